"""Fit text to a terminal of any width: choose columns, break lines between words, draw bars and charts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.snapshot import mean_of_known
from badcjobs.words import plain, spark, to_ascii

GAP = "  "
DOT = " · "
_CONTINUED = " \\\n    "  # between the lines of a wrapped command
_SHELL_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|[^\s'"])+""")
_MIN_BAR = 8

Lines = list[Text]


def finished(line: Text, width: int, *, ascii_only: bool) -> Text:
    """Return a line cut to the width, without control characters: names from files must not control the terminal.

    A line to paste, whose overflow is "ignore", is not cut.
    """
    line.plain = plain(line.plain)
    overflow = line.overflow or "ellipsis"
    if ascii_only:
        line.plain = "".join(sign if sign.isascii() else "?" * cell_len(sign) for sign in to_ascii(line.plain))
        overflow = line.overflow or "crop"
    line.highlight_regex("─+", "dim")  # the empty part of a bar
    line.truncate(width, overflow=overflow)
    return line


# --- tables -----------------------------------------------------------------------------------------------------------


class Column(NamedTuple):
    """A table column; a larger ``rank`` is dropped first, ``max_width`` is used when there is room for it."""

    title: str
    width: int
    cells: Callable[[int], Sequence[Text]]  # the cells of all rows, for a width
    rank: int = 0
    max_width: int = 0
    right: bool = False

    def lines(self) -> Lines:
        """Return the title and the cells, all of the same width."""
        column = [Text(self.title, "bold"), *self.cells(self.width)]
        for cell in column:
            cell.truncate(self.width, overflow="ellipsis")
            cell.align("right" if self.right else "left", self.width)
        return column


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, as wide as possible."""
    kept = list(columns)
    while len(kept) > 1 and _spare(kept, width) < 0:
        kept.remove(max(kept, key=lambda column: column.rank))
    for number, column in enumerate(kept):
        wider = min(column.max_width, column.width + max(0, _spare(kept, width)))
        if wider > column.width:
            kept[number] = column._replace(width=wider)
    return kept


def _spare(columns: Sequence[Column], width: int) -> int:
    return width - sum(column.width for column in columns) - len(GAP) * (len(columns) - 1)


def table_lines(columns: Sequence[Column], width: int, chosen: int | None = None) -> Lines:
    """Return the title row and the rows; ``chosen`` is the number of the marked row."""
    cells = [column.lines() for column in choose_columns(columns, width - 1 - len(GAP))]
    lines = []
    for number, row in enumerate(zip(*cells, strict=True), -1):
        line = Text(GAP).join([Text(" "), *row])
        if number == chosen:
            line = Text(f"▸{line.plain[1:]}", "reverse")  # colours would be hard to read
        lines.append(line)
    return lines


# --- lines ------------------------------------------------------------------------------------------------------------


def flow(parts: Iterable[Text], width: int, gap: str) -> Lines:
    """Return the parts in lines, as many on each line as fit."""
    lines: Lines = []
    for part in parts:
        if lines and lines[-1].cell_len + len(gap) + part.cell_len <= width:
            lines[-1].append(gap).append_text(part)
        else:
            lines.append(Text.assemble(part))
    return lines


def wrap(text: str, width: int, style: str = "") -> Lines:
    """Return text in lines that break between words; a word that is too long gets its own line."""
    lines = flow(map(Text, text.split()), width, " ")
    return [Text(line.plain, style) for line in lines]


def labelled(name: str, text: str, width: int, *, indent: int, style: str = "dim") -> Lines:
    """Return a label and its text, wrapped to the width."""
    lines = []
    label = f"  {name}"
    for part in wrap(text, width - indent) or [Text()]:
        lines.append(Text.assemble((label.ljust(indent), style), part))
        label = ""
    return lines


def wrap_command(command: str, width: int) -> list[str] | None:
    """Return a command in lines that can be pasted together; None: a word of it is too long for one line."""
    if cell_len(command) <= width:
        return [command]
    room = width - len(_CONTINUED)
    lines = flow(map(Text, _SHELL_WORD.findall(command)), room, " ")
    if any(line.cell_len > room for line in lines):
        return None
    return _CONTINUED.join(line.plain for line in lines).split("\n")


# --- bars -------------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int, failed: float = 0.0) -> str:
    """Return a progress bar for a share from 0 to 1, of which ``failed`` is marked by signs of its own."""
    settled = int(width * min(1.0, share or 0.0))  # only a share of 1 is a full bar
    marked = min(width, max(failed > 0, round(width * failed)))
    filled = max(0, settled - marked)
    return "━" * filled + "x" * marked + "─" * (width - filled - marked)


def bar_line(share: float | None, facts: Sequence[str], width: int, *, style: str, failed: float) -> Text:
    """Return a progress bar, if there is room for it, and facts after it."""
    text = GAP.join(facts)
    room = min(_MAX_BAR, width - cell_len(text) - 1)
    if room < _MIN_BAR:
        return Text(text, "bold")
    return Text.assemble((bar(share, room, failed), style), " ", (text, "bold"))


_MAX_BAR = 46


def downsample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` values: means of neighbours, None where no value is known."""
    if len(values) <= width:
        return list(values)
    edges = [number * len(values) // width for number in range(width + 1)]
    return [mean_of_known(values[edges[number] : edges[number + 1]]) for number in range(width)]


def sparkline(values: Sequence[float | None], width: int, *, over: bool) -> str:
    """Return percentages as a chart, right-aligned; a blank is a step without a reading.

    With ``over`` (the task has ended, no values follow) the chart is left-aligned.
    """
    text = spark(downsample(values, width), 100).replace("·", " ")
    if over:
        return text.ljust(width)
    return text.rjust(width)
