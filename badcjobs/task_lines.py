"""From what a published database says of a task to its lines of the live view."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from badcjobs.model import is_silent, silent_after_s
from badcjobs.monitor.frame import AlertLine, DeviceLine, TaskLine, Trail
from badcjobs.store.live_snapshot import DeviceSnapshot, TaskSnapshot


@dataclass(frozen=True)
class ToldTask:
    """One attempt of a task: its lines, and which part of the source it has."""

    line: TaskLine
    devices: tuple[DeviceLine, ...]
    alerts: tuple[AlertLine, ...]
    part: tuple[object, ...]
    settings: str | None = None  # how it was told to work, as JSON

    @property
    def age(self) -> tuple[int, int]:
        """What is larger for a later attempt."""
        return self.line.started_at_ms or 0, self.line.restart

    @property
    def life(self) -> tuple[int, int]:
        """When it began and when it was last heard of, in ms."""
        start_ms = self.line.started_at_ms or 0
        return start_ms, max(start_ms, self.line.heard_at_ms or 0)

    def at(self, now_ms: int) -> ToldTask:
        """Return it as it looks at a moment: a task that should have been heard of by then is silent."""
        line = self.line
        overdue = line.state == "running" and is_silent(line.heard_at_ms, line.silent_after_s, now_ms)
        return self.silent if overdue else self

    @cached_property
    def silent(self) -> ToldTask:
        """The same, once it should have been heard of again and was not."""
        line = replace(self.line, state="silent", ends_at_ms=None)
        return replace(self, line=line, devices=self._devices_over("no word from its task"))

    @cached_property
    def killed(self) -> ToldTask:
        """The same, once somebody else has written down that it was ended before it could say so itself."""
        line = replace(self.line, state="killed", ends_at_ms=None, working_on=())
        return replace(self, line=line, devices=self._devices_over("its task was killed"))

    def _devices_over(self, trouble: str) -> tuple[DeviceLine, ...]:
        over: dict[str, Any] = {"alive": False, "trouble": trouble}
        return tuple(replace(device, means=device.trail.means, **over) for device in self.devices)


def tell_task(task: TaskSnapshot, published_at_ms: int, size_bytes: int) -> ToldTask:
    """Return the lines of a task as its file tells it."""
    alive = task.verdict is None
    elapsed_s = (task.last_sign_ms - task.started_at_ms) / 1000
    pace = task.done / elapsed_s if task.done and elapsed_s > 0 else None
    line = TaskLine(
        name=task.name,
        job_id=task.job_id,
        array_index=task.array_index,
        state=task.verdict or "running",
        procid=task.procid,
        restart=task.restart,
        node=task.node,
        engine=task.engine,
        devices=task.granted,
        workers=task.workers,
        shard_index=task.shard_index,
        shard_count=task.shard_count,
        exit_code=task.exit_code,
        started_at_ms=task.started_at_ms,
        ended_at_ms=task.ended_at_ms,
        heard_at_ms=max(task.last_sign_ms, published_at_ms) if alive else task.last_sign_ms,
        silent_after_s=silent_after_s(size_bytes, task.publish_every_s),
        done=task.done,
        failed=task.failed,
        before=task.before,
        pending=task.pending,
        audio_done_s=task.audio_done_s,
        rate=task.audio_done_s / elapsed_s if task.audio_done_s > 0 and elapsed_s > 0 else None,
        chunks_per_s=pace,
        ends_at_ms=round(task.last_sign_ms + 1000 * task.pending / pace) if pace and alive and task.pending else None,
        working_on=task.under_way if alive else (),
        cpu_percent=task.cpu_percent,
        memory_used_bytes=task.memory_used_bytes,
        memory_percent=task.memory_percent,
    )
    part = (task.array_index, task.procid, task.shard_index, task.shard_count)
    devices = tuple(_device(task, device, elapsed_s) for device in task.devices)
    return ToldTask(line, devices, tuple(_alerts(task)), part, task.settings)


def _device(task: TaskSnapshot, device: DeviceSnapshot, elapsed_s: float) -> DeviceLine:
    alive, trail = task.verdict is None, _trail(device.stretches)
    return DeviceLine(
        node=task.node,
        index=device.index,
        uuid=device.uuid,
        token=device.token,
        name=device.name,
        backend=device.backend,
        task=task.name,
        alive=alive,
        memory_total_bytes=device.memory_total_bytes,
        power_limit_w=device.power_limit_w,
        read_at_ms=device.read_at_ms,
        reading=device.reading,
        trail=trail,
        means=None if alive else trail.means,
        chunks=device.under_way if alive else (),
        chunks_done=device.done,
        audio_done_s=device.audio_done_s,
        rate=device.audio_done_s / elapsed_s if device.audio_done_s > 0 and elapsed_s > 0 else None,
    )


def _trail(stretches: Sequence[tuple[Any, ...]]) -> Trail:
    """Return stretches as columns; one that is missing is a step without a reading."""
    if not stretches:
        return Trail()
    from_ms, step_ms = stretches[0][0], max(1, stretches[0][1] - stretches[0][0])
    rows: list[Sequence[int | None]] = [(None,) * 4] * ((stretches[-1][0] - from_ms) // step_ms + 1)
    for stretch in stretches:
        rows[(stretch[0] - from_ms) // step_ms] = stretch[2:]
    return Trail(from_ms, step_ms, *(tuple(column) for column in zip(*rows, strict=True)))


def _alerts(task: TaskSnapshot) -> list[AlertLine]:
    devices = {device.device_id: device for device in task.devices}
    return [
        AlertLine(
            kind=alert.kind,
            severity=alert.severity,
            message=alert.message,
            node=task.node,
            started_at_ms=alert.started_at_ms,
            task=task.name,
            device_index=device.index if (device := devices.get(alert.device_id or 0)) else None,
            device_uuid=device.uuid if device else None,
            peak=alert.peak,
            threshold=alert.threshold,
        )
        for alert in task.alerts
    ]
