"""When a run will be done, at the pace of the tasks that run: the same for everybody who tells an end."""

from __future__ import annotations

import re
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


_SECONDS = re.compile(r"[0-9]{1,10}(\.[0-9]*)?")


_CLOCK = re.compile(
    r"(?:(?:(?P<days>[0-9]{1,5})-)?(?P<hours>[0-9]{1,7}):)?(?P<minutes>[0-9]{1,7}):(?P<seconds>[0-5]?[0-9])"
)


def parse_time_left(text: str) -> float:
    """Read seconds, ``M:S``, ``H:M:S`` or ``D-H:M:S``, the forms in which ``squeue -o %L`` says it.

    Raises ValueError for anything else.
    """
    text = text.strip()
    if _SECONDS.fullmatch(text):
        return float(text)
    parts = _CLOCK.fullmatch(text)
    if parts is None or (parts["hours"] is not None and int(parts["minutes"]) > 59):
        raise ValueError(text)
    days, hours, minutes, seconds = (int(part or 0) for part in parts.group("days", "hours", "minutes", "seconds"))
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
