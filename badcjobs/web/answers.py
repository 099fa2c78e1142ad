"""The answers of the API, made from a look. Pure; None is what nobody knows."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from badcjobs.web.look import Look
from badcjobs.web.parameters import WrongQuestion

Document = Mapping[str, Any]


def summary(look: Look) -> dict[str, Any]:
    """Return all devices together, and by model."""
    every = [item.document for item in look.devices.values()]
    models: dict[str | None, list[Document]] = defaultdict(list)
    for device in every:
        if device["alive"]:
            models[device["name"]].append(device)
    return {
        "at_ms": look.at_ms,
        "title": look.title,
        "of_run": look.of_run,
        **_together([device for device in every if device["alive"]]),
        "ended": sum(not device["alive"] for device in every),
        "alerts": len(look.alerts),
        "models": [
            {"name": name, **_together(devices)} for name, devices in sorted(models.items(), key=lambda m: m[0] or "")
        ],
    }


def _together(devices: Sequence[Document]) -> dict[str, Any]:
    readings = [device["reading"] for device in devices]
    busy = _known(reading["utilization_percent"] for reading in readings)
    return {
        "devices": len(devices),
        "readable": sum(d["trouble"] is None and d["read_at_ms"] is not None for d in devices),
        "utilization_percent": sum(busy) / len(busy) if busy else None,
        "memory_used_bytes": _sum(reading["memory_used_bytes"] for reading in readings),
        "memory_total_bytes": _sum(device["memory_total_bytes"] for device in devices),
        "temperature_max_c": max(_known(reading["temperature_c"] for reading in readings), default=None),
        "power_w": _sum(reading["power_w"] for reading in readings),
    }


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _sum(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) if known else None


def metrics(look: Look, wanted: Mapping[str, Any], processes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the devices one by one; ``processes`` by device key, for those that do not tell theirs themselves."""
    if wanted["task"] is not None:
        _task(look, wanted["task"])
    found = [item.document for item in look.devices.values() if _is_wanted(item.document, wanted)]
    if wanted["device"] is not None and not found:
        raise WrongQuestion(404, f"there is no device {wanted['device']}")
    return {
        "at_ms": look.at_ms,
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
        "at_ms": look.at_ms,
        "title": look.title,
        "total": look.total,
        "matched": len(found),
        "tasks": found[first:last],
        "remarks": list(look.remarks),
    }


def one_task(look: Look, name: str) -> dict[str, Any]:
    """Return a task with its devices and alerts."""
    return {
        "at_ms": look.at_ms,
        "task": _task(look, name),
        "devices": [i.document for i in look.devices.values() if i.document["task"] == name],
        "alerts": [alert for alert in look.alerts if alert["task"] == name],
    }


def alerts(look: Look) -> dict[str, Any]:
    """Return the trouble that goes on now."""
    return {"at_ms": look.at_ms, "alerts": list(look.alerts)}


def _task(look: Look, name: str) -> Document:
    item = look.tasks.get(name)
    if item is None:
        raise WrongQuestion(404, f"there is no task {name[:80]!r}")
    return item.document
