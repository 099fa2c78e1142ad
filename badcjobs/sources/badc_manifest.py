"""A BADC manifest as a source: its rows, and their audio files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, ChunkKey, Fingerprint, Place, parse_place
from badcjobs.paths import shell_line
from badcjobs.sources.audio_files import ESCAPED, Found, NoAudio, end_ms_of, locate, look_at, with_header
from badcjobs.sources.mistakes import Mistakes, quoted
from badcjobs.sources.tables import Fields, copy_command, read_table
from badcjobs.sources.walk import Walk, look_ahead

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
REQUIRED = ("recording_id", "chunk_id", "source_path")
_identity_of = itemgetter(*REQUIRED)
OF_A_PLACE = ("region", "latitude", "longitude", "recording_date", "location_name")
CARRIED = ("overlap_ms", "sha256", "notes", *OF_A_PLACE)  # a plan hands these columns on as they are
# A column that a plan adds, because one shard alone does not show it. "yes": the row is a part of its file, and is cut
# out. "as 0-30000": the first row of the file, which may be in another shard, had these times and decides.
CUT = "badcjobs_cut"
_CUT = re.compile(r"yes|as \d{1,15}-\d{1,15}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Times = tuple[int, int | None]  # start and end of a row
_SLACK_MS = 1000  # a row and its file may differ by this much: recorders are not exact, and numbers are rounded
_LATEST_MS = 10**15  # about thirty thousand years; an integer in the database has 64 bits


def read_rows(path: Path, mistakes: Mistakes) -> Iterator[tuple[int, Fields]]:
    """Yield line number and fields of every row that can be read."""
    return read_table(path, mistakes, _missing_of, HEADER)


def _missing_of(columns: Sequence[str]) -> list[str]:
    return [name for name in REQUIRED if name not in columns]


class ManifestRow(NamedTuple):
    """A row of a manifest."""

    line: int
    recording_id: str
    chunk_id: str
    source_path: str
    times: Times
    place: Place
    cut: str  # the column CUT
    first: Times  # the times of the first row of its file, in any task
    is_first: bool  # of its file
    fields: Fields


def check_row(fields: Fields) -> tuple[Times, str, list[str]]:
    """Return start and end (None: not given), the column CUT and the mistakes of a row."""
    mistakes = []
    for name in REQUIRED:
        if not fields[name].strip():
            mistakes.append(f"{name} is empty")
    cut = fields.get(CUT, "").strip()
    if cut and not _CUT.fullmatch(cut):
        mistakes.append(f'{CUT} {quoted(cut)} is neither "yes" nor "as START-END"')
    times = []
    for name in ("start_ms", "end_ms"):
        try:
            times.append(parse_ms(fields.get(name, "")))
        except ValueError as error:
            mistakes.append(f"{name} {error}")
    if len(times) < 2:
        return (0, None), cut, mistakes
    start = times[0] or 0
    end = times[1]
    if end is not None and end <= start:
        mistakes.append(f"end_ms {end} is not after start_ms {start}")
    return (start, end), cut, mistakes


def parse_ms(text: str) -> int | None:
    """Parse whole milliseconds; ``1000.0`` is accepted, because pandas writes it if a cell of the column is empty."""
    if not text.strip():
        return None
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value.is_integer():
        raise ValueError(f"{quoted(text)} is not a whole number")
    if value < 0:
        raise ValueError(f"{text.strip()} is negative")
    if value > _LATEST_MS:
        raise ValueError(f"{text.strip()} is too large")
    return int(value)


def read_place(fields: Fields) -> tuple[Place, Sequence[str]]:
    """Return the place in a row, and the mistakes in it."""
    return _parse_place(tuple(map(fields.get, OF_A_PLACE)))


@lru_cache(1024)
def _parse_place(texts: tuple[str | None, ...]) -> tuple[Place, Sequence[str]]:
    """Parse a place once: the rows of a recording follow each other."""
    return parse_place({name: text for name, text in zip(OF_A_PLACE, texts, strict=True) if text})


# --- the files of the rows --------------------------------------------------------------------------------------------

Question = tuple[str, bool]  # a file to look at, and whether to read its header
Look = tuple[Found | NoAudio, bool]  # what was found, and whether the header was read


class RowFiles:
    """Finds the file of each row, and decides whether the row is the complete file or a part that must be cut out.

    Rows of one recording follow each other, so each file is looked at once, and its header is read only if needed.
    """

    def __init__(self, folders: Sequence[str], walk: Walk) -> None:
        self._folders = folders
        self._read_header = walk.read_header
        self._cuts = walk.cutting.rows
        self.measures = walk.for_plan or self._cuts is not False
        self._file: Found = ("", Fingerprint())
        self._problem: NoAudio | None = None
        self._measured = False

    @property
    def header(self) -> AudioHeader:
        """The header of the current file, if it was read."""
        return self._file[1].header

    def look(self, question: Question) -> Look:
        """Look at a file; may be called by any thread."""
        path, measure = question
        return look_at(path, self._folders, self._read_header if measure else None), measure

    def resolve(self, row: ManifestRow, look: Look | None) -> tuple[str, Fingerprint, int | None, bool]:
        """Return the path of a row's audio, its fingerprint, its end, and whether to cut it out; or raise NoAudio.

        ``look`` None: the same as for the previous row.
        """
        if look is not None:
            answer, self._measured = look
            self._problem = None
            if isinstance(answer, NoAudio):
                self._problem = answer
            else:
                self._file = answer
        if self._problem is not None:
            raise self._problem.with_traceback(None)

        start_ms, end_ms = row.times
        if end_ms is None:
            end_ms = self._length_ms()
            # The engine decides about empty audio; but a start after the end of the audio is a mistake.
            if end_ms is not None and 0 < start_ms >= end_ms:
                raise NoAudio(f"start_ms {start_ms} is not before the end of the audio at {end_ms} ms")
        # A plan, which read the complete source, requires a cut, unless a setting forbids it.
        is_cut = (row.cut == "yes" and self._cuts is None) or self._is_cut(row, end_ms)

        audio_path, fingerprint = self._file
        if self._measured and not is_cut:  # a file may be one of several chunks: its length is not the recording's
            fingerprint = replace(fingerprint, header=replace(fingerprint.header, duration_s=None))
        return audio_path, fingerprint, end_ms, is_cut

    def _is_cut(self, row: ManifestRow, end_ms: int | None) -> bool:
        start_ms, _ = row.times
        if self._cuts is False and not self._measured:
            return False
        audio_ms = self._length_ms()
        if audio_ms == 0:
            return True  # cutting empty audio fails, with a clear error
        unfinished = self.header.unfinished or self.header.there_s is not None
        is_beyond = audio_ms is not None and end_ms is not None and end_ms - audio_ms > _SLACK_MS
        if unfinished and audio_ms is not None and start_ms == 0 and not is_beyond:
            return True  # engines may not be able to read the file; a cut copy is a valid file
        if self._cuts is False:
            return False
        if audio_ms is None or end_ms is None:
            return self._cuts is True  # not known yet; if it cannot be cut, only this row fails
        if self._cuts is True:
            if is_beyond:
                what = (
                    f"end_ms {end_ms} is after the end of {row.source_path} at {audio_ms} ms, so it cannot be cut out"
                )
                raise NoAudio(what, "the same command without run.cut = true: then only such rows fail")
            return start_ms > 0 or audio_ms > end_ms
        is_longer = audio_ms - (end_ms - start_ms) > _SLACK_MS
        # If the first row of a file is a part of it, a row after the end is a missing part, not a separate file.
        first_ms, last_ms = row.first
        first_is_part = last_ms is not None and last_ms - audio_ms <= _SLACK_MS < audio_ms - (last_ms - first_ms)
        return is_longer and (first_is_part or not is_beyond)

    def _length_ms(self) -> int | None:
        if not self._measured:
            self._file = with_header(self._file, self._read_header)
            self._measured = True
        return end_ms_of(self.header)


# --- the source -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Manifest:
    """A manifest file; a relative ``source_path`` is searched in ``folders``, in this order."""

    path: Path
    folders: tuple[str, ...]
    named_by: str = ""  # " (line 3 of manifests.txt)"
    without_rows: str = "has a header but no rows"
    has_places: bool = False

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def description(self) -> str:
        return f"manifest {self.path}{self.named_by}"

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        files = RowFiles(self.folders, walk)
        for row, look in look_ahead(self.rows(walk, files), files.look, walk.while_waiting):
            try:
                audio_path, fingerprint, end_ms, is_cut = files.resolve(row, look)
            except NoAudio as problem:
                if problem.not_found:
                    problem.fix = f"badcjobs run {shell_line(self.name)} --root DIR …"
                    problem.fix += "   (DIR: the folder that its source_paths are relative to)"
                chunk = Chunk(row.recording_id, row.chunk_id, row.source_path, "", *row.times, place=row.place)
                yield from walk.add_missing(row.line, str(problem), problem, chunk)
                continue
            sha256 = row.fields.get("sha256", "").strip().lower()
            if _SHA256.fullmatch(sha256):  # it may have another value: "", "n/a", another hash
                fingerprint = replace(fingerprint, audio_sha256=sha256)
            yield Chunk(
                row.recording_id,
                row.chunk_id,
                row.source_path,
                audio_path,
                row.times[0],
                end_ms,
                fingerprint,
                is_cut=is_cut,
                place=row.place,
            )

    def rows(self, walk: Walk, files: RowFiles) -> Iterator[tuple[ManifestRow, Question | None]]:
        """Read every row, and yield those that the walk takes, each with the question about its file."""
        before = ""
        first: Times = (0, None)
        has_asked = False
        may_look = False
        for line, fields in read_rows(self.path, walk.mistakes):
            recording_id, chunk_id, path = _identity_of(fields)
            is_ours = walk.takes(recording_id, chunk_id)

            times, cut, mistakes = check_row(fields)
            place, wrong_place = read_place(fields)
            mistakes += wrong_place
            fix = None
            if "\\x" in recording_id and ESCAPED.search(recording_id) and not ESCAPED.search(path):
                mistakes.append(f"recording_id {recording_id} is not UTF-8")
                fix = copy_command(self.path, "iconv -f latin1 -t utf-8")
            for mistake in mistakes:
                walk.mistakes.add(line, mistake, fix=fix)

            is_first = path != before
            if is_first:
                before = path
                first = times
                has_asked = False
                may_look = walk.may_look()
            if mistakes or not is_ours:
                continue
            question = None
            lacks_end = times[1] is None
            if not has_asked and (may_look or lacks_end):
                has_asked = True
                question = path, files.measures or lacks_end
            first_of_file = first
            if cut.startswith("as "):
                start, end = cut[3:].split("-")
                first_of_file = (int(start), int(end))
            identity = (line, recording_id, chunk_id, path)
            yield ManifestRow(*identity, times, place, cut, first_of_file, is_first, fields), question

    def named_recordings(self) -> Iterator[Chunk]:
        before = None
        for _, fields in read_rows(self.path, Mistakes([self.name])):
            recording_id, _, path = _identity_of(fields)
            place, _ = read_place(fields)
            if (recording_id, path, place) != before:
                before = (recording_id, path, place)
                yield Chunk(
                    recording_id,
                    recording_id,
                    path,
                    locate(path, self.folders),
                    place=place,
                )

    def identities(self) -> Iterator[tuple[int, ChunkKey]]:
        for line, fields in read_rows(self.path, Mistakes([self.name])):
            yield line, (fields["recording_id"], fields["chunk_id"])
