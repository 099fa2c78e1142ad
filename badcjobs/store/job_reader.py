"""Reads a job database into plain facts, from which the report says what they mean."""

from __future__ import annotations

import json
import shlex
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import DeviceFacts, FailedChunk, GapFacts, JobFacts, TaskFacts
from badcjobs.store.connect import complain_about
from badcjobs.store.job_file import open_job_database
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.merging.source_file import MERGED, NOT_OURS, read_source_files
from badcjobs.store.schema import SCHEMA_VERSION

_MOST_FAILED = 1000


def read_job(path: Path) -> JobFacts:
    """Return everything the summary needs."""
    try:
        with closing(open_job_database(path)) as db:
            complaint = complain_about(path, db) or _why_not(db)
            if complaint is not None:
                raise DatabaseProblem(
                    f"{path} is not a job database that this badcjobs reads",
                    why=complaint,
                    fix=_way_out(path, complaint),
                )
            return _read(db)
    except sqlite3.Error as error:
        raise DatabaseProblem(f"{path} cannot be read", why=str(error), fix=_way_out(path, str(error))) from error


def _way_out(path: Path, why: str) -> str:
    """Return what to do; a merge adds to a job database and would stumble over its damaged pages again."""
    if "malformed" not in why:
        return shlex.join(["badcjobs", "merge", str(path.parent)])
    # Only the database itself knew where its task files are; beside a folder of them it is the run's own.
    run = str(path.parent) if (path.parent / "tasks").is_dir() else "RUN_FOLDER"
    into = [] if path.name == "job.sqlite" and run != "RUN_FOLDER" else ["-o", str(path)]
    return f"{shlex.join(['mv', str(path), f'{path}.damaged'])} && {shlex.join(['badcjobs', 'merge', run, *into])}"


def _why_not(db: sqlite3.Connection) -> str | None:
    if not is_job_database(db):
        return "this is a task database; merge it first"
    (version,) = db.execute("PRAGMA user_version").fetchone()
    return (
        None if version == SCHEMA_VERSION else f"an earlier version made it (schema {version}); merging takes it over"
    )


def _read(db: sqlite3.Connection) -> JobFacts:
    files = [file for file in read_source_files(db) if file.reason != NOT_OURS]
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
        file_remarks=tuple((file.path, f"{file.status}: {file.reason}") for file in files if file.status != MERGED),
        lossy_files=sum(file.lost_something for file in files),
        file_folders=tuple(sorted({str(Path(file.path).parent) for file in files})),
        conflicts=db.execute("SELECT count(*) FROM rival_chunk WHERE status = 'done'").fetchone()[0],
        last_settings=_last_settings(db),
    )


def _last_settings(db: sqlite3.Connection) -> dict[str, Any]:
    """Return how the task that started last was told to work; run.toml has only what all tasks share."""
    row = db.execute(
        """SELECT value FROM task_meta JOIN task USING (task_id)
           WHERE key = 'settings' ORDER BY started_at_ms DESC LIMIT 1"""
    ).fetchone()
    try:
        return dict(json.loads(row[0])) if row else {}
    except (TypeError, ValueError):
        return {}


def _tasks(db: sqlite3.Connection) -> list[TaskFacts]:
    rows = db.execute(
        """SELECT name, job_id, array_index, restart, node, shard_count, verdict, exit_code, telemetry,
                  coalesce(devices, 0), started_at_ms, last_sign_ms, done, failed, pending, coalesce(audio_s, 0.0)
           FROM task_summary ORDER BY job_id, array_index, restart, node, name"""
    )
    return [TaskFacts(*row) for row in rows]


def _devices(db: sqlite3.Connection) -> list[DeviceFacts]:
    busy: dict[int, dict[int, int]] = {}
    counts = "SELECT device_id, utilization_percent, samples FROM utilization_count"
    for device_id, percent, samples in db.execute(counts):
        busy.setdefault(device_id, {})[percent] = samples
    rows = db.execute(
        """SELECT d.device_id, t.name, t.node, d.device_index, d.uuid, d.token, d.name, d.backend, d.memory_total_bytes,
                  s.samples, s.memory_peak_bytes, s.temperature_max_c, s.power_mean_w, s.energy_j,
                  s.energy_span_s, s.span_s, coalesce(s.gap_s, 0.0), s.energy_integrated_j,
                  s.busy_mean_percent
           FROM device d JOIN task t USING (task_id) JOIN device_summary s USING (device_id)
           ORDER BY t.job_id, t.array_index, t.restart, t.node, t.name, d.device_index, d.token"""
    ).fetchall()
    return [DeviceFacts(*(*row[1:], busy.get(row[0], {}))) for row in rows]
