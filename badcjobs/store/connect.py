"""Opens SQLite files: the live ones of a task that runs, the sealed ones that are published, and the job database."""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import quote

from badcjobs import __version__
from badcjobs.errors import DatabaseProblem
from badcjobs.store.filesystem import read_filesystem
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION, ddl_script

if TYPE_CHECKING:
    from sqlite_utils import Database


SQLITE_MAGIC = b"SQLite format 3\0"
_Facts = TypeVar("_Facts")
# What people call a chunk, as an SQL expression.
CHUNK_NAME = "CASE WHEN recording_id = chunk_id THEN '' ELSE recording_id || '/' END || chunk_id"
_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables


def create_live(path: Path, *, shared: bool = False) -> sqlite3.Connection:
    """Open (or create) a database with one writer.

    On node-local disk: WAL with synchronous=NORMAL. A commit costs no fsync, kill -9 loses nothing committed, the
    file survives a power cut, and readers of this machine may look on. ``shared``: WAL needs memory that hosts do not
    share, and locks may be missing or lie; so a rollback journal, synced, and nobody looks on (live_files.py).
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise DatabaseProblem(
            f"this Python has SQLite {sqlite3.sqlite_version}; badcjobs needs 3.37 or newer",
            fix="module load python   (or any Python built with a newer SQLite)",
        )
    uri = unshared_uri(path) if shared else file_uri(path, "mode=rwc")
    # Snapshots are taken from another thread; SQLite itself lets one thread in at a time.
    connection = sqlite3.connect(uri, isolation_level=None, timeout=5, uri=True, check_same_thread=False)
    if shared:
        connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # keeps the journal open: one fsync less per commit
    connection.execute(f"PRAGMA journal_mode = {'TRUNCATE' if shared else 'WAL'}")
    connection.execute(f"PRAGMA synchronous = {'FULL' if shared else 'NORMAL'}")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        create_tables(connection)
    return connection


def unshared_uri(path: Path) -> str:
    """Return the URI of a file that only one living process opens: it asks the filesystem for no lock at all.

    A rollback journal that a dead writer has left behind is rolled back on opening.
    """
    return file_uri(path, "vfs=unix-none")


def create_tables(connection: sqlite3.Connection) -> None:
    """Create every table of a task database, in one transaction."""
    connection.executescript(ddl_script())


def with_tool(connection: sqlite3.Connection) -> Database:
    """Return a connection in the hands of sqlite-utils: for tables, views, indexes, small writes and other people.

    Imported here because it takes a sixth of a second, which neither the recorder nor ``--help`` has. A version 3 of it
    commits after each insert, so that inside a transaction rows are written by plain SQL.
    """
    from sqlite_utils import Database

    return Database(connection)


@contextmanager
def transaction(db: sqlite3.Connection, begin: str = "BEGIN") -> Iterator[None]:
    """Keep all that is written in the block, or nothing of it; inside another one it is a part of that."""
    inside = db.in_transaction
    db.execute("SAVEPOINT part" if inside else begin)
    try:
        yield
    except BaseException:
        if db.in_transaction:  # a full disk has rolled it back already
            db.execute("ROLLBACK TO part" if inside else "ROLLBACK")
        raise
    db.execute("RELEASE part" if inside else "COMMIT")


def rows_by_name(db: sqlite3.Connection, sql: str, values: Sequence[object] = ()) -> list[dict[str, Any]]:
    """Return rows under the names of their columns."""
    cursor = db.execute(sql, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]


def read_as(db: sqlite3.Connection, kind: Callable[..., _Facts], sql: str, *values: object) -> tuple[_Facts, ...]:
    """Return rows as values of one type, whose fields are called like the columns."""
    return tuple(kind(**row) for row in rows_by_name(db, sql, values))


def grouped(rows: Iterable[Sequence[Any]]) -> dict[Any, list[Any]]:
    """Return rows under their first column: each as its other columns, or as the only other one."""
    found: dict[Any, list[Any]] = defaultdict(list)
    for key, *others in rows:
        found[key].append(others[0] if len(others) == 1 else tuple(others))
    return found


def read_only_uri(path: Path, *, sealed: bool) -> str:
    """Return the URI that opens a file for reading only.

    ``sealed`` files are complete and never change in place, so SQLite may leave out locks,
    which some shared filesystems do not have.
    """
    return file_uri(path, "mode=ro&immutable=1" if sealed else "mode=ro")


def file_uri(path: Path, how: str) -> str:
    """Return the URI that opens a file in a certain way, whatever letters its name has."""
    return f"file:{quote(os.fsencode(path.absolute()))}?{how}"


def open_sealed(path: Path) -> sqlite3.Connection:
    """Open a published task or job database for reading."""
    return sqlite3.connect(read_only_uri(path, sealed=True), uri=True, isolation_level=None)


def is_job_database(db: sqlite3.Connection) -> bool:
    """Tell a job database from a task database."""
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'source_file'").fetchone() is not None


def complain_about(path: Path, connection: sqlite3.Connection) -> str | None:
    """Return why this file is not a database that we can read; None: it is."""
    if path.stat().st_size == 0:
        return "the file is empty"
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        if application != APPLICATION_ID:
            return "not a badcjobs database"
        return version_complaint(connection)
    except sqlite3.DatabaseError as error:
        return str(error)


def version_complaint(connection: sqlite3.Connection) -> str | None:
    """Return why a file of another schema cannot be read, by name; None: it can."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == SCHEMA_VERSION:
        return None
    try:
        (writer,) = connection.execute("SELECT 'badcjobs ' || version FROM task").fetchone()
    except (sqlite3.Error, TypeError):
        writer = "another badcjobs"
    return f"schema {version}, written by {writer}; this badcjobs ({__version__}) reads schema {SCHEMA_VERSION}"


_MERGE_PATIENCE_S = 60.0


def open_job_database(path: Path) -> sqlite3.Connection:
    """Open a job database for reading."""
    return sqlite3.connect(_reading_uri(path), uri=True, isolation_level=None, timeout=_MERGE_PATIENCE_S)


def open_published(path: Path) -> sqlite3.Connection:
    """Open a database of a run folder for reading, a task's or the job's."""
    return sqlite3.connect(published_uri(path), uri=True, isolation_level=None, timeout=_MERGE_PATIENCE_S)


def published_uri(path: Path) -> str:
    """Return the URI under which a database of a run folder can be attached."""
    with closing(open_sealed(path)) as db:
        return _reading_uri(path) if is_job_database(db) else read_only_uri(path, sealed=True)


def _reading_uri(path: Path) -> str:
    """Return the URI of a job database.

    On a shared filesystem it only ever changes by a rename, and locks are not to be trusted. On a local disk a merge
    may be changing it in place; if one was killed there, its journal restores what was before.
    """
    if read_filesystem(path.parent).shared:
        return read_only_uri(path, sealed=True)
    if path.with_name(f"{path.name}-journal").exists():
        with closing(sqlite3.connect(path, timeout=_MERGE_PATIENCE_S)) as db:
            db.execute("SELECT count(*) FROM sqlite_master").fetchone()
    return read_only_uri(path, sealed=False)
