"""Facts of a job → its summary. Pure; every number's meaning is one line in the guide (``badcjobs guide tables``)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from badcjobs.model import Completeness, DeviceFacts, FailedChunk, GapFacts, JobFacts, TaskFacts

SUMMARY_VERSION = 1
_COUNTER_COVERS = 0.9  # the counter is read every few seconds: short tasks end between two readings


@dataclass(frozen=True, slots=True)
class DeviceSummary:
    """One device of one task; None where nothing was read."""

    task: str
    node: str
    index: int | None
    uuid: str | None
    token: str
    name: str | None
    backend: str
    samples: int
    busy_mean_percent: float | None  # the best figure there is; the plain utilization is blind to light load
    utilization_mean_percent: float | None
    utilization_p50_percent: int | None
    utilization_p95_percent: int | None
    utilization_max_percent: int | None
    memory_peak_bytes: int | None
    memory_total_bytes: int | None
    temperature_max_c: int | None
    power_mean_w: float | None
    energy_j: float | None
    energy_source: str | None  # counter, or integrated power
    gap_s: float


@dataclass(frozen=True, slots=True)
class Summary:
    """What ``badcjobs merge --json`` prints."""

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
    tries: int
    conflicts: int
    audio_hours: float
    chunks_of_unknown_length: int
    wall_s: float
    gpu_hours: float
    audio_hours_per_gpu_hour: float | None
    times_real_time: float | None
    energy_wh: float | None
    energy_devices: int
    detections: int
    task_list: tuple[TaskFacts, ...]
    devices: tuple[DeviceSummary, ...]
    gaps: tuple[GapFacts, ...]
    labels: tuple[tuple[str, str | None, int], ...]
    failed_chunks: tuple[FailedChunk, ...]
    file_remarks: tuple[tuple[str, str], ...]
    lossy_files: int  # of which rows are missing, or may be; merge and report exit with 4
    completeness: Completeness | None = None  # None: nobody has compared the job with its source

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document."""
        document = asdict(self)
        if self.completeness is not None:
            document["completeness"]["complete"] = self.completeness.complete
        return document


def summarize(job: JobFacts, missing_indices: Sequence[int] = (), completeness: Completeness | None = None) -> Summary:
    """Say what a job's facts amount to; ``missing_indices`` are array tasks that left no database."""
    devices = tuple(_summarize_device(device) for device in job.devices)
    energies = [device.energy_j for device in devices if device.energy_j is not None]
    gpu_s = sum(task.wall_s * task.devices for task in job.tasks)
    wall_s = running_s(job.tasks)
    done, left = job.chunks.get("done", 0), job.chunks.get("pending", 0)
    failed = job.chunks.get("failed", 0) + job.chunks.get("poison", 0)
    skipped = job.chunks.get("skipped", 0)
    not_listed = completeness.not_listed if completeness is not None else None
    return Summary(
        version=SUMMARY_VERSION,
        # A chunk that is only known as done elsewhere is not done here: its results are in a file we do not have.
        verdict="stopped" if left or skipped or missing_indices or not_listed else "failed" if failed else "done",
        tasks=len(job.tasks),
        tasks_by_verdict=dict(Counter(task.verdict or "running" for task in job.tasks)),
        tasks_missing=tuple(missing_indices),
        tasks_without_telemetry=sum(not task.telemetry for task in job.tasks),
        chunks=sum(job.chunks.values()),
        done=done,
        failed=failed,
        left=left,
        skipped=skipped,
        tries=job.tries,
        conflicts=job.conflicts,
        audio_hours=job.audio_done_s / 3600,
        chunks_of_unknown_length=job.done_of_unknown_length,
        wall_s=wall_s,
        gpu_hours=gpu_s / 3600,
        audio_hours_per_gpu_hour=_ratio(job.audio_done_s, gpu_s),
        times_real_time=_ratio(job.audio_done_s, wall_s),
        energy_wh=sum(energies) / 3600 if energies else None,
        energy_devices=len(energies),
        detections=sum(count for _, _, count in job.labels),
        task_list=job.tasks,
        devices=devices,
        gaps=job.gaps,
        labels=job.labels,
        failed_chunks=job.failed,
        file_remarks=job.file_remarks,
        lossy_files=job.lossy_files,
        completeness=completeness,
    )


def _summarize_device(device: DeviceFacts) -> DeviceSummary:
    counts = device.utilization_counts
    total = sum(counts.values())
    mean = sum(percent * count for percent, count in counts.items()) / total if total else None
    energy_j, energy_source = _energy(device)
    return DeviceSummary(
        task=device.task,
        node=device.node,
        index=device.index,
        uuid=device.uuid,
        token=device.token,
        name=device.name,
        backend=device.backend,
        samples=device.samples,
        busy_mean_percent=device.busy_mean_percent,
        utilization_mean_percent=mean,
        utilization_p50_percent=percentile(counts, 50),
        utilization_p95_percent=percentile(counts, 95),
        utilization_max_percent=max(counts, default=None),
        memory_peak_bytes=device.memory_peak_bytes,
        memory_total_bytes=device.memory_total_bytes,
        temperature_max_c=device.temperature_max_c,
        power_mean_w=device.power_mean_w,
        energy_j=energy_j,
        energy_source=energy_source,
        gap_s=device.gap_s,
    )


def _energy(device: DeviceFacts) -> tuple[float | None, str | None]:
    """Take the counter where it saw nearly the whole time, else power integrated over the samples."""
    span_s = device.energy_counter_span_s
    if device.energy_counter_j is not None and span_s and span_s >= _COUNTER_COVERS * (device.span_s or 0.0):
        return device.energy_counter_j, "counter"
    if device.energy_integrated_j is not None:
        return device.energy_integrated_j, "integrated power"
    return None, None


def percentile(counts: Mapping[int, int], share_percent: int) -> int | None:
    """Return the smallest value that at least this share of the samples does not exceed (nearest rank)."""
    total = sum(counts.values())
    seen = 0
    for value in sorted(counts):
        seen += counts[value]
        if seen * 100 >= total * share_percent:
            return value
    return None


def running_s(tasks: Sequence[TaskFacts]) -> float:
    """Return for how long at least one task was running; the days between two submissions do not count."""
    total_ms, until_ms = 0, 0
    for start_ms, end_ms in sorted((task.started_at_ms, task.last_sign_ms) for task in tasks):
        total_ms += max(0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms / 1000


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None
