"""The tables of a job report, for text, notebook and page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from badcjobs.model import AUDIO_FAULTS, CHARTED, load_word
from badcjobs.report.progress import KILLED, OUTDATED, RUNNING, SILENT, state_words
from badcjobs.report.summary import STATE_WORDS, StateSummary, Summary, chunk_name, ratio
from badcjobs.report.tables import Cell, Row, Table, columns, ending
from badcjobs.report.verdict import alert_lines
from badcjobs.store.read_model import Completeness, DeviceFacts, GapFacts, TaskFacts
from badcjobs.words import (
    UNKNOWN,
    count,
    duration,
    energy,
    fixed,
    memory,
    number,
    power,
    share_words,
    temperature,
)

MOST_ROWS = 200  # of a table, or names in a finding, on a page
_LONGEST_MESSAGE = 1000
_LAST_LINE = 500  # characters of an engine error, in text


# --- the lists of the text --------------------------------------------------------------------------------------------


def detail_lists(summary: Summary, most: int) -> Iterator[list[str]]:
    """Yield the lists below the findings, each with its first lines."""
    facts = summary.facts
    yield [f"alert: {line}" for line in alert_lines(summary.alerts)]
    for where, examples, many in _strays(summary.completeness):
        yield _first([f"{where}: {name}" for name in examples], many, most, "more")
    tasks = list(_unwell_tasks(summary))
    yield _first(tasks, len(tasks), most, "more tasks (--json lists all)")
    yield _gap_lines(facts.gaps)
    yield _failed_lines(summary, most)


def file_lines(summary: Summary, most: int) -> list[str]:
    """Return the first files with a remark."""
    files = [f"file {path}: {remark}" for path, remark in summary.facts.file_remarks]
    return _first(files, len(files), most, "more files (in job.sqlite, table source_file)")


def _strays(proof: Completeness) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """Yield rows that are only in the source, or only in the job: the first ones, and how many there are."""
    if proof.not_listed_examples:
        yield "in the source, in no task", proof.not_listed_examples, proof.not_listed or 0
    if proof.strangers_examples:
        yield "in the job, not in the source", proof.strangers_examples, proof.strangers or 0


def _unwell_tasks(summary: Summary) -> Iterator[str]:
    for task in trouble_first(summary):
        if task.verdict != "done":
            counts = f"{task.done:,} done, {task.failed:,} failed, {task.pending:,} left"
            yield f"task {task.name}: {state_words(task)}; {counts}"


def _gap_lines(gaps: Sequence[GapFacts]) -> list[str]:
    lines = []
    missing = set()
    for gap in gaps:
        if gap.metric is None:
            lines.append(f"gap: {gap.reason} ({count(gap.gaps, 'time')}, {duration(gap.seconds)})")
        else:
            missing.add((gap.metric, gap.reason))
    return lines + [f"not available: {metric}: {reason}" for metric, reason in sorted(missing)]


def _failed_lines(summary: Summary, most: int) -> list[str]:
    """Return failed chunks; each file without audio is named."""
    chunks = sorted(summary.facts.failed, key=lambda chunk: chunk.error_class not in AUDIO_FAULTS)
    faults = sum(chunk.error_class in AUDIO_FAULTS for chunk in chunks)
    lines = []
    for chunk in chunks:
        error = failure(chunk.recording_id, chunk.chunk_id, chunk.error_class, chunk.error)
        lines.append(f"{chunk.status}: {error}")
    return _first(lines, summary.failed, max(most, faults), "more failed chunks (in job.sqlite, table chunk)")


def _first(lines: list[str], many: int, most: int, noun: str) -> list[str]:
    """Return the first of many lines, and how many more there are."""
    shown = lines[:most]
    if many > len(shown):
        shown.append(f"… and {many - len(shown):,} {noun}")
    return shown


def failure(recording_id: str, chunk_id: str, error_class: str, error: str) -> str:
    """Return a failed chunk and the last line of the engine error."""
    last_line = error.strip().rpartition("\n")[2][:_LAST_LINE]
    return f"{chunk_name(recording_id, chunk_id)} ({error_class}): {last_line or 'no message'}"


# --- cells ------------------------------------------------------------------------------------------------------------


def _cell(value: float | None, write: Callable[[Any], str] = "{:,}".format) -> Cell:
    return Cell(UNKNOWN if value is None else write(value), value)


_percent = "{:.0f} %".format


def _hours(hours: float) -> str:
    return duration(hours * 3600) if hours < 0.1 else f"{number(hours, 2)} h"


def _load(percent: float) -> str:
    """Return a utilization with the word for it."""
    return f"{percent:.0f} % {load_word(percent)}"


# --- tasks and devices ------------------------------------------------------------------------------------------------


def state_table(states: Mapping[str, StateSummary]) -> Table:
    """Return the time and energy of all devices by state."""
    rows = [
        (
            STATE_WORDS[name],
            _cell(state.gpu_hours, _hours),
            _cell(state.share_percent, share_words),
            _cell(state.busy_hours, _hours),
            _cell(state.energy_wh, energy),
            _cell(state.energy_share_percent, share_words),
            _cell(state.measured_percent, share_words),
        )
        for name, state in states.items()
    ]
    heads = columns(
        "<what the GPUs did", "GPU time", "of the time", "of it busy", "energy", "of the energy", "measured"
    )
    return Table("state-table", "What the GPUs did with their time and energy", heads, rows)


def device_table(summary: Summary) -> Table:
    """Return the devices of all tasks, those with trouble first; if there are too many, the least busy."""
    devices = summary.devices
    heads = columns(
        "<task",
        "<device",
        "<model",
        "working",
        "start-up",
        "waiting",
        "busy",
        "util.",
        "p50/p95/max",
        "memory",
        "hottest",
        "power",
        "energy",
        "samples",
        "gaps",
    )
    rows = [_device_row(device) for device in sorted(devices, key=trouble_rank)[:MOST_ROWS]]
    caption = _caption("Devices of each array task", len(devices), "device_summary")
    return Table("device-table", caption, heads, rows, of=len(devices))


def _device_row(device: DeviceFacts) -> Row:
    total_s = device.total_s
    shares = [ratio(100 * device.state_s.get(state, 0.0), total_s) for state in ("working", "start_up", "waiting")]
    ranks = Cell(UNKNOWN, None)
    utilization = device.metrics.get("utilization_percent")
    if utilization is not None:
        values = (utilization.p50, utilization.p95, utilization.maximum)
        ranks = Cell("/".join(fixed(value, 0) for value in values), utilization.p50)
    energy_wh = device.energy_j and device.energy_j / 3600
    return (
        device.task,
        device.label,
        device.name or UNKNOWN,
        *(_cell(share, _percent) for share in shares),
        _cell(device.busy_mean_percent, _percent),
        _cell(device.utilization_mean_percent, _load),
        ranks,
        _cell(device.memory_peak_bytes, memory),
        _cell(device.temperature_max_c, temperature),
        _cell(device.power_mean_w, power),
        _cell(energy_wh, energy),
        _cell(device.samples),
        _cell(device.gap_s, duration),
    )


def trouble_rank(device: DeviceFacts) -> tuple[bool, float]:
    """Return the sort key of a device: failed or lost work first, then the least busy."""
    trouble = device.work.gave_up or device.work.failed or device.work.lost
    busy = device.busy_mean_percent
    return not trouble, 101.0 if busy is None else busy


def _caption(noun: str, many: int, table: str) -> str:
    """Return the caption of a table; if it has only the first of many rows, with the command that writes all."""
    if many <= MOST_ROWS:
        return noun
    command = f"badcjobs export job.sqlite --table {table} -o {table}.csv"
    return f"{noun}: the first {MOST_ROWS} of {many:,}, trouble first; all of them: {command}"


_ORDER = {KILLED: 0, "failed": 1, SILENT: 2, "stopped": 3, RUNNING: 4, OUTDATED: 4}


def trouble_first(summary: Summary) -> list[TaskFacts]:
    """Return the tasks; those that need attention come first, and those that are done last."""
    return sorted(summary.facts.tasks, key=lambda task: (_ORDER.get(task.state, len(_ORDER)), -task.failed))


# --- the charts in numbers --------------------------------------------------------------------------------------------

# metric → its name, and its value in words
SPOKEN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "utilization_percent": ("utilization", _load),
    "memory_used_bytes": ("memory in use", lambda value: memory(round(value))),
    "temperature_c": ("temperature", temperature),
    "power_w": ("power", power),
}


def reading_table(summary: Summary) -> Table:
    """Return the numbers of each charted metric over all devices."""
    rows: list[Row] = []
    for metric in CHARTED:
        readings = [device.metrics[metric] for device in summary.devices if metric in device.metrics]
        if not readings:
            continue
        name, say = SPOKEN[metric]
        samples = sum(reading.samples for reading in readings)
        values = (
            min(reading.minimum for reading in readings),
            sum(reading.mean * reading.samples for reading in readings) / samples,
            max(reading.p95 for reading in readings),
            max(reading.maximum for reading in readings),
        )
        rows.append((name, *(Cell(say(value), value) for value in values), _cell(samples)))
    heads = columns("<metric", "smallest reading", "mean", "highest p95 of a device", "largest reading", "samples")
    return Table("reading-table", "The charts in numbers, over all devices and the full time", heads, rows)


def bar_table(edges_s: Sequence[float], counts: Sequence[int]) -> Table:
    """Return the histogram of how long chunks took."""
    rows = [
        (Cell(f"{low:,.4g} s", low), Cell(f"{high:,.4g} s", high), _cell(many))
        for low, high, many in zip(edges_s, edges_s[1:], counts, strict=False)
        if many
    ]
    return Table("duration-table", "How many chunks took how long", columns("from", "to", "chunks"), rows)


# --- the lists of the page --------------------------------------------------------------------------------------------


class PageTable(NamedTuple):
    """A section of the page with one table."""

    section: str
    heading: str
    table: Table
    empty: str = "None."  # the text for an empty table


def page_tables(summary: Summary) -> Iterator[PageTable]:
    """Yield the lists of a page."""
    facts = summary.facts
    yield PageTable("failed", "Failed chunks", _failed_table(summary), "No chunk failed for good.")
    yield PageTable("heard", "Detections", label_table(summary), "No detections.")
    yield PageTable("tasks", "Array tasks", _task_table(summary))
    yield PageTable("devices", "Devices", device_table(summary), "No device was used.")
    heads = columns("<kind", "<severity", "alerts", "devices", "longest", "<<for example")
    alerts = [
        (
            alert.kind.replace("_", " "),
            alert.severity,
            _cell(alert.alerts),
            _cell(alert.devices),
            _cell(alert.longest_s, duration),
            alert.example,
        )
        for alert in sorted(summary.alerts, key=lambda alert: alert.severity != "critical")
    ]
    yield PageTable("alerts", "Alerts", Table("alert-table", "Alerts, by kind", heads, alerts))
    heads = columns("<reason", "<what", "gaps", "time", "tasks")
    gaps = [
        (gap.reason, gap.metric or "all readings", _cell(gap.gaps), _cell(gap.seconds, duration), _cell(gap.tasks))
        for gap in sorted(facts.gaps, key=lambda gap: (gap.metric is not None, -gap.seconds))
    ]
    table = Table("gap-table", "Time without readings, by reason", heads, gaps)
    yield PageTable("gaps", "Gaps in telemetry", table)
    many = len(facts.file_remarks)
    caption = _caption("Files with a remark", many, "source_file")
    table = Table("file-table", caption, columns("<file", "<<remark"), facts.file_remarks[:MOST_ROWS], of=many)
    yield PageTable("files", "Files with a remark", table)


def _failed_table(summary: Summary) -> Table:
    chunks = summary.facts.failed
    caption = "Chunks that failed for good"
    if summary.failed > len(chunks):
        caption = f"The first {len(chunks):,} of {summary.failed:,} chunks that failed for good; job.sqlite has all"
    heads = columns("<recording", "<chunk", "<state", "tries", "<class", "<<error")
    rows = [
        (
            chunk.recording_id,
            chunk.chunk_id,
            chunk.status,
            _cell(chunk.attempts),
            chunk.error_class,
            ending(chunk.error, _LONGEST_MESSAGE),
        )
        for chunk in chunks
    ]
    return Table("failed-table", caption, heads, rows)


def _task_table(summary: Summary) -> Table:
    heads = columns(
        "<task", "<node", "<verdict", "exit code", "devices", "done", "failed", "left", "audio", "wall time"
    )
    rows = [
        (
            task.name,
            task.node,
            state_words(task),
            _cell(task.exit_code),
            _cell(task.devices),
            _cell(task.done),
            _cell(task.failed),
            _cell(task.pending),
            _cell(task.audio_s, duration),
            _cell(task.wall_s, duration),
        )
        for task in trouble_first(summary)[:MOST_ROWS]
    ]
    caption = _caption("Array tasks", summary.tasks, "task_summary")
    return Table("task-table", caption, heads, rows, of=summary.tasks)


def label_table(summary: Summary) -> Table:
    """Return the detections by label."""
    total = summary.detections
    rows = [
        (label, name or "", _cell(many), _cell(100 * many / total, "{:.1f} %".format))
        for label, name, many in summary.facts.labels
    ]
    return Table("label-table", "Detections by label", columns("<label", "<name", "detections", "share"), rows)


def stray_table(proof: Completeness) -> Table:
    """Return rows that are in the source or in the job, but not in both."""
    rows = [(where, _cell(many), "\n".join(examples)) for where, examples, many in _strays(proof)]
    return Table("stray-table", "Rows that do not match", columns("<where", "rows", "<<first rows"), rows)


def setting_table(values: Mapping[str, Any]) -> Table:
    """Return the settings, without those that are not set."""
    settings = sorted(flat_settings(values).items())
    rows = [(name, setting_words(value)) for name, value in settings if value not in (None, [], ())]
    return Table("setting-table", "Settings", columns("<setting", "<<value"), rows)


def setting_words(value: Any) -> str:
    """Return the value of a setting."""
    if value is None:
        return UNKNOWN
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the keys of a table as dotted names: alerts.idle_s."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in value.items()}
        else:
            flat[key] = value
    return flat
