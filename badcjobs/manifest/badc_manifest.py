"""A BADC manifest as a source: its rows, with the audio of our own found on disk."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from badcjobs.manifest.audio_files import NoAudio
from badcjobs.manifest.badc_csv import check_cut, check_row, cut_of, read_rows, sha256_of
from badcjobs.manifest.look_ahead import look_ahead
from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.row_files import Question, RowFiles, RowLooks, Times
from badcjobs.manifest.walk import Walk
from badcjobs.model import Chunk


class _OurRow(NamedTuple):
    line: int
    recording_id: str
    chunk_id: str
    source_path: str
    start_ms: int
    end_ms: int | None
    sha256: str | None
    first: Times  # of the first row of its file, whoever has it
    is_cut: bool  # that is known already


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
        files = RowFiles(self.folders, walk.cutting, walk.read_header)
        for row, look in look_ahead(self._our_rows(walk), files.look, while_waiting=walk.while_waiting):
            line, recording_id, chunk_id, source_path, start_ms, end_ms, sha256, first, known_cut = row
            files.turn_to(source_path, first, look)
            try:
                audio_path, fingerprint = files.find(sha256)
                end_ms, is_cut = files.place(start_ms, end_ms, known_cut=known_cut)
                fingerprint = files.told(fingerprint, is_cut=is_cut)
            except NoAudio as problem:
                row_alone = Chunk(recording_id, chunk_id, source_path, "", start_ms, end_ms)
                fix = self._other_root() if problem.nowhere else None
                yield from walk.miss(line, str(problem), problem, row_alone, fix)
            else:
                yield Chunk(
                    recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, fingerprint, is_cut=is_cut
                )

    def _our_rows(self, walk: Walk) -> Iterator[tuple[_OurRow, Question | None]]:
        """Read every row, and yield our own, each with what is to be asked of its file."""
        looks = RowLooks(walk.cutting)
        for line, row, columns in read_rows(self.path, walk.mistakes):
            recording_id, chunk_id, path = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
            ours = walk.takes(recording_id, chunk_id)
            start_ms, end_ms, wrong = check_row(row, columns)
            cut, wrong_cut = check_cut(row, columns)
            for text in (*wrong, *wrong_cut):
                walk.mistakes.add(line, text)
            ours = ours and not wrong and not wrong_cut
            first, question = looks.ask(path, (start_ms, end_ms), ours=ours)
            if ours:
                is_cut, told = cut_of(cut)
                times, sha256 = (start_ms, end_ms), sha256_of(row, columns)
                yield _OurRow(line, recording_id, chunk_id, path, *times, sha256, told or first, is_cut), question

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        for line, row, columns in read_rows(self.path, Mistakes([self.name])):
            yield line, (row[columns.recording_id], row[columns.chunk_id])

    def _other_root(self) -> str:
        return f"badcjobs run {shlex.quote(self.name)} --root DIR …   (DIR: the folder its source_paths start from)"
