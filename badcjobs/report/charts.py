"""The charts of the page: which devices are shown, the data of each chart, and what was left out. Pure.

Imported only if Bokeh, and with it NumPy, is installed.
"""

from __future__ import annotations

import base64
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice, zip_longest
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from badcjobs.model import CHARTED, ChartData, Envelope, Stretches, not_none
from badcjobs.report import chart_figures as figures
from badcjobs.report.chart_figures import STATES, Histogram, MetricForm, Runs, Whole
from badcjobs.report.progress import over_time
from badcjobs.report.rules import known_texts
from badcjobs.report.summary import STATE_WORDS, Summary, count_devices, devices_words
from badcjobs.store.read_model import DeviceFacts
from badcjobs.words import natural

Numbers = npt.NDArray[np.float64]
Read = Callable[[DeviceFacts], Stretches | None]
Rankings = Mapping[str, Sequence[int]]  # reason → devices, worst first
Inner = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # metric → lower and upper edge; see _middle

_PLACES = {state: place for place, state in enumerate(STATES)}
_LIFE = ("start_up", "waiting", "working", "failed", "lost", "idle")  # the usual order of the states of a worker
_USUAL_ORDER: Mapping[str | None, int] = {state: place for place, state in enumerate(_LIFE)}
MOST_RUNS = 40_000
MOST_ROWS = 4_000  # of the timeline
_MOST_RANKED = 500  # devices from which the inner band is computed
_BLOCK = 128
_COLUMNS = 400
_FEWEST_BARS = 8
_MOST_BARS = 60
_LONG_TAIL = 8  # if the longest chunk takes this many times the median, the scale is logarithmic
MOST_PICTURED = 240
_FEWEST_TRIES = 5  # fewer need no histogram
_GIB = 2**30
_STEPS = 60_000  # a figure takes two bytes: finer than a pixel on any screen
_NOTHING = 65_535
_CHOSEN = (
    "the least busy, the slowest, the hottest, those with the longest gaps, those with failed or lost work, and an even"
    " sample of the others. The charts of all devices together include every device."
)
_NOTES = (  # how the data were reduced, and what was left out; see rules.say
    "Each device is shown in at most 120 intervals of equal length. An interval keeps its smallest, mean and largest"
    " reading, so peaks stay visible. The timeline shows the state that lasted longest in an interval; an interval of"
    " one second or less shows all its states, in their likely order. The table below counts every second.",
    "With this many devices, the timeline merges {joined} neighbouring intervals into one.",
    "There are no data over time for {unknown}.",
    "The timeline shows {rows:whole} of {known:whole} devices: " + _CHOSEN,
    "You can select {shown:whole} of {known:whole} devices below: " + _CHOSEN,
)


class Charts(NamedTuple):
    """The charts for the page; the keys of ``places`` are timeline, histogram and those of CHARTED."""

    chart_code: str
    script: str
    places: Mapping[str, str]
    data: Mapping[str, Any]  # for page.js
    histogram: Histogram | None
    notes: tuple[str, ...]  # how the data were reduced, and what was left out


def draw(summary: Summary, data: ChartData) -> Charts:
    """Return the charts of a job."""
    drawn, sent, notes = _draw_over_time(summary, data)
    histogram = None
    durations_ms = summary.facts.durations
    if sum(durations_ms.values()) >= _FEWEST_TRIES:
        histogram = make_histogram(durations_ms)
        drawn["histogram"] = figures.histogram(histogram)
    if not drawn:
        return Charts("", "", {}, {}, None, ())
    script, places = figures.as_parts(drawn)
    return Charts(figures.chart_code(), script, places, sent, histogram, notes)


def _draw_over_time(summary: Summary, data: ChartData) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """Return the charts over time, their data for page.js, and notes; all empty without data."""
    devices = summary.devices
    read = over_time(data, summary.facts.tasks)
    rankings = _rankings(devices)
    rows: dict[int, Stretches | None] = dict.fromkeys(choose(rankings, len(devices), MOST_ROWS))
    unknown = []
    spans_ms = []
    for place, device in enumerate(devices):
        stretches = read(device)  # one device at a time: those of a large array do not fit into memory
        if stretches is None:
            unknown.append(device)
            continue
        spans_ms.append((stretches.from_ms[0], stretches.to_ms[-1]))
        if place in rows:
            rows[place] = replace(stretches, metrics={})
    if not spans_ms:
        return {}, {}, ()

    from_ms = min(begin_ms for begin_ms, _ in spans_ms)
    to_ms = max(end_ms for _, end_ms in spans_ms)
    runs = find_runs(list(rows.values()))
    together, inner = over_all(filter(None, map(read, devices)), from_ms, to_ms, len(spans_ms))
    forms = _forms(devices, together)
    times = figures.time_range(from_ms, to_ms)
    drawn = {"timeline": figures.timeline(runs, len(rows), times)}
    drawn |= {form.name: figures.metric(form, times) for form in forms}

    single = list(_single_devices(devices, rankings, read, forms))
    sent = {
        **_row_names([devices[place] for place in rows]),
        "states": {state: STATE_WORDS[state] for state in STATES},
        "forms": {form.name: [form.bottom, form.top] for form in forms},
        "series": [_packed(_name_of_all(devices), together, forms, inner), *single],
    }
    about = {
        "joined": runs.joined if runs.joined > 1 else None,
        "unknown": devices_words(unknown) if unknown else None,
        "rows": len(rows) if len(rows) < len(devices) else None,
        "shown": len(single) if len(single) < len(spans_ms) else None,
        "known": len(spans_ms),
    }
    return drawn, sent, tuple(known_texts(_NOTES, about))


def _single_devices(
    devices: Sequence[DeviceFacts], rankings: Rankings, read: Read, forms: Sequence[MetricForm]
) -> Iterator[dict[str, Any]]:
    """Yield the series of the devices that can be picked."""
    for place, why in choose(rankings, len(devices), MOST_PICTURED).items():
        stretches = read(devices[place])
        if stretches is not None:
            because = f" ({why})" if why else ""
            yield _packed(f"{_full_name(devices[place])}{because}", stretches, forms)


def _name_of_all(devices: Sequence[DeviceFacts]) -> str:
    many = count_devices(devices)
    return f"All {many:,} devices together" if many > 1 else "The device"


def _full_name(device: DeviceFacts) -> str:
    return f"{device.task} · device {device.label}"


def _row_names(rows: Sequence[DeviceFacts]) -> dict[str, Any]:
    """Return the names of the rows of the timeline: a short one for the axis, a full one for the pointer.

    Also returns the names of the devices, sorted by node, and the device of each row.
    """
    full = [_full_name(device) for device in rows]
    short = [f"{device.task.split('.')[0]} · {device.label}" for device in rows]
    if len(set(short)) < len(short):
        short = full
    labels = {device.card: f"{device.node} · {device.label}" for device in rows}
    order = sorted(labels, key=lambda card: (natural(labels[card]), card))
    place_of = {card: place for place, card in enumerate(order)}
    return {
        "rows": [[*names] for names in zip(short, full, strict=True)],
        "cards": {"names": [labels[card] for card in order], "of": [place_of[device.card] for device in rows]},
    }


def _rankings(devices: Sequence[DeviceFacts]) -> dict[str, list[int]]:
    """Return the devices that are worth a look, by reason, worst first."""
    figures: Mapping[str, Callable[[DeviceFacts], float | None]] = {
        "failed or lost work": lambda d: d.state_s.get("failed", 0.0) + d.state_s.get("lost", 0.0),
        "least busy": lambda d: None if d.busy_mean_percent is None else 100 - d.busy_mean_percent,
        "slowest": lambda d: d.work.chunk_p50_s,
        "hottest": lambda d: d.temperature_max_c,
        "longest gaps": lambda d: d.gap_s,
    }
    rankings = {}
    for why, figure in figures.items():
        values = {place: figure(device) or 0.0 for place, device in enumerate(devices)}
        ranked = sorted(filter(values.get, values), key=lambda place: -values[place])
        rankings[why] = ranked[:MOST_ROWS]
    return rankings


def _forms(devices: Sequence[DeviceFacts], series: Stretches) -> list[MetricForm]:
    """Return how to draw each metric that any device has."""
    memory_gib = _same(d.memory_total_bytes and d.memory_total_bytes / _GIB for d in devices)
    power_w = _same(d.power_limit_w for d in devices)
    lows = {name: _known(series.metrics[name].low) for name in CHARTED}
    tops = {name: max(_known(series.metrics[name].high), default=1.0) or 1.0 for name in CHARTED}
    coolest_c = min(lows["temperature_c"], default=0.0)
    most_gib = max(tops["memory_used_bytes"] / _GIB, memory_gib or 0)
    most_w = max(tops["power_w"], power_w or 0)
    forms = [
        MetricForm("utilization_percent", "%", "0", 0, 102),
        MetricForm("memory_used_bytes", "GiB", "0.0", 0, 1.05 * most_gib, memory_gib, per_unit=_GIB),
        MetricForm("temperature_c", "°C", "0", max(0, coolest_c - 6), tops["temperature_c"] + 6),
        MetricForm("power_w", "W", "0", 0, 1.05 * most_w, power_w),
    ]
    return [form for form in forms if lows[form.name]]


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _same(values: Iterable[float | None]) -> float | None:
    """Return the value, if all known values are the same."""
    different = set(not_none(values))
    return different.pop() if len(different) == 1 else None


def _packed(name: str, series: Stretches, forms: Sequence[MetricForm], inner: Inner | None = None) -> dict[str, Any]:
    """Return a series as it is stored in the page: times in ms from its start, figures as shares of their axis."""
    begin_ms = int(series.from_ms[0])
    edges_ms = np.append(np.asarray(series.from_ms), series.to_ms[-1]) - begin_ms
    figures = {}
    for form in forms:
        envelope = series.metrics[form.name]
        lines = [envelope.low, envelope.mean, envelope.high]
        if inner is not None:
            lines += inner.get(form.name, ())
        values = np.concatenate([np.asarray(line) for line in lines]) / form.per_unit
        steps = np.rint((values - form.bottom) / (form.top - form.bottom) * _STEPS)
        steps = np.where(np.isnan(steps), _NOTHING, np.clip(steps, 0, _STEPS))
        figures[form.name] = _text(steps.astype("<u2"))
    return {"name": name, "begin": begin_ms, "edges": _text(edges_ms.astype("<u4")), "figures": figures}


def _text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


# --- what the devices did: runs of states -----------------------------------------------------------------------------


def find_runs(devices: Sequence[Stretches | None]) -> Runs:
    """Return what the devices did: each stretch by the state that lasted longest in it, equal neighbours joined."""
    rows = [(row, _cut_mixed(device)) for row, device in enumerate(devices) if device is not None]
    for joined in (1, 2, 4, 8, 16, 32, 64):
        parts = [_runs_of(place, device, joined) for place, device in rows]
        nothing = (np.array([], dtype=np.int64),) * 4
        row, left_ms, right_ms, state = map(np.concatenate, zip(nothing, *parts, strict=True))
        runs = Runs(row, left_ms, right_ms, state, joined)
        if len(runs.row) <= MOST_RUNS:
            break
    return runs


def _cut_mixed(device: Stretches) -> Stretches:
    """Cut short stretches with several states into one stretch per state.

    Their order is not known: a state that a neighbour has comes next to it, others are in the usual order.
    """
    if not device.mixed:
        return device
    from_ms = []
    to_ms = []
    states = []
    last = len(device.states) - 1
    for place, (begin_ms, end_ms) in enumerate(zip(device.from_ms, device.to_ms, strict=True)):
        parts = device.mixed.get(place, {device.states[place]: 1.0})
        rank = dict(_USUAL_ORDER)
        if place < last:
            rank[device.states[place + 1]] = len(_USUAL_ORDER)
        if place:
            rank[device.states[place - 1]] = -1
        total_s = sum(parts.values())
        spent_s = 0.0
        at_ms = begin_ms
        for state in sorted(parts, key=lambda state: rank[state]):
            from_ms.append(at_ms)
            spent_s += parts[state]
            at_ms = begin_ms + round((end_ms - begin_ms) * spent_s / total_s)
            to_ms.append(at_ms)
            states.append(state)
    return Stretches(from_ms, to_ms, states, {})


def _runs_of(row: int, device: Stretches, joined: int) -> tuple[Whole, Whole, Whole, Whole]:
    """Return row, begin, end and state of each run of a device; ``joined`` neighbouring stretches count as one."""
    state = np.array([_PLACES[state] for state in device.states])
    from_ms = np.asarray(device.from_ms)
    to_ms = np.asarray(device.to_ms)
    if joined > 1:
        starts = np.arange(0, len(state), joined)
        lasting_ms = (state == np.arange(len(STATES))[:, None]) * (to_ms - from_ms)
        state = np.argmax(np.add.reduceat(lasting_ms, starts, axis=1), axis=0)
        from_ms = from_ms[starts]
        to_ms = to_ms[np.append(starts[1:], len(to_ms)) - 1]
    firsts = np.flatnonzero(np.diff(state, prepend=-1))
    lasts = np.append(firsts[1:], len(to_ms)) - 1
    return np.full(len(firsts), row), from_ms[firsts], to_ms[lasts], state[firsts]


# --- readings over time -----------------------------------------------------------------------------------------------


def over_all(devices: Iterable[Stretches], from_ms: int, to_ms: int, many: int) -> tuple[Stretches, Inner]:
    """Return the smallest, mean and largest reading of all devices together, in columns of equal width.

    Also returns, by metric, the range that contains four out of five devices; with very many devices, of an even sample
    of them.
    """
    edges = np.linspace(from_ms, to_ms, _COLUMNS + 1)
    nothing = np.outer([np.inf, -np.inf, 0.0, 0.0], np.ones(_COLUMNS))
    totals = {metric: nothing.copy() for metric in CHARTED}
    ranked = defaultdict(list)
    every = -(-many // _MOST_RANKED)
    rest = iter(devices)
    while block := list(islice(rest, _BLOCK)):
        places, column, inside_ms = _touched(block, edges)
        device = np.repeat(np.arange(len(block)), [len(stretches.from_ms) for stretches in block])[places]
        for metric in CHARTED:
            envelopes = [stretches.metrics[metric] for stretches in block]
            low = np.concatenate([np.asarray(envelope.low) for envelope in envelopes])[places]
            mean = np.concatenate([np.asarray(envelope.mean) for envelope in envelopes])[places]
            high = np.concatenate([np.asarray(envelope.high) for envelope in envelopes])[places]
            _add(totals[metric], column, inside_ms, low, mean, high)
            sampled = np.isfinite(mean) & (device % every == 0)
            ranked[metric].append((column[sampled], mean[sampled]))
    begins = edges[:-1].astype(np.int64).tolist()
    ends = edges[1:].astype(np.int64).tolist()
    inner = {metric: _middle(*map(np.concatenate, zip(*blocks, strict=True))) for metric, blocks in ranked.items()}
    envelopes_of_all = {metric: _envelope(sums) for metric, sums in totals.items()}
    return Stretches(begins, ends, (), envelopes_of_all), inner


def _touched(block: Sequence[Stretches], edges: Numbers) -> tuple[Whole, Whole, Numbers]:
    """Return, for every column that a stretch touches: the place of the stretch, the column, the time in it."""
    begins = np.concatenate([np.asarray(stretches.from_ms) for stretches in block])
    ends = np.concatenate([np.asarray(stretches.to_ms) for stretches in block])
    width = edges[1] - edges[0]
    first = np.clip(((begins - edges[0]) // width).astype(np.int64), 0, _COLUMNS - 1)
    last = np.clip(np.ceil((ends - edges[0]) / width).astype(np.int64) - 1, first, _COLUMNS - 1)
    touched = last - first + 1
    places = np.repeat(np.arange(len(first)), touched)
    column = first[places] + np.arange(len(places)) - np.repeat(np.cumsum(touched) - touched, touched)
    inside_ms = np.minimum(ends[places], edges[column + 1]) - np.maximum(begins[places], edges[column])
    return places, column, inside_ms


def _add(totals: Numbers, column: Whole, weight: Numbers, low: Numbers, mean: Numbers, high: Numbers) -> None:
    """Add the readings of a block: the rows of ``totals`` are smallest, largest, time, and sum over time."""
    measured = np.isfinite(mean) & (weight > 0)
    column = column[measured]
    weight = weight[measured]
    np.minimum.at(totals[0], column, low[measured])
    np.maximum.at(totals[1], column, high[measured])
    totals[2] += np.bincount(column, weight, _COLUMNS)
    totals[3] += np.bincount(column, weight * mean[measured], _COLUMNS)


def _envelope(totals: Numbers) -> Envelope:
    lows, highs, times, sums = np.where(totals[2] > 0, totals, np.nan)
    return Envelope(lows.tolist(), (sums / times).tolist(), highs.tolist())


def _middle(column: Whole, mean: Numbers) -> tuple[list[float], list[float]]:
    """Return the range that contains the means of four out of five devices, for each column (nearest rank)."""
    order = np.lexsort((mean, column))
    values = np.append(mean[order], np.nan)  # the last is for columns without values
    many = np.bincount(column, minlength=_COLUMNS)
    first = np.cumsum(many) - many

    def ranked(share: float) -> list[float]:
        place = first + np.rint(share * (many - 1)).astype(np.int64)
        return values[np.where(many > 0, place, -1)].tolist()  # type: ignore[no-any-return]

    return ranked(0.1), ranked(0.9)


def choose(rankings: Rankings, everything: int, most: int) -> dict[int, str]:
    """Return the devices to show one by one, and why: all, or the worst of each ranking and an even sample."""
    if everything <= most:
        return dict.fromkeys(range(everything), "")
    chosen: dict[int, str] = {}
    for places in zip_longest(*rankings.values()):  # the worst of each, then the next one of each
        for why, place in zip(rankings, places, strict=True):
            if place is not None and len(chosen) < most // 2:
                chosen.setdefault(place, why)
    step = everything / (most - len(chosen))
    for number in range(most - len(chosen)):
        chosen.setdefault(int(number * step), "")
    return dict(sorted(chosen.items()))


def make_histogram(durations_ms: Mapping[int, int]) -> Histogram:
    """Return the histogram of durations; with a long tail it has a logarithmic scale."""
    seconds = np.maximum(np.array(sorted(durations_ms)), 1) / 1000
    tries = np.array([durations_ms[key] for key in sorted(durations_ms)])
    median_s = seconds[np.searchsorted(np.cumsum(tries), tries.sum() / 2)]
    shortest_s = float(seconds[0])
    longest_s = float(seconds[-1])
    bars = int(np.clip(2 * np.sqrt(tries.sum()), _FEWEST_BARS, _MOST_BARS))
    long_tail = longest_s > _LONG_TAIL * float(median_s)
    if long_tail:
        edges = np.geomspace(shortest_s, longest_s * 1.0001, bars + 1)
    else:
        width = _round_width((longest_s - shortest_s) / bars)
        edges = np.arange(np.floor(shortest_s / width), np.floor(longest_s / width) + 1.5) * width
    # An edge may differ from its value by a rounding error.
    counts, _ = np.histogram(np.clip(seconds, edges[0], edges[-1]), edges, weights=tries)
    return Histogram(edges.tolist(), counts.astype(int).tolist(), long_tail)


def _round_width(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, at least a rough width."""
    rough = max(rough, 1e-3)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999)
