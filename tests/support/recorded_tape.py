"""Recordings for replay: task databases with the samples and gaps that a test wants, in any version of the schema."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

from rooms.model import METRICS, InventoryDevice, Reading
from rooms.store import create_tables

BEGIN_MS = 1_700_000_000_000
TASK_ID = 77

Said = Reading | str  # what a device said; a text: why nothing


def write_recording(
    path: Path, devices: Sequence[InventoryDevice], said: Callable[[int, float], Said], seconds: Sequence[float],
    metric_gaps: Mapping[tuple[int, str], str] | None = None,
) -> Path:  # fmt: skip
    """Write what device ``index`` said at each second; ``metric_gaps`` last from the first to the last of them."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        create_tables(db)
        db.execute("BEGIN")
        insert(db, "task", task_id=TASK_ID, name="4821_0.r0.n", job_id="4821", array_index=0, restart=0, node="n",
               telemetry=1, version="0.1.0", started_at_ms=BEGIN_MS)  # fmt: skip
        for device in devices:
            insert(db, "device", device_id=100 + device.index, task_id=TASK_ID, uuid=device.uuid,
                   device_index=device.index, token=str(device.index), name=device.name, backend="nvml", why="test",
                   memory_total_bytes=device.memory_total_bytes, power_limit_w=device.power_limit_w)  # fmt: skip
            good_s = seconds[0]
            for at_s in seconds:
                answer = said(device.index, at_s)
                if isinstance(answer, str):
                    add_gap(db, device.index, good_s, at_s, answer)
                    continue
                good_s, values = at_s, {metric: getattr(answer, metric) for metric in METRICS}
                at_ms = BEGIN_MS + round(at_s * 1000)
                insert(db, "sample", task_id=TASK_ID, device_id=100 + device.index, at_ms=at_ms, **values)
        for (index, metric), reason in (metric_gaps or {}).items():
            add_gap(db, index, seconds[0], seconds[-1], reason, metric)
        db.execute("COMMIT")
    return path


def insert(db: sqlite3.Connection, table: str, **values: object) -> None:
    names = ", ".join(values)
    db.execute(f"INSERT INTO {table} ({names}) VALUES ({', '.join('?' * len(values))})", list(values.values()))


def add_gap(
    db: sqlite3.Connection, index: int | None, from_s: float, to_s: float, reason: str, metric: str | None = None
) -> None:
    insert(db, "gap", task_id=TASK_ID, device_id=None if index is None else 100 + index, metric=metric,
           from_ms=BEGIN_MS + round(from_s * 1000), to_ms=BEGIN_MS + round(to_s * 1000), reason=reason)  # fmt: skip
