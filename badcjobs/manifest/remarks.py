"""What is odd about the audio of sources and stops nobody: counted while it is listed, with a few examples."""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.manifest.mistakes import Mistakes, shown
from badcjobs.model import AudioHeader, Chunk

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
