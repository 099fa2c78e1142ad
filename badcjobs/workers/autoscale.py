"""The number of workers of a task: planned at its start; ``--workers-per-gpu auto`` adds workers while that helps.

All devices of a task get one more worker at the same time, because they share the cores, which run out first, and the
main memory. The estimate for one more worker is (n + 1) / n of the memory in use.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field

from badcjobs.model import Device, MemoryHeld, WorkerPlan
from badcjobs.seams import Clock
from badcjobs.workers.learned import Learned
from badcjobs.workers.supervise import Supervisor

log = logging.getLogger(__name__)

_CORES_EACH = 4  # with this many cores for each worker, one more has always been faster
_MEMORY_EACH = 4 * 2**30  # device memory of HawkEars with its usual threads, plus half
_MOST = 16
_PAYS = 1.05  # a smaller gain is not worth the memory
_FULL = 0.9  # of the device memory (more raises an alert), and of the main memory (a job that uses all is killed)
_WINDOW_S = 5.0
_WINDOW_CHUNKS = 20  # per worker: with fewer, one chunk changes the rate by more than 5 %
_WORTH_S = 60.0  # with less work left than this, starting a worker costs more than it gains
_STEADY, _APART_S = 1.05, 5.0  # growth between two readings, and their distance: the memory of a new worker grows
_EACH_BYTES = 4 * 2**30  # assumed main memory of an engine process until it is measured
_EVERY_S = 1.0
_DYING_S = 30.0  # the workers of a lost device do not all end at the same moment
_LIKE = 0.25  # cores per device may differ by this share from an earlier run

Note = Callable[[str, str | None, float | None, str], None]  # kind, subject, value, reason


def plan_workers(
    devices: Sequence[tuple[int, Device]], *, per_gpu: int, cpu_workers: int, cpus: int
) -> list[WorkerPlan]:
    """Return one plan per worker; ``devices`` are (device_id, device) in the order they were granted.

    ``cpu_workers`` are used only when there is no device; they do not add to the workers of devices.
    """
    places: list[tuple[int | None, Device | None]] = [pair for pair in devices for _ in range(per_gpu)]
    if not devices:
        places = [(None, None)] * cpu_workers
    threads = max(1, cpus // len(places)) if places else 1
    return [WorkerPlan(slot, device, device_id, threads) for slot, (device_id, device) in enumerate(places)]


@dataclass(eq=False)
class Autoscaler:
    """Plans the workers of a task, then (with auto) measures them and changes their number."""

    devices: Sequence[tuple[int, Device]]  # the devices that get work, each with its device_id
    learned: Learned
    note: Note
    clock: Clock
    _: KW_ONLY
    cpus: int
    per_gpu: int | None  # workers on each device; None: auto
    cpu_workers: int = 0  # workers where there is no device
    granted_bytes: int | None = None  # main memory of the task; None: no known limit
    _settled: bool = True  # no other number is tried (any more)
    _rates: dict[int, float] = field(default_factory=dict)  # workers → seconds of audio (or chunks) per second
    _window: tuple[float, float, int] | None = None  # when it began, work and chunks done by then
    _held: list[MemoryHeld] = field(default_factory=list)  # main memory, since the window began
    _worker_bytes: int = 0  # peak main memory of a worker; 0: not read
    _next_s: float = 0.0
    _short_since_s: float | None = None  # since when there are fewer workers than planned

    def __post_init__(self) -> None:
        self._cores = max(1, self.cpus // max(1, len(self.devices)))  # per device
        self._most = min(self._cores, _MOST)
        self._model = next((device.name for _, device in self.devices if device.name), "unknown")
        self._workers = self.per_gpu or 1  # per device, now
        if self.per_gpu is None and self.devices:
            self._choose_start()
        elif self.per_gpu is None and self.cpu_workers:
            log.info("workers per device: there is no device; workers on the CPU, as requested: %d", self.cpu_workers)
        self.plans = plan_workers(self.devices, per_gpu=self._workers, cpu_workers=self.cpu_workers, cpus=self.cpus)
        self._slots = len(self.plans)

    def _choose_start(self) -> None:
        """Choose the number to start with by cores, memory and earlier runs, and whether others are tried."""
        cores, lesson = self._cores, self.learned.about(self._model)
        memories = [device.memory_total_bytes for _, device in self.devices if device.memory_total_bytes]
        memory = f"{min(memories) / 2**30:.0f} GiB of GPU memory" if memories else "unknown GPU memory"
        reason = f"{cores} {'core' if cores == 1 else 'cores'} and {memory} per device"
        room = max(1, int(_FULL * min(memories) / _MEMORY_EACH)) if memories else _MOST
        self._workers, self._settled = min(max(1, cores // _CORES_EACH), room), False
        is_alike = lesson.cores is not None and abs(lesson.cores - cores) <= _LIKE * cores
        if is_alike and lesson.workers is not None:
            self._workers, self._settled = min(lesson.workers, self._most), lesson.settled
            reason = f"an earlier run found {lesson.workers} to be best ({reason})"
        if self.granted_bytes is not None:
            each_bytes = lesson.worker_bytes or _EACH_BYTES
            fitting = max(1, int(_FULL * self.granted_bytes / (len(self.devices) * each_bytes)))
            if fitting < self._workers:
                granted, each = format_bytes(self.granted_bytes), format_bytes(each_bytes)
                reason += f"; the job has {granted} of main memory, and a worker may need {each}"
                self._workers, self._settled = fitting, False
        self._record(self._workers, f"start: {reason}")

    def update(
        self,
        supervisor: Supervisor,
        *,
        left: int,
        memory_peaks: Callable[[float], dict[int, int]],
        memory_held: Callable[[], MemoryHeld | None],
    ) -> None:
        """Measure, then add or retire workers; called often, works once a second."""
        now_s = self.clock.monotonic_s()
        if self._settled or supervisor.draining or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        at_work = supervisor.slots_at_work
        on_device = Counter(at_work.values())  # a lost device has no workers and is not counted
        if on_device and min(on_device.values()) < self._workers:
            self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
            if now_s - self._short_since_s >= _DYING_S and self._workers > 1:
                self._rates.clear()  # the rates no longer apply
                self._apply(supervisor, self._workers - 1, "a worker has ended", is_best=False)
            return
        self._short_since_s = None
        if not all(supervisor.finished.get(slot) for slot in at_work):
            return
        chunks_done = supervisor.tally.done
        work_done = supervisor.audio_done_s or float(chunks_done)
        if self._window is None:
            self._window = (now_s, work_done, chunks_done)
            self._held.clear()  # older readings are from fewer workers, or from workers that were starting
            return
        started_s, work_before, chunks_before = self._window
        held = memory_held()
        if held is not None and held.at_s >= started_s and held not in self._held[-1:]:  # it may be the same reading
            self._held.append(held)
            self._worker_bytes = max(self._worker_bytes, held.memory_bytes // max(1, len(at_work)))
        took_s, chunks = now_s - started_s, chunks_done - chunks_before
        if took_s < _WINDOW_S or chunks < _WINDOW_CHUNKS * self._workers * len(self.devices):
            return
        self._rates[self._workers] = (work_done - work_before) / took_s
        used = memory_peaks(30.0)
        shares = [
            used[device_id] / device.memory_total_bytes
            for device_id, device in self.devices
            if device_id in used and device.memory_total_bytes
        ]
        number, reason, is_best = self._choose(max(shares, default=None), left * took_s / chunks)
        if number <= self._workers or held is None or self._is_steady:
            self._apply(supervisor, number, reason, is_best=is_best)

    def _choose(self, memory_share: float | None, left_s: float) -> tuple[int, str, bool]:
        """Return the next number of workers, the reason, and whether it is the best on any such device.

        ``memory_share``: of the fullest device; ``left_s``: the time that the rest of the work takes.
        """
        now, rate, granted = self._workers, self._rates[self._workers], self.granted_bytes
        held = max((one.memory_bytes for one in self._held), default=0)
        gain = ""
        if before := self._rates.get(now - 1):
            gain = f"{now} per device changed the rate by {rate / before - 1:+.0%} against {now - 1}"
            if rate <= _PAYS * before:
                return now - 1, gain, True
            gain += "; "
        if now >= self._most:
            return now, f"{gain}there are no cores for more", True
        if granted is not None and (then := held * (now + 1) / now) > _FULL * granted:
            more = f"one more might raise the main memory in use from {format_bytes(held)} to {format_bytes(then)}"
            return now, f"{gain}{more}; the job has {format_bytes(granted)}", False  # another job may have more memory
        if memory_share is not None and (share := memory_share * (now + 1) / now) > _FULL:
            # Not final: other processes may fill the device this time.
            return now, f"{gain}one more might fill {share:.0%} of a device's memory", False
        if left_s < _WORTH_S:
            return now, f"{gain}only {left_s:.0f} s of work left", False
        return now + 1, f"{gain}trying one more", False

    @property
    def _is_steady(self) -> bool:
        """Whether the main memory of the workers no longer grows; True if the task has no known limit."""
        if self.granted_bytes is None:
            return True
        earlier = [one.memory_bytes for one in self._held if one.at_s <= self._held[-1].at_s - _APART_S]
        return bool(earlier) and self._held[-1].memory_bytes <= _STEADY * earlier[-1]

    def _apply(self, supervisor: Supervisor, workers: int, reason: str, *, is_best: bool) -> None:
        """Change the number of workers; the search is over unless this tries one more."""
        self._settled = workers <= self._workers
        self._workers, self._window = workers, None
        self._record(workers, reason)
        at_work = supervisor.slots_at_work
        for device_id, device in self.devices:
            slots = sorted(slot for slot, place in at_work.items() if place == device_id)
            for slot in slots[workers:]:
                supervisor.retire(slot)
            if slots and len(slots) < workers and not is_best:
                threads = max(1, self.cpus // (workers * len(self.devices)))
                supervisor.add_worker(WorkerPlan(self._slots, device, device_id, threads))
                self._slots += 1
        if self._settled and workers in self._rates:
            memory = {"worker_bytes": self._worker_bytes} if self._worker_bytes else {}
            self.learned.note(self._model, workers=workers, cores=self._cores, settled=is_best, **memory)

    def _record(self, workers: int, reason: str) -> None:
        log.info("workers per device: %d; %s", workers, reason)
        self.note("workers_per_gpu", self._model, workers, reason)


def format_bytes(memory_bytes: float) -> str:
    """Return an amount of memory in GiB or MiB."""
    return f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes >= 2**30 else f"{memory_bytes / 2**20:.0f} MiB"
