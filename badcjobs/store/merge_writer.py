"""Writes the draft of a job database, file by file, and checks that every row has arrived.

Of two sealed files of one task the later publication counts. Where one of them is damaged, or a live file, the two are
put together.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import replace

from badcjobs import __version__
from badcjobs.errors import DatabaseProblem
from badcjobs.store.connect import read_only_uri, transaction
from badcjobs.store.job_schema import ORDERED_BY, create_indexes
from badcjobs.store.merge_rows import add_missing_rows, copy_task, count_rows, extract_task, put_in, settle, take_out
from badcjobs.store.schema import DERIVED
from badcjobs.store.source_files import (
    COPY,
    HOLDING,
    KEPT,
    SALVAGED,
    SKIPPED,
    Intake,
    SourceFile,
    describe,
    total,
    write_source_files,
)


class FileChanged(Exception):
    """A file was published again between its examination and its copying."""


class JobWriter:
    """Knows which file each task's rows are from."""

    def __init__(self, db: sqlite3.Connection, files: Mapping[str, SourceFile]) -> None:
        self._db = db
        self._files = dict(files)
        self._holders = {file.task_id: path for path, file in files.items() if file.status in HOLDING}
        self._expected: dict[int, Mapping[str, int]] = {}  # task → rows by table
        self._attachments = 0

    def take(self, intake: Intake) -> None:
        """Take what a file has to give."""
        name, before = intake.path, self._files.get(intake.path)
        if before is not None and before.status in HOLDING and intake.task_id not in (None, before.task_id):
            # The file of a task was replaced by one of another task: the rows of the first stay.
            other = f"{name} (before {intake.task_name} took its place)"
            self._files[other] = replace(self._files.pop(name), path=other)
            self._holders[before.task_id] = other
        holder = self._files.get(self._holders.get(intake.task_id, ""))
        if intake.database is None:
            self._files[name] = intake
            if before is not None and before.status in HOLDING:
                reason = f"kept from an earlier merge; the file now: {intake.reason}"
                size_bytes, mtime_ns = intake.size_bytes, intake.mtime_ns
                kept = replace(before, status=KEPT, reason=reason, size_bytes=size_bytes, mtime_ns=mtime_ns)
                self._files[name] = kept
        elif holder is None and intake.is_half:
            reason = "half of a task whose other half is not here"
            self._files[name] = SourceFile(name, None, SKIPPED, reason)  # without a time: tried again
        elif holder is None:
            self._hold(intake)
        elif holder.path != name and self._is_namesake(intake):
            reason = f"another task of the same name as that in {holder.path}; merge it into a job database of its own"
            self._files[name] = replace(intake, task_id=None, status=SKIPPED, reason=reason)
        elif intake.checksum is None or holder.checksum is None:
            self._put_together(intake, holder)
        elif holder.path == name:
            self._hold(intake)
        elif intake.checksum == holder.checksum and name < holder.path:
            self._holders[holder.task_id] = name
            self._files[name] = intake
            self._files[holder.path] = _copy_of(holder, name)
        elif intake.checksum != holder.checksum and intake.rank > holder.rank:
            self._hold(intake)  # the later publication has all that the earlier one had
            self._files[holder.path] = _copy_of(holder, name)
        else:
            self._files[name] = _copy_of(intake, holder.path)

    def finish(self) -> tuple[SourceFile, ...]:
        """Settle what the tasks say of each other's chunks, check the rows, and write what became of each file."""
        salvaged = [file.task_id for file in self._files.values() if file.status == SALVAGED and file.task_id]
        with transaction(self._db):
            create_indexes(self._db)
            settle(self._db, salvaged)
            for task_id, expected in self._expected.items():
                for table, many in count_rows(self._db, task_id, leave_out=(*ORDERED_BY, *DERIVED)).items():
                    _check(table, task_id, expected.get(table, 0), many)
            files = tuple(self._files[path] for path in sorted(self._files))
            write_source_files(self._db, files)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
        return files

    def _is_namesake(self, intake: Intake) -> bool:
        """Say whether a task of the same name and id is another one: it started at another time."""
        row = self._db.execute("SELECT started_at_ms FROM task WHERE task_id = ?", (intake.task_id,)).fetchone()
        return not intake.is_half and row is not None and row[0] != intake.started_at_ms

    def _hold(self, intake: Intake) -> None:
        """Make this file's rows those of its task."""
        rows = self._write(intake)
        self._files[intake.path] = replace(intake, rows=rows, counts={})  # there may be thousands
        self._holders[intake.task_id] = intake.path

    def _write(self, intake: Intake) -> int:
        """Copy the rows of a task in place of those it had; return how many there are."""
        assert intake.database is not None and intake.task_id is not None
        db, task_id, counts = self._db, intake.task_id, dict(intake.counts)
        self._attachments += 1
        source = f"source{self._attachments}"
        db.execute(f"ATTACH ? AS {source}", (read_only_uri(intake.database, sealed=True),))
        try:
            with transaction(db):
                if task_id in self._holders:
                    take_out(db, task_id)
                put_in(db, source, task_id, add_up=intake.checksum is None or intake.database != intake.file)
                if intake.was_replaced:
                    raise FileChanged(intake.file)
                for table in (table for table in ORDERED_BY if table in counts):
                    counts[table] = self._count_keyed(source, table, task_id, counts[table])
        finally:
            if not db.in_transaction:  # inside one it cannot be detached before its end
                db.execute(f"DETACH {source}")
        self._expected[task_id] = counts
        return total(counts)

    def _count_keyed(self, source: str, table: str, task_id: int, wanted: int) -> int:
        """Count and check rows that lie under a key; the same instant told twice is one row."""
        ours = f"{table} WHERE task_id = ?"
        (many,) = self._db.execute(f"SELECT count(*) FROM main.{ours}", (task_id,)).fetchone()
        if many != wanted and table not in DERIVED:
            keys = f"SELECT count(*) FROM (SELECT DISTINCT {ORDERED_BY[table]} FROM {source}.{ours})"
            _check(table, task_id, self._db.execute(keys, (task_id,)).fetchone()[0], many)
        return int(many)

    def _put_together(self, intake: Intake, holder: SourceFile) -> None:
        """Join two files of one task: one is damaged, or a live file, and each may have rows that the other has not."""
        assert intake.database is not None and intake.task_id is not None
        held, theirs = intake.scratch / "held.sqlite", intake.scratch / "theirs.sqlite"
        for path in (held, theirs):
            path.unlink(missing_ok=True)
        extract_task(self._db, intake.task_id, held)
        copy_task(intake.database, theirs)
        held_first = intake.is_half or _trust(holder) >= _trust(intake)
        first, second = (held, theirs) if held_first else (theirs, held)
        add_missing_rows(first, second)
        whole = describe(replace(intake, database=first, checksum=None))
        rows = self._write(whole)
        keeper, other = (holder, intake) if held_first else (intake, holder)
        if holder.path == intake.path:
            keeper = other = intake
        else:
            self._files[other.path] = _copy_of(other, keeper.path)
        self._holders[intake.task_id] = keeper.path
        # How many rows are still missing, if any of the files knows how many there were.
        sizes = [(f.rows or 0) + (f.rows_lost or 0) for f in (holder, intake) if f.checksum or f.rows_lost is not None]
        lost = max(0, max(sizes) - rows) if sizes else None
        damaged = keeper.status == SALVAGED or (other.status == SALVAGED and lost != 0 and other.rank > keeper.rank)
        reason, more = keeper.reason, rows - (keeper.rows or 0)
        if more > 0:
            origin = "an earlier merge" if other.path == keeper.path else other.path
            reason = "; ".join(filter(None, [reason, f"{more:,} rows more from {origin}"]))
        self._files[keeper.path] = replace(
            keeper,
            status=SALVAGED if damaged else keeper.status,
            reason=reason,
            rows=rows,
            rows_lost=lost if damaged else None,
            last_sign_ms=whole.last_sign_ms,
        )


def _trust(file: SourceFile) -> tuple[object, ...]:
    """Order two files of one task: whose rows are believed where both have them."""
    return (file.checksum is not None, file.status != SALVAGED, *file.rank)


def _copy_of(file: SourceFile, holder: str) -> SourceFile:
    how = "a damaged or partial copy" if file.checksum is None else "a copy, or an earlier publication,"
    return replace(file, status=COPY, reason=f"{how} of the task in {holder}", rows_lost=None)


def _check(table: str, task_id: int, wanted: int, found: int) -> None:
    """Compare rows in and rows out."""
    if wanted != found:
        raise DatabaseProblem(
            f"the row check failed: task {task_id} has {wanted:,} rows of {table}, but {found:,} arrived",
            why="this is a bug in badcjobs, or a disk that does not keep what is written; nothing was replaced",
            fix="badcjobs merge RUN_FOLDER -o /another/disk/job.sqlite",
        )
