"""Makes one task whole from two incomplete sources of its rows: a salvaged file, and another copy of the same task."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import create_tables, file_uri, read_only_uri, transaction
from badcjobs.store.schema import DERIVED, TABLES, columns_of

# What makes two rows the same reading or event, where the table has no key of its own that says so.
_SAME = {
    "sample": ("device_id", "at_ms"),
    "host_sample": ("at_ms",),
    "gap": ("device_id", "metric", "from_ms", "reason"),
    "detection": ("recording_id", "chunk_id"),  # all those of a chunk, or none
    "alert": ("device_id", "kind", "started_at_ms"),
    "process_sample": ("device_id", "at_ms", "pid"),
}


def extract_task(db: sqlite3.Connection, task_id: int, path: Path) -> None:
    """Write the rows that a job database has of one task as a task database."""
    with closing(sqlite3.connect(path)) as new:
        create_tables(new)
    db.execute("ATTACH ? AS extract", (file_uri(path, "mode=rw"),))
    try:
        with transaction(db):
            kept = "SELECT key, value FROM main.task_meta WHERE task_id = ?"
            db.execute(f"INSERT INTO extract.meta {kept}", (task_id,))
            for table in _tables():
                for origin in (table, f"rival_{table}") if table in ("chunk", "detection") else (table,):
                    names = ", ".join(columns_of(table))
                    db.execute(
                        f"INSERT INTO extract.{table} ({names}) SELECT {names} FROM main.{origin} WHERE task_id = ?",
                        (task_id,),
                    )
    finally:
        db.execute("DETACH extract")


def add_missing_rows(incomplete: Path, other: Path) -> int:
    """Add to one task database the rows that only another of the same task has; return how many."""
    added = 0
    with closing(sqlite3.connect(file_uri(incomplete, "mode=rw"), uri=True, isolation_level=None)) as db:
        db.execute("ATTACH ? AS other", (read_only_uri(other, sealed=True),))
        with transaction(db):
            for table, same in _SAME.items():
                db.execute(f"CREATE INDEX same_{table} ON {table} ({', '.join(same)})")
            for table in _tables():
                added += db.execute(_missing(table)).rowcount
            for table in _SAME:
                db.execute(f"DROP INDEX same_{table}")
            for table in DERIVED:
                db.execute(f"DELETE FROM {table}")
    return added


def _tables() -> list[str]:
    return [table.name for table in TABLES if table.name not in ("meta", *DERIVED)]


def _missing(table: str) -> str:
    names = ", ".join(columns_of(table))
    rows = f"INSERT OR IGNORE INTO main.{table} ({names}) SELECT {names} FROM other.{table} o"
    if table not in _SAME:
        return rows  # its primary key says what is there already
    # Seen before anything is added: a chunk's detections come together.
    same = " AND ".join(f"m.{name} IS o.{name}" for name in _SAME[table])
    return f"{rows} WHERE NOT EXISTS (SELECT 1 FROM main.{table} m WHERE {same})"
