"""Draws a Snapshot: the pages of the live view, as styled lines. Pure: the same lines go to a terminal or a file.

Colour only repeats what the words say: all of it can be read without."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from badcjobs.live import text_fit as words
from badcjobs.live.snapshot import STATES, Snapshot, Total
from badcjobs.live.tables import STYLES, alert_line, device_rows, task_lines, task_rows
from badcjobs.live.text_fit import Paper, Part, bar_line, described, fit, flowing, joined, shorten, tail, width_of, wrap
from badcjobs.live.ui_state import DEVICES, HELP, TASK, UiState, arrange_devices, arrange_tasks, devices_by_task

_BAR = 46  # at most
_BESIDE_BAR = 9  # columns that a bar shall have, with the blank after it
_LOW = 16  # on fewer lines than this only what matters most is said
_MOST_ALERTS = 20
_DOT = " · "
_HELP_INDENT = 16
_HELP = (
    ("up down j k", "go from line to line; page up, page down, home, end"),
    ("enter", "open the task of this line; escape goes back"),
    ("s   r", "the next order of the lines; the other way round"),
    ("/", "only lines with these words: 'gpu03 running'; escape shows all"),
    ("d", "tasks or devices"),
    ("?   q", "this page; quit"),
    ("", ""),
    ("running", "its database was published in time"),
    ("silent", "it should have been by now: a dead node, or a disk that hangs"),
    ("stopped", "it ended in order with work left: run it again"),
    ("waiting", "of the array, and nothing was heard of it yet"),
    ("unbegun", "never begun: the emulation that was to start it is over"),
    ("rate", "seconds of audio per second since the task began"),
    ("ETA", "until the last chunk, at the pace so far"),
    ("GPU  busy", "how busy the devices are; of a task that has ended, the mean"),
    ("history", "the same since the task began"),
    ("chunks 8/~20", "about 20 (20+: or more): some tasks have not listed theirs yet"),
)


@dataclass(frozen=True, slots=True)
class Page:
    """What is on the screen, and what keys need to know of it."""

    lines: tuple[Text, ...]
    names: tuple[str | None, ...]  # the task of each line that can be chosen
    rows: int  # how many such lines fit


def draw(snapshot: Snapshot, ui: UiState, *, width: int, height: int | None = None, ascii_only: bool = False) -> Page:
    """Return one page; ``height`` None: as long as it takes, without keys."""
    paper = Paper(max(20, width), ascii_only)
    top = [] if ui.page == HELP else _head(snapshot, paper, height, whole=ui.page != TASK)
    room = None if height is None else max(1, height - len(top) - 1)
    body, names, rows = _body(snapshot, ui, paper, room)
    lines = [*top, *body]
    if height is not None:
        lines = [*lines, *[Text("", end="")] * (height - len(lines) - 1)][: height - 1]
        lines.append(_foot(ui, paper, more=len(names) > 1))
    for line in lines:
        line.truncate(paper.width, overflow="ellipsis" if not ascii_only else "crop")
    return Page(tuple(lines), tuple(names), rows)


def as_plain_text(snapshot: Snapshot, ui: UiState | None = None, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return one page as text without any style: for a file, a pipe, a mail."""
    page = draw(snapshot, ui or UiState.at_start(of_run=snapshot.of_run), width=width, ascii_only=ascii_only)
    return "\n".join(line.plain.rstrip() for line in page.lines).rstrip()


def _body(snapshot: Snapshot, ui: UiState, paper: Paper, room: int | None) -> tuple[list[Text], list[str | None], int]:
    """Return the lines below the head, the task of each line that can be chosen, and how many such lines fit."""
    if ui.page in (HELP, TASK):
        lines = help_lines(paper) if ui.page == HELP else task_lines(snapshot, ui.opened or "", paper)
        hidden = 0 if room is None else max(0, len(lines) - room)
        return lines[min(ui.scroll, hidden) :], [None] * (hidden + 1), room or len(lines)
    by_task, names = devices_by_task(snapshot.devices), list[str | None]()
    if ui.page == DEVICES:
        devices = arrange_devices(snapshot.devices, order=ui.order, wanted=ui.wanted, backwards=ui.backwards)
        names += [device.task or None for device in devices]
    else:
        tasks = arrange_tasks(snapshot.tasks, by_task, order=ui.order, wanted=ui.wanted, backwards=ui.backwards)
        names += [task.name for task in tasks]
    rows = max(1, len(names) if room is None else room - 1)  # one is the title
    chosen = None if room is None else min(ui.line, max(0, len(names) - 1))
    # The chosen one is in the middle of the screen where that is possible.
    first = 0 if chosen is None else max(0, min(chosen - rows // 2, len(names) - rows))
    if ui.page == DEVICES:
        lines = device_rows(snapshot, devices[first : first + rows], chosen, first, paper)
    else:
        lines = task_rows(snapshot, tasks[first : first + rows], by_task, chosen, first, paper)
    if not names and ui.wanted:
        lines.append(Text(paper.text(f"  nothing matches '{ui.wanted}'"), style="dim", end=""))
    return lines, names, rows


def help_lines(paper: Paper) -> list[Text]:
    """Return the lines of the page of help, as many as it takes; none is too long."""
    return [line for name, meaning in _HELP for line in described(name, meaning, _HELP_INDENT, paper, "bold")]


# --- the head ---------------------------------------------------------------------------------------------------------


def _head(snapshot: Snapshot, paper: Paper, height: int | None, *, whole: bool) -> list[Text]:
    """Return the head of a page; ``height`` None: there is room for all of it. Not ``whole``: of the run alone."""
    low = height is not None and height < _LOW
    lines = _title(snapshot, paper)
    if low and not whole:
        return lines[:1]
    if snapshot.total.chunks is not None:
        parts = fit(_progress(snapshot), paper.width - _BESIDE_BAR, "  ", keep=1)
        lines.append(bar_line(snapshot.total.share, parts, paper, most=_BAR, style="green", words="bold"))
    if not low:
        lines += flowing(_facts(snapshot), _DOT, paper, "dim")
    if whole:
        lines += _standstill(snapshot, paper, height)
        lines += [
            Text(shorten(paper.text(f"! {remark}"), paper.width, paper).rstrip(), "yellow", end="")
            for remark in snapshot.remarks[: 1 if low else 3]
        ]
    lines += [] if low else [Text("", end="")]
    return lines + (_alerts(snapshot, paper, height) if whole else [])


def _title(snapshot: Snapshot, paper: Paper) -> list[Text]:
    """Return the title with the states beside it or, where that is too much for a line, below it."""
    states = snapshot.total.states
    clock = time.strftime("%H:%M:%S", time.localtime(snapshot.at_ms / 1000))
    order = sorted(STATES, key=lambda state: state not in ("running", "waiting", "done"))
    parts = [Part(f"{states[state]:,} {state}", STYLES[state]) for state in order if states.get(state)]
    name, room = paper.text(snapshot.title), paper.width - len(clock) - 2
    beside = width_of(parts, _DOT)
    together = beside > 0 and room - beside - 2 >= min(12, cell_len(name))
    room -= beside + 2 if together else 0
    name = f"badcjobs  {name}" if cell_len(name) + 10 <= room else name
    first = Text(end="").append(set_cell_size(tail(name, room, paper), room), "bold").append("  ")
    if together:
        first.append_text(joined(parts, _DOT, paper)).append("  ")
    return [first.append(clock, "dim"), *([] if together else flowing(parts, _DOT, paper))]


def _progress(snapshot: Snapshot) -> list[Part]:
    total = snapshot.total
    if not total.chunks or total.share is None:
        return [Part("no chunks yet")]
    shown = "100" if total.share == 1 else f"{min(99.9, 100 * total.share):.3g}"
    more = "" if total.chunks_known or total.parts else "+"  # more are not listed yet
    about = "~" if total.parts else ""
    chunks = f"{about}{total.source_chunks or total.chunks:,}{more}"
    parts = [Part(f"{about}{shown}%"), Part(f"{total.settled:,}/{chunks} chunks", rank=1)]
    parts += [Part(f"{total.parts_listed:,} of {total.parts:,} parts", rank=4)] if total.parts else []
    parts += [Part(f"{total.failed:,} failed", rank=2)] if total.failed else []
    rate = total.speed if total.rate is None else total.rate
    parts += [Part(words.rate(rate), rank=3)] if rate is not None else []
    eta_s = snapshot.eta_s(total.ends_at_ms)
    return parts + ([Part(f"ETA {about}{words.span(eta_s)}")] if eta_s is not None else [])


def _facts(snapshot: Snapshot) -> list[Part]:
    total, unread = snapshot.total, snapshot.unread
    facts = [_at_work(total)]
    if total.utilization_percent is not None:
        facts.append(f"{total.utilization_percent:.0f}% busy")
    if total.power_w is not None:
        facts.append(f"{total.power_w / 1000:.1f} kW" if total.power_w >= 10_000 else f"{total.power_w:,.0f} W")
    if total.chunks is not None:
        facts.append(f"{words.hours(total.audio_done_s)} of audio done")
    if unread:
        facts.append(f"{unread:,} database{'' if unread == 1 else 's'} still to be read")
    return [Part(fact) for fact in facts]


def _at_work(total: Total) -> str:
    if total.devices:
        return f"{total.devices:,} GPU{'' if total.devices == 1 else 's'}"
    if total.ended_at_ms is None:
        return "no GPU at work"
    ended = time.strftime("%d %b %H:%M", time.localtime(total.ended_at_ms / 1000))
    return f"ended {ended} after {words.span(total.ran_s)}"


def _standstill(snapshot: Snapshot, paper: Paper, height: int | None) -> list[Text]:
    """Say that work is left and how to go on; where the command is too long for this screen, what else says it."""
    if snapshot.total.standstill is None:
        return []
    lines = [Text(paper.text(line), "yellow", end="") for line in wrap(f"! {snapshot.total.standstill}", paper.width)]
    for command in snapshot.total.go_on[:1]:
        wrapped = words.wrap_command(paper.text(command), paper.width - 2)
        if wrapped is None or (height is not None and len(wrapped) > max(1, height // 6)):
            wrapped = words.wrap_command(f"badcjobs merge {shlex.quote(snapshot.title)}", paper.width - 2)
        lines += [Text(f"  {line}", end="") for line in wrapped or [paper.text("badcjobs merge says how to go on")]]
    return lines


def _alerts(snapshot: Snapshot, paper: Paper, height: int | None) -> list[Text]:
    if not snapshot.alerts:
        return []
    most = _MOST_ALERTS if height is None else max(1, height // 8)
    worst = sorted(snapshot.alerts, key=lambda alert: (alert.severity != "critical", alert.started_at_ms))
    shown = worst if len(worst) <= most else worst[: max(1, most - 1)]
    lines = [alert_line(snapshot, alert, paper) for alert in shown]
    if len(worst) > len(shown):
        lines.append(Text(paper.text(f"! and {len(worst) - len(shown):,} more alerts"), "yellow", end=""))
    return lines if height is not None and height < _LOW else [*lines, Text("", end="")]


# --- the foot ---------------------------------------------------------------------------------------------------------


def _foot(ui: UiState, paper: Paper, *, more: bool) -> Text:
    """Return the keys, as many as fit; ``more``: not all lines are on the screen."""
    if ui.typing:
        said = f"show only: {ui.wanted}_   enter keeps it, escape shows all"
        return Text(shorten(paper.text(said), paper.width, paper), "reverse", end="")
    line = joined(fit(list(_keys(ui, more)), paper.width, "  "), "  ", paper)
    line.append(" " * (paper.width - line.cell_len))
    line.stylize("reverse")
    return line


def _keys(ui: UiState, more: bool) -> Iterator[Part]:
    if ui.page in (TASK, HELP):
        yield Part("esc back " if ui.page == TASK or more else "any key goes back ")
        if more:
            yield Part("up/down scroll ")
        yield Part("q quit")
        return
    turned = ", turned" if ui.backwards else ""
    wanted = f", only '{ui.wanted}'" if ui.wanted else ""
    yield Part(f"by {ui.order}{turned}{wanted} ", rank=1)
    yield from (Part("q quit"), Part("s sort", rank=2), Part("r turn", rank=5), Part("/ filter", rank=3))
    if ui.of_run:
        yield from (Part("enter open", rank=2), Part(f"d {'tasks' if ui.page == DEVICES else 'devices'}", rank=4))
    yield Part("? help")
