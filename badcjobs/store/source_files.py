"""Finds and examines the files that a merge is given (table ``source_file``).

A file is complete, or can be completed, or some of its rows can be saved. The files themselves are never changed: a
journal is rolled back, and damage is read past, on a copy.
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
from badcjobs.paths import shell_line
from badcjobs.settings import absolute
from badcjobs.store.atomic_write import PAGE_BYTES, count_tables, is_stamped, read_checksum, read_sealed_rows
from badcjobs.store.connect import (
    SQLITE_MAGIC,
    file_uri,
    is_job_database,
    open_sealed,
    open_uri,
    read_value,
    refuse_strange_tables,
    rows_by_name,
    schema_problem,
)
from badcjobs.store.plausible import UNREADABLE, find_damage
from badcjobs.store.salvage import read_stamps, salvage
from badcjobs.store.schema import APPLICATION_ID, DERIVED, SCHEMA_VERSION, insert_sql

# merged: as it is. recovered: with the journal or WAL next to it; no row is lost. salvaged: damaged; the rows that
# could be read. kept: no longer readable; its rows come from an earlier merge. copy: another file of the same task has
# all its rows. skipped: none of its rows are in the job database.
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
        """A sort key: of two files of one task, the higher one was published later."""
        return self.last_sign_ms or 0, self.rows or 0, self.checksum or ""

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
    has_leftovers: bool = False  # a WAL or a journal is next to it
    scratch: Path = Path()  # a folder for copies, until the file is merged
    database: Path | None = None  # what to merge: the file, or a repaired copy; None: nothing
    task_name: str | None = None
    started_at_ms: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)  # table → rows

    @property
    def was_replaced(self) -> bool:
        """Whether the file was published again since it was examined; a copy of ours never is."""
        with suppress(OSError):
            return self.database == self.file and not self.is_same(self.file.stat())
        return True

    @property
    def is_half(self) -> bool:
        """Whether this is a recorder's live file: readings without the row of their task."""
        return self.database is not None and self.task_name is None


_COLUMNS = tuple(column.name for column in fields(SourceFile))


def read_source_files(db: sqlite3.Connection) -> tuple[SourceFile, ...]:
    """Return the files that a job database lists."""
    return tuple(SourceFile(*row) for row in db.execute(f"SELECT {', '.join(_COLUMNS)} FROM source_file ORDER BY path"))


def write_source_files(db: sqlite3.Connection, files: Iterable[SourceFile]) -> None:
    """Replace the list of files."""
    db.execute("DELETE FROM source_file")
    db.executemany(insert_sql("source_file", _COLUMNS), map(attrgetter(*_COLUMNS), files))


# --- finding ----------------------------------------------------------------------------------------------------------

LEFTOVERS = ("-wal", "-journal")


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
    found: dict[Path, Intake] = {}
    home = f"{full_path(target.parent)}{os.sep}"

    def add(path: Path, *, has_leftovers: bool = False, closed: str | None = None) -> None:
        # Faster than relative_to, for thousands of files. ``source_file`` can store only valid UTF-8.
        name = str(path).removeprefix(home).encode("utf-8", "backslashreplace").decode()
        found.setdefault(path, Intake(name, None, "skipped", closed, file=path, has_leftovers=has_leftovers))

    for place in map(full_path, inputs):
        if not place.is_dir():
            add(place, has_leftovers=any(place.with_name(place.name + ending).exists() for ending in LEFTOVERS))
            continue
        closed: list[OSError] = []
        for parent, folders, names in os.walk(place, onerror=closed.append):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in [name for name in folders if name.endswith(".sqlite")]:
                add(Path(parent, name), closed="a folder, not a file")
                folders.remove(name)
            there = set(names)
            for name in names:  # hidden files are unfinished copies and live files
                if name.endswith(".sqlite") and not name.startswith(".") and name != "job.sqlite":
                    add(Path(parent, name), has_leftovers=any(name + ending in there for ending in LEFTOVERS))
        for error in closed:
            if not isinstance(error, FileNotFoundError):  # removed since it was listed
                line = shell_line("ls", "-ld", error.filename)
                why = f"the folder cannot be read: {error.strerror}; its files are not merged. try: {line}"
                add(Path(error.filename), closed=why)
    found.pop(full_path(target), None)
    return sorted(found.values(), key=lambda file: file.file)


def full_path(path: Path) -> Path:
    """Return the absolute path without ``..``; resolve() would follow a link to a file of another name."""
    return Path(absolute(Path(), str(path)))


# --- examining one file -----------------------------------------------------------------------------------------------

_TRIES = 3
_TASKS = "SELECT task_id, name AS task_name, started_at_ms FROM task"
_WHOSE_READINGS = "SELECT task_id FROM sample UNION SELECT task_id FROM host_sample LIMIT 2"
_LAST_SIGN = """
    SELECT max(at_ms) FROM (
        SELECT max(started_at_ms, coalesce(ended_at_ms, 0)) AS at_ms FROM task
        UNION ALL SELECT max({column}) FROM {table}
        UNION ALL SELECT max(to_ms) FROM gap UNION ALL SELECT max(ended_at_ms) FROM attempt)"""


def examine(found: Intake, scratch: Path) -> Intake:
    """Examine a file, and again if it changes meanwhile; a file that cannot be merged is skipped with a reason."""
    found = replace(found, scratch=scratch)
    if found.reason is not None:
        return found
    try:
        for _ in range(_TRIES):
            before = found.file.stat()
            try:
                intake = _read(found, before)
            except DatabaseProblem as refusal:
                intake = replace(found, reason=refusal.what)
            except OSError:
                raise
            except Exception as error:  # an isolation boundary: damage has countless forms
                intake = salvage_instead(found, f"damaged: {error}")
            intake = replace(intake, size_bytes=before.st_size, mtime_ns=before.st_mtime_ns)
            if intake.is_same(found.file.stat()):
                return intake
    except OSError as error:
        return replace(found, reason=error.strerror or str(error))
    return replace(found, reason=STILL_WRITTEN)


def salvage_instead(intake: Intake, damage: str) -> Intake:
    """Salvage a file whose damage was found only while its rows were read or copied; skip it if that fails, too."""
    intake.scratch.mkdir(exist_ok=True)
    try:
        return _salvage_rows(replace(intake, counts={}), damage)
    except Exception as error:  # no damage of one file stops the merge of the others
        return skipped(intake, error.what if isinstance(error, DatabaseProblem) else f"{damage}; {error}")


def skipped(intake: Intake, reason: str) -> Intake:
    """Return a file of which no row is merged."""
    return replace(intake, status="skipped", reason=reason, database=None, task_id=None, rows=None, rows_lost=None)


def describe(intake: Intake) -> Intake:
    """Fill in the task, the row counts and the last time that the database itself gives.

    The counts of a sealed file are used as they are: its checksum shows that it has not changed since it was published.
    """
    assert intake.database is not None
    sealed = intake.checksum is not None
    with closing(open_sealed(intake.database)) as db:
        if is_job_database(db):
            raise DatabaseProblem(NOT_OURS)
        refuse_strange_tables(db)
        counts = read_sealed_rows(db) if sealed else count_tables(db)
        tasks = rows_by_name(db, _TASKS) or rows_by_name(db, _WHOSE_READINGS)
        if len(tasks) != 1:
            raise DatabaseProblem("it contains no task" if not tasks else f"it contains {len(tasks)} tasks")
        column, table = ("last_at_ms", "device_total") if sealed else ("at_ms", "sample")
        last_sign_ms = read_value(db, _LAST_SIGN.format(column=column, table=table))
    return replace(intake, **tasks[0], counts=counts, rows=total(counts), last_sign_ms=last_sign_ms)


def total(counts: Mapping[str, int]) -> int:
    """Return the number of rows, without those of derived tables."""
    return sum(many for table, many in counts.items() if table not in ("meta", *DERIVED))


def _read(intake: Intake, status: os.stat_result) -> Intake:
    path = intake.file
    if not stat.S_ISREG(status.st_mode):  # reading a named pipe would block forever
        raise DatabaseProblem("a folder, not a file" if stat.S_ISDIR(status.st_mode) else "not a file")
    if status.st_size == 0:
        raise DatabaseProblem("the file is empty")
    besides = [(ending, path.with_name(path.name + ending)) for ending in LEFTOVERS]
    leftovers = [ending for ending, beside in besides if beside.exists() and beside.stat().st_size > 0]
    is_new = leftovers and status.st_size == PAGE_BYTES  # its header, too, is in its log
    damage = None if is_new else check_bytes(path, status.st_size)
    stated, computed = read_checksum(path)
    if damage is None and stated == computed:
        return describe(replace(intake, status="merged", database=path, checksum=stated))
    if leftovers:
        copy = _recover(path, leftovers, intake.scratch)
        reason = f"completed on a copy with {path.name}{leftovers[0]}"
        intake = replace(intake, status="recovered", reason=reason, database=copy)
        before_and_after = [*zip(read_stamps(path), read_stamps(copy), strict=False)]
        if is_stamped(path) and not all(map(any, before_and_after[1:])):  # SQLite itself may change the first page
            return _salvage_rows(intake, "damaged: its checksum is wrong")
    elif damage is not None or stated is not None or is_stamped(path):
        return _salvage_rows(intake, damage or "damaged: its checksum is wrong")
    else:
        intake = replace(intake, status="merged", database=path)
    return _read_unproven(intake, intake.database or path)


def _read_unproven(intake: Intake, database: Path) -> Intake:
    """Read a file without a valid seal: a live one, or one that was recovered."""
    intake = describe(intake)
    with closing(open_sealed(database)) as db:
        damage = find_damage(db, intake.task_id)
        published = read_sealed_rows(db)
    if damage is not None:
        return _salvage_rows(intake, f"damaged: {damage}")
    if not (lost := Counter(published) - Counter(intake.counts)):
        return intake
    reason = f"{intake.reason or 'damaged: rows are missing'}; {_saved_text(intake.counts, lost)}"
    return replace(intake, status="salvaged", reason=reason, rows_lost=lost.total())


_LARGEST_HOLE = 1 << 30
_HEADER = ">16xH10xI28xI4xI28x"  # size of a page, pages, user_version, application_id
_TREE_PAGES = (2, 5, 10, 13)  # the first byte of an SQLite page that is in use


def check_bytes(path: Path, size_bytes: int) -> str | None:
    """Return the damage that a few bytes show; refuse at once a file of any size that cannot be a database of ours.

    A file whose first page is lost can be salvaged: the pages after it are those of our tables.
    """
    with path.open("rb") as file:
        pages = [page for _ in range(20) if (page := file.read(PAGE_BYTES))]
        hole = end = size_bytes
        with suppress(OSError):  # the filesystem does not say, or nothing follows the hole
            hole = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
            end = os.lseek(file.fileno(), hole, os.SEEK_DATA)
    if end - hole > _LARGEST_HOLE:
        raise DatabaseProblem(f"a sparse file: of its {size_bytes:,} bytes, {end - hole:,} were never written")
    head, *others = pages
    if not head.startswith(SQLITE_MAGIC) or len(head) < 100:
        if sum(page[0] in _TREE_PAGES for page in others) <= len(others) // 2:
            raise DatabaseProblem("not a SQLite database")
        return "damaged: its header is wrong"
    page_bytes, count, version, application = struct.unpack_from(_HEADER, head)
    if (application, version) == (APPLICATION_ID, SCHEMA_VERSION):
        wanted_bytes = count * (65536 if page_bytes == 1 else page_bytes)
        return f"truncated: {size_bytes:,} of {wanted_bytes:,} bytes" if wanted_bytes > size_bytes else None
    if application == APPLICATION_ID or version == SCHEMA_VERSION:
        stated, computed = read_checksum(path)
        if stated not in (None, computed):
            return "damaged: its header is wrong"
    if application != APPLICATION_ID:
        raise DatabaseProblem("not a badcjobs database")
    with closing(open_sealed(path)) as db:
        raise DatabaseProblem(schema_problem(db) or "")


def _recover(path: Path, leftovers: list[str], scratch: Path) -> Path:
    """Let SQLite complete, on a copy, what a dead writer had started."""
    copy = scratch / path.name
    for ending in ("", *leftovers):
        shutil.copyfile(path.with_name(path.name + ending), copy.with_name(copy.name + ending))
    # The check that follows reports what is wrong.
    with suppress(*UNREADABLE), closing(open_uri(file_uri(copy, "mode=rw"))) as db:
        db.execute("PRAGMA journal_mode = DELETE").fetchone()
    return copy


def _salvage_rows(intake: Intake, damage: str) -> Intake:
    """Salvage the rows of a damaged file; refuse it if there are none."""
    clean = intake.scratch / f"salvaged-{intake.file.name}"
    clean.unlink(missing_ok=True)
    saved = salvage(intake.database or intake.file, clean)
    if saved is None:
        raise DatabaseProblem(damage)
    rows, lost = saved
    reason = f"{damage}; {_saved_text(rows, lost)}"
    if not is_stamped(intake.file):
        reason += "; some values may be wrong"
    rows_lost = None if lost is None else total(lost)
    return describe(
        replace(intake, status="salvaged", reason=reason, database=clean, rows_lost=rows_lost, checksum=None)
    )


def _saved_text(saved: Mapping[str, int], lost: Mapping[str, int] | None) -> str:
    rows = total(saved)
    if lost is None:
        return f"rows saved: {rows:,}; the number of lost rows is not known"
    if not total(lost):
        return f"rows saved: all {rows:,}"
    by_table = ", ".join(f"{many:,} of {table}" for table, many in sorted(lost.items()) if total({table: many}))
    return f"rows saved: {rows:,} of {rows + total(lost):,} (lost: {by_table})"
