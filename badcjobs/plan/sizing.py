"""How many array tasks, and how much audio for each, so that each ends well inside its time."""

from __future__ import annotations

import math
from dataclasses import dataclass

from badcjobs.plan.lengths import Lengths
from badcjobs.plan.margin import Margin, round_up
from badcjobs.plan.shares import Share, share_out
from badcjobs.plan.speed import Speed
from badcjobs.plan.wish import Caps, Wish

_WORTH_A_START = 10  # a task is not cut off for more GPUs unless it works ten times as long as it starts up
_TRIES = 50


@dataclass(frozen=True, slots=True)
class Sizing:
    """The array tasks of a plan."""

    gpus: int  # of each task
    time_s: int  # that each asks for
    chosen: bool  # the time limit is what the work needs; else what was wanted
    shares: tuple[Share, ...]
    longest_chunk_s: float  # seconds of audio that one GPU finishes in a task's time, however slow
    expected_s: float  # of the fullest task, at the mean speed
    work_s: float  # of all tasks together on all their GPUs, without start-up


def size_tasks(lengths: Lengths, speed: Speed, margin: Margin, wish: Wish, caps: Caps) -> Sizing:
    """Return the fewest tasks that end in time; more where there are GPUs for them and each is worth its start-up."""
    gpus, most_s = wish.task_gpus(caps), wish.longest_s(caps)
    rate = speed.audio_hours_per_gpu_hour
    usable_s = margin.work_s(most_s)
    # While one GPU is at the longest chunk, which may come last, the others have nothing left to do.
    tail_s = min(lengths.longest_ms / 1000 / rate * (1 - 1 / gpus), usable_s / 2)
    room_ms = (usable_s - tail_s) * gpus * rate * 1000
    whole_s = lengths.total_ms / 1000 / rate / gpus  # as one task
    at_least = max(1, math.ceil(lengths.total_ms / room_ms), _for_all_gpus(whole_s, margin, wish, caps))
    shares = _share_out(lengths, min(at_least, lengths.rows), room_ms)
    fullest_s = max(share.audio_ms for share in shares) / 1000 / rate / gpus
    needed_s = round_up(margin.time_s(fullest_s + tail_s))
    return Sizing(
        gpus=gpus,
        time_s=wish.time_s or min(needed_s, int(most_s)),
        chosen=wish.time_s is None,
        shares=tuple(shares),
        longest_chunk_s=usable_s * rate,
        expected_s=margin.start_up_s + fullest_s,
        work_s=whole_s * gpus,
    )


def _share_out(lengths: Lengths, tasks: int, room_ms: float) -> list[Share]:
    """Share out to as many tasks as it takes until none has too much; a single chunk cannot be shared."""
    for _ in range(_TRIES):
        shares = share_out(lengths, tasks)
        fullest_ms = max((share.audio_ms for share in shares if share.rows > 1), default=0)
        if fullest_ms <= room_ms or tasks >= lengths.rows:
            break
        tasks = min(lengths.rows, max(tasks + 1, math.ceil(tasks * fullest_ms / room_ms)))
    return shares


def _for_all_gpus(whole_s: float, margin: Margin, wish: Wish, caps: Caps) -> int:
    """Return how many tasks it takes to have all GPUs at work at a time, as far as that is worth their start-up."""
    at_a_time = wish.gpus or caps.plan_gpus
    if at_a_time is None:
        return 1
    worth = whole_s / (_WORTH_A_START * max(margin.start_up_s, 1.0))
    return int(min(at_a_time // wish.task_gpus(caps), worth))
