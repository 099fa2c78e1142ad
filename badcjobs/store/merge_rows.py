"""The rows of one task in a job database: put in, counted, taken out again.

Every attempt is kept as history; a chunk has one final state. The rule: done beats poison beats failed beats pending
beats skipped; among equals the one that ended last wins, then that of the later task, then the higher task_id. The
winner's row is in ``chunk`` and its detections in ``detection``; those of its rivals are in ``rival_chunk`` and
``rival_detection``, and come back when the winner's task is taken out. So the content follows from the set of tasks
alone, in whatever order they came.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path

from badcjobs.store.atomic_write import ROWS, SEAL
from badcjobs.store.connect import create_tables, file_uri, read_only_uri, transaction
from badcjobs.store.figures import write_figures
from badcjobs.store.job_schema import index_samples
from badcjobs.store.schema import DERIVED, TABLES, columns_of

_RANK = "CASE {0}.status WHEN 'done' THEN 4 WHEN 'poison' THEN 3 WHEN 'failed' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END"
_BORN = "coalesce((SELECT k.started_at_ms FROM main.task k WHERE k.task_id = {0}.task_id), 0)"
STRENGTH = f"({_RANK}, coalesce({{0}}.ended_at_ms, 0), {_BORN}, {{0}}.task_id)"
_MEETING = "{0}.recording_id = {1}.recording_id AND {0}.chunk_id = {1}.chunk_id"
_PLAIN = tuple(table.name for table in TABLES if table.name not in ("meta", "chunk"))
_OWN = tuple(table.name for table in TABLES if table.name not in ("meta", *DERIVED))
_WHERE_ROWS_ARE = (*_PLAIN, "chunk", "rival_chunk", "rival_detection")


def put_in(db: sqlite3.Connection, source: str, task_id: int, *, add_up: bool) -> None:
    """Copy the rows of a task from the database attached as ``source``, inside the caller's transaction.

    Its detections may stand beside a rival's until ``settle``. ``add_up``: the file's own figures cannot be trusted, as
    those of a sealed one can.
    """
    for table in _PLAIN:
        copy_table(db, source, table)
    _copy_chunks(db, source, task_id)
    facts = f"SELECT ?, key, value FROM {source}.meta WHERE key NOT IN (?, ?)"
    db.execute(f"INSERT INTO task_meta {facts}", (task_id, ROWS, SEAL))
    if add_up:
        index_samples(db)
        write_figures(db, task_id)


def copy_table(db: sqlite3.Connection, source: str, table: str) -> None:
    """Copy the rows of one table."""
    # In these words, and no others, SQLite takes the samples over without looking into them.
    verb = "INSERT" if table == "sample" else "INSERT OR REPLACE"
    db.execute(f"{verb} INTO main.{table} SELECT * FROM {source}.{table}")


def _copy_chunks(db: sqlite3.Connection, source: str, task_id: int) -> None:
    """Copy the chunks, and let those that another task has, too, meet."""
    ours, task = f"SELECT * FROM {source}.chunk WHERE task_id = :task", {"task": task_id}
    inserted = db.execute(f"INSERT OR IGNORE INTO main.chunk {ours} ORDER BY rowid", task).rowcount
    (wanted,) = db.execute(f"SELECT count(*) FROM ({ours})", task).fetchone()
    if inserted == wanted:
        return
    met = f"FROM ({ours}) s JOIN main.chunk m ON {_MEETING.format('m', 's')} WHERE m.task_id != s.task_id"
    stronger = f"{STRENGTH.format('s')} > {STRENGTH.format('m')}"
    db.execute(f"INSERT INTO rival_chunk SELECT s.* {met} AND NOT {stronger}", task)
    db.execute(f"INSERT INTO rival_chunk SELECT m.* {met} AND {stronger}", task)
    db.execute(
        f"""INSERT INTO main.chunk {ours} ON CONFLICT (recording_id, chunk_id) DO UPDATE SET {_all_anew("chunk")}
            WHERE {STRENGTH.format("excluded")} > {STRENGTH.format("chunk")}""",
        task,
    )


def _all_anew(table: str) -> str:
    return ", ".join(f"{name} = excluded.{name}" for name in columns_of(table))


def settle(db: sqlite3.Connection, incomplete: Collection[int]) -> None:
    """Move the detections of rivals aside, so that each chunk has those of its winner, once.

    ``incomplete`` tasks may have lost the row of a chunk and kept its detections.
    """
    lost = f"""FROM rival_chunk r JOIN detection d ON {_MEETING.format("d", "r")} AND d.task_id = r.task_id
               WHERE r.status = 'done'"""
    without_row = f"FROM detection d JOIN chunk c ON {_MEETING.format('c', 'd')} WHERE c.task_id != d.task_id"
    for which in (lost, *(f"{without_row} AND d.task_id = {task_id:d}" for task_id in incomplete)):
        if db.execute(f"INSERT INTO rival_detection SELECT d.* {which}").rowcount:
            db.execute(f"DELETE FROM detection WHERE rowid IN (SELECT d.rowid {which})")


def take_out(db: sqlite3.Connection, task_id: int) -> None:
    """Remove a task; chunks that it had won go to the strongest of their rivals."""
    index_samples(db)
    db.execute("CREATE TEMP TABLE vacated AS SELECT recording_id, chunk_id FROM chunk WHERE task_id = ?", (task_id,))
    for table in (*_WHERE_ROWS_ARE, "task_meta"):
        db.execute(f"DELETE FROM main.{table} WHERE task_id = ?", (task_id,))
    heirs = f"""FROM vacated v JOIN rival_chunk r ON {_MEETING.format("r", "v")}
                WHERE NOT EXISTS (SELECT 1 FROM rival_chunk b
                    WHERE {_MEETING.format("b", "v")} AND {STRENGTH.format("b")} > {STRENGTH.format("r")})"""
    db.execute(f"INSERT INTO chunk SELECT r.* {heirs}")
    heard = f"""FROM vacated v JOIN chunk c ON {_MEETING.format("c", "v")}
                JOIN rival_detection d ON {_MEETING.format("d", "c")} AND d.task_id = c.task_id"""
    db.execute(f"INSERT INTO detection SELECT d.* {heard}")
    db.execute(f"DELETE FROM rival_detection WHERE rowid IN (SELECT d.rowid {heard})")
    db.execute(
        f"""DELETE FROM rival_chunk WHERE rowid IN (
                SELECT r.rowid FROM vacated v JOIN chunk c ON {_MEETING.format("c", "v")}
                JOIN rival_chunk r ON {_MEETING.format("r", "c")} AND r.task_id = c.task_id)"""
    )
    db.execute("DROP TABLE vacated")


def count_rows(db: sqlite3.Connection, task_id: int, leave_out: Collection[str] = ()) -> dict[str, int]:
    """Return how many rows of a task there are, by the table of its file that they came from."""
    counts = {table: 0 for table in (*_PLAIN, "chunk") if table not in leave_out}
    for table in _WHERE_ROWS_ARE:
        if table in leave_out:
            continue
        (many,) = db.execute(f"SELECT count(*) FROM {table} WHERE task_id = ?", (task_id,)).fetchone()
        counts[table.removeprefix("rival_")] += many
    return counts


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
# The key of a table, and when the other's row tells more than ours: the same story, further on.
_FURTHER = {
    "task": (
        "task_id",
        """(main.task.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL)
           OR (main.task.version = 'unknown' AND excluded.version != 'unknown')""",  # made up by salvage
    ),
    "device": ("device_id", "main.device.token = '?' AND excluded.token != '?'"),
    "worker": ("worker_id", "main.worker.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL"),
    "attempt": ("task_id, attempt_id", "main.attempt.outcome IS NULL AND excluded.outcome IS NOT NULL"),
    "chunk": ("recording_id, chunk_id", f"{STRENGTH.format('excluded')} > {STRENGTH.format('chunk')}"),
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
            for table in _OWN:
                for origin in (table, f"rival_{table}") if table in ("chunk", "detection") else (table,):
                    rows = f"SELECT * FROM main.{origin} WHERE task_id = ?"
                    db.execute(f"INSERT INTO extract.{table} {rows}", (task_id,))
    finally:
        db.execute("DETACH extract")


def copy_task(source: Path, path: Path) -> None:
    """Write the rows of a task database, without its figures, as a new one."""
    with closing(sqlite3.connect(file_uri(path, "mode=rwc"), uri=True, isolation_level=None)) as db:
        create_tables(db)
        db.execute("ATTACH ? AS source", (read_only_uri(source, sealed=True),))
        with transaction(db):
            for table in ("meta", *_OWN):
                db.execute(f"INSERT INTO main.{table} SELECT * FROM source.{table} ORDER BY rowid")


def add_missing_rows(ours: Path, other: Path) -> None:
    """Add to one task database what only another of the same task has; where both have a row, ours stays.

    Unless the other's tells more: a chunk that is done there, an attempt that has ended.
    """
    with closing(sqlite3.connect(file_uri(ours, "mode=rw"), uri=True, isolation_level=None)) as db:
        db.execute("ATTACH ? AS other", (read_only_uri(other, sealed=True),))
        with transaction(db):
            for table, columns in _SAME.items():
                db.execute(f"CREATE INDEX same_{table} ON {table} ({', '.join(columns)})")
            for table in (table for table in _OWN if table != "detection"):
                rows = f"INTO main.{table} SELECT * FROM other.{table} o WHERE"
                if table in _SAME:
                    same = " AND ".join(f"m.{name} IS o.{name}" for name in _SAME[table])
                    db.execute(f"INSERT {rows} NOT EXISTS (SELECT 1 FROM main.{table} m WHERE {same})")
                elif table in _FURTHER:
                    key, further = _FURTHER[table]
                    anew = f"ON CONFLICT ({key}) DO UPDATE SET {_all_anew(table)}"
                    db.execute(f"INSERT {rows} true {anew} WHERE {further}")
                else:
                    db.execute(f"INSERT OR IGNORE {rows} true")
            _add_detections(db)
            for table in _SAME:
                db.execute(f"DROP INDEX same_{table}")
            for table in DERIVED:
                db.execute(f"DELETE FROM main.{table}")


def _add_detections(db: sqlite3.Connection) -> None:
    """Add detections to the chunks that have fewer than they say; equal ones count as often as they come."""
    names = ", ".join(columns_of("detection"))
    numbered = f"SELECT *, row_number() OVER (PARTITION BY {names}) AS number FROM {{0}}.detection"
    # Of a chunk that is not known to be done, who can say how many there are? Its row may be lost.
    short = """SELECT c.recording_id, c.chunk_id FROM main.chunk c WHERE c.detections IS NULL OR c.detections > (
                   SELECT count(*) FROM main.detection d
                   WHERE d.recording_id = c.recording_id AND d.chunk_id = c.chunk_id)"""
    unknown = "(recording_id, chunk_id) NOT IN (SELECT recording_id, chunk_id FROM main.chunk)"
    db.execute("CREATE INDEX same_detection ON detection (recording_id, chunk_id)")
    db.execute(
        f"""INSERT INTO main.detection SELECT {names} FROM (
                SELECT * FROM ({numbered.format("other")}) EXCEPT SELECT * FROM ({numbered.format("main")}))
            WHERE (recording_id, chunk_id) IN ({short}) OR {unknown}"""
    )
    db.execute("DROP INDEX same_detection")
