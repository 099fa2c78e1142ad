"""How far the work of a task is at this moment, for whoever shows it: the whole, and device by device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.heartbeat import Progress
from badcjobs.model import Device
from badcjobs.store.live.task_writer import TaskWriter


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

    progress: Progress
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


def count_progress(writer: TaskWriter, elapsed_s: float) -> Progress:
    """Return how far the work is."""
    counts = writer.count_by_status()
    failed = counts.get("failed", 0) + counts.get("poison", 0)
    settled = counts.get("done", 0) + failed
    return Progress(
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
