"""Draw a Snapshot as styled lines, for a terminal or a file. Pure functions.

Colour only repeats what the text says, so that every page can be read without colour."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.draw_lists import STYLES, device_columns, failed_share, settled_share, task_columns
from badcjobs.live.snapshot import STATES, Snapshot
from badcjobs.live.text_fit import (
    DOT,
    GAP,
    Column,
    Lines,
    bar_line,
    finished,
    flow,
    labelled,
    table_lines,
    wrap,
    wrap_command,
)
from badcjobs.live.ui_state import DEVICES, HELP, Row, UiState, arrange_devices, arrange_tasks
from badcjobs.model import AUDIO_FAULTS, load_word
from badcjobs.paths import shell_line
from badcjobs.report.tables import WIDTH, ending
from badcjobs.report.verdict import MOST_FINDINGS
from badcjobs.store.read_model import TaskAlert, TaskFacts
from badcjobs.words import audio_time, count, duration, power, progress, share_words, speed

_LOW = 20  # lines; a lower terminal shows only the most important facts
_LINES_PER_ALERT = 12  # of the screen
_MAX_REMARKS = 3
_HELP_INDENT = 16
_TASK_INDENT = 10  # the width of labels
_HELP = (
    ("up down j k", "move between lines; also page up, page down, home, end"),
    ("enter", "open the task on this line; escape returns"),
    ("s", "change the sort order"),
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
    if ui.opened != HELP:
        head = _head(snapshot, width, height, full=ui.opened is None)
    room = None
    if height is not None:
        room = max(1, height - len(head) - 1)
    body = _body(snapshot, ui, width, room)

    lines = [*head, *body.lines]
    if height is not None:
        empty = [Text() for _ in range(height - len(lines) - 1)]
        lines = [*[*lines, *empty][: height - 1], _foot(ui, width)]
    return body._replace(lines=[finished(line, width, ascii_only=ascii_only) for line in lines])


def as_plain_text(snapshot: Snapshot, *, ascii_only: bool = False) -> str:
    """Return the first page as text without style, for a file, a pipe or a mail."""
    page = draw(snapshot, UiState.at_start(of_run=snapshot.of_run), width=WIDTH, ascii_only=ascii_only)
    return "\n".join(line.plain.rstrip() for line in page.lines).rstrip()


# --- the body ---------------------------------------------------------------------------------------------------------


def _body(snapshot: Snapshot, ui: UiState, width: int, room: int | None) -> Page:
    """Return the lines below the head."""
    if ui.opened == HELP:
        return _scrolled(_help_lines(width), ui, room)
    if ui.opened is not None:
        return _scrolled(_task_page(snapshot, ui.opened, width), ui, room)
    if ui.page == DEVICES:
        devices = arrange_devices(snapshot.devices, ui)
        page = _list(devices, lambda shown: device_columns(snapshot, shown), ui, width, room)
        return page._replace(names=[device.task or None for device in devices])

    tasks = arrange_tasks(snapshot.tasks, ui)
    page = _list(tasks, lambda shown: task_columns(snapshot, shown), ui, width, room)
    lines = [*page.lines]
    if room is None:  # a text has room for the name of each file without audio
        faults = [error for task in tasks for error in task.errors if error[0] in AUDIO_FAULTS]
        lines += _failure_lines(faults, width)
    return page._replace(lines=lines, names=[task.name for task in tasks])


def _help_lines(width: int) -> Lines:
    lines = []
    for name, meaning in _HELP:
        lines += labelled(name, meaning, width, indent=_HELP_INDENT, style="bold")
    return lines


def _scrolled(lines: Lines, ui: UiState, room: int | None) -> Page:
    """Return a page without lines to select; it has a name for each line that it can be scrolled by."""
    hidden = max(0, len(lines) - (room or len(lines)))
    first = min(ui.scroll, hidden)
    return Page(lines[first:], [None] * (hidden + 1), room or len(lines))


def _list(
    rows: Sequence[Row], columns: Callable[[Sequence[Row]], list[Column]], ui: UiState, width: int, room: int | None
) -> Page:
    """Return a list with the selected line in its middle; ``room`` None: all lines, without a selection."""
    first = 0
    size = len(rows)
    chosen = None
    if room is not None:
        size = max(1, room - 1)  # one line is the title
        line = min(ui.line, max(0, len(rows) - 1))
        first = max(0, min(line - size // 2, len(rows) - size))
        chosen = line - first
    lines = table_lines(columns(rows[first : first + size]), width, chosen)
    if not rows and ui.filter:
        lines.append(Text(f"  nothing matches '{ui.filter}'", "dim"))
    return Page(lines, [], size)


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(snapshot: Snapshot, width: int, height: int | None, *, full: bool) -> Lines:
    """Return the head of a page; ``height`` None: no limit. Not ``full``: without alerts and remarks."""
    lines = [_title(snapshot, width)]
    if height is not None and height < _LOW:
        return [*lines, *_progress(snapshot, width), *_next_step(snapshot, width, height)]

    if snapshot.reading is not None:
        lines.append(Text(snapshot.reading, "bold yellow"))
    verdict = snapshot.verdict
    if verdict is not None:
        outcome = verdict.outcome
        if verdict.cost:
            outcome += f"{DOT}{verdict.cost}"
        lines += wrap(outcome, width, "bold")
    lines += _progress(snapshot, width)
    lines += flow([*_states(snapshot), *_totals(snapshot)], width, DOT)
    if full:
        lines += _next_step(snapshot, width, height)
        lines += [Text(f"! {remark}", "yellow") for remark in snapshot.remarks[:_MAX_REMARKS]]
        lines += _alerts(snapshot, width, height)
    return [*lines, Text()]


def _title(snapshot: Snapshot, width: int) -> Text:
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at_ms / 1000))
    room = width - len(clock) - len(GAP)
    title = ending(f"badcjobs  {snapshot.title}", room)
    return Text.assemble((title, "bold"), " " * (room - cell_len(title)), GAP, (clock, "dim"))


def _states(snapshot: Snapshot) -> Lines:
    """Return the number of tasks in each state; those that need attention come first."""
    states = []
    for state in STATES:
        tasks = snapshot.total.states.get(state)
        if tasks:
            states.append(Text(f"{tasks:,} {state}", STYLES[state]))
    return states


def _progress(snapshot: Snapshot, width: int) -> Lines:
    """Return the bar of a run; none for a machine."""
    total = snapshot.total
    if total.chunks is None:
        return []
    if total.share is None:
        return [Text("no chunks yet", "bold")]
    share_of_chunk = total.share / (total.settled or 1)
    about = "~" if total.parts else ""
    facts = [f"{about}{progress(share_of_chunk * total.done)}"]  # failed is not done
    eta_s = snapshot.eta_s(total.ends_at_ms)
    if eta_s is not None:
        facts.append(f"ETA {about}{duration(eta_s)}")
    rate = total.speed if total.rate is None else total.rate
    if rate is not None:
        facts.append(speed(rate))
    style = "yellow" if total.failed else "green"
    return [bar_line(total.share, facts, width, style=style, failed=share_of_chunk * total.failed)]


def _totals(snapshot: Snapshot) -> Lines:
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
        done = f"{audio_time(total.audio_done_s)} of audio done"
        if total.with_overlaps:
            done += ", with overlaps"
        facts.append(done)
    return [Text(fact, "dim") for fact in facts]


def _next_step(snapshot: Snapshot, width: int, height: int | None) -> Lines:
    """Return why no task is running, and the command that goes on; a command is never shortened in a text."""
    lines: Lines = []
    if snapshot.total.standstill is not None:
        lines = wrap(f"! {snapshot.total.standstill}", width, "yellow")
    if not snapshot.next_steps:
        return lines

    explanation, command = snapshot.next_steps[0]
    wrapped = wrap_command(command, width - 2)
    if height is None:
        wrapped = wrapped or [command]
    elif wrapped is None or len(wrapped) > max(1, height // 6):
        wrapped = [shell_line("badcjobs", "merge", Path(snapshot.title))]  # it prints the same command
    lines.append(Text(f"next: {explanation}"))
    for part in wrapped:
        line = Text(f"  {part}")
        if height is None:
            line.overflow = "ignore"
        lines.append(line)
    return lines


def _alerts(snapshot: Snapshot, width: int, height: int | None) -> Lines:
    """Return the worst alerts, as many as there is room for."""
    most = MOST_FINDINGS
    if height is not None:
        most = max(1, min(most, height // _LINES_PER_ALERT))
    lines: Lines = []
    for alert in snapshot.findings[:most]:
        lines += _alert_lines(snapshot, alert, width)
    more = len(snapshot.findings) - most
    if more > 0:
        lines.append(Text(f"! {count(more, 'more alert')}", "yellow"))
    return lines


# --- the page of a task -----------------------------------------------------------------------------------------------


def _task_page(snapshot: Snapshot, name: str, width: int) -> Lines:
    """Return the page of a task, below the head."""
    task = next((task for task in snapshot.tasks if task.name == name), None)
    if task is None:
        return [Text(f"{name} is no longer the newest attempt of its array task", "yellow")]
    title = Text(task.label, "bold")
    state = Text(task.state, STYLES[task.state])
    facts = map(Text, _task_facts(task))
    lines = flow([title, state, *facts], width, DOT)
    lines.append(_task_progress(snapshot, task, width))
    for label, text in _task_labels(snapshot, task):
        lines += labelled(label, text, width, indent=_TASK_INDENT)
    for alert in snapshot.alerts:
        if alert.task == name:
            lines += _alert_lines(snapshot, alert, width)
    lines += _failure_lines(task.errors, width)
    if task.its_devices:
        columns = device_columns(snapshot, task.its_devices, of_one_task=True)
        lines += [Text(), *table_lines(columns, width)]
    return lines


def _task_facts(task: TaskFacts) -> list[str]:
    facts = []
    if task.node:
        facts.append(f"on {task.node}")
    if task.engine:
        facts.append(task.engine)
    if task.devices is not None:
        facts.append(count(task.devices, "GPU"))
    if task.workers is not None:
        facts.append(count(task.workers, "worker"))
    if task.restart:
        facts.append(f"restart {task.restart}")
    if task.exit_code is not None:
        facts.append(f"exit code {task.exit_code}")
    return facts


def _task_progress(snapshot: Snapshot, task: TaskFacts, width: int) -> Text:
    facts = [f"{task.settled:,}/{task.chunks:,} chunks"]
    if task.alive:
        facts.append(f"ETA {duration(snapshot.eta_s(task.ends_at_ms))}")
    facts.append(speed(task.rate))
    if task.failed_for_good:
        facts.append(f"{task.failed_for_good:,} failed")
    if task.before:
        facts.append(f"{task.before:,} done before")
    return bar_line(settled_share(task), facts, width, style=STYLES[task.state], failed=failed_share(task))


def _task_labels(snapshot: Snapshot, task: TaskFacts) -> list[tuple[str, str]]:
    """Return what else is known of a task, each with its label."""
    machine = f"CPU {share_words(task.cpu_percent)}, memory {share_words(task.memory_percent)}"
    labels = [("started", _start_words(snapshot, task)), ("machine", machine)]
    if task.working_on:
        labels.append(("on", ", ".join(task.working_on)))
    if task.node and not snapshot.title.endswith(".sqlite"):
        labels.append(("log", shell_line("tail", "-f", Path(snapshot.title, "tasks", f"{task.name}.log"))))
    return labels


def _start_words(snapshot: Snapshot, task: TaskFacts) -> str:
    """Return when a task started, and when it ended or gave its last sign."""
    if not task.started_at_ms:
        return "not yet"
    started = time.strftime("%d %b %H:%M:%S", time.localtime(task.started_at_ms / 1000))
    if task.ended_at_ms is not None:
        return f"{started}, ended after {_between(task.started_at_ms, task.ended_at_ms)}"
    return f"{started}; last published {_between(task.heard_at_ms or 0, snapshot.at_ms)} ago"


def _between(from_ms: int, to_ms: int) -> str:
    return duration(max(0, to_ms - from_ms) / 1000)


# --- what failed, and alerts ------------------------------------------------------------------------------------------


def _failure_lines(errors: Sequence[tuple[str, int, str | None]], width: int) -> Lines:
    """Return what failed: each file without audio, and one example of each other error."""
    lines = []
    for error_class, chunks, example in errors:
        error = error_class.replace("_", " ")
        last_line = "".join((example or "").strip().splitlines()[-1:])
        text = f"  failed  {error} ({count(chunks, 'chunk')}): {last_line}"
        wrapped = textwrap.wrap(text, width, subsequent_indent=" " * _TASK_INDENT)  # uncut, also a long path
        lines += [Text(line, "red") for line in wrapped]
    return lines


def _alert_lines(snapshot: Snapshot, alert: TaskAlert, width: int) -> Lines:
    """Return an alert: its severity, where, its message, its duration so far, and what to do."""
    style = "yellow"
    severity = alert.severity
    if severity == "critical":
        style = "bold red"
        severity = "problem"  # as in the report
    task = (alert.task or "").partition(".")[0]
    place = " ".join(filter(None, [task, alert.node]))
    text = f"! {severity} {alert.message}"
    if place:
        text = f"! {severity} {place}: {alert.message} (for {_between(alert.started_at_ms, snapshot.at_ms)})"
    lines = wrap(text, width, style)
    if alert.fix:
        lines += [Text(f"  {line.plain}") for line in wrap(f"→ {alert.fix}", width - 2)]
    return lines


# --- the foot ---------------------------------------------------------------------------------------------------------


def _foot(ui: UiState, width: int) -> Text:
    """Return the line of keys."""
    if ui.typing:
        keys = [f"show only: {ui.filter}_", "enter keeps it, escape shows all"]
    elif ui.opened is not None:
        keys = ["esc back", "q quit", "up/down scroll"]
    else:
        keys = _list_keys(ui)
    line = Text(GAP.join(keys), "reverse")
    line.truncate(width, overflow="ellipsis", pad=True)
    return line


def _list_keys(ui: UiState) -> list[str]:
    order = f"by {ui.order}"
    if ui.filter:
        order += f", only '{ui.filter}'"
    keys = [order, "q quit", "? help", "s sort", "/ filter"]
    if ui.of_run:
        keys[3:3] = ["enter open", "d tasks" if ui.page == DEVICES else "d devices"]
    return keys
