"""Read Slurm's environment variables: this task's place in the array, its memory, its cores and its end time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from badcjobs.errors import BadInput
from badcjobs.model import Allocation, ArrayShape

_RECORDED_VARIABLES = (  # by the start of their names
    "SLURM_",
    "CUDA_VISIBLE_DEVICES",
    "CUDA_DEVICE_ORDER",
    "NVIDIA_VISIBLE_DEVICES",
    "ROCR_VISIBLE_DEVICES",
    "HIP_VISIBLE_DEVICES",
)


def is_in_slurm(environ: Mapping[str, str]) -> bool:
    """Return whether this process runs inside a Slurm job."""
    return bool(environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID"))


def parse_allocation(environ: Mapping[str, str], *, hostname: str, pid: int, started_at_ms: int) -> Allocation:
    """Return the allocation of this process, from its environment variables."""
    # SLURM_JOB_ID differs between the tasks of an array; SLURM_ARRAY_JOB_ID is the number that sbatch printed.
    job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    base = Allocation(
        in_slurm=bool(job_id),
        job_id=job_id or f"local{started_at_ms}-{pid}",
        node=hostname,
        local_dir=environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or None,
        facts={name: value for name, value in sorted(environ.items()) if name.startswith(_RECORDED_VARIABLES)},
        started_at_ms=started_at_ms,
    )
    if not job_id:
        return base
    array_index = _number(environ, "SLURM_ARRAY_TASK_ID")
    first, last, count = (_number(environ, f"SLURM_ARRAY_TASK_{name}") for name in ("MIN", "MAX", "COUNT"))
    array_indices = None
    if array_index is not None and first is not None and last is not None and count is not None:
        array_indices = first, last, _number(environ, "SLURM_ARRAY_TASK_STEP") or 1, count
    return replace(
        base,
        node=environ.get("SLURMD_NODENAME") or hostname,
        restart=_number(environ, "SLURM_RESTART_COUNT") or 0,
        array_index=array_index,
        array_indices=array_indices,
        # Only steps have it. SLURM_NTASKS is set in the batch script too, which is one process.
        step_tasks=_number(environ, "SLURM_STEP_NUM_TASKS") or 1,
        procid=_number(environ, "SLURM_PROCID") or 0,
        cpus=_number(environ, "SLURM_CPUS_PER_TASK") or _number(environ, "SLURM_CPUS_ON_NODE"),
    )


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "").strip()
    number = _whole_number(text)
    if text and number is None:
        raise BadInput(f"{name}={text} is not a whole number", why="Slurm always sets a number here")
    return number


# --- this task's shard ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Shard ``index`` of ``count``.

    A list of manifests has one line per array task: line ``position`` of ``positions``. Only the tasks of one step
    (``step_index`` of ``step_count``) share a line.
    """

    index: int
    count: int
    position: int | None = None
    positions: int | None = None
    step_index: int = 0
    step_count: int = 1


def array_shape(allocation: Allocation) -> ArrayShape | None:
    """Return the shape of this task's array; None without an array, or if its indices are irregular."""
    if allocation.array_indices is None:
        return None
    first, last, step, count = allocation.array_indices
    shape = ArrayShape(first, max(step, 1), count)
    return shape if shape.position_of(last) == count - 1 else None  # a list such as 1,2,5 has step 1


def find_place(allocation: Allocation, frozen: ArrayShape | None) -> ShardPlace:
    """Return the shard of this task; ``frozen`` is the array's shape in run.toml (None: the run has no array)."""
    tasks, procid = allocation.step_tasks, allocation.procid
    if allocation.array_index is None:
        return ShardPlace(procid, tasks)
    if frozen is None and allocation.array_indices is None:
        raise BadInput(
            f"the shape of the array of task {allocation.job_id}_{allocation.array_index} is unknown",
            why="SLURM_ARRAY_TASK_MIN, _MAX and _COUNT are not set",
            fix="badcjobs run … --shard I/N   (I from 0)",
        )
    if frozen is None and allocation.array_indices is not None and array_shape(allocation) is None:
        first, last, step, count = allocation.array_indices
        # It may be evenly spaced, but a task cannot tell: Slurm sets the same variables for 1,3,5,7 and 1,2,6,7.
        apart, rest = divmod(last - first, max(count - 1, 1))
        same = "" if rest else f"if evenly spaced: --array={ArrayShape(first, apart, count)}; "
        raise BadInput(
            "the indices of this array are a list, and Slurm does not report the indices of a list to its tasks",
            why="the first task of a run computes the shards from the first index, the step and the count; here Slurm"
            f" reports only indices from {first} to {last}, {count} tasks and a step of {step}",
            fix=f"sbatch --array=0-{count - 1} …   ({same}later, you can submit any of these indices again)",
        )
    if frozen is None:
        raise BadInput(
            f"array task {allocation.job_id}_{allocation.array_index} cannot join a run that started without an array",
            why="the first task of a run defines the shards; according to run.toml it took all sources",
            fix="badcjobs run … --shard I/N   (I from 0), or another --out for a new run",
        )
    position = frozen.position_of(allocation.array_index)
    if position is None:
        raise BadInput(
            f"array index {allocation.array_index} is not part of this run's array {frozen}",
            why="the first task saved the array's shape in run.toml, so that the shards stay the same",
            fix=f"sbatch --array={frozen} …   (or a part of it), or use another --out for a new run",
        )
    return ShardPlace(position * tasks + procid, frozen.count * tasks, position, frozen.count, procid, tasks)


# --- memory -----------------------------------------------------------------------------------------------------------

# The variable of each kind of request, in MiB, and the variable with the number of such units on this node.
_REQUESTS = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 2(x3),1: two tasks on each of three nodes, one on the fourth


def requested_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return the memory that the job requested; None: not known, or all of the node (--mem=0)."""
    for size_name, count_name in _REQUESTS:
        size_mib = _whole_number(facts.get(size_name, ""))
        if size_mib is not None:
            many = 1 if count_name is None else _whole_number(facts.get(count_name, ""))
            return size_mib * 2**20 * many if size_mib and many else None
    return None


def own_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return this task's part of the requested memory: the tasks of a step share it on each node."""
    requested_bytes = requested_memory_bytes(facts)
    if requested_bytes is None:
        return None
    groups = _TASKS.findall(facts.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    node = _whole_number(facts.get("SLURM_NODEID", "")) or 0
    # Outside steps, or if the number of tasks is not known, this is the only task.
    return requested_bytes // (max(1, by_node[node]) if node < len(by_node) else 1)


def _whole_number(text: str) -> int | None:
    """Return the number; None for any other text, which must not end a job."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None


# --- the end time -----------------------------------------------------------------------------------------------------

END_VARIABLE = "SLURM_JOB_END_TIME"  # only newer versions of Slurm set it
_LONGEST_S = 100 * 366 * 86_400  # a later date is a number that means "no limit"


@dataclass(frozen=True, slots=True)
class EndTime:
    """The time at which the job must end, and its source."""

    at_ms: int
    source: str


def parse_end(text: str, source: str, now_ms: int) -> EndTime | None:
    """Parse SLURM_JOB_END_TIME, or the output of ``squeue -h -o %e``; None if it has no end time in the future.

    The text has epoch seconds or a local date; NONE, Unknown and N/A mean no end. Slurm sets the variable once, at the
    start of the job, so it can be in the past after ``scontrol update TimeLimit=…``. With several lines (a
    heterogeneous job, a banner) the earliest end counts.
    """
    found = []
    for line in map(str.strip, text.splitlines()):
        at_s: float | None = _whole_number(line)
        with suppress(ValueError, OverflowError, OSError):
            at_s = datetime.fromisoformat(line).timestamp() if at_s is None and "T" in line else at_s
        if at_s is not None and now_ms < at_s * 1000 <= now_ms + _LONGEST_S * 1000:
            found.append(round(at_s * 1000))
    return EndTime(min(found), source) if found else None


def end_time_command(allocation: Allocation) -> list[str]:
    """Return the squeue command for the end time of this task only, not of its whole array."""
    index = "" if allocation.array_index is None else f"_{allocation.array_index}"
    return ["squeue", "-h", "-j", f"{allocation.job_id}{index}", "-o", "%e"]
