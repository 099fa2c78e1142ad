"""Read sources for check and plan: every row, without stopping at mistakes, and the headers of the files.

``check`` looks at every file. For ``plan`` the first files are enough where the rows have an end: for twenty million
rows a shared filesystem would need hours. After them, only the first file of each folder is looked at, which finds a
wrong --root and a missing folder."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, Fingerprint
from badcjobs.sources.audio_files import NoAudio, locate
from badcjobs.sources.badc_manifest import CARRIED, Look, Manifest, ManifestRow, RowFiles
from badcjobs.sources.cutter import needs_ffmpeg
from badcjobs.sources.mistakes import Mistakes, Remarks, shown
from badcjobs.sources.open import AudioSource, Sources
from badcjobs.sources.walk import WHOLE, Walk, look_ahead

_MOST_LOOKS = 10_000  # at files of rows with an end, for a plan


class PlannedRow(NamedTuple):
    """A chunk as a plan needs it; a tuple, because there may be millions."""

    recording_id: str
    chunk_id: str
    path: str  # as in the source
    base: str  # the folder of a relative path, with a slash at its end
    start_ms: int
    end_ms: int | None
    is_cut: bool = False  # a part of a longer file
    cut: str = ""  # the column CUT of a plan
    carried: Sequence[str] = ()  # fields of the manifest that are handed on
    there_ms: int | None = None  # where the audio of its truncated file ends, on the clock of its times
    fails: bool = False  # its file gives no audio


@dataclass
class SourceSize:
    """Files and bytes of a source; a file that is not here has its size in its git-annex key."""

    files: int = 0
    known_bytes: int = 0
    unsized: int = 0  # files whose size is not known
    not_here: int = 0  # files whose content git-annex has not fetched
    not_here_total_bytes: int = 0
    not_here_unknown: int = 0  # of these, those without a length; and their bytes
    not_here_bytes: int = 0
    not_here_fix: str | None = None
    measured_bytes: int = 0  # of files whose length is known
    measured_s: float = 0.0

    def add(self, size_bytes: int | None, length_s: float | None = None) -> None:
        """Count one more file."""
        self.files += 1
        if size_bytes is None:
            self.unsized += 1
            return
        self.known_bytes += size_bytes
        if length_s:
            self.measured_bytes += size_bytes
            self.measured_s += length_s

    def forget_unsized(self) -> None:
        """Take back a file whose size was not known: a later row looks at it."""
        self.files -= 1
        self.unsized -= 1

    @property
    def total_bytes(self) -> int | None:
        """All files together; one that was not looked at counts as the mean of the others; None: not known."""
        known = self.files - self.unsized
        if known:
            return self.known_bytes * self.files // known
        return None

    def guessed_s(self) -> float | None:
        """Return the length of the files that are not here, from their size and the length of the others."""
        if not self.not_here_bytes or not self.measured_bytes:
            return None
        return self.not_here_bytes * self.measured_s / self.measured_bytes


@dataclass
class Surveyor(Walk):
    """A walk for a plan: it takes all rows, and counts their files."""

    for_plan: bool = True
    needs_audio: bool = False  # look at every file; one that is missing is a mistake, too
    looks_left: int = _MOST_LOOKS
    not_there: list[str] = field(default_factory=list)  # missing files of rows with an end, with the reason if known
    measured: int = 0  # files whose header was read
    rates_hz: Counter[int] = field(default_factory=Counter)  # sample rate → files
    for_ffmpeg: list[str] = field(default_factory=list)  # files without a length, because there is no ffmpeg
    size: SourceSize = field(default_factory=SourceSize)
    _base_of: dict[tuple[Sequence[str], str], str] = field(default_factory=dict)  # search folders, folder → base

    def may_look(self) -> bool:
        """Return whether to look at the next file: all of them, or the first ones."""
        self.looks_left -= 1
        return self.needs_audio or self.looks_left >= 0

    def measure(
        self,
        path: str,
        audio_path: str,
        found: Fingerprint,
    ) -> None:
        """Count one more file whose header was read, and note what is wrong with it."""
        header = found.header
        self.measured += 1
        self.remarks.note_file(path, audio_path, header)
        self.size.add(found.audio_bytes, None if header.why else header.duration_s)
        if header.sample_rate_hz:
            self.rates_hz[header.sample_rate_hz] += 1
        elif not header.why and header.duration_s is None and needs_ffmpeg(Path(audio_path)):
            self.for_ffmpeg.append(path)

    def miss(self, path: str, error: NoAudio, *, has_end: bool, is_new: bool = True) -> bool:
        """Count a file that is not here, if it is new, and return whether its row can be planned all the same."""
        if error.missing_at is None or (error.key_bytes is None and not has_end):
            return False
        if not is_new:
            return True
        self.size.add(error.key_bytes)
        if error.key_bytes is None:
            if not self.needs_audio:
                self.not_there.append(shown(path) if error.not_found else str(error))
            return True
        self.size.not_here += 1
        self.size.not_here_total_bytes += error.key_bytes
        self.size.not_here_fix = self.size.not_here_fix or error.fix
        if not has_end:
            self.size.not_here_unknown += 1
            self.size.not_here_bytes += error.key_bytes
        return True

    def add_missing(
        self,
        line: int,
        text: str,
        error: NoAudio,
        row: Chunk,
    ) -> Iterator[Chunk]:
        """Report a recording without audio; yield it anyway if only git-annex has to fetch it."""
        is_planned = self.miss(row.source_path, error, has_end=False)
        if self.needs_audio or not is_planned:
            yield from super().add_missing(line, text, error, row)
        if is_planned:
            yield replace(row, audio_path=error.missing_at or "")

    def base_of(self, path: str, folders: Sequence[str], *, seen: bool) -> str:
        """Return the probable base folder of a relative path, from one look per folder; ``seen``: it was looked at."""
        key = (folders, path[: path.rfind("/") + 1])
        if key not in self._base_of:
            place = locate(path, folders)
            if not seen and not os.path.exists(place):  # noqa: PTH110 - a Path for each of many folders is slow
                self.not_there.append(shown(path))
            self._base_of[key] = place.removesuffix(path.removeprefix("./"))
        return self._base_of[key]


def survey(sources: Sources, mistakes: Mistakes, *, needs_audio: bool = False) -> tuple[Iterator[PlannedRow], Surveyor]:
    """Return all rows that can be processed, and the walk, which has the totals after they are read."""
    walk = Surveyor(
        WHOLE,
        mistakes,
        sources.cutting,
        Remarks(),
        sources.read_header,
        needs_audio=needs_audio,
    )
    walk.left_out = sources.left_out

    def plan(part: AudioSource) -> Iterator[PlannedRow]:
        if isinstance(part, Manifest):
            return _rows_of(part, walk)
        return _files_of(part, walk)

    return sources.read_parts(walk, plan), walk


def _rows_of(manifest: Manifest, walk: Surveyor) -> Iterator[PlannedRow]:
    files = RowFiles(manifest.folders, walk)
    path = base = ""  # of the current file; its rows follow each other
    was_looked_at = False
    for row, look in look_ahead(manifest.rows(walk, files), files.look):
        if row.source_path == path and was_looked_at:  # again, if the rows between are left out: it counts once
            look = None
        is_new = look is not None  # otherwise it is the file of the row before, or was not looked at
        if row.source_path != path:
            path = row.source_path
            was_looked_at = is_new
            base = walk.base_of(path, manifest.folders, seen=was_looked_at)
            if not was_looked_at:
                walk.size.add(None)
        elif is_new:
            was_looked_at = True
            walk.size.forget_unsized()
        planned = _plan_row(row, base, walk)
        is_planned = True
        if was_looked_at:
            try:
                planned = _with_audio(planned, row, look, files, walk)
            except NoAudio as problem:
                is_planned = walk.miss(path, problem, has_end=planned.end_ms is not None, is_new=is_new)
                if walk.needs_audio or not is_planned:
                    is_missing = problem.missing_at is not None
                    walk.mistakes.add(row.line, str(problem), fix=problem.fix, missing=is_missing)
        if is_planned:
            yield planned


def _plan_row(row: ManifestRow, base: str, walk: Surveyor) -> PlannedRow:
    cut = row.cut
    is_undecided = walk.cutting.rows is None and not cut
    if is_undecided and not row.is_first and row.first[1] is not None:
        cut = f"as {row.first[0]}-{row.first[1]}"
    return PlannedRow(
        row.recording_id,
        row.chunk_id,
        row.source_path,
        base,
        *row.times,
        is_cut=cut == "yes",
        cut=cut,
        carried=[row.fields.get(name, "") for name in CARRIED],
    )


def _with_audio(
    planned: PlannedRow, row: ManifestRow, look: Look | None, files: RowFiles, walk: Surveyor
) -> PlannedRow:
    """Add what the row's file says; raise NoAudio."""
    audio_path, fingerprint, end_ms, is_cut = files.resolve(row, look)
    header = files.header
    cut = planned.cut
    if is_cut and row.times[1] is None:
        cut = "yes"
    there_ms = None
    if header.there_s is not None:
        there_ms = round(header.there_s * 1000)
        if not is_cut:
            there_ms += planned.start_ms
    if look is not None:
        walk.measure(row.source_path, audio_path, replace(fingerprint, header=header))
    return planned._replace(end_ms=end_ms, is_cut=cut == "yes", cut=cut, there_ms=there_ms, fails=header.fault != "")


def _files_of(part: AudioSource, walk: Surveyor) -> Iterator[PlannedRow]:
    before = ""
    header = AudioHeader()
    there_ms = None
    for chunk in part.chunks(walk):
        if chunk.audio_path != before:
            before = chunk.audio_path
            header = chunk.fingerprint.header
            there_ms = None if header.there_s is None else round(header.there_s * 1000)
            if chunk.fingerprint.audio_bytes is not None:  # otherwise it is not here
                walk.measure(chunk.source_path, before, chunk.fingerprint)
        base, path = _split(chunk)
        yield PlannedRow(
            chunk.recording_id,
            chunk.chunk_id,
            path,
            base,
            chunk.start_ms,
            chunk.end_ms,
            is_cut=chunk.is_cut and chunk.chunk_id != chunk.recording_id,  # not a complete file that is truncated
            cut="yes" if chunk.is_cut else "",
            there_ms=there_ms,
            fails=header.fault != "",
        )


def _split(chunk: Chunk) -> tuple[str, str]:
    """Return the base folder of a path ("": the path is absolute), and the path."""
    path = chunk.source_path
    below = path.removeprefix("./")
    if path.startswith("/"):
        return "", path
    if not chunk.audio_path.endswith(below):
        return "", chunk.audio_path
    return chunk.audio_path[: len(chunk.audio_path) - len(below)], path
