"""Makes one task whole from two sources of its rows: a damaged file or a live one, and another of the same task."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import create_tables, file_uri, read_only_uri, transaction
from badcjobs.store.job_schema import index_samples
from badcjobs.store.merging.task_rows import STRENGTH, shared_columns
from badcjobs.store.schema import DERIVED, TABLES, columns_of

# What makes two rows the same reading or event, where the table has no key of its own that says so.
_SAME = {
    "sample": ("device_id", "at_ms"),
    "host_sample": ("at_ms",),
    "gap": ("device_id", "metric", "from_ms", "reason"),
    "alert": ("device_id", "kind", "started_at_ms"),
    "process_sample": ("device_id", "at_ms", "pid"),
    "mark": ("name", "started_at_ms"),
    "decision": ("at_ms", "kind", "subject"),
}
# When the other's row tells more than ours: the same story, further on.
_FURTHER = {
    "task": """(main.task.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL)
               OR (main.task.version = 'unknown' AND excluded.version != 'unknown')""",  # made up by salvage
    "device": "main.device.token = '?' AND excluded.token != '?'",
    "worker": "main.worker.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL",
    "attempt": "main.attempt.outcome IS NULL AND excluded.outcome IS NOT NULL",
    "chunk": f"{STRENGTH.format('excluded')} > {STRENGTH.format('chunk')}",
}
_KEYS = {
    "task": "task_id",
    "device": "device_id",
    "worker": "worker_id",
    "attempt": "task_id, attempt_id",
    "chunk": "recording_id, chunk_id",
}


def extract_task(db: sqlite3.Connection, task_id: int, path: Path) -> None:
    """Write the rows that a job database has of one task as a task database."""
    with closing(sqlite3.connect(path)) as new:
        create_tables(new)
    index_samples(db)
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


def copy_task(source: Path, path: Path) -> None:
    """Write the rows of a task database, of this version or an earlier one, as a new one."""
    with closing(sqlite3.connect(file_uri(path, "mode=rwc"), uri=True, isolation_level=None)) as db:
        create_tables(db)
        db.execute("ATTACH ? AS source", (read_only_uri(source, sealed=True),))
        with transaction(db):
            for table in ("meta", *_tables()):
                names = shared_columns(db, "source", table)
                if names:
                    db.execute(f"INSERT INTO main.{table} ({names}) SELECT {names} FROM source.{table} ORDER BY rowid")


def add_missing_rows(ours: Path, other: Path) -> None:
    """Add to one task database what only another of the same task has; where both have a row, ours stays.

    Unless the other's tells more: a chunk that is done there, an attempt that has ended.
    """
    with closing(sqlite3.connect(file_uri(ours, "mode=rw"), uri=True, isolation_level=None)) as db:
        db.execute("ATTACH ? AS other", (read_only_uri(other, sealed=True),))
        with transaction(db):
            for table, same in _SAME.items():
                db.execute(f"CREATE INDEX same_{table} ON {table} ({', '.join(same)})")
            for table in _tables():
                if table != "detection":
                    db.execute(_missing(table))
            _add_detections(db)
            for table in _SAME:
                db.execute(f"DROP INDEX same_{table}")
            for table in DERIVED:
                db.execute(f"DELETE FROM main.{table}")


def _tables() -> list[str]:
    return [table.name for table in TABLES if table.name not in ("meta", *DERIVED)]


def _missing(table: str) -> str:
    columns = columns_of(table)
    names = ", ".join(columns)
    if table in _SAME:
        same = " AND ".join(f"m.{name} IS o.{name}" for name in _SAME[table])
        absent = f"WHERE NOT EXISTS (SELECT 1 FROM main.{table} m WHERE {same})"
        return f"INSERT INTO main.{table} ({names}) SELECT {names} FROM other.{table} o {absent}"
    rows = f"INTO main.{table} ({names}) SELECT {names} FROM other.{table} WHERE true"
    if table not in _FURTHER:
        return f"INSERT OR IGNORE {rows}"
    changes = ", ".join(f"{name} = excluded.{name}" for name in columns)
    return f"INSERT {rows} ON CONFLICT ({_KEYS[table]}) DO UPDATE SET {changes} WHERE {_FURTHER[table]}"


def _add_detections(db: sqlite3.Connection) -> None:
    """Add detections to the chunks that have fewer than they say; equal ones count as often as they come."""
    columns = columns_of("detection")
    names = ", ".join(columns)
    numbered = f"SELECT {names}, row_number() OVER (PARTITION BY {names}) AS number FROM {{0}}.detection"
    # Of a chunk that is not known to be done, who can say how many there are? Its row may be lost.
    short = """SELECT c.recording_id, c.chunk_id FROM main.chunk c WHERE c.detections IS NULL OR c.detections > (
                   SELECT count(*) FROM main.detection d
                   WHERE d.recording_id = c.recording_id AND d.chunk_id = c.chunk_id)"""
    unknown = "(recording_id, chunk_id) NOT IN (SELECT recording_id, chunk_id FROM main.chunk)"
    db.execute("CREATE INDEX same_detection ON detection (recording_id, chunk_id)")
    db.execute(
        f"""INSERT INTO main.detection ({names}) SELECT {names} FROM (
                SELECT * FROM ({numbered.format("other")}) EXCEPT SELECT * FROM ({numbered.format("main")}))
            WHERE (recording_id, chunk_id) IN ({short}) OR {unknown}"""
    )
    db.execute("DROP INDEX same_detection")
