"""Finds and examines the files that a merge is given (table ``source_file``).

A file was published, and is complete or damaged, or it is the live file of a task that has ended. The files themselves
are never changed: damage is read past, and live files are joined, on a copy.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Literal

from badcjobs.errors import DatabaseProblem
from badcjobs.paths import LocalFolder, shell_line
from badcjobs.settings import absolute
from badcjobs.store.atomic_write import (
    PAGE_BYTES,
    count_tables,
    is_published,
    read_pages,
    read_publication,
    read_row_counts,
    read_stamp,
    write_row_counts,
)
from badcjobs.store.connect import (
    SQLITE_MAGIC,
    UNREADABLE,
    create_scratch,
    file_uri,
    is_job_database,
    open_sealed,
    open_uri,
    read_as,
    read_value,
    refuse_strange_tables,
    rows_by_name,
    schema_problem,
    with_logs,
)
from badcjobs.store.figures import write_figures
from badcjobs.store.live_files import LiveHalf
from badcjobs.store.publish import join_files
from badcjobs.store.schema import (
    APPLICATION_ID,
    DERIVED,
    SCHEMA_VERSION,
    TABLES,
    columns_of,
    insert_sql,
)

# merged: as it is. recovered: joined from live files; no row is lost. salvaged: damaged; the rows that could be read.
# kept: no longer readable; its rows come from an earlier merge. copy: another file of the same task has all its rows.
# skipped: none of its rows are in the job database.
Status = Literal["merged", "recovered", "salvaged", "kept", "copy", "skipped"]
HOLDING = ("merged", "recovered", "salvaged", "kept")  # the rows of the task come from this file
NOT_OURS = "a job database, not a task database"
STILL_WRITTEN = "it is still being written; merge again when it is complete"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, merged or not: a row of ``source_file``."""

    path: str
    task_id: int | None
    status: Status
    reason: str | None = None
    size_bytes: int | None = None
    mtime_ns: int | None = None
    rows: int | None = None
    rows_lost: int | None = None
    last_sign_ms: int | None = None
    checksum: str | None = None

    @property
    def rank(self) -> tuple[int, int, str]:
        """A sort key: of two files of one task, the higher one has more rows."""
        return self.rows or 0, self.last_sign_ms or 0, self.checksum or ""

    @property
    def is_damaged(self) -> bool:
        """Whether its rows are those that could be read."""
        return self.rows_lost is not None

    def is_same(self, now: os.stat_result) -> bool:
        """Say whether a file still has the same size and modification time."""
        return (now.st_size, now.st_mtime_ns) == (self.size_bytes, self.mtime_ns)

    @property
    def lost_something(self) -> bool:
        """Whether rows of this file are missing, or may be; a job database among the inputs does not count."""
        return self.status in ("salvaged", "kept", "skipped") and self.reason != NOT_OURS


@dataclass(frozen=True, slots=True)
class Intake(SourceFile):
    """A file that was found and, if it has a ``scratch`` folder, examined."""

    file: Path = Path()
    scratch: Path = Path()  # a folder for copies, if they are needed, until the file is merged
    database: Path | None = None  # what to merge: the file, or a repaired copy; None: nothing
    task_name: str | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # table → rows

    @property
    def was_replaced(self) -> bool:
        """Whether the file was published again, or is gone, since it was examined."""
        with suppress(OSError):
            return not self.is_same(self.file.stat())
        return True


_COLUMNS = tuple(column.name for column in fields(SourceFile))


def read_source_files(db: sqlite3.Connection) -> tuple[SourceFile, ...]:
    """Return the files that a job database lists."""
    return read_as(db, SourceFile, "SELECT * FROM source_file ORDER BY path")


def write_source_files(db: sqlite3.Connection, files: Iterable[SourceFile]) -> None:
    """Replace the list of files."""
    db.execute("DELETE FROM source_file")
    db.executemany(insert_sql("source_file", _COLUMNS), map(attrgetter(*_COLUMNS), files))


# --- finding ----------------------------------------------------------------------------------------------------------


class NoTaskDatabases(DatabaseProblem):
    """The given folders contain no task database."""


def check_inputs(inputs: Iterable[Path]) -> None:
    """Refuse paths that do not exist; the error names all of them."""
    missing = []
    for place in inputs:
        try:
            place.lstat()
        except FileNotFoundError:
            missing.append(str(place))
        except OSError as error:  # no permission for a parent folder
            line = shell_line("ls", "-ld", place.absolute().parent)
            raise DatabaseProblem(f"{place} cannot be read", why=error.strerror, fix=line) from error
    if missing:
        above = next(folder for folder in Path(missing[0]).absolute().parents if folder.is_dir())
        raise DatabaseProblem(
            f"{', '.join(missing)} {'does' if len(missing) == 1 else 'do'} not exist",
            why="expected: run folders (--out of badcjobs run or submit), or task databases",
            fix=shell_line("ls", above),
        )


def find_task_databases(inputs: Iterable[Path], target: Path) -> list[Intake]:
    """Return the given files, and every ``*.sqlite`` below the given folders, in a stable order, not yet examined.

    Folders that cannot be read are returned, too, with the reason.
    """
    files: dict[Path, Intake] = {}
    home = f"{full_path(target.parent)}{os.sep}"

    def add(path: Path, reason: str | None = None) -> None:
        # Faster than relative_to, for thousands of files. ``source_file`` can store only valid UTF-8.
        name = str(path).removeprefix(home).encode("utf-8", "backslashreplace").decode()
        files.setdefault(path, Intake(name, None, "skipped", reason, file=path))

    for place in map(full_path, inputs):
        if not place.is_dir():
            add(place)
            continue
        errors: list[OSError] = []
        for parent, folders, names in os.walk(place, onerror=errors.append):
            folders[:] = [name for name in folders if not name.startswith(".")]
            live = LocalFolder(Path(parent))
            if live.wrapper_file.name in names:  # the recorder's files are read together with it
                of_recorder = (live.recorder_file.name, live.recorder_snapshot.name)
                names = [name for name in names if name not in of_recorder]
            for name in names:  # hidden files are unfinished copies
                if name.endswith(".sqlite") and not name.startswith(".") and name != "job.sqlite":
                    add(Path(parent, name))
        for error in errors:
            if not isinstance(error, FileNotFoundError):  # removed since it was listed
                line = shell_line("ls", "-ld", error.filename)
                why = f"the folder cannot be read: {error.strerror}; its files are not merged. try: {line}"
                add(Path(error.filename), why)
    files.pop(full_path(target), None)
    return sorted(files.values(), key=lambda file: file.file)


def full_path(path: Path) -> Path:
    """Return the absolute path without ``..``; resolve() would follow a link to a file of another name."""
    return Path(absolute(Path(), str(path)))


# --- examining one file -----------------------------------------------------------------------------------------------

_TASKS = "SELECT task_id, name AS task_name FROM task"
_LAST_SIGN = """
    SELECT max(at_ms) FROM (
        SELECT max(started_at_ms, coalesce(ended_at_ms, 0)) AS at_ms
        FROM task
        UNION ALL SELECT max(last_at_ms) FROM device_total
        UNION ALL SELECT max(to_ms) FROM gap UNION ALL SELECT max(ended_at_ms) FROM attempt)"""


def examine(file: Intake, scratch: Path) -> Intake:
    """Examine a file; one that cannot be merged is skipped with a reason."""
    file = replace(file, scratch=scratch)
    if file.reason is not None:
        return file
    examined = file
    try:
        status = file.file.stat()
        examined = replace(file, size_bytes=status.st_size, mtime_ns=status.st_mtime_ns)
        return _read(examined, status)
    except DatabaseProblem as refusal:
        return replace(examined, reason=refusal.what)
    except OSError as error:  # without a size: the next merge tries again
        return replace(file, reason=error.strerror or str(error))
    except Exception as error:  # an isolation boundary: damage has countless forms
        return skipped(examined, f"damaged: {error}")


def skipped(intake: Intake, reason: str) -> Intake:
    """Return a file of which no row is merged."""
    return replace(
        intake,
        status="skipped",
        reason=reason,
        database=None,
        task_id=None,
        rows=None,
        rows_lost=None,
    )


def _describe(intake: Intake, database: Path) -> Intake:
    """Fill in the task, the row counts and the last time that the database itself gives."""
    with closing(open_sealed(database)) as db:
        refuse_strange_tables(db)
        counts = read_row_counts(db)
        tasks = list(rows_by_name(db, _TASKS))
        if len(tasks) != 1:
            raise DatabaseProblem("it contains no task" if not tasks else f"it contains {len(tasks)} tasks")
        last_sign_ms = read_value(db, _LAST_SIGN)
    rows = total(counts)
    return replace(intake, **tasks[0], database=database, counts=counts, rows=rows, last_sign_ms=last_sign_ms)


def total(counts: Mapping[str, int]) -> int:
    """Return the number of rows, without those of derived tables."""
    return sum(count for table, count in counts.items() if table not in ("meta", *DERIVED))


def _read(intake: Intake, status: os.stat_result) -> Intake:
    path = intake.file
    if not stat.S_ISREG(status.st_mode):  # reading a named pipe would block forever
        raise DatabaseProblem("not a file")
    if status.st_size == 0:
        raise DatabaseProblem("the file is empty")
    if not is_published(path):
        return _join_live(intake)
    damage = check_bytes(path)
    publication = read_publication(path)
    if damage is None and publication is not None:
        return _describe(replace(intake, status="merged", checksum=publication), path)
    return _salvage_rows(intake, damage or "damaged: its checksum is wrong")


def _join_live(intake: Intake) -> Intake:
    """Join the live files of a task that has ended."""
    intake.scratch.mkdir(exist_ok=True)
    halves = [intake.file]
    live = LocalFolder(intake.file.parent)
    if intake.file == live.wrapper_file and live.recorder_file.is_file():
        halves.append(live.recorder_file)
    complete = [_recover(half, intake.scratch) for half in halves]
    for half in complete:
        damage = check_bytes(half)
        if damage is not None:
            raise DatabaseProblem(damage)
        with closing(open_sealed(half)) as db:
            if is_job_database(db):
                raise DatabaseProblem(NOT_OURS)
            refuse_strange_tables(db)
    joined = intake.scratch / "joined.sqlite"
    join_files([LiveHalf(half, "sealed") for half in complete], joined)
    return _describe(replace(intake, status="recovered", reason="not published; completed on a copy"), joined)


_LARGEST_REST = 1 << 30
_HEADER = ">16xH10xI28xI4xI28x"  # size of a page, pages, user_version, application_id


def check_bytes(path: Path) -> str | None:
    """Return the damage that a few bytes show; refuse at once a file of any size that cannot be a database of ours."""
    size_bytes = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(100)
    if not head.startswith(SQLITE_MAGIC) or len(head) < 100:
        raise DatabaseProblem("not a SQLite database")
    page_bytes, count, version, application = struct.unpack_from(_HEADER, head)
    if application != APPLICATION_ID:
        raise DatabaseProblem("not a badcjobs database")
    if version != SCHEMA_VERSION:
        with closing(open_sealed(path)) as db:
            raise DatabaseProblem(schema_problem(db) or "")
    wanted_bytes = count * (65536 if page_bytes == 1 else page_bytes)
    if size_bytes - wanted_bytes > _LARGEST_REST:
        raise DatabaseProblem(f"not a badcjobs database: {size_bytes:,} bytes instead of {wanted_bytes:,}")
    return f"truncated: {size_bytes:,} of {wanted_bytes:,} bytes" if wanted_bytes > size_bytes else None


def _recover(path: Path, scratch: Path) -> Path:
    """Let SQLite complete, on a copy, what a dead writer had started; return the file itself if that was nothing."""
    files = with_logs(path)
    if files == [path]:
        return path
    copy = scratch / path.name
    for file in files:
        shutil.copyfile(file, scratch / file.name)
    # The check that follows reports what is wrong.
    with suppress(*UNREADABLE), closing(open_uri(file_uri(copy, "mode=rw"))) as db:
        db.execute("PRAGMA journal_mode = DELETE").fetchone()
    return copy


def _salvage_rows(intake: Intake, damage: str) -> Intake:
    """Salvage the rows of a damaged file; refuse it if that is not possible."""
    intake.scratch.mkdir(exist_ok=True)
    clean = intake.scratch / f"salvaged-{intake.file.name}"
    clean.unlink(missing_ok=True)
    try:
        lost = salvage(intake.file, clean)
    except UNREADABLE as error:
        raise DatabaseProblem(f"{damage}; {error}") from error
    rows_lost = total(lost)
    salvaged = _describe(replace(intake, status="salvaged", rows_lost=rows_lost), clean)
    by_table = ", ".join(f"{count:,} of {table}" for table, count in sorted(lost.items()) if total({table: count}))
    return replace(salvaged, reason=f"{damage}; rows saved: {salvaged.rows:,}; lost: {by_table or 'none'}")


# --- salvaging a damaged file -----------------------------------------------------------------------------------------
# Only pages with the right stamp are read, so that no value is wrong. Every table is read with SQL from both ends up to
# the damage. A chunk of which something is lost is pending again.

# A chunk stays done only if all its detections were saved, and only such a chunk has detections.
_REOPEN = """
    UPDATE chunk SET status = 'pending', detections = NULL
    WHERE status = 'done' AND detections > 0
    AND (recording_id, chunk_id, detections) NOT IN (
        SELECT recording_id, chunk_id, count(*) FROM detection GROUP BY 1, 2)"""
_DROP = """
    DELETE FROM {} WHERE (recording_id, chunk_id) NOT IN (
        SELECT recording_id, chunk_id FROM chunk WHERE status = 'done')"""


def salvage(damaged: Path, clean: Path) -> Counter[str]:
    """Write what can still be read of a published file as a new one; return how many rows are lost, by table.

    The damaged file is only read. ``clean`` must not exist. An error of SQLite means that nothing can be saved.
    """
    copy = clean.with_name(f"readable-{clean.name}")
    _copy_good_pages(damaged, copy)
    with closing(open_sealed(copy)) as source, closing(create_scratch(clean)) as db:
        source.execute("PRAGMA writable_schema = ON")  # allows a file that is shorter than its header states
        source.execute("PRAGMA cell_size_check = ON")
        refuse_strange_tables(source)
        db.execute("BEGIN")
        for table in (table for table in TABLES if table not in DERIVED):
            _copy_rows(source, db, table)
        task_id = read_value(db, "SELECT task_id FROM task")
        if task_id is None:
            raise sqlite3.DatabaseError("the row of its task is lost")
        db.execute(_REOPEN)
        for table in ("detection", "rarity"):
            db.execute(_DROP.format(table))
        write_figures(db, task_id)
        lost = Counter(read_row_counts(db)) - Counter(count_tables(db))
        write_row_counts(db)
        db.execute("COMMIT")
    copy.unlink()
    return lost


def _copy_good_pages(damaged: Path, copy: Path) -> None:
    """Copy the pages of one publication; in place of all others, write bytes that are neither a table nor text.

    The first page has no rows, and changes when another program opens the file: it is always copied.
    """
    stamps = Counter(read_stamp(page, number) for number, page in read_pages(damaged))
    del stamps[None]
    if not stamps:
        raise sqlite3.DatabaseError("all of its pages are damaged")
    [(publication, _)] = stamps.most_common(1)
    with copy.open("wb") as target:
        for number, page in read_pages(damaged):
            is_good = number == 1 or read_stamp(page, number) == publication
            target.write(page if is_good else b"\xff" * PAGE_BYTES)


def _copy_rows(source: sqlite3.Connection, clean: sqlite3.Connection, table: str) -> None:
    """Copy the rows of a table from its beginning up to the damage, then from its end."""
    columns = ("rowid", *columns_of(table))
    select = f"SELECT {', '.join(columns)} FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"
    insert = f"{insert_sql(table, columns)} ON CONFLICT DO NOTHING"
    last_copied = -1
    for order in ("ASC", "DESC"):
        with suppress(*UNREADABLE):
            clean.executemany(insert, source.execute(f"{select} {order}", (last_copied,)))
            return
        last_copied = read_value(clean, f"SELECT coalesce(max(rowid), -1) FROM {table}")
