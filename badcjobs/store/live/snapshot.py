"""Copies a live database through the connection of the one who writes it, while the writing goes on.

This needs no lock that another process would have to see. SQLite carries what is written by the same connection
meanwhile into the copy, and does no step of it in the middle of a transaction.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import unshared_uri
from badcjobs.store.into_place import sync_file

_STEP_PAGES = 128  # half a megabyte: the writer waits for one step at most
_BREATH_S = 0.0005  # between two steps, so that a writer who waits comes first
_BUSY_S = 0.002


def take_snapshot(live: sqlite3.Connection, target: Path, *, lasting: bool = True) -> None:
    """Write a sealed copy of a live database; ``target`` is replaced at once and is never half a file.

    May be called from another thread than the writer's. Not ``lasting``: a scratch file, not worth an fsync.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        _copy(live, temporary)
        if lasting:
            sync_file(temporary)
        os.replace(temporary, target)  # noqa: PTH105
    except (OSError, sqlite3.Error):
        temporary.unlink(missing_ok=True)
        raise


def _copy(live: sqlite3.Connection, temporary: Path) -> None:
    with closing(sqlite3.connect(unshared_uri(temporary), uri=True, isolation_level=None)) as copy:
        copy.execute("PRAGMA locking_mode = EXCLUSIVE")  # else the copy of a WAL file cannot be turned into a plain one
        copy.execute("PRAGMA journal_mode = OFF")  # half a copy is thrown away
        copy.execute("PRAGMA synchronous = OFF")  # synced once, at the end, when the writer does not wait for us
        copy.execute("PRAGMA cache_size = -512")
        live.backup(copy, pages=_STEP_PAGES, progress=lambda *_: time.sleep(_BREATH_S), sleep=_BUSY_S)
        copy.execute("PRAGMA journal_mode = DELETE")
