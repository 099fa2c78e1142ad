"""The mistakes of all sources, gathered while they are read and told at once; only the first few are kept."""

from __future__ import annotations

import shlex
from bisect import insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from badcjobs.errors import BadInput
from badcjobs.model import AudioHeader, Chunk

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
        """Count mistakes that are not kept one by one."""
        self.count += count

    def examples(self, most: int) -> tuple[list[str], str | None]:
        """Return the first of them, and a line to paste."""
        return [self._line(*mistake, named=True) for mistake in self._first[:most]], self._fix

    def raise_any(self) -> None:
        """Raise one BadInput for all of them; without any, do nothing."""
        if not self.count:
            return
        source, line, text, why = self._first[0]
        name = self._names[source]
        if self.count == 1 and line == 0:
            raise BadInput(f"{name} {text}", why=why or None, fix=self._fix or f"ls -l {shlex.quote(name)}")
        one = len(self._guilty) == 1
        lines = with_more([self._line(*mistake, named=not one) for mistake in self._first], self.count)
        numbers = sorted({line for where, line, *_ in self._first if where == source and line})[:5]
        see_lines = f"sed -n '{';'.join(f'{line}p' for line in numbers)}' {shlex.quote(name)}" if numbers else None
        who = f"{name} has" if one else f"{len(self._guilty)} sources have"
        what = f"{who} {self.count:,} mistake{'s' if self.count > 1 else ''}"
        raise BadInput(what, why="\n".join(lines), fix=self._fix or see_lines)

    def _line(self, source: int, line: int, text: str, why: str, *, named: bool) -> str:
        told = f"{text} ({why})" if why else text
        if line == 0:
            return f"{self._names[source]} {told}"
        return f"{self._names[source]} line {line}: {told}" if named else f"line {line}: {told}"


def quoted(value: str) -> str:
    """Show a value in a message: in quotes, on one line, not longer than a reader has patience for."""
    return repr(value if len(value) <= 80 else value[:79] + "…")


def shown(path: str) -> str:
    """Show a path in a message: as it is, unless it would break the line."""
    return path if path.isprintable() else repr(path)


# --- remarks ----------------------------------------------------------------------------------------------------------

EXAMPLES = 3
_MOST_PATHS = 200_000  # that are remembered, so that a path with two names is noticed


class Remarks:
    """Files that break off, files that are missing, files that come under two names, and what is passed over.

    Parameters
    ----------
    keeps_missing: list chunks whose audio is missing, as long as any audio is there; they fail later, and alone.
    """

    def __init__(self, *, keeps_missing: bool = False) -> None:
        self.keeps_missing = keeps_missing
        self.broken = 0
        self.broken_examples: list[str] = []
        self.missing = 0
        self._missing_examples: Sequence[str] = ()
        self._missing_fix: str | None = None
        self._twice = 0
        self._twice_examples: list[str] = []
        self._passed: dict[
            str, tuple[int, str]
        ] = {}  # hidden or linked → how many, and the first in the order of paths
        self._before = "", ""
        self._names: dict[int, int] = {}  # hashes: path → recording

    def pass_over(self, kind: Literal["hidden", "linked"], name: str) -> None:
        """Note a name in a folder that is passed over."""
        many, first = self._passed.get(kind, (0, name))
        self._passed[kind] = many + 1, min(first, name)

    def note(self, chunk: Chunk, *, several_sources: bool = False) -> None:
        """Look at the next chunk; those of a recording follow each other."""
        if (now := (chunk.audio_path, chunk.recording_id)) == self._before:
            return
        if chunk.audio_path != self._before[0]:
            self.note_broken(chunk.source_path, chunk.fingerprint.header)
        self._before = now
        if several_sources:
            path, name = hash(chunk.audio_path), hash(chunk.recording_id)
            if len(self._names) < _MOST_PATHS and self._names.setdefault(path, name) != name:
                self._twice += 1
                if self._twice <= EXAMPLES:
                    self._twice_examples.append(shown(chunk.audio_path))

    def note_broken(self, path: str, header: AudioHeader) -> None:
        """Note the header of the next file where it says more audio than there is."""
        if header.there_s is None:
            return
        self.broken += 1
        says = "" if header.duration_s is None else f"its header says {header.duration_s:g} s, "
        if self.broken <= EXAMPLES:
            self.broken_examples.append(f"{shown(path)} ({says}{header.there_s:g} s are there)")

    def forgive(self, mistakes: Mistakes) -> None:
        """Take over what is missing."""
        self.missing = mistakes.missing
        self._missing_examples, self._missing_fix = mistakes.examples(EXAMPLES)

    def notes(self) -> list[str]:
        """Return a line for what is left out because sources are meant so; the guide says it, too."""
        found = []
        for kind, one, several in (
            ("hidden", "hidden name is passed over", "hidden names are passed over"),
            ("linked", "link to a folder is not followed", "links to folders are not followed"),
        ):
            if kind in self._passed:
                many, first = self._passed[kind]
                found.append(f"{many:,} {one if many == 1 else several} (the first: {shown(first)})")
        return found

    def lines(self) -> list[str]:
        """Return a line for each kind of what will fail, or be done twice."""
        found = []
        if many := self.broken:
            what = f"{many:,} file{' breaks' if many == 1 else 's break'} off; what is there is done"
            found.append(f"{what}: {_listed(many, self.broken_examples)}")
        if many := self.missing:
            rows, they = ("row", "it") if many == 1 else ("rows", "they")
            what = f"the audio of {many:,} {rows} is missing or cannot be used; {they} will fail, all others are done"
            fix = f"; try: {self._missing_fix}" if self._missing_fix else ""
            found.append(f"{what}: {_listed(many, self._missing_examples)}{fix}")
        if many := self._twice:
            what = f"{many:,} file{' comes' if many == 1 else 's come'} from two sources under two names"
            found.append(f"{what}, and will be done twice: {_listed(many, self._twice_examples)}")
        return found


def _listed(many: int, examples: Sequence[str]) -> str:
    return ", ".join(examples) + (f" and {many - len(examples):,} more" if many > len(examples) else "")


# --- lines of text ----------------------------------------------------------------------------------------------------


def read_lines(path: Path, mistakes: Mistakes) -> Iterator[str]:
    """Yield every line with its end; note what is not UTF-8 text, and yield it repaired so that reading goes on."""
    # With "strict" the first wrong byte would end the reading, and the later mistakes would go untold.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if not line.isascii() and not is_text(line):
                mistakes.add(number, "is not UTF-8", fix=copy_command(path, "iconv -f latin1 -t utf-8"))
                line = line.encode(errors="surrogateescape").decode(errors="replace")
            if "\0" in line:
                mistakes.add(number, "has a NUL byte", fix=copy_command(path, "tr -d '\\000'", "< "))
                line = line.replace("\0", "")
            yield line


def with_more(examples: Sequence[str], count: int) -> list[str]:
    """Return examples and, where they are not all, a line that says how many more there are."""
    return [*examples, *([f"… and {count - len(examples):,} more"] if count > len(examples) else [])]


def is_text(line: str) -> bool:
    """Say whether UTF-8 can hold it: what was no text is kept as surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def copy_command(path: Path, command: str, redirect: str = "") -> str:
    """Return the line that writes a repaired copy of a file."""
    copy = path.with_suffix(f".utf8{path.suffix}")
    return f"{command} {redirect}{shlex.quote(str(path))} > {shlex.quote(str(copy))}"
