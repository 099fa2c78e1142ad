"""Writes the files that BADC reads: a JSON document per chunk, a telemetry log, and the summary for a resumed run."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sqlite3
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from badcjobs.model import ChunkKey
from badcjobs.store.atomic_write import fresh_file, make_folder
from badcjobs.store.connect import read_value, rows_by_name
from badcjobs.store.export_tables import DetectionFilter, as_text

log = logging.getLogger(__name__)

_LONGEST_NAME_BYTES = 240  # filesystems allow 255; the rest is for the extension


def safe_name(name: str) -> str:
    """Return a part of an id as a file name; %-escape what a path would interpret, and shorten long names."""
    escaped = re.sub("%(?=[0-9A-Fa-f]{2})", "%25", name).replace("/", "%2F").replace("\0", "%00")
    if set(escaped) <= {"."}:  # an empty name, "." or ".."
        escaped = "%2E" * len(escaped) or "%FF"  # no other name becomes that
    if len(escaped.encode()) <= _LONGEST_NAME_BYTES:
        return escaped
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    return escaped.encode()[: _LONGEST_NAME_BYTES - 17].decode(errors="ignore") + "~" + digest


def area_names(areas: Iterable[str | None], *, taken: str, nameless: str) -> Mapping[str | None, str]:
    """Return a file name without extension for each study area, in the given order.

    ``taken`` is the name of another file in the same folder; ``nameless`` is the name for recordings without a study
    area. Names that differ only in case get a number, because some filesystems do not distinguish them.
    """
    used = {taken.casefold()}
    names = dict[str | None, str]()
    for area in areas:
        name = base = nameless if area is None else re.sub(r"^\.", "%2E", safe_name(area))  # never hidden
        number = 1
        while name.casefold() in used:
            number += 1
            name = f"{base}~{number}"
        used.add(name.casefold())
        names[area] = name
    return names


def chunk_file(recording_id: str, chunk_id: str, suffix: str = ".json") -> Path:
    """Return the path of a chunk's file relative to the output folder; no id can lead outside that folder.

    A recording id may be a path (from a folder of audio); its parts become folders. A chunk id is one name, unless it
    equals the recording id.
    """
    parts = recording_id.split("/")
    names = parts if chunk_id == recording_id else [chunk_id]
    return Path(*map(safe_name, parts), *map(safe_name, names[:-1]), safe_name(names[-1]) + suffix)


# --- a document per chunk ---------------------------------------------------------------------------------------------

_FINISHED = "c.status IN ('done', 'failed', 'poison')"  # BADC does not list other chunks
# The columns from timestamp_ms on are those of a detection, NULL for a chunk without any.
_DETECTIONS = f"""
    SELECT c.recording_id, c.chunk_id, c.source_path, c.start_ms,
           c.end_ms AS chunk_end_ms, c.status, c.error_class, c.error,
           t.engine,
           d.start_ms AS timestamp_ms, d.end_ms, d.label,
           d.label AS label_code, d.label_name, d.score AS confidence
    FROM chunk c LEFT JOIN task t USING (task_id)
    LEFT JOIN detection d ON d.recording_id = c.recording_id
        AND d.chunk_id = c.chunk_id AND {{condition}}
    WHERE {_FINISHED} ORDER BY c.recording_id, c.chunk_id, timestamp_ms, d.end_ms, d.label"""


def count_finished(db: sqlite3.Connection) -> int:
    """Return the number of chunks that are done or failed: each of them becomes a file."""
    return int(read_value(db, f"SELECT count(*) FROM chunk c WHERE {_FINISHED}"))


def write_chunks(db: sqlite3.Connection, folder: Path, wanted: DetectionFilter, progress: Callable[[int], None]) -> int:
    """Write ``<recording_id>/<chunk_id>.json`` for every chunk that is done or failed; return the number of files."""
    written = 0
    rows = _named_rows(db, _DETECTIONS.format(condition=wanted.condition), wanted.values)
    for written, (_, group) in enumerate(groupby(rows, key=_key), 1):
        chunk, *more = group
        names = chunk.keys()[9:]
        detections = [{name: row[name] for name in names} for row in (chunk, *more) if row["label"] is not None]
        target = folder / chunk_file(*_key(chunk))
        make_folder(target.parent)
        with fresh_file(target) as out:
            out.write(json.dumps(_document(chunk, detections)).encode())
        progress(written)
    return written


def _key(row: sqlite3.Row) -> ChunkKey:
    return row["recording_id"], row["chunk_id"]


def _named_rows(db: sqlite3.Connection, sql: str, values: Sequence[str] = ()) -> sqlite3.Cursor:
    cursor = db.cursor()
    cursor.row_factory = sqlite3.Row
    return cursor.execute(sql, values)


def _document(chunk: sqlite3.Row, detections: list[dict[str, object]]) -> dict[str, object]:
    done = chunk["status"] == "done"
    status = "failed"
    if done:
        status = "ok" if detections else "no_detections"
    document = {
        "chunk_id": chunk["chunk_id"],
        "recording_id": chunk["recording_id"],
        "source_path": chunk["source_path"],
        "status": status,
        "detections": detections if done else [],
        "chunk": {
            "start_ms": chunk["start_ms"],
            "end_ms": chunk["chunk_end_ms"],
            "overlap_ms": None,  # not kept in the database
            "sha256": None,
            "notes": None,
        },
        "runner": chunk["engine"],
    }
    return document if done else {**document, "error_class": chunk["error_class"], "error": chunk["error"]}


# --- the telemetry log ------------------------------------------------------------------------------------------------
# One line when an attempt starts and one when it ends, in time order. BADC reads each device once before and once
# after an attempt: the last sample at or before the start, and the first one at or after the end.

_NEAR_MS = 15_000  # as in the energy of the summary: a longer step counts as a gap
_ERROR_CHARACTERS = 500  # BADC keeps as many
# At the start of an attempt: the samples that may be "before"; at its end: "after".
_SIDES = {
    "started_at_ms": f"BETWEEN :at - {_NEAR_MS} AND :at ORDER BY at_ms DESC",
    "ended_at_ms": f"BETWEEN :at AND :at + {_NEAR_MS} ORDER BY at_ms",
}

_EVENTS = """
    SELECT {at} AS at_ms, {end} AS is_end, a.task_id AS task_id,
           a.attempt_id AS attempt_id,
           a.recording_id, a.chunk_id, a.try_number, a.started_at_ms,
           a.ended_at_ms, a.outcome, a.error_class, a.error,
           a.device_id, d.device_index, d.name AS device_name,
           d.memory_total_bytes, t.engine
    FROM attempt a LEFT JOIN device d USING (device_id)
    LEFT JOIN task t ON t.task_id = a.task_id
    WHERE {where}"""
_SAMPLES_BY_TIME = """
    CREATE TEMP TABLE sample_by_time (
        task_id, device_id, at_ms, utilization_percent,
        memory_used_bytes, PRIMARY KEY (task_id, device_id, at_ms)
    ) WITHOUT ROWID;
    INSERT OR IGNORE INTO sample_by_time
    SELECT task_id, device_id, at_ms, utilization_percent,
           memory_used_bytes FROM sample
    ORDER BY task_id, device_id, at_ms"""


def write_telemetry(db: sqlite3.Connection, folder: Path, target: Path, progress: Callable[[int], None]) -> int:
    """Write the log; return the number of lines."""
    # An interrupted attempt has no end line; BADC's own log has none either when BADC is killed.
    ended = "a.ended_at_ms IS NOT NULL AND a.outcome IS NOT NULL"
    starts = _EVENTS.format(at="a.started_at_ms", end=0, where="true")
    ends = _EVENTS.format(at="a.ended_at_ms", end=1, where=ended)
    events = _named_rows(db, f"{starts} UNION ALL {ends} ORDER BY at_ms, is_end, task_id, attempt_id")
    lines = 0
    has_index = db.execute("PRAGMA index_list(sample)").fetchone()  # a task database has none
    db.executescript("CREATE TEMP VIEW sample_by_time AS SELECT * FROM sample" if has_index else _SAMPLES_BY_TIME)
    with fresh_file(target) as out, as_text(out) as text:
        for lines, event in enumerate(events, 1):
            text.write(json.dumps(_line(db, event, folder)) + "\n")
            progress(lines)
    return lines


def _line(db: sqlite3.Connection, event: sqlite3.Row, folder: Path) -> dict[str, object]:
    ended = bool(event["is_end"])
    details = {
        "attempt": event["try_number"],
        "recording_id": event["recording_id"],
        "runner": event["engine"],
    }
    status = "start"
    if ended and event["outcome"] == "done":
        status = "success"
        details["output"] = str(folder / chunk_file(event["recording_id"], event["chunk_id"]))
    elif ended:
        status = "failure"
        details |= {
            "error_class": event["error_class"],
            "stderr": (event["error"] or "")[-_ERROR_CHARACTERS:],
        }
    details["gpu_metrics"] = {
        "before": _metrics_at(db, event, "started_at_ms"),
        "after": _metrics_at(db, event, "ended_at_ms") if ended else None,
    }
    return {
        "chunk_id": event["chunk_id"],
        "gpu_index": event["device_index"],
        "gpu_name": event["device_name"],
        "status": status,
        "timestamp": _iso(event["at_ms"]),
        "finished_at": _iso(event["ended_at_ms"]) if ended else None,
        "runtime_s": (event["ended_at_ms"] - event["started_at_ms"]) / 1000 if ended else None,
        "details": details,
    }


def _metrics_at(db: sqlite3.Connection, event: sqlite3.Row, moment: str) -> dict[str, object] | None:
    """Return the sample before or after an attempt, in the form of BADC's own GPU readings."""
    if event["device_id"] is None:
        return None
    reading = db.execute(
        f"""SELECT utilization_percent, memory_used_bytes FROM sample_by_time
            WHERE task_id = :task AND device_id = :device AND at_ms {_SIDES[moment]} LIMIT 1""",
        {"task": event["task_id"], "device": event["device_id"], "at": event[moment]},
    ).fetchone()  # None: no sample within _NEAR_MS on that side
    return reading and {
        "index": event["device_index"],
        "utilization": reading[0],
        "memory_used_mb": _mib(reading[1]),
        "memory_total_mb": _mib(event["memory_total_bytes"]),
    }


def _iso(at_ms: int) -> str:
    return datetime.fromtimestamp(at_ms / 1000, timezone.utc).isoformat(timespec="milliseconds")


def _mib(size_bytes: int | None) -> int | None:
    return None if size_bytes is None else round(size_bytes / 2**20)


# --- the summary for a resumed run ------------------------------------------------------------------------------------

_CHUNKS = """chunk c LEFT JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = c.device_id"""
_WORKER = """t.node || '/' || CASE WHEN c.device_id IS NULL THEN 'cpu'
                                   ELSE 'gpu-' || coalesce(d.device_index, d.token, '?') END"""


def write_resume_summary(db: sqlite3.Connection, folder: Path, telemetry: Path) -> tuple[Path, int]:
    """Write the final state of every chunk next to the telemetry log; return the file and the number of entries.

    BADC identifies a chunk by its chunk id alone, so each id has one entry.
    """
    # BADC's own name has .json at the end: `badc infer aggregate` would read the file as a chunk.
    target = telemetry.with_name(telemetry.name + ".summary")
    counts = rows_by_name(
        db,
        f"""SELECT {_WORKER} AS worker, sum(c.status = 'done') AS success, sum(c.status != 'done') AS failure,
                   sum((c.status = 'done') * max(c.attempts - 1, 0)) AS retries,
                   sum((c.status != 'done') * max(c.attempts - 1, 0)) AS failed_retries
            FROM {_CHUNKS} WHERE {_FINISHED} GROUP BY worker ORDER BY worker""",
    )
    workers = {row.pop("worker"): row for row in counts}
    chunks = db.execute(
        f"""SELECT c.chunk_id, c.recording_id, c.status, c.attempts, c.error, {_WORKER}
            FROM {_CHUNKS} WHERE {_FINISHED} ORDER BY c.chunk_id, c.status != 'done', c.recording_id"""
    )
    written = hidden = 0
    with fresh_file(target) as out, as_text(out) as text:
        text.write(f'{{"telemetry_log": {json.dumps(str(telemetry))},\n')
        text.write(f'"workers": {json.dumps(workers)},\n"jobs": {{')
        for written, (chunk_id, rows) in enumerate(groupby(chunks, key=itemgetter(0)), 1):
            (_, recording_id, status, attempts, error, worker), *same_id = rows
            hidden += len(same_id)
            state = {"status": "failure", "attempts": attempts, "error": error}
            if status == "done":
                output = folder / chunk_file(recording_id, chunk_id)
                state |= {"status": "success", "retries": max(attempts - 1, 0), "output": str(output)}
                del state["error"]
            state |= {"worker": worker, "recording_id": recording_id}
            text.write(f"{',' if written > 1 else ''}\n{json.dumps(chunk_id)}: {json.dumps(state)}")
        text.write("\n}}\n")
    if hidden:
        log.warning(
            "BADC would analyse chunks again whose id is that of another recording's chunk: %d",
            hidden,
        )
    return target, written
