"""Publishing: joins the two live files of a task into one sealed file in the run folder.

The join is built on node-local disk and copied over under a temporary name, then renamed: a reader on another node
sees the old file or the new one, whole, and the shared filesystem never needs to lock anything.
"""

from __future__ import annotations

import glob
import logging
import os
import sqlite3
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from badcjobs.store.connect import create_tables, read_only_uri
from badcjobs.store.sample_text import TEXT_FORMS, write_samples
from badcjobs.store.schema import TABLES, columns_of
from badcjobs.store.seal import Checksum, prepare_seal

log = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_SLOW_BYTES_PER_S = 50_000  # keeps the traffic of a 24-hour task at about 4 GB


def publish_interval_s(size_bytes: int, base_s: float) -> float:
    """Return how long to wait between publications of a file of this size."""
    return max(base_s, size_bytes / _SLOW_BYTES_PER_S)


def publish(live_files: list[Path], target: Path, *, closing: Mapping[str, object] | None = None) -> int:
    """Publish the join of the live files as ``target`` and return its size; its ending picks SQLite, CSV or JSON lines.

    ``closing`` fills columns of the task row that are still NULL: the recorder's last words about
    a wrapper that was killed.
    """
    with ExitStack() as stack:
        try:
            joined = _build(stack, live_files[0].parent, live_files, target.suffix, closing)
        except (OSError, sqlite3.Error) as error:  # a full local disk; the run folder may have room
            log.warning("nothing can be built in %s: %s", live_files[0].parent, error)
            joined = _build(stack, target.parent, live_files, target.suffix, closing)
        move_into_place(joined, target)
    return target.stat().st_size


def _build(
    stack: ExitStack, workplace: Path, live_files: list[Path], form: str, closing: Mapping[str, object] | None
) -> Path:
    """Make the file to be published in a folder that ``stack`` removes."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=".badcjobs-publish-", dir=workplace))
    joined = Path(folder) / "joined.sqlite"
    join_files(live_files, joined, closing=closing)
    return write_samples(joined, Path(folder) / f"samples{form}") if form in TEXT_FORMS else joined


def join_files(live_files: list[Path], joined: Path, *, closing: Mapping[str, object] | None = None) -> None:
    """Write a new database with the rows of all the live files that exist.

    The first is the wrapper's and must be readable; what cannot be read of the recorder's is a gap, not a failure.
    """
    db = sqlite3.connect(joined, isolation_level=None, uri=True)
    try:
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file: only a rollback matters
        db.execute("PRAGMA synchronous = OFF")
        create_tables(db)
        for live in live_files:
            try:
                if live.exists():
                    _copy_rows(db, live)
            except sqlite3.Error as error:
                if live == live_files[0]:
                    raise
                _note_unreadable(db, live, error)
        for column, value in (closing or {}).items():
            db.execute(f"UPDATE task SET {column} = coalesce({column}, ?)", (value,))
        prepare_seal(db)
    finally:
        db.close()


def _copy_rows(db: sqlite3.Connection, live: Path) -> None:
    db.execute("ATTACH ? AS live", (read_only_uri(live, sealed=False),))
    try:
        if db.execute("PRAGMA live.user_version").fetchone() == (0,):
            return  # just created: its tables come next
        db.execute("BEGIN")  # one snapshot of the live file
        try:
            for table in TABLES:
                into, names = f"main.{table.name}", ", ".join(columns_of(table.name))
                db.execute(f"INSERT INTO {into} ({names}) SELECT {names} FROM live.{table.name} ORDER BY rowid")
        except sqlite3.Error:
            db.execute("ROLLBACK")
            raise
        db.execute("COMMIT")
    finally:
        db.execute("DETACH live")


def _note_unreadable(db: sqlite3.Connection, live: Path, error: sqlite3.Error) -> None:
    log.warning("%s cannot be read, its readings are lost: %s", live.name, error)
    db.execute(
        """INSERT INTO gap (task_id, from_ms, to_ms, reason)
           SELECT task_id, started_at_ms,
                  coalesce(ended_at_ms, (SELECT max(started_at_ms) FROM attempt), started_at_ms), ? FROM task""",
        (f"the recorder's file cannot be read: {error}",),
    )


def move_into_place(local: Path, target: Path) -> None:
    """Copy a finished local file to where readers look, so that they never see half of it."""
    temporary = target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")
    try:
        with local.open("rb") as source, temporary.open("wb") as copy:
            _copy_and_seal(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, target)  # noqa: PTH105
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(target.parent)


def _copy_and_seal(source: BinaryIO, copy: BinaryIO) -> None:
    checksum = Checksum()
    while block := source.read(_BLOCK_BYTES):
        checksum.feed(block)
        copy.write(block)
    digits = checksum.digits()
    if checksum.seal_at is not None:  # None: samples as text
        copy.seek(checksum.seal_at)
        copy.write(digits)


def remove_unfinished(target: Path) -> None:
    """Remove the copies that killed publishers of this file have left half done."""
    for copy in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        copy.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some shared filesystems refuse to sync a folder; the rename itself is still atomic
    finally:
        os.close(descriptor)
