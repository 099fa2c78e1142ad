"""Wait for a submitted array, and judge it: by what the chunks say, and by how its tasks have ended.

Of a job of Slurm the tasks have ended as Slurm says, else as what they have left shows: squeue forgets a task some
minutes after its end, and many sites have no accounting. Then there is the job database, with the words of the hooks in
slurm/ where they are installed.
"""

from __future__ import annotations

import logging
import shlex
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster.slurm import UNFINISHED, has_ended, query_ends
from badcjobs.cluster.submit import Progress, SubmitResult
from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import JobStates, Submitted, TaskKey
from badcjobs.paths import RunFolder
from badcjobs.report.job import finish_job, summarize_database
from badcjobs.report.summary import Summary
from badcjobs.report.words import count
from badcjobs.seams import Clock, Scheduler, Unanswered
from badcjobs.store.connect import open_job_database, open_sealed
from badcjobs.store.merge import MergeOrder

log = logging.getLogger(__name__)

_BAR = 20
EXIT_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}  # by verdict
_COMPLETED, _FAILED = "COMPLETED", "FAILED"
_BY_VERDICT = {"done": _COMPLETED, "failed": _FAILED, "stopped": "STOPPED", "killed": "KILLED"}
_UNDONE = "SELECT (SELECT verdict FROM task), count(*), sum(status NOT IN ('done', 'skipped')) FROM chunk"
_SETTLED = "SELECT count(*) FROM chunk WHERE status IN ('done', 'failed', 'poison')"
_DONE = "SELECT count(*) FROM chunk WHERE status = 'done'"
_MOST_LINES, _MOST_OF_A_LOG = 10, 2000
_BY_TASK = "SELECT array_index, verdict, exit_code, slurm_state FROM task WHERE job_id = ? ORDER BY started_at_ms"


def follow(result: SubmitResult, scheduler: Scheduler, clock: Clock, tell: Callable[[str], None]) -> JobStates:
    """Wait for the end of array and merge job; ``tell`` gets one line for each change.

    Returns how all tasks stood that were seen to end, also those that Slurm has forgotten since.
    """
    # Where it does again what others have done, only its own databases count.
    names = f"{result.job.job_id}_*.sqlite" if result.plan.redo_all else "[!.]*.sqlite"
    tasks, of = RunFolder(result.plan.order.out).tasks, result.plan.chunks
    known: dict[Path, tuple[tuple[int, int], int]] = {}
    seen: dict[int, str] = {}
    codes: dict[int, int] = {}

    def line(states: JobStates) -> None:
        seen.update(states.array)
        codes.update(states.exit_codes)
        tell(progress_line(result.job, states, min(count_done(tasks.glob(names), known), of), of))

    last = watch(scheduler, result.job, clock, line)
    ended = {index: state for index, state in seen.items() if state not in UNFINISHED}
    return replace(last, array=ended, exit_codes=codes)


def evaluate_job(
    result: SubmitResult, states: JobStates, clock: Clock, progress: Progress
) -> tuple[Summary, str, tuple[TaskOutcome, ...]]:
    """Return the summary of the run, the verdict on this job, and how its tasks ended; merge where no job has."""
    folder, logs = RunFolder(result.plan.order.out), result.plan.order.logs
    if not any(folder.tasks.glob("*.sqlite")) and not folder.job_database.exists():
        ends = find_ends(result.job, states, folder, logs)
        raise no_task_started(result.job.job_id, ends, then="the same command with --again")
    if states.merge == "COMPLETED" and folder.job_database.exists():
        summary = summarize_database(folder.job_database, progress, now_ms=clock.now_ms())
    else:
        summary = finish_job(MergeOrder([folder.path], folder.job_database), clock, reading_source=progress).summary
    ends = find_ends(result.job, states, folder, logs)
    # Every chunk may be done by an older job, while of this one no task has even begun.
    verdict = verdict_of(ends) if summary.verdict == "done" else summary.verdict
    return summary, verdict, ends


def watch(scheduler: Scheduler, job: Submitted, clock: Clock, tell: Callable[[JobStates], None]) -> JobStates:
    """Wait until array and merge job have ended; ``tell`` hears of every change. Returns how they stood at the end."""
    before: JobStates | None = None
    silent = False
    while True:
        try:
            states = scheduler.states(job)
            silent = False
        except Unanswered as error:
            if not silent:  # a controller that restarts is silent for minutes
                log.warning("%s does not answer, asking on: %s", scheduler.name, error)
            silent = True
        else:
            if states != before:
                tell(states)
            before = states
            if has_ended(states):
                return states
        clock.sleep(scheduler.poll_s)


def progress_line(job: Submitted, states: JobStates, done: int, of: int) -> str:
    """Return one line: the job, a bar of its chunks, and how many tasks are in which state."""
    counts = Counter(states.array.get(index, "ENDED") for index in job.indices)
    why = f" ({', '.join(states.why_pending)})" if states.why_pending else ""
    # What is still going on first, then the ends; the same order every time.
    order = sorted(counts, key=lambda s: (s not in UNFINISHED, s))
    words = [f"{counts[state]} {state.lower()}{why if state == 'PENDING' else ''}" for state in order]
    why_merge = f" ({states.why_merge_pending})" if states.why_merge_pending else ""
    merging = f"; merge {states.merge.lower()}{why_merge}" if states.merge else ""
    full = _BAR if done >= of else _BAR * done // of
    bar = "#" * full + "-" * (_BAR - full)
    return f"{job.job_id} [{bar}] {done:,} of {of:,} chunks; tasks: {', '.join(words)}{merging}"


def count_done(files: Iterable[Path], known: dict[Path, tuple[tuple[int, int], int]]) -> int:
    """Count the done chunks in published task databases; each is read only when it differs from what is ``known``."""
    for path in files:
        with suppress(OSError):  # just being replaced; the next look will tell
            mark = (path.stat().st_mtime_ns, path.stat().st_size)
            if known.get(path, (None, 0))[0] != mark and (row := read_row(path, _DONE)):
                known[path] = mark, row[0]
    return sum(done for _, done in known.values())


@dataclass(slots=True)
class TaskOutcome:
    """One array task and how it has ended."""

    index: int | None  # None: the job has no array
    state: str | None  # in Slurm's words, else in ours; None: nobody knows
    exit_code: int | None
    log: Path
    worked: bool = False  # however it has ended: of its chunks nothing was left by then
    note: str = ""  # what is known besides, where it could not even be started

    @property
    def well(self) -> bool:
        """Whether it has ended as it should."""
        return self.state == _COMPLETED

    def words(self, job_id: str) -> str:
        """Return which task it is and how it has ended, for people."""
        code = "" if self.exit_code is None else f", exit code {self.exit_code}"
        if self.state is None:
            return f"no word from array index {self.index}{code}"
        name = f"job {job_id}" if self.index is None else f"task {job_id}_{self.index}"
        return f"{name}: {self.state}{code}"

    def to_dict(self) -> dict[str, object]:
        """Return it for ``--json``."""
        return {"index": self.index, "state": self.state, "exit_code": self.exit_code, "log": str(self.log)}


def find_ends(job: Submitted, states: JobStates, run: RunFolder, logs: Path) -> tuple[TaskOutcome, ...]:
    """Return how each task has ended; sacct is asked only of those that squeue has forgotten."""
    told = {index: state for index, state in states.array.items() if state not in UNFINISHED}
    if not all(index in told for index in job.indices):
        told = {**{i: state for i, state in query_ends(job).items() if state not in UNFINISHED}, **told}
    left = _ends_in(run.job_database, job.job_id)
    ends = []
    for index in job.indices:
        state, exit_code = left.get(index, (None, None))
        state = told.get(index) or state
        worked = state != _COMPLETED and finished_all_chunks(run, job.job_id, index)
        if state == _FAILED and exit_code is None:  # it failed without a word of its own
            exit_code = states.exit_codes.get(index)
        ends.append(TaskOutcome(index, state, exit_code, logs / f"{job.job_id}_{index}_0_log.out", worked))
    return tuple(ends)


def finished_all_chunks(run: RunFolder, job_id: str, index: int | None) -> bool:
    """Say whether the last attempt of a task has left nothing of its chunks undone, by the databases it has left."""
    found = [(TaskKey.parse(path.stem), path) for path in run.tasks.glob(f"{job_id}_{index or 0}.r*.sqlite")]
    last = max((key.restart for key, _ in found if key is not None), default=None)
    databases = [path for key, path in found if key is not None and key.restart == last]
    rows = [read_row(path, _UNDONE) or (None, 0, 0) for path in databases]
    return bool(rows) and all(verdict == "done" or (chunks and not undone) for verdict, chunks, undone in rows)


def made_progress(tasks: Path, attempt: str) -> bool | None:
    """Return whether an attempt (4821_7.r0) has got any chunk done; None: it left no database that can be read."""
    known = [row[0] for path in tasks.glob(f"{attempt}.*.sqlite") if (row := read_row(path, _SETTLED))]
    return any(known) if known else None


def read_row(database: Path, question: str) -> tuple[Any, ...] | None:
    """Return the one row of an answer; None: this database cannot be read."""
    try:
        with closing(open_sealed(database)) as db:
            row: tuple[Any, ...] | None = db.execute(question).fetchone()
            return row
    except sqlite3.Error:
        return None


def verdict_of(ends: Sequence[TaskOutcome]) -> str:
    """Judge by the tasks alone; of a job whose every task has done its work it does not matter how they ended."""
    if all(end.well or end.worked for end in ends):
        return "done"
    failed = all(end.state in (_COMPLETED, _FAILED) and end.exit_code != ExitCode.RUN_ME_AGAIN for end in ends)
    return "failed" if failed else "stopped"


def _ends_in(job_database: Path, job_id: str) -> dict[int, tuple[str | None, int | None]]:
    """Return state and exit code of the last attempt of each task of this job that has left a database."""
    found: dict[int, tuple[str | None, int | None]] = {}
    if not job_database.exists():
        return found
    try:
        with closing(open_job_database(job_database)) as db:
            for index, verdict, exit_code, slurm_state in db.execute(_BY_TASK, (job_id,)):
                word = None if slurm_state == "ENDED" else slurm_state
                found[index] = word or _BY_VERDICT.get(verdict), exit_code
    except sqlite3.Error:
        pass  # the summary was read a moment ago; without this, Slurm's word counts alone
    return found


def headline(job_id: str, verdict: str, ends: Sequence[TaskOutcome]) -> str | None:
    """Return what to say where every chunk of a run is done, but not every task has ended well; None: nothing.

    ``verdict`` is that on the job, whose tasks may have done nothing of it.
    """
    bad = [end for end in ends if not end.well]
    if verdict != "done":
        return f"job {job_id} did not do its work, though every chunk is done:"
    after = "their" if len(bad) > 1 else "its"
    return f"every chunk is done; {count(len(bad), 'task')} ended badly after {after} work:" if bad else None


def end_lines(job_id: str, ends: Sequence[TaskOutcome]) -> list[str]:
    """Return a line for each task that did not end well, and where to read why."""
    bad = [end for end in ends if not end.well]
    lines = []
    for end in bad[:_MOST_LINES]:
        where = f"less {shlex.quote(str(end.log))}" if end.log.exists() else "it left no log"
        lines.append(f"{end.words(job_id)}; {where}")
    return lines + ([f"… and {len(bad) - _MOST_LINES:,} more (--json has them all)"] if len(bad) > _MOST_LINES else [])


def no_task_started(job_id: str, ends: Sequence[TaskOutcome], *, then: str) -> NotHere:
    """Return why no task has left anything: what the first that failed says speaks for all; ``then``: what to do."""
    end = next((end for end in ends if not end.well), ends[0])
    said = end.log.read_text(errors="replace").strip()[-_MOST_OF_A_LOG:] if end.log.exists() else None
    lacking = "its log is empty" if said == "" else end.note or "it left no log: cancelled before it began?"
    return NotHere(
        f"no task of job {job_id} could begin",
        why=f"{end.words(job_id)}\n{said or lacking}",
        fix=f"less {shlex.quote(str(end.log if said is not None else end.log.parent))}   (then {then})",
    )
