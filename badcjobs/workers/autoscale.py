"""The number of workers of a task: planned at its start; ``--workers-per-gpu auto`` adds workers while that helps.

``plan_start`` and ``Ramp`` only decide. ``Autoscaler`` measures, starts and stops workers, records each decision and
keeps the result for the next task. All devices of a task get one more worker at the same time, because they share the
cores, which run out first, and the main memory. The estimate for one more worker is (n + 1) / n of the memory in use.
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


# --- decisions: pure functions ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """A decision: the number of workers per device from now on."""

    workers: int
    reason: str
    settled: bool  # the best number is found; False: one more is tried, or would be with more work or memory


def plan_start(
    *,
    cpus: int,
    devices: int,
    memory_bytes: int | None,
    known: int | None,
    granted_bytes: int | None = None,
    worker_bytes: int | None = None,
) -> tuple[int, int, str, bool]:
    """Return the workers per device to start with, the maximum, the reason, and whether main memory sets the limit.

    ``memory_bytes``: of the smallest device; ``granted_bytes``: main memory of the task. From an earlier run:
    ``known``, the best number of workers, and ``worker_bytes``, the main memory of one worker.
    """
    cores = max(1, cpus // max(1, devices))
    room = _MOST if memory_bytes is None else max(1, int(_FULL * memory_bytes / _MEMORY_EACH))
    most = max(1, min(cores, _MOST))
    memory = "unknown GPU memory" if memory_bytes is None else f"{memory_bytes / 2**30:.0f} GiB of GPU memory"
    reason = f"{cores} {'core' if cores == 1 else 'cores'} and {memory} per device"
    wanted = min(max(1, cores // _CORES_EACH), room)
    if known is not None:
        wanted, reason = min(known, most), f"an earlier run found {known} to be best ({reason})"
    if granted_bytes is not None:
        each_bytes = worker_bytes or _EACH_BYTES
        fitting = max(1, int(_FULL * granted_bytes / (max(1, devices) * each_bytes)))
        if fitting < wanted:
            granted, each = format_bytes(granted_bytes), format_bytes(each_bytes)
            reason += f"; the job has {granted} of main memory, and a worker may need {each}"
            return fitting, most, reason, True
    return wanted, most, reason, False


@dataclass
class Ramp:
    """Measures the rate of each number of workers, and decides when to try one more."""

    workers: int  # per device, now
    most: int  # per device, at most
    devices: int  # number of devices
    settled: bool  # the search is over: this run or an earlier one has found the best number
    granted_bytes: int | None = None  # the main memory of the task; None: no known limit
    rates: dict[int, float] = field(default_factory=dict)  # workers → seconds of audio (or chunks) per second
    _held: list[MemoryHeld] = field(default_factory=list)  # main memory, since the window began
    _since: tuple[float, float, int] | None = None  # when the window began, work and chunks done by then

    def observe(
        self,
        now_s: float,
        *,
        work_done: float,
        chunks_done: int,
        chunks_left: int,
        all_warm: bool,
        memory_share: float | None,
        memory_held: MemoryHeld | None,
    ) -> WorkerStep | None:
        """Return the next step; None: not enough is measured yet, or the search is over.

        ``work_done``: seconds of audio (or chunks) finished so far; ``all_warm``: every worker has finished a chunk;
        ``memory_share``: of the fullest device; ``memory_held``: last reading of all processes of the task.
        """
        if self.settled or not all_warm:
            return None
        if self._since is None:
            self._since = (now_s, work_done, chunks_done)
            self._held.clear()  # older readings are from fewer workers, or from workers that were starting
            return None
        if memory_held is not None and memory_held.at_s >= self._since[0] and memory_held not in self._held[-1:]:
            self._held.append(memory_held)  # the same reading may be passed several times
        started_s, work_before, chunks_before = self._since
        took_s, chunks = now_s - started_s, chunks_done - chunks_before
        if took_s < _WINDOW_S or chunks < _WINDOW_CHUNKS * self.workers * self.devices:
            return None
        self.rates[self.workers] = (work_done - work_before) / took_s
        return self._decide(memory_share, chunks_left * took_s / chunks, memory_is_read=memory_held is not None)

    @property
    def peak_bytes(self) -> int | None:
        """The most main memory in use with these workers; None: not read since all of them started work."""
        return max((held.memory_bytes for held in self._held), default=None)

    def step_back(self, reason: str) -> WorkerStep | None:
        """Go back by one worker per device; None: there is only one."""
        if self.workers == 1:
            return None
        self.rates.clear()  # the rates no longer apply
        return self._settle(self.workers - 1, reason, final=False)

    def _decide(self, memory_share: float | None, left_s: float, *, memory_is_read: bool) -> WorkerStep | None:
        now, rate = self.workers, self.rates[self.workers]
        granted, held = self.granted_bytes, self.peak_bytes or 0
        gain = ""
        if before := self.rates.get(now - 1):
            gain = f"{now} per device changed the rate by {rate / before - 1:+.0%} against {now - 1}"
            if rate <= _PAYS * before:
                return self._settle(now - 1, gain)
            gain += "; "
        if now >= self.most:
            return self._settle(now, f"{gain}there are no cores for more")
        if granted is not None and (then := held * (now + 1) / now) > _FULL * granted:
            more = f"one more might raise the main memory in use from {format_bytes(held)} to {format_bytes(then)}"
            reason = f"{gain}{more}; the job has {format_bytes(granted)}"
            return self._settle(now, reason, final=False)  # another job may have more memory
        if memory_share is not None and (share := memory_share * (now + 1) / now) > _FULL:
            # Not final: other processes may fill the device this time.
            return self._settle(now, f"{gain}one more might fill {share:.0%} of a device's memory", final=False)
        if left_s < _WORTH_S:
            return self._settle(now, f"{gain}only {left_s:.0f} s of work left", final=False)
        if granted is not None and memory_is_read:  # wait until the memory of the workers no longer grows
            last = self._held[-1] if self._held else None
            earlier = [one.memory_bytes for one in self._held if last and one.at_s <= last.at_s - _APART_S]
            if last is None or not earlier or last.memory_bytes > _STEADY * earlier[-1]:
                return None
        self.workers = now + 1
        self._since = None
        return WorkerStep(self.workers, f"{gain}trying one more", settled=False)

    def _settle(self, workers: int, reason: str, *, final: bool = True) -> WorkerStep:
        self.workers, self.settled = workers, True
        return WorkerStep(workers, reason, settled=final)


def format_bytes(memory_bytes: float) -> str:
    """Return an amount of memory in GiB or MiB."""
    return f"{memory_bytes / 2**30:.1f} GiB" if memory_bytes >= 2**30 else f"{memory_bytes / 2**20:.0f} MiB"


# --- measuring and acting ---------------------------------------------------------------------------------------------


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
    _next_s: float = 0.0
    _ramp: Ramp | None = None
    _worker_bytes: int = 0  # peak main memory of a worker; 0: not read
    _short_since_s: float | None = None  # since when there are fewer workers than planned

    def __post_init__(self) -> None:
        self._cores = max(1, self.cpus // max(1, len(self.devices)))  # per device
        self._model = next((device.name for _, device in self.devices if device.name), "unknown")
        per_gpu = self.per_gpu
        if per_gpu is None and self.devices:
            lesson = self.learned.about(self._model)
            is_alike = lesson.cores is not None and abs(lesson.cores - self._cores) <= _LIKE * self._cores
            known = lesson.workers if is_alike else None
            memories = [device.memory_total_bytes for _, device in self.devices if device.memory_total_bytes]
            per_gpu, most, reason, short_of_memory = plan_start(
                cpus=self.cpus,
                devices=len(self.devices),
                memory_bytes=min(memories, default=None),
                known=known,
                granted_bytes=self.granted_bytes,
                worker_bytes=lesson.worker_bytes,
            )
            settled = known is not None and lesson.settled and not short_of_memory
            self._ramp = Ramp(per_gpu, most, len(self.devices), settled=settled, granted_bytes=self.granted_bytes)
            self._decide(per_gpu, f"start: {reason}")
        elif per_gpu is None and self.cpu_workers:
            log.info("workers per device: there is no device; workers on the CPU, as requested: %d", self.cpu_workers)
        self.plans = plan_workers(self.devices, per_gpu=per_gpu or 1, cpu_workers=self.cpu_workers, cpus=self.cpus)
        self._slots = len(self.plans)

    def update(
        self,
        supervisor: Supervisor,
        *,
        left: int,
        memory_peaks: Callable[[float], dict[int, int]],
        memory_held: Callable[[], MemoryHeld | None],
    ) -> None:
        """Measure, then add or retire workers; called often, works once a second."""
        now_s, ramp = self.clock.monotonic_s(), self._ramp
        if ramp is None or ramp.settled or supervisor.draining or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        at_work = supervisor.slots_at_work
        on_device = Counter(at_work.values())  # a lost device has no workers and is not counted
        if on_device and min(on_device.values()) < ramp.workers:
            self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
            if now_s - self._short_since_s >= _DYING_S:
                self._apply(ramp, ramp.step_back("a worker has ended"), supervisor)
            return
        self._short_since_s = None
        tally, used = supervisor.tally, memory_peaks(30.0)
        shares = [
            used[device_id] / device.memory_total_bytes
            for device_id, device in self.devices
            if device_id in used and device.memory_total_bytes
        ]
        step = ramp.observe(
            now_s,
            work_done=supervisor.audio_done_s or float(tally.done),
            chunks_done=tally.done,
            chunks_left=left,
            all_warm=all(supervisor.finished.get(slot) for slot in at_work),
            memory_share=max(shares, default=None),
            memory_held=memory_held(),
        )
        self._worker_bytes = max(self._worker_bytes, (ramp.peak_bytes or 0) // max(1, len(at_work)))
        self._apply(ramp, step, supervisor)

    def _apply(self, ramp: Ramp, step: WorkerStep | None, supervisor: Supervisor) -> None:
        if step is None:
            return
        self._decide(step.workers, step.reason)
        at_work = supervisor.slots_at_work
        for device_id, device in self.devices:
            slots = sorted(slot for slot, place in at_work.items() if place == device_id)
            for slot in slots[step.workers :]:
                supervisor.retire(slot)
            if slots and len(slots) < step.workers and not step.settled:
                threads = max(1, self.cpus // (step.workers * len(self.devices)))
                supervisor.add_worker(WorkerPlan(self._slots, device, device_id, threads))
                self._slots += 1
        if ramp.settled and step.workers in ramp.rates:
            memory = {"worker_bytes": self._worker_bytes} if self._worker_bytes else {}
            self.learned.note(self._model, workers=step.workers, cores=self._cores, settled=step.settled, **memory)

    def _decide(self, workers: int, reason: str) -> None:
        log.info("workers per device: %d; %s", workers, reason)
        self.note("workers_per_gpu", self._model, workers, reason)
