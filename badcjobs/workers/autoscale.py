"""The number of workers of a task: planned at its start; ``--workers-per-gpu auto`` measures and corrects it.

The first guess is one worker per core, as many as the memory holds. All devices of a task change at the same time,
because they share the cores, which run out first, and the main memory. ``choose_start`` and ``next_step`` decide, from
values alone; ``Meter`` measures; ``Autoscaler`` asks once a second, and adds or retires workers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

from badcjobs.model import (
    Device,
    MemoryHeld,
    WorkerMemory,
    WorkerPlan,
    fitting_workers,
    not_none,
)
from badcjobs.model.decisions import Code, Decision
from badcjobs.seams import Clock
from badcjobs.workers.learned import Learned, Lesson
from badcjobs.workers.mps import MOST_CLIENTS, ONLY_ONE
from badcjobs.workers.supervise import Supervisor

log = logging.getLogger(__name__)

_UNKNOWN_CORES = 4  # for each worker of an engine that is not ours, at the start
_PAYS = 1.05  # a smaller gain is not worth the memory
_TIGHT = 0.95  # of the main memory: a job that uses all is killed
_WINDOW_S = 5.0
_WINDOW_CHUNKS = 4  # per worker
_WORTH_S = 60.0  # with less work left than this, starting a worker costs more than it gains
_WORTH_FEWER_S = 300.0  # and fewer are not tried
_PEAKS_S = 30.0
_EVERY_S = 1.0


# --- what is known ----------------------------------------------------------------------------------------------------


class Limits(NamedTuple):
    """What limits the workers of a device."""

    devices: int
    cores: int  # for each device
    cores_each: int | None  # cores that a worker keeps busy; None: not known, so start with few
    device_bytes: int | None  # memory of the smallest device; None: not known
    granted_bytes: int | None  # main memory of the task; None: no known limit
    exclusive: bool  # only one process may use a device

    @property
    def most(self) -> int:
        """The most workers that the cores and the mode of the device allow, whatever its memory."""
        if self.exclusive:
            return 1
        return min(MOST_CLIENTS, max(1, self.cores // (self.cores_each or 1)))


class Trials(NamedTuple):
    """The numbers of workers per device that were tried."""

    workers: int  # now
    before: int  # the number that these are compared with; the same: nothing is tried
    settled: bool  # no other number is tried any more
    rates: Mapping[int, float] = {}  # number → seconds of audio (or chunks) per second

    @property
    def is_fewer(self) -> bool:
        return self.workers < self.before


class Performance(NamedTuple):
    """What the present workers do and use."""

    rate: float  # seconds of audio (or chunks) per second
    left_s: float  # the time that the rest of the work takes
    device_peak_bytes: int  # memory in use on the fullest device; 0: not known
    peak_bytes: int | None  # main memory in use; None: not known


class Reading(NamedTuple):
    """What is known of the present workers; None: it does not apply, or is not measured yet."""

    memory_errors: int = 0  # chunks that ran out of memory with them
    held_bytes: int | None = None  # main memory in use now
    performance: Performance | None = None


class Step(NamedTuple):
    """A number of workers per device, and why."""

    code: Code
    workers: int
    figures: Mapping[str, Any]
    is_trial: bool = False  # it is measured, and compared with the number before
    is_best: bool = False  # a later run need not search; False: with more time or memory another number may be better


# --- the start --------------------------------------------------------------------------------------------------------


def choose_start(limits: Limits, lesson: Lesson, memory: WorkerMemory, chunk_s: float | None) -> Step:
    """Choose the number to start with: by cores or an earlier run, then as many of these as the memory holds."""
    figures: dict[str, Any] = {"cores": limits.cores, "device_bytes": limits.device_bytes}
    if limits.exclusive:
        figures["note"] = ONLY_ONE

    code = Code.START_WORKERS
    workers = limits.most
    if limits.cores_each is None:
        workers = max(1, workers // _UNKNOWN_CORES)
    if lesson.workers is not None and (lesson.settled or limits.cores_each is None):
        workers = min(lesson.workers, limits.most)
        figures["earlier"] = lesson.workers

    device_worker_bytes = lesson.device_bytes or memory.device_bytes
    room = _room(limits.device_bytes, device_worker_bytes)
    if room < workers:
        figures |= {"devices_hold": room, "before_devices": workers, "device_worker_bytes": device_worker_bytes}
        workers = room

    worker_bytes = lesson.worker_bytes or memory.bytes_for(chunk_s)
    room = _room(limits.granted_bytes, worker_bytes * limits.devices)
    if room < workers:
        code = Code.START_AS_MEMORY_HOLDS
        figures |= {"memory_holds": room, "before_memory": workers, "worker_bytes": worker_bytes}
        figures |= {"granted_bytes": limits.granted_bytes, "devices": limits.devices}
        workers = room

    if workers * (limits.cores_each or 0) == limits.cores:
        code = Code.START_ONE_PER_CORE
    return Step(code, workers, figures, is_best=lesson.settled and workers == lesson.workers)


def _room(memory_bytes: int | None, worker_bytes: float) -> int:
    return MOST_CLIENTS if memory_bytes is None else fitting_workers(memory_bytes, worker_bytes)


# --- the next step: one rule per function, the first one that applies -------------------------------------------------


def next_step(reading: Reading, trials: Trials, limits: Limits) -> Step | None:
    """Return what to change about the number of workers; None: leave it, or go on measuring."""
    step = step_back_after_memory_errors(reading, trials) or step_back_before_memory_is_full(reading, trials, limits)
    now = reading.performance
    if step is not None or trials.settled or now is None:
        return step
    limit = find_limit(now, trials, limits)
    return (
        undo_more(now, trials)
        or undo_fewer(now, trials, limit)
        or try_more(now, trials, limit, limits)
        or try_fewer(now, trials, limits)
        or stay(now, trials, limit, limits)
    )


def step_back_after_memory_errors(reading: Reading, trials: Trials) -> Step | None:
    """Use one less if chunks ran out of memory with so many workers."""
    if reading.memory_errors == 0 or trials.workers == 1:
        return None
    return Step(Code.MEMORY_ERRORS, trials.workers - 1, {"before": trials.workers})


def step_back_before_memory_is_full(reading: Reading, trials: Trials, limits: Limits) -> Step | None:
    """Use one less if the main memory gets tight."""
    if reading.held_bytes is None or limits.granted_bytes is None or trials.workers == 1:
        return None
    if reading.held_bytes <= _TIGHT * limits.granted_bytes:
        return None
    figures = {"before": trials.workers, "held_bytes": reading.held_bytes, "granted_bytes": limits.granted_bytes}
    return Step(Code.MEMORY_TIGHT, trials.workers - 1, figures)


def undo_more(now: Performance, trials: Trials) -> Step | None:
    """Return to the number before if more workers are not worth their memory."""
    if trials.workers <= trials.before or now.rate > _PAYS * trials.rates[trials.before]:
        return None
    return Step(Code.MORE_WORKERS_NOT_FASTER, trials.before, _trial(now, trials), is_best=True)


def undo_fewer(now: Performance, trials: Trials, limit: Limit) -> Step | None:
    """Return to the number before if fewer workers are slower."""
    if not trials.is_fewer or now.rate >= trials.rates[trials.before]:
        return None
    code = limit.code
    if trials.before < limit.workers:  # there would be room for more
        code = Code.FEWER_WORKERS_SLOWER
    return Step(code, trials.before, _trial(now, trials) | limit.figures, is_best=limit.is_cores)


def try_more(now: Performance, trials: Trials, limit: Limit, limits: Limits) -> Step | None:
    """Try as many as there is room for, or one more of an engine whose needs are not known."""
    more = limit.workers - trials.workers
    if more <= 0 or trials.is_fewer:
        return None
    figures = _trial(now, trials)
    if now.left_s < _WORTH_S:
        return Step(Code.LITTLE_WORK_LEFT, trials.workers, figures | {"left_s": now.left_s})
    if limits.cores_each is None:
        more = 1
    return Step(Code.TRY_MORE_WORKERS, trials.workers + more, figures | {"more": more}, is_trial=True)


def try_fewer(now: Performance, trials: Trials, limits: Limits) -> Step | None:
    """Try three quarters of the workers: there is no room for more."""
    fewer = _fewer(trials, limits)
    if fewer is None or now.left_s < _WORTH_FEWER_S:
        return None
    code = Code.FEWER_WORKERS_AS_FAST if trials.is_fewer else Code.TRY_FEWER_WORKERS
    return Step(code, fewer, _trial(now, trials) | {"trying": fewer}, is_trial=True)


def stay(
    now: Performance,
    trials: Trials,
    limit: Limit,
    limits: Limits,
) -> Step:
    """Stay with the present number: there is nothing left to try."""
    figures = _trial(now, trials)
    is_best = limit.is_cores and _fewer(trials, limits) is None
    if trials.is_fewer:
        return Step(Code.FEWER_WORKERS_AS_FAST, trials.workers, figures, is_best=is_best)
    return Step(limit.code, trials.workers, figures | limit.figures, is_best=is_best)


class Limit(NamedTuple):
    """The most workers per device, and what allows no more."""

    workers: int
    code: Code
    figures: dict[str, Any]

    @property
    def is_cores(self) -> bool:
        """Whether no other run can have more."""
        return self.code is Code.NO_CORES_FOR_MORE


def find_limit(now: Performance, trials: Trials, limits: Limits) -> Limit:
    """Return how many workers the cores, the device and the main memory hold, by what the present ones use."""
    workers = trials.workers
    limit = Limit(limits.most, Code.NO_CORES_FOR_MORE, {})
    if now.device_peak_bytes and limits.device_bytes:
        worker_bytes = now.device_peak_bytes / workers
        room = max(workers, fitting_workers(limits.device_bytes, worker_bytes))
        if room < limit.workers:
            figures = {"memory_share": worker_bytes * (room + 1) / limits.device_bytes}
            limit = Limit(room, Code.NO_DEVICE_MEMORY_FOR_MORE, figures)

    granted_bytes = limits.granted_bytes
    if granted_bytes is None:
        return limit
    if now.peak_bytes is None:
        return Limit(workers, Code.MEMORY_IN_USE_UNKNOWN, {"granted_bytes": granted_bytes})
    room = max(workers, fitting_workers(granted_bytes, now.peak_bytes / workers))
    if room < limit.workers:
        expected_bytes = round(now.peak_bytes * (room + 1) / workers)
        figures = {"held_bytes": now.peak_bytes, "expected_bytes": expected_bytes, "granted_bytes": granted_bytes}
        limit = Limit(room, Code.NO_MEMORY_FOR_MORE, figures)
    return limit


def _fewer(trials: Trials, limits: Limits) -> int | None:
    """Return the smaller number to try; None: there is none, or it was tried."""
    fewer = trials.workers - max(1, trials.workers // 4)
    if limits.cores_each is None or fewer == 0 or fewer in trials.rates:
        return None
    return fewer


def _trial(now: Performance, trials: Trials) -> dict[str, Any]:
    """Return the figures of the trial; empty if nothing is tried."""
    if trials.workers == trials.before:
        return {}
    rate_change = now.rate / trials.rates[trials.before] - 1
    return {"tried": trials.workers, "before": trials.before, "rate_change": round(rate_change, 4)}


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Meter:
    """Measures the workers of a task, from one change of their number to the next."""

    granted_bytes: int | None
    clock: Clock
    memory_peaks: Callable[[float], dict[int, int]]  # by device_id, over the last seconds
    memory_held: Callable[[], MemoryHeld | None]  # main memory of our processes; None: not known
    _memory_errors: int = 0  # chunks that had run out of memory before
    _restarted_s: float = 0.0
    _began_s: float | None = None  # None: the workers have not all done a chunk yet
    _work_before: float = 0.0
    _chunks_before: int = 0
    _peak_bytes: int | None = None  # main memory, since it began

    def restart(self, supervisor: Supervisor) -> None:
        """Forget what was measured and what failed with another number of workers."""
        self._restarted_s = self.clock.monotonic_s()
        self._began_s = None
        self._memory_errors = len(supervisor.short_of_memory)

    def read(self, supervisor: Supervisor, trials: Trials, left: int) -> Reading:
        """Return what is known of the present workers; ``left``: chunks that are not done."""
        memory_errors = len(supervisor.short_of_memory) - self._memory_errors
        held = self.memory_held()
        held_bytes = None
        if held is not None and held.at_s > self._restarted_s:
            held_bytes = held.memory_bytes

        at_work = supervisor.slots_at_work
        on_device = Counter(at_work.values())  # a lost device has no workers and is not counted
        is_complete = min(on_device.values(), default=0) >= trials.workers
        performance = None
        if is_complete and not trials.settled and supervisor.productive.issuperset(at_work):
            performance = self._measure(supervisor, held, left)
        return Reading(memory_errors, held_bytes, performance)

    def _measure(self, supervisor: Supervisor, held: MemoryHeld | None, left: int) -> Performance | None:
        """Return what the workers do, once there are enough chunks and a reading of the memory."""
        now_s = self.clock.monotonic_s()
        chunks = supervisor.tally.done
        work = supervisor.audio_done_s or float(chunks)
        if self._began_s is None:
            self._began_s = now_s
            self._work_before = work
            self._chunks_before = chunks
            self._peak_bytes = None  # of fewer workers, or of workers that were starting
            return None
        if held is not None and held.at_s >= self._began_s:
            self._peak_bytes = max(held.memory_bytes, self._peak_bytes or 0)

        took_s = now_s - self._began_s
        new_chunks = chunks - self._chunks_before
        if took_s < _WINDOW_S or new_chunks < _WINDOW_CHUNKS * len(supervisor.slots_at_work):
            return None
        if self.granted_bytes is not None and held is not None and self._peak_bytes is None:
            return None
        return Performance(
            rate=(work - self._work_before) / took_s,
            left_s=left * took_s / new_chunks,
            device_peak_bytes=max(self.memory_peaks(_PEAKS_S).values(), default=0),
            peak_bytes=self._peak_bytes,
        )


# --- acting -----------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Autoscaler:
    """Plans the workers of a task, then (with auto) changes their number as ``next_step`` says."""

    devices: Sequence[tuple[int, Device]]  # the devices that get work, each with its device_id
    meter: Meter
    learned: Learned
    note: Callable[[Decision], None]
    _: KW_ONLY
    cpus: int
    per_gpu: int | None  # workers on each device; None: auto
    cpu_workers: int  # workers where there is no device; they do not add to the workers of devices
    chunk_s: float | None  # the longest chunk; None: not known
    exclusive: bool  # only one process may use a device
    cores_each: int | None  # cores that a worker of this engine keeps busy; None: not known, so start with few
    memory_per_worker: WorkerMemory  # until it is measured
    _next_s: float = 0.0
    _slots: int = 0

    def __post_init__(self) -> None:
        self._limits = Limits(
            devices=len(self.devices),
            cores=max(1, self.cpus // max(1, len(self.devices))),
            cores_each=self.cores_each,
            device_bytes=min(not_none(device.memory_total_bytes for _, device in self.devices), default=None),
            granted_bytes=self.meter.granted_bytes,
            exclusive=self.exclusive,
        )
        self._model = next((device.name for _, device in self.devices if device.name), "unknown")
        length = "unknown length"
        if self.chunk_s is not None:
            length = f"{max(10, round(self.chunk_s, -1)):.0f} s"
        self._subject = f"{self._model}, {self._limits.cores} cores, chunks of {length}"  # of its lessons
        lesson = self.learned.about(self._subject)
        workers = self.per_gpu or 1
        self._trials = Trials(workers, workers, settled=True)
        if self.devices and self.per_gpu is None:
            start = choose_start(self._limits, lesson, self.memory_per_worker, self.chunk_s)
            self._trials = Trials(start.workers, start.workers, settled=start.is_best)
            self._record(start)
        self.plans = self._plan_workers()

    @property
    def most_per_device(self) -> int:
        """The most workers that a device may get."""
        return self.per_gpu or self._limits.most

    def _plan_workers(self) -> list[WorkerPlan]:
        """Return the workers to start with: on each device, or on the CPU if there is none."""
        if not self.devices:
            threads = max(1, self.cpus // max(1, self.cpu_workers))
            return [WorkerPlan(slot, None, None, threads) for slot in range(self.cpu_workers)]
        plans = []
        for device_id, device in self.devices:
            plans += [self._plan_worker(device_id, device) for _ in range(self._trials.workers)]
        return plans

    def _plan_worker(self, device_id: int, device: Device) -> WorkerPlan:
        """Plan one more worker, with the cores that it keeps busy or, if that is not known, an equal share."""
        threads = max(1, self.cpus // (self._trials.workers * len(self.devices)))
        if self.cores_each and self.per_gpu is None:
            threads = self.cores_each
        plan = WorkerPlan(self._slots, device, device_id, threads)
        self._slots += 1
        return plan

    def update(self, supervisor: Supervisor, left: int) -> None:
        """Measure, then add or retire workers; called often, works once a second."""
        now_s = self.meter.clock.monotonic_s()
        if self.per_gpu is not None or not self.devices or supervisor.draining or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        if supervisor.is_retiring:  # retired workers still use cores and memory
            self.meter.restart(supervisor)
            return
        reading = self.meter.read(supervisor, self._trials, left)
        step = next_step(reading, self._trials, self._limits)
        if step is not None:
            self._take(step, reading, supervisor)

    def _take(self, step: Step, reading: Reading, supervisor: Supervisor) -> None:
        """Change the number of workers; the search is over unless this is a trial."""
        now = self._trials.workers
        rates = dict(self._trials.rates)
        if reading.performance is not None:
            rates[now] = reading.performance.rate
        if not step.is_trial:
            self._learn(step, reading, rates, supervisor)
        compared_with = now if step.is_trial else step.workers
        self._trials = Trials(step.workers, compared_with, settled=not step.is_trial, rates=rates)
        self._record(step)

        self.meter.restart(supervisor)
        self._change_devices(supervisor, step.workers - now)

    def _change_devices(self, supervisor: Supervisor, more: int) -> None:
        """Add workers to each device, or retire its last ones; a lost device stays without."""
        for device_id, device in self.devices:
            slots = sorted(slot for slot, place in supervisor.slots_at_work.items() if place == device_id)
            for slot in slots[self._trials.workers :]:
                supervisor.retire(slot)
            if slots:
                for _ in range(more):
                    supervisor.add_worker(self._plan_worker(device_id, device))

    def _learn(
        self,
        step: Step,
        reading: Reading,
        rates: Mapping[int, float],
        supervisor: Supervisor,
    ) -> None:
        """Keep the results for later runs; rates only if they are of audio, not of chunks."""
        facts: dict[str, Any] = {}
        now = reading.performance
        used_bytes = reading.held_bytes if now is None else now.peak_bytes
        if used_bytes:
            facts["worker_bytes"] = used_bytes // max(1, len(supervisor.slots_at_work))
        if now is not None and now.device_peak_bytes:
            facts["device_bytes"] = now.device_peak_bytes // self._trials.workers
        if step.workers in rates:
            facts |= {"workers": step.workers, "settled": step.is_best}
            if supervisor.audio_done_s > 0:
                facts["rates"] = {str(number): rate / len(self.devices) for number, rate in rates.items()}
        if facts:
            self.learned.note(
                self._subject,
                chunk_s=self.chunk_s,
                memory_bytes=self._limits.device_bytes,
                **facts,
            )

    def _record(self, step: Step) -> None:
        decision = Decision.of(step.code, self._model, workers=step.workers, **step.figures)
        log.info("workers per device: %d; %s", step.workers, decision.reason)
        self.note(decision)
