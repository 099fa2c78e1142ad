"""Facts of a job → its summary. Pure; every number's meaning is one line in the guide (``badcjobs guide report``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from badcjobs.model import CutShort
from badcjobs.report.device_summary import DeviceSummary, StateSummary, add_up_states, percentile
from badcjobs.report.progress import OUTDATED, SILENT, Outlook, give_up, look_ahead, state_of
from badcjobs.report.rules import Finding
from badcjobs.store.read_model import (
    AlertFacts,
    Completeness,
    CostFacts,
    Freshness,
    JobFacts,
    MetricFacts,
    TaskFacts,
)

TASK_KEYS = (
    "name", "job_id", "array_index", "restart", "node", "shard_count", "verdict", "exit_code", "telemetry", "devices",
    "started_at_ms", "last_sign_ms", "done", "failed", "pending", "audio_s", "engine", "workers", "cpus",
    "memory_limit_bytes", "time_limit_s", "slurm_state", "cpu_mean_cores", "memory_peak_bytes",
    "read_mean_bytes_per_s", "host_cpu_mean_percent", "host_memory_peak_bytes", "heard_at_ms", "silent_after_s",
    "changed",
)  # fmt: skip

SUMMARY_VERSION = 2  # 2: states, outlook, chunk_cost, findings, … were added; all of 1 is as it was
# The keys of the document, in their order, and those that facts have under another name.
KEYS = (
    "version", "verdict", "tasks", "tasks_by_verdict", "tasks_missing", "tasks_without_telemetry", "chunks", "done",
    "failed", "left", "skipped", "tries", "conflicts", "audio_hours", "chunks_of_unknown_length", "wall_s", "gpu_hours",
    "audio_hours_per_gpu_hour", "times_real_time", "energy_wh", "energy_devices", "detections", "task_list", "devices",
    "gaps", "labels", "failed_chunks", "file_remarks", "lossy_files", "completeness", "started_at_ms", "last_sign_ms",
    "devices_at_once", "kwh_per_1000_audio_hours", "states", "chunk_s", "chunk_cost", "tries_on_cpu",
    "audio_hours_on_cpu", "outlook", "findings", "alerts", "errors", "settings", "energy_measured_percent",
    "recording_names", "tasks_silent", "merged", "cut_short",
)  # fmt: skip
_OF_FACTS = {
    "task_list": "tasks", "failed_chunks": "failed", "settings": "last_settings", "tries_on_cpu": "cpu_tries",
    "chunks_of_unknown_length": "done_of_unknown_length",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Summary:
    """All numbers of a job: its facts, and what they amount to."""

    facts: JobFacts
    version: int
    verdict: str
    tasks: int
    tasks_by_verdict: Mapping[str, int]
    tasks_missing: tuple[int, ...]
    tasks_without_telemetry: int
    chunks: int
    done: int
    failed: int
    left: int
    skipped: int
    audio_hours: float
    wall_s: float
    gpu_hours: float
    audio_hours_per_gpu_hour: float | None
    times_real_time: float | None
    energy_wh: float | None
    energy_devices: int
    detections: int
    devices: tuple[DeviceSummary, ...]
    completeness: Completeness | None = None  # None: nobody has compared the job with its source
    started_at_ms: int | None = None  # the first task
    last_sign_ms: int | None = None  # of any task
    devices_at_once: float | None = None  # on average, while at least one task was running
    kwh_per_1000_audio_hours: float | None = None
    states: Mapping[str, StateSummary] = field(default_factory=dict)  # what the devices did with their time and energy
    chunk_s: MetricFacts | None = None  # how long the tries took that ended well
    chunk_cost: CostFacts = field(default_factory=CostFacts)  # what each of them cost
    audio_hours_on_cpu: float = 0.0
    outlook: Outlook | None = None  # None: nothing is left
    findings: tuple[Finding, ...] = ()
    alerts: tuple[AlertFacts, ...] = ()
    energy_measured_percent: float | None = None  # of the GPU time; None: no energy is known
    tasks_silent: tuple[str, ...] = ()  # names of those that have not ended and should have been heard of again
    merged: Freshness = field(default_factory=Freshness)  # whether there is news since
    cut_short: CutShort | None = None  # a submit in its run folder; None: none was, or it has come to its end since

    def to_dict(self) -> dict[str, Any]:
        """Return what ``badcjobs merge --json`` prints; what is not a finite number is null."""
        own = {one.name: getattr(self, one.name) for one in fields(self)}
        document = {key: own[key] if key in own else getattr(self.facts, _OF_FACTS.get(key, key)) for key in KEYS}
        document["task_list"] = [{name: getattr(task, name) for name in TASK_KEYS} for task in self.facts.tasks]
        document["devices"] = [device.to_dict() for device in self.devices]
        if self.completeness is not None:
            document["completeness"] = {**asdict(self.completeness), "complete": self.completeness.complete}
        return finite(document)  # type: ignore[no-any-return]


def summarize(
    job: JobFacts,
    missing_indices: Sequence[int] = (),
    completeness: Completeness | None = None,
    now_ms: int | None = None,
) -> Summary:
    """Say what a job's facts amount to; ``missing_indices`` are array tasks that left no database.

    Of tasks that have not ended ``now_ms`` tells the running from the silent; None: as if all of them were running.
    """
    task_states = [state_of(task, now_ms) for task in job.tasks]
    silent = tuple(task.name for task, state in zip(job.tasks, task_states, strict=True) if state == SILENT)
    late = {task.name for task, state in zip(job.tasks, task_states, strict=True) if state in (SILENT, OUTDATED)}
    job = give_up(job, silent)
    devices = tuple(DeviceSummary.of(device) for device in job.devices)
    energies = [device.energy_j for device in devices if device.energy_j is not None]
    energy_wh = sum(energies) / 3600 if energies else None
    gpu_s = sum(task.gpu_s for task in job.tasks)
    wall_s = running_s(job.tasks)
    done, left = job.chunks.get("done", 0), job.chunks.get("pending", 0)
    failed = job.chunks.get("failed", 0) + job.chunks.get("poison", 0)
    skipped = job.chunks.get("skipped", 0)
    not_here = completeness is not None and bool(completeness.not_listed or completeness.unmerged_indices)
    states = add_up_states(devices, gpu_s)
    return Summary(
        facts=job,
        version=SUMMARY_VERSION,
        # A chunk that is only known as done elsewhere is not done here: its results are in a file we do not have.
        verdict="stopped" if left or skipped or missing_indices or not_here else "failed" if failed else "done",
        tasks=len(job.tasks),
        tasks_by_verdict=dict(Counter(task_states)),
        tasks_missing=tuple(missing_indices),
        tasks_without_telemetry=sum(not task.telemetry for task in job.tasks),
        chunks=sum(job.chunks.values()),
        done=done,
        failed=failed,
        left=left,
        skipped=skipped,
        audio_hours=job.audio_done_s / 3600,
        wall_s=wall_s,
        gpu_hours=gpu_s / 3600,
        audio_hours_per_gpu_hour=ratio(job.audio_done_s, gpu_s),
        times_real_time=ratio(job.audio_done_s, wall_s),
        energy_wh=energy_wh,
        energy_devices=len(energies),
        detections=sum(count for _, _, count in job.labels),
        devices=devices,
        completeness=completeness,
        started_at_ms=min((task.started_at_ms for task in job.tasks), default=None),
        last_sign_ms=max((task.last_sign_ms for task in job.tasks), default=None),
        devices_at_once=ratio(gpu_s, wall_s),
        kwh_per_1000_audio_hours=_kwh_per_1000(devices, job.audio_done_s),
        states=states,
        chunk_s=_durations(job.durations),
        chunk_cost=_cost(job, states),
        audio_hours_on_cpu=job.cpu_audio_s / 3600,
        outlook=look_ahead(job, completeness, gpu_s, wall_s, now_ms),
        alerts=tuple(_alerts(job, late)),
        energy_measured_percent=_measured_percent(devices, gpu_s) if energies else None,
        tasks_silent=silent,
        merged=job.merged,
    )


def _alerts(job: JobFacts, late: Collection[str]) -> Iterator[AlertFacts]:
    """Yield the alerts; those of a task that runs no more, as far as anybody knows, do not go on."""
    for alert in job.alerts:
        over = sum(task in late for task in job.open_alerts.get(alert.kind, ()))
        yield replace(alert, still_open=alert.still_open - over)


def _kwh_per_1000(devices: Sequence[DeviceSummary], audio_done_s: float) -> float | None:
    """Return kWh for a thousand hours of audio; where some devices kept silent, by what the others did."""
    known = [device for device in devices if device.energy_j is not None]
    if not known:
        return None
    hours = audio_done_s / 3600 if len(known) == len(devices) else sum(device.work.audio_s for device in known) / 3600
    # Wh for one hour are kWh for a thousand.
    return ratio(sum(device.energy_j or 0.0 for device in known) / 3600, hours)


def _measured_percent(devices: Sequence[DeviceSummary], gpu_s: float) -> float | None:
    """Return for which share of the GPU time the energy was measured; rounding never makes it more than all."""
    share = ratio(sum(device.energy_measured_s for device in devices), gpu_s)
    return None if share is None else 100 * min(1.0, share)


def _durations(durations: Mapping[int, int]) -> MetricFacts | None:
    """Describe how long tries took, from how many took so many milliseconds."""
    tries = sum(durations.values())
    p50_ms, p95_ms = percentile(durations, 50), percentile(durations, 95)
    if not tries or p50_ms is None or p95_ms is None:
        return None
    mean_s = sum(took_ms * many for took_ms, many in durations.items()) / tries / 1000
    return MetricFacts(tries, min(durations) / 1000, mean_s, p50_ms / 1000, p95_ms / 1000, max(durations) / 1000)


def _cost(job: JobFacts, states: Mapping[str, StateSummary]) -> CostFacts:
    """Return what a chunk cost, its joules in the same measure as those of the states.

    Each try was charged by the readings of power; where a device's counter is the better one, it corrects them.
    """
    measured = [device.states["working"].energy_j for device in job.devices if "working" in device.states]
    measured_j = sum(joules for joules in measured if joules is not None)
    chosen_wh = states["working"].energy_wh if "working" in states else None
    if not measured_j or chosen_wh is None:
        return job.cost
    factor = chosen_wh * 3600 / measured_j
    energies = ("energy_j_mean", "energy_j_p50", "energy_j_p95", "energy_j_max")
    known = {name: getattr(job.cost, name) for name in energies}
    return replace(job.cost, **{name: joules * factor for name, joules in known.items() if joules is not None})


def running_s(tasks: Sequence[TaskFacts]) -> float:
    """Return for how long at least one task was running; the days between two submissions do not count."""
    total_ms, until_ms = 0, 0
    for start_ms, end_ms in sorted((task.started_at_ms, task.last_sign_ms) for task in tasks):
        total_ms += max(0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms / 1000


def ratio(over: float, under: float) -> float | None:
    """Return a ratio; None where there is nothing to divide by."""
    return over / under if under > 0 else None


def finite(value: Any) -> Any:
    """Return a JSON value: data classes as objects, NaN and infinities, which JSON does not have, as null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(item) for item in value)
    return value
