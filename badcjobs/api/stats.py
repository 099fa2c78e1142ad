"""The figures of ``Recorder.stats()``: what was read so far, device by device."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import TypedDict

from badcjobs.model import Device
from badcjobs.store.figures import describe

_MIB = 2**20


class Figures(TypedDict):
    """One metric over all samples that had a value; None: none had one. p50 and p95 are by nearest rank."""

    min: float | None
    mean: float | None
    p50: float | None
    p95: float | None
    max: float | None
    samples: int


class DeviceStats(TypedDict):
    """One device."""

    name: str | None
    utilization: Figures  # percent
    memory_used_mb: Figures  # MiB
    memory_usage_percent: Figures
    temperature_c: Figures
    power_draw_w: Figures


class Stats(TypedDict):
    """What ``Recorder.stats()`` returns."""

    monitoring_duration_seconds: float
    sample_count: int  # instants, not devices × instants
    gpu_stats: dict[str, DeviceStats]  # by the device's index


_Counts = Mapping[float, int]


def read_stats(uri: str | None, devices: Sequence[tuple[int, Device]], duration_s: float) -> Stats:
    """Return the figures of a recorder's file or a task database; of one that cannot be read, nothing is known."""
    try:
        if uri is not None:
            with closing(sqlite3.connect(uri, uri=True)) as db:
                return _read(db, devices, duration_s)
    except sqlite3.Error:
        pass
    return _stats(duration_s, 0, [(device, [{}] * 4) for _, device in devices])


def _read(db: sqlite3.Connection, devices: Sequence[tuple[int, Device]], duration_s: float) -> Stats:
    (instants,) = db.execute(
        "SELECT count(*) FROM (SELECT at_ms FROM host_sample UNION SELECT at_ms FROM sample)"
    ).fetchone()
    metrics = ("utilization_percent", "memory_used_bytes", "temperature_c", "power_w")
    found = [(device, [_counts(db, device_id, metric) for metric in metrics]) for device_id, device in devices]
    return _stats(duration_s, int(instants), found)


def _counts(db: sqlite3.Connection, device_id: int, metric: str) -> _Counts:
    sql = f"SELECT {metric}, count(*) FROM sample WHERE device_id = ? AND {metric} IS NOT NULL GROUP BY 1"
    return dict(db.execute(sql, (device_id,)).fetchall())


def _stats(duration_s: float, instants: int, found: Sequence[tuple[Device, Sequence[_Counts]]]) -> Stats:
    stats: dict[str, DeviceStats] = {}
    for device, counts in found:
        stats[_name_of(device, stats)] = _device_stats(device, *counts)
    return {"monitoring_duration_seconds": duration_s, "sample_count": instants, "gpu_stats": stats}


def _device_stats(device: Device, busy: _Counts, used: _Counts, temperature: _Counts, power: _Counts) -> DeviceStats:
    total = device.memory_total_bytes
    return {
        "name": device.name,
        "utilization": _figures(busy),
        "memory_used_mb": _figures({value / _MIB: many for value, many in used.items()}),
        "memory_usage_percent": _figures({100 * value / total: many for value, many in used.items()} if total else {}),
        "temperature_c": _figures(temperature),
        "power_draw_w": _figures(power),
    }


def _figures(counts: _Counts) -> Figures:
    if not counts:
        return {"min": None, "mean": None, "p50": None, "p95": None, "max": None, "samples": 0}
    samples, low, mean, p50, p95, high = describe(counts)
    return {"min": low, "mean": mean, "p50": p50, "p95": p95, "max": high, "samples": samples}


def _name_of(device: Device, taken: Mapping[str, object]) -> str:
    """Return the device's index as text; slices of one card share it, so all but the first have their UUID."""
    index = device.token if device.index is None else str(device.index)
    return device.pin if index in taken else index
