"""The workers of a task: planned at its start, and with ``--workers-per-gpu auto`` one more while that pays.

What pays is workers/ramp.py's business; here it is measured, done, written down, and kept for the next task.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from badcjobs.learned import Learned
from badcjobs.model import Device, MemoryHeld, WorkerPlan
from badcjobs.seams import Clock
from badcjobs.workers.plan import plan_workers
from badcjobs.workers.ramp import Beginning, Ramp, Step, begin
from badcjobs.workers.supervise import Supervisor

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_DYING_S = 30.0  # the workers of a device that is lost do not end all at once
_LIKE = 0.25  # cores per device may differ so much from those of an earlier run

Note = Callable[[str, str | None, float | None, str], None]  # kind, subject, value, reason


@dataclass(frozen=True)
class Terms:
    """What a crew is made of: the devices (each with its id), cores, memory, and how many workers somebody wants."""

    devices: Sequence[tuple[int, Device]]
    cpus: int
    per_gpu: int | None  # None: auto
    cpu_workers: int = 0
    memory_bytes: int | None = None  # main memory that was granted; None: nobody knows of a limit

    @property
    def model(self) -> str:
        """The model of the devices, under which lessons are kept."""
        return next((device.name for _, device in self.devices if device.name), "unknown")

    @property
    def cores(self) -> int:
        """Cores per device."""
        return max(1, self.cpus // max(1, len(self.devices)))


class Crew:
    """Plans the workers, then (with auto) watches what they achieve."""

    def __init__(self, terms: Terms, learned: Learned, note: Note, clock: Clock) -> None:
        self._terms = terms
        self._learned = learned
        self._note = note
        self._clock = clock
        self._next_s = 0.0
        self._ramp: Ramp | None = None
        self._slots = 0
        self._worker_bytes = 0  # of main memory, at most; 0: nobody has read it
        self._short_since_s: float | None = None  # since when there are fewer workers than there should be
        per_gpu = terms.per_gpu
        if per_gpu is None and terms.devices:
            per_gpu = self._begin().workers
        elif per_gpu is None and terms.cpu_workers:
            log.info("workers per device: there is no device; %d workers on the CPU, as asked for", terms.cpu_workers)
        self.plans = plan_workers(
            terms.devices, max_gpus=None, per_gpu=per_gpu or 1, cpu_workers=terms.cpu_workers, cpus=terms.cpus
        )
        self._slots = len(self.plans)

    def _begin(self) -> Beginning:
        terms, lesson = self._terms, self._learned.about(self._terms.model)
        like = lesson.cores is not None and abs(lesson.cores - terms.cores) <= _LIKE * terms.cores
        known = lesson.workers if like else None
        memories = [device.memory_total_bytes for _, device in terms.devices if device.memory_total_bytes]
        beginning = begin(
            cpus=terms.cpus,
            devices=len(terms.devices),
            memory_bytes=min(memories, default=None),
            known=known,
            granted_bytes=terms.memory_bytes,
            worker_bytes=lesson.worker_bytes,
        )
        settled = known is not None and lesson.settled and not beginning.short_of_memory
        self._ramp = Ramp(beginning, len(terms.devices), settled=settled, granted_bytes=terms.memory_bytes)
        self._decide(beginning.workers, f"to begin with: {beginning.reason}")
        return beginning

    def look(
        self,
        supervisor: Supervisor,
        *,
        left: int,
        memory_peaks: Callable[[float], dict[int, int]],
        memory_held: Callable[[], MemoryHeld | None],
    ) -> None:
        """Measure, and hire or retire; called all the time, at work once a second."""
        now_s = self._clock.monotonic_s()
        if self._ramp is None or self._ramp.settled or supervisor.draining or now_s < self._next_s:
            return
        self._next_s = now_s + _EVERY_S
        at_work = supervisor.slots_at_work
        on_device = Counter(at_work.values())  # a device that is lost has none, and tells nothing about the others
        if on_device and min(on_device.values()) < self._ramp.workers:
            self._short_since_s = now_s if self._short_since_s is None else self._short_since_s
            if now_s - self._short_since_s >= _DYING_S:
                self._obey(self._ramp.too_much("a worker has ended"), supervisor)
            return
        self._short_since_s = None
        tally = supervisor.tally
        step = self._ramp.look(
            now_s,
            work_done=supervisor.audio_done_s or float(tally.done),
            chunks_done=tally.done,
            chunks_left=left,
            all_warm=all(supervisor.finished.get(slot) for slot in at_work),
            memory_share=self._memory_share(memory_peaks(30.0)),
            memory_held=memory_held(),
        )
        self._worker_bytes = max(self._worker_bytes, (self._ramp.main_memory.peak_bytes or 0) // max(1, len(at_work)))
        self._obey(step, supervisor)

    def _obey(self, step: Step | None, supervisor: Supervisor) -> None:
        if step is None:
            return
        self._decide(step.workers, step.reason)
        by_device: dict[int | None, list[int]] = {}
        for slot, device_id in supervisor.slots_at_work.items():
            by_device.setdefault(device_id, []).append(slot)
        for device_id, device in self._terms.devices:
            slots = sorted(by_device.get(device_id, []))
            for slot in slots[step.workers :]:
                supervisor.retire(slot)
            if slots and len(slots) < step.workers and not step.settled:
                supervisor.hire(self._plan_one(device_id, device, step.workers))
        if self._ramp is not None and self._ramp.settled and step.workers in self._ramp.rates:
            self._learn(step)

    def _learn(self, step: Step) -> None:
        memory = {"worker_bytes": self._worker_bytes} if self._worker_bytes else {}
        self._learned.note(
            self._terms.model, workers=step.workers, cores=self._terms.cores, settled=step.settled, **memory
        )

    def _plan_one(self, device_id: int, device: Device, per_gpu: int) -> WorkerPlan:
        slot, self._slots = self._slots, self._slots + 1
        threads = max(1, self._terms.cpus // (per_gpu * len(self._terms.devices)))
        return WorkerPlan(slot, device, device_id, threads)

    def _memory_share(self, peaks: dict[int, int]) -> float | None:
        """Return how full the fullest device is; None: none says."""
        totals = {device_id: device.memory_total_bytes for device_id, device in self._terms.devices}
        shares = [used / total for device_id, used in peaks.items() if (total := totals.get(device_id))]
        return max(shares, default=None)

    def _decide(self, workers: int, reason: str) -> None:
        log.info("workers per device: %d; %s", workers, reason)
        self._note("workers_per_gpu", self._terms.model, workers, reason)
