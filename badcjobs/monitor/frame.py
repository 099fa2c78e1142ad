"""The nouns of one live view: what tasks, devices and alerts look like at one moment. None is what nobody knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from badcjobs.model import Reading

# From what needs a look to what does not.
STATES = ("killed", "failed", "silent", "stopped", "unbegun", "running", "waiting", "done")
ALIVE = ("running", "silent")
_THINNED = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w")  # what a trail has
_OF_A_READING = ("missing", "sources", "processes", "faults")  # told elsewhere, or of no use a moment later


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
        return Reading(**{metric: _mean(getattr(self, metric)) for metric in _THINNED}) if self.step_ms else None


@dataclass(frozen=True, slots=True)
class ProcessLine:
    """A process on a device of this machine."""

    pid: int
    program: str | None
    user: str | None
    memory_used_bytes: int | None


@dataclass(frozen=True, slots=True)
class DeviceLine:
    """One device of one task, or of this machine."""

    node: str
    index: int | None
    uuid: str | None
    token: str | None
    name: str | None
    backend: str
    task: str | None = None  # the name of the task that has it; None: of this machine
    alive: bool = True  # its task runs; False: these are the last readings of a task that has ended or is silent
    memory_total_bytes: int | None = None
    power_limit_w: float | None = None
    read_at_ms: int | None = None
    reading: Reading = field(default_factory=Reading)
    trail: Trail = field(default_factory=Trail)
    means: Reading | None = None  # over the time of its task, once that has ended or is silent
    chunks: tuple[str, ...] = ()  # begun and not ended
    chunks_done: int | None = None
    audio_done_s: float | None = None
    rate: float | None = None  # seconds of audio per second since its task began
    processes: tuple[ProcessLine, ...] | None = None  # None: not told
    trouble: str | None = None  # why it gives no reading now

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

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON; a metric that is not known is null."""
        values = asdict(self)
        reading = {name: value for name, value in values.pop("reading").items() if name not in _OF_A_READING}
        means = values.pop("means") and {metric: getattr(self.means, metric) for metric in _THINNED}
        return {**values, "reading": reading, "means": means, "memory_percent": self.memory_percent}


@dataclass(frozen=True, slots=True)
class TaskLine:
    """The newest attempt of one array task.

    ``waiting``: nothing was heard of it yet; ``unbegun``: nothing will be, the emulation that was to start it is over.
    """

    name: str
    job_id: str
    array_index: int
    state: str  # one of STATES
    procid: int | None = None
    restart: int = 0
    node: str | None = None
    engine: str | None = None
    devices: int | None = None
    workers: int | None = None
    shard_index: int | None = None
    shard_count: int | None = None
    exit_code: int | None = None
    started_at_ms: int | None = None
    ended_at_ms: int | None = None
    heard_at_ms: int | None = None  # when it was last heard of
    silent_after_s: float | None = None  # without a word for longer than this it counts as silent
    done: int = 0  # in this attempt
    failed: int = 0  # for good, in this attempt or before it
    before: int = 0  # done before this attempt
    pending: int = 0
    audio_done_s: float = 0.0  # in this attempt
    rate: float | None = None  # seconds of audio per second
    chunks_per_s: float | None = None
    ends_at_ms: int | None = None  # when its last chunk will be done, at the pace so far
    working_on: tuple[str, ...] = ()  # chunks begun and not ended, on whatever device
    cpu_percent: float | None = None  # of its machine
    memory_used_bytes: int | None = None  # of its machine
    memory_percent: float | None = None  # of its machine

    @property
    def label(self) -> str:
        """What people call it: 4821_7."""
        step = "" if self.procid is None else f".p{self.procid}"
        of = f"{self.job_id}_" if self.job_id else ""  # nobody knows the job's number before its first task
        return f"{of}{self.array_index}{step}"

    @property
    def begun(self) -> bool:
        """Whether anything was heard of it since it was handed in."""
        return self.state not in ("waiting", "unbegun")

    @property
    def alive(self) -> bool:
        """Whether it goes on, as far as we know."""
        return self.state in ALIVE

    @property
    def chunks(self) -> int:
        """How many chunks its part of the source has."""
        return self.done + self.failed + self.before + self.pending

    @property
    def settled(self) -> int:
        """How many of them need nothing more."""
        return self.done + self.failed + self.before

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "label": self.label, "chunks": self.chunks, "settled": self.settled}


@dataclass(frozen=True, slots=True)
class AlertLine:
    """Trouble that goes on now."""

    kind: str
    severity: str
    message: str
    node: str
    started_at_ms: int
    task: str | None = None
    device_index: int | None = None
    device_uuid: str | None = None
    peak: float | None = None
    threshold: float | None = None


@dataclass(frozen=True, slots=True)
class Total:
    """All of it together."""

    states: Mapping[str, int] = field(default_factory=dict)  # state → array tasks
    devices: int = 0  # of tasks that run; of this machine, all
    chunks: int | None = None  # of the source where that is known, else those that are listed; None: no work here
    chunks_known: bool = False  # whether ``chunks`` is the whole source
    parts: int | None = None  # into which tasks cut the source; None: nobody knows, or it is whole
    parts_listed: int = 0  # those that some task has listed
    done: int = 0
    failed: int = 0
    audio_done_s: float = 0.0
    rate: float | None = None  # seconds of audio per second, of the tasks that run
    ends_at_ms: int | None = None
    ended_at_ms: int | None = None  # when the last task ended; None: some go on, wait, or none has begun
    ran_s: float = 0.0  # for how long at least one task was running
    speed: float | None = None  # audio done over that time: × real time
    standstill: str | None = None  # work is left and nobody is at it
    go_on: tuple[str, ...] = ()  # commands, each of which goes on with it
    utilization_percent: float | None = None  # mean over the devices that say it
    power_w: float | None = None  # sum over the devices that say it

    @property
    def settled(self) -> int:
        """How many chunks need nothing more."""
        return self.done + self.failed

    @property
    def source_chunks(self) -> int | None:
        """How many chunks the whole source has; about, while not all parts are listed. None: nobody knows."""
        return self.chunks if self.chunks_known else self.chunks_in(self.parts or 0) or None

    def chunks_in(self, parts: int) -> int:
        """Return about how many chunks so many parts have: those that are not listed count as equally large."""
        return round((self.chunks or 0) * parts / self.parts_listed) if self.parts_listed else 0

    @property
    def share(self) -> float | None:
        """How far it is, from 0 to 1; about, while not all parts are listed: the others count as equally large."""
        if not self.chunks:
            return None
        share = self.settled / self.chunks
        return share if self.chunks_known or not self.parts else share * self.parts_listed / self.parts

    def to_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return {**asdict(self), "source_chunks": self.source_chunks, "settled": self.settled, "share": self.share}


@dataclass(frozen=True, slots=True)
class Frame:
    """One live view."""

    at_ms: int
    title: str
    of_run: bool  # False: of this machine
    tasks: tuple[TaskLine, ...] = ()
    devices: tuple[DeviceLine, ...] = ()
    alerts: tuple[AlertLine, ...] = ()
    total: Total = field(default_factory=Total)
    remarks: tuple[str, ...] = ()  # what could not be read, and why
    unread: int = 0  # files that there was no time for yet, never

    def eta_s(self, ends_at_ms: int | None) -> float | None:
        """Return the seconds from this frame to a moment."""
        return None if ends_at_ms is None else max(0.0, (ends_at_ms - self.at_ms) / 1000)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs monitor --once --json``."""
        total = {**self.total.to_dict(), "eta_s": self.eta_s(self.total.ends_at_ms)}
        return {
            "version": 1,
            "at_ms": self.at_ms,
            "title": self.title,
            "of_run": self.of_run,
            "total": total,
            "tasks": [{**task.to_dict(), "eta_s": self.eta_s(task.ends_at_ms)} for task in self.tasks],
            "devices": [device.to_dict() for device in self.devices],
            "alerts": [asdict(alert) for alert in self.alerts],
            "remarks": list(self.remarks),
            "unread": self.unread,
        }


def _mean(values: Sequence[int | None]) -> Any:
    known = [value for value in values if value is not None]
    return round(sum(known) / len(known)) if known else None
