"""The variables in which sbatch repeats to a job what it was asked for. Pure; seen on a real 22.05."""

from __future__ import annotations

from collections.abc import Mapping

from badcjobs.scheduler.local_values import parse_memory

_AS_GIVEN = {
    "account": "SLURM_JOB_ACCOUNT", "cpus-per-gpu": "SLURM_CPUS_PER_GPU", "dependency": "SLURM_JOB_DEPENDENCY",
    "distribution": "SLURM_DISTRIBUTION", "export": "SLURM_EXPORT_ENV", "gpu-bind": "SLURM_GPU_BIND",
    "gpu-freq": "SLURM_GPU_FREQ", "gpus": "SLURM_GPUS", "gpus-per-node": "SLURM_GPUS_PER_NODE",
    "gpus-per-socket": "SLURM_GPUS_PER_SOCKET", "gpus-per-task": "SLURM_GPUS_PER_TASK",
    "ntasks-per-core": "SLURM_NTASKS_PER_CORE", "ntasks-per-gpu": "SLURM_NTASKS_PER_GPU",
    "ntasks-per-node": "SLURM_NTASKS_PER_NODE", "ntasks-per-socket": "SLURM_NTASKS_PER_SOCKET",
    "threads-per-core": "SLURM_THREADS_PER_CORE",
}  # fmt: skip
_IN_MIB = {"mem": "SLURM_MEM_PER_NODE", "mem-per-cpu": "SLURM_MEM_PER_CPU", "mem-per-gpu": "SLURM_MEM_PER_GPU"}


def echoed_variables(given: Mapping[str, str]) -> dict[str, str]:
    """Return what a job is told of its options; raises ValueError for memory that is none."""
    found = {variable: given[name] for name, variable in _AS_GIVEN.items() if given.get(name)}
    for name, variable in _IN_MIB.items():
        if name in given and (mib := parse_memory(given[name], name)):
            found[variable] = str(mib)
    if "open-mode" in given:
        found["SLURM_OPEN_MODE"] = given["open-mode"][:1]
    if "overcommit" in given:
        found["SLURM_OVERCOMMIT"] = "1"
    if given.get("export", "ALL") not in ("ALL", "NIL"):
        found["SLURM_GET_USER_ENV"] = "1"
    return found
