"""Draw a Snapshot as styled lines, for a terminal or a file. Pure functions.

Colour only repeats what the text says, so that every page can be read without colour."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.draw_lists import device_columns, task_columns
from badcjobs.live.draw_task import STYLES, alert_lines, failure_lines, task_page
from badcjobs.live.snapshot import STATES, Snapshot
from badcjobs.live.text_fit import (
    GAP,
    Lines,
    Part,
    bar_line,
    finished,
    fit,
    flow,
    joined,
    labelled,
    table_lines,
    width_of,
    wrap,
    wrap_command,
)
from badcjobs.live.ui_state import DEVICES, HELP, TASK, UiState, arrange_devices, arrange_tasks
from badcjobs.model import AUDIO_FAULTS, load_word
from badcjobs.paths import shell_line
from badcjobs.report.tables import ending
from badcjobs.report.verdict import MOST_FINDINGS
from badcjobs.store.connect import grouped
from badcjobs.store.read_model import DeviceFacts, TaskFacts
from badcjobs.words import audio_time, count, duration, power, progress, share_words, speed

_MAX_BAR = 46
_MIN_BAR = 9  # with the blank after it
_LOW = 16  # lines; a lower terminal shows only the most important facts
_MAX_ALERT_LINES = 4
_MAX_REMARKS = 3
_DOT = " · "
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


class Page(NamedTuple):
    """The lines of one screen, and what the key handler needs to know about them."""

    lines: Sequence[Text]
    names: Sequence[str | None]  # the task of each line that can be selected
    rows: int  # how many such lines fit on the screen


def draw(snapshot: Snapshot, ui: UiState, *, width: int, height: int | None = None, ascii_only: bool = False) -> Page:
    """Return one page; ``height`` None: as long as necessary, and without the line of keys."""
    width = max(20, width)
    head: Lines = []
    if ui.page != HELP:
        head = _head(snapshot, width, height, full=ui.page != TASK)
    room = None
    if height is not None:
        room = max(1, height - len(head) - 1)
    body = _body(snapshot, ui, width, room)

    lines = [*head, *body.lines]
    if height is not None:
        empty = [Text() for _ in range(height - len(lines) - 1)]
        lines = [*[*lines, *empty][: height - 1], _foot(ui, width, more=len(body.names) > 1)]
    return body._replace(lines=[finished(line, width, ascii_only=ascii_only) for line in lines])


def as_plain_text(snapshot: Snapshot, ui: UiState | None = None, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return one page as text without style, for a file, a pipe or a mail."""
    if ui is None:
        ui = UiState.at_start(of_run=snapshot.of_run)
    page = draw(snapshot, ui, width=width, ascii_only=ascii_only)
    return "\n".join(line.plain.rstrip() for line in page.lines).rstrip()


# --- the body ---------------------------------------------------------------------------------------------------------


def _body(snapshot: Snapshot, ui: UiState, width: int, room: int | None) -> Page:
    """Return the lines below the head."""
    if ui.page == HELP:
        return _scrolled(_help_lines(width), ui, room)
    if ui.page == TASK:
        return _scrolled(task_page(snapshot, ui.opened or "", width), ui, room)
    if ui.page == DEVICES:
        return _device_list(snapshot, ui, width, room)
    return _task_list(snapshot, ui, width, room)


def _help_lines(width: int) -> Lines:
    lines = []
    for name, meaning in _HELP:
        lines += labelled(name, meaning, width, indent=_HELP_INDENT, style="bold")
    return lines


def _scrolled(lines: Lines, ui: UiState, room: int | None) -> Page:
    """Return a page without lines to select; it has a name for each line that it can be scrolled by."""
    if room is None:
        return Page(lines, [None], len(lines))
    hidden = max(0, len(lines) - room)
    return Page(lines[min(ui.scroll, hidden) :], [None] * (hidden + 1), room)


class _Window(NamedTuple):
    """The lines of a list that are on the screen, and the number of the selected one among them."""

    first: int
    rows: int
    chosen: int | None

    @classmethod
    def of(cls, total: int, line: int, room: int | None) -> _Window:
        """Return the window with the selected line in its middle; ``room`` None: all lines, without a selection."""
        if room is None:
            return cls(0, max(1, total), None)
        rows = max(1, room - 1)  # one line is the title
        line = min(line, max(0, total - 1))
        first = max(0, min(line - rows // 2, total - rows))
        return cls(first, rows, line - first)


def _task_list(snapshot: Snapshot, ui: UiState, width: int, room: int | None) -> Page:
    devices_of = grouped((device.task, device) for device in snapshot.devices)
    tasks = arrange_tasks(snapshot.tasks, devices_of, ui)
    window = _Window.of(len(tasks), ui.line, room)
    shown = tasks[window.first :][: window.rows]
    lines = table_lines(task_columns(snapshot, shown, devices_of), width, window.chosen)
    if room is None:
        lines += _unreadable_files(shown, width)
    return Page([*lines, *_no_match(tasks, ui)], [task.name for task in tasks], window.rows)


def _device_list(snapshot: Snapshot, ui: UiState, width: int, room: int | None) -> Page:
    devices = arrange_devices(snapshot.devices, ui)
    window = _Window.of(len(devices), ui.line, room)
    shown = devices[window.first :][: window.rows]
    lines = table_lines(device_columns(snapshot, shown), width, window.chosen)
    return Page([*lines, *_no_match(devices, ui)], [device.task or None for device in devices], window.rows)


def _no_match(rows: Sequence[TaskFacts | DeviceFacts], ui: UiState) -> Lines:
    if rows or not ui.filter:
        return []
    return [Text(f"  nothing matches '{ui.filter}'", "dim")]


def _unreadable_files(tasks: Sequence[TaskFacts], width: int) -> Lines:
    """Return each file without audio, for a text, which has room for their names."""
    faults = [error for task in tasks for error in task.errors if error[0] in AUDIO_FAULTS]
    if not faults:
        return []
    return [Text(), *failure_lines(faults, width)]


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(snapshot: Snapshot, width: int, height: int | None, *, full: bool) -> Lines:
    """Return the head of a page; ``height`` None: no limit. Not ``full``: without alerts and remarks."""
    title = _title(snapshot, width)
    if height is not None and height < _LOW:
        return [title[0], *_progress(snapshot, width), *_next_step(snapshot, width, height)]

    lines = title
    verdict = snapshot.verdict
    if snapshot.reading is not None:
        lines.append(Text(snapshot.reading, "bold yellow"))
    if verdict is not None:
        outcome = f"{verdict.outcome}{_DOT}{verdict.cost}" if verdict.cost else verdict.outcome
        lines += [Text(line, "bold") for line in wrap(outcome, width)]
    lines += _progress(snapshot, width)
    lines += [joined(row, _DOT) for row in flow(_totals(snapshot), width, _DOT)]
    if full:
        lines += _next_step(snapshot, width, height)
        lines += [Text(f"! {remark}", "yellow") for remark in snapshot.remarks[:_MAX_REMARKS]]
        lines += _alerts(snapshot, width, height)
    return [*lines, Text()]


def _title(snapshot: Snapshot, width: int) -> Lines:
    """Return the title line with the task states on it, or below it if there is no room."""
    by_attention = sorted(STATES, key=lambda state: state not in ("running", "waiting", "done"))
    states = []
    for state in by_attention:
        tasks = snapshot.total.states.get(state)
        if tasks:
            states.append(Part(f"{tasks:,} {state}", STYLES[state]))
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at_ms / 1000))
    name = snapshot.title
    room = width - len(clock) - len(GAP)
    room_beside = room - width_of(states, _DOT) - len(GAP)
    if not states or room_beside < min(12, cell_len(name)):
        below = [joined(row, _DOT) for row in flow(states, width, _DOT)]
        return [Text.assemble((_padded(name, room), "bold"), GAP, (clock, "dim")), *below]
    beside = joined(states, _DOT)
    return [Text.assemble((_padded(name, room_beside), "bold"), GAP, beside, GAP, (clock, "dim"))]


def _padded(name: str, width: int) -> str:
    if cell_len(name) + 10 <= width:
        name = f"badcjobs  {name}"
    name = ending(name, width)
    return name + " " * (width - cell_len(name))


def _progress(snapshot: Snapshot, width: int) -> Lines:
    """Return the bar of a run; none for a machine."""
    total = snapshot.total
    if total.chunks is None:
        return []
    failed = 0.0
    parts = [Part("no chunks yet", "bold")]
    if total.share is not None:
        part = total.share / (total.settled or 1)
        failed = part * total.failed  # failed is not done
        about = "~" if total.parts else ""
        parts = [Part(f"{about}{progress(part * total.done)}", "bold")]
        rate = total.speed if total.rate is None else total.rate
        if rate is not None:
            parts.append(Part(speed(rate), "bold", rank=3))
        eta_s = snapshot.eta_s(total.ends_at_ms)
        if eta_s is not None:
            parts.append(Part(f"ETA {about}{duration(eta_s)}", "bold"))
    parts = fit(parts, width - _MIN_BAR, keep=1)
    style = "yellow" if failed else "green"
    return [bar_line(total.share, parts, width, max_width=_MAX_BAR, style=style, failed=failed)]


def _totals(snapshot: Snapshot) -> list[Part]:
    total = snapshot.total
    facts = []
    if total.devices:
        facts.append(count(total.devices, "GPU"))
    elif total.ended_at_ms is None:
        facts.append("no active GPU")
    else:
        ended = time.strftime("%d %b %H:%M", time.localtime(total.ended_at_ms / 1000))
        facts.append(f"ended {ended}")
    busy = total.utilization_percent
    if busy is not None:
        facts.append(f"{share_words(busy)} busy ({load_word(busy)} load)")
    if total.power_w is not None:
        facts.append(power(total.power_w))
    if total.chunks is not None:
        overlaps = ", with overlaps" if total.with_overlaps else ""
        facts.append(f"{audio_time(total.audio_done_s)} of audio done{overlaps}")
    return [Part(fact, "dim") for fact in facts]


def _next_step(snapshot: Snapshot, width: int, height: int | None) -> Lines:
    """Return why no task is running, and the command that goes on; a command is never shortened in a text."""
    total = snapshot.total
    verdict = snapshot.verdict
    lines: Lines = []
    if total.standstill is not None:
        lines += [Text(line, "yellow") for line in wrap(f"! {total.standstill}", width)]
    if verdict is not None and total.standstill is None:
        steps = list(verdict.next)
    else:
        steps = [("", command) for command in total.go_on]
    if not steps:
        return lines

    explanation, command = steps[0]
    wrapped = wrap_command(command, width - 2)
    if height is None:
        wrapped = wrapped or [command]
    elif wrapped is None or len(wrapped) > max(1, height // 6):
        wrapped = [shell_line("badcjobs", "merge", Path(snapshot.title))]  # it prints the same command
    if total.standstill is None and not explanation and len(wrapped) == 1:
        commands = [Text(f"next: {wrapped[0]}")]
    else:
        if total.standstill is None:
            lines.append(Text(f"next: {explanation}:" if explanation else "next:"))
        commands = [Text(f"  {line}") for line in wrapped]
    if height is None:
        for line in commands:
            line.overflow = "ignore"
    return [*lines, *commands]


def _alerts(snapshot: Snapshot, width: int, height: int | None) -> Lines:
    """Return the worst alerts, as many as there is room for."""
    most = MOST_FINDINGS
    most_lines = _MAX_ALERT_LINES
    if height is not None:
        most = max(1, min(MOST_FINDINGS, height // 8))
        most_lines = max(1, height // 12)
    lines: Lines = [Text()] if snapshot.alerts else []
    for alert in snapshot.findings[:most]:
        lines += alert_lines(snapshot, alert, width, most_lines)
    more = len(snapshot.findings) - most
    if more > 0:
        lines.append(Text(f"! {count(more, 'more alert')}", "yellow"))
    return lines


# --- the foot ---------------------------------------------------------------------------------------------------------


def _foot(ui: UiState, width: int, *, more: bool) -> Text:
    """Return the line of keys; ``more``: there are lines that are not on the screen."""
    if ui.typing:
        keys = [Part(f"show only: {ui.filter}_   enter keeps it, escape shows all")]
    elif ui.page in (TASK, HELP):
        keys = [Part("esc back " if ui.page == TASK or more else "any key goes back ")]
        if more:
            keys.append(Part("up/down scroll "))
        keys.append(Part("q quit"))
    else:
        keys = _list_keys(ui)
    line = Text(GAP.join(part.text for part in fit(keys, width, keep=0)), "reverse")
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _list_keys(ui: UiState) -> list[Part]:
    order = f"by {ui.order}"
    if ui.reverse:
        order += ", reversed"
    if ui.filter:
        order += f", only '{ui.filter}'"
    keys = [
        Part(f"{order} ", rank=1),
        Part("q quit"),
        Part("s sort", rank=2),
        Part("r reverse", rank=5),
        Part("/ filter", rank=3),
    ]
    if ui.of_run:
        keys.append(Part("enter open", rank=2))
        keys.append(Part("d tasks" if ui.page == DEVICES else "d devices", rank=4))
    return [*keys, Part("? help")]
