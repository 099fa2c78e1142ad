"""Every Prometheus metric of badcjobs (name, unit, meaning, value), and the text that Prometheus reads.

Both ``report --prometheus FILE`` and ``/metrics`` of ``serve`` use this table, so a name means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from badcjobs import __version__
from badcjobs.report.rules import SEVERITIES
from badcjobs.report.summary import Summary

BOTH, TEXTFILE, SERVED = "both", "textfile", "/metrics"
# What a metric describes, which decides its first labels. ``device`` is the index (or the token, if it has none),
# ``task`` is empty on a machine without a task, ``run`` is its path: Prometheus uses the label ``job`` itself.
# Readings and work exist only while the task runs: a gauge of an ended one is not current.
READING, WORK, DEVICE, HOST = "reading", "work", "device", "host"
TASK, RUN, REPORT, INFO, ALERTS = "task", "run", "report", "info", "alerts"
_LABELS = {
    **dict.fromkeys((READING, WORK, DEVICE), ("run", "task", "device", "uuid")),
    **dict.fromkeys((HOST, TASK), ("run", "task")),
    **dict.fromkeys((RUN, REPORT, ALERTS), ("run",)),
    INFO: ("run", "version"),
}
Sample = tuple[str, float | None, dict[str, str]]  # metric, value (None: not known, left out), labels


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: what it means, in which unit, and its value."""

    name: str  # of a counter, which never falls, it ends in _total
    unit: str
    of: str  # what has this metric: a device, a task, or the Summary of a run
    help: str
    value: str | Callable[[Any], Any]  # an attribute, or a function: a number; with ``by``, label values → number
    by: tuple[str, ...] = ()
    times: float = 1  # factor from the unit of ``value``

    @property
    def where(self) -> str:
        """In the file, in /metrics, or in both."""
        return {REPORT: TEXTFILE, HOST: SERVED}.get(self.of, BOTH)

    @property
    def labels(self) -> tuple[str, ...]:
        """All its labels."""
        return (*_LABELS[self.of], *self.by)


def _left(summary: Summary, name: str) -> float | None:
    """Return a figure of what is left; 0: nothing is left; None: not known."""
    known = summary.completeness is not None and summary.completeness.expected is not None
    return getattr(summary.outlook, name, 0.0 if known else None)


def _complete(summary: Summary) -> int | None:
    proof = summary.completeness
    if proof is None:
        return None
    if proof.expected is not None:
        return int(proof.complete)
    return 0 if proof.pending or proof.failed or proof.poison else None


def _outdated(summary: Summary) -> int | None:
    """Return how many databases are new or have changed since the merge; None: they cannot be checked."""
    merged = summary.merged
    unknown = merged.as_of_ms is None or merged.gone or merged.closed
    return merged.changed + merged.new or (None if unknown else 0)


def _energy_j(device: Any) -> Any:
    """Return the larger of two measurements that never fall; the better one may change, and be smaller."""
    counted_j, integrated_j = device.energy_counter_j, device.energy_integrated_j
    return integrated_j if counted_j is None else max(counted_j, integrated_j or 0.0)


METRICS = (
    # The last reading of a device.
    Metric("badcjobs_gpu_utilization_percent", "percent", READING,
           "share of the last sampling period in which a kernel ran", "reading.utilization_percent"),
    Metric("badcjobs_gpu_busy_percent", "percent", READING,
           "share of the time in which the device was busy, by the best available measurement", "reading.busy_percent"),
    Metric("badcjobs_gpu_memory_utilization_percent", "percent", READING,
           "share of the last sampling period in which device memory was read or written",
           "reading.memory_utilization_percent"),
    Metric("badcjobs_gpu_memory_used_bytes", "bytes", READING,
           "device memory in use, by all processes", "reading.memory_used_bytes"),
    Metric("badcjobs_gpu_memory_total_bytes", "bytes", READING, "memory of the device", "memory_total_bytes"),
    Metric("badcjobs_gpu_temperature_celsius", "°C", READING, "temperature of the chip", "reading.temperature_c"),
    Metric("badcjobs_gpu_power_watts", "W", READING, "power draw of the board", "reading.power_w"),
    Metric("badcjobs_gpu_power_limit_watts", "W", READING, "power limit", "power_limit_w"),
    Metric("badcjobs_gpu_sm_clock_hertz", "Hz", READING,
           "clock of the multiprocessors", "reading.sm_clock_mhz", times=1e6),
    Metric("badcjobs_gpu_memory_clock_hertz", "Hz", READING,
           "clock of the memory", "reading.memory_clock_mhz", times=1e6),
    Metric("badcjobs_gpu_last_reading_timestamp_seconds", "s since 1970", READING,
           "when the device was last read", "read_at_ms", times=1e-3),
    Metric("badcjobs_gpu_sm_activity_percent", "percent", READING,
           "share of the multiprocessors that had work, over time", "reading.sm_activity_percent"),
    Metric("badcjobs_gpu_sm_occupancy_percent", "percent", READING,
           "share of the warps that the multiprocessors can hold, over time", "reading.sm_occupancy_percent"),
    Metric("badcjobs_gpu_encoder_percent", "percent", READING,
           "utilization of the video encoder", "reading.encoder_percent"),
    Metric("badcjobs_gpu_decoder_percent", "percent", READING,
           "utilization of the video decoder", "reading.decoder_percent"),
    Metric("badcjobs_gpu_fan_percent", "percent", READING, "fan speed, of its maximum", "reading.fan_percent"),
    Metric("badcjobs_gpu_info", "1", READING, "always 1; the model, node and driver of the device",
           lambda d: {(d.name or "", d.node, d.driver or ""): 1}, ("name", "node", "driver")),
    # What a device did and used so far.
    Metric("badcjobs_gpu_samples_total", "readings", DEVICE, "readings of the device so far", "samples"),
    Metric("badcjobs_gpu_gap_seconds_total", "s", DEVICE, "time without readings", "gap_s"),
    Metric("badcjobs_gpu_energy_joules_total", "J", DEVICE, "energy used during the task", _energy_j),
    Metric("badcjobs_gpu_throttled_samples_total", "readings", DEVICE,
           "readings with a reduced clock, by reason", "held_back", ("reason",)),
    Metric("badcjobs_gpu_tries_total", "tries", DEVICE, "tries of chunks on the device: done, failed",
           lambda d: {"done": d.work.done, "failed": d.work.failed}, ("outcome",)),
    Metric("badcjobs_gpu_audio_seconds_total", "s of audio", DEVICE,
           "audio in the chunks done on the device", "work.audio_s"),
    # The same, as far as it is known: a try in progress counts as working, and may fail.
    Metric("badcjobs_gpu_state_seconds", "s", WORK,
           "time in each state: working, failed, lost, start_up, waiting, idle", "state_s", ("state",)),
    Metric("badcjobs_gpu_state_energy_joules", "J", WORK, "energy used in each state", "state_energy_j", ("state",)),
    Metric("badcjobs_gpu_lost_tries", "tries", WORK, "tries without a result: their worker was killed", "work.lost"),
    # The machine around them, as the task sees it.
    Metric("badcjobs_host_cpu_percent", "percent", HOST,
           "all cores of the machine together, 100 = all busy", "cpu_percent"),
    Metric("badcjobs_host_memory_used_bytes", "bytes", HOST, "memory in use on the machine", "memory_used_bytes"),
    # One array task.
    Metric("badcjobs_task_chunks", "chunks", TASK, "chunks of the task by state: done, failed, pending",
           lambda t: {"done": t.done, "failed": t.failed, "pending": t.pending}, ("state",)),
    Metric("badcjobs_task_audio_seconds", "s of audio", TASK,
           "audio in the chunks whose result is from the task", "audio_s"),
    Metric("badcjobs_task_running_seconds_total", "s", TASK, "from the start of the task to its last sign", "wall_s"),
    # The run.
    Metric("badcjobs_info", "1", INFO, "always 1; the version that wrote this", lambda _: 1),
    Metric("badcjobs_tasks", "task attempts", RUN,
           "array task attempts by verdict: done, failed, stopped, killed, running, silent, outdated",
           "tasks_by_verdict", ("verdict",)),
    Metric("badcjobs_tasks_missing", "array tasks", RUN,
           "array tasks that left no database, or have not started yet", lambda s: len(s.tasks_missing)),
    Metric("badcjobs_tasks_outdated", "task attempts", REPORT,
           "task attempts whose database is new or has changed since the merge; above 0, these metrics are out of date",
           _outdated),
    Metric("badcjobs_chunks", "chunks", RUN, "chunks that tasks have listed, by state: done, failed, pending, skipped",
           lambda s: {"done": s.done, "failed": s.failed, "pending": s.left, "skipped": s.skipped}, ("state",)),
    Metric("badcjobs_source_rows", "rows", RUN,
           "rows of the source", lambda s: s.completeness and s.completeness.expected),
    Metric("badcjobs_complete", "0 or 1", RUN, "1 when every row of the source is done", _complete),
    Metric("badcjobs_tries_total", "tries", RUN, "tries of chunks", "facts.tries"),
    Metric("badcjobs_audio_seconds_total", "s of audio", RUN, "audio in the chunks that are done", "audio_hours",
           times=3600),
    Metric("badcjobs_audio_left_seconds", "s of audio", RUN,
           "audio that is left (estimate)", lambda s: _left(s, "audio_hours"), times=3600),
    Metric("badcjobs_detections", "detections", RUN, "detections of all labels", "detections"),
    Metric("badcjobs_running_seconds_total", "s", RUN, "time during which at least one task was running", "wall_s"),
    Metric("badcjobs_speed_ratio", "s of audio per s", RUN,
           "audio done over running time: × real time", "times_real_time"),
    Metric("badcjobs_granted_gpu_seconds_total", "GPU-seconds", RUN,
           "for each task, its running time × the devices it was granted", "gpu_hours", times=3600),
    Metric("badcjobs_state_gpu_seconds", "GPU-seconds", RUN, "what the devices did with that time, by state",
           lambda s: {state: time.gpu_hours for state, time in s.states.items()}, ("state",), times=3600),
    Metric("badcjobs_state_energy_joules", "J", RUN, "energy used in each state",
           lambda s: {state: time.energy_wh for state, time in s.states.items()}, ("state",), times=3600),
    Metric("badcjobs_energy_joules_total", "J", RUN, "energy of all devices that report it",
           lambda s: math.fsum(filter(None, map(_energy_j, s.devices))) or None),
    Metric("badcjobs_left_gpu_seconds", "GPU-seconds", RUN,
           "device time that is left (estimate)", lambda s: _left(s, "gpu_hours"), times=3600),
    Metric("badcjobs_predicted_end_timestamp_seconds", "s since 1970", RUN,
           "when the work will be done (estimate); only while tasks are running and until that time has passed",
           lambda s: s.outlook and s.outlook.end_at_ms, times=1e-3),
    Metric("badcjobs_alerts_total", "alerts", ALERTS, "alerts of each kind",
           lambda s: {(alert.kind, alert.severity): alert.alerts for alert in s.alerts}, ("kind", "severity")),
    Metric("badcjobs_alerts_open", "alerts", ALERTS, "alerts that are still open",
           lambda s: {(alert.kind, alert.severity): alert.still_open for alert in s.alerts}, ("kind", "severity")),
    Metric("badcjobs_findings", "findings", REPORT, "findings of the report: problem, warning, note",
           lambda s: {name: sum(found.severity == name for found in s.findings) for name in SEVERITIES}, ("severity",)),
)  # fmt: skip
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}


def samples_of(things: Mapping[str, Iterable[Any]], run: str) -> Iterator[Sample]:
    """Yield the samples of devices, tasks and a run, by what they are for their metrics, metric by metric."""
    for metric in METRICS:
        for thing in things.get(metric.of, ()):
            yield from _samples(metric, thing, run)


def _samples(metric: Metric, thing: Any, run: str) -> Iterator[Sample]:
    first: tuple[str, ...] = (run,)
    if metric.of in (READING, WORK, DEVICE):
        first = run, thing.task, thing.label, thing.uuid or ""
    elif metric.of in (HOST, TASK):
        first = run, thing.name
    elif metric.of == INFO:
        first = run, __version__
    found = attrgetter(metric.value)(thing) if isinstance(metric.value, str) else metric.value(thing)
    for key, value in found.items() if metric.by else [((), found)]:
        labels = zip(metric.labels, (*first, *((key,) if isinstance(key, str) else key)), strict=True)
        yield metric.name, value and value * metric.times, dict(labels)


def job_samples(summary: Summary, run: str) -> Iterator[Sample]:
    """Yield every sample of a job; ``run`` is its path."""
    things = accounts_of(summary)
    things |= {READING: things[WORK], **dict.fromkeys((INFO, RUN, REPORT, ALERTS), (summary,))}
    return samples_of(things, run)


def accounts_of(summary: Summary) -> dict[str, Sequence[Any]]:
    """Return the tasks and devices of a summary, by what they are for their metrics."""
    running = [device for device in summary.devices if device.task in summary.tasks_running]
    return {DEVICE: summary.devices, WORK: running, TASK: summary.facts.tasks}


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Return samples that come metric by metric in the Prometheus text format; only known, finite values."""
    return "".join(prometheus_lines(samples))


def prometheus_lines(samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the same text line by line."""
    last = None
    for name, value, labels in samples:
        if value is not None and math.isfinite(value):
            if name != last:
                metric, last = METRIC_BY_NAME[name], name
                kind = "counter" if name.endswith("_total") else "gauge"
                yield f"# HELP {name} {metric.help} ({metric.unit})\n# TYPE {name} {kind}\n"
            # For Prometheus an empty label is the same as no label.
            pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items() if text)
            value = round(value, 3)  # a sum in another order must not be smaller
            number = str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
            yield f"{name}{{{pairs}}} {number}\n" if pairs else f"{name} {number}\n"
