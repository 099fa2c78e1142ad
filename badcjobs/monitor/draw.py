"""Draws a Frame: the pages of the live view, as styled lines. Pure: the same lines go to a terminal, a file, a picture.

Colour only repeats what the words say: all of it can be read without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.text import Text

from badcjobs.monitor.columns import Paper, shorten
from badcjobs.monitor.desk import DEVICES, HELP, TASK, Desk
from badcjobs.monitor.fitting import Part, fit, joined
from badcjobs.monitor.frame import Frame
from badcjobs.monitor.head import head_lines
from badcjobs.monitor.help_page import help_lines
from badcjobs.monitor.order import arrange_devices, arrange_tasks, devices_by_task
from badcjobs.monitor.tables import device_rows, task_rows
from badcjobs.monitor.task_page import task_lines


@dataclass(frozen=True, slots=True)
class Page:
    """What is on the screen, and what keys need to know of it."""

    lines: tuple[Text, ...]
    names: tuple[str | None, ...]  # the task of each line that can be chosen
    rows: int  # how many such lines fit


def draw(frame: Frame, desk: Desk, *, width: int, height: int | None = None, ascii_only: bool = False) -> Page:
    """Return one page; ``height`` None: as long as it takes, without keys."""
    paper = Paper(max(20, width), ascii_only)
    top = [] if desk.page == HELP else head_lines(frame, paper, height, whole=desk.page != TASK)
    room = None if height is None else max(1, height - len(top) - 1)
    body, names, rows = _body(frame, desk, paper, room)
    lines = [*top, *body]
    if height is not None:
        lines = [*lines, *[Text("", end="")] * (height - len(lines) - 1)][: height - 1]
        lines.append(_foot(desk, paper, more=len(names) > 1))
    for line in lines:
        line.truncate(paper.width, overflow="ellipsis" if not ascii_only else "crop")
    return Page(tuple(lines), tuple(names), rows)


def _body(frame: Frame, desk: Desk, paper: Paper, room: int | None) -> tuple[list[Text], list[str | None], int]:
    if desk.page in (HELP, TASK):
        lines = help_lines(paper) if desk.page == HELP else task_lines(frame, desk.opened or "", paper)
        hidden = 0 if room is None else max(0, len(lines) - room)
        first = min(desk.scroll, hidden)
        return lines[first:], [None] * (hidden + 1), room or len(lines)
    devices = devices_by_task(frame.devices)
    how = {"order": desk.order, "wanted": desk.wanted, "backwards": desk.backwards}
    if desk.page == DEVICES:
        shown = arrange_devices(frame.devices, **how)  # type: ignore[arg-type]
        names = [device.task for device in shown]
    else:
        tasks = arrange_tasks(frame.tasks, devices, **how)  # type: ignore[arg-type]
        names = [task.name for task in tasks]
    rows = max(1, len(names) if room is None else room - 1)  # one is the title
    chosen = None if room is None else min(desk.line, max(0, len(names) - 1))
    first = 0 if chosen is None else _first(chosen, rows, len(names))
    if desk.page == DEVICES:
        lines = device_rows(frame, shown[first : first + rows], chosen, first, paper)
    else:
        lines = task_rows(frame, tasks[first : first + rows], devices, chosen, first, paper)
    if not names and desk.wanted:
        lines.append(Text(paper.text(f"  nothing matches '{desk.wanted}'"), style="dim", end=""))
    return lines, names, rows


def _first(chosen: int, rows: int, many: int) -> int:
    """Return the first line of the part that is shown: the chosen one is in its middle where that is possible."""
    return max(0, min(chosen - rows // 2, many - rows))


# --- the foot ---------------------------------------------------------------------------------------------------------


def _foot(desk: Desk, paper: Paper, *, more: bool) -> Text:
    """Return the keys, as many as fit; ``more``: not all lines are on the screen."""
    if desk.typing:
        said = f"show only: {desk.wanted}_   enter keeps it, escape shows all"
        return Text(shorten(paper.text(said), paper.width, paper), "reverse", end="")
    parts = fit(list(_keys(desk, more)), paper.width, "  ")
    line = joined(parts, "  ", paper)
    line.append(" " * (paper.width - line.cell_len))
    line.stylize("reverse")
    return line


def _keys(desk: Desk, more: bool) -> Iterator[Part]:
    if desk.page in (TASK, HELP):
        yield Part("esc back " if desk.page == TASK or more else "any key goes back ")
        if more:
            yield Part("up/down scroll ")
        yield Part("q quit")
        return
    turned = ", turned" if desk.backwards else ""
    wanted = f", only '{desk.wanted}'" if desk.wanted else ""
    yield Part(f"by {desk.order}{turned}{wanted} ", rank=1)
    yield from (Part("q quit"), Part("s sort", rank=2), Part("r turn", rank=5), Part("/ filter", rank=3))
    if desk.of_run:
        yield from (Part("enter open", rank=2), Part(f"d {'tasks' if desk.page == DEVICES else 'devices'}", rank=4))
    yield Part("? help")


def as_plain_text(frame: Frame, *, width: int = 100, ascii_only: bool = False) -> str:
    """Return one frame as text without any style: for a file, a pipe, a mail."""
    page = draw(frame, Desk.at_start(of_run=frame.of_run), width=width, ascii_only=ascii_only)
    lines: Sequence[Text] = page.lines
    return "\n".join(line.plain.rstrip() for line in lines).rstrip()
