"""Splits the time and energy of a device by state and by try. Pure functions.

A device has exactly one state at each moment of its task, the first of these that applies:

    working   it processes a chunk that succeeds in the end, or that a running task has not finished yet
    failed    it processes only chunks that fail
    lost      it processes only chunks without a result: their worker or their task was killed
    start_up  the task prepares, or a worker runs that has not started its first chunk
    waiting   workers run, but none of them has a chunk
    idle      no worker runs
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter
from typing import NamedTuple

STATES = ("working", "failed", "lost", "start_up", "waiting", "idle")

Try = tuple[int, int, int, str]  # one try of a chunk: attempt_id, start and end (ms), working, failed or lost
Life = tuple[int, int | None, int]  # one worker: start, start of its first chunk (None: it had none), end (ms)


class Span(NamedTuple):
    """A period in which the state and the tries in progress do not change."""

    from_ms: int
    to_ms: int
    state: str
    attempt_ids: tuple[int, ...] = ()  # the tries in progress, which share it equally


def make_spans(from_ms: int, to_ms: int, tries: Sequence[Try], lives: Sequence[Life]) -> Iterator[Span]:
    """Yield what the device did between two moments, without holes or overlaps."""
    stretches: list[tuple[int, int, str, int | None]] = [(a, b, state, attempt_id) for attempt_id, a, b, state in tries]
    for start_ms, began_ms, end_ms in lives:
        stretches.append((start_ms, end_ms, "waiting", None))
        stretches.append((start_ms, end_ms if began_ms is None else began_ms, "start_up", None))
    if lives:
        stretches.append((from_ms, min(life[0] for life in lives), "start_up", None))
    events = []  # when, +1 or -1, state, attempt_id
    for begin_ms, end_ms, state_at, attempt_id in stretches:
        begin_ms, end_ms = max(begin_ms, from_ms), min(end_ms, to_ms)
        if begin_ms < end_ms:
            events += [(begin_ms, 1, state_at, attempt_id), (end_ms, -1, state_at, attempt_id)]
    present: Counter[str] = Counter()
    in_progress = set[int]()
    at_ms = from_ms
    # In order of time; ends come before starts of the same moment.
    for when_ms, more, state_at, attempt_id in [
        *sorted(events, key=lambda event: event[:2]),
        (to_ms, 0, "", None),
    ]:
        if when_ms > at_ms:
            yield Span(
                at_ms,
                when_ms,
                next((s for s in STATES if present[s]), "idle"),
                tuple(sorted(in_progress)),
            )
            at_ms = when_ms
        present[state_at] += more
        if attempt_id is not None:
            in_progress ^= {attempt_id}  # it starts, or ends


class Cumulated:
    """A quantity that grows over time, and how much of that time was measured."""

    def __init__(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """Take steps (from, to, amount added) in order of time; they do not overlap."""
        self._steps = list(steps)
        self._totals = [0.0, *accumulate(step[2] for step in self._steps)]
        self._measured_ms = [0, *accumulate(step[1] - step[0] for step in self._steps)]

    @property
    def total(self) -> float | None:
        """The amount at the end; None: nothing was measured."""
        return self._totals[-1] if self._steps else None

    def until(self, at_ms: int) -> tuple[float, float]:
        """Return the amount at a moment, and how many milliseconds before it were measured."""
        place = bisect_right(self._steps, at_ms, key=itemgetter(0)) - 1
        if place < 0:
            return 0.0, 0.0
        begin_ms, end_ms, added = self._steps[place]
        part_ms = min(at_ms, end_ms) - begin_ms
        share = part_ms / (end_ms - begin_ms)
        return self._totals[place] + added * share, self._measured_ms[place] + part_ms

    def within(self, span: Span) -> tuple[float, float]:
        """Return the amount added during a span, and how many milliseconds of it were measured."""
        after = self.until(span.to_ms)
        before = self.until(span.from_ms)
        return after[0] - before[0], after[1] - before[1]


Points = Sequence[tuple[int, float | None]]
Steps = Iterator[tuple[int, int, float]]  # from, to, amount added


def power_steps(points: Points, longest_ms: int) -> Steps:
    """Yield the joules between neighbouring readings of power; skip pairs more than ``longest_ms`` apart."""
    for a_ms, a_w, b_ms, b_w in _neighbours(points, longest_ms):
        yield a_ms, b_ms, (a_w + b_w) / 2 * (b_ms - a_ms) / 1000


def busy_steps(points: Points, longest_ms: int) -> Steps:
    """Yield the busy seconds between neighbouring readings; a reading is the busy share since the one before it."""
    for a_ms, _, b_ms, percent in _neighbours(points, longest_ms):
        yield a_ms, b_ms, percent / 100 * (b_ms - a_ms) / 1000


def _neighbours(points: Points, longest_ms: int) -> Iterator[tuple[int, float, int, float]]:
    measured = [(at_ms, value) for at_ms, value in points if value is not None]
    return ((*a, *b) for a, b in pairwise(measured) if 0 < b[0] - a[0] <= longest_ms)


@dataclass(frozen=True, slots=True)
class StateTime:
    """The time of a device in one state, or of one try, and what was measured in it; None: not measured."""

    total_s: float = 0.0
    measured_s: float = 0.0  # the part of it in which the power is known
    busy_s: float | None = None
    energy_j: float | None = None

    def plus(self, spent: StateTime, share: float = 1.0) -> StateTime:
        """Return this time with a share of another one added; a negative share subtracts, but never below 0."""

        def total(value: float | None, more: float | None) -> float | None:
            if more is None or (value is None and share < 0):
                return value
            return max(0.0, (value or 0.0) + share * more)

        return StateTime(
            max(0.0, self.total_s + share * spent.total_s),
            max(0.0, self.measured_s + share * spent.measured_s),
            total(self.busy_s, spent.busy_s),
            total(self.energy_j, spent.energy_j),
        )


def sum_by_state(
    spans: Iterable[Span], busy: Cumulated, energy: Cumulated
) -> tuple[dict[str, StateTime], dict[int, StateTime]]:
    """Return the time, busy seconds and joules of a device by state, and by try; tries at the same time share them."""
    states: dict[str, StateTime] = {}
    tries: dict[int, StateTime] = {}
    for span in spans:
        busy_s, busy_ms = busy.within(span)
        energy_j, energy_ms = energy.within(span)
        measured = (busy_s if busy_ms > 0 else None, energy_j if energy_ms > 0 else None)
        spent = StateTime((span.to_ms - span.from_ms) / 1000, energy_ms / 1000, *measured)
        states[span.state] = states.get(span.state, StateTime()).plus(spent)
        for attempt_id in span.attempt_ids:
            tries[attempt_id] = tries.get(attempt_id, StateTime()).plus(spent, 1 / len(span.attempt_ids))
    return states, tries


def state_seconds(spans: Iterable[Span], from_ms: int, width_ms: int) -> dict[int, Counter[str]]:
    """Return the seconds of each state in stretches of equal width, by the number of the stretch from 0."""
    by_stretch: dict[int, Counter[str]] = {}
    for span in spans:
        at_ms = span.from_ms
        while at_ms < span.to_ms:
            number = (at_ms - from_ms) // width_ms
            end_ms = min(span.to_ms, from_ms + (number + 1) * width_ms)
            by_stretch.setdefault(number, Counter())[span.state] += (end_ms - at_ms) / 1000  # type: ignore[assignment]
            at_ms = end_ms
    return by_stretch
