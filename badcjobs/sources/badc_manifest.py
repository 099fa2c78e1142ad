"""A BADC manifest as a source: its rows, with the audio of our own found on disk."""

from __future__ import annotations

import csv
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from badcjobs.model import Chunk
from badcjobs.sources.audio_files import NoAudio
from badcjobs.sources.look_ahead import look_ahead
from badcjobs.sources.mistakes import Mistakes, quoted, read_lines
from badcjobs.sources.row_files import FileQuestion, RowFiles, RowLooks, Times
from badcjobs.sources.walk import Walk

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
REQUIRED = ("recording_id", "chunk_id", "source_path")
TIMES = ("start_ms", "end_ms")
CARRIED = ("overlap_ms", "notes")  # what we do not read, but carry on
# What a plan knows of a row, and its shard alone would not show. "yes": it is a stretch of its file, to be cut out.
# "as 0-30000": whether it is one is seen by the first row of the file, which had these times and may be elsewhere.
CUT = "badcjobs_cut"
_AS = re.compile(r"as (\d{1,15})-(\d{1,15})")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LATEST_MS = 10**15  # thirty thousand years; a database holds no more than 64 bits


@dataclass(frozen=True, slots=True)
class Columns:
    """Where the header puts what we read; None: the manifest has no such column."""

    width: int
    recording_id: int
    chunk_id: int
    source_path: int
    start_ms: int | None
    end_ms: int | None
    sha256: int | None = None
    overlap_ms: int | None = None
    notes: int | None = None
    cut: int | None = None
    further: tuple[int, ...] = ()  # all that others have added
    further_names: tuple[str, ...] = ()


def is_header(line: str) -> bool:
    """Say whether a line could be the header of a manifest."""
    return {"recording_id", "chunk_id"} <= set(_names(line.lstrip("\ufeff").split(",")))


def read_rows(path: Path, mistakes: Mistakes) -> Iterator[tuple[int, list[str], Columns]]:
    """Yield line, fields and columns of every row that has as many fields as the header."""
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
        if not row or (not row[0] and not any(row)):  # spreadsheets leave lines of commas at the end
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
    """Return where the columns are; None, and every reason noted, when rows could not be understood."""
    names = _names(row)
    show_header = f"head -n 1 {shlex.quote(str(path))}  # wanted: {HEADER}"
    missing = [name for name in REQUIRED if name not in names]
    if missing:
        text = f"lacks the column{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
        mistakes.add(0, text, why=f"its header is {quoted(','.join(names))}", fix=show_header)
    twice = [name for name in (*REQUIRED, *TIMES) if names.count(name) > 1]
    if twice:
        mistakes.add(0, f"has more than one column {', '.join(twice)}", fix=show_header)
    if missing or twice:
        return None
    recording_id, chunk_id, source_path = (names.index(name) for name in REQUIRED)
    start_ms, end_ms = (names.index(name) if name in names else None for name in TIMES)
    # Where two columns have that name nobody knows which of them is true.
    sha256 = names.index("sha256") if names.count("sha256") == 1 else None
    overlap_ms, notes, cut = (names.index(name) if name in names else None for name in (*CARRIED, CUT))
    known = {recording_id, chunk_id, source_path, start_ms, end_ms, sha256, overlap_ms, notes, cut}
    further = tuple(place for place in range(len(names)) if place not in known)
    # A second sha256 is not to make those of another manifest doubtful, where the rows of both come together.
    ours = HEADER.split(",")
    further_names = tuple(f"{name} (column {at + 1})" if (name := names[at]) in ours else name for at in further)
    return Columns(
        len(names), recording_id, chunk_id, source_path, start_ms, end_ms, sha256,
        overlap_ms, notes, cut, further, further_names,
    )  # fmt: skip


def check_row(row: Sequence[str], columns: Columns) -> tuple[int, int | None, Sequence[str]]:
    """Return start, end (None: the row does not say) and what is wrong with the row."""
    start_text = "" if columns.start_ms is None else row[columns.start_ms]
    end_text = "" if columns.end_ms is None else row[columns.end_ms]
    ids = row[columns.recording_id], row[columns.chunk_id], row[columns.source_path]
    try:  # nearly every row of a million ends here
        start_ms, end_ms = int(start_text), int(end_text)
        if 0 <= start_ms < end_ms <= _LATEST_MS and ids[0].strip() and ids[1].strip() and ids[2].strip():
            return start_ms, end_ms, ()
    except ValueError:
        pass
    return _check_slowly(ids, start_text, end_text)


def _check_slowly(ids: Sequence[str], start_text: str, end_text: str) -> tuple[int, int | None, Sequence[str]]:
    wrong = [f"{name} is empty" for name, value in zip(REQUIRED, ids, strict=True) if not value.strip()]
    times: dict[str, int | None] = {}
    for name, text in zip(TIMES, (start_text, end_text), strict=True):
        try:
            times[name] = parse_ms(text)
        except ValueError as error:
            wrong.append(f"{name} {error}")
    start_ms, end_ms = times.get("start_ms") or 0, times.get("end_ms")
    if len(times) == 2 and end_ms is not None and end_ms <= start_ms:
        wrong.append(f"end_ms {end_ms} is not after start_ms {start_ms}")
    return start_ms, end_ms, wrong


def sha256_of(row: Sequence[str], columns: Columns) -> str | None:
    """Return the row's checksum; None where the column is missing or holds anything else: "", "n/a", another kind."""
    if columns.sha256 is None:
        return None
    text = row[columns.sha256].strip().lower()
    return text if _SHA256.fullmatch(text) else None


def cut_of(text: str) -> tuple[bool, tuple[int, int] | None]:
    """Return whether a row is known to be a stretch of its file, and the times of that file's first row, if told."""
    if not text or text == "yes":
        return text == "yes", None
    if found := _AS.fullmatch(text):
        return False, (int(found[1]), int(found[2]))
    raise ValueError(f'{CUT} {quoted(text)} is neither "yes" nor "as START-END"')


def check_cut(row: Sequence[str], columns: Columns) -> tuple[str, Sequence[str]]:
    """Return what the column CUT of a row holds, and what is wrong with that."""
    text = "" if columns.cut is None else row[columns.cut].strip()
    try:
        cut_of(text)
    except ValueError as error:
        return "", (str(error),)
    return text, ()


def parse_ms(text: str) -> int | None:
    """Read whole milliseconds; ``1000.0`` counts, because pandas writes that next to an empty cell."""
    try:
        value = int(text)
    except ValueError:
        if not text.strip():
            return None
        value = _whole(text)
    if not 0 <= value <= _LATEST_MS:
        raise ValueError(f"{value} is {'negative' if value < 0 else 'too large'}")
    return value


def _whole(text: str) -> int:
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if not value.is_integer():
        raise ValueError(f"{quoted(text)} is not a whole number")
    return int(value)


def _names(fields: Sequence[str]) -> list[str]:
    return [field.strip().strip('"') for field in fields]


# --- the source -------------------------------------------------------------------------------------------------------


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
                where = "(DIR: the folder its source_paths start from)"
                fix = f"badcjobs run {shlex.quote(self.name)} --root DIR …   {where}" if problem.nowhere else None
                yield from walk.miss(line, str(problem), problem, row_alone, fix)
            else:
                yield Chunk(
                    recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, fingerprint, is_cut=is_cut
                )

    def _our_rows(self, walk: Walk) -> Iterator[tuple[_OurRow, FileQuestion | None]]:
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
