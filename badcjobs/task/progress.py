"""The heartbeat line of a task's log: how the machine is, how far the work is, when it will be done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.model import Device
from badcjobs.seams import Clock
from badcjobs.store.task_writer import TaskWriter


@dataclass(frozen=True, slots=True)
class TaskProgress:
    """How far a task is."""

    chunks_settled: int
    chunks_total: int
    audio_done_s: float
    elapsed_s: float
    start_up_s: float = 0.0  # of that, before the first chunk was begun
    failed: int = 0  # of the settled ones, for good
    retrying: int = 0  # of those that are left: they have failed before, and are tried again or wait for it

    @property
    def rate(self) -> float | None:
        """Seconds of audio per second; None before anything is known."""
        return self.audio_done_s / self.elapsed_s if self.elapsed_s > 0 and self.audio_done_s > 0 else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last chunk, at the pace since the first; None before anything is known.

        Nor when nothing is left but what has failed before: how long that rests, and how often, has no pace.
        """
        left = self.chunks_total - self.chunks_settled
        if self.chunks_settled == 0 or 0 < left <= self.retrying:
            return None
        return max(0.0, self.elapsed_s - self.start_up_s) * left / self.chunks_settled


class Heartbeat:
    """Says when the next line is due."""

    def __init__(self, every_s: float, clock: Clock) -> None:
        self._every_s = every_s
        self._clock = clock
        self._next_s = clock.monotonic_s() + every_s

    @property
    def is_due(self) -> bool:
        """Whether it is time for a line; the next one is due after this, and what was slept through never."""
        late_s = self._clock.monotonic_s() - self._next_s
        if late_s < 0:
            return False
        self._next_s += self._every_s * (1 + late_s // self._every_s)
        return True


def heartbeat_line(progress: TaskProgress, load: Sequence[float | None], devices: int) -> str:
    """Return the line as other people's scripts read it; '?': not known. ``load``: percent of CPU, memory and GPU."""
    percents = ["?" if percent is None else f"{percent:.0f}%" for percent in load]
    rate, eta = "?", "?"
    if progress.rate is not None:  # a whole number; below 1, where that would be 0, two digits, and never 5e-05
        rate = f"{progress.rate:.0f}x" if progress.rate >= 1 else f"{max(progress.rate, 0.0001):.2g}x"
    if progress.eta_s is not None:
        minutes, seconds = divmod(round(progress.eta_s), 60)
        eta = f"{minutes // 60:02d}:{minutes % 60:02d}:{seconds:02d}"
    chunks = f"{progress.chunks_settled}/{progress.chunks_total}"
    machine = "cpu={} mem={} gpu={}".format(*percents)
    return f"heartbeat {machine} devices={devices} chunks={chunks} rate={rate} eta={eta}"


# --- work now ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeviceWorkNow:
    """What one device has done in this task, and what it is at."""

    label: str  # "GPU 0  Tesla V100", or "CPU"
    done: int
    audio_done_s: float
    working_on: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkNow:
    """The whole work and its devices."""

    progress: TaskProgress
    devices: tuple[DeviceWorkNow, ...]

    def rate_of(self, device: DeviceWorkNow) -> float | None:
        """Return how many seconds of audio per second a device does; None before anything is known."""
        elapsed_s = self.progress.elapsed_s
        return device.audio_done_s / elapsed_s if device.audio_done_s > 0 and elapsed_s > 0 else None

    @property
    def share(self) -> float:
        """How much of the work is settled, from 0 to 1."""
        return self.progress.chunks_settled / self.progress.chunks_total if self.progress.chunks_total else 1.0

    def share_of(self, device: DeviceWorkNow) -> float:
        """Return how far a device is: the one that has done most is as far as the whole work, the others are behind it.

        No device has chunks of its own; so one that hangs is seen to fall behind.
        """
        most = max(one.done for one in self.devices)
        return self.share * device.done / most if most else 0.0

    @property
    def pause(self) -> str:
        """What a device is at that works on no chunk; nothing to say of the moment between two."""
        now = self.progress
        if now.retrying and now.chunks_total - now.chunks_settled <= now.retrying:
            return "waits to try again"
        return "" if now.chunks_settled or now.retrying else "starting"


def count_progress(writer: TaskWriter, elapsed_s: float) -> TaskProgress:
    """Return how far the work is."""
    counts = writer.count_by_status()
    failed = counts.get("failed", 0) + counts.get("poison", 0)
    settled = counts.get("done", 0) + failed
    return TaskProgress(
        settled,
        settled + counts.get("pending", 0),
        writer.audio_done_s(),
        elapsed_s,
        start_up_s=writer.start_up_s() or 0.0,
        failed=failed,
        retrying=writer.count_retrying(),
    )


def count_work(writer: TaskWriter, devices: Sequence[Device], elapsed_s: float) -> WorkNow:
    """Return how far the work is, device by device."""
    labels: dict[int | None, str] = {
        writer.device_id(one): f"GPU {one.token if one.index is None else one.index}  {one.name or ''}".rstrip()
        for one in devices
    }
    done, under_way = writer.done_by_device(), writer.under_way()
    nothing = (0, 0.0)
    shown = tuple(
        DeviceWorkNow(label, *done.get(device_id, nothing), tuple(under_way.get(device_id, ())))
        for device_id, label in (labels or {None: "CPU"}).items()
    )
    return WorkNow(count_progress(writer, elapsed_s), shown)
