"""The variables of an emulated array task: those that a real Slurm (22.05) sets, and nothing of an outer job.

Pure. Newer versions of Slurm add SLURM_JOB_START_TIME and SLURM_JOB_END_TIME; sites add SLURM_TMPDIR.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import Device
from badcjobs.scheduler.array_spec import ArraySpec
from badcjobs.scheduler.device_pool import visible_lists
from badcjobs.scheduler.job_script import JobRequest

# Of an outer job, or of the shell that submits: none of it is true inside.
_FOREIGN = re.compile(r"(SLURMD?|SBATCH|SRUN|SALLOC)_")
_DEVICE_LISTS = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL")
_LOGIN = ("HOME", "USER", "LOGNAME", "SHELL", "PATH", "LANG", "TZ")  # what --export=NONE leaves: a login's own

_PATTERN = re.compile(r"%(\d*)([%AajJNnstux])")
_EXPORTED = re.compile(r"""((?:[^,'"]|'[^']*'|"[^"]*")+)(?:,|$)""")


@dataclass(frozen=True, slots=True)
class Identity:
    """Which array task of which job; ``index`` is None for a job without an array."""

    job_id: int
    index: int | None
    array: ArraySpec | None
    restart: int = 0

    @property
    def own_id(self) -> int:
        """Slurm's number of this task alone: the last of an array has that of the array itself."""
        if self.index is None or self.array is None or self.index == self.array.indices[-1]:
            return self.job_id
        return self.job_id + 1 + self.array.indices.index(self.index)

    @property
    def name(self) -> str:
        return str(self.job_id) if self.index is None else f"{self.job_id}_{self.index}"


@dataclass(frozen=True, slots=True)
class Node:
    """The machine, as a job sees it."""

    name: str
    cores: int
    user: str
    submit_dir: Path


def task_variables(
    who: Identity, request: JobRequest, node: Node, devices: Sequence[Device], *, name: str
) -> dict[str, str]:
    """Return the variables of one attempt, without those of its time and its folder."""
    cpus = min(request.cpus or 1, node.cores)
    found = {
        "SLURMD_NODENAME": node.name, "SLURM_CLUSTER_NAME": "local", "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_ID": str(who.own_id), "SLURM_JOBID": str(who.own_id), "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": node.name, "SLURM_NODELIST": node.name, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0",
        "SLURM_CPUS_ON_NODE": str(cpus), "SLURM_JOB_CPUS_PER_NODE": str(cpus), "SLURM_TASKS_PER_NODE": "1",
        "SLURM_JOB_USER": node.user, "SLURM_SUBMIT_DIR": str(node.submit_dir), "SLURM_SUBMIT_HOST": node.name,
    }  # fmt: skip
    if request.cpus is not None:
        found["SLURM_CPUS_PER_TASK"] = str(cpus)
    if request.mem_mib is not None:
        found["SLURM_MEM_PER_NODE"] = str(request.mem_mib)
    if request.ntasks is not None:
        found.update(SLURM_NTASKS=str(request.ntasks), SLURM_NPROCS=str(request.ntasks))
    if who.restart:
        found["SLURM_RESTART_COUNT"] = str(who.restart)
    return {**found, **_array_variables(who), **_device_variables(devices)}


def _array_variables(who: Identity) -> dict[str, str]:
    if who.array is None:
        return {}
    indices = who.array.indices
    return {
        "SLURM_ARRAY_JOB_ID": str(who.job_id),
        "SLURM_ARRAY_TASK_ID": str(who.index),
        "SLURM_ARRAY_TASK_MIN": str(indices[0]),
        "SLURM_ARRAY_TASK_MAX": str(indices[-1]),
        "SLURM_ARRAY_TASK_STEP": str(who.array.step),
        "SLURM_ARRAY_TASK_COUNT": str(len(indices)),
    }


def _device_variables(devices: Sequence[Device]) -> dict[str, str]:
    lists = visible_lists(devices)
    if not devices:
        return lists
    many = str(len(devices))
    physical = ",".join(device.token if device.index is None else str(device.index) for device in devices)
    return {**lists, "SLURM_JOB_GPUS": physical, "SLURM_GPUS_ON_NODE": many, "SLURM_GPUS_PER_NODE": many}


def inherited(environ: Mapping[str, str], export: str) -> dict[str, str]:
    """Return what a job takes over from the shell that submits it, as ``--export`` says."""
    clean = {name: value for name, value in environ.items() if not _FOREIGN.match(name) and name not in _DEVICE_LISTS}
    words = [word.strip() for word in _EXPORTED.findall(export)]
    base = clean if "ALL" in words else {name: clean[name] for name in _LOGIN if name in clean}
    for word in words:
        name, equals, value = word.partition("=")
        if equals:
            base[name] = _unquoted(value)
        elif name in clean:
            base[name] = clean[name]
    return base


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value


def log_path(pattern: str | None, who: Identity, node: Node, *, name: str) -> Path:
    """Return where a log goes: Slurm's pattern, filled in; relative to the folder of submission."""
    values = {
        "A": str(who.job_id), "a": str(who.index if who.index is not None else 4294967294), "j": str(who.own_id),
        "J": str(who.own_id), "N": node.name, "n": "0", "s": "batch", "t": "0", "u": node.user, "x": name,
    }  # fmt: skip

    def fill(found: re.Match[str]) -> str:
        width, letter = found.groups()
        return "%" if letter == "%" else values[letter].zfill(int(width or 0))

    default = "slurm-%j.out" if who.index is None else "slurm-%A_%a.out"
    return node.submit_dir / _PATTERN.sub(fill, pattern or default)
