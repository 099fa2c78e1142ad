"""Draw a Snapshot as styled lines, for a terminal or a file. Pure functions.

Colour only repeats what the text says, so that every page can be read without colour."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from badcjobs.live.snapshot import STATES, Snapshot, mean_of_known, mean_utilization, total_power_w
from badcjobs.live.text_fit import (
    GAP,
    NAMES,
    Column,
    Line,
    Lines,
    Part,
    bar,
    bar_line,
    downsample,
    fit,
    joined,
    labelled,
    rate,
    rounded,
    shorten,
    span,
    sparkline,
    styled,
    table_rows,
    to_text,
    width_of,
    wrap,
    wrap_command,
    wrap_parts,
)
from badcjobs.live.ui_state import DEVICES, HELP, TASK, DevicesOf, UiState, arrange_devices, arrange_tasks
from badcjobs.model import AUDIO_FAULTS, load_word
from badcjobs.paths import shell_line
from badcjobs.report.tables import ending
from badcjobs.report.verdict import MOST_FINDINGS
from badcjobs.report.words import UNKNOWN, count, duration
from badcjobs.store.read_model import DeviceFacts, TaskAlert, TaskFacts

STYLES = {
    "running": "green", "done": "cyan", "waiting": "dim", "stopped": "yellow", "unbegun": "yellow",
    "silent": "bold yellow", "failed": "bold red", "killed": "bold red",
}  # fmt: skip
_MORE = {
    "sm_activity_percent": "SM act", "sm_occupancy_percent": "SM occ", "encoder_percent": "encoder",
    "decoder_percent": "decoder", "fan_percent": "fan",
}  # fmt: skip
_MAX_BAR = 46
_MIN_BAR = 9  # with the blank after it
_LOW = 16  # lines; a lower terminal shows only the most important facts
_MAX_ALERT_LINES = 4
_DOT = " · "
_MAX_NAME = 18
_VALUES = 15  # the width of values on the page of a task
_HELP_INDENT = 16
_HELP = (
    ("up down j k", "move between lines; also page up, page down, home, end"),
    ("enter", "open the task on this line; escape returns"),
    ("s   r", "change the sort order; reverse it"),
    ("/", "show only lines with these words: 'gpu03 running'"),
    ("d", "switch between tasks and devices"),
    ("?   q", "this help; quit"),
    ("", ""),
    ("running", "it published its database on time"),
    ("silent", "it stopped publishing: the node is down or a disk hangs"),
    ("stopped", "it stopped normally with chunks left: run it again"),
    ("waiting", "an array task that has not published anything yet"),
    ("unbegun", "never started: the emulation that should start it has ended"),
    ("rate", "seconds of audio per second since the task started"),
    ("ETA", "time until the last chunk, at the average pace so far"),
    ("GPU  busy", "device utilization; the mean when the task has ended"),
    ("history", "device utilization since the task started"),
    ("x in a bar", "chunks that failed for good"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """The lines of one screen, and what the key handler needs to know about them."""

    lines: tuple[Text, ...]
    names: tuple[str | None, ...]  # the task of each line that can be selected
    rows: int  # how many such lines fit on the screen


def draw(snapshot: Snapshot, ui: UiState, *, width: int, height: int | None = None, ascii_only: bool = False) -> Page:
    """Return one page; ``height`` None: as long as necessary, and without the line of keys."""
    width = max(20, width)
    top = [] if ui.page == HELP else _head(snapshot, width, height, full=ui.page != TASK)
    room = None if height is None else max(1, height - len(top) - 1)
    body, names, rows = _body(snapshot, ui, width, room)
    lines: Lines = [*top, *body]
    if height is not None:
        empty: Lines = [[]] * (height - len(lines) - 1)
        lines = [*[*lines, *empty][: height - 1], _foot(ui, width, more=len(names) > 1)]
    return Page(tuple(to_text(line, width, ascii_only=ascii_only) for line in lines), tuple(names), rows)


def as_plain_text(snapshot: Snapshot, ui: UiState | None = None, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return one page as text without style, for a file, a pipe or a mail."""
    page = draw(snapshot, ui or UiState.at_start(of_run=snapshot.of_run), width=width, ascii_only=ascii_only)
    return "\n".join(line.plain.rstrip() for line in page.lines).rstrip()


def _body(snapshot: Snapshot, ui: UiState, width: int, room: int | None) -> tuple[Lines, list[str | None], int]:
    """Return the lines below the head, the task of each line that can be selected, and how many such lines fit."""
    if ui.page in (HELP, TASK):
        lines = _task_page(snapshot, ui.opened or "", width) if ui.page == TASK else []
        for name, meaning in _HELP if ui.page == HELP else ():
            lines += labelled(name, meaning, width, indent=_HELP_INDENT, style="bold")
        hidden = 0 if room is None else max(0, len(lines) - room)
        return lines[min(ui.scroll, hidden) :], [None] * (hidden + 1), room or len(lines)
    by_task: dict[str, list[DeviceFacts]] = {}
    for device in snapshot.devices:
        by_task.setdefault(device.task, []).append(device)
    devices = arrange_devices(snapshot.devices, ui) if ui.page == DEVICES else []
    tasks = [] if ui.page == DEVICES else arrange_tasks(snapshot.tasks, by_task, ui)
    names = [*(device.task or None for device in devices), *(task.name for task in tasks)]
    rows = max(1, len(names) if room is None else room - 1)  # one line is the title
    chosen = None if room is None else min(ui.line, max(0, len(names) - 1))
    # Keep the selected line in the middle of the screen.
    first = 0 if chosen is None else max(0, min(chosen - rows // 2, len(names) - rows))
    devices, tasks = devices[first : first + rows], tasks[first : first + rows]
    columns = _device_columns(snapshot, devices) if ui.page == DEVICES else _task_columns(snapshot, tasks, by_task)
    lines = table_rows([*devices, *tasks], columns, chosen, first, width)
    if room is None:  # a text has room for the name of each file without audio
        faults = [error for task in tasks for error in task.errors if error[0] in AUDIO_FAULTS]
        lines += [[], *_failures(faults, width)] if faults else []
    if not names and ui.filter:
        lines.append([Part(f"  nothing matches '{ui.filter}'", "dim")])
    return lines, names, rows


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(snapshot: Snapshot, width: int, height: int | None, *, full: bool) -> Lines:
    """Return the head of a page; ``height`` None: no limit. Not ``full``: without alerts and remarks."""
    low, total = height is not None and height < _LOW, snapshot.total
    lines = _title(snapshot, width)
    if low and not full:
        return lines[:1]
    found = snapshot.verdict
    if snapshot.reading is not None:
        lines.append([Part(snapshot.reading, "bold yellow")])
    if found is not None:
        words = found.outcome if low or not found.cost else f"{found.outcome}{_DOT}{found.cost}"
        lines += styled([words] if low else wrap(words, width), "bold")
    if total.chunks is not None:
        parts, failed = fit(_progress(snapshot), width - _MIN_BAR, GAP, keep=1), 0.0
        if total.share is not None and total.settled:
            failed = total.share * total.failed / total.settled
        style, most = "yellow" if failed else "green", _MAX_BAR
        lines.append(bar_line(total.share, parts, width, max_width=most, style=style, text_style="bold", failed=failed))
    if not low:
        lines += wrap_parts(_total_parts(snapshot), _DOT, width, "dim")
    if full and total.standstill is not None:
        lines += styled(wrap(f"! {total.standstill}", width), "yellow")
    steps = found.next if found and total.standstill is None else [("", command) for command in total.go_on]
    for words, command in steps[:1] if full else ():
        wrapped = wrap_command(command, width - 2)
        if wrapped is None or (height is not None and len(wrapped) > max(1, height // 6)):
            wrapped = [shell_line("badcjobs", "merge", Path(snapshot.title))]  # it prints the same command
        alone = total.standstill is None and not words and len(wrapped) == 1
        lead = [] if total.standstill is not None else [f"next: {words}:" if words else "next:"]
        said = [f"next: {wrapped[0]}"] if alone else [*lead, *(f"  {line}" for line in wrapped)]
        lines += styled(said)
    if full:
        remarks = snapshot.remarks[: 1 if low else 3]
        lines += styled((shorten(f"! {remark}", width).rstrip() for remark in remarks), "yellow")
    lines += [] if low else [[]]
    if not full or not snapshot.alerts:
        return lines
    worst = snapshot.findings
    shown = worst[: MOST_FINDINGS if height is None else max(1, min(MOST_FINDINGS, height // 8))]
    for alert in shown:
        lines += _alert_lines(snapshot, alert, width, _MAX_ALERT_LINES if height is None else max(1, height // 12))
    if len(worst) > len(shown):
        lines.append([Part(f"! {count(len(worst) - len(shown), 'more alert')}", "yellow")])
    return lines if low else [*lines, []]


def _title(snapshot: Snapshot, width: int) -> Lines:
    """Return the title line with the task states on it, or below it if there is no room."""
    states = snapshot.total.states
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at_ms / 1000))
    order = sorted(STATES, key=lambda state: state not in ("running", "waiting", "done"))
    parts = [Part(f"{states[state]:,} {state}", STYLES[state]) for state in order if states.get(state)]
    name, room = snapshot.title, width - len(clock) - 2
    beside = width_of(parts, _DOT)
    together = beside > 0 and room - beside - 2 >= min(12, cell_len(name))
    room -= beside + 2 if together else 0
    name = f"badcjobs  {name}" if cell_len(name) + 10 <= room else name
    beside_it = [*joined(parts, _DOT), Part(GAP)] if together else []
    first = [Part(set_cell_size(ending(name, room), room), "bold"), Part(GAP), *beside_it, Part(clock, "dim")]
    return [first, *([] if together else wrap_parts(parts, _DOT, width))]


def _progress(snapshot: Snapshot) -> list[Part]:
    total = snapshot.total
    if not total.chunks or total.share is None:
        return [Part("no chunks yet")]
    done = total.share * total.done / (total.settled or 1)  # failed is not done
    shown = "100" if done == 1 else f"{min(99.9, 100 * done):.3g}"
    about = "~" if total.parts else ""
    parts = [Part(f"{about}{shown}%")]
    speed = total.speed if total.rate is None else total.rate
    parts += [Part(rate(speed), rank=3)] if speed is not None else []
    eta_s = snapshot.eta_s(total.ends_at_ms)
    return parts + ([Part(f"ETA {about}{span(eta_s)}")] if eta_s is not None else [])


def _total_parts(snapshot: Snapshot) -> list[Part]:
    total = snapshot.total
    facts = [count(total.devices, "GPU") if total.devices else "no active GPU"]
    if not total.devices and total.ended_at_ms is not None:
        ended = time.strftime("%d %b %H:%M", time.localtime(total.ended_at_ms / 1000))
        facts = [f"ended {ended}"]
    if total.utilization_percent is not None:
        facts.append(f"{total.utilization_percent:.0f}% busy ({load_word(total.utilization_percent)} load)")
    if total.power_w is not None:
        facts.append(f"{total.power_w / 1000:.1f} kW" if total.power_w >= 10_000 else f"{total.power_w:,.0f} W")
    if total.chunks is not None:
        facts.append(f"{duration(total.audio_done_s)} of audio done")
    return [Part(fact) for fact in facts]


def _alert_lines(snapshot: Snapshot, alert: TaskAlert, width: int, most: int) -> Lines:
    """Return an alert: its severity, where, its message, its duration so far, and what to do if there is room."""
    # The words of the report.
    style, severity = ("bold red", "problem") if alert.severity == "critical" else ("yellow", alert.severity)
    if snapshot.of_run and alert.node is None:
        words = f"! {severity} {alert.message}"
        wrapped = [shorten(words, width).rstrip()] if most == 1 else wrap(words, width)
        return [*styled(wrapped[:most], style), *_fix_lines(alert, width, most)]
    lasted = span(max(0, snapshot.at_ms - alert.started_at_ms) / 1000)
    names_itself = alert.device_index is None or alert.message.startswith(f"device {alert.device_index} ")
    where = alert.node if names_itself else f"{alert.node} GPU {alert.device_index}"
    of = f"{alert.task.partition('.')[0]} " if alert.task else ""
    place = f"{of}{where or ''}".strip()
    words = f"! {severity} {place}{': ' if place else ''}{alert.message}"
    text = shorten(words, width - len(lasted) - 1)
    return [[Part(f"{text} {lasted}", style)], *_fix_lines(alert, width, most)]


def _fix_lines(alert: TaskAlert, width: int, most: int) -> Lines:
    wrapped = wrap(f"→ {alert.fix}", width - 2) if alert.fix and most > 1 else []
    return styled(f"  {line}" for line in wrapped)


# --- the foot ---------------------------------------------------------------------------------------------------------


def _foot(ui: UiState, width: int, *, more: bool) -> Line:
    """Return the line of keys; ``more``: there are lines that are not on the screen."""
    if ui.typing:
        keys = [Part(f"show only: {ui.filter}_   enter keeps it, escape shows all")]
    elif ui.page in (TASK, HELP):
        back = "esc back " if ui.page == TASK or more else "any key goes back "
        keys = [Part(back), *([Part("up/down scroll ")] if more else []), Part("q quit")]
    else:
        reversed_order = ", reversed" if ui.reverse else ""
        wanted = f", only '{ui.filter}'" if ui.filter else ""
        other = "tasks" if ui.page == DEVICES else "devices"
        keys = [Part(f"by {ui.order}{reversed_order}{wanted} ", rank=1), Part("q quit"), Part("s sort", rank=2)]
        keys += [Part("r reverse", rank=5), Part("/ filter", rank=3)]
        keys += [Part("enter open", rank=2), Part(f"d {other}", rank=4)] if ui.of_run else []
        keys.append(Part("? help"))
    text = GAP.join(part.text for part in fit(keys, width, GAP, keep=0))
    return [Part(shorten(text, width), "reverse")]


# --- tables -----------------------------------------------------------------------------------------------------------

_number_column = partial(Column, right=True)


def _task_columns(snapshot: Snapshot, tasks: Sequence[TaskFacts], devices: DevicesOf) -> list[Column]:
    """Return the columns of the task table; ``tasks`` are the tasks on the screen."""

    def of(task: TaskFacts) -> Sequence[DeviceFacts]:
        return devices.get(task.name, ())

    def busy(task: TaskFacts, _width: int) -> Part:
        percent = mean_utilization(of(task))
        return measured(task, rounded(percent, "%"), _style_of_busy(percent, task.state == "running"))

    def history(task: TaskFacts, width: int) -> Part:
        series = tuple(d.trail.utilization_percent for d in of(task) if d.trail.step_ms)
        over = not any(device.alive for device in of(task))
        return Part(_task_history(series, width, over), "green" if task.state == "running" else "dim")

    def highest(task: TaskFacts, values: Iterable[float | None], unit: str) -> Part:
        return measured(task, rounded(max((value for value in values if value is not None), default=None), unit))

    def measured(task: TaskFacts, text: str, style: str = "") -> Part:
        style = style or ("" if task.state == "running" else "dim")  # values of tasks that have ended are means
        return Part(text if of(task) else "", style)

    every = snapshot.tasks
    chunks = max((len(f"{task.settled:,}/{task.chunks:,}") for task in every), default=1)
    return [
        Column("task", _name_width((t.label for t in every), 4), 0, cell=lambda t, w: Part(ending(t.label, w))),
        Column("node", _name_width((task.node for task in every), 0), 3, cell=lambda t, _: Part(t.node)),
        Column("state", 7, 0, cell=lambda t, _: Part(t.state, STYLES[t.state])),
        Column(
            "progress", 8, 2, max_width=30,
            cell=lambda t, w: Part(bar(_share(t), w, _failed_share(t)), STYLES[t.state]),
        ),
        _number_column(
            "chunks", max(6, chunks), 1,
            cell=lambda t, _: Part(f"{t.settled:,}/{t.chunks:,}" if t.chunks else UNKNOWN),
        ),
        _number_column("rate", 7, 1, cell=lambda t, _: Part(rate(t.rate))),
        _number_column(
            "ETA", 8 if any(task.alive for task in every) else 0, 1,
            cell=lambda t, _: Part(span(snapshot.eta_s(t.ends_at_ms)) if t.alive else ""),
        ),
        _number_column("GPU", 4, 1, cell=busy),
        Column("load", 8, 3, cell=lambda t, _: measured(t, load_word(mean_utilization(of(t))) or "")),
        Column("history", 8, 4, max_width=60, cell=history),
        _number_column("mem", 4, 7, cell=lambda t, _: highest(t, (d.memory_percent for d in of(t)), "%")),
        _number_column("temp", 6, 5, cell=lambda t, _: highest(t, (d.shown.temperature_c for d in of(t)), " °C")),
        _number_column("power", 7, 8, cell=lambda t, _: measured(t, rounded(total_power_w(of(t)), " W"))),
        Column(
            "working on", 18 if any(task.working_on for task in tasks) else 0, 6, max_width=44,
            cell=lambda t, _: Part(", ".join(t.working_on), "dim"),
        ),
    ]  # fmt: skip


@lru_cache(maxsize=1024)  # most charts have not changed since the last screen
def _task_history(series: tuple[Sequence[int | None], ...], width: int, over: bool) -> str:
    """Return a chart of the mean utilization of a task's devices."""
    sampled = (downsample(values, width) for values in series)
    return sparkline([mean_of_known(values) for values in zip(*sampled, strict=False)], width, 100, over=over)


def _device_columns(snapshot: Snapshot, devices: Sequence[DeviceFacts]) -> list[Column]:
    """Return the columns of the device table; ``devices`` are the devices on the screen."""

    def busy(device: DeviceFacts, _width: int) -> Part:
        percent = device.shown.utilization_percent
        return Part(rounded(percent, "%"), _style_of_busy(percent, device.alive and bool(device.chunks)))

    def history(device: DeviceFacts, width: int) -> Part:
        bars = sparkline(device.trail.utilization_percent, width, 100, over=not device.alive)
        return Part(bars, "green" if device.alive else "dim")

    def doing(device: DeviceFacts, _width: int) -> Part:
        if of_run:
            return Part(device.trouble or ", ".join(device.chunks) or ("" if device.alive else "ended"), "dim")
        running = ", ".join(f"{p.program or '?'} ({p.pid})" for p in device.processes or ())
        return Part(device.trouble or running, "yellow" if device.trouble else "dim")

    def more(title: str, metric: str) -> Column:
        known = any(getattr(device.reading, metric) is not None for device in devices)
        cell = lambda d, _: Part(rounded(getattr(d.reading, metric), "%"))  # noqa: E731
        return _number_column(title, 7 if known else 0, 8, cell=cell)

    def task_of(device: DeviceFacts) -> str:
        return device.task.partition(".")[0]

    every, of_run = snapshot.devices, snapshot.of_run
    node = _name_width((device.node for device in every), 0) if of_run else 0
    model = max((cell_len(device.name or "") for device in every), default=0)
    something = of_run or any(device.processes or device.trouble for device in devices)
    memory, power = (max([5, *(len(words(device)) for device in devices)]) for words in (_memory, _power))
    return [
        Column("task", _name_width(map(task_of, every), 0), 0, cell=lambda d, w: Part(ending(task_of(d), w))),
        Column("node", node, 5, cell=lambda d, _: Part(d.node)),
        _number_column("GPU", 3, 0, cell=lambda d, _: Part(_device_number(d))),
        Column(
            "model", min(22, max(5, model)) if model else 0, 6 if of_run else 3,
            cell=lambda d, _: Part(d.name or UNKNOWN),
        ),
        _number_column("busy", 4, 0, cell=busy),
        Column("load", 8, 1, cell=lambda d, _: Part(load_word(d.shown.utilization_percent) or "", "dim")),
        Column("history", 8, 2, max_width=60, cell=history),
        _number_column("memory GiB", max(10, memory), 1, cell=lambda d, _: Part(_memory(d))),
        _number_column("temp", 6, 1, cell=lambda d, _: Part(rounded(d.shown.temperature_c, " °C"))),
        _number_column("power", power, 1, cell=lambda d, _: Part(_power(d))),
        _number_column("rate", 7 if of_run else 0, 4, cell=lambda d, _: Part(rate(d.rate))),
        *(more(title, metric) for metric, title in _MORE.items()),
        _number_column(
            "age", 8 if of_run else 0, 7,
            cell=lambda d, _: Part(_age(snapshot, d) if d.alive else "", "dim"),
        ),
        Column("working on" if of_run else "processes", 14 if something else 0, 3, max_width=50, cell=doing),
    ]  # fmt: skip


def _age(snapshot: Snapshot, device: DeviceFacts) -> str:
    """Return how long ago a device was read."""
    return UNKNOWN if device.read_at_ms is None else span(max(0, snapshot.at_ms - device.read_at_ms) / 1000)


def _failed_share(task: TaskFacts) -> float:
    return task.failed_for_good / task.chunks if task.chunks else 0.0


def _device_number(device: DeviceFacts) -> str:
    return str(device.index if device.index is not None else device.token or UNKNOWN)


def _share(task: TaskFacts) -> float | None:
    return task.settled / task.chunks if task.chunks else None


def _memory(device: DeviceFacts) -> str:
    known = (device.shown.memory_used_bytes, device.memory_total_bytes)
    return "/".join(UNKNOWN if value is None else f"{value / 2**30:.1f}" for value in known)


def _power(device: DeviceFacts) -> str:
    power_w, limit_w = device.shown.power_w, device.power_limit_w
    return UNKNOWN if power_w is None else rounded(power_w) + (f"/{limit_w:.0f}" if limit_w else "") + " W"


def _name_width(names: Iterable[str], least: int) -> int:
    """Return the width of a column of names; 0: all names are empty."""
    longest = max((cell_len(name) for name in names), default=least) or least
    return min(_MAX_NAME, max(4, longest)) if longest else 0


def _style_of_busy(percent: float | None, active: bool) -> str:
    return "bold yellow" if active and percent is not None and percent < 20 else ""


# --- the page of a task -----------------------------------------------------------------------------------------------


def _task_page(snapshot: Snapshot, name: str, width: int) -> Lines:
    task = next((task for task in snapshot.tasks if task.name == name), None)
    if task is None:
        return [[Part(f"{name} is no longer the newest attempt of its array task", "yellow")]]
    devices = [device for device in snapshot.devices if device.task == name]
    facts = [
        task.node and f"on {task.node}",
        task.engine,
        None if task.devices is None else count(task.devices, "GPU"),
        None if task.workers is None else count(task.workers, "worker"),
        f"restart {task.restart}" if task.restart else None,
        None if task.exit_code is None else f"exit code {task.exit_code}",
    ]
    parts = [Part(task.label, "bold"), Part(task.state, STYLES[task.state]), *[Part(fact) for fact in facts if fact]]
    lines = [*wrap_parts(parts, _DOT, width), *_task_progress(snapshot, task, width)]
    for alert in (alert for alert in snapshot.alerts if alert.task == name):
        lines += _alert_lines(snapshot, alert, width, _MAX_ALERT_LINES)
    lines += [*_failures(task.errors, width), []]
    for device in devices:
        lines += _device_lines(snapshot, device, width)
    if task.working_on and not any(device.chunks for device in devices):
        lines += labelled("on", ", ".join(task.working_on), width)
    if not snapshot.title.endswith(".sqlite") and task.node:
        log = shell_line("tail", "-f", Path(snapshot.title, "tasks", f"{task.name}.log"))
        lines += [[], *labelled("log", log, width)]
    return lines


def _failures(errors: Sequence[tuple[str, int, str | None]], width: int) -> Lines:
    """Return what failed: each file without audio, and one example of each other error."""
    lines: Lines = []
    for error_class, chunks, example in errors:
        many = f" ({count(chunks, 'chunk')})" if chunks > 1 else ""
        words = f"{error_class.replace('_', ' ')}{many}: {''.join((example or '').strip().splitlines()[-1:])}"
        wrapped = textwrap.wrap(f"  failed  {words}", width, subsequent_indent=" " * NAMES)  # uncut, also a long path
        lines += styled(wrapped, "red")
    return lines


def _task_progress(snapshot: Snapshot, task: TaskFacts, width: int) -> Lines:
    parts = [Part(f"{task.settled:,}/{task.chunks:,} chunks")]
    parts += [Part(f"{task.failed_for_good:,} failed", rank=2)] if task.failed_for_good else []
    parts += [Part(f"{task.before:,} done before", rank=4)] if task.before else []
    parts += [Part(rate(task.rate), rank=3)]
    parts += [Part(f"ETA {span(snapshot.eta_s(task.ends_at_ms))}")] if task.alive else []
    started = "not yet"
    if task.started_at_ms:
        end_ms = snapshot.at_ms if task.ended_at_ms is None else task.ended_at_ms
        took = span(max(0, end_ms - task.started_at_ms) / 1000)
        silence = span(max(0, snapshot.at_ms - (task.heard_at_ms or 0)) / 1000)
        started = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
        ended = task.ended_at_ms is not None
        started += f", ended after {took}" if ended else f", {took} ago; last published {silence} ago"
    when = "" if task.alive else ", at its last reading"
    machine = f"CPU {rounded(task.cpu_percent, '%')}, memory {rounded(task.memory_percent, '%')}{when}"
    return [
        bar_line(_share(task), parts, width, max_width=40, style=STYLES[task.state], failed=_failed_share(task)),
        *labelled("started", started, width),
        *labelled("machine", machine, width),
    ]


def _device_lines(snapshot: Snapshot, device: DeviceFacts, width: int) -> Lines:
    """Return a device on the page of its task: each metric with its value (now, or the mean) and its chart."""
    parts = [Part(f"GPU {_device_number(device)}", "bold"), *([Part(device.name, "bold")] if device.name else [])]
    parts.append(Part(f"{count(device.work.done, 'chunk')}, {rate(device.rate)}", "dim"))
    parts.append(Part(f"read {_age(snapshot, device)} ago" if device.alive else "means", "dim"))
    lines = wrap_parts(parts, GAP, width)
    trail, room = device.trail, min(120, max(0, width - NAMES - _VALUES - 2))
    metrics: list[tuple[str, str, Sequence[float | None], float | None]] = [
        ("busy", rounded(device.shown.utilization_percent, "%"), trail.utilization_percent, 100),
        ("memory", f"{_memory(device)} GiB", trail.memory_used_bytes, device.memory_total_bytes),
        ("temp", rounded(device.shown.temperature_c, " °C"), trail.temperature_c, 100),
        ("power", _power(device), trail.power_w, device.power_limit_w),
    ]
    for name, value, values, top in metrics:
        top = top or max((value for value in values if value is not None), default=1)
        bars = sparkline(values, room, top, over=not device.alive)
        style = "green" if device.alive else "dim"
        lines.append([Part(f"  {name:<{NAMES - 2}}", "dim"), Part(f"{value:>{_VALUES}}  "), Part(bars, style)])
    known = {title: getattr(device.reading, metric) for metric, title in _MORE.items()}
    others = [f"{word} load"] if (word := load_word(device.shown.utilization_percent)) else []
    others += [f"{title} {value:.0f}%" for title, value in known.items() if value is not None and device.alive]
    lines += labelled("more", ", ".join(others), width) if others else []
    return lines + (labelled("on", ", ".join(device.chunks), width) if device.chunks else [])
