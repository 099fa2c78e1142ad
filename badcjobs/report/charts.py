"""The charts of the page: chooses what is drawn, hands it to Bokeh, and says what was left out."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from badcjobs.model import CHARTED, ChartData, Envelope, Stretches
from badcjobs.report.cards import card, cards, of_tasks
from badcjobs.report.cut_short import over_time
from badcjobs.report.states import STATE_WORDS
from badcjobs.report.summarize import DeviceSummary, Summary
from badcjobs.report.words import count, natural

if TYPE_CHECKING:
    from badcjobs.report.chart_figures import MetricForm
    from badcjobs.report.chart_numbers import Histogram, Series

MOST_PICTURED = 240
_FEWEST_TRIES = 5  # fewer are told better in words
_GIB = 2**30
_STEPS, _NOTHING = 60_000, 65_535  # a figure is sent as two bytes: finer than a pixel on any screen
_NAMES = dict(zip(CHARTED, ("Utilization", "Memory in use", "Temperature", "Power"), strict=True))


@dataclass(frozen=True, slots=True)
class Charts:
    """What is put into the page; ``places`` has the keys timeline, histogram and those of CHARTED."""

    chart_code: str
    script: str
    places: Mapping[str, str]
    data: Mapping[str, Any]  # for page.js
    histogram: Histogram | None
    notes: tuple[str, ...]  # how it was thinned, and what was left out

    @staticmethod
    def heading(metric: str) -> str:
        """Return what a chart of CHARTED is called."""
        return _NAMES[metric]


def draw(summary: Summary, data: ChartData) -> Charts | None:
    """Return the charts of a job; None: Bokeh is not installed."""
    try:
        from badcjobs.report import chart_figures as figures
        from badcjobs.report import chart_numbers as numbers
    except ImportError:
        return None
    drawn: dict[str, Any] = {}
    sent: dict[str, Any] = {}
    notes: list[str] = []
    by_device = over_time(data, summary.task_list, summary.tasks_silent)
    stretches = [by_device.get((device.task, device.token)) for device in summary.devices]
    known = [one for one in stretches if one is not None]
    if known:
        times = figures.time_range(min(one.from_ms[0] for one in known), max(one.to_ms[-1] for one in known))
        runs = numbers.find_runs(stretches)
        drawn["timeline"] = figures.timeline(runs, len(stretches), times)
        pictured = numbers.choose(_rankings(summary.devices), len(stretches), MOST_PICTURED)
        shown = [place for place in pictured if stretches[place] is not None]
        series = [_all(numbers.over_all(known)), *(_one(stretches[place]) for place in shown)]
        forms = [form for form in _forms(summary.devices, series[0]) if _is_told(series[0], form.name)]
        drawn.update({form.name: figures.metric(form, times) for form in forms})
        names = [_all_name(summary.devices), *(_name(summary.devices[place], pictured[place]) for place in shown)]
        sent = {
            "rows": _row_names(summary.devices),
            "cards": _cards(summary.devices),
            "states": {state: STATE_WORDS[state] for state in numbers.STATES},
            "forms": {form.name: [form.bottom, form.top] for form in forms},
            "series": [_packed(name, one, forms) for name, one in zip(names, series, strict=True)],
        }
        notes = [_thinned(cut=runs.cut), *_notes(runs.joined, len(shown), len(known), summary.devices)]
    many = sum(data.durations.values())
    found = numbers.make_histogram(data.durations) if many >= _FEWEST_TRIES else None
    if found is not None:
        drawn["histogram"] = figures.histogram(found)
    if not drawn:
        return Charts("", "", {}, {}, None, ())
    script, places = figures.as_parts(drawn)
    return Charts(figures.chart_code(), script, places, sent, found, tuple(notes))


def _thinned(*, cut: bool) -> str:
    """Return how the readings and the states were thinned; ``cut``: short stretches show all their states."""
    words = (
        "A device's readings are thinned to at most 120 stretches of equal length; each keeps its smallest, mean and "
        "largest value, so no peak is lost. In the timeline a stretch has the colour of the state that lasted longest "
        "in it"
    )
    short = ", but one of a second or less shows each of its states for as long as it lasted, in their likely order"
    return f"{words}{short if cut else ''}; the table below counts every second."


def _notes(joined: int, shown: int, known: int, devices: Sequence[DeviceSummary]) -> list[str]:
    notes = []
    if joined > 1:
        notes.append(f"So many devices: {joined} neighbouring stretches are drawn as one in the timeline.")
    if known < len(devices):
        notes.append(f"Nothing is known over time of {count(len(devices) - known, 'device')}{of_tasks(devices)}.")
    if shown < known:
        notes.append(
            f"To be picked one by one below: {shown:,} of {known:,} devices of array tasks, namely the least busy, the "
            "slowest, the hottest, those with the longest gaps, those with failed or lost work, and an even choice of "
            "the others. The charts of all devices together, the timeline and the tables leave nobody out."
        )
    return notes


def _rankings(devices: Sequence[DeviceSummary]) -> dict[str, list[int]]:
    """Return which devices somebody would want to look at, by reason, the worst first."""
    from badcjobs.report.chart_numbers import worst_first

    many = MOST_PICTURED
    bad_s = [d.state_s.get("failed", 0.0) + d.state_s.get("lost", 0.0) for d in devices]
    idle = [None if d.busy_mean_percent is None else 100 - d.busy_mean_percent for d in devices]
    return {
        "failed or lost work": worst_first(bad_s, many, least=0.0),
        "least busy": worst_first(idle, many, least=0.0),
        "slowest": worst_first([d.chunk_p50_s for d in devices], many, least=0.0),
        "hottest": worst_first([d.temperature_max_c for d in devices], many, least=0.0),
        "longest gaps": worst_first([d.gap_s for d in devices], many, least=0.0),
    }


def _all_name(devices: Sequence[DeviceSummary]) -> str:
    many = cards(devices)
    return f"All {many:,} devices together" if many > 1 else "The device"


def _name(device: DeviceSummary, why: str) -> str:
    return f"{device.task} · device {device.label}" + (f" ({why})" if why else "")


def _row_names(devices: Sequence[DeviceSummary]) -> list[list[str]]:
    """Return for each row what stands at the axis, and what stands in full when somebody points at it."""
    short = [f"{device.task.split('.')[0]} · {device.label}" for device in devices]
    full = [f"{device.task} · device {device.label}" for device in devices]
    return [list(pair) for pair in zip(short if len(set(short)) == len(short) else full, full, strict=True)]


def _cards(devices: Sequence[DeviceSummary]) -> dict[str, Any]:
    """Return the devices themselves by name, node by node, and for each row of the timeline which of them it is."""
    labels = {card(device): f"{device.node} · {device.label}" for device in devices}
    order = sorted(labels, key=lambda one: (natural(labels[one]), one))
    places = {one: place for place, one in enumerate(order)}
    return {"names": [labels[one] for one in order], "of": [places[card(device)] for device in devices]}


def _forms(devices: Sequence[DeviceSummary], series: Series) -> list[MetricForm]:
    from badcjobs.report.chart_figures import MetricForm

    memory_gib = _same(None if d.memory_total_bytes is None else d.memory_total_bytes / _GIB for d in devices)
    power_w = _same(d.power_limit_w for d in devices)
    tops = {name: _largest(series.metrics[name].high) for name in CHARTED}
    coolest = _smallest(series.metrics["temperature_c"].low)
    return [
        MetricForm("utilization_percent", "%", "0", 0, 102),
        MetricForm(
            "memory_used_bytes", "GiB", "0.0", 0, 1.05 * max(tops["memory_used_bytes"], memory_gib or 0), memory_gib
        ),
        MetricForm("temperature_c", "°C", "0", max(0, coolest - 6), tops["temperature_c"] + 6),
        MetricForm("power_w", "W", "0", 0, 1.05 * max(tops["power_w"], power_w or 0), power_w),
    ]


def _is_told(series: Series, metric: str) -> bool:
    return any(value == value for value in series.metrics[metric].mean)


def _same(values: Iterable[float | None]) -> float | None:
    """Return the value that all have that have one."""
    known = {value for value in values if value is not None}
    return known.pop() if len(known) == 1 else None


def _largest(values: Sequence[float]) -> float:
    return max((value for value in values if value == value), default=1.0) or 1.0


def _smallest(values: Sequence[float]) -> float:
    return min((value for value in values if value == value), default=0.0)


def _one(device: Stretches | None) -> Series:
    from badcjobs.report.chart_numbers import Series

    assert device is not None
    return _all(Series(device.from_ms, device.to_ms, device.metrics))


def _all(series: Series) -> Series:
    """Return the series with memory in GiB, as it is drawn."""
    from badcjobs.report.chart_numbers import Series

    memory = series.metrics["memory_used_bytes"]
    in_gib = Envelope(*([value / _GIB for value in part] for part in (memory.low, memory.mean, memory.high)))
    metrics, inner = {**series.metrics, "memory_used_bytes": in_gib}, dict(series.inner)
    if inner:
        low, high = inner["memory_used_bytes"]
        inner["memory_used_bytes"] = ([value / _GIB for value in low], [value / _GIB for value in high])
    return Series(series.from_ms, series.to_ms, metrics, inner)


def _packed(name: str, series: Series, forms: Sequence[MetricForm]) -> dict[str, Any]:
    """Return a series as the page carries it: times in ms from its start, figures as shares of their axis."""
    import numpy as np

    begin_ms = int(series.from_ms[0])
    edges = np.append(np.asarray(series.from_ms), series.to_ms[-1]) - begin_ms
    figures = {}
    for form in forms:
        envelope = series.metrics[form.name]
        parts = (envelope.low, envelope.mean, envelope.high, *series.inner.get(form.name, ()))
        values = np.concatenate([np.asarray(part) for part in parts])
        steps = np.rint((values - form.bottom) / (form.top - form.bottom) * _STEPS)
        figures[form.name] = _text(np.where(np.isnan(steps), _NOTHING, np.clip(steps, 0, _STEPS)).astype("<u2"))
    return {"name": name, "begin": begin_ms, "edges": _text(edges.astype("<u4")), "figures": figures}


def _text(values: Any) -> str:
    return base64.b64encode(values.tobytes()).decode("ascii")
