"""Reads tables and detections of a published database for an export, and writes rows as CSV, JSON or Parquet.

Text is UTF-8 in every locale. Rows are streamed.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone, tzinfo
from itertools import chain, groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TextIO

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import NameGaps, RecordingName
from badcjobs.paths import run_of, shell_line
from badcjobs.store.connect import as_sqlite_utils, reading, with_logs
from badcjobs.store.task_writer import count_gaps

Row = tuple[object, ...]


def in_batches(cursor: sqlite3.Cursor) -> Iterator[list[Row]]:
    """Yield rows in batches, to limit both memory and the number of calls."""
    return iter(lambda: cursor.fetchmany(_BATCH), [])


@contextmanager
def open_for_export(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a published task or job database for reading; errors while reading name the file.

    Refuse a file with a WAL or journal beside it: opened as sealed, it would lack those rows.
    """
    run = shell_line(run_of(path.parent))
    again = f"badcjobs merge {run} && badcjobs export {run} …"
    with reading(path, lambda why: "pip install --upgrade badcjobs" if why.startswith("schema ") else again) as db:
        for beside in with_logs(path)[1:]:
            raise sqlite3.DatabaseError(f"{beside.name} exists: the file is being written, or its writer was killed")
        yield db


def list_tables(db: sqlite3.Connection) -> list[str]:
    """Return the names of all tables and views, in file order."""
    tool = as_sqlite_utils(db)
    return [*tool.table_names(), *tool.view_names()]


def check_tables(db: sqlite3.Connection, wanted: Sequence[str], path: Path) -> None:
    """Refuse tables that the file does not have; the error names all of them."""
    there = list_tables(db)
    if missing := [name for name in wanted if name not in there]:
        raise BadInput(
            f"{path.name} has no table {', '.join(missing)}",
            why="it has " + ", ".join(there),
            fix=f"badcjobs export {path} --table {there[0]} …" if there else None,
        )


def read_table(db: sqlite3.Connection, table: str, form: str) -> tuple[dict[str, str], Iterator[list[Row]]]:
    """Return the columns of a table with their SQL types (computed ones: only for parquet), and its rows."""
    types = {column.name: column.type for column in as_sqlite_utils(db)[table].columns}
    sql = f"SELECT * FROM {quoted(table)}"
    # A computed column of a view has the type of its values; one query reads them all, because a view may be slow.
    computed = [name for name, kind in types.items() if kind not in _ARROW]  # a view may have columns without a type
    if computed and form == "parquet":
        kinds = ", ".join(f"max(typeof({name})) FILTER (WHERE {name} IS NOT NULL)" for name in map(quoted, computed))
        row = db.execute(f"SELECT {kinds} FROM ({sql})").fetchone()
        types |= {name: (kind or "REAL").upper() for name, kind in zip(computed, row, strict=True)}
    return types, in_batches(db.execute(sql))


def quoted(name: str) -> str:
    """Return an SQL identifier in quotes."""
    return '"' + name.replace('"', '""') + '"'


VIEW = "recording_detection"
# Users asked for the first eight columns; their names and order must not change.
COLUMNS = {
    "study_area": "TEXT",
    "location": "TEXT",
    "recording_date_time": "TEXT",
    "start_s": "REAL",
    "end_s": "REAL",
    "species_code": "TEXT",
    "species_name": "TEXT",
    "score": "REAL",
    "recording_id": "TEXT",
    "chunk_id": "TEXT",
    "detected_at": "TEXT",
    "detected_at_utc": "TEXT",
    "recording_date": "TEXT",
}
_RENAMED = "temp.renamed_recording"
# A date that was read from the path is read again.
_PATHS = """
    SELECT c.recording_id, min(c.source_path), c.audio_path, nullif(r.recorded_on, substr(r.recorded_at, 1, 10)),
           r.location_name
    FROM chunk c LEFT JOIN recording r USING (recording_id) GROUP BY c.recording_id"""


class DetectionFilter(NamedTuple):
    """Which detections are wanted; without species: those of all species."""

    species: Sequence[str] = ()
    min_score: float | None = None

    @property
    def condition(self) -> str:
        """The SQL condition on the columns of detections; its parameters are ``values``."""
        where = "true"
        if self.species:
            marks = ", ".join("?" * len(self.species))
            where = f"(label COLLATE NOCASE IN ({marks}) OR label_name COLLATE NOCASE IN ({marks}))"
        if self.min_score is not None:  # drops rows without a score, too
            where += f" AND score >= {self.min_score!r}"
        return where

    @property
    def values(self) -> tuple[str, ...]:
        """The parameters of ``condition``."""
        return (*self.species, *self.species)

    def never_heard(self, db: sqlite3.Connection) -> list[str]:
        """Return which of its species have no single detection in the job, at any score."""
        there = set()
        for names in db.execute("SELECT DISTINCT label, label_name FROM detection"):
            there |= {name.upper() for name in names if name is not None}
        return [name for name in self.species if name.upper() not in there]


@dataclass
class JobDetections:
    """The detections of a job database, at their times in the recording."""

    db: sqlite3.Connection
    selection: DetectionFilter
    time_zone: tzinfo | None  # of the recorders' clocks
    recordings: str = "recording"  # the table with their names

    def rename(self, name_of: Callable[[str, str, str], RecordingName]) -> None:
        """Read study area, location and time of all recordings from their paths again; the database is not changed."""
        self.db.execute(
            f"""CREATE TABLE {_RENAMED} (
                    recording_id TEXT PRIMARY KEY, source_path, study_area, location, recorded_at, pattern,
                    recorded_on, location_name
                ) WITHOUT ROWID"""
        )
        for recording_id, source_path, audio_path, *given in self.db.execute(_PATHS):
            name = name_of(recording_id, source_path, audio_path)
            facts = (name.study_area, name.location, name.recorded_at, name.pattern)
            self.db.execute(
                f"INSERT INTO {_RENAMED} VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (recording_id, source_path, *facts, *given),
            )
        self.recordings = _RENAMED

    def gaps(self) -> NameGaps:
        """Count the recordings without a study area, a date or a time."""
        return count_gaps(self.db, self.recordings)

    def study_areas(self) -> list[str | None]:
        """Return all study areas in row order; None: recordings without one."""
        rows = self.db.execute(f"SELECT DISTINCT study_area FROM {self.recordings} ORDER BY study_area")
        return [area for (area,) in rows]

    def batches(self) -> Iterator[tuple[str | None, Sequence[Row]]]:
        """Yield the rows in order, in batches; each batch belongs to one study area, which comes with it."""
        cursor = self.db.execute(
            f"""SELECT n.study_area, coalesce(n.location, n.location_name), n.recorded_at,
                       v.start_ms / 1000.0, v.end_ms / 1000.0, v.label, v.label_name, v.score, v.recording_id,
                       v.chunk_id, coalesce(n.recorded_on, substr(n.recorded_at, 1, 10))
                FROM {VIEW} v LEFT JOIN {self.recordings} n USING (recording_id)
                WHERE {self.selection.condition}
                ORDER BY 1, 2, 3, v.recording_id, v.start_ms, v.end_ms, v.label, v.score, v.chunk_id""",
            self.selection.values,
        )
        for batch in in_batches(cursor):
            for area, rows in groupby(batch, key=itemgetter(0)):
                yield area, [(*row[:-1], *self._times(row[2], row[3]), row[-1]) for row in rows]

    def _times(self, recorded_at: Any, start_s: Any) -> tuple[str | None, str | None]:
        """Return when a detection starts, by the clock of the recorder and in UTC; None: not known."""
        if recorded_at is None or len(recorded_at) == len("2026-05-01"):
            return None, None
        begin = datetime.fromisoformat(recorded_at)
        since = timedelta(seconds=start_s)
        local = (begin + since).isoformat(timespec="milliseconds")
        if self.time_zone is None:
            return local, None
        utc = begin.replace(tzinfo=self.time_zone).astimezone(timezone.utc) + since
        return local, utc.isoformat(timespec="milliseconds").replace("+00:00", "Z")


# --- rows as CSV, JSON, JSON lines or Parquet -------------------------------------------------------------------------

Write = Callable[[Iterable[Sequence[object]]], None]
_BATCH = 10_000  # also the size of a row group of Parquet
_FORMULA = frozenset("=+-@\t\r\n")  # the first characters of what a spreadsheet may run
_ARROW = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}

# ASCII only: safe for readers that split lines at every Unicode line break, or decode with the locale's encoding.
_encode = json.JSONEncoder(allow_nan=False).encode


@contextmanager
def rows_written_to(out: BinaryIO, form: str, types: Mapping[str, str]) -> Iterator[Write]:
    """Give a function that writes rows as csv (RFC 4180), json (an array), jsonl (one object per line) or parquet.

    ``types`` maps each column to its SQL type, in order. NULL becomes an empty field or null. In csv, a text that a
    spreadsheet would run as a formula gets an apostrophe.
    """
    if form == "parquet":
        arrow, parquet = load_pyarrow()
        schema = arrow.schema([(name, getattr(arrow, _ARROW[kind])()) for name, kind in types.items()])
        with parquet.ParquetWriter(out, schema, compression="zstd") as group_writer:

            def write_group(rows: Iterable[Sequence[object]]) -> None:
                columns = dict(zip(types, zip(*rows, strict=True), strict=True))
                group_writer.write_table(arrow.Table.from_pydict(columns, schema=schema))

            yield write_group
        return
    names = tuple(types)
    with as_text(out) as text:
        if form == "csv":
            writer = csv.writer(text)
            writer.writerow(names)
            yield lambda rows: writer.writerows(map(_without_formulas, rows))
        elif form == "jsonl":
            yield lambda rows: text.writelines(json_object(names, row) + "\n" for row in rows)
        else:
            befores = chain(["[\n"], repeat(",\n"))
            yield lambda rows: text.writelines(next(befores) + json_object(names, row) for row in rows)
            text.write("[]\n" if next(befores) == "[\n" else "\n]\n")


def _without_formulas(row: Sequence[object]) -> list[object]:
    return [f"'{value}" if isinstance(value, str) and value[:1] in _FORMULA else value for value in row]


def json_object(names: Sequence[str], row: Sequence[object]) -> str:
    """Return a row as a JSON object on one line."""
    try:
        return _encode(dict(zip(names, row, strict=True)))
    except ValueError:  # JSON has no infinity, SQLite does
        finite = [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]
        return _encode(dict(zip(names, finite, strict=True)))


@contextmanager
def as_text(out: BinaryIO) -> Iterator[TextIO]:
    """Give a text file that writes to a binary file; the binary file stays open."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    try:
        yield text
        text.flush()
    finally:
        with suppress(OSError):
            text.detach()  # flushes again; the first flush has already raised the error


def load_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and pyarrow.parquet; raise NotHere with the install command without them."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise NotHere(
            "--format parquet needs pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'badcjobs[parquet]'",
        ) from error
