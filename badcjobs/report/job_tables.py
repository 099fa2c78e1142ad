"""Every table of a job's report, built once; text, notebook and page show the columns that they have room for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from badcjobs.model import CHARTED
from badcjobs.report.device_summary import (
    STATE_WORDS,
    DeviceSummary,
    StateSummary,
    cards,
    partly_measured,
    percentile,
    rows_words,
    together,
)
from badcjobs.report.progress import state_words
from badcjobs.report.rules_devices import LEAST_PEERS, LEAST_TRIES, peer_groups
from badcjobs.report.summary import Summary
from badcjobs.report.tables import Cell, Row, Table, columns
from badcjobs.report.words import (
    UNKNOWN,
    count,
    duration,
    durations,
    energies,
    energy,
    memory,
    number,
    percent,
    share_words,
    spark,
    three,
)
from badcjobs.store.read_model import FailedChunk

MOST_DEVICES = 5000  # on a page
_LONGEST_MESSAGE, _SHORTEST_MESSAGE = 1000, 300
_ALL_MESSAGES = 300_000  # characters: a page is to stay small enough to be sent around


def _whole(value: int | None) -> Cell:
    return Cell(UNKNOWN if value is None else f"{value:,}", value)


def _with_unit(value: float | None, unit: str, digits: int = 0) -> Cell:
    return Cell(UNKNOWN if value is None else f"{number(value, digits)} {unit}", value)


def _percent(value: float | None) -> Cell:
    return Cell(UNKNOWN if value is None else f"{value:.0f} %", value)


def _duration(seconds: float) -> Cell:
    return Cell(duration(seconds), seconds)


# --- tasks and devices ------------------------------------------------------------------------------------------------


def task_table(summary: Summary) -> Table:
    """Return the array tasks."""
    heads = columns(
        "<task", "<node", "<verdict", "exit code", "devices", "done", "failed", "left", "audio", "wall time"
    )
    rows = [
        (t.name, t.node, state_words(t, summary.tasks_silent), _whole(t.exit_code), _whole(t.devices), _whole(t.done),
         _whole(t.failed), _whole(t.pending), _duration(t.audio_s), _duration(t.wall_s))
        for t in summary.facts.tasks
    ]  # fmt: skip
    return Table("task-table", "Array tasks", heads, rows)


def state_table(states: Mapping[str, StateSummary], *, compact: bool = False) -> Table:
    """Return what all devices together did with their time and energy; ``compact``: one unit for all times."""
    shown = [(words, states[state]) for state, words in STATE_WORDS.items() if state in states]
    everything = [*shown, ("together", together(states))]
    times = durations([found.gpu_hours * 3600 for _, found in everything])
    joules = energies([found.energy_wh for _, found in everything])
    rows: list[Row] = []
    for (words, found), time, used in zip(everything, times, joules, strict=True):
        shares = (found.share_percent, found.energy_share_percent, found.measured_percent)
        said = [share_words(value).replace(" %", "%" if compact else " %") for value in shares]
        of_time, of_energy, measured = map(Cell, said, shares)
        gpu_time = Cell(time, found.gpu_hours) if compact else _hours(found.gpu_hours)
        energy_used = Cell(used, found.energy_wh)
        rows.append((words, gpu_time, of_time, _hours(found.busy_hours), energy_used, of_energy, measured))
    heads = columns(
        "<what the GPUs did", "GPU time", "of the time", "of it busy", "energy", "of the energy", "measured"
    )
    table = Table("state-table", "What the GPUs did with their time and energy", heads, rows[:-1], rows[-1])
    return table if partly_measured(states) else table.without("measured")


def _hours(hours: float | None) -> Cell:
    if hours is None:
        return Cell(UNKNOWN, None)
    return Cell(duration(hours * 3600) if hours < 0.1 else f"{number(hours, 2)} h", hours)


def device_table(summary: Summary) -> Table:
    """Return the devices of all tasks for a page, or the least busy of very many."""
    chosen, caption = list(summary.devices), "Devices"
    if len(chosen) > MOST_DEVICES:
        chosen = sorted(chosen, key=lambda d: -1.0 if d.busy_mean_percent is None else d.busy_mean_percent)
        chosen = chosen[:MOST_DEVICES]
        caption = f"The {MOST_DEVICES:,} least busy of {rows_words(summary.devices)}; job.sqlite has all"
    heads = columns(
        "<task", "<device", "<model", "working", "start-up", "waiting", "busy", "util.", "p50/p95/max", "memory",
        "hottest", "power", "energy", "samples", "gaps",
    )  # fmt: skip
    table = Table("device-table", caption, heads, [_device(device) for device in chosen])
    return table.without("model") if one_model(summary) else table  # said above the table: the page is not wide


def one_model(summary: Summary) -> str | None:
    """Return the model of all devices; None: there are several."""
    models = {device.name for device in summary.devices}
    return models.pop() if len(models) == 1 else None


def _device(d: DeviceSummary) -> Row:
    energy_wh = None if d.energy_j is None else d.energy_j / 3600
    p50, p95 = percentile(d.utilization_counts, 50), percentile(d.utilization_counts, 95)
    util = three(p50, p95, max(d.utilization_counts, default=None))
    gaps = duration(d.gap_s) if d.gap_s else "none" if d.samples else UNKNOWN
    shares = [_percent(_state_percent(d, state)) for state in ("working", "start_up", "waiting")]
    return (
        d.task, d.label, d.name or UNKNOWN, *shares,
        _percent(d.busy_mean_percent), _percent(d.utilization_mean_percent), Cell(util, p50),
        Cell(memory(d.memory_peak_bytes), d.memory_peak_bytes), _with_unit(d.temperature_max_c, "°C"),
        _with_unit(d.power_mean_w, "W"), Cell(energy(energy_wh), energy_wh), _whole(d.samples), Cell(gaps, d.gap_s),
    )  # fmt: skip


def _state_percent(device: DeviceSummary, state: str) -> float | None:
    total_s = sum(device.state_s.values())
    return 100 * device.state_s.get(state, 0.0) / total_s if total_s > 0 else None


def least_busy(devices: Sequence[DeviceSummary], most: int) -> Sequence[DeviceSummary]:
    """Return all devices or, where they are too many, those that were busy least, in their order."""

    def busy(place: int) -> float:
        one = devices[place]
        known = one.utilization_mean_percent if one.busy_mean_percent is None else one.busy_mean_percent
        return 101.0 if known is None else known

    return [devices[place] for place in sorted(sorted(range(len(devices)), key=busy)[:most])]


def work_table(devices: Sequence[DeviceSummary]) -> Table:
    """Return what each device did, for text."""
    joules = energies([None if d.energy_j is None else d.energy_j / 3600 for d in devices])
    times = durations([d.gap_s for d in devices])
    rows = [
        # Where telemetry was off there is neither a reading nor a gap.
        (_name(d), d.task, spark(d.spark) or UNKNOWN, percent(d.busy_mean_percent),
         percent(_state_percent(d, "working")), f"{d.work.done:,}", used,
         gap if d.gap_s else "none" if d.samples else UNKNOWN)
        for d, used, gap in zip(devices, joules, times, strict=True)
    ]  # fmt: skip
    heads = columns("<device", "<task", "<utilization over time", "busy", "working", "chunks", "energy", "gaps")
    return Table("work-table", "What each device did", heads, rows)


def rank_table(devices: Sequence[DeviceSummary]) -> Table:
    """Return p50, p95 and maximum of what was measured on each device, for text."""
    rows = [
        (_name(d), d.task, _ranks(d, "utilization_percent"), _ranks(d, "memory_used_bytes", per=2**30, digits=1),
         _ranks(d, "temperature_c"), _ranks(d, "power_w"),
         three(d.work.chunk_p50_s, d.work.chunk_p95_s, d.work.chunk_max_s, 2 if (d.work.chunk_max_s or 0) < 10 else 1))
        for d in devices
    ]  # fmt: skip
    heads = columns("<p50 / p95 / max", "<task", "util %", "memory GiB", "°C", "power W", "chunk s")
    return Table("rank-table", "What was measured on each device", heads, rows)


def _ranks(device: DeviceSummary, metric: str, *, per: float = 1.0, digits: int = 0) -> str:
    found = device.metrics.get(metric)
    return UNKNOWN if found is None else three(found.p50 / per, found.p95 / per, found.maximum / per, digits)


def _name(device: DeviceSummary) -> str:
    return f"{device.label} {device.name or UNKNOWN}"[:16].rstrip()


# --- devices that were slower than others of their model --------------------------------------------------------------


def straggler_table(summary: Summary) -> tuple[Table | None, str]:
    """Return the devices that were slower than their peers, as the findings have them, and what was compared.

    None: there was nothing to compare.
    """
    groups = peer_groups(summary.facts.tasks, summary.devices)
    rows: list[Row] = []
    for group in groups:
        for peer in group.stragglers():
            rate, longest_s = group.rate(peer), max(row.work.chunk_max_s or 0.0 for row in peer.rows)
            degrees = [row.temperature_max_c for row in peer.rows if row.temperature_max_c is not None]
            rows.append(
                (peer.label, group.model, _percent(100 * rate / group.middle), _with_unit(rate, group.unit, 1),
                 _with_unit(peer.chunk_p50_s, "s", 1), _with_unit(longest_s, "s", 1),
                 _with_unit(max(degrees, default=None), "°C"), peer.held_back or UNKNOWN)
            )  # fmt: skip
    heads = columns("<device", "<model", "of the median speed", "speed", "chunk p50", "longest", "hottest",
                    "<held back by")  # fmt: skip
    needed = f"that takes {LEAST_PEERS} devices of one model at the same work, with {LEAST_TRIES} chunks each"
    if not groups:
        return None, f"No devices were compared: {needed}." if summary.devices else "No device took part."
    medians = "; ".join(f"{number(group.middle)} {group.unit} on {group.model}" for group in groups)
    compared = sum(len(group.peers) for group in groups)
    words = f"Compared while working: {count(compared, 'device')}, with the median of the same model: {medians}."
    if left := cards(summary.devices) - compared:
        words += f" {count(left, 'other was', 'others were')} not compared: {needed}."
    return Table("straggler-table", "Devices that were slower than their peers by more than chance", heads, rows), words


# --- the charts in numbers --------------------------------------------------------------------------------------------

_SAYING: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "utilization_percent": ("utilization", lambda value: f"{value:.0f} %"),
    "memory_used_bytes": ("memory in use", lambda value: memory(round(value))),
    "temperature_c": ("temperature", lambda value: f"{value:.0f} °C"),
    "power_w": ("power", lambda value: f"{value:.0f} W"),
}


def reading_table(summary: Summary) -> Table:
    """Return each charted metric over all devices."""
    rows: list[Row] = []
    for metric in CHARTED:
        found = [d.metrics[metric] for d in summary.devices if metric in d.metrics]
        if found:
            name, say = _SAYING[metric]
            samples = sum(m.samples for m in found)
            values = (
                min(m.minimum for m in found), min(m.mean for m in found),
                sum(m.mean * m.samples for m in found) / samples, max(m.mean for m in found),
                max(m.p95 for m in found), max(m.maximum for m in found),
            )  # fmt: skip
            rows.append((name, *(Cell(say(value), value) for value in values), _whole(samples)))
    heads = columns("<metric", "smallest reading", "lowest mean of a device", "mean of all", "highest mean of a device",
             "highest p95 of a device", "largest reading", "samples")  # fmt: skip
    return Table("reading-table", "The charts in numbers, over all devices and their whole time", heads, rows)


def bar_table(edges_s: Sequence[float], counts: Sequence[int]) -> Table:
    """Return the histogram of how long chunks took."""
    rows = [
        (Cell(f"{low:,.4g} s", low), Cell(f"{high:,.4g} s", high), _whole(many))
        for low, high, many in zip(edges_s, edges_s[1:], counts, strict=False)
        if many
    ]
    return Table("duration-table", "How many chunks took how long", columns("from", "to", "chunks"), rows)


# --- what failed, what was heard, gaps, alerts, files, settings -------------------------------------------------------


def failed_table(failed: int, chunks: Sequence[FailedChunk]) -> Table:
    """Return the chunks that failed for good, or the first of them, with what the engine said."""
    longest = max(_SHORTEST_MESSAGE, min(_LONGEST_MESSAGE, _ALL_MESSAGES // max(1, len(chunks))))
    rows = [
        (c.recording_id, c.chunk_id, c.status, _whole(c.attempts), c.error_class, shortened(c.error, longest))
        for c in chunks
    ]
    caption = "Chunks that failed for good"
    if failed > len(rows):
        caption = f"The first {len(rows):,} of {failed:,} chunks that failed for good; job.sqlite has all"
    heads = columns("<recording", "<chunk", "<state", "tries", "<class", "<<what it said")
    return Table("failed-table", caption, heads, rows)


def shortened(message: str, longest: int = _LONGEST_MESSAGE) -> str:
    """Return a message as it is, or its beginning and its end: the reason stands in one of them."""
    left_out = len(message) - longest
    if left_out <= 100:
        return message
    half = longest // 2
    return f"{message[:half]}\n[… {left_out:,} characters are left out; job.sqlite has them …]\n{message[-half:]}"


def label_table(summary: Summary) -> Table:
    """Return what was heard."""
    total = sum(many for _, _, many in summary.facts.labels)
    rows = [
        (label, name or "", _whole(many), Cell(f"{100 * many / total:.1f} %", 100 * many / total))
        for label, name, many in summary.facts.labels
    ]
    return Table("label-table", "Detections by label", columns("<label", "<name", "detections", "share"), rows)


def gap_table(summary: Summary) -> Table:
    """Return the stretches without readings."""
    heads = columns("<reason", "<what", "gaps", "time", "tasks")
    rows = [
        (g.reason, g.metric or "all readings", _whole(g.gaps), _duration(g.seconds), _whole(g.tasks))
        for g in summary.facts.gaps
    ]
    return Table("gap-table", "Stretches without readings, by reason", heads, rows)


def alert_table(summary: Summary) -> Table:
    """Return the alerts by kind."""
    heads = columns("<kind", "<severity", "alerts", "devices", "longest", "<<for example")
    rows = [
        (a.kind.replace("_", " "), a.severity, _whole(a.alerts), _whole(a.devices), _duration(a.longest_s), a.example)
        for a in summary.alerts
    ]
    return Table("alert-table", "Alerts, by kind", heads, rows)


def stray_table(summary: Summary) -> Table:
    """Return rows that are in the source or in the job, but not in both."""
    proof = summary.completeness
    rows: list[Row] = []
    if proof is not None and proof.not_listed_examples:
        rows.append(("in the source, in no task", _whole(proof.not_listed), "\n".join(proof.not_listed_examples)))
    if proof is not None and proof.strangers_examples:
        rows.append(("in the job, not in the source", _whole(proof.strangers), "\n".join(proof.strangers_examples)))
    return Table("stray-table", "Rows that do not match", columns("<where", "rows", "<<the first of them"), rows)


def file_table(summary: Summary) -> Table:
    """Return the files about which merge had something to say."""
    return Table("file-table", "Files with a remark", columns("<file", "<<remark"), summary.facts.file_remarks)


def setting_table(values: Mapping[str, Any]) -> Table:
    """Return the settings that were given; those left to their default are left out."""
    return Table("setting-table", "Settings", columns("<setting", "<<value"), list(_flat(values)))


def _flat(values: Mapping[str, Any], above: str = "") -> Iterable[tuple[str, str]]:
    for name, value in sorted(values.items()):
        if isinstance(value, Mapping):
            yield from _flat(value, f"{above}{name}.")
        elif isinstance(value, bool):
            yield above + name, "yes" if value else "no"
        elif isinstance(value, list | tuple):
            yield from [(above + name, "\n".join(map(str, value)))] if value else []
        elif value is not None:
            yield above + name, str(value)
