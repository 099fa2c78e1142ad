"""Reads a job database into plain facts, from which the report says what they mean."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.model import DeviceFacts, FailedChunk, GapFacts, JobFacts, TaskFacts
from badcjobs.store.connect import complain_about, open_sealed

_MOST_FAILED = 1000

# Energy by integration: neighbouring power readings, but never across a hole.
_LONGEST_STEP_MS = 15_000
_INTEGRATED_ENERGY = f"""
    SELECT device_id, sum((power_w + before_w) / 2 * (at_ms - before_ms) / 1000.0) FROM (
        SELECT device_id, at_ms, power_w,
               lag(at_ms) OVER (PARTITION BY task_id, device_id ORDER BY at_ms) AS before_ms,
               lag(power_w) OVER (PARTITION BY task_id, device_id ORDER BY at_ms) AS before_w
        FROM sample WHERE power_w IS NOT NULL)
    WHERE at_ms - before_ms <= {_LONGEST_STEP_MS} GROUP BY device_id"""


def read_job(path: Path) -> JobFacts:
    """Return everything the summary needs."""
    try:
        with closing(open_sealed(path)) as db:
            complaint = complain_about(path, db)
            if complaint is None and not _is_job_database(db):
                complaint = "this is a task database; merge it first"
            if complaint is not None:
                raise DatabaseProblem(
                    f"{path} is not a job database", why=complaint, fix=f"badcjobs merge {path.parent}"
                )
            return _read(db)
    except sqlite3.Error as error:
        raise DatabaseProblem(f"{path} cannot be read", why=str(error), fix="badcjobs merge RUN_FOLDER") from error


def _is_job_database(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT 1 FROM sqlite_master WHERE name = 'source_file'").fetchone() is not None


def _read(db: sqlite3.Connection) -> JobFacts:
    return JobFacts(
        tasks=tuple(_tasks(db)),
        devices=tuple(_devices(db)),
        chunks=dict(db.execute("SELECT status, count(*) FROM chunk GROUP BY status").fetchall()),
        audio_done_s=db.execute("SELECT total(audio_s) FROM chunk WHERE status = 'done'").fetchone()[0],
        done_of_unknown_length=db.execute(
            "SELECT count(*) FROM chunk WHERE status = 'done' AND audio_s IS NULL"
        ).fetchone()[0],
        tries=db.execute("SELECT count(*) FROM attempt").fetchone()[0],
        failed=tuple(
            FailedChunk(*row)
            for row in db.execute(
                """SELECT recording_id, chunk_id, status, attempts, coalesce(error_class, ''), coalesce(error, '')
                   FROM chunk WHERE status IN ('failed', 'poison') ORDER BY recording_id, chunk_id LIMIT ?""",
                (_MOST_FAILED,),
            )
        ),
        labels=tuple(
            db.execute("SELECT label, max(label_name), count(*) FROM detection GROUP BY label ORDER BY 3 DESC, 1")
        ),
        gaps=tuple(
            GapFacts(*row)
            for row in db.execute(
                """SELECT reason, metric, count(*), sum(to_ms - from_ms) / 1000.0, count(DISTINCT task_id)
                   FROM gap GROUP BY reason, metric ORDER BY metric IS NOT NULL, 4 DESC, reason, metric"""
            )
        ),
        file_remarks=tuple(
            db.execute("SELECT path, reason FROM source_file WHERE status != 'merged' ORDER BY path").fetchall()
        ),
    )


def _tasks(db: sqlite3.Connection) -> list[TaskFacts]:
    rows = db.execute(
        """SELECT name, job_id, array_index, restart, node, shard_count, verdict, exit_code, telemetry,
                  coalesce(devices, 0), started_at_ms, last_sign_ms, done, failed, pending, coalesce(audio_s, 0.0)
           FROM task_summary ORDER BY job_id, array_index, restart, node, name"""
    )
    return [TaskFacts(*row) for row in rows]


def _devices(db: sqlite3.Connection) -> list[DeviceFacts]:
    integrated = dict(db.execute(_INTEGRATED_ENERGY).fetchall())
    busy: dict[int, dict[int, int]] = {}
    for device_id, percent, count in db.execute(
        """SELECT device_id, utilization_percent, count(*) FROM sample
           WHERE utilization_percent IS NOT NULL GROUP BY device_id, utilization_percent"""
    ):
        busy.setdefault(device_id, {})[percent] = count
    rows = db.execute(
        """SELECT d.device_id, t.name, t.node, d.device_index, d.uuid, d.token, d.name, d.backend, d.memory_total_bytes,
                  s.samples, s.memory_peak_bytes, s.temperature_max_c, s.power_mean_w, s.energy_j,
                  s.energy_span_s, s.span_s, coalesce(s.gap_s, 0.0)
           FROM device d JOIN task t USING (task_id) JOIN device_summary s USING (device_id)
           ORDER BY t.job_id, t.array_index, t.restart, t.node, t.name, d.device_index, d.token"""
    ).fetchall()
    return [DeviceFacts(*(*row[1:], integrated.get(row[0]), busy.get(row[0], {}))) for row in rows]
