"""Looks around before anything is written: what were we given, which part is ours, which devices, which engine?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.allocation.place import Place, array_shape, find_place
from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.allocation.visible_devices import Grant, resolve_devices
from badcjobs.config import RunSettings
from badcjobs.errors import BadInput, NotHere
from badcjobs.frozen_run import FrozenRun, check_against
from badcjobs.gpu.choose import open_reader
from badcjobs.manifest import Sources, open_sources, parse_shard
from badcjobs.model import Allocation, InventoryDevice, StandIn
from badcjobs.paths import RunFolder
from badcjobs.seams import Engine, ReaderUnavailable
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher
from badcjobs.world import World


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


def look_around(settings: RunSettings, world: World) -> Given:
    """Read the allocation, find our part of the source, our devices and our engine."""
    started_at_ms = world.clock.now_ms()
    allocation = read_allocation(world, started_at_ms)
    run_toml = RunFolder(settings.out).run_toml
    mine = FrozenRun.of(settings, array_shape(allocation), world.cwd)
    frozen = FrozenRun.read(run_toml) or mine
    check_against(frozen, mine, run_toml)
    place = find_my_place(settings, allocation, frozen)
    sources = open_sources(
        [world.cwd / path for path in settings.source],
        root=None if settings.root is None else world.cwd / settings.root,
        position=place.position,
    )
    check_every_manifest_has_a_task(sources, place)
    grant = find_devices(world, allocation, settings.stand_in(world.cwd))
    if not grant.devices and settings.cpu_workers == 0:
        raise NotHere(
            "this task has no GPU",
            why=grant.why,
            fix="ask Slurm for one (#SBATCH --gpus-per-node=1), or add --cpu-workers 2, or --simulate 2 to try it out",
        )
    mark = mark_of(allocation, world)
    return Given(
        started_at_ms, allocation, mine, place, sources, grant, make_engine(settings, world, mark, grant), mark
    )


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
    """Return the devices that this task really has, and why."""
    reader = open_reader(stand_in, world.clock, world.clock.now_ms(), world.environ.get("PATH"))
    inventory: Sequence[InventoryDevice] | None
    trouble = ""
    try:
        inventory = reader.inventory()
    except ReaderUnavailable as error:
        inventory, trouble = None, f"\n{error}"
    finally:
        reader.close()
    grant = resolve_devices(world.environ, inventory, in_slurm=allocation.in_slurm)
    return Grant(grant.devices, grant.why + trouble)


def make_engine(settings: RunSettings, world: World, mark: str, grant: Grant) -> Engine:
    """Return the engine, checked: a missing program is found here, not by every chunk."""
    engine = choose_engine(
        settings.engine,
        args=settings.engine_args,
        command=settings.command,
        hawkears_python=settings.hawkears_python,
        hawkears_root=None if settings.hawkears_root is None else world.cwd / settings.hawkears_root,
        allow_cpu=not grant.devices,
        environ=world.environ,
        launcher=SubprocessLauncher(mark),
        clock=world.clock,
    )
    engine.check()
    return engine
