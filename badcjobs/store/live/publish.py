"""Publishing: joins the two live files of a task into one sealed file in the run folder.

The join is built beside the live files (or beside the target, where they have no room), copied over under a temporary
name, then renamed: a reader on another node sees the old file or the new one, whole, and nothing needs to be locked.
"""

from __future__ import annotations

import logging
import sqlite3
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.store.connect import create_tables, transaction, unshared_uri
from badcjobs.store.figures import write_figures
from badcjobs.store.into_place import move_into_place
from badcjobs.store.live.halves import Half, OpenHalf, can_be_read
from badcjobs.store.live.sample_text import TEXT_FORMS, write_samples
from badcjobs.store.schema import TABLES, columns_of
from badcjobs.store.seal import prepare_seal

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LastWords:
    """What is said about a task by the one who publishes it last.

    ``closing`` fills columns of the task row that are still NULL; a gap is (from_ms, to_ms, reason).
    """

    closing: Mapping[str, object] = field(default_factory=dict)
    gaps: Sequence[tuple[int, int, str]] = ()


def publish(
    halves: Sequence[Half | Path],
    target: Path,
    *,
    workplace: Path | None = None,
    closing: Mapping[str, object] | None = None,
    gaps: Sequence[tuple[int, int, str]] = (),
) -> int:
    """Publish the join of the halves as ``target`` and return its size; its ending picks SQLite, CSV or JSON lines.

    The first half is the wrapper's; a path is a live file on node-local disk. ``closing`` and ``gaps`` are last words:
    columns of the task row that are still NULL, and stretches without readings that nobody could write down.
    """
    if workplace is None:
        workplace = next((half.parent for half in halves if isinstance(half, Path)), target.parent)
    words = LastWords(closing or {}, gaps)
    with ExitStack() as stack:
        try:
            joined = _build(stack, workplace, halves, target, words)
        except (OSError, sqlite3.Error):  # a full local disk; the run folder may have room
            joined = _build(stack, target.parent, halves, target, words)
        move_into_place(joined, target)
    return target.stat().st_size


def _build(stack: ExitStack, workplace: Path, halves: Sequence[Half | Path], target: Path, words: LastWords) -> Path:
    """Make the file to be published in a folder that ``stack`` removes."""
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=workplace))
    joined = Path(folder) / "joined.sqlite"
    join_files(halves, joined, words)
    return write_samples(joined, Path(folder) / target.name) if target.suffix in TEXT_FORMS else joined


def join_files(halves: Sequence[Half | Path], joined: Path, words: LastWords | None = None) -> None:
    """Write a new database with the rows of all the halves that there are.

    The first is the wrapper's and must be readable; what cannot be read of the recorder's is a gap, not a failure.
    """
    db = sqlite3.connect(unshared_uri(joined), isolation_level=None, uri=True)
    try:
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file: only a rollback matters
        db.execute("PRAGMA synchronous = OFF")
        create_tables(db)
        for half in halves:
            part = OpenHalf(half) if isinstance(half, Path) else half
            try:
                found = _copy_rows(db, part, joined.parent)
            except sqlite3.Error as error:
                if half is halves[0] or can_be_read(part, joined.parent):
                    raise  # it is our own file that has no room
                _note_unreadable(db, error)
            else:
                if half is halves[0] and not found:
                    raise FileNotFoundError("the wrapper's file is gone")  # never publish nothing over something
        _add_last_words(db, words or LastWords())
        _complete(db)
    finally:
        db.close()


def _complete(db: sqlite3.Connection) -> None:
    """Add what follows from the rows."""
    with transaction(db):
        for (task_id,) in db.execute("SELECT task_id FROM task").fetchall():
            write_figures(db, task_id)
        prepare_seal(db)


def _copy_rows(db: sqlite3.Connection, half: Half, workplace: Path) -> bool:
    """Copy all there is; return whether there was a database at all."""
    uri = half.uri(workplace)
    if uri is None:
        return False
    db.execute("ATTACH ? AS live", (uri,))
    try:
        if db.execute("PRAGMA live.user_version").fetchone() == (0,):
            return False  # just created: its tables come next
        with transaction(db):  # one snapshot of the live file
            for table in (table for table in TABLES if table.name in half.tables):
                _copy_table(db, table.name)
    finally:
        db.execute("DETACH live")
    return True


def _copy_table(db: sqlite3.Connection, table: str) -> None:
    """Copy the rows in the order in which they were written; samples device by device, as merge keeps them."""
    names = ", ".join(columns_of(table))
    copy = f"INSERT INTO main.{table} ({names}) SELECT {names} FROM live.{table}"
    if table != "sample":
        db.execute(f"{copy} ORDER BY rowid")
        return
    for device in db.execute("SELECT DISTINCT device_id FROM live.sample ORDER BY 1").fetchall():
        db.execute(f"{copy} WHERE device_id = ? ORDER BY rowid", device)


def _add_last_words(db: sqlite3.Connection, words: LastWords) -> None:
    for column, value in words.closing.items():
        db.execute(f"UPDATE task SET {column} = coalesce({column}, ?)", (value,))
    db.executemany("INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, ?, ?, ? FROM task", words.gaps)


def _note_unreadable(db: sqlite3.Connection, error: sqlite3.Error) -> None:
    log.warning("the recorder's file cannot be read, its readings are not published: %s", error)
    db.execute(
        """INSERT INTO gap (task_id, from_ms, to_ms, reason)
           SELECT task_id, started_at_ms,
                  coalesce(ended_at_ms, (SELECT max(started_at_ms) FROM attempt), started_at_ms), ? FROM task""",
        (f"the recorder's file cannot be read: {error}",),
    )
