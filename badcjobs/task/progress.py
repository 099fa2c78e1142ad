"""Counts the progress of a task, and decides whether there is time for another chunk.

Progress is for the heartbeat line of the log and for the progress bars. The end time is read once, from the settings,
Slurm's variables or squeue (parsed in ``devices/allocation.py``); then no chunk is started that would not finish.
"""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from badcjobs.devices.allocation import END_VARIABLE, EndTime, parse_end
from badcjobs.devices.slurm_programs import show_end_time
from badcjobs.model import Allocation, Chunk, Device, parse_stop_after
from badcjobs.seams import Clock
from badcjobs.store.connect import grouped
from badcjobs.store.task_writer import TaskWriter
from badcjobs.workers.work_queue import Fits

log = logging.getLogger(__name__)

_RESERVE_S = 20.0  # for the last publication, and for stopping the engines and the recorder
_MARGIN_S = 5.0  # because chunks differ
_SMALL_SHARE = 0.1  # reserve and margin take at most this share each, so that a task of one minute gets work done
_LEARN_EVERY_S = 1.0
_RECENT = 200  # chunks: enough for a p95, few enough to notice a device that slows down

Work = tuple[int | None, float | None, float]  # device_id, seconds of audio (None: not known), seconds of work


@dataclass(frozen=True)
class DeviceWorkNow:
    """What one device has done in this task, and the chunks in progress on it."""

    label: str  # "GPU 0  Tesla V100", or "CPU"
    done: int
    audio_done_s: float
    working_on: tuple[str, ...]


@dataclass(frozen=True)
class TaskProgress:
    """The progress of a task."""

    chunks_settled: int
    chunks_total: int
    audio_done_s: float
    elapsed_s: float
    start_up_s: float  # the part of elapsed_s before the first chunk
    failed: int  # the part of chunks_settled that failed for good
    retrying: int  # chunks not settled that have failed before
    devices: tuple[DeviceWorkNow, ...]

    @property
    def rate(self) -> float | None:
        """Seconds of audio per second; None: not known yet."""
        if self.elapsed_s <= 0 or self.audio_done_s <= 0:
            return None
        return self.audio_done_s / self.elapsed_s

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last chunk, at the pace since the first one; None: not known yet.

        Also None if only chunks that have failed before are left: their waiting time has no pace.
        """
        left = self.chunks_total - self.chunks_settled
        if self.chunks_settled == 0 or 0 < left <= self.retrying:
            return None
        return max(0.0, self.elapsed_s - self.start_up_s) * left / self.chunks_settled


def heartbeat_line(progress: TaskProgress, load: Sequence[float | None], devices: int, lost: int) -> str:
    """Return the heartbeat line, a promised format. ``load``: percent of CPU, memory and GPU; '?': not known.

    ``lost``: how many of the devices no longer work.
    """
    cpu, memory, gpu = ("?" if percent is None else f"{percent:.0f}%" for percent in load)
    at_work = f"{devices - lost}/{devices}" if lost else devices
    chunks = f"{progress.chunks_settled}/{progress.chunks_total}"
    rate = "?"
    if progress.rate is not None and progress.rate >= 1:
        rate = f"{progress.rate:.0f}x"
    elif progress.rate is not None:  # two digits, because 0x would be wrong; never 5e-05
        rate = f"{max(progress.rate, 0.0001):.2g}x"
    eta = "?"
    if progress.eta_s is not None:
        minutes, seconds = divmod(round(progress.eta_s), 60)
        eta = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
    return f"heartbeat cpu={cpu} mem={memory} gpu={gpu} devices={at_work} chunks={chunks} rate={rate} eta={eta}"


def count_progress(writer: TaskWriter, elapsed_s: float, devices: Sequence[Device] = ()) -> TaskProgress:
    """Count the progress of the task, and of each of these devices."""
    counts = writer.counts()
    settled = counts.done + counts.failed
    done = writer.done_by_device()
    under_way = writer.under_way()
    labels: dict[int | None, str] = {writer.device_id(device): _label_of(device) for device in devices}
    work = []
    for device_id, label in (labels or {None: "CPU"}).items():
        chunks, audio_s = done.get(device_id, (0, 0.0))
        work.append(DeviceWorkNow(label, chunks, audio_s, tuple(under_way.get(device_id, ()))))
    return TaskProgress(
        settled,
        settled + counts.pending,
        counts.audio_done_s,
        elapsed_s,
        start_up_s=counts.start_up_s,
        failed=counts.failed,
        retrying=counts.retrying,
        devices=tuple(work),
    )


def _label_of(device: Device) -> str:
    number = device.token if device.index is None else device.index
    return f"GPU {number}  {device.name or ''}".rstrip()


# --- the time limit ---------------------------------------------------------------------------------------------------


def find_end(
    stop_after: str | None,
    allocation: Allocation,
    environ: Mapping[str, str],
    now_ms: int,
) -> EndTime | None:
    """Return the end of our time: the user's setting, else Slurm's variable, else one call of squeue, else None."""
    seconds = parse_stop_after(stop_after or "")
    if seconds is not None:
        return EndTime(now_ms + round(seconds * 1000), "run.stop_after")
    if not allocation.in_slurm:
        return None
    known = parse_end(allocation.facts.get(END_VARIABLE, ""), END_VARIABLE, now_ms)
    return known or parse_end(show_end_time(allocation, environ), "squeue", now_ms)


class Rates:
    """Predicts how long a chunk takes: the 95th percentile of the chunks finished last."""

    def __init__(self, work: Iterable[Work] = ()) -> None:
        by_device = grouped(work)
        self._by_device = {device_id: _slowest(times) for device_id, times in by_device.items()}
        self._anywhere = _slowest(list(chain.from_iterable(by_device.values())))

    def expected_s(self, device_id: int | None, audio_s: float | None) -> float | None:
        """Return the expected seconds of a chunk on a device, or on any if it has finished none; None: not known."""
        per_audio_s, per_chunk_s = self._by_device.get(device_id, self._anywhere)
        if audio_s is None or per_audio_s is None:
            return per_chunk_s
        return per_audio_s * audio_s


def _slowest(times: Sequence[tuple[float | None, float]]) -> tuple[float | None, float | None]:
    """Return the p95 of seconds of work per second of audio, and per chunk."""
    return _p95([took_s / audio_s for audio_s, took_s in times if audio_s]), _p95([took_s for _, took_s in times])


def _p95(values: list[float]) -> float | None:
    return sorted(values)[math.ceil(0.95 * len(values)) - 1] if values else None


class TimeBudget:
    """Decides whether there is time for more work; without an end time there always is.

    Called from the workers' threads. After the start only the monotonic clock counts.
    """

    def __init__(self, end: EndTime | None, clock: Clock) -> None:
        self.out_of_time = False  # whether any work was refused
        self._reported = False
        self._clock = clock
        whole_s = math.inf
        if end is not None:
            whole_s = max(0.0, (end.at_ms - clock.now_ms()) / 1000)
        self._margin_s = min(_MARGIN_S, _SMALL_SHARE * whole_s)
        self._stop_at_s = clock.monotonic_s() + whole_s - min(_RESERVE_S, _SMALL_SHARE * whole_s)
        self._rates = Rates()  # replaced as one object, so that threads need no lock
        self._learn_at_left_s = math.inf

    @property
    def left_s(self) -> float:
        """Seconds until work must stop: the end less the reserve."""
        return self._stop_at_s - self._clock.monotonic_s()

    def learn(self, recent_work: Callable[[int], Iterable[Work]]) -> None:
        """Update the rates from the chunks finished last, at most once a second."""
        if math.isfinite(self.left_s) and self.left_s <= self._learn_at_left_s:
            self._learn_at_left_s = self.left_s - _LEARN_EVERY_S
            self._rates = Rates(recent_work(_RECENT))

    def may_start(self, ends_in_s: float | None, expected_s: float) -> bool:
        """Return whether work that ends in ``ends_in_s`` may start; None: not known, so any time left is enough."""
        if ends_in_s is None or self.left_s <= 0:
            return self.left_s > 0
        return ends_in_s + max(self._margin_s, _SMALL_SHARE * expected_s) <= self.left_s

    def fit_test(self, device_id: int | None, in_hand: Sequence[tuple[Chunk, int | None]], lanes: int) -> Fits:
        """Return a function that checks, chunk by chunk, whether a worker would finish it in time.

        ``in_hand``: the chunks that the worker already has, each with its start time (ms) if it has one; the worker
        runs ``lanes`` of them at a time. Each accepted chunk counts as in hand for the next.
        """
        rates = self._rates
        now_ms = self._clock.now_ms()
        free_in_s = [0.0] * max(1, lanes)  # a heap: when each lane is free
        for chunk, started_at_ms in sorted(in_hand, key=lambda work: work[1] is None):
            left_s = rates.expected_s(device_id, chunk.audio_s) or 0.0
            if started_at_ms is not None:  # a chunk that takes longer than expected may end at any time
                left_s = max(0.0, left_s - (now_ms - started_at_ms) / 1000)
            heapq.heapreplace(free_in_s, free_in_s[0] + left_s)

        def fits(chunk: Chunk) -> bool:
            expected_s = rates.expected_s(device_id, chunk.audio_s)
            ends_in_s = None if expected_s is None else free_in_s[0] + expected_s
            if not self.may_start(ends_in_s, expected_s or 0.0):
                self.out_of_time = True
                return False
            heapq.heapreplace(free_in_s, ends_in_s or free_in_s[0])
            return True

        return fits

    @property
    def is_news(self) -> bool:
        """Whether work was refused for lack of time, the first time that it is asked."""
        is_news = self.out_of_time and not self._reported
        self._reported = self.out_of_time
        return is_news

    @property
    def over(self) -> bool:
        """Whether the time for work is over."""
        is_over = self.left_s <= 0
        self.out_of_time = self.out_of_time or is_over
        return is_over
