"""Adds up a live view: how far a run is as a whole, and when it will be done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from badcjobs.model import Progress, expected_end_ms
from badcjobs.monitor.frame import DeviceLine, TaskLine, Total


def add_up(
    tasks: Sequence[TaskLine],
    devices: Sequence[DeviceLine],
    *,
    done_everywhere: int = 0,
    audio_everywhere_s: float = 0.0,
    lives_everywhere: Iterable[tuple[int, int]] = (),
    source_chunks: int | None = None,
    array_count: int = 0,
    all_listed: bool = False,
    alone: bool = False,
) -> Total:
    """Add up a run; ``…_everywhere`` counts all attempts, also those that another one has followed.

    ``lives_everywhere``: when each began and was last heard of, in ms. ``array_count``: tasks of the array; 0: unknown.
    ``alone``: of one file, in which nobody expects the other parts of the source.

    A source may have been cut in several ways into parts, one after the other. Each cut covers all of it, so the chunks
    are those of one of them, not of all.
    """
    cut = _cut_to_count(tasks)
    listed = sum(task.chunks for task in cut)
    parts, parts_listed = _parts(cut, array_count)
    known = all_listed or parts == parts_listed or (source_chunks is not None and source_chunks >= listed)
    in_parts = parts is not None and not known and not alone
    chunks = listed if source_chunks is None else max(listed, source_chunks)
    failed = sum(task.failed for task in cut)
    done = min(chunks - failed, max(done_everywhere, sum(task.done + task.before for task in cut)))
    at_work = [device for device in devices if device.alive]
    ran_s = running_s(lives_everywhere)
    total = Total(
        states=dict(Counter(task.state for task in tasks)),
        devices=len(at_work),
        chunks=chunks,
        chunks_known=known,
        parts=parts if in_parts else None,
        parts_listed=parts_listed if in_parts else 0,
        done=done,
        failed=failed,
        audio_done_s=audio_everywhere_s,
        rate=_sum(task.rate for task in tasks if task.state == "running"),
        ended_at_ms=None if in_parts else _ended(tasks),
        ran_s=ran_s,
        speed=audio_everywhere_s / ran_s if audio_everywhere_s and ran_s > 0 else None,
        utilization_percent=mean_utilization(at_work),
        power_w=total_power_w(at_work),
    )
    return replace(total, ends_at_ms=_end(tasks, (total.source_chunks or chunks) - total.settled))


def _cut_to_count(tasks: Sequence[TaskLine]) -> Sequence[TaskLine]:
    """Return the tasks of the latest cut; of one that lists more, while the latest has not listed all."""
    cuts: dict[int | None, list[TaskLine]] = {}
    for task in tasks:
        if task.begun or task.chunks:
            cuts.setdefault(task.shard_count, []).append(task)
    by_age = sorted(cuts.values(), key=lambda cut: max(task.started_at_ms or 0 for task in cut), reverse=True)
    return max(by_age, key=lambda cut: sum(task.chunks for task in cut), default=())  # of equals the first


def _parts(cut: Sequence[TaskLine], array_count: int) -> tuple[int | None, int]:
    """Return into how many parts the source was cut (None: nobody knows), and how many of them these tasks have.

    Where the source lists manifests, each task of the array has one: its ``shard_count`` is of that one.
    """
    count = cut[0].shard_count if cut else None
    outside = any(task.job_id.startswith("local") for task in cut)  # such a task takes what --shard says, or all
    if cut and array_count and not outside and (count is None or count % array_count):
        return max(len(cut), array_count * (count or 1)), len(cut)
    return count, len({task.shard_index for task in cut})


def mean_utilization(devices: Iterable[DeviceLine]) -> float | None:
    """Return the mean over the devices that say it."""
    readings = [device.shown for device in devices]
    busy = [reading.utilization_percent for reading in readings if reading.utilization_percent is not None]
    return sum(busy) / len(busy) if busy else None


def total_power_w(devices: Iterable[DeviceLine]) -> float | None:
    """Return the sum over the devices that say it."""
    return _sum(device.shown.power_w for device in devices)


def _end(tasks: Sequence[TaskLine], left: int) -> int | None:
    """Return when all is done, at the pace of the tasks that run."""
    running = [_progress(task) for task in tasks if task.state == "running"]
    return expected_end_ms(running, left, [task.chunks_per_s for task in tasks if task.chunks_per_s])


def _progress(task: TaskLine) -> Progress:
    started_ms, pace = task.started_at_ms or 0, task.chunks_per_s
    # Its pace is that of its last sign; its file may have been published later.
    at_ms = round(started_ms + 1000 * task.done / pace) if pace else task.heard_at_ms or 0
    return Progress(started_ms, at_ms, task.done, task.pending, task.chunks > 0, task.workers)


def _ended(tasks: Sequence[TaskLine]) -> int | None:
    """Return when the last task ended; None: one goes on, as far as we know, or has not begun."""
    if not tasks or any(task.alive or not task.begun for task in tasks):
        return None
    return max((task.ended_at_ms or task.heard_at_ms or 0 for task in tasks), default=None)


def running_s(lives: Iterable[tuple[int, int]]) -> float:
    """Return for how long at least one was running; the days between two submissions do not count."""
    total_ms, until_ms = 0, 0
    for start_ms, end_ms in sorted(lives):
        total_ms += max(0, end_ms - max(start_ms, until_ms))
        until_ms = max(until_ms, end_ms)
    return total_ms / 1000


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
