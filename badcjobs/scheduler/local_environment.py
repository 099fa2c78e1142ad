"""The variables of an emulated array task: those that a real Slurm (22.05) sets, and nothing of an outer job.

Not set are SLURM_CONF and SLURM_WORKING_CLUSTER: there is no cluster to talk to. SLURM_TASK_PID is known to the process
alone, which sets it (emulated_task.py). Newer versions of Slurm add SLURM_JOB_START_TIME and SLURM_JOB_END_TIME; sites
add SLURM_TMPDIR.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    uid: int = field(default_factory=os.getuid)
    gid: int = field(default_factory=os.getgid)


def task_variables(
    who: Identity, request: JobRequest, node: Node, devices: Sequence[Device], *, name: str
) -> dict[str, str]:
    """Return the variables of one attempt, without those of its time and its folder."""
    cores, per_task = cores_of(request, node), min(request.cpus or 1, node.cores)
    tasks = request.ntasks or max(1, cores // per_task)
    found = {
        "SLURMD_NODENAME": node.name, "SLURM_CLUSTER_NAME": "local", "SLURM_JOB_PARTITION": "local",
        "SLURM_JOB_ID": str(who.own_id), "SLURM_JOBID": str(who.own_id), "SLURM_JOB_NAME": name,
        "SLURM_JOB_NODELIST": node.name, "SLURM_NODELIST": node.name, "SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1",
        "SLURM_NODEID": "0", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_GTIDS": "0", "SLURM_PRIO_PROCESS": "0",
        "SLURM_CPUS_ON_NODE": str(cores), "SLURM_JOB_CPUS_PER_NODE": str(cores), "SLURM_TASKS_PER_NODE": str(tasks),
        "SLURM_JOB_USER": node.user, "SLURM_JOB_UID": str(node.uid), "SLURM_JOB_GID": str(node.gid),
        "SLURM_SUBMIT_DIR": str(node.submit_dir), "SLURM_SUBMIT_HOST": node.name, "SLURM_NODE_ALIASES": "(null)",
        "SLURM_TOPOLOGY_ADDR": node.name, "SLURM_TOPOLOGY_ADDR_PATTERN": "node",
        "ENVIRONMENT": "BATCH", "HOSTNAME": node.name,
    }  # fmt: skip
    if request.cpus is not None:
        found["SLURM_CPUS_PER_TASK"] = str(per_task)
    if request.ntasks is not None:
        found.update(SLURM_NTASKS=str(request.ntasks), SLURM_NPROCS=str(request.ntasks))
    if who.restart:
        found["SLURM_RESTART_COUNT"] = str(who.restart)
    return {**request.told, **found, **_array_variables(who), **_device_variables(devices)}


def cores_of(request: JobRequest, node: Node) -> int:
    """Return how many cores an array task has: what it asks for, as far as they are there."""
    return node.cores if request.exclusive else min(request.cores, node.cores)


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
    return {**lists, "SLURM_JOB_GPUS": physical, "SLURM_GPUS_ON_NODE": many}


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
    """Return where a log goes: Slurm's pattern, filled in; relative to the folder in which the script runs."""
    values = {
        "A": str(who.job_id), "a": str(who.index if who.index is not None else 4294967294), "j": str(who.own_id),
        "J": str(who.own_id), "N": node.name, "n": "0", "s": "batch", "t": "0", "u": node.user, "x": name,
    }  # fmt: skip

    def fill(found: re.Match[str]) -> str:
        width, letter = found.groups()
        return "%" if letter == "%" else values[letter].zfill(int(width or 0))

    default = "slurm-%j.out" if who.index is None else "slurm-%A_%a.out"
    return Path(_PATTERN.sub(fill, pattern or default))


def make_tmpdir(wanted: str | None) -> str:
    """Return a job's TMPDIR: as Slurm does, the one of whoever submits, made where it is missing, else /tmp."""
    try:
        Path(wanted or "/tmp").mkdir(mode=0o700, exist_ok=True)
    except OSError:
        return "/tmp"
    return wanted or "/tmp"
