"""Publishing: joins the two live files of a task into one sealed file in the run folder.

The join is built on node-local disk and copied over under a temporary name, then renamed: a reader on another node
sees the old file or the new one, whole, and the shared filesystem never needs to lock anything.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import tempfile
from collections.abc import Mapping
from pathlib import Path

from badcjobs.store.connect import create_tables, read_only_uri
from badcjobs.store.sample_text import TEXT_FORMS, write_samples
from badcjobs.store.schema import TABLES, columns_of

_SLOW_BYTES_PER_S = 50_000  # keeps the traffic of a 24-hour task at about 4 GB


def publish_interval_s(size_bytes: int, base_s: float) -> float:
    """Return how long to wait between publications of a file of this size."""
    return max(base_s, size_bytes / _SLOW_BYTES_PER_S)


def publish(live_files: list[Path], target: Path, *, closing: Mapping[str, object] | None = None) -> int:
    """Publish the join of the live files as ``target`` and return its size; its ending picks SQLite, CSV or JSON lines.

    ``closing`` fills columns of the task row that are still NULL: the recorder's last words about
    a wrapper that was killed.
    """
    with tempfile.TemporaryDirectory(prefix="badcjobs-publish-", dir=live_files[0].parent) as folder:
        joined = Path(folder) / "joined.sqlite"
        join_files(live_files, joined, closing=closing)
        if target.suffix in TEXT_FORMS:
            joined = write_samples(joined, Path(folder) / f"samples{target.suffix}")
        move_into_place(joined, target)
    return target.stat().st_size


def join_files(live_files: list[Path], joined: Path, *, closing: Mapping[str, object] | None = None) -> None:
    """Write a new database with the rows of all the live files that exist."""
    db = sqlite3.connect(joined, isolation_level=None, uri=True)
    try:
        db.execute("PRAGMA journal_mode = OFF")  # a scratch file: when this dies, it is thrown away
        db.execute("PRAGMA synchronous = OFF")
        create_tables(db)
        for live in live_files:
            if live.exists():
                _copy_rows(db, live)
        for column, value in (closing or {}).items():
            db.execute(f"UPDATE task SET {column} = coalesce({column}, ?)", (value,))
    finally:
        db.close()


def _copy_rows(db: sqlite3.Connection, live: Path) -> None:
    db.execute("ATTACH ? AS live", (read_only_uri(live, sealed=False),))
    db.execute("BEGIN")  # one snapshot of the live file
    for table in TABLES:
        names = ", ".join(columns_of(table.name))
        db.execute(f"INSERT INTO main.{table.name} ({names}) SELECT {names} FROM live.{table.name} ORDER BY rowid")
    db.execute("COMMIT")
    db.execute("DETACH live")


def move_into_place(local: Path, target: Path) -> None:
    """Copy a finished local file to where readers look, so that they never see half of it."""
    temporary = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with local.open("rb") as source, temporary.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, target)  # noqa: PTH105
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some shared filesystems refuse to sync a folder; the rename itself is still atomic
    finally:
        os.close(descriptor)
