"""A BADC manifest as a source: its rows, with the audio of our own found on disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from badcjobs.manifest.audio_files import NoAudio, end_ms_of, find_audio
from badcjobs.manifest.badc_csv import check_row, read_rows, sha256_of
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.walk import Walk
from badcjobs.model import Chunk


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest file; a relative ``source_path`` lies in the first of ``folders`` that has it."""

    path: Path
    folders: tuple[str, ...]
    named_by: str = ""  # " (line 3 of manifests.txt)"
    without_rows: str = "has a header but no rows"

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def description(self) -> str:
        return f"manifest {self.path}{self.named_by}"

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        for line, row, columns in read_rows(self.path, walk.mistakes):
            recording_id, chunk_id = row[columns.recording_id], row[columns.chunk_id]
            ours = walk.takes(recording_id, chunk_id)
            start_ms, end_ms, wrong = check_row(row, columns)
            for text in wrong:
                walk.mistakes.add(line, text)
            if ours and not wrong:
                source_path = row[columns.source_path]
                try:
                    audio_path, fingerprint = find_audio(source_path, self.folders, sha256_of(row, columns))
                    if end_ms is None:
                        end_ms = _end_after(start_ms, audio_path)
                except NoAudio as problem:
                    fix = self._other_root() if problem.nowhere else problem.fix
                    walk.mistakes.add(line, str(problem), fix=fix)
                else:
                    yield Chunk(recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, fingerprint)

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for line, row, columns in read_rows(self.path, Mistakes([self.name])):
            yield line, (row[columns.recording_id], row[columns.chunk_id])

    def _other_root(self) -> str:
        return f"badcjobs run {shlex.quote(self.name)} --root DIR …   (DIR: the folder its source_paths start from)"


def _end_after(start_ms: int, audio_path: str) -> int | None:
    end_ms = end_ms_of(audio_path)
    # From the start, audio of no length is the engine's to judge; a start behind its end is the manifest's mistake.
    if end_ms is not None and 0 < start_ms >= end_ms:
        raise NoAudio(f"start_ms {start_ms} is not before the end of the audio at {end_ms} ms")
    return end_ms
