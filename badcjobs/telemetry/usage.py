"""Read what the task's own processes use: the wrapper, its workers, the recorder, and their child processes.

A process that has ended is not lost: as soon as its parent has waited for it, its CPU time and its bytes are part of
the parent's counters. So programs that run for less than the time between two readings are also counted."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass

import psutil

from badcjobs.model import MemoryHeld, UsageReading
from badcjobs.seams import Clock

log = logging.getLogger(__name__)

# Rarely, a child that ends between the reading of its parent and its own reading is counted twice.
_MORE_THAN_ALL_CORES = 1.1
_SHORTEST_S = 1.0
# From this age of a task: seconds between readings, and the share of a core for reading, because the kernel walks all
# pages of a process to count its memory. At first the number of workers depends on it.
_PACES = {0.0: (4.0, 0.05), 120.0: (10.0, 0.005), 3600.0: (30.0, 0.005)}
_FINISH_TIMEOUT_S = 1.0
_MOST_WAITING = 1000


@dataclass(eq=False)
class UsageWatch:
    """Reads in a thread, and keeps the readings until the thread that writes them takes them."""

    reader: UsageReader
    clock: Clock
    memory_held: MemoryHeld | None = None  # at the last reading; None: not known

    def __post_init__(self) -> None:
        self._over = threading.Event()
        self._waiting: deque[tuple[UsageReading, int]] = deque(maxlen=_MOST_WAITING)
        self._thread = threading.Thread(target=self._watch, name="badcjobs usage", daemon=True)
        self._thread.start()

    def take_readings(self) -> Iterator[tuple[UsageReading, int]]:
        """Yield the readings since the last call, with their times."""
        while self._waiting:
            yield self._waiting.popleft()

    def finish(self) -> None:
        """Take a last reading and stop; do not wait long for a /proc that hangs."""
        self._over.set()
        self._thread.join(_FINISH_TIMEOUT_S)

    def _watch(self) -> None:
        started_s = self.clock.monotonic_s()
        while True:
            began_s = self.clock.monotonic_s()
            cpu_before_s = time.thread_time()
            held = None
            try:
                reading = self.reader.read(began_s)
            except (OSError, psutil.Error) as error:
                log.warning("CPU and memory use of our processes cannot be read: %s", error)
                self._over.set()
            else:
                if reading is not None:
                    held = MemoryHeld(reading.memory_bytes, began_s)
                    self._waiting.append((reading, self.clock.now_ms()))
            self.memory_held = held
            if self._over.is_set():
                return
            self._over.wait(pause_s(began_s - started_s, time.thread_time() - cpu_before_s))


def pause_s(age_s: float, cost_s: float) -> float:
    """Return how long to wait after a reading: short at first, for short tasks; longer if reading is slow."""
    every_s, share = next(pace for since_s, pace in reversed(_PACES.items()) if age_s >= since_s)
    return max(min(every_s, max(_SHORTEST_S, age_s)), cost_s / share)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process; its counters include those of each child that it has waited for. None: no permission to read."""

    cpu_s: float
    rss_bytes: int = 0
    pss_bytes: int | None = None  # with its share of shared pages
    read_bytes: int | None = None  # by calls of read(), from files and pipes
    has_ended: bool = False


Processes = Mapping[int, ProcessUse]


@dataclass
class UsageReader:
    """Reads what a process and its descendants have used since the last reading, and their memory now."""

    pid: int
    _before: tuple[float, Processes] | None = None

    def read(self, at_s: float) -> UsageReading | None:
        """Return the reading at this time of a monotonic clock; None: the process itself is not visible."""
        processes = {}
        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            for process in (root, *root.children(recursive=True)):
                with suppress(psutil.NoSuchProcess):  # it has just ended
                    processes[process.pid] = _read(process)
        if self.pid not in processes:
            return None
        before_s, before = self._before or (at_s, None)
        self._before = (at_s, processes)
        return add_up(processes, before, at_s - before_s)


def _read(process: psutil.Process) -> ProcessUse:
    pss_bytes = read_bytes = None
    with process.oneshot():
        times = process.cpu_times()
        rss_bytes = process.memory_info().rss
        has_ended = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
        with suppress(psutil.AccessDenied, AttributeError):  # AttributeError: the kernel does not count it
            read_bytes = process.io_counters().read_chars
        with suppress(psutil.AccessDenied, AttributeError):
            pss_bytes = 0 if has_ended else process.memory_full_info().pss
        return ProcessUse(
            cpu_s=times.user + times.system + times.children_user + times.children_system,
            rss_bytes=rss_bytes,
            pss_bytes=pss_bytes,
            read_bytes=read_bytes,
            has_ended=has_ended,
        )


def add_up(now: Processes, before: Processes | None, seconds: float) -> UsageReading:
    """Return what the processes used between two readings; without an earlier one, only their memory now.

    If the PSS of one process is hidden, RSS is used for all; if the bytes of one are hidden, they are unknown.
    """
    living = [process for process in now.values() if not process.has_ended]
    memory_bytes = sum(process.pss_bytes or 0 for process in living)
    source = "pss"
    if any(process.pss_bytes is None for process in living):
        memory_bytes = sum(process.rss_bytes for process in living)
        source = "rss"

    cpu_cores = bytes_per_s = None
    if before is not None and seconds > 0:
        busy_cores = growth(before, now, lambda process: process.cpu_s) / seconds
        if busy_cores <= _MORE_THAN_ALL_CORES * (os.cpu_count() or 1):
            cpu_cores = round(busy_cores, 3)
        if all(process.read_bytes is not None for process in (*before.values(), *now.values())):
            bytes_per_s = round(growth(before, now, lambda process: process.read_bytes or 0) / seconds, 1)
    return UsageReading(cpu_cores, memory_bytes, bytes_per_s, len(living), source)


def growth(before: Processes, now: Processes, count: Callable[[ProcessUse], float]) -> float:
    """Return by how much a counter of all processes together has grown.

    What an ended child has counted is in the counter of the parent that waited for it. If no parent waited, it is lost;
    so the result of this one reading is too low, but never below zero.
    """
    return max(0.0, sum(map(count, now.values())) - sum(map(count, before.values())))
