"""How many workers a device gets with ``--workers-per-gpu auto``: one more while that pays. Pure.

All devices of a task go up together: they share the cores, which run out first, and the main memory, which is next
door (main_memory.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.model import MemoryHeld
from badcjobs.workers.main_memory import EACH_BYTES, MainMemory, count_with_room, size

_CORES_EACH = 4  # with so many cores for each, another worker has always paid
_MEMORY_EACH = 4 * 2**30  # what HawkEars takes with its usual threads, and half as much again
_MOST = 16
_PAYS = 1.05  # less than this is not worth its memory
_FULL = 0.9  # of a device's memory: more is an alert
_WINDOW_S = 5.0
_WINDOW_CHUNKS = 20  # per worker: with fewer, a chunk that happens to end inside or outside is worth more than 5 %
_WORTH_S = 60.0  # with less work left than this a new worker would hardly have started


@dataclass(frozen=True, slots=True)
class Beginning:
    """With how many workers each device starts, how many there may be, and why."""

    workers: int
    most: int
    reason: str
    short_of_memory: bool = False  # there would be more, but for the main memory


@dataclass(frozen=True, slots=True)
class Step:
    """What follows from the last measurement: so many workers per device from now on."""

    workers: int
    reason: str
    settled: bool  # it is the best there is; False: one more is tried, or would be if there were more work


def begin(
    *,
    cpus: int,
    devices: int,
    memory_bytes: int | None,
    known: int | None,
    granted_bytes: int | None = None,
    worker_bytes: int | None = None,
) -> Beginning:
    """Suggest with how many workers to start.

    ``memory_bytes``: of the smallest device; ``granted_bytes``: of main memory, for the task. From an earlier run:
    ``known``, what it has settled on, and ``worker_bytes``, the main memory of a worker.
    """
    cores = max(1, cpus // max(1, devices))
    room = _MOST if memory_bytes is None else max(1, int(_FULL * memory_bytes / _MEMORY_EACH))
    most = max(1, min(cores, _MOST))
    memory = "GPU memory not known" if memory_bytes is None else f"{memory_bytes / 2**30:.0f} GiB of GPU memory"
    words = f"{cores} {'core' if cores == 1 else 'cores'} and {memory} per device"
    wanted = min(max(1, cores // _CORES_EACH), room)
    if known is not None:
        wanted, words = min(known, most), f"an earlier run came to {known} ({words})"
    if granted_bytes is None:
        return Beginning(wanted, most, words)
    each_bytes = worker_bytes or EACH_BYTES
    fitting = count_with_room(granted_bytes, devices, each_bytes)
    if fitting >= wanted:
        return Beginning(wanted, most, words)
    words += f"; {size(granted_bytes)} of main memory were granted, and a worker may take {size(each_bytes)}"
    return Beginning(fitting, most, words, short_of_memory=True)


class Ramp:
    """Measures what each number of workers achieves, and says when to go on.

    Parameters
    ----------
    beginning: with how many per device the work was started.
    devices: how many devices there are.
    settled: an earlier run has found the best number already: nothing is tried.
    granted_bytes: the main memory of the task; None: nobody knows of a limit.
    """

    def __init__(self, beginning: Beginning, devices: int, *, settled: bool, granted_bytes: int | None = None) -> None:
        self.workers = beginning.workers
        self.settled = settled
        self.rates: dict[int, float] = {}  # workers per device → seconds of audio (or chunks) per second
        self.main_memory = MainMemory(granted_bytes)
        self._most = beginning.most
        self._devices = devices
        self._since: tuple[float, float, int] | None = None  # when the window began, work and chunks done by then

    def look(
        self,
        now_s: float,
        *,
        work_done: float,
        chunks_done: int,
        chunks_left: int,
        all_warm: bool,
        memory_share: float | None,
        memory_held: MemoryHeld | None,
    ) -> Step | None:
        """Return the next step; None: nothing is known yet, or nothing is to be tried any more.

        ``work_done``: seconds of audio (or chunks) finished so far; ``all_warm``: every worker has finished a chunk;
        ``memory_share``: of the fullest device; ``memory_held``: by all processes of the task, as it was last read.
        """
        if self.settled or not all_warm:
            return None
        if self._since is None:
            self._since = (now_s, work_done, chunks_done)
            self.main_memory.start_anew(now_s)
            return None
        self.main_memory.note(memory_held)
        started_s, work_before, chunks_before = self._since
        took_s, chunks = now_s - started_s, chunks_done - chunks_before
        if took_s < _WINDOW_S or chunks < _WINDOW_CHUNKS * self.workers * self._devices:
            return None
        self.rates[self.workers] = (work_done - work_before) / took_s
        return self._decide(memory_share, left_s=chunks_left * took_s / chunks)

    def too_much(self, reason: str) -> Step | None:
        """Go back by one: the memory of a device has run out."""
        if self.workers == 1:
            return None
        self.rates.clear()  # whatever was measured, this is not what it was about
        return self._settle(self.workers - 1, reason, final=False)

    def _decide(self, memory_share: float | None, left_s: float) -> Step | None:
        now, rate = self.workers, self.rates[self.workers]
        before = self.rates.get(now - 1)
        if before is not None and rate <= _PAYS * before:
            return self._settle(now - 1, f"{now} per device did {rate / before - 1:+.0%} against {now - 1}")
        gain = "" if before is None else f"{now} per device did {rate / before - 1:+.0%} against {now - 1}; "
        if now >= self._most:
            return self._settle(now, f"{gain}no more cores than that")
        if (too_little := self.main_memory.too_little_for(now)) is not None:
            return self._settle(now, f"{gain}{too_little}", final=False)  # another job may have asked for more
        if memory_share is not None and (share := memory_share * (now + 1) / now) > _FULL:
            # Not for good: it may be somebody else's work that fills the device today.
            return self._settle(now, f"{gain}one more might fill {share:.0%} of a device's memory", final=False)
        if left_s < _WORTH_S:
            return self._settle(now, f"{gain}only {left_s:.0f} s of work are left", final=False)
        if not self.main_memory.is_known:
            return None  # until the next reading
        self.workers = now + 1
        self._since = None
        return Step(self.workers, f"{gain}one more is tried", settled=False)

    def _settle(self, workers: int, reason: str, *, final: bool = True) -> Step:
        self.workers, self.settled = workers, True
        return Step(workers, reason, settled=final)
