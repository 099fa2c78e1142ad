"""Choose what a task requests (GPUs, workers, chunk length, cores, memory): the cheapest or the fastest.

Speed and memory are those that were measured with so many workers, or estimated: between two measured numbers of
workers the speed is interpolated, fewer than the fewest are slower in proportion, more than the most are no faster.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadcjobsError
from badcjobs.model import LEAST_CPUS, USUAL_WORKERS, advised_gb, guess_worker_bytes, guessed_gb
from badcjobs.planning.plan_speed import Measured, Speed, at_length, find_speed, read_off
from badcjobs.planning.plan_tasks import PlanWish
from badcjobs.planning.preflight_facts import SourceFacts
from badcjobs.planning.site import Site
from badcjobs.report.words import count
from badcjobs.settings import PlanSettings, RunSettings, SubmitSettings
from badcjobs.workers.chunk_audio import OVERLAP_S, WIDE_GRID_S

FASTEST = "fastest"
_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)  # of workers per GPU
_MANY_WORKERS = 6  # per GPU, for the fastest request, if the cores of a node are not known
ALIKE = 1.1  # lengths of chunks
_ESTIMATED = 1.05
_NEARLY = 1.01  # as cheap: then the energy decides
_USUAL_START_UP_S = 15.0  # in the cost, until it is measured; the time limit has more
_GIB = 2**30
StartUp = Callable[[float, int], float]  # speed, GPUs per task → start-up of all tasks in hours per hour of recordings
Held = Callable[[int], float]  # workers of a task → mean length of their chunks while these are the longest
# the length that recordings are cut to, the mean, the longest, audio with its overlaps per audio recorded
Cut = tuple[float | None, float | None, Held, float, StartUp]


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
    hours_per_1000_audio_hours: float  # of tasks, with start-up
    units_per_hour: float | None  # billed
    units_per_1000_audio_hours: float | None  # billed, with start-up
    joules_per_audio_hour: float | None  # of the GPUs
    fits: bool  # into a node, a device, and into what was asked for


def choose(speed: Speed, wish: PlanWish, site: Site, cuts: Sequence[Cut]) -> tuple[Choice, Choice, list[Choice]]:
    """Return what to request, what is fastest, and all choices, the cheapest first.

    All are the same, whatever is preferred. The fastest has one worker per core, unless fewer were faster. If nothing
    fits, one worker is tried; if that does not fit either, it is the only choice.
    """
    gpus, most = wish.task_gpus(site), speed.most_workers
    full = max(1, wish.cpus // gpus) if wish.cpus else site.cores_per_gpu or most or _MANY_WORKERS
    full = min(full, max(1, site.node_cpus // gpus)) if site.node_cpus else full
    full = int(min(full, max(speed.device_room(cut[2](gpus * full) or cut[0]) for cut in cuts)))
    both = full, min(USUAL_WORKERS, full)
    numbers = {*both} if site.billing else {both[wish.prefer != FASTEST]}  # without a cost there is nothing to compare
    if wish.workers is not None:
        numbers = {wish.workers}
    elif speed.points:
        numbers = {full, *(one.workers for one in speed.points), *(one for one in _NUMBERS if one < most)}
    fewer = [one for one in (1, 2, 4) if one < gpus and site.billing and wish.gpus_per_task is None]
    ways = product([*fewer, gpus], sorted(numbers), cuts)
    made = [_make(speed, wish, site, some, many, cut) for some, many, cut in ways]
    made.sort(key=lambda one: (_cost_of(one), one.mem_gb))
    every = [one for one in made if one.fits]
    if not every and wish.workers is None:
        return choose(speed, replace(wish, workers=1), site, cuts)
    every = every or made[:1]
    near = [one for one in every if _cost_of(one) <= _NEARLY * _cost_of(every[0])]
    best = min(near, key=lambda one: float(f"{one.joules_per_audio_hour or 0.0:.3g}"))
    every.insert(0, every.pop(every.index(best)))
    fastest = max(every, key=lambda one: (one.gpus * one.rate, max(one.workers, most), -_cost_of(one)))
    return fastest if wish.prefer == FASTEST else best, fastest, every


def _cost_of(one: Choice) -> float:
    """Return the billed units or, without weights, GPU time; an estimate counts as a bit more."""
    return float(f"{(one.units_per_1000_audio_hours or 1 / one.rate) * (1.0 if one.measured else _ESTIMATED):.3g}")


def usual_request(
    submit: SubmitSettings, prefer: str, settings: RunSettings, site: Site, environ: Mapping[str, str], cwd: Path,
    source: SourceFacts | None = None, tasks: int = 1,
) -> Choice:  # fmt: skip
    """Return what a job requests that was not planned, and at what speed; 0: no speed is known here."""
    submit = replace(submit, gpus_per_task=submit.gpus_per_task or 1)
    wish = PlanWish.of(submit, PlanSettings(prefer), settings)
    try:
        speed, is_known = find_speed(None, None, settings, environ, cwd), True
    except BadcjobsError:
        speed, is_known = Speed(1.0, ""), False
    source = source or SourceFacts(0, 0.0, 0)
    speed = at_length(speed, source.mean_s or 0.0)
    start_up = tasks * billed_start_up_s(speed) / source.audio_s if source.audio_s else 0.0
    chunk_s = source.mean_s or settings.chunk_length_s
    held = source.lengths.held_s if source.lengths else lambda many: source.longest_s or 0.0
    cut: Cut = chunk_s, chunk_s, held, 1.0, lambda rate, gpus: start_up
    found, *_ = choose(speed, wish, site, [cut])
    return found if is_known else found._replace(rate=0.0, units_per_1000_audio_hours=None)


def billed_start_up_s(speed: Speed) -> float:
    """Return the start-up of a task that its cost includes."""
    return _USUAL_START_UP_S if speed.start_up_s is None else speed.start_up_s


def list_lengths(speed: Speed) -> list[float]:
    """Return the lengths to which recordings can be cut, as far as anything is known about them."""
    known = {(one.chunk_s if one.cut_s is None else one.cut_s) or 0.0 for one in speed.points} - {0.0}
    if speed.bytes_per_s:  # HawkEars
        steps = {8, *(max(1, round((one - OVERLAP_S) / WIDE_GRID_S)) for one in known)}
        known = {many * WIDE_GRID_S + OVERLAP_S for many in steps}
    return sorted(one for one in known if one <= (speed.safe_s or math.inf))


def _make(speed: Speed, wish: PlanWish, site: Site, gpus: int, workers: int, cut: Cut) -> Choice:
    chunk_s, mean_s, held, repeated, start_up = cut
    held_s = held(gpus * workers) or chunk_s
    busy = max((one.cores / one.workers for one in speed.points if one.cores), default=0.0)
    cpus = max(gpus * workers, round(gpus * workers * busy))
    mem_gb, mem_why = memory_of(speed, gpus * workers, workers, held_s)
    most_cpus, most_gb = wish.cpus or site.node_cpus or cpus, math.ceil(wish.mem_gb or site.node_memory_gb or mem_gb)
    fits = cpus <= most_cpus and mem_gb <= most_gb and workers <= speed.device_room(held_s)
    if wish.mem_gb is not None or mem_gb > most_gb:
        asked = "all of a node" if wish.mem_gb is None else "from [submit] mem"
        mem_gb, mem_why = most_gb, f"{asked}; {mem_gb} GB would be requested: {mem_why}"
    rate = speed.audio_hours_per_gpu_hour
    if speed.points:  # the first point has the speed that is planned with
        usual = rate_of(speed.points, speed.points[0].workers, speed.chunk_s)
        rate *= rate_of(speed.points, workers, mean_s) / usual
    hours = repeated / (rate * gpus) + start_up(rate, gpus)  # of tasks, for an hour of recordings
    cpus = wish.cpus or max(LEAST_CPUS, min(cpus, most_cpus))
    units = None if site.billing is None else site.billing.per_hour(gpus, mem_gb, cpus)
    power_w = _power_of(speed.points, workers, mean_s)
    points = () if speed.given else speed.points
    measured = any(one.workers == workers and _is_alike(one.chunk_s, mean_s) for one in points)
    per_1000, joules = units and 1000 * units * hours, power_w and 3600 * power_w * gpus * hours
    mem_gb = 0 if wish.mem_gb == 0 else mem_gb  # Slurm: all memory of the node
    return Choice(
        gpus, workers, chunk_s, cpus, mem_gb, mem_why, rate, measured, 1000 * hours, units, per_1000, joules, fits
    )


def _is_alike(one_s: float | None, other_s: float | None) -> bool:
    return not one_s or not other_s or 1 / ALIKE <= one_s / other_s <= ALIKE


def rate_of(points: Sequence[Measured], workers: int, chunk_s: float | None) -> float:
    """Return the audio-hours per GPU-hour of so many workers per GPU with such chunks."""
    rates = {0: 0.0}
    for many in sorted({one.workers for one in points}):
        curve = tuple(sorted({one.chunk_s or 0.0: one.rate for one in points if one.workers == many}.items()))
        rates[many] = read_off(curve, chunk_s)[0] if chunk_s and len(curve) > 1 else max(rate for _, rate in curve)
    for (few, slow), (many, fast) in pairwise(rates.items()):
        if workers <= many:
            return slow + (fast - slow) * (workers - few) / (many - few)
    return rates[max(rates)]


def memory_of(speed: Speed, in_all: int, workers: int, chunk_s: float | None) -> tuple[int, str]:
    """Return the memory to request for all workers of a task, so many per GPU, and why; None: of unknown length."""
    each = f"for each of {in_all} workers" if in_all > 1 else "for the worker"
    known = [one for one in speed.points if one.memory_bytes and (chunk_s or not one.chunk_s)]
    if not known:
        length = "unknown length" if chunk_s is None else f"{chunk_s:,.0f} s"
        guess = f"{guess_worker_bytes(chunk_s) / _GIB:.1f} GiB {each} with chunks of {length}"
        return guessed_gb(in_all, chunk_s), f"assumed: {guess}, and a tenth left free; not measured"
    near_s = chunk_s or 3600.0  # a whole recording
    one = min(known, key=lambda one: (abs(math.log(one.workers / workers)), abs((one.chunk_s or near_s) - near_s)))
    each_bytes, why = (one.memory_bytes or 0.0) / one.workers, f"measured with {count(one.workers, 'worker')} per GPU"
    if one.chunk_s and chunk_s and not _is_alike(one.chunk_s, chunk_s):
        each_bytes = max(each_bytes / 2, each_bytes + speed.bytes_per_s * (chunk_s - one.chunk_s))
        why += f" and chunks of {one.chunk_s:,.0f} s"
    return advised_gb(in_all * each_bytes), f"{each_bytes / _GIB:.2f} GiB {each} ({why}), 15 % more and 0.5 GiB"


def _power_of(points: Sequence[Measured], workers: int, chunk_s: float | None) -> float | None:
    """Return the mean power of a GPU: what it draws without work, and the rest in proportion to the speed."""
    known = [one for one in points if one.power_w is not None]
    for one in sorted(known, key=lambda one: abs(math.log(one.workers / workers)))[:1]:
        faster = rate_of(points, workers, chunk_s) / rate_of(points, one.workers, chunk_s)
        return (one.idle_w or 0.0) + ((one.power_w or 0.0) - (one.idle_w or 0.0)) * faster
    return None
