"""Runs the recorder alone, or around any command: ``badcjobs record``."""

from __future__ import annotations

import errno
import logging
import math
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.model import Device
from badcjobs.store.atomic_write import try_to_write
from badcjobs.store.publish import TEXT_FORMS
from badcjobs.task.records import RecordingOptions, Records
from badcjobs.task.startup import World, find_devices, read_allocation
from badcjobs.telemetry.books import RECORDING_MARK

log = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 30.0
_FIRST_SAMPLE_TIMEOUT_S = 10.0
_TEMPORARY = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EINTR, errno.ESTALE)  # the disk may accept files later
_ENDINGS = (".sqlite", ".db", *TEXT_FORMS)


def run_record(
    out: Path,
    options: RecordingOptions,
    world: World,
    *,
    command: Sequence[str] = (),
    duration_s: float | None = None,
    overwrite: bool = False,
    live_mode: str = "auto",
) -> dict[str, Any]:
    """Record until the command ends, the time is over or a signal arrives; return the JSON document of ``--json``."""
    _check_options(options, duration_s, out)
    check_target(out, overwrite=overwrite)
    needs_device = None if command else f"badcjobs record --out {out} --simulate 2"
    records, devices = start_recording(out.absolute(), world, options, live_mode=live_mode, needs_device=needs_device)
    end_s = math.inf if duration_s is None else world.clock.monotonic_s() + duration_s
    if command:
        records.start_usage()
        exit_code = _follow_command(command, end_s, world, records)
    else:
        exit_code = 0
        while not world.stop.requested and world.clock.monotonic_s() < end_s:  # both are a normal end
            records.check_recorder()
            world.clock.sleep(min(0.2, max(0.0, end_s - world.clock.monotonic_s())))
    published = records.close(exit_code=exit_code, verdict="done" if exit_code == 0 else "failed")
    records.writer.close()
    kept = "on" if published else f"not published; the files stay in {records.local.path}"
    if not command and (records.telemetry_failure or not published):
        exit_code = ExitCode.DATABASE  # recording was the only purpose
    return {
        "exit_code": int(exit_code),
        "out": str(out),
        "devices": len(devices),
        "wall_s": (records.ended_at_ms - records.started_at_ms) / 1000,
        "telemetry": records.telemetry_failure or kept,
    }


def start_recording(
    target: Path, world: World, options: RecordingOptions, *, live_mode: str = "auto", needs_device: str | None = None
) -> tuple[Records, tuple[Device, ...]]:
    """Record the devices of this process into ``target``; return after the first sample.

    Without a device, record the machine alone or, if ``needs_device`` is given, raise NotHere with that line to paste.
    """
    allocation = read_allocation(world)
    grant = find_devices(world, options.stand_in)
    if not grant.devices and needs_device is not None:
        raise NotHere("there is no GPU to record", why=grant.why, fix=needs_device)
    if not grant.devices:
        log.warning("no GPU to record (%s): recording only CPU and memory", grant.why)
    records = Records(allocation.key, target, allocation, world, live_mode=live_mode)
    records.begin(engine=None, telemetry=True)
    records.writer.add_devices(grant.devices)
    records.writer.update_task(devices=len(grant.devices), workers=0)
    records.start_publishing(_PUBLISH_EVERY_S)
    records.start_recorder(grant.devices, options, wait_s=_FIRST_SAMPLE_TIMEOUT_S)
    return records, grant.devices


def _follow_command(command: Sequence[str], end_s: float, world: World, records: Records) -> int:
    """Run the command, forward our signals to it, and return its exit code."""
    try:
        child = subprocess.Popen(command, env={**world.environ, RECORDING_MARK: records.mark})
    except OSError as error:
        log.error("%s could not be started: %s", command[0], error)
        return 127 if isinstance(error, FileNotFoundError) else 126
    stop = world.stop
    forwarded: set[object] = {None, signal.SIGINT}  # a Ctrl-C reaches it directly: it is in our process group
    while child.poll() is None:
        records.check_recorder()
        for number in (stop.warned_by, stop.ended_by, stop.cut_short_by):
            if number is not None and number not in forwarded:
                forwarded.add(number)
                child.send_signal(number)
        if world.clock.monotonic_s() >= end_s:
            end_s = math.inf
            child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _check_options(options: RecordingOptions, duration_s: float | None, out: Path) -> None:
    for name, value in (("interval", options.interval_s), ("duration", duration_s)):
        if value is not None and not math.isfinite(value):
            raise BadInput(f"--{name} {value} is not a finite number", fix="badcjobs record --help")
    replay = options.stand_in.replay
    if replay is not None and out.exists() and Path(replay).exists() and out.samefile(replay):
        raise BadInput(
            f"{out} is the recording that --simulate plays",
            why="it would be overwritten before it is read",
            fix=f"the same command with --out {out.with_stem(out.stem + '-again')}",
        )


def check_target(out: Path, *, overwrite: bool) -> None:
    """Refuse a target that cannot be written, or that exists."""
    if out.suffix not in _ENDINGS:
        why, known = "known extensions: " + ", ".join(_ENDINGS), out.parent / f"{out.stem or 'recording'}.sqlite"
        raise BadInput(f"{out} has an unknown extension {out.suffix!r}", why=why, fix=f"write to {known}")
    try:
        if out.exists() and not overwrite:
            why, fix = ("recordings are not overwritten without --force", "another name, or --force (overwrite=True)")
            raise BadInput(f"{out} already exists", why=why, fix=fix)
        if not out.absolute().parent.is_dir():
            raise BadInput(f"the folder of {out} does not exist", fix=f"mkdir -p {out.parent}")
        try_to_write(out)
    except OSError as error:
        if error.errno not in _TEMPORARY:
            why = f"no file can be created there: {error.strerror or error}"
            raise BadInput(f"{out} cannot be written", why=why, fix=f"write to ~/{out.name[-40:]}") from error
