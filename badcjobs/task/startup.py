"""Resolves a task before anything is written: allocation, part of the source and its claim, devices, engine, end time.

Signals are requests to stop, in three degrees: drain, drain with a deadline, stop now.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.devices.allocation import (
    EndTime,
    Grant,
    ShardPlace,
    find_place,
    own_job_id,
    parse_allocation,
)
from badcjobs.devices.free import DeviceLocks, DeviceRequest, Waiting, describe_holder, lock_folder, pick_free
from badcjobs.devices.listing import open_devices
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.locks import Held, Holder, Lease
from badcjobs.model import Allocation, StandIn, TaskKey
from badcjobs.paths import RunFolder, shell_line
from badcjobs.processes import Launcher, end_leftovers, parse_prefix
from badcjobs.run_toml import FrozenRun, check_against
from badcjobs.seams import Clock, Engine
from badcjobs.settings import RunSettings
from badcjobs.sources.open import Sources, open_sources_of
from badcjobs.sources.places import (
    PlaceReader,
    gives_places,
    name_few,
    place_reader,
    place_sources,
    refuse_placing_options,
)
from badcjobs.sources.walk import Shard, parse_shard
from badcjobs.store.slurm_ends import SPOOL_KEY
from badcjobs.task.progress import TaskProgress, find_end
from badcjobs.words import count, moment
from badcjobs.workers.engines import choose_engine
from badcjobs.workers.program_start import EngineStart

log = logging.getLogger(__name__)

NOTES_VARIABLE = "BADCJOBS_SLURM_NOTES"  # a file on this node in which the task epilog finds the path of our database
# A file in which a task writes that it must not be started again, although it exits with 75: another one has its work.
NO_RESTART_VARIABLE = "BADCJOBS_NO_RESTART"
SPOOL_VARIABLE = "BADCJOBS_SLURM_SPOOL"  # a folder on a shared filesystem, for requests for the end state of a job

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
_LOG_EVERY_S = 180.0
_REPEATED_S = 5.0  # Slurm may send TERM twice within this time; the second does not count


@dataclass
class StopRequest:
    """The request of the signals received so far.

    A warning (USR1, USR2) drains: nothing new is started. TERM, INT and HUP drain with a deadline. Another one of
    these means stop now, unless it is a repetition within seconds.
    """

    monotonic_s: Callable[[], float]
    warned_by: signal.Signals | None = None
    ended_by: signal.Signals | None = None
    ended_at_s: float = 0.0
    cut_short_by: signal.Signals | None = None

    def receive(self, signum: int, _frame: object = None) -> None:
        """Record a signal; safe as a signal handler."""
        number = signal.Signals(signum)
        if number in WARNINGS:
            self.warned_by = number
        elif self.ended_by is None:
            self.ended_by = number
            self.ended_at_s = self.monotonic_s()
        elif number is signal.SIGINT or self.monotonic_s() - self.ended_at_s > _REPEATED_S:
            self.cut_short_by = number

    def install(self) -> None:
        """Install the handlers in this process."""
        for number in (*WARNINGS, *ENDINGS):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
                continue  # nohup: the work continues after the terminal is closed
            signal.signal(number, self.receive)
        atexit.register(self._ignore_all)

    @property
    def requested(self) -> bool:
        """Whether to start nothing new."""
        return self.warned_by is not None or self.ended_by is not None

    def overdue(self, grace_s: float) -> bool:
        """Return whether running work must be ended now."""
        if self.cut_short_by is not None:
            return True
        return self.ended_by is not None and self.monotonic_s() - self.ended_at_s > grace_s

    @property
    def exit_code(self) -> int:
        """75 asks for another try; not after Ctrl-C, or a second signal that cut the orderly stop short."""
        if self.cut_short_by is not None:
            return 128 + self.cut_short_by
        if self.ended_by is signal.SIGINT:
            return 128 + signal.SIGINT
        return ExitCode.RUN_ME_AGAIN

    @property
    def name(self) -> str:
        """The name of the last signal, for the log."""
        last = self.cut_short_by or self.ended_by or self.warned_by
        return last.name if last else "no signal"

    @staticmethod
    def _ignore_all() -> None:
        """Ignore late signals, which could change the exit code: Python removes its handlers at exit."""
        for number in (*WARNINGS, *ENDINGS):
            signal.signal(number, signal.SIG_IGN)


@dataclass(frozen=True)
class World:
    """The environment, clock, signals and location of this process."""

    environ: Mapping[str, str]
    clock: Clock
    stop: StopRequest
    hostname: str
    pid: int
    cwd: Path
    cores: int
    log_to: Callable[[Path], None] = lambda path: None
    progress: Callable[[int], None] = lambda rows: None
    show: Callable[[Callable[[], TaskProgress]], None] = lambda look: None  # calls look if it needs it

    @classmethod
    def here(
        cls,
        environ: Mapping[str, str],
        clock: Clock,
        stop: StopRequest,
    ) -> World:
        """Describe this process."""
        return cls(
            environ,
            clock,
            stop,
            hostname=socket.gethostname().split(".")[0],
            pid=os.getpid(),
            cwd=Path.cwd(),
            cores=len(os.sched_getaffinity(0)),
        )


@dataclass(frozen=True)
class ResolvedTask:
    """The inputs of a task, all known before anything is written."""

    allocation: Allocation
    run: FrozenRun  # the settings common to all tasks of the run
    place: ShardPlace  # our part of the source
    sources: Sources
    names: PlaceReader  # where and when recordings were made
    grant: Grant  # our devices, and the reason
    engine: Engine
    end: EndTime | None  # the end of our time; None: no time limit, or not known
    locks: AbstractContextManager[object]  # of the devices that --max-gpus chose outside Slurm; released on exit

    @property
    def shard(self) -> Shard:
        """Our part of the source, or of our line of a list of manifests: only the tasks of a step share a line."""
        place = self.place
        if self.sources.picked_by_position:
            return Shard(place.step_index, place.step_count)
        return Shard(place.index, place.count)


def resolve_task(settings: RunSettings, world: World) -> ResolvedTask:
    """Read the allocation, find our part of the source, our devices and our engine."""
    began_ms = world.clock.now_ms()
    allocation = read_allocation(world)
    run_toml = RunFolder(settings.out).run_toml
    mine = FrozenRun.of(settings, allocation.array, world.cwd)
    frozen = FrozenRun.read(run_toml) or mine
    check_against(frozen, mine, run_toml)
    refuse_changed_list(settings, mine)

    place = find_our_place(settings, allocation, frozen)
    named = replace(settings, source=frozen.settings["source"], root=frozen.settings.get("root"))
    sources = open_sources_of(named, world.cwd, place.position)  # as merge does, so that ids are the same
    refuse_lost_manifests(sources, place)
    if mine.array is None and settings.shard is None:  # submit has checked the places for an array
        check_places(named, sources, world.cwd)
    refuse_placing_options(settings, sources)
    names = place_reader(settings, world.cwd)

    grant = find_devices(world, settings.stand_in(world.cwd)).for_work()
    refuse_no_device(settings, allocation, grant)
    engine = make_engine(settings, world, task_mark(allocation, world), grant, places=gives_places(settings, sources))
    end = find_end(settings.stop_after, allocation, world.environ, began_ms)
    locks: AbstractContextManager[object] = nullcontext()
    if settings.max_gpus is not None and not allocation.in_slurm and grant.devices:
        # Last: find a missing engine before waiting for a device.
        grant, locks = take_free_devices(settings, min(settings.max_gpus, len(grant.devices)), world)
        allocation = replace(allocation, started_at_ms=world.clock.now_ms())  # do not count the wait as GPU time
    return ResolvedTask(allocation, mine, place, sources, names, grant, engine, end, locks)


def find_our_place(settings: RunSettings, allocation: Allocation, frozen: FrozenRun) -> ShardPlace:
    """Return our part of the source: that of --shard, or that of this index of the array."""
    if settings.shard is None:
        return find_place(allocation, frozen.array)
    shard = parse_shard(settings.shard)
    return ShardPlace(shard.index, shard.count)


def refuse_lost_manifests(sources: Sources, place: ShardPlace) -> None:
    """Refuse a list with more manifests than the array has tasks."""
    listed = sources.manifests_listed
    if listed is None or place.positions is None or listed <= place.positions:
        return
    raise BadInput(
        f"the list names {count(listed, 'manifest')}, but the array has {count(place.positions, 'task')}",
        why="each array task takes one line of the list; the last lines would never be analysed",
        fix=f"sbatch --array=0-{listed - 1} …   (with a new --out)",
    )


def refuse_no_device(settings: RunSettings, allocation: Allocation, grant: Grant) -> None:
    """Refuse to work without a device, unless workers on the CPU are requested."""
    if grant.devices or settings.cpu_workers > 0:
        return
    fix = "ask Slurm for one (#SBATCH --gpus-per-node=1), or add --cpu-workers 2"
    if not allocation.in_slurm:  # inside a job without GPUs --simulate gives no devices either
        fix += ", or --simulate 2 to try it out"
    raise NotHere("this task has no GPU", why=grant.why, fix=fix)


def refuse_changed_list(settings: RunSettings, mine: FrozenRun) -> None:
    """Refuse another list of places than the one that submit has checked."""
    if settings.filelist_digest in (None, mine.filelist_sha256):
        return
    raise BadInput(
        f"--filelist {settings.filelist} has changed since submit checked it",
        why="all tasks of an array must use the same list",
        fix="restore it, or the same badcjobs submit with --again, which checks the new list",
    )


def check_places(settings: RunSettings, sources: Sources, cwd: Path) -> None:
    """Refuse wrong places, and log the names in the list that match no recording."""
    places = place_sources(settings, sources, cwd).places
    if places is not None and places.unmatched_names:
        names = name_few(places.unmatched_names, len(places.unmatched_names))
        log.info("names in %s that match no recording: %s", settings.filelist, names)


def read_allocation(world: World) -> Allocation:
    """Return the allocation of this process: Slurm's or, outside Slurm, the machine."""
    return parse_allocation(
        world.environ,
        hostname=world.hostname,
        pid=world.pid,
        started_at_ms=world.clock.now_ms(),
    )


def task_mark(allocation: Allocation, world: World) -> str:
    """Return the mark that our processes have in their environment.

    Not the name in the run folder: that is chosen later, and ``badcjobs record`` in the same job has the same name.
    """
    return f"{allocation.key.name}-{world.pid}"


def find_devices(world: World, stand_in: StandIn) -> Grant:
    """Return the devices of this task and the reason, which includes the reader that found them."""
    with open_devices(world.environ, world.clock, stand_in) as sight:
        return Grant(sight.grant.devices, f"{sight.grant.why}\n{sight.read_by}")


def take_free_devices(settings: RunSettings, wanted: int, world: World) -> tuple[Grant, DeviceLocks]:
    """Return the devices with the most free capacity, locked for this run; wait for them as the settings say."""
    run = RunFolder(settings.out.absolute())
    locks = DeviceLocks(lock_folder(world.environ), world.clock, describe_holder(world.pid, run.path))
    request = DeviceRequest(wanted, settings.min_memory_mib, settings.max_utilization_percent, settings.wait_s)

    def report(text: str) -> None:
        log.info("%s", text)
        run.tell_waiting(text)

    waiting = Waiting(world.clock, report, lambda: raise_if_stopped(world.stop))
    with open_devices(world.environ, world.clock, settings.stand_in(world.cwd)) as sight:
        try:
            free, _ = pick_free(request, sight, locks, waiting)
        finally:
            run.stop_waiting()
        granted = {device.uuid: device for device in sight.grant.devices}
        picked = [replace(granted[device.uuid], why=device.why) for device in free]
        why = f"{sight.grant.why}; the {wanted} most free of {len(granted)}\n{sight.read_by}"
        return Grant(tuple(picked), why), locks


def raise_if_stopped(stop: StopRequest) -> None:
    """Raise an error if a signal has arrived; for the time before the first worker."""
    if stop.requested:
        stopped = BadcjobsError(f"{stop.name} arrived before any work was started", fix="run the same command again")
        stopped.exit_code = stop.exit_code
        raise stopped


def make_engine(
    settings: RunSettings,
    world: World,
    mark: str,
    grant: Grant,
    *,
    places: bool = False,
) -> Engine:
    """Return the engine after its check, so that a missing program is found now and not by every chunk."""
    prefix: Sequence[str] = ()
    if settings.engine_prefix is not None:
        prefix = parse_prefix(settings.engine_prefix, world.environ.get("PATH"))
    start = EngineStart(
        settings.engine_args,
        world.environ,
        Launcher(mark, prefix),
        world.clock,
        cwd=world.cwd,
        allow_cpu=not grant.devices,
        places=places,
    )
    engine = choose_engine(settings, start)
    with ThreadPoolExecutor(1) as pool:
        check = pool.submit(engine.check)  # it may import the engine, for minutes
        logged_s = world.clock.monotonic_s()
        while wait([check], _POLL_S).not_done:
            if world.clock.monotonic_s() - logged_s >= _LOG_EVERY_S:
                logged_s += _LOG_EVERY_S
                log.info("waiting for the start of %s; a cold import from a busy filesystem is slow", engine.name)
            if world.stop.requested:
                end_leftovers(mark)
    raise_if_stopped(world.stop)
    check.result()
    return engine


# --- claims: of all live tasks that have the same part of a source, one works and the others are refused --------------
# A claim is a lease in the folder of the tasks; its name states the part.


class PartTaken(BadcjobsError):
    """A live task works on the same part."""

    exit_code = ExitCode.RUN_ME_AGAIN


@dataclass(frozen=True)
class Part:
    """A part of a source: every ``count``-th row, or those of one line of a list of manifests."""

    source: str  # eight digits for the source and its root folder
    line: str  # of a list of manifests; "all": all of it, or there is no list
    index: int
    count: int

    @classmethod
    def parse(cls, name: str) -> Part | None:
        """Return the part that the name of a claim states; None: it is another name."""
        with suppress(ValueError):
            kind, source, line, index, count = name.split("-")
            if kind == "claim":
                return cls(source, line, int(index), int(count))
        return None

    @property
    def name(self) -> str:
        """The name of its claims."""
        return f"claim-{self.source}-{self.line}-{self.index}-{self.count}"

    def overlaps(self, part: Part) -> bool:
        """Return whether the two parts may have a row in common."""
        if self.source != part.source:
            return False
        if self.line != part.line:
            return "all" in (self.line, part.line)
        return (self.index - part.index) % math.gcd(self.count, part.count) == 0


class Claim(Lease):
    """The claim of this task; its beginning raises PartTaken if another live task has the part."""

    def __init__(
        self,
        out: RunFolder,
        part: Part,
        me: Holder,
        clock: Clock,
        while_waiting: Callable[[], None],
    ) -> None:
        super().__init__(out.tasks, part.name, me, clock, while_waiting)
        self.replaced: set[str] = set()  # earlier attempts of this task, which may still run
        self._out = out
        self._part = part

    def __enter__(self) -> Claim:
        try:
            super().__enter__()
        except Held as error:
            raise self._refusal(error.holder) from None
        except OSError as error:
            raise self._out.unusable(error) from error
        return self

    def is_rival(self, name: str) -> bool:
        """Return whether a claim is on a part that overlaps ours."""
        part = Part.parse(name)
        return part is not None and part.overlaps(self._part)

    def is_valid(self, holder: Holder) -> bool:
        """Return whether the holder is a task."""
        return TaskKey.parse(holder.name) is not None

    def replaces(self, holder: Holder) -> bool:
        """Return whether Slurm has restarted the holder as this attempt."""
        key = TaskKey.parse(holder.name)
        mine = TaskKey.parse(self._me.name)
        assert key is not None and mine is not None
        is_same = replace(key, restart=mine.restart, node=mine.node) == mine
        if not is_same or holder.restart >= self._me.restart:
            return False
        self.replaced.add(holder.name)
        return True

    def describe(self, holder: Holder) -> str:
        """Return the name of a task in messages."""
        return f"task {holder.name}"

    def on_rival(self, holder: Holder | None, name: str) -> None:
        """Log that the part is claimed."""
        log.info("%s has claimed the same work; waiting for its next heartbeat", name)

    def _refusal(self, holder: Holder | None) -> PartTaken:
        part = self._part
        name = "another live task"
        why = "both would process the same chunks"
        if holder is not None:
            key = TaskKey.parse(holder.name)
            assert key is not None
            name = self.describe(holder)
            where = f"job {key.job_id}, array index {key.array_index}, node {key.node}"
            why = f"{where}, since {moment(holder.since_ms)}, last heartbeat {moment(holder.beat_at_ms)}; {why}"
        line = "" if part.line == "all" else f" of line {int(part.line) + 1}"
        return PartTaken(
            f"{name} works on shard {part.index}/{part.count}{line} of this source in {self._out.path}",
            why=why,
            fix=f"{shell_line('badcjobs', 'monitor', self._out.path)}   (run again when that task has ended)",
        )


# --- for Slurm's hooks and for the program that started us -----------------------------------------------------------


def forbid_restart(environ: Mapping[str, str]) -> None:
    """Tell the program that started this task, if it wants to know, not to start the task again."""
    with suppress(OSError), open(environ.get(NO_RESTART_VARIABLE, ""), "w") as file:  # noqa: PTH123 - it may be empty
        file.write("another task has its part of the source\n")


def announce(environ: Mapping[str, str], key: TaskKey, database: Path) -> dict[str, str]:
    """Write the path of our task database for Slurm's hooks, if the site has them; return the meta rows for merge."""
    notes = environ.get(NOTES_VARIABLE, "")
    spool = environ.get(SPOOL_VARIABLE)
    # A job submitted from inside another job may have inherited that job's variables.
    if Path(notes).name.startswith(f"{own_job_id(environ)}."):
        try:
            fd = os.open(notes, os.O_WRONLY | os.O_CLOEXEC | os.O_APPEND | os.O_NOFOLLOW)
            with os.fdopen(fd, "wb") as file:
                file.write(os.fsencode(database) + b"\n")
        except OSError as error:
            log.debug("the task epilog will not find this task: %s", error)
    if not spool or not key.job_id.isdecimal():
        return {}
    try:
        # This file asks the jobcomp hook, by its existence, to record the ends of the job.
        with suppress(FileExistsError):  # another task of the array has already written it
            (Path(spool) / "wanted" / key.job_id).touch(mode=0o644, exist_ok=False)
    except OSError as error:
        log.debug("Slurm's end states are not recorded: %s", error)
    return {SPOOL_KEY: spool}
