"""Lines of plain text that fit 100 columns: wrapped, cut, in columns, and coloured where a terminal shows colours.

A column is a place on a terminal: 鳥 takes two of them, and an accent that is put on a letter none.
"""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size

from badcjobs.report.words import plain

WIDTH = 100
_SECOND = "\ue000"  # stands for the second column of a wide letter while lines are measured; no plain text has it
_COLOURS = {
    "done": "\x1b[32m", "failed": "\x1b[31m", "stopped": "\x1b[33m",
    "problem": "\x1b[1;31m", "warning": "\x1b[33m", "note": "\x1b[36m",
}  # fmt: skip


def paint(text: str, kind: str, *, colour: bool) -> str:
    """Return a text in the colour of a verdict or severity, if colours are wanted."""
    return f"{_COLOURS[kind]}{text}\x1b[0m" if colour and kind in _COLOURS else text


def table(rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return rows as aligned lines; the first ``left`` columns are texts, the others numbers."""
    widths = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  "
        + "  ".join(
            padded(cell, width) if i < left else " " * (width - cell_len(cell)) + cell
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def padded(text: str, width: int) -> str:
    """Return a text with blanks behind it, up to a number of columns."""
    return text + " " * (width - cell_len(text))


def ending(text: str, width: int) -> str:
    """Return a text, or as much of its end as there is room for."""
    return text if cell_len(text) <= width else "…" + set_cell_size(text[::-1], width - 1)[::-1]


def narrow(rows: Sequence[Sequence[str]], column: int, *, at_least: int = 8) -> list[list[str]]:
    """Shorten the texts of one column at their beginning, so that the table fits."""
    others = [max(cell_len(row[i]) for row in rows) for i in range(len(rows[0])) if i != column]
    most = max(at_least, WIDTH - 2 - sum(others) - 2 * len(others))
    return [[ending(cell, most) if i == column else cell for i, cell in enumerate(row)] for row in rows]


def wrap(line: str, *, indent: int, whole_words: bool = True) -> list[str]:
    """Return a line as several that fit; a word that is longer than a line is whole, if that is wanted."""
    measured = _measured(plain(line))
    width = WIDTH - (_SECOND in measured)  # a wide letter may be cut in its middle, and is whole again afterwards
    lines = textwrap.wrap(
        measured, width, subsequent_indent=" " * indent, break_long_words=not whole_words, break_on_hyphens=False
    )
    return [line.replace(_SECOND, "") for line in lines]


def _measured(text: str) -> str:
    """Return a plain text that has as many letters as it takes columns, or more."""
    return text if text.isascii() else "".join(c + _SECOND * (cell_len(c) - 1) for c in text)


def fit(line: str, width: int = WIDTH) -> str:
    """Return a line cut to the width."""
    line = plain(line)
    return line if cell_len(line) <= width else set_cell_size(line, width - 1) + "…"


def command_lines(command: str, indent: int = 4) -> list[str]:
    r"""Return a command in lines that a shell joins again: cut between words, with a backslash at each end."""
    lines = [" " * indent + plain(command)]
    if cell_len(lines[0]) > WIDTH:
        lines = [" " * (indent - 1)]
        for word in shlex.split(command):
            if cell_len(lines[-1]) + cell_len(shlex.quote(word)) > WIDTH - 3 and lines[-1].strip():
                lines[-1] += " \\"
                lines.append(" " * (indent + 3))
            first, *others = _folded(plain(shlex.quote(word)), WIDTH - 2 - cell_len(lines[-1]))
            lines[-1] += " " + first
            lines += others
    return lines


def _folded(word: str, room: int) -> list[str]:
    r"""Return a long list, 1,3,5,…, as lines that a shell joins again.

    The second and later lines begin at the left edge: blanks there would end the word.
    """
    if cell_len(word) <= room or "'" in word or "," not in word:
        return [word]
    lines = [""]
    for part in word.replace(",", ",\n").split("\n"):
        if lines[-1] and cell_len(lines[-1]) + cell_len(part) > (room if len(lines) == 1 else WIDTH) - 3:
            lines[-1] += "\\"
            lines.append("")
        lines[-1] += part
    return lines


def paste_lines(line: str, indent: int) -> list[str]:
    """Return a line to paste, cut only where it is a plain command; others are whole however long they are."""
    try:
        plain_command = shlex.join(shlex.split(line)) == line
    except ValueError:
        plain_command = False
    return command_lines(line, indent) if plain_command else [" " * indent + plain(line)]
