"""The recorder's half of a task database: samples, gaps and what is noted beside them, one transaction per tick."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from pathlib import Path

from badcjobs.model import METRICS, HostReading, Reading
from badcjobs.store.connect import create_live, rows_by_name, transaction
from badcjobs.store.live_files import LAST_READING, take_snapshot
from badcjobs.store.schema import columns_of, insert_sql

_values_of = attrgetter(*METRICS)
_SAMPLE = f"""INSERT INTO sample (task_id, device_id, at_ms, {", ".join(METRICS)})
              VALUES (?, ?, ?{", ?" * len(METRICS)})"""


class TelemetryWriter:
    """Writes one task's readings; reopening the file goes on where a dead recorder stopped."""

    def __init__(self, path: Path, task_id: int, *, shared: bool = False) -> None:
        self.task_id = task_id
        self._db = create_live(path, shared=shared)

    def last_sample_ms(self) -> int | None:
        """Return the time of the newest sample; None in a new file."""
        last_ms: int | None = self._db.execute(LAST_READING).fetchone()[0]
        return last_ms

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
            [(self.task_id, device_id, at_ms, *_values_of(reading)) for device_id, reading in readings],
        )
        if host is not None:
            self._db.execute(
                insert_sql("host_sample"),
                (self.task_id, at_ms, host.cpu_percent, host.memory_used_bytes, host.memory_total_bytes),
            )

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int:
        """Write the beginning of a gap and return its row, to be stretched while it lasts."""
        cursor = self._db.execute(insert_sql("gap"), (self.task_id, device_id, metric, from_ms, to_ms, reason))
        return int(cursor.lastrowid or 0)

    def stretch_gap(self, gap: int, to_ms: int) -> None:
        """Move the end of a gap."""
        self._db.execute("UPDATE gap SET to_ms = ? WHERE rowid = ?", (to_ms, gap))

    # --- notes beside the samples ---------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        """Hold a part of the open transaction that is undone alone if it fails."""
        return transaction(self._db)

    def write_alert(self, values: Mapping[str, object]) -> None:
        """Write an alert, or its new state: device, kind, begin and message tell which one it is."""
        changed = self._db.execute(
            """UPDATE alert SET severity = :severity, ended_at_ms = :ended_at_ms, peak = :peak
               WHERE device_id = :device_id AND kind = :kind AND message = :message
                     AND started_at_ms = :started_at_ms""",
            values,
        )
        if changed.rowcount == 0:
            self.put("alert", values)

    def open_alerts(self) -> list[dict[str, object]]:
        """Return the alerts that have not ended."""
        return self._noted("alert", "WHERE ended_at_ms IS NULL")

    def last_processes(self) -> list[dict[str, object]]:
        """Return every process in its newest row, as an earlier recorder has left them."""
        return self._noted("process", "ORDER BY first_at_ms")

    def _noted(self, table: str, which: str) -> list[dict[str, object]]:
        names = ", ".join(name for name in columns_of(table) if name != "task_id")
        return rows_by_name(self._db, f"SELECT {names} FROM {table} {which}")

    def write_process_samples(self, rows: Sequence[tuple[int, int, int, int | None, int | None]]) -> None:
        """Write processes of one instant: device, time, pid, memory, share of the multiprocessors."""
        self._db.executemany(insert_sql("process_sample"), [(self.task_id, *row) for row in rows])

    def put(self, table: str, values: Mapping[str, object]) -> None:
        """Write a row, in place of the one with the same key; the process on a device, the source of a metric, …."""
        columns, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        news = ", ".join(f"{name} = excluded.{name}" for name in values)
        self._db.execute(
            f"INSERT INTO {table} (task_id, {columns}) VALUES (:task_id, {marks}) ON CONFLICT DO UPDATE SET {news}",
            {"task_id": self.task_id, **values},
        )

    # --- the file -------------------------------------------------------------------------------------------------

    def snapshot(self, target: Path) -> None:
        """Write a sealed copy of all that was committed; for any thread, while the ticks go on."""
        take_snapshot(self._db, target)

    def close(self) -> None:
        """Close the file."""
        self._db.close()
