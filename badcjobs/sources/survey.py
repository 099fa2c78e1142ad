"""Read sources for check and plan: every row, without stopping at mistakes, and the headers of the files.

``check`` looks at every file. For ``plan`` the first files are enough where the rows have an end: for twenty million
rows a shared filesystem would need hours. After them, only the first file of each folder is looked at, which finds a
wrong --root and a missing folder."""

from __future__ import annotations

import math
import posixpath
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, ChunkKey, Fingerprint
from badcjobs.sources.audio_files import NoAudio, look_at
from badcjobs.sources.badc_manifest import NO_COLUMNS, Columns, Manifest, RowFiles, Times
from badcjobs.sources.mistakes import Mistakes, Remarks, shown
from badcjobs.sources.open import AudioSource, Sources, note_repeats
from badcjobs.sources.walk import WHOLE, Walk, look_ahead

_MOST_LOOKS = 10_000  # at files of rows with an end, for a plan
_MOST_FOLDERS = 1000


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
    fields: Sequence[str] = ()  # as in the manifest
    columns: Columns = NO_COLUMNS
    there_ms: int | None = None  # where the audio of its truncated file ends, on the clock of its times
    fails: bool = False  # its file gives no audio


@dataclass(slots=True)
class SourceSize:
    """Files and bytes of a source; a file that is not here has its size in its git-annex key."""

    files: int = 0
    known_bytes: int = 0
    unsized: int = 0  # files whose size is not known
    not_here: int = 0  # files whose content git-annex has not fetched
    not_here_total_bytes: int = 0
    not_here_unknown: int = 0  # of these, those without a length; and their bytes by ending
    not_here_bytes: Counter[str] = field(default_factory=Counter)
    not_here_fix: str | None = None
    measured: dict[str, list[float]] = field(default_factory=dict)  # ending → bytes, seconds

    def add(self, path: str, size_bytes: int | None, length_s: float | None = None) -> None:
        """Count one more file."""
        self.files += 1
        if size_bytes is None:
            self.unsized += 1
            return
        self.known_bytes += size_bytes
        if length_s:
            both = self.measured.setdefault(posixpath.splitext(path)[1].lower(), [0.0, 0.0])
            both[0] += size_bytes
            both[1] += length_s

    @property
    def total_bytes(self) -> int | None:
        """All files together; one that was not looked at counts as the mean of the others; None: not known."""
        known = self.files - self.unsized
        return self.known_bytes * self.files // known if known else None

    def guessed_s(self) -> float | None:
        """Return the length of the files that are not here, from their size and the others of their ending, or all."""
        if not self.not_here_bytes or not self.measured:
            return None
        every = [sum(part) for part in zip(*self.measured.values(), strict=True)]
        by_ending = [(size, *self.measured.get(one, every)) for one, size in self.not_here_bytes.items()]
        return math.fsum(size * length_s / size_bytes for size, size_bytes, length_s in by_ending)


@dataclass
class Surveyor(Walk):
    """A walk that takes all rows, except those with the identity of an earlier row."""

    for_plan: bool = True
    needs_audio: bool = False  # look at every file; one that is missing is a mistake, too
    several_sources: bool = False
    suspected: Collection[int] = ()  # hashes of identities that probably repeat
    looks_left: int = _MOST_LOOKS
    not_there: list[str] = field(default_factory=list)  # missing files of rows with an end, with the reason if known
    measured: int = 0  # files whose header was read
    rates_hz: Counter[int] = field(default_factory=Counter)  # sample rate → files
    size: SourceSize = field(default_factory=SourceSize)
    _known: set[ChunkKey] = field(default_factory=set)
    _folders: Sequence[str] = ()
    _base_of: dict[str, str] = field(default_factory=dict)
    _usual_base: str = "/"

    def takes(self, recording_id: str, chunk_id: str, *, to_cut: bool = False) -> bool:
        """Count one more row, and return whether it is the first one with its identity."""
        self.rows += 1
        key = recording_id, chunk_id
        if not self.suspected:
            self.seen.add(key)
            return True
        if hash(key) not in self.suspected:
            return True
        is_new = key not in self._known
        self._known.add(key)
        return is_new

    def may_look(self) -> bool:
        """Return whether to look at the next file: all of them, or the first ones."""
        self.looks_left -= 1
        return self.needs_audio or self.looks_left >= 0

    def measure(self, path: str, audio_path: str, recording_id: str, found: Fingerprint) -> None:
        """Count one more file whose header was read, and note what is wrong with it."""
        header = found.header
        self.measured += 1
        self.remarks.note_file(path, audio_path, header)
        if self.several_sources:
            self.remarks.note_name(audio_path, recording_id)
        self.size.add(path, found.audio_bytes, None if header.why else header.duration_s)
        if header.sample_rate_hz:
            self.rates_hz[header.sample_rate_hz] += 1

    def miss(self, path: str, error: NoAudio, *, has_end: bool, is_new: bool = True) -> bool:
        """Count a file that is not here, if it is new, and return whether its row can be planned all the same."""
        if error.missing_at is None or (error.key_bytes is None and not has_end):
            return False
        if not is_new:
            return True
        self.size.add(path, error.key_bytes)
        if error.key_bytes is None:
            if not self.needs_audio:
                self.not_there.append(shown(path) if error.not_found else str(error))
            return True
        self.size.not_here += 1
        self.size.not_here_total_bytes += error.key_bytes
        self.size.not_here_fix = self.size.not_here_fix or error.fix
        if not has_end:
            self.size.not_here_unknown += 1
            self.size.not_here_bytes[posixpath.splitext(path)[1].lower()] += error.key_bytes
        return True

    def add_missing(self, line: int, text: str, error: NoAudio, row: Chunk, fix: str | None = None) -> Iterator[Chunk]:
        """Report a recording without audio; yield it anyway if only git-annex has to fetch it."""
        is_planned = self.miss(row.source_path, error, has_end=False)
        if self.needs_audio or not is_planned:
            yield from super().add_missing(line, text, error, row, fix)
        if is_planned:
            yield replace(row, audio_path=error.missing_at or "")

    def base_of(self, path: str, folders: Sequence[str], *, seen: bool) -> str:
        """Return the probable base folder of a relative path, from one look per folder; ``seen``: it was looked at."""
        if folders is not self._folders:  # another source
            self._folders, self._base_of = folders, {}
        folder = path[: path.rfind("/") + 1]
        if folder in self._base_of:
            return self._base_of[folder]
        candidates = ("",) if path.startswith("/") else folders
        if len(self._base_of) >= _MOST_FOLDERS:
            return self._usual_base if self._usual_base in candidates else candidates[-1]
        answer, below = look_at(path, candidates, None), path.removeprefix("./")
        if isinstance(answer, NoAudio):
            if not seen:
                self.not_there.append(path if answer.not_found else str(answer))
            at = None if answer.not_found else answer.missing_at
            base = next((base for base in candidates if base + below == at), candidates[-1])
        else:
            base = self._usual_base = answer[0].removesuffix(below)
        self._base_of[folder] = base
        return base


def survey(
    sources: Sources, mistakes: Mistakes, suspected: Collection[int] = (), *, needs_audio: bool = False
) -> tuple[Iterator[PlannedRow], Surveyor]:
    """Return all rows that can be processed, and the walk, which has the totals after they are read.

    Repeated identities are known only at the end: then ``survey_again`` leaves such rows out.
    """
    walk = Surveyor(WHOLE, mistakes, sources.cutting, Remarks(), sources.read_header, needs_audio=needs_audio)
    walk.suspected, walk.several_sources = suspected, len(sources.parts) > 1
    rows = sources.read_parts(
        walk, lambda part: _rows_of(part, walk) if isinstance(part, Manifest) else _files_of(part, walk)
    )
    return rows, walk


def survey_again(sources: Sources, before: Surveyor) -> Iterator[PlannedRow] | None:
    """Report all rows that repeat an identity, and return the rows without them; None: no row does."""
    suspected = before.seen.repeated()
    if not suspected:
        return None
    note_repeats(sources.parts, before)
    unnoted = Mistakes([part.name for part in sources.parts])
    return survey(sources, unnoted, suspected, needs_audio=before.needs_audio)[0]


def _rows_of(manifest: Manifest, walk: Surveyor) -> Iterator[PlannedRow]:
    files, before, gone, seen, base = RowFiles(manifest.folders, walk), "", "", False, ""
    known_first: Times | None = None
    as_first, undecided = "", walk.cutting.rows is None
    for (line, row, columns, times, cut, first), look in look_ahead(manifest.rows(walk, files), files.look):
        start_ms, end_ms = times
        path, is_cut, there_ms, fails = row[columns.source_path], cut == "yes", None, False
        if first is not known_first:
            known_first, as_first = first, "" if first[1] is None else f"as {first[0]}-{first[1]}"
        if undecided and not cut and first is not times:  # not the first row of its file
            cut = as_first
        if path != before or look is not None:
            before, seen = path, look is not None
            base = walk.base_of(path, manifest.folders, seen=seen)
            if look is None:
                walk.size.add(path, None)
        if seen and (gone != path or end_ms is None or walk.needs_audio):
            had_end = end_ms is not None
            try:
                audio_path, fingerprint, end_ms, is_cut = files.resolve(path, first, look, times, known_cut=is_cut)
                header, cut = files.header, "yes" if is_cut and not had_end else cut
                fails = header.fault != ""
                if header.there_s is not None:
                    there_ms = round(header.there_s * 1000) + (0 if is_cut else start_ms)
                if look is not None:  # otherwise it is the file of the row before
                    walk.measure(path, audio_path, row[columns.recording_id], replace(fingerprint, header=header))
            except NoAudio as problem:
                is_planned = walk.miss(path, problem, has_end=had_end, is_new=look is not None)
                if walk.needs_audio or not is_planned:
                    walk.mistakes.add(line, str(problem), fix=problem.fix, missing=problem.missing_at is not None)
                if not is_planned:
                    continue
                gone = path
        yield PlannedRow(
            row[columns.recording_id], row[columns.chunk_id], path, base, start_ms, end_ms, cut == "yes", cut,
            row, columns, there_ms, fails,
        )  # fmt: skip


def _files_of(part: AudioSource, walk: Surveyor) -> Iterator[PlannedRow]:
    before, header, there_ms = "", AudioHeader(), None
    for chunk in part.chunks(walk):
        if chunk.audio_path != before:
            before, header = chunk.audio_path, chunk.fingerprint.header
            there_ms = None if header.there_s is None else round(header.there_s * 1000)
            if chunk.fingerprint.audio_bytes is not None:  # otherwise it is not here
                walk.measure(chunk.source_path, before, chunk.recording_id, chunk.fingerprint)
        base, path = _split(chunk)
        is_part = chunk.is_cut and chunk.chunk_id != chunk.recording_id  # not a complete file that is truncated
        yield PlannedRow(
            chunk.recording_id, chunk.chunk_id, path, base, chunk.start_ms, chunk.end_ms, is_part,
            "yes" if chunk.is_cut else "", there_ms=there_ms, fails=header.fault != "",
        )  # fmt: skip


def _split(chunk: Chunk) -> tuple[str, str]:
    """Return the base folder of a path ("": the path is absolute), and the path."""
    path = chunk.source_path
    below = path.removeprefix("./")
    if path.startswith("/"):
        return "", path
    if not chunk.audio_path.endswith(below):
        return "", chunk.audio_path
    return chunk.audio_path[: len(chunk.audio_path) - len(below)], path
