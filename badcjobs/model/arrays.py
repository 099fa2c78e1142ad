"""Job arrays: their shape, what one task of them was given, what is handed to a scheduler, and when it will be done."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TASK_NAME = re.compile(r"(?P<job>.+?)_(?P<index>\d+)\.r(?P<restart>\d+)\.(?P<node>.+?)(\.p(?P<procid>\d+))?")
_BITS_OF_BIRTH = 17


def stable_id(*parts: object) -> int:
    """Return a 47-bit number for these names: the same in every process, six bytes in SQLite.

    Task databases are written apart and joined later, so a row number would collide; these do not
    (10,000 tasks of 4 devices: one chance in 100,000).
    """
    import hashlib  # late: it carries a cryptographic library of 4 MB, and the recorder needs none of it

    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") >> 1


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The name of one attempt of one array task; its file names carry it."""

    job_id: str
    array_index: int
    restart: int
    node: str
    procid: int | None = None
    # When it started. Names repeat across run folders, so the id needs it; no name says it, so keys are equal without.
    born_ms: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        step = "" if self.procid is None else f".p{self.procid}"
        return f"{self.job_id}_{self.array_index}.r{self.restart}.{self.node}{step}"

    @property
    def task_id(self) -> int:
        """The number of this attempt; its first bits are those of the name, so that names tell the order of ids."""
        by_name = stable_id(self.name)
        if self.born_ms is None:
            return by_name
        mask = (1 << _BITS_OF_BIRTH) - 1
        return (by_name & ~mask) | (stable_id(self.name, self.born_ms) & mask)

    @classmethod
    def parse(cls, name: str) -> TaskKey | None:
        """Return the task of this name; None when no task has such a name."""
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


def usual_cpus(gpus: int) -> int:
    """Return the cores of an array task for which none were asked."""
    return 2 * max(gpus, 1)


def usual_mem(gpus: int) -> str:
    """Return the memory of an array task for which none was asked.

    Memory is billed, on some sites higher than the GPUs: what an engine process or two need, and no more.
    """
    return f"{4 * max(gpus, 1)}G"


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


# --- progress ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a task that runs is."""

    started_at_ms: int
    at_ms: int  # as of when: its last sign or, of one that has nothing done, when it was last heard of
    done: int  # chunks
    pending: int
    listed: bool = True  # False: what it has to do is not known yet
    workers: int | None = None

    @property
    def elapsed_s(self) -> float:
        return (self.at_ms - self.started_at_ms) / 1000

    @property
    def pace(self) -> float | None:
        """How many in a second; None: it is too early to say."""
        return self.done / self.elapsed_s if self.done and self.elapsed_s > 0 else None


def expected_end_ms(running: Sequence[Progress], left: float, paces_before: Iterable[float] = ()) -> int | None:
    """Return when all is done: when the last running task is, or later if there is more than they have.

    ``left`` is counted in chunks as long as those that are done. None: there is no pace to go by. A task that has none
    done yet would leave what it has to the others; so it counts as fast as they are on average (where none has a pace,
    as those before: ``paces_before``), but not as if each of its workers had done more than one by now.
    """
    known = [task.pace for task in running if task.pace]
    others = known or list(paces_before)
    if not left or not others:
        return None
    usual = sum(others) / len(others)
    at_work = [task for task in running if task.pace or task.pending or not task.listed]
    paces = [task.pace or _first_pace(task, usual) for task in at_work]
    ends = [task.at_ms + 1000 * task.pending / its for task, its in zip(at_work, paces, strict=True) if task.pending]
    if not ends:
        return None
    return round(max(*ends, max(task.at_ms for task in running) + 1000 * left / sum(paces)))


def _first_pace(task: Progress, usual: float) -> float:
    return min(usual, (task.workers or 1) / task.elapsed_s) if task.elapsed_s > 0 else usual


# --- silence ----------------------------------------------------------------------------------------------------------

_PUBLISH_EVERY_S = 30.0  # where the file does not say
_SLOW_BYTES_PER_S = 50_000  # keeps the traffic of a day of readings at about 4 GB
_LONGEST_S = 480.0  # what a dead node may cost, however many chunks there are
_SLACK_S = 60.0  # a shared filesystem may show a new file so much later


def publish_interval_s(size_bytes: int, base_s: float) -> float:
    """Return how long to wait between publications of a file of this size."""
    return max(base_s, min(_LONGEST_S, size_bytes / _SLOW_BYTES_PER_S))


def silent_after_s(size_bytes: int, publish_every_s: float | None) -> float:
    """Return how long a task that runs may be without a word: two publications of its file, and a minute."""
    return 2 * publish_interval_s(size_bytes, publish_every_s or _PUBLISH_EVERY_S) + _SLACK_S


def is_silent(heard_at_ms: int | None, after_s: float | None, now_ms: int | None) -> bool:
    """Say whether a task that has not ended should have been heard of by now; what nobody knows accuses nobody."""
    if heard_at_ms is None or after_s is None or now_ms is None:
        return False
    return now_ms - heard_at_ms > 1000 * after_s


_MINUTES = re.compile(r"[0-9]{1,8}(\.[0-9]*)?")
_CLOCK = re.compile(
    r"(?:(?:(?P<days>[0-9]{1,5})-)?(?P<hours>[0-9]{1,7}):)?(?P<minutes>[0-9]{1,7}):(?P<seconds>[0-5]?[0-9])"
)


def parse_stop_after(text: str) -> float | None:
    """Read minutes, ``M:S``, ``H:M:S`` or ``D-H:M:S``, as sbatch takes them; return seconds, None for anything else."""
    if _MINUTES.fullmatch(text):
        return 60 * float(text)
    parts = _CLOCK.fullmatch(text)
    if parts is None or (parts["hours"] is not None and int(parts["minutes"]) > 59):
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in parts.group("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
