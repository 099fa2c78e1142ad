"""How Slurm says a task ended, from the files that the scripts in slurm/ leave; all of it is optional.

The task epilog writes ``<task>.slurm.json`` beside the task database. The jobcomp hook writes a line per end of a job
or array task to a folder that the cluster shares; the task's own ``meta`` says where. What is not there, or cannot be
read, leaves NULL.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

from badcjobs.store.connect import open_job_database
from badcjobs.store.source_files import HOLDING, SourceFile

SPOOL_KEY = "slurm_spool"  # in a task's meta
SEEN_TO_END = "ENDED"  # the task epilog is not told how
_COLUMNS = "slurm_state, slurm_exit_code, slurm_reason"
_CLOCKS_APART_S = 5
_LONGEST_FILE_BYTES = 64 << 20  # ten thousand array tasks take 2 MB
_UNTOLD = f"""
    SELECT t.task_id, t.job_id, t.array_index, t.started_at_ms, m.value FROM task t
    LEFT JOIN task_meta m ON m.task_id = t.task_id AND m.key = '{SPOOL_KEY}' WHERE t.slurm_state IS NULL"""


SlurmEnd = tuple[str, str | None, str | None, int]  # state, exit code, who says so; and the id of the task


def wanted_file(spool: Path, job_id: str) -> Path:
    """Return the file whose being there asks the jobcomp hook for the ends of a job."""
    return spool / "wanted" / job_id


def has_news(job_database: Path, files: Sequence[SourceFile]) -> bool:
    """Say whether an end has become known since a job database was made."""
    try:
        with closing(open_job_database(job_database)) as db:
            return next(find_ends(db, files, job_database.parent), None) is not None
    except sqlite3.Error:
        return False


def find_ends(db: sqlite3.Connection, files: Sequence[SourceFile], folder: Path) -> Iterator[SlurmEnd]:
    """Yield the ends of tasks that a job database knows none of; ``folder`` is where the files' paths begin."""
    databases = {file.task_id: folder / file.path for file in files if file.status in HOLDING}
    listing, ends_of = cache(_records_in), cache(_read_ends)
    for task_id, job_id, array_index, started_at_ms, spool in db.execute(_UNTOLD).fetchall():
        told: dict[str, Any] = {}  # by the controller
        if spool is not None and str(job_id).isdecimal():
            ends = ends_of(Path(spool), job_id)
            told = _nearest([*ends.get(array_index, []), *ends.get(None, [])], started_at_ms / 1000)
        database, seen = databases.get(task_id), dict[str, Any]()  # by the node, or the emulation
        if database is not None and end_beside(database).name in listing(database.parent):
            seen = next(_read_lines(end_beside(database)), {})
        if told or seen:
            state, code, who = (_text(told, name) or _text(seen, name) for name in ("state", "exit_code", "written_by"))
            yield state or SEEN_TO_END, code, who, task_id


def read_end_beside(database: Path) -> str | None:
    """Return the word of the record beside a task database: FAILED, …; None: there is none, or it says nothing."""
    seen = next(_read_lines(end_beside(database)), None)
    return None if seen is None else _text(seen, "state") or SEEN_TO_END


def end_beside(database: Path) -> Path:
    """Return where the end of a task is written, beside its database."""
    return database.with_suffix(".slurm.json")


def read_ends(db: sqlite3.Connection) -> list[SlurmEnd]:
    """Return what a job database knows already."""
    return db.execute(f"SELECT {_COLUMNS}, task_id FROM task WHERE slurm_state IS NOT NULL").fetchall()


def write_ends(db: sqlite3.Connection, ends: Iterable[SlurmEnd]) -> None:
    """Write ends into the rows that know none."""
    db.executemany(f"UPDATE task SET ({_COLUMNS}) = (?, ?, ?) WHERE task_id = ? AND slurm_state IS NULL", ends)


def _text(record: dict[str, Any], name: str) -> str | None:
    return value if isinstance(value := record.get(name), str) and value else None


def _nearest(ends: Iterable[dict[str, Any]], started_at_s: float) -> dict[str, Any]:
    """Return the end of the run in which a task was started; a requeued job has several, one after the other."""
    fits = [end for end in ends if end["start_s"] - _CLOCKS_APART_S <= started_at_s <= end["end_s"] + _CLOCKS_APART_S]
    # Of two runs in quick succession both may fit: the nearer begin is its own.
    return min(fits, key=lambda end: abs(float(end["start_s"]) - started_at_s), default={})


def _read_ends(spool: Path, job_id: str) -> dict[int | None, list[dict[str, Any]]]:
    """Return the ends of a job by array index; None: it is no array."""
    ends: dict[int | None, list[dict[str, Any]]] = {}
    for line in _read_lines(spool / "ends" / f"{job_id}.jsonl"):
        times = isinstance(line.get("start_s"), int) and isinstance(line.get("end_s"), int)
        if times and isinstance(index := line.get("array_index"), int | None):
            ends.setdefault(index, []).append(line)
    return ends


def _records_in(folder: Path) -> frozenset[str]:
    """List a folder once, however many tasks it has."""
    try:
        return frozenset(path.name for path in folder.iterdir() if path.name.endswith(".slurm.json"))
    except OSError:
        return frozenset()


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects of a file, one per line; anything else is not ours, or half written."""
    try:
        if not path.is_file():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            text = file.read(_LONGEST_FILE_BYTES)
    except OSError:
        return
    for line in text.splitlines():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
