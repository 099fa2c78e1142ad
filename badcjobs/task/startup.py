"""Resolves a task before anything is written: allocation, part of the source, devices, engine, end time.

Signals are requests to stop, in three degrees: drain, drain with a deadline, stop now.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.devices.allocation import EndTime, Grant, ShardPlace, array_shape, find_place, parse_allocation
from badcjobs.devices.free import DeviceLocks, DeviceRequest, Waiting, describe_holder, lock_folder, pick_free
from badcjobs.devices.listing import open_devices
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.model import Allocation, StandIn, TaskKey
from badcjobs.paths import RunFolder
from badcjobs.processes import Launcher, end_leftovers, parse_prefix
from badcjobs.report.words import count
from badcjobs.run_toml import FrozenRun, check_against
from badcjobs.seams import Clock, Engine
from badcjobs.settings import RunSettings
from badcjobs.sources.open import Sources, open_sources_of
from badcjobs.sources.walk import Shard, parse_shard
from badcjobs.store.slurm_ends import SPOOL_KEY
from badcjobs.task.progress import TaskProgress, find_end
from badcjobs.workers.engines import choose_engine

log = logging.getLogger(__name__)

NOTES_VARIABLE = "BADCJOBS_SLURM_NOTES"  # a file on this node in which the task epilog finds the path of our database
# A file in which a task writes that it must not be started again, although it exits with 75: another one has its work.
NO_RESTART_VARIABLE = "BADCJOBS_NO_RESTART"
SPOOL_VARIABLE = "BADCJOBS_SLURM_SPOOL"  # a folder on a shared filesystem, for requests for the end state of a job

WARNINGS = (signal.SIGUSR1, signal.SIGUSR2)
ENDINGS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.2
_TELL_S = 180.0
_REPEATED_S = 5.0  # Slurm may send TERM twice within this time; the second does not count


class StopRequest:
    """The request of the signals received so far.

    A warning (USR1, USR2) drains: nothing new is started. TERM, INT and HUP drain with a deadline. Another one of
    these means stop now, unless it is a repetition within seconds.
    """

    def __init__(self, monotonic_s: Callable[[], float]) -> None:
        self._monotonic_s = monotonic_s
        self.warned_by: signal.Signals | None = None
        self.ended_by: signal.Signals | None = None
        self.ended_at_s = 0.0
        self.cut_short_by: signal.Signals | None = None

    def receive(self, signum: int, _frame: object = None) -> None:
        """Record a signal; safe as a signal handler."""
        number = signal.Signals(signum)
        if number in WARNINGS:
            self.warned_by = number
        elif self.ended_by is None:
            self.ended_by, self.ended_at_s = number, self._monotonic_s()
        elif number is signal.SIGINT or self._monotonic_s() - self.ended_at_s > _REPEATED_S:
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
        return self.ended_by is not None and self._monotonic_s() - self.ended_at_s > grace_s

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
    def here(cls, environ: Mapping[str, str], clock: Clock, stop: StopRequest) -> World:
        """Describe this process."""
        hostname, cores = socket.gethostname().split(".")[0], len(os.sched_getaffinity(0))
        return cls(environ, clock, stop, hostname, os.getpid(), Path.cwd(), cores)


@dataclass(frozen=True)
class ResolvedTask:
    """The inputs of a task, all known before anything is written."""

    allocation: Allocation
    run: FrozenRun  # the settings common to all tasks of the run
    place: ShardPlace  # our part of the source
    sources: Sources
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
    began_ms, allocation = world.clock.now_ms(), read_allocation(world)
    run_toml = RunFolder(settings.out).run_toml
    mine = FrozenRun.of(settings, array_shape(allocation), world.cwd)
    frozen = FrozenRun.read(run_toml) or mine
    check_against(frozen, mine, run_toml)
    if settings.shard is None:
        place = find_place(allocation, frozen.array)
    else:
        shard = parse_shard(settings.shard)
        place = ShardPlace(shard.index, shard.count, position=shard.index, positions=shard.count)
    named = replace(settings, source=frozen.settings["source"], root=frozen.settings.get("root"))
    sources = open_sources_of(named, world.cwd, place.position)  # as merge does, so that ids are the same
    listed = sources.manifests_listed
    if listed is not None and place.positions is not None and listed > place.positions:
        raise BadInput(
            f"the list names {count(listed, 'manifest')}, but the array has {count(place.positions, 'task')}",
            why="each array task takes one line of the list; the last lines would never be analysed",
            fix=f"sbatch --array=0-{listed - 1} …   (with a new --out)",
        )
    grant = find_devices(world, settings.stand_in(world.cwd)).for_work()
    if not grant.devices and settings.cpu_workers == 0:
        # Inside a job without GPUs --simulate gives no devices either.
        try_out = "" if allocation.in_slurm else ", or --simulate 2 to try it out"
        raise NotHere(
            "this task has no GPU",
            why=grant.why,
            fix=f"ask Slurm for one (#SBATCH --gpus-per-node=1), or add --cpu-workers 2{try_out}",
        )
    engine = make_engine(settings, world, task_mark(allocation, world), grant)
    end = find_end(settings.stop_after, allocation, world.environ, began_ms)
    locks: AbstractContextManager[object] = nullcontext()
    if settings.max_gpus is not None and not allocation.in_slurm and grant.devices:
        # Last: find a missing engine before waiting for a device.
        grant, locks = take_free_devices(settings, min(settings.max_gpus, len(grant.devices)), world)
        allocation = replace(allocation, started_at_ms=world.clock.now_ms())  # do not count the wait as GPU time
    return ResolvedTask(allocation, mine, place, sources, grant, engine, end, locks)


def read_allocation(world: World) -> Allocation:
    """Return the allocation of this process: Slurm's or, outside Slurm, the machine."""
    now_ms = world.clock.now_ms()
    return parse_allocation(world.environ, hostname=world.hostname, pid=world.pid, started_at_ms=now_ms)


def task_mark(allocation: Allocation, world: World) -> str:
    """Return the mark that our processes have in their environment.

    Not the name in the run folder: that is chosen later, and ``badcjobs record`` in the same job has the same name.
    """
    return f"{allocation.key.name}-{world.pid}"


def find_devices(world: World, stand_in: StandIn) -> Grant:
    """Return the devices of this task and the reason, which includes the reader that found them."""
    with open_devices(world.environ, world.clock, stand_in) as sight:
        read_by = sight.trouble or f"read through {sight.reader.backend}: {sight.reader.why}"
        return Grant(sight.grant.devices, f"{sight.grant.why}\n{read_by}")


def take_free_devices(settings: RunSettings, wanted: int, world: World) -> tuple[Grant, DeviceLocks]:
    """Return the devices with the most free capacity, locked for this run; wait for them as the settings say."""
    locks = DeviceLocks(lock_folder(world.environ), world.clock, describe_holder(world.pid, settings.out.absolute()))
    busiest = settings.max_utilization_percent if settings.max_utilization_percent < 100 else None
    request = DeviceRequest(wanted, settings.min_memory_mib or None, busiest, settings.wait_s)
    run = RunFolder(settings.out.absolute())

    def report(text: str) -> None:
        log.info("%s", text)
        run.tell_waiting(text)

    waiting = Waiting(world.clock, report, lambda: raise_if_stopped(world.stop))
    with open_devices(world.environ, world.clock, settings.stand_in(world.cwd)) as sight:
        ours = {device.uuid: device for device in sight.grant.devices}
        try:
            free, _ = pick_free(request, sight, locks, waiting)
        finally:
            run.stop_waiting()
        picked = [replace(ours[device.uuid], why=device.why) for device in free]
        why = f"{sight.grant.why}; the {wanted} most free of {len(ours)}"
        why += f"\nread through {sight.reader.backend}: {sight.reader.why}"
        return Grant(tuple(picked), why), locks


def raise_if_stopped(stop: StopRequest) -> None:
    """Raise an error if a signal has arrived; for the time before the first worker."""
    if stop.requested:
        stopped = BadcjobsError(f"{stop.name} arrived before any work was started", fix="run the same command again")
        by_hand = stop.ended_by is signal.SIGINT
        stopped.exit_code = 128 + signal.SIGINT if by_hand else ExitCode.RUN_ME_AGAIN
        raise stopped


def make_engine(settings: RunSettings, world: World, mark: str, grant: Grant) -> Engine:
    """Return the engine after its check, so that a missing program is found now and not by every chunk."""
    prefix = settings.engine_prefix
    launcher = Launcher(mark, () if prefix is None else parse_prefix(prefix, world.environ.get("PATH")))
    allow_cpu = not grant.devices
    engine = choose_engine(settings, world.environ, launcher, world.clock, cwd=world.cwd, allow_cpu=allow_cpu)
    with ThreadPoolExecutor(1) as pool:
        checked = pool.submit(engine.check)  # it may import the engine, for minutes
        told_s = world.clock.monotonic_s()
        while wait([checked], _POLL_S).not_done:
            if world.clock.monotonic_s() - told_s >= _TELL_S:
                told_s += _TELL_S
                log.info("waiting for the start of %s; a cold import from a busy filesystem is slow", engine.name)
            if world.stop.requested:
                end_leftovers(mark)
    raise_if_stopped(world.stop)
    checked.result()
    return engine


# --- for Slurm's hooks and for the program that started us -----------------------------------------------------------


def forbid_restart(environ: Mapping[str, str]) -> None:
    """Tell the program that started this task, if it wants to know, not to start the task again."""
    with suppress(OSError), open(environ.get(NO_RESTART_VARIABLE, ""), "w") as file:  # noqa: PTH123 - it may be empty
        file.write("another task has its part of the source\n")


def announce(environ: Mapping[str, str], key: TaskKey, database: Path) -> dict[str, str]:
    """Write the path of our task database for Slurm's hooks, if the site has them; return the meta rows for merge."""
    notes, spool = environ.get(NOTES_VARIABLE), environ.get(SPOOL_VARIABLE)
    # A job submitted from inside another job may have inherited that job's variables.
    if notes and Path(notes).name.startswith(f"{environ.get('SLURM_JOB_ID')}."):
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
