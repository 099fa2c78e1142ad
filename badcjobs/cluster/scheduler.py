"""The seam to what runs job arrays: Slurm (``slurm.py``) or this machine (``local.py``), with the states of Slurm."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.errors import BadInput
from badcjobs.model import ArrayOrder, JobStates, Queue, Submitted
from badcjobs.paths import RunFolder
from badcjobs.seams import Clock
from badcjobs.store import submission_record as records

POLL_S = 30.0  # squeue loads the controller, which all users share
COMPLETED = "COMPLETED"
FAILED = "FAILED"
CANCELLED = "CANCELLED"
TIMEOUT = "TIMEOUT"
REQUEUED = "REQUEUED"
# All other states are final.
UNFINISHED = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    }
)  # fmt: skip


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

    def queue(self, run: Path, job_ids: Collection[str], merge_job_id: str | None) -> Queue:
        """Return what waits and runs of these jobs of a run."""

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> tuple[TaskOutcome, ...]:
        """Return how each task has ended; ``states``: what was seen of the job."""

    def cancel_line(self, job: Submitted) -> str:
        """Return the command that ends a job, to paste."""


def has_ended(states: JobStates) -> bool:
    """Say whether all tasks and the merge job have ended."""
    return UNFINISHED.isdisjoint([*states.array.values(), states.merge])


class QueueReader:
    """Asks a scheduler what it has of a run, at most every 30 s."""

    def __init__(self, scheduler: Scheduler, clock: Clock) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._question: object = None  # the last one
        self._answer: Queue | None = None
        self._ask_again_s = 0.0

    def __call__(self, run: Path, job_ids: Iterable[str]) -> Queue | None:
        """Return what waits and runs of the submitted job and of the jobs that wrote the task databases.

        None: no job is known.
        """
        with suppress(OSError, ValueError, BadInput):
            record = records.read_record(run)
            submitted = Submitted("", None, ()) if record is None else record.job
            numbers = {number for number in (submitted.job_id, *job_ids) if number.isdecimal()}
            numbers -= {number for number in numbers if records.rows_in(run, number).exists()}  # emulated
            now_s = self._clock.monotonic_s()
            if (run, numbers, submitted) != self._question or now_s >= self._ask_again_s:
                self._question = run, numbers, submitted
                self._ask_again_s = now_s + POLL_S
                merge_job_id = submitted.merge_job_id
                self._answer = self._scheduler.queue(run, numbers, merge_job_id) if numbers else None
            return self._answer
        return None
