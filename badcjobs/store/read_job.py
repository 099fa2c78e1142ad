"""Reads a complete job database into the read model."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Collection, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from pathlib import Path, PurePath

from badcjobs.errors import DatabaseProblem
from badcjobs.model import TaskKey, is_silent, not_none
from badcjobs.paths import shell_line
from badcjobs.store.connect import (
    grouped,
    is_job_database,
    open_sealed,
    read_as,
    reading,
    rows_by_name,
)
from badcjobs.store.job_figures import TOPICS
from badcjobs.store.read_model import (
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
from badcjobs.store.read_tasks import (
    DURATIONS,
    STILL_OPEN,
    parse_settings,
    read_devices,
    read_task_rows,
    with_contact,
)
from badcjobs.store.source_files import HOLDING, NOT_OURS, SourceFile, read_source_files
from badcjobs.store.task_writer import count_gaps, count_places

_MOST_FAILED = 1000
_MOST_FOREIGN = 100
NO_DATABASE = ("the file is empty", "file is not a database", "not a badcjobs database")
_CARDS = "count(DISTINCT coalesce(t.node, '') || char(0) || coalesce(d.uuid, d.token))"  # each physical device once
_ALERT_NODES = "SELECT DISTINCT a.kind, t.node FROM alert a JOIN task t USING (task_id) ORDER BY 1, 2"


def read_job(path: Path) -> JobFacts:
    """Return everything that the summary needs from a job database."""
    with reading(path, lambda why: _suggest_fix(path, why)) as db:
        if not is_job_database(db):
            raise sqlite3.DatabaseError("this is a task database; merge it first")
        return _read(db, path)


def _suggest_fix(path: Path, why: str) -> str:
    """Return the command to paste; a damaged file is moved away first, because a merge would read it again."""
    if path.suffix in (".csv", ".jsonl"):
        return f"{shell_line('badcjobs', 'record', '--out', path.with_suffix('.sqlite'))} …   (not as text)"
    if why in NO_DATABASE and (job := path.with_name("job.sqlite")) != path and job.is_file():
        return f"the same command with {shell_line(job)}"
    if why in NO_DATABASE and not (path.parent / "tasks").is_dir():
        return "badcjobs report RUN_FOLDER   (the folder given as --out to badcjobs run)"
    if "malformed" not in why and "damaged" not in why:
        return shell_line("badcjobs", "merge", path.parent)
    # The paths of the task databases are in the damaged file; with a folder ``tasks`` next to it, they are there.
    run = str(path.parent) if (path.parent / "tasks").is_dir() else "RUN_FOLDER"
    into = [] if path.name == "job.sqlite" and run != "RUN_FOLDER" else ["-o", str(path)]
    return f"{shell_line('mv', path, f'{path}.damaged')} && {shell_line('badcjobs', 'merge', run, *into)}"


def read_outline(db: sqlite3.Connection, database: Path) -> JobFacts:
    """Return only the tasks, the states of the chunks and the changes since the merge; also for a task database."""
    files = _files(db) if is_job_database(db) else ()
    tasks, merged = add_last_contact(db, read_task_rows(db), files, database) if files else ([], Freshness())
    chunks = dict(db.execute("SELECT status, count(*) FROM chunk GROUP BY status"))
    return JobFacts(tuple(tasks), chunks=chunks, file_folders=_folders(files), merged=merged)


def _files(db: sqlite3.Connection) -> tuple[SourceFile, ...]:
    return tuple(file for file in read_source_files(db) if file.reason != NOT_OURS)


def _folders(files: tuple[SourceFile, ...]) -> tuple[str, ...]:
    return tuple(sorted({str(Path(file.path).parent) for file in files}))


def _read(db: sqlite3.Connection, database: Path) -> JobFacts:
    files = _files(db)
    tasks, merged = add_last_contact(db, read_task_rows(db), files, database)
    # run.toml has only the settings that all tasks share.
    last_settings = max(((task.started_at_ms, task.settings) for task in tasks if task.settings), default=(0, ""))
    figures = {topic: dict(db.execute(_FIGURES, (topic,))) for topic in TOPICS}
    return JobFacts(
        **figures["totals"],
        tasks=tuple(tasks),
        devices=tuple(read_devices(db)),
        chunks=dict(db.execute("SELECT status, count(*) FROM chunk GROUP BY status")),
        failed=read_as(db, FailedChunk, _FAILED),
        labels=tuple(db.execute("SELECT * FROM label_total ORDER BY detections DESC, label")),
        gaps=read_as(db, GapFacts, _GAPS),
        file_remarks=tuple((file.path, f"{file.status}: {file.reason}") for file in files if file.status != "merged"),
        lossy_paths=tuple(file.path for file in files if file.lost_something),
        file_folders=_folders(files),
        last_settings=parse_settings(last_settings[1]),
        errors=read_as(db, ErrorFacts, _ERRORS),
        alerts=read_as(db, AlertFacts, _ALERTS),
        foreign=read_as(db, ForeignProcess, _FOREIGN),
        decisions=_read_decisions(db),
        cost=CostFacts(**figures["cost"]),
        durations=dict(db.execute(DURATIONS)),
        alert_nodes={kind: tuple(nodes) for kind, nodes in grouped(db.execute(_ALERT_NODES)).items()},
        recording_names=names if (names := count_gaps(db)).recordings else None,
        places=count_places(db),
        merged=merged,
    )


def _read_decisions(db: sqlite3.Connection) -> tuple[DecisionFacts, ...]:
    rows = rows_by_name(db, _DECISIONS)
    return tuple(DecisionFacts(**{**row, "figures": parse_settings(row["figures"])}) for row in rows)


_FIGURES = "SELECT name, value FROM job_figure WHERE topic = ?"
_FAILED = f"""
    SELECT recording_id, chunk_id, status, attempts,
           coalesce(error_class, '') AS error_class,
           coalesce(error, '') AS error
    FROM chunk WHERE status IN ('failed', 'poison') ORDER BY recording_id, chunk_id LIMIT {_MOST_FAILED}"""
_GAPS = """
    SELECT reason, metric, count(*) AS gaps,
           sum(to_ms - from_ms) / 1000.0 AS seconds,
           count(DISTINCT task_id) AS tasks
    FROM gap GROUP BY reason, metric ORDER BY metric IS NOT NULL, seconds DESC, reason, metric"""
# When a worker gives up its device, its tries have the outcome lost, so that no chunk fails; they are errors, too.
_ERRORS = f"""
    SELECT coalesce(a.error_class, 'unknown') AS error_class,
           count(*) AS tries,
           count(DISTINCT a.recording_id || char(0) || a.chunk_id) AS chunks,
           count(DISTINCT CASE WHEN c.status = 'done' THEN a.recording_id || char(0) || a.chunk_id END) AS rescued,
           {_CARDS} AS devices, coalesce(max(a.error), '') AS example
    FROM attempt a LEFT JOIN task t USING (task_id)
    LEFT JOIN device d ON d.device_id = a.device_id
    LEFT JOIN chunk c USING (recording_id, chunk_id)
    WHERE a.outcome = 'failed' OR a.outcome = 'lost'
    AND a.error_class IN ('gpu_lost', 'ran_on_cpu')
    GROUP BY 1 ORDER BY 2 DESC, 1"""
_ALERTS = f"""
    SELECT kind,
           iif(max(severity = 'critical'), 'critical', max(severity)) AS severity,
           count(*) AS alerts, {_CARDS} AS devices,
           max(max(coalesce(a.ended_at_ms, t.ended_at_ms, l.last_at_ms, 0) - a.started_at_ms, 0)) / 1000.0 AS longest_s,
           max(peak) AS peak, max(threshold) AS threshold,
           (SELECT b.message FROM alert b WHERE b.kind = a.kind
            ORDER BY b.severity = 'critical' DESC, b.peak DESC,
            b.started_at_ms LIMIT 1) AS example,
           count(CASE WHEN {STILL_OPEN} THEN 1 END) AS still_open
    FROM alert a JOIN task t USING (task_id)
    LEFT JOIN device d ON d.device_id = a.device_id
    LEFT JOIN device_total l ON l.device_id = a.device_id
    GROUP BY kind ORDER BY 3 DESC, 1"""
_FOREIGN = f"""
    SELECT t.name AS task, t.node, d.device_index, p.pid, p.name,
           p.user,
           (p.last_at_ms - p.first_at_ms) / 1000.0 AS seconds,
           p.memory_peak_bytes
    FROM process p JOIN task t USING (task_id)
    JOIN device d USING (device_id)
    WHERE p.ours = 0 ORDER BY 7 DESC, 1, 3, 4 LIMIT {_MOST_FOREIGN}"""
# With max(at_ms), SQLite takes the bare columns from the row of the last decision. The topic stands before the dot.
# Retries may be many, and are read from the attempts.
_DECISIONS = """
    SELECT code, subject, figures, reason, tasks FROM (
        SELECT code, subject, figures, reason,
               count(DISTINCT task_id) AS tasks, max(at_ms),
               substr(code, 1, instr(code || '.', '.') - 1) AS topic
        FROM decision WHERE code NOT GLOB 'retry.*' GROUP BY topic, subject)
    ORDER BY topic, subject"""


# --- changes of the merged files since the merge, by their times and sizes --------------------------------------------


def add_last_contact(
    db: sqlite3.Connection, tasks: Sequence[TaskFacts], files: tuple[SourceFile, ...], database: Path
) -> tuple[list[TaskFacts], Freshness]:
    """Return the tasks, with the time of the last contact for those that had not ended, and what has changed since.

    The data of a changed or missing file is not read: its task is shown as of the merge, and the file is counted, as
    are files that were never merged. The paths of the files are relative to the folder of the ``database``.
    """
    holders = {file.task_id: file for file in files if file.status in HOLDING and file.mtime_ns is not None}
    as_of_ms = max(((file.mtime_ns or 0) // 10**6 for file in holders.values()), default=None)
    merged_at_ms = database.stat().st_mtime_ns // 10**6
    listed = {path for (path,) in db.execute("SELECT path FROM source_file")}
    statuses, closed = _list(database.parent, listed)
    new = not_none(map(_task_of, statuses.keys() - listed))
    shown = []
    followed = set[str]()  # the files of tasks that had not ended
    gone = 0
    for task in tasks:
        file = holders.get(task.task_id)
        if task.verdict is not None or file is None:
            shown.append(task)
            continue
        followed.add(file.path)
        status = statuses.get(file.path)
        at_merge = with_contact(task, file.size_bytes or 0, file.mtime_ns or 0)
        now_ms = as_of_ms if status is None else merged_at_ms  # other tasks published long after a silent one
        was_silent = is_silent(at_merge.heard_at_ms, at_merge.silent_after_s, now_ms)
        if status is None:
            shown.append(at_merge if was_silent else task)
            gone += not was_silent
            continue
        is_copy = was_silent and status.st_size == file.size_bytes
        has_changed = not (is_copy or file.is_same(status))
        if has_changed and not was_silent:
            at_merge = with_contact(task, status.st_size, status.st_mtime_ns)
        shown.append(replace(at_merge, changed=has_changed))  # of a silent one, a later attempt may have published it

    changed = sum(task.changed for task in shown)
    for file in files:
        status = None if file.path in followed else statuses.get(file.path)
        if status is not None and file.mtime_ns is not None:  # with a new time but the same size it is a copy
            changed += status.st_size != file.size_bytes
    indices = {task.array_index for task in new if not task.job_id.startswith("local")}
    news = Freshness(as_of_ms, changed, gone, new=len(new), new_indices=tuple(sorted(indices)), closed=closed)
    return shown, news


def _list(folder: Path, merged: Collection[str]) -> tuple[dict[str, os.stat_result], str | None]:
    """Return the files in the folders of the merged files by their path as in ``source_file``.

    Also return a message about a folder that exists but cannot be listed.
    """
    statuses = {}
    closed = None
    for parent in {str(PurePath(path).parent) for path in merged}:
        try:
            with os.scandir(folder / parent) as entries:
                for entry in entries:
                    name = entry.name.encode("utf-8", "backslashreplace").decode()  # as in source_file
                    path = name if parent == "." else f"{parent}/{name}"
                    is_known = path in merged or _task_of(path) is not None
                    with suppress(OSError):  # just removed, or a link that cannot be followed
                        if is_known and entry.is_file():
                            statuses[path] = entry.stat()
        except (FileNotFoundError, NotADirectoryError, ValueError):
            continue  # its files count as gone
        except OSError as error:
            closed = f"{folder / parent} cannot be read: {error.strerror}"
    return statuses, closed


def _task_of(path: str) -> TaskKey | None:
    """Return the task of a database from the names of the file and its folder; None: not a task database."""
    pure = PurePath(path)
    if pure.suffix != ".sqlite" or pure.parent.name != "tasks" or pure.name.startswith("."):
        return None
    return TaskKey.parse(pure.stem)


# --- for later runs and for the comparison with the sources -----------------------------------------------------------


def merged_files(job_database: Path) -> set[str]:
    """Return the names of the task databases that job.sqlite contains; empty if it cannot be read.

    Tasks that were still running at the merge are left out: they may have done more since.
    """
    sql = """SELECT path FROM source_file JOIN task USING (task_id)
             WHERE status != 'skipped' AND verdict IS NOT NULL"""
    try:
        with reading(job_database) as db:
            return {Path(path).name for (path,) in db.execute(sql)}
    except DatabaseProblem:
        return set()


def known_lengths(job_database: Path) -> dict[str, float]:
    """Return the length in seconds of the recordings whose headers the tasks have read, by recording_id.

    Recordings with two different lengths are left out.
    """
    sql = """SELECT recording_id, min(duration_s) FROM task_recording WHERE duration_s IS NOT NULL
             GROUP BY recording_id HAVING min(duration_s) = max(duration_s)"""
    with closing(open_sealed(job_database)) as db:
        return dict(db.execute(sql))
