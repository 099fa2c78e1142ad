"""Reads what a job database says of each device of each task: what was measured, what was worked on."""

from __future__ import annotations

import sqlite3
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from badcjobs.model import METRICS, DeviceFacts, DeviceWork, MetricFacts, StateTime, UnderWay
from badcjobs.store.account_rows import UNDER_WAY
from badcjobs.store.figures import describe
from badcjobs.store.under_way_reader import read_under_way

_SPARK_COLUMNS = 20

_DEVICES = """
    SELECT d.device_id, t.name, t.node, d.device_index, d.uuid, d.token, d.name, d.backend, d.memory_total_bytes,
           s.samples, s.memory_peak_bytes, s.temperature_max_c, s.power_mean_w, s.energy_j,
           s.energy_span_s, s.span_s, coalesce(s.gap_s, 0.0), s.energy_integrated_j, s.busy_mean_percent,
           d.power_limit_w, d.slowdown_c
    FROM device d JOIN task t USING (task_id) JOIN device_summary s USING (device_id)
    ORDER BY t.job_id, t.array_index, t.restart, t.node, t.name, d.device_index, d.token"""


def read_devices(db: sqlite3.Connection) -> Iterator[DeviceFacts]:
    """Yield the devices of all tasks, task by task."""
    utilization: dict[int, dict[int, int]] = defaultdict(dict)
    for device_id, percent, samples in db.execute(
        "SELECT device_id, utilization_percent, samples FROM utilization_count"
    ):
        utilization[device_id][percent] = samples
    throttled: dict[int, dict[str, int]] = defaultdict(dict)
    for device_id, reason, samples in db.execute("SELECT device_id, reason, samples FROM throttle_count"):
        throttled[device_id][reason] = samples
    states, metrics, work, sparks, last = _states(db), _metrics(db), _work(db), _sparks(db), _last_readings(db)
    under_way = read_under_way(db)
    for device_id, *row, power_limit_w, slowdown_c in db.execute(_DEVICES):
        row += [utilization[device_id], device_id, power_limit_w, slowdown_c, states[device_id], metrics[device_id]]
        row += [throttled[device_id], work.get(device_id, DeviceWork()), sparks.get(device_id, ())]
        row += [last.get(device_id, {}), under_way.get(device_id, UnderWay())]
        yield DeviceFacts(*row)


def _states(db: sqlite3.Connection) -> dict[int, dict[str, StateTime]]:
    found: dict[int, dict[str, StateTime]] = defaultdict(dict)
    for device_id, state, *figures in db.execute(
        "SELECT device_id, state, total_s, measured_s, busy_s, energy_j FROM device_time"
    ):
        found[device_id][state] = StateTime(*figures)
    return found


def _metrics(db: sqlite3.Connection) -> dict[int, dict[str, MetricFacts]]:
    found: dict[int, dict[str, MetricFacts]] = defaultdict(dict)
    for device_id, metric, *figures in db.execute(
        "SELECT device_id, metric, samples, minimum, mean, p50, p95, maximum FROM metric_summary"
    ):
        found[device_id][metric] = MetricFacts(*figures)
    return found


def _work(db: sqlite3.Connection) -> dict[int, DeviceWork]:
    workers = dict(db.execute("SELECT device_id, count(*) FROM worker WHERE device_id IS NOT NULL GROUP BY 1"))
    durations: dict[int, Counter[float]] = defaultdict(Counter)
    for device_id, took_ms, many in db.execute(
        """SELECT device_id, ended_at_ms - started_at_ms, count(*) FROM attempt
           WHERE outcome = 'done' AND device_id IS NOT NULL GROUP BY 1, 2"""
    ):
        durations[device_id][took_ms / 1000] = many
    audio_s = dict(
        db.execute(
            "SELECT device_id, total(audio_s) FROM chunk WHERE status = 'done' AND device_id IS NOT NULL GROUP BY 1"
        )
    )
    tries = db.execute(
        f"""SELECT a.device_id, sum(a.outcome IS 'done'), sum(a.outcome IS 'failed'),
                   sum((a.outcome IS NULL OR a.outcome = 'lost') AND NOT {UNDER_WAY}), max(a.ended_at_ms),
                   max(CASE WHEN a.error_class IN ('gpu_lost', 'ran_on_cpu') THEN a.error_class END)
            FROM attempt a JOIN task t USING (task_id) LEFT JOIN worker w USING (worker_id)
            WHERE a.device_id IS NOT NULL GROUP BY 1"""
    )
    found = {}
    for device_id, done, failed, lost, *ends in tries:
        p50_s = p95_s = longest_s = None
        if durations[device_id]:
            _, _, _, p50_s, p95_s, longest_s = describe(durations[device_id])
        heard_s = audio_s.get(device_id, 0.0)
        counts = (workers.get(device_id, 0), done, failed, lost)
        found[device_id] = DeviceWork(*counts, heard_s, p50_s, p95_s, longest_s, *ends)
    for device_id in workers.keys() - found.keys():
        found[device_id] = DeviceWork(workers[device_id])
    return found


def _sparks(db: sqlite3.Connection) -> dict[int, tuple[float | None, ...]]:
    """Return the utilization of each device over its time, in few columns."""
    found: dict[int, list[tuple[float, int]]] = defaultdict(list)
    for device_id, mean, samples in db.execute(
        """SELECT device_id, coalesce(utilization_mean_percent, 0.0),
                  CASE WHEN utilization_mean_percent IS NULL THEN 0 ELSE samples END
           FROM device_stretch ORDER BY task_id, device_id, from_ms"""
    ):
        found[device_id].append((mean, samples))
    return {device_id: _thin(stretches) for device_id, stretches in found.items()}


def _thin(stretches: Sequence[tuple[float, int]]) -> tuple[float | None, ...]:
    """Return weighted means of (mean, samples) over neighbours; None where there is no sample."""
    columns = min(_SPARK_COLUMNS, len(stretches))
    edges = [len(stretches) * column // columns for column in range(columns + 1)]
    parts = [stretches[a:b] for a, b in pairwise(edges)]
    weights = [sum(samples for _, samples in part) for part in parts]
    return tuple(
        sum(mean * samples for mean, samples in part) / weight if weight else None
        for part, weight in zip(parts, weights, strict=True)
    )


def _last_readings(db: sqlite3.Connection) -> dict[int, dict[str, float]]:
    """Return what each device said last; what it did not say then is left out."""
    names = ("at_ms", *METRICS)
    rows = db.execute(
        f"""SELECT d.device_id, {", ".join(f"s.{name}" for name in names)} FROM device_total d
            JOIN sample s ON s.task_id = d.task_id AND s.device_id = d.device_id AND s.at_ms = d.last_at_ms"""
    )
    return {
        device_id: {name: value for name, value in zip(names, values, strict=True) if value is not None}
        for device_id, *values in rows
    }
