"""Texts for a screen of any width: parts that are shown whole or not at all, lines that break between words."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.text import Span, Text

from badcjobs.live.snapshot import mean_of_known

UNKNOWN = "–"
_GAP = "  "
_CONTINUED = " \\"
_SHORTEST_BAR = 4
_BARS, _ASCII_BARS = "▁▂▃▄▅▆▇█", "_.:-=+*#"
_ASCII = str.maketrans({"–": "-", "×": "x", "·": "|", "°": "", "…": "~", "→": ">", "▸": ">", "↑": "^", "↓": "v"})


# --- values -----------------------------------------------------------------------------------------------------------


def whole(value: float | None, unit: str = "") -> str:
    """Return a whole number with its unit."""
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def rate(value: float | None) -> str:
    """Return how many times faster than real time."""
    if value is None:
        return UNKNOWN
    if value >= 99_999.5:
        return f"{value / 1000:,.0f}k×"
    return f"{value:,.0f}×" if value >= 9.95 else f"{value:.1f}×"


def span(seconds: float | None) -> str:
    """Return a time span: 0:14:10, or 3d 04h where that is too long."""
    if seconds is None:
        return UNKNOWN
    left = round(seconds)
    if left >= 100 * 3600:
        return f"{left // 86400}d {left // 3600 % 24:02d}h"
    return f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"


def hours(seconds: float) -> str:
    """Return hours of audio."""
    value = seconds / 3600
    if 0 < value < 1:
        return f"{60 * value:.1f} min"
    return f"{value:,.0f} h" if value >= 100 else f"{value:.1f} h"


def plain(text: str) -> str:
    """Return text without control characters: a name from a file must not steer somebody's terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def in_ascii(text: str) -> str:
    """Return text for a terminal that shows nothing but ASCII."""
    return plain(text).translate(_ASCII).encode("ascii", "replace").decode()


@dataclass(frozen=True, slots=True)
class Paper:
    """What is drawn on: how wide, and whether it shows nothing but ASCII."""

    width: int
    ascii_only: bool = False

    def text(self, words: str) -> str:
        """Return words as they can be shown here."""
        return in_ascii(words) if self.ascii_only else plain(words)

    @property
    def cut(self) -> str:
        """The sign that a text was cut."""
        return "~" if self.ascii_only else "…"


def shorten(text: str, width: int, paper: Paper) -> str:
    """Return text in exactly this width; where it is too long, a sign says so."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + paper.cut


def tail(text: str, width: int, paper: Paper) -> str:
    """Return text in this width at most; where it is too long, its end is kept."""
    if cell_len(text) <= width:
        return text
    kept = text[-max(1, width - 1) :]  # more is too much, but for accents that take no room
    while len(kept) > 1 and cell_len(kept) > width - 1:
        kept = kept[1:]
    return paper.cut + kept


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a column; ``more`` follows at once, in another style."""

    text: str = ""
    style: str = ""
    more: str = ""
    more_style: str = ""


def _empty(_line: object, _width: int) -> Cell:
    return Cell()


@dataclass(frozen=True, slots=True)
class Column:
    """A column; those with a larger ``rank`` go first where there is no room. ``most``: it takes more if there is."""

    title: str
    width: int
    rank: int = 0
    most: int = 0
    right: bool = False
    cell: Callable[[Any, int], Cell] = _empty  # of a task or device, in the width that the column has in the end


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, as wide as they can be; one that has no room is left out."""
    kept = [column for column in columns if column.width > 0]
    while len(kept) > 1 and _needed(kept) > width:
        kept.remove(max(kept, key=lambda column: column.rank))
    spare = width - _needed(kept)
    growing = sum(column.most > column.width for column in kept)
    chosen = []
    for column in kept:
        if column.most > column.width:
            share = min(column.most - column.width, max(0, spare // growing))
            column, growing, spare = replace(column, width=column.width + share), growing - 1, spare - share
        chosen.append(column)
    return chosen


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def table_rows(
    lines: Sequence[object], columns: Sequence[Column], chosen: int | None, first: int, paper: Paper
) -> list[Text]:
    """Return the title and one row per line; ``first`` is the number of the first one."""
    columns = choose_columns(columns, paper.width)
    title = [(column, Cell(column.title, "bold" if column.title.strip() else "")) for column in columns]
    rows = [_compose(title, paper)]
    for number, line in enumerate(lines, first):
        cells = [(column, column.cell(line, column.width)) for column in columns]
        if number == chosen:  # colours turned around would be blots
            cells = [(c, Cell(cell.text, "", cell.more) if c.title.strip() else Cell("▸")) for c, cell in cells]
        rows.append(_compose(cells, paper, "reverse" if number == chosen else ""))
    return rows


def _compose(cells: Sequence[tuple[Column, Cell]], paper: Paper, style: str = "") -> Text:
    """Return one row; put together at once, because Text.append is slow and rows are many."""
    parts: list[tuple[str, str]] = []
    for number, (column, cell) in enumerate(cells):
        if number:
            parts.append((_GAP, ""))
        text, more = paper.text(cell.text), paper.text(cell.more)
        room = column.width - cell_len(text)
        if more:
            parts += [(text, cell.style), (set_cell_size(more, max(0, room)), cell.more_style)]
        elif column.right and room > 0:
            parts.append((" " * room + text, cell.style))
        else:
            parts.append((shorten(text, column.width, paper), cell.style))
    spans, at = [], 0
    for text, its_style in parts:
        if its_style and text:
            spans.append(Span(at, at + len(text), its_style))
        at += len(text)
    return Text("".join(text for text, _ in parts), style=style, no_wrap=True, end="", spans=spans)


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is said whole or not at all; those with a larger ``rank`` go first where there is no room."""

    text: str
    style: str = ""
    rank: int = 0


def fit(parts: Sequence[Part], width: int, gap: str, *, keep: int = -1) -> list[Part]:
    """Return the parts that fit on one line; those of rank ``keep`` and below stay in any case."""
    kept = list(parts)
    while kept and width_of(kept, gap) > width and (worst := max(part.rank for part in kept)) > keep:
        del kept[max(number for number, part in enumerate(kept) if part.rank == worst)]
    return kept


def flow(parts: Sequence[Part], width: int, gap: str) -> list[list[Part]]:
    """Return the parts line by line, as many on each as fit."""
    lines: list[list[Part]] = []
    for part in parts:
        if lines and width_of([*lines[-1], part], gap) <= width:
            lines[-1].append(part)
        else:
            lines.append([part])
    return lines


def width_of(parts: Sequence[Part], gap: str) -> int:
    """Return how wide the parts are on one line."""
    return sum(cell_len(part.text) for part in parts) + len(gap) * max(0, len(parts) - 1)


def joined(parts: Sequence[Part], gap: str, paper: Paper, style: str = "") -> Text:
    """Return the parts as one line."""
    line = Text(end="")
    for number, part in enumerate(parts):
        line.append(paper.text(gap) if number else "", style).append(paper.text(part.text), part.style or style)
    return line


def flowing(parts: Sequence[Part], gap: str, paper: Paper, style: str = "") -> list[Text]:
    """Return the parts on as many lines as they need."""
    return [joined(line, gap, paper, style) for line in flow(parts, paper.width, gap)]


def described(name: str, words: str, indent: int, paper: Paper, style: str) -> list[Text]:
    """Return a name and what belongs to it, on as many lines as that takes."""
    lines = []
    for number, said in enumerate(wrap(paper.text(words), paper.width - indent) or [""]):
        first = f"  {name}" if number == 0 else ""
        text = shorten(said, paper.width - indent, paper).rstrip()
        lines.append(Text(end="").append(first.ljust(indent), style).append(text))
    return lines


def wrap(text: str, width: int) -> list[str]:
    """Return text in lines that break between words; a word that is too long has its line to itself."""
    lines: list[str] = []
    for word in text.split():
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def wrap_command(command: str, width: int) -> list[str] | None:
    """Return a command in lines that can be pasted together; None: one of its words is too long for that."""
    try:
        words = [shlex.quote(word) if word != "…" else word for word in shlex.split(command)]
    except ValueError:
        words = [command]
    lines: list[str] = []
    for word in words:
        if lines and cell_len(lines[-1]) + 1 + cell_len(word) + len(_CONTINUED) <= width:
            lines[-1] += f" {word}"
        else:
            lines.append(f"    {word}" if lines else word)
    if any(cell_len(line) + len(_CONTINUED) > width for line in lines):
        return None
    return [line + _CONTINUED for line in lines[:-1]] + lines[-1:]


# --- bars -------------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int, paper: Paper) -> tuple[str, str]:
    """Return the full and the empty part of a bar."""
    full, half, empty = ("=", ">", "-") if paper.ascii_only else ("━", "╸", "─")
    halves = round(2 * width * min(1.0, max(0.0, share or 0.0)))
    if share and 0 < share < 1:
        halves = min(halves, 2 * width - 1)  # not full before it is
    return full * (halves // 2) + half * (halves % 2), empty * (width - halves // 2 - halves % 2)


def bar_line(
    share: float | None, parts: Sequence[Part], paper: Paper, *, most: int, style: str, words: str = ""
) -> Text:
    """Return a bar, where there is room for one, and the parts that say how far it is, in the style ``words``."""
    parts, line = fit(parts, paper.width, _GAP), Text(end="")
    room = min(most, paper.width - width_of(parts, _GAP) - 1)
    if room >= _SHORTEST_BAR:
        full, empty = bar(share, room, paper)
        line.append(full, style).append(empty, "dim").append(" ")
    return line.append_text(joined(parts, _GAP, paper, words))


def thin(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` values: means of neighbours, None where none of them is known."""
    if len(values) <= width:
        return list(values)
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return [mean_of_known(part) for part in parts]


def sparkline(
    values: Sequence[float | None], width: int, top: float, *, ascii_only: bool = False, over: bool = False
) -> str:
    """Return values between 0 and ``top`` as bars, the newest at the right; a blank is a step without a reading.

    Those of something that is ``over`` begin at the left: nothing comes after them.
    """
    bars = _ASCII_BARS if ascii_only else _BARS
    steps = [None if v is None else int(v / top * len(bars)) if top > 0 else 0 for v in thin(values, width)]
    text = "".join(" " if step is None else bars[min(len(bars) - 1, max(0, step))] for step in steps)
    return text.ljust(width) if over else text.rjust(width)
