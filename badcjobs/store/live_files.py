"""The two live files of a task: how to open and copy them.

On node-local disk any process can open a live file. On a shared filesystem only the process that writes it may open
it; this process writes snapshots for the others.
"""

from __future__ import annotations

import json
import shutil
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.model import known_values
from badcjobs.store.atomic_write import replacing
from badcjobs.store.connect import (
    file_uri,
    open_uri,
    read_only_uri,
    read_value,
    unshared_uri,
    with_logs,
)

# In the wrapper's file.
_GROWING = (
    "worker",
    "attempt",
    "attempt WHERE outcome IS NOT NULL",
    "detection",
)

# One of the two live files: a call with a folder for copies returns the URI to read its rows; None: not there yet.
Half = Callable[[Path], str | None]


@dataclass(frozen=True)
class LiveHalf:
    """A file that can be opened; ``kind`` decides how.

    local: on node-local disk, with or without a running writer. left: on a shared filesystem, after its writer has
    ended; SQLite rolls back an incomplete transaction. sealed: a snapshot or a published file, which never changes.
    """

    path: Path
    kind: str = "local"

    def __call__(self, workplace: Path) -> str | None:
        """Return the URI of the file, or of a copy if it cannot be read where it is.

        Its disk is too full to open the log, or its writer was killed while it created the file.
        """
        if not self.path.exists():
            return None
        if self.kind == "left":
            return unshared_uri(self.path)
        if self.kind == "sealed":
            return read_only_uri(self.path)
        uri = file_uri(self.path, "mode=ro&vfs=unix")
        try:
            with closing(open_uri(uri)) as db:
                read_value(db, "PRAGMA user_version")
            return uri
        except sqlite3.OperationalError:  # its writer has ended: copy it with its log or journal
            for source in with_logs(self.path):
                shutil.copyfile(source, workplace / f"copy-{source.name}")
            return file_uri(workplace / f"copy-{self.path.name}", "vfs=unix-excl")  # needs no shared memory


def left_behind(path: Path, *, shared: bool) -> LiveHalf:
    """Return the live file of a process that has ended or does not answer."""
    return LiveHalf(path, "left" if shared else "local")


def count_rows(half: Half, workplace: Path, tables: Collection[str] = _GROWING) -> int:
    """Return how many rows some tables of a live file have; -1: it does not exist, or cannot be read."""
    try:
        if (uri := half(workplace)) is None:
            return -1
        with closing(open_uri(uri)) as db:
            return sum(read_value(db, f"SELECT count(*) FROM {table}") for table in tables)
    except (OSError, sqlite3.Error):
        return -1


# --- copying a live database ------------------------------------------------------------------------------------------
# The copy uses the connection of the writer while it continues to write: this needs no locks between processes. SQLite
# adds to the copy what the same connection writes in the meantime.

_STEP_PAGES = 128  # 0.5 MiB: the writer waits for one step at most
_BREATH_S = 0.0005  # between two steps, so that a waiting writer is next
_BUSY_S = 0.002


def take_snapshot(live: sqlite3.Connection, target: Path, *, lasting: bool = True) -> None:
    """Write a sealed copy of a live database and rename it to ``target``; ``lasting``: with fsync.

    Another thread than the writer's may call this.
    """
    temporary = target.with_name(f".{target.name}.tmp")
    temporary.unlink(missing_ok=True)
    with (
        replacing(target, temporary, lasting=lasting),
        closing(open_uri(unshared_uri(temporary))) as copy,
    ):
        copy.execute("PRAGMA locking_mode = EXCLUSIVE")  # else the copy of a WAL file cannot leave WAL mode
        copy.execute("PRAGMA journal_mode = OFF")  # an incomplete copy is removed
        copy.execute("PRAGMA synchronous = OFF")  # one fsync at the end, when the writer does not wait
        copy.execute("PRAGMA cache_size = -512")
        live.backup(copy, pages=_STEP_PAGES, progress=lambda *_: time.sleep(_BREATH_S), sleep=_BUSY_S)
        copy.execute("PRAGMA journal_mode = DELETE")


# --- the newest readings ----------------------------------------------------------------------------------------------


def _ask(uri: str | None, sql: str, values: Sequence[object] = ()) -> list[Any]:
    """Return rows of the recorder's file; empty if it cannot be read now."""
    if uri is None:
        return []
    try:
        with closing(open_uri(uri)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(sql, values).fetchall()
    except sqlite3.Error:
        return []


# Each reading has a row in host_sample unless the machine could not be read; a device may then have one.
LAST_READING = "SELECT max(at_ms) FROM (SELECT at_ms FROM host_sample UNION ALL SELECT at_ms FROM sample)"


def last_reading_ms(uri: str | None) -> int | None:
    """Return the time of the recorder's last reading; None: there is none, or its file cannot be read."""
    rows = _ask(uri, LAST_READING)
    return rows[0][0] if rows else None


def read_device_state(uri: str | None, device_id: int, before_ms: int) -> str | None:
    """Return the last sample of a device before a moment as JSON, without unknown values; None: there is none."""
    sql = "SELECT * FROM sample WHERE device_id = ? AND at_ms <= ? ORDER BY rowid DESC LIMIT 1"
    rows = _ask(uri, sql, (device_id, before_ms))
    if not rows:
        return None
    reading = dict(rows[0])
    del reading["task_id"], reading["device_id"]
    return json.dumps(known_values(reading))


def read_memory_peaks(uri: str | None, since_ms: int, until_ms: int | None = None) -> dict[int, int]:
    """Return the peak memory in use on each device since a moment, or between two; empty: not known."""
    sql = """SELECT device_id, max(memory_used_bytes) FROM sample
             WHERE at_ms >= ? AND at_ms <= coalesce(?, at_ms) AND memory_used_bytes IS NOT NULL GROUP BY device_id"""
    return dict(_ask(uri, sql, (since_ms, until_ms)))


def read_lost_devices(uri: str | None) -> set[int]:
    """Return the devices that do not answer now; empty: not known."""
    return {row[0] for row in _ask(uri, "SELECT device_id FROM alert WHERE kind = 'lost' AND ended_at_ms IS NULL")}


def read_pulse(uri: str | None, since_ms: int) -> tuple[float | None, float | None, float | None]:
    """Return the mean percentages of CPU, memory and GPU since a moment; None: not known, or not readable now."""
    sql = """SELECT avg(cpu_percent), avg(100.0 * memory_used_bytes / memory_total_bytes),
                    (SELECT avg(utilization_percent) FROM sample WHERE at_ms >= ?)
             FROM host_sample WHERE at_ms >= ?"""
    cpu, memory, gpu = next(iter(_ask(uri, sql, (since_ms, since_ms))), (None, None, None))
    return cpu, memory, gpu
