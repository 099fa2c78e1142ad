"""Reads from /proc what the task's own processes use: the wrapper, its workers, the recorder, and what those start.

A process that has ended is not lost: as soon as its parent has waited for it, its CPU time and its bytes are part of
the parent's own. So programs that live for less than the time between two readings count too."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.model import MemoryHeld, UsageReading
from badcjobs.seams import Clock

log = logging.getLogger(__name__)

_NO_MEMORY = b"ZX"  # states of a process that has ended
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_LONGEST_FILE = 4096
_FORBIDDEN = (errno.EACCES, errno.EPERM)
# A child that ends between the look at its parent and the look at itself is counted twice, once in a long while.
_MORE_THAN_ALL_CORES = 1.1
_EVERY_S = 10.0
_LATER_EVERY_S = 30.0
_LATER_S = 3600.0
_SHORTEST_S = 1.0
_SHARE_OF_A_CORE = 0.005  # what reading may cost; the kernel goes through all pages of a process to count its memory
_PATIENCE_S = 1.0
_MOST_WAITING = 1000


class UsageWatch:
    """Reads in a thread, and keeps the readings until the thread that may write them asks for them."""

    def __init__(self, reader: UsageReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self.memory_held: MemoryHeld | None = None  # at the last reading; None: there is none, or no more of them
        self._over = threading.Event()
        self._waiting: deque[tuple[UsageReading, int]] = deque(maxlen=_MOST_WAITING)
        self._thread = threading.Thread(target=self._watch, name="badcjobs usage", daemon=True)
        self._thread.start()

    def news(self) -> Iterator[tuple[UsageReading, int]]:
        """Yield the readings since the last call, with their times."""
        while self._waiting:
            yield self._waiting.popleft()

    def finish(self) -> None:
        """Take a last reading and end; a /proc that hangs is left alone."""
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            began_s, cpu_before_s = self._clock.monotonic_s(), time.thread_time()
            self._read(began_s)
            cost_s = time.thread_time() - cpu_before_s
            is_over = self._over.is_set()
            if not is_over:
                self._over.wait(pause_s(began_s - self._started_s, cost_s))

    def _read(self, at_s: float) -> None:
        try:
            reading = self._reader.read(at_s)
        except OSError as error:
            log.warning("what our processes use cannot be read: %s", error)
            self.memory_held = None
            self._over.set()
        else:
            if reading is not None:
                self._waiting.append((reading, self._clock.now_ms()))
            self.memory_held = None if reading is None else MemoryHeld(reading.memory_bytes, at_s)


def pause_s(age_s: float, cost_s: float) -> float:
    """Return how long to wait after a reading: short at first, for short tasks; longer where reading takes long."""
    wanted_s = _LATER_EVERY_S if age_s >= _LATER_S else min(_EVERY_S, max(_SHORTEST_S, age_s))
    return max(wanted_s, cost_s / _SHARE_OF_A_CORE)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process; its counters hold those of every child that it has waited for."""

    pid: int
    parent: int
    started_ticks: int  # a number that is used again belongs to another process
    cpu_ticks: int
    rss_pages: int
    has_ended: bool
    read_bytes: int | None = None  # by calls of read(), from files and pipes; None: not to be seen


Processes = Mapping[int, ProcessUse]


class UsageReader:
    """What a process and all below it have used since the last reading, and the memory they hold now."""

    def __init__(self, pid: int, proc: Path = Path("/proc"), cores: int | None = None) -> None:
        self._pid = pid
        self._proc = str(proc)
        self._cores = cores or os.cpu_count() or 1
        self._before: tuple[float, Processes] | None = None

    def read(self, at_s: float) -> UsageReading | None:
        """Return the reading of this instant of a monotonic clock; None where not even we are to be seen."""
        found = family(self._scan(), self._pid)
        if not found:
            return None
        found = {pid: replace(process, read_bytes=self._bytes_read(pid)) for pid, process in found.items()}
        before, self._before = self._before, (at_s, found)
        memory_bytes, source = self._memory([one for one in found.values() if not one.has_ended])
        living = sum(not one.has_ended for one in found.values())
        if before is None or at_s <= before[0]:
            return UsageReading(None, memory_bytes, None, living, source)
        cpu_cores, bytes_per_s = _rates(before[1], found, at_s - before[0])
        possible = cpu_cores <= _MORE_THAN_ALL_CORES * self._cores
        return UsageReading(cpu_cores if possible else None, memory_bytes, bytes_per_s, living, source)

    def _scan(self) -> Iterable[ProcessUse]:
        """Yield all processes that are to be seen: their files say who their parents are, not their children."""
        with os.scandir(self._proc) as entries:
            names = [entry.name for entry in entries if entry.name.isdecimal()]
        for name in names:
            try:
                yield parse_process(int(name), _read(f"{self._proc}/{name}/stat"))
            except (OSError, ValueError, IndexError):
                continue  # it has ended meanwhile, or hides

    def _bytes_read(self, pid: int) -> int | None:
        try:
            return parse_bytes_read(_read(f"{self._proc}/{pid}/io"))
        except (OSError, ValueError, IndexError):
            return None

    def _memory(self, living: list[ProcessUse]) -> tuple[int, str]:
        """Return the memory of all, and how it was counted; one that hides makes us count all in the coarse way."""
        pss_bytes = 0
        for process in living:
            share_bytes = self._pss_bytes(process.pid)
            if share_bytes is None:
                return sum(one.rss_pages for one in living) * _PAGE_BYTES, "rss"
            pss_bytes += share_bytes
        return pss_bytes, "pss"

    def _pss_bytes(self, pid: int) -> int | None:
        """Return its memory, its part of shared pages included; None: it does not say; 0: it is no more."""
        try:
            return parse_pss(_read(f"{self._proc}/{pid}/smaps_rollup"))
        except OSError as error:
            is_there = Path(self._proc, str(pid), "stat").exists()
            hides = error.errno in _FORBIDDEN or (error.errno == errno.ENOENT and is_there)
            return None if hides else 0
        except (ValueError, IndexError):
            return None


def parse_process(pid: int, stat: bytes) -> ProcessUse:
    """Read /proc/PID/stat; a program's name may hold blanks and brackets."""
    words = stat.rpartition(b")")[2].split()
    return ProcessUse(
        pid=pid,
        parent=int(words[1]),
        started_ticks=int(words[19]),
        cpu_ticks=sum(map(int, words[11:15])),  # its own and its children's, each in user and system mode
        rss_pages=int(words[21]),
        has_ended=words[0] in _NO_MEMORY,
    )


def parse_bytes_read(io: bytes) -> int:
    """Read /proc/PID/io; rchar counts what read() gave, from whatever filesystem, cached or not."""
    return int(io.partition(b"rchar:")[2].split(None, 1)[0])


def parse_pss(rollup: bytes) -> int:
    """Read /proc/PID/smaps_rollup, in bytes."""
    return int(rollup.partition(b"\nPss:")[2].split(None, 1)[0]) * 1024


def family(processes: Iterable[ProcessUse], pid: int) -> dict[int, ProcessUse]:
    """Return a process and all below it, by their numbers; nothing where it is not to be seen itself."""
    children: dict[int, list[ProcessUse]] = {}
    found: dict[int, ProcessUse] = {}
    for process in processes:
        children.setdefault(process.parent, []).append(process)
        if process.pid == pid:
            found[pid] = process
    unvisited = list(found)
    while unvisited:
        for child in children.get(unvisited.pop(), []):
            if child.pid not in found:
                found[child.pid] = child
                unvisited.append(child.pid)
    return found


def growth(before: Processes, now: Processes, count: Callable[[ProcessUse], int]) -> int:
    """Return by how much a counter of the whole family has grown.

    What an ended child had counted before comes a second time in the counter of whoever waited for it, and is taken
    off there. Never below zero: a child that nobody waited for leaves its counter to nobody.
    """
    same = {pid for pid in before if pid in now and before[pid].started_ticks == now[pid].started_ticks}
    seen_twice: Counter[int] = Counter()
    for pid in before.keys() - same:
        heir = before[pid].parent
        while heir in before and heir not in same:
            heir = before[heir].parent
        seen_twice[heir] += count(before[pid])
    new = sum(count(now[pid]) for pid in now.keys() - same)
    return new + sum(max(0, count(now[pid]) - count(before[pid]) - seen_twice[pid]) for pid in same)


def _rates(before: Processes, now: Processes, seconds: float) -> tuple[float, float | None]:
    """Return cores busy, and bytes per second if everybody said how many there were."""
    cpu_cores = growth(before, now, lambda process: process.cpu_ticks) / _TICKS_PER_S / seconds
    if any(process.read_bytes is None for process in (*before.values(), *now.values())):
        return round(cpu_cores, 3), None
    read_bytes = growth(before, now, lambda process: process.read_bytes or 0)
    return round(cpu_cores, 3), round(read_bytes / seconds, 1)


def _read(path: str) -> bytes:
    """Return a file of /proc; a third of the time that Python's own open() takes."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return os.read(descriptor, _LONGEST_FILE)
    finally:
        os.close(descriptor)
