"""Reads words of a command line as sbatch does: long options that may be cut short, and short ones that may be joined.

Which options there are is ``local_options.py``'s knowledge. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.scheduler.local_options import ALIASES, FLAGS, OPTIONAL, QUESTIONS, SHORT, VALUES


def read_options(words: Sequence[str], mistakes: list[str]) -> dict[str, str]:
    """Return options of sbatch under their long names, as getopt_long reads them; the last of a name counts.

    A flag has an empty value. Long options may be cut short as long as it is clear which one is meant. What sbatch
    would refuse is added to ``mistakes``, a sentence each.
    """
    given: dict[str, str] = {}
    left = list(words)
    while left:
        word = left.pop(0)
        try:
            name, value = _read_long(word) if word.startswith("--") else _read_short(word, left)
            if name in VALUES and value is None and not left:
                raise ValueError(f"{word} needs a value")
            if name in VALUES and value is None:
                value = left.pop(0)
            given[name] = value or ""
        except ValueError as error:
            mistakes.append(str(error))
    return given


def _read_long(word: str) -> tuple[str, str | None]:
    start, equals, value = word[2:].partition("=")
    name = _whole_name(start, word)
    if equals and name in FLAGS:
        raise ValueError(f"--{name} takes no value: {word}")
    return name, value if equals else None


def _whole_name(start: str, word: str) -> str:
    """Return the option that begins like this; raises ValueError where there is none, or more than one."""
    names = VALUES | FLAGS | OPTIONAL | QUESTIONS | ALIASES.keys()
    fit = {start} if start in names else {name for name in names if start and name.startswith(start)}
    meant = {ALIASES.get(name, name) for name in fit}
    if len(meant) > 1:
        raise ValueError(f"{word} may be any of {', '.join(f'--{name}' for name in sorted(fit))}")
    if not meant:
        raise ValueError(f"sbatch knows no option {word}")
    if meant & QUESTIONS:
        raise ValueError(f"with {word} sbatch would run nothing")
    return meant.pop()


def _read_short(word: str, left: list[str]) -> tuple[str, str | None]:
    name = SHORT.get(word[1:2]) if word.startswith("-") else None
    if name is None:
        raise ValueError(f"sbatch knows no option {word}")
    if name in FLAGS and word[2:]:
        left.insert(0, f"-{word[2:]}")  # flags may stand together: -QH
        return name, None
    return name, word[2:] or None
