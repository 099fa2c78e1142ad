"""The mistakes of all sources, gathered while they are read and told at once; only the first few are kept."""

from __future__ import annotations

import shlex
from bisect import insort
from collections.abc import Iterator, Sequence
from pathlib import Path

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


# --- remarks ----------------------------------------------------------------------------------------------------------

EXAMPLES = 3
_MOST_PATHS = 200_000  # that are remembered, so that a path with two names is noticed


class Passed:
    """Names in folders that are passed over."""

    def __init__(self) -> None:
        self.many = 0
        self.first = ""  # in the order of paths; folders are listed in any

    def add(self, name: str) -> None:
        self.first = min(self.first, name) if self.many else name
        self.many += 1


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
        self.missing_examples: Sequence[str] = ()
        self.missing_fix: str | None = None
        self.twice = 0
        self.twice_examples: list[str] = []
        self.hidden = Passed()
        self.linked = Passed()
        self._before = "", ""
        self._names: dict[int, int] = {}  # hashes: path → recording

    def note(self, chunk: Chunk, *, several_sources: bool = False) -> None:
        """Look at the next chunk; those of a recording follow each other."""
        if (now := (chunk.audio_path, chunk.recording_id)) == self._before:
            return
        if chunk.audio_path != self._before[0]:
            self.note_broken(chunk.source_path, chunk.fingerprint.header)
        self._before = now
        if several_sources:
            self._note_name(chunk)

    def note_broken(self, path: str, header: AudioHeader) -> None:
        """Note the header of the next file where it says more audio than there is."""
        if header.there_s is None:
            return
        self.broken += 1
        says = "" if header.duration_s is None else f"its header says {header.duration_s:g} s, "
        _keep(self.broken_examples, f"{shown(path)} ({says}{header.there_s:g} s are there)")

    def _note_name(self, chunk: Chunk) -> None:
        path, name = hash(chunk.audio_path), hash(chunk.recording_id)
        if len(self._names) < _MOST_PATHS and self._names.setdefault(path, name) != name:
            self.twice += 1
            _keep(self.twice_examples, shown(chunk.audio_path))

    def forgive(self, mistakes: Mistakes) -> None:
        """Take over what is missing."""
        self.missing = mistakes.missing
        self.missing_examples, self.missing_fix = mistakes.examples(EXAMPLES)

    def notes(self) -> list[str]:
        """Return a line for what nobody looks at because sources are meant so; the guide says it, too."""
        found = []
        if many := self.hidden.many:
            verb = "name is" if many == 1 else "names are"
            found.append(f"{many:,} hidden {verb} passed over (the first: {shown(self.hidden.first)})")
        if many := self.linked.many:
            verb = "link to a folder is" if many == 1 else "links to folders are"
            found.append(f"{many:,} {verb} not followed (the first: {shown(self.linked.first)})")
        return found

    def lines(self) -> list[str]:
        """Return a line for each kind of what will fail, or be done twice."""
        found = []
        if self.broken:
            what = f"{self.broken:,} file{' breaks' if self.broken == 1 else 's break'} off; what is there is done"
            found.append(f"{what}: {_listed(self.broken, self.broken_examples)}")
        if self.missing:
            rows = f"{self.missing:,} row{'' if self.missing == 1 else 's'}"
            they = "it" if self.missing == 1 else "they"
            what = f"the audio of {rows} is missing or cannot be used; {they} will fail, all others are done"
            fix = f"; try: {self.missing_fix}" if self.missing_fix else ""
            found.append(f"{what}: {_listed(self.missing, self.missing_examples)}{fix}")
        if self.twice:
            what = f"{self.twice:,} file{' comes' if self.twice == 1 else 's come'} from two sources under two names"
            found.append(f"{what}, and will be done twice: {_listed(self.twice, self.twice_examples)}")
        return found


def _keep(examples: list[str], one: str) -> None:
    if len(examples) < EXAMPLES:
        examples.append(one)


def _listed(many: int, examples: Sequence[str]) -> str:
    more = f" and {many - len(examples):,} more" if many > len(examples) else ""
    return ", ".join(examples) + more


# --- lines of text ----------------------------------------------------------------------------------------------------


def read_lines(path: Path, mistakes: Mistakes) -> Iterator[str]:
    """Yield every line with its end; note what is not UTF-8 text, and yield it repaired so that reading goes on."""
    # With "strict" the first wrong byte would end the reading, and the later mistakes would go untold.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        for number, line in enumerate(file, 1):
            if not line.isascii() and not is_text(line):
                mistakes.add(number, "is not UTF-8", fix=_convert(path, "latin1"))
                line = line.encode(errors="surrogateescape").decode(errors="replace")
            if "\0" in line:
                mistakes.add(number, "has a NUL byte", fix=f"tr -d '\\000' < {_quote(path)} > {_repaired(path)}")
                line = line.replace("\0", "")
            yield line


def note_utf16(path: Path, start: bytes, mistakes: Mistakes) -> bool:
    """Say whether the file is UTF-16 (a spreadsheet's "Unicode text"), where every single line would be a mistake."""
    if start[:2] not in (b"\xff\xfe", b"\xfe\xff"):
        return False
    mistakes.add(0, "is UTF-16, not UTF-8", fix=_convert(path, "utf-16"))
    return True


def is_text(line: str) -> bool:
    """Say whether UTF-8 can hold it: what was no text is kept as surrogates."""
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _convert(path: Path, encoding: str) -> str:
    return f"iconv -f {encoding} -t utf-8 {_quote(path)} > {_repaired(path)}"


def _repaired(path: Path) -> str:
    return _quote(path.with_suffix(f".utf8{path.suffix}"))


def _quote(path: Path) -> str:
    return shlex.quote(str(path))
