"""Reads a job database into plain facts, from which the report says what they mean."""

from __future__ import annotations

import json
import shlex
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from typing import Any

from badcjobs.errors import DatabaseProblem
from badcjobs.model import (
    AlertFacts,
    CostFacts,
    DecisionFacts,
    ErrorFacts,
    FailedChunk,
    ForeignProcess,
    Freshness,
    GapFacts,
    JobFacts,
    TaskFacts,
)
from badcjobs.store.connect import complain_about
from badcjobs.store.device_reader import read_devices
from badcjobs.store.job_file import open_job_database
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.last_heard import add_last_heard
from badcjobs.store.live.recording_rows import EACH_ONCE, count_gaps
from badcjobs.store.merging.source_file import MERGED, NOT_OURS, SourceFile, read_source_files
from badcjobs.store.schema import SCHEMA_VERSION

_MOST_FAILED = 1000
_MOST_FOREIGN = 100
_NOT_OURS = ("the file is empty", "file is not a database", "not a badcjobs database")
_CARDS = "count(DISTINCT coalesce(t.node, '') || char(0) || coalesce(d.uuid, d.token))"  # not once for each task
_STILL_OPEN = "a.ended_at_ms IS NULL AND t.ended_at_ms IS NULL AND t.verdict IS NULL"
_ALERT_NODES = "SELECT DISTINCT a.kind, t.node FROM alert a JOIN task t USING (task_id) ORDER BY 1, 2"
_OPEN_ALERTS = f"SELECT a.kind, t.name FROM alert a JOIN task t USING (task_id) WHERE {_STILL_OPEN} ORDER BY 1, 2"


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
            return _read(db, path.parent)
    except sqlite3.Error as error:
        raise DatabaseProblem(f"{path} cannot be read", why=str(error), fix=_way_out(path, str(error))) from error


def _way_out(path: Path, why: str) -> str:
    """Return what to do; a merge adds to a job database and would stumble over its damaged pages again."""
    if why in _NOT_OURS and (job := path.with_name("job.sqlite")) != path and job.is_file():
        return f"the same command with {shlex.quote(str(job))}"
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


def read_freshness(db: sqlite3.Connection, folder: Path) -> tuple[Freshness, tuple[str, ...]]:
    """Return whether there is news since the merge, and where the task databases lay; of other files nothing."""
    if _why_not(db) is not None:
        return Freshness(), ()
    files = _files(db)
    return add_last_heard(db, _tasks(db), files, folder)[1], _folders(files)


def _files(db: sqlite3.Connection) -> tuple[SourceFile, ...]:
    return tuple(file for file in read_source_files(db) if file.reason != NOT_OURS)


def _folders(files: tuple[SourceFile, ...]) -> tuple[str, ...]:
    return tuple(sorted({str(Path(file.path).parent) for file in files}))


def _read(db: sqlite3.Connection, folder: Path) -> JobFacts:
    files = _files(db)
    on_cpu = db.execute(
        """SELECT count(*), total(c.audio_s) FROM attempt a JOIN chunk c USING (recording_id, chunk_id)
           WHERE a.outcome = 'done' AND a.device_id IS NULL"""
    ).fetchone()
    spent_s = dict(db.execute("SELECT state, total(gpu_s) FROM attempt_cost GROUP BY state"))
    tasks, merged = add_last_heard(db, _tasks(db), files, folder)
    return JobFacts(
        tasks=tuple(tasks),
        devices=tuple(read_devices(db)),
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
        file_folders=_folders(files),
        conflicts=db.execute("SELECT count(*) FROM rival_chunk WHERE status = 'done'").fetchone()[0],
        last_settings=_last_settings(db),
        audio_left_s=db.execute("SELECT total(audio_s) FROM chunk WHERE status = 'pending'").fetchone()[0],
        left_of_unknown_length=db.execute(
            "SELECT count(*) FROM chunk WHERE status = 'pending' AND audio_s IS NULL"
        ).fetchone()[0],
        errors=_errors(db),
        alerts=_alerts(db),
        foreign=_foreign(db),
        decisions=_decisions(db),
        cost=_cost(db),
        cpu_tries=on_cpu[0],
        cpu_audio_s=on_cpu[1],
        durations=dict(
            db.execute("SELECT ended_at_ms - started_at_ms, count(*) FROM attempt WHERE outcome = 'done' GROUP BY 1")
        ),
        failed_gpu_s=spent_s.get("failed", 0.0),
        lost_gpu_s=spent_s.get("lost", 0.0),
        again_gpu_s=_again_gpu_s(db),
        alert_nodes=_by_kind(db, _ALERT_NODES),
        open_alerts=_by_kind(db, _OPEN_ALERTS),
        recording_names=names if (names := count_gaps(db, EACH_ONCE)).recordings else None,
        merged=merged,
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
        """SELECT s.name, s.job_id, s.array_index, s.restart, s.node, s.shard_count, s.verdict, s.exit_code,
                  s.telemetry, coalesce(s.devices, 0), s.started_at_ms, s.last_sign_ms, s.done, s.failed, s.pending,
                  coalesce(s.audio_s, 0.0), t.engine, t.workers, t.cpus, t.memory_limit_bytes, t.time_limit_s,
                  t.slurm_state, u.cpu_mean_cores, u.memory_peak_bytes, u.read_mean_bytes_per_s,
                  u.host_cpu_mean_percent, u.host_memory_peak_bytes
           FROM task_summary s JOIN task t USING (task_id) LEFT JOIN task_total u USING (task_id)
           ORDER BY s.job_id, s.array_index, s.restart, s.node, s.name"""
    )
    return [TaskFacts(*row) for row in rows]


def _errors(db: sqlite3.Connection) -> tuple[ErrorFacts, ...]:
    """Return tries that failed; where a worker gave its device up, the chunks in its hands are not charged with it."""
    rows = db.execute(
        f"""SELECT coalesce(a.error_class, 'unknown'), count(*),
                  count(DISTINCT a.recording_id || char(0) || a.chunk_id),
                  count(DISTINCT CASE WHEN c.status = 'done' THEN a.recording_id || char(0) || a.chunk_id END),
                  {_CARDS}, coalesce(max(a.error), '')
           FROM attempt a LEFT JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = a.device_id
           LEFT JOIN chunk c USING (recording_id, chunk_id)
           WHERE a.outcome = 'failed' OR a.outcome = 'lost' AND a.error_class IN ('gpu_lost', 'ran_on_cpu')
           GROUP BY 1 ORDER BY 2 DESC, 1"""
    )
    return tuple(ErrorFacts(*row) for row in rows)


def _alerts(db: sqlite3.Connection) -> tuple[AlertFacts, ...]:
    rows = db.execute(
        f"""SELECT kind, CASE WHEN max(severity = 'critical') THEN 'critical' ELSE max(severity) END, count(*),
                  {_CARDS},
                  max(coalesce(a.ended_at_ms, t.ended_at_ms, l.last_at_ms, a.started_at_ms) - a.started_at_ms) / 1000.0,
                  max(peak), max(threshold),
                  (SELECT b.message FROM alert b WHERE b.kind = a.kind
                   ORDER BY b.severity = 'critical' DESC, b.peak DESC, b.started_at_ms LIMIT 1),
                  count(CASE WHEN {_STILL_OPEN} THEN 1 END)
           FROM alert a JOIN task t USING (task_id) LEFT JOIN device d ON d.device_id = a.device_id
           LEFT JOIN device_total l ON l.device_id = a.device_id
           GROUP BY kind ORDER BY 3 DESC, 1"""
    )
    return tuple(AlertFacts(*row) for row in rows)


def _by_kind(db: sqlite3.Connection, sql: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = defaultdict(list)
    for kind, name in db.execute(sql):
        found[kind].append(name)
    return {kind: tuple(names) for kind, names in found.items()}


def _foreign(db: sqlite3.Connection) -> tuple[ForeignProcess, ...]:
    rows = db.execute(
        """SELECT t.name, t.node, d.device_index, p.pid, p.name, p.user, (p.last_at_ms - p.first_at_ms) / 1000.0,
                  p.memory_peak_bytes
           FROM process p JOIN task t USING (task_id) JOIN device d USING (device_id)
           WHERE p.ours = 0 ORDER BY 7 DESC, 1, 3, 4 LIMIT ?""",
        (_MOST_FOREIGN,),
    )
    return tuple(ForeignProcess(*row) for row in rows)


def _decisions(db: sqlite3.Connection) -> tuple[DecisionFacts, ...]:
    rows = db.execute(
        """SELECT kind, subject, value, reason, count(DISTINCT task_id), max(at_ms) FROM decision
           GROUP BY kind, subject ORDER BY kind, subject"""  # the bare columns are those of the last one
    )
    return tuple(DecisionFacts(*row[:5]) for row in rows)


def _again_gpu_s(db: sqlite3.Connection) -> float:
    """Return what went into tries of chunks that were done before; only chunks with rivals can have any."""
    found: float = db.execute(
        """SELECT total(gpu_s) FROM (
               SELECT c.gpu_s, row_number() OVER (
                   PARTITION BY a.recording_id, a.chunk_id ORDER BY a.ended_at_ms, a.task_id, a.attempt_id) AS number
               FROM (SELECT DISTINCT recording_id, chunk_id FROM rival_chunk WHERE status = 'done')
               JOIN attempt a USING (recording_id, chunk_id) LEFT JOIN attempt_cost c USING (task_id, attempt_id)
               WHERE a.outcome = 'done')
           WHERE number > 1"""
    ).fetchone()[0]
    return found


_DONE_COST = "FROM attempt_cost c JOIN attempt a USING (task_id, attempt_id) WHERE a.outcome = 'done'"


def _cost(db: sqlite3.Connection) -> CostFacts:
    tries, gpu_s, busy_s, energy_tries, energy_j = db.execute(
        f"SELECT count(*), avg(c.gpu_s), avg(c.busy_s), count(c.energy_j), avg(c.energy_j) {_DONE_COST}"
    ).fetchone()
    of_gpu, of_energy = _ranks(db, "gpu_s", tries), _ranks(db, "energy_j", energy_tries)
    return CostFacts(tries, gpu_s, *of_gpu, busy_s, energy_j, *of_energy, energy_tries)


def _ranks(db: sqlite3.Connection, column: str, count: int) -> tuple[float | None, float | None, float | None]:
    """Return p50, p95 (nearest rank) and maximum; SQLite sorts on disk what millions of tries do not hold in memory."""
    wanted = [-(-count // 2), -(-count * 95 // 100), count]
    values = db.execute(f"SELECT c.{column} {_DONE_COST} AND c.{column} IS NOT NULL ORDER BY 1")
    found = {rank: value for rank, (value,) in enumerate(values, start=1) if rank in wanted}
    p50, p95, highest = (found.get(rank) for rank in wanted)
    return p50, p95, highest
