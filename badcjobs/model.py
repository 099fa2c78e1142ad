"""The nouns that travel between stages: frozen, typed, with the unit in each name.

No behaviour beyond what a noun knows about itself; no imports from the rest of the package.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# What a sample holds; the `sample` table has a column for each. None: the device did not say.
METRICS = (
    "utilization_percent",
    "memory_utilization_percent",
    "memory_used_bytes",
    "temperature_c",
    "power_w",
    "energy_j",
    "sm_clock_mhz",
    "memory_clock_mhz",
    "throttle_reasons",
    "sm_activity_percent",
    "sm_occupancy_percent",
    "busy_percent",
    "tensor_percent",
    "dram_percent",
    "pcie_rx_bytes_per_s",
    "pcie_tx_bytes_per_s",
    "fan_percent",
    "encoder_percent",
    "decoder_percent",
    "ecc_errors",
)
COUNTERS = ("energy_j", "throttle_reasons", "ecc_errors")  # of these a mean says nothing


_TASK_NAME = re.compile(r"(?P<job>.+?)_(?P<index>\d+)\.r(?P<restart>\d+)\.(?P<node>.+?)(\.p(?P<procid>\d+))?")


_BITS_OF_BIRTH = 17

_ROCR_UUID = re.compile(r"GPU-[0-9A-Fa-f]{16}")  # the only form that ROCR_VISIBLE_DEVICES takes; amdsmi has another
_FIRST_DRIVER_WITH_MIG_UUIDS = 470


def stable_id(*parts: object) -> int:
    """Return a 47-bit number for these names: the same in every process, six bytes in SQLite.

    Task databases are written apart and joined later, so a row number would collide; these do not
    (10,000 tasks of 4 devices: one chance in 100,000).
    """
    import hashlib  # late: it carries a cryptographic library of 4 MB, and the recorder needs none of it

    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") >> 1


@dataclass(frozen=True, slots=True)
class TaskKey:
    """The name of one attempt of one array task; its file names carry it."""

    job_id: str
    array_index: int
    restart: int
    node: str
    procid: int | None = None
    # When it started. Names repeat across run folders, so the id needs it; no name says it, so keys are equal without.
    born_ms: int | None = field(default=None, compare=False)

    @property
    def name(self) -> str:
        step = "" if self.procid is None else f".p{self.procid}"
        return f"{self.job_id}_{self.array_index}.r{self.restart}.{self.node}{step}"

    @property
    def task_id(self) -> int:
        """The number of this attempt; its first bits are those of the name, so that names tell the order of ids."""
        by_name = stable_id(self.name)
        if self.born_ms is None:
            return by_name
        mask = (1 << _BITS_OF_BIRTH) - 1
        return (by_name & ~mask) | (stable_id(self.name, self.born_ms) & mask)

    @classmethod
    def parse(cls, name: str) -> TaskKey | None:
        """Return the task of this name; None when no task has such a name."""
        parts = _TASK_NAME.fullmatch(name)
        if parts is None:
            return None
        procid = None if parts["procid"] is None else int(parts["procid"])
        key = cls(parts["job"], int(parts["index"]), int(parts["restart"]), parts["node"], procid)
        return key if key.name == name else None


@dataclass(frozen=True, slots=True)
class StandIn:
    """What takes the place of this machine's devices: simulated ones, or a recording; paths are absolute."""

    simulate: int | None = None
    script: str | None = None  # TOML: how simulated devices behave
    replay: str | None = None  # a task database


@dataclass(frozen=True, slots=True)
class InventoryDevice:
    """A device that a reader found on this machine, ours or not."""

    index: int
    uuid: str
    name: str
    backend: str
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None  # where the device begins to slow down
    memory_reserved_bytes: int = 0  # what the driver keeps for itself, and nobody can have
    vendor: str = "nvidia"
    # A MIG slice has the index of its card, which is listed just before its slices.
    parent_uuid: str | None = None
    slice: str | None = None  # "<gpu instance>/<compute instance>", as in the old tokens MIG-GPU-<uuid>/gi/ci


@dataclass(frozen=True, slots=True)
class Device:
    """A device granted to this task, and how we know."""

    token: str
    why: str
    index: int | None = None
    uuid: str | None = None
    name: str | None = None
    backend: str = "none"
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    pci_bus_id: str | None = None
    driver: str | None = None
    slowdown_c: int | None = None
    memory_reserved_bytes: int = 0
    vendor: str = "nvidia"
    parent_uuid: str | None = None

    @property
    def pin(self) -> str:
        """What shows a worker this device alone: its UUID, or the token (AMD: the index) where UUIDs do not serve."""
        if self.uuid is None:
            return self.token
        if self.vendor == "amd" and not _ROCR_UUID.fullmatch(self.uuid):
            return self.token if self.index is None else str(self.index)
        if self.uuid.startswith("MIG-") and self._driver_is_older_than(_FIRST_DRIVER_WITH_MIG_UUIDS):
            return self.token
        return self.uuid

    def _driver_is_older_than(self, major: int) -> bool:
        number = (self.driver or "").partition(".")[0]
        return number.isdecimal() and int(number) < major


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """One process on one device at one instant; pids are the host's."""

    pid: int
    memory_used_bytes: int | None = None
    sm_percent: int | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """One device at one instant; None: it does not say, or was not asked this time."""

    utilization_percent: int | None = None
    memory_utilization_percent: int | None = None
    memory_used_bytes: int | None = None
    temperature_c: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle_reasons: int | None = None
    sm_activity_percent: float | None = None
    sm_occupancy_percent: float | None = None
    busy_percent: float | None = None  # share of the time since it was last given in which the device worked
    tensor_percent: float | None = None
    dram_percent: float | None = None
    pcie_rx_bytes_per_s: int | None = None
    pcie_tx_bytes_per_s: int | None = None
    fan_percent: int | None = None
    encoder_percent: int | None = None
    decoder_percent: int | None = None
    ecc_errors: int | None = None  # uncorrected, since the driver was loaded
    missing: Mapping[str, str] = field(default_factory=dict)  # metric → why the device did not give it
    sources: Mapping[str, str] = field(default_factory=dict)  # metric → where it is from, if there are several ways
    processes: tuple[ProcessReading, ...] | None = None  # None: not asked this time
    faults: tuple[str, ...] = ()  # what the device reported since the last reading: "Xid 79", …


@dataclass(frozen=True, slots=True)
class AlertLimits:
    """Where alerts begin; the fields are the keys of the table [alerts]."""

    temperature_c: float | None = None  # None: where the device slows down, else 83
    memory_percent: float = 90.0
    power_percent: float = 95.0
    idle_s: float = 300.0  # without work for so long, while work waits
    energy_percent: float = 5.0  # counter against integrated power

    def problems(self) -> list[str]:
        """Return what is wrong with these limits, a sentence each."""
        found = []
        for name, value in asdict(self).items():
            if name == "temperature_c" and value is None:
                continue
            if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
                found.append(f"{name} = {value!r} must be a number above 0")
            elif name.endswith("_percent") and value > 100:
                found.append(f"{name} = {value!r} must be at most 100")
        return found


@dataclass(frozen=True, slots=True)
class HostReading:
    """The machine around the devices at one instant."""

    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What tells that an audio file is still the one it was; None: not known."""

    audio_bytes: int | None = None
    audio_mtime_ns: int | None = None
    audio_sha256: str | None = None  # as the manifest gives it; nobody reads the audio for it


@dataclass(frozen=True, slots=True)
class Chunk:
    """One piece of audio to analyse; identity is (recording_id, chunk_id)."""

    recording_id: str
    chunk_id: str
    source_path: str  # as the source says
    audio_path: str  # where it lies
    start_ms: int = 0
    end_ms: int | None = None
    # Only from the source to the task database, where resume compares it: a worker gets its chunks without.
    fingerprint: Fingerprint = field(default=Fingerprint(), compare=False)
    piece_of: str | None = None  # the chunk_id of the chunk that this is a piece of

    @property
    def key(self) -> tuple[str, str]:
        return (self.recording_id, self.chunk_id)

    @property
    def name(self) -> str:
        return self.recording_id if self.chunk_id == self.recording_id else f"{self.recording_id}/{self.chunk_id}"

    @property
    def audio_s(self) -> float | None:
        return None if self.end_ms is None else (self.end_ms - self.start_ms) / 1000


@dataclass(frozen=True, slots=True)
class Detection:
    """Something heard; times count from the chunk's start."""

    start_ms: int
    end_ms: int
    label: str
    score: float | None
    label_name: str | None = None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """One place for an engine process: a device (or none, on the CPU) and its share of the cores."""

    slot: int
    device: Device | None
    device_id: int | None
    threads: int
    lean: bool = False  # with as little memory of the device as the engine can do with: one thread, one chunk


@dataclass(frozen=True, slots=True)
class ChunkStarted:
    """An engine has begun a chunk."""

    chunk: Chunk
    at_ms: int


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """What became of one try of one chunk."""

    chunk: Chunk
    started_at_ms: int
    ended_at_ms: int
    detections: tuple[Detection, ...] = ()
    audio_s: float | None = None
    error_class: str | None = None  # None: it worked
    error: str | None = None
    # False: lost together with others and not proven guilty; tried again in smaller company, at no charge.
    charged: bool = True
    pieces: int | None = None  # it was cut into so many; None: analysed whole

    @property
    def ok(self) -> bool:
        return self.error_class is None


@dataclass(frozen=True, slots=True)
class ArrayShape:
    """The indices of a regular job array: ``first``, ``first + step``, … (``count`` of them)."""

    first: int
    step: int
    count: int

    def position_of(self, index: int) -> int | None:
        """Return where this index stands among the array's indices, from 0; None when it is not one of them."""
        position, rest = divmod(index - self.first, self.step)
        return position if rest == 0 and 0 <= position < self.count else None

    def __str__(self) -> str:
        last = self.first + (self.count - 1) * self.step
        return f"{self.first}-{last}" + (f":{self.step}" if self.step > 1 else "")


@dataclass(frozen=True, slots=True)
class Allocation:
    """What Slurm (or nobody) gave to this process."""

    in_slurm: bool
    job_id: str
    node: str
    restart: int = 0
    array_index: int | None = None
    array_indices: tuple[int, int, int, int] | None = None  # min, max, step, count as Slurm says them
    step_tasks: int = 1
    procid: int = 0
    cpus: int | None = None
    local_dir: str | None = None
    facts: Mapping[str, str] = field(default_factory=dict)  # the variables all this was read from
    started_at_ms: int | None = None  # when this process looked; None: nobody said

    @property
    def key(self) -> TaskKey:
        procid = self.procid if self.step_tasks > 1 else None
        return TaskKey(self.job_id, self.array_index or 0, self.restart, self.node, procid, self.started_at_ms)


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

    @property
    def wall_s(self) -> float:
        return (self.last_sign_ms - self.started_at_ms) / 1000


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
class GapFacts:
    """All gaps with one reason."""

    reason: str
    metric: str | None
    gaps: int
    seconds: float
    tasks: int


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

    @property
    def complete(self) -> bool:
        return self.expected is not None and self.done == self.expected


@dataclass(frozen=True, slots=True)
class ArrayOrder:
    """A job array and its merge job, as somebody wants them; a scheduler makes them so."""

    out: Path  # absolute
    run_arguments: tuple[str, ...]  # what follows `badcjobs`: run SOURCE… --out DIR …, with absolute paths
    tasks: int
    first: int = 0
    step: int = 1
    only: tuple[int, ...] = ()  # of the array's indices just these, where a part is submitted again; empty: all
    parallel: int | None = None  # how many tasks at a time; None: as many as there is room for
    gpus_per_task: int = 1
    cpus: int | None = None  # of each task; None: whatever the site gives
    mem: str | None = None  # of each task, as sbatch takes it
    time_min: int = 720
    warning_s: int = 180  # how long before the time limit a task is told to stop in order
    requeues: int = 10  # how often a task that has stopped in order, with work left, is started again
    account: str | None = None
    partition: str | None = None
    constraint: str | None = None
    extra_sbatch: tuple[str, ...] = ()  # more options of sbatch for the array: "--qos=high"
    name: str = "badcjobs"
    setup: tuple[str, ...] = ()  # lines of shell before the work: "module load gcc cuda"
    merge_account: str | None = None  # None: as the array
    merge_mem: str = "4G"
    merge_time_min: int = 60

    @property
    def shape(self) -> ArrayShape:
        return ArrayShape(self.first, self.step, self.tasks)

    @property
    def indices(self) -> tuple[int, ...]:
        """The array indices that are submitted now."""
        return self.only or tuple(range(self.first, self.first + self.tasks * self.step, self.step))

    @property
    def spec(self) -> str:
        """What ``sbatch --array=`` takes."""
        indices = ",".join(map(str, self.only)) or str(self.shape)
        return indices if self.parallel is None else f"{indices}%{self.parallel}"

    @property
    def logs(self) -> Path:
        """Where the scheduler writes what the tasks say, and keeps its own files."""
        return self.out / "logs"


@dataclass(frozen=True, slots=True)
class Submitted:
    """An array that was handed in."""

    job_id: str
    merge_job_id: str | None  # None: there is no merge job; whoever waits merges
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class JobStates:
    """Where a submitted array stands, in Slurm's words.

    An index that is not there has ended and is forgotten; ``merge`` is None when there is no merge job, or no more.
    """

    array: Mapping[int, str]
    merge: str | None = None
