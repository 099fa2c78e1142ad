"""Job arrays: shape, allocation of one task, submission, states."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import NamedTuple

from badcjobs.words import count

_TASK_NAME = re.compile(r"(?P<job>.+?)_(?P<index>\d+)\.r(?P<restart>\d+)\.(?P<node>.+?)(\.p(?P<procid>\d+))?")
_BITS_OF_START = 17
_MOST_INDICES = 4_000_001  # of an array in Slurm


def stable_id(*parts: object) -> int:
    """Return a 47-bit number for these names: the same in every process, six bytes in SQLite.

    Task databases are written separately and merged later, so row numbers would collide; these ids do not (for 10,000
    tasks with 4 devices the probability is 1 in 100,000).
    """
    import hashlib  # late: it loads a cryptographic library of 4 MB, which the recorder does not need

    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") >> 1


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The identity of one attempt of one array task; file names are made from it."""

    job_id: str
    array_index: int
    restart: int
    node: str
    procid: int | None = None
    # Names repeat across run folders, so the id includes the start time. File names lack it, so it is not compared.
    started_at_ms: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        step = "" if self.procid is None else f".p{self.procid}"
        return f"{self.job_id}_{self.array_index}.r{self.restart}.{self.node}{step}"

    @property
    def task_id(self) -> int:
        """The id of this attempt; its first bits depend on the name alone, so that names give the order of ids."""
        by_name = stable_id(self.name)
        if self.started_at_ms is None:
            return by_name
        mask = (1 << _BITS_OF_START) - 1
        return (by_name & ~mask) | (stable_id(self.name, self.started_at_ms) & mask)

    def is_sibling_of(self, other: TaskKey) -> bool:
        """Say whether both belong to one array, with different indices: their parts of the source are disjoint."""
        return self.job_id == other.job_id and self.array_index != other.array_index

    @classmethod
    def parse(cls, name: str) -> TaskKey | None:
        """Return the key of a task with this name; None: not the name of a task."""
        parts = _TASK_NAME.fullmatch(name)
        if parts is None:
            return None
        procid = None if parts["procid"] is None else int(parts["procid"])
        key = cls(parts["job"], int(parts["index"]), int(parts["restart"]), parts["node"], procid)
        return key if key.name == name else None


# --- arrays -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The indices of a regular job array: ``first``, ``first + step``, … (``count`` of them)."""

    first: int
    step: int
    count: int

    def __post_init__(self) -> None:
        if self.first < 0 or self.step < 1 or not 0 <= self.count <= _MOST_INDICES:
            raise ValueError("first, step and count are not those of an array in Slurm")

    @property
    def indices(self) -> range:
        """All of them."""
        return range(self.first, self.first + self.count * self.step, self.step)

    def position_of(self, index: int) -> int | None:
        """Return the position of this index in the array, from 0; None: not in the array."""
        return self.indices.index(index) if index in self.indices else None

    def __str__(self) -> str:
        last = self.first + (self.count - 1) * self.step
        return f"{self.first}-{last}" + (f":{self.step}" if self.step > 1 else "")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm gave to this process; outside Slurm, the machine."""

    in_slurm: bool
    job_id: str
    node: str
    restart: int = 0
    array_index: int | None = None
    array: ArrayShape | None = None  # None: without an array, or its indices are a list without a step
    step_tasks: int = 1
    procid: int = 0
    cpus: int | None = None
    local_dir: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)  # the environment variables that were read
    started_at_ms: int | None = None  # when the allocation was read; None: not known

    @property
    def key(self) -> TaskKey:
        procid = self.procid if self.step_tasks > 1 else None
        return TaskKey(self.job_id, self.array_index or 0, self.restart, self.node, procid, self.started_at_ms)


_GIB = 2**30
_USABLE = 0.9  # of a memory: more raises an alert on a device, and may get a job killed
LEAST_CPUS = 2  # of a task: badcjobs itself reads and cuts audio
USUAL_WORKERS = 2  # per GPU, one per core, while nothing is measured: a slow GPU keeps two at work, too


class WorkerMemory(NamedTuple):
    """The memory that a worker of an engine may need, until it is measured."""

    start_bytes: int  # of main memory, without audio
    bytes_per_audio_s: float  # of a chunk
    bytes_for_unknown_length: int
    device_bytes: int

    def bytes_for(self, chunk_s: float | None) -> int:
        """Return the main memory for chunks of this length."""
        if chunk_s is None:
            return self.bytes_for_unknown_length
        return round(self.start_bytes + self.bytes_per_audio_s * chunk_s)


# Measured with HawkEars and one thread, device memory plus a quarter; assumed of engines that declare none.
USUAL_MEMORY = WorkerMemory(
    start_bytes=round(1.75 * _GIB),
    bytes_per_audio_s=0.8 * 2**20,
    bytes_for_unknown_length=3 * _GIB,
    device_bytes=2 * _GIB,
)


def fitting_workers(memory_bytes: float, worker_bytes: float) -> int:
    """Return how many workers a memory holds, at least one; a tenth is left free."""
    return max(1, int(_USABLE * memory_bytes / worker_bytes))


def guessed_gb(workers: int, chunk_s: float | None) -> int:
    """Return the memory to request for so many workers in all, until it is measured; a run leaves a tenth free."""
    return ceil(workers * USUAL_MEMORY.bytes_for(chunk_s) / _USABLE / _GIB)


def advised_gb(peak_bytes: float) -> int:
    """Return the memory to request for a measured peak of all processes of a task: 15 % more and 0.5 GiB."""
    return ceil(1.15 * peak_bytes / _GIB + 0.5)


def default_cpus(gpus: int) -> int:
    """Return the default number of cores of an array task: one per worker."""
    return USUAL_WORKERS * max(gpus, 1)


def default_mem(gpus: int) -> str:
    """Return the default memory of an array task: what its workers may need."""
    return f"{guessed_gb(default_cpus(gpus), None)}G"


@dataclass(frozen=True, slots=True)
class Billing:
    """The weights by which a site bills an hour of a task."""

    gpu: float
    memory_gb: float = 0.0
    cpu: float = 0.0
    rule: str = "sum"

    def __post_init__(self) -> None:
        if min(self.gpu, self.memory_gb, self.cpu) < 0 or self.rule not in ("max", "sum"):
            raise ValueError("the weights must not be negative, and rule must be max or sum")

    def per_hour(self, gpus: float, mem_gb: float, cpus: float) -> float:
        """Return the billed units of an hour: the largest of the three parts counts, or their sum."""
        parts = (gpus * self.gpu, mem_gb * self.memory_gb, cpus * self.cpu)
        return max(parts) if self.rule == "max" else sum(parts)


@dataclass(frozen=True, slots=True)
class ArrayOrder:
    """A job array and its merge job, to be submitted to a scheduler."""

    out: Path  # absolute
    run_arguments: tuple[str, ...]  # after `badcjobs`: run SOURCE… --out DIR …, with absolute paths
    tasks: int
    first: int = 0
    step: int = 1
    only: tuple[int, ...] = ()  # submit only these indices of the array again; empty: all
    parallel: int | None = None  # most tasks at a time; None: no limit
    gpus_per_task: int = 1
    cpus: int | None = None  # of each task; None: the site's default
    mem: str | None = None  # of each task, as sbatch takes it
    time_min: int = 720
    warning_s: int = 180  # how long before the time limit Slurm sends the warning signal
    requeues: int = 10  # how often a task that stopped with work left is started again
    account: str | None = None
    constraint: str | None = None
    extra_sbatch: Mapping[str, str | bool] = field(default_factory=dict)  # more sbatch options; True: a flag
    name: str = "badcjobs"
    setup: tuple[str, ...] = ()  # shell lines before the work: "module load gcc cuda"
    merge_account: str | None = None  # None: that of the array
    merge_mem: str = "4G"
    merge_time_min: int = 60

    @property
    def shape(self) -> ArrayShape:
        return ArrayShape(self.first, self.step, self.tasks)

    @property
    def indices(self) -> tuple[int, ...]:
        """The array indices to submit now."""
        return self.only or tuple(self.shape.indices)

    @property
    def spec(self) -> str:
        """The value of ``sbatch --array=``."""
        indices = ",".join(map(str, self.only)) or str(self.shape)
        return indices if self.parallel is None else f"{indices}%{self.parallel}"

    @property
    def partition(self) -> str | bool | None:
        """The partition that the options of sbatch name; the merge job also runs there."""
        return self.extra_sbatch.get("partition")

    @property
    def logs(self) -> Path:
        """Where the scheduler writes the output of the tasks, and its own files."""
        return self.out / "logs"


@dataclass(frozen=True, slots=True)
class Submitted:
    """A submitted array."""

    job_id: str
    merge_job_id: str | None  # None: there is no merge job; the waiting process merges
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobStates:
    """The Slurm states of a submitted array.

    An index that is missing has ended, and Slurm no longer lists it; ``merge`` is None if there is no merge job, or no
    longer.
    """

    array: Mapping[int, str]
    merge: str | None = None
    exit_codes: Mapping[int, int] = field(default_factory=dict)  # of tasks that have ended, if not 0
    why_pending: tuple[str, ...] = ()  # Slurm's reasons, if array tasks wait for more than their turn


@dataclass(frozen=True, slots=True)
class Queue:
    """What Slurm has of a run now: the jobs and the number of their array tasks."""

    known: bool = True  # False: there is no squeue here, or it does not answer
    jobs: tuple[str, ...] = ()
    waiting: int = 0
    running: int = 0
    reasons: tuple[str, ...] = ()  # unusual reasons for waiting: JobHeldUser
    merge: str | None = None  # the merge job, if it waits or runs

    @property
    def release(self) -> tuple[str, ...]:
        """The command that releases jobs which the user holds; empty: no job is held."""
        if "JobHeldUser" not in self.reasons:
            return ()
        return (f"scontrol release {','.join(self.jobs)}",)

    def __str__(self) -> str:
        parts = []
        if self.running:
            parts.append(f"{count(self.running, 'task runs', 'tasks run')} in Slurm")
        if self.waiting:
            parts.append(f"{count(self.waiting, 'task waits', 'tasks wait')} in the queue")
        if self.waiting and self.reasons:
            parts[-1] += f" ({', '.join(self.reasons)})"
        return " and ".join(parts)


AskQueue = Callable[[Path, Iterable[str]], Queue | None]  # for a run folder and the jobs of its tasks


def not_asked(run: Path, job_ids: Iterable[str]) -> None:
    """Return that nothing is asked: the ``AskQueue`` of who does not want it."""


@dataclass(frozen=True, slots=True)
class CutShort:
    """A submit that was not completed: killed, left without Slurm's answer, or still waiting for it."""

    what: str
    command: str  # to paste: it finds out what Slurm has, and completes the submit


# --- tasks without a sign of life -------------------------------------------------------------------------------------

_PUBLISH_EVERY_S = 30.0  # if the file does not contain it
_SLOW_BYTES_PER_S = 50_000  # limits publishing to about 4 GB a day
_LONGEST_S = 480.0  # the most work that a dead node may lose
_SLACK_S = 60.0  # a shared filesystem may show a new file this much later


def publish_interval_s(size_bytes: int, base_s: float) -> float:
    """Return the interval between publications of a file of this size."""
    return max(base_s, min(_LONGEST_S, size_bytes / _SLOW_BYTES_PER_S))


def silent_after_s(size_bytes: int, publish_every_s: float | None) -> float:
    """Return after how long without a publication a running task counts as silent: two intervals and a minute."""
    return 2 * publish_interval_s(size_bytes, publish_every_s or _PUBLISH_EVERY_S) + _SLACK_S


def is_silent(heard_at_ms: int | None, after_s: float | None, now_ms: int | None) -> bool:
    """Return whether a task that has not ended has been silent for too long; False if that is not known."""
    if heard_at_ms is None or after_s is None or now_ms is None:
        return False
    return now_ms - heard_at_ms > 1000 * after_s


_MINUTES = re.compile(r"[0-9]{1,8}(\.[0-9]*)?")
_CLOCK = re.compile(r"[0-9]{1,5}-[0-9]{1,7}(?::[0-9]{1,2}){0,2}|[0-9]{1,7}(?::[0-9]{1,2}){1,2}")


def parse_stop_after(text: str) -> float | None:
    """Read minutes, ``M:S``, ``H:M:S``, ``D-H``, ``D-H:M`` or ``D-H:M:S``, as sbatch does; return seconds, or None."""
    if _MINUTES.fullmatch(text):
        return 60 * float(text)
    if not _CLOCK.fullmatch(text):
        return None
    days, dash, clock = text.rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if any(part > 59 for part in parts[1:]):
        return None
    missing = [0] * (3 - len(parts))
    hours, minutes, seconds = [*parts, *missing] if dash else [*missing, *parts]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds)
