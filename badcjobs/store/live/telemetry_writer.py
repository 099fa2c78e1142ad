"""The recorder's half of a task database: samples and gaps, one transaction per tick."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from badcjobs.model import METRICS, HostReading, Reading
from badcjobs.store.connect import create_live
from badcjobs.store.live.snapshot import take_snapshot

_SAMPLE = f"""INSERT INTO sample (task_id, device_id, at_ms, {", ".join(METRICS)})
              VALUES (?, ?, ?{", ?" * len(METRICS)})"""


class TelemetryWriter:
    """Writes one task's readings; reopening the file goes on where a dead recorder stopped."""

    def __init__(self, path: Path, task_id: int, *, shared: bool = False) -> None:
        self.task_id = task_id
        self._db = create_live(path, shared=shared)

    def last_sample_ms(self) -> int | None:
        """Return the time of the newest sample; None in a new file."""
        row = self._db.execute(
            "SELECT max(at_ms) FROM (SELECT at_ms FROM sample UNION ALL SELECT at_ms FROM host_sample)"
        )
        value = row.fetchone()[0]
        return None if value is None else int(value)

    def batch(self) -> sqlite3.Connection:
        """Hold one transaction open over several calls: ``with writer.batch(): …``."""
        if self._db.in_transaction:  # a commit that a full disk refused, and that was not undone
            self._db.execute("ROLLBACK")
        self._db.execute("BEGIN")
        return self._db  # commits on leaving the with block, rolls back on an exception

    def write_tick(self, at_ms: int, readings: Sequence[tuple[int, Reading]], host: HostReading | None) -> None:
        """Write one instant: every device that answered, and the machine around them."""
        self._db.executemany(
            _SAMPLE,
            [
                (self.task_id, device_id, at_ms, *(getattr(r, metric) for metric in METRICS))
                for device_id, r in readings
            ],
        )
        if host is not None:
            self._db.execute(
                "INSERT INTO host_sample VALUES (?, ?, ?, ?, ?)",
                (self.task_id, at_ms, host.cpu_percent, host.memory_used_bytes, host.memory_total_bytes),
            )

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        """Write the beginning of a gap and return its row, to be stretched while it lasts."""
        cursor = self._db.execute(
            "INSERT INTO gap VALUES (?, ?, ?, ?, ?, ?)", (self.task_id, device_id, metric, from_ms, to_ms, reason)
        )
        return int(cursor.lastrowid or 0)

    def stretch_gap(self, gap: int, to_ms: int) -> None:
        """Move the end of a gap."""
        self._db.execute("UPDATE gap SET to_ms = ? WHERE rowid = ?", (to_ms, gap))

    def snapshot(self, target: Path) -> None:
        """Write a sealed copy of all that was committed; for any thread, while the ticks go on."""
        take_snapshot(self._db, target)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
