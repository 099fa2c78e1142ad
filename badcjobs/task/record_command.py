"""The recorder alone, or around any command: what ``badcjobs record`` does."""

from __future__ import annotations

import errno
import logging
import math
import shlex
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.model import AlertHooks, AlertLimits, Device, StandIn
from badcjobs.settings import LIVE_MODES, read_alerts, read_toml
from badcjobs.store.atomic_write import unfinished_name
from badcjobs.store.publish import TEXT_FORMS
from badcjobs.task.records import RecordingOptions, Records
from badcjobs.task.startup import World, find_devices, mark_of, read_allocation
from badcjobs.telemetry.alerts import Alert
from badcjobs.telemetry.device_processes import RECORDING_MARK

log = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 30.0
_FIRST_SAMPLE_PATIENCE_S = 10.0
_LONGEST_INTERVAL_S = 86_400.0
_TABLES = ("run", "alerts", "report", "array", "written_by")  # what the file of a run, or its run.toml, may hold
_PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.ESTALE)  # the disk may be well again later
_ENDINGS = (".sqlite", ".db", *TEXT_FORMS)


@dataclass(frozen=True, slots=True)
class RecordSettings:
    """The options of ``badcjobs record``."""

    out: Path
    interval_s: float = 1.0
    duration_s: float | None = None
    command: tuple[str, ...] = ()
    stand_in: StandIn = field(default_factory=StandIn)
    overwrite: bool = False
    live_mode: str = "auto"
    alerts: AlertLimits = field(default_factory=AlertLimits)
    hooks: AlertHooks = field(default_factory=AlertHooks)


@dataclass(frozen=True, slots=True)
class RecordEnd:
    """What was recorded."""

    exit_code: int
    out: str
    devices: int
    wall_s: float
    telemetry: str


def run_record(settings: RecordSettings, world: World, tell: Callable[[str], None] = lambda text: None) -> RecordEnd:
    """Record until the command ends, the time is over or a signal comes; ``tell`` is called when an alert is over."""
    _check_settings(settings)
    on_alert = partial(_tell_of_end, tell)
    options = RecordingOptions(settings.interval_s, settings.stand_in, settings.alerts, on_alert, settings.hooks)
    needs_device = None if settings.command else f"badcjobs record --out {settings.out} --simulate 2"
    records, devices = start_recording(
        settings.out.absolute(), world, options, live_mode=settings.live_mode, needs_device=needs_device
    )
    if settings.command:
        records.start_usage()
        exit_code = _follow_command(settings, world, records)
    else:
        exit_code = _wait(settings, world, records)
    closing = records.close(exit_code=exit_code, verdict="done" if exit_code == 0 else "failed")
    records.writer.close()
    kept = "on" if closing.published else f"not published; the files stay in {records.local.path}"
    if not settings.command and (closing.telemetry_failure or not closing.published):
        exit_code = ExitCode.DATABASE  # there was nothing else to do than to record
    wall_s = (closing.ended_at_ms - records.started_at_ms) / 1000
    return RecordEnd(exit_code, str(settings.out), len(devices), wall_s, closing.telemetry_failure or kept)


def start_recording(
    target: Path, world: World, options: RecordingOptions, *, live_mode: str = "auto", needs_device: str | None = None
) -> tuple[Records, tuple[Device, ...]]:
    """Record the devices of this process into ``target``; return when the first sample is taken.

    Without a device the machine alone is recorded, or NotHere raised with the line ``needs_device`` to paste.
    """
    started_at_ms = world.clock.now_ms()
    allocation = read_allocation(world, started_at_ms)
    grant = find_devices(world, allocation, options.stand_in)
    if not grant.devices and needs_device is not None:
        raise NotHere("there is no GPU to record", why=grant.why, fix=needs_device)
    if not grant.devices:
        log.warning("no GPU to record (%s): recording the machine alone", grant.why)
    mark = mark_of(allocation, world)
    records = Records(
        allocation.key, target, allocation, world, started_at_ms=started_at_ms, mark=mark, live_mode=live_mode
    )
    records.begin(engine=None, telemetry=True)
    records.writer.add_devices(grant.devices)
    records.writer.update_task(devices=len(grant.devices), workers=0)
    records.start_publishing(_PUBLISH_EVERY_S)
    records.start_recorder(grant.devices, options, wait_s=_FIRST_SAMPLE_PATIENCE_S)
    return records, grant.devices


def _tell_of_end(tell: Callable[[str], None], alert: Alert) -> None:
    if alert.over:
        tell(alert.words)


def _wait(settings: RecordSettings, world: World, records: Records) -> int:
    """Wait for the end of the time, or for a signal: both are good endings here."""
    end_s = _end_s(settings, world)
    while not world.stop.requested and world.clock.monotonic_s() < end_s:
        records.look_after_recorder()
        world.clock.sleep(min(0.2, max(0.0, end_s - world.clock.monotonic_s())))
    return 0


def _end_s(settings: RecordSettings, world: World) -> float:
    return math.inf if settings.duration_s is None else world.clock.monotonic_s() + settings.duration_s


def _follow_command(settings: RecordSettings, world: World, records: Records) -> int:
    """Run the command, pass our signals on to it, and return its exit code."""
    try:
        child = subprocess.Popen(settings.command, env={**world.environ, RECORDING_MARK: records.mark})
    except OSError as error:
        log.error("%s could not be started: %s", settings.command[0], error)
        return 127 if isinstance(error, FileNotFoundError) else 126
    end_s = _end_s(settings, world)
    passed_on: set[object] = set()
    while child.poll() is None:
        records.look_after_recorder()
        records.write_usage()
        for number in _signals_to_pass_on(world, passed_on):
            child.send_signal(number)
        if world.clock.monotonic_s() >= end_s and "time" not in passed_on:
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


def read_alert_settings(config: Path | None) -> tuple[AlertLimits, AlertHooks]:
    """Return the table [alerts] of a TOML file, perhaps that of a run; without a file, the defaults."""
    mistakes: list[str] = []
    alerts = AlertLimits(), AlertHooks()
    if config is not None:
        document = read_toml(config)
        unknown = [name for name in document if name not in _TABLES]
        mistakes += [f"{config}: unknown key {name!r}; limits are in the table [alerts]" for name in unknown]
        alerts = read_alerts(document.get("alerts", {}), config, mistakes)
    if mistakes:
        raise BadInput(f"{config} cannot be used", why="\n".join(mistakes), fix="badcjobs guide telemetry")
    return alerts


def _check_settings(settings: RecordSettings) -> None:
    for name, value in (("interval", settings.interval_s), ("duration", settings.duration_s)):
        if value is not None and not math.isfinite(value):
            raise BadInput(f"--{name} {value} is not a finite number", fix="badcjobs record --help")
    if settings.interval_s > _LONGEST_INTERVAL_S:
        raise BadInput(
            f"--interval {settings.interval_s:g} is too long",
            why=f"at least one sample a day ({_LONGEST_INTERVAL_S:.0f} s) makes a recording",
            fix="--interval 60",
        )
    if settings.live_mode not in LIVE_MODES:
        raise BadInput(
            f"--live-mode {settings.live_mode} is not known",
            why="modes are " + ", ".join(LIVE_MODES),
            fix="--live-mode auto",
        )
    _check_replay(settings)
    out, command = settings.out, ("--", *settings.command) if settings.command else ()
    check_target(
        out,
        overwrite=settings.overwrite,
        as_sqlite=shlex.join(["badcjobs", "record", "--out", str(_with_ending(out)), *command]),
        to_overwrite=f"badcjobs record --out {out} --overwrite …, or choose another name",
    )


def _check_replay(settings: RecordSettings) -> None:
    """Refuse to write over the recording that is to be played, under whatever name."""
    if settings.stand_in.replay is None:
        return
    try:
        same = settings.out.samefile(settings.stand_in.replay)
    except OSError:
        return  # one of them does not exist; that is said elsewhere
    if same:
        raise BadInput(
            f"{settings.out} is the recording that --replay plays",
            why="it would be overwritten before it is read",
            fix=f"the same command with --out {settings.out.with_stem(settings.out.stem + '-again')}",
        )


def check_target(out: Path, *, overwrite: bool, as_sqlite: str, to_overwrite: str) -> None:
    """Refuse a file that a recording cannot be written to; the last two are the lines to paste."""
    if out.suffix not in _ENDINGS:
        raise BadInput(
            f"{out} has an unknown ending {out.suffix!r}", why="endings are " + ", ".join(_ENDINGS), fix=as_sqlite
        )
    try:
        if out.exists() and not overwrite:
            raise BadInput(
                f"{out} exists already", why="a recording is never overwritten by accident", fix=to_overwrite
            )
        if not out.absolute().parent.is_dir():
            raise BadInput(f"the folder of {out} does not exist", fix=f"mkdir -p {out.parent}")
        _try_to_write(out.absolute())
    except OSError as error:
        if error.errno not in _PASSING:
            why = f"no file can be made there: {error.strerror or error}"
            raise BadInput(f"{out} cannot be written", why=why, fix=f"write to ~/{out.name[-40:]}") from error


def _try_to_write(out: Path) -> None:
    """Create what a publication creates first, and remove it; raise OSError where nothing will ever be published."""
    if out.is_dir():
        raise IsADirectoryError(errno.EISDIR, f"{out.name} is a folder")
    attempt = unfinished_name(out)
    attempt.touch()
    attempt.unlink()


def _with_ending(out: Path) -> Path:
    return out.parent / f"{out.stem or 'recording'}.sqlite"
