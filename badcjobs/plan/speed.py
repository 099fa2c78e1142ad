"""How fast the work goes, and what a task needs for it: from what a job has measured, or as somebody says."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from badcjobs.model import JobFacts, TaskFacts

_ENOUGH_S = 60.0  # of work; a task that had less says little about its node
_SLOWEST_PERCENT = 5
Curve = tuple[tuple[float, float], ...]  # length of the chunks in seconds, times real time; the shortest first
ASSUMED_START_UP_S = 300.0  # models read from a shared filesystem by many tasks at once


@dataclass(frozen=True, slots=True)
class Speed:
    """What a GPU gets done once it works; None: nobody has measured it."""

    audio_hours_per_gpu_hour: float
    origin: str  # in words
    start_up_s: float | None = None  # of a task, from its start to the first chunk; only one in twenty took longer
    slowness: float | None = None  # so many times as slow as all together were the slowest twentieth of the tasks
    tasks: int = 0  # that was measured on
    gpu_hours: float | None = None
    devices: tuple[str, ...] = ()
    memory_bytes_per_gpu: float | None = None  # the most of any task
    cores_per_gpu: float | None = None  # busy on average, the most of any task
    chunk_s: float | None = None  # the mean length of the chunks that it is the speed of
    curve: Curve = ()  # a probe's trials
    lean_curve: Curve = ()  # with one thread, and nothing beside it
    safe_s: float | None = None  # longer chunks are done with one thread; None: nothing was too long, or nobody tried
    lean_safe_s: float | None = None  # and still longer ones in pieces
    best_s: float | None = None  # the best length that is safe
    doubts: tuple[str, ...] = ()  # why it may be the speed of something else
    remedy: str | None = None  # against these doubts, a line to paste: measure it anew; None: nobody knows one


class NothingMeasured(Exception):
    """A job says nothing about the speed of GPUs; the text says why."""


def speed_of(job: JobFacts, name: str) -> Speed:
    """Return what a job has measured; start-up is counted apart, so that a short first job is no slander."""
    start_up_s = _start_ups(job)
    worked = [task for task in job.tasks if task.devices and task.audio_s > 0]
    if not worked:
        why = "none of its tasks had a GPU" if any(task.audio_s > 0 for task in job.tasks) else "nothing is done in it"
        raise NothingMeasured(why)
    work_s = {task.name: max(task.wall_s * task.devices - sum(start_up_s[task.name]), 0.001) for task in worked}
    total_s = sum(work_s.values())
    rate = sum(task.audio_s for task in worked) / total_s
    devices = Counter(device.name or "GPU" for device in job.devices)
    return Speed(
        audio_hours_per_gpu_hour=rate,
        origin=f"measured in {name}",
        start_up_s=_rank([max(times) for times in start_up_s.values() if times], 95),
        slowness=_slowness(worked, work_s, rate),
        tasks=len(worked),
        gpu_hours=total_s / 3600,
        devices=tuple(f"{many} × {model}" for model, many in sorted(devices.items())),
        memory_bytes_per_gpu=_most([(task.memory_peak_bytes, task.devices) for task in worked]),
        cores_per_gpu=_most([(task.cpu_mean_cores, task.devices) for task in worked]),
        chunk_s=_mean_chunk(worked),
    )


def _start_ups(job: JobFacts) -> Mapping[str, list[float]]:
    """Return for each task how long each of its devices took to its first chunk."""
    found: dict[str, list[float]] = defaultdict(list)
    for device in job.devices:
        if "start_up" in device.states:
            found[device.task].append(device.states["start_up"].total_s)
    return found


def _slowness(tasks: Sequence[TaskFacts], work_s: Mapping[str, float], rate: float) -> float | None:
    """Return how many times as slow the slowest twentieth was; None: one task has no spread."""
    long_enough = [task for task in tasks if work_s[task.name] >= _ENOUGH_S * task.devices]
    if len(long_enough) < 2:
        return None
    slowest = _rank([task.audio_s / work_s[task.name] for task in long_enough], _SLOWEST_PERCENT)
    return None if slowest is None else max(1.0, rate / slowest)


def _mean_chunk(tasks: Sequence[TaskFacts]) -> float | None:
    done = sum(task.done for task in tasks)
    return sum(task.audio_s for task in tasks) / done if done else None


def _rank(values: Sequence[float], percent: int) -> float | None:
    """Return the nearest rank."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def _most(pairs: Sequence[tuple[float | None, int]]) -> float | None:
    return max((value / devices for value, devices in pairs if value is not None), default=None)
