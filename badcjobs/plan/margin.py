"""How much of its time a task may be given work for: what start-up, a slow node and an orderly end leave."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.errors import BadInput
from badcjobs.plan.speed import ASSUMED_START_UP_S, Speed

# Three minutes before the end Slurm's warning comes, and nothing new is begun; then the last results are published.
END_S = 300.0
LEAST_FACTOR, UNMEASURED_FACTOR = 1.25, 1.5
_STEP_S, _LONG_STEP_S, _LONG_S = 300, 1800, 3 * 3600


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
