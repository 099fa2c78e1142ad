"""Plans the workers: which device, how many threads. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.model import Device, WorkerPlan


def plan_workers(
    devices: Sequence[tuple[int, Device]], *, max_gpus: int | None, per_gpu: int, cpu_workers: int, cpus: int
) -> list[WorkerPlan]:
    """Return one plan per worker; ``devices`` are (device_id, device) in the order they were granted.

    ``cpu_workers`` come in only when there is no device: they are how to go on without, not an addition.
    """
    used = list(devices)[:max_gpus]
    places: list[tuple[int | None, Device | None]] = [pair for pair in used for _ in range(per_gpu)]
    if not devices:
        places = [(None, None)] * cpu_workers
    threads = max(1, cpus // len(places)) if places else 1
    return [WorkerPlan(slot, device, device_id, threads) for slot, (device_id, device) in enumerate(places)]
