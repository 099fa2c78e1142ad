"""The charts of the page: which devices are shown, the data of each chart, and what was left out. Pure.

Imported only if Bokeh, and with it NumPy, is installed.
"""

from __future__ import annotations

import base64
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from badcjobs.model import ChartData, Stretches, not_none
from badcjobs.report import chart_figures as figures
from badcjobs.report.chart_figures import STATES, Histogram, MetricForm, Runs
from badcjobs.report.job_tables import trouble_rank
from badcjobs.report.progress import names_of_running
from badcjobs.report.rules import known_texts
from badcjobs.report.summary import STATE_WORDS, Summary, count_devices
from badcjobs.store.read_model import DeviceFacts
from badcjobs.words import natural

MOST_DEVICES = 300  # in the timeline, and one by one
_FEWEST_BARS = 8
_MOST_BARS = 60
_WIDTHS_MS = [step * 10**power for power in range(9) for step in (1, 2, 5)]  # of a bar
_FEWEST_TRIES = 5  # fewer need no histogram
_GIB = 2**30
_STEPS = 60_000  # a figure takes two bytes: finer than a pixel on any screen
_NOTHING = 65_535
_NOTES = (  # how the data were reduced, and what was left out; see rules.say
    "Each device is shown in at most 120 intervals of equal length. An interval keeps its smallest, mean and largest"
    " reading, so peaks stay visible. The timeline shows the state that lasted longest in an interval; the table below"
    " counts every second.",
    "There are no data over time for {unknown:count device?}.",
    "{left_out:count device?} not shown one by one: shown are those with failed or lost work, and the least busy. The"
    " charts of all devices together include every device.",
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
    together = data.together
    if together is None:
        return {}, {}, ()
    running = names_of_running(summary.facts.tasks)
    known = [device for device in summary.devices if device.states]
    shown = choose(known, MOST_DEVICES)
    rows = not_none(data.stretches(device.device_id, device.task not in running) for device in shown)
    times = figures.time_range(together.from_ms[0], together.to_ms[-1])
    forms = _forms(known, together)
    drawn = {"timeline": figures.timeline(find_runs(rows), len(rows), times)}
    drawn |= {form.name: figures.metric(form, times) for form in forms}
    single = [_packed(_full_name(device), series, forms) for device, series in zip(shown, rows, strict=True)]
    sent = {
        **_row_names(shown),
        "states": {state: STATE_WORDS[state] for state in STATES},
        "forms": {form.name: [0, form.top] for form in forms},
        "series": [_packed(f"All {count_devices(known):,} devices together", together, forms), *single],
    }
    about = {"unknown": len(summary.devices) - len(known), "left_out": len(known) - len(shown)}
    return drawn, sent, tuple(known_texts(_NOTES, about))


def _full_name(device: DeviceFacts) -> str:
    return f"{device.task} · device {device.label}"


def _row_names(rows: Sequence[DeviceFacts]) -> dict[str, Any]:
    """Return the names of the rows of the timeline: a short one for the axis, a full one for the pointer.

    Also returns the names of the devices, sorted by node, and the device of each row.
    """
    labels = {device.card: f"{device.node} · {device.label}" for device in rows}
    order = sorted(labels, key=lambda card: (natural(labels[card]), card))
    place_of = {card: place for place, card in enumerate(order)}
    return {
        "rows": [[f"{device.task.split('.')[0]} · {device.label}", _full_name(device)] for device in rows],
        "cards": {"names": [labels[card] for card in order], "of": [place_of[device.card] for device in rows]},
    }


def _forms(devices: Sequence[DeviceFacts], series: Stretches) -> list[MetricForm]:
    """Return how to draw each metric that any device has."""
    memory_gib = _same(d.memory_total_bytes and d.memory_total_bytes / _GIB for d in devices)
    power_w = _same(d.power_limit_w for d in devices)
    forms = []
    for name, unit, digits, per_unit, limit, least in (
        ("utilization_percent", "%", "0", 1, None, 100),
        ("memory_used_bytes", "GiB", "0.0", _GIB, memory_gib, 0),
        ("temperature_c", "°C", "0", 1, None, 0),
        ("power_w", "W", "0", 1, power_w, 0),
    ):
        highest = np.fmax.reduce(series.metrics[name].high)
        if not np.isnan(highest):
            top = max(highest / per_unit, limit or 0, least) or 1.0
            forms.append(MetricForm(name, unit, digits, 1.05 * top, limit, per_unit))
    return forms


def _same(values: Iterable[float | None]) -> float | None:
    """Return the value, if all known values are the same."""
    different = set(not_none(values))
    return different.pop() if len(different) == 1 else None


def _packed(name: str, series: Stretches, forms: Sequence[MetricForm]) -> dict[str, Any]:
    """Return a series as it is stored in the page: times in ms from its start, figures as shares of their axis."""
    begin_ms = int(series.from_ms[0])
    edges_ms = np.append(np.asarray(series.from_ms), series.to_ms[-1]) - begin_ms
    figures = {}
    for form in forms:
        shares = np.concatenate(series.metrics[form.name]) / form.per_unit / form.top  # lowest, mean, highest
        steps = np.rint(np.clip(shares, 0, 1) * _STEPS)
        figures[form.name] = _text(np.nan_to_num(steps, nan=_NOTHING).astype("<u2"))
    return {"name": name, "begin": begin_ms, "edges": _text(edges_ms.astype("<u4")), "figures": figures}


def _text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")


# --- what the devices did, and their readings over time --------------------------------------------------------------


def find_runs(devices: Iterable[Stretches]) -> Runs:
    """Return what the devices did: neighbouring stretches of one state are joined."""
    runs: Runs = defaultdict(list)
    for row, device in enumerate(devices):
        stretches = zip(device.states, device.from_ms, device.to_ms, strict=True)
        for state, group in groupby(stretches, itemgetter(0)):
            joined = list(group)
            runs[state].append((row, joined[0][1], joined[-1][2]))
    return runs


def choose(devices: Sequence[DeviceFacts], most: int) -> list[DeviceFacts]:
    """Return the devices to show; if there are too many, those with the most trouble."""
    worst_first = sorted(range(len(devices)), key=lambda place: trouble_rank(devices[place]))
    return [devices[place] for place in sorted(worst_first[:most])]


def make_histogram(durations_ms: Mapping[int, int]) -> Histogram:
    """Return the histogram of durations; the edges of its bars are round numbers."""
    shortest_ms = min(durations_ms)
    longest_ms = max(durations_ms)
    bars = np.clip(2 * np.sqrt(sum(durations_ms.values())), _FEWEST_BARS, _MOST_BARS)
    least_ms = max(longest_ms - shortest_ms, longest_ms / 10) / bars
    width_ms = next(width_ms for width_ms in _WIDTHS_MS if width_ms >= least_ms)
    edges_ms = np.arange(shortest_ms // width_ms, longest_ms // width_ms + 2) * width_ms
    counts, _ = np.histogram([*durations_ms], edges_ms, weights=[*durations_ms.values()])
    return Histogram((edges_ms / 1000).tolist(), counts.astype(int).tolist())
