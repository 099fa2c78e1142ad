"""Choose the number of array tasks and the audio of each, so that each ends within its time limit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from badcjobs.cluster.sbatch_options import parse_memory, parse_minutes
from badcjobs.errors import BadInput
from badcjobs.planning.plan_speed import ASSUMED_START_UP_S, Speed
from badcjobs.planning.plan_survey import Lengths
from badcjobs.planning.site import Site
from badcjobs.settings import PlanSettings, RunSettings, SubmitSettings, refuse
from badcjobs.words import clock, round_up

# Three minutes before the end Slurm's warning comes, and nothing new is begun; then the last results are published.
END_S = 300.0
LEAST_FACTOR = 1.25
UNMEASURED_FACTOR = 1.5
SLURMS_OWN_ARRAY = 1_000  # the default of MaxArraySize is 1001
USUAL_TIME_H = 12  # as of badcjobs submit


@dataclass(frozen=True)
class PlanWish:
    """What the tasks of a plan are to be like; None: not set."""

    time_s: int | None = None
    gpus_per_task: int | None = None
    parallel: int | None = None  # tasks at a time
    margin: float | None = None
    cpus: int | None = None
    mem_gb: float | None = None
    prefer: str = "cheapest"
    workers: int | None = None  # per GPU
    max_gpus: int | None = None  # that a task uses

    @classmethod
    def of(cls, submit: SubmitSettings, plan: PlanSettings, run: RunSettings) -> PlanWish:
        """Read the tables [submit] and [plan], and of [run] what each task uses."""
        try:
            time_s = None if submit.time is None else 60 * parse_minutes(submit.time)
            mem_gb = None if submit.mem is None else parse_memory(submit.mem) / 1024
        except ValueError as error:
            raise BadInput(
                "this cannot be planned",
                why=str(error),
                fix="--time 12:00:00",
            ) from error
        return cls(
            time_s=time_s,
            gpus_per_task=submit.gpus_per_task,
            parallel=submit.parallel,
            margin=plan.margin,
            cpus=submit.cpus,
            mem_gb=mem_gb,
            prefer=plan.prefer,
            workers=run.workers_wanted,
            max_gpus=run.max_gpus,
        )

    def longest_s(self, site: Site) -> int:
        """Return the most time that a task may ask for."""
        return self.time_s or site.time_limit_s(site.plan_time_h or USUAL_TIME_H)

    def task_gpus(self, site: Site) -> int:
        """Return the GPUs of each task: all of a node, if the site has their number, but none that it does not use."""
        gpus = self.gpus_per_task or site.node_gpus or 1
        return min(gpus, self.max_gpus or gpus)


def check_wish(wish: PlanWish, site: Site) -> None:
    """Refuse what cannot be planned, before a long reading; all mistakes in one message."""
    mistakes = []
    fixes = []
    if wish.gpus_per_task == 0:
        mistakes.append("--gpus-per-task 0: only tasks with GPUs can be planned")
        fixes.append("--gpus-per-task 1")
    gpus = wish.task_gpus(site)
    hours = wish.longest_s(site) / 3600
    most_gpu_hours = site.gpu_hours or 0.0
    for amount, most, unit, fix in (
        ((wish.time_s or 0) / 3600, site.time_h, "hours", f"--time {clock(site.time_limit_s(hours))}"),
        (gpus, site.node_gpus, "GPUs on a node", f"--gpus-per-task {site.node_gpus}"),
        (wish.cpus, site.node_cpus, "cores on a node", f"--config submit.cpus={site.node_cpus}"),
        (wish.mem_gb, site.node_memory_gb, "GB on a node", f"--config submit.mem={int(site.node_memory_gb or 0)}G"),
        (gpus * hours, most_gpu_hours, "GPU-hours", f"--time {clock(site.time_limit_s(most_gpu_hours / gpus))}"),
    ):
        if amount and most and amount > most:
            mistakes.append(f"a task asks for {amount:g} {unit}, but {site.name} allows {most:g}")
            fixes.append(fix)
    refuse(mistakes, " ".join(fixes), "this cannot be planned")


# --- margins ----------------------------------------------------------------------------------------------------------


class Margin(NamedTuple):
    """The part of a task's time limit that is not planned for work."""

    start_up_s: float
    start_up_measured: bool
    end_s: float
    factor: float  # a task may be so many times as slow as the mean and still ends in time
    why: str  # where the factor is from

    @property
    def start_up_origin(self) -> str:
        """Where the start-up is from."""
        if self.start_up_measured:
            return "measured"
        return "assumed"

    def work_s(self, time_s: float) -> float:
        """Return the seconds of work at the mean speed that fit into a time limit; raise BadInput where none do."""
        left_s = time_s - self.start_up_s - self.end_s
        if left_s <= 0:
            raise BadInput(
                f"a time limit of {time_s / 60:g} min leaves no time for work",
                why=f"start-up {self.start_up_s:.0f} s ({self.start_up_origin}), an orderly end {self.end_s:.0f} s",
                fix=f"--time {clock(round_up(4 * (self.start_up_s + self.end_s)))}",
            )
        return left_s / self.factor


def make_margin(speed: Speed, factor: float | None) -> Margin:
    """Return what to keep back: from the measured speed, or with the factor of [plan]."""
    if factor is not None:
        why = "from [plan] margin"
    elif speed.slowness is None:
        factor = UNMEASURED_FACTOR
        why = "default: the spread of speeds is not known"
    else:
        factor = max(LEAST_FACTOR, speed.slowness)
        why = f"the slowest of {speed.tasks} measured tasks took {speed.slowness:.2f} times as long as the mean"
        if speed.slowness < factor:
            why += f", and at least {LEAST_FACTOR:g} is kept for slow nodes"
    start_up_s = ASSUMED_START_UP_S if speed.start_up_s is None else speed.start_up_s
    return Margin(start_up_s, speed.start_up_s is not None, END_S, factor, why)


# --- shares -----------------------------------------------------------------------------------------------------------


class Share(NamedTuple):
    """What one array task gets."""

    rows: int
    audio_ms: int


def share_out(lengths: Lengths, tasks: int) -> list[Share]:
    """Return the shares of the tasks, at most one for each chunk, and no empty ones.

    Each task takes its part of what is left, to within half a chunk, so that one very long chunk does not leave those
    behind it with nothing. Whole numbers only: the same source gives the same shares on every machine.
    """
    runs = lengths.runs()
    rows_left = lengths.rows
    left_ms = lengths.total_ms
    shares = []
    length_ms = many = 0  # of neighbours that are equally long, and not taken yet
    for tasks_left in range(max(1, min(tasks, lengths.rows)), 0, -1):
        rows = audio_ms = 0
        most = rows_left - (tasks_left - 1)  # each of the others needs one
        while rows < most and (not rows or not many):
            if not many:
                length_ms, many = next(runs)
            fitting = _fitting(left_ms, tasks_left, audio_ms, length_ms)
            if not rows:  # a task gets at least one
                fitting = max(1, fitting)
            taken = min(most - rows, many, fitting)
            rows += taken
            audio_ms += taken * length_ms
            many -= taken
        rows_left -= rows
        left_ms -= audio_ms
        shares.append(Share(rows, audio_ms))
    return shares


def _fitting(left_ms: int, tasks_left: int, audio_ms: int, length_ms: int) -> int:
    """Return how many chunks of a length have their middle within the part of the next task."""
    if length_ms == 0:
        return 2**62
    room = 2 * left_ms - (2 * audio_ms + length_ms) * tasks_left
    if room >= 0:
        return room // (2 * length_ms * tasks_left) + 1
    return 0


# --- sizing -----------------------------------------------------------------------------------------------------------

_WORTH_A_START = 10  # a task is not cut off for more GPUs unless it works ten times as long as it starts up
_TRIES = 50


class Sizing(NamedTuple):
    """The array tasks of a plan."""

    gpus: int  # of each task
    time_s: int  # that each asks for
    shares: Sequence[Share]
    longest_chunk_s: float  # seconds of audio that one GPU finishes in a task's time, however slow
    expected_s: float  # of the fullest task, at the mean speed


def count_tasks(
    lengths: Lengths,
    rate: float,
    gpus: int,
    margin: Margin,
    wish: PlanWish,
    site: Site,
) -> tuple[int, float, float]:
    """Return about how many tasks are needed, the audio that one has room for in ms, and its longest tail in s."""
    usable_s = margin.work_s(wish.longest_s(site))
    # While one GPU is at the longest chunk, which may come last, the others have nothing left to do.
    tail_s = min(lengths.longest_ms / 1000 / rate * (1 - 1 / gpus), usable_s / 2)
    room_ms = (usable_s - tail_s) * gpus * rate * 1000
    whole_s = lengths.total_ms / 1000 / rate / gpus  # as one task
    # More, to have all GPUs at work at a time, as far as that is worth their start-up.
    worth = whole_s / (_WORTH_A_START * max(margin.start_up_s, 1.0))
    at_a_time = int(min(wish.parallel or (site.plan_gpus or 0) // gpus, worth))
    return min(max(1, math.ceil(lengths.total_ms / room_ms), at_a_time), lengths.rows), room_ms, tail_s


def size_tasks(
    lengths: Lengths,
    speed: Speed,
    margin: Margin,
    wish: PlanWish,
    site: Site,
) -> Sizing:
    """Return the fewest tasks that end in time; more where there are GPUs for them and each is worth its start-up."""
    gpus = wish.task_gpus(site)
    rate = speed.audio_hours_per_gpu_hour
    most_s = wish.longest_s(site)
    tasks, room_ms, tail_s = count_tasks(lengths, rate, gpus, margin, wish, site)
    for _ in range(_TRIES):  # until none has too much; a single chunk cannot be shared
        shares = share_out(lengths, tasks)
        fullest_ms = max((share.audio_ms for share in shares if share.rows > 1), default=0)
        if fullest_ms <= room_ms or tasks >= lengths.rows:
            break
        tasks = min(lengths.rows, max(tasks + 1, math.ceil(tasks * fullest_ms / room_ms)))
    fullest_s = max(share.audio_ms for share in shares) / 1000 / rate / gpus
    needed_s = round_up(margin.start_up_s + margin.factor * (fullest_s + tail_s) + margin.end_s)
    return Sizing(
        gpus=gpus,
        time_s=wish.time_s or min(needed_s, most_s),
        shares=shares,
        longest_chunk_s=margin.work_s(most_s) * rate,
        expected_s=margin.start_up_s + fullest_s,
    )


# --- waves ------------------------------------------------------------------------------------------------------------


class Wave(NamedTuple):
    """Array tasks that are submitted together: one job, one run folder."""

    number: int  # from 1
    first: int  # its first task, among all of the plan
    tasks: int
    rows: int
    audio_ms: int
    running_s: float  # from the start of its first task to the end of its last


def make_waves(
    sizing: Sizing,
    speed: Speed,
    margin: Margin,
    most: int,
    at_a_time: int | None,
) -> list[Wave]:
    """Cut the tasks into waves of at most so many, as few as can be, all about equally large."""
    tasks = len(sizing.shares)
    number_of_waves = -(-tasks // most)
    waves = []
    first = 0
    for number in range(1, number_of_waves + 1):
        size = tasks // number_of_waves + (number <= tasks % number_of_waves)
        shares = sizing.shares[first : first + size]
        fullest_s = max(share.audio_ms for share in shares) / 1000
        task_s = margin.start_up_s + fullest_s / speed.audio_hours_per_gpu_hour / sizing.gpus
        rounds = -(-size // (at_a_time or size))
        wave = Wave(
            number=number,
            first=first,
            tasks=size,
            rows=sum(share.rows for share in shares),
            audio_ms=sum(share.audio_ms for share in shares),
            running_s=rounds * task_s,
        )
        waves.append(wave)
        first += size
    return waves


def most_tasks(sizing: Sizing, site: Site) -> tuple[int, str]:
    """Return how many tasks may be submitted at a time, and which limit applies."""
    limits = site.task_limits()
    if not site.array_tasks:
        limits.append((SLURMS_OWN_ARRAY, f"arrays of {SLURMS_OWN_ARRAY:,} are the default limit of Slurm"))
    if site.gpu_hours:
        task_hours = sizing.gpus * sizing.time_s / 3600
        why = f"{site.name} allows {site.gpu_hours:,.12g} GPU-hours at a time, and a task asks for {task_hours:,.4g}"
        limits.append((max(1, int(site.gpu_hours / task_hours + 1e-9)), why))
    return min(limits)


def tasks_at_a_time(
    sizing: Sizing,
    wish: PlanWish,
    site: Site,
    most: int,
) -> tuple[int | None, str]:
    """Return how many tasks of a wave work at the same time, and why; None: not known, nor when all is finished."""
    tasks = len(sizing.shares)
    number_of_waves = -(-tasks // most)
    limits = [(-(-tasks // number_of_waves), "all tasks of a wave at once")]
    if wish.parallel is not None:
        limits.append((wish.parallel, "from --parallel"))
    elif site.plan_gpus is not None:
        limits.append((max(1, site.plan_gpus // sizing.gpus), f"from the site file of {site.name}"))
    elif not site.gpu_hours:
        return None, "add --parallel N"
    return min(limits)
