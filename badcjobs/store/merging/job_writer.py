"""Writes the draft of a job database, file by file, and checks that every row has arrived.

Of two files of one task the later publication counts. Where one of them is damaged the two are put together.
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
from badcjobs.store.merging.intake import Intake, describe, salvage_instead
from badcjobs.store.merging.piece_together import add_missing_rows, extract_task
from badcjobs.store.merging.source_file import COPY, HOLDING, KEPT, SALVAGED, SourceFile, write_source_files
from badcjobs.store.merging.task_rows import count_rows, put_in, settle, take_out
from badcjobs.store.schema import DERIVED


class JobWriter:
    """Knows which file each task's rows are from."""

    def __init__(self, db: sqlite3.Connection, files: Mapping[str, SourceFile]) -> None:
        self._db = db
        self._files = dict(files)
        self._holders = {file.task_id: path for path, file in files.items() if file.status in HOLDING}
        self._expected: dict[int, Mapping[str, int]] = {}  # task → rows by table
        self._attachments = 0

    def adopt(self, old: Path) -> None:
        """Take over all rows of a job database that an older version made."""
        with self._attached(old) as source:
            for (task_id,) in self._db.execute(f"SELECT task_id FROM {source}.task ORDER BY task_id").fetchall():
                with transaction(self._db):
                    put_in(self._db, source, task_id, add_up=True)
        with transaction(self._db):
            create_indexes(self._db)
        for task_id, path in self._holders.items():
            if task_id is not None:
                self._files[path] = replace(self._files[path], rows=_total(count_rows(self._db, task_id)))

    def take(self, name: str, intake: Intake) -> None:
        """Take what a file has to give; ``name`` is what ``source_file`` calls it."""
        self._make_way(name, intake)
        holder = self._files.get(self._holders.get(intake.task_id, ""))
        if intake.database is None:
            self._note_unreadable(name, intake)
        elif holder is None or (holder.path == name and intake.status != SALVAGED):
            self._hold(name, intake)
        elif holder.path == name:
            self._hold(name, self._with_what_was_there(intake, "an earlier merge"))
        else:
            self._meet(name, intake, holder)

    def finish(self) -> tuple[SourceFile, ...]:
        """Settle what the tasks say of each other's chunks, check the rows, and write what became of each file."""
        with transaction(self._db):
            create_indexes(self._db)
            settle(self._db)
            self._check_rows()
            files = tuple(self._files[path] for path in sorted(self._files))
            write_source_files(self._db, files)
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('made_by', ?)", (f"badcjobs {__version__}",))
        return files

    # --- one file -----------------------------------------------------------------------------------------------------

    def _make_way(self, name: str, intake: Intake) -> None:
        """Keep the entry of a task whose file was replaced by one of another task."""
        before = self._files.get(name)
        if before is not None and before.status in HOLDING and intake.task_id not in (None, before.task_id):
            other = f"{name} (before {intake.task_name} took its place)"
            self._files[other] = replace(self._files.pop(name), path=other)
            self._holders[before.task_id] = other

    def _note_unreadable(self, name: str, intake: Intake) -> None:
        before, now = self._files.get(name), _entry(name, intake)
        if before is not None and before.status in HOLDING:
            reason = f"kept from an earlier merge; the file now: {intake.reason}"
            now = replace(before, status=KEPT, reason=reason, size_bytes=now.size_bytes, mtime_ns=now.mtime_ns)
        self._files[name] = now

    def _hold(self, name: str, intake: Intake) -> None:
        """Make this file's rows those of its task."""
        assert intake.database is not None and intake.task_id is not None
        try:
            rows = self._write(intake, intake.database, intake.task_id)
        except sqlite3.DatabaseError as error:
            if "malformed" not in str(error) or intake.checksum is not None:
                raise  # the fault is not in the file
            self.take(name, salvage_instead(intake, f"damaged: {error}"))
            return
        self._files[name] = _entry(name, replace(intake, rows=rows))
        self._holders[intake.task_id] = name
        self._expected[intake.task_id] = rows

    def _write(self, intake: Intake, database: Path, task_id: int) -> Mapping[str, int]:
        """Copy the rows and return how many there must be."""
        keyed = [table for table in ORDERED_BY if table in intake.rows]
        with self._attached(database) as source, transaction(self._db):
            if task_id in self._holders:
                take_out(self._db, task_id)
            put_in(self._db, source, task_id, add_up=intake.checksum is None)
            return {**intake.rows, **{table: self._arrived(source, table, task_id, intake.rows) for table in keyed}}

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

    def _meet(self, name: str, intake: Intake, holder: SourceFile) -> None:
        """Two files of one task: decide whose rows count, the same way whichever came first."""
        same_bytes = intake.checksum is not None and intake.checksum == holder.checksum
        ours, theirs = (_order(_entry(name, intake)), _order(holder))
        damaged = SALVAGED in (intake.status, holder.status)
        if same_bytes and name < holder.path:
            self._holders[holder.task_id] = name
            self._files[name] = _entry(name, intake)
            self._files[holder.path] = _copy_of(holder, name, "a copy of")
        elif same_bytes:
            self._files[name] = _copy_of(_entry(name, intake), holder.path, "a copy of")
        elif ours > theirs:
            better = intake if intake.status != SALVAGED else self._with_what_was_there(intake, holder.path)
            self._hold(name, better)
            self._files[holder.path] = _copy_of(holder, name, "an earlier or damaged copy of")
        elif damaged and holder.status == SALVAGED:
            self._complete(holder, intake, name)
        else:
            self._files[name] = _copy_of(_entry(name, intake), holder.path, "an earlier or damaged copy of")

    def _with_what_was_there(self, intake: Intake, origin: str) -> Intake:
        """Add to salvaged rows what the draft has of the same task."""
        assert intake.database is not None and intake.task_id is not None
        held = intake.database.with_name("held.sqlite")
        held.unlink(missing_ok=True)
        extract_task(self._db, intake.task_id, held)
        return _added(intake, add_missing_rows(intake.database, held), origin)

    def _complete(self, holder: SourceFile, intake: Intake, name: str) -> None:
        """Add to the salvaged rows that the draft holds what this file has."""
        assert intake.database is not None and intake.task_id is not None
        held = intake.scratch / "held.sqlite"
        held.unlink(missing_ok=True)
        extract_task(self._db, intake.task_id, held)
        added = add_missing_rows(held, intake.database)
        whole = describe(replace(intake, status=holder.status, reason=holder.reason, database=held))
        stamped = replace(whole, size_bytes=holder.size_bytes, mtime_ns=holder.mtime_ns, checksum=holder.checksum)
        self._hold(holder.path, _added(stamped, added, name))
        self._files[name] = _copy_of(_entry(name, intake), holder.path, "an earlier or damaged copy of")

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


def _order(file: SourceFile) -> tuple[object, ...]:
    """Order files of one task: the later publication, then what was read whole."""
    return (*file.rank[:2], file.status != SALVAGED, file.rank[2])


def _entry(name: str, intake: Intake) -> SourceFile:
    return SourceFile(
        path=name,
        task_id=intake.task_id,
        status=intake.status,
        reason=intake.reason,
        size_bytes=intake.size_bytes,
        mtime_ns=intake.mtime_ns,
        rows=None if intake.database is None else _total(intake.rows),
        rows_lost=intake.rows_lost,
        last_sign_ms=intake.last_sign_ms,
        checksum=intake.checksum,
    )


def _copy_of(file: SourceFile, holder: str, how: str) -> SourceFile:
    return replace(file, status=COPY, reason=f"{how} the task in {holder}", rows_lost=None)


def _added(intake: Intake, added: int, origin: str) -> Intake:
    intake = describe(intake)
    if not added:
        return intake
    lost = None if intake.rows_lost is None else max(0, intake.rows_lost - added)
    return replace(intake, reason=f"{intake.reason}; {added:,} rows more from {origin}", rows_lost=lost)


def _total(rows: Mapping[str, int]) -> int:
    return sum(many for table, many in rows.items() if table not in DERIVED)


def _rows_missing(table: str, task_id: int, wanted: int, found: int) -> DatabaseProblem:
    return DatabaseProblem(
        f"the row check failed: task {task_id} has {wanted:,} rows of {table}, but {found:,} arrived",
        why="this is a bug in badcjobs, or a disk that does not keep what is written; nothing was replaced",
        fix="badcjobs merge RUN_FOLDER -o /another/disk/job.sqlite",
    )
