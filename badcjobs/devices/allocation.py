"""What Slurm's variables say about this task: its place in the array, its memory, its cores, the end of its time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime

from badcjobs.errors import BadInput
from badcjobs.model import Allocation, ArrayShape

_TELLING = (
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
    """Return what this process was given, from the variables of its environment."""
    # Slurm may reuse the array's number as the job id of one of its tasks: the array's own comes first.
    job_id = environ.get("SLURM_ARRAY_JOB_ID") or environ.get("SLURM_JOB_ID")
    base = Allocation(
        in_slurm=bool(job_id),
        job_id=job_id or f"local{started_at_ms}-{pid}",
        node=hostname,
        local_dir=environ.get("SLURM_TMPDIR") or environ.get("TMPDIR") or None,
        facts={name: value for name, value in sorted(environ.items()) if name.startswith(_TELLING)},
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
        # Set only inside steps; SLURM_NTASKS is also there in the batch script, where we are alone.
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


# --- which part of the work is ours -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """Part ``index`` of ``count``.

    A list of manifests has a line per array task: ``position`` of ``positions`` picks it, and only the tasks of
    a step (``step_index`` of ``step_count``) share it.
    """

    index: int
    count: int
    position: int | None = None
    positions: int | None = None
    step_index: int = 0
    step_count: int = 1


def array_shape(allocation: Allocation) -> ArrayShape | None:
    """Return the shape of the array this task belongs to; None without one, or when its indices are irregular."""
    if allocation.array_indices is None:
        return None
    first, last, step, count = allocation.array_indices
    shape = ArrayShape(first, max(step, 1), count)
    return shape if shape.position_of(last) == count - 1 else None  # a list such as 1,2,5 has step 1


def find_place(allocation: Allocation, frozen: ArrayShape | None) -> ShardPlace:
    """Return our place; ``frozen`` is the array's shape in run.toml (None: no array was frozen)."""
    tasks, procid = allocation.step_tasks, allocation.procid
    if allocation.array_index is None:
        return ShardPlace(procid, tasks)
    if frozen is None and allocation.array_indices is None:
        raise BadInput(
            f"this array task ({allocation.job_id}_{allocation.array_index}) does not know its array's shape",
            why="SLURM_ARRAY_TASK_MIN, _MAX and _COUNT are not set",
            fix="badcjobs run … --shard I/N   (I from 0)",
        )
    if frozen is None and allocation.array_indices is not None and array_shape(allocation) is None:
        first, last, step, count = allocation.array_indices
        # Evenly spaced it may be, but a task cannot know it: Slurm says the same of 1,3,5,7 and of 1,2,6,7.
        apart, rest = divmod(last - first, max(count - 1, 1))
        same = "" if rest else f"if the steps are even: --array={ArrayShape(first, apart, count)}; "
        raise BadInput(
            "the indices of this array are a list, whose spacing Slurm hides from its tasks",
            why="the first task of a run decides the shards from the first index, the step and the count; of a list"
            f" Slurm tells only that it goes from {first} to {last}, with {count} tasks and a step of {step}",
            fix=f"sbatch --array=0-{count - 1} …   ({same}later, any of its indices may be submitted again)",
        )
    if frozen is None:
        raise BadInput(
            f"array task {allocation.job_id}_{allocation.array_index} cannot join a run that began without an array",
            why="the first task of a run decides the shards; run.toml says that it took the whole source",
            fix="badcjobs run … --shard I/N   (I from 0), or another --out for a new run",
        )
    position = frozen.position_of(allocation.array_index)
    if position is None:
        raise BadInput(
            f"array index {allocation.array_index} is not part of this run's array {frozen}",
            why="the first task froze the array's shape in run.toml, so that the shards stay the same",
            fix=f"sbatch --array={frozen} …   (or a part of it), or use another --out for a new run",
        )
    return ShardPlace(position * tasks + procid, frozen.count * tasks, position, frozen.count, procid, tasks)


# --- memory -----------------------------------------------------------------------------------------------------------

_MIB = 2**20
# Each kind of request has its variable, in MiB; the second says how many of those there are on this node.
_REQUESTS = (
    ("SLURM_MEM_PER_NODE", None),
    ("SLURM_MEM_PER_CPU", "SLURM_CPUS_ON_NODE"),
    ("SLURM_MEM_PER_GPU", "SLURM_GPUS_ON_NODE"),
)
_TASKS = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # 2(x3),1: two tasks on each of three nodes, one on the fourth


def requested_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return the memory of the first request that was made; None: nobody knows, or all that the node has (--mem=0)."""
    for size_name, count_name in _REQUESTS:
        size_mib = _whole_number(facts.get(size_name, ""))
        if size_mib is not None:
            many = 1 if count_name is None else _whole_number(facts.get(count_name, ""))
            return size_mib * _MIB * many if size_mib and many else None
    return None


def own_memory_bytes(facts: Mapping[str, str]) -> int | None:
    """Return this task's part of the memory that was asked for: the tasks of a step share it on each node."""
    asked_bytes = requested_memory_bytes(facts)
    if asked_bytes is None:
        return None
    groups = _TASKS.findall(facts.get("SLURM_STEP_TASKS_PER_NODE", ""))
    by_node = [int(tasks) for tasks, nodes in groups for _ in range(int(nodes or 1))]
    node = _whole_number(facts.get("SLURM_NODEID", "")) or 0
    # Outside of steps, and where it is not known, we are alone.
    return asked_bytes // (max(1, by_node[node]) if node < len(by_node) else 1)


def _whole_number(text: str) -> int | None:
    """Read a number; anything else is no reason to end a job, it is only not known then."""
    text = text.strip()
    return int(text) if text.isascii() and text.isdecimal() else None


# --- the end of the time ----------------------------------------------------------------------------------------------

END_VARIABLE = "SLURM_JOB_END_TIME"  # set by newer versions of Slurm only
_LONGEST_S = 100 * 366 * 86_400  # what is further away is no date, but a number that stands for "no limit"


@dataclass(frozen=True, slots=True)
class EndTime:
    """The instant at which the time is over, and who says so."""

    at_ms: int
    source: str


def parse_end(text: str, source: str, now_ms: int) -> EndTime | None:
    """Read SLURM_JOB_END_TIME, or the output of ``squeue -h -o %e``; None where it names no end that is to come.

    Epoch seconds or a local date; NONE, Unknown and N/A are no end. The variable is written once, when the job starts:
    after ``scontrol update TimeLimit=…`` an end in the past is an old one. Of several lines (a heterogeneous job, a
    banner) the earliest end counts.
    """
    found = []
    for line in map(str.strip, text.splitlines()):
        at_s: float | None = _whole_number(line)
        with suppress(ValueError, OverflowError, OSError):
            at_s = datetime.fromisoformat(line).timestamp() if at_s is None and "T" in line else at_s
        if at_s is not None and now_ms < at_s * 1000 <= now_ms + _LONGEST_S * 1000:
            found.append(round(at_s * 1000))
    return EndTime(min(found), source) if found else None


def squeue_question(allocation: Allocation) -> list[str]:
    """Return the command that asks for our end alone: an array's own number would name all its tasks."""
    index = "" if allocation.array_index is None else f"_{allocation.array_index}"
    return ["squeue", "-h", "-j", f"{allocation.job_id}{index}", "-o", "%e"]
