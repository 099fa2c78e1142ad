"""Commands about devices: ``badcjobs gpus`` and ``record`` on this machine, ``cluster`` in the whole cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import DEVICES, ConfigWords, JsonWanted, Target, refuse_data, with_settings
from badcjobs.cli.output import answer, environ, log_to_stderr, print_json, read_world, remark, say
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode, NotHere
from badcjobs.settings import Config, refuse, stand_in

if TYPE_CHECKING:
    from badcjobs.devices.free import DeviceRequest


@with_settings(*DEVICES)
def gpus(
    everything: Annotated[bool, typer.Option("--all", help="Every GPU of the machine, with its processes.")] = False,
    free: Annotated[int | None, typer.Option(help="Only the N devices that are most free.")] = None,
    min_memory_mib: Annotated[int | None, typer.Option(min=1, help="With --free: minimum free memory.")] = None,
    max_utilization: Annotated[float | None, typer.Option(help="With --free: maximum utilization in percent.")] = None,
    wait: Annotated[float | None, typer.Option(help="With --free: wait so many seconds for them; default 0.")] = None,
    json_wanted: JsonWanted = False,
    **devices: Any,
) -> int:
    """Show the devices this task really has, and how we know; with --free the best ones that nobody uses.

    Example: CUDA_VISIBLE_DEVICES=2 badcjobs gpus --simulate 4 --json   (or, on a shared machine: badcjobs gpus
    --free 2 --wait 600)
    """
    from badcjobs.devices.free import Waiting, list_free
    from badcjobs.devices.listing import list_granted
    from badcjobs.devices.locks import DeviceLocks, lock_folder

    request = _request(free, everything, min_memory_mib=min_memory_mib, max_utilization=max_utilization, wait=wait)
    try:
        simulated, clock, variables = stand_in(Path.cwd(), **devices), SystemClock(), environ()
        if request is None:
            found = list_granted(variables, clock, stand_in=simulated, everything=everything)
        else:
            locks = DeviceLocks(lock_folder(variables), clock, None)
            found = list_free(variables, simulated, request, locks, Waiting(clock, remark))
    except NotHere as error:
        if not json_wanted:
            raise
        why = "\n".join(filter(None, [error.what, error.why]))
        reader = {"backend": getattr(error, "backend", "none"), "backend_why": getattr(error, "backend_why", "")}
        print_json({"devices": [], "why": why, **reader})
        return int(error.exit_code)
    if json_wanted:
        print_json(found.to_dict())
        return 0 if found.devices else int(NotHere.exit_code)
    if not found.devices:
        raise NotHere(
            "no GPU here", why=found.why, fix="badcjobs gpus --simulate 2   (to see how it looks), or ask Slurm for one"
        )
    say(_devices_text(found.to_dict(), processes=everything, to_take=request is not None))
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
            why="one shows every card, the other the best ones of ours",
            fix=f"badcjobs gpus --free {free}   (or: badcjobs gpus --all)",
        )
    request = DeviceRequest(free, limits["min_memory_mib"], limits["max_utilization"], limits["wait"] or 0.0)
    check_request(request)
    return request


@with_settings(*DEVICES)
def record(
    out: Annotated[Path, typer.Option(help="Where to; .sqlite, .csv or .jsonl.")],
    command: Annotated[
        list[str] | None, typer.Argument(metavar="[-- COMMAND...]", help="Record while this command runs.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.01, max=86_400, help="Seconds between samples.")] = 1.0,
    duration: Annotated[float | None, typer.Option(min=0.0, help="Stop after so many seconds, with SIGTERM.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it exists.")] = False,
    config: ConfigWords = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON (not with a command).")] = False,
    **devices: Any,
) -> int:
    """Record every granted device until Ctrl-C, for some time, or while a command runs (whose exit code it returns).

    Example: badcjobs record --out training.sqlite -- python train.py
    """
    from badcjobs.report.words import count
    from badcjobs.task.record_command import run_record
    from badcjobs.task.records import RecordingOptions

    log_to_stderr(quiet=True)
    if overwrite:
        refuse_data([Target("--out", out, f"recording{out.suffix}")], whatever_it_holds=True)
    mistakes: list[str] = []
    of_run, alerts, hooks, _ = Config.read(config).read_tables(mistakes)
    refuse(mistakes, "badcjobs guide telemetry")
    world = read_world()
    options = RecordingOptions(
        interval,
        stand_in(world.cwd, **devices),
        alerts,
        lambda alert: remark(alert.text) if alert.over else None,  # the log, kept to warnings, has only their begin
        hooks,
    )
    live_mode = of_run.get("live_mode", "auto")
    end = run_record(
        out, options, world, command=command or (), duration_s=duration, overwrite=overwrite, live_mode=live_mode
    )
    if json_wanted:
        print_json(end)
        return int(end["exit_code"])
    trouble = "" if end["telemetry"] == "on" else f"; telemetry {end['telemetry']}"
    said = f"{count(end['devices'], 'device')} recorded for {end['wall_s']:.1f} s: {end['out']}{trouble}"
    if command:
        remark(said)  # its own output stays clean
    else:
        say(f"badcjobs: {said}")
    return int(end["exit_code"])


def cluster(
    gpus: Annotated[int, typer.Option(min=1, help="How many GPUs a task needs, for the advice.")] = 1,
    kind: Annotated[str | None, typer.Option(help="Only GPUs of this kind: v100, a100, or a node feature.")] = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Show free and used GPUs per partition and node, and where a task of so many GPUs would start.

    Asks sinfo once. Exit code 3 without Slurm, without any such GPU, or when no node has so many (the advice then says
    which is the most, and what to ask for instead); 5 when sinfo refuses.

    Example: badcjobs cluster --gpus 4 --kind v100
    """
    from badcjobs.cluster.nodes import cluster_text, look_at_cluster

    found = look_at_cluster(environ(), gpus=gpus, kind=kind)
    answer(json_wanted, lambda: found, lambda: cluster_text(found))
    return int(ExitCode.DONE if found["fits"] else ExitCode.NOT_HERE)


_LONGEST_MODEL = 28


def _devices_text(listing: Mapping[str, Any], *, processes: bool = False, to_take: bool = False) -> str:
    """Return the devices of ``badcjobs gpus`` with the reasons; on request also their processes or how to take them."""
    from badcjobs.report.tables import Table, columns, table_text
    from badcjobs.report.words import UNKNOWN, memory, percent, plain

    devices: Sequence[Mapping[str, Any]] = listing["devices"]
    rows = [
        (UNKNOWN if d["index"] is None else str(d["index"]), d["uuid"] or f"token {d['token']}",
         (d["name"] or UNKNOWN)[:_LONGEST_MODEL], memory(d["memory_free_bytes"]), memory(d["memory_total_bytes"]),
         percent(d["utilization_percent"]), UNKNOWN if d["temperature_c"] is None else f"{d['temperature_c']} °C",
         UNKNOWN if d["score"] is None else f"{d['score']:.2f}", d["backend"])
        for d in devices
    ]  # fmt: skip
    heads = columns("<index", "<uuid", "<name", "free", "of", "util", "temp", "score", "backend")
    lines = table_text(Table("devices", "Devices", heads, rows))
    lines += ["", *(f"  {_device_name(d)}: {d['why']}" for d in devices)]
    lines += [f"  {_device_name(d)}: no reading: {d['trouble']}" for d in devices if d["trouble"]]
    lines += [f"  granted: {listing['why']}"]
    if listing["backend_why"]:
        lines.append(f"  read through {listing['backend']}: {listing['backend_why']}")
    if processes:
        lines += ["", *_process_lines(devices)]
    if to_take:
        variable = "ROCR_VISIBLE_DEVICES" if devices[0]["vendor"] == "amd" else "CUDA_VISIBLE_DEVICES"
        lines += ["", f"  export {variable}={','.join(device['pin'] for device in devices)}"]
    return "\n".join(plain(line) for line in lines)


def _device_name(device: Mapping[str, Any]) -> str:
    if device["index"] is None:
        return f"token {device['token']}"
    return str(device["uuid"]) if device["parent_uuid"] else f"GPU {device['index']}"  # slices share an index


def _process_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    from badcjobs.report.tables import Table, columns, table_text
    from badcjobs.report.words import UNKNOWN, memory

    rows = [
        (_device_name(device), str(process["pid"]), process["user"] or UNKNOWN, process["program"] or UNKNOWN,
         memory(process["memory_used_bytes"]))
        for device in devices
        for process in device["processes"] or ()
    ]  # fmt: skip
    silent = [f"  {_device_name(d)}: its processes are not told" for d in devices if d["processes"] is None]
    table = Table("processes", "Processes", columns("<device", "<pid", "<user", "<program", "memory"), rows)
    found = table_text(table) if rows else ["  no process is on these devices"]
    return [*(found if len(silent) < len(devices) else []), *silent]
