"""A small job array on this machine: each emulated task has its own devices and Slurm's own variables."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue


@dataclass(frozen=True, slots=True)
class EmulatedTask:
    """One element of the array and how it ended."""

    index: int
    devices: tuple[str, ...]
    exit_code: int
    log: Path


def array_environment(environ: Mapping[str, str], *, job_id: int, index: int, count: int) -> dict[str, str]:
    """Return the variables that Slurm would set for one element of ``--array=0-<count - 1>``."""
    clean = {name: value for name, value in environ.items() if not name.startswith(("SLURM_", "SBATCH_"))}
    return {
        **clean,
        "SLURM_JOB_ID": str(job_id + index),
        "SLURM_ARRAY_JOB_ID": str(job_id),
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": str(count - 1),
        "SLURM_ARRAY_TASK_STEP": "1",
        "SLURM_ARRAY_TASK_COUNT": str(count),
    }


def run_array(
    argv: Sequence[str],
    *,
    environ: Mapping[str, str],
    job_id: int,
    tasks: int,
    device_sets: Sequence[Sequence[str]],
    logs: Path,
) -> list[EmulatedTask]:
    """Run ``tasks`` copies of a command, one at a time per set of devices, and wait for all of them."""
    free: SimpleQueue[tuple[str, ...]] = SimpleQueue()
    for devices in device_sets:
        free.put(tuple(devices))
    logs.mkdir(parents=True, exist_ok=True)

    def run_one(index: int) -> EmulatedTask:
        devices = free.get()
        log = logs / f"{job_id}_{index}.out"
        env = array_environment(environ, job_id=job_id, index=index, count=tasks)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        try:
            with log.open("wb") as out:
                code = subprocess.run(argv, env=env, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
        finally:
            free.put(devices)
        return EmulatedTask(index, devices, code, log)

    with ThreadPoolExecutor(max_workers=len(device_sets)) as pool:
        return list(pool.map(run_one, range(tasks)))
