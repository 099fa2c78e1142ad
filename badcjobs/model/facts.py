"""What a job database says, before anybody has judged it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from badcjobs.model.recordings import NameGaps


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One task attempt, as a job database tells it."""

    name: str
    job_id: str
    array_index: int
    restart: int
    node: str
    shard_count: int | None
    verdict: str | None
    exit_code: int | None
    telemetry: int
    devices: int
    started_at_ms: int
    last_sign_ms: int
    done: int
    failed: int
    pending: int
    audio_s: float
    engine: str | None = None
    workers: int | None = None  # as planned
    cpus: int | None = None  # cores of the allocation
    memory_limit_bytes: int | None = None  # what was asked of Slurm
    time_limit_s: float | None = None
    slurm_state: str | None = None  # Slurm's own word: TIMEOUT, …
    cpu_mean_cores: float | None = None  # by its own processes, while chunks were worked on
    memory_peak_bytes: int | None = None  # by its own processes
    read_mean_bytes_per_s: float | None = None
    host_cpu_mean_percent: float | None = None  # of the whole machine, while chunks were worked on
    host_memory_peak_bytes: int | None = None
    heard_at_ms: int | None = None  # while it has not ended: its last sign, or when its file was published last
    silent_after_s: float | None = None  # without a word for longer than this it counts as silent
    changed: bool = False  # while it had not ended at the merge: its file was published again, and may tell its end

    @property
    def wall_s(self) -> float:
        return (self.last_sign_ms - self.started_at_ms) / 1000


@dataclass(frozen=True, slots=True)
class StateTime:
    """What a device did in one state; the states are those of the table ``device_time``."""

    total_s: float
    measured_s: float  # for so many of them its power is known
    busy_s: float | None
    energy_j: float | None


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric of one device over all its samples."""

    samples: int
    minimum: float
    mean: float
    p50: float
    p95: float
    maximum: float


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """What was worked on on one device."""

    workers: int = 0  # engine processes, or places for them, one after another counted as well
    done: int = 0  # tries that ended well
    failed: int = 0
    lost: int = 0
    audio_s: float = 0.0  # of the chunks that were done
    chunk_p50_s: float | None = None  # how long the tries took that ended well
    chunk_p95_s: float | None = None
    chunk_max_s: float | None = None
    last_end_ms: int | None = None  # when the last try that has an end ended
    gave_up: str | None = None  # the error class with which its workers ended before the work did


@dataclass(frozen=True, slots=True)
class UnderWay:
    """What tries on one device had cost that had not ended when their task was last heard of; counted as working."""

    tries: int = 0
    total_s: float = 0.0  # shared with tries at the same time
    busy_s: float | None = None
    energy_j: float | None = None
    alone_s: float = 0.0  # while no try was in flight beside them that was done in the end


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of one task, as a job database tells it."""

    task: str
    node: str
    index: int | None
    uuid: str | None
    token: str
    name: str | None
    backend: str
    memory_total_bytes: int | None
    samples: int
    memory_peak_bytes: int | None
    temperature_max_c: int | None
    power_mean_w: float | None
    energy_counter_j: float | None
    energy_counter_span_s: float | None  # from its first reading to its last
    span_s: float | None  # from the first sample to the last
    gap_s: float
    energy_integrated_j: float | None = None
    busy_mean_percent: float | None = None
    utilization_counts: Mapping[int, int] = field(default_factory=dict)  # percent → how many samples
    device_id: int = 0
    power_limit_w: float | None = None
    slowdown_c: int | None = None
    states: Mapping[str, StateTime] = field(default_factory=dict)
    metrics: Mapping[str, MetricFacts] = field(default_factory=dict)
    throttled: Mapping[str, int] = field(default_factory=dict)  # reason → samples; gpu_idle slows nobody
    work: DeviceWork = field(default_factory=DeviceWork)
    spark: tuple[float | None, ...] = ()  # mean utilization in stretches of equal length; None: no reading in it
    last: Mapping[str, float] = field(default_factory=dict)  # the last reading: metric → value, and at_ms
    under_way: UnderWay = field(default_factory=UnderWay)


@dataclass(frozen=True, slots=True)
class FailedChunk:
    """A chunk that failed for good."""

    recording_id: str
    chunk_id: str
    status: str
    attempts: int
    error_class: str
    error: str


@dataclass(frozen=True, slots=True)
class ErrorFacts:
    """All tries that failed in one way."""

    error_class: str
    tries: int
    chunks: int
    rescued: int  # chunks among them that were done in the end
    devices: int  # on how many devices
    example: str  # what the engine said, once


@dataclass(frozen=True, slots=True)
class AlertFacts:
    """All alerts of one kind."""

    kind: str
    severity: str
    alerts: int
    devices: int
    longest_s: float
    peak: float | None
    threshold: float | None
    example: str
    still_open: int = 0  # not over when their tasks, which have not ended, were last heard of; in a summary: that run


@dataclass(frozen=True, slots=True)
class ForeignProcess:
    """Somebody else's process on a device of ours."""

    task: str
    node: str
    device_index: int | None
    pid: int
    name: str | None
    user: str | None
    seconds: float
    memory_peak_bytes: int | None


@dataclass(frozen=True, slots=True)
class DecisionFacts:
    """What the wrapper decided by itself, the last time for each subject."""

    kind: str
    subject: str | None
    value: float | None
    reason: str
    tasks: int


@dataclass(frozen=True, slots=True)
class CostFacts:
    """What the tries that ended well cost each; None: not measured."""

    tries: int = 0
    gpu_s_mean: float | None = None
    gpu_s_p50: float | None = None
    gpu_s_p95: float | None = None
    gpu_s_max: float | None = None
    busy_s_mean: float | None = None
    energy_j_mean: float | None = None
    energy_j_p50: float | None = None
    energy_j_p95: float | None = None
    energy_j_max: float | None = None
    energy_tries: int = 0  # in so many of them energy was measured: the means and ranks of joules are theirs


@dataclass(frozen=True, slots=True)
class GapFacts:
    """All gaps with one reason."""

    reason: str
    metric: str | None
    gaps: int
    seconds: float
    tasks: int


@dataclass(frozen=True, slots=True)
class Freshness:
    """How what was merged stands to the task databases by now."""

    as_of_ms: int | None = None  # when the newest of the databases merged was published; None: not known
    changed: int = 0  # so many have been published again since
    gone: int = 0  # so many of tasks that had not ended are not where they were; told as of then
    command: str | None = None  # merges those that are new or have changed
    new: int = 0  # so many lie beside them and were never merged
    new_indices: tuple[int, ...] = ()  # the array tasks whose databases are among the new ones
    closed: str | None = (
        None  # a folder of them that nobody here may look into, and why; of what is in it nothing is known
    )


@dataclass(frozen=True, slots=True)
class JobFacts:
    """A job, as its database tells it; what it means is the report's business."""

    tasks: tuple[TaskFacts, ...]
    devices: tuple[DeviceFacts, ...]
    chunks: Mapping[str, int]
    audio_done_s: float
    done_of_unknown_length: int
    tries: int
    failed: tuple[FailedChunk, ...]
    labels: tuple[tuple[str, str | None, int], ...]
    gaps: tuple[GapFacts, ...]
    file_remarks: tuple[tuple[str, str], ...]  # (path, what became of it), where it was not simply merged
    lossy_files: int = 0  # files of which rows are missing, or may be
    file_folders: tuple[str, ...] = ()  # where its task databases lay: absolute, or below the job database's folder
    conflicts: int = 0  # chunks that were done more than once; the stated rule has chosen
    last_settings: Mapping[str, Any] = field(default_factory=dict)  # how the task that started last was told to work
    audio_left_s: float = 0.0  # of the chunks that are listed and not settled, where it is known
    left_of_unknown_length: int = 0  # so many of these say nothing of their length
    errors: tuple[ErrorFacts, ...] = ()
    alerts: tuple[AlertFacts, ...] = ()
    foreign: tuple[ForeignProcess, ...] = ()
    decisions: tuple[DecisionFacts, ...] = ()
    cost: CostFacts = field(default_factory=CostFacts)
    cpu_tries: int = 0  # tries that ended well without a device
    cpu_audio_s: float = 0.0
    durations: Mapping[int, int] = field(default_factory=dict)  # ms of a try that ended well → how many
    failed_gpu_s: float = 0.0  # spent on tries that failed
    lost_gpu_s: float = 0.0  # spent on tries that nobody will ever hear of
    again_gpu_s: float = 0.0  # spent on tries that ended well, of chunks that were done before
    alert_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind of alert → where
    recording_names: NameGaps | None = None  # None: there are no recordings
    open_alerts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind → the task of each still_open
    merged: Freshness = field(default_factory=Freshness)


@dataclass(frozen=True, slots=True)
class Completeness:
    """What the sources of a run hold against what its job database holds.

    ``done`` to ``elsewhere`` and ``not_listed`` are the source's rows and add up to ``expected``; ``done`` to
    ``elsewhere`` and ``strangers`` add up to ``listed``. Where the source is not known they are the database's rows.
    """

    expected: int | None  # rows of the sources in run.toml; None: see why_unknown
    why_unknown: str | None
    listed: int  # rows of the job database
    done: int
    failed: int
    poison: int
    pending: int
    elsewhere: int  # found done by a task, in a file that was not merged
    not_listed: int | None = None  # rows of the source that are in no task
    strangers: int | None = None  # rows of the job database that are not in the source
    not_listed_examples: tuple[str, ...] = ()
    strangers_examples: tuple[str, ...] = ()
    missing_indices: tuple[int, ...] = ()  # array tasks that left no database
    finish: tuple[str, ...] = ()  # commands, each of which does what is left; the last one without Slurm
    left_indices: tuple[int, ...] = ()  # array tasks that would do what is left; empty: no array, or not theirs alone
    missing_logs: tuple[str, ...] = ()  # what the scheduler kept of missing_indices, where it is there
    missing_notes: tuple[str, ...] = ()  # what an emulation says of each of missing_indices; empty: it was none
    unmerged_indices: tuple[int, ...] = ()  # array tasks of which nothing was merged, though a database is there now

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.done == self.expected
