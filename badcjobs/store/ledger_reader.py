"""Reads the accounts of a published database for Prometheus: what its devices did, used and cost so far.

They were added up when the file was published, so few rows are read of a task database, however large it is. What a
live view shows is ``live_reader.py``'s business; all of a merged job, ``job_reader.py``'s.
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import DeviceFacts, DeviceWork, StateTime, TaskFacts, UnderWay
from badcjobs.store.account_rows import UNDER_WAY
from badcjobs.store.connect import complain_about
from badcjobs.store.job_file import open_published
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.under_way_reader import read_under_way
from badcjobs.store.views import VIEWS

# Not in files of older versions.
_ADDED_UP = {"device_total", "metric_summary", "device_time", "throttle_count", "attempt_cost", "device_stretch"}
_TASKS = """
    SELECT s.task_id, s.name, s.job_id, s.array_index, s.restart, s.node, s.shard_count, s.verdict, s.exit_code,
           s.telemetry, coalesce(s.devices, 0), s.started_at_ms, s.last_sign_ms, s.done, s.failed, s.pending,
           coalesce(s.audio_s, 0.0), t.engine, t.workers
    FROM task_summary s JOIN task t USING (task_id)"""
_CHUNKS = """
    SELECT task_id, total(CASE WHEN status = 'done' THEN detections END), sum(status = 'done' AND audio_s IS NULL),
           total(CASE WHEN status = 'pending' THEN audio_s END), sum(status = 'pending' AND audio_s IS NULL)
    FROM chunk GROUP BY 1"""
_ALERTS = """
    SELECT a.task_id, kind, severity, a.ended_at_ms IS NULL AND t.ended_at_ms IS NULL AND t.verdict IS NULL
    FROM alert a JOIN task t USING (task_id)"""
_DEVICES = """
    SELECT d.task_id, d.device_id, d.device_index, d.uuid, d.token, d.name, d.backend, d.memory_total_bytes,
           s.samples, s.energy_j, s.energy_span_s, s.span_s, coalesce(s.gap_s, 0.0), s.energy_integrated_j
    FROM device d JOIN device_summary s USING (device_id) ORDER BY d.device_index, d.token"""
_TRIES = f"""
    SELECT a.device_id, sum(a.outcome IS 'done'), sum(a.outcome IS 'failed'),
           sum((a.outcome IS NULL OR a.outcome = 'lost') AND NOT {UNDER_WAY})
    FROM attempt a JOIN task t USING (task_id) LEFT JOIN worker w USING (worker_id) GROUP BY 1"""


@dataclass(frozen=True, slots=True)
class Ledger:
    """The accounts of one task attempt."""

    task: TaskFacts
    devices: tuple[DeviceFacts, ...]
    tries: int
    detections: int
    done_of_unknown_length: int
    audio_left_s: float  # of the chunks that are listed and not settled, where it is known
    left_of_unknown_length: int
    alerts: tuple[tuple[str, str, bool], ...]  # kind, severity, whether it goes on


def read_ledgers(path: Path, known: Collection[str] = ()) -> tuple[Ledger, ...]:
    """Return the accounts in a task or job database, without those of tasks whose names are known already."""
    try:
        with closing(open_published(path)) as db:
            trouble = complain_about(path, db)
            if trouble is None:
                return _read(db, known)
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"{path.name} cannot be read: {error}") from error
    raise DatabaseProblem(f"{path.name} cannot be read: {trouble}")


def _read(db: sqlite3.Connection, known: Collection[str]) -> tuple[Ledger, ...]:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not is_job_database(db):  # the same questions as there, asked of one task
        for view in VIEWS[:2]:
            db.execute(view.ddl().replace("CREATE VIEW", "CREATE TEMP VIEW", 1))
    rows = [row for row in db.execute(_TASKS) if row[1] not in known]
    if not rows:
        return ()
    tasks = {task_id: TaskFacts(*row) for task_id, *row in rows}
    tries = dict(db.execute("SELECT task_id, count(*) FROM attempt GROUP BY 1"))
    chunks = {task_id: row for task_id, *row in db.execute(_CHUNKS)}
    alerts: dict[int, list[tuple[str, str, bool]]] = defaultdict(list)
    for task_id, kind, severity, goes_on in db.execute(_ALERTS):
        alerts[task_id].append((kind, severity, bool(goes_on)))
    devices = _devices(db, tasks) if tables >= _ADDED_UP else {}
    return tuple(
        Ledger(task, tuple(devices.get(task_id, ())), tries.get(task_id, 0),
               *_counts(chunks.get(task_id, (0, 0, 0.0, 0))), tuple(alerts[task_id]))
        for task_id, task in tasks.items()
    )  # fmt: skip


def _counts(row: Any) -> tuple[int, int, float, int]:
    detections, unknown_done, audio_left_s, unknown_left = row
    return round(detections), unknown_done, audio_left_s, unknown_left


def _devices(db: sqlite3.Connection, tasks: dict[int, TaskFacts]) -> dict[int, list[DeviceFacts]]:
    states: dict[int, dict[str, StateTime]] = defaultdict(dict)
    for device_id, state, *figures in db.execute(
        "SELECT device_id, state, total_s, measured_s, busy_s, energy_j FROM device_time"
    ):
        states[device_id][state] = StateTime(*figures)
    throttled: dict[int, dict[str, int]] = defaultdict(dict)
    for device_id, reason, samples in db.execute("SELECT device_id, reason, samples FROM throttle_count"):
        throttled[device_id][reason] = samples
    audio_s = dict(db.execute("SELECT device_id, total(audio_s) FROM chunk WHERE status = 'done' GROUP BY 1"))
    tries = {device_id: row for device_id, *row in db.execute(_TRIES)}
    under_way = read_under_way(db)
    found: dict[int, list[DeviceFacts]] = defaultdict(list)
    for task_id, device_id, *row in db.execute(_DEVICES):
        if task_id in tasks:
            done, failed, lost = tries.get(device_id, (0, 0, 0))
            work = DeviceWork(done=done, failed=failed, lost=lost, audio_s=audio_s.get(device_id, 0.0))
            task, more = tasks[task_id], (states[device_id], throttled[device_id], work)
            device = _device(task, row, *more)
            found[task_id].append(replace(device, under_way=under_way.get(device_id, UnderWay())))
    return found


def _device(
    task: TaskFacts, row: list[Any], states: dict[str, StateTime], throttled: dict[str, int], work: DeviceWork
) -> DeviceFacts:
    index, uuid, token, name, backend, memory, samples, counter_j, counter_span_s, span_s, gap_s, integrated_j = row
    return DeviceFacts(
        task=task.name,
        node=task.node,
        index=index,
        uuid=uuid,
        token=token,
        name=name,
        backend=backend,
        memory_total_bytes=memory,
        samples=samples,
        memory_peak_bytes=None,
        temperature_max_c=None,
        power_mean_w=None,
        energy_counter_j=counter_j,
        energy_counter_span_s=counter_span_s,
        span_s=span_s,
        gap_s=gap_s,
        energy_integrated_j=integrated_j,
        states=states,
        throttled=throttled,
        work=work,
    )
