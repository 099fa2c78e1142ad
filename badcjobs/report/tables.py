"""A table is one value: title, columns, rows. It is rendered as aligned text, as Markdown and as HTML.

Widths are in terminal columns: 鳥 takes two, a combining accent none. All text from files is escaped here: control
characters in text, special characters in Markdown and HTML.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size

from badcjobs.words import escape, plain

WIDTH = 100  # of text, where there is no terminal
_LEAST_TEXT = 8  # columns of a text that is shortened
FOLD = 15  # rows of a longer table on a page that are shown at first
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


class Cell(NamedTuple):
    """A cell in a column of numbers, and the number to sort by; None: not known."""

    words: str
    value: float | None


Row = Sequence[str | Cell]
Column = tuple[str, str]  # the heading, and the kind of the cells: text, long (text), or numbers (empty)


def columns(*marked: str) -> tuple[Column, ...]:
    """Return columns by their headings; '<' before a heading marks text, '<<' long text."""
    kinds = ("", "text", "long")
    return tuple((heading.lstrip("<"), kinds[len(heading) - len(heading.lstrip("<"))]) for heading in marked)


class Table(NamedTuple):
    """A title, columns and rows."""

    name: str  # stable: the id of the table on the page
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    of: int = 0  # how many rows there are, if these are only the first

    @property
    def headings(self) -> list[str]:
        """The headings of its columns."""
        return [heading for heading, _ in self.columns]

    def cells(self) -> list[list[str]]:
        """Return all cells as text: headings and rows."""
        rows = [[cell if isinstance(cell, str) else cell.words for cell in row] for row in self.rows]
        return [self.headings, *rows]


def table_text(table: Table, width: int | None = None) -> list[str]:
    """Return a table as aligned lines; with ``width``, long text is shortened to fit in it."""
    rows = table.cells()
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
    if width is not None:
        _shrink(widths, table, width)
    lines = []
    for row in rows:
        cells = []
        for text, cell_width, (_, kind) in zip(row, widths, table.columns, strict=True):
            shown = beginning(text, cell_width)
            blank = " " * (cell_width - cell_len(shown))
            cells.append(shown + blank if kind else blank + shown)  # numbers are aligned to the right
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def _shrink(widths: list[int], table: Table, width: int) -> None:
    """Make the widest columns of text narrower until a line fits."""
    texts = [place for place, (_, kind) in enumerate(table.columns) if kind]
    while texts and sum(widths) + 2 * len(widths) > width:
        widest = max(texts, key=lambda place: widths[place])
        if widths[widest] <= _LEAST_TEXT:
            return
        widths[widest] -= 1


def beginning(text: str, width: int) -> str:
    """Return a text, or as much of its beginning as fits."""
    if cell_len(text) <= width:
        return text
    return set_cell_size(text, width - 1) + "…"


def ending(text: str, width: int) -> str:
    """Return a text, or as much of its end as fits."""
    if cell_len(text) <= width:
        return text
    return "…" + set_cell_size(text[::-1], width - 1)[::-1]


def table_markdown(table: Table) -> str:
    """Return a table as Markdown."""
    head, *others = [[escaped(cell) for cell in row] for row in table.cells()]
    kinds = [":---" if kind else "---:" for _, kind in table.columns]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, kinds, *others))


def escaped(text: str) -> str:
    """Escape text from a file for Markdown, in one line."""
    return _SPECIAL.sub(r"\\\1", plain(" ".join(text.split())))


def table_html(table: Table) -> str:
    """Return a table as HTML; page.js makes it sortable and folds long ones."""
    classes = [f' class="{kind}"' if kind else "" for _, kind in table.columns]
    heads = zip(classes, table.headings, strict=True)
    head = "".join(f'<th scope="col" aria-sort="none"{kind}>{escape(heading)}</th>' for kind, heading in heads)
    # Without JavaScript all rows are shown: see noscript in page.py.
    lines = [
        f"<tr{' hidden' if number >= FOLD else ''}>{_cells(row, classes)}" for number, row in enumerate(table.rows)
    ]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f'<table id="{escape(table.name)}" data-fold="{FOLD}"><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n" + "\n".join(lines) + "</tbody></table></div>"
    )


def _cells(row: Row, classes: Sequence[str]) -> str:
    """Return the cells of a row; the first is its header. Optional closing tags are omitted to keep the page small."""
    cells = []
    for place, (cell, kind) in enumerate(zip(row, classes, strict=True)):
        if isinstance(cell, Cell):
            value = "" if cell.value is None else f"={cell.value:.6g}"
            cells.append(f"<td data-v{value}>{escape(cell.words, quote=False)}")
        else:
            tag = "td" if place else 'th scope="row"'
            cells.append(f"<{tag}{kind}>{escape(cell, quote=False)}")
    return "".join(cells)
