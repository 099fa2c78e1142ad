"""The seam to what runs job arrays, Slurm (``slurm.py``) or this machine (``local.py``); how their tasks have ended."""

from __future__ import annotations

import functools
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted, TaskKey, not_none
from badcjobs.paths import FileVersion, RunFolder, file_version, shell_line
from badcjobs.processes import last_lines
from badcjobs.store.connect import open_sealed
from badcjobs.words import count

POLL_S = 30.0  # squeue loads the controller, which all users share
COMPLETED = "COMPLETED"
FAILED = "FAILED"
CANCELLED = "CANCELLED"
TIMEOUT = "TIMEOUT"
REQUEUED = "REQUEUED"
EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}  # by verdict
_SETTLED = "SELECT count(*) FROM chunk WHERE status IN ('done', 'failed', 'poison')"
_DONE = "SELECT count(*) FROM chunk WHERE status = 'done'"
_ALL_ENDED = "SELECT min(status <> 'pending') FROM chunk"  # NULL: it has not listed its chunks
_MOST_LINES = 10
# All other states are final.
UNFINISHED = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    }
)  # fmt: skip


@dataclass
class TaskOutcome:
    """One array task and how it ended."""

    index: int | None  # None: the job has no array
    state: str | None  # of Slurm, else from the task's verdict; None: not known
    exit_code: int | None
    log: Path
    did_all_chunks: bool = False  # its last attempt has finished all its own chunks
    note: str = ""  # why it could not be started, or more about its end

    @property
    def well(self) -> bool:
        """Whether it completed."""
        return self.state == COMPLETED

    def words(self, job_id: str) -> str:
        """Return the task's name, state and exit code as text."""
        name = f"job {job_id}"
        if self.index is not None:
            name = f"task {job_id}_{self.index}"
        text = f"{name}: {self.state or 'state not known'}"
        if self.exit_code is None:
            return text
        return f"{text}, exit code {self.exit_code}"

    def to_dict(self) -> dict[str, object]:
        """Return it for ``--json``."""
        return {"index": self.index, "state": self.state, "exit_code": self.exit_code, "log": str(self.log)}


class Scheduler(Protocol):
    """Runs job arrays. A method that asks raises Unanswered if there is no answer now."""

    def submit(self, order: ArrayOrder) -> Submitted:
        """Submit an array; this machine runs it to its end."""

    def states(self, job: Submitted) -> JobStates:
        """Return the states of a job; an index that is missing has ended."""

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> Ends:
        """Return how each task has ended; ``states``: what was seen of the job."""

    def cancel_line(self, job: Submitted) -> str:
        """Return the command that ends a job, to paste."""


def has_ended(states: JobStates) -> bool:
    """Say whether all tasks and the merge job have ended."""
    return UNFINISHED.isdisjoint([*states.array.values(), states.merge])


# --- how the tasks of a job have ended --------------------------------------------------------------------------------

Ends = Sequence[TaskOutcome]


def did_all_chunks(run: RunFolder, job_id: str, index: int | None) -> bool:
    """Say whether the last attempt of a task that left a database has finished all its own chunks."""
    databases = list(run.tasks.glob(f"{job_id}_{index or 0}.r*.sqlite"))
    last = max((key.restart for key in not_none(TaskKey.parse(path.stem) for path in databases)), default=0)
    ended = [read_value(path, _ALL_ENDED) for path in databases if f".r{last}." in path.name]
    return bool(ended) and all(ended)


def made_progress(tasks: Path, attempt: str) -> bool | None:
    """Return whether an attempt (4821_7.r0) finished any chunk; None: it left no readable database."""
    settled = not_none(read_value(path, _SETTLED) for path in tasks.glob(f"{attempt}.*.sqlite"))
    return any(settled) if settled else None


def read_value(database: Path, question: str) -> int | None:
    """Return the number that a query asks for; None: there is none, or the database cannot be read."""
    try:
        with closing(open_sealed(database)) as db:
            value: int | None = db.execute(question).fetchone()[0]
            return value
    except sqlite3.Error:
        return None


def count_done(databases: Iterable[Path]) -> int:
    """Return how many chunks are done in published task databases; reads only those that have changed."""
    return sum(_count_done(path, file_version(path)) for path in databases)


@functools.lru_cache(maxsize=20_000)
def _count_done(database: Path, version: FileVersion | None) -> int:
    return read_value(database, _DONE) or 0


def verdict_of(ends: Ends) -> str:
    """Return the verdict on a job from its tasks alone; one that did all its chunks counts as done."""
    left = [end for end in ends if not (end.well or end.did_all_chunks)]
    if not left:
        return "done"
    for end in left:
        if end.state not in (COMPLETED, FAILED) or end.exit_code == ExitCode.RUN_ME_AGAIN:
            return "stopped"
    return "failed"


def headline(job_id: str, verdict: str, ends: Ends) -> str | None:
    """Return a headline if every chunk of a run is done but not every task completed; None: all completed.

    ``verdict`` is the verdict on the job; an earlier job may have done the chunks.
    """
    if verdict != "done":
        return f"job {job_id} did not complete, but every chunk is done:"
    bad = sum(not end.well for end in ends)
    if not bad:
        return None
    return f"every chunk is done; after that {count(bad, 'task')} failed:"


def end_lines(job_id: str, ends: Ends) -> list[str]:
    """Return a line for each task that did not complete, with its log."""
    bad = [end for end in ends if not end.well]
    lines = []
    for end in bad[:_MOST_LINES]:
        log = f"less {shell_line(end.log)}" if end.log.exists() else "no log"
        lines.append(f"{end.words(job_id)}; {log}")
    if len(bad) > _MOST_LINES:
        lines.append(f"… and {len(bad) - _MOST_LINES:,} more (--json has them all)")
    return lines


def no_task_started(job_id: str, ends: Ends, *, then: str) -> NotHere:
    """Return the error for a job whose tasks left no database, with the log of its first failed task.

    ``then``: what to do after reading the log.
    """
    end = next((end for end in ends if not end.well), ends[0])
    if end.log.exists():
        place = end.log
        detail = last_lines(end.log) or "its log is empty"
    else:
        place = end.log.parent
        detail = end.note or "there is no log; the task may have been cancelled before it started"
    return NotHere(
        f"no task of job {job_id} could start",
        why=f"{end.words(job_id)}\n{detail}",
        fix=f"less {shell_line(place)}   (then {then})",
    )
