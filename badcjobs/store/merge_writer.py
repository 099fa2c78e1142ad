"""Writes the draft of a job database, file by file, and checks that every row has arrived.

Of two sealed files of one task the later publication counts. Where one of them is damaged, or a live file, the two are
put together.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

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
    has_changed,
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
        name = intake.path
        self._make_way(intake)
        holder = self._files.get(self._holders.get(intake.task_id, ""))
        if intake.database is None:
            self._note_unreadable(intake)
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
        else:
            self._choose(intake, holder)

    def finish(self) -> tuple[SourceFile, ...]:
        """Settle what the tasks say of each other's chunks, check the rows, and write what became of each file."""
        salvaged = [file.task_id for file in self._files.values() if file.status == SALVAGED and file.task_id]
        with transaction(self._db):
            create_indexes(self._db)
            settle(self._db, salvaged)
            self._check_rows()
            files = tuple(self._files[path] for path in sorted(self._files))
            write_source_files(self._db, files)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
        return files

    # --- one file -----------------------------------------------------------------------------------------------------

    def _make_way(self, intake: Intake) -> None:
        """Keep the entry of a task whose file was replaced by one of another task."""
        before = self._files.get(intake.path)
        if before is not None and before.status in HOLDING and intake.task_id not in (None, before.task_id):
            other = f"{intake.path} (before {intake.task_name} took its place)"
            self._files[other] = replace(self._files.pop(intake.path), path=other)
            self._holders[before.task_id] = other

    def _note_unreadable(self, intake: Intake) -> None:
        before = self._files.get(intake.path)
        self._files[intake.path] = intake
        if before is not None and before.status in HOLDING:
            reason = f"kept from an earlier merge; the file now: {intake.reason}"
            self._files[intake.path] = replace(
                before, status=KEPT, reason=reason, size_bytes=intake.size_bytes, mtime_ns=intake.mtime_ns
            )

    def _is_namesake(self, intake: Intake) -> bool:
        """Say whether a task of the same name and id is another one: it started at another time."""
        row = self._db.execute("SELECT started_at_ms FROM task WHERE task_id = ?", (intake.task_id,)).fetchone()
        return not intake.is_half and row is not None and row[0] != intake.started_at_ms

    def _hold(self, intake: Intake) -> None:
        """Make this file's rows those of its task."""
        assert intake.database is not None and intake.task_id is not None
        counts = self._write(intake, intake.database, intake.task_id)
        self._files[intake.path] = replace(intake, rows=total(counts), counts={})  # there may be thousands
        self._holders[intake.task_id] = intake.path
        self._expected[intake.task_id] = counts

    def _write(self, intake: Intake, database: Path, task_id: int) -> Mapping[str, int]:
        """Copy the rows and return how many there must be."""
        counts = intake.counts
        with self._attached(database) as source, transaction(self._db):
            if task_id in self._holders:
                take_out(self._db, task_id)
            put_in(self._db, source, task_id, add_up=intake.checksum is None or database != intake.file)
            if has_changed(intake):  # published again since it was examined
                raise FileChanged(intake.file)
            keyed = [table for table in ORDERED_BY if table in counts]
            return {**counts, **{table: self._arrived(source, table, task_id, counts) for table in keyed}}

    def _arrived(self, source: str, table: str, task_id: int, rows: Mapping[str, int]) -> int:
        """Count rows that lie under a key; the same instant told twice is one row."""
        ours = f"{table} WHERE task_id = ?"
        (many,) = self._db.execute(f"SELECT count(*) FROM main.{ours}", (task_id,)).fetchone()
        if many != rows[table] and table not in DERIVED:
            keys = f"SELECT count(*) FROM (SELECT DISTINCT {ORDERED_BY[table]} FROM {source}.{ours})"
            (distinct,) = self._db.execute(keys, (task_id,)).fetchone()
            if many != distinct:
                raise _rows_missing(table, task_id, distinct, many)
        return int(many)

    # --- two files of one task ----------------------------------------------------------------------------------------

    def _choose(self, ours: Intake, holder: SourceFile) -> None:
        """Two sealed files: the later publication has all that the earlier one had."""
        if ours.checksum == holder.checksum and ours.path < holder.path:
            self._holders[holder.task_id] = ours.path
            self._files[ours.path] = ours
            self._files[holder.path] = _copy_of(holder, ours.path)
        elif ours.checksum != holder.checksum and ours.rank > holder.rank:
            self._hold(ours)
            self._files[holder.path] = _copy_of(holder, ours.path)
        else:
            self._files[ours.path] = _copy_of(ours, holder.path)

    def _put_together(self, intake: Intake, holder: SourceFile) -> None:
        """One of the two is damaged, or a live file: each may have rows that the other has not."""
        assert intake.database is not None and intake.task_id is not None
        held, theirs = intake.scratch / "held.sqlite", intake.scratch / "theirs.sqlite"
        for path in (held, theirs):
            path.unlink(missing_ok=True)
        extract_task(self._db, intake.task_id, held)
        copy_task(intake.database, theirs)
        ours_first = intake.is_half or _trust(holder) >= _trust(intake)
        first, second = (held, theirs) if ours_first else (theirs, held)
        add_missing_rows(first, second)
        keeper: SourceFile = intake
        other = holder
        if ours_first or holder.path == intake.path:
            keeper, other = holder, intake
        whole = describe(replace(intake, database=first))
        stamp = {name: getattr(keeper, name) for name in ("path", "size_bytes", "mtime_ns", "status", "reason")}
        self._hold(replace(whole, **stamp))
        together = self._files[keeper.path]
        if keeper.path == other.path:
            keeper = intake
        else:
            self._files[other.path] = _copy_of(other, keeper.path)
        lost = _lost(together.rows or 0, holder, intake)
        self._files[keeper.path] = _judged(keeper, other, together.rows or 0, lost, together.last_sign_ms)

    # --- the check ----------------------------------------------------------------------------------------------------

    def _check_rows(self) -> None:
        """Compare rows in and rows out of every task that was written."""
        for task_id, expected in self._expected.items():
            counts = count_rows(self._db, task_id, leave_out=(*ORDERED_BY, *DERIVED))
            for table, many in counts.items():
                if many != expected.get(table, 0):
                    raise _rows_missing(table, task_id, expected.get(table, 0), many)

    @contextmanager
    def _attached(self, database: Path) -> Iterator[str]:
        """Attach a file under a name; inside a transaction it cannot be detached before its end."""
        self._attachments += 1
        source = f"source{self._attachments}"
        self._db.execute(f"ATTACH ? AS {source}", (read_only_uri(database, sealed=True),))
        try:
            yield source
        finally:
            if not self._db.in_transaction:
                self._db.execute(f"DETACH {source}")


def _trust(file: SourceFile) -> tuple[object, ...]:
    """Order two files of one task: whose rows are believed where both have them."""
    return (file.checksum is not None, file.status != SALVAGED, *file.rank)


def _lost(rows: int, *files: SourceFile) -> int | None:
    """Return how many rows are still missing, if any of the files knows how many there were."""
    known = [(file.rows or 0) + (file.rows_lost or 0) for file in files if file.checksum or file.rows_lost is not None]
    return max(0, max(known) - rows) if known else None


def _judged(keeper: SourceFile, other: SourceFile, rows: int, lost: int | None, last_sign_ms: int | None) -> SourceFile:
    """Say what became of two files that were put together."""
    damaged = keeper.status == SALVAGED or (other.status == SALVAGED and lost != 0 and other.rank > keeper.rank)
    more = rows - (keeper.rows or 0)
    origin = "an earlier merge" if other.path == keeper.path else other.path
    words = [keeper.reason, f"{more:,} rows more from {origin}" if more > 0 else None]
    return replace(
        keeper,
        status=SALVAGED if damaged else keeper.status,
        reason="; ".join(word for word in words if word) or None,
        rows=rows,
        rows_lost=lost if damaged else None,
        last_sign_ms=last_sign_ms,
    )


def _copy_of(file: SourceFile, holder: str) -> SourceFile:
    how = "a damaged or partial copy" if file.checksum is None else "a copy, or an earlier publication,"
    return replace(file, status=COPY, reason=f"{how} of the task in {holder}", rows_lost=None)


def _rows_missing(table: str, task_id: int, wanted: int, found: int) -> DatabaseProblem:
    return DatabaseProblem(
        f"the row check failed: task {task_id} has {wanted:,} rows of {table}, but {found:,} arrived",
        why="this is a bug in badcjobs, or a disk that does not keep what is written; nothing was replaced",
        fix="badcjobs merge RUN_FOLDER -o /another/disk/job.sqlite",
    )
