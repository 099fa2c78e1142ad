"""How the tasks of a job have ended, and what that says of the job; the words for it are the same on both clusters.

Of a job of Slurm: by Slurm's own word, else by what they have left. squeue forgets a task some minutes after its end,
and many sites have no accounting. Then there is the job database, with the words of the hooks in slurm/ where they are
installed, and what submitit leaves of a task that went well.
"""

from __future__ import annotations

import pickle
import shlex
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import ExitCode, NotHere
from badcjobs.model import JobStates, Submitted, TaskKey
from badcjobs.paths import RunFolder
from badcjobs.report.words import count
from badcjobs.scheduler.sacct import query_ends
from badcjobs.scheduler.squeue import UNFINISHED
from badcjobs.store.connect import open_sealed
from badcjobs.store.job_file import open_job_database

_COMPLETED, _FAILED = "COMPLETED", "FAILED"
_BY_VERDICT = {"done": _COMPLETED, "failed": _FAILED, "stopped": "STOPPED", "killed": "KILLED"}
_UNDONE = "SELECT (SELECT verdict FROM task), count(*), sum(status NOT IN ('done', 'skipped')) FROM chunk"
_MOST_LINES, _MOST_OF_A_LOG = 10, 2000
_BY_TASK = "SELECT array_index, verdict, exit_code, slurm_state FROM task WHERE job_id = ? ORDER BY started_at_ms"


@dataclass(frozen=True, slots=True)
class TaskEnd:
    """One array task, ended."""

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


def find_ends(job: Submitted, states: JobStates, run: RunFolder, logs: Path) -> tuple[TaskEnd, ...]:
    """Return how each task has ended; sacct is asked only of those that squeue has forgotten."""
    told = {index: state for index, state in states.array.items() if state not in UNFINISHED}
    if not all(index in told for index in job.indices):
        told = {**{i: state for i, state in query_ends(job).items() if state not in UNFINISHED}, **told}
    left = _ends_in(run.job_database, job.job_id)
    ends = []
    for index in job.indices:
        state, exit_code = left.get(index, (None, None))
        state = told.get(index) or state or _by_result(logs / f"{job.job_id}_{index}_0_result.pkl")
        worked = state != _COMPLETED and has_worked(run, job.job_id, index)
        if state == _FAILED and exit_code is None:  # it failed without a word of its own
            exit_code = states.exit_codes.get(index)
        ends.append(TaskEnd(index, state, exit_code, logs / f"{job.job_id}_{index}_0_log.out", worked))
    return tuple(ends)


def has_worked(run: RunFolder, job_id: str, index: int | None) -> bool:
    """Say whether the last attempt of a task has left nothing of its chunks undone, by the databases it has left."""
    found = [(TaskKey.parse(path.stem), path) for path in run.tasks.glob(f"{job_id}_{index or 0}.r*.sqlite")]
    last = max((key.restart for key, _ in found if key is not None), default=None)
    databases = [path for key, path in found if key is not None and key.restart == last]
    return bool(databases) and not any(_is_unfinished(path) for path in databases)


def _is_unfinished(database: Path) -> bool:
    try:
        with closing(open_sealed(database)) as db:
            verdict, chunks, undone = db.execute(_UNDONE).fetchone()
    except sqlite3.Error:
        return True
    return verdict != "done" and (not chunks or undone > 0)


def verdict_of(ends: Sequence[TaskEnd]) -> str:
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


def _by_result(result: Path) -> str | None:
    """Read what submitit has kept of a call: (success or error, its value); a task that exits leaves nothing."""
    from submitit.core.utils import pickle_load

    try:
        outcome, _ = pickle_load(result)
    except (OSError, EOFError, ValueError, TypeError, AttributeError, ImportError, pickle.PickleError):
        return None  # not there, cut off, or of a class that is gone: then it says nothing
    return _COMPLETED if outcome == "success" else _FAILED


# --- what to say of it ------------------------------------------------------------------------------------------------


def headline(job_id: str, verdict: str, ends: Sequence[TaskEnd]) -> str | None:
    """Return what to say where every chunk of a run is done, but not every task has ended well; None: nothing.

    ``verdict`` is that on the job, whose tasks may have done nothing of it.
    """
    bad = [end for end in ends if not end.well]
    if verdict != "done":
        return f"job {job_id} did not do its work, though every chunk is done:"
    after = "their" if len(bad) > 1 else "its"
    return f"every chunk is done; {count(len(bad), 'task')} ended badly after {after} work:" if bad else None


def end_lines(job_id: str, ends: Sequence[TaskEnd]) -> list[str]:
    """Return a line for each task that did not end well, and where to read why."""
    bad = [end for end in ends if not end.well]
    lines = [f"{end.words(job_id)}; {_where_to_read(end)}" for end in bad[:_MOST_LINES]]
    return lines + ([f"… and {len(bad) - _MOST_LINES:,} more (--json has them all)"] if len(bad) > _MOST_LINES else [])


def _where_to_read(end: TaskEnd) -> str:
    return f"less {shlex.quote(str(end.log))}" if end.log.exists() else "it left no log"


def nobody_began(job_id: str, ends: Sequence[TaskEnd], *, then: str) -> NotHere:
    """Return why no task has left anything: what the first that failed says speaks for all; ``then``: what to do."""
    end = next((end for end in ends if not end.well), ends[0])
    said = end.log.read_text(errors="replace").strip()[-_MOST_OF_A_LOG:] if end.log.exists() else None
    lacking = "its log is empty" if said == "" else end.note or "it left no log: cancelled before it began?"
    return NotHere(
        f"no task of job {job_id} could begin",
        why=f"{end.words(job_id)}\n{said or lacking}",
        fix=f"less {shlex.quote(str(end.log if said is not None else end.log.parent))}   (then {then})",
    )
