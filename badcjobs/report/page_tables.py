"""The tables of the page: what stands in each row, in words, and by what number it is sorted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from badcjobs.model import CHARTED
from badcjobs.report.cards import rows_words
from badcjobs.report.device_tables import MEASURED_HEAD, STATE_HEADS
from badcjobs.report.page_parts import Cell, Row, Table
from badcjobs.report.states import STATE_WORDS, partly_measured, together
from badcjobs.report.summarize import DeviceSummary, Summary
from badcjobs.report.task_states import state_words
from badcjobs.report.words import UNKNOWN, duration, energies, energy, memory, number, share_words, three

MOST_DEVICES = 5000
_Any = TypeVar("_Any")


def tasks(summary: Summary) -> Table:
    """Return the array tasks."""
    rows: list[Row] = [
        [
            t.name, t.node, state_words(t, summary.tasks_silent), whole(t.exit_code), whole(t.devices), whole(t.done),
            whole(t.failed), whole(t.pending), Cell(duration(t.audio_s), t.audio_s), Cell(duration(t.wall_s), t.wall_s),
        ]
        for t in summary.task_list
    ]  # fmt: skip
    heads = ("<task", "<node", "<verdict", "exit code", "devices", "done", "failed", "left", "audio", "wall time")
    return Table("task-table", "Array tasks", heads, rows)


def devices(summary: Summary) -> Table:
    """Return the devices of all tasks, or the least busy of very many."""
    chosen: Sequence[DeviceSummary] = summary.devices
    caption = "Devices"
    if len(chosen) > MOST_DEVICES:
        chosen = sorted(chosen, key=lambda d: -1.0 if d.busy_mean_percent is None else d.busy_mean_percent)
        chosen = chosen[:MOST_DEVICES]
        some = f"The {MOST_DEVICES:,} least busy of {rows_words(summary.devices)}"
        caption = f"{some}; job.sqlite has all"
    heads: Sequence[str] = (
        "<task", "<device", "<model", "working", "start-up", "waiting", "busy", "util.", "p50/p95/max", "memory",
        "hottest", "power", "energy", "samples", "gaps",
    )  # fmt: skip
    rows: list[Row] = [_device(device) for device in chosen]
    if one_model(summary):  # said above the table: the page is not wide
        heads, rows = _without_model(heads), [_without_model(row) for row in rows]
    return Table("device-table", caption, heads, rows)


def one_model(summary: Summary) -> str | None:
    """Return the model of all devices; None: there are several."""
    models = {device.name for device in summary.devices}
    return models.pop() if len(models) == 1 else None


def _without_model(row: Sequence[_Any]) -> tuple[_Any, ...]:
    return (*row[:2], *row[3:])


def _device(d: DeviceSummary) -> list[str | Cell]:
    total_s = sum(d.state_s.values())
    shares = [100 * d.state_s.get(state, 0.0) / total_s if total_s > 0 else None for state in
              ("working", "start_up", "waiting")]  # fmt: skip
    energy_wh = None if d.energy_j is None else d.energy_j / 3600
    return [
        d.task,
        d.label,
        d.name or UNKNOWN,
        *(_percent(share) for share in shares),
        _percent(d.busy_mean_percent),
        _percent(d.utilization_mean_percent),
        Cell(
            three(d.utilization_p50_percent, d.utilization_p95_percent, d.utilization_max_percent),
            d.utilization_p50_percent,
        ),
        Cell(memory(d.memory_peak_bytes), d.memory_peak_bytes),
        with_unit(d.temperature_max_c, "°C", 0),
        with_unit(d.power_mean_w, "W", 0),
        Cell(energy(energy_wh), energy_wh),
        whole(d.samples),
        Cell(duration(d.gap_s) if d.gap_s else "none" if d.samples else UNKNOWN, d.gap_s),
    ]


def states(summary: Summary) -> Table:
    """Return what the devices did with their time and energy."""
    partly, whole_time = partly_measured(summary.states), together(summary.states)
    used = energies([*(s.energy_wh for s in summary.states.values()), whole_time.energy_wh])
    rows: list[Row] = [
        [
            STATE_WORDS[state],
            _hours(s.gpu_hours),
            _share(s.share_percent),
            _hours(s.busy_hours),
            Cell(words, s.energy_wh),
            _share(s.energy_share_percent),
            *([_share(s.measured_percent)] if partly else []),
        ]
        for (state, s), words in zip(summary.states.items(), used, strict=False)
    ]
    foot: Row = [
        "together", _hours(whole_time.gpu_hours), _share(100.0), _hours(whole_time.busy_hours),
        Cell(used[-1], whole_time.energy_wh), _share(None if whole_time.energy_wh is None else 100.0),
        *([_share(whole_time.measured_percent)] if partly else []),
    ]  # fmt: skip
    what, time, of_time, joules, of_joules = STATE_HEADS
    heads = (f"<{what}", time, of_time, "of it busy", joules, of_joules, *([MEASURED_HEAD] if partly else []))
    return Table("state-table", "What the GPUs did with their time and energy", heads, rows, foot)


def _share(value: float | None) -> Cell:
    return Cell(share_words(value), value)


_SAYING: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "utilization_percent": ("utilization", lambda value: f"{value:.0f} %"),
    "memory_used_bytes": ("memory in use", lambda value: memory(round(value))),
    "temperature_c": ("temperature", lambda value: f"{value:.0f} °C"),
    "power_w": ("power", lambda value: f"{value:.0f} W"),
}


def readings(summary: Summary) -> Table:
    """Return each charted metric over all devices: the charts in numbers."""
    rows: list[Row] = []
    for metric in CHARTED:
        found = [d.metrics[metric] for d in summary.devices if metric in d.metrics]
        if found:
            name, say = _SAYING[metric]
            samples = sum(m.samples for m in found)
            values = [
                min(m.minimum for m in found), min(m.mean for m in found),
                sum(m.mean * m.samples for m in found) / samples, max(m.mean for m in found),
                max(m.p95 for m in found), max(m.maximum for m in found),
            ]  # fmt: skip
            rows.append([name, *(Cell(say(value), value) for value in values), whole(samples)])
    heads = ("<metric", "smallest reading", "lowest mean of a device", "mean of all", "highest mean of a device",
             "highest p95 of a device", "largest reading", "samples")  # fmt: skip
    return Table("reading-table", "The charts in numbers, over all devices and their whole time", heads, rows)


def bars(edges_s: Sequence[float], counts: Sequence[int]) -> Table:
    """Return the histogram in numbers."""
    rows: list[Row] = [
        [Cell(f"{low:,.4g} s", low), Cell(f"{high:,.4g} s", high), whole(many)]
        for low, high, many in zip(edges_s, edges_s[1:], counts, strict=False)
        if many
    ]
    return Table("duration-table", "How many chunks took how long", ("from", "to", "chunks"), rows)


def whole(value: int | None) -> Cell:
    """Return a count; None: not known."""
    return Cell(UNKNOWN if value is None else f"{value:,}", value)


def _hours(value: float | None) -> Cell:
    if value is None:
        return Cell(UNKNOWN, None)
    return Cell(duration(value * 3600) if value < 0.1 else f"{number(value, 2)} h", value)


def _percent(value: float | None) -> Cell:
    return Cell(UNKNOWN if value is None else f"{value:.0f} %", value)


def with_unit(value: float | None, unit: str, digits: int) -> Cell:
    """Return a figure with its unit; None: not known."""
    return Cell(UNKNOWN if value is None else f"{number(value, digits)} {unit}", value)
