"""Looks around before anything is written: what were we given, which part is ours, which devices, which engine?"""

from __future__ import annotations

import logging
import signal
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from badcjobs.allocation.end_time import EndTime
from badcjobs.allocation.grant import Grant
from badcjobs.allocation.place import Place, array_shape, find_place
from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.config import RunSettings
from badcjobs.deadline import find_end
from badcjobs.device_locks import DeviceLocks, holder_words, lock_folder
from badcjobs.devices import open_sight
from badcjobs.errors import BadInput, ExitCode, NotHere, StoppedEarly
from badcjobs.free_devices import Waiting, Wish, pick_free
from badcjobs.frozen_run import FrozenRun, check_against
from badcjobs.manifest import Sources, open_sources, parse_shard
from badcjobs.model import Allocation, StandIn
from badcjobs.paths import RunFolder
from badcjobs.seams import Engine, Launcher
from badcjobs.stop import StopRequest
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher
from badcjobs.workers.profiled_engine import ProfileOrder
from badcjobs.workers.profiling import find_profiler
from badcjobs.world import World

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Given:
    """What this task was given, and what it will do with it."""

    started_at_ms: int
    allocation: Allocation
    run: FrozenRun
    place: Place
    sources: Sources
    grant: Grant
    engine: Engine
    mark: str
    end: EndTime | None  # of our time; None: nobody says, or there is none
    locks: AbstractContextManager[object]  # of what --free picked: held until its exit, or the end of the process
    profile: ProfileOrder | None = None


def look_around(settings: RunSettings, world: World) -> Given:
    """Read the allocation, find our part of the source, our devices and our engine."""
    started_at_ms = world.clock.now_ms()
    allocation = read_allocation(world, started_at_ms)
    if settings.free is not None and allocation.in_slurm:
        raise _slurm_has_chosen(settings.free)
    run_toml = RunFolder(settings.out).run_toml
    mine = FrozenRun.of(settings, array_shape(allocation), world.cwd)
    frozen = FrozenRun.read(run_toml) or mine
    check_against(frozen, mine, run_toml)
    place = find_my_place(settings, allocation, frozen)
    sources = open_sources(
        [world.cwd / path for path in settings.source],
        root=None if settings.root is None else world.cwd / settings.root,
        position=place.position,
        cutting=settings.cutting,
    )
    check_every_manifest_has_a_task(sources, place)
    grant = find_devices(world, allocation, settings.stand_in(world.cwd))
    if not grant.devices and settings.cpu_workers == 0:
        try_out = "" if allocation.in_slurm else ", or --simulate 2 to try it out"  # a job without GPUs simulates none
        raise NotHere(
            "this task has no GPU",
            why=grant.why,
            fix=f"ask Slurm for one (#SBATCH --gpus-per-node=1), or add --cpu-workers 2{try_out}",
        )
    mark = mark_of(allocation, world)
    profile = order_profile(settings, world, mark, grant)
    engine = make_engine(settings, world, mark, grant)
    end = find_end(settings.time_left, allocation, world.environ, started_at_ms)
    locks: AbstractContextManager[object] = nullcontext()
    if settings.free is not None:  # last: nobody waits an hour for a device to hear that the engine is missing
        grant, locks = take_free_devices(settings, settings.free, world)
        started_at_ms = world.clock.now_ms()  # the wait was nobody's GPU time
        allocation = replace(allocation, started_at_ms=started_at_ms)
    return Given(started_at_ms, allocation, mine, place, sources, grant, engine, mark, end, locks, profile)


def read_allocation(world: World, started_at_ms: int) -> Allocation:
    """Return what Slurm (or nobody) gave to this process."""
    return parse_allocation(world.environ, hostname=world.hostname, pid=world.pid, started_at_ms=started_at_ms)


def mark_of(allocation: Allocation, world: World) -> str:
    """Return what every process below our workers carries.

    Not the name in the run folder: that is taken later, and ``badcjobs record`` in the same job has the same one.
    """
    return f"{allocation.key.name}-{world.pid}"


def find_my_place(settings: RunSettings, allocation: Allocation, frozen: FrozenRun) -> Place:
    """Return which part of the source is ours: --shard, else our position in the array."""
    if settings.shard is not None:
        shard = parse_shard(settings.shard)
        return Place(shard.index, shard.count, position=shard.index, positions=shard.count)
    return find_place(allocation, frozen.array)


def check_every_manifest_has_a_task(sources: Sources, place: Place) -> None:
    """Refuse an array that is shorter than its list of manifests: the rest would silently never be done."""
    listed = sources.manifests_listed
    if listed is not None and place.positions is not None and listed > place.positions:
        raise BadInput(
            f"the list names {listed} manifests, but the array has {place.positions} tasks",
            why="each array task takes one line of the list; the others would never be done",
            fix=f"sbatch --array=0-{listed - 1} …   (with a new --out)",
        )


def find_devices(world: World, allocation: Allocation, stand_in: StandIn) -> Grant:
    """Return the devices that this task really has, and why; which reader knows them is part of it."""
    with open_sight(world.environ, world.clock, stand_in, in_slurm=allocation.in_slurm) as sight:
        read_by = sight.trouble or f"read through {sight.reader.backend}: {sight.backend_why}"
        return Grant(sight.grant.devices, f"{sight.grant.why}\n{read_by}")


def take_free_devices(settings: RunSettings, count: int, world: World) -> tuple[Grant, DeviceLocks]:
    """Return the best devices that nobody uses, locked for this run; wait for them as long as the settings say."""
    locks = DeviceLocks(lock_folder(world.environ), world.clock, holder_words(world.pid, settings.out.absolute()))
    wish = Wish(count, settings.min_memory_mib, settings.max_utilization_percent, settings.wait_s)
    how = Waiting(world.clock, log.info, lambda: heed(world.stop))
    with open_sight(world.environ, world.clock, settings.stand_in(world.cwd), in_slurm=False) as sight:
        ours = {device.uuid: device for device in sight.grant.devices}
        picked = [replace(ours[device.uuid], why=device.why) for device in pick_free(wish, sight, locks, how)]
        why = f"{sight.grant.why}; --free {count} picked the best of {len(ours)}"
        why += f"\nread through {sight.reader.backend}: {sight.backend_why}"
        return Grant(tuple(picked), why), locks


def heed(stop: StopRequest) -> None:
    """End the waiting when a signal asks for it; nothing was started yet."""
    if stop.requested:
        raise StoppedEarly(stop.name, 128 + stop.ended_by if stop.ended_by is signal.SIGINT else ExitCode.RUN_ME_AGAIN)


def _slurm_has_chosen(count: int) -> BadInput:
    return BadInput(
        f"--free {count} cannot be used inside a Slurm job",
        why="Slurm has chosen the devices of this job already; others on this node belong to other jobs",
        fix=f"the same command without --free, in a job with #SBATCH --gpus-per-node={count}",
    )


def make_engine(settings: RunSettings, world: World, mark: str, grant: Grant) -> Engine:
    """Return the engine, checked: a missing program is found here, not by every chunk."""
    engine = engine_behind(SubprocessLauncher(mark), settings, world, grant)
    engine.check()
    return engine


def order_profile(settings: RunSettings, world: World, mark: str, grant: Grant) -> ProfileOrder | None:
    """Return what --profile asks for; a missing profiler is found here."""
    if settings.profile is None:
        return None
    profiler = find_profiler(settings.profile, world.environ.get("PATH"))
    return ProfileOrder(
        profiler,
        settings.profile_chunks,
        lambda launcher: engine_behind(launcher, settings, world, grant),
        SubprocessLauncher(mark),
    )


def engine_behind(launcher: Launcher, settings: RunSettings, world: World, grant: Grant) -> Engine:
    """Return the engine of this run, started by this launcher."""
    return choose_engine(
        settings.engine,
        args=settings.engine_args,
        command=settings.command,
        hawkears_python=settings.hawkears_python,
        hawkears_root=None if settings.hawkears_root is None else world.cwd / settings.hawkears_root,
        allow_cpu=not grant.devices,
        environ=world.environ,
        launcher=launcher,
        clock=world.clock,
    )
