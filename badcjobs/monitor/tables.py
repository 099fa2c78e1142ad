"""The two tables of the live view: a line for each array task, a line for each device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len
from rich.text import Text

from badcjobs.monitor import words
from badcjobs.monitor.columns import Cell, Column, Paper, bar, choose_columns, compose, shorten, tail
from badcjobs.monitor.frame import AlertLine, DeviceLine, Frame, TaskLine, Trail
from badcjobs.monitor.order import DevicesOf
from badcjobs.monitor.sparkline import sparkline, thin
from badcjobs.monitor.totals import mean_utilization, total_power_w

STYLES = {
    "running": "green", "done": "cyan", "waiting": "dim", "stopped": "yellow", "unbegun": "yellow",
    "silent": "bold yellow", "failed": "bold red", "killed": "bold red",
}  # fmt: skip
_TITLE = "bold"
_CHOSEN = "reverse"
_LONGEST_NAME = 18


def task_rows(
    frame: Frame, tasks: Sequence[TaskLine], devices: DevicesOf, chosen: int | None, first: int, paper: Paper
) -> list[Text]:
    """Return the title and one line per task; ``first`` is the number of the first one."""
    columns = choose_columns(_task_columns(frame, any(task.working_on for task in tasks)), paper.width)
    lines = [_title(columns, paper)]
    for number, task in enumerate(tasks, first):
        cells = _task_cells(frame, task, devices.get(task.name, ()), columns, paper)
        lines.append(_line(cells, columns, paper, number == chosen))
    return lines


def _task_columns(frame: Frame, working: bool) -> list[Column]:
    label = max((cell_len(task.label) for task in frame.tasks), default=4)
    node = max((cell_len(task.node or "") for task in frame.tasks), default=0)
    chunks = max((len(f"{task.settled:,}/{task.chunks:,}") for task in frame.tasks), default=1)
    return [
        Column(" ", 1),
        Column("task", min(_LONGEST_NAME, max(4, label)), 0),
        Column("node", min(_LONGEST_NAME, max(4, node)) if node else 0, 3),
        Column("state", 7, 0),
        Column("progress", 8, 2, most=30),
        Column("chunks", max(6, chunks), 1, right=True),
        Column("rate", 7, 1, right=True),
        Column("ETA", 8 if any(task.alive for task in frame.tasks) else 0, 1, right=True),
        Column("GPU", 4, 1, right=True),
        Column("history", 8, 4, most=60),
        Column("mem", 4, 7, right=True),
        Column("temp", 6, 5, right=True),
        Column("power", 7, 8, right=True),
        Column("working on", 18 if working else 0, 6, most=44),
    ]


def _task_cells(
    frame: Frame, task: TaskLine, devices: Sequence[DeviceLine], columns: Sequence[Column], paper: Paper
) -> dict[str, Cell]:
    width = {column.title: column.width for column in columns}
    share = task.settled / task.chunks if task.chunks else None
    full, empty = bar(share, width.get("progress", 0), paper)
    readings = [device.shown for device in devices]
    heat = max((r.temperature_c for r in readings if r.temperature_c is not None), default=None)
    fill = max((d.memory_percent for d in devices if d.memory_percent is not None), default=None)
    busy = mean_utilization(devices)
    running = task.state == "running"
    over = "" if running else "dim"  # these are means then
    history = _history(devices, width.get("history", 0), paper)
    return {
        "task": Cell(tail(paper.text(task.label), width.get("task", 0), paper)),  # at its end is the array index
        "node": Cell(task.node or ""),
        "state": Cell(task.state, STYLES[task.state]),
        "progress": Cell(full, STYLES[task.state], empty, "dim"),
        "chunks": Cell(f"{task.settled:,}/{task.chunks:,}" if task.chunks else words.UNKNOWN),
        "rate": Cell(words.rate(task.rate)),
        "ETA": Cell(words.span(frame.eta_s(task.ends_at_ms)) if task.alive else ""),
        "GPU": Cell(words.percent(busy) if devices else "", _heed(busy, running) or over),
        "history": Cell(history, "green" if running else "dim"),
        "mem": Cell(words.percent(fill) if devices else "", over),
        "temp": Cell(words.whole(heat, " °C") if devices else "", over),
        "power": Cell(words.whole(total_power_w(devices), " W") if devices else "", over),
        "working on": Cell(", ".join(task.working_on), "dim"),
    }


def _history(devices: Sequence[DeviceLine], width: int, paper: Paper) -> str:
    """Return how busy the devices of a task were together since it began."""
    courses = tuple(device.trail.utilization_percent for device in devices if device.trail.step_ms)
    over = not any(device.alive for device in devices)
    return _together(courses, width, paper.ascii_only, over) if courses and width else ""


@lru_cache(maxsize=1024)  # most courses are as they were when the screen was drawn last
def _together(courses: tuple[tuple[int | None, ...], ...], width: int, ascii_only: bool, over: bool) -> str:
    together = []
    for values in zip(*(thin(course, width) for course in courses), strict=False):
        known = [value for value in values if value is not None]
        together.append(sum(known) / len(known) if known else None)
    return sparkline(together, width, 100, ascii_only=ascii_only, over=over)


def device_rows(
    frame: Frame, devices: Sequence[DeviceLine], chosen: int | None, first: int, paper: Paper
) -> list[Text]:
    """Return the title and one line per device; ``first`` is the number of the first one."""
    columns = choose_columns(_device_columns(frame, devices), paper.width)
    lines = [_title(columns, paper)]
    for number, device in enumerate(devices, first):
        lines.append(_line(_device_cells(device, columns, paper), columns, paper, number == chosen))
    return lines


def _device_columns(frame: Frame, devices: Sequence[DeviceLine]) -> list[Column]:
    label = max((cell_len(_task_label(device)) for device in frame.devices), default=0)
    node = max((cell_len(device.node) for device in frame.devices), default=0) if frame.of_run else 0
    model = max((cell_len(device.name or "") for device in frame.devices), default=0)
    working = "working on" if frame.of_run else "processes"
    busy = frame.of_run or any(device.processes or device.trouble for device in devices)
    return [
        Column(" ", 1),
        Column("task", min(_LONGEST_NAME, max(4, label)) if label else 0, 0),
        Column("node", min(_LONGEST_NAME, max(4, node)) if node else 0, 5),
        Column("GPU", 3, 0, right=True),
        Column("model", min(22, max(5, model)) if model else 0, 6 if frame.of_run else 3),
        Column("busy", 4, 0, right=True),
        Column("history", 8, 2, most=60),
        Column("memory GiB", _widest(10, map(_memory, devices)), 1, right=True),
        Column("temp", _widest(5, map(_heat, devices)), 1, right=True),
        Column("power", _widest(5, map(_power, devices)), 1, right=True),
        Column("rate", 7 if frame.of_run else 0, 4, right=True),
        Column(working, 14 if busy else 0, 3, most=50),
    ]


def _device_cells(device: DeviceLine, columns: Sequence[Column], paper: Paper) -> dict[str, Cell]:
    width = {column.title: column.width for column in columns}
    now = device.shown
    course, room = device.trail.utilization_percent, width.get("history", 0)
    history = sparkline(course, room, 100, ascii_only=paper.ascii_only, over=not device.alive)
    at_work = device.alive and bool(device.chunks)
    doing = device.trouble or ", ".join(device.chunks) or ("" if device.alive else "ended")
    running = ", ".join(f"{p.program or '?'} ({p.pid})" for p in device.processes or ())
    return {
        "task": Cell(tail(paper.text(_task_label(device)), width.get("task", 0), paper)),
        "node": Cell(device.node),
        "GPU": Cell(words.whole(device.index) if device.index is not None else device.token or words.UNKNOWN),
        "model": Cell(device.name or words.UNKNOWN),
        "busy": Cell(words.percent(now.utilization_percent), _heed(now.utilization_percent, at_work)),
        "history": Cell(history, "green" if device.alive else "dim"),
        "memory GiB": Cell(_memory(device)),
        "temp": Cell(_heat(device)),
        "power": Cell(_power(device)),
        "rate": Cell(words.rate(device.rate)),
        "working on": Cell(doing, "dim"),
        "processes": Cell(device.trouble or running, "yellow" if device.trouble else "dim"),
    }


def metric_lines(device: DeviceLine, paper: Paper) -> list[tuple[str, str, Sequence[float | None], float]]:
    """Return, for the page of one task: a metric, its value in words (now, or its mean), its course, its highest."""
    now, trail = device.shown, device.trail
    total, limit = device.memory_total_bytes, device.power_limit_w
    memory, power = f"{_memory(device)} GiB", _power(device)
    return [
        ("busy", words.percent(now.utilization_percent), trail.utilization_percent, 100),
        ("memory", memory, trail.memory_used_bytes, total or _largest(trail)),
        ("temp", _heat(device), trail.temperature_c, 100),
        ("power", power, trail.power_w, limit or max((w for w in trail.power_w if w is not None), default=1)),
    ]


def _memory(device: DeviceLine) -> str:
    return f"{words.memory(device.shown.memory_used_bytes)}/{words.memory(device.memory_total_bytes)}"


def _widest(least: int, texts: Iterable[str]) -> int:
    return max(least, *map(len, texts), 0)


def _heat(device: DeviceLine) -> str:
    return words.whole(device.shown.temperature_c, " °C")


def _power(device: DeviceLine) -> str:
    power_w, limit_w = device.shown.power_w, device.power_limit_w
    return words.UNKNOWN if power_w is None else words.whole(power_w) + (f"/{limit_w:.0f}" if limit_w else "") + " W"


def _largest(trail: Trail) -> float:
    return max((used for used in trail.memory_used_bytes if used is not None), default=1)


def _task_label(device: DeviceLine) -> str:
    return "" if device.task is None else device.task.partition(".")[0]


def _heed(busy: float | None, at_work: bool) -> str:
    return "bold yellow" if at_work and busy is not None and busy < 20 else ""


def _title(columns: Sequence[Column], paper: Paper) -> Text:
    return compose([(column, Cell(column.title, _TITLE if column.title.strip() else "")) for column in columns], paper)


def _line(cells: dict[str, Cell], columns: Sequence[Column], paper: Paper, chosen: bool) -> Text:
    cells[" "] = Cell("▸" if chosen else "")
    if chosen:  # colours turned around would be blots
        cells = {title: Cell(cell.text, "", cell.more, "") for title, cell in cells.items()}
    return compose([(column, cells[column.title]) for column in columns], paper, _CHOSEN if chosen else "")


def alert_line(frame: Frame, alert: AlertLine, paper: Paper) -> Text:
    """Return what is wrong, where, and for how long."""
    lasted = words.span(max(0, frame.at_ms - alert.started_at_ms) / 1000)
    names_itself = alert.device_index is None or alert.message.startswith(f"device {alert.device_index} ")
    where = alert.node if names_itself else f"{alert.node} GPU {alert.device_index}"
    of = f"{alert.task.partition('.')[0]} " if alert.task else ""
    said = shorten(paper.text(f"! {alert.severity} {of}{where}: {alert.message}"), paper.width - len(lasted) - 1, paper)
    return Text(f"{said} {lasted}", "bold red" if alert.severity == "critical" else "yellow", end="")
