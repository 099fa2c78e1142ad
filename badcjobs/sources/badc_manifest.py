"""A BADC manifest as a source: its rows, and their audio files."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import AudioHeader, Chunk, ChunkKey, Fingerprint
from badcjobs.paths import shell_line
from badcjobs.sources.audio_files import ESCAPED, Found, NoAudio, end_ms_of, look_at, with_header
from badcjobs.sources.mistakes import Mistakes, copy_command, quoted, read_lines
from badcjobs.sources.walk import Walk, look_ahead

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
REQUIRED = ("recording_id", "chunk_id", "source_path")
TIMES = ("start_ms", "end_ms")
CARRIED = ("overlap_ms", "notes")  # not read, but copied into the manifests of a plan
# A column that a plan adds, because one shard alone does not show it. "yes": the row is a part of its file, and is cut
# out. "as 0-30000": the first row of the file, which may be in another shard, had these times and decides.
CUT = "badcjobs_cut"
_AS = re.compile(r"as (\d{1,15})-(\d{1,15})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
Times = tuple[int, int | None]  # start and end of a row
_SLACK_MS = 1000  # a row and its file may differ by this much: recorders are not exact, and numbers are rounded
_LATEST_MS = 10**15  # about thirty thousand years; an integer in the database has 64 bits


class Columns(NamedTuple):
    """The positions of the columns; None: the manifest does not have the column."""

    width: int
    recording_id: int
    chunk_id: int
    source_path: int
    start_ms: int | None = None
    end_ms: int | None = None
    sha256: int | None = None
    overlap_ms: int | None = None
    notes: int | None = None
    badcjobs_cut: int | None = None
    further: tuple[int, ...] = ()  # columns that are not part of a BADC manifest
    further_names: tuple[str, ...] = ()


NO_COLUMNS = Columns(0, 0, 0, 0)  # of a row that is not from a manifest


def is_header(line: str) -> bool:
    """Return whether a line could be the header of a manifest."""
    return {"recording_id", "chunk_id"} <= set(_names(line.lstrip("\ufeff").split(",")))


def read_rows(path: Path, mistakes: Mistakes) -> Iterator[tuple[int, list[str], Columns]]:
    """Yield line number, fields and columns of every row that has as many fields as the header."""
    reader = csv.reader(read_lines(path, mistakes))
    columns: Columns | None = None
    while True:
        line = reader.line_num + 1
        try:
            row = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            mistakes.add(line, f"cannot be read as CSV: {error}")
            continue
        if not row or (not row[0] and not any(row)):  # spreadsheets write lines of commas at the end
            continue
        if columns is None:
            columns = parse_header(row, path, mistakes)
            if columns is None:
                return
        elif len(row) == columns.width:
            yield line, row, columns
        else:
            text = f"{len(row)} field{'' if len(row) == 1 else 's'} where the header has {columns.width}"
            open_quote = "; a quote is opened here and not closed" if reader.line_num > line else ""
            mistakes.add(line, text + open_quote)


def parse_header(row: Sequence[str], path: Path, mistakes: Mistakes) -> Columns | None:
    """Return the positions of the columns; None, with the mistakes noted, if the rows cannot be read."""
    names = _names(row)
    show_header = f"head -n 1 {shell_line(path)}  # expected: {HEADER}"
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        text = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        mistakes.add(0, text, why=f"its header is {quoted(','.join(names))}", fix=show_header)
    twice = [name for name in (*REQUIRED, *TIMES) if names.count(name) > 1]
    if twice:
        mistakes.add(0, f"has more than one column {', '.join(twice)}", fix=show_header)
    if missing or twice:
        return None
    places: dict[str, int] = {name: names.index(name) for name in (*REQUIRED, *TIMES, *CARRIED, CUT) if name in names}
    if names.count("sha256") == 1:  # with two columns it is not known which one is right
        places["sha256"] = names.index("sha256")
    further = tuple(place for place in range(len(names)) if place not in places.values())
    # Numbered, so that a second sha256 column here does not become the sha256 column of a combined manifest.
    ours = HEADER.split(",")
    further_names = tuple(f"{name} (column {at + 1})" if (name := names[at]) in ours else name for at in further)
    return Columns(len(names), further=further, further_names=further_names, **places)


def check_row(row: Sequence[str], columns: Columns) -> tuple[Times, Sequence[str]]:
    """Return start and end (None: not given) and the mistakes of a row."""
    start_text = "" if columns.start_ms is None else row[columns.start_ms]
    end_text = "" if columns.end_ms is None else row[columns.end_ms]
    ids = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
    try:  # a fast path for nearly all rows
        start_ms, end_ms = int(start_text), int(end_text)
        if 0 <= start_ms < end_ms <= _LATEST_MS and ids[0].strip() and ids[1].strip() and ids[2].strip():
            return (start_ms, end_ms), ()
    except ValueError:
        pass
    wrong = [f"{name} is empty" for name, value in zip(REQUIRED, ids, strict=True) if not value.strip()]
    times: dict[str, int | None] = {}
    for name, text in zip(TIMES, (start_text, end_text), strict=True):
        try:
            times[name] = parse_ms(text)
        except ValueError as error:
            wrong.append(f"{name} {error}")
    start, end = times.get("start_ms") or 0, times.get("end_ms")
    if len(times) == 2 and end is not None and end <= start:
        wrong.append(f"end_ms {end} is not after start_ms {start}")
    return (start, end), wrong


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
    if not 0 <= value <= _LATEST_MS:
        raise ValueError(f"{text.strip()} is {'negative' if value < 0 else 'too large'}")
    return int(value)


def check_cut(row: Sequence[str], columns: Columns) -> tuple[str, Times | None, Sequence[str]]:
    """Return the column CUT of a row, the times of its file's first row if given there, and the mistakes."""
    text = "" if columns.badcjobs_cut is None else row[columns.badcjobs_cut].strip()
    if text in ("", "yes"):
        return text, None, ()
    if found := _AS.fullmatch(text):
        return text, (int(found[1]), int(found[2])), ()
    return "", None, (f'{CUT} {quoted(text)} is neither "yes" nor "as START-END"',)


def _names(fields: Sequence[str]) -> list[str]:
    return [field.strip().strip('"') for field in fields]


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
        self._found: Found = "", Fingerprint()
        self._problem: NoAudio | None = None
        self._measured = False

    @property
    def header(self) -> AudioHeader:
        """The header of the current file, if it was read."""
        return self._found[1].header

    def look(self, question: Question) -> Look:
        """Look at a file; may be called by any thread."""
        path, measure = question
        return look_at(path, self._folders, self._read_header if measure else None), measure

    def resolve(
        self, path: str, first: Times, look: Look | None, times: Times, *, known_cut: bool = False
    ) -> tuple[str, Fingerprint, int | None, bool]:
        """Return the path of a row's audio, its fingerprint, its end, and whether to cut it out; or raise NoAudio.

        ``first``: the times of the first row of its file. ``look`` None: the same as for the previous row.
        ``known_cut``: the plan, which read the complete source, requires a cut, unless a setting forbids it.
        """
        if look is not None:
            found, self._measured = look
            self._problem = found if isinstance(found, NoAudio) else None
            self._found = self._found if isinstance(found, NoAudio) else found
        if self._problem is not None:
            raise self._problem.with_traceback(None)
        start_ms, end_ms = times
        if end_ms is None:
            end_ms = self._length_ms()
            # The engine decides about empty audio; but a start after the end of the audio is a mistake.
            if end_ms is not None and 0 < start_ms >= end_ms:
                raise NoAudio(f"start_ms {start_ms} is not before the end of the audio at {end_ms} ms")
        is_cut = (known_cut and self._cuts is None) or self._is_cut(path, first, start_ms, end_ms)
        audio_path, fingerprint = self._found
        if self._measured and not is_cut:  # a file may be one of several chunks: its length is not the recording's
            fingerprint = replace(fingerprint, header=replace(fingerprint.header, duration_s=None))
        return audio_path, fingerprint, end_ms, is_cut

    def _is_cut(self, path: str, first: Times, start_ms: int, end_ms: int | None) -> bool:
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
                what = f"end_ms {end_ms} is after the end of {path} at {audio_ms} ms, so it cannot be cut out"
                raise NoAudio(what, "the same command without run.cut = true: then only such rows fail")
            return start_ms > 0 or audio_ms > end_ms
        is_longer = audio_ms - (end_ms - start_ms) > _SLACK_MS
        # If the first row of a file is a part of it, a row after the end is a missing part, not a separate file.
        first_ms, last_ms = first
        first_is_part = last_ms is not None and last_ms - audio_ms <= _SLACK_MS < audio_ms - (last_ms - first_ms)
        return is_longer and (first_is_part or not is_beyond)

    def _length_ms(self) -> int | None:
        if not self._measured:
            self._found, self._measured = with_header(self._found, self._read_header), True
        return end_ms_of(self.header)


# --- the source -------------------------------------------------------------------------------------------------------

# Line, fields, where they are, times, CUT, times of the first row of its file.
ManifestRow = tuple[int, list[str], Columns, Times, str, Times]


@dataclass(frozen=True, slots=True)
class Manifest:
    """A manifest file; a relative ``source_path`` is searched in ``folders``, in this order."""

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
        files = RowFiles(self.folders, walk)
        for found, look in look_ahead(self.rows(walk, files), files.look, while_waiting=walk.while_waiting):
            line, row, columns, times, cut, first = found
            recording_id, chunk_id, path = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
            try:
                answer = files.resolve(path, first, look, times, known_cut=cut == "yes")
            except NoAudio as problem:
                row_alone = Chunk(recording_id, chunk_id, path, "", *times)
                where = "(DIR: the folder that its source_paths are relative to)"
                fix = f"badcjobs run {shell_line(self.name)} --root DIR …   {where}" if problem.not_found else None
                yield from walk.add_missing(line, str(problem), problem, row_alone, fix)
                continue
            audio_path, fingerprint, end_ms, is_cut = answer
            # The column may be missing, or have another value: "", "n/a", another hash.
            text = "" if columns.sha256 is None else row[columns.sha256].strip().lower()
            if _SHA256.fullmatch(text):
                fingerprint = replace(fingerprint, audio_sha256=text)
            yield Chunk(recording_id, chunk_id, path, audio_path, times[0], end_ms, fingerprint, is_cut=is_cut)

    def rows(self, walk: Walk, files: RowFiles) -> Iterator[tuple[ManifestRow, Question | None]]:
        """Read every row, and yield those that the walk takes, each with the question about its file."""
        mistakes, known_mistakes, before, has_asked, looks = walk.mistakes, 0, "", False, False
        first: Times = 0, None  # of the rows of one path, in any task
        for line, row, columns in read_rows(self.path, mistakes):
            recording_id, chunk_id, path = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
            ours = walk.takes(recording_id, chunk_id)
            times, wrong = check_row(row, columns)
            if "\\x" in recording_id and ESCAPED.search(recording_id) and not ESCAPED.search(path):
                ours = False
                fix = copy_command(self.path, "iconv -f latin1 -t utf-8")
                mistakes.add(line, f"recording_id {recording_id} is not UTF-8", fix=fix)
            cut, given_first, wrong_cut = ("", None, ()) if columns.badcjobs_cut is None else check_cut(row, columns)
            for text in (*wrong, *wrong_cut) if wrong or wrong_cut else ():
                mistakes.add(line, text)
            if mistakes.count != known_mistakes:  # a mistake in this row, or in a line before it
                known_mistakes = mistakes.count
                ours = ours and not (wrong or wrong_cut)
            if path != before:
                before, first, has_asked, looks = path, times, False, walk.may_look()
            if ours:
                question = None
                if not has_asked and (looks or times[1] is None):
                    has_asked, question = True, (path, files.measures or times[1] is None)
                yield (line, row, columns, times, cut, given_first or first), question

    def identities(self) -> Iterator[tuple[int, ChunkKey]]:
        for line, row, columns in read_rows(self.path, Mistakes([self.name])):
            yield line, (row[columns.recording_id], row[columns.chunk_id])
