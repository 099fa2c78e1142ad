"""Checks whole sources once, before any array is submitted: every row, every file, every identity."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from pathlib import Path

from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.manifest import WHOLE, Sources, open_sources
from badcjobs.manifest.walk import Seen
from badcjobs.preflight.facts import SourceFacts
from badcjobs.preflight.finding import Finding, problem
from badcjobs.preflight.machine import say_source


def check_source(
    paths: Sequence[Path], root: Path | None, *, progress: Callable[[int], None], quick: bool = False
) -> tuple[SourceFacts | None, list[Finding]]:
    """Read every row and look at every file; all mistakes are counted, the first twenty named.

    ``quick``: look at no file. The facts are None when there are mistakes.
    """
    try:
        sources = open_sources(paths, root=root)
        facts = _count_rows(sources, progress) if quick else _read_all(sources, progress)
    except BadcjobsError as error:
        look = f"ls -ld {shlex.quote(str(paths[0]))}"
        return None, [problem("source", error.what, error.fix or look, (error.why or "").splitlines())]
    return facts, [say_source(facts)]


def _read_all(sources: Sources, progress: Callable[[int], None]) -> SourceFacts:
    chunks = of_unknown_length = 0
    audio_s = 0.0
    for chunks, chunk in enumerate(sources.chunks(WHOLE), 1):
        progress(chunks)
        audio_s += chunk.audio_s or 0.0
        of_unknown_length += chunk.audio_s is None
    return SourceFacts(chunks, audio_s, of_unknown_length, sources.manifests_listed)


def _count_rows(sources: Sources, progress: Callable[[int], None]) -> SourceFacts:
    seen, rows = Seen(), 0

    def note(row: int, _part: int, key: tuple[str, str]) -> None:
        nonlocal rows
        rows = row + 1
        seen.add(key)
        progress(rows)

    sources.read_identities(note)
    if repeats := sum(seen.repeated().values()):
        what = f"{repeats:,} rows have the recording_id and chunk_id of an earlier row"
        raise BadInput(what, fix="badcjobs check SOURCE   (without --quick it names them)")
    return SourceFacts(rows, 0.0, 0, sources.manifests_listed, stats=False)
