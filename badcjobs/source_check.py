"""Checks whole sources once, before any array is submitted: every row, every file, every identity."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.manifest import AS_IT_COMES, WHOLE, Cutting, Remarks, Sources, open_sources
from badcjobs.manifest.mistakes import SHOWN, shown
from badcjobs.manifest.walk import Seen
from badcjobs.model import Chunk
from badcjobs.preflight.facts import SourceFacts
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.preflight.machine import say_source


def check_source(
    paths: Sequence[Path],
    root: Path | None,
    *,
    progress: Callable[[int], None],
    quick: bool = False,
    cutting: Cutting = AS_IT_COMES,
) -> tuple[SourceFacts | None, list[Finding]]:
    """Read every row and look at every file; all mistakes are counted, the first twenty named.

    ``quick``: look at no file. The facts are None when there are mistakes.
    """
    try:
        sources = open_sources(paths, root=root, cutting=cutting)
        odd = OddFiles()
        facts, remarks = _count_rows(sources, progress) if quick else _read_all(sources, progress, odd)
    except BadcjobsError as error:
        look = f"ls -ld {shlex.quote(str(paths[0]))}"
        return None, [problem("source", error.what, error.fix or look, (error.why or "").splitlines())]
    go_on = "badcjobs run SOURCE --out DIR   (the others are done; restore the files and run it again)"
    passed_over = [fine("source", line) for line in remarks.notes()]
    will_fail = [*odd.findings(go_on), *(warning("audio", line, go_on) for line in remarks.lines())]
    return facts, [say_source(facts), *passed_over, *will_fail]


class OddFiles:
    """Files that are there, and of which a run would make nothing but a failed chunk; the first twenty are named."""

    def __init__(self) -> None:
        self.empty = self.unreadable = 0
        self._empty_names: list[str] = []
        self._unreadable_names: list[str] = []
        self._look = ""
        self._before = ""
        self._odd: set[str] = set()

    def note(self, chunk: Chunk) -> None:
        """Look at the next chunk."""
        if chunk.audio_path == self._before or chunk.audio_path in self._odd:
            return
        self._before = chunk.audio_path
        header, name = chunk.fingerprint.header, shown(chunk.source_path)
        if chunk.fingerprint.audio_bytes == 0 or header.duration_s == 0:
            self.empty += 1
            self._odd.add(chunk.audio_path)
            _keep(self._empty_names, name)
        elif header.unreadable:
            self.unreadable += 1
            self._odd.add(chunk.audio_path)
            self._look = self._look or f"ls -l {shlex.quote(chunk.audio_path)}"
            _keep(self._unreadable_names, f"{name}: {header.unreadable}")

    def findings(self, go_on: str) -> Iterator[Finding]:
        """Yield what would fail."""
        if self.unreadable:
            text = f"{_files(self.unreadable)} cannot be read from here: what is in there would fail"
            yield problem("audio", text, self._look, _with_more(self._unreadable_names, self.unreadable))
        if self.empty:
            text = f"{_files(self.empty)} without any audio; each will fail, for there is nothing to analyse"
            yield warning("audio", text, go_on, _with_more(self._empty_names, self.empty))


def _files(many: int) -> str:
    return f"{many:,} file{'' if many == 1 else 's'}"


def _keep(names: list[str], name: str) -> None:
    if len(names) < SHOWN:
        names.append(name)


def _with_more(names: Sequence[str], many: int) -> list[str]:
    return [*names, *([f"… and {many - len(names):,} more"] if many > len(names) else [])]


def _read_all(sources: Sources, progress: Callable[[int], None], odd: OddFiles) -> tuple[SourceFacts, Remarks]:
    remarks = Remarks()
    chunks = of_unknown_length = 0
    audio_s = 0.0
    for chunks, chunk in enumerate(sources.chunks(WHOLE, remarks), 1):
        progress(chunks)
        audio_s += chunk.audio_s or 0.0
        of_unknown_length += chunk.audio_s is None
        odd.note(chunk)
    listed = sources.manifests_listed
    facts = SourceFacts(chunks, audio_s, of_unknown_length, listed, empty=odd.empty, unreadable=odd.unreadable)
    return facts, remarks


def _count_rows(sources: Sources, progress: Callable[[int], None]) -> tuple[SourceFacts, Remarks]:
    seen, rows = Seen(), 0

    def note(_row: int, _part: int, key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        seen.add(key)
        progress(rows)

    remarks = sources.read_identities(note)
    if repeats := sum(seen.repeated().values()):
        what = f"{repeats:,} rows have the recording_id and chunk_id of an earlier row"
        raise BadInput(what, fix="badcjobs check SOURCE   (without --quick it names them)")
    return SourceFacts(rows, 0.0, 0, sources.manifests_listed, stats=False), remarks
