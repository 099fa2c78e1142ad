"""Which lines are shown, and in which order. What is not known comes last in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from badcjobs.monitor.frame import STATES, DeviceLine, TaskLine
from badcjobs.monitor.totals import mean_utilization

Line = TypeVar("Line", TaskLine, DeviceLine)
_Value = float | tuple[float, ...] | None
DevicesOf = Mapping[str | None, Sequence[DeviceLine]]  # by the name of their task


def devices_by_task(devices: Iterable[DeviceLine]) -> DevicesOf:
    """Return the devices under the names of their tasks."""
    found: dict[str | None, list[DeviceLine]] = {}
    for device in devices:
        found.setdefault(device.task, []).append(device)
    return found


def _progress(task: TaskLine) -> float | None:
    return task.settled / task.chunks if task.chunks else None


# The order of the lines as they come is the first one. Most urgent, or largest, first.
TASK_ORDERS: dict[str, Callable[[TaskLine, DevicesOf], _Value]] = {
    "task": lambda task, devices: 0.0,
    "state": lambda task, devices: float(STATES.index(task.state)),
    "progress": lambda task, devices: _progress(task),
    "rate": lambda task, devices: _negative(task.rate),
    "ETA": lambda task, devices: _negative(task.ends_at_ms),
    "GPU": lambda task, devices: mean_utilization(devices.get(task.name, ())) if task.alive else None,
}
DEVICE_ORDERS: dict[str, Callable[[DeviceLine], _Value]] = {
    "task": lambda device: 0.0,
    "GPU": lambda device: device.shown.utilization_percent,
    "memory": lambda device: _negative(device.memory_percent),
    "temperature": lambda device: _negative(device.shown.temperature_c),
    "power": lambda device: _negative(device.shown.power_w),
    "rate": lambda device: _negative(device.rate),
}


def arrange_tasks(
    tasks: Sequence[TaskLine], devices: DevicesOf, *, order: str = "task", wanted: str = "", backwards: bool = False
) -> list[TaskLine]:
    """Return the tasks that match all words of ``wanted``, in an order of TASK_ORDERS."""
    key = TASK_ORDERS[order]
    return _sort(
        [task for task in tasks if _matches(_words_of_task(task), wanted)], lambda t: key(t, devices), backwards
    )


def arrange_devices(
    devices: Sequence[DeviceLine], *, order: str = "task", wanted: str = "", backwards: bool = False
) -> list[DeviceLine]:
    """Return the devices that match all words of ``wanted``, in an order of DEVICE_ORDERS.

    Those at work come first, then those of tasks that have ended.
    """
    kept = [device for device in devices if _matches(_words_of_device(device), wanted)]
    at_work, ended = [[device for device in kept if device.alive is alive] for alive in (True, False)]
    key = DEVICE_ORDERS[order]
    return [*_sort(at_work, key, backwards), *_sort(ended, key, backwards)]


def _sort(lines: Iterable[Line], key: Callable[[Line], _Value], backwards: bool) -> list[Line]:
    judged = [(key(line), line) for line in lines]
    known = [pair for pair in judged if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=backwards)  # type: ignore[arg-type, return-value]
    if backwards and known and known[0][0] == known[-1][0]:
        known.reverse()  # all alike: the order as they came, the other way round
    return [line for _, line in known] + [line for value, line in judged if value is None]


def _matches(words: str, wanted: str) -> bool:
    return all(word in words for word in wanted.lower().split())


def _words_of_task(task: TaskLine) -> str:
    return f"{task.label} {task.node or ''} {task.state} {task.engine or ''} {' '.join(task.working_on)}".lower()


def _words_of_device(device: DeviceLine) -> str:
    known = (device.task, device.node, device.name, device.uuid, *device.chunks)
    return " ".join(
        [*(word for word in known if word), f"gpu{device.index}", "running" if device.alive else "ended"]
    ).lower()


def _negative(value: float | None) -> float | None:
    return None if value is None else -value
