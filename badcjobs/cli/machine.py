"""Commands about devices: ``badcjobs gpus`` and ``record`` on this machine, ``cluster`` in the whole cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from badcjobs.cli.options import (
    JsonWanted,
    Simulate,
    find_stand_in,
    flag,
    is_stdout,
    option,
    other_command,
    read_project,
    refuse_data,
)
from badcjobs.cli.output import (
    answer,
    environ,
    log_to_stderr,
    print_json,
    print_line,
    read_world,
    remark,
    say,
    say_next,
    terminal_width,
    text_width,
    this_command,
)
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.model import StandIn
from badcjobs.paths import shell_line
from badcjobs.report.tables import Table, columns, table_text
from badcjobs.words import UNKNOWN, count, duration, memory, plain, share_words, temperature

if TYPE_CHECKING:
    from badcjobs.devices.free import DeviceRequest
    from badcjobs.devices.listing import DeviceNow, Listing


def gpus(
    context: typer.Context,
    everything: bool = flag("--all", "List every GPU of the machine, with processes."),
    free: int | None = option("N", "Pick the N most free GPUs.", min=1),
    min_memory_mib: int | None = option("M", "With --free: minimum free memory.", min=1),
    max_utilization: float | None = option("P", "With --free: maximum utilization in percent.", min=0, max=100),
    wait: float | None = option("S", "With --free: wait up to S seconds [0].", min=0),
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Show the GPUs that this task really has, and why.

    With --free, show the best ones of a shared machine.

    Example:
      badcjobs gpus --simulate 4 --free 2
    """
    request = _request(free, min_memory_mib, max_utilization, wait, everything)
    try:
        listing = _list_devices(request, find_stand_in(read_project(context), simulate), everything=everything)
    except NotHere as error:
        if not json_wanted:
            raise
        print_json({"devices": [], "why": "\n".join(filter(None, [error.what, error.why]))})
        return error.exit_code
    if json_wanted:
        print_json(listing.to_dict())
        return 0 if listing.devices else NotHere.exit_code
    if not listing.devices:
        fix = "badcjobs gpus --simulate 2   (shows simulated ones), or request one"
        raise NotHere("no GPU here", why=listing.why, fix=fix)
    to_take = request is not None and listing.devices[0].backend != "simulated"
    say(_devices_text(listing, processes=everything, to_take=to_take, width=terminal_width()))
    if request is None:
        say_next(*this_command(name="monitor", without=["--all"]))
    elif not to_take:
        say_next(*other_command("monitor", "--simulate", str(simulate)))
    return 0


def _list_devices(request: DeviceRequest | None, stand_in: StandIn, *, everything: bool) -> Listing:
    from badcjobs.devices.free import DeviceLocks, Waiting, describe_holder, list_free, lock_folder
    from badcjobs.devices.listing import list_granted

    clock = SystemClock()
    variables = environ()
    if request is None:
        return list_granted(variables, clock, stand_in, everything=everything)
    with DeviceLocks(lock_folder(variables), clock, describe_holder(os.getpid(), Path.cwd())) as locks:
        return list_free(variables, stand_in, request, locks, Waiting(clock, remark))


def _request(
    free: int | None, min_memory_mib: int | None, max_utilization: float | None, wait: float | None, everything: bool
) -> DeviceRequest | None:
    """Return which devices --free asks for; None: it is not given."""
    from badcjobs.devices.free import DeviceRequest

    if free is None:
        if (min_memory_mib, max_utilization, wait) == (None, None, None):
            return None
        what = "--min-memory-mib, --max-utilization and --wait need --free"
        raise BadInput(what, fix="badcjobs gpus --free 1 --wait 60")
    if everything:
        raise BadInput(
            "--all and --free together",
            why="--all shows every GPU, --free only the best ones that this task has",
            fix=f"badcjobs gpus --free {free}   (or: badcjobs gpus --all)",
        )
    return DeviceRequest(free, min_memory_mib, max_utilization, wait or 0.0)


def record(
    context: typer.Context,
    out: Path = option("FILE", "File: .sqlite, .csv or .jsonl; - is stdout.", "--out", "-o", default=...),
    command: list[str] | None = typer.Argument(None, metavar="COMMAND"),
    interval: float | None = option("S", "Seconds between samples [1].", min=0.01, max=86_400),
    duration: float | None = option("S", "Stop after S seconds.", min=0.0),
    force: bool = flag("--force", "Replace FILE if it exists."),
    simulate: Simulate = None,
) -> int:
    """Record every granted GPU: until Ctrl-C, for some time, or while a command runs, whose exit code is returned.

    Example:
      badcjobs record --out training.sqlite -- python train.py
    """
    from badcjobs.task.records import RecordingOptions, run_record, stream_samples

    log_to_stderr()
    if force:
        refuse_data({"--out": out}, whatever_it_holds=True)
    project = read_project(context, "alerts")
    world = read_world()
    options = RecordingOptions(
        interval or project.get("run", "interval") or 1.0,
        find_stand_in(project, simulate),
        project.alerts,
        lambda alert: remark(alert.text) if alert.over else None,  # the log has only warnings, not the end of an alert
        project.hooks,
    )
    if is_stdout(out):
        return stream_samples(print_line, options, world, command=command or (), duration_s=duration)
    mode = project.get("run", "live_mode") or "auto"
    end = run_record(out, options, world, command=command or (), duration_s=duration, overwrite=force, live_mode=mode)
    _say_recorded(end, around_command=bool(command))
    return int(end["exit_code"])


def _say_recorded(end: Mapping[str, Any], *, around_command: bool) -> None:
    """Print what was recorded; stdout belongs to the command, if there is one."""
    recorded = f"{count(end['devices'], 'device')} recorded for {duration(end['wall_s'])}: {end['out']}"
    if end["telemetry"] != "on":
        recorded += f"; telemetry {end['telemetry']}"
    following = shell_line(*other_command("report", Path(end["out"])))
    if around_command:
        remark(f"{recorded}\nnext: {following}")
    else:
        say(f"badcjobs: {recorded}\nnext: {following}")


def cluster(
    context: typer.Context,
    gpus_per_task: int | None = option("N", "GPUs that one task needs [1].", min=1),
    constraint: str | None = option("FEATURE", "Only nodes with this feature or GPU type."),
    json_wanted: JsonWanted = False,
) -> int:
    """Show free and used GPUs per partition and node, and where a task would start.

    Exit code 3: no node can run it.

    Example:
      badcjobs cluster --gpus-per-task 4 --constraint v100
    """
    from badcjobs.cluster.nodes import cluster_text, look_at_cluster

    project = read_project(context)
    gpus = gpus_per_task or project.get("submit", "gpus_per_task") or 1
    nodes = look_at_cluster(environ(), gpus=gpus, kind=constraint or project.get("submit", "constraint"))
    answer(json_wanted, nodes, cluster_text(nodes, text_width()))
    if not nodes["fits"]:
        return ExitCode.NOT_HERE
    if not json_wanted:
        where = f"--sbatch=--partition={nodes['best']['partition']}"
        say_next(*this_command(where, "SOURCE", name="submit"))
    return ExitCode.DONE


_LONGEST_MODEL = 28


def _devices_text(listing: Listing, *, processes: bool, to_take: bool, width: int | None) -> str:
    """Return the devices of ``badcjobs gpus`` with the reasons; optionally their processes, or the line to use them."""
    from badcjobs.devices.allocation import VISIBLE
    from badcjobs.report.text import wrap

    devices = listing.devices
    reasons = [f"{_device_name(device)}: {device.why}" for device in devices]
    reasons += [f"{_device_name(device)}: no reading: {device.trouble}" for device in devices if device.trouble]
    reasons += [f"{_device_name(device)}: skipped: {device.why}" for device in listing.skipped]
    reasons.append(f"granted: {listing.why}")
    if listing.backend_why:
        reasons.append(f"read through {listing.backend}: {listing.backend_why}")

    lines = [*_device_table(devices, width), ""]
    for reason in reasons:
        lines += [f"  {reason}"] if width is None else wrap(f"  {reason}", indent=4, width=width)
    if processes:
        lines += ["", *_process_lines(devices, width)]
    vendor = devices[0].vendor
    if to_take and vendor in VISIBLE:
        pins = ",".join(device.pin or "" for device in devices)
        lines += ["", f"next: export {VISIBLE[vendor]}={pins}"]
    return "\n".join(map(plain, lines))


def _device_table(devices: Sequence[DeviceNow], width: int | None) -> list[str]:
    heads = columns("<index", "<uuid", "<name", "free", "of", "util", "<load", "temp", "score", "backend")
    rows = []
    for device in devices:
        row = (
            UNKNOWN if device.index is None else str(device.index),
            device.uuid or f"token {device.token}",
            (device.name or UNKNOWN)[:_LONGEST_MODEL],
            memory(device.memory_free_bytes),
            memory(device.memory_total_bytes),
            share_words(device.utilization_percent),
            device.load or UNKNOWN,
            temperature(device.temperature_c),
            UNKNOWN if device.score is None else f"{device.score:.2f}",
            device.backend,
        )
        rows.append(row)
    return table_text(Table("devices", "Devices", heads, rows), width)


def _process_lines(devices: Sequence[DeviceNow], width: int | None) -> list[str]:
    """Return the processes on the devices, and which devices do not tell theirs."""
    rows = []
    for device in devices:
        name = _device_name(device)
        if device.processes is None:
            rows.append((name, UNKNOWN, UNKNOWN, "process list not available", UNKNOWN))
        for process in device.processes or ():
            user = process.user or UNKNOWN
            program = process.program or UNKNOWN
            rows.append((name, str(process.pid), user, program, memory(process.memory_used_bytes)))
    if not rows:
        return ["  no process is on these devices"]
    heads = columns("<device", "<pid", "<user", "<program", "memory")
    return table_text(Table("processes", "Processes", heads, rows), width)


def _device_name(device: DeviceNow) -> str:
    if device.index is None:
        return f"token {device.token}"
    if device.parent_uuid:  # slices share an index
        return str(device.uuid)
    return f"GPU {device.index}"
