"""Opens SQLite files: the live ones of a task that runs, and the sealed ones that are published."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from urllib.parse import quote

from badcjobs import __version__
from badcjobs.errors import DatabaseProblem
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES, Table

SQLITE_MAGIC = b"SQLite format 3\0"
_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables


def create_live(path: Path, *, shared: bool = False) -> sqlite3.Connection:
    """Open (or create) a database with one writer.

    On node-local disk: WAL with synchronous=NORMAL. A commit costs no fsync, kill -9 loses nothing committed, the
    file survives a power cut, and readers of this machine may look on. ``shared``: WAL needs memory that hosts do not
    share, and locks may be missing or lie; so a rollback journal, synced, and nobody looks on (snapshot.py).
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


def create_tables(
    connection: sqlite3.Connection,
    tables: Sequence[Table] = TABLES,
    ordered_by: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Create every table of a task database (or those given), in one transaction."""
    connection.execute("BEGIN")
    for table in tables:
        connection.execute(table.ddl(ordered_by.get(table.name)))
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


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
    """Return why a file is too new for us, by name; None: it is not."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version <= SCHEMA_VERSION:
        return None
    try:
        (writer,) = connection.execute("SELECT 'badcjobs ' || version FROM task").fetchone()
    except (sqlite3.Error, TypeError):
        writer = "a newer badcjobs"
    return f"schema {version}, written by {writer}; this badcjobs ({__version__}) reads up to schema {SCHEMA_VERSION}"
