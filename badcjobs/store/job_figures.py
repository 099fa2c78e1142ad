"""Computes the figures of a whole job when its tasks are merged: a report reads them, not all chunks and samples."""

from __future__ import annotations

import sqlite3

from badcjobs.model import CHARTED
from badcjobs.store.connect import rows_by_name
from badcjobs.store.schema import stretch_columns

_MOST_STRETCHES = 400


def settle_figures(db: sqlite3.Connection) -> None:
    """Write the totals of the job, the detections of each label, and the readings of all devices together."""
    for table in ("job_figure", "label_total", "job_stretch"):
        db.execute(f"DELETE FROM {table}")
    for topic, sql in TOPICS.items():
        [figures] = rows_by_name(db, sql)
        rows = [(topic, name, value) for name, value in figures.items()]
        db.executemany("INSERT INTO job_figure VALUES (?, ?, ?)", rows)
    db.execute(_LABELS)
    settle_stretches(db)


def settle_stretches(db: sqlite3.Connection) -> None:
    """Write the smallest, mean and largest reading of all devices in stretches of equal length.

    Each is at least as long as the longest stretch of a device, so each of those counts where its middle is.
    """
    from_ms, to_ms, longest_ms = db.execute(
        "SELECT min(from_ms), max(to_ms), max(to_ms - from_ms) FROM device_stretch"
    ).fetchone()
    if from_ms is None:
        return
    width_ms = max(longest_ms, -(-(to_ms - from_ms) // _MOST_STRETCHES))
    measured = {number: row for number, *row in db.execute(_together(), (from_ms, width_ms))}
    nothing = [None] * (3 * len(CHARTED))
    for number, begin_ms in enumerate(range(from_ms, to_ms, width_ms)):
        row = (begin_ms, min(to_ms, begin_ms + width_ms), *measured.get(number, nothing))
        db.execute(f"INSERT INTO job_stretch VALUES ({', '.join('?' * len(row))})", row)


def _together() -> str:
    """Return the query for the readings by the number of the stretch; ?1: the first moment, ?2: the length."""
    parts = []
    for metric in CHARTED:
        low, mean, high = stretch_columns(metric)
        parts.append(f"min({low})")
        parts.append(f"sum({mean} * (to_ms - from_ms)) / sum(iif({mean} IS NULL, 0, to_ms - from_ms))")
        parts.append(f"max({high})")
    return f"SELECT ((from_ms + to_ms) / 2 - ?1) / ?2, {', '.join(parts)} FROM device_stretch GROUP BY 1"


_LABELS = """
    INSERT INTO label_total
    SELECT label, max(label_name), count(*) FROM recording_detection GROUP BY label"""
# Chunks that were done more than once, and whether only because Slurm restarted a task that could not end in order.
_DONE_AGAIN = """
    SELECT r.recording_id, r.chunk_id,
           min(a.job_id = b.job_id AND a.array_index = b.array_index AND a.procid IS b.procid
               AND coalesce(a.verdict, 'killed') IN ('killed', 'stopped')) AS restarted
    FROM rival_chunk r JOIN chunk c USING (recording_id, chunk_id)
    JOIN task a ON a.task_id = r.task_id
    JOIN task b ON b.task_id = c.task_id
    WHERE r.status = 'done' GROUP BY 1, 2"""
# The cost of tries of chunks that were done before; only chunks with rivals can have such tries.
_AGAIN_GPU_S = f"""
    SELECT total(gpu_s) FROM (
        SELECT c.gpu_s, row_number() OVER (
            PARTITION BY a.recording_id, a.chunk_id
            ORDER BY a.ended_at_ms, a.task_id, a.attempt_id) AS number
        FROM ({_DONE_AGAIN})
        JOIN attempt a USING (recording_id, chunk_id)
        LEFT JOIN attempt_cost c USING (task_id, attempt_id)
        WHERE a.outcome = 'done')
    WHERE number > 1"""
_TOTALS = f"""
    SELECT c.done_s - o.overlap_s AS audio_done_s, o.overlap_s, c.done_of_unknown_length,
           c.audio_left_s, c.left_of_unknown_length,
           (SELECT count(*) FROM attempt) AS tries, p.cpu_tries, p.cpu_audio_s,
           r.conflicts, r.restarted, g.failed_gpu_s, g.lost_gpu_s,
           ({_AGAIN_GPU_S}) AS again_gpu_s
    FROM (SELECT total(audio_s) FILTER (WHERE status = 'done') AS done_s,
                 total(audio_s) FILTER (WHERE status = 'pending') AS audio_left_s,
                 count(*) FILTER (WHERE status = 'done' AND audio_s IS NULL) AS done_of_unknown_length,
                 count(*) FILTER (WHERE status = 'pending' AND audio_s IS NULL) AS left_of_unknown_length
          FROM chunk) c,
         (SELECT total(overlap_s) AS overlap_s FROM overlap) o,
         (SELECT count(*) AS cpu_tries, total(c.audio_s - coalesce(o.overlap_s, 0)) AS cpu_audio_s
          FROM attempt a JOIN chunk c USING (recording_id, chunk_id)
          LEFT JOIN overlap o USING (recording_id, chunk_id)
          WHERE a.outcome = 'done' AND a.device_id IS NULL) p,
         (SELECT count(*) AS conflicts, coalesce(sum(restarted), 0) AS restarted
          FROM ({_DONE_AGAIN})) r,
         (SELECT total(gpu_s) FILTER (WHERE state = 'failed') AS failed_gpu_s,
                 total(gpu_s) FILTER (WHERE state = 'lost') AS lost_gpu_s
          FROM attempt_cost) g"""
# Percentiles by nearest rank.
_COST = """
    WITH cost AS MATERIALIZED (
        SELECT gpu_s, busy_s, energy_j
        FROM attempt_cost JOIN attempt USING (task_id, attempt_id)
        WHERE outcome = 'done'),
    figures AS MATERIALIZED (
        SELECT count(*) AS tries, avg(gpu_s) AS gpu_s_mean, max(gpu_s) AS gpu_s_max,
               avg(busy_s) AS busy_s_mean,
               count(energy_j) AS energy_tries, avg(energy_j) AS energy_j_mean,
               max(energy_j) AS energy_j_max
        FROM cost)
    SELECT *,
        (SELECT gpu_s FROM cost ORDER BY 1
         LIMIT 1 OFFSET (SELECT (tries - 1) / 2 FROM figures)) AS gpu_s_p50,
        (SELECT gpu_s FROM cost ORDER BY 1
         LIMIT 1 OFFSET (SELECT (95 * tries - 1) / 100 FROM figures)) AS gpu_s_p95,
        (SELECT energy_j FROM cost ORDER BY 1 NULLS LAST
         LIMIT 1 OFFSET (SELECT (energy_tries - 1) / 2 FROM figures)) AS energy_j_p50,
        (SELECT energy_j FROM cost ORDER BY 1 NULLS LAST
         LIMIT 1 OFFSET (SELECT (95 * energy_tries - 1) / 100 FROM figures)) AS energy_j_p95
    FROM figures"""
TOPICS = {"totals": _TOTALS, "cost": _COST}
