"""Writes the rows of a job database, file by file, and checks that every row has arrived.

Of several files of one task the one with the most rows counts, but a damaged one only if it has all chunks that an
undamaged one has done.

Every attempt is kept as history; a chunk has one final state. The rule: done beats poison beats failed beats pending
beats skipped; among equals the one that ended last wins, then that of the later task, then the higher task_id. The
winner's row is in ``chunk`` and its detections are in ``detection``; those of the others are in ``rival_chunk`` and
``rival_detection``, and are used again when the winner's task is removed. So the content depends only on the set of
tasks, not on the order in which they were merged.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

from badcjobs.store.atomic_write import ROWS
from badcjobs.store.connect import find_damage, read_only_uri, read_value, transaction
from badcjobs.store.job_figures import settle_figures
from badcjobs.store.job_schema import ORDERED_BY, create_indexes
from badcjobs.store.overlaps import follow_changes, note_changes, settle_overlaps
from badcjobs.store.schema import DERIVED, TABLES, columns_of
from badcjobs.store.source_files import (
    HOLDING,
    Intake,
    SourceFile,
    read_source_files,
    total,
    write_source_files,
)
from badcjobs.version import __version__

_RANK = "CASE {0}.status WHEN 'done' THEN 4 WHEN 'poison' THEN 3 WHEN 'failed' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END"
_TASK_STARTED = "coalesce((SELECT k.started_at_ms FROM main.task k WHERE k.task_id = {0}.task_id), 0)"
STRENGTH = f"({_RANK}, coalesce({{0}}.ended_at_ms, 0), {_TASK_STARTED}, {{0}}.task_id)"
_DONE = "SELECT recording_id, chunk_id FROM {} WHERE task_id = :task AND status = 'done'"
_SAME_CHUNK = "{0}.recording_id = {1}.recording_id AND {0}.chunk_id = {1}.chunk_id"
_PLAIN = tuple(table for table in TABLES if table not in ("meta", "chunk"))
_HOMES = {table: "task_recording" if table == "recording" else table for table in _PLAIN}  # in the job database
_WHERE_ROWS_ARE = (*_HOMES.values(), "chunk", "rival_chunk", "rival_detection")
_FROM = {"task_recording": "recording", "rival_chunk": "chunk", "rival_detection": "detection"}


# In messages of SQLite about the file that it writes.
_CAUSES = (
    "is full",
    "locked",
    "attached",
    "readonly",
)


def insert_task(db: sqlite3.Connection, source: str, task_id: int) -> None:
    """Copy the rows of a task from the database attached as ``source``, inside the caller's transaction.

    Detections of rivals stay in ``detection`` until ``settle_detections``.
    """
    for table, home in _HOMES.items():
        # With exactly this statement SQLite copies the samples page by page, without decoding them.
        verb = "INSERT" if table == "sample" else "INSERT OR REPLACE"
        db.execute(f"{verb} INTO main.{home} SELECT * FROM {source}.{table}")
    ours = f"SELECT * FROM {source}.chunk WHERE task_id = :task"
    task = {"task": task_id}
    inserted = db.execute(f"INSERT OR IGNORE INTO main.chunk {ours} ORDER BY rowid", task).rowcount
    if inserted != db.execute(f"SELECT count(*) FROM ({ours})", task).fetchone()[0]:  # other tasks have some, too
        met = f"FROM ({ours}) s JOIN main.chunk m ON {_SAME_CHUNK.format('m', 's')} WHERE m.task_id != s.task_id"
        stronger = f"{STRENGTH.format('s')} > {STRENGTH.format('m')}"
        db.execute(f"INSERT INTO rival_chunk SELECT s.* {met} AND NOT {stronger}", task)
        db.execute(f"INSERT INTO rival_chunk SELECT m.* {met} AND {stronger}", task)
        changes = ", ".join(f"{name} = excluded.{name}" for name in columns_of("chunk"))
        replace_row = f"ON CONFLICT (recording_id, chunk_id) DO UPDATE SET {changes}"
        wins = f"{STRENGTH.format('excluded')} > {STRENGTH.format('chunk')}"
        db.execute(f"INSERT INTO main.chunk {ours} {replace_row} WHERE {wins}", task)
    note_changes(db, (f"{source}.recording", f"{source}.chunk"), task_id)
    facts = f"SELECT ?, key, value FROM {source}.meta WHERE key != ?"
    db.execute(f"INSERT INTO task_meta {facts}", (task_id, ROWS))


def settle_detections(db: sqlite3.Connection) -> None:
    """Move the detections of rivals to ``rival_detection``, so that each chunk has only those of its winner."""
    _move(
        db,
        "detection",
        "rival_detection",
        f"""FROM rival_chunk r JOIN detection m ON {_SAME_CHUNK.format("m", "r")} AND m.task_id = r.task_id
            WHERE r.status = 'done'""",
    )


def _move(db: sqlite3.Connection, source: str, target: str, rows: str) -> None:
    """Move rows to another table; ``m`` stands for them in ``rows``, the rest of a SELECT statement."""
    db.execute(f"INSERT INTO {target} SELECT m.* {rows}")
    db.execute(f"DELETE FROM {source} WHERE rowid IN (SELECT m.rowid {rows})")


def settle_recordings(db: sqlite3.Connection) -> None:
    """Give each recording one row; each of its facts comes from the last task that knows it.

    The facts of its place belong together: all of them come from the last task that has done a chunk of it, or else
    did not leave it out.
    """
    names = columns_of("recording")
    apart = names[: names.index("latitude")]
    updates = ", ".join(f"{name} = coalesce(excluded.{name}, {name})" for name in apart)
    updates += "".join(f", {name} = excluded.{name}" for name in names[len(apart) :])
    db.execute("DELETE FROM recording")
    db.execute(
        f"""INSERT INTO recording SELECT r.* FROM task_recording r LEFT JOIN task t USING (task_id)
            WHERE true ORDER BY r.left_out IS NULL, EXISTS (
                SELECT 1 FROM chunk c
                WHERE c.recording_id = r.recording_id AND c.task_id = r.task_id
                AND c.status = 'done'
            ), t.started_at_ms, r.task_id
            ON CONFLICT (recording_id) DO UPDATE SET {updates}"""
    )


def remove_task(db: sqlite3.Connection, task_id: int) -> None:
    """Remove a task; each chunk that it had won goes to the strongest rival."""
    create_indexes(db)
    note_changes(db, ("task_recording", "chunk", "rival_chunk"), task_id)
    db.execute(
        "CREATE TEMP TABLE vacated AS SELECT recording_id, chunk_id FROM chunk WHERE task_id = ?",
        (task_id,),
    )
    for table in (*_WHERE_ROWS_ARE, "task_meta"):
        db.execute(f"DELETE FROM main.{table} WHERE task_id = ?", (task_id,))
    heirs = f"""FROM vacated v JOIN rival_chunk m ON {_SAME_CHUNK.format("m", "v")}
                WHERE NOT EXISTS (SELECT 1 FROM rival_chunk b
                    WHERE {_SAME_CHUNK.format("b", "v")} AND {STRENGTH.format("b")} > {STRENGTH.format("m")})"""
    _move(db, "rival_chunk", "chunk", heirs)
    of_heirs = f"""FROM vacated v JOIN chunk c ON {_SAME_CHUNK.format("c", "v")}
                   JOIN rival_detection m ON {_SAME_CHUNK.format("m", "c")} AND m.task_id = c.task_id"""
    _move(db, "rival_detection", "detection", of_heirs)
    db.execute("DROP TABLE vacated")


def count_rows(db: sqlite3.Connection, task_id: int, leave_out: Collection[str] = ()) -> dict[str, int]:
    """Count the rows of a task by the table of its file that they come from."""
    counts: Counter[str] = Counter()
    for table in (table for table in _WHERE_ROWS_ARE if table not in leave_out):
        sql = f"SELECT count(*) FROM {table} WHERE task_id = ?"
        counts[_FROM.get(table, table)] += read_value(db, sql, task_id)
    return counts


# --- the file that each task's rows come from -------------------------------------------------------------------------


class FileChanged(Exception):
    """A file was published again between its examination and its copying."""


class RowsDiffer(Exception):
    """The job database has other rows of a task than its file."""


class JobWriter:
    """Writes the rows of each file, and records which file each task's rows come from."""

    def __init__(self, db: sqlite3.Connection, files: Mapping[str, SourceFile]) -> None:
        self._db = db
        follow_changes(db)
        self._files = dict(files)
        self._holders = {file.task_id: path for path, file in files.items() if file.status in HOLDING}
        self._expected: dict[int, Mapping[str, int]] = {}  # task → rows by table
        self._attachments = 0

    def add_file(self, intake: Intake) -> None:
        """Add the rows of a file, or record why they are not needed."""
        name = intake.path
        before = self._files.get(name)
        if before is not None and before.status not in HOLDING:
            before = None
        if before is not None and intake.task_id not in (None, before.task_id):
            # The file now belongs to another task; the rows of the first one stay.
            former = f"{name} (before {intake.task_name} replaced it)"
            self._files[former] = replace(self._files.pop(name), path=former)
            self._holders[before.task_id] = former
            before = None
        holder = self._files.get(self._holders.get(intake.task_id, ""))
        if before is not None and (intake.database is None or (intake.is_damaged and self._is_worse(intake, before))):
            self._files[name] = _kept(before, intake)
        elif intake.database is None:
            self._files[name] = intake
        elif holder is None or before is not None:
            self._use_file(intake)
        elif intake.rank == holder.rank and _is_original(name, holder.path, f"{intake.task_name}.sqlite"):
            self._holders[holder.task_id] = name
            self._files[name] = intake
            self._files[holder.path] = _copy_of(holder, name)
        elif intake.rank == holder.rank or self._is_worse(intake, holder):
            self._files[name] = _copy_of(intake, holder.path)
        else:
            self._use_file(intake)
            self._files[holder.path] = _copy_of(holder, name)

    def finish(self) -> tuple[SourceFile, ...]:
        """Move the detections of rivals, check the row counts, and write the table of files."""
        with transaction(self._db):
            create_indexes(self._db)
            settle_detections(self._db)
            for task_id, expected in self._expected.items():
                arrived = count_rows(self._db, task_id, leave_out=(*ORDERED_BY, *DERIVED))
                try:
                    for table, many in arrived.items():
                        _check(table, expected.get(table, 0), many)
                except RowsDiffer as error:
                    name = self._holders.pop(task_id)
                    remove_task(self._db, task_id)
                    reason = f"its rows were left out: {error}"
                    self._files[name] = replace(self._files[name], task_id=None, status="skipped", reason=reason)
            settle_recordings(self._db)
            settle_overlaps(self._db)
            settle_figures(self._db)
            write_source_files(self._db, self._files.values())
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
        return read_source_files(self._db)  # without what was needed to merge them: there may be thousands

    def is_cause(self, error: Exception) -> bool:
        """Say whether the job database is the cause of an error, not the file that was being added."""
        return any(cause in str(error) for cause in _CAUSES) or find_damage(self._db) is not None

    def _is_worse(self, intake: Intake, holder: SourceFile) -> bool:
        """Say whether a file has fewer rows than the holder of its task; a damaged one must have each chunk done."""
        if intake.rank < holder.rank:
            return intake.is_damaged or not holder.is_damaged or not self._has_lost_chunks(intake, "main", "other")
        return intake.is_damaged and self._has_lost_chunks(intake, "other", "main")

    def _has_lost_chunks(self, intake: Intake, damaged: str, whole: str) -> bool:
        """Say whether one of the job database (main) and a file (other) lacks a chunk that the other one has done."""
        assert intake.database is not None
        self._db.execute("ATTACH ? AS other", (read_only_uri(intake.database),))
        try:
            done = {"other": _DONE.format("other.chunk")}
            done["main"] = f"SELECT * FROM ({_DONE.format('main.chunk')} UNION ALL {_DONE.format('main.rival_chunk')})"
            lost = f"{done[whole]} EXCEPT {done[damaged]}"
            return self._db.execute(lost, {"task": intake.task_id}).fetchone() is not None
        finally:
            self._db.execute("DETACH other")

    def _use_file(self, intake: Intake) -> None:
        """Replace the rows of a task by those of this file."""
        assert intake.database is not None and intake.task_id is not None
        db = self._db
        task_id = intake.task_id
        counts = dict(intake.counts)
        self._attachments += 1
        source = f"source{self._attachments}"
        db.execute(f"ATTACH ? AS {source}", (read_only_uri(intake.database),))
        try:
            with transaction(db):
                if task_id in self._holders:
                    remove_task(db, task_id)
                insert_task(db, source, task_id)
                if intake.was_replaced:
                    raise FileChanged(intake.file)
                for table in (table for table in ORDERED_BY if table not in DERIVED):
                    arrived = read_value(db, f"SELECT count(*) FROM main.{table} WHERE task_id = ?", task_id)
                    if arrived != counts[table]:  # two readings of one instant are one row
                        different = f"SELECT count(*) FROM (SELECT DISTINCT {ORDERED_BY[table]} FROM {source}.{table})"
                        _check(table, read_value(db, different), arrived)
                    counts[table] = arrived
        finally:
            if not db.in_transaction:  # SQLite cannot detach inside a transaction
                db.execute(f"DETACH {source}")
        self._expected[task_id] = counts
        self._files[intake.path] = replace(intake, rows=total(counts), counts={})  # to save memory
        self._holders[task_id] = intake.path


def _is_original(path: str, other: str, task_file: str) -> bool:
    """Say whether the first of two equal files is the original: it has its task's name, or both have not."""
    return (Path(path).name != task_file, path) < (Path(other).name != task_file, other)


def _copy_of(file: SourceFile, holder: str) -> SourceFile:
    reason = f"a copy, or an earlier or damaged state, of the task in {holder}"
    return replace(file, status="copy", reason=reason, rows_lost=None)


def _kept(before: SourceFile, now: SourceFile) -> SourceFile:
    """Return the entry of a file that can be read no longer, or not in all that an earlier merge has taken from it."""
    reason = f"kept from an earlier merge; the file now: {now.reason}"
    return replace(before, status="kept", reason=reason, size_bytes=now.size_bytes, mtime_ns=now.mtime_ns)


def _check(table: str, wanted: int, arrived: int) -> None:
    """Raise RowsDiffer if rows were lost or added on the way."""
    if wanted != arrived:
        raise RowsDiffer(f"{table} rows in the file: {wanted:,}, in job.sqlite: {arrived:,}")
