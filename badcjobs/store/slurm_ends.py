"""Reads how tasks ended according to Slurm, from files that the scripts in slurm/ write; all of them are optional.

The task epilog writes ``<task>.slurm.json`` next to the task database. The jobcomp hook writes one line for each end of
a job or array task to a shared folder, which is named in the task's ``meta``. A missing or unreadable file leaves NULL.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.small_files import parse_json, read_small, set_aside
from badcjobs.store.connect import UNREADABLE, open_sealed
from badcjobs.store.source_files import HOLDING, SourceFile

SPOOL_KEY = "slurm_spool"  # in a task's meta
SEEN_TO_END = "ENDED"  # Slurm does not give the task epilog a state
_COLUMNS = "slurm_state, slurm_exit_code, slurm_reason"
_SLACK_S = 5  # the clocks of controller and node may differ
_LONGEST_FILE_BYTES = 64 << 20  # ten thousand array tasks take 2 MB
_WITHOUT_END = f"""
    SELECT t.task_id, t.job_id, t.array_index, t.started_at_ms,
           m.value FROM task t
    LEFT JOIN task_meta m ON m.task_id = t.task_id AND m.key = '{SPOOL_KEY}' WHERE t.slurm_state IS NULL"""


class SlurmEnd(NamedTuple):
    """How a task ended according to Slurm."""

    state: str
    exit_code: str | None
    written_by: str | None  # the hook
    task_id: int


def has_new_ends(job_database: Path, files: Sequence[SourceFile]) -> bool:
    """Say whether there is an end that a job database does not have yet."""
    with suppress(*UNREADABLE), closing(open_sealed(job_database)) as db:
        return next(find_ends(db, files, job_database.parent), None) is not None
    return False


def find_ends(db: sqlite3.Connection, files: Sequence[SourceFile], folder: Path) -> Iterator[SlurmEnd]:
    """Yield the ends that a job database does not have yet; the paths of the files are relative to ``folder``."""
    databases = {file.task_id: folder / file.path for file in files if file.status in HOLDING}
    ends_of = cache(_read_ends)
    for task_id, job_id, array_index, started_at_ms, spool in db.execute(_WITHOUT_END).fetchall():
        from_controller = {}
        if spool is not None and str(job_id).isdecimal():
            ends = ends_of(Path(spool), job_id)
            runs = [*ends.get(array_index, []), *ends.get(None, [])]
            from_controller = _choose_run(runs, started_at_ms / 1000)
        from_node = {}
        if task_id in databases:  # or from the emulation
            from_node = next(_read_lines(end_beside(databases[task_id])), {})
        if from_controller or from_node:
            both = {**_texts(from_node), **_texts(from_controller)}
            state = both.get("state", SEEN_TO_END)
            yield SlurmEnd(state, both.get("exit_code"), both.get("written_by"), task_id)


def _choose_run(runs: Sequence[dict[str, Any]], at_s: float) -> dict[str, Any]:
    """Return the run of a task that started at this time; empty: none.

    A requeued task has several runs; of two that fit the nearer start counts.
    """
    fitting = [run for run in runs if run["start_s"] - _SLACK_S <= at_s <= run["end_s"] + _SLACK_S]
    return min(fitting, key=lambda run: abs(float(run["start_s"]) - at_s), default={})


def _texts(record: dict[str, Any]) -> dict[str, str]:
    """Return what a record says about the end, without what is empty or no text."""
    texts = {name: record.get(name) for name in ("state", "exit_code", "written_by")}
    return {name: text for name, text in texts.items() if isinstance(text, str) and text}


def read_end_beside(database: Path) -> str | None:
    """Return the Slurm state in the record next to a task database: FAILED, …; None: there is no record."""
    record = next(_read_lines(end_beside(database)), None)
    if record is None:
        return None
    return _texts(record).get("state", SEEN_TO_END)


def end_beside(database: Path) -> Path:
    """Return the path of the record of a task's end, next to its database."""
    return database.with_suffix(".slurm.json")


def read_ends(db: sqlite3.Connection) -> list[SlurmEnd]:
    """Return the ends that a job database has already."""
    rows = db.execute(f"SELECT {_COLUMNS}, task_id FROM task WHERE slurm_state IS NOT NULL")
    return [SlurmEnd(*row) for row in rows]


def write_ends(db: sqlite3.Connection, ends: Iterable[SlurmEnd]) -> None:
    """Write ends into the rows that have none."""
    db.executemany(f"UPDATE task SET ({_COLUMNS}) = (?, ?, ?) WHERE task_id = ? AND slurm_state IS NULL", ends)


def _read_ends(spool: Path, job_id: str) -> dict[int | None, list[dict[str, Any]]]:
    """Return the ends of a job by array index; the index is None for a job that is not an array."""
    ends: dict[int | None, list[dict[str, Any]]] = {}
    for line in _read_lines(spool / "ends" / f"{job_id}.jsonl"):
        index = line.get("array_index")
        has_times = isinstance(line.get("start_s"), int) and isinstance(line.get("end_s"), int)
        if has_times and isinstance(index, int | None):
            ends.setdefault(index, []).append(line)
    return ends


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; skip other lines, which are incomplete or not ours."""
    try:
        lines = read_small(path, _LONGEST_FILE_BYTES).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return
    except OSError as error:
        set_aside(path, str(error))
        return
    for number, line in enumerate(lines, start=1):
        try:
            yield {**parse_json(line)}
        except (TypeError, ValueError) as error:
            set_aside(path, f"line {number}: {error}")
