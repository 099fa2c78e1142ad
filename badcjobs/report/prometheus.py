"""Every Prometheus metric of badcjobs (name, unit, meaning, source), its samples, and the text that Prometheus reads.

Both ``report --prometheus FILE`` and the page ``/metrics`` of ``serve`` speak through this table, so that a name means
the same in both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from badcjobs import __version__
from badcjobs.report.rules import SEVERITIES
from badcjobs.report.summary import Summary
from badcjobs.store.read_model import DeviceFacts, Freshness, TaskFacts

GAUGE, COUNTER = "gauge", "counter"
BOTH, TEXTFILE, SERVED = "both", "textfile", "/metrics"
_DEVICE = ("device", "uuid", "task")
_RUN = ("run",)


@dataclass(frozen=True, slots=True)
class Metric:
    """One name: what it means, in which unit, with which labels, and where its value comes from."""

    name: str
    kind: str  # gauge or counter
    unit: str
    labels: tuple[str, ...]
    help: str
    source: str
    where: str = BOTH  # whether the file, /metrics, or both have it


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one metric; None: nobody knows, and nothing is said."""

    name: str
    value: float | None
    labels: Mapping[str, str] = field(default_factory=dict)


METRICS = (
    # One device; ``device`` is its index (where it has none, its token), ``task`` empty for a machine without a task.
    Metric("badcjobs_gpu_utilization_percent", GAUGE, "percent", _DEVICE,
           "share of the last moments in which a kernel ran", "last reading: sample.utilization_percent"),
    Metric("badcjobs_gpu_busy_percent", GAUGE, "percent", _DEVICE,
           "share of the time in which the device worked, by the best way there is",
           "last reading: sample.busy_percent"),
    Metric("badcjobs_gpu_memory_utilization_percent", GAUGE, "percent", _DEVICE,
           "share of the last moments in which device memory was read or written",
           "last reading: sample.memory_utilization_percent"),
    Metric("badcjobs_gpu_memory_used_bytes", GAUGE, "bytes", _DEVICE,
           "device memory in use, by anybody", "last reading: sample.memory_used_bytes"),
    Metric("badcjobs_gpu_memory_total_bytes", GAUGE, "bytes", _DEVICE,
           "memory of the device", "device.memory_total_bytes"),
    Metric("badcjobs_gpu_temperature_celsius", GAUGE, "°C", _DEVICE,
           "temperature of the chip", "last reading: sample.temperature_c"),
    Metric("badcjobs_gpu_power_watts", GAUGE, "W", _DEVICE,
           "power draw of the board", "last reading: sample.power_w"),
    Metric("badcjobs_gpu_power_limit_watts", GAUGE, "W", _DEVICE, "power limit", "device.power_limit_w"),
    Metric("badcjobs_gpu_sm_clock_hertz", GAUGE, "Hz", _DEVICE,
           "clock of the multiprocessors", "last reading: sample.sm_clock_mhz"),
    Metric("badcjobs_gpu_memory_clock_hertz", GAUGE, "Hz", _DEVICE,
           "clock of the memory", "last reading: sample.memory_clock_mhz"),
    Metric("badcjobs_gpu_last_reading_timestamp_seconds", GAUGE, "s since 1970", _DEVICE,
           "when the device was last read", "last reading: sample.at_ms"),
    Metric("badcjobs_gpu_samples_total", COUNTER, "readings", _DEVICE,
           "readings of the device so far", "device_total.samples"),
    Metric("badcjobs_gpu_gap_seconds_total", COUNTER, "s", _DEVICE,
           "time without readings", "gap"),
    Metric("badcjobs_gpu_energy_joules_total", COUNTER, "J", _DEVICE,
           "energy used during the task", "device_total: the device's counter, else power over the readings"),
    Metric("badcjobs_gpu_state_seconds_total", COUNTER, "s", (*_DEVICE, "state"),
           "time in each state: working, failed, lost, start_up, waiting, idle", "device_time.total_s"),
    Metric("badcjobs_gpu_state_energy_joules_total", COUNTER, "J", (*_DEVICE, "state"),
           "energy used in each state; the states add up to the energy of the device", "device_time.energy_j"),
    Metric("badcjobs_gpu_throttled_samples_total", COUNTER, "readings", (*_DEVICE, "reason"),
           "readings with a lowered clock, by reason", "throttle_count.samples"),
    Metric("badcjobs_gpu_tries_total", COUNTER, "tries", (*_DEVICE, "outcome"),
           "tries of chunks on the device: done, failed, lost", "attempt"),
    Metric("badcjobs_gpu_audio_seconds_total", COUNTER, "s of audio", _DEVICE,
           "audio in the chunks done on the device", "chunk.audio_s"),
    # The machine around them, as the task sees it.
    Metric("badcjobs_host_cpu_percent", GAUGE, "percent", ("task",),
           "all cores of the machine together, 100 = all busy", "last reading: host_sample.cpu_percent", SERVED),
    Metric("badcjobs_host_memory_used_bytes", GAUGE, "bytes", ("task",),
           "memory in use on the machine", "last reading: host_sample.memory_used_bytes", SERVED),
    # One array task.
    Metric("badcjobs_task_chunks", GAUGE, "chunks", ("task", "state"),
           "chunks of the task by state: done, failed, pending", "task_summary"),
    Metric("badcjobs_task_audio_seconds_total", COUNTER, "s of audio", ("task",),
           "audio in the chunks that the task has done", "task_summary.audio_s"),
    Metric("badcjobs_task_running_seconds_total", COUNTER, "s", ("task",),
           "from the start of the task to its last sign", "task_summary.wall_s"),
    # The whole run; ``run`` is the name of its folder, because Prometheus keeps the label ``job`` for itself.
    Metric("badcjobs_info", GAUGE, "1", ("version",), "always 1; the version that wrote this", "badcjobs --version"),
    Metric("badcjobs_tasks", GAUGE, "task attempts", (*_RUN, "verdict"),
           "array task attempts by verdict: done, failed, stopped, killed, running, silent, outdated",
           "task.verdict; silent: not ended, and without a word for too long; outdated: see badcjobs guide report"),
    Metric("badcjobs_tasks_missing", GAUGE, "array tasks", _RUN,
           "array tasks that left no database, or have not begun yet", "run.toml against task"),
    Metric("badcjobs_tasks_outdated", GAUGE, "task attempts", _RUN,
           "task attempts whose database is new, or has changed, since the merge: above 0, all of this is out of date",
           "source_file against the task databases", TEXTFILE),
    Metric("badcjobs_chunks", GAUGE, "chunks", (*_RUN, "state"),
           "chunks that tasks have listed, by state: done, failed, pending, skipped",
           "chunk.status; failed includes poison"),
    Metric("badcjobs_source_rows", GAUGE, "rows", _RUN, "rows of the source", "run.toml and the source"),
    Metric("badcjobs_complete", GAUGE, "0 or 1", _RUN, "1 when every row of the source is done", "completeness"),
    Metric("badcjobs_tries_total", COUNTER, "tries", _RUN, "tries of chunks", "attempt"),
    Metric("badcjobs_audio_seconds_total", COUNTER, "s of audio", _RUN,
           "audio in the chunks that are done", "chunk.audio_s"),
    Metric("badcjobs_audio_left_seconds", GAUGE, "s of audio", _RUN,
           "audio that is left, about", "chunk.audio_s, and the mean of those done where it is not known"),
    Metric("badcjobs_detections_total", COUNTER, "detections", _RUN, "what was heard", "detection"),
    Metric("badcjobs_running_seconds_total", COUNTER, "s", _RUN,
           "time during which at least one task was running", "task"),
    Metric("badcjobs_speed_ratio", GAUGE, "s of audio per s", _RUN,
           "audio done over running time: × real time", "audio and running time"),
    Metric("badcjobs_granted_gpu_seconds_total", COUNTER, "GPU-seconds", _RUN,
           "for each task, its running time × the devices it was granted", "task"),
    Metric("badcjobs_state_gpu_seconds_total", COUNTER, "GPU-seconds", (*_RUN, "state"),
           "what the devices did with that time, by state", "device_time.total_s"),
    Metric("badcjobs_state_energy_joules_total", COUNTER, "J", (*_RUN, "state"),
           "energy used in each state", "device_time.energy_j"),
    Metric("badcjobs_energy_joules_total", COUNTER, "J", _RUN,
           "energy of all devices that said", "device_total"),
    Metric("badcjobs_left_gpu_seconds", GAUGE, "GPU-seconds", _RUN,
           "device time that is left, about", "audio left at the speed so far"),
    Metric("badcjobs_predicted_end_timestamp_seconds", GAUGE, "s since 1970", _RUN,
           "when the work will be done, about; while tasks run, until it has passed",
           "what is left at the pace of the tasks that run, or the slowest at its own"),
    Metric("badcjobs_alerts_total", COUNTER, "alerts", (*_RUN, "kind", "severity"),
           "alerts of each kind", "alert"),
    Metric("badcjobs_alerts_open", GAUGE, "alerts", (*_RUN, "kind", "severity"),
           "alerts that go on now", "alert.ended_at_ms IS NULL, of tasks that are running"),
    Metric("badcjobs_findings", GAUGE, "findings", (*_RUN, "severity"),
           "findings of the report: problem, warning, note", "badcjobs report", TEXTFILE),
)  # fmt: skip
METRIC_BY_NAME = {metric.name: metric for metric in METRICS}


def prometheus_text(samples: Iterable[Sample]) -> str:
    """Return samples in Prometheus' text format, metric by metric in the order of the table.

    A name or a label that the table does not have is a mistake of ours (KeyError). Values that nobody knows, and those
    that are no finite number, are left out.
    """
    lines: dict[str, list[str]] = {name: [] for name in METRIC_BY_NAME}
    for sample in samples:
        strangers = sample.labels.keys() - set(METRIC_BY_NAME[sample.name].labels)
        if strangers:
            raise KeyError(f"{sample.name} has no label {', '.join(sorted(strangers))}")
        if sample.value is not None and math.isfinite(sample.value):
            lines[sample.name].append(f"{sample.name}{_labels(sample)} {_number(sample.value)}\n")
    heads = {m.name: f"# HELP {m.name} {m.help} ({m.unit})\n# TYPE {m.name} {m.kind}\n" for m in METRICS}
    return "".join(heads[name] + "".join(values) for name, values in lines.items() if values)


def _labels(sample: Sample) -> str:
    """Return the labels in the order of the table; an empty one is no label to Prometheus."""
    known = METRIC_BY_NAME[sample.name].labels
    pairs = [f'{name}="{_escape(value)}"' for name in known if (value := sample.labels.get(name))]
    return "{" + ",".join(pairs) + "}" if pairs else ""


def _number(value: float) -> str:
    return str(int(value)) if value == int(value) and abs(value) < 2**53 else repr(float(value))


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


# --- the samples of a job ---------------------------------------------------------------------------------------------

# A metric of a reading → its name, and by what it is multiplied.
READING_NAMES = {
    "utilization_percent": ("badcjobs_gpu_utilization_percent", 1.0),
    "busy_percent": ("badcjobs_gpu_busy_percent", 1.0),
    "memory_utilization_percent": ("badcjobs_gpu_memory_utilization_percent", 1.0),
    "memory_used_bytes": ("badcjobs_gpu_memory_used_bytes", 1.0),
    "temperature_c": ("badcjobs_gpu_temperature_celsius", 1.0),
    "power_w": ("badcjobs_gpu_power_watts", 1.0),
    "sm_clock_mhz": ("badcjobs_gpu_sm_clock_hertz", 1e6),
    "memory_clock_mhz": ("badcjobs_gpu_memory_clock_hertz", 1e6),
    "at_ms": ("badcjobs_gpu_last_reading_timestamp_seconds", 1e-3),
}


def job_samples(summary: Summary, run: str) -> Iterator[Sample]:
    """Yield every sample of a job; ``run`` names it."""
    yield Sample("badcjobs_info", 1, {"version": __version__})
    for device in summary.devices:
        yield from _last_reading(device)
        yield from device_samples(device)
    for task in summary.facts.tasks:
        yield from task_samples(task)
    yield from run_samples(summary, run)
    yield Sample("badcjobs_tasks_outdated", _outdated(summary.merged), {"run": run})
    found = {severity: sum(one.severity == severity for one in summary.findings) for severity in SEVERITIES}
    yield from _by("badcjobs_findings", "severity", found, {"run": run})


def _outdated(merged: Freshness) -> int | None:
    """Return how many databases are new or have changed since the merge; None: they are not here, and nobody knows."""
    unknown = merged.as_of_ms is None or merged.gone or merged.closed
    return merged.changed + merged.new or (None if unknown else 0)


def run_samples(summary: Summary, run: str) -> Iterator[Sample]:
    """Yield what is known of the run as a whole, also while it goes on."""
    for name, value in _figures(summary).items():
        yield Sample(name, value, {"run": run})
    yield from _by("badcjobs_tasks", "verdict", summary.tasks_by_verdict, {"run": run})
    chunks = {"done": summary.done, "failed": summary.failed, "pending": summary.left, "skipped": summary.skipped}
    yield from _by("badcjobs_chunks", "state", chunks, {"run": run})
    for state, time in summary.states.items():
        labels = {"run": run, "state": state}
        yield Sample("badcjobs_state_gpu_seconds_total", time.gpu_hours * 3600, labels)
        yield Sample("badcjobs_state_energy_joules_total", _times(time.energy_wh, 3600), labels)
    for alert in summary.alerts:
        labels = {"run": run, "kind": alert.kind, "severity": alert.severity}
        yield Sample("badcjobs_alerts_total", alert.alerts, labels)
        yield Sample("badcjobs_alerts_open", alert.still_open, labels)


def reading_samples(last: Mapping[str, float | None], labels: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples of one reading of one device: metric (or at_ms) → value."""
    for metric, (name, factor) in READING_NAMES.items():
        yield Sample(name, _times(last.get(metric), factor), labels)


def _device_labels(device: DeviceFacts) -> dict[str, str]:
    return {"device": device.label, "uuid": device.uuid or "", "task": device.task}


def _last_reading(device: DeviceFacts) -> Iterator[Sample]:
    labels = _device_labels(device)
    yield from reading_samples(device.last, labels)
    yield Sample("badcjobs_gpu_memory_total_bytes", device.memory_total_bytes, labels)
    yield Sample("badcjobs_gpu_power_limit_watts", device.power_limit_w, labels)


def device_samples(device: DeviceFacts) -> Iterator[Sample]:
    """Yield what a device did and used so far."""
    labels = _device_labels(device)
    yield Sample("badcjobs_gpu_samples_total", device.samples, labels)
    yield Sample("badcjobs_gpu_gap_seconds_total", device.gap_s, labels)
    yield Sample("badcjobs_gpu_energy_joules_total", device.energy_j, labels)
    yield Sample("badcjobs_gpu_audio_seconds_total", device.work.audio_s, labels)
    yield from _by("badcjobs_gpu_state_seconds_total", "state", device.state_s, labels)
    yield from _by("badcjobs_gpu_state_energy_joules_total", "state", device.state_energy_j, labels)
    yield from _by("badcjobs_gpu_throttled_samples_total", "reason", device.held_back, labels)
    tries = {"done": device.work.done, "failed": device.work.failed, "lost": device.work.lost}
    yield from _by("badcjobs_gpu_tries_total", "outcome", tries, labels)


def task_samples(task: TaskFacts) -> Iterator[Sample]:
    """Yield how far a task is."""
    chunks = {"done": task.done, "failed": task.failed, "pending": task.pending}
    yield from _by("badcjobs_task_chunks", "state", chunks, {"task": task.name})
    yield Sample("badcjobs_task_audio_seconds_total", task.audio_s, {"task": task.name})
    yield Sample("badcjobs_task_running_seconds_total", task.wall_s, {"task": task.name})


def _figures(summary: Summary) -> dict[str, float | None]:
    """Return what the run as a whole has one value of."""
    left, proof = summary.outlook, summary.completeness
    known = proof is not None and proof.expected is not None
    unfinished = proof is not None and bool(proof.pending or proof.failed or proof.poison)
    return {
        "badcjobs_tasks_missing": len(summary.tasks_missing),
        "badcjobs_source_rows": proof.expected if proof is not None else None,
        "badcjobs_complete": int(proof.complete) if proof is not None and known else 0 if unfinished else None,
        "badcjobs_tries_total": summary.facts.tries,
        "badcjobs_audio_seconds_total": summary.audio_hours * 3600,
        "badcjobs_audio_left_seconds": _times(left.audio_hours, 3600) if left else 0.0 if known else None,
        "badcjobs_detections_total": summary.detections,
        "badcjobs_running_seconds_total": summary.wall_s,
        "badcjobs_speed_ratio": summary.times_real_time,
        "badcjobs_granted_gpu_seconds_total": summary.gpu_hours * 3600,
        "badcjobs_energy_joules_total": _times(summary.energy_wh, 3600),
        "badcjobs_left_gpu_seconds": _times(left.gpu_hours, 3600) if left else 0.0 if known else None,
        "badcjobs_predicted_end_timestamp_seconds": _times(left.end_at_ms, 1e-3) if left else None,
    }


def _by(name: str, label: str, values: Mapping[str, float], labels: Mapping[str, str]) -> Iterator[Sample]:
    for key, value in values.items():
        yield Sample(name, value, {**labels, label: key})


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
