"""Writes the job scripts of the emulation: plain sbatch text, which a Slurm would take as it is."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from badcjobs.model import ArrayOrder

PROGRAM = (sys.executable, "-m", "badcjobs")


def array_text(order: ArrayOrder, program: Sequence[str] = PROGRAM) -> str:
    """Return the script of the array; ``program`` is how badcjobs is called here."""
    wanted: dict[str, str | int | None] = {
        "job-name": order.name,
        "array": order.spec,
        "nodes": 1,
        "ntasks": 1,
        "gpus-per-node": order.gpus_per_task or None,
        "cpus-per-task": order.cpus,
        "mem": order.mem,
        "time": order.time_min,
        "account": order.account,
        "partition": order.partition,
        "constraint": order.constraint,
        "signal": f"B:USR1@{order.warning_s}",
        "output": f"{_escaped(order.logs)}/%A_%a.out",
        "open-mode": "append",
    }
    return _text(wanted, order.extra_sbatch, order.setup, [*program, *order.run_arguments])


def merge_text(order: ArrayOrder, program: Sequence[str] = PROGRAM) -> str:
    """Return the script that merges; here it is read by people only, the emulation merges by itself."""
    wanted: dict[str, str | int | None] = {
        "job-name": f"{order.name}-merge",
        "nodes": 1,
        "ntasks": 1,
        "mem": order.merge_mem,
        "time": order.merge_time_min,
        "account": order.merge_account or order.account,
        "output": f"{_escaped(order.logs)}/%j-merge.out",
    }
    return _text(wanted, (), order.setup, [*program, "merge", str(order.out)])


def _text(
    wanted: dict[str, str | int | None], more: Sequence[str], setup: Sequence[str], command: Sequence[str]
) -> str:
    options = [f"--{name}={shlex.quote(str(value))}" for name, value in wanted.items() if value is not None]
    lines = ["#!/bin/bash", *(f"#SBATCH {option}" for option in (*options, *more)), "", *setup]
    return "\n".join([*lines, f"exec {shlex.join(command)}", ""])


def _escaped(path: Path) -> str:
    return str(path).replace("%", "%%")
