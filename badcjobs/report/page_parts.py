"""The pieces a page is made of: sections and tables. Every text that comes in is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

FOLD = 15  # longer tables show so many rows until somebody asks for more


@dataclass(frozen=True, slots=True)
class Cell:
    """What stands in a column of numbers, and the number it is sorted by; None: not known."""

    words: str
    value: float | None


Row = Sequence[str | Cell]


@dataclass(frozen=True, slots=True)
class Table:
    """A table; a column whose heading starts with '<' holds text, with '<<' long text, all others numbers."""

    name: str  # stable: the id of the table on the page
    caption: str
    headings: Sequence[str]
    rows: Sequence[Row] = field(default_factory=list)
    foot: Row = ()  # the sum, which stays at the end however the rows are sorted


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page with a heading of its own."""

    name: str  # stable: where #name leads to
    heading: str
    body: str  # HTML
    many: int | None = None  # said in the list of sections


def paragraph(text: str, kind: str = "") -> str:
    """Return a paragraph."""
    return f"<p{_class(kind)}>{escape(text)}</p>"


def table_html(table: Table) -> str:
    """Return a table; script makes its headings buttons that sort, and folds what is too long."""
    kinds = ["long" if h.startswith("<<") else "text" if h.startswith("<") else "" for h in table.headings]
    head = "".join(
        f'<th scope="col" aria-sort="none"{_class(kind)}>{escape(heading.lstrip("<"))}</th>'
        for heading, kind in zip(table.headings, kinds, strict=True)
    )
    # Without script all rows are shown: see the style sheet's part for noscript.
    lines = [
        f"<tr{' hidden' if number >= FOLD else ''}>" + "".join(map(_cell, row, kinds, _FIRST + [False] * len(kinds)))
        for number, row in enumerate(table.rows)
    ]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.caption)}">'
        f'<table id="{escape(table.name)}" data-fold="{FOLD}"><caption>{escape(table.caption)}</caption>'
        f"<thead><tr>{head}</tr></thead><tbody>\n"
        + "\n".join(lines)
        + f"</tbody>{_foot(table.foot, kinds)}</table></div>"
    )


_FIRST = [True]


def _foot(row: Row, kinds: Sequence[str]) -> str:
    cells = "".join(map(_cell, row, kinds, _FIRST + [False] * len(kinds)))
    return f"<tfoot><tr>{cells}</tfoot>" if row else ""


def _cell(cell: str | Cell, kind: str, first: bool) -> str:
    """Return one cell; the first of a row names the row. HTML does without closing tags: many rows stay small."""
    if isinstance(cell, Cell):
        value = "" if cell.value is None else f"{cell.value:.6g}"
        return f"<td data-v{'=' + value if value else ''}>{escape(cell.words, quote=False)}"
    tag = 'th scope="row"' if first else "td"
    return f"<{tag}{_class(kind)}>{escape(cell, quote=False)}"


def folded(summary: str, body: str) -> str:
    """Return a part that opens when somebody asks for it."""
    return f"<details><summary>{escape(summary)}</summary>{body}</details>"


def section_html(section: Section) -> str:
    """Return a section with its heading."""
    name = escape(section.name)
    return (
        f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{escape(section.heading)}</h2>'
        f"{section.body}</section>"
    )


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
