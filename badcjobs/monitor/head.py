"""The lines above the tables: who is looked at, how far it is, what is wrong with it. Each is whole at any width."""

from __future__ import annotations

import shlex
import time

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from badcjobs.monitor import words
from badcjobs.monitor.columns import Paper, bar, shorten, tail
from badcjobs.monitor.fitting import Part, fit, flow, joined, width_of, wrap, wrap_command
from badcjobs.monitor.frame import STATES, Frame, Total
from badcjobs.monitor.tables import STYLES, alert_line

_BAR = 46  # at most
_SHORTEST_BAR = 8
_LOW = 16  # on fewer lines than this only what matters most is said
_MOST_ALERTS = 20
_DOT = " · "


def head_lines(frame: Frame, paper: Paper, height: int | None, *, whole: bool = True) -> list[Text]:
    """Return the head of a page; ``height`` None: there is room for all of it. Not ``whole``: of the run alone."""
    low = height is not None and height < _LOW
    lines = _title(frame, paper)
    if low and not whole:
        return lines[:1]
    if frame.total.chunks is not None:
        lines.append(_total_bar(frame, paper))
    if not low:
        lines += [joined(facts, _DOT, paper, "dim") for facts in flow(_facts(frame), paper.width, _DOT)]
    if whole:
        lines += _standstill(frame, paper, height)
        lines += [
            Text(shorten(paper.text(f"! {remark}"), paper.width, paper).rstrip(), "yellow", end="")
            for remark in frame.remarks[: 1 if low else 3]
        ]
    lines += [] if low else [Text("", end="")]
    return lines + (_alerts(frame, paper, height) if whole else [])


def _title(frame: Frame, paper: Paper) -> list[Text]:
    """Return the title with the states beside it or, where that is too much for a line, below it."""
    total = frame.total
    clock = time.strftime("%H:%M:%S", time.localtime(frame.at_ms / 1000))
    order = sorted(STATES, key=lambda state: state not in ("running", "waiting", "done"))
    states = [Part(f"{total.states[s]:,} {s}", STYLES[s]) for s in order if total.states.get(s)]
    beside = width_of(states, _DOT)
    room = paper.width - len(clock) - 2
    if beside and room - beside - 2 >= min(12, cell_len(paper.text(frame.title))):
        first = _name(frame.title, room - beside - 2, paper).append("  ").append_text(joined(states, _DOT, paper))
        return [first.append("  ").append(clock, "dim")]
    below = [joined(line, _DOT, paper) for line in flow(states, paper.width, _DOT)]
    return [_name(frame.title, room, paper).append("  ").append(clock, "dim"), *below]


def _name(title: str, room: int, paper: Paper) -> Text:
    """Return the title in so much room; of a long one its end is kept."""
    name = paper.text(title)
    name = f"badcjobs  {name}" if cell_len(name) + 10 <= room else name
    return Text(end="").append(set_cell_size(tail(name, room, paper), room), "bold")


def _total_bar(frame: Frame, paper: Paper) -> Text:
    total = frame.total
    share = total.share
    parts = fit(_progress(frame), paper.width - _SHORTEST_BAR - 1, "  ", keep=1)
    parts = fit(parts, paper.width, "  ")
    room = min(_BAR, paper.width - width_of(parts, "  ") - 1)
    line = Text(end="")
    if room >= _SHORTEST_BAR // 2:
        full, empty = bar(share, room, paper)
        line.append(full, "green").append(empty, "dim").append(" ")
    return line.append_text(joined(parts, "  ", paper, "bold"))


def _progress(frame: Frame) -> list[Part]:
    total = frame.total
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
    eta_s = frame.eta_s(total.ends_at_ms)
    return parts + ([Part(f"ETA {about}{words.span(eta_s)}")] if eta_s is not None else [])


def _facts(frame: Frame) -> list[Part]:
    total = frame.total
    facts = [_at_work(total)]
    facts += [] if total.utilization_percent is None else [f"{total.utilization_percent:.0f}% busy"]
    facts += [] if total.power_w is None else [_power(total.power_w)]
    facts += [f"{words.hours(total.audio_done_s)} of audio done"] if total.chunks is not None else []
    facts += [f"{frame.unread:,} database{'' if frame.unread == 1 else 's'} still to be read"] if frame.unread else []
    return [Part(fact) for fact in facts]


def _at_work(total: Total) -> str:
    if total.devices:
        return f"{total.devices:,} GPU{'' if total.devices == 1 else 's'}"
    if total.ended_at_ms is None:
        return "no GPU at work"
    ended = time.strftime("%d %b %H:%M", time.localtime(total.ended_at_ms / 1000))
    return f"ended {ended} after {words.span(total.ran_s)}"


def _power(watts: float) -> str:
    return f"{watts / 1000:.1f} kW" if watts >= 10_000 else f"{watts:,.0f} W"


def _standstill(frame: Frame, paper: Paper, height: int | None) -> list[Text]:
    """Say that work is left and how to go on; where the command is too long for this screen, who else says it."""
    if frame.total.standstill is None:
        return []
    lines = [Text(paper.text(line), "yellow", end="") for line in wrap(f"! {frame.total.standstill}", paper.width)]
    commands = [wrap_command(paper.text(command), paper.width - 2) for command in frame.total.go_on[:1]]
    if commands and (commands[0] is None or (height is not None and len(commands[0]) > max(1, height // 6))):
        commands = [wrap_command(f"badcjobs merge {shlex.quote(frame.title)}", paper.width - 2)]
    for command in commands:
        lines += [Text(f"  {line}", end="") for line in command or [paper.text("badcjobs merge says how to go on")]]
    return lines


def _alerts(frame: Frame, paper: Paper, height: int | None) -> list[Text]:
    if not frame.alerts:
        return []
    most = _MOST_ALERTS if height is None else max(1, height // 8)
    worst = sorted(frame.alerts, key=lambda alert: (alert.severity != "critical", alert.started_at_ms))
    shown = worst if len(worst) <= most else worst[: max(1, most - 1)]
    lines = [alert_line(frame, alert, paper) for alert in shown]
    if len(worst) > len(shown):
        lines.append(Text(paper.text(f"! and {len(worst) - len(shown):,} more alerts"), "yellow", end=""))
    return lines if height is not None and height < _LOW else [*lines, Text("", end="")]
