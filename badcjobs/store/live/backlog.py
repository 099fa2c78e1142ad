"""A live database whose owner goes on when its disk does not.

What the disk refuses (full, read-only, gone) is kept in memory: as a list of transactions, to be written when there is
room again, and as a copy of the whole database with these in it, so that whoever asks meanwhile hears the truth.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from badcjobs.store.connect import create_live
from badcjobs.store.live.snapshot import take_snapshot

log = logging.getLogger(__name__)

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
            self._attempt(_commit)
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
                _write_whole(self._disk, self._backlog[0])
                del self._backlog[0]
        except sqlite3.OperationalError:
            _roll_back(self._disk)
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
        self._retry_at_s = self._monotonic_s() + _RETRY_S
        self._warn(error)

    def _warn(self, error: sqlite3.Error) -> None:
        """Say it, but not every second of a night in which the disk is on the brink."""
        if self._monotonic_s() >= self._quiet_until_s:
            log.warning("%s cannot be written: %s; going on, and keeping the rest in memory", self._path, error)
        self._quiet_until_s = self._monotonic_s() + _QUIET_S


def _begin(db: sqlite3.Connection) -> None:
    if not db.in_transaction:  # going over to memory has opened it already
        db.execute("BEGIN")


def _commit(db: sqlite3.Connection) -> None:
    db.execute("COMMIT")


def _roll_back(db: sqlite3.Connection) -> None:
    if db.in_transaction:  # SQLite has often done it by itself
        db.execute("ROLLBACK")


def _write_whole(db: sqlite3.Connection, changes: list[Change]) -> None:
    db.execute("BEGIN")
    for change in changes:
        change(db)
    db.execute("COMMIT")
