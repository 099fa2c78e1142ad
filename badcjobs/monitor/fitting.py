"""Texts for a screen of any width: parts that are shown whole or not at all, lines that break between words."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.text import Text

from badcjobs.monitor.columns import Paper

_CONTINUED = " \\"


@dataclass(frozen=True, slots=True)
class Part:
    """Something that is said whole or not at all; those with a larger ``rank`` go first where there is no room."""

    text: str
    style: str = ""
    rank: int = 0


def fit(parts: Sequence[Part], width: int, gap: str, *, keep: int = -1) -> list[Part]:
    """Return the parts that fit on one line; those of rank ``keep`` and below stay in any case."""
    kept = list(parts)
    while kept and width_of(kept, gap) > width and max(part.rank for part in kept) > keep:
        worst = max(part.rank for part in kept)
        kept.reverse()
        kept.remove(next(part for part in kept if part.rank == worst))  # of equals the last one
        kept.reverse()
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
