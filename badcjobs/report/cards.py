"""The devices themselves: a job has a row for each device of each task, and one device may serve many tasks. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from badcjobs.report.words import count


class OfATask(Protocol):
    """One device of one task; its facts and its summary are both that."""

    @property
    def node(self) -> str: ...
    @property
    def uuid(self) -> str | None: ...
    @property
    def token(self) -> str: ...


def card(device: OfATask) -> tuple[str, str]:
    """Return what tells a device from all others, whichever task it works for."""
    return device.node, device.uuid or device.token


def cards(devices: Iterable[OfATask]) -> int:
    """Return how many devices these are, each counted once."""
    return len({card(device) for device in devices})


def rows_words(devices: Collection[OfATask], one: str = "device") -> str:
    """Return how many devices of tasks these are, and say so where one of them has served several tasks."""
    return count(len(devices), one) + of_tasks(devices)


def of_tasks(devices: Collection[OfATask]) -> str:
    """Return what goes behind a count of devices that were counted once for each task that had them."""
    return "" if cards(devices) == len(devices) else " of array tasks"
