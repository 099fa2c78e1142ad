"""The devices of a machine as a table: what ``badcjobs gpus`` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from badcjobs.report.text_lines import table
from badcjobs.report.words import UNKNOWN, memory, percent, plain

_LONGEST_NAME = 28


def devices_text(listing: Mapping[str, Any], *, processes: bool = False, to_take: bool = False) -> str:
    """Return the table, the reasons below it, and on request the processes or the line that takes the devices."""
    devices: Sequence[Mapping[str, Any]] = listing["devices"]
    head = ("index", "uuid", "name", "free", "of", "util", "temp", "score", "backend")
    lines = table([head, *(_row(device) for device in devices)], left=3)
    lines += ["", *(f"  {_label(d)}: {d['why']}" for d in devices)]
    lines += [f"  {_label(d)}: no reading: {d['trouble']}" for d in devices if d["trouble"]]
    lines += [f"  granted: {listing['why']}"]
    if listing["backend_why"]:
        lines.append(f"  read through {listing['backend']}: {listing['backend_why']}")
    if processes:
        lines += ["", *_process_lines(devices)]
    if to_take:
        lines += ["", *_taking_lines(devices)]
    return "\n".join(plain(line) for line in lines)


def _row(device: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        UNKNOWN if device["index"] is None else str(device["index"]),
        device["uuid"] or f"token {device['token']}",
        (device["name"] or UNKNOWN)[:_LONGEST_NAME],
        memory(device["memory_free_bytes"]),
        memory(device["memory_total_bytes"]),
        percent(device["utilization_percent"]),
        UNKNOWN if device["temperature_c"] is None else f"{device['temperature_c']} °C",
        UNKNOWN if device["score"] is None else f"{device['score']:.2f}",
        device["backend"],
    )


def _label(device: Mapping[str, Any]) -> str:
    if device["index"] is None:
        return f"token {device['token']}"
    return str(device["uuid"]) if device["parent_uuid"] else f"GPU {device['index']}"  # slices share an index


def _process_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    rows = [("device", "pid", "user", "program", "memory")]
    silent = []
    for device in devices:
        if device["processes"] is None:
            silent.append(f"  {_label(device)}: its processes are not told")
        for process in device["processes"] or ():
            user, program = process["user"] or UNKNOWN, process["program"] or UNKNOWN
            used = memory(process["memory_used_bytes"])
            rows.append((_label(device), str(process["pid"]), user, program, used))
    found = table(rows, left=4) if len(rows) > 1 else ["  no process is on these devices"]
    return [*(found if len(silent) < len(devices) else []), *silent]


def _taking_lines(devices: Sequence[Mapping[str, Any]]) -> list[str]:
    variable = "ROCR_VISIBLE_DEVICES" if devices[0]["vendor"] == "amd" else "CUDA_VISIBLE_DEVICES"
    return [f"  export {variable}={','.join(device['pin'] for device in devices)}"]
