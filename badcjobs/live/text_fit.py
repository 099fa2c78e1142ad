"""Fit text to a terminal of any width: show parts completely or not at all, and break lines between words.

A line is a list of parts. Widths are terminal cells; ``to_text`` converts a line for the terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from badcjobs.live.snapshot import mean_of_known
from badcjobs.report.words import UNKNOWN, clock, plain, spark

GAP = "  "
_CONTINUED = " \\\n    "  # between the lines of a wrapped command
_SHELL_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|[^\s'"])+""")
_MIN_BAR = 4
NAMES = 10  # the width of labels
_ASCII = dict(zip("–×·°…→▸↑↓━╸─▁▂▃▄▅▆▇█", "-x| ~>>^v=>-_.:-=+*#", strict=True))


class Part(NamedTuple):
    """A piece of a line; parts with a larger ``rank`` are dropped first when the line is too long."""

    text: str
    style: str = ""
    rank: int = 0


Parts = Sequence[Part]
Line = list[Part]
Lines = list[Line]


def to_text(line: Line, width: int, *, ascii_only: bool) -> Text:
    """Return a line cut to the width, without control characters: names from files must not control the terminal."""
    shown = [(plain(part.text), part.style) for part in line]
    if ascii_only:  # of the same width
        shown = [("".join(c if c.isascii() else _ASCII.get(c) or "?" * cell_len(c) for c in t), s) for t, s in shown]
    text = Text.assemble(*shown, no_wrap=True, end="")
    text.highlight_regex("─+", "dim")  # the empty part of a bar
    text.truncate(width, overflow="crop" if ascii_only else "ellipsis")
    return text


# --- values -----------------------------------------------------------------------------------------------------------


def rounded(value: float | None, unit: str = "") -> str:
    """Return a rounded number with its unit."""
    return UNKNOWN if value is None else f"{value:.0f}{unit}"


def rate(value: float | None) -> str:
    """Return a speed as a multiple of real time."""
    if value is None:
        return UNKNOWN
    if value >= 99_999.5:
        return f"{value / 1000:,.0f}k×"
    return f"{value:,.0f}×" if value >= 9.95 else f"{value:.1f}×"


def span(seconds: float | None) -> str:
    """Return a time span as 0:14:10, or as 3d 04h from 100 hours on."""
    if seconds is None:
        return UNKNOWN
    hours = round(seconds) // 3600
    return f"{hours // 24}d {hours % 24:02d}h" if hours >= 100 else clock(seconds)


def shorten(text: str, width: int) -> str:
    """Return text padded or cut to exactly this width; text that was cut ends with an ellipsis."""
    if cell_len(text) <= width:
        return set_cell_size(text, width)
    return set_cell_size(text, max(0, width - 1)) + "…"


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Column:
    """A table column; a larger ``rank`` is dropped first, ``max_width`` is used when there is room for it."""

    title: str
    width: int
    rank: int = 0
    max_width: int = 0
    right: bool = False
    cell: Callable[[Any, int], Part] = lambda line, width: Part("")  # (task or device, width) → content


def choose_columns(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that fit, as wide as possible; columns of width 0 are left out."""

    def spare(kept: Sequence[Column]) -> int:
        return width - sum(column.width for column in kept) - len(GAP) * (len(kept) - 1)

    kept = [column for column in columns if column.width > 0]
    while len(kept) > 1 and spare(kept) < 0:
        kept.remove(max(kept, key=lambda column: column.rank))
    growing = [number for number, column in enumerate(kept) if column.max_width > column.width]
    for already, number in enumerate(growing):
        column = kept[number]
        share = min(column.max_width - column.width, max(0, spare(kept) // (len(growing) - already)))
        kept[number] = replace(column, width=column.width + share)
    return kept


def table_rows(lines: Sequence[object], columns: Sequence[Column], chosen: int | None, first: int, width: int) -> Lines:
    """Return the title row and one row per line; ``first`` is the number of the first line."""
    columns = choose_columns([Column(" ", 1), *columns], width)
    rows = [
        joined([_pad(column, Part(column.title, "bold" if column.title.strip() else "")) for column in columns], GAP)
    ]
    for number, line in enumerate(lines, first):
        row = joined([_pad(column, column.cell(line, column.width)) for column in columns], GAP)
        if number == chosen:  # reversed colours would be hard to read
            row = [Part("▸", "reverse"), *(Part(part.text, "reverse") for part in row[1:])]
        rows.append(row)
    return rows


def _pad(column: Column, cell: Part) -> Part:
    room = column.width - cell_len(cell.text)
    return cell._replace(text=" " * room + cell.text if column.right and room > 0 else shorten(cell.text, column.width))


# --- lines ------------------------------------------------------------------------------------------------------------


def fit(parts: Parts, width: int, gap: str, *, keep: int = -1) -> list[Part]:
    """Return the parts that fit on one line; parts of rank ``keep`` and below are never dropped."""
    kept = list(parts)
    while kept and width_of(kept, gap) > width and (worst := max(part.rank for part in kept)) > keep:
        del kept[max(number for number, part in enumerate(kept) if part.rank == worst)]
    return kept


def flow(parts: Parts, width: int, gap: str) -> list[list[Part]]:
    """Return the parts in lines, as many on each line as fit."""
    lines: list[list[Part]] = []
    for part in parts:
        if lines and width_of([*lines[-1], part], gap) <= width:
            lines[-1].append(part)
        else:
            lines.append([part])
    return lines


def width_of(parts: Parts, gap: str) -> int:
    """Return the width of the parts on one line."""
    return sum(cell_len(part.text) for part in parts) + len(gap) * max(0, len(parts) - 1)


def joined(parts: Parts, gap: str, style: str = "") -> Line:
    """Return the parts as one line, with ``gap`` between them."""
    line: Line = []
    for part in parts:
        line += [*([Part(gap, style)] if line else []), Part(part.text, part.style or style)]
    return line


def wrap_parts(parts: Parts, gap: str, width: int, style: str = "") -> Lines:
    """Return the parts as lines, as many as needed."""
    return [joined(line, gap, style) for line in flow(parts, width, gap)]


def labelled(name: str, words: str, width: int, *, indent: int = NAMES, style: str = "dim") -> Lines:
    """Return a label and its text, wrapped to the width."""
    said = wrap(words, width - indent) or [""]
    names = [f"  {name}", *[""] * len(said)]
    return [
        [Part(first.ljust(indent), style), Part(shorten(text, width - indent).rstrip())]
        for first, text in zip(names, said, strict=False)
    ]


def styled(texts: Iterable[str], style: str = "") -> Lines:
    """Return each text as a line."""
    return [[Part(text, style)] for text in texts]


def wrap(text: str, width: int) -> list[str]:
    """Return text in lines that break between words; a word that is too long gets its own line."""
    lines = flow([Part(word) for word in text.split()], width, " ")
    return [" ".join(part.text for part in line) for line in lines]


def wrap_command(command: str, width: int) -> list[str] | None:
    """Return a command in lines that can be pasted together; None: a word of it is too long for one line."""
    if cell_len(command) <= width:
        return [command]
    words = [Part(found[0]) for found in _SHELL_WORD.finditer(command)]
    room = width - len(_CONTINUED)
    lines = flow(words, room, " ")
    if any(width_of(line, " ") > room for line in lines):
        return None
    return _CONTINUED.join(" ".join(part.text for part in line) for line in lines).split("\n")


# --- bars -------------------------------------------------------------------------------------------------------------


def bar(share: float | None, width: int, failed: float = 0.0) -> str:
    """Return a progress bar for a share from 0 to 1, of which ``failed`` is marked by signs of its own."""
    bad = min(width, max(1, round(width * failed))) if failed > 0 else 0
    halves = round(2 * width * min(1.0, max(0.0, (share or 0.0) - failed)))
    # Only a share of 1 is a full bar.
    halves = min(halves, max(0, 2 * (width - bad) - (1 if share and 0 < share < 1 else 0)))
    return ("━" * (halves // 2) + "╸" * (halves % 2) + "x" * bad).ljust(width, "─")[:width]


def bar_line(
    share: float | None,
    parts: Parts,
    width: int,
    *,
    max_width: int,
    style: str,
    text_style: str = "",
    failed: float,
) -> Line:
    """Return a progress bar, if there is room for it, and the parts after it, in the style ``text_style``."""
    parts = fit(parts, width, GAP)
    room = min(max_width, width - width_of(parts, GAP) - 1)
    shown = [Part(bar(share, room, failed), style), Part(" ")] if room >= _MIN_BAR else []
    return [*shown, *joined(parts, GAP, text_style)]


def downsample(values: Sequence[float | None], width: int) -> list[float | None]:
    """Return at most ``width`` values: means of neighbours, None where no value is known."""
    if len(values) <= width:
        return list(values)
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    return [mean_of_known(part) for part in parts]


def sparkline(values: Sequence[float | None], width: int, top: float, *, over: bool) -> str:
    """Return values from 0 to ``top`` as a chart, right-aligned; a blank is a step without a reading.

    With ``over`` (the task has ended, no values follow) the chart is left-aligned.
    """
    text = spark(downsample(values, width), top or 1).replace("·", " ")
    return text.ljust(width) if over else text.rjust(width)
