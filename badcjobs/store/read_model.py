"""The one read model: what a task database or a job database says, as plain values.

    TaskFacts     one attempt of an array task: who it is, how it was started, how far it is, how it ended
    DeviceFacts   one device of a task, or of this machine: what was measured on it, what it worked on
    TaskAlert     one alert of a task that goes on, or did
    JobFacts      a whole job: its tasks and devices, and what they amount to together
    Completeness  a job against the sources of its run

There are no other types for these: report, monitor, live page, completeness and resume all use them. Three readers
fill them, each as far as its users need; what a reader does not ask for stays at its default:

    read_tasks.read_tasks      how far tasks are and what their devices do now (a few milliseconds for a file)
    read_tasks.read_accounts   what their devices have done, used and cost so far
    read_job.read_job          everything that a job database says

None: not known, or not asked for. Nothing here judges: what facts mean is said by report/ and live/.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from badcjobs.model import CHARTED, METRICS, NameGaps, ProcessFacts, Reading, is_silent
from badcjobs.store.accounting import StateTime

ALIVE = ("running", "silent")
UNKNOWN_STATE = "unknown"  # of energy that cannot be shared out
_COUNTER_COVERS = 0.9  # the counter is read every few seconds: short tasks end between two readings


@dataclass(frozen=True, slots=True)
class TaskAlert:
    """One alert of a task, or of a device of this machine."""

    kind: str
    severity: str
    message: str
    node: str | None
    started_at_ms: int
    task: str | None = None
    device_index: int | None = None
    device_uuid: str | None = None
    peak: float | None = None
    threshold: float | None = None
    is_open: bool = True  # it had not ended when its task was last published


# --- a device ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Trail:
    """What a device did, in steps of equal length, oldest first; None: no reading in that step."""

    from_ms: int = 0
    step_ms: int = 0
    utilization_percent: tuple[int | None, ...] = ()
    memory_used_bytes: tuple[int | None, ...] = ()
    temperature_c: tuple[int | None, ...] = ()
    power_w: tuple[int | None, ...] = ()

    @property
    def means(self) -> Reading | None:
        """The means over all steps that have a reading; None: there are no steps."""
        if not self.step_ms:
            return None
        known = {metric: [value for value in getattr(self, metric) if value is not None] for metric in CHARTED}
        return Reading(**{metric: round(sum(values) / len(values)) for metric, values in known.items() if values})


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
    """One device of one task, or of this machine."""

    task: str  # the name of the task that has it; empty: a device of this machine
    node: str
    index: int | None
    uuid: str | None
    token: str  # empty: a device of this machine
    name: str | None
    backend: str
    memory_total_bytes: int | None = None
    # What was measured on it
    samples: int = 0
    memory_peak_bytes: int | None = None
    temperature_max_c: int | None = None
    power_mean_w: float | None = None
    energy_counter_j: float | None = None
    energy_counter_span_s: float | None = None  # from its first reading to its last
    span_s: float | None = None  # from the first sample to the last
    gap_s: float = 0.0
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
    under_way: UnderWay = field(default_factory=UnderWay)
    # Its last reading, and what it does now
    read_at_ms: int | None = None
    reading: Reading = field(default_factory=Reading)
    alive: bool = True  # its task runs; False: these are the last readings of a task that has ended or is silent
    trail: Trail = field(default_factory=Trail)
    means: Reading | None = None  # over the time of its task, once that has ended or is silent
    chunks: tuple[str, ...] = ()  # begun and not ended
    rate: float | None = None  # seconds of audio per second since its task began
    processes: tuple[ProcessFacts, ...] | None = None  # None: not known
    trouble: str | None = None  # why it gives no reading now

    @property
    def last(self) -> dict[str, float]:
        """Its last reading: metric → value, and at_ms; what it did not say is left out."""
        values = {"at_ms": self.read_at_ms, **{metric: getattr(self.reading, metric) for metric in METRICS}}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def shown(self) -> Reading:
        """What to show of it: the last reading or, where its task has ended, its means.

        The last reading of a task that has ended was taken when its work was done: nearly always an idle device.
        """
        return self.means or self.reading

    @property
    def memory_percent(self) -> float | None:
        """How full its memory is, or was."""
        used, total = self.shown.memory_used_bytes, self.memory_total_bytes
        return None if used is None or not total else 100 * used / total

    # --- what was measured on it amounts to

    @property
    def card(self) -> tuple[str, str]:
        """What tells it from all others, whichever task it works for."""
        return self.node, self.uuid or self.token

    @property
    def label(self) -> str:
        """What people call it: its index or, where it has none, its token."""
        return self.token if self.index is None else str(self.index)

    @property
    def utilization_mean_percent(self) -> float | None:
        """The plain utilization, which is blind to light load; busy_mean_percent is the best figure there is."""
        total = sum(self.utilization_counts.values())
        return sum(value * many for value, many in self.utilization_counts.items()) / total if total else None

    @property
    def energy_source(self) -> str | None:
        """The counter where it saw nearly the whole time, else power integrated over the samples."""
        span_s = self.energy_counter_span_s
        if self.energy_counter_j is not None and span_s and span_s >= _COUNTER_COVERS * (self.span_s or 0.0):
            return "counter"
        return None if self.energy_integrated_j is None else "integrated power"

    @property
    def energy_j(self) -> float | None:
        """The energy that it used, as far as it was measured."""
        return self.energy_counter_j if self.energy_source == "counter" else self.energy_integrated_j

    @property
    def energy_measured_s(self) -> float:
        """For how long energy_j was measured: what was used before and after is not in it."""
        if self.energy_source is None:
            return 0.0
        return (self.energy_counter_span_s or 0.0) if self.energy_source == "counter" else sum(self.measured_s.values())

    @property
    def total_s(self) -> float:
        """For how long its task had it."""
        return sum(time.total_s for time in self.states.values())

    @property
    def state_s(self) -> dict[str, float]:
        """Its time by state."""
        return {state: time.total_s for state, time in self.states.items()}

    @property
    def measured_s(self) -> dict[str, float]:
        """For so much of the time in each state its power is known."""
        return {state: time.measured_s for state, time in self.states.items()}

    @property
    def state_energy_j(self) -> dict[str, float]:
        """Its energy shared out over its states in the ratio of what was measured in each; adds up to energy_j."""
        energy_j = self.energy_j
        if energy_j is None:
            return {}
        measured = {state: time.energy_j for state, time in self.states.items() if time.energy_j is not None}
        total_j = sum(measured.values())
        if total_j <= 0:
            return {UNKNOWN_STATE: energy_j}
        return {state: energy_j * (joules / total_j) for state, joules in measured.items()}

    @property
    def held_back(self) -> dict[str, int]:
        """Why its clock was lowered: reason → samples."""
        return {reason: many for reason, many in self.throttled.items() if reason != "gpu_idle"}


# --- a task -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One attempt of one array task.

    One that has not begun has the state waiting or unbegun, no node and no times: empty, and 0.
    """

    name: str
    job_id: str
    array_index: int
    restart: int = 0
    node: str = ""
    shard_count: int | None = None
    verdict: str | None = None
    exit_code: int | None = None
    telemetry: int = 0
    devices: int | None = None  # granted
    started_at_ms: int = 0
    last_sign_ms: int = 0  # the latest time in its database
    # Its chunks
    done: int = 0  # in this attempt
    failed: int = 0  # for good, in this attempt
    pending: int = 0
    audio_s: float = 0.0  # of the chunks that are done
    # How it was started
    engine: str | None = None
    workers: int | None = None  # as planned
    cpus: int | None = None  # cores of the allocation
    memory_limit_bytes: int | None = None  # what was asked of Slurm
    time_limit_s: float | None = None
    slurm_state: str | None = None  # TIMEOUT, …, as Slurm calls it
    # What its own processes and its machine used while chunks were worked on
    cpu_mean_cores: float | None = None
    memory_peak_bytes: int | None = None
    read_mean_bytes_per_s: float | None = None
    host_cpu_mean_percent: float | None = None
    host_memory_peak_bytes: int | None = None
    heard_at_ms: int | None = None  # its last sign, or when its file was published last
    silent_after_s: float | None = None  # without news for longer than this it counts as silent
    changed: bool = False  # while it had not ended at the merge: its file was published again since
    procid: int | None = None
    shard_index: int | None = None
    ended_at_ms: int | None = None
    before: int = 0  # chunks done before this attempt
    failed_before: int = 0  # chunks that failed for good before this attempt
    settings: str | None = None  # how it was told to work, as JSON
    # What it counted up to
    tries: int = 0
    detections: int = 0
    done_of_unknown_length: int = 0
    audio_left_s: float = 0.0  # of the chunks that are listed and not settled, where it is known
    left_of_unknown_length: int = 0
    # Now
    state: str = "running"  # its verdict, or running, silent, killed, waiting, unbegun
    working_on: tuple[str, ...] = ()  # chunks begun and not ended, on whatever device
    cpu_percent: float | None = None  # of its machine
    memory_used_bytes: int | None = None  # of its machine
    memory_percent: float | None = None  # of its machine
    task_id: int = 0
    its_devices: tuple[DeviceFacts, ...] = field(default=(), compare=False)
    alerts: tuple[TaskAlert, ...] = field(default=(), compare=False)

    @property
    def wall_s(self) -> float:
        """How long it ran, up to its last sign."""
        return (self.last_sign_ms - self.started_at_ms) / 1000

    @property
    def gpu_s(self) -> float:
        """For how long it held its devices, all of them together."""
        return self.wall_s * (self.devices or 0)

    @property
    def age(self) -> tuple[int, int]:
        """What is larger for a later attempt."""
        return self.started_at_ms, self.restart

    @property
    def part(self) -> tuple[object, ...]:
        """Which part of the source it has."""
        return self.array_index, self.procid, self.shard_index, self.shard_count

    @property
    def label(self) -> str:
        """What people call it: 4821_7."""
        step = "" if self.procid is None else f".p{self.procid}"
        of = f"{self.job_id}_" if self.job_id else ""  # the job's number is not known before its first task
        return f"{of}{self.array_index}{step}"

    @property
    def begun(self) -> bool:
        """Whether anything is known of it since it was submitted."""
        return self.state not in ("waiting", "unbegun")

    @property
    def alive(self) -> bool:
        """Whether it goes on, as far as we know."""
        return self.state in ALIVE

    @property
    def failed_for_good(self) -> int:
        """Chunks that failed in this attempt or before it."""
        return self.failed + self.failed_before

    @property
    def settled(self) -> int:
        """How many of its chunks need nothing more."""
        return self.done + self.failed_for_good + self.before

    @property
    def chunks(self) -> int:
        """How many chunks its part of the source has."""
        return self.settled + self.pending

    @property
    def rate(self) -> float | None:
        """Seconds of audio per second."""
        return self.audio_s / self.wall_s if self.audio_s > 0 and self.wall_s > 0 else None

    @property
    def chunks_per_s(self) -> float | None:
        """The pace so far."""
        return self.done / self.wall_s if self.done and self.wall_s > 0 else None

    @property
    def ends_at_ms(self) -> int | None:
        """When its last chunk will be done, at the pace so far."""
        if self.state != "running" or not self.pending or self.chunks_per_s is None:
            return None
        return round(self.last_sign_ms + 1000 * self.pending / self.chunks_per_s)

    def at(self, now_ms: int) -> TaskFacts:
        """Return it as it looks at a moment: a task without news for too long is silent."""
        overdue = self.state == "running" and is_silent(self.heard_at_ms, self.silent_after_s, now_ms)
        return self._over("silent", "no word from its task") if overdue else self

    def as_killed(self) -> TaskFacts:
        """Return it once its end was written down beside its database: it could not do so itself."""
        return replace(self._over("killed", "its task was killed"), verdict="killed", working_on=())

    def _over(self, state: str, trouble: str) -> TaskFacts:
        devices = tuple(replace(d, means=d.trail.means, alive=False, trouble=trouble) for d in self.its_devices)
        return replace(self, state=state, its_devices=devices)


# --- a job ------------------------------------------------------------------------------------------------------------


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
