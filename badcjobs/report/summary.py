"""Facts of a job → its summary. Pure; ``badcjobs guide report`` explains every number in one line."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from typing import Any

from badcjobs.model import CutShort, Queue, load_word, not_none
from badcjobs.report.progress import OUTDATED, RUNNING, SILENT, Outlook, estimate_rest, mark_lost_work, state_of
from badcjobs.report.words import count
from badcjobs.sources.mistakes import LEFT_OUT
from badcjobs.store.figures import distribution
from badcjobs.store.read_model import (
    UNKNOWN_STATE,
    AlertFacts,
    Completeness,
    CostFacts,
    DeviceFacts,
    Freshness,
    JobFacts,
    MetricFacts,
    TaskFacts,
)

_TASK_FIELDS = tuple(one.name for one in fields(TaskFacts))
TASK_KEYS = _TASK_FIELDS[: _TASK_FIELDS.index("changed") + 1]  # those that the JSON document has

SUMMARY_VERSION = 2  # 2: states, outlook, chunk_cost, findings, … were added
# The keys of the JSON document in their order, and those with another name in JobFacts.
KEYS = (
    "version", "verdict", "tasks", "tasks_by_verdict", "tasks_missing", "tasks_without_telemetry", "chunks", "done",
    "failed", "left", "skipped", "tries", "conflicts", "audio_hours", "chunks_of_unknown_length", "wall_s", "gpu_hours",
    "audio_hours_per_gpu_hour", "times_real_time", "energy_wh", "energy_devices", "detections", "task_list", "devices",
    "gaps", "labels", "failed_chunks", "file_remarks", "lossy_files", "completeness", "started_at_ms", "last_sign_ms",
    "devices_at_once", "kwh_per_1000_audio_hours", "states", "chunk_s", "chunk_cost", "tries_on_cpu",
    "audio_hours_on_cpu", "outlook", "findings", "alerts", "errors", "settings", "energy_measured_percent",
    "recording_names", "left_out", "tasks_silent", "merged", "cut_short", "queue", "bill", "overview",
)  # fmt: skip
_OF_FACTS = {
    "task_list": "tasks", "failed_chunks": "failed", "settings": "last_settings", "tries_on_cpu": "cpu_tries",
    "chunks_of_unknown_length": "done_of_unknown_length",
}  # fmt: skip
# The keys of a device in the JSON document, in their order; see _device for those that DeviceFacts does not have.
DEVICE_KEYS = (
    "task", "node", "index", "uuid", "token", "name", "backend", "samples", "busy_mean_percent",
    "utilization_mean_percent", "utilization_p50_percent", "utilization_p95_percent", "utilization_max_percent",
    "memory_peak_bytes", "memory_total_bytes", "temperature_max_c", "power_mean_w", "energy_j", "energy_source",
    "gap_s", "power_limit_w", "metrics", "state_s", "state_busy_s", "state_energy_j", "state_measured_s",
    "energy_measured_s", "throttled", "workers", "tries_done", "tries_failed", "tries_lost", "audio_hours",
    "chunk_p50_s", "chunk_p95_s", "chunk_max_s", "spark", "last", "load",
)  # fmt: skip
_METRICS = ("utilization_percent", "busy_percent", "memory_used_bytes", "temperature_c", "power_w")


@dataclass(frozen=True, slots=True)
class Finding:
    """One statement about a job, always with numbers."""

    kind: str  # a stable name for scripts: unused_gpus, start_up, waiting_for_audio, …
    severity: str
    sentence: str
    evidence: tuple[str, ...]  # one figure each: "busy 12 % of 3.4 GPU-hours"
    advice: str
    lines: tuple[str, ...] = ()  # to paste: #SBATCH lines, commands
    subjects: tuple[str, ...] = ()  # the tasks, devices, nodes or chunks concerned
    gpu_hours: float | None = None  # what it cost; None: not measurable in GPU time


@dataclass(frozen=True, slots=True)
class StateSummary:
    """What all devices did in one state; None: not measured."""

    gpu_hours: float
    share_percent: float | None  # of the time of all devices
    busy_hours: float | None
    energy_wh: float | None
    energy_share_percent: float | None  # of the known energy of all devices
    measured_percent: float | None = None  # share of the time for which the power is known


@dataclass(frozen=True, slots=True)
class Bill:
    """What a job is billed by the weights of its site, and what the same work would cost with the advised request."""

    units: float | None = None
    units_per_1000_audio_hours: float | None = None
    advised_units_per_1000_audio_hours: float | None = None  # None: what the tasks used was not measured
    advised_gpus: int | None = None  # of a task
    advised_cpus: int | None = None
    advised_mem_gb: int | None = None
    why_unknown: str | None = None  # then nothing else is known


class _Streamed(list[Any]):
    """A list of a JSON document whose items are made one by one, while they are written."""

    def __init__(self, make: Callable[[Any], Any], things: Sequence[Any]) -> None:
        super().__init__()
        self._make, self._things = make, things

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._things)

    def __len__(self) -> int:
        return len(self._things)


@dataclass(frozen=True, slots=True)
class Summary:
    """All numbers of a job: its facts, and what is computed from them."""

    facts: JobFacts
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
    devices: tuple[DeviceFacts, ...]
    completeness: Completeness | None = None  # None: the job was not compared with its source
    started_at_ms: int | None = None  # the first task
    last_sign_ms: int | None = None  # of any task
    devices_at_once: float | None = None  # on average, while at least one task was running
    kwh_per_1000_audio_hours: float | None = None
    states: Mapping[str, StateSummary] = field(default_factory=dict)  # time and energy of all devices by state
    chunk_s: MetricFacts | None = None  # how long successful tries took
    chunk_cost: CostFacts = field(default_factory=CostFacts)  # what a successful try cost
    audio_hours_on_cpu: float = 0.0
    outlook: Outlook | None = None  # None: nothing is left
    findings: tuple[Finding, ...] = ()
    alerts: tuple[AlertFacts, ...] = ()
    energy_measured_percent: float | None = None  # of the GPU time; None: no energy is known
    tasks_silent: tuple[str, ...] = ()  # names of tasks that have not ended and no longer update their database
    tasks_running: Collection[str] = ()  # names; a set
    merged: Freshness = field(default_factory=Freshness)  # whether task databases are newer
    cut_short: CutShort | None = None  # an interrupted submit in the run folder
    place: str = ""  # the run folder or the file, for commands
    queue: Queue | None = None  # what Slurm has of the run now; None: it was not asked, or it is no run under Slurm
    bill: Bill | None = None  # None: the site has no weights, or no task had a GPU of Slurm

    @property
    def left_out(self) -> dict[str, int]:
        """Files of the source that are not audio by their ending → number; every task counts the whole source."""
        return {d.subject or "": int(d.value or 0) for d in self.facts.decisions if d.kind == LEFT_OUT}

    def to_dict(self, *, streamed: bool = False) -> dict[str, Any]:
        """Return the document of ``badcjobs merge --json``; a number that is not finite is null.

        ``streamed``: to be written once; its long lists take no memory.
        """
        from badcjobs.report.verdict import verdict_of  # which needs this module

        own = {one.name: getattr(self, one.name) for one in fields(self)}
        own |= {"version": SUMMARY_VERSION, "left_out": self.left_out, "overview": verdict_of(self).to_dict()}
        document = {key: own[key] if key in own else getattr(self.facts, _OF_FACTS.get(key, key)) for key in KEYS}
        document |= {"task_list": None, "devices": None}
        if self.completeness is not None:
            document["completeness"] = {**asdict(self.completeness), "complete": self.completeness.complete}
        lists = {"task_list": _Streamed(_task, self.facts.tasks), "devices": _Streamed(_device, self.devices)}
        return {**finite(document), **{key: some if streamed else list(some) for key, some in lists.items()}}


def _task(task: TaskFacts) -> Any:
    return finite({key: getattr(task, key) for key in TASK_KEYS})


def _device(device: DeviceFacts) -> Any:
    """Return a device for the JSON document: DEVICE_KEYS."""
    work, load = device.work, device.metrics.get("utilization_percent")
    others = {
        "utilization_p50_percent": load and int(load.p50),
        "utilization_p95_percent": load and int(load.p95),
        "utilization_max_percent": load and int(load.maximum),
        "load": load_word(device.utilization_mean_percent),
        "metrics": {name: asdict(device.metrics[name]) for name in _METRICS if name in device.metrics},
        "state_busy_s": {state: time.busy_s for state, time in device.states.items() if time.busy_s is not None},
        "state_measured_s": device.measured_s,
        "throttled": device.held_back,
        "tries_done": work.done,
        "tries_failed": work.failed,
        "tries_lost": work.lost,
        "audio_hours": work.audio_s / 3600,
        **{key: getattr(work, key) for key in ("workers", "chunk_p50_s", "chunk_p95_s", "chunk_max_s")},
    }
    return finite({key: others[key] if key in others else getattr(device, key) for key in DEVICE_KEYS})


def summarize(
    job: JobFacts,
    missing_indices: Sequence[int] = (),
    completeness: Completeness | None = None,
    now_ms: int | None = None,
) -> Summary:
    """Compute the summary of a job; ``missing_indices`` are array tasks that left no database.

    ``now_ms`` decides which tasks without an end are running and which are silent; None: all are running.
    """
    task_states = [(task.name, state_of(task, now_ms)) for task in job.tasks]
    silent = tuple(name for name, state in task_states if state == SILENT)
    late = {name for name, state in task_states if state in (SILENT, OUTDATED)}
    over = Counter(alert.kind for task in job.tasks if task.name in late for alert in task.alerts if alert.is_open)
    job = mark_lost_work(job, silent)
    energies = not_none(device.energy_j for device in job.devices)
    gpu_s, wall_s = sum(task.gpu_s for task in job.tasks), running_s(job.tasks)
    all_said = len(energies) == len(job.devices)
    on_gpus_s = job.audio_done_s - job.cpu_audio_s
    audio_s = on_gpus_s if all_said else sum(d.work.audio_s for d in job.devices if d.energy_j is not None)
    measured = ratio(sum(device.energy_measured_s for device in job.devices), gpu_s)
    left, skipped = job.chunks.get("pending", 0), job.chunks.get("skipped", 0)
    failed = job.chunks.get("failed", 0) + job.chunks.get("poison", 0)
    not_here = completeness is not None and bool(completeness.not_listed or completeness.unmerged_indices)
    by_verdict = Counter(state for _, state in task_states)
    # A chunk that was skipped because it was done elsewhere is not done here: its results are in another file.
    unfinished, bad = bool(left or skipped or missing_indices or not_here), failed
    if not job.chunks:  # a recording, or no task has listed its chunks: the ends of the tasks decide
        unfinished, bad = unfinished or bool(by_verdict.keys() - {"done", "failed"}), by_verdict["failed"]
    states = add_up_states(job.devices, gpu_s)
    return Summary(
        facts=job,
        verdict="stopped" if unfinished else "failed" if bad else "done",
        tasks=len(job.tasks),
        tasks_by_verdict=dict(by_verdict),
        tasks_missing=tuple(missing_indices),
        tasks_without_telemetry=sum(not task.telemetry for task in job.tasks),
        chunks=sum(job.chunks.values()),
        done=job.chunks.get("done", 0),
        failed=failed,
        left=left,
        skipped=skipped,
        audio_hours=job.audio_done_s / 3600,
        wall_s=wall_s,
        gpu_hours=gpu_s / 3600,
        audio_hours_per_gpu_hour=ratio(on_gpus_s, gpu_s),
        times_real_time=ratio(job.audio_done_s, wall_s),
        energy_wh=sum(energies) / 3600 if energies else None,
        energy_devices=len(energies),
        detections=sum(count for _, _, count in job.labels),
        devices=job.devices,
        completeness=completeness,
        started_at_ms=min((task.started_at_ms for task in job.tasks), default=None),
        last_sign_ms=max((task.last_sign_ms for task in job.tasks), default=None),
        devices_at_once=ratio(gpu_s, wall_s),
        # Wh per hour are kWh per 1,000 hours; devices without energy readings, and their audio, are left out.
        kwh_per_1000_audio_hours=ratio(sum(energies), audio_s) if energies else None,
        states=states,
        chunk_s=MetricFacts(*distribution({ms / 1000: many for ms, many in job.durations.items()}))
        if job.durations
        else None,
        chunk_cost=_cost(job, states),
        audio_hours_on_cpu=job.cpu_audio_s / 3600,
        outlook=estimate_rest(job, completeness, gpu_s, wall_s, now_ms),
        # Alerts of a task that is no longer running are not open.
        alerts=tuple(replace(alert, still_open=alert.still_open - over[alert.kind]) for alert in job.alerts),
        # Rounding must not make it more than 100 %.
        energy_measured_percent=100 * min(1.0, measured) if energies and measured is not None else None,
        tasks_silent=silent,
        tasks_running=frozenset(name for name, state in task_states if state == RUNNING),
        merged=job.merged,
    )


def _cost(job: JobFacts, states: Mapping[str, StateSummary]) -> CostFacts:
    """Return what a chunk cost, with joules that agree with those of the states.

    The joules of a try come from power readings; where the counter of the device is more exact, it corrects them.
    """
    measured = [device.states["working"].energy_j for device in job.devices if "working" in device.states]
    measured_j = sum(not_none(measured))
    chosen_wh = states["working"].energy_wh if "working" in states else None
    if not measured_j or chosen_wh is None:
        return job.cost
    factor = chosen_wh * 3600 / measured_j
    energies = ("energy_j_mean", "energy_j_p50", "energy_j_p95", "energy_j_max")
    known = {name: getattr(job.cost, name) for name in energies}
    return replace(job.cost, **{name: joules * factor for name, joules in known.items() if joules is not None})


def running_s(tasks: Sequence[TaskFacts]) -> float:
    """Return for how long at least one task was running; time between two submissions does not count."""
    total_ms, until_ms = 0, 0
    for start_ms, end_ms in sorted((task.started_at_ms, task.last_sign_ms) for task in tasks):
        total_ms += max(0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms / 1000


def ratio(over: float, under: float) -> float | None:
    """Return a ratio; None if the divisor is 0."""
    return over / under if under > 0 else None


def finite(value: Any) -> Any:
    """Return a JSON value: data classes as objects; NaN and infinities as null."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(finite(item) for item in value)
    return value


# --- all devices together ---------------------------------------------------------------------------------------------

# State in the table device_time → its name for people.
STATE_WORDS = {
    "working": "working",
    "failed": "on failed chunks",
    "lost": "on lost work",
    "start_up": "starting up",
    "waiting": "waiting for a chunk",
    "idle": "without a worker",
    UNKNOWN_STATE: "not known",
}
NEARLY_ALL = 99.0  # percent: if less was measured, the report says so
_ROUNDING_S = 1.0


def add_up_states(devices: Sequence[DeviceFacts], gpu_s: float) -> dict[str, StateSummary]:
    """Return the states of all devices together; time that is missing in all states is in the state unknown."""
    energies = [device.state_energy_j for device in devices]
    total_s, total_j = sum(device.total_s for device in devices), sum(sum(one.values()) for one in energies)
    missing_s = gpu_s - total_s if gpu_s - total_s > _ROUNDING_S else 0.0
    found = {}
    for state in STATE_WORDS:
        times = [device.states[state] for device in devices if state in device.states]
        seconds = sum(time.total_s for time in times) + (missing_s if state == UNKNOWN_STATE else 0.0)
        busy_s = not_none(time.busy_s for time in times)
        joules = [one[state] for one in energies if state in one]
        if seconds > 0 or joules:
            measured = ratio(sum(time.measured_s for time in times), seconds)
            found[state] = StateSummary(
                gpu_hours=seconds / 3600,
                share_percent=None if total_s + missing_s <= 0 else 100 * seconds / (total_s + missing_s),
                busy_hours=sum(busy_s) / 3600 if busy_s else None,
                energy_wh=sum(joules) / 3600 if joules else None,
                energy_share_percent=100 * sum(joules) / total_j if joules and total_j else None,
                measured_percent=measured and 100 * min(1.0, measured),
            )
    return found


def count_devices(devices: Iterable[DeviceFacts]) -> int:
    """Return how many different devices these are."""
    return len({device.card for device in devices})


def devices_words(devices: Collection[DeviceFacts], one: str = "device") -> str:
    """Return the number of devices; if one served several tasks, it counts once per task and the text says so."""
    return count(len(devices), one) + ("" if count_devices(devices) == len(devices) else " (counted once per task)")
