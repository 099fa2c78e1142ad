"""The seam to what runs job arrays: Slurm (``slurm.py``) or this machine (``local.py``), with the states of Slurm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.paths import RunFolder

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

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> Sequence[TaskOutcome]:
        """Return how each task has ended; ``states``: what was seen of the job."""

    def cancel_line(self, job: Submitted) -> str:
        """Return the command that ends a job, to paste."""


def has_ended(states: JobStates) -> bool:
    """Say whether all tasks and the merge job have ended."""
    return UNFINISHED.isdisjoint([*states.array.values(), states.merge])
