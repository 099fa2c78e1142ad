"""The two halves of a task database, as whoever joins them can read them at this moment.

Who may open which file depends on where it lies and on who is alive: on node-local disk anybody may look on; on a
shared filesystem a file that a living process writes is opened by nobody else, and its owner hands out snapshots.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Protocol

from badcjobs.store.connect import file_uri, read_only_uri, unshared_uri
from badcjobs.store.schema import TABLES

_EVERYTHING = frozenset(table.name for table in TABLES)
_WORK = frozenset(
    {
        "meta",
        "task",
        "device",
        "worker",
        "chunk",
        "recording",
        "attempt",
        "decision",
        "detection",
        "mark",
        "usage_sample",
    }
)  # what the wrapper writes

_GROWING = ("worker", "attempt", "attempt WHERE outcome IS NOT NULL", "detection")


class Half(Protocol):
    """One of the two live files, and the tables to be taken from it."""

    tables: ClassVar[Collection[str]]

    def uri(self, workplace: Path) -> str | None:
        """Return where its rows can be read now, perhaps after copying them to ``workplace``; None: nowhere yet."""
        ...


@dataclass(frozen=True, slots=True)
class OpenHalf:
    """A file on node-local disk, whether its writer lives or not."""

    tables: ClassVar[Collection[str]] = _EVERYTHING
    path: Path

    def uri(self, workplace: Path) -> str | None:
        """Return the file itself, or a copy where its own disk has not even the room that reading needs."""
        if not self.path.exists():
            return None
        uri = file_uri(self.path, "mode=ro&vfs=unix")
        try:
            _look_into(uri)
        except sqlite3.OperationalError:
            return self._set_aside(workplace)
        return uri

    def _set_aside(self, workplace: Path) -> str:
        """Copy the file with its log; its writer is dead, or else opening it would have worked."""
        copy = workplace / self.path.name
        for ending in ("", "-wal"):
            source = self.path.with_name(self.path.name + ending)
            if source.exists():
                shutil.copyfile(source, copy.with_name(copy.name + ending))
        return file_uri(copy, "vfs=unix-excl")  # needs no shared memory


@dataclass(frozen=True, slots=True)
class LeftHalf:
    """A file on a shared filesystem whose writer has stopped or is dead: what it left half written is undone."""

    tables: ClassVar[Collection[str]] = _EVERYTHING
    path: Path

    def uri(self, workplace: Path) -> str | None:
        """Return the file itself."""
        return unshared_uri(self.path) if self.path.exists() else None


@dataclass(frozen=True, slots=True)
class SealedHalf:
    """A snapshot: complete, and never changed in place."""

    tables: ClassVar[Collection[str]] = _EVERYTHING
    path: Path

    def uri(self, workplace: Path) -> str | None:
        """Return the file itself."""
        return read_only_uri(self.path, sealed=True) if self.path.exists() else None


class Owner(Protocol):
    """Who writes a live file, and can therefore copy it at any time."""

    def snapshot(self, target: Path) -> None: ...


@dataclass(frozen=True, slots=True)
class OwnHalf:
    """Our own file, read through the connection that writes it: also what the disk would not take, or has lost."""

    tables: ClassVar[Collection[str]] = _EVERYTHING
    owner: Owner

    def uri(self, workplace: Path) -> str | None:
        """Return a snapshot of this moment."""
        copy = workplace / "own.sqlite"
        self.owner.snapshot(copy)
        return read_only_uri(copy, sealed=True)


@dataclass(frozen=True, slots=True)
class PublishedWork:
    """The wrapper's half of a published file."""

    tables: ClassVar[Collection[str]] = _WORK
    path: Path

    def uri(self, workplace: Path) -> str | None:
        """Return the file itself."""
        return read_only_uri(self.path, sealed=True)


def left_behind(path: Path, *, shared: bool) -> Half:
    """Return the half of somebody who writes no more."""
    return LeftHalf(path) if shared else OpenHalf(path)


def work_left_behind(path: Path, published: Path, *, shared: bool) -> Half:
    """Return the half of a wrapper that is dead: its file, or what it had published when its disk would not take it.

    Both hold the beginning of the same story; the longer one is the newer.
    """
    left = left_behind(path, shared=shared)
    with tempfile.TemporaryDirectory(prefix=f".{published.name}.", suffix=".tmp", dir=published.parent) as workplace:
        known, told = _length(left, Path(workplace)), _length(PublishedWork(published), Path(workplace))
    return PublishedWork(published) if told > known else left


def can_be_read(half: Half, workplace: Path) -> bool:
    """Say whether every row of a half can be read, so that an error must have had another cause."""
    try:
        uri = half.uri(workplace)
        if uri is not None:
            _count_rows(uri, _EVERYTHING)
    except sqlite3.Error:
        return False
    return True


def _length(half: Half, workplace: Path) -> int:
    """Return how far a wrapper's story goes: rows are added to it and never taken away."""
    try:
        uri = half.uri(workplace)
        return -1 if uri is None else _count_rows(uri, _GROWING)
    except (OSError, sqlite3.Error):
        return -1


def _count_rows(uri: str, tables: Collection[str]) -> int:
    with closing(sqlite3.connect(uri, uri=True)) as db:
        return sum(int(db.execute(f"SELECT count(*) FROM {table}").fetchone()[0]) for table in tables)


def _look_into(uri: str) -> None:
    with closing(sqlite3.connect(uri, uri=True)) as db:
        db.execute("PRAGMA user_version").fetchone()
