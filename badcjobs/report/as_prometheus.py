"""The summary of a job as Prometheus samples; their names and meanings are in metrics.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from badcjobs import __version__
from badcjobs.model import SEVERITIES, Freshness, TaskFacts
from badcjobs.report.device_summary import DeviceSummary
from badcjobs.report.metrics import Sample
from badcjobs.report.summarize import Summary

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
    for task in summary.task_list:
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


def _labels(device: DeviceSummary) -> dict[str, str]:
    return {"device": device.label, "uuid": device.uuid or "", "task": device.task}


def _last_reading(device: DeviceSummary) -> Iterator[Sample]:
    labels = _labels(device)
    yield from reading_samples(device.last, labels)
    yield Sample("badcjobs_gpu_memory_total_bytes", device.memory_total_bytes, labels)
    yield Sample("badcjobs_gpu_power_limit_watts", device.power_limit_w, labels)


def device_samples(device: DeviceSummary) -> Iterator[Sample]:
    """Yield what a device did and used so far."""
    labels = _labels(device)
    yield Sample("badcjobs_gpu_samples_total", device.samples, labels)
    yield Sample("badcjobs_gpu_gap_seconds_total", device.gap_s, labels)
    yield Sample("badcjobs_gpu_energy_joules_total", device.energy_j, labels)
    yield Sample("badcjobs_gpu_audio_seconds_total", device.audio_hours * 3600, labels)
    yield from _by("badcjobs_gpu_state_seconds_total", "state", device.state_s, labels)
    yield from _by("badcjobs_gpu_state_energy_joules_total", "state", device.state_energy_j, labels)
    yield from _by("badcjobs_gpu_throttled_samples_total", "reason", device.throttled, labels)
    tries = {"done": device.tries_done, "failed": device.tries_failed, "lost": device.tries_lost}
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
        "badcjobs_tries_total": summary.tries,
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
