"""Every Prometheus metric of badcjobs (name, unit, meaning, value), and the text that Prometheus reads.

Both ``report --prometheus FILE`` and ``/metrics`` of ``serve`` use this table, so a name means the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from badcjobs import __version__
from badcjobs.report.rules import SEVERITIES
from badcjobs.report.summary import Summary
from badcjobs.store.read_model import DeviceFacts

GAUGE, COUNTER = "gauge", "counter"
BOTH, TEXTFILE, SERVED = "both", "textfile", "/metrics"
# What a metric describes, which decides its first labels. ``device`` is the index (or the token, if it has none),
# ``task`` is empty on a machine without a task, ``run`` is the folder name: Prometheus uses the label ``job`` itself.
READING, DEVICE, HOST, TASK, RUN, REPORT = "reading", "device", "host", "task", "run", "report"
_INFO = "info"
_LABELS = {
    READING: ("run", "task", "device", "uuid"), DEVICE: ("run", "task", "device", "uuid"), HOST: ("run", "task"),
    TASK: ("run", "task"), RUN: ("run",), REPORT: ("run",), _INFO: ("run", "version"),
}  # fmt: skip
Sample = tuple[str, float | None, Mapping[str, str]]  # metric, value (None: not known, left out), labels


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: what it means, in which unit, and its value."""

    name: str
    kind: str  # gauge or counter
    unit: str
    of: str  # the argument of ``value``: a device, a task, or the Summary of a run
    help: str
    value: Callable[[Any], Any]  # a number; with ``by``, label values → number
    by: tuple[str, ...] = ()
    where: str = BOTH  # in the file, in /metrics, or in both

    @property
    def labels(self) -> tuple[str, ...]:
        """All its labels."""
        return (*_LABELS[self.of], *self.by)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _left(summary: Summary, value: Callable[[Any], float | None]) -> float | None:
    """Return a figure of what is left; 0: nothing is left; None: not known."""
    known = summary.completeness is not None and summary.completeness.expected is not None
    return value(summary.outlook) if summary.outlook else 0.0 if known else None


def _complete(summary: Summary) -> int | None:
    proof = summary.completeness
    if proof is None or proof.expected is None:
        return 0 if proof is not None and (proof.pending or proof.failed or proof.poison) else None
    return int(proof.complete)


def _outdated(summary: Summary) -> int | None:
    """Return how many databases are new or have changed since the merge; None: they cannot be checked."""
    merged = summary.merged
    unknown = merged.as_of_ms is None or merged.gone or merged.closed
    return merged.changed + merged.new or (None if unknown else 0)


METRICS = (
    # The last reading of a device.
    Metric("badcjobs_gpu_utilization_percent", GAUGE, "percent", READING,
           "share of the last sampling period in which a kernel ran", lambda d: d.reading.utilization_percent),
    Metric("badcjobs_gpu_busy_percent", GAUGE, "percent", READING,
           "share of the time in which the device was busy, by the best available measurement",
           lambda d: d.reading.busy_percent),
    Metric("badcjobs_gpu_memory_utilization_percent", GAUGE, "percent", READING,
           "share of the last sampling period in which device memory was read or written",
           lambda d: d.reading.memory_utilization_percent),
    Metric("badcjobs_gpu_memory_used_bytes", GAUGE, "bytes", READING,
           "device memory in use, by all processes", lambda d: d.reading.memory_used_bytes),
    Metric("badcjobs_gpu_memory_total_bytes", GAUGE, "bytes", READING,
           "memory of the device", lambda d: d.memory_total_bytes),
    Metric("badcjobs_gpu_temperature_celsius", GAUGE, "°C", READING,
           "temperature of the chip", lambda d: d.reading.temperature_c),
    Metric("badcjobs_gpu_power_watts", GAUGE, "W", READING, "power draw of the board", lambda d: d.reading.power_w),
    Metric("badcjobs_gpu_power_limit_watts", GAUGE, "W", READING, "power limit", lambda d: d.power_limit_w),
    Metric("badcjobs_gpu_sm_clock_hertz", GAUGE, "Hz", READING,
           "clock of the multiprocessors", lambda d: _times(d.reading.sm_clock_mhz, 1e6)),
    Metric("badcjobs_gpu_memory_clock_hertz", GAUGE, "Hz", READING,
           "clock of the memory", lambda d: _times(d.reading.memory_clock_mhz, 1e6)),
    Metric("badcjobs_gpu_last_reading_timestamp_seconds", GAUGE, "s since 1970", READING,
           "when the device was last read", lambda d: _times(d.read_at_ms, 1e-3)),
    Metric("badcjobs_gpu_sm_activity_percent", GAUGE, "percent", READING,
           "share of the multiprocessors that had work, over time", lambda d: d.reading.sm_activity_percent),
    Metric("badcjobs_gpu_sm_occupancy_percent", GAUGE, "percent", READING,
           "share of the warps that the multiprocessors can hold, over time",
           lambda d: d.reading.sm_occupancy_percent),
    Metric("badcjobs_gpu_encoder_percent", GAUGE, "percent", READING,
           "utilization of the video encoder", lambda d: d.reading.encoder_percent),
    Metric("badcjobs_gpu_decoder_percent", GAUGE, "percent", READING,
           "utilization of the video decoder", lambda d: d.reading.decoder_percent),
    Metric("badcjobs_gpu_fan_percent", GAUGE, "percent", READING,
           "fan speed, of its maximum", lambda d: d.reading.fan_percent),
    Metric("badcjobs_gpu_info", GAUGE, "1", READING, "always 1; the model, node and driver of the device",
           lambda d: {(d.name or "", d.node, d.driver or ""): 1}, ("name", "node", "driver")),
    # What a device did and used so far.
    Metric("badcjobs_gpu_samples_total", COUNTER, "readings", DEVICE,
           "readings of the device so far", lambda d: d.samples),
    Metric("badcjobs_gpu_gap_seconds_total", COUNTER, "s", DEVICE, "time without readings", lambda d: d.gap_s),
    Metric("badcjobs_gpu_energy_joules_total", COUNTER, "J", DEVICE,
           "energy used during the task", lambda d: d.energy_j),
    Metric("badcjobs_gpu_state_seconds_total", COUNTER, "s", DEVICE,
           "time in each state: working, failed, lost, start_up, waiting, idle", lambda d: d.state_s, ("state",)),
    Metric("badcjobs_gpu_state_energy_joules_total", COUNTER, "J", DEVICE,
           "energy used in each state; the states add up to the energy of the device",
           lambda d: d.state_energy_j, ("state",)),
    Metric("badcjobs_gpu_throttled_samples_total", COUNTER, "readings", DEVICE,
           "readings with a reduced clock, by reason", lambda d: d.held_back, ("reason",)),
    Metric("badcjobs_gpu_tries_total", COUNTER, "tries", DEVICE, "tries of chunks on the device: done, failed, lost",
           lambda d: {"done": d.work.done, "failed": d.work.failed, "lost": d.work.lost}, ("outcome",)),
    Metric("badcjobs_gpu_audio_seconds_total", COUNTER, "s of audio", DEVICE,
           "audio in the chunks done on the device", lambda d: d.work.audio_s),
    # The machine around them, as the task sees it.
    Metric("badcjobs_host_cpu_percent", GAUGE, "percent", HOST,
           "all cores of the machine together, 100 = all busy", lambda t: t.cpu_percent, where=SERVED),
    Metric("badcjobs_host_memory_used_bytes", GAUGE, "bytes", HOST,
           "memory in use on the machine", lambda t: t.memory_used_bytes, where=SERVED),
    # One array task.
    Metric("badcjobs_task_chunks", GAUGE, "chunks", TASK, "chunks of the task by state: done, failed, pending",
           lambda t: {"done": t.done, "failed": t.failed, "pending": t.pending}, ("state",)),
    Metric("badcjobs_task_audio_seconds_total", COUNTER, "s of audio", TASK,
           "audio in the chunks that the task has done", lambda t: t.audio_s),
    Metric("badcjobs_task_running_seconds_total", COUNTER, "s", TASK,
           "from the start of the task to its last sign", lambda t: t.wall_s),
    # The run.
    Metric("badcjobs_info", GAUGE, "1", _INFO, "always 1; the version that wrote this", lambda version: 1),
    Metric("badcjobs_tasks", GAUGE, "task attempts", RUN,
           "array task attempts by verdict: done, failed, stopped, killed, running, silent, outdated",
           lambda s: s.tasks_by_verdict, ("verdict",)),
    Metric("badcjobs_tasks_missing", GAUGE, "array tasks", RUN,
           "array tasks that left no database, or have not started yet", lambda s: len(s.tasks_missing)),
    Metric("badcjobs_tasks_outdated", GAUGE, "task attempts", REPORT,
           "task attempts whose database is new or has changed since the merge; above 0, these metrics are out of date",
           _outdated, where=TEXTFILE),
    Metric("badcjobs_chunks", GAUGE, "chunks", RUN,
           "chunks that tasks have listed, by state: done, failed, pending, skipped",
           lambda s: {"done": s.done, "failed": s.failed, "pending": s.left, "skipped": s.skipped}, ("state",)),
    Metric("badcjobs_source_rows", GAUGE, "rows", RUN, "rows of the source",
           lambda s: None if s.completeness is None else s.completeness.expected),
    Metric("badcjobs_complete", GAUGE, "0 or 1", RUN, "1 when every row of the source is done", _complete),
    Metric("badcjobs_tries_total", COUNTER, "tries", RUN, "tries of chunks", lambda s: s.facts.tries),
    Metric("badcjobs_audio_seconds_total", COUNTER, "s of audio", RUN,
           "audio in the chunks that are done", lambda s: s.audio_hours * 3600),
    Metric("badcjobs_audio_left_seconds", GAUGE, "s of audio", RUN,
           "audio that is left (estimate)", lambda s: _left(s, lambda left: _times(left.audio_hours, 3600))),
    Metric("badcjobs_detections_total", COUNTER, "detections", RUN, "detections of all labels", lambda s: s.detections),
    Metric("badcjobs_running_seconds_total", COUNTER, "s", RUN,
           "time during which at least one task was running", lambda s: s.wall_s),
    Metric("badcjobs_speed_ratio", GAUGE, "s of audio per s", RUN,
           "audio done over running time: × real time", lambda s: s.times_real_time),
    Metric("badcjobs_granted_gpu_seconds_total", COUNTER, "GPU-seconds", RUN,
           "for each task, its running time × the devices it was granted", lambda s: s.gpu_hours * 3600),
    Metric("badcjobs_state_gpu_seconds_total", COUNTER, "GPU-seconds", RUN,
           "what the devices did with that time, by state",
           lambda s: {state: time.gpu_hours * 3600 for state, time in s.states.items()}, ("state",)),
    Metric("badcjobs_state_energy_joules_total", COUNTER, "J", RUN, "energy used in each state",
           lambda s: {state: _times(time.energy_wh, 3600) for state, time in s.states.items()}, ("state",)),
    Metric("badcjobs_energy_joules_total", COUNTER, "J", RUN,
           "energy of all devices that report it", lambda s: _times(s.energy_wh, 3600)),
    Metric("badcjobs_left_gpu_seconds", GAUGE, "GPU-seconds", RUN,
           "device time that is left (estimate)", lambda s: _left(s, lambda left: _times(left.gpu_hours, 3600))),
    Metric("badcjobs_predicted_end_timestamp_seconds", GAUGE, "s since 1970", RUN,
           "when the work will be done (estimate); only while tasks are running and until that time has passed",
           lambda s: _times(s.outlook.end_at_ms, 1e-3) if s.outlook else None),
    Metric("badcjobs_alerts_total", COUNTER, "alerts", RUN, "alerts of each kind",
           lambda s: {(alert.kind, alert.severity): alert.alerts for alert in s.alerts}, ("kind", "severity")),
    Metric("badcjobs_alerts_open", GAUGE, "alerts", RUN, "alerts that are still open",
           lambda s: {(alert.kind, alert.severity): alert.still_open for alert in s.alerts}, ("kind", "severity")),
    Metric("badcjobs_findings", GAUGE, "findings", REPORT, "findings of the report: problem, warning, note",
           lambda s: {name: sum(found.severity == name for found in s.findings) for name in SEVERITIES},
           ("severity",), TEXTFILE),
)  # fmt: skip
_ESCAPES = str.maketrans({"\\": "\\\\", "\n": "\\n", '"': '\\"'})
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}


def samples_of(of: str, thing: object, *first: str) -> Iterator[Sample]:
    """Yield the samples of a device, a task or a run; ``first``: the values of its first labels."""
    return (sample for metric in METRICS if metric.of == of for sample in _samples(metric, thing, first))


def _samples(metric: Metric, thing: object, first: tuple[str, ...]) -> Iterator[Sample]:
    found = metric.value(thing)
    for key, value in found.items() if metric.by else [((), found)]:
        others = (key,) if isinstance(key, str) else key
        yield metric.name, value, dict(zip(metric.labels, (*first, *others), strict=True))


def info_samples(run: str) -> Iterator[Sample]:
    """Yield the version of badcjobs."""
    return samples_of(_INFO, None, run, __version__)


def device_samples(of: str, device: DeviceFacts, run: str) -> Iterator[Sample]:
    """Yield the last reading of a device, or what it did and used so far."""
    return samples_of(of, device, *_device_labels(device, run))


def _device_labels(device: DeviceFacts, run: str) -> tuple[str, ...]:
    return run, device.task, device.label, device.uuid or ""


def job_samples(summary: Summary, run: str) -> Iterator[Sample]:
    """Yield every sample of a job; ``run`` names it."""
    return run_samples(summary, run, (_INFO, READING, DEVICE, TASK, RUN, REPORT))


def run_samples(summary: Summary, run: str, kinds: Collection[str] = (DEVICE, TASK, RUN)) -> Iterator[Sample]:
    """Yield the samples of a run, its tasks and its devices, metric by metric; also while it is running."""
    for metric in (metric for metric in METRICS if metric.of in kinds):
        if metric.of in (READING, DEVICE):
            for device in summary.devices:
                yield from _samples(metric, device, _device_labels(device, run))
        elif metric.of == TASK:
            for task in summary.facts.tasks:
                yield from _samples(metric, task, (run, task.name))
        else:
            yield from _samples(metric, summary, (run, __version__) if metric.of == _INFO else (run,))


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Return samples in the Prometheus text format, in the order of the table; only known, finite values."""
    places = {name: place for place, name in enumerate(METRIC_BY_NAME)}
    return "".join(prometheus_lines(sorted(samples, key=lambda sample: places[sample[0]])))


def prometheus_lines(samples: Iterable[Sample]) -> Iterator[str]:
    """Yield the same text line by line, from samples that come metric by metric."""
    last = None
    for name, value, labels in samples:
        if value is not None and math.isfinite(value):
            if name != last:
                metric, last = METRIC_BY_NAME[name], name
                yield f"# HELP {name} {metric.help} ({metric.unit})\n# TYPE {name} {metric.kind}\n"
            # For Prometheus an empty label is the same as no label.
            pairs = ",".join(f'{label}="{text.translate(_ESCAPES)}"' for label, text in labels.items() if text)
            number = str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))
            yield f"{name}{{{pairs}}} {number}\n" if pairs else f"{name} {number}\n"
