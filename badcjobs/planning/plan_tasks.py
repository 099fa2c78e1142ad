"""How many array tasks, and how much audio for each, so that each ends well inside its time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from badcjobs.errors import BadInput
from badcjobs.planning.plan_speed import ASSUMED_START_UP_S, Speed
from badcjobs.planning.plan_survey import Lengths
from badcjobs.planning.site import Site

# Three minutes before the end Slurm's warning comes, and nothing new is begun; then the last results are published.
END_S = 300.0
LEAST_FACTOR, UNMEASURED_FACTOR = 1.25, 1.5
_STEP_S, _LONG_STEP_S, _LONG_S = 300, 1800, 3 * 3600
SLURMS_OWN_ARRAY = 1_000  # MaxArraySize is 1001 unless somebody has changed it
USUAL_TIME_S = 12 * 3600  # as of badcjobs submit


@dataclass(frozen=True, slots=True)
class PlanWish:
    """What the command line says."""

    time_s: int | None = None
    gpus_per_task: int | None = None
    gpus: int | None = None  # at a time
    margin: float | None = None
    cpus: int | None = None
    mem_gb: float | None = None

    def longest_s(self, site: Site) -> float:
        """Return the most time that a task may ask for."""
        return self.time_s or site.plan_time_s or min(USUAL_TIME_S, site.time_s or math.inf)

    def task_gpus(self, site: Site) -> int:
        """Return the GPUs of each task: all of a node, where the site says how many that are."""
        return self.gpus_per_task or min(site.node_gpus or 1, self.gpus or site.node_gpus or 1)


def check_wish(wish: PlanWish, site: Site) -> None:
    """Refuse what cannot be planned, before a long reading; all mistakes at once."""
    mistakes = list(_mistakes(wish, site))
    if mistakes:
        what, fix = mistakes[0]
        raise BadInput(
            what if len(mistakes) == 1 else "this cannot be planned",
            why=None if len(mistakes) == 1 else "\n".join(text for text, _ in mistakes),
            fix=" ".join(fix for _, fix in mistakes) if len(mistakes) > 1 else fix,
        )


def _mistakes(wish: PlanWish, site: Site) -> Iterator[tuple[str, str]]:
    where, gpus = site.name or "the site", wish.task_gpus(site)
    if wish.time_s and site.time_s and wish.time_s > site.time_s:
        hours = f"{site.time_s / 3600:g}"
        yield f"--time asks for {wish.time_s / 3600:g} h, but {where} allows {hours} h", f"--time {hours}:00:00"
    if wish.margin is not None and not 1 <= wish.margin < math.inf:
        yield f"--margin {wish.margin:g} must be a number from 1: how many times as slow a task may be", "--margin 1.5"
    for name, value in (("--gpus", wish.gpus), ("--gpus-per-task", wish.gpus_per_task), ("--cpus", wish.cpus)):
        if value is not None and value < 1:
            yield f"{name} {value} must be at least 1", f"{name} 1"
    if site.node_gpus and gpus > site.node_gpus:
        yield f"a task of {gpus} GPUs, but a node of {where} has {site.node_gpus}", f"--gpus-per-task {site.node_gpus}"
    if site.node_cpus and (wish.cpus or 0) > site.node_cpus:
        yield f"--cpus {wish.cpus}, but a node of {where} has {site.node_cpus} cores", f"--cpus {site.node_cpus}"
    if site.node_memory_gb and (wish.mem_gb or 0) > site.node_memory_gb:
        most = f"{site.node_memory_gb:g}"
        yield f"--mem {wish.mem_gb:g}G, but a node of {where} has {most} GB", f"--mem {most}G"
    if wish.gpus and wish.gpus < gpus:
        yield f"--gpus {wish.gpus} at a time are fewer than the {gpus} of one task", f"--gpus-per-task {wish.gpus}"
    task_hours = gpus * wish.longest_s(site) / 3600
    if site.gpu_hours and task_hours > site.gpu_hours:
        fitting_h = max(1, int(site.gpu_hours / gpus))
        text = f"one task of {gpus} GPUs × {wish.longest_s(site) / 3600:g} h is {task_hours:,.0f} GPU-hours"
        yield f"{text}, but {where} allows {site.gpu_hours:,.0f} at a time", f"--time {fitting_h}:00:00"


# --- what is kept back of a task's time -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Margin:
    """What is kept back of a task's time."""

    start_up_s: float
    start_up_measured: bool
    end_s: float
    factor: float  # a task may be so many times as slow as the mean and still ends in time
    why: str  # where the factor is from

    def work_s(self, time_s: float) -> float:
        """Return the seconds of work at the mean speed that fit into a time limit; raise BadInput where none do."""
        left_s = time_s - self.start_up_s - self.end_s
        if left_s <= 0:
            measured = "measured" if self.start_up_measured else "assumed: nobody has measured it"
            raise BadInput(
                f"a time limit of {time_s / 60:g} min leaves no time for work",
                why=f"start-up takes {self.start_up_s:.0f} s ({measured}), an orderly end {self.end_s:.0f} s",
                fix=f"--time {clock(round_up(4 * (self.start_up_s + self.end_s)))}",
            )
        return left_s / self.factor

    def time_s(self, work_s: float) -> float:
        """Return the time limit for so many seconds of work at the mean speed."""
        return self.start_up_s + self.end_s + self.factor * work_s


def make_margin(speed: Speed, wanted: float | None) -> Margin:
    """Return what to keep back, by what was measured and, of the slowness, what somebody wants instead."""
    measured = speed.start_up_s is not None
    start_up_s = ASSUMED_START_UP_S if speed.start_up_s is None else speed.start_up_s
    if wanted is not None:
        return Margin(start_up_s, measured, END_S, wanted, "as --margin says")
    if speed.slowness is None:
        why = "no spread of speeds is known, so half as much again"
        return Margin(start_up_s, measured, END_S, UNMEASURED_FACTOR, why)
    why = f"the slowest of {speed.tasks} measured tasks took {speed.slowness:.2f} times as long as the mean"
    if speed.slowness < LEAST_FACTOR:
        why += f", and at least {LEAST_FACTOR:g} is kept for slow nodes"
    return Margin(start_up_s, measured, END_S, max(LEAST_FACTOR, speed.slowness), why)


def round_up(seconds: float) -> int:
    """Return a time limit that people would ask for: in steps of 5 minutes, of half an hour from 3 h on."""
    step_s = _STEP_S if seconds <= _LONG_S else _LONG_STEP_S
    return -(-int(seconds + 0.999) // step_s) * step_s


def clock(seconds: float) -> str:
    """Return a time limit as sbatch takes it."""
    whole = round(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


# --- shares -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Share:
    """What one array task gets."""

    rows: int
    audio_ms: int


def share_out(lengths: Lengths, tasks: int) -> list[Share]:
    """Return the shares of so many tasks, at most one for each chunk; none is empty.

    Each task takes its part of what is left, to within half a chunk, so that one very long chunk does not leave those
    behind it with nothing. Whole numbers only: the same source gives the same shares on every machine.
    """
    tasks = max(1, min(tasks, lengths.rows))
    left_ms = sum(length_ms * many for length_ms, many in lengths.runs())
    shares, runs = [], _Runs(lengths.runs(), lengths.rows)
    for tasks_left in range(tasks, 0, -1):
        share = runs.take(left_ms, tasks_left)
        left_ms -= share.audio_ms
        shares.append(share)
    return shares


class _Runs:
    """What nobody has taken yet."""

    def __init__(self, runs: Iterator[tuple[int, int]], rows: int) -> None:
        self._runs = runs
        self._rows = rows
        self._length_ms = self._many = 0

    def take(self, left_ms: int, tasks_left: int) -> Share:
        """Take the share of the next task: a part of what is left, and at least one chunk."""
        rows = audio_ms = 0
        most = self._rows - (tasks_left - 1)  # each of the others needs one
        while rows < most:
            if not self._many:
                self._length_ms, self._many = next(self._runs)
            wanted = most - rows
            if tasks_left > 1:
                wanted = min(wanted, max(_fitting(left_ms, tasks_left, audio_ms, self._length_ms), 0 if rows else 1))
            taken = min(wanted, self._many)
            rows, audio_ms, self._many = rows + taken, audio_ms + taken * self._length_ms, self._many - taken
            if self._many:
                break
        self._rows -= rows
        return Share(rows, audio_ms)


def _fitting(left_ms: int, tasks_left: int, audio_ms: int, length_ms: int) -> int:
    """Return how many chunks of a length have their middle within the part of the next task."""
    if length_ms == 0:
        return 2**62
    room = 2 * left_ms - (2 * audio_ms + length_ms) * tasks_left
    return room // (2 * length_ms * tasks_left) + 1 if room >= 0 else 0


# --- sizing -----------------------------------------------------------------------------------------------------------

_WORTH_A_START = 10  # a task is not cut off for more GPUs unless it works ten times as long as it starts up
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Sizing:
    """The array tasks of a plan."""

    gpus: int  # of each task
    time_s: int  # that each asks for
    chosen: bool  # the time limit is what the work needs; else what was wanted
    shares: tuple[Share, ...]
    longest_chunk_s: float  # seconds of audio that one GPU finishes in a task's time, however slow
    expected_s: float  # of the fullest task, at the mean speed
    work_s: float  # of all tasks together on all their GPUs, without start-up


def size_tasks(lengths: Lengths, speed: Speed, margin: Margin, wish: PlanWish, site: Site) -> Sizing:
    """Return the fewest tasks that end in time; more where there are GPUs for them and each is worth its start-up."""
    gpus, most_s = wish.task_gpus(site), wish.longest_s(site)
    rate = speed.audio_hours_per_gpu_hour
    usable_s = margin.work_s(most_s)
    # While one GPU is at the longest chunk, which may come last, the others have nothing left to do.
    tail_s = min(lengths.longest_ms / 1000 / rate * (1 - 1 / gpus), usable_s / 2)
    room_ms = (usable_s - tail_s) * gpus * rate * 1000
    whole_s = lengths.total_ms / 1000 / rate / gpus  # as one task
    at_least = max(1, math.ceil(lengths.total_ms / room_ms), _for_all_gpus(whole_s, margin, wish, site))
    shares = _share_out(lengths, min(at_least, lengths.rows), room_ms)
    fullest_s = max(share.audio_ms for share in shares) / 1000 / rate / gpus
    needed_s = round_up(margin.time_s(fullest_s + tail_s))
    return Sizing(
        gpus=gpus,
        time_s=wish.time_s or min(needed_s, int(most_s)),
        chosen=wish.time_s is None,
        shares=tuple(shares),
        longest_chunk_s=usable_s * rate,
        expected_s=margin.start_up_s + fullest_s,
        work_s=whole_s * gpus,
    )


def _share_out(lengths: Lengths, tasks: int, room_ms: float) -> list[Share]:
    """Share out to as many tasks as it takes until none has too much; a single chunk cannot be shared."""
    for _ in range(_TRIES):
        shares = share_out(lengths, tasks)
        fullest_ms = max((share.audio_ms for share in shares if share.rows > 1), default=0)
        if fullest_ms <= room_ms or tasks >= lengths.rows:
            break
        tasks = min(lengths.rows, max(tasks + 1, math.ceil(tasks * fullest_ms / room_ms)))
    return shares


def _for_all_gpus(whole_s: float, margin: Margin, wish: PlanWish, site: Site) -> int:
    """Return how many tasks it takes to have all GPUs at work at a time, as far as that is worth their start-up."""
    at_a_time = wish.gpus or site.plan_gpus
    if at_a_time is None:
        return 1
    worth = whole_s / (_WORTH_A_START * max(margin.start_up_s, 1.0))
    return int(min(at_a_time // wish.task_gpus(site), worth))


# --- waves ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Wave:
    """Array tasks that are submitted together: one job, one run folder."""

    number: int  # from 1
    first: int  # its first task, among all of the plan
    tasks: int
    rows: int
    audio_ms: int
    running_s: float  # from the start of its first task to the end of its last


@dataclass(frozen=True, slots=True)
class Waves:
    """All of them, one after another."""

    waves: tuple[Wave, ...]
    why: str  # what decides their number
    gpus: int | None  # at a time; None: nobody says, and then nobody knows when it is finished
    gpus_why: str
    parallel: int | None  # tasks at a time; None: as many as there are

    @property
    def running_s(self) -> float | None:
        """How long tasks are running, without any waiting in the queue; None: not known."""
        return None if self.gpus is None else sum(wave.running_s for wave in self.waves)


def make_waves(sizing: Sizing, speed: Speed, margin: Margin, wish: PlanWish, site: Site) -> Waves:
    """Cut the tasks into as few waves as the site allows, all about equally large."""
    most, why = _most_tasks(sizing, site)
    tasks = len(sizing.shares)
    count = -(-tasks // most)
    gpus, gpus_why = _gpus_at_a_time(sizing, wish, site, -(-tasks // count))
    at_a_time = None if gpus is None else max(1, gpus // sizing.gpus)
    waves, first = [], 0
    for number in range(1, count + 1):
        size = tasks // count + (number <= tasks % count)
        shares = sizing.shares[first : first + size]
        task_s = max(share.audio_ms for share in shares) / 1000 / speed.audio_hours_per_gpu_hour / sizing.gpus
        rounds = -(-size // (at_a_time or size))
        running_s = rounds * (margin.start_up_s + task_s)
        waves.append(Wave(number, first, size, _rows(shares), sum(one.audio_ms for one in shares), running_s))
        first += size
    parallel = at_a_time if wish.gpus and at_a_time and at_a_time < waves[0].tasks else None
    return Waves(tuple(waves), why, gpus, gpus_why, parallel)


def _rows(shares: Sequence[Share]) -> int:
    return sum(share.rows for share in shares)


def _most_tasks(sizing: Sizing, site: Site) -> tuple[int, str]:
    """Return how many tasks may be submitted at a time, and which cap says so."""
    who = site.name or "Slurm"
    if site.array_tasks:
        limits = [(site.array_tasks, f"{who} allows arrays of {site.array_tasks:,}")]
    else:
        own = f"arrays of {SLURMS_OWN_ARRAY:,} are Slurm's own limit, as no site says another"
        limits = [(SLURMS_OWN_ARRAY, own)]
    if site.queued_jobs:
        limits.append((max(1, site.queued_jobs - 1), f"{who} queues {site.queued_jobs:,} jobs, the merge job too"))
    if site.gpu_hours:
        task_hours = sizing.gpus * sizing.time_s / 3600
        said = f"{who} allows {site.gpu_hours:,.0f} GPU-hours at a time, and a task asks for {task_hours:,.4g}"
        limits.append((max(1, int(site.gpu_hours / task_hours + 1e-9)), said))
    return min(limits)


def _gpus_at_a_time(sizing: Sizing, wish: PlanWish, site: Site, largest: int) -> tuple[int | None, str]:
    if wish.gpus is not None:
        return wish.gpus, "as --gpus says"
    if site.plan_gpus is not None:
        return max(site.plan_gpus, sizing.gpus), f"as the site file of {site.name} says"
    if site.gpu_hours is not None:
        return largest * sizing.gpus, "all tasks of a wave at once, which is the most that the cap allows"
    return None, "say how many with --gpus N"


# --- asking -----------------------------------------------------------------------------------------------------------

USUAL_CPUS_PER_GPU, USUAL_MEM_GB_PER_GPU = 2, 4  # of badcjobs submit
_MEMORY_MARGIN, _CPU_MARGIN = 1.2, 1.3  # as the report asks for next time
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Asking:
    """What one task asks Slurm for, besides its GPUs and its time, and why."""

    cpus: int
    cpus_why: str
    mem_gb: int
    mem_why: str


def ask_for(gpus: int, speed: Speed, wish: PlanWish, site: Site) -> Asking:
    """Return cores and memory for a task of so many GPUs, never more than a node has."""
    cpus, cpus_why = _cpus(gpus, speed, wish, site)
    mem_gb, mem_why = _memory(gpus, speed, wish)
    if site.node_cpus and cpus > site.node_cpus:
        cpus, cpus_why = site.node_cpus, f"all of a node ({cpus} would be asked for: {cpus_why})"
    if site.node_memory_gb and mem_gb > site.node_memory_gb:
        mem_why = f"all of a node ({mem_gb} GB would be asked for: {mem_why})"
        mem_gb = int(site.node_memory_gb)
    return Asking(cpus, cpus_why, mem_gb, mem_why)


def _cpus(gpus: int, speed: Speed, wish: PlanWish, site: Site) -> tuple[int, str]:
    if wish.cpus is not None:
        return wish.cpus, "as --cpus says"
    cpus, why = USUAL_CPUS_PER_GPU * gpus, f"{USUAL_CPUS_PER_GPU} per GPU, as submit asks for: nothing is measured"
    if speed.cores_per_gpu is not None:
        cpus = math.ceil(_CPU_MARGIN * speed.cores_per_gpu * gpus) + 1
        why = f"measured: {speed.cores_per_gpu:.1f} busy per GPU at most, a third more and one for the wrapper"
    free = int((site.free_cores_per_gpu or 0.0) * gpus)
    if free > cpus:
        return free, f"they cost no more than the GPUs do at {site.name}; needed are {cpus} ({why})"
    return cpus, why


def _memory(gpus: int, speed: Speed, wish: PlanWish) -> tuple[int, str]:
    if wish.mem_gb is not None:
        return math.ceil(wish.mem_gb), "as --mem says"
    if speed.memory_bytes_per_gpu is None:
        said = f"{USUAL_MEM_GB_PER_GPU} GB per GPU, as submit asks for: nothing is measured"
        return USUAL_MEM_GB_PER_GPU * gpus, said
    peak = speed.memory_bytes_per_gpu
    wanted = math.ceil((_MEMORY_MARGIN * peak * gpus + _GIB) / _GIB)
    return wanted, f"measured: {peak / _GIB:.1f} GiB per GPU at most, a fifth more and 1 GiB"
