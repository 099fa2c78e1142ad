"""The answers of the API, made from a look. Pure; None is what nobody knows."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from badcjobs import __version__
from badcjobs.live.snapshot import Snapshot, alert_document, device_document, mean_of_known, sum_of_known, task_document
from badcjobs.report.prometheus import Sample, device_samples, reading_samples, run_samples, task_samples
from badcjobs.report.summary import Summary
from badcjobs.store.read_model import DeviceFacts, TaskFacts

Document = Mapping[str, Any]
Facts = TypeVar("Facts", TaskFacts, DeviceFacts)


class WrongQuestion(Exception):
    """A request that cannot be answered; becomes an answer in JSON with this status."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


def json_text(document: object) -> str:
    """Return JSON as short as it gets; NaN is no JSON and a mistake of ours."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class Item:
    """A task or a device: its document, and the text that listeners get of it, made once for all of them."""

    document: Document
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """A snapshot as JSON documents. A task or device that has not changed is the same Item as before."""

    snapshot: Snapshot
    total: Document = field(default_factory=dict)
    tasks: Mapping[str, Item] = field(default_factory=dict)  # by name
    devices: Mapping[str, Item] = field(default_factory=dict)  # by key
    alerts: tuple[Document, ...] = ()


class Documents:
    """Turns one snapshot after the other into looks."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[TaskFacts, Item]] = {}
        self._devices: dict[str, tuple[DeviceFacts, Item]] = {}

    def look(self, snapshot: Snapshot) -> Look:
        """Return a snapshot as a look; what is as before keeps its Item."""
        self._tasks = _renew(self._tasks, {task.name: task for task in snapshot.tasks}, _task_item)
        self._devices = _renew(self._devices, _by_key(snapshot.devices), _device_item)
        return Look(
            snapshot,
            total=snapshot.total.to_dict(),
            tasks={name: item for name, (_, item) in self._tasks.items()},
            devices={key: item for key, (_, item) in self._devices.items()},
            alerts=tuple(alert_document(alert) for alert in snapshot.alerts),
        )


def _renew(
    known: Mapping[str, tuple[Facts, Item]], now: Mapping[str, Facts], make: Callable[[str, Facts], Item]
) -> dict[str, tuple[Facts, Item]]:
    before = {key: known[key] for key, facts in now.items() if key in known and known[key][0] == facts}
    return {key: before.get(key) or (facts, make(key, facts)) for key, facts in now.items()}


def _task_item(_name: str, task: TaskFacts) -> Item:
    document = task_document(task)
    return Item(document, json_text(document))


def _device_item(key: str, device: DeviceFacts) -> Item:
    document = {"key": key, **device_document(device)}
    # Listeners are sent every device; a chart of one that has ended is there for those who ask.
    return Item(document, json_text(document if device.alive else {**document, "trail": None}))


def _by_key(devices: Iterable[DeviceFacts]) -> dict[str, DeviceFacts]:
    """Return the devices by what tells each from all others."""
    found: dict[str, DeviceFacts] = {}
    for device in devices:
        key = first = f"{device.task or device.node}/{device.uuid or device.token or device.index}"
        number = 1
        while key in found:
            number += 1
            key = f"{first}#{number}"
        found[key] = device
    return found


# --- answers ----------------------------------------------------------------------------------------------------------


def summary(look: Look) -> dict[str, Any]:
    """Return all devices together, and by model."""
    every = [item.document for item in look.devices.values()]
    models: dict[str | None, list[Document]] = defaultdict(list)
    for device in every:
        if device["alive"]:
            models[device["name"]].append(device)
    return {
        "at_ms": look.snapshot.at_ms,
        "title": look.snapshot.title,
        "of_run": look.snapshot.of_run,
        **_together([device for device in every if device["alive"]]),
        "ended": sum(not device["alive"] for device in every),
        "alerts": len(look.alerts),
        "models": [
            {"name": name, **_together(devices)} for name, devices in sorted(models.items(), key=lambda m: m[0] or "")
        ],
    }


def _together(devices: Sequence[Document]) -> dict[str, Any]:
    readings = [device["reading"] for device in devices]
    heat = [reading["temperature_c"] for reading in readings if reading["temperature_c"] is not None]
    return {
        "devices": len(devices),
        "readable": sum(d["trouble"] is None and d["read_at_ms"] is not None for d in devices),
        "utilization_percent": mean_of_known(reading["utilization_percent"] for reading in readings),
        "memory_used_bytes": sum_of_known(reading["memory_used_bytes"] for reading in readings),
        "memory_total_bytes": sum_of_known(device["memory_total_bytes"] for device in devices),
        "temperature_max_c": max(heat, default=None),
        "power_w": sum_of_known(reading["power_w"] for reading in readings),
    }


def metrics(look: Look, wanted: Mapping[str, Any], processes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the devices one by one; ``processes`` by device key, for those that do not tell theirs themselves."""
    if wanted["task"] is not None:
        _task(look, wanted["task"])
    found = [item.document for item in look.devices.values() if _is_wanted(item.document, wanted)]
    if wanted["device"] is not None and not found:
        raise WrongQuestion(404, f"there is no device {wanted['device']}")
    return {
        "at_ms": look.snapshot.at_ms,
        "devices": [_with(device, processes.get(device["key"]), trail=wanted["trail"]) for device in found],
    }


def _is_wanted(device: Document, wanted: Mapping[str, Any]) -> bool:
    names = {str(device["index"]), device["uuid"], device["token"], device["key"]}
    return (
        (wanted["task"] is None or device["task"] == wanted["task"])
        and (wanted["device"] is None or wanted["device"] in names)
        and (wanted["alive"] is None or device["alive"] == wanted["alive"])
    )


def _with(device: Document, processes: Any, *, trail: bool) -> Document:
    told = device["processes"] if processes is None else processes
    return {**device, "processes": told, **({} if trail else {"trail": None})}


def tasks(look: Look, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tasks that are wanted, some at a time, and the total of all."""
    found = [i.document for i in look.tasks.values() if wanted["state"] in (None, i.document["state"])]
    first = wanted["offset"]
    last = None if wanted["limit"] is None else first + wanted["limit"]
    return {
        "at_ms": look.snapshot.at_ms,
        "title": look.snapshot.title,
        "total": look.total,
        "matched": len(found),
        "tasks": found[first:last],
        "remarks": list(look.snapshot.remarks),
    }


def one_task(look: Look, name: str) -> dict[str, Any]:
    """Return a task with its devices and alerts."""
    return {
        "at_ms": look.snapshot.at_ms,
        "task": _task(look, name),
        "devices": [i.document for i in look.devices.values() if i.document["task"] == name],
        "alerts": [alert for alert in look.alerts if alert["task"] == name],
    }


def _task(look: Look, name: str) -> Document:
    item = look.tasks.get(name)
    if item is None:
        raise WrongQuestion(404, f"there is no task {name[:80]!r}")
    return item.document


# --- metrics for Prometheus -------------------------------------------------------------------------------------------


def snapshot_samples(snapshot: Snapshot, run: str, summary: Summary | None = None) -> Iterator[Sample]:
    """Yield the samples of a snapshot; ``run`` names the run, if it is of one, and ``summary`` has its accounts."""
    yield Sample("badcjobs_info", 1, {"version": __version__})
    for device in snapshot.devices:
        if device.alive:  # the last reading of a task that has ended is no reading of now
            yield from _readings(device)
    for task in snapshot.tasks:
        if task.state == "running":  # nor is that of one that went silent
            yield from _host(task)
    if summary is not None:
        for its_device in summary.devices:
            yield from device_samples(its_device)
        for its_task in summary.facts.tasks:
            yield from task_samples(its_task)
        yield from run_samples(summary, run)


def _readings(device: DeviceFacts) -> Iterator[Sample]:
    label = device.token if device.index is None else str(device.index)
    labels = {"device": label or "", "uuid": device.uuid or "", "task": device.task or ""}
    yield from reading_samples({**asdict(device.reading), "at_ms": device.read_at_ms}, labels)
    yield Sample("badcjobs_gpu_memory_total_bytes", device.memory_total_bytes, labels)
    yield Sample("badcjobs_gpu_power_limit_watts", device.power_limit_w, labels)


def _host(task: TaskFacts) -> Iterator[Sample]:
    yield Sample("badcjobs_host_cpu_percent", task.cpu_percent, {"task": task.name})
    yield Sample("badcjobs_host_memory_used_bytes", task.memory_used_bytes, {"task": task.name})
