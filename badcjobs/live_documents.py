"""From frames of the live view to looks of the live page: what has not changed is not written again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import asdict
from typing import Any

from badcjobs.monitor.frame import DeviceLine, Frame, TaskLine
from badcjobs.web.look import Item, Look


class Documents:
    """Turns one frame after the other into looks."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[TaskLine, Item]] = {}
        self._devices: dict[str, tuple[DeviceLine, Item]] = {}

    def look(self, frame: Frame) -> Look:
        """Return a frame as a look; a line that is as before keeps its Item."""
        self._tasks = {line.name: self._task(line) for line in frame.tasks}
        self._devices = {key: self._device(key, line) for key, line in _with_keys(frame.devices)}
        return Look(
            at_ms=frame.at_ms,
            title=frame.title,
            of_run=frame.of_run,
            total=frame.total.to_dict(),
            tasks={name: item for name, (_, item) in self._tasks.items()},
            devices={key: item for key, (_, item) in self._devices.items()},
            alerts=tuple(asdict(alert) for alert in frame.alerts),
            remarks=frame.remarks,
            origin=frame,
        )

    def _task(self, line: TaskLine) -> tuple[TaskLine, Item]:
        known = self._tasks.get(line.name)
        if known is not None and (known[0] is line or known[0] == line):
            return known
        return line, Item.of(line.to_dict())

    def _device(self, key: str, line: DeviceLine) -> tuple[DeviceLine, Item]:
        known = self._devices.get(key)
        if known is not None and (known[0] is line or known[0] == line):
            return known
        document: dict[str, Any] = {"key": key, **line.to_dict()}
        # Listeners hear of every device; a chart of one that has ended is there for those who ask.
        return line, Item.of(document, told=document if line.alive else {**document, "trail": None})


def device_key(line: DeviceLine) -> str:
    """Return what tells a device from all others of a frame, nearly always."""
    place = line.node if line.task is None else line.task
    return f"{place}/{line.uuid or line.token or line.index}"


def _with_keys(lines: Iterable[DeviceLine]) -> Iterable[tuple[str, DeviceLine]]:
    seen: set[Hashable] = set()
    for line in lines:
        key, number = device_key(line), 1
        while key in seen:
            number += 1
            key = f"{device_key(line)}#{number}"
        seen.add(key)
        yield key, line
