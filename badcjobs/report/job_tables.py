"""The tables of a job report, for text, notebook and page."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from badcjobs.model import AUDIO_FAULTS, CHARTED, load_word, not_none
from badcjobs.report.progress import KILLED, RUNNING, SILENT, state_of, state_words
from badcjobs.report.rules_devices import LEAST_PEERS, LEAST_TRIES, find_stragglers, peer_groups
from badcjobs.report.summary import NEARLY_ALL, STATE_WORDS, StateSummary, Summary, count_devices
from badcjobs.report.tables import Cell, Row, Table, columns
from badcjobs.report.verdict import alert_lines
from badcjobs.report.words import UNKNOWN, count, duration, energies, energy, fixed, memory, number, share_words
from badcjobs.store.read_model import Completeness, DeviceFacts, TaskFacts

MOST_ROWS = 200  # of a table, or names in a finding, on a page
_LONGEST_MESSAGE, _SHORTEST_MESSAGE = 1000, 300
_ALL_MESSAGES = 300_000  # characters: a page should stay small enough to send
_NEARLY_ALL_OF_A_STATE = 90.0  # percent
_LAST_LINE = 500  # characters of an engine error, in text


# --- the lists and tables of text and notebook ------------------------------------------------------------------------


def report_parts(summary: Summary, most: int, most_devices: int = 0) -> Iterator[tuple[str, list[str] | Table]]:
    """Yield the parts below the findings: a heading, and a table or the first lines of a list."""
    facts, proof, labels = summary.facts, summary.completeness, summary.facts.labels
    yield "Alerts", [f"alert: {line}" for line in alert_lines(summary.alerts)]
    strays = [] if proof is None else [
        ("in no task", proof.not_listed_examples, proof.not_listed or 0),
        ("not in the source", proof.strangers_examples, proof.strangers or 0),
    ]  # fmt: skip
    for what, examples, many in strays:
        yield f"Rows {what}", _first([f"{what}: {name}" for name in examples], many if examples else 0, most, "more")
    if summary.states:
        yield "Time and energy", state_table(summary.states)
    if summary.devices and most_devices:
        yield "Devices", device_table(summary, most_devices)
    silent = frozenset(summary.tasks_silent)
    unwell = [
        f"task {task.name}: {state_words(task, silent)}; {task.done:,} done, {task.failed:,} failed,"
        f" {task.pending:,} left"
        for task in trouble_first(summary)
        if task.verdict != "done"
    ]
    yield "Array tasks", _first(unwell, len(unwell), most, "more tasks (--json lists all)")
    gaps = [f"gap: {g.reason} ({count(g.gaps, 'time')}, {duration(g.seconds)})" for g in facts.gaps if g.metric is None]
    missing = sorted({(gap.metric, gap.reason) for gap in facts.gaps if gap.metric is not None})
    yield "Gaps in telemetry", gaps + [f"not available: {metric}: {reason}" for metric, reason in missing]
    if labels:
        yield "Detections", label_table(summary, most).without("share")
        yield "", _first([], len(labels) - most, 0, "more labels")
    chunks = sorted(facts.failed, key=lambda c: c.error_class not in AUDIO_FAULTS)
    every = max(most, sum(c.error_class in AUDIO_FAULTS for c in chunks))  # each file without audio is named
    failed = [f"{c.status}: {failure(c.recording_id, c.chunk_id, c.error_class, c.error)}" for c in chunks]
    yield (
        "Failed chunks",
        _first(failed, summary.failed, every, "more failed chunks (in job.sqlite, table chunk)"),
    )
    files = [f"file {path}: {remark}" for path, remark in facts.file_remarks]
    yield "Files with a remark", _first(files, len(files), most, "more files (in job.sqlite, table source_file)")


def _first(lines: list[str], many: int, most: int, what: str) -> list[str]:
    """Return the first of many lines, and how many more there are."""
    shown = lines[:most]
    return shown + ([f"… and {many - len(shown):,} {what}"] if many > len(shown) else [])


def failure(recording_id: str, chunk_id: str, error_class: str, error: str) -> str:
    """Return a failed chunk and the last line of the engine error."""
    name = recording_id if recording_id == chunk_id else f"{recording_id} {chunk_id}"
    last = error.strip().rpartition("\n")[2][:_LAST_LINE]
    return f"{name} ({error_class})" + (f": {last}" if last else "")


# --- cells ------------------------------------------------------------------------------------------------------------


def _cell(value: float | None, form: str = "{:,}") -> Cell:
    return Cell(UNKNOWN if value is None else form.format(value), value)


def _with_unit(value: float | None, unit: str, digits: int = 0) -> Cell:
    return Cell(UNKNOWN if value is None else f"{number(value, digits)} {unit}", value)


def _percent(value: float | None) -> Cell:
    return _cell(value, "{:.0f} %")


def _duration(seconds: float) -> Cell:
    return Cell(duration(seconds), seconds)


# --- tasks and devices ------------------------------------------------------------------------------------------------


def state_table(states: Mapping[str, StateSummary]) -> Table:
    """Return the time and energy of all devices by state; if a part is missing, how much of the time was measured."""
    shown = [(words, states[state]) for state, words in STATE_WORDS.items() if state in states]
    hours, busy = sum(s.gpu_hours for _, s in shown), not_none(s.busy_hours for _, s in shown)
    known = not_none(s.energy_wh for _, s in shown)
    measured = sum(s.gpu_hours * (s.measured_percent or 0.0) for _, s in shown) / hours if hours else None
    whole = StateSummary(
        hours, 100.0, sum(busy) if busy else None, sum(known) if known else None, 100.0 if known else None, measured
    )
    everything = [*shown, ("total", whole)]
    joules = energies([found.energy_wh for _, found in everything])
    rows: list[Row] = []
    for (words, found), used in zip(everything, joules, strict=True):
        shares = (found.share_percent, found.energy_share_percent, found.measured_percent)
        of_time, of_energy, of_measured = map(Cell, map(share_words, shares), shares)
        hours_of = (_hours(found.gpu_hours), of_time, _hours(found.busy_hours))
        rows.append((words, *hours_of, Cell(used, found.energy_wh), of_energy, of_measured))
    heads = columns(
        "<what the GPUs did", "GPU time", "of the time", "of it busy", "energy", "of the energy", "measured"
    )
    table = Table("state-table", "What the GPUs did with their time and energy", heads, rows[:-1], rows[-1])
    least = min(not_none(s.measured_percent for s in states.values()), default=100.0)
    partly = bool(known) and ((measured or 0.0) < NEARLY_ALL or least < _NEARLY_ALL_OF_A_STATE)
    return table if partly else table.without("measured")


def _hours(hours: float | None) -> Cell:
    if hours is None:
        return Cell(UNKNOWN, None)
    return Cell(duration(hours * 3600) if hours < 0.1 else f"{number(hours, 2)} h", hours)


def device_table(summary: Summary, most: int = MOST_ROWS) -> Table:
    """Return the devices of all tasks, those with trouble first; if there are too many, the least busy."""
    chosen, many = sorted(summary.devices, key=_device_rank)[:most], len(summary.devices)
    heads = columns(
        "<task", "<device", "<model", "working", "start-up", "waiting", "busy", "util.", "p50/p95/max", "memory",
        "hottest", "power", "energy", "samples", "gaps",
    )  # fmt: skip
    rows: list[Row] = []
    for d in chosen:
        load, energy_wh = d.metrics.get("utilization_percent"), d.energy_j and d.energy_j / 3600
        ranks = "/".join(fixed(one, 0) for one in (load.p50, load.p95, load.maximum)) if load else UNKNOWN
        gaps = duration(d.gap_s) if d.gap_s else "none" if d.samples else UNKNOWN
        times_s = [d.state_s.get(state, 0.0) for state in ("working", "start_up", "waiting")]
        shares = [_percent(100 * time_s / d.total_s if d.total_s > 0 else None) for time_s in times_s]
        rows.append((
            d.task, d.label, d.name or UNKNOWN, *shares,
            _percent(d.busy_mean_percent), _load(d.utilization_mean_percent),
            Cell(ranks, None if load is None else load.p50),
            Cell(memory(d.memory_peak_bytes), d.memory_peak_bytes), _with_unit(d.temperature_max_c, "°C"),
            _with_unit(d.power_mean_w, "W"), Cell(energy(energy_wh), energy_wh), _cell(d.samples), Cell(gaps, d.gap_s),
        ))  # fmt: skip
    table = Table("device-table", _caption("Devices", many, "device_summary", most), heads, rows, of=many)
    one_model = len({device.name for device in summary.devices}) == 1
    return table.without("model") if one_model else table  # the model is named above the table


def _load(percent: float | None) -> Cell:
    """Return a utilization with the word for it."""
    return Cell(UNKNOWN if percent is None else f"{percent:.0f} % {load_word(percent)}", percent)


def _device_rank(device: DeviceFacts) -> tuple[bool, float]:
    """Return the sort key of a device: failed or lost work first, then the least busy."""
    busy = device.utilization_mean_percent if device.busy_mean_percent is None else device.busy_mean_percent
    return not (device.work.gave_up or device.work.failed or device.work.lost), 101.0 if busy is None else busy


def _caption(words: str, many: int, table: str, most: int = MOST_ROWS) -> str:
    """Return the caption of a table; if it has only the first of many rows, with the command that writes all."""
    if many <= most:
        return words
    return (
        f"{words}: the first {most} of {many:,}, trouble first; all of them:"
        f" badcjobs export job.sqlite --table {table} -o {table}.csv"
    )


def trouble_first(summary: Summary) -> list[TaskFacts]:
    """Return the tasks; those that need attention come first."""
    silent = frozenset(summary.tasks_silent)

    def rank(task: TaskFacts) -> tuple[int, int]:
        state = SILENT if task.name in silent else state_of(task, None)
        return (_ORDER.index(state) if state in _ORDER else len(_ORDER)), -task.failed

    return sorted(summary.facts.tasks, key=rank)


_ORDER = (KILLED, "failed", SILENT, "stopped", RUNNING)  # then done


# --- stragglers: devices that were slower than others of the same model -----------------------------------------------


def straggler_table(summary: Summary) -> tuple[Table | None, str]:
    """Return the devices that were slower than their peers, as in the findings, and what was compared.

    No table: there was nothing to compare.
    """
    groups = peer_groups(summary.facts.tasks, summary.devices)
    needed = f"this needs {LEAST_PEERS} devices of one model with the same work and {LEAST_TRIES} chunks each"
    if not groups:
        return None, f"No devices were compared: {needed}." if summary.devices else "No device was used."
    rows: list[Row] = []
    medians = []
    for peers in groups:
        middle, model = median(peer.rate for peer in peers), peers[0].rows[0].name or "same model"
        medians.append(f"{number(middle)} {peers[0].unit} on {model}")
        for peer in find_stragglers(peers):
            degrees = not_none(row.temperature_max_c for row in peer.rows)
            rows.append(
                (peer.label, model, _percent(100 * peer.rate / middle), _with_unit(peer.rate, peer.unit, 1),
                 _with_unit(peer.chunk_p50_s, "s", 1),
                 _with_unit(max(row.work.chunk_max_s or 0.0 for row in peer.rows), "s", 1),
                 _with_unit(max(degrees, default=None), "°C"), peer.held_back or UNKNOWN)
            )  # fmt: skip
    compared = sum(map(len, groups))
    words = f"{count(compared, 'device')} compared with the median speed of the same model while working: "
    words += f"{'; '.join(medians)}."
    if left := count_devices(summary.devices) - compared:
        words += f" {count(left, 'other was', 'others were')} not compared: {needed}."
    heads = columns("<device", "<model", "of the median speed", "speed", "chunk p50", "longest", "hottest",
                    "<held back by")  # fmt: skip
    if len(rows) > MOST_ROWS:
        words += f" The table shows {MOST_ROWS} of {len(rows):,} slow devices; --json lists all in the finding."
    caption = "Devices that were slower than their peers by more than chance"
    return Table("straggler-table", caption, heads, rows[:MOST_ROWS], of=len(rows)), words


# --- the charts in numbers --------------------------------------------------------------------------------------------

# metric → its name, and its value in words
SPOKEN: Mapping[str, tuple[str, Callable[[float], str]]] = {
    "utilization_percent": ("utilization", lambda value: _load(value).words),
    "memory_used_bytes": ("memory in use", lambda value: memory(round(value))),
    "temperature_c": ("temperature", lambda value: f"{value:.0f} °C"),
    "power_w": ("power", lambda value: f"{value:.0f} W"),
}


def reading_table(summary: Summary) -> Table:
    """Return the numbers of each charted metric over all devices."""
    rows: list[Row] = []
    for metric in CHARTED:
        found = [d.metrics[metric] for d in summary.devices if metric in d.metrics]
        if found:
            name, say = SPOKEN[metric]
            samples = sum(m.samples for m in found)
            values = (
                min(m.minimum for m in found), min(m.mean for m in found),
                sum(m.mean * m.samples for m in found) / samples, max(m.mean for m in found),
                max(m.p95 for m in found), max(m.maximum for m in found),
            )  # fmt: skip
            rows.append((name, *(Cell(say(value), value) for value in values), _cell(samples)))
    heads = columns("<metric", "smallest reading", "lowest mean of a device", "mean of all", "highest mean of a device",
             "highest p95 of a device", "largest reading", "samples")  # fmt: skip
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


def page_tables(summary: Summary) -> Iterator[tuple[str, str, Table, str, str]]:
    """Yield the lists of a page: section, heading, table, the text for an empty table, and the text above the table."""
    facts, models = summary.facts, {device.name or "" for device in summary.devices}
    caption = "Chunks that failed for good"
    if summary.failed > len(facts.failed):
        caption = (
            f"The first {len(facts.failed):,} of {summary.failed:,} chunks that failed for good; job.sqlite has all"
        )
    longest = max(_SHORTEST_MESSAGE, min(_LONGEST_MESSAGE, _ALL_MESSAGES // max(1, len(facts.failed))))
    heads = columns("<recording", "<chunk", "<state", "tries", "<class", "<<error")
    rows: list[Row] = [
        (c.recording_id, c.chunk_id, c.status, _cell(c.attempts), c.error_class, shortened(c.error, longest))
        for c in facts.failed
    ]
    yield "failed", "Failed chunks", Table("failed-table", caption, heads, rows), "No chunk failed for good.", ""
    yield "heard", "Detections", label_table(summary), "No detections.", ""
    heads = columns("<task", "<node", "<verdict", "exit code", "devices", "done", "failed", "left", "audio",
                    "wall time")  # fmt: skip
    silent, many = frozenset(summary.tasks_silent), len(facts.tasks)
    rows = [
        (t.name, t.node, state_words(t, silent), _cell(t.exit_code), _cell(t.devices), _cell(t.done),
         _cell(t.failed), _cell(t.pending), _duration(t.audio_s), _duration(t.wall_s))
        for t in trouble_first(summary)[:MOST_ROWS]
    ]  # fmt: skip
    caption = _caption("Array tasks", many, "task_summary")
    yield "tasks", "Array tasks", Table("task-table", caption, heads, rows, of=many), "None.", ""
    many, backends = count_devices(summary.devices), ", ".join(sorted({device.backend for device in summary.devices}))
    each = f"{count(many, 'device')}, one row per array task that used it. " if many < len(summary.devices) else ""
    model = f"Model: {'; '.join(models)}. " if len(models) == 1 and all(models) else ""
    words = f"{each}{model}Readings come from {backends}." if backends else ""
    yield "devices", "Devices", device_table(summary), "No device was used.", words
    heads = columns("<kind", "<severity", "alerts", "devices", "longest", "<<for example")
    rows = [
        (a.kind.replace("_", " "), a.severity, _cell(a.alerts), _cell(a.devices), _duration(a.longest_s), a.example)
        for a in sorted(summary.alerts, key=lambda alert: alert.severity != "critical")
    ]
    yield "alerts", "Alerts", Table("alert-table", "Alerts, by kind", heads, rows), "None.", ""
    heads = columns("<reason", "<what", "gaps", "time", "tasks")
    rows = [
        (g.reason, g.metric or "all readings", _cell(g.gaps), _duration(g.seconds), _cell(g.tasks))
        for g in sorted(facts.gaps, key=lambda gap: (gap.metric is not None, -gap.seconds))
    ]
    gaps = Table("gap-table", "Time without readings, by reason", heads, rows)
    yield "gaps", "Gaps in telemetry", gaps, "None.", ""
    many, heads = len(facts.file_remarks), columns("<file", "<<remark")
    caption = _caption("Files with a remark", many, "source_file")
    remarks = Table("file-table", caption, heads, facts.file_remarks[:MOST_ROWS], of=many)
    yield "files", "Files with a remark", remarks, "None.", ""


def shortened(message: str, longest: int) -> str:
    """Return a message, or the beginning and the end of a long one: the reason is in one of them."""
    left_out = len(message) - longest
    if left_out <= 100:
        return message
    half = longest // 2
    return f"{message[:half]}\n[… {left_out:,} characters left out; job.sqlite has them …]\n{message[-half:]}"


def label_table(summary: Summary, most: int | None = None) -> Table:
    """Return the detections by label, or the most frequent labels."""
    total = sum(many for _, _, many in summary.facts.labels)
    rows = [
        (label, name or "", _cell(many), _cell(100 * many / total, "{:.1f} %"))
        for label, name, many in summary.facts.labels[:most]
    ]
    return Table("label-table", "Detections by label", columns("<label", "<name", "detections", "share"), rows)


def stray_table(proof: Completeness | None) -> Table:
    """Return rows that are in the source or in the job, but not in both."""
    kinds = () if proof is None else (
        ("in the source, in no task", proof.not_listed, proof.not_listed_examples),
        ("in the job, not in the source", proof.strangers, proof.strangers_examples),
    )  # fmt: skip
    rows = [(where, _cell(many), "\n".join(examples)) for where, many, examples in kinds if examples]
    return Table("stray-table", "Rows that do not match", columns("<where", "rows", "<<first rows"), rows)


def setting_table(values: Mapping[str, Any]) -> Table:
    """Return the settings, without those that are not set."""
    rows = []
    for name, value in sorted(flat_settings(values).items()):
        if isinstance(value, bool):
            rows.append((name, "yes" if value else "no"))
        elif isinstance(value, list | tuple):
            rows += [(name, "\n".join(map(str, value)))] if value else []
        elif value is not None:
            rows.append((name, str(value)))
    return Table("setting-table", "Settings", columns("<setting", "<<value"), rows)


def flat_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the keys of a table as dotted names: alerts.idle_s."""
    found: dict[str, Any] = {}
    for key, value in settings.items():
        inner = value if isinstance(value, Mapping) else None
        found.update({key: value} if inner is None else {f"{key}.{name}": item for name, item in inner.items()})
    return found
