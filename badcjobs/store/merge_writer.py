"""Writes the rows of a job database, file by file, and checks that every row has arrived.

Of two sealed files of one task the one published later counts. If one of them is damaged, or a live file, the two are
combined.

Every attempt is kept as history; a chunk has one final state. The rule: done beats poison beats failed beats pending
beats skipped; among equals the one that ended last wins, then that of the later task, then the higher task_id. The
winner's row is in ``chunk`` and its detections are in ``detection``; those of the others are in ``rival_chunk`` and
``rival_detection``, and are used again when the winner's task is removed. So the content depends only on the set of
tasks, not on the order in which they were merged.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from badcjobs.model import not_none
from badcjobs.store.atomic_write import ROWS, SEAL
from badcjobs.store.connect import create_tables, file_uri, open_uri, read_only_uri, read_value, transaction
from badcjobs.store.figures import write_figures
from badcjobs.store.job_schema import ORDERED_BY, create_indexes, index_samples
from badcjobs.store.overlaps import follow_changes, note_changes, settle_overlaps
from badcjobs.store.plausible import find_damage
from badcjobs.store.schema import DERIVED, TABLES, columns_of
from badcjobs.store.source_files import (
    HOLDING,
    Intake,
    SourceFile,
    describe,
    read_source_files,
    total,
    write_source_files,
)
from badcjobs.version import __version__

_RANK = "CASE {0}.status WHEN 'done' THEN 4 WHEN 'poison' THEN 3 WHEN 'failed' THEN 2 WHEN 'pending' THEN 1 ELSE 0 END"
_TASK_STARTED = "coalesce((SELECT k.started_at_ms FROM main.task k WHERE k.task_id = {0}.task_id), 0)"
STRENGTH = f"({_RANK}, coalesce({{0}}.ended_at_ms, 0), {_TASK_STARTED}, {{0}}.task_id)"
_SAME_CHUNK = "{0}.recording_id = {1}.recording_id AND {0}.chunk_id = {1}.chunk_id"
_PLAIN = tuple(table.name for table in TABLES if table.name not in ("meta", "chunk"))
_OWN = tuple(table.name for table in TABLES if table.name not in ("meta", *DERIVED))
_HOMES = {table: "task_recording" if table == "recording" else table for table in _PLAIN}  # in the job database
_WHERE_ROWS_ARE = (*_HOMES.values(), "chunk", "rival_chunk", "rival_detection")
_FROM = {"task_recording": "recording", "rival_chunk": "chunk", "rival_detection": "detection"}


_CAUSES = ("is full", "locked", "attached", "readonly")  # in messages of SQLite about the file that it writes


def insert_task(db: sqlite3.Connection, source: str, task_id: int, *, add_up: bool) -> None:
    """Copy the rows of a task from the database attached as ``source``, inside the caller's transaction.

    Detections of rivals stay in ``detection`` until ``settle_detections``. ``add_up``: compute the task's figures from
    its rows, because the file is not sealed.
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
        replace_row = f"ON CONFLICT (recording_id, chunk_id) DO UPDATE SET {_replace_columns('chunk')}"
        wins = f"{STRENGTH.format('excluded')} > {STRENGTH.format('chunk')}"
        db.execute(f"INSERT INTO main.chunk {ours} {replace_row} WHERE {wins}", task)
    note_changes(db, (f"{source}.recording", f"{source}.chunk"), task_id)
    facts = f"SELECT ?, key, value FROM {source}.meta WHERE key NOT IN (?, ?)"
    db.execute(f"INSERT INTO task_meta {facts}", (task_id, ROWS, SEAL))
    if add_up:
        index_samples(db)
        write_figures(db, task_id)


def _replace_columns(table: str) -> str:
    return ", ".join(f"{name} = excluded.{name}" for name in columns_of(table))


def settle_detections(db: sqlite3.Connection, incomplete: Collection[int]) -> None:
    """Move the detections of rivals to ``rival_detection``, so that each chunk has only those of its winner.

    ``incomplete`` tasks may have lost the row of a chunk and kept its detections.
    """
    lost = f"""FROM rival_chunk r JOIN detection d ON {_SAME_CHUNK.format("d", "r")} AND d.task_id = r.task_id
               WHERE r.status = 'done'"""
    without_row = f"FROM detection d JOIN chunk c ON {_SAME_CHUNK.format('c', 'd')} WHERE c.task_id != d.task_id"
    for which in (lost, *(f"{without_row} AND d.task_id = {task_id:d}" for task_id in incomplete)):
        if db.execute(f"INSERT INTO rival_detection SELECT d.* {which}").rowcount:
            db.execute(f"DELETE FROM detection WHERE rowid IN (SELECT d.rowid {which})")


def settle_recordings(db: sqlite3.Connection) -> None:
    """Give each recording one row; each of its facts comes from the last task that knows it.

    The facts of its place belong together: all of them come from the last task that has done a chunk of it, or else
    did not leave it out.
    """
    names = columns_of("recording")
    apart = names[: names.index("latitude")]
    known = ", ".join(f"{name} = coalesce(excluded.{name}, {name})" for name in apart)
    known += "".join(f", {name} = excluded.{name}" for name in names[len(apart) :])
    db.execute("DELETE FROM recording")
    db.execute(
        f"""INSERT INTO recording SELECT r.* FROM task_recording r LEFT JOIN task t USING (task_id)
            WHERE true ORDER BY r.left_out IS NULL, EXISTS (
                SELECT 1 FROM chunk c
                WHERE c.recording_id = r.recording_id AND c.task_id = r.task_id AND c.status = 'done'
            ), t.started_at_ms, r.task_id
            ON CONFLICT (recording_id) DO UPDATE SET {known}"""
    )


def remove_task(db: sqlite3.Connection, task_id: int) -> None:
    """Remove a task; each chunk that it had won goes to the strongest rival."""
    index_samples(db)
    note_changes(db, ("task_recording", "chunk", "rival_chunk"), task_id)
    db.execute("CREATE TEMP TABLE vacated AS SELECT recording_id, chunk_id FROM chunk WHERE task_id = ?", (task_id,))
    for table in (*_WHERE_ROWS_ARE, "task_meta"):
        db.execute(f"DELETE FROM main.{table} WHERE task_id = ?", (task_id,))
    heirs = f"""FROM vacated v JOIN rival_chunk r ON {_SAME_CHUNK.format("r", "v")}
                WHERE NOT EXISTS (SELECT 1 FROM rival_chunk b
                    WHERE {_SAME_CHUNK.format("b", "v")} AND {STRENGTH.format("b")} > {STRENGTH.format("r")})"""
    db.execute(f"INSERT INTO chunk SELECT r.* {heirs}")
    found = f"""FROM vacated v JOIN chunk c ON {_SAME_CHUNK.format("c", "v")}
                JOIN rival_detection d ON {_SAME_CHUNK.format("d", "c")} AND d.task_id = c.task_id"""
    db.execute(f"INSERT INTO detection SELECT d.* {found}")
    db.execute(f"DELETE FROM rival_detection WHERE rowid IN (SELECT d.rowid {found})")
    db.execute(
        f"""DELETE FROM rival_chunk WHERE rowid IN (
                SELECT r.rowid FROM vacated v JOIN chunk c ON {_SAME_CHUNK.format("c", "v")}
                JOIN rival_chunk r ON {_SAME_CHUNK.format("r", "c")} AND r.task_id = c.task_id)"""
    )
    db.execute("DROP TABLE vacated")


def count_rows(db: sqlite3.Connection, task_id: int, leave_out: Collection[str] = ()) -> dict[str, int]:
    """Count the rows of a task by the table of its file that they come from."""
    counts: Counter[str] = Counter()
    for table in (table for table in _WHERE_ROWS_ARE if table not in leave_out):
        sql = f"SELECT count(*) FROM {table} WHERE task_id = ?"
        counts[_FROM.get(table, table)] += read_value(db, sql, task_id)
    return counts


# Columns that identify a reading or an event, for tables without a key.
_SAME = {
    "sample": ("device_id", "at_ms"),
    "host_sample": ("at_ms",),
    "gap": ("device_id", "metric", "from_ms", "reason"),
    "alert": ("device_id", "kind", "started_at_ms"),
    "process_sample": ("device_id", "at_ms", "pid"),
    "mark": ("name", "started_at_ms"),
    "decision": ("at_ms", "code", "subject"),
}
# The key of a table, and the condition under which the other file's row replaces ours: it is more recent.
_MORE_RECENT = {
    "task": (
        "task_id",
        """(main.task.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL)
           OR (main.task.version = 'unknown' AND excluded.version != 'unknown')""",  # ours was made by salvage
    ),
    "device": ("device_id", "main.device.token = '?' AND excluded.token != '?'"),
    "worker": ("worker_id", "main.worker.ended_at_ms IS NULL AND excluded.ended_at_ms IS NOT NULL"),
    "attempt": ("task_id, attempt_id", "main.attempt.outcome IS NULL AND excluded.outcome IS NOT NULL"),
    "chunk": ("recording_id, chunk_id", f"{STRENGTH.format('excluded')} > {STRENGTH.format('chunk')}"),
}


def extract_task(db: sqlite3.Connection, task_id: int, path: Path) -> None:
    """Write the rows of one task in a job database as a task database."""
    with closing(sqlite3.connect(path)) as new:
        create_tables(new)
    index_samples(db)
    db.execute("ATTACH ? AS extract", (file_uri(path, "mode=rw"),))
    try:
        with transaction(db):
            kept = "SELECT key, value FROM main.task_meta WHERE task_id = ?"
            db.execute(f"INSERT INTO extract.meta {kept}", (task_id,))
            for table in _OWN:
                homes = (table, f"rival_{table}") if table in ("chunk", "detection") else (_HOMES[table],)
                for origin in homes:
                    rows = f"SELECT * FROM main.{origin} WHERE task_id = ?"
                    db.execute(f"INSERT INTO extract.{table} {rows}", (task_id,))
    finally:
        db.execute("DETACH extract")


def add_missing_rows(ours: Path, other: Path) -> None:
    """Add to one task database the rows that only another one of the same task has.

    Where both have a row, ours stays, unless the other one is more recent: a chunk that is done there, an attempt that
    has ended.
    """
    with closing(open_uri(file_uri(ours, "mode=rw"))) as db:
        db.execute("ATTACH ? AS other", (read_only_uri(other),))
        with transaction(db):
            for table, columns in _SAME.items():
                db.execute(f"CREATE INDEX same_{table} ON {table} ({', '.join(columns)})")
            for table in (table for table in _OWN if table != "detection"):
                rows = f"INTO main.{table} SELECT * FROM other.{table} o WHERE"
                if table in _SAME:
                    same = " AND ".join(f"m.{name} IS o.{name}" for name in _SAME[table])
                    db.execute(f"INSERT {rows} NOT EXISTS (SELECT 1 FROM main.{table} m WHERE {same})")
                elif table in _MORE_RECENT:
                    key, more_recent = _MORE_RECENT[table]
                    replace_row = f"ON CONFLICT ({key}) DO UPDATE SET {_replace_columns(table)}"
                    db.execute(f"INSERT {rows} true {replace_row} WHERE {more_recent}")
                else:
                    db.execute(f"INSERT OR IGNORE {rows} true")
            _add_detections(db)
            for table in _SAME:
                db.execute(f"DROP INDEX same_{table}")
            for table in DERIVED:
                db.execute(f"DELETE FROM main.{table}")


def _add_detections(db: sqlite3.Connection) -> None:
    """Add detections to chunks that have fewer than their row states; equal detections are counted."""
    names = ", ".join(columns_of("detection"))
    numbered = f"SELECT *, row_number() OVER (PARTITION BY {names}) AS number FROM {{0}}.detection"
    # Also to chunks without a row or a number: how many detections they had is not known.
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
        before = self._files.get(intake.path)
        if before is not None and before.status in HOLDING and intake.task_id not in (None, before.task_id):
            # The file now belongs to another task; the rows of the first one stay.
            other = f"{name} (before {intake.task_name} replaced it)"
            self._files[other] = replace(self._files.pop(name), path=other)
            self._holders[before.task_id] = other
        holder = self._files.get(self._holders.get(intake.task_id, ""))
        if intake.database is None:
            self._files[name] = intake
            if before is not None and before.status in HOLDING:
                reason = f"kept from an earlier merge; the file now: {intake.reason}"
                size_bytes = intake.size_bytes
                mtime_ns = intake.mtime_ns
                kept = replace(before, status="kept", reason=reason, size_bytes=size_bytes, mtime_ns=mtime_ns)
                self._files[name] = kept
        elif holder is None and intake.is_half:
            reason = "a recorder's live file; the file of its task was not given"
            self._files[name] = SourceFile(name, None, "skipped", reason)  # without a time, so that it is tried again
        elif holder is None:
            self._use_file(intake)
        elif holder.path != name and self._is_other_task(intake):
            reason = f"another task of the same name as the one in {holder.path}; merge it into another job database"
            self._files[name] = replace(intake, task_id=None, status="skipped", reason=reason)
        elif intake.checksum is None or holder.checksum is None:
            self._combine_files(intake, holder)
        elif holder.path == name:
            self._use_file(intake)
        elif intake.checksum == holder.checksum and _is_original(name, holder.path, f"{intake.task_name}.sqlite"):
            self._holders[holder.task_id] = name
            self._files[name] = intake
            self._files[holder.path] = _copy_of(holder, name)
        elif intake.checksum != holder.checksum and intake.rank > holder.rank:
            self._use_file(intake)  # the later publication has all rows of the earlier one
            self._files[holder.path] = _copy_of(holder, name)
        else:
            self._files[name] = _copy_of(intake, holder.path)

    def finish(self) -> tuple[SourceFile, ...]:
        """Move the detections of rivals, check the row counts, and write the table of files."""
        salvaged = [file.task_id for file in self._files.values() if file.status == "salvaged" and file.task_id]
        with transaction(self._db):
            create_indexes(self._db)
            settle_detections(self._db, salvaged)
            for task_id, expected in self._expected.items():
                try:
                    for table, many in count_rows(self._db, task_id, leave_out=(*ORDERED_BY, *DERIVED)).items():
                        _check(table, expected.get(table, 0), many)
                except RowsDiffer as error:
                    name = self._holders.pop(task_id)
                    remove_task(self._db, task_id)
                    reason = f"its rows were left out: {error}"
                    self._files[name] = replace(self._files[name], task_id=None, status="skipped", reason=reason)
            settle_recordings(self._db)
            settle_overlaps(self._db)
            write_source_files(self._db, self._files.values())
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
        return read_source_files(self._db)  # without what was needed to merge them: there may be thousands

    def is_cause(self, error: Exception, *, after_salvage: bool) -> bool:
        """Say whether the job database is the cause of an error, not the file that was being added."""
        if any(word in str(error) for word in _CAUSES):
            return True
        return after_salvage and find_damage(self._db) is not None

    def _is_other_task(self, intake: Intake) -> bool:
        """Say whether this is another task of the same name: it started at another time."""
        started_at_ms = read_value(self._db, "SELECT started_at_ms FROM task WHERE task_id = ?", intake.task_id)
        return not intake.is_half and started_at_ms not in (None, intake.started_at_ms)

    def _use_file(self, intake: Intake) -> None:
        """Write the rows of this file as those of its task."""
        rows = self._write(intake)
        self._files[intake.path] = replace(intake, rows=rows, counts={})  # to save memory: there may be thousands
        self._holders[intake.task_id] = intake.path

    def _write(self, intake: Intake) -> int:
        """Replace the rows of a task by those of a file; return their number."""
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
                insert_task(db, source, task_id, add_up=intake.checksum is None or intake.database != intake.file)
                if intake.was_replaced:
                    raise FileChanged(intake.file)
                for table in (table for table in ORDERED_BY if table in counts):
                    ours = f"{table} WHERE task_id = ?"
                    many = read_value(db, f"SELECT count(*) FROM main.{ours}", task_id)
                    if many != counts[table] and table not in DERIVED:  # two readings of one instant are one row
                        keys = f"SELECT count(*) FROM (SELECT DISTINCT {ORDERED_BY[table]} FROM {source}.{ours})"
                        _check(table, read_value(db, keys, task_id), many)
                    counts[table] = int(many)
        finally:
            if not db.in_transaction:  # SQLite cannot detach inside a transaction
                db.execute(f"DETACH {source}")
        self._expected[task_id] = counts
        return total(counts)

    def _combine_files(self, intake: Intake, holder: SourceFile) -> None:
        """Combine two files of one task: one is damaged, or a live file, and each may have rows the other lacks."""
        assert intake.database is not None and intake.task_id is not None
        held = intake.scratch / "held.sqlite"
        theirs = intake.scratch / "theirs.sqlite"
        for path in (held, theirs):
            path.unlink(missing_ok=True)
        extract_task(self._db, intake.task_id, held)
        shutil.copyfile(intake.database, theirs)
        keeper: SourceFile = holder
        other: SourceFile = intake
        first, second = held, theirs
        if not intake.is_half and _trust(holder) < _trust(intake):
            keeper, other = intake, holder
            first, second = theirs, held
        add_missing_rows(first, second)
        combined = describe(replace(intake, database=first, checksum=None))
        rows = self._write(combined)
        if holder.path == intake.path:
            keeper = other = intake
        else:
            self._files[other.path] = _copy_of(other, keeper.path)
        self._holders[intake.task_id] = keeper.path

        # How many rows are still missing, if one of the files states how many there were.
        sizes = [(f.rows or 0) + (f.rows_lost or 0) for f in (holder, intake) if f.checksum or f.rows_lost is not None]
        lost = max(0, max(sizes) - rows) if sizes else None
        status = keeper.status
        if other.status == "salvaged" and lost != 0 and other.rank > keeper.rank:
            status = "salvaged"
        reasons = [keeper.reason]
        added = rows - (keeper.rows or 0)
        if added > 0:
            origin = "an earlier merge" if other.path == keeper.path else other.path
            reasons.append(f"rows added from {origin}: {added:,}")
        self._files[keeper.path] = replace(
            keeper,
            status=status,
            reason="; ".join(not_none(reasons)) or None,
            rows=rows,
            rows_lost=lost if status == "salvaged" else None,
            last_sign_ms=combined.last_sign_ms,
        )


def _trust(file: SourceFile) -> tuple[object, ...]:
    """Return a sort key: of two files of one task, rows of the higher one are used where both have them."""
    return (file.checksum is not None, file.status != "salvaged", *file.rank)


def _is_original(path: str, other: str, task_file: str) -> bool:
    """Say whether the first of two equal files is the original: it has its task's name, or both have not."""
    return (Path(path).name != task_file, path) < (Path(other).name != task_file, other)


def _copy_of(file: SourceFile, holder: str) -> SourceFile:
    how = "a damaged or partial copy" if file.checksum is None else "a copy, or an earlier publication,"
    return replace(file, status="copy", reason=f"{how} of the task in {holder}", rows_lost=None)


def _check(table: str, wanted: int, found: int) -> None:
    """Raise RowsDiffer if rows were lost or added on the way."""
    if wanted != found:
        raise RowsDiffer(f"{table} rows in the file: {wanted:,}, in job.sqlite: {found:,}")
