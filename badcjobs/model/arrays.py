"""Job arrays: their shape, what one task of them was given, and what is handed to a scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.model.names import TaskKey


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The indices of a regular job array: ``first``, ``first + step``, … (``count`` of them)."""

    first: int
    step: int
    count: int

    def position_of(self, index: int) -> int | None:
        """Return where this index stands among the array's indices, from 0; None when it is not one of them."""
        position, rest = divmod(index - self.first, self.step)
        return position if rest == 0 and 0 <= position < self.count else None

    def __str__(self) -> str:
        last = self.first + (self.count - 1) * self.step
        return f"{self.first}-{last}" + (f":{self.step}" if self.step > 1 else "")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm (or nobody) gave to this process."""

    in_slurm: bool
    job_id: str
    node: str
    restart: int = 0
    array_index: int | None = None
    array_indices: tuple[int, int, int, int] | None = None  # min, max, step, count as Slurm says them
    step_tasks: int = 1
    procid: int = 0
    cpus: int | None = None
    local_dir: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)  # the variables all this was read from
    started_at_ms: int | None = None  # when this process looked; None: nobody said

    @property
    def key(self) -> TaskKey:
        procid = self.procid if self.step_tasks > 1 else None
        return TaskKey(self.job_id, self.array_index or 0, self.restart, self.node, procid, self.started_at_ms)


@dataclass(frozen=True, slots=True)
class ArrayOrder:
    """A job array and its merge job, as somebody wants them; a scheduler makes them so."""

    out: Path  # absolute
    run_arguments: tuple[str, ...]  # what follows `badcjobs`: run SOURCE… --out DIR …, with absolute paths
    tasks: int
    first: int = 0
    step: int = 1
    only: tuple[int, ...] = ()  # of the array's indices just these, where a part is submitted again; empty: all
    parallel: int | None = None  # how many tasks at a time; None: as many as there is room for
    gpus_per_task: int = 1
    cpus: int | None = None  # of each task; None: whatever the site gives
    mem: str | None = None  # of each task, as sbatch takes it
    time_min: int = 720
    warning_s: int = 180  # how long before the time limit a task is told to stop in order
    requeues: int = 10  # how often a task that has stopped in order, with work left, is started again
    account: str | None = None
    partition: str | None = None
    constraint: str | None = None
    extra_sbatch: tuple[str, ...] = ()  # more options of sbatch for the array: "--qos=high"
    name: str = "badcjobs"
    setup: tuple[str, ...] = ()  # lines of shell before the work: "module load gcc cuda"
    merge_account: str | None = None  # None: as the array
    merge_mem: str = "4G"
    merge_time_min: int = 60

    @property
    def shape(self) -> ArrayShape:
        return ArrayShape(self.first, self.step, self.tasks)

    @property
    def indices(self) -> tuple[int, ...]:
        """The array indices that are submitted now."""
        return self.only or tuple(range(self.first, self.first + self.tasks * self.step, self.step))

    @property
    def spec(self) -> str:
        """What ``sbatch --array=`` takes."""
        indices = ",".join(map(str, self.only)) or str(self.shape)
        return indices if self.parallel is None else f"{indices}%{self.parallel}"

    @property
    def logs(self) -> Path:
        """Where the scheduler writes what the tasks say, and keeps its own files."""
        return self.out / "logs"


@dataclass(frozen=True, slots=True)
class Submitted:
    """An array that was handed in."""

    job_id: str
    merge_job_id: str | None  # None: there is no merge job; whoever waits merges
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobStates:
    """Where a submitted array stands, in Slurm's words.

    An index that is not there has ended and is forgotten; ``merge`` is None when there is no merge job, or no more.
    """

    array: Mapping[int, str]
    merge: str | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)  # of those that have ended, where it is not 0
    why_pending: tuple[str, ...] = ()  # Slurm's reasons, where array tasks wait for more than their turn
    why_merge_pending: str | None = None  # the same of the merge job


@dataclass(frozen=True, slots=True)
class CutShort:
    """A submit that has not come to its end: killed, left without Slurm's answer, or still waiting for that."""

    what: str
    command: str  # to paste: it finds what Slurm has, and does the rest
