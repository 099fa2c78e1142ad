"""Opens the job database for reading, whether it is still, being changed, or left in the middle of a change."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import open_sealed, read_only_uri
from badcjobs.store.filesystem import read_filesystem
from badcjobs.store.job_schema import is_job_database

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
