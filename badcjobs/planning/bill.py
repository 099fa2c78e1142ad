"""Choose what a task requests (GPUs, workers, chunk length, cores, memory): the cheapest or the fastest.

Speed and memory are those that were measured with so many workers, or estimated: between two measured numbers of
workers the speed is interpolated, fewer than the fewest are slower in proportion, more than the most are no faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadcjobsError
from badcjobs.model import LEAST_CPUS, USUAL_MEMORY, USUAL_WORKERS, advised_gb, guessed_gb
from badcjobs.planning.plan_speed import Measured, Speed, find_speed, read_off
from badcjobs.planning.plan_survey import Lengths
from badcjobs.planning.plan_tasks import PlanWish
from badcjobs.planning.site import Site
from badcjobs.seams import Environ
from badcjobs.settings import PlanSettings, RunSettings, SubmitSettings
from badcjobs.words import count, memory, three_digits
from badcjobs.workers.chunk_audio import OVERLAP_S, WIDE_GRID_S

FASTEST = "fastest"
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of workers per GPU
_MANY_WORKERS = 6  # per GPU, for the fastest request, if the cores of a node are not known
ALIKE = 1.1  # lengths of chunks
_ESTIMATED = 1.05
_USUAL_START_UP_S = 15.0  # in the cost, until it is measured; the time limit has more


class Cut(NamedTuple):
    """A way to cut the recordings into chunks; None: not known."""

    chunk_s: float | None  # the length that recordings are cut to
    mean_s: float | None
    held_s: Callable[[int], float]  # workers of a task → mean length of their chunks while these are the longest
    repeated: float  # audio with its overlaps per audio recorded
    start_up: Callable[[float, int], float]  # speed, GPUs per task → start-up of all tasks per time of recordings


class Choice(NamedTuple):
    """What one task requests; None: not known."""

    gpus: int
    workers: int  # per GPU
    chunk_s: float | None
    cpus: int  # one for each worker, or as many as were busy
    mem_gb: int
    mem_why: str
    rate: float  # audio-hours per GPU-hour
    measured: bool  # the speed, with so many workers and chunks of about this length
    units_per_hour: float | None  # billed
    units_per_1000_audio_hours: float | None  # billed, with start-up
    joules_per_audio_hour: float | None  # of the GPUs
    fits: bool  # into a node, a device, and into what was asked for


def choose(
    speed: Speed,
    wish: PlanWish,
    site: Site,
    cuts: Sequence[Cut],
) -> tuple[Choice, Choice, list[Choice]]:
    """Return what to request, what is fastest, and all choices, the cheapest first.

    All are the same, whatever is preferred. The fastest has one worker per core, unless fewer were faster. If nothing
    fits, one worker is tried; if that does not fit either, it is the only choice.
    """
    gpus = wish.task_gpus(site)
    numbers_of_gpus = [gpus]
    if site.billing and wish.gpus_per_task is None:
        numbers_of_gpus += [fewer for fewer in (1, 2, 4) if fewer < gpus]
    ways = product(
        sorted(numbers_of_gpus),
        _numbers_of_workers(speed, wish, site, cuts),
        cuts,
    )
    choices = [_make_choice(speed, wish, site, *way) for way in ways]
    choices.sort(
        key=lambda choice: (_cost_of(choice), three_digits(choice.joules_per_audio_hour or 0.0), choice.mem_gb)
    )
    fitting = [choice for choice in choices if choice.fits]
    if not fitting and wish.workers is None:
        return choose(speed, replace(wish, workers=1), site, cuts)
    fitting = fitting or choices[:1]
    cheapest = fitting[0]

    def pace(choice: Choice) -> tuple[float, int, float]:
        return choice.gpus * choice.rate, max(choice.workers, speed.most_workers), -_cost_of(choice)

    fastest = max(fitting, key=pace)
    return fastest if wish.prefer == FASTEST else cheapest, fastest, fitting


def _numbers_of_workers(
    speed: Speed,
    wish: PlanWish,
    site: Site,
    cuts: Sequence[Cut],
) -> list[int]:
    """Return how many workers per GPU to compare; without a cost there is nothing to compare."""
    if wish.workers is not None:
        return [wish.workers]
    gpus = wish.task_gpus(site)
    full = site.cores_per_gpu or speed.most_workers or _MANY_WORKERS
    if wish.cpus:
        full = max(1, wish.cpus // gpus)
    elif site.node_cpus:
        full = max(1, min(full, site.node_cpus // gpus))
    room = max(speed.device_room(cut.held_s(gpus * full) or cut.chunk_s) for cut in cuts)
    full = int(min(full, room))
    if speed.points:
        measured = {point.workers for point in speed.points}
        return sorted({full, *measured, *(number for number in _NUMBERS if number < speed.most_workers)})
    usual = min(USUAL_WORKERS, full)
    if site.billing:
        return sorted({usual, full})
    return [full if wish.prefer == FASTEST else usual]


def _cost_of(choice: Choice) -> float:
    """Return the billed units or, without weights, GPU time; an estimate counts as a bit more."""
    cost = choice.units_per_1000_audio_hours or 1 / choice.rate
    if not choice.measured:
        cost *= _ESTIMATED
    return three_digits(cost)  # so that noise decides nothing


def usual_request(
    submit: SubmitSettings,
    prefer: str,
    settings: RunSettings,
    site: Site,
    environ: Environ,
    cwd: Path,
    lengths: Lengths | None = None,
) -> Choice:
    """Return what a job requests that was not planned; its speed is 1 if none is known here."""
    submit = replace(submit, gpus_per_task=submit.gpus_per_task or 1)
    wish = PlanWish.of(submit, PlanSettings(prefer), settings)
    try:
        speed = find_speed(None, None, settings, environ, cwd)
    except BadcjobsError:
        speed = Speed(1.0, "")
    lengths = lengths or Lengths()
    mean_s = lengths.mean_ms / 1000
    chunk_s = mean_s or settings.chunk_length_s
    cut = Cut(chunk_s, chunk_s, lengths.held_s, 1.0, lambda rate, gpus: 0.0)
    request, *_ = choose(speed, wish, site, [cut])
    return request


def billed_start_up_s(speed: Speed) -> float:
    """Return the start-up of a task that its cost includes."""
    if speed.start_up_s is None:
        return _USUAL_START_UP_S
    return speed.start_up_s


def list_lengths(speed: Speed) -> list[float]:
    """Return the lengths to which recordings can be cut, as far as anything is known about them."""
    lengths = {point.chunk_s if point.cut_s is None else point.cut_s for point in speed.points}
    lengths_s = {length_s for length_s in lengths if length_s}
    if speed.bytes_per_s:  # HawkEars
        steps = {8, *(max(1, round((length_s - OVERLAP_S) / WIDE_GRID_S)) for length_s in lengths_s)}
        lengths_s = {number * WIDE_GRID_S + OVERLAP_S for number in steps}
    return sorted(length_s for length_s in lengths_s if length_s <= (speed.safe_s or math.inf))


# --- one choice -------------------------------------------------------------------------------------------------------


def _make_choice(
    speed: Speed,
    wish: PlanWish,
    site: Site,
    gpus: int,
    workers: int,
    cut: Cut,
) -> Choice:
    """Return what a task with so many GPUs and workers on each requests and costs."""
    cpus, mem_gb, mem_why, fits = _size_request(speed, wish, site, gpus, workers, cut)
    rate = speed.audio_hours_per_gpu_hour
    if speed.points:  # the first point has the speed that is planned with
        usual = rate_of(speed.points, speed.points[0].workers, speed.chunk_s or cut.mean_s)
        rate *= rate_of(speed.points, workers, cut.mean_s) / usual
    hours = cut.repeated / (rate * gpus) + cut.start_up(rate, gpus)  # of tasks, for an hour of recordings
    alike = [point for point in speed.points if point.workers == workers and _is_alike(point.chunk_s, cut.mean_s)]
    units = None if site.billing is None else site.billing.per_hour(gpus, mem_gb, cpus)
    power_w = _power_of(speed.points, workers, cut.mean_s)
    return Choice(
        gpus=gpus,
        workers=workers,
        chunk_s=cut.chunk_s,
        cpus=cpus,
        mem_gb=0 if wish.mem_gb == 0 else mem_gb,  # Slurm: all memory of the node
        mem_why=mem_why,
        rate=rate,
        measured=bool(alike) and not speed.given,
        units_per_hour=units,
        units_per_1000_audio_hours=units and 1000 * units * hours,
        joules_per_audio_hour=power_w and 3600 * power_w * gpus * hours,
        fits=fits,
    )


def _size_request(
    speed: Speed,
    wish: PlanWish,
    site: Site,
    gpus: int,
    workers: int,
    cut: Cut,
) -> tuple[int, int, str, bool]:
    """Return the cores, the memory in GB and why, and whether the workers fit into them and into the devices."""
    in_all = gpus * workers
    held_s = cut.held_s(in_all) or cut.chunk_s
    busy = max((point.cores / point.workers for point in speed.points if point.cores), default=0.0)
    cpus = max(in_all, round(in_all * busy))
    mem_gb, mem_why = memory_of(speed, in_all, workers, held_s)
    most_cpus = wish.cpus or site.node_cpus or cpus
    most_gb = math.ceil(wish.mem_gb or site.node_memory_gb or mem_gb)
    fits = cpus <= most_cpus and mem_gb <= most_gb and workers <= speed.device_room(held_s)
    if wish.mem_gb is not None or mem_gb > most_gb:
        limit = "all of a node" if wish.mem_gb is None else "from [submit] mem"
        mem_why = f"{limit}; {mem_gb} GB would be requested: {mem_why}"
        mem_gb = most_gb
    cpus = wish.cpus or max(LEAST_CPUS, min(cpus, most_cpus))
    return cpus, mem_gb, mem_why, fits


def _is_alike(chunk_s: float | None, other_s: float | None) -> bool:
    return not chunk_s or not other_s or 1 / ALIKE <= chunk_s / other_s <= ALIKE


def rate_of(points: Sequence[Measured], workers: int, chunk_s: float | None) -> float:
    """Return the audio-hours per GPU-hour of so many workers per GPU with such chunks."""
    rates = {0: 0.0}
    for number in sorted({point.workers for point in points}):
        by_length = {point.chunk_s or 0.0: point.rate for point in points if point.workers == number}
        rates[number] = max(by_length.values())
        if chunk_s and (len(by_length) > 1 or points[0].cut_s is None):
            rates[number] = read_off(sorted(by_length.items()), chunk_s)
    for (few, slow), (many, fast) in pairwise(rates.items()):
        if workers <= many:
            return slow + (fast - slow) * (workers - few) / (many - few)
    return rates[max(rates)]


def memory_of(
    speed: Speed,
    in_all: int,
    workers: int,
    chunk_s: float | None,
) -> tuple[int, str]:
    """Return the memory to request for all workers of a task, so many per GPU, and why; None: of unknown length."""
    for_each = f"for each of {count(in_all, 'worker')}"
    points = [point for point in speed.points if point.memory_bytes and (chunk_s or not point.chunk_s)]
    if not points:
        guess = f"{memory(USUAL_MEMORY.bytes_for(chunk_s))} {for_each} with chunks of"
        guess += " unknown length" if chunk_s is None else f" {chunk_s:,.0f} s"
        return guessed_gb(in_all, chunk_s), f"assumed: {guess}, and a tenth left free; not measured"

    near_s = chunk_s or 3600.0  # a whole recording

    def distance(point: Measured) -> tuple[float, float]:
        return abs(math.log(point.workers / workers)), abs((point.chunk_s or near_s) - near_s)

    nearest = min(points, key=distance)
    each_bytes = (nearest.memory_bytes or 0.0) / nearest.workers
    why = f"measured with {count(nearest.workers, 'worker')} per GPU"
    if nearest.chunk_s and chunk_s and not _is_alike(nearest.chunk_s, chunk_s):
        longer_s = chunk_s - nearest.chunk_s
        each_bytes = max(each_bytes / 2, each_bytes + (speed.bytes_per_s or 0.0) * longer_s)
        why += f" and chunks of {nearest.chunk_s:,.0f} s"
    return advised_gb(in_all * each_bytes), f"{memory(each_bytes)} {for_each} ({why}), 15 % more and 0.5 GiB"


def _power_of(
    points: Sequence[Measured],
    workers: int,
    chunk_s: float | None,
) -> float | None:
    """Return the mean power of a GPU: what it draws without work, and the rest in proportion to the speed."""
    measured = [point for point in points if point.power_w is not None]
    if not measured:
        return None
    nearest = min(measured, key=lambda point: abs(math.log(point.workers / workers)))
    idle_w = nearest.idle_w or 0.0
    faster = rate_of(points, workers, chunk_s) / rate_of(points, nearest.workers, chunk_s)
    return idle_w + ((nearest.power_w or 0.0) - idle_w) * faster
