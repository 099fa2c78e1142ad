"""Reads which processes were on a task's devices when its database was published."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs.store.connect import open_sealed

_GONE_MS = 60_000  # the recorder asks for processes now and then: one that was seen so long ago has left
_LAST = f"""
    SELECT task.name, device.uuid, device.token, process.pid, process.name, process.user, (
        SELECT memory_used_bytes FROM process_sample AS now
        WHERE now.task_id = process.task_id AND now.device_id = process.device_id AND now.pid = process.pid
          AND now.at_ms = process.last_at_ms)
    FROM process JOIN device USING (task_id, device_id) JOIN task USING (task_id)
    JOIN device_total USING (task_id, device_id)
    WHERE process.last_at_ms > device_total.last_at_ms - {_GONE_MS}
    ORDER BY process.first_at_ms"""


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device of a task; None: not to be seen, or not told."""

    task: str
    uuid: str | None
    token: str
    pid: int
    program: str | None
    user: str | None
    memory_used_bytes: int | None


def read_processes(path: Path) -> tuple[DeviceProcess, ...]:
    """Return the processes in a published database; none from one that has no such table, or cannot be read now."""
    try:
        with closing(open_sealed(path)) as db:
            return tuple(DeviceProcess(*row) for row in db.execute(_LAST))
    except (OSError, sqlite3.Error):
        return ()
