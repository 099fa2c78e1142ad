"""BADC's telemetry log: a line when a try of a chunk starts and one when it ends, in the order of time.

BADC asks each device once before and once after; here these are the samples nearest to those moments.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

from badcjobs.store.exports.badc_paths import chunk_file
from badcjobs.store.exports.fresh_file import fresh_file
from badcjobs.store.exports.text import as_text
from badcjobs.store.exports.window import Window

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_NEAR_MS = 15_000  # the longest step of the summary's energy, too: farther apart nothing was sampled
_LAST_WORDS = 500  # characters of an error, as many as BADC keeps

_EVENTS = """
    SELECT {at} AS at_ms, {end} AS is_end, a.task_id AS task_id, a.attempt_id AS attempt_id,
           a.recording_id, a.chunk_id, a.try_number, a.started_at_ms, a.ended_at_ms, a.outcome, a.error_class, a.error,
           a.device_id, d.device_index, d.name AS device_name, d.memory_total_bytes, t.engine
    FROM attempt a LEFT JOIN device d USING (device_id) LEFT JOIN task t ON t.task_id = a.task_id
    WHERE {where}"""


def write_telemetry(
    db: sqlite3.Connection, folder: Path, target: Path, window: Window, progress: Callable[[int], None]
) -> int:
    """Write the log and return how many lines it has."""
    samples = _NearestSamples(db)
    lines = 0
    with fresh_file(target) as out, as_text(out) as text:
        for lines, event in enumerate(_events(db, window), 1):
            text.write(json.dumps(_line(event, samples, folder)) + "\n")
            progress(lines)
    return lines


def _events(db: sqlite3.Connection, window: Window) -> sqlite3.Cursor:
    chosen = window.overlaps("a.started_at_ms", "a.ended_at_ms") if window else "true"
    # A try that was cut short has no end; BADC's own log has none either when it is killed.
    ended = f"{chosen} AND a.ended_at_ms IS NOT NULL AND a.outcome IS NOT NULL"
    starts = _EVENTS.format(at="a.started_at_ms", end=0, where=chosen)
    ends = _EVENTS.format(at="a.ended_at_ms", end=1, where=ended)
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(f"{starts} UNION ALL {ends} ORDER BY at_ms, is_end, task_id, attempt_id")


def _line(event: sqlite3.Row, samples: _NearestSamples, folder: Path) -> dict[str, object]:
    ended = bool(event["is_end"])
    details = {"attempt": event["try_number"], "recording_id": event["recording_id"], "runner": event["engine"]}
    if ended and event["outcome"] == "done":
        details["output"] = str(folder / chunk_file(event["recording_id"], event["chunk_id"]))
    elif ended:
        details |= {"error_class": event["error_class"], "stderr": (event["error"] or "")[-_LAST_WORDS:]}
    details["gpu_metrics"] = {
        "before": samples.near(event, event["started_at_ms"]),
        "after": samples.near(event, event["ended_at_ms"]) if ended else None,
    }
    return {
        "chunk_id": event["chunk_id"],
        "gpu_index": event["device_index"],
        "gpu_name": event["device_name"],
        "status": "start" if not ended else "success" if event["outcome"] == "done" else "failure",
        "timestamp": _iso(event["at_ms"]),
        "finished_at": _iso(event["ended_at_ms"]) if ended else None,
        "runtime_s": (event["ended_at_ms"] - event["started_at_ms"]) / 1000 if ended else None,
        "details": details,
    }


class _NearestSamples:
    """Finds the reading of a device that is nearest to a moment."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        side = f"""SELECT at_ms, utilization_percent, memory_used_bytes FROM {self._indexed()}
                   WHERE task_id = :task AND device_id = :device AND at_ms BETWEEN"""
        self._sql = f"""
            SELECT utilization_percent, memory_used_bytes FROM (
                SELECT * FROM ({side} :at - {_NEAR_MS} AND :at ORDER BY at_ms DESC LIMIT 1) UNION ALL
                SELECT * FROM ({side} :at + 1 AND :at + {_NEAR_MS} ORDER BY at_ms LIMIT 1))
            ORDER BY abs(at_ms - :at), at_ms LIMIT 1"""

    def near(self, event: sqlite3.Row, at_ms: int) -> dict[str, object] | None:
        """Return what BADC would have asked of the try's device; None: nothing was sampled around then."""
        if event["device_id"] is None:
            return None
        asked = {"task": event["task_id"], "device": event["device_id"], "at": at_ms}
        found = self._db.execute(self._sql, asked).fetchone()
        return found and {
            "index": event["device_index"],
            "utilization": found[0],
            "memory_used_mb": _mib(found[1]),
            "memory_total_mb": _mib(event["memory_total_bytes"]),
        }

    def _indexed(self) -> str:
        """Return a table in which a moment is found quickly: a task database keeps its samples as they came."""
        if self._db.execute("PRAGMA index_list(sample)").fetchone():
            return "sample"
        self._db.execute(
            """CREATE TEMP TABLE sample_by_time (task_id, device_id, at_ms, utilization_percent, memory_used_bytes,
                                                 PRIMARY KEY (task_id, device_id, at_ms)) WITHOUT ROWID"""
        )
        self._db.execute(
            """INSERT OR IGNORE INTO sample_by_time
               SELECT task_id, device_id, at_ms, utilization_percent, memory_used_bytes FROM sample
               ORDER BY task_id, device_id, at_ms"""
        )
        return "sample_by_time"


def _iso(at_ms: int) -> str:
    return (_EPOCH + timedelta(milliseconds=at_ms)).isoformat(timespec="milliseconds")


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / 2**20)
