"""When a run will be done, at the pace of the tasks that run: the same for everybody who tells an end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


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
