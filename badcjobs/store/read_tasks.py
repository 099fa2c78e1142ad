"""Reads tasks, devices and chart data from a published task or job database, in a few milliseconds per task database.

Published files are complete and never change in place; live files are not read here.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import fields, replace
from itertools import groupby
from math import nan
from operator import itemgetter
from pathlib import Path
from sys import intern
from typing import Any

from badcjobs.model import (
    CHARTED,
    ChartData,
    Envelope,
    ProcessFacts,
    Reading,
    Stretches,
    known_values,
    silent_after_s,
)
from badcjobs.model.work import AUDIO_FAULTS
from badcjobs.small_files import parse_json
from badcjobs.store.connect import (
    CHUNK_NAME,
    UNREADABLE,
    grouped,
    is_job_database,
    open_sealed,
    read_as,
    read_value,
    reading,
    rows_by_name,
)
from badcjobs.store.figures import StateTime
from badcjobs.store.job_schema import DEVICE_SUMMARY
from badcjobs.store.read_model import (
    DeviceFacts,
    DeviceWork,
    MetricFacts,
    Named,
    PackedSteps,
    TaskAlert,
    TaskFacts,
    Trail,
)
from badcjobs.store.schema import stretch_columns

_CHUNKS = """
    SELECT task_id, sum(status = 'done') AS done,
           sum(status IN ('failed', 'poison')) AS failed,
           sum(status = 'pending') AS pending,
           sum(status = 'skipped' AND error_class IS NULL) AS before,
           sum(status = 'skipped' AND error_class IS NOT NULL) AS failed_before,
           total(CASE WHEN status = 'done' THEN audio_s END) AS audio_s,
           CAST(total(CASE WHEN status = 'done' THEN detections END) AS INTEGER) AS detections,
           sum(status = 'done' AND audio_s IS NULL) AS done_of_unknown_length,
           total(CASE WHEN status = 'pending' THEN audio_s END) AS audio_left_s,
           sum(status = 'pending' AND audio_s IS NULL) AS left_of_unknown_length
    FROM chunk GROUP BY 1"""
_ATTEMPTS = """
    SELECT task_id, count(*) AS tries, min(started_at_ms) AS first_ms,
           max(coalesce(ended_at_ms, started_at_ms)) AS last_ms,
           max(CASE WHEN outcome = 'done' THEN ended_at_ms - started_at_ms END) / 1000.0 AS longest_s
    FROM attempt GROUP BY 1"""
_TASKS = f"""
    SELECT t.task_id, t.name, t.job_id, t.array_index, t.restart,
           t.node, t.procid, t.engine, t.telemetry, t.devices,
           t.workers, t.cpus, t.memory_limit_bytes, t.time_limit_s,
           t.slurm_state, t.shard_index, t.shard_count,
           t.started_at_ms, t.ended_at_ms, t.exit_code, t.verdict,
           coalesce(t.verdict, 'running') AS state,
           u.cpu_mean_cores, u.memory_peak_bytes, u.read_mean_bytes_per_s,
           u.host_cpu_mean_percent, u.host_memory_peak_bytes,
           c.done, c.failed, c.pending, c.before, c.failed_before,
           c.audio_s - coalesce(o.overlap_s, 0.0) AS audio_s,
           c.detections, c.done_of_unknown_length, c.audio_left_s,
           c.left_of_unknown_length,
           a.tries, a.longest_s, max(0, a.first_ms - t.started_at_ms) / 1000.0 AS startup_s,
           max(t.started_at_ms, coalesce(a.last_ms, 0), coalesce(g.last_ms, 0)) AS last_sign_ms,
           s.value AS settings, l.value AS live_folder
    FROM task t LEFT JOIN task_total u USING (task_id)
    LEFT JOIN ({_CHUNKS}) c USING (task_id)
    LEFT JOIN ({_ATTEMPTS}) a USING (task_id)
    LEFT JOIN (SELECT task_id, sum(overlap_s) AS overlap_s
        FROM overlap GROUP BY 1) o USING (task_id)
    LEFT JOIN (SELECT task_id, max(to_ms) AS last_ms FROM gap
        GROUP BY 1) g USING (task_id)
    LEFT JOIN task_meta s ON s.task_id = t.task_id
        AND s.key = 'settings'
    LEFT JOIN task_meta l ON l.task_id = t.task_id
        AND l.key = 'live_folder'
    ORDER BY t.job_id, t.array_index, t.restart, t.node, t.name"""
_WORKER_DECISIONS = "SELECT task_id, figures FROM decision WHERE code GLOB 'workers.*' ORDER BY at_ms"
_ERRORS = f"""
    SELECT task_id, error_class, count(*), min(error) FROM chunk
    WHERE error_class IS NOT NULL AND status != 'done'
    GROUP BY 1, 2, CASE WHEN error_class IN {AUDIO_FAULTS} THEN source_path END"""
_LAST_HOST = """
    SELECT at_ms, cpu_percent, memory_used_bytes,
           100.0 * memory_used_bytes / memory_total_bytes AS memory_percent
    FROM host_sample WHERE task_id = ? ORDER BY {order} DESC LIMIT 1"""
_WORK = tuple(part.name for part in fields(DeviceWork))
_DEVICE = f"""d.device_id, t.name AS task, t.node, d.device_index AS "index", d.uuid, d.token, d.name, d.backend,
             d.memory_total_bytes, d.power_limit_w, d.driver,
             {", ".join(f"w.{name}" for name in _WORK)}, w.spark, w.last_reading,
             l.last_at_ms AS read_at_ms"""
_OF_DEVICE = """device d JOIN task t USING (task_id)
    JOIN device_work w USING (device_id) JOIN device_total l USING (device_id)"""
_DEVICES_NOW = f"""
    SELECT {_DEVICE} FROM {_OF_DEVICE} ORDER BY d.device_index, d.token"""
# Audio that two chunks have counts once, also if another task has done the chunk again, whose result was chosen.
_TWICE = """
    SELECT c.device_id, sum(o.overlap_s) FROM overlap o
    JOIN (SELECT * FROM chunk UNION ALL SELECT * FROM rival_chunk) c
    USING (recording_id, chunk_id)
    WHERE c.status = 'done' GROUP BY 1"""
_UNDER_WAY = f"""
    SELECT task_id, device_id, {CHUNK_NAME} FROM attempt WHERE ended_at_ms IS NULL ORDER BY started_at_ms DESC"""
_TRAIL = """
    SELECT device_id, from_ms, to_ms,
           CAST(round(utilization_mean_percent) AS INTEGER),
           CAST(round(memory_used_mean_bytes) AS INTEGER),
           CAST(round(temperature_mean_c) AS INTEGER),
           CAST(round(power_mean_w) AS INTEGER)
    FROM device_stretch WHERE task_id = ? ORDER BY device_id, from_ms"""
STILL_OPEN = "a.ended_at_ms IS NULL AND t.ended_at_ms IS NULL AND t.verdict IS NULL"
_ALERTS = f"""
    SELECT a.kind, a.severity, a.message, t.node, a.started_at_ms,
           t.name AS task, d.device_index,
           d.uuid AS device_uuid, a.peak, a.threshold,
           {STILL_OPEN} AS is_open
    FROM alert a JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = a.device_id"""
_MOST_UNDER_WAY = 16  # names of chunks to show
_GONE_MS = 60_000  # the recorder reads processes less often than devices; one last seen longer ago has ended
_PROCESSES = f"""
    SELECT task.name, device.uuid, device.token, process.pid,
           process.name, process.user, (
        SELECT memory_used_bytes FROM process_sample AS now
        WHERE now.task_id = process.task_id
        AND now.device_id = process.device_id AND now.pid = process.pid
          AND now.at_ms = process.last_at_ms)
    FROM process JOIN device USING (task_id, device_id)
    JOIN task USING (task_id)
    JOIN device_total USING (task_id, device_id)
    WHERE process.last_at_ms > device_total.last_at_ms - {_GONE_MS}
    ORDER BY process.first_at_ms"""


# What only a job database has, as it is for a single task.
_LIKE_JOB = f"""
    CREATE TEMP VIEW IF NOT EXISTS task_meta AS
        SELECT task_id, key, value FROM task, meta;
    CREATE TEMP VIEW IF NOT EXISTS rival_chunk AS
        SELECT * FROM chunk WHERE false;
    CREATE TEMP VIEW IF NOT EXISTS overlap AS
        SELECT NULL AS task_id, NULL AS recording_id, NULL AS chunk_id,
               NULL AS overlap_s WHERE false;
    CREATE TEMP VIEW IF NOT EXISTS device_summary AS {DEVICE_SUMMARY.select()}"""


def _show_like_job(db: sqlite3.Connection) -> bool:
    """Let the queries for a job database also work with a task database; return whether it is a job database."""
    is_job = is_job_database(db)
    if not is_job:
        db.executescript(_LIKE_JOB)
    return is_job


def read_task_rows(db: sqlite3.Connection, known: Collection[str] = ()) -> list[TaskFacts]:
    """Return the tasks of a task or job database without their devices; skip those whose names are in ``known``."""
    if all(name in known for (name,) in db.execute("SELECT name FROM task")):
        return []
    is_job = _show_like_job(db)
    last_host = _LAST_HOST.format(order="at_ms" if is_job else "rowid")  # no index, but in order of time
    decisions = grouped(db.execute(_WORKER_DECISIONS))
    errors = grouped(db.execute(_ERRORS))
    alerts = grouped((alert.task, alert) for alert in read_as(db, TaskAlert, _ALERTS))

    tasks = []
    for row in rows_by_name(db, _TASKS):
        if row["name"] in known:
            continue
        task_id = row["task_id"]
        row |= next(rows_by_name(db, last_host, (task_id,)), {})
        read_at_ms = row.pop("at_ms", 0)
        row["last_sign_ms"] = row["ended_at_ms"] or max(row["last_sign_ms"], read_at_ms)
        row["workers"] = _workers_now(row["workers"], decisions[task_id])
        row["settings"] = intern(row["settings"] or "")  # most tasks have the same
        tasks.append(TaskFacts(**known_values(row), errors=tuple(errors[task_id]), alerts=tuple(alerts[row["name"]])))
    return tasks


def _workers_now(planned: int | None, decisions: Sequence[str]) -> int | None:
    """Return the workers of a task after the last decision about the number on each of its devices.

    ``planned``: those of the start; GPUs that --max-gpus leaves unused have none.
    """
    figures = [parse_settings(text).get("workers") for text in decisions]
    per_device = [number for number in figures if isinstance(number, int) and number > 0]
    if planned is None or not per_device:
        return planned
    return planned * per_device[-1] // per_device[0]


def read_tasks(path: Path, known: Collection[str] = ()) -> tuple[TaskFacts, ...]:
    """Return the tasks of a task or job database with what they do now; skip those whose names are in ``known``."""
    with reading(path) as db:
        rows = read_task_rows(db, known)
        if not rows:
            return ()
        status = path.stat()
        devices = grouped((row["task"], row) for row in rows_by_name(db, _DEVICES_NOW))
        under_way = grouped(db.execute(_UNDER_WAY))
        tasks = []
        for task in rows:
            is_alive = task.verdict is None
            on_devices = under_way[task.task_id] if is_alive else []
            tasks.append(
                with_contact(
                    task,
                    status.st_size,
                    status.st_mtime_ns if is_alive else 0,
                    working_on=tuple(name for _, name in on_devices[:_MOST_UNDER_WAY]),
                    its_devices=tuple(_read_devices_now(db, task, devices[task.name], on_devices)),
                )
            )
        return tuple(tasks)


def _read_devices_now(
    db: sqlite3.Connection,
    task: TaskFacts,
    rows: Iterable[dict[str, Any]],
    under_way: Iterable[tuple[int, str]],
) -> Iterator[DeviceFacts]:
    """Yield the devices of a task with their last readings and what they do; ``under_way``: device → chunk."""
    is_alive = task.verdict is None
    stretches = grouped(db.execute(_TRAIL, (task.task_id,)))
    twice_s = dict(db.execute(_TWICE))
    chunks = grouped(under_way)
    for row in rows:
        device_id = row["device_id"]
        trail = _trail(stretches[device_id])
        device = _device(row, twice_s)
        audio_s = device.work.audio_s
        yield replace(
            device,
            alive=is_alive,
            trail=trail,
            means=None if is_alive else trail.means,
            chunks=tuple(chunks[device_id][:_MOST_UNDER_WAY]),
            rate=audio_s / task.wall_s if audio_s and task.wall_s > 0 else None,
        )


def with_contact(task: TaskFacts, size_bytes: int, published_ns: int, **more: Any) -> TaskFacts:
    """Return a task with the time of its last contact, from the size and time of its database, and more facts."""
    after_s = silent_after_s(size_bytes, parse_settings(task.settings).get("publish_every_s"))
    return replace(
        task,
        heard_at_ms=max(task.last_sign_ms, published_ns // 10**6),
        silent_after_s=after_s,
        **more,
    )


def read_accounts(path: Path, tasks: Iterable[TaskFacts]) -> tuple[TaskFacts, ...]:
    """Return tasks of a database with what their devices have done, used and cost so far."""
    with reading(path) as db:
        devices = grouped((device.task, device) for device in read_devices(db))
    return tuple(replace(task, its_devices=tuple(devices[task.name])) for task in tasks)


def parse_settings(text: str | None) -> dict[str, Any]:
    """Return the settings of a task, or the figures of a decision, from JSON; empty: not known, or damaged."""
    with suppress(TypeError, ValueError):
        return dict(parse_json(text or "{}"))
    return {}


def _trail(stretches: Sequence[tuple[Any, ...]]) -> Trail:
    """Return stretches as columns; a missing stretch is a step without a reading."""
    if not stretches:
        return Trail()
    from_ms = stretches[0][0]
    step_ms = max(1, stretches[0][1] - stretches[0][0])
    rows = [(None,) * 4] * ((stretches[-1][0] - from_ms) // step_ms + 1)
    for stretch in stretches:
        rows[(stretch[0] - from_ms) // step_ms] = stretch[2:]
    return Trail(from_ms, step_ms, *map(PackedSteps, zip(*rows, strict=True)))


def read_processes(path: Path) -> dict[tuple[str, str | None, str], list[ProcessFacts]]:
    """Return the processes on the devices of a database, by task, UUID and token; empty: it cannot be read now."""
    with suppress(OSError, *UNREADABLE), closing(open_sealed(path)) as db:
        rows = db.execute(_PROCESSES)
        return grouped(((task, uuid, token), ProcessFacts(*rest)) for task, uuid, token, *rest in rows)
    return {}


# --- each device ------------------------------------------------------------------------------------------------------

_DEVICES = f"""
    SELECT {_DEVICE}, d.slowdown_c, s.samples, s.memory_peak_bytes,
           s.temperature_max_c, s.power_mean_w, s.span_s,
           s.energy_j AS energy_counter_j, s.energy_span_s AS energy_counter_span_s, s.energy_integrated_j,
           coalesce(s.gap_s, 0.0) AS gap_s, s.busy_mean_percent
    FROM {_OF_DEVICE} JOIN device_summary s USING (device_id)
    ORDER BY t.job_id, t.array_index, t.restart, t.node, t.name, d.device_index, d.token"""
_SHARED = ("task", "node", "name", "backend")  # the same text for many devices: kept once
# Each is stored in this order.
_NAMED: dict[str, tuple[str, Callable[..., Any]]] = {
    "states": (
        "SELECT device_id, state, total_s, measured_s, busy_s, energy_j FROM device_time ORDER BY task_id, device_id",
        StateTime,
    ),
    "metrics": (
        """SELECT device_id, metric, samples, minimum, mean, p50, p95, maximum
        FROM metric_summary WHERE metric IN (
            'utilization_percent', 'busy_percent', 'memory_used_bytes', 'temperature_c', 'power_w', 'sm_clock_mhz')
        ORDER BY task_id, device_id""",
        MetricFacts.of,
    ),
    "throttled": ("SELECT device_id, reason, samples FROM throttle_count ORDER BY task_id, device_id", int),
}


def read_devices(db: sqlite3.Connection) -> Iterator[DeviceFacts]:
    """Yield the devices of all tasks with the totals that were computed at publication, and their last readings."""
    _show_like_job(db)
    named = {name: _by_device(db, *source) for name, source in _NAMED.items()}
    twice_s = dict(db.execute(_TWICE))
    nothing = Named(float, ())
    for row in rows_by_name(db, _DEVICES):
        of_device = {name: by_device.pop(row["device_id"], nothing) for name, by_device in named.items()}
        yield _device(row | of_device, twice_s)


def _by_device(db: sqlite3.Connection, sql: str, make: Callable[..., Any]) -> dict[int, Named]:
    """Return what is known of each device, in little memory: a job may have tens of thousands of them."""
    return {
        device_id: Named(make, [row[1:] for row in rows]) for device_id, rows in groupby(db.execute(sql), itemgetter(0))
    }


def _device(row: dict[str, Any], twice_s: Mapping[int, float]) -> DeviceFacts:
    """Return a device from a row of ``_DEVICE``; ``twice_s``: its audio that two chunks have, which counts once."""
    work = {name: row.pop(name) for name in _WORK}
    work["audio_s"] -= twice_s.get(row["device_id"], 0.0)
    row |= {name: row[name] and intern(row[name]) for name in _SHARED}
    spark = tuple(json.loads(row.pop("spark")))
    reading = Reading(**json.loads(row.pop("last_reading")))
    return DeviceFacts(**row, work=DeviceWork(**work), spark=spark, reading=reading)


# --- over time --------------------------------------------------------------------------------------------------------

_FIGURES = ", ".join(name for metric in CHARTED for name in stretch_columns(metric))

DURATIONS = "SELECT ended_at_ms - started_at_ms, count(*) FROM attempt WHERE outcome = 'done' GROUP BY 1"
_SETS = "SELECT count(DISTINCT value) FROM task_meta WHERE key = 'settings'"
_VERSIONS = "SELECT DISTINCT version FROM task WHERE version IS NOT NULL ORDER BY 1"
# With ?2, what follows the last try that succeeded is lost.
_STRETCHES = f"""
    SELECT from_ms, to_ms,
           iif(?2 AND state = 'working' AND from_ms >= (
               SELECT coalesce(max(a.ended_at_ms), 0)
               FROM attempt a JOIN device d USING (task_id)
               WHERE d.device_id = ?1 AND a.device_id = ?1
               AND a.outcome = 'done'), 'lost', state), {_FIGURES}
    FROM device_stretch
    WHERE task_id = (SELECT task_id FROM device WHERE device_id = ?1)
    AND device_id = ?1
    ORDER BY from_ms"""


@contextmanager
def read_chart_data(path: Path) -> Iterator[ChartData]:
    """Give the data of a job database that the page shows in addition to the summary."""
    with reading(path) as db:
        yield ChartData(
            together=read_together(db),
            stretches=lambda device_id, is_given_up: _stretches(db, _STRETCHES, device_id, is_given_up),
            sets_of_settings=read_value(db, _SETS),
            versions=tuple(row[0] for row in db.execute(_VERSIONS)),
        )


def read_together(db: sqlite3.Connection) -> Stretches | None:
    """Return the readings of all devices together; None: there are no data over time."""
    return _stretches(db, f"SELECT from_ms, to_ms, '', {_FIGURES} FROM job_stretch ORDER BY 1")


def _stretches(db: sqlite3.Connection, sql: str, *values: object) -> Stretches | None:
    rows = db.execute(sql, values).fetchall()
    if not rows:
        return None
    from_ms, to_ms, states, *columns = zip(*rows, strict=True)
    figures = [array("d", [nan if v is None else v for v in column]) for column in columns]
    return Stretches(
        array("q", from_ms),
        array("q", to_ms),
        tuple(map(intern, states)),
        {metric: Envelope(*figures[3 * n : 3 * n + 3]) for n, metric in enumerate(CHARTED)},
    )
