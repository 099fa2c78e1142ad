"""The two live files of a task: who may read them when, how they are copied, and what to do when a disk refuses.

Who may open which file depends on where it lies and on who is alive: on node-local disk anybody may look on; on a
shared filesystem a file that a living process writes is opened by nobody else, and its owner hands out snapshots.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.store.atomic_write import replacing
from badcjobs.store.connect import create_live, file_uri, read_only_uri, transaction, unshared_uri

log = logging.getLogger(__name__)

_GROWING = ("worker", "attempt", "attempt WHERE outcome IS NOT NULL", "detection")

# One of the two live files: called with a folder for copies, it says where its rows can be read now; None: nowhere yet.
Half = Callable[[Path], str | None]


@dataclass(frozen=True, slots=True)
class LiveHalf:
    """A file that can be opened; ``kind`` says how.

    local: on node-local disk, whether its writer lives or not. left: on a shared filesystem, by a writer that has
    stopped or is dead; what it left half written is undone. sealed: a snapshot, or a published file: complete and never
    changed in place.
    """

    path: Path
    kind: str = "local"

    def __call__(self, workplace: Path) -> str | None:
        """Return the file itself, or a copy where its own disk has not even the room that reading needs."""
        if not self.path.exists():
            return None
        if self.kind == "left":
            return unshared_uri(self.path)
        if self.kind == "sealed":
            return read_only_uri(self.path, sealed=True)
        uri = file_uri(self.path, "mode=ro&vfs=unix")
        try:
            with closing(sqlite3.connect(uri, uri=True)) as db:
                db.execute("PRAGMA user_version").fetchone()
            return uri
        except sqlite3.OperationalError:  # so its writer is dead: copy it with its log
            copy = workplace / self.path.name
            for ending in ("", "-wal"):
                source = self.path.with_name(self.path.name + ending)
                if source.exists():
                    shutil.copyfile(source, copy.with_name(copy.name + ending))
            return file_uri(copy, "vfs=unix-excl")  # needs no shared memory


def left_behind(path: Path, *, shared: bool) -> LiveHalf:
    """Return the half of a process that writes no more."""
    return LiveHalf(path, "left" if shared else "local")


def work_left_behind(path: Path, published: Path, *, shared: bool) -> LiveHalf:
    """Return the half of a wrapper that is dead: its file, or what it had published when its disk would not take it.

    Both hold the beginning of the same story; the longer one is the newer.
    """
    left, told = left_behind(path, shared=shared), LiveHalf(published, "sealed")
    with tempfile.TemporaryDirectory(prefix=f".{published.name}.", suffix=".tmp", dir=published.parent) as workplace:
        return told if _length(told, Path(workplace)) > _length(left, Path(workplace)) else left


def _length(half: Half, workplace: Path) -> int:
    """Return how far a wrapper's story goes: rows are added to it and never taken away."""
    try:
        return count_rows(half, workplace, _GROWING)
    except (OSError, sqlite3.Error):
        return -1


def count_rows(half: Half, workplace: Path, tables: Collection[str]) -> int:
    """Return how many rows some tables of a half have; -1: it is not there."""
    uri = half(workplace)
    if uri is None:
        return -1
    with closing(sqlite3.connect(uri, uri=True)) as db:
        return sum(int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in tables)


# --- copying a live database ------------------------------------------------------------------------------------------
# Through the connection of the one who writes it, while the writing goes on: this needs no lock that another process
# would have to see. SQLite carries what is written by the same connection meanwhile into the copy.

_STEP_PAGES = 128  # half a megabyte: the writer waits for one step at most
_BREATH_S = 0.0005  # between two steps, so that a writer who waits comes first
_BUSY_S = 0.002


def take_snapshot(live: sqlite3.Connection, target: Path, *, lasting: bool = True) -> None:
    """Write a sealed copy of a live database; ``target`` is replaced at once and is never half a file.

    May be called from another thread than the writer's. Not ``lasting``: a scratch file, not worth an fsync.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    with (
        replacing(target, temporary, lasting=lasting),
        closing(sqlite3.connect(unshared_uri(temporary), uri=True, isolation_level=None)) as copy,
    ):
        copy.execute("PRAGMA locking_mode = EXCLUSIVE")  # else a WAL file's copy cannot be turned into a plain one
        copy.execute("PRAGMA journal_mode = OFF")  # half a copy is thrown away
        copy.execute("PRAGMA synchronous = OFF")  # synced once, at the end, when the writer does not wait for us
        copy.execute("PRAGMA cache_size = -512")
        live.backup(copy, pages=_STEP_PAGES, progress=lambda *_: time.sleep(_BREATH_S), sleep=_BUSY_S)
        copy.execute("PRAGMA journal_mode = DELETE")


# --- the newest readings ----------------------------------------------------------------------------------------------


def _ask(uri: str | None, sql: str, values: Sequence[object] = ()) -> list[Any]:
    """Return rows of the recorder's file; none where it cannot be read now."""
    if uri is None:
        return []
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(sql, values).fetchall()
    except sqlite3.Error:
        return []


# Every instant is in host_sample, unless the machine did not say; then a device may have.
LAST_READING = "SELECT max(at_ms) FROM (SELECT at_ms FROM host_sample UNION ALL SELECT at_ms FROM sample)"


def last_reading_ms(uri: str | None) -> int | None:
    """Return when the recorder last wrote something; None when it never did, or its file cannot be read."""
    found = _ask(uri, LAST_READING)
    return found[0][0] if found else None


def read_device_state(uri: str | None, device_id: int, before_ms: int) -> str | None:
    """Return the last sample of a device up to a moment, as JSON without what it did not say; None: there is none."""
    sql = "SELECT * FROM sample WHERE device_id = ? AND at_ms <= ? ORDER BY rowid DESC LIMIT 1"
    found = _ask(uri, sql, (device_id, before_ms))
    if not found:
        return None
    known = {name: value for name, value in dict(found[0]).items() if value is not None}
    return json.dumps({name: value for name, value in known.items() if name not in ("task_id", "device_id")})


def read_memory_peaks(uri: str | None, since_ms: int, until_ms: int | None = None) -> dict[int, int]:
    """Return the most memory in use on each device since a moment, or between two; empty where it is not known."""
    sql = """SELECT device_id, max(memory_used_bytes) FROM sample
             WHERE at_ms >= ? AND at_ms <= coalesce(?, at_ms) AND memory_used_bytes IS NOT NULL GROUP BY device_id"""
    return dict(_ask(uri, sql, (since_ms, until_ms)))


def read_pulse(uri: str | None, since_ms: int) -> tuple[float | None, float | None, float | None]:
    """Return the mean percentages of CPU, memory and GPU in the recent past; None: not known, or not readable now."""
    sql = """SELECT avg(cpu_percent), avg(100.0 * memory_used_bytes / memory_total_bytes),
                    (SELECT avg(utilization_percent) FROM sample WHERE at_ms >= ?)
             FROM host_sample WHERE at_ms >= ?"""
    cpu, memory, gpu = next(iter(_ask(uri, sql, (since_ms, since_ms))), (None, None, None))
    return cpu, memory, gpu


# --- a disk that refuses ----------------------------------------------------------------------------------------------
# What the disk refuses (full, read-only, gone) is kept in memory: as a list of transactions, to be written when there
# is room again, and as a copy of the whole database with these in it, so that a reader meanwhile gets everything.

_RETRY_S = 1.0
_QUIET_S = 60.0

Change = Callable[[sqlite3.Connection], Any]  # writes something; done a second time in memory, a third on disk


class PatientDatabase:
    """One writer's database; every change is kept until the disk has it."""

    def __init__(self, path: Path, *, shared: bool, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._disk = create_live(path, shared=shared)
        self._memory: sqlite3.Connection | None = None  # None: the disk has everything
        self._backlog: list[list[Change]] = []
        self._open: list[Change] | None = None  # the changes of the transaction that is open
        self._monotonic_s = monotonic_s
        self._retry_at_s = 0.0
        self._quiet_until_s = -math.inf

    @property
    def now(self) -> sqlite3.Connection:
        """The connection that knows everything written so far; for reading."""
        return self._disk if self._memory is None else self._memory

    @property
    def waiting(self) -> int:
        """How many transactions the disk has not taken yet."""
        return len(self._backlog)

    def write(self, change: Change) -> Any:
        """Make one change: part of the transaction that is open, or one of its own."""
        if self._open is None:
            with self.transaction():
                return self.write(change)
        result = self._attempt(change)
        self._open.append(change)
        return result

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Hold one transaction open over several changes; an exception undoes them all."""
        self.catch_up()
        self._open = []
        try:
            self._attempt(_begin)
            yield
            self._attempt(lambda db: db.execute("COMMIT"))
            if self._memory is not None and self._open:
                self._backlog.append(self._open)
        except BaseException:
            _roll_back(self.now)
            raise
        finally:
            self._open = None

    def on_disk(self) -> sqlite3.Connection:
        """Return the disk's own connection, for what is too much to be kept in memory."""
        self.catch_up(at_once=True)
        if self._memory is not None:
            raise sqlite3.OperationalError("the disk takes nothing more")
        return self._disk

    def catch_up(self, *, at_once: bool = False) -> None:
        """Write what the disk has refused; not more than once a second unless ``at_once``."""
        if self._memory is None or (self._monotonic_s() < self._retry_at_s and not at_once):
            return
        try:
            while self._backlog:
                with transaction(self._disk):
                    for change in self._backlog[0]:
                        change(self._disk)
                del self._backlog[0]
        except sqlite3.OperationalError:
            self._retry_at_s = self._monotonic_s() + _RETRY_S
            return
        self._memory = None  # not closed: a snapshot of it may still be under way
        log.info("%s can be written again; nothing is missing in it", self._path)

    def snapshot(self, target: Path) -> None:
        """Write a scratch copy of everything written so far; may be called from another thread."""
        take_snapshot(self.now, target, lasting=False)

    def close(self) -> None:
        """Close the file; what it could not take by now is gone with us."""
        self.catch_up(at_once=True)
        self._disk.close()

    def _attempt(self, change: Change) -> Any:
        if self._memory is None:
            try:
                return change(self._disk)
            except sqlite3.OperationalError as error:
                self._move_to_memory(error)
        return change(self.now)

    def _move_to_memory(self, error: sqlite3.Error) -> None:
        """Go on in memory with what is on disk and what this transaction has done so far."""
        _roll_back(self._disk)
        memory = sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)
        self._disk.backup(memory)
        memory.execute("PRAGMA journal_mode = MEMORY")
        if self._open is not None:
            memory.execute("BEGIN")
            for change in self._open:
                change(memory)
        self._memory = memory
        now_s = self._monotonic_s()
        self._retry_at_s = now_s + _RETRY_S
        if now_s >= self._quiet_until_s:  # not every second of a night in which the disk is nearly full
            log.warning("%s cannot be written: %s; going on, and keeping the rest in memory", self._path, error)
        self._quiet_until_s = now_s + _QUIET_S


def _begin(db: sqlite3.Connection) -> None:
    if not db.in_transaction:  # going over to memory has opened it already
        db.execute("BEGIN")


def _roll_back(db: sqlite3.Connection) -> None:
    if db.in_transaction:  # SQLite has often done it by itself
        db.execute("ROLLBACK")
