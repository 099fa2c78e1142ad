"""Fit text to a terminal of any width: show parts completely or not at all, and break lines between words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from rich.cells import cell_len
from rich.text import Text

from badcjobs.live.snapshot import mean_of_known
from badcjobs.words import plain, spark, to_ascii

GAP = "  "
_CONTINUED = " \\\n    "  # between the lines of a wrapped command
_SHELL_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|[^\s'"])+""")
_MIN_BAR = 4


class Part(NamedTuple):
    """A piece of a line; parts with a larger ``rank`` are dropped first when the line is too long."""

    text: str
    style: str = ""
    rank: int = 0


Parts = Sequence[Part]
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
    cells: Callable[[int], Sequence[Part]]  # the cells of all rows, for a width
    rank: int = 0
    max_width: int = 0
    right: bool = False

    def lines(self) -> list[Text]:
        """Return the title and the cells, all of the same width."""
        column = [Text(self.title, "bold" if self.title else "")]
        column += [Text(cell.text, cell.style) for cell in self.cells(self.width)]
        for cell in column:
            cell.truncate(self.width, overflow="ellipsis")
            cell.align("right" if self.right else "left", self.width)
        return column


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, as wide as possible; columns of width 0 are left out."""
    kept = [column for column in columns if column.width > 0]
    while len(kept) > 1 and _spare(kept, width) < 0:
        kept.remove(max(kept, key=lambda column: column.rank))

    growing = [number for number, column in enumerate(kept) if column.max_width > column.width]
    for already, number in enumerate(growing):
        column = kept[number]
        share = max(0, _spare(kept, width) // (len(growing) - already))
        kept[number] = column._replace(width=min(column.max_width, column.width + share))
    return kept


def _spare(columns: Sequence[Column], width: int) -> int:
    return width - sum(column.width for column in columns) - len(GAP) * (len(columns) - 1)


def table_lines(columns: Sequence[Column], width: int, chosen: int | None) -> Lines:
    """Return the title row and the rows; ``chosen`` is the number of the marked row."""
    cells = [column.lines() for column in choose_columns(columns, width - 1 - len(GAP))]
    lines = []
    for number, row in enumerate(zip(*cells, strict=True), -1):
        line = Text(GAP).join([Text(" "), *row])
        if number == chosen:
            line = Text(GAP.join(["▸", *(cell.plain for cell in row)]), "reverse")  # colours would be hard to read
        lines.append(line)
    return lines


# --- lines ------------------------------------------------------------------------------------------------------------


def fit(parts: Parts, width: int, gap: str = GAP, *, keep: int = -1) -> list[Part]:
    """Return the parts that fit on one line; parts of rank ``keep`` and below are never dropped."""
    kept = list(parts)
    while kept and width_of(kept, gap) > width:
        worst = max(part.rank for part in kept)
        if worst <= keep:
            break
        last = max(number for number, part in enumerate(kept) if part.rank == worst)
        del kept[last]
    return kept


def width_of(parts: Parts, gap: str = GAP) -> int:
    """Return the width of the parts on one line."""
    return sum(cell_len(part.text) for part in parts) + len(gap) * max(0, len(parts) - 1)


def joined(parts: Parts, gap: str = GAP) -> Text:
    """Return the parts as one line, with ``gap`` between them."""
    return Text(gap).join(Text(part.text, part.style) for part in parts)


def flow(parts: Parts, width: int, gap: str) -> list[list[Part]]:
    """Return the parts in lines, as many on each line as fit."""
    lines: list[list[Part]] = []
    for part in parts:
        if lines and width_of([*lines[-1], part], gap) <= width:
            lines[-1].append(part)
        else:
            lines.append([part])
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Return text in lines that break between words; a word that is too long gets its own line."""
    return _fold(text.split(), width)


def labelled(name: str, text: str, width: int, *, indent: int, style: str = "dim") -> Lines:
    """Return a label and its text, wrapped to the width."""
    label = f"  {name}"
    lines = []
    for part in wrap(text, width - indent) or [""]:
        lines.append(Text.assemble((label.ljust(indent), style), part))
        label = ""
    return lines


def wrap_command(command: str, width: int) -> list[str] | None:
    """Return a command in lines that can be pasted together; None: a word of it is too long for one line."""
    if cell_len(command) <= width:
        return [command]
    room = width - len(_CONTINUED)
    lines = _fold(_SHELL_WORD.findall(command), room)
    if any(cell_len(line) > room for line in lines):
        return None
    return _CONTINUED.join(lines).split("\n")


def _fold(words: Iterable[str], width: int) -> list[str]:
    lines = flow([Part(word) for word in words], width, " ")
    return [" ".join(part.text for part in line) for line in lines]


# --- bars -------------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int, failed: float = 0.0) -> str:
    """Return a progress bar for a share from 0 to 1, of which ``failed`` is marked by signs of its own."""
    share = share or 0.0
    marked = 0
    if failed > 0:
        marked = min(width, max(1, round(width * failed)))
    room = 2 * (width - marked)
    if 0 < share < 1:
        room = max(0, room - 1)  # only a share of 1 is a full bar
    halves = round(2 * width * min(1.0, max(0.0, share - failed)))
    halves = min(halves, room)
    filled = "━" * (halves // 2) + "╸" * (halves % 2) + "x" * marked
    return filled.ljust(width, "─")[:width]


def bar_line(share: float | None, parts: Parts, width: int, *, max_width: int, style: str, failed: float) -> Text:
    """Return a progress bar, if there is room for it, and the parts after it."""
    text = joined(fit(parts, width))
    room = min(max_width, width - text.cell_len - 1)
    if room < _MIN_BAR:
        return text
    return Text.assemble((bar(share, room, failed), style), " ", text)


def downsample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` values: means of neighbours, None where no value is known."""
    if len(values) <= width:
        return list(values)
    edges = [number * len(values) // width for number in range(width + 1)]
    return [mean_of_known(values[edges[number] : edges[number + 1]]) for number in range(width)]


def sparkline(values: Sequence[float | None], width: int, top: float, *, over: bool) -> str:
    """Return values from 0 to ``top`` as a chart, right-aligned; a blank is a step without a reading.

    With ``over`` (the task has ended, no values follow) the chart is left-aligned.
    """
    text = spark(downsample(values, width), top or 1).replace("·", " ")
    return text.ljust(width) if over else text.rjust(width)
