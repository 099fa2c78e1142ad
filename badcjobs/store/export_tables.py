"""What an export takes out of a sealed file, tables or detections, and the forms in which rows are written.

Text is UTF-8, whatever the machine's locale, and written as the rows come.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import re
import shlex
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from itertools import chain, groupby, repeat
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import NameGaps, RecordingName
from badcjobs.store.connect import reading, with_tool
from badcjobs.store.task_writer import EACH_ONCE, count_gaps

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_MS = 2**63 - 1  # SQLite's largest integer
_DATE_IN_DIGITS = re.compile(r"(19|20)\d{2}(\d{2}){0,2}")  # 20260701 would be a moment in 1970
_FORMS = "a time is 2026-07-01, 2026-07-01T06:30, 2026-07-01T06:30:00-07:00, …Z, or UTC milliseconds; naive means UTC"

# How a table says when, where not by an instant (at_ms): a stretch that may not have ended.
_STRETCHES = (
    ("from_ms", "to_ms"),
    ("started_at_ms", "ended_at_ms"),
    ("started_at_ms", "last_sign_ms"),
    ("first_at_ms", "last_at_ms"),
)
# What was heard has the time of the chunk it was heard in; its own times count from the chunk's start.
_THROUGH = {"detection": "chunk", "rival_detection": "rival_chunk"}


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of time in UTC milliseconds; None: open at that end."""

    from_ms: int | None = None
    to_ms: int | None = None

    def __bool__(self) -> bool:
        return self.from_ms is not None or self.to_ms is not None

    def overlaps(self, start: str, end: str) -> str:
        """Return the SQL condition for a stretch with a moment inside the window; one without an end goes on."""
        parts = [f"{start} IS NOT NULL"]
        if self.to_ms is not None:
            parts.append(f"{start} < {self.to_ms}")
        if self.from_ms is not None:  # the last part keeps a stretch of no length that lies on the edge
            parts.append(f"({end} IS NULL OR {end} > {self.from_ms} OR {start} >= {self.from_ms})")
        return " AND ".join(parts)


def parse_window(from_text: str | None, to_text: str | None) -> Window:
    """Return the window that two options say, or name everything that is wrong with them."""
    mistakes, moments = [], []
    for option, text in (("--from", from_text), ("--to", to_text)):
        try:
            moments.append(None if text is None else parse_moment(text))
        except ValueError:
            mistakes.append(f"{option} {text} is not a time")
    if mistakes:
        raise BadInput("; ".join(mistakes), why=_FORMS, fix="--from 2026-07-01 --to 2026-07-02T06:30Z")
    from_ms, to_ms = moments
    if from_ms is not None and to_ms is not None and from_ms >= to_ms:
        raise BadInput(
            f"--from {from_text} is not before --to {to_text}",
            why="the window is from (included) to (excluded), so nothing is in it",
            fix=f"--from {to_text} --to {from_text}" if from_ms > to_ms else None,
        )
    return Window(from_ms, to_ms)


def parse_moment(text: str) -> int:
    """Return UTC milliseconds from an ISO-8601 date or date-time, or from milliseconds; ValueError: neither."""
    text = text.strip()
    if re.fullmatch(r"-?[0-9]+", text):
        if _DATE_IN_DIGITS.fullmatch(text) or abs(int(text)) > _LAST_MS:
            raise ValueError(text)
        return int(text)
    moment = datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))  # Python 3.10 knows no Z
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=timezone.utc)
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def condition(table: str, columns: Sequence[str], window: Window) -> str | None:
    """Return the SQL condition that keeps a table's rows inside the window; None: its rows have no time."""
    if table in _THROUGH:
        through = window.overlaps("c.started_at_ms", "c.ended_at_ms")
        return (
            f"EXISTS (SELECT 1 FROM {_THROUGH[table]} c WHERE c.recording_id = {table}.recording_id "
            f"AND c.chunk_id = {table}.chunk_id AND c.task_id = {table}.task_id AND {through})"
        )
    if "at_ms" in columns:
        return window.overlaps("at_ms", "at_ms")
    for start, end in _STRETCHES:
        if start in columns and end in columns:
            return window.overlaps(start, end)
    return None


Row = tuple[object, ...]
_STORED = ("INTEGER", "REAL", "TEXT")  # the types that tables declare


def in_batches(cursor: sqlite3.Cursor, form: str) -> Iterator[list[Row]]:
    """Yield rows, many at a time: neither all of them in memory nor one call for each."""
    size = _ROW_GROUP if form == "parquet" else _TEXT_BATCH
    return iter(lambda: cursor.fetchmany(size), [])


@contextmanager
def open_for_export(path: Path) -> Iterator[sqlite3.Connection]:
    """Open a published task or job database for reading; whatever goes wrong while reading it names the file.

    Refuse one beside which a writer has left something: opening it as sealed would miss those rows.
    """
    run = shlex.quote(str(path.parent.parent if path.parent.name == "tasks" else path.parent))
    again = f"badcjobs merge {run} && badcjobs export {run} …"
    with reading(path, lambda why: "pip install --upgrade badcjobs" if why.startswith("schema ") else again) as db:
        # Of a job database's journal nothing is left by now.
        for beside in (path.with_name(path.name + ending) for ending in ("-wal", "-journal")):
            if beside.exists() and beside.stat().st_size:
                raise sqlite3.DatabaseError(
                    f"{beside.name} lies next to it: it is being written, or its writer was killed"
                )
        yield db


def list_tables(db: sqlite3.Connection) -> list[str]:
    """Return the names of all tables and views, in the order of the file."""
    tool = with_tool(db)
    return [*tool.table_names(), *tool.view_names()]


def check_tables(db: sqlite3.Connection, wanted: Sequence[str], path: Path) -> None:
    """Refuse tables that the file does not have, all at once."""
    there = list_tables(db)
    if missing := [name for name in wanted if name not in there]:
        raise BadInput(
            f"{path.name} has no table {', '.join(missing)}",
            why="it has " + ", ".join(there),
            fix=f"badcjobs export {path} --table {there[0]} …" if there else None,
        )


def check_columns(db: sqlite3.Connection, table: str, wanted: Sequence[str], command: str) -> None:
    """Refuse columns that the table does not have, all at once, and those that are named twice.

    ``command`` is the one that was given, without its columns.
    """
    there = tuple(declared_types(db, table))
    right = ",".join(dict.fromkeys(name for name in wanted if name in there)) or there[0]
    fix = f"{command} --columns {shlex.quote(right)}"
    if missing := [name or "''" for name in wanted if name not in there]:
        raise BadInput(f"{table} has no column {', '.join(missing)}", why="it has " + ", ".join(there), fix=fix)
    if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
        raise BadInput(f"--columns names {', '.join(twice)} more than once", fix=fix)


def select(
    db: sqlite3.Connection, table: str, columns: Sequence[str] | None, window: Window, *, everything: bool
) -> tuple[tuple[str, ...], str]:
    """Return these columns (None: all) and the query for them in this time; the table and the columns are there.

    Where ``everything`` is exported, a table without a time describes the rest, and comes whole.
    """
    there = tuple(declared_types(db, table))
    chosen = there if columns is None else tuple(columns)
    sql = f"SELECT {', '.join(map(quoted, chosen))} FROM {quoted(table)}"
    inside = condition(table, there, window) if window else "true"
    if inside is None and not everything:
        raise BadInput(
            f"--from and --to mean nothing for {table}",
            why=f"its rows have no time; its columns are {', '.join(there)}",
            fix=f"the same command without them for --table {table}",
        )
    return chosen, f"{sql} WHERE {inside or 'true'}"


def declared_types(db: sqlite3.Connection, table: str) -> dict[str, str]:
    """Map column to declared SQL type; an expression in a view may have none."""
    return {column.name: column.type for column in with_tool(db)[table].columns}


def column_types(db: sqlite3.Connection, table: str, columns: Sequence[str], sql: str) -> dict[str, str]:
    """Map each column to its SQL type: as declared or, where a view computes it, as its values are.

    All values are looked at once: a view may take a while.
    """
    declared = declared_types(db, table)
    types = {name: declared[name] for name in columns}
    computed = [name for name, kind in types.items() if kind not in _STORED]
    if computed:
        found = ", ".join(f"group_concat(DISTINCT typeof({quoted(name)}))" for name in computed)
        for name, kinds in zip(computed, db.execute(f"SELECT {found} FROM ({sql})").fetchone(), strict=True):
            there = set((kinds or "null").split(",")) - {"null"}
            types[name] = "TEXT" if "text" in there else "INTEGER" if there == {"integer"} else "REAL"
    return types


def quoted(name: str) -> str:
    """Return a name as SQL writes it."""
    return '"' + name.replace('"', '""') + '"'


VIEW = "recording_detection"
# The names that were asked for come first, and stay.
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
}
_RENAMED = "temp.renamed_recording"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which detections; no species: all of them."""

    species: tuple[str, ...] = ()
    min_score: float | None = None


class Heard:
    """The detections of a job database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._renamed = False

    def rename(self, name_of: Callable[[str, str, str], RecordingName]) -> None:
        """Read the paths of all recordings anew; the database itself stays as it is."""
        self._db.execute(
            f"""CREATE TABLE {_RENAMED} (
                    recording_id TEXT PRIMARY KEY, source_path, study_area, location, recorded_at, pattern
                ) WITHOUT ROWID"""
        )
        paths = self._db.execute("SELECT recording_id, min(source_path), audio_path FROM chunk GROUP BY recording_id")
        rows = (
            (r, s, n.study_area, n.location, n.recorded_at, n.pattern) for r, s, a in paths for n in [name_of(r, s, a)]
        )
        self._db.executemany(f"INSERT INTO {_RENAMED} VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._renamed = True

    def gaps(self) -> NameGaps:
        """Return of how many recordings the paths do not tell enough."""
        return count_gaps(self._db, _RENAMED if self._renamed else EACH_ONCE)

    def study_areas(self) -> list[str | None]:
        """Return all study areas in the order of the rows; None: that of recordings without one."""
        recordings = _RENAMED if self._renamed else "recording"
        found = self._db.execute(f"SELECT DISTINCT study_area FROM {recordings} ORDER BY study_area")
        return [area for (area,) in found]

    def count_chunks(self) -> tuple[int, int]:
        """Return how many chunks there are, and how many of them are not done."""
        many, undone = self._db.execute("SELECT count(*), total(status != 'done') FROM chunk").fetchone()
        return int(many), int(undone)

    def never_heard(self, species: Iterable[str]) -> list[str]:
        """Return those that no chunk of the job has heard, whatever the score."""
        there = set()
        for names in self._db.execute("SELECT DISTINCT label, label_name FROM detection"):
            there |= {name.upper() for name in names if name is not None}
        return [name for name in species if name.upper() not in there]

    def batches(self, wanted: Wanted, form: str) -> Iterator[tuple[str | None, Sequence[Row]]]:
        """Yield the rows in their order, many at a time, those of one study area together with its name."""
        marks, where = ", ".join("?" * len(wanted.species)), "true"
        if wanted.species:
            where = f"(v.label COLLATE NOCASE IN ({marks}) OR v.label_name COLLATE NOCASE IN ({marks}))"
        if wanted.min_score is not None:  # an unknown score is not above it
            where += f" AND v.score >= {wanted.min_score!r}"
        place, join = ("n", f"LEFT JOIN {_RENAMED} n USING (recording_id)") if self._renamed else ("v", "")
        cursor = self._db.execute(
            f"""SELECT {place}.study_area, {place}.location, {place}.recorded_at, v.start_ms / 1000.0,
                       v.end_ms / 1000.0, v.label, v.label_name, v.score, v.recording_id, v.chunk_id
                FROM {VIEW} v {join} WHERE {where}
                ORDER BY 1, 2, 3, v.recording_id, v.start_ms, v.end_ms, v.label, v.score, v.chunk_id""",
            wanted.species * 2,
        )
        for batch in in_batches(cursor, form):
            for area, rows in groupby(batch, key=itemgetter(0)):
                yield area, list(rows)


# --- rows as CSV, JSON, JSON lines or Parquet -------------------------------------------------------------------------

Write = Callable[[Iterable[Sequence[object]]], None]
_ROW_GROUP, _TEXT_BATCH = 65_536, 5_000
_ARROW = {"INTEGER": "int64", "REAL": "float64", "TEXT": "string"}

# ASCII: readers that cut lines at every Unicode line break, or read in the locale's encoding, stay right.
_encode = json.JSONEncoder(allow_nan=False).encode


@contextmanager
def rows_written_to(out: BinaryIO, form: str, types: Mapping[str, str]) -> Iterator[Write]:
    """Give what writes lots of rows to a file: csv (RFC 4180), json (an array), jsonl (an object per line) or parquet.

    ``types`` maps each column to its SQL type, in order. A value that is not known is an empty field, or null.
    """
    if form == "parquet":
        arrow, parquet = load_pyarrow()
        schema = arrow.schema([(name, getattr(arrow, _ARROW[kind])()) for name, kind in types.items()])
        with parquet.ParquetWriter(out, schema, compression="zstd") as group_writer:

            def write_group(rows: Iterable[Sequence[object]]) -> None:
                columns = zip(schema.types, zip(*rows, strict=True), strict=True)
                arrays = [arrow.array(values, kind) for kind, values in columns]
                group_writer.write_table(arrow.Table.from_arrays(arrays, schema=schema))

            yield write_group
        return
    names = tuple(types)
    with as_text(out) as text:
        if form == "csv":
            writer = csv.writer(text)
            writer.writerow(names)
            yield writer.writerows
        elif form == "jsonl":
            yield lambda rows: text.writelines(json_object(names, row) + "\n" for row in rows)
        else:
            befores = chain(["[\n"], repeat(",\n"))
            yield lambda rows: text.writelines(next(befores) + json_object(names, row) for row in rows)
            text.write("[]\n" if next(befores) == "[\n" else "\n]\n")


def json_object(names: Sequence[str], row: Sequence[object]) -> str:
    """Return a row as a JSON object on one line."""
    try:
        return _encode(dict(zip(names, row, strict=True)))
    except ValueError:  # SQLite stores infinity, JSON has no word for it
        finite = [None if isinstance(value, float) and not math.isfinite(value) else value for value in row]
        return _encode(dict(zip(names, finite, strict=True)))


@contextmanager
def as_text(out: BinaryIO) -> Iterator[TextIO]:
    """Write text to a binary file, which stays open."""
    text = io.TextIOWrapper(out, encoding="utf-8", newline="")
    try:
        yield text
        text.flush()
    finally:
        with suppress(OSError):
            text.detach()  # flushes once more; what is wrong with the file was said by the flush before


def load_pyarrow() -> tuple[Any, Any]:
    """Return pyarrow and its Parquet writer, or say what to install."""
    try:
        return importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise NotHere(
            "--format parquet needs pyarrow, which is not installed",
            why=str(error),
            fix="pip install 'badcjobs[parquet]'",
        ) from error
