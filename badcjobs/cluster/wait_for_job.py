"""Wait for a submitted array and decide on its verdict, from its chunks and from how its tasks ended.

The end of a task comes from Slurm, else from the databases it has left: squeue lists a task only for some minutes
after its end, and many sites have no accounting. The job database also has what the hooks in slurm/ wrote, if a site
has installed them.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster.slurm import UNFINISHED, has_ended, query_ends, query_states
from badcjobs.cluster.submit import Progress, SubmitResult
from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import JobStates, Queue, Submitted, TaskKey
from badcjobs.paths import RunFolder, shell_line
from badcjobs.processes import last_lines
from badcjobs.report.job import finish_job, summarize_database
from badcjobs.report.summary import Summary
from badcjobs.report.words import count
from badcjobs.seams import Clock, Unanswered
from badcjobs.store.connect import open_job_database, open_uri, read_only_uri
from badcjobs.store.merge import MergeOrder

log = logging.getLogger(__name__)

Tell = Callable[[str], None]  # prints a line
_BAR = 20
EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}  # by verdict
_COMPLETED, _FAILED = "COMPLETED", "FAILED"
_BY_VERDICT = {"done": _COMPLETED, "failed": _FAILED, "stopped": "STOPPED", "killed": "KILLED"}
_UNDONE = "SELECT (SELECT verdict FROM task), count(*), sum(status NOT IN ('done', 'skipped')) FROM chunk"
_SETTLED = "SELECT count(*) FROM chunk WHERE status IN ('done', 'failed', 'poison')"
_DONE = "SELECT count(*) FROM chunk WHERE status = 'done'"
_MOST_LINES = 10
_BY_TASK = "SELECT array_index, verdict, exit_code, slurm_state FROM task WHERE job_id = ? ORDER BY started_at_ms"


def follow(result: SubmitResult, clock: Clock, poll_s: float, tell: Tell) -> JobStates:
    """Wait for the end of array and merge job, asking Slurm every ``poll_s``; ``tell`` gets one line for each change.

    Returns the final states of all tasks that were seen, also of those that Slurm no longer lists.
    """
    # If the job does chunks of earlier jobs again, only its own databases count.
    names = f"{result.job.job_id}_*.sqlite" if result.plan.redo_all else "[!.]*.sqlite"
    tasks, of = RunFolder(result.plan.order.out).tasks, result.plan.chunks
    known: dict[Path, tuple[tuple[int, int], int]] = {}
    seen: dict[int, str] = {}
    codes: dict[int, int] = {}
    before: JobStates | None = None
    silent = False
    while before is None or not has_ended(before):
        if before is not None or silent:
            clock.sleep(poll_s)
        try:
            states, silent = query_states(result.job), False
        except Unanswered as error:
            if not silent:  # a controller that restarts does not answer for minutes
                log.warning("slurm does not answer; trying again: %s", error)
            silent = True
            continue
        if states != before:
            seen.update(states.array)
            codes.update(states.exit_codes)
            tell(progress_line(result.job, states, min(count_done(tasks.glob(names), known), of), of))
        before = states
    ended = {index: state for index, state in seen.items() if state not in UNFINISHED}
    return replace(before, array=ended, exit_codes=codes)


def evaluate_job(
    result: SubmitResult, states: JobStates, clock: Clock, progress: Progress
) -> tuple[Summary, str, tuple[TaskOutcome, ...]]:
    """Return the summary of the run, the verdict on this job and the ends of its tasks; merge if no merge job has."""
    folder, logs = RunFolder(result.plan.order.out), result.plan.order.logs
    if not any(folder.tasks.glob("*.sqlite")) and not folder.job_database.exists():
        ends = find_ends(result.job, states, folder, logs)
        raise no_task_started(result.job.job_id, ends, then="the same command with --again")
    if states.merge == "COMPLETED" and folder.job_database.exists():
        summary = summarize_database(folder.job_database, progress, clock.now_ms(), lambda run, job_ids: Queue())
    else:
        order = MergeOrder([folder.path], folder.job_database)
        summary = finish_job(order, clock, reading_source=progress, ask_queue=lambda run, job_ids: Queue()).summary
    ends = find_ends(result.job, states, folder, logs)
    # An earlier job may have done every chunk, although no task of this job started.
    verdict = verdict_of(ends) if summary.verdict == "done" else summary.verdict
    return summary, verdict, ends


def progress_line(job: Submitted, states: JobStates, done: int, of: int) -> str:
    """Return one line: the job, a bar of its chunks, and the number of tasks in each state."""
    counts = Counter(states.array.get(index, "ENDED") for index in job.indices)
    why = f" ({', '.join(states.why_pending)})" if states.why_pending else ""
    # Unfinished states first; always in the same order.
    order = sorted(counts, key=lambda s: (s not in UNFINISHED, s))
    words = [f"{counts[state]} {state.lower()}{why if state == 'PENDING' else ''}" for state in order]
    why_merge = f" ({states.why_merge_pending})" if states.why_merge_pending else ""
    merging = f"; merge {states.merge.lower()}{why_merge}" if states.merge else ""
    full = _BAR if done >= of else _BAR * done // of
    bar = "#" * full + "-" * (_BAR - full)
    return f"{job.job_id} [{bar}] {done:,} of {of:,} chunks; tasks: {', '.join(words)}{merging}"


def count_done(files: Iterable[Path], known: dict[Path, tuple[tuple[int, int], int]]) -> int:
    """Count the done chunks in published task databases; read only those that have changed since ``known``."""
    for path in files:
        with suppress(OSError):  # it is being replaced; the next call counts it
            mark = (path.stat().st_mtime_ns, path.stat().st_size)
            if known.get(path, (None, 0))[0] != mark and (row := read_row(path, _DONE)):
                known[path] = mark, row[0]
    return sum(done for _, done in known.values())


@dataclass(slots=True)
class TaskOutcome:
    """One array task and how it ended."""

    index: int | None  # None: the job has no array
    state: str | None  # of Slurm, else from the task's verdict; None: not known
    exit_code: int | None
    log: Path
    worked: bool = False  # all its chunks were finished, however it ended
    note: str = ""  # why it could not be started, or more about its end

    @property
    def well(self) -> bool:
        """Whether it completed."""
        return self.state == _COMPLETED

    def words(self, job_id: str) -> str:
        """Return the task's name, state and exit code as text."""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        if self.state is None:
            return f"array index {self.index}: state not known{code}"
        name = f"job {job_id}" if self.index is None else f"task {job_id}_{self.index}"
        return f"{name}: {self.state}{code}"

    def to_dict(self) -> dict[str, object]:
        """Return it for ``--json``."""
        return {"index": self.index, "state": self.state, "exit_code": self.exit_code, "log": str(self.log)}


Ends = Sequence[TaskOutcome]


def find_ends(job: Submitted, states: JobStates, run: RunFolder, logs: Path) -> tuple[TaskOutcome, ...]:
    """Return how each task ended; sacct is called only if squeue does not list all tasks."""
    final = {index: state for index, state in states.array.items() if state not in UNFINISHED}
    if not all(index in final for index in job.indices):
        final = {**{i: state for i, state in query_ends(job).items() if state not in UNFINISHED}, **final}
    left: dict[int, tuple[str | None, int | None]] = {}  # state and exit code of each task's last attempt
    if run.job_database.exists():
        with suppress(sqlite3.Error), closing(open_job_database(run.job_database)) as db:  # else only Slurm's count
            for index, verdict, exit_code, slurm_state in db.execute(_BY_TASK, (job.job_id,)):
                known = None if slurm_state == "ENDED" else slurm_state
                left[index] = known or _BY_VERDICT.get(verdict), exit_code
    ends = []
    for index in job.indices:
        state, exit_code = left.get(index, (None, None))
        state = final.get(index) or state
        worked = state != _COMPLETED and finished_all_chunks(run, job.job_id, index)
        if state == _FAILED and exit_code is None:  # it failed before it could write its own
            exit_code = states.exit_codes.get(index)
        ends.append(TaskOutcome(index, state, exit_code, logs / f"{job.job_id}_{index}_0_log.out", worked))
    return tuple(ends)


def finished_all_chunks(run: RunFolder, job_id: str, index: int | None) -> bool:
    """Say whether the databases of a task's last attempt show that all its chunks are finished."""
    found = [(TaskKey.parse(path.stem), path) for path in run.tasks.glob(f"{job_id}_{index or 0}.r*.sqlite")]
    last = max((key.restart for key, _ in found if key is not None), default=None)
    databases = [path for key, path in found if key is not None and key.restart == last]
    rows = [read_row(path, _UNDONE) or (None, 0, 0) for path in databases]
    return bool(rows) and all(verdict == "done" or (chunks and not undone) for verdict, chunks, undone in rows)


def made_progress(tasks: Path, attempt: str) -> bool | None:
    """Return whether an attempt (4821_7.r0) finished any chunk; None: it left no readable database."""
    known = [row[0] for path in tasks.glob(f"{attempt}.*.sqlite") if (row := read_row(path, _SETTLED))]
    return any(known) if known else None


def read_row(database: Path, question: str, *, live: bool = False) -> tuple[Any, ...] | None:
    """Return the single row of a query; None: the database cannot be read. ``live``: a task is writing it."""
    try:
        with closing(open_uri(read_only_uri(database, sealed=not live))) as db:
            row: tuple[Any, ...] | None = db.execute(question).fetchone()
            return row
    except sqlite3.Error:
        return None


def verdict_of(ends: Ends) -> str:
    """Return the verdict from the tasks alone; a task that finished all its chunks counts as done, however it ended."""
    if all(end.well or end.worked for end in ends):
        return "done"
    failed = all(end.state in (_COMPLETED, _FAILED) and end.exit_code != ExitCode.RUN_ME_AGAIN for end in ends)
    return "failed" if failed else "stopped"


def headline(job_id: str, verdict: str, ends: Ends) -> str | None:
    """Return a headline if every chunk of a run is done but not every task completed; None: all completed.

    ``verdict`` is the verdict on the job; an earlier job may have done the chunks.
    """
    bad = [end for end in ends if not end.well]
    if verdict != "done":
        return f"job {job_id} did not complete, but every chunk is done:"
    after = "their" if len(bad) > 1 else "its"
    return f"every chunk is done; {count(len(bad), 'task')} failed after {after} last chunk:" if bad else None


def end_lines(job_id: str, ends: Ends) -> list[str]:
    """Return a line for each task that did not complete, with its log."""
    bad = [end for end in ends if not end.well]
    lines = []
    for end in bad[:_MOST_LINES]:
        where = f"less {shell_line(end.log)}" if end.log.exists() else "no log"
        lines.append(f"{end.words(job_id)}; {where}")
    return lines + ([f"… and {len(bad) - _MOST_LINES:,} more (--json has them all)"] if len(bad) > _MOST_LINES else [])


def no_task_started(job_id: str, ends: Ends, *, then: str) -> NotHere:
    """Return the error for a job whose tasks left no database, with the log of its first failed task.

    ``then``: what to do after reading the log.
    """
    end = next((end for end in ends if not end.well), ends[0])
    said = last_lines(end.log) if end.log.exists() else None
    lacking = end.note or "there is no log; the task may have been cancelled before it started"
    return NotHere(
        f"no task of job {job_id} could start",
        why=f"{end.words(job_id)}\n{lacking if said is None else said or 'its log is empty'}",
        fix=f"less {shell_line(end.log if said is not None else end.log.parent)}   (then {then})",
    )
