"""Reads the newest telemetry that the recorder lets us see: for the heartbeat, for failures, for more workers."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pulse:
    """The machine now; None where nobody knows."""

    cpu_percent: float | None = None
    memory_percent: float | None = None
    gpu_percent: float | None = None


def last_reading_ms(uri: str | None) -> int | None:
    """Return when the recorder last wrote something; None when it never did, or its file cannot be read."""
    if uri is None:
        return None
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            # Every instant is in host_sample, unless the machine did not say; then a device may have.
            (at_ms,) = db.execute(
                "SELECT max(at_ms) FROM (SELECT at_ms FROM host_sample UNION ALL SELECT at_ms FROM sample)"
            ).fetchone()
    except sqlite3.Error:
        return None
    return None if at_ms is None else int(at_ms)


def read_device_state(uri: str | None, device_id: int, before_ms: int) -> str | None:
    """Return the last sample of a device up to a moment, as JSON without what it did not say; None: there is none."""
    if uri is None:
        return None
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            db.row_factory = sqlite3.Row
            row = db.execute(
                "SELECT * FROM sample WHERE device_id = ? AND at_ms <= ? ORDER BY rowid DESC LIMIT 1",
                (device_id, before_ms),
            ).fetchone()
    except sqlite3.Error:
        return None
    if row is None:
        return None
    known = {name: row[name] for name in row.keys() if row[name] is not None}  # noqa: SIM118 - a Row is no dict
    return json.dumps({name: value for name, value in known.items() if name not in ("task_id", "device_id")})


def read_memory_peaks(uri: str | None, since_ms: int, until_ms: int | None = None) -> dict[int, int]:
    """Return the most memory in use on each device since a moment, or between two; empty where nobody knows."""
    if uri is None:
        return {}
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            return dict(
                db.execute(
                    """SELECT device_id, max(memory_used_bytes) FROM sample
                       WHERE at_ms >= ? AND at_ms <= coalesce(?, at_ms) AND memory_used_bytes IS NOT NULL
                       GROUP BY device_id""",
                    (since_ms, until_ms),
                ).fetchall()
            )
    except sqlite3.Error:
        return {}


def read_pulse(uri: str | None, since_ms: int) -> Pulse:
    """Return means over the recent past; an unreadable file is an unknown pulse, not an error."""
    if uri is None:
        return Pulse()
    try:
        with closing(sqlite3.connect(uri, uri=True)) as db:
            host = db.execute(
                """SELECT avg(cpu_percent), avg(100.0 * memory_used_bytes / memory_total_bytes)
                   FROM host_sample WHERE at_ms >= ?""",
                (since_ms,),
            ).fetchone()
            (gpu,) = db.execute("SELECT avg(utilization_percent) FROM sample WHERE at_ms >= ?", (since_ms,)).fetchone()
    except sqlite3.Error:
        return Pulse()
    return Pulse(host[0], host[1], gpu)
