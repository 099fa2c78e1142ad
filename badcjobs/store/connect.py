"""Opens SQLite files: the live ones on node-local disk, and the sealed ones that are published."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from urllib.parse import quote

from badcjobs.errors import DatabaseProblem
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION, TABLES

_OLDEST_SQLITE = (3, 37, 0)  # STRICT tables


def create_live(path: Path) -> sqlite3.Connection:
    """Open (or create) a database with one writer on node-local disk; readers of this machine may look on.

    WAL with synchronous=NORMAL: a commit costs no fsync, kill -9 loses nothing committed, and the file
    survives a power cut. Never on a shared filesystem: WAL needs memory that hosts do not share.
    """
    if sqlite3.sqlite_version_info < _OLDEST_SQLITE:
        raise DatabaseProblem(
            f"this Python has SQLite {sqlite3.sqlite_version}; badcjobs needs 3.37 or newer",
            fix="module load python   (or any Python built with a newer SQLite)",
        )
    connection = sqlite3.connect(path, isolation_level=None, timeout=5, uri=True)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")
    if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
        create_tables(connection)
    return connection


def create_tables(connection: sqlite3.Connection) -> None:
    """Create every table of a task database, in one transaction."""
    connection.execute("BEGIN")
    for table in TABLES:
        connection.execute(table.ddl())
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    connection.execute("COMMIT")


def read_only_uri(path: Path, *, sealed: bool) -> str:
    """Return the URI that opens a file for reading only.

    ``sealed`` files are complete and never change in place, so SQLite may leave out locks,
    which some shared filesystems do not have.
    """
    return f"file:{quote(str(path.absolute()))}?mode=ro" + ("&immutable=1" if sealed else "")


def open_sealed(path: Path) -> sqlite3.Connection:
    """Open a published task or job database for reading."""
    return sqlite3.connect(read_only_uri(path, sealed=True), uri=True, isolation_level=None)


def complain_about(path: Path, connection: sqlite3.Connection) -> str | None:
    """Return why this file is not a database that we can read; None: it is."""
    try:
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.DatabaseError as error:
        return str(error)
    if path.stat().st_size == 0:
        return "the file is empty"
    if application != APPLICATION_ID:
        return "not a badcjobs database"
    if version > SCHEMA_VERSION:
        return f"schema {version}; this badcjobs reads up to {SCHEMA_VERSION}"
    return None
