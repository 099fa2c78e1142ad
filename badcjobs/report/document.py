"""The JSON document of a summary: ``--json`` of merge and report, and ``Job.summary()``."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from badcjobs.model import load_word
from badcjobs.report.progress import SILENT
from badcjobs.report.summary import Summary
from badcjobs.report.verdict import verdict_of
from badcjobs.store.read_model import DeviceFacts, TaskFacts

SUMMARY_VERSION = 2  # 2: states, outlook, chunk_cost, findings, … were added
# The keys of the document in their order: attributes of the summary or its facts, except those below.
KEYS = (
    "version",
    "verdict",
    "tasks",
    "tasks_by_verdict",
    "tasks_missing",
    "tasks_without_telemetry",
    "chunks",
    "done",
    "failed",
    "left",
    "skipped",
    "tries",
    "conflicts",
    "audio_hours",
    "chunks_of_unknown_length",
    "wall_s",
    "gpu_hours",
    "audio_hours_per_gpu_hour",
    "times_real_time",
    "energy_wh",
    "energy_devices",
    "detections",
    "task_list",
    "devices",
    "gaps",
    "labels",
    "failed_chunks",
    "file_remarks",
    "lossy_files",
    "completeness",
    "started_at_ms",
    "last_sign_ms",
    "devices_at_once",
    "kwh_per_1000_audio_hours",
    "states",
    "chunk_s",
    "chunk_cost",
    "tries_on_cpu",
    "audio_hours_on_cpu",
    "outlook",
    "findings",
    "alerts",
    "errors",
    "settings",
    "energy_measured_percent",
    "recording_names",
    "places",
    "left_out",
    "tasks_silent",
    "merged",
    "cut_short",
    "queue",
    "bill",
    "overview",
)
_OTHER_NAMES = {  # of attributes of JobFacts
    "chunk_cost": "cost",
    "chunks_of_unknown_length": "done_of_unknown_length",
    "failed_chunks": "failed",
    "tries_on_cpu": "cpu_tries",
    "settings": "last_settings",
}
_TASK_FIELDS = tuple(field.name for field in fields(TaskFacts))
TASK_KEYS = _TASK_FIELDS[: _TASK_FIELDS.index("changed") + 1]
# The keys of a device in their order; see _device for those that DeviceFacts does not have.
DEVICE_KEYS = (
    "task",
    "node",
    "index",
    "uuid",
    "token",
    "name",
    "backend",
    "samples",
    "busy_mean_percent",
    "utilization_mean_percent",
    "utilization_p50_percent",
    "utilization_p95_percent",
    "utilization_max_percent",
    "memory_peak_bytes",
    "memory_total_bytes",
    "temperature_max_c",
    "power_mean_w",
    "energy_j",
    "energy_source",
    "gap_s",
    "power_limit_w",
    "metrics",
    "state_s",
    "state_busy_s",
    "state_energy_j",
    "state_measured_s",
    "energy_measured_s",
    "throttled",
    "workers",
    "tries_done",
    "tries_failed",
    "tries_lost",
    "audio_hours",
    "chunk_p50_s",
    "chunk_p95_s",
    "chunk_max_s",
    "spark",
    "last",
    "load",
)
_METRICS = ("utilization_percent", "busy_percent", "memory_used_bytes", "temperature_c", "power_w")


class _Streamed(list[Any]):
    """A list of a JSON document whose items are made one by one, while they are written."""

    def __init__(self, make: Callable[[Any], Any], facts: Sequence[Any]) -> None:
        super().__init__()
        self._make = make
        self._facts = facts

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._facts)

    def __len__(self) -> int:
        return len(self._facts)


def document_of(summary: Summary, *, streamed: bool = False) -> dict[str, Any]:
    """Return the document of a summary; a number that is not finite is null.

    ``streamed``: to be written once; its long lists take no memory.
    """
    tasks = _Streamed(_task, summary.facts.tasks)
    devices = _Streamed(_device, summary.devices)
    made: dict[str, Any] = {
        "version": SUMMARY_VERSION,
        "overview": verdict_of(summary).to_dict(),
        "tasks_missing": summary.completeness.missing_indices,
        "tasks_silent": tuple(task.name for task in summary.facts.tasks if task.state == SILENT),
        "energy_devices": len(summary.metered),
        "completeness": {**asdict(summary.completeness), "complete": summary.completeness.complete},
        "task_list": tasks if streamed else list(tasks),
        "devices": devices if streamed else list(devices),
    }
    document = {}
    for key in KEYS:
        if key in made:
            document[key] = made[key]
            continue
        source = summary if hasattr(summary, key) else summary.facts
        document[key] = finite(getattr(source, _OTHER_NAMES.get(key, key)))
    return document


def _task(task: TaskFacts) -> Any:
    return finite({key: getattr(task, key) for key in TASK_KEYS})


def _device(device: DeviceFacts) -> Any:
    """Return a device for the document: DEVICE_KEYS."""
    work = device.work
    utilization = device.metrics.get("utilization_percent")
    figures = {
        "utilization_p50_percent": utilization and int(utilization.p50),
        "utilization_p95_percent": utilization and int(utilization.p95),
        "utilization_max_percent": utilization and int(utilization.maximum),
        "load": load_word(device.utilization_mean_percent),
        "metrics": {name: device.metrics[name] for name in _METRICS if name in device.metrics},
        "state_busy_s": {state: time.busy_s for state, time in device.states.items() if time.busy_s is not None},
        "state_measured_s": device.measured_s,
        "throttled": device.held_back,
        "workers": work.workers,
        "tries_done": work.done,
        "tries_failed": work.failed,
        "tries_lost": work.lost,
        "audio_hours": work.audio_s / 3600,
        "chunk_p50_s": work.chunk_p50_s,
        "chunk_p95_s": work.chunk_p95_s,
        "chunk_max_s": work.chunk_max_s,
    }
    return finite({key: figures[key] if key in figures else getattr(device, key) for key in DEVICE_KEYS})


def finite(value: Any) -> Any:
    """Return a JSON value: data classes as objects; NaN and infinities as null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(item) for item in value)
    return value
