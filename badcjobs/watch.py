"""The recorder alone, or around any command: what ``badcjobs record`` does."""

from __future__ import annotations

import logging
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs import __version__
from badcjobs.allocation.slurm_variables import parse_allocation
from badcjobs.allocation.visible_devices import resolve_devices
from badcjobs.errors import BadInput, NotHere
from badcjobs.gpu.choose import load_script, open_reader
from badcjobs.paths import LocalFolder
from badcjobs.seams import ReaderUnavailable
from badcjobs.store.live_readings import last_reading_ms
from badcjobs.store.publisher import Publisher
from badcjobs.store.sample_text import TEXT_FORMS
from badcjobs.store.task_writer import TaskWriter
from badcjobs.task import World
from badcjobs.telemetry.sidecar import Sidecar, SidecarOrder

log = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 30.0
_SIDECAR_PATIENCE_S = 5.0
_ENDINGS = (".sqlite", ".db", *TEXT_FORMS)


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Everything ``badcjobs record`` can be told."""

    out: Path
    interval_s: float = 1.0
    duration_s: float | None = None
    command: tuple[str, ...] = ()
    simulate: int | None = None
    simulate_script: str | None = None
    overwrite: bool = False


@dataclass(frozen=True, slots=True)
class WatchEnd:
    """What was recorded."""

    exit_code: int
    out: str
    devices: int
    wall_s: float
    telemetry: str


def watch(settings: WatchSettings, world: World) -> WatchEnd:
    """Record until the command ends, the time is over or a signal comes."""
    _check_target(settings)
    started_at_ms = world.clock.now_ms()
    allocation = parse_allocation(world.environ, hostname=world.hostname, pid=world.pid, started_at_ms=started_at_ms)
    script = load_script(world.cwd / settings.simulate_script) if settings.simulate_script else None
    reader = open_reader(settings.simulate, script, world.clock, started_at_ms)
    trouble, inventory = None, None
    try:
        inventory = reader.inventory()
    except ReaderUnavailable as error:
        trouble = str(error)
    finally:
        reader.close()
    grant = resolve_devices(world.environ, inventory, in_slurm=allocation.in_slurm)
    if not grant.devices and not settings.command:
        raise NotHere(
            "there is no GPU to record",
            why=grant.why + (f"\n{trouble}" if trouble else ""),
            fix=f"badcjobs record --out {settings.out} --simulate 2",
        )
    if not grant.devices:
        log.warning("no GPU to record (%s): recording the machine alone", grant.why)
    local = LocalFolder.create(allocation.local_dir, allocation.key)
    writer = TaskWriter(local.wrapper_file, allocation.key)
    writer.begin_task(
        allocation, started_at_ms=started_at_ms, pid=world.pid, version=__version__, engine=None, telemetry=True
    )
    writer.add_devices(grant.devices)
    writer.set_plan(devices=len(grant.devices), workers=0)
    target = settings.out.absolute()
    publisher = Publisher([local.wrapper_file, local.recorder_file], target, base_interval_s=_PUBLISH_EVERY_S)
    publisher.start()
    sidecar = Sidecar(
        SidecarOrder(
            task_name=allocation.key.name,
            task_id=allocation.key.task_id,
            wrapper_pid=world.pid,
            devices=[(writer.device_id(device), device.uuid) for device in grant.devices],
            interval_s=settings.interval_s,
            simulate=settings.simulate,
            simulate_script=str(world.cwd / settings.simulate_script) if settings.simulate_script else None,
            started_at_ms=started_at_ms,
            recorder_file=str(local.recorder_file),
            wrapper_file=str(local.wrapper_file),
            publish_to=str(target),
            local_folder=str(local.path),
        )
    )
    exit_code = _follow_command(settings, world, sidecar) if settings.command else _wait(settings, world, sidecar)
    sidecar.stop(_SIDECAR_PATIENCE_S)
    ended_at_ms = world.clock.now_ms()
    if sidecar.failure is not None:
        since_ms = last_reading_ms(local.recorder_file) or started_at_ms
        writer.add_gap(None, since_ms, ended_at_ms, sidecar.failure)
    writer.end_task(ended_at_ms=ended_at_ms, exit_code=exit_code, verdict="done" if exit_code == 0 else "failed")
    publisher.stop()
    published = publisher.publish_now()
    writer.close()
    sidecar.release(_SIDECAR_PATIENCE_S)
    if published:
        local.remove()
    telemetry = sidecar.failure or ("on" if published else f"not published; the files stay in {local.path}")
    return WatchEnd(exit_code, str(settings.out), len(grant.devices), (ended_at_ms - started_at_ms) / 1000, telemetry)


def _check_target(settings: WatchSettings) -> None:
    if settings.out.suffix not in _ENDINGS:
        raise BadInput(
            f"--out {settings.out}: unknown ending {settings.out.suffix!r}", why="endings are " + ", ".join(_ENDINGS)
        )
    if settings.out.exists() and not settings.overwrite:
        raise BadInput(
            f"{settings.out} exists already",
            why="a recording is never overwritten by accident",
            fix=f"badcjobs record --out {settings.out} --overwrite …, or choose another name",
        )
    if not settings.out.absolute().parent.is_dir():
        raise BadInput(f"the folder of --out {settings.out} does not exist", fix=f"mkdir -p {settings.out.parent}")


def _wait(settings: WatchSettings, world: World, sidecar: Sidecar) -> int:
    """Wait for the end of the time, or for a signal: both are good endings here."""
    end_s = None if settings.duration_s is None else world.clock.monotonic_s() + settings.duration_s
    while not world.stop.requested and (end_s is None or world.clock.monotonic_s() < end_s):
        sidecar.check()
        left_s = 0.2 if end_s is None else min(0.2, end_s - world.clock.monotonic_s())
        world.clock.sleep(left_s)
    return 0


def _follow_command(settings: WatchSettings, world: World, sidecar: Sidecar) -> int:
    """Run the command, pass our signals on to it, and return its exit code."""
    try:
        child = subprocess.Popen(settings.command)
    except OSError as error:
        log.error("%s could not be started: %s", settings.command[0], error)
        return 127 if isinstance(error, FileNotFoundError) else 126
    end_s = None if settings.duration_s is None else world.clock.monotonic_s() + settings.duration_s
    passed_on: set[object] = set()
    while child.poll() is None:
        sidecar.check()
        for number in _signals_to_pass_on(world, passed_on):
            child.send_signal(number)
        if end_s is not None and world.clock.monotonic_s() >= end_s and "time" not in passed_on:
            passed_on.add("time")
            child.terminate()
        try:
            child.wait(0.1)
        except subprocess.TimeoutExpired:
            continue
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _signals_to_pass_on(world: World, passed_on: set[object]) -> Sequence[signal.Signals]:
    stop = world.stop
    wanted = [number for number in (stop.warned_by, stop.ended_by, stop.cut_short_by) if number is not None]
    # A Ctrl-C in the terminal has reached the command already: it is in our process group.
    new = [number for number in wanted if number not in passed_on and number is not signal.SIGINT]
    passed_on.update(new)
    return new
