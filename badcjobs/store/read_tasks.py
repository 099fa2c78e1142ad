"""Reads what a published database says of tasks that may still run: how far they are, how their devices fare.

Only files that are complete and never change in place, not the live ones. One file is read in a few milliseconds.
"""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from badcjobs.model import METRICS, ProcessFacts, Reading, silent_after_s
from badcjobs.store.connect import CHUNK_NAME, grouped, is_job_database, open_sealed, read_as, reading, rows_by_name
from badcjobs.store.read_model import DeviceFacts, DeviceWork, TaskAlert, TaskFacts, Trail

_TASKS = """
    SELECT task_id, name, job_id, array_index, restart, node, procid, engine, telemetry, devices, workers,
           shard_index, shard_count, started_at_ms, ended_at_ms, exit_code, verdict FROM task"""
_DEVICES = """
    SELECT task_id, device_id, device_index AS "index", uuid, token, name, backend, memory_total_bytes, power_limit_w
    FROM device ORDER BY device_index, token"""
_COUNTS = """
    SELECT {by}, status || CASE WHEN status = 'skipped' AND error_class IS NOT NULL THEN ' with an error' ELSE '' END,
           count(*), total(audio_s)
    FROM chunk GROUP BY 1, 2"""
_UNDER_WAY = f"""
    SELECT task_id, device_id, {CHUNK_NAME} FROM attempt WHERE ended_at_ms IS NULL ORDER BY started_at_ms DESC"""
_SETTINGS = "SELECT NULL, value FROM meta WHERE key = 'settings'"  # those of the only task
_SETTINGS_OF_JOB = "SELECT task_id, value FROM task_meta WHERE key = 'settings'"
_LAST_ATTEMPT = "SELECT max(coalesce(ended_at_ms, started_at_ms)) FROM attempt WHERE task_id = ?"
_LAST_HOST = """
    SELECT at_ms, cpu_percent, memory_used_bytes, 100.0 * memory_used_bytes / memory_total_bytes
    FROM host_sample WHERE task_id = ? ORDER BY {order} DESC LIMIT 1"""
_STRETCHES = """
    SELECT device_id, from_ms, to_ms, CAST(round(utilization_mean_percent) AS INTEGER),
           CAST(round(memory_used_mean_bytes) AS INTEGER), CAST(round(temperature_mean_c) AS INTEGER),
           CAST(round(power_mean_w) AS INTEGER)
    FROM device_stretch WHERE task_id = ? ORDER BY device_id, from_ms"""
STILL_OPEN = "a.ended_at_ms IS NULL AND t.ended_at_ms IS NULL AND t.verdict IS NULL"
_NOT_ENDED = "a.ended_at_ms IS NULL"
EVERY_ALERT = f"""
    SELECT a.kind, a.severity, a.message, t.node, a.started_at_ms, t.name AS task, d.device_index,
           d.uuid AS device_uuid, a.peak, a.threshold, {STILL_OPEN} AS is_open
    FROM alert a JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = a.device_id"""
_MOST_UNDER_WAY = 16  # names of chunks that are worth showing
_GONE_MS = 60_000  # the recorder asks for processes now and then: one that was seen so long ago has left
_PROCESSES = f"""
    SELECT task.name, device.uuid, device.token, process.pid, process.name, process.user, (
        SELECT memory_used_bytes FROM process_sample AS now
        WHERE now.task_id = process.task_id AND now.device_id = process.device_id AND now.pid = process.pid
          AND now.at_ms = process.last_at_ms)
    FROM process JOIN device USING (task_id, device_id) JOIN task USING (task_id)
    JOIN device_total USING (task_id, device_id)
    WHERE process.last_at_ms > device_total.last_at_ms - {_GONE_MS}
    ORDER BY process.first_at_ms"""

_NONE = (0, 0.0)  # chunks, seconds of audio


def read_tasks(path: Path, known: Collection[str] = ()) -> tuple[TaskFacts, ...]:
    """Return the tasks of a task or job database, without those whose names are known already."""
    with reading(path) as db:
        rows = [row for row in rows_by_name(db, _TASKS) if row["name"] not in known]
        if not rows:
            return ()
        status, tasks = path.stat(), []
        for task in _read_now(db, rows):
            heard_at_ms = task.last_sign_ms
            if task.verdict is None:  # of one that runs, at the latest when its file was published
                heard_at_ms = max(heard_at_ms, status.st_mtime_ns // 10**6)
            after_s = silent_after_s(status.st_size, parse_publish_every_s(task.settings))
            tasks.append(replace(task, heard_at_ms=heard_at_ms, silent_after_s=after_s))
        return tuple(tasks)


def parse_publish_every_s(settings: str | None) -> float | None:
    """Return how often a task was told to publish its database; ``settings`` are its own, as JSON."""
    try:
        return float(json.loads(settings or "")["publish_every_s"])
    except (ValueError, TypeError, KeyError):
        return None


def _read_now(db: sqlite3.Connection, rows: Sequence[dict[str, Any]]) -> Iterator[TaskFacts]:
    """Yield tasks with how far they are and what their devices do; ``rows`` are their own."""
    of_job = is_job_database(db)
    counts: dict[tuple[str, int | None], dict[str, tuple[int, float]]] = defaultdict(dict)
    for by in ("task_id", "device_id"):
        for place, status, many, audio_s in db.execute(_COUNTS.format(by=by)):
            counts[by, place][status] = many, audio_s
    all_devices = grouped((row.pop("task_id"), row) for row in rows_by_name(db, _DEVICES))
    all_under_way = grouped(db.execute(_UNDER_WAY))
    alerts = grouped((alert.task, alert) for alert in read_as(db, TaskAlert, f"{EVERY_ALERT} WHERE {_NOT_ENDED}"))
    last, settings = last_readings(db), dict(db.execute(_SETTINGS_OF_JOB if of_job else _SETTINGS))
    for row in rows:
        task_id, alive = row.pop("task_id"), row["verdict"] is None
        chunks, under_way, devices = counts["task_id", task_id], all_under_way[task_id], []
        stretches = grouped((device_id, rest) for device_id, *rest in db.execute(_STRETCHES, (task_id,)))
        for device in all_devices[task_id]:
            device_id = device["device_id"]
            read_at_ms, reading = last.get(device_id, (None, Reading()))
            trail = _trail(stretches[device_id])
            done, audio_s = counts["device_id", device_id].get("done", _NONE)
            names = tuple(name for on, name in under_way if on == device_id)[:_MOST_UNDER_WAY]
            devices.append(
                DeviceFacts(
                    **device,
                    task=row["name"],
                    node=row["node"],
                    alive=alive,
                    read_at_ms=read_at_ms,
                    reading=reading,
                    trail=trail,
                    means=None if alive else trail.means,
                    chunks=names if alive else (),
                    work=DeviceWork(done=done, audio_s=audio_s),
                )
            )
        host = db.execute(_LAST_HOST.format(order="at_ms" if of_job else "rowid"), (task_id,)).fetchone()
        host_ms, cpu_percent, memory_used_bytes, memory_percent = host or (None,) * 4
        (attempt_ms,) = db.execute(_LAST_ATTEMPT, (task_id,)).fetchone()
        signs = [row["started_at_ms"], row["ended_at_ms"], host_ms, attempt_ms, *(d.read_at_ms for d in devices)]
        task = TaskFacts(
            **row,
            state=row["verdict"] or "running",
            last_sign_ms=max(sign for sign in signs if sign is not None),
            done=chunks.get("done", _NONE)[0],
            failed=chunks.get("failed", _NONE)[0] + chunks.get("poison", _NONE)[0],
            failed_before=chunks.get("skipped with an error", _NONE)[0],
            before=chunks.get("skipped", _NONE)[0],
            pending=chunks.get("pending", _NONE)[0],
            audio_s=chunks.get("done", _NONE)[1],
            settings=settings.get(task_id if of_job else None),
            cpu_percent=cpu_percent,
            memory_used_bytes=memory_used_bytes,
            memory_percent=memory_percent,
            working_on=tuple(name for _, name in under_way[:_MOST_UNDER_WAY]) if alive else (),
            alerts=tuple(alerts[row["name"]]),
        )
        if task.wall_s > 0:
            devices = [replace(d, rate=d.work.audio_s / task.wall_s) if d.work.audio_s else d for d in devices]
        yield replace(task, its_devices=tuple(devices))


def last_readings(db: sqlite3.Connection) -> dict[int, tuple[int, Reading]]:
    """Return the last reading of each device, and when it was taken.

    There is no index in a task database, but samples lie device by device: how many there are tells where the last one
    is. Where they lie otherwise, as in a job database, there is an index.
    """
    wanted = f"SELECT at_ms, {', '.join(METRICS)} FROM sample WHERE"
    totals = "SELECT device_id, task_id, samples, last_at_ms FROM device_total WHERE samples > 0 ORDER BY device_id"
    found, row_number = {}, 0
    for device_id, task_id, samples, last_ms in db.execute(totals).fetchall():
        row_number += samples
        place = (row_number, device_id, last_ms)
        row = db.execute(f"{wanted} rowid = ? AND device_id = ? AND at_ms = ?", place).fetchone()
        if row is None:
            here = (task_id, device_id, last_ms)
            row = db.execute(f"{wanted} task_id = ? AND device_id = ? AND at_ms = ?", here).fetchone()
        if row is not None:
            found[device_id] = row[0], Reading(**dict(zip(METRICS, row[1:], strict=True)))
    return found


def _trail(stretches: Sequence[tuple[Any, ...]]) -> Trail:
    """Return stretches as columns; one that is missing is a step without a reading."""
    if not stretches:
        return Trail()
    from_ms, step_ms = stretches[0][0], max(1, stretches[0][1] - stretches[0][0])
    rows: list[Sequence[int | None]] = [(None,) * 4] * ((stretches[-1][0] - from_ms) // step_ms + 1)
    for stretch in stretches:
        rows[(stretch[0] - from_ms) // step_ms] = stretch[2:]
    return Trail(from_ms, step_ms, *(tuple(column) for column in zip(*rows, strict=True)))


def read_processes(path: Path) -> dict[tuple[str, str | None, str], list[ProcessFacts]]:
    """Return the processes on the devices of a database, by task, UUID and token; none: it cannot be read now."""
    try:
        with closing(open_sealed(path)) as db:
            return grouped(
                ((task, uuid, token), ProcessFacts(*rest)) for task, uuid, token, *rest in db.execute(_PROCESSES)
            )
    except (OSError, sqlite3.Error):
        return {}
