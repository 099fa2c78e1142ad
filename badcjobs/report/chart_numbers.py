"""The numbers behind the charts of the page: runs of states, envelopes, a choice of devices, a histogram. Pure.

Imported only where Bokeh is there, which brings NumPy.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from badcjobs.model import CHARTED, Envelope, Stretches

Numbers = npt.NDArray[np.float64]
Whole = npt.NDArray[np.int64]

STATES = ("working", "failed", "lost", "start_up", "waiting", "idle")
_PLACES = {state: place for place, state in enumerate(STATES)}
_USUAL_ORDER = ("start_up", "waiting", "working", "failed", "lost", "idle")  # of the life of a worker
MOST_RUNS = 40_000
_COLUMNS = 400
_FEWEST_BARS, _MOST_BARS = 8, 60
_LONG_TAIL = 8  # a longest chunk of so many times the median would squeeze all others into two bars


@dataclass(frozen=True, slots=True)
class Runs:
    """Stretches of one state each, of all devices; ``row`` counts the devices from 0."""

    row: Whole
    left_ms: Whole
    right_ms: Whole
    state: Whole  # place in STATES
    joined: int  # so many neighbouring stretches were taken together to come to few enough
    cut: bool = False  # short stretches of several states were cut into these


def find_runs(devices: Sequence[Stretches | None]) -> Runs:
    """Return what the devices did: each stretch by the state that lasted longest in it, equal neighbours joined.

    A short stretch of several states is cut into them, as long as that does not make too many.
    """
    rows = [(row, device) for row, device in enumerate(devices) if device is not None]
    if any(device.mixed for _, device in rows):
        runs = _join([_runs_of(row, cut_mixed(device), 1) for row, device in rows])
        if len(runs.row) <= MOST_RUNS:
            return replace(runs, cut=True)
    joined = 1
    while True:
        runs = _join([_runs_of(row, device, joined) for row, device in rows])
        if len(runs.row) <= MOST_RUNS or joined >= 64:
            return replace(runs, joined=joined)
        joined *= 2


def cut_mixed(device: Stretches) -> Stretches:
    """Return the stretches with the short ones of several states cut into these, each as long as it lasted.

    Their order is not known: what the neighbours do comes next to them, else it is that of the life of a worker.
    """
    if not device.mixed:
        return device
    from_ms: list[int] = []
    to_ms: list[int] = []
    states: list[str] = []
    for place, (begin_ms, end_ms) in enumerate(zip(device.from_ms, device.to_ms, strict=True)):
        parts = device.mixed.get(place, {device.states[place]: 1.0})
        before = device.states[place - 1] if place else None
        after = device.states[place + 1] if place + 1 < len(device.states) else None
        order = _in_order(parts, before, after)
        spent_s, total_s = 0.0, sum(parts.values())
        for state in order:
            from_ms.append(begin_ms + round((end_ms - begin_ms) * spent_s / total_s))
            spent_s += parts[state]
            to_ms.append(begin_ms + round((end_ms - begin_ms) * spent_s / total_s))
            states.append(state)
    return Stretches(from_ms, to_ms, states, {})


def _in_order(parts: Iterable[str], before: str | None, after: str | None) -> list[str]:
    def rank(state: str) -> int:
        return -1 if state == before else len(STATES) if state == after else _USUAL_ORDER.index(state)

    return sorted(parts, key=rank)


def _runs_of(row: int, device: Stretches, joined: int) -> Runs:
    state = np.array([_PLACES[state] for state in device.states])
    from_ms, to_ms = np.asarray(device.from_ms), np.asarray(device.to_ms)
    if joined > 1:
        starts = np.arange(0, len(state), joined)
        lasting_ms = (state == np.arange(len(STATES))[:, None]) * (to_ms - from_ms)
        state = np.argmax(np.add.reduceat(lasting_ms, starts, axis=1), axis=0)
        from_ms, to_ms = from_ms[starts], to_ms[np.append(starts[1:], len(to_ms)) - 1]
    firsts = np.flatnonzero(np.diff(state, prepend=-1))
    left_ms, right_ms = from_ms[firsts], to_ms[np.append(firsts[1:], len(to_ms)) - 1]
    return Runs(np.full(len(firsts), row), left_ms, right_ms, state[firsts], joined)


def _join(parts: Sequence[Runs]) -> Runs:
    nothing = np.array([], dtype=np.int64)
    columns = [
        np.concatenate([nothing, *(getattr(part, name) for part in parts)])
        for name in ("row", "left_ms", "right_ms", "state")
    ]
    return Runs(columns[0], columns[1], columns[2], columns[3], 1)


@dataclass(frozen=True, slots=True)
class Series:
    """One line with its envelope for each metric, on one axis of time."""

    from_ms: Sequence[int]
    to_ms: Sequence[int]
    metrics: Mapping[str, Envelope]
    inner: Mapping[str, tuple[Sequence[float], Sequence[float]]] = field(default_factory=dict)  # see _middle


def over_all(devices: Sequence[Stretches]) -> Series:
    """Return the smallest, mean and largest reading of all devices together, in columns of equal width."""
    from_ms = np.concatenate([np.asarray(device.from_ms) for device in devices])
    to_ms = np.concatenate([np.asarray(device.to_ms) for device in devices])
    edges = np.linspace(from_ms.min(), to_ms.max(), _COLUMNS + 1)
    width = edges[1] - edges[0]
    first = np.clip(((from_ms - edges[0]) // width).astype(np.int64), 0, _COLUMNS - 1)
    last = np.clip(np.ceil((to_ms - edges[0]) / width).astype(np.int64) - 1, first, _COLUMNS - 1)
    places, column = _spread(first, last)
    inside_ms = np.minimum(to_ms[places], edges[column + 1]) - np.maximum(from_ms[places], edges[column])
    envelopes, inner = {}, {}
    for metric in CHARTED:
        low, mean, high = (
            np.concatenate([np.asarray(getattr(device.metrics[metric], part)) for device in devices])[places]
            for part in ("low", "mean", "high")
        )
        envelopes[metric] = _envelope(column, inside_ms, low, mean, high)
        inner[metric] = _middle(column, mean)
    return Series(edges[:-1].astype(np.int64).tolist(), edges[1:].astype(np.int64).tolist(), envelopes, inner)


def _spread(first: Whole, last: Whole) -> tuple[Whole, Whole]:
    """Return for every column that a stretch touches the stretch's place and the column."""
    many = last - first + 1
    places = np.repeat(np.arange(len(first)), many)
    within = np.arange(len(places)) - np.repeat(np.cumsum(many) - many, many)
    return places, first[places] + within


def _envelope(column: Whole, weight: Numbers, low: Numbers, mean: Numbers, high: Numbers) -> Envelope:
    known = np.isfinite(mean) & (weight > 0)
    column, weight = column[known], weight[known]
    lows, highs = np.full(_COLUMNS, np.inf), np.full(_COLUMNS, -np.inf)
    np.minimum.at(lows, column, low[known])
    np.maximum.at(highs, column, high[known])
    weights = np.bincount(column, weight, _COLUMNS)
    empty = weights == 0
    means = np.bincount(column, weight * mean[known], _COLUMNS) / np.where(empty, np.nan, weights)
    lows[empty] = highs[empty] = np.nan
    return Envelope(lows.tolist(), means.tolist(), highs.tolist())


def _middle(column: Whole, mean: Numbers) -> tuple[list[float], list[float]]:
    """Return between which values four in five of the devices' means lie, column by column (nearest rank)."""
    known = np.isfinite(mean)
    order = np.lexsort((mean[known], column[known]))
    values, columns = mean[known][order], column[known][order]
    many = np.bincount(columns, minlength=_COLUMNS)
    first = np.cumsum(many) - many
    found = []
    for share in (0.1, 0.9):
        place = np.clip(first + np.rint(share * (many - 1)).astype(np.int64), 0, max(0, len(values) - 1))
        picked = values[place] if len(values) else np.full(_COLUMNS, np.nan)
        found.append(np.where(many > 0, picked, np.nan).tolist())
    return found[0], found[1]


def choose(rankings: Mapping[str, Sequence[int]], everything: int, most: int) -> dict[int, str]:
    """Return which devices are pictured one by one, and why: all, or in turn the worst of each ranking and a spread."""
    if everything <= most:
        return dict.fromkeys(range(everything), "")
    chosen: dict[int, str] = {}
    deepest = max((len(ranking) for ranking in rankings.values()), default=0)
    for depth in range(deepest):
        for why, ranking in rankings.items():
            if depth < len(ranking) and len(chosen) < most // 2:
                chosen.setdefault(ranking[depth], why)
    step = everything / (most - len(chosen))
    for number in range(most - len(chosen)):
        chosen.setdefault(int(number * step), "")
    return dict(sorted(chosen.items()))


@dataclass(frozen=True, slots=True)
class Histogram:
    """How many chunks took how long."""

    edges_s: Sequence[float]
    counts: Sequence[int]
    logarithmic: bool


def make_histogram(durations_ms: Mapping[int, int]) -> Histogram | None:
    """Return the histogram of durations; with a long tail its bars are of equal width on a logarithmic scale."""
    if not durations_ms:
        return None
    seconds = np.maximum(np.array(sorted(durations_ms)), 1) / 1000
    many = np.array([durations_ms[key] for key in sorted(durations_ms)])
    median_s = seconds[np.searchsorted(np.cumsum(many), many.sum() / 2)]
    shortest_s, longest_s = float(seconds[0]), float(seconds[-1])
    bars = int(np.clip(2 * np.sqrt(many.sum()), _FEWEST_BARS, _MOST_BARS))
    tail = longest_s > _LONG_TAIL * float(median_s)
    if tail:
        edges = np.geomspace(shortest_s, longest_s * 1.0001, bars + 1)
    else:
        edges = _round_edges(shortest_s, longest_s, bars)
    # An edge may lie a rounding error beyond the value it was made from.
    counts, _ = np.histogram(np.clip(seconds, edges[0], edges[-1]), edges, weights=many)
    return Histogram(edges.tolist(), counts.astype(int).tolist(), tail)


def _round_edges(low: float, high: float, bars: int) -> Numbers:
    """Return edges that people would choose: a width of 1, 2 or 5 times a power of ten."""
    rough = max((high - low) / bars, 1e-3)
    power = 10.0 ** np.floor(np.log10(rough))
    width = float(next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999))
    first, last = np.floor(low / width), np.floor(high / width) + 1
    edges: Numbers = np.arange(first, last + 0.5) * width
    return edges


def worst_first(values: Iterable[float | None], many: int, *, least: float) -> list[int]:
    """Return the places of the largest values above ``least``, the largest first."""
    known = [(value, -place) for place, value in enumerate(values) if value is not None and value > least]
    return [-place for _, place in sorted(known, reverse=True)[:many]]
