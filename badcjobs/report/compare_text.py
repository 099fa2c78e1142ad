"""Two jobs side by side as plain text that fits 100 columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len

from badcjobs.report.compare import Comparison, about_rows, news_of
from badcjobs.report.text_lines import WIDTH, command_lines, ending, fit, padded, table, wrap
from badcjobs.report.words import UNKNOWN

_LONGEST_CELL, _LEAST_NAME = 30, 20
_BETWEEN = 8  # blanks between four columns, and before the first


def comparison_text(comparison: Comparison) -> str:
    """Return the comparison as tables with one column for each job."""
    titles = (comparison.this["title"], comparison.other["title"])
    about = [(name, _short(this), _short(other), "") for name, this, other in about_rows(comparison)]
    figures = [(f.name, f.this_words, f.other_words, f.change) for f in comparison.figures]
    room = _room([("", *map(_short, titles), ""), *about, *figures])
    head = [ending(title, room) for title in titles]
    lines = []
    if head[0] == head[1]:  # so long, and their ends are the same
        lines += [*wrap(f"  this is {titles[0]}, other is {titles[1]}", indent=4), ""]
        head = ["this", "other"]
    about = [(name, ending(this, room), ending(other, room), "") for name, this, other, _ in about]
    lines += _lines([("", *head, ""), *about, *figures])
    if comparison.states:
        shares = [(f.name, f.this_words, f.other_words, f.change) for f in comparison.states]
        lines += ["", *_lines([("share of the GPU time", *head, ""), *shares])]
    lines += ["", *_settings(comparison, head)]
    top = [*map(fit, wrap(comparison.conclusion, indent=2)), *_news(comparison), ""]
    return "\n".join([*top, *map(fit, lines)]).rstrip()


def _news(comparison: Comparison) -> list[str]:
    lines = []
    for words, command in news_of(comparison):
        lines += ["", *wrap(f"  {words}", indent=2), *([] if command is None else command_lines(command))]
    return lines


def _room(rows: Sequence[Sequence[str]]) -> int:
    """Return how long a name may be, so that what became of each figure stands beside it whole."""
    names, this, other, changes = (max(cell_len(row[i]) for row in rows) for i in range(4))
    room = WIDTH - _BETWEEN - names - changes
    return min(_LONGEST_CELL, max(_LEAST_NAME, room // 2, room - min(this, other)))


def _settings(comparison: Comparison, head: list[str]) -> list[str]:
    if not comparison.settings:
        return [f"  {no_difference(comparison)}"]
    rows = [(key, said(pair["this"]), said(pair["other"]), "") for key, pair in comparison.settings.items()]
    return _lines([("settings that differ", *head, ""), *(tuple(map(_short, row)) for row in rows)])


def no_difference(comparison: Comparison) -> str:
    """Return what to say where no difference of settings was found."""
    return "no setting differs" if comparison.settings_known else "the settings of one of them are not known"


def said(value: Any) -> str:
    """Return a setting as people write it."""
    return UNKNOWN if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _lines(rows: list[tuple[str, ...]]) -> list[str]:
    """Return a table whose last column is words again."""
    numbers = table([row[:3] for row in rows], left=1)
    width = max(map(cell_len, numbers))
    return [f"{padded(line, width)}  {row[3]}".rstrip() for line, row in zip(numbers, rows, strict=True)]


def _short(text: str) -> str:
    return ending(text, _LONGEST_CELL)
