"""The mistakes of all sources, gathered while they are read and told at once; only the first few are kept."""

from __future__ import annotations

import shlex
from bisect import insort
from collections.abc import Sequence

from badcjobs.errors import BadInput

SHOWN = 20


class Mistakes:
    """A count, and the first mistakes in the order of sources and lines, however late they are found."""

    def __init__(self, names: Sequence[str]) -> None:
        self.count = 0
        self.missing = 0  # of them, files that are not there or cannot be used: their rows can fail alone
        self.source = 0  # which of the names is being read
        self._names = names
        self._guilty: set[int] = set()
        self._first: list[tuple[int, int, str, str]] = []
        self._fix: str | None = None

    def add(self, line: int, text: str, *, why: str = "", fix: str | None = None, missing: bool = False) -> None:
        """Note a mistake; line 0 is the source as a whole, and its text goes on after the source's name."""
        self.count += 1
        self.missing += missing
        self._guilty.add(self.source)
        insort(self._first, (self.source, line, text, why))
        del self._first[SHOWN:]
        self._fix = self._fix or fix

    def add_unseen(self, count: int) -> None:
        """Count mistakes nobody will look at one by one."""
        self.count += count

    def examples(self, most: int) -> tuple[list[str], str | None]:
        """Return the first of them, and a line to paste."""
        return [self._line(*mistake, named=True) for mistake in self._first[:most]], self._fix

    def raise_any(self) -> None:
        if self.count:
            raise self._error()

    def _error(self) -> BadInput:
        source, line, text, why = self._first[0]
        if self.count == 1 and line == 0:
            look = f"ls -l {shlex.quote(self._names[source])}"
            return BadInput(f"{self._names[source]} {text}", why=why or None, fix=self._fix or look)
        one = len(self._guilty) == 1
        who = f"{self._names[source]} has" if one else f"{len(self._guilty)} sources have"
        lines = [self._line(*mistake, named=not one) for mistake in self._first]
        if self.count > len(lines):
            lines.append(f"… and {self.count - len(lines):,} more")
        what = f"{who} {self.count:,} mistake{'s' if self.count > 1 else ''}"
        return BadInput(what, why="\n".join(lines), fix=self._fix or self._look_at_lines())

    def _line(self, source: int, line: int, text: str, why: str, *, named: bool) -> str:
        told = f"{text} ({why})" if why else text
        if line == 0:
            return f"{self._names[source]} {told}"
        return f"{self._names[source]} line {line}: {told}" if named else f"line {line}: {told}"

    def _look_at_lines(self) -> str | None:
        source = self._first[0][0]
        lines = sorted({line for where, line, *_ in self._first if where == source and line})[:5]
        if not lines:
            return None
        return f"sed -n '{';'.join(f'{line}p' for line in lines)}' {shlex.quote(self._names[source])}"


def quoted(value: str) -> str:
    """Show a value in a message: in quotes, on one line, not longer than a reader has patience for."""
    return repr(value if len(value) <= 80 else value[:79] + "…")


def shown(path: str) -> str:
    """Show a path in a message: as it is, unless it would break the line."""
    return path if path.isprintable() else repr(path)
