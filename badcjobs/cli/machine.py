"""Commands about devices: ``badcjobs gpus`` and ``record`` on this machine, ``cluster`` in the whole cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import JsonWanted, Simulate, find_stand_in, flag, is_stdout, option, read_project, refuse_data
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
    this_command,
)
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.paths import shell_line

if TYPE_CHECKING:
    from badcjobs.devices.free import DeviceRequest


def gpus(
    context: typer.Context,
    everything: Annotated[bool, flag("--all", "List every GPU of the machine, with processes.")] = False,
    free: Annotated[int | None, option("N", "Pick the N most free GPUs.")] = None,
    min_memory_mib: Annotated[int | None, option("M", "With --free: minimum free memory.", min=1)] = None,
    max_utilization: Annotated[float | None, option("P", "With --free: maximum utilization in percent.")] = None,
    wait: Annotated[float | None, option("S", "With --free: wait up to S seconds [0].")] = None,
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Show the GPUs that this task really has, and why.

    With --free, show the best ones of a shared machine.

    Example:
      badcjobs gpus --simulate 4 --free 2
    """
    from badcjobs.devices.free import DeviceLocks, Waiting, list_free, lock_folder
    from badcjobs.devices.listing import Listing, list_granted

    request = _request(free, everything, min_memory_mib=min_memory_mib, max_utilization=max_utilization, wait=wait)
    try:
        simulated = find_stand_in(read_project(context), simulate)
        clock, variables = SystemClock(), environ()
        if request is None:
            found = list_granted(variables, clock, stand_in=simulated, everything=everything)
        else:
            locks = DeviceLocks(lock_folder(variables), clock, None)
            found = list_free(variables, simulated, request, locks, Waiting(clock, remark))
    except NotHere as error:
        if not json_wanted:
            raise
        why = "\n".join(filter(None, [error.what, error.why]))
        print_json(getattr(error, "listing", Listing((), why)).to_dict())
        return error.exit_code
    if json_wanted:
        print_json(found.to_dict())
        return 0 if found.devices else NotHere.exit_code
    if not found.devices:
        raise NotHere(
            "no GPU here", why=found.why, fix="badcjobs gpus --simulate 2   (shows simulated ones), or request one"
        )
    to_take = request is not None and found.devices[0].backend != "simulated"
    say(_devices_text(found.to_dict(), processes=everything, to_take=to_take))
    if request is None:
        say_next(*this_command(name="monitor", without=["--all"]))
    elif not to_take:
        say_next("badcjobs", "monitor", "--simulate", str(simulate))
    return 0


def _request(free: int | None, everything: bool, **limits: Any) -> DeviceRequest | None:
    from badcjobs.devices.free import DeviceRequest, check_request

    if free is None:
        given = [f"--{name.replace('_', '-')}" for name, value in limits.items() if value is not None]
        if given:
            raise BadInput(f"{' and '.join(given)} without --free", fix="badcjobs gpus --free 1 --wait 60")
        return None
    if everything:
        raise BadInput(
            "--all and --free together",
            why="--all shows every GPU, --free only the best ones that this task has",
            fix=f"badcjobs gpus --free {free}   (or: badcjobs gpus --all)",
        )
    request = DeviceRequest(free, limits["min_memory_mib"], limits["max_utilization"], limits["wait"] or 0.0)
    check_request(request)
    return request


def record(
    context: typer.Context,
    out: Annotated[Path, option("FILE", "File: .sqlite, .csv or .jsonl; - is stdout.", "--out", "-o")],
    command: Annotated[list[str] | None, typer.Argument(metavar="COMMAND")] = None,
    interval: Annotated[float | None, option("S", "Seconds between samples [1].", min=0.01, max=86_400)] = None,
    duration: Annotated[float | None, option("S", "Stop after S seconds.", min=0.0)] = None,
    force: Annotated[bool, flag("--force", "Replace FILE if it exists.")] = False,
    simulate: Simulate = None,
) -> int:
    """Record every granted GPU: until Ctrl-C, for some time, or while a command runs, whose exit code is returned.

    Example:
      badcjobs record --out training.sqlite -- python train.py
    """
    from badcjobs.report.words import count
    from badcjobs.task.records import RecordingOptions, run_record, stream_samples

    log_to_stderr()
    if force:
        refuse_data([("--out", out, f"recording{out.suffix}")], whatever_it_holds=True)
    project, world = read_project(context, "alerts"), read_world()
    options = RecordingOptions(
        interval or project.get("run", "interval") or 1.0,
        find_stand_in(project, simulate),
        project.alerts,
        lambda alert: remark(alert.text) if alert.over else None,  # the log has only warnings, not the end of an alert
        project.hooks,
    )
    if is_stdout(out):
        return stream_samples(print_line, options, world, command=command or (), duration_s=duration)
    end = run_record(
        out,
        options,
        world,
        command=command or (),
        duration_s=duration,
        overwrite=force,
        live_mode=project.get("run", "live_mode") or "auto",
    )
    trouble = "" if end["telemetry"] == "on" else f"; telemetry {end['telemetry']}"
    said = f"{count(end['devices'], 'device')} recorded for {end['wall_s']:.1f} s: {end['out']}{trouble}"
    if command:
        remark(f"{said}\nnext: {shell_line('badcjobs', 'report', Path(end['out']))}")  # stdout belongs to the command
    else:
        say(f"badcjobs: {said}")
        say_next("badcjobs", "report", Path(end["out"]))
    return int(end["exit_code"])


def cluster(
    context: typer.Context,
    gpus_per_task: Annotated[int | None, option("N", "GPUs that one task needs [1].", min=1)] = None,
    constraint: Annotated[str | None, option("FEATURE", "Only nodes with this feature or GPU type.")] = None,
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
    found = look_at_cluster(environ(), gpus=gpus, kind=constraint or project.get("submit", "constraint"))
    answer(json_wanted, found, cluster_text(found))
    if found["fits"] and not json_wanted:
        where = this_command(f"--sbatch=--partition={found['best']['partition']}")[2:]
        say_next("badcjobs", "submit", "SOURCE", *where)
    return ExitCode.DONE if found["fits"] else ExitCode.NOT_HERE


_LONGEST_MODEL = 28


def _devices_text(listing: Mapping[str, Any], *, processes: bool, to_take: bool) -> str:
    """Return the devices of ``badcjobs gpus`` with the reasons; optionally their processes, or the line to use them."""
    from badcjobs.devices.allocation import VISIBLE
    from badcjobs.report.tables import Table, columns, table_text
    from badcjobs.report.words import UNKNOWN, memory, percent, plain

    devices: Sequence[Mapping[str, Any]] = listing["devices"]
    rows = [
        (UNKNOWN if d["index"] is None else str(d["index"]), d["uuid"] or f"token {d['token']}",
         (d["name"] or UNKNOWN)[:_LONGEST_MODEL], memory(d["memory_free_bytes"]), memory(d["memory_total_bytes"]),
         percent(d["utilization_percent"]), d["load"] or UNKNOWN,
         UNKNOWN if d["temperature_c"] is None else f"{d['temperature_c']} °C",
         UNKNOWN if d["score"] is None else f"{d['score']:.2f}", d["backend"])
        for d in devices
    ]  # fmt: skip
    heads = columns("<index", "<uuid", "<name", "free", "of", "util", "<load", "temp", "score", "backend")
    lines = table_text(Table("devices", "Devices", heads, rows))
    lines += ["", *(f"  {_device_name(d)}: {d['why']}" for d in devices)]
    lines += [f"  {_device_name(d)}: no reading: {d['trouble']}" for d in devices if d["trouble"]]
    lines += [f"  {_device_name(d)}: skipped: {d['why']}" for d in listing["skipped"]]
    lines += [f"  granted: {listing['why']}"]
    if listing["backend_why"]:
        lines.append(f"  read through {listing['backend']}: {listing['backend_why']}")
    if processes:
        running = [
            (_device_name(d), str(one["pid"]), one["user"] or UNKNOWN, one["program"] or UNKNOWN,
             memory(one["memory_used_bytes"]))
            for d in devices
            for one in d["processes"] or ()
        ]  # fmt: skip
        silent = [f"  {_device_name(d)}: process list not available" for d in devices if d["processes"] is None]
        heads = columns("<device", "<pid", "<user", "<program", "memory")
        found = table_text(Table("processes", "Processes", heads, running))
        found = found if running else ["  no process is on these devices"]
        lines += ["", *(found if len(silent) < len(devices) else []), *silent]
    if to_take and devices[0]["vendor"] in VISIBLE:
        lines += ["", f"next: export {VISIBLE[devices[0]['vendor']]}={','.join(device['pin'] for device in devices)}"]
    return "\n".join(plain(line) for line in lines)


def _device_name(device: Mapping[str, Any]) -> str:
    if device["index"] is None:
        return f"token {device['token']}"
    return str(device["uuid"]) if device["parent_uuid"] else f"GPU {device['index']}"  # slices share an index
