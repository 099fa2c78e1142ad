"""Which tasks can be submitted at a time under a site's caps, and when the last of them would be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.plan.margin import Margin
from badcjobs.plan.shares import Share
from badcjobs.plan.sizing import Sizing
from badcjobs.plan.speed import Speed
from badcjobs.plan.wish import SLURMS_OWN_ARRAY, Caps, Wish


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


def make_waves(sizing: Sizing, speed: Speed, margin: Margin, wish: Wish, caps: Caps) -> Waves:
    """Cut the tasks into as few waves as the caps allow, all about equally large."""
    most, why = _most_tasks(sizing, caps)
    tasks = len(sizing.shares)
    count = -(-tasks // most)
    gpus, gpus_why = _gpus_at_a_time(sizing, wish, caps, -(-tasks // count))
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


def _most_tasks(sizing: Sizing, caps: Caps) -> tuple[int, str]:
    """Return how many tasks may be submitted at a time, and which cap says so."""
    who = caps.site or "Slurm"
    if caps.array_tasks:
        limits = [(caps.array_tasks, f"{who} allows arrays of {caps.array_tasks:,}")]
    else:
        own = f"arrays of {SLURMS_OWN_ARRAY:,} are Slurm's own limit, as no site says another"
        limits = [(SLURMS_OWN_ARRAY, own)]
    if caps.queued_jobs:
        limits.append((max(1, caps.queued_jobs - 1), f"{who} queues {caps.queued_jobs:,} jobs, the merge job too"))
    if caps.gpu_hours:
        task_hours = sizing.gpus * sizing.time_s / 3600
        said = f"{who} allows {caps.gpu_hours:,.0f} GPU-hours at a time, and a task asks for {task_hours:,.4g}"
        limits.append((max(1, int(caps.gpu_hours / task_hours + 1e-9)), said))
    return min(limits)


def _gpus_at_a_time(sizing: Sizing, wish: Wish, caps: Caps, largest: int) -> tuple[int | None, str]:
    if wish.gpus is not None:
        return wish.gpus, "as --gpus says"
    if caps.plan_gpus is not None:
        return max(caps.plan_gpus, sizing.gpus), f"as the site file of {caps.site} says"
    if caps.gpu_hours is not None:
        return largest * sizing.gpus, "all tasks of a wave at once, which is the most that the cap allows"
    return None, "say how many with --gpus N"
