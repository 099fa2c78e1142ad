"""The mistakes of all sources, collected while they are read and reported together; only the first few are kept."""

from __future__ import annotations

import posixpath
from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal, TextIO

from badcjobs.errors import BadInput
from badcjobs.model import AUDIO_FAULTS, BROKEN_AUDIO, AudioHeader, Chunk
from badcjobs.paths import shell_line
from badcjobs.words import count, first_names

SHOWN = 20


class Mistakes:
    """The number of mistakes, and the first ones in the order of sources and lines; all of them in ``file``."""

    def __init__(self, names: Sequence[str], file: TextIO | None = None) -> None:
        self.count = 0
        self.missing = 0  # of these, files that are missing or cannot be used: only their rows fail
        self.source = 0  # the number of the source that is being read
        self._names = names
        self._file = file
        self._wrong_sources: set[int] = set()
        self._first: list[tuple[int, int, str, str]] = []
        self._fix: str | None = None

    def add(
        self,
        line: int,
        text: str,
        *,
        why: str = "",
        fix: str | None = None,
        missing: bool = False,
    ) -> None:
        """Add a mistake; line 0 means the complete source, and the text continues after its name."""
        self.count += 1
        self.missing += missing
        self._wrong_sources.add(self.source)
        insort(self._first, (self.source, line, text, why))
        del self._first[SHOWN:]
        self._fix = self._fix or fix
        if self._file is not None:
            self._file.write(f"{self.describe(self.source, line, text, why, named=True)}\n")

    def examples(self, most: int) -> tuple[list[str], str | None]:
        """Return the first mistakes, and a line to paste."""
        return [self.describe(*mistake, named=True) for mistake in self._first[:most]], self._fix

    def raise_any(self) -> None:
        """Raise one BadInput for all mistakes, if there are any."""
        if (error := self.error()) is not None:
            raise error

    def error(self) -> BadInput | None:
        """Return one error for all mistakes; None: there are none."""
        if not self.count:
            return None
        source, line, text, why = self._first[0]
        name = self._names[source]
        if self.count == 1 and line == 0:
            return BadInput(
                f"{name} {text}",
                why=why or None,
                fix=self._fix or shell_line("ls", "-l", name),
            )

        several = len(self._wrong_sources) > 1
        whose = f"{len(self._wrong_sources)} sources have" if several else f"{name} has"
        lines = with_more([self.describe(*mistake, named=several) for mistake in self._first], self.count)
        fix = self._fix
        numbers = sorted({line for where, line, *_ in self._first if where == source and line})
        if fix is None and numbers:
            wanted_lines = ";".join(f"{line}p" for line in numbers[:5])
            fix = f"sed -n '{wanted_lines}' {shell_line(name)}"
        return BadInput(
            f"{whose} {count(self.count, 'mistake')}",
            why="\n".join(lines),
            fix=fix,
        )

    def describe(self, source: int, line: int, text: str, why: str, *, named: bool) -> str:
        """Return a mistake as one line; ``named``: with its source."""
        text = f"{text} ({why})" if why else text
        if line == 0:
            return f"{self._names[source]} {text}"
        if named:
            return f"{self._names[source]} line {line}: {text}"
        return f"line {line}: {text}"


def quoted(value: str) -> str:
    """Return a value for a message: in quotes, on one line, at most 80 characters."""
    return repr(value if len(value) <= 80 else value[:79] + "…")


def shown(path: str) -> str:
    """Return a path for a message: unchanged, unless it has characters that cannot be printed."""
    if path.isprintable():
        return path
    return repr(path)


# --- remarks ----------------------------------------------------------------------------------------------------------

EXAMPLES = 3
_SKIPPED = {
    "hidden": ("hidden name is skipped", "hidden names are skipped"),
    "linked": ("link to a folder is not followed", "links to folders are not followed"),
}
_ENDINGS = 12  # that are named
# Files that may contain audio, in a form that engines do not read.
PERHAPS_AUDIO = (
    ".7z", ".avi", ".bz2", ".gz", ".mkv", ".mov", ".mp4", ".pcm", ".rar", ".raw", ".tar", ".tgz", ".w4v", ".wac", ".xz",
    ".zip",
)  # fmt: skip


class Remarks:
    """Collects files that give no audio or are missing, and the names that are skipped.

    ``keeps_missing``: list chunks whose audio is missing, if there is any audio at all; only these chunks fail later.
    """

    def __init__(self, *, keeps_missing: bool = False) -> None:
        self.keeps_missing = keeps_missing
        self.faults: dict[str, list[str]] = {fault: [] for fault in AUDIO_FAULTS}  # every file, with the reason
        self.first_fault: dict[str, str] = {}  # the path of the first one
        self.missing: Mistakes | None = None  # of chunks that are listed without their audio
        self._skipped: dict[str, tuple[int, str]] = {}  # hidden or linked → number, and the first path
        self.left_out: Counter[str] = Counter()  # files that are not audio by their name: ending → number
        self._before = ""

    def skip(self, kind: Literal["hidden", "linked"], name: str) -> None:
        """Add a name in a folder that is skipped."""
        many, first = self._skipped.get(kind, (0, name))
        self._skipped[kind] = many + 1, min(first, name)

    def leave_out(self, name: str) -> None:
        """Count a file in a folder that is not audio by its name."""
        self.left_out[posixpath.splitext(escape_bytes(name))[1].lower()] += 1

    def note(self, chunk: Chunk) -> None:
        """Check the next chunk; the chunks of a recording follow each other."""
        if chunk.audio_path != self._before:
            self._before = chunk.audio_path
            self.note_file(chunk.source_path, chunk.audio_path, chunk.fingerprint.header)

    def note_file(self, path: str, audio_path: str, header: AudioHeader) -> None:
        """Add the next file if it gives no audio, or less than its header promises."""
        fault = header.fault
        if not fault and header.there_s is not None:
            fault = BROKEN_AUDIO
        if fault:
            self.first_fault.setdefault(fault, audio_path)
            self.faults[fault].append(f"{shown(path)}: {header.why}")

    def notes(self) -> list[str]:
        """Return a line for each kind of name that is skipped on purpose."""
        lines = []
        for kind, (names, first) in sorted(self._skipped.items()):
            lines.append(f"{count(names, *_SKIPPED[kind])} (the first: {shown(first)})")
        return lines

    def lines(self) -> list[str]:
        """Return a line for each kind of audio that will fail, at least in part."""
        lines = []
        for fault, names in self.faults.items():
            if names:
                examples = first_names(names, EXAMPLES)
                lines.append(f"{fault.replace('_', ' ')}: {count(len(names), 'file')}: {examples}")
        if self.missing is not None and self.missing.missing:
            lines.append(self._missing_line(self.missing))
        return lines

    def _missing_line(self, missing: Mistakes) -> str:
        rows = count(missing.missing, "row")
        examples, fix = missing.examples(EXAMPLES)
        they = "it" if missing.missing == 1 else "they"
        line = f"the audio of {rows} is missing or cannot be used; {they} will fail, all others are processed"
        line += f": {', '.join(with_more(examples, missing.missing))}"
        if fix:
            line += f"; try: {fix}"
        return line


def left_out_words(counts: Mapping[str, int]) -> str:
    """Return how many files of each ending were left out, and which of them may contain audio."""
    ranked = sorted(counts, key=lambda ending: (-counts[ending], ending))
    parts = [f"{counts[ending]:,} {shown(ending) or 'without an ending'}" for ending in ranked]
    text = first_names(parts, _ENDINGS)
    suspicious = [ending for ending in ranked if ending in PERHAPS_AUDIO]
    if suspicious:
        text += f"; {' and '.join(suspicious)} may contain audio"
    return text


# --- text -------------------------------------------------------------------------------------------------------------


def with_more(examples: Sequence[str], total: int) -> list[str]:
    """Return the examples and, if there are more, a line with their number."""
    if total <= len(examples):
        return [*examples]
    return [*examples, f"… and {total - len(examples):,} more"]


def escape_bytes(path: str) -> str:
    r"""Return a path as text that SQLite can store: a byte that is not UTF-8 becomes four characters, such as \xff."""
    return path.encode(errors="surrogateescape").decode(errors="backslashreplace")
