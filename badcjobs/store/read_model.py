"""The read model: the content of a task database or a job database as plain values.

    TaskFacts     one attempt of an array task: its name, how it was started, its progress, how it ended
    DeviceFacts   one device of a task, or of this machine: what was measured on it, what it worked on
    TaskAlert     one alert of a task
    JobFacts      a job: its tasks and devices, and their totals
    Completeness  a job compared with the sources of its run

Report, monitor, live page, completeness and resume all use these types. Three functions read them; a field that a
function does not read keeps its default:

    read_tasks.read_tasks      the progress of tasks and what their devices do now (a few milliseconds per file)
    read_tasks.read_accounts   what their devices have done, used and cost so far
    read_job.read_job          everything in a job database

None means not known, or not read. Conclusions from these facts are in report/ and live/.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from math import isnan, nan
from typing import Any

from badcjobs.model import CHARTED, METRICS, NameGaps, PlaceCounts, ProcessFacts, Reading, is_silent, known_values
from badcjobs.store.figures import StateTime

ALIVE = ("running", "silent")
UNKNOWN_STATE = "unknown"  # of energy that cannot be split by state
_COUNTER_COVERS = 0.9  # the energy counter is read every few seconds, so it misses the end of a task


@dataclass(frozen=True)
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
    is_open: bool = True  # it had not ended when its task published last
    fix: str = ""  # what to do about it


# --- a device ---------------------------------------------------------------------------------------------------------


class PackedSteps(Sequence[int | None]):
    """Whole numbers or None, in little memory: a run may have tens of thousands of devices."""

    __slots__ = ("_numbers",)

    def __init__(self, numbers: Iterable[int | None]) -> None:
        """Keep a copy of them."""
        packed = [_NO_READING if number is None else number for number in numbers]
        are_small = all(_NO_READING <= number < -_NO_READING for number in packed)
        self._numbers = array("h" if are_small else "q", packed)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int | None]:
        return (None if number == _NO_READING else number for number in self._numbers)

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self)[place]
        number = self._numbers[place]
        return None if number == _NO_READING else number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


_NO_READING = -(2**15)


@dataclass(frozen=True)
class Trail:
    """The readings of a device in steps of equal length, oldest first; None: no reading in that step."""

    from_ms: int = 0
    step_ms: int = 0
    utilization_percent: Sequence[int | None] = ()
    memory_used_bytes: Sequence[int | None] = ()
    temperature_c: Sequence[int | None] = ()
    power_w: Sequence[int | None] = ()

    @property
    def means(self) -> Reading | None:
        """The means over all steps with a reading; None: there are no steps."""
        if not self.step_ms:
            return None
        readings = {metric: [value for value in getattr(self, metric) if value is not None] for metric in CHARTED}
        return Reading(**{metric: round(sum(values) / len(values)) for metric, values in readings.items() if values})


@dataclass(frozen=True, slots=True)
class MetricFacts:
    """One metric of one device over all its samples."""

    samples: int
    minimum: float
    mean: float
    p50: float
    p95: float
    maximum: float

    @classmethod
    def of(cls, samples: float, *figures: float) -> MetricFacts:
        """Make it from figures of one type."""
        return cls(int(samples), *figures)


class Named(Mapping[str, Any]):
    """Values of a device by their names, in little memory: a job may have tens of thousands of devices."""

    __slots__ = ("_figures", "_make", "_places")

    def __init__(self, make: Callable[..., Any], rows: Sequence[Sequence[Any]]) -> None:
        """Take rows of a name and the figures that make its value."""
        self._make = make
        self._places = _places(tuple(row[0] for row in rows))
        self._figures = array("d", [nan if figure is None else figure for row in rows for figure in row[1:]])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, name: str) -> Any:
        width = len(self._figures) // len(self._places or " ")
        begin = width * self._places[name]
        return self._make(*(None if isnan(figure) else figure for figure in self._figures[begin : begin + width]))


@cache
def _places(names: tuple[str, ...]) -> dict[str, int]:
    """Return the place of each name; nearly all devices have the same names, and share it."""
    return {name: place for place, name in enumerate(names)}


@dataclass(frozen=True, slots=True)
class DeviceWork:
    """The work that was done on one device."""

    workers: int = 0  # engine processes, or slots for them; a restarted one counts again
    done: int = 0  # tries that succeeded
    failed: int = 0
    lost: int = 0
    audio_s: float = 0.0  # of the chunks that are done
    chunk_p50_s: float | None = None  # duration of the tries that succeeded
    chunk_p95_s: float | None = None
    chunk_max_s: float | None = None
    last_end_ms: int | None = None  # end of the last try that has ended
    gave_up: str | None = None  # the error class with which its workers ended before all work was done
    under_way: int = 0  # tries in progress when their task published last; counted as working
    under_way_s: float = 0.0  # their time, split between tries at the same time


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """One device of one task, or of this machine."""

    task: str  # the name of its task; empty: a device of this machine
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
    energy_counter_span_s: float | None = None  # from the first reading of the counter to the last
    span_s: float | None = None  # from the first sample to the last
    gap_s: float = 0.0
    energy_integrated_j: float | None = None
    busy_mean_percent: float | None = None
    device_id: int = 0
    power_limit_w: float | None = None
    slowdown_c: int | None = None
    driver: str | None = None
    states: Mapping[str, StateTime] = field(default_factory=dict)
    metrics: Mapping[str, MetricFacts] = field(default_factory=dict)
    throttled: Mapping[str, int] = field(default_factory=dict)  # reason → number of samples; gpu_idle is not a slowdown
    work: DeviceWork = DeviceWork()
    spark: tuple[int | None, ...] = ()  # mean utilization in stretches of equal length; None: no reading
    # Its last reading, and what it does now
    read_at_ms: int | None = None
    reading: Reading = field(default_factory=Reading)
    alive: bool = True  # its task runs; False: its task has ended or is silent
    trail: Trail = Trail()
    means: Reading | None = None  # over the time of its task, after that has ended or is silent
    chunks: tuple[str, ...] = ()  # in progress
    rate: float | None = None  # seconds of audio per second since its task started
    processes: tuple[ProcessFacts, ...] | None = None  # None: not known
    trouble: str | None = None  # why there is no reading now

    @property
    def last(self) -> dict[str, float]:
        """Its last reading: metric → value, and at_ms, without unknown values."""
        values = {metric: getattr(self.reading, metric) for metric in METRICS}
        return known_values({"at_ms": self.read_at_ms, **values})

    @property
    def shown(self) -> Reading:
        """The reading to show: the last one or, after its task has ended, the means.

        The last reading of a task that has ended nearly always shows an idle device.
        """
        return self.means or self.reading

    @property
    def memory_percent(self) -> float | None:
        """Memory in use, in percent of its memory."""
        used = self.shown.memory_used_bytes
        total = self.memory_total_bytes
        return None if used is None or not total else 100 * used / total

    # --- figures that follow from what was measured

    @property
    def card(self) -> tuple[str, str]:
        """The identity of the physical device, the same for every task that uses it."""
        return self.node, self.uuid or self.token

    @property
    def label(self) -> str:
        """Its name in messages: its index or, without one, its token."""
        return self.token if self.index is None else str(self.index)

    @property
    def utilization_mean_percent(self) -> float | None:
        """The mean of the plain utilization, which misses light load; busy_mean_percent is more exact."""
        metric = self.metrics.get("utilization_percent")
        return None if metric is None else metric.mean

    @property
    def energy_source(self) -> str | None:
        """The counter if it covers nearly all of the time, else power integrated over the samples."""
        span_s = self.energy_counter_span_s
        if self.energy_counter_j is not None and span_s and span_s >= _COUNTER_COVERS * (self.span_s or 0.0):
            return "counter"
        return None if self.energy_integrated_j is None else "integrated power"

    @property
    def energy_j(self) -> float | None:
        """The energy that was measured."""
        return self.energy_counter_j if self.energy_source == "counter" else self.energy_integrated_j

    @property
    def energy_measured_s(self) -> float:
        """The time during which energy_j was measured."""
        if self.energy_source is None:
            return 0.0
        return (self.energy_counter_span_s or 0.0) if self.energy_source == "counter" else sum(self.measured_s.values())

    @property
    def total_s(self) -> float:
        """The time during which its task had it."""
        return sum(time.total_s for time in self.states.values())

    @property
    def state_s(self) -> dict[str, float]:
        """Its time by state."""
        return {state: time.total_s for state, time in self.states.items()}

    @property
    def measured_s(self) -> dict[str, float]:
        """The time in each state during which its power is known."""
        return {state: time.measured_s for state, time in self.states.items()}

    @property
    def state_energy_j(self) -> dict[str, float]:
        """energy_j split by state, in proportion to the energy measured in each state."""
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
        """Why its clock was lowered: reason → number of samples."""
        return {reason: many for reason, many in self.throttled.items() if reason != "gpu_idle"}


# --- a task -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TaskFacts:
    """One attempt of one array task.

    A task that has not started has the state waiting or unbegun, an empty node, and times of 0.
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
    last_sign_ms: int = 0  # its end or, without one, the latest time in its database
    # Its chunks
    done: int = 0  # in this attempt
    failed: int = 0  # permanently, in this attempt
    pending: int = 0
    audio_s: float = 0.0  # of the chunks that are done
    # How it was started
    engine: str | None = None
    workers: int | None = None  # as planned, or the last number that auto chose
    cpus: int | None = None  # cores of the allocation
    memory_limit_bytes: int | None = None  # requested from Slurm
    time_limit_s: float | None = None
    slurm_state: str | None = None  # TIMEOUT, …
    # What its own processes and its machine used while chunks were processed
    cpu_mean_cores: float | None = None
    memory_peak_bytes: int | None = None
    read_mean_bytes_per_s: float | None = None
    host_cpu_mean_percent: float | None = None
    host_memory_peak_bytes: int | None = None
    heard_at_ms: int | None = None  # last_sign_ms, or the time of its last publication if that is later
    silent_after_s: float | None = None  # without a publication for longer than this it counts as silent
    changed: bool = False  # it had not ended at the merge, and has published again since
    # Up to here, these are the keys of a task in the JSON document of a report, in their order
    procid: int | None = None
    shard_index: int | None = None
    ended_at_ms: int | None = None
    before: int = 0  # chunks done before this attempt
    failed_before: int = 0  # chunks that failed permanently before this attempt
    settings: str = ""  # its settings as JSON; empty: not known
    live_folder: str | None = None  # on its node
    # Totals
    tries: int = 0
    startup_s: float | None = None  # from its start to its first try
    longest_s: float | None = None  # its longest try that succeeded
    # Class, chunks that are not done, one message; each file without audio is one of its own
    errors: tuple[tuple[str, int, str | None], ...] = ()
    detections: int = 0
    done_of_unknown_length: int = 0
    audio_left_s: float = 0.0  # of the pending chunks whose length is known
    left_of_unknown_length: int = 0
    # Now
    state: str = "running"  # its verdict, or running, silent, killed, waiting, unbegun
    working_on: tuple[str, ...] = ()  # chunks in progress, on all devices
    cpu_percent: float | None = None  # of its machine
    memory_used_bytes: int | None = None  # of its machine
    memory_percent: float | None = None  # of its machine
    task_id: int = 0
    its_devices: tuple[DeviceFacts, ...] = field(default=(), compare=False)
    alerts: tuple[TaskAlert, ...] = field(default=(), compare=False)

    @property
    def is_local(self) -> bool:
        """Whether it ran without Slurm."""
        return self.job_id.startswith("local")

    @property
    def wall_s(self) -> float:
        """Seconds from its start to last_sign_ms."""
        return (self.last_sign_ms - self.started_at_ms) / 1000

    @property
    def gpu_s(self) -> float:
        """Seconds that it had its devices, added up over the devices."""
        return self.wall_s * (self.devices or 0)

    @property
    def age(self) -> tuple[int, int]:
        """A value that is larger for a later attempt."""
        return self.started_at_ms, self.restart

    @property
    def part(self) -> tuple[object, ...]:
        """The part of the source that it processes."""
        return self.array_index, self.procid, self.shard_index, self.shard_count

    @property
    def label(self) -> str:
        """Its name in messages: 4821_7."""
        step = "" if self.procid is None else f".p{self.procid}"
        of = f"{self.job_id}_" if self.job_id else ""  # the job number is not known before the first task
        return f"{of}{self.array_index}{step}"

    @property
    def begun(self) -> bool:
        """Whether it has started."""
        return self.state not in ("waiting", "unbegun")

    @property
    def alive(self) -> bool:
        """Whether it has not ended, as far as is known."""
        return self.state in ALIVE

    @property
    def failed_for_good(self) -> int:
        """Chunks that failed permanently, in this attempt or before it."""
        return self.failed + self.failed_before

    @property
    def settled(self) -> int:
        """How many of its chunks need no more work."""
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
        """Chunks done per second so far."""
        return self.done / self.wall_s if self.done and self.wall_s > 0 else None

    @property
    def counted_at_ms(self) -> int:
        """The time of its counts of chunks: its last sign or, while nothing is done, its last update."""
        if self.done:
            return self.last_sign_ms
        return self.heard_at_ms or self.last_sign_ms

    @property
    def ends_at_ms(self) -> int | None:
        """When its last chunk will be done, at the rate so far."""
        if self.state != "running" or not self.pending or self.chunks_per_s is None:
            return None
        return round(self.last_sign_ms + 1000 * self.pending / self.chunks_per_s)

    def at(self, now_ms: int) -> TaskFacts:
        """Return it as of a moment: a task that has not published for too long is silent."""
        overdue = self.state == "running" and is_silent(self.heard_at_ms, self.silent_after_s, now_ms)
        return self._over("silent", "its task is silent") if overdue else self

    def as_killed(self) -> TaskFacts:
        """Return it as killed, which a record next to its database says: it could not write this itself."""
        return replace(self._over("killed", "its task was killed"), verdict="killed", working_on=())

    def _over(self, state: str, trouble: str) -> TaskFacts:
        devices = tuple(replace(d, means=d.trail.means, alive=False, trouble=trouble) for d in self.its_devices)
        return replace(self, state=state, its_devices=devices)


# --- a job ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FailedChunk:
    """A chunk that failed permanently."""

    recording_id: str
    chunk_id: str
    status: str
    attempts: int
    error_class: str
    error: str


@dataclass(frozen=True)
class ErrorFacts:
    """All tries that failed with one error class."""

    error_class: str
    tries: int
    chunks: int
    rescued: int  # chunks among them that succeeded in a later try
    devices: int  # number of different devices
    example: str  # one error message of the engine


@dataclass(frozen=True)
class AlertFacts:
    """All alerts of one kind."""

    kind: str
    severity: str
    alerts: int
    devices: int = 0
    longest_s: float = 0.0
    peak: float | None = None
    threshold: float | None = None
    example: str = ""
    still_open: int = 0  # not over at the last publication of a task that has not ended; in a summary: of one that runs


@dataclass(frozen=True)
class ForeignProcess:
    """A process of another user or job on one of our devices."""

    task: str
    node: str
    device_index: int | None
    pid: int
    name: str | None
    user: str | None
    seconds: float
    memory_peak_bytes: int | None


@dataclass(frozen=True)
class DecisionFacts:
    """The last decision of the wrapper about one topic and subject."""

    code: str  # of model/decisions.py, or of a newer version
    subject: str | None
    figures: Mapping[str, Any]
    reason: str
    tasks: int


@dataclass(frozen=True)
class CostFacts:
    """The cost per try of the tries that succeeded; None: not measured."""

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
    energy_tries: int = 0  # the tries with measured energy, on which the energy_j figures are based


@dataclass(frozen=True)
class GapFacts:
    """All gaps with one reason."""

    reason: str
    metric: str | None
    gaps: int
    seconds: float
    tasks: int


@dataclass(frozen=True)
class Freshness:
    """How the merged data compares with the task databases now."""

    as_of_ms: int | None = None  # publication time of the newest merged database; None: not known
    changed: int = 0  # databases that were published again since
    gone: int = 0  # databases of tasks that had not ended, which are missing now; shown as of the merge
    command: str | None = None  # merges the new and changed databases
    new: int = 0  # databases in the same folders that were never merged
    new_indices: tuple[int, ...] = ()  # the array tasks of the new databases
    closed: str | None = None  # a folder that cannot be read, and why


@dataclass(frozen=True)
class JobFacts:
    """The content of a job database."""

    tasks: tuple[TaskFacts, ...]
    devices: tuple[DeviceFacts, ...] = ()
    chunks: Mapping[str, int] = field(default_factory=dict)
    audio_done_s: float = 0.0
    done_of_unknown_length: int = 0
    tries: int = 0
    failed: tuple[FailedChunk, ...] = ()
    labels: tuple[tuple[str, str | None, int], ...] = ()
    gaps: tuple[GapFacts, ...] = ()
    file_remarks: tuple[tuple[str, str], ...] = ()  # (path, remark) for each file that was not simply merged
    lossy_paths: tuple[str, ...] = ()  # of the files with rows that are missing, or may be
    file_folders: tuple[str, ...] = ()  # folders of its task databases: absolute, or below the job database's folder
    conflicts: int = 0  # chunks that were done more than once; a documented rule chooses one result
    restarted: int = 0  # those of them that a restarted task repeated: a node had failed
    last_settings: Mapping[str, Any] = field(default_factory=dict)  # of the task that started last
    audio_left_s: float = 0.0  # of the pending chunks whose length is known
    left_of_unknown_length: int = 0  # pending chunks whose length is not known
    errors: tuple[ErrorFacts, ...] = ()
    alerts: tuple[AlertFacts, ...] = ()
    foreign: tuple[ForeignProcess, ...] = ()
    decisions: tuple[DecisionFacts, ...] = ()
    cost: CostFacts = CostFacts()
    cpu_tries: int = 0  # tries that succeeded without a device
    cpu_audio_s: float = 0.0
    overlap_s: float = 0.0  # audio that two chunks have and that counts once; before a merge it is not known
    durations: Mapping[int, int] = field(default_factory=dict)  # ms of tries that succeeded → number of tries
    failed_gpu_s: float = 0.0  # spent on tries that failed
    lost_gpu_s: float = 0.0  # spent on tries without a result: their worker or task was killed
    again_gpu_s: float = 0.0  # spent on successful tries of chunks that were done before
    alert_nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # kind of alert → nodes
    recording_names: NameGaps | None = None  # None: there are no recordings
    places: PlaceCounts | None = None  # None: no recording has a place or is left out
    merged: Freshness = Freshness()

    @property
    def lossy_files(self) -> int:
        """How many files have rows that are missing, or may be."""
        return len(self.lossy_paths)

    @property
    def audio_processed_s(self) -> float:
        """The length of all chunks that are done: overlaps take time in each of their chunks."""
        return self.audio_done_s + self.overlap_s


@dataclass(frozen=True)
class Completeness:
    """The sources of a run compared with its job database.

    ``done`` to ``elsewhere`` and ``not_listed`` are rows of the source and add up to ``expected``; ``done`` to
    ``elsewhere`` and ``strangers`` add up to ``listed``. If the source is not known, they are rows of the database.
    """

    expected: int | None = None  # rows of the sources in run.toml, without those left out; None: see why_unknown
    why_unknown: str | None = None
    listed: int = 0  # rows of the job database
    done: int = 0
    failed: int = 0
    poison: int = 0
    pending: int = 0
    elsewhere: int = 0  # done in a file that was not merged, as a task has found
    not_listed: int | None = None  # rows of the source that no task has listed
    left_out: int | None = None  # rows of recordings that the tasks left out: nothing gives them a place
    strangers: int | None = None  # rows of the job database that are not in the source
    not_listed_examples: tuple[str, ...] = ()
    strangers_examples: tuple[str, ...] = ()
    missing_indices: tuple[int, ...] = ()  # array tasks without a database
    finish: tuple[str, ...] = ()  # commands, each of which does the rest; the last one works without Slurm
    finish_by: str = ""  # what the first of them does: run, submit, emulate, or script: submit one that is not known
    left_indices: tuple[int, ...] = ()  # array tasks that can do the rest; empty: no array, or not all of it
    missing_logs: tuple[str, ...] = ()  # the scheduler's logs of missing_indices, as far as they exist
    missing_notes: tuple[str, ...] = ()  # an emulation's note on each of missing_indices; empty: not an emulation
    unmerged_indices: tuple[int, ...] = ()  # array tasks without merged data, though a database exists now

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.done == self.expected

    @property
    def rows(self) -> int:
        """The rows of the source or, if that is not known, of the job database."""
        return self.listed if self.expected is None else self.expected

    @property
    def given_up(self) -> int:
        """The rows that failed for good, or crashed the engine too often."""
        return self.failed + self.poison

    @property
    def left(self) -> int:
        """The rows that need work."""
        return self.rows - self.done - self.given_up - self.elsewhere
