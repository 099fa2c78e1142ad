"""Facts of a job → its summary. Pure; ``badcjobs guide report`` explains every number in one line."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from badcjobs.model import CutShort, Queue
from badcjobs.model.decisions import Code
from badcjobs.report.progress import OUTDATED, SILENT, Outlook, estimate_rest, mark_lost_work, state_of
from badcjobs.store.figures import StateTime, distribution
from badcjobs.store.read_model import (
    UNKNOWN_STATE,
    AlertFacts,
    Completeness,
    DeviceFacts,
    Freshness,
    JobFacts,
    MetricFacts,
    TaskFacts,
)


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class StateSummary:
    """What all devices did in one state; None: not measured."""

    gpu_hours: float
    share_percent: float | None  # of the time of all devices
    busy_hours: float | None
    energy_wh: float | None
    energy_share_percent: float | None  # of the known energy of all devices
    measured_percent: float | None  # share of the time for which the power is known


@dataclass(frozen=True)
class Bill:
    """What a job is billed by the weights of its site, and what the same work would cost with the advised request."""

    units: float
    units_per_1000_audio_hours: float | None
    advised_units_per_1000_audio_hours: float | None  # None: what the tasks used was not measured
    advised_gpus: int  # of a task
    advised_cpus: int
    advised_mem_gb: int | None


@dataclass(frozen=True)
class Summary:
    """All numbers of a job: its facts, and what is computed from them."""

    facts: JobFacts  # each task with its state at that time
    verdict: str
    tasks_by_verdict: Mapping[str, int]
    wall_s: float
    gpu_hours: float
    states: Mapping[str, StateSummary]  # time and energy of all devices by state
    chunk_s: MetricFacts | None  # how long successful tries took
    outlook: Outlook | None  # None: nothing is left
    alerts: tuple[AlertFacts, ...]
    merged: Freshness  # whether task databases are newer
    completeness: Completeness
    findings: tuple[Finding, ...] = ()
    cut_short: CutShort | None = None  # an interrupted submit in the run folder
    place: str = ""  # the run folder or the file, for commands
    queue: Queue | None = None  # what Slurm has of the run now; None: it was not asked, or it is no run under Slurm
    bill: Bill | None = None  # None: the site has no weights, or what the tasks requested from Slurm is not known

    @property
    def tasks(self) -> int:
        """How many tasks left a database."""
        return len(self.facts.tasks)

    @property
    def tasks_without_telemetry(self) -> int:
        """How many tasks ran with telemetry off."""
        return sum(not task.telemetry for task in self.facts.tasks)

    @property
    def devices(self) -> tuple[DeviceFacts, ...]:
        """The devices of all tasks."""
        return self.facts.devices

    @property
    def started_at_ms(self) -> int | None:
        """The start of the first task."""
        return min((task.started_at_ms for task in self.facts.tasks), default=None)

    @property
    def last_sign_ms(self) -> int | None:
        """The last sign of any task."""
        return max((task.last_sign_ms for task in self.facts.tasks), default=None)

    # --- chunks

    @property
    def chunks(self) -> int:
        """The chunks that tasks have listed."""
        return sum(self.facts.chunks.values())

    @property
    def done(self) -> int:
        """The chunks that are done."""
        return self.facts.chunks.get("done", 0)

    @property
    def failed(self) -> int:
        """The chunks that failed for good or were given up."""
        return self.facts.chunks.get("failed", 0) + self.facts.chunks.get("poison", 0)

    @property
    def left(self) -> int:
        """The chunks that are not done yet."""
        return self.facts.chunks.get("pending", 0)

    @property
    def skipped(self) -> int:
        """The chunks that are done elsewhere: their results are in another file."""
        return self.facts.chunks.get("skipped", 0)

    @property
    def detections(self) -> int:
        """The detections of all labels."""
        return sum(many for _, _, many in self.facts.labels)

    @property
    def left_out(self) -> dict[str, int]:
        """Files of the source that are not audio by their ending → number; every task counts the whole source."""
        decisions = [decision for decision in self.facts.decisions if decision.code == Code.LEFT_OUT]
        return {decision.subject or "": decision.figures.get("files", 0) for decision in decisions}

    # --- speed

    @property
    def audio_hours(self) -> float:
        """The audio in the chunks that are done."""
        return self.facts.audio_done_s / 3600

    @property
    def audio_hours_on_cpu(self) -> float:
        """The part of it that was analysed without a GPU."""
        return self.facts.cpu_audio_s / 3600

    @property
    def audio_hours_per_gpu_hour(self) -> float | None:
        """How much audio a GPU analyses in an hour."""
        return ratio(self.audio_hours - self.audio_hours_on_cpu, self.gpu_hours)

    @property
    def times_real_time(self) -> float | None:
        """The audio done over the time in which at least one task was running."""
        return ratio(self.facts.audio_done_s, self.wall_s)

    @property
    def devices_at_once(self) -> float | None:
        """The devices in use, on average, while at least one task was running."""
        return ratio(self.gpu_hours * 3600, self.wall_s)

    # --- energy

    @property
    def metered(self) -> list[DeviceFacts]:
        """The devices whose energy is known."""
        return [device for device in self.devices if device.energy_j is not None]

    @property
    def energy_wh(self) -> float | None:
        """The energy of all devices that report it."""
        energy_j = sum(device.energy_j or 0.0 for device in self.metered)
        return energy_j / 3600 if self.metered else None

    @property
    def energy_measured_percent(self) -> float | None:
        """The share of the GPU time with known energy; None: no energy is known."""
        if not self.metered:
            return None
        gpu_s = self.gpu_hours * 3600
        measured_s = sum(device.energy_measured_s for device in self.metered)
        return ratio(100 * min(measured_s, gpu_s), gpu_s)  # rounding must not make it more

    @property
    def kwh_per_1000_audio_hours(self) -> float | None:
        """The energy per audio; devices without energy readings, and their audio, are left out."""
        if self.energy_wh is None:
            return None
        audio_s = sum(device.work.audio_s for device in self.metered)
        if len(self.metered) == len(self.devices):
            audio_s = self.facts.audio_done_s - self.facts.cpu_audio_s
        return ratio(3600 * self.energy_wh, audio_s)  # J per s is kWh per 1,000 h


def describe_chunks(facts: JobFacts, states: Mapping[str, int] | None = None) -> Completeness:
    """Return how far a job is, from the states of the rows of its source; None: of the chunks in its database."""
    if states is None:
        states = facts.chunks
    return Completeness(
        listed=sum(facts.chunks.values()),
        done=states.get("done", 0),
        failed=states.get("failed", 0),
        poison=states.get("poison", 0),
        pending=states.get("pending", 0),
        elsewhere=states.get("skipped", 0),
    )


def summarize(job: JobFacts, completeness: Completeness | None = None, now_ms: int | None = None) -> Summary:
    """Compute the summary of a job; ``completeness`` None: its sources are not known.

    ``now_ms`` decides which tasks without an end are running and which are silent; None: all are running.
    """
    completeness = completeness or describe_chunks(job)
    tasks = tuple(replace(task, state=state_of(task, now_ms)) for task in job.tasks)
    job = mark_lost_work(replace(job, tasks=tasks))
    by_verdict = Counter(task.state for task in tasks)
    gpu_s = sum(task.gpu_s for task in job.tasks)
    wall_s = running_s(job.tasks)
    states = add_up_states(job.devices, gpu_s)
    return Summary(
        facts=job,
        verdict=_verdict(job, by_verdict, completeness),
        tasks_by_verdict=dict(by_verdict),
        wall_s=wall_s,
        gpu_hours=gpu_s / 3600,
        states=states,
        chunk_s=_durations(job),
        outlook=estimate_rest(job, completeness, gpu_s, wall_s, now_ms),
        alerts=_alerts(job),
        merged=job.merged,
        completeness=completeness,
    )


def _verdict(job: JobFacts, by_verdict: Counter[str], completeness: Completeness) -> str:
    """Return stopped if work is left, failed if some of it failed, else done."""
    if completeness.missing_indices or completeness.unmerged_indices or completeness.not_listed:
        return "stopped"

    if job.chunks:
        # A chunk that was skipped because it was done elsewhere is not done here: its results are in another file.
        unfinished = bool(job.chunks.get("pending") or job.chunks.get("skipped"))
        failed = bool(job.chunks.get("failed") or job.chunks.get("poison"))
    else:  # a recording, or no task has listed its chunks: the ends of the tasks decide
        unfinished = bool(by_verdict.keys() - {"done", "failed"})
        failed = bool(by_verdict["failed"])
    if unfinished:
        return "stopped"
    return "failed" if failed else "done"


def _durations(job: JobFacts) -> MetricFacts | None:
    if not job.durations:
        return None
    return MetricFacts(*distribution({ms / 1000: tries for ms, tries in job.durations.items()}))


def _alerts(job: JobFacts) -> tuple[AlertFacts, ...]:
    """Return the alerts; those of a task that is no longer running, though it has not ended, are not open."""
    stopped = [task for task in job.tasks if task.state in (SILENT, OUTDATED)]
    over = Counter(alert.kind for task in stopped for alert in task.alerts if alert.is_open)
    return tuple(replace(alert, still_open=alert.still_open - over[alert.kind]) for alert in job.alerts)


def running_s(tasks: Sequence[TaskFacts]) -> float:
    """Return for how long at least one task was running; time between two submissions does not count."""
    total_ms = 0
    until_ms = 0
    for start_ms, end_ms in sorted((task.started_at_ms, task.last_sign_ms) for task in tasks):
        total_ms += max(0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms / 1000


def chunk_name(recording_id: str, chunk_id: str) -> str:
    """Return the name of a chunk; a whole recording has one chunk with its own name."""
    if recording_id == chunk_id:
        return recording_id
    return f"{recording_id} {chunk_id}"


def ratio(over: float, under: float) -> float | None:
    """Return a ratio; None if the divisor is 0."""
    return over / under if under > 0 else None


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
    totals: dict[str, StateTime] = defaultdict(StateTime)
    for device in devices:
        for state, time in device.states.items():
            totals[state] = totals[state].plus(replace(time, energy_j=None))
        for state, energy_j in device.state_energy_j.items():
            totals[state] = totals[state].plus(StateTime(energy_j=energy_j))
    missing_s = gpu_s - sum(time.total_s for time in totals.values())
    if missing_s > _ROUNDING_S:
        totals[UNKNOWN_STATE] = totals[UNKNOWN_STATE].plus(StateTime(missing_s))

    total_s = sum(time.total_s for time in totals.values())
    total_j = sum(time.energy_j or 0.0 for time in totals.values())
    summaries = {}
    for state in STATE_WORDS:
        time = totals[state]
        if not time.total_s and time.energy_j is None:
            continue
        summaries[state] = StateSummary(
            gpu_hours=time.total_s / 3600,
            share_percent=ratio(100 * time.total_s, total_s),
            busy_hours=time.busy_s and time.busy_s / 3600,
            energy_wh=time.energy_j and time.energy_j / 3600,
            energy_share_percent=time.energy_j and ratio(100 * time.energy_j, total_j),
            measured_percent=ratio(100 * min(time.measured_s, time.total_s), time.total_s),
        )
    return summaries


def count_devices(devices: Iterable[DeviceFacts]) -> int:
    """Return how many different devices these are."""
    return len({device.card for device in devices})
