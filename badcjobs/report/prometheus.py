"""Every Prometheus metric of badcjobs (name, unit, meaning, value), and the text that Prometheus reads.

Both ``report --prometheus FILE`` and ``/metrics`` of ``serve`` use this table, so a name means the same in both.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

from badcjobs.model import not_none
from badcjobs.report.progress import RUNNING
from badcjobs.report.rules import SEVERITIES
from badcjobs.report.summary import Summary
from badcjobs.version import __version__

TEXTFILE = "textfile"
SERVED = "/metrics"
# What a metric describes, which decides its first labels. ``device`` is the index (or the token, if it has none),
# ``task`` is empty on a machine without a task, ``run`` is its path: Prometheus uses the label ``job`` itself.
# Readings and work exist only while the task runs: a gauge of an ended one is not current.
READING, WORK, DEVICE, HOST = "reading", "work", "device", "host"
TASK, RUN, REPORT, INFO, ALERTS = "task", "run", "report", "info", "alerts"
_OF_DEVICE = {"task": "task", "device": "label", "uuid": "uuid"}  # label → attribute
_OF_TASK = {"task": "name"}
_LABELS = {READING: _OF_DEVICE, WORK: _OF_DEVICE, DEVICE: _OF_DEVICE, HOST: _OF_TASK, TASK: _OF_TASK}
Sample = tuple[str, float | None, dict[str, str]]  # metric, value (None: not known, left out), labels


class Metric(NamedTuple):
    """One name: what it means, in which unit, and its value."""

    of: str  # what has this metric: a device, a task, or the Summary of a run
    name: str  # of a counter, which never falls, it ends in _total
    unit: str
    help: str
    value: str | Callable[[Any], Any]  # an attribute, or a function: a number; with ``by``, label values → number
    by: tuple[str, ...] = ()
    times: float = 1  # factor from the unit of ``value``

    @property
    def where(self) -> str:
        """Where it is: only in the file, only in /metrics, or (empty) in both."""
        return {REPORT: TEXTFILE, HOST: SERVED}.get(self.of, "")

    @property
    def labels(self) -> tuple[str, ...]:
        """All its labels."""
        return ("run", *_LABELS.get(self.of, ()), *self.by)


def _left(summary: Summary, name: str) -> float | None:
    """Return a figure of what is left; 0: nothing is left; None: not known."""
    if summary.outlook is not None:
        return getattr(summary.outlook, name)  # type: ignore[no-any-return]
    return None if summary.completeness.expected is None else 0.0


def _complete(summary: Summary) -> int | None:
    proof = summary.completeness
    if proof.expected is not None:
        return int(proof.complete)
    return 0 if proof.pending or proof.given_up else None


def _outdated(summary: Summary) -> int | None:
    """Return how many databases are new or have changed since the merge; None: they cannot be checked."""
    merged = summary.merged
    if merged.changed or merged.new:
        return merged.changed + merged.new
    return None if merged.as_of_ms is None or merged.gone or merged.closed else 0


def _energy_j(device: Any) -> Any:
    """Return the larger of two measurements that never fall; the better one may change, and be smaller."""
    return max(not_none((device.energy_counter_j, device.energy_integrated_j)), default=None)


_KINDS = (READING, DEVICE, WORK, HOST, TASK, INFO, RUN, REPORT, ALERTS)
_reading, _device, _work, _host, _task, _info, _run, _report, _alerts = (partial(Metric, kind) for kind in _KINDS)
METRICS = (
    # The last reading of a device.
    _reading(
        "badcjobs_gpu_utilization_percent",
        "percent",
        "share of the last sampling period in which a kernel ran",
        "reading.utilization_percent",
    ),
    _reading(
        "badcjobs_gpu_busy_percent",
        "percent",
        "share of the time in which the device was busy, by the best available measurement",
        "reading.busy_percent",
    ),
    _reading(
        "badcjobs_gpu_memory_utilization_percent",
        "percent",
        "share of the last sampling period in which device memory was read or written",
        "reading.memory_utilization_percent",
    ),
    _reading(
        "badcjobs_gpu_memory_used_bytes", "bytes", "device memory in use, by all processes", "reading.memory_used_bytes"
    ),
    _reading("badcjobs_gpu_memory_total_bytes", "bytes", "memory of the device", "memory_total_bytes"),
    _reading("badcjobs_gpu_temperature_celsius", "°C", "temperature of the chip", "reading.temperature_c"),
    _reading("badcjobs_gpu_power_watts", "W", "power draw of the board", "reading.power_w"),
    _reading("badcjobs_gpu_power_limit_watts", "W", "power limit", "power_limit_w"),
    _reading("badcjobs_gpu_sm_clock_hertz", "Hz", "clock of the multiprocessors", "reading.sm_clock_mhz", times=1e6),
    _reading("badcjobs_gpu_memory_clock_hertz", "Hz", "clock of the memory", "reading.memory_clock_mhz", times=1e6),
    _reading(
        "badcjobs_gpu_last_reading_timestamp_seconds",
        "s since 1970",
        "when the device was last read",
        "read_at_ms",
        times=1e-3,
    ),
    _reading(
        "badcjobs_gpu_sm_activity_percent",
        "percent",
        "share of the multiprocessors that had work, over time",
        "reading.sm_activity_percent",
    ),
    _reading(
        "badcjobs_gpu_sm_occupancy_percent",
        "percent",
        "share of the warps that the multiprocessors can hold, over time",
        "reading.sm_occupancy_percent",
    ),
    _reading("badcjobs_gpu_encoder_percent", "percent", "utilization of the video encoder", "reading.encoder_percent"),
    _reading("badcjobs_gpu_decoder_percent", "percent", "utilization of the video decoder", "reading.decoder_percent"),
    _reading("badcjobs_gpu_fan_percent", "percent", "fan speed, of its maximum", "reading.fan_percent"),
    _reading(
        "badcjobs_gpu_info",
        "1",
        "always 1; the model, node and driver of the device",
        lambda d: {(d.name or "", d.node, d.driver or ""): 1},
        ("name", "node", "driver"),
    ),
    # What a device did and used so far.
    _device("badcjobs_gpu_samples_total", "readings", "readings of the device so far", "samples"),
    _device("badcjobs_gpu_gap_seconds_total", "s", "time without readings", "gap_s"),
    _device("badcjobs_gpu_energy_joules_total", "J", "energy used during the task", _energy_j),
    _device(
        "badcjobs_gpu_throttled_samples_total",
        "readings",
        "readings with a reduced clock, by reason",
        "held_back",
        ("reason",),
    ),
    _device(
        "badcjobs_gpu_tries_total",
        "tries",
        "tries of chunks on the device: done, failed",
        lambda d: {"done": d.work.done, "failed": d.work.failed},
        ("outcome",),
    ),
    # The same, as far as it is known: a try in progress counts as working, and may fail.
    _work(
        "badcjobs_gpu_state_seconds",
        "s",
        "time in each state: working, failed, lost, start_up, waiting, idle",
        "state_s",
        ("state",),
    ),
    _work("badcjobs_gpu_state_energy_joules", "J", "energy used in each state", "state_energy_j", ("state",)),
    _work("badcjobs_gpu_audio_seconds", "s of audio", "audio in the chunks done on the device", "work.audio_s"),
    _work("badcjobs_gpu_lost_tries", "tries", "tries without a result: their worker was killed", "work.lost"),
    # The machine around them, as the task sees it.
    _host("badcjobs_host_cpu_percent", "percent", "all cores of the machine together, 100 = all busy", "cpu_percent"),
    _host("badcjobs_host_memory_used_bytes", "bytes", "memory in use on the machine", "memory_used_bytes"),
    # One array task.
    _task(
        "badcjobs_task_chunks",
        "chunks",
        "chunks of the task by state: done, failed, pending",
        lambda t: {"done": t.done, "failed": t.failed, "pending": t.pending},
        ("state",),
    ),
    _task("badcjobs_task_audio_seconds", "s of audio", "audio in the chunks whose result is from the task", "audio_s"),
    _task("badcjobs_task_running_seconds_total", "s", "from the start of the task to its last sign", "wall_s"),
    # The run.
    _info("badcjobs_info", "1", "always 1; the version that wrote this", lambda _: {__version__: 1}, ("version",)),
    _run(
        "badcjobs_tasks",
        "task attempts",
        "array task attempts by verdict: done, failed, stopped, killed, running, silent, outdated",
        "tasks_by_verdict",
        ("verdict",),
    ),
    _run(
        "badcjobs_tasks_missing",
        "array tasks",
        "array tasks that left no database, or have not started yet",
        lambda s: len(s.completeness.missing_indices),
    ),
    _report(
        "badcjobs_tasks_outdated",
        "task attempts",
        "task attempts whose database is new or has changed since the merge; above 0, these metrics are out of date",
        _outdated,
    ),
    _run(
        "badcjobs_chunks",
        "chunks",
        "chunks that tasks have listed, by state: done, failed, pending, skipped",
        lambda s: {"done": s.done, "failed": s.failed, "pending": s.left, "skipped": s.skipped},
        ("state",),
    ),
    _run(
        "badcjobs_source_rows",
        "rows",
        "rows of the source, without recordings left out",
        "completeness.expected",
    ),
    _run("badcjobs_complete", "0 or 1", "1 when every row of the source is done or left out", _complete),
    _run("badcjobs_tries_total", "tries", "tries of chunks", "facts.tries"),
    _run(
        "badcjobs_audio_seconds",
        "s of audio",
        "audio in the chunks that are done; overlaps count twice before a merge",
        "audio_hours",
        times=3600,
    ),
    _run(
        "badcjobs_audio_left_seconds",
        "s of audio",
        "audio that is left (estimate)",
        lambda s: _left(s, "audio_hours"),
        times=3600,
    ),
    _run(
        "badcjobs_detections",
        "detections",
        "detections of all labels; overlaps count twice before a merge",
        "detections",
    ),
    _run("badcjobs_running_seconds_total", "s", "time during which at least one task was running", "wall_s"),
    _run("badcjobs_speed_ratio", "s of audio per s", "audio done over running time: × real time", "times_real_time"),
    _run(
        "badcjobs_granted_gpu_seconds_total",
        "GPU-seconds",
        "for each task, its running time × the devices it was granted",
        "gpu_hours",
        times=3600,
    ),
    _run(
        "badcjobs_state_gpu_seconds",
        "GPU-seconds",
        "what the devices did with that time, by state",
        lambda s: {state: time.gpu_hours for state, time in s.states.items()},
        ("state",),
        times=3600,
    ),
    _run(
        "badcjobs_state_energy_joules",
        "J",
        "energy used in each state",
        lambda s: {state: time.energy_wh for state, time in s.states.items()},
        ("state",),
        times=3600,
    ),
    _run(
        "badcjobs_energy_joules_total",
        "J",
        "energy of all devices that report it",
        lambda s: math.fsum(filter(None, map(_energy_j, s.devices))) or None,
    ),
    _run(
        "badcjobs_left_gpu_seconds",
        "GPU-seconds",
        "device time that is left (estimate)",
        lambda s: _left(s, "gpu_hours"),
        times=3600,
    ),
    _run(
        "badcjobs_predicted_end_timestamp_seconds",
        "s since 1970",
        "when the work will be done (estimate); only while tasks are running and until that time has passed",
        lambda s: s.outlook and s.outlook.end_at_ms,
        times=1e-3,
    ),
    _alerts(
        "badcjobs_alerts_total",
        "alerts",
        "alerts of each kind",
        lambda s: {(alert.kind, alert.severity): alert.alerts for alert in s.alerts},
        ("kind", "severity"),
    ),
    _alerts(
        "badcjobs_alerts_open",
        "alerts",
        "alerts that are still open",
        lambda s: {(alert.kind, alert.severity): alert.still_open for alert in s.alerts},
        ("kind", "severity"),
    ),
    _report(
        "badcjobs_findings",
        "findings",
        "findings of the report: problem, warning, note",
        lambda s: dict.fromkeys(SEVERITIES, 0) | Counter(finding.severity for finding in s.findings),
        ("severity",),
    ),
)
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}


def samples_of(sources: Mapping[str, Iterable[Any]], run: str) -> Iterator[Sample]:
    """Yield the samples of devices, tasks and a run, by what they are for their metrics, metric by metric."""
    for metric in METRICS:
        for source in sources.get(metric.of, ()):
            yield from _samples(metric, source, run)


def _samples(metric: Metric, source: Any, run: str) -> Iterator[Sample]:
    of_source = {label: getattr(source, name) or "" for label, name in _LABELS.get(metric.of, {}).items()}
    figures = attrgetter(metric.value)(source) if isinstance(metric.value, str) else metric.value(source)
    if not metric.by:
        figures = {(): figures}
    for key, value in figures.items():
        keys = (key,) if isinstance(key, str) else key
        labels = {"run": run, **of_source, **dict(zip(metric.by, keys, strict=True))}
        yield metric.name, value and value * metric.times, labels


def job_samples(summary: Summary, run: str) -> Iterator[Sample]:
    """Yield every sample of a job; ``run`` is its path."""
    sources = accounts_of(summary)
    sources |= {READING: sources[WORK], **dict.fromkeys((INFO, RUN, REPORT, ALERTS), (summary,))}
    return samples_of(sources, run)


def accounts_of(summary: Summary) -> dict[str, Sequence[Any]]:
    """Return the tasks and devices of a summary, by what they are for their metrics."""
    running = {task.name for task in summary.facts.tasks if task.state == RUNNING}
    working = [device for device in summary.devices if device.task in running]
    return {DEVICE: summary.devices, WORK: working, TASK: summary.facts.tasks}


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Return samples that come metric by metric in the Prometheus text format; only known, finite values."""
    return "".join(prometheus_lines(samples))


def prometheus_lines(samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the same text line by line."""
    last = None
    for name, value, labels in samples:
        if value is None or not math.isfinite(value):
            continue
        if name != last:
            last = name
            metric = METRIC_BY_NAME[name]
            kind = "counter" if name.endswith("_total") else "gauge"
            yield f"# HELP {name} {metric.help} ({metric.unit})\n# TYPE {name} {kind}\n"
        # For Prometheus an empty label is the same as no label.
        pairs = [f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items() if text]
        braces = f"{{{','.join(pairs)}}}" if pairs else ""
        shown = repr(float(round(value, 3))).removesuffix(".0")  # a sum in another order must not be smaller
        yield f"{name}{braces} {shown}\n"
