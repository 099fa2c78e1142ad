"""The tables and pages of the live view: a line for each array task, a line for each device, all of one task."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import lru_cache

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.snapshot import Snapshot, mean_of_known, mean_utilization, total_power_w
from badcjobs.live.text_fit import (
    UNKNOWN,
    Cell,
    Column,
    Paper,
    Part,
    bar,
    bar_line,
    described,
    flowing,
    rate,
    shorten,
    span,
    sparkline,
    table_rows,
    tail,
    thin,
    whole,
)
from badcjobs.live.ui_state import DevicesOf
from badcjobs.store.read_model import DeviceFacts, TaskAlert, TaskFacts

STYLES = {
    "running": "green", "done": "cyan", "waiting": "dim", "stopped": "yellow", "unbegun": "yellow",
    "silent": "bold yellow", "failed": "bold red", "killed": "bold red",
}  # fmt: skip
_LONGEST_NAME = 18
_NAMES, _VALUES = 10, 15  # widths of two columns on the page of a task
_MARK = Column(" ", 1)  # of the line that is chosen


def task_rows(
    snapshot: Snapshot, tasks: Sequence[TaskFacts], devices: DevicesOf, chosen: int | None, first: int, paper: Paper
) -> list[Text]:
    """Return the title and one line per task; ``first`` is the number of the first one."""

    def of(task: TaskFacts) -> Sequence[DeviceFacts]:
        return devices.get(task.name, ())

    def progress(task: TaskFacts, width: int) -> Cell:
        full, empty = bar(task.settled / task.chunks if task.chunks else None, width, paper)
        return Cell(full, STYLES[task.state], empty, "dim")

    def busy(task: TaskFacts, _width: int) -> Cell:
        percent = mean_utilization(of(task))
        return measured(task, whole(percent, "%"), _style_of_busy(percent, task.state == "running"))

    def history(task: TaskFacts, width: int) -> Cell:
        courses = tuple(d.trail.utilization_percent for d in of(task) if d.trail.step_ms)
        over = not any(device.alive for device in of(task))
        text = _together(courses, width, paper.ascii_only, over) if courses else ""
        return Cell(text, "green" if task.state == "running" else "dim")

    def highest(task: TaskFacts, values: Iterable[float | None], unit: str) -> Cell:
        return measured(task, whole(max((value for value in values if value is not None), default=None), unit))

    def measured(task: TaskFacts, text: str, style: str = "") -> Cell:
        style = style or ("" if task.state == "running" else "dim")  # these are means then
        return Cell(text, style) if of(task) else Cell("", style)

    every = snapshot.tasks
    label = _name_width((task.label for task in every), 4)
    chunks = max((len(f"{task.settled:,}/{task.chunks:,}") for task in every), default=1)
    columns = [
        _MARK,
        Column("task", label, 0, cell=lambda t, w: Cell(tail(paper.text(t.label), w, paper))),  # its end: the index
        Column("node", _name_width((task.node for task in every), 0), 3, cell=lambda t, _: Cell(t.node)),
        Column("state", 7, 0, cell=lambda t, _: Cell(t.state, STYLES[t.state])),
        Column("progress", 8, 2, most=30, cell=progress),
        Column("chunks", max(6, chunks), 1, right=True, cell=lambda t, _: Cell(_chunks(t))),
        Column("rate", 7, 1, right=True, cell=lambda t, _: Cell(rate(t.rate))),
        Column(
            "ETA", 8 if any(task.alive for task in every) else 0, 1, right=True,
            cell=lambda t, _: Cell(span(snapshot.eta_s(t.ends_at_ms)) if t.alive else ""),
        ),
        Column("GPU", 4, 1, right=True, cell=busy),
        Column("history", 8, 4, most=60, cell=history),
        Column("mem", 4, 7, right=True, cell=lambda t, _: highest(t, (d.memory_percent for d in of(t)), "%")),
        Column("temp", 6, 5, right=True, cell=lambda t, _: highest(t, (d.shown.temperature_c for d in of(t)), " °C")),
        Column("power", 7, 8, right=True, cell=lambda t, _: measured(t, whole(total_power_w(of(t)), " W"))),
        Column(
            "working on", 18 if any(task.working_on for task in tasks) else 0, 6, most=44,
            cell=lambda t, _: Cell(", ".join(t.working_on), "dim"),
        ),
    ]  # fmt: skip
    return table_rows(tasks, columns, chosen, first, paper)


@lru_cache(maxsize=1024)  # most courses are as they were when the screen was drawn last
def _together(courses: tuple[tuple[int | None, ...], ...], width: int, ascii_only: bool, over: bool) -> str:
    """Return how busy the devices of a task were together since it began."""
    together = [mean_of_known(values) for values in zip(*(thin(course, width) for course in courses), strict=False)]
    return sparkline(together, width, 100, ascii_only=ascii_only, over=over)


def device_rows(
    snapshot: Snapshot, devices: Sequence[DeviceFacts], chosen: int | None, first: int, paper: Paper
) -> list[Text]:
    """Return the title and one line per device; ``first`` is the number of the first one."""

    def busy(device: DeviceFacts, _width: int) -> Cell:
        percent = device.shown.utilization_percent
        return Cell(whole(percent, "%"), _style_of_busy(percent, device.alive and bool(device.chunks)))

    def history(device: DeviceFacts, width: int) -> Cell:
        course, over = device.trail.utilization_percent, not device.alive
        bars = sparkline(course, width, 100, ascii_only=paper.ascii_only, over=over)
        return Cell(bars, "dim" if over else "green")

    def doing(device: DeviceFacts, _width: int) -> Cell:
        if snapshot.of_run:
            return Cell(device.trouble or ", ".join(device.chunks) or ("" if device.alive else "ended"), "dim")
        running = ", ".join(f"{p.program or '?'} ({p.pid})" for p in device.processes or ())
        return Cell(device.trouble or running, "yellow" if device.trouble else "dim")

    every, of_run = snapshot.devices, snapshot.of_run
    node = _name_width((device.node for device in every), 0) if of_run else 0
    model = max((cell_len(device.name or "") for device in every), default=0)
    something = of_run or any(device.processes or device.trouble for device in devices)
    columns = [
        _MARK,
        Column(
            "task", _name_width(map(_task_label, every), 0), 0,
            cell=lambda d, w: Cell(tail(paper.text(_task_label(d)), w, paper)),
        ),
        Column("node", node, 5, cell=lambda d, _: Cell(d.node)),
        Column("GPU", 3, 0, right=True, cell=lambda d, _: Cell(str(_number(d)))),
        Column(
            "model", min(22, max(5, model)) if model else 0, 6 if of_run else 3,
            cell=lambda d, _: Cell(d.name or UNKNOWN),
        ),
        Column("busy", 4, 0, right=True, cell=busy),
        Column("history", 8, 2, most=60, cell=history),
        Column("memory GiB", _widest(10, map(_memory, devices)), 1, right=True, cell=lambda d, _: Cell(_memory(d))),
        Column("temp", _widest(5, map(_heat, devices)), 1, right=True, cell=lambda d, _: Cell(_heat(d))),
        Column("power", _widest(5, map(_power, devices)), 1, right=True, cell=lambda d, _: Cell(_power(d))),
        Column("rate", 7 if of_run else 0, 4, right=True, cell=lambda d, _: Cell(rate(d.rate))),
        Column("working on" if of_run else "processes", 14 if something else 0, 3, most=50, cell=doing),
    ]  # fmt: skip
    return table_rows(devices, columns, chosen, first, paper)


def alert_line(snapshot: Snapshot, alert: TaskAlert, paper: Paper) -> Text:
    """Return what is wrong, where, and for how long."""
    lasted = span(max(0, snapshot.at_ms - alert.started_at_ms) / 1000)
    names_itself = alert.device_index is None or alert.message.startswith(f"device {alert.device_index} ")
    where = alert.node if names_itself else f"{alert.node} GPU {alert.device_index}"
    of = f"{alert.task.partition('.')[0]} " if alert.task else ""
    said = shorten(paper.text(f"! {alert.severity} {of}{where}: {alert.message}"), paper.width - len(lasted) - 1, paper)
    return Text(f"{said} {lasted}", "bold red" if alert.severity == "critical" else "yellow", end="")


def task_lines(snapshot: Snapshot, name: str, paper: Paper) -> list[Text]:
    """Return the lines of a task's page."""
    task = next((task for task in snapshot.tasks if task.name == name), None)
    if task is None:
        return [Text(paper.text(f"{name} is no longer the newest attempt of its array task"), "yellow", end="")]
    devices = [device for device in snapshot.devices if device.task == name]
    lines = [*_who(task, paper), *_work(snapshot, task, paper)]
    lines += [alert_line(snapshot, alert, paper) for alert in snapshot.alerts if alert.task == name]
    lines.append(Text("", end=""))
    for device in devices:
        lines += _device(device, paper)
    if task.working_on and not any(device.chunks for device in devices):
        lines += described("on", ", ".join(task.working_on), _NAMES, paper, "dim")
    if not snapshot.title.endswith(".sqlite") and task.node:
        log = f"tail -f {snapshot.title}/tasks/{task.name}.log"
        lines += [Text("", end=""), *described("log", log, _NAMES, paper, "dim")]
    return lines


def _who(task: TaskFacts, paper: Paper) -> list[Text]:
    facts = [task.node and f"on {task.node}", task.engine]
    for many, what in ((task.devices, "GPU"), (task.workers, "worker")):
        facts.append(None if many is None else f"{many} {what}{'' if many == 1 else 's'}")
    facts.append(f"start number {task.restart + 1}" if task.restart else None)
    facts.append(None if task.exit_code is None else f"exit code {task.exit_code}")
    parts = [Part(task.label, "bold"), Part(task.state, STYLES[task.state]), *[Part(fact) for fact in facts if fact]]
    return flowing(parts, " · ", paper)


def _work(snapshot: Snapshot, task: TaskFacts, paper: Paper) -> list[Text]:
    parts = [Part(f"{task.settled:,}/{task.chunks:,} chunks")]
    parts += [Part(f"{task.failed_for_good:,} failed", rank=2)] if task.failed_for_good else []
    parts += [Part(f"{task.before:,} done before", rank=4)] if task.before else []
    parts += [Part(rate(task.rate), rank=3)]
    parts += [Part(f"ETA {span(snapshot.eta_s(task.ends_at_ms))}")] if task.alive else []
    share = task.settled / task.chunks if task.chunks else None
    when = "" if task.alive else ", when it was last read"
    machine = f"CPU {whole(task.cpu_percent, '%')}, memory {whole(task.memory_percent, '%')}{when}"
    return [
        bar_line(share, parts, paper, most=40, style=STYLES[task.state]),
        *described("began", _times(snapshot, task), _NAMES, paper, "dim"),
        *described("machine", machine, _NAMES, paper, "dim"),
    ]


def _times(snapshot: Snapshot, task: TaskFacts) -> str:
    if not task.started_at_ms:
        return "not yet, as far as we know"
    began = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
    end_ms = snapshot.at_ms if task.ended_at_ms is None else task.ended_at_ms
    took = span(max(0, end_ms - task.started_at_ms) / 1000)
    if task.ended_at_ms is not None:
        return f"{began}, ended after {took}"
    silence = span(max(0, snapshot.at_ms - (task.heard_at_ms or 0)) / 1000)
    return f"{began}, {took} ago; last heard of {silence} ago"


def _device(device: DeviceFacts, paper: Paper) -> list[Text]:
    """Return a device on the page of its task: each metric with its value (now, or its mean) and its course."""
    parts = [Part(f"GPU {_number(device)}", "bold"), *([Part(device.name, "bold")] if device.name else [])]
    parts.append(Part(f"{device.work.done:,} chunks, {rate(device.rate)}", "dim"))
    parts += [] if device.alive else [Part("means", "dim")]
    lines = flowing(parts, "  ", paper)
    trail, over = device.trail, not device.alive
    metrics: list[tuple[str, str, Sequence[float | None], float | None]] = [
        ("busy", whole(device.shown.utilization_percent, "%"), trail.utilization_percent, 100),
        ("memory", f"{_memory(device)} GiB", trail.memory_used_bytes, device.memory_total_bytes),
        ("temp", _heat(device), trail.temperature_c, 100),
        ("power", _power(device), trail.power_w, device.power_limit_w),
    ]
    width = min(120, max(0, paper.width - _NAMES - _VALUES - 2))
    for name, value, course, top in metrics:
        top = top or max((value for value in course if value is not None), default=1)
        bars = sparkline(course, width, top, ascii_only=paper.ascii_only, over=over)
        line = Text(end="").append(f"  {name:<{_NAMES - 2}}", "dim").append(f"{paper.text(value):>{_VALUES}}  ")
        lines.append(line.append(bars, "dim" if over else "green"))
    return lines + (described("on", ", ".join(device.chunks), _NAMES, paper, "dim") if device.chunks else [])


def _number(device: DeviceFacts) -> int | str:
    return device.index if device.index is not None else device.token or UNKNOWN


def _chunks(task: TaskFacts) -> str:
    return f"{task.settled:,}/{task.chunks:,}" if task.chunks else UNKNOWN


def _memory(device: DeviceFacts) -> str:
    known = (device.shown.memory_used_bytes, device.memory_total_bytes)
    return "/".join(UNKNOWN if value is None else f"{value / 2**30:.1f}" for value in known)


def _heat(device: DeviceFacts) -> str:
    return whole(device.shown.temperature_c, " °C")


def _power(device: DeviceFacts) -> str:
    power_w, limit_w = device.shown.power_w, device.power_limit_w
    return UNKNOWN if power_w is None else whole(power_w) + (f"/{limit_w:.0f}" if limit_w else "") + " W"


def _widest(least: int, texts: Iterable[str]) -> int:
    return max(least, *map(len, texts), 0)


def _name_width(names: Iterable[str], least: int) -> int:
    """Return the width of a column of names; 0: none has one."""
    longest = max((cell_len(name) for name in names), default=least) or least
    return min(_LONGEST_NAME, max(4, longest)) if longest else 0


def _task_label(device: DeviceFacts) -> str:
    return device.task.partition(".")[0]


def _style_of_busy(percent: float | None, at_work: bool) -> str:
    return "bold yellow" if at_work and percent is not None and percent < 20 else ""
