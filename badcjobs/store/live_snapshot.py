"""The nouns of a published database as the live view reads it: a task, its devices, its alerts. None: nobody knows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from badcjobs.model import Reading

Row = tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class OpenAlert:
    """Trouble that had not ended when the file was published."""

    device_id: int | None
    kind: str
    severity: str
    message: str
    started_at_ms: int
    peak: float | None
    threshold: float | None


@dataclass(frozen=True, slots=True)
class DeviceSnapshot:
    """One device of a task when its file was published."""

    device_id: int
    index: int | None
    uuid: str | None
    token: str
    name: str | None
    backend: str
    memory_total_bytes: int | None
    power_limit_w: float | None
    read_at_ms: int | None
    reading: Reading
    stretches: tuple[Row, ...]  # from_ms, to_ms, then whole means of utilization, memory, temperature and power
    under_way: tuple[str, ...]  # chunks
    done: int
    audio_done_s: float


@dataclass(frozen=True, slots=True)
class TaskSnapshot:
    """One task attempt when its file was published."""

    name: str
    job_id: str
    array_index: int
    restart: int
    node: str
    procid: int | None
    engine: str | None
    granted: int | None
    workers: int | None
    shard_index: int | None
    shard_count: int | None
    started_at_ms: int
    ended_at_ms: int | None
    exit_code: int | None
    verdict: str | None
    last_sign_ms: int
    done: int
    failed: int  # for good, here or before
    before: int  # done before this task
    pending: int
    audio_done_s: float
    settings: str | None  # how it was told to work, as JSON
    publish_every_s: float | None  # as it was asked to; None: not known
    cpu_percent: float | None
    memory_used_bytes: int | None
    memory_percent: float | None
    under_way: tuple[str, ...]
    devices: tuple[DeviceSnapshot, ...]
    alerts: tuple[OpenAlert, ...]
