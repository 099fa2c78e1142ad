"""The number of workers of a task: planned at its start; ``--workers-per-gpu auto`` measures and corrects it.

The first guess is one worker per core, as many as the memory holds. All devices of a task change at the same time,
because they share the cores, which run out first, and the main memory. The estimate for n workers is n times the mean
of those at work.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from badcjobs.model import Device, MemoryHeld, WorkerPlan, advised_gb, fitting_workers, guess_worker_bytes
from badcjobs.seams import Clock
from badcjobs.workers.learned import Learned
from badcjobs.workers.mps import ONLY_ONE
from badcjobs.workers.supervise import Supervisor

log = logging.getLogger(__name__)

_UNKNOWN_CORES = 4  # for each worker of an engine that is not ours, at the start
_DEVICE_BYTES = 2 * 2**30  # device memory of HawkEars with one thread, plus a quarter
_MOST = 48  # clients of CUDA MPS on one device
_PAYS = 1.05  # a smaller gain is not worth the memory
_TIGHT = 0.95  # of the main memory: a job that uses all is killed
_WINDOW_S = 5.0
_WINDOW_CHUNKS = 4  # per worker
_WORTH_S = 60.0  # with less work left than this, starting a worker costs more than it gains
_WORTH_FEWER_S = 300.0  # and fewer are not tried
_STEADY, _APART_S = 1.05, 4.0  # growth between two readings, and their distance: the memory of a new worker grows
_EVERY_S = 1.0
_DYING_S = 30.0  # the workers of a lost device do not all end at the same moment
_TRY, _STAY, _BEST = "try", "stay", "best"


@dataclass(eq=False)
class Autoscaler:
    """Plans the workers of a task, then (with auto) measures them and changes their number."""

    devices: Sequence[tuple[int, Device]]  # the devices that get work, each with its device_id
    learned: Learned
    note: Callable[[str, str | None, float | None, str], None]  # gets kind, subject, value, reason
    clock: Clock
    _: KW_ONLY
    cpus: int
    per_gpu: int | None  # workers on each device; None: auto
    cpu_workers: int = 0  # workers where there is no device; they do not add to the workers of devices
    granted_bytes: int | None = None  # main memory of the task; None: no known limit
    chunk_s: float | None = None  # the longest chunk; None: not known
    exclusive: bool = False  # only one process may use a device
    cores_each: int | None = None  # cores that a worker of this engine keeps busy; None: not known, so start with few
    memory_peaks: Callable[[float], dict[int, int]] = lambda last_s: {}  # by device_id, over the last seconds
    memory_held: Callable[[], MemoryHeld | None] = lambda: None  # main memory of our processes; None: not known
    _settled: bool = False  # no other number is tried any more
    _before: int | None = None  # the number before the one that is tried
    _rates: dict[int, float] = field(default_factory=dict)  # workers → seconds of audio (or chunks) per second
    _window: tuple[float, float, int] | None = None  # when it began, work and chunks done by then
    _held: list[MemoryHeld] = field(default_factory=list)  # main memory, since the window began
    _next_s: float = 0.0
    _retired_s: float = 0.0  # when a retired worker was last seen
    _worker_bytes: int = 0  # main memory of a worker; 0: not read
    _device_bytes: int = 0  # the same on its device
    _short_since_s: float | None = None  # since when there are fewer workers than planned
    _memory_errors: int = 0  # chunks that had run out of memory when a worker was last retired

    def __post_init__(self) -> None:
        self._memory_bytes = min((d.memory_total_bytes for _, d in self.devices if d.memory_total_bytes), default=None)
        self._cores = max(1, self.cpus // max(1, len(self.devices)))  # per device
        most = 1 if self.exclusive else max(1, self._cores // (self.cores_each or 1))
        self._most = min(most, _MOST)  # that auto may choose
        self.most_per_device = self.per_gpu or self._most
        self._model = next((device.name for _, device in self.devices if device.name), "unknown")
        length = "unknown length" if self.chunk_s is None else f"{max(10, round(self.chunk_s, -1)):.0f} s"
        self._subject = f"{self._model}, {self._cores} cores, chunks of {length}"  # of what is learned
        self._workers = self.per_gpu or 1  # per device, now
        if self.per_gpu is None and self.devices:
            self._choose_start()
        elif self.per_gpu is None and self.cpu_workers:
            log.info("workers per device: there is no device; workers on the CPU, as requested: %d", self.cpu_workers)
        places: list[tuple[int | None, Device | None]] = [one for one in self.devices for _ in range(self._workers)]
        places = places or [(None, None)] * self.cpu_workers
        share = max(1, self.cpus // max(1, len(places)))
        threads = self._threads if self.devices and not self.per_gpu else share
        self.plans = [WorkerPlan(slot, one, device_id, threads) for slot, (device_id, one) in enumerate(places)]
        self._slots = len(self.plans)
        each = self.learned.about(self._subject).worker_bytes or guess_worker_bytes(self.chunk_s)
        if self.cores_each and self.granted_bytes and (needs := self._slots * each) > self.granted_bytes:
            what = f"{self._slots} worker{'s' if self._slots > 1 else ''} may need {format_bytes(needs)}"
            has, wanted = format_bytes(self.granted_bytes), advised_gb(needs)
            log.warning("%s of main memory, but the job has %s: ask for more (#SBATCH --mem=%dG)", what, has, wanted)

    @property
    def _threads(self) -> int:
        """The cores of each worker: what it keeps busy or, if that is not known, an equal share."""
        return self.cores_each or max(1, self.cpus // (self._workers * len(self.devices)))

    def _choose_start(self) -> None:
        """Choose the number to start with by cores, memory and earlier runs, and whether others are tried."""
        cores, lesson = self._cores, self.learned.about(self._subject)
        memory = f"{self._memory_bytes / 2**30:.0f} GiB of" if self._memory_bytes else "unknown"
        reason = f"{cores} {'core' if cores == 1 else 'cores'} and {memory} GPU memory per device"
        reason += f"; {ONLY_ONE}" if self.exclusive else ""
        self._workers = self._most if self.cores_each else max(1, self._most // _UNKNOWN_CORES)
        if lesson.workers is not None and (lesson.settled or not self.cores_each):
            self._workers, self._settled = min(lesson.workers, self._most), lesson.settled
            reason = f"an earlier run found {lesson.workers} to be best ({reason})"
        need, each = lesson.device_bytes or _DEVICE_BYTES, lesson.worker_bytes or guess_worker_bytes(self.chunk_s)
        device = ("a device has", self._memory_bytes, "", need, 1)
        shared = f" of main memory for {len(self.devices)} devices" if len(self.devices) > 1 else " of main memory"
        job = ("the job has", self.granted_bytes, shared, each, len(self.devices))
        for who, total, what, need, sharing in (device, job):
            if total is not None and (room := fitting_workers(total, sharing * need)) < self._workers:
                reason += f"; {room} instead of {self._workers}: {who} {format_bytes(total)}{what}"
                reason += f", and a worker may need {format_bytes(need)} (a tenth stays free)"
                self._workers, self._settled = room, False
        one_per_core = "one per core, " if self._workers * (self.cores_each or 0) == cores else ""
        self._record(self._workers, f"start: {one_per_core}{reason}")

    def update(self, supervisor: Supervisor, left: int) -> None:
        """Measure, then add or retire workers; called often, works once a second."""
        now_s = self.clock.monotonic_s()
        if self.per_gpu is not None or not self.devices or supervisor.draining or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        if supervisor.is_retiring:  # they still use cores and memory
            self._retired_s, self._window, self._memory_errors = now_s, None, len(supervisor.short_of_memory)
            return
        at_work, held, granted = supervisor.slots_at_work, self.memory_held(), self.granted_bytes
        if len(supervisor.short_of_memory) > self._memory_errors and self._workers > 1:
            why = f"{self._workers - 1} instead of {self._workers}: chunks ran out of memory"
            self._apply(supervisor, self._workers - 1, why, _STAY)
            self._memory_errors = len(supervisor.short_of_memory)
            return
        is_fresh = held is not None and held.at_s > self._retired_s
        if held and granted and is_fresh and held.memory_bytes > _TIGHT * granted and self._workers > 1:
            self._worker_bytes = held.memory_bytes // max(1, len(at_work))
            fewer, in_use = self._workers - 1, f"main memory gets tight: {format_bytes(held.memory_bytes)} in use"
            in_use = f"{fewer} instead of {self._workers}: {in_use}; the job has {format_bytes(granted)}"
            self._apply(supervisor, fewer, in_use, _STAY)
        if self._settled:
            return
        on_device = Counter(at_work.values())  # a lost device has no workers and is not counted
        if on_device and min(on_device.values()) < self._workers:
            self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
            if now_s - self._short_since_s >= _DYING_S and self._workers > 1:
                self._rates.clear()  # the rates no longer apply
                self._apply(supervisor, self._workers - 1, "a worker has ended", _STAY)
            return
        self._short_since_s = None
        if not at_work or not all(supervisor.finished.get(slot) for slot in at_work):
            return
        chunks_done = supervisor.tally.done
        work_done = supervisor.audio_done_s or float(chunks_done)
        if self._window is None:
            self._window = (now_s, work_done, chunks_done)
            self._held.clear()  # older readings are from fewer workers, or from workers that were starting
            return
        started_s, work_before, chunks_before = self._window
        if held is not None and held.at_s >= started_s and held not in self._held[-1:]:  # it may be the same reading
            self._held.append(held)
        took_s, chunks = now_s - started_s, chunks_done - chunks_before
        awaits_memory = self.granted_bytes is not None and held is not None and not self._held
        if took_s < _WINDOW_S or chunks < _WINDOW_CHUNKS * len(at_work) or awaits_memory:
            return
        self._rates[self._workers] = (work_done - work_before) / took_s
        used = self.memory_peaks(30.0)
        shares = [
            used[device_id] / device.memory_total_bytes
            for device_id, device in self.devices
            if device_id in used and device.memory_total_bytes
        ]
        self._device_bytes = max(used.values(), default=0) // self._workers
        self._worker_bytes = max((one.memory_bytes for one in self._held), default=0) // len(at_work)
        number, reason, how = self._choose(max(shares, default=0.0), left * took_s / chunks)
        if how != _TRY or number < self._workers or self._is_steady:
            self._apply(supervisor, number, reason, how)

    def _choose(self, device_share: float, left_s: float) -> tuple[int, str, str]:
        """Return the next number of workers, the reason, and whether to try it, to stay with it, or that it is best.

        ``device_share``: of the fullest device's memory; ``left_s``: the time that the rest of the work takes.
        """
        now, before, rate, gain = self._workers, self._before, self._rates[self._workers], ""
        room, why = self._find_room(device_share)
        end = _BEST if room >= self._most else _STAY  # another device, or another job, may have more memory
        if before is not None:
            change = f"{rate / self._rates[before] - 1:+.0%}"
            if now > before:
                gain = f"{now} per device changed the rate by {change} against {before}"
                if rate <= _PAYS * self._rates[before]:
                    return before, gain, _BEST
            else:
                if rate < self._rates[before]:
                    gain = f"fewer are slower: {change} with {now} per device"
                    return before, f"{gain}; {why}" if before >= room else gain, end
                gain = f"fewer are not slower: {change} with {now} per device"
            gain += "; "
        more = room - now if self.cores_each else min(room - now, 1)
        if more > 0 and (before is None or now > before):
            if left_s < _WORTH_S:
                return now, f"{gain}only {left_s:.0f} s of work left", _STAY
            return now + more, f"{gain}trying {'one' if more == 1 else more} more", _TRY
        fewer = now - max(1, now // 4)
        if self.cores_each and fewer > 0 and fewer not in self._rates:
            if left_s >= _WORTH_FEWER_S:
                return fewer, f"{gain}trying {fewer}", _TRY
            end = _STAY  # a longer run may try it
        return now, f"{gain}{why}", end

    def _find_room(self, device_share: float) -> tuple[int, str]:
        """Return how many workers per device the cores and the memory hold, and why not more."""
        now, room, why = self._workers, self._most, "there are no cores for more"
        if device_share and (fits := max(now, fitting_workers(now, device_share))) < room:
            room, why = fits, f"one more might fill {device_share * (fits + 1) / now:.0%} of a device's memory"
        if (granted := self.granted_bytes) is None:
            return room, why
        if not self._held:
            return now, f"the main memory in use is not known; the job has {format_bytes(granted)}"
        held = max(one.memory_bytes for one in self._held)
        if (fits := max(now, fitting_workers(granted, held / now))) < room:
            more = f"from {format_bytes(held)} to {format_bytes(held * (fits + 1) / now)}"
            room, why = fits, f"one more might raise the main memory in use {more}; the job has {format_bytes(granted)}"
        return room, why

    @property
    def _is_steady(self) -> bool:
        """Whether the main memory of the workers no longer grows; True if the task has no known limit."""
        if self.granted_bytes is None:
            return True
        earlier = [one.memory_bytes for one in self._held if one.at_s <= self._held[-1].at_s - _APART_S]
        return bool(earlier) and self._held[-1].memory_bytes <= _STEADY * earlier[-1]

    def _apply(self, supervisor: Supervisor, workers: int, reason: str, how: str) -> None:
        """Change the number of workers; the search is over unless this is a try."""
        new, self._before, self._window = workers - self._workers, self._workers if how == _TRY else None, None
        self._workers, self._settled = workers, how != _TRY
        self._record(workers, reason)
        at_work = supervisor.slots_at_work
        for device_id, device in self.devices:
            slots = sorted(slot for slot, place in at_work.items() if place == device_id)
            for slot in slots[workers:]:
                supervisor.retire(slot)
            for _ in range(new if slots else 0):
                supervisor.add_worker(WorkerPlan(self._slots, device, device_id, self._threads))
                self._slots += 1
        facts: dict[str, Any] = {"worker_bytes": self._worker_bytes, "device_bytes": self._device_bytes}
        facts = {name: value for name, value in facts.items() if value}
        if workers in self._rates:
            facts |= {"workers": workers, "settled": how == _BEST}
            if supervisor.audio_done_s:  # else the rates are of chunks
                facts["rates"] = {str(many): rate / len(self.devices) for many, rate in self._rates.items()}
        if self._settled and facts:
            self.learned.note(self._subject, chunk_s=self.chunk_s, memory_bytes=self._memory_bytes, **facts)

    def _record(self, workers: int, reason: str) -> None:
        log.info("workers per device: %d; %s", workers, reason)
        self.note("workers_per_gpu", self._model, workers, reason)


def format_bytes(memory_bytes: float) -> str:
    """Return an amount of memory in GiB or MiB."""
    return f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes >= 2**30 else f"{memory_bytes / 2**20:.0f} MiB"
