"""Facts of a job → its summary. Pure; every number's meaning is one line in the guide (``badcjobs guide report``)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from badcjobs.model import (
    AlertFacts,
    Completeness,
    CostFacts,
    CutShort,
    ErrorFacts,
    FailedChunk,
    Finding,
    Freshness,
    GapFacts,
    JobFacts,
    MetricFacts,
    NameGaps,
    TaskFacts,
)
from badcjobs.report.cut_short import give_up
from badcjobs.report.device_summary import DeviceSummary, percentile, summarize_device
from badcjobs.report.factors import Bill, Factors, make_bill
from badcjobs.report.outlook import Outlook, look_ahead
from badcjobs.report.states import StateSummary, add_up_states
from badcjobs.report.task_states import OUTDATED, SILENT, state_of

__all__ = ["SUMMARY_VERSION", "DeviceSummary", "Summary", "finite", "percentile", "running_s", "summarize"]

SUMMARY_VERSION = 2  # 2: states, outlook, chunk_cost, bill, findings, … were added; all of 1 is as it was


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
    started_at_ms: int | None = None  # the first task
    last_sign_ms: int | None = None  # of any task
    devices_at_once: float | None = None  # on average, while at least one task was running
    kwh_per_1000_audio_hours: float | None = None
    states: Mapping[str, StateSummary] = field(default_factory=dict)  # what the devices did with their time and energy
    chunk_s: MetricFacts | None = None  # how long the tries took that ended well
    chunk_cost: CostFacts = field(default_factory=CostFacts)  # what each of them cost
    tries_on_cpu: int = 0
    audio_hours_on_cpu: float = 0.0
    outlook: Outlook | None = None  # None: nothing is left
    bill: Bill | None = None  # None: the user gave no factors
    findings: tuple[Finding, ...] = ()
    alerts: tuple[AlertFacts, ...] = ()
    errors: tuple[ErrorFacts, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the task that started last
    energy_measured_percent: float | None = None  # of the GPU time; None: no energy is known
    recording_names: NameGaps | None = None  # None: there are no recordings
    tasks_silent: tuple[str, ...] = ()  # names of those that have not ended and should have been heard of again
    merged: Freshness = field(default_factory=Freshness)  # whether there is news since
    cut_short: CutShort | None = None  # a submit in its run folder; None: none was, or it has come to its end since

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document; what is not a finite number is null."""
        document = asdict(self)
        if self.completeness is not None:
            document["completeness"]["complete"] = self.completeness.complete
        return finite(document)  # type: ignore[no-any-return]


def summarize(
    job: JobFacts,
    missing_indices: Sequence[int] = (),
    completeness: Completeness | None = None,
    factors: Factors | None = None,
    now_ms: int | None = None,
) -> Summary:
    """Say what a job's facts amount to; ``missing_indices`` are array tasks that left no database.

    Of tasks that have not ended ``now_ms`` tells the running from the silent; None: as if all of them were running.
    """
    task_states = [state_of(task, now_ms) for task in job.tasks]
    silent = tuple(task.name for task, state in zip(job.tasks, task_states, strict=True) if state == SILENT)
    late = {task.name for task, state in zip(job.tasks, task_states, strict=True) if state in (SILENT, OUTDATED)}
    job = give_up(job, silent)
    devices = tuple(summarize_device(device) for device in job.devices)
    energies = [device.energy_j for device in devices if device.energy_j is not None]
    energy_wh = sum(energies) / 3600 if energies else None
    gpu_s = sum(task.wall_s * task.devices for task in job.tasks)
    wall_s = running_s(job.tasks)
    done, left = job.chunks.get("done", 0), job.chunks.get("pending", 0)
    failed = job.chunks.get("failed", 0) + job.chunks.get("poison", 0)
    skipped = job.chunks.get("skipped", 0)
    not_here = completeness is not None and bool(completeness.not_listed or completeness.unmerged_indices)
    states = add_up_states(devices, gpu_s)
    return Summary(
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
        tries=job.tries,
        conflicts=job.conflicts,
        audio_hours=job.audio_done_s / 3600,
        chunks_of_unknown_length=job.done_of_unknown_length,
        wall_s=wall_s,
        gpu_hours=gpu_s / 3600,
        audio_hours_per_gpu_hour=_ratio(job.audio_done_s, gpu_s),
        times_real_time=_ratio(job.audio_done_s, wall_s),
        energy_wh=energy_wh,
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
        started_at_ms=min((task.started_at_ms for task in job.tasks), default=None),
        last_sign_ms=max((task.last_sign_ms for task in job.tasks), default=None),
        devices_at_once=_ratio(gpu_s, wall_s),
        kwh_per_1000_audio_hours=_kwh_per_1000(devices, job.audio_done_s),
        states=states,
        chunk_s=_durations(job.durations),
        chunk_cost=_cost(job, states),
        tries_on_cpu=job.cpu_tries,
        audio_hours_on_cpu=job.cpu_audio_s / 3600,
        outlook=look_ahead(job, completeness, gpu_s, wall_s, now_ms),
        bill=None if factors is None else make_bill(factors, energy_wh, gpu_s / 3600),
        alerts=tuple(_alerts(job, late)),
        errors=job.errors,
        settings=dict(job.last_settings),
        energy_measured_percent=_measured_percent(devices, gpu_s) if energies else None,
        recording_names=job.recording_names,
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
    hours = audio_done_s / 3600 if len(known) == len(devices) else sum(device.audio_hours for device in known)
    # Wh for one hour are kWh for a thousand.
    return _ratio(sum(device.energy_j or 0.0 for device in known) / 3600, hours)


def _measured_percent(devices: Sequence[DeviceSummary], gpu_s: float) -> float | None:
    """Return for which share of the GPU time the energy was measured; rounding never makes it more than all."""
    share = _ratio(sum(device.energy_measured_s for device in devices), gpu_s)
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


def _ratio(over: float, under: float) -> float | None:
    return over / under if under > 0 else None


def finite(value: Any) -> Any:
    """Return a JSON value without NaN and infinities, which JSON does not have."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(item) for item in value)
    return value
