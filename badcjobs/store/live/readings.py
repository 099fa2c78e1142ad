"""Reads the newest telemetry that the recorder lets us see, for the heartbeat line and the gap after its death."""

from __future__ import annotations

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
