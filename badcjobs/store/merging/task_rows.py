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

from badcjobs.store.figures import write_figures
from badcjobs.store.job_schema import index_samples, is_job_database
from badcjobs.store.schema import SCHEMA_VERSION, TABLES, columns_of
from badcjobs.store.seal import ROWS, SEAL

_RANK = "CASE {0}.status WHEN 'done' THEN 4 WHEN 'poison' THEN 3 WHEN 'failed' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END"
_BORN = "coalesce((SELECT k.started_at_ms FROM main.task k WHERE k.task_id = {0}.task_id), 0)"
STRENGTH = f"({_RANK}, coalesce({{0}}.ended_at_ms, 0), {_BORN}, {{0}}.task_id)"
_CHUNK = ", ".join(columns_of("chunk"))
_DETECTION = ", ".join(columns_of("detection"))
_MEETING = "{0}.recording_id = {1}.recording_id AND {0}.chunk_id = {1}.chunk_id"
_PLAIN = tuple(table.name for table in TABLES if table.name not in ("meta", "chunk"))
_WHERE_ROWS_ARE = (*_PLAIN, "chunk", "rival_chunk", "rival_detection")


def put_in(db: sqlite3.Connection, source: str, task_id: int, *, add_up: bool) -> None:
    """Copy the rows of a task from the database attached as ``source``, inside the caller's transaction.

    Its detections may stand beside a rival's until ``settle``. ``add_up``: the file's own figures cannot be trusted, as
    those of a sealed one can.
    """
    of_many = is_job_database(db, source)
    for table in _PLAIN:
        copy_table(db, source, table, "WHERE task_id = :task" if of_many else "", task_id)
    _copy_chunks(db, source, task_id)
    if not of_many:
        facts = f"SELECT ?, key, value FROM {source}.meta WHERE key NOT IN (?, ?)"
        db.execute(f"INSERT INTO task_meta {facts}", (task_id, ROWS, SEAL))
    if add_up or not _is_same_version(db, source):  # an older one had not all of them
        index_samples(db)
        write_figures(db, task_id)


def copy_table(db: sqlite3.Connection, source: str, table: str, where: str, task_id: int) -> None:
    """Copy a task's rows of one table."""
    names = shared_columns(db, source, table)
    if table == "sample" and not where and _is_same_version(db, source):
        # In these words, and no others, SQLite takes the rows over without looking into them.
        db.execute(f"INSERT INTO main.{table} SELECT * FROM {source}.{table}")
    elif names:  # else the version that wrote it had no such table
        rows = f"SELECT {names} FROM {source}.{table} {where}"
        db.execute(f"INSERT OR REPLACE INTO main.{table} ({names}) {rows}", {"task": task_id})


def shared_columns(db: sqlite3.Connection, source: str, table: str) -> str:
    """Return the columns that both sides have; what an older version did not write stays NULL."""
    if _is_same_version(db, source):
        return ", ".join(columns_of(table))
    there = {row[1] for row in db.execute(f"PRAGMA {source}.table_info({table})")}
    return ", ".join(name for name in columns_of(table) if name in there)


def _is_same_version(db: sqlite3.Connection, source: str) -> bool:
    ((version,),) = db.execute(f"PRAGMA {source}.user_version").fetchall()
    return bool(version == SCHEMA_VERSION)


def _copy_chunks(db: sqlite3.Connection, source: str, task_id: int) -> None:
    """Copy the chunks, and let those that another task has, too, meet."""
    names = shared_columns(db, source, "chunk")
    ours = f"{source}.chunk WHERE task_id = :task"
    inserted = db.execute(
        f"INSERT OR IGNORE INTO main.chunk ({names}) SELECT {names} FROM {ours} ORDER BY rowid", {"task": task_id}
    ).rowcount
    (wanted,) = db.execute(f"SELECT count(*) FROM {ours}", {"task": task_id}).fetchone()
    if inserted == wanted:
        return
    met = f"FROM ({'SELECT ' + names + ' FROM ' + ours}) s JOIN main.chunk m ON {_MEETING.format('m', 's')}"
    stronger = f"{STRENGTH.format('s')} > {STRENGTH.format('m')}"
    losers = ", ".join(f"m.{name}" for name in columns_of("chunk"))
    ours_lost = ", ".join(f"s.{name.strip()}" for name in names.split(","))
    both = f"{met} WHERE m.task_id != s.task_id"
    db.execute(f"INSERT INTO rival_chunk ({names}) SELECT {ours_lost} {both} AND NOT {stronger}", {"task": task_id})
    db.execute(f"INSERT INTO rival_chunk ({_CHUNK}) SELECT {losers} {both} AND {stronger}", {"task": task_id})
    db.execute(
        f"""INSERT INTO main.chunk ({names}) SELECT {names} FROM {ours}
            ON CONFLICT (recording_id, chunk_id) DO UPDATE SET
                {", ".join(f"{name} = excluded.{name}" for name in columns_of("chunk"))}
            WHERE {STRENGTH.format("excluded")} > {STRENGTH.format("chunk")}""",
        {"task": task_id},
    )


def settle(db: sqlite3.Connection, incomplete: Collection[int]) -> None:
    """Move the detections of rivals aside, so that each chunk has those of its winner, once.

    ``incomplete`` tasks may have lost the row of a chunk and kept its detections.
    """
    lost = f"""FROM rival_chunk r JOIN detection d ON {_MEETING.format("d", "r")} AND d.task_id = r.task_id
               WHERE r.status = 'done'"""
    _set_aside(db, lost)
    for task_id in incomplete:
        _set_aside(
            db,
            f"""FROM detection d JOIN chunk c ON {_MEETING.format("c", "d")}
                WHERE d.task_id = {task_id:d} AND c.task_id != d.task_id""",
        )


def _set_aside(db: sqlite3.Connection, which: str) -> None:
    rows = ", ".join(f"d.{name}" for name in columns_of("detection"))
    if db.execute(f"INSERT INTO rival_detection ({_DETECTION}) SELECT {rows} {which}").rowcount:
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
    rows = ", ".join(f"r.{name}" for name in columns_of("chunk"))
    db.execute(f"INSERT INTO chunk ({_CHUNK}) SELECT {rows} {heirs}")
    heard = f"""FROM vacated v JOIN chunk c ON {_MEETING.format("c", "v")}
                JOIN rival_detection d ON {_MEETING.format("d", "c")} AND d.task_id = c.task_id"""
    rows = ", ".join(f"d.{name}" for name in columns_of("detection"))
    db.execute(f"INSERT INTO detection ({_DETECTION}) SELECT {rows} {heard}")
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
