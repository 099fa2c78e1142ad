"""Lines of a table with columns of known width: which fit, how wide each is, and their cells as one styled text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.cells import cell_len, set_cell_size
from rich.text import Span, Text

from badcjobs.monitor.words import in_ascii, plain

_GAP = "  "


@dataclass(frozen=True, slots=True)
class Column:
    """A column; those with a larger ``rank`` go first where there is no room. ``most``: it takes more if there is."""

    title: str
    width: int
    rank: int = 0
    most: int = 0
    right: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a column; ``more`` follows at once, in another style."""

    text: str = ""
    style: str = ""
    more: str = ""
    more_style: str = ""


@dataclass(frozen=True, slots=True)
class Paper:
    """What is drawn on: how wide, and whether it shows nothing but ASCII."""

    width: int
    ascii_only: bool = False

    def text(self, words: str) -> str:
        """Return words as they can be shown here."""
        return in_ascii(words) if self.ascii_only else plain(words)


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, as wide as they can be; one that has no room is left out."""
    kept = [column for column in columns if column.width > 0]
    while len(kept) > 1 and _needed(kept) > width:
        least = max(kept, key=lambda column: column.rank)
        kept.remove(least)
    spare = width - _needed(kept)
    growing = [column for column in kept if column.most > column.width]
    wider = {}
    for number, column in enumerate(growing):
        share = min(column.most - column.width, max(0, spare // (len(growing) - number)))
        wider[column.title] = column.width + share
        spare -= share
    return [replace(column, width=wider.get(column.title, column.width)) for column in kept]


def _needed(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def compose(cells: Sequence[tuple[Column, Cell]], paper: Paper, style: str = "") -> Text:
    """Return one line of the table."""
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
    return _styled(parts, style)


def _styled(parts: Sequence[tuple[str, str]], style: str) -> Text:
    """Return texts with their styles as one line; at once, because Text.append is slow and lines are many."""
    spans, at = [], 0
    for text, its_style in parts:
        if its_style and text:
            spans.append(Span(at, at + len(text), its_style))
        at += len(text)
    return Text("".join(text for text, _ in parts), style=style, no_wrap=True, end="", spans=spans)


def shorten(text: str, width: int, paper: Paper) -> str:
    """Return text in exactly this width; where it is too long, its end is told by a sign."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + ("~" if paper.ascii_only else "…")


def tail(text: str, width: int, paper: Paper) -> str:
    """Return text in this width at most; where it is too long, its end is kept."""
    if cell_len(text) <= width:
        return text
    kept = text[-max(1, width - 1) :]  # more is too much, but for accents that take no room
    while len(kept) > 1 and cell_len(kept) > width - 1:
        kept = kept[1:]
    return ("~" if paper.ascii_only else "…") + kept


def bar(share: float | None, width: int, paper: Paper) -> tuple[str, str]:
    """Return the full and the empty part of a bar."""
    full, half, empty = ("=", ">", "-") if paper.ascii_only else ("━", "╸", "─")
    halves = round(2 * width * min(1.0, max(0.0, share or 0.0)))
    whole, odd = divmod(halves, 2)
    if share and 0 < share < 1 and whole == width:
        whole, odd = width - 1, 1  # not full before it is
    return full * whole + half * odd, empty * (width - whole - odd)
