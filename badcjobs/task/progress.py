"""How far the work of a task is: for the heartbeat line of its log, and for the progress bars."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.model import Device
from badcjobs.store.task_writer import TaskWriter


@dataclass(frozen=True, slots=True)
class DeviceWorkNow:
    """What one device has done in this task, and what it is at."""

    label: str  # "GPU 0  Tesla V100", or "CPU"
    done: int
    audio_done_s: float
    working_on: tuple[str, ...] = ()


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
    devices: tuple[DeviceWorkNow, ...] = ()

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


def count_progress(writer: TaskWriter, elapsed_s: float, devices: Sequence[Device] = ()) -> TaskProgress:
    """Return how far the work is, on each of these devices too."""
    counts = writer.count_by_status()
    failed = counts.get("failed", 0) + counts.get("poison", 0)
    settled = counts.get("done", 0) + failed
    done, under_way = writer.done_by_device(), writer.under_way()
    labels: dict[int | None, str] = {
        writer.device_id(one): f"GPU {one.token if one.index is None else one.index}  {one.name or ''}".rstrip()
        for one in devices
    }
    return TaskProgress(
        settled,
        settled + counts.get("pending", 0),
        writer.audio_done_s(),
        elapsed_s,
        start_up_s=writer.start_up_s() or 0.0,
        failed=failed,
        retrying=writer.count_retrying(),
        devices=tuple(
            DeviceWorkNow(label, *done.get(device_id, (0, 0.0)), tuple(under_way.get(device_id, ())))
            for device_id, label in (labels or {None: "CPU"}).items()
        ),
    )
