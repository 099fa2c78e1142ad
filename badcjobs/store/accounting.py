"""Where a device's time and energy went: every moment of a task has one state, every joule one owner. Pure.

At each moment the first of these that is true names the state of a device:

    working   a chunk is being worked on that was done in the end, or, in a running task, has not ended yet
    failed    only chunks that will fail are being worked on
    lost      only chunks that nobody will ever hear of: their worker or their task was killed
    start_up  the task prepares, or a worker is alive that has not begun its first chunk
    waiting   workers are alive, and none has a chunk: it is being fetched, or there is none
    idle      no worker is alive
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

STATES = ("working", "failed", "lost", "start_up", "waiting", "idle")
OF_CHUNKS = STATES[:3]

_ALIVE, _STARTING = "alive", "starting"


Try = tuple[int, int, int, str]  # of a chunk on the device: attempt_id, from and to (ms), one of OF_CHUNKS
Life = tuple[int, int | None, int]  # of a worker: from, when it began its first chunk (None: never), to (ms)


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch in which nothing changes."""

    from_ms: int
    to_ms: int
    state: str
    attempt_ids: tuple[int, ...] = ()  # the tries in flight, which share it equally

    @property
    def seconds(self) -> float:
        return (self.to_ms - self.from_ms) / 1000


def make_spans(from_ms: int, to_ms: int, tries: Sequence[Try], lives: Sequence[Life]) -> Iterator[Span]:
    """Yield what the device did from one moment to another, without a hole and without an overlap."""
    stretches: list[tuple[int, int, str, int | None]] = [(begin, end, state, one) for one, begin, end, state in tries]
    for start_ms, began_ms, end_ms in lives:
        stretches.append((start_ms, end_ms, _ALIVE, None))
        stretches.append((start_ms, end_ms if began_ms is None else began_ms, _STARTING, None))
    if lives:
        stretches.append((from_ms, min(life[0] for life in lives), _STARTING, None))
    events: list[tuple[int, int, str, int | None]] = []  # when, one more or one less, what, which try
    for begin_ms, end_ms, what, attempt_id in stretches:
        begin_ms, end_ms = max(begin_ms, from_ms), min(end_ms, to_ms)
        if begin_ms < end_ms:
            events += [(begin_ms, 1, what, attempt_id), (end_ms, -1, what, attempt_id)]
    present: Counter[str] = Counter()
    flying: dict[int, None] = {}
    at_ms = from_ms
    # In order of time; at one moment ends come first.
    for when_ms, more, what, attempt_id in [*sorted(events, key=lambda event: event[:2]), (to_ms, 0, "", None)]:
        if when_ms > at_ms:
            yield Span(at_ms, when_ms, _state(present), tuple(flying))
            at_ms = when_ms
        present[what] += more
        if attempt_id is not None and more > 0:
            flying[attempt_id] = None
        elif attempt_id is not None:
            flying.pop(attempt_id)


def _state(present: Counter[str]) -> str:
    names = {_STARTING: "start_up", _ALIVE: "waiting"}
    found = next((what for what in (*OF_CHUNKS, *names) if present[what]), None)
    return "idle" if found is None else names.get(found, found)


class Cumulated:
    """A quantity that grew over time, and for how much of that time it was measured."""

    def __init__(self, steps: Iterable[tuple[int, int, float]]) -> None:
        """Take steps (from, to, how much was added) in order of time, none overlapping."""
        steps = list(steps)
        self._starts = [step[0] for step in steps]
        self._steps = steps
        self._totals = [0.0, *accumulate(step[2] for step in steps)]
        self._measured_ms = [0, *accumulate(step[1] - step[0] for step in steps)]

    @property
    def total(self) -> float | None:
        """How much there was in the end; None: nothing was measured."""
        return self._totals[-1] if self._steps else None

    def until(self, at_ms: int) -> tuple[float, float]:
        """Return how much there was by then, and how many milliseconds were measured by then."""
        place = bisect_right(self._starts, at_ms) - 1
        if place < 0:
            return 0.0, 0.0
        begin_ms, end_ms, added = self._steps[place]
        part_ms = min(at_ms, end_ms) - begin_ms
        share = part_ms / (end_ms - begin_ms)
        return self._totals[place] + added * share, self._measured_ms[place] + part_ms

    def within(self, span: Span) -> tuple[float, float]:
        """Return how much was added in a span, and how many milliseconds of it were measured."""
        after, before = self.until(span.to_ms), self.until(span.from_ms)
        return after[0] - before[0], after[1] - before[1]


Points = Sequence[tuple[int, float | None]]
Steps = Iterator[tuple[int, int, float]]  # from, to, how much was added


def power_steps(points: Points, longest_ms: int) -> Steps:
    """Yield the joules between neighbouring readings of power; never across a hole."""
    for a_ms, a_w, b_ms, b_w in _neighbours(points, longest_ms):
        yield a_ms, b_ms, (a_w + b_w) / 2 * (b_ms - a_ms) / 1000


def busy_steps(points: Points, longest_ms: int) -> Steps:
    """Yield the busy seconds between neighbouring readings; each says what share was busy since the one before."""
    for a_ms, _, b_ms, percent in _neighbours(points, longest_ms):
        yield a_ms, b_ms, percent / 100 * (b_ms - a_ms) / 1000


def _neighbours(points: Points, longest_ms: int) -> Iterator[tuple[int, float, int, float]]:
    known = [(at_ms, value) for at_ms, value in points if value is not None]
    return ((*a, *b) for a, b in pairwise(known) if 0 < b[0] - a[0] <= longest_ms)


@dataclass(slots=True)
class Account:
    """Seconds, and what was measured in them; None: nothing was."""

    seconds: float = 0.0
    measured_s: float = 0.0  # for so many of them the power is known
    busy_s: float | None = None
    energy_j: float | None = None

    def add(self, seconds: float, busy: tuple[float, float], energy: tuple[float, float], share: float = 1.0) -> None:
        """Add a stretch: its length, (busy seconds, measured ms) and (joules, measured ms)."""
        self.seconds += seconds * share
        self.measured_s += energy[1] / 1000 * share
        if busy[1] > 0:
            self.busy_s = (self.busy_s or 0.0) + busy[0] * share
        if energy[1] > 0:
            self.energy_j = (self.energy_j or 0.0) + energy[0] * share


def keep_books(
    spans: Iterable[Span], busy: Cumulated, energy: Cumulated
) -> tuple[dict[str, Account], dict[int, Account]]:
    """Share time, busy seconds and joules of a device out, by state and by try; whatever is shared is shared once."""
    states: dict[str, Account] = {}
    tries: dict[int, Account] = {}
    for span in spans:
        added_busy, added_energy = busy.within(span), energy.within(span)
        states.setdefault(span.state, Account()).add(span.seconds, added_busy, added_energy)
        for attempt_id in span.attempt_ids:
            share = 1 / len(span.attempt_ids)
            tries.setdefault(attempt_id, Account()).add(span.seconds, added_busy, added_energy, share)
    return states, tries


def state_seconds(spans: Iterable[Span], from_ms: int, width_ms: int) -> dict[int, Counter[str]]:
    """Return how many seconds of each state there are in each stretch of equal width, by its number from 0."""
    found: dict[int, Counter[str]] = {}
    for span in spans:
        at_ms = span.from_ms
        while at_ms < span.to_ms:
            number = (at_ms - from_ms) // width_ms
            end_ms = min(span.to_ms, from_ms + (number + 1) * width_ms)
            found.setdefault(number, Counter())[span.state] += (end_ms - at_ms) / 1000  # type: ignore[assignment]
            at_ms = end_ms
    return found
