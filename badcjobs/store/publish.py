"""Publishing: joins the two live files of a task into one sealed file in the run folder.

The join is built beside the live files (or beside the target, where they have no room), copied over under a temporary
name, then renamed: a reader on another node sees the old file or the new one, whole, and nothing needs to be locked.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from badcjobs.model import METRICS, publish_interval_s
from badcjobs.store.atomic_write import move_into_place, prepare_seal
from badcjobs.store.connect import create_tables, open_sealed, transaction, unshared_uri
from badcjobs.store.export_formats import csv_rows, json_lines
from badcjobs.store.figures import write_figures
from badcjobs.store.live_files import Half, LiveHalf, can_be_read
from badcjobs.store.schema import TABLES

TEXT_FORMS = (".csv", ".jsonl")

_SAMPLES = f"""
    SELECT strftime('%Y-%m-%dT%H:%M:%f', s.at_ms / 1000.0, 'unixepoch') || 'Z' AS at, s.at_ms,
           d.device_index, d.uuid, d.name, {", ".join(f"s.{metric}" for metric in METRICS)}
    FROM sample s JOIN device d USING (device_id) ORDER BY s.at_ms, d.device_index"""


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

    def build(stack: ExitStack, place: Path) -> Path:
        """Make the file to be published in a folder that ``stack`` removes."""
        temporary = tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=place)
        folder = Path(stack.enter_context(temporary))
        joined = folder / "joined.sqlite"
        join_files(halves, joined, closing=closing, gaps=gaps)
        return write_samples(joined, folder / target.name) if target.suffix in TEXT_FORMS else joined

    with ExitStack() as stack:
        try:
            built = build(stack, workplace)
        except (OSError, sqlite3.Error):  # a full local disk; the run folder may have room
            built = build(stack, target.parent)
        move_into_place(built, target)
    return target.stat().st_size


def join_files(
    halves: Sequence[Half | Path],
    joined: Path,
    *,
    closing: Mapping[str, object] | None = None,
    gaps: Sequence[tuple[int, int, str]] = (),
) -> None:
    """Write a new database with the rows of all the halves that there are.

    The first is the wrapper's and must be readable; what cannot be read of the recorder's is a gap, not a failure.
    """
    db = sqlite3.connect(unshared_uri(joined), isolation_level=None, uri=True)
    try:
        db.execute("PRAGMA journal_mode = MEMORY")  # a scratch file: only a rollback matters
        db.execute("PRAGMA synchronous = OFF")
        create_tables(db)
        for half in halves:
            part = LiveHalf(half) if isinstance(half, Path) else half
            try:
                found = _copy_rows(db, part, joined.parent)
            except sqlite3.Error as error:
                if half is halves[0] or can_be_read(part, joined.parent):
                    raise  # it is our own file that has no room
                _note_unreadable(db, error)
            else:
                if half is halves[0] and not found:
                    raise FileNotFoundError("the wrapper's file is gone")  # never publish nothing over something
        for column, value in (closing or {}).items():
            db.execute(f"UPDATE task SET {column} = coalesce({column}, ?)", (value,))
        db.executemany("INSERT INTO gap (task_id, from_ms, to_ms, reason) SELECT task_id, ?, ?, ? FROM task", gaps)
        with transaction(db):
            for (task_id,) in db.execute("SELECT task_id FROM task").fetchall():
                write_figures(db, task_id)
            prepare_seal(db)
    finally:
        db.close()


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
    copy = f"INSERT INTO main.{table} SELECT * FROM live.{table}"
    if table != "sample":
        db.execute(f"{copy} ORDER BY rowid")
        return
    for device in db.execute("SELECT DISTINCT device_id FROM live.sample ORDER BY 1").fetchall():
        db.execute(f"{copy} WHERE device_id = ? ORDER BY rowid", device)


def _note_unreadable(db: sqlite3.Connection, error: sqlite3.Error) -> None:
    log.warning("the recorder's file cannot be read, its readings are not published: %s", error)
    db.execute(
        """INSERT INTO gap (task_id, from_ms, to_ms, reason)
           SELECT task_id, started_at_ms,
                  coalesce(ended_at_ms, (SELECT max(started_at_ms) FROM attempt), started_at_ms), ? FROM task""",
        (f"the recorder's file cannot be read: {error}",),
    )


# --- samples as text, for people who want no database -----------------------------------------------------------------


def write_samples(database: Path, target: Path) -> Path:
    """Write the samples of a task database as text; an unknown value is an empty field, or null."""
    rows_to = csv_rows if target.suffix == ".csv" else json_lines
    with contextlib.closing(open_sealed(database)) as db, target.open("wb") as out:
        cursor = db.execute(_SAMPLES)
        with rows_to([column[0] for column in cursor.description], out) as write:
            write(cursor)
    return target


log = logging.getLogger(__name__)


# --- now and then, from a thread of its own ---------------------------------------------------------------------------


_NICENESS = 10


class Publisher:
    """Keeps the published file at most one interval behind the live ones; builds it in ``workplace``."""

    def __init__(
        self, halves: Sequence[Half | Path], target: Path, *, base_interval_s: float, workplace: Path | None = None
    ) -> None:
        self._halves = halves
        self._target = target
        self._workplace = workplace
        self._base_interval_s = base_interval_s
        self._wake = threading.Event()
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)
        self._size_bytes = 0
        self._failing = False

    def start(self) -> None:
        """Publish once, so that a file is there from the beginning, then go on in the background."""
        self.publish_now()
        self._thread.start()

    def publish_soon(self) -> None:
        """Publish without waiting for the interval, and without making the caller wait."""
        self._wake.set()

    def publish_now(self, closing: Mapping[str, object] | None = None) -> bool:
        """Publish and return whether it worked; a full or vanished disk is a warning, not the end of the job.

        ``closing`` fills columns of the task row that a full disk would not take.
        """
        with self._one_at_a_time:
            try:
                self._size_bytes = publish(self._halves, self._target, workplace=self._workplace, closing=closing)
            except (OSError, sqlite3.Error) as error:
                self._note_failure(error)
                return False
        if self._failing:
            log.info("%s is published again", self._target.name)
        self._failing = False
        return True

    def _note_failure(self, error: Exception) -> None:
        """Warn once, not at every interval, of a disk that stays full."""
        if not self._failing:
            log.warning("%s could not be published: %s; trying again at every interval", self._target.name, error)
        self._failing = True

    def stop(self) -> None:
        """End the background thread; the last publication is the caller's, by ``publish_now``."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        _step_back()
        while not self._over.is_set():
            self._wake.wait(publish_interval_s(self._size_bytes, self._base_interval_s))
            self._wake.clear()
            if not self._over.is_set():
                self.publish_now()


def _step_back() -> None:
    """Let everybody else go first on a busy machine: on Linux a priority is a thread's own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:
        pass  # a sandbox that does not let us; then we compete
