"""The job database: the tables of all tasks together, kept in the order in which they are read, and what merge adds."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from badcjobs import __version__
from badcjobs.store.connect import create_tables, file_uri
from badcjobs.store.schema import TABLE_BY_NAME, TABLES, Column, Table
from badcjobs.store.views import VIEWS, View

# Read by task and time: these rows lie in that order, so that a task's are neighbours. Samples are neighbours too,
# because a task's are copied in one piece, device by device; without a key of their own SQLite copies them as they are.
ORDERED_BY = {
    "host_sample": "task_id, at_ms",
    "process_sample": "task_id, device_id, at_ms, pid",
    "attempt": "task_id, attempt_id",
    "metric_summary": "task_id, device_id, metric",
    "utilization_count": "task_id, device_id, utilization_percent",
    "usage_sample": "task_id, at_ms",
    "throttle_count": "task_id, device_id, reason",
    "device_time": "task_id, device_id, state",
    "attempt_cost": "task_id, attempt_id",
    "device_stretch": "task_id, device_id, from_ms",
}
_CACHE_KIB = 4_000  # appending, a small cache is quicker: its pages stay in the processor's own
SORT_CACHE_KIB = 32_000

_RIVAL = "(recording_id, chunk_id, task_id) REFERENCES rival_chunk (recording_id, chunk_id, task_id)"

ADDED_TABLES = (
    Table(
        "source_file",
        "What merge found: one row per file, read or not.",
        (
            Column("path", "TEXT NOT NULL", "the file, relative to the job database's folder where it lies below it"),
            Column("task_id", "INTEGER REFERENCES task", "the task in it; NULL: none of its rows are here"),
            Column("status", "TEXT NOT NULL", "merged, recovered, salvaged, copy, kept or skipped"),
            Column("reason", "TEXT", "why it was not simply merged"),
            Column("size_bytes", "INTEGER", "its size when it was read"),
            Column("mtime_ns", "INTEGER", "its time when it was read"),
            Column("rows", "INTEGER", "how many rows of it are here"),
            Column("rows_lost", "INTEGER", "how many are known to be lost; NULL: nobody knows"),
            Column("last_sign_ms", "INTEGER", "the latest time in it"),
            Column("checksum", "TEXT", "of its bytes, as sealed; NULL: it had no seal"),
        ),
        key="path",
    ),
    Table(
        "task_meta",
        "What `meta` says in each task's own file: the settings it ran with, its environment, where it wrote.",
        (
            Column("task_id", "INTEGER NOT NULL REFERENCES task", "task.task_id"),
            Column("key", "TEXT NOT NULL", "name"),
            Column("value", "TEXT", "value; structured ones are JSON"),
        ),
        key="task_id, key",
    ),
    replace(
        TABLE_BY_NAME["chunk"],
        name="rival_chunk",
        help="What another attempt said of a chunk, and lost by the rule: the history behind `chunk`.",
        key="recording_id, chunk_id, task_id",
    ),
    replace(
        TABLE_BY_NAME["detection"],
        name="rival_detection",
        help="What those attempts heard: the history behind `detection`.",
        parent=_RIVAL,
    ),
)
JOB_TABLES = (*TABLES, *ADDED_TABLES)

_HELP = View(
    "column_help",
    "What every column of every table and view means.",
    (
        Column("table_name", "column1", "the table or view"),
        Column("column_name", "column2", "the column"),
        Column("help", "column3", "what it means"),
    ),
    "",
)
JOB_VIEWS = (*VIEWS, _HELP)

# Made after the rows of a new database are in: sorting once is cheaper than keeping an index in order.
INDEXES = {
    "chunk_by_task": "chunk (task_id, status, audio_s)",
    "detection_by_chunk": "detection (recording_id, chunk_id)",
    "attempt_by_chunk": "attempt (recording_id, chunk_id)",
    "rival_chunk_by_task": "rival_chunk (task_id)",
    "sample_by_time": "sample (task_id, device_id, at_ms)",
    **{
        f"{table}_by_task": f"{table} (task_id)"
        for table in ("device", "gap", "worker", "alert", "detection", "rival_detection", "device_total", "mark")
    },
}


def open_draft(path: Path, *, new: bool) -> sqlite3.Connection:
    """Open a job database that nobody else sees yet, to be written in one go and then renamed into place.

    Without locks, which some shared filesystems do not have, and without syncing: only a rollback matters until the
    whole file is synced.
    """
    db = sqlite3.connect(file_uri(path, "nolock=1"), isolation_level=None, uri=True)
    if new:
        db.execute("PRAGMA page_size = 16384")
    db.execute("PRAGMA journal_mode = MEMORY")
    db.execute("PRAGMA synchronous = OFF")
    db.execute(f"PRAGMA cache_size = -{_CACHE_KIB}")
    db.execute("PRAGMA secure_delete = OFF")  # nothing secret here; some builds of SQLite zero every page they free
    if new:
        create_tables(db, JOB_TABLES, ordered_by=ORDERED_BY)
        for view in (*(view.ddl() for view in VIEWS), _column_help()):
            db.execute(view)
        db.execute("INSERT INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
    return db


def create_indexes(db: sqlite3.Connection, names: Collection[str] = tuple(INDEXES)) -> None:
    """Create the indexes of the job database that are not there yet."""
    db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
    for name in names:
        db.execute(f"CREATE INDEX IF NOT EXISTS {name} ON {INDEXES[name]}")


def index_samples(db: sqlite3.Connection) -> None:
    """Make the samples of one task easy to find before all are in: for a task that is added up, replaced or mended."""
    create_indexes(db, ("sample_by_time",))


def is_job_database(db: sqlite3.Connection, attached_as: str = "main") -> bool:
    """Tell a job database from a task database."""
    found = db.execute(f"SELECT 1 FROM {attached_as}.sqlite_master WHERE name = 'source_file'").fetchone()
    return found is not None


def _column_help() -> str:
    """Return the view that says what every column means; a view, because every table carries ``task_id``."""
    helps = [(t.name, column.name, column.help) for t in (*JOB_TABLES, *JOB_VIEWS) for column in t.columns]
    lines = ("(" + ", ".join("'" + text.replace("'", "''") + "'" for text in row) + ")" for row in helps)
    return replace(_HELP, source="FROM (VALUES\n" + ",\n".join(lines) + ")").ddl()
