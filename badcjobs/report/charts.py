"""The charts of the page: which devices are shown, the data of each chart, and what was left out. Pure.

Imported only if Bokeh, and with it NumPy, is installed.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt

from badcjobs.model import CHARTED, ChartData, Envelope, Stretches
from badcjobs.report import chart_figures as figures
from badcjobs.report.chart_figures import STATES, Histogram, MetricForm, Runs, Whole
from badcjobs.report.progress import over_time
from badcjobs.report.rules import known_texts
from badcjobs.report.summary import STATE_WORDS, Summary, count_devices, devices_words
from badcjobs.report.words import natural
from badcjobs.store.read_model import DeviceFacts

Numbers = npt.NDArray[np.float64]
Inner = Mapping[str, tuple[Sequence[float], Sequence[float]]]  # metric → lower and upper edge; see _middle

_PLACES = {state: place for place, state in enumerate(STATES)}
_LIFE = ("start_up", "waiting", "working", "failed", "lost", "idle")  # the usual order of the states of a worker
_USUAL_ORDER: Mapping[str | None, int] = {state: place for place, state in enumerate(_LIFE)}
MOST_RUNS = 40_000
MOST_ROWS = 4_000  # of the timeline
_MOST_RANKED = 500  # devices from which the inner band is computed
_BLOCK = 128
_COLUMNS = 400
_FEWEST_BARS, _MOST_BARS = 8, 60
_LONG_TAIL = 8  # if the longest chunk takes this many times the median, the scale is logarithmic
MOST_PICTURED = 240
_FEWEST_TRIES = 5  # fewer need no histogram
_GIB = 2**30
_STEPS, _NOTHING = 60_000, 65_535  # a figure takes two bytes: finer than a pixel on any screen
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


@dataclass(frozen=True, slots=True)
class Charts:
    """The charts for the page; the keys of ``places`` are timeline, histogram and those of CHARTED."""

    chart_code: str
    script: str
    places: Mapping[str, str]
    data: Mapping[str, Any]  # for page.js
    histogram: Histogram | None
    notes: tuple[str, ...]  # how the data were reduced, and what was left out


def draw(summary: Summary, data: ChartData) -> Charts:
    """Return the charts of a job."""
    drawn: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    notes: list[str] = []
    read = over_time(data, summary.facts.tasks, summary.tasks_silent)
    rankings, everything = _rankings(summary.devices), len(summary.devices)
    shown = dict.fromkeys(choose(rankings, everything, MOST_ROWS))  # place → its states over time
    unknown, begins_ms, ends_ms = list[DeviceFacts](), list[int](), list[int]()
    for place, device in enumerate(summary.devices):
        one = read(device)  # one device at a time: those of a large array do not fit into memory
        if one is None:
            unknown.append(device)
            continue
        begins_ms.append(one.from_ms[0])
        ends_ms.append(one.to_ms[-1])
        if place in shown:
            shown[place] = replace(one, metrics={})
    if begins_ms:
        span_ms = min(begins_ms), max(ends_ms)
        times, runs = figures.time_range(*span_ms), find_runs(list(shown.values()))
        drawn["timeline"] = figures.timeline(runs, len(shown), times)
        together, inner = over_all(filter(None, map(read, summary.devices)), *span_ms, len(begins_ms))
        forms = _forms(summary.devices, together)
        drawn.update({form.name: figures.metric(form, times) for form in forms})
        many = count_devices(summary.devices)
        series = [_packed(f"All {many:,} devices together" if many > 1 else "The device", together, forms, inner)]
        for place, why in choose(rankings, everything, MOST_PICTURED).items():
            device, one = summary.devices[place], read(summary.devices[place])
            name = f"{device.task} · device {device.label}" + (f" ({why})" if why else "")
            series += [] if one is None else [_packed(name, one, forms)]
        # For each row a short label for the axis, and a full one for the pointer.
        rows = [summary.devices[place] for place in shown]
        short = [f"{device.task.split('.')[0]} · {device.label}" for device in rows]
        full = [f"{device.task} · device {device.label}" for device in rows]
        # The names of the devices, sorted by node, and the device of each row of the timeline.
        labels = {device.card: f"{device.node} · {device.label}" for device in rows}
        order = sorted(labels, key=lambda one: (natural(labels[one]), one))
        place_of = {one: place for place, one in enumerate(order)}
        sent = {
            "rows": list(map(list, zip(short if len(set(short)) == len(short) else full, full, strict=True))),
            "cards": {"names": [labels[one] for one in order], "of": [place_of[d.card] for d in rows]},
            "states": {state: STATE_WORDS[state] for state in STATES},
            "forms": {form.name: [form.bottom, form.top] for form in forms},
            "series": series,
        }
        about = {
            "joined": runs.joined if runs.joined > 1 else None,
            "unknown": devices_words(unknown) if unknown else None,
            "rows": len(rows) if len(rows) < everything else None,
            "shown": len(series) - 1 if len(series) - 1 < len(begins_ms) else None,
            "known": len(begins_ms),
        }
        notes = list(known_texts(_NOTES, about))
    took_ms = summary.facts.durations
    found = make_histogram(took_ms) if sum(took_ms.values()) >= _FEWEST_TRIES else None
    if found is not None:
        drawn["histogram"] = figures.histogram(found)
    if not drawn:
        return Charts("", "", {}, {}, None, ())
    script, places = figures.as_parts(drawn)
    return Charts(figures.chart_code(), script, places, sent, found, tuple(notes))


def _rankings(devices: Sequence[DeviceFacts]) -> dict[str, list[int]]:
    """Return the devices that are worth a look, by reason, worst first."""
    figures: Mapping[str, Callable[[DeviceFacts], float | None]] = {
        "failed or lost work": lambda d: d.state_s.get("failed", 0.0) + d.state_s.get("lost", 0.0),
        "least busy": lambda d: None if d.busy_mean_percent is None else 100 - d.busy_mean_percent,
        "slowest": lambda d: d.work.chunk_p50_s,
        "hottest": lambda d: d.temperature_max_c,
        "longest gaps": lambda d: d.gap_s,
    }
    found = {}
    for why, figure in figures.items():
        values = {place: value for place, device in enumerate(devices) if (value := figure(device))}
        found[why] = sorted(values, key=lambda place: -values[place])[:MOST_ROWS]
    return found


def _forms(devices: Sequence[DeviceFacts], series: Stretches) -> list[MetricForm]:
    """Return how to draw each metric that any device has."""
    memory_gib = _same(d.memory_total_bytes and d.memory_total_bytes / _GIB for d in devices)
    power_w = _same(d.power_limit_w for d in devices)
    lows = {name: [value for value in series.metrics[name].low if value == value] for name in CHARTED}
    tops = {name: max((value for value in series.metrics[name].high if value == value), default=1.0) or 1.0
            for name in CHARTED}  # fmt: skip
    most_gib, hottest = tops["memory_used_bytes"] / _GIB, tops["temperature_c"]
    coolest = min(lows["temperature_c"], default=0.0)
    forms = [
        MetricForm("utilization_percent", "%", "0", 0, 102),
        MetricForm(
            "memory_used_bytes", "GiB", "0.0", 0, 1.05 * max(most_gib, memory_gib or 0), memory_gib, per_unit=_GIB
        ),
        MetricForm("temperature_c", "°C", "0", max(0, coolest - 6), hottest + 6),
        MetricForm("power_w", "W", "0", 0, 1.05 * max(tops["power_w"], power_w or 0), power_w),
    ]
    return [form for form in forms if lows[form.name]]


def _same(values: Iterable[float | None]) -> float | None:
    """Return the value, if all known values are the same."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None


def _packed(name: str, one: Stretches, forms: Sequence[MetricForm], inner: Inner | None = None) -> dict[str, Any]:
    """Return a series as it is stored in the page: times in ms from its start, figures as shares of their axis."""
    begin_ms = int(one.from_ms[0])
    edges = np.append(np.asarray(one.from_ms), one.to_ms[-1]) - begin_ms
    figures = {}
    for form in forms:
        envelope = one.metrics[form.name]
        parts = (envelope.low, envelope.mean, envelope.high, *(inner or {}).get(form.name, ()))
        values = np.concatenate([np.asarray(part) for part in parts]) / form.per_unit
        steps = np.rint((values - form.bottom) / (form.top - form.bottom) * _STEPS)
        figures[form.name] = _text(np.where(np.isnan(steps), _NOTHING, np.clip(steps, 0, _STEPS)).astype("<u2"))
    return {"name": name, "begin": begin_ms, "edges": _text(edges.astype("<u4")), "figures": figures}


def _text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


# --- what the devices did: runs of states -----------------------------------------------------------------------------


def find_runs(devices: Sequence[Stretches | None]) -> Runs:
    """Return what the devices did: each stretch by the state that lasted longest in it, equal neighbours joined."""
    rows = [(row, _cut_mixed(device)) for row, device in enumerate(devices) if device is not None]
    for joined in [2**power for power in range(7)]:
        parts = [_runs_of(row, device, joined) for row, device in rows]
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
    from_ms: list[int] = []
    to_ms: list[int] = []
    states: list[str] = []
    for place, (begin_ms, end_ms) in enumerate(zip(device.from_ms, device.to_ms, strict=True)):
        parts = device.mixed.get(place, {device.states[place]: 1.0})
        before = device.states[place - 1] if place else None
        after = device.states[place + 1] if place + 1 < len(device.states) else None
        rank = {**_USUAL_ORDER, after: len(_USUAL_ORDER), before: -1}
        spent_s, total_s = 0.0, sum(parts.values())
        for state in sorted(parts, key=lambda state: rank[state]):
            from_ms.append(begin_ms + round((end_ms - begin_ms) * spent_s / total_s))
            spent_s += parts[state]
            to_ms.append(begin_ms + round((end_ms - begin_ms) * spent_s / total_s))
            states.append(state)
    return Stretches(from_ms, to_ms, states, {})


def _runs_of(row: int, device: Stretches, joined: int) -> tuple[Whole, Whole, Whole, Whole]:
    """Return row, begin, end and state of each run of a device; ``joined`` neighbouring stretches count as one."""
    state = np.array([_PLACES[state] for state in device.states])
    from_ms, to_ms = np.asarray(device.from_ms), np.asarray(device.to_ms)
    if joined > 1:
        starts = np.arange(0, len(state), joined)
        lasting_ms = (state == np.arange(len(STATES))[:, None]) * (to_ms - from_ms)
        state = np.argmax(np.add.reduceat(lasting_ms, starts, axis=1), axis=0)
        from_ms, to_ms = from_ms[starts], to_ms[np.append(starts[1:], len(to_ms)) - 1]
    firsts = np.flatnonzero(np.diff(state, prepend=-1))
    left_ms, right_ms = from_ms[firsts], to_ms[np.append(firsts[1:], len(to_ms)) - 1]
    return np.full(len(firsts), row), left_ms, right_ms, state[firsts]


# --- readings over time -----------------------------------------------------------------------------------------------


def over_all(devices: Iterable[Stretches], from_ms: int, to_ms: int, many: int) -> tuple[Stretches, Inner]:
    """Return the smallest, mean and largest reading of all devices together, in columns of equal width.

    Also returns, by metric, the range that contains four out of five devices; with very many devices, of an even sample
    of them.
    """
    edges, every = np.linspace(from_ms, to_ms, _COLUMNS + 1), -(-many // _MOST_RANKED)
    nothing, left = np.outer([np.inf, -np.inf, 0.0, 0.0], np.ones(_COLUMNS)), iter(devices)
    totals, ranked = {metric: nothing.copy() for metric in CHARTED}, defaultdict(list)
    while block := list(islice(left, _BLOCK)):
        begins, ends = (np.concatenate([np.asarray(getattr(d, part)) for d in block]) for part in ("from_ms", "to_ms"))
        first = np.clip(((begins - edges[0]) // (edges[1] - edges[0])).astype(np.int64), 0, _COLUMNS - 1)
        last = np.clip(np.ceil((ends - edges[0]) / (edges[1] - edges[0])).astype(np.int64) - 1, first, _COLUMNS - 1)
        # For every column that a stretch touches: the place of the stretch, and the column.
        touched = last - first + 1
        places = np.repeat(np.arange(len(first)), touched)
        column = first[places] + np.arange(len(places)) - np.repeat(np.cumsum(touched) - touched, touched)
        inside_ms = np.minimum(ends[places], edges[column + 1]) - np.maximum(begins[places], edges[column])
        device = np.repeat(np.arange(len(block)), [len(one.from_ms) for one in block])[places]
        for metric in CHARTED:
            low, mean, high = (
                np.concatenate([np.asarray(getattr(one.metrics[metric], part)) for one in block])[places]
                for part in ("low", "mean", "high")
            )
            _add(totals[metric], column, inside_ms, low, mean, high)
            some = np.isfinite(mean) & (device % every == 0)
            ranked[metric].append((column[some], mean[some]))
    begins, ends = (edges[part].astype(np.int64).tolist() for part in (slice(None, -1), slice(1, None)))
    inner = {metric: _middle(*map(np.concatenate, zip(*some, strict=True))) for metric, some in ranked.items()}
    return Stretches(begins, ends, (), {metric: _envelope(one) for metric, one in totals.items()}), inner


def _add(totals: Numbers, column: Whole, weight: Numbers, low: Numbers, mean: Numbers, high: Numbers) -> None:
    """Add the readings of a block: the rows of ``totals`` are smallest, largest, time, and sum over time."""
    known = np.isfinite(mean) & (weight > 0)
    column, weight = column[known], weight[known]
    np.minimum.at(totals[0], column, low[known])
    np.maximum.at(totals[1], column, high[known])
    totals[2] += np.bincount(column, weight, _COLUMNS)
    totals[3] += np.bincount(column, weight * mean[known], _COLUMNS)


def _envelope(totals: Numbers) -> Envelope:
    lows, highs, times, sums = np.where(totals[2] > 0, totals, np.nan)
    return Envelope(lows.tolist(), (sums / times).tolist(), highs.tolist())


def _middle(column: Whole, mean: Numbers) -> tuple[list[float], list[float]]:
    """Return the range that contains the means of four out of five devices, for each column (nearest rank)."""
    order = np.lexsort((mean, column))
    values, columns = mean[order], column[order]
    many = np.bincount(columns, minlength=_COLUMNS)
    first = np.cumsum(many) - many
    found = []
    for share in (0.1, 0.9):
        place = np.clip(first + np.rint(share * (many - 1)).astype(np.int64), 0, max(0, len(values) - 1))
        picked = values[place] if len(values) else np.full(_COLUMNS, np.nan)
        found.append(np.where(many > 0, picked, np.nan).tolist())
    return found[0], found[1]


def choose(rankings: Mapping[str, Sequence[int]], everything: int, most: int) -> dict[int, str]:
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
    many = np.array([durations_ms[key] for key in sorted(durations_ms)])
    median_s = seconds[np.searchsorted(np.cumsum(many), many.sum() / 2)]
    shortest_s, longest_s = float(seconds[0]), float(seconds[-1])
    bars = int(np.clip(2 * np.sqrt(many.sum()), _FEWEST_BARS, _MOST_BARS))
    tail = longest_s > _LONG_TAIL * float(median_s)
    if tail:
        edges = np.geomspace(shortest_s, longest_s * 1.0001, bars + 1)
    else:  # round edges: a width of 1, 2 or 5 times a power of ten
        rough = max((longest_s - shortest_s) / bars, 1e-3)
        power = 10.0 ** np.floor(np.log10(rough))
        width = float(next(step * power for step in (1, 2, 5, 10) if step * power >= rough * 0.999))
        edges = np.arange(np.floor(shortest_s / width), np.floor(longest_s / width) + 1.5) * width
    # An edge may differ from its value by a rounding error.
    counts, _ = np.histogram(np.clip(seconds, edges[0], edges[-1]), edges, weights=many)
    return Histogram(edges.tolist(), counts.astype(int).tolist(), tail)
