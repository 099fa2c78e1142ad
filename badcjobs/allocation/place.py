"""Finds which part of the source is ours: our position in the array, and the step's tasks within it."""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.errors import BadInput
from badcjobs.model import Allocation, ArrayShape


@dataclass(frozen=True, slots=True)
class Place:
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


def find_place(allocation: Allocation, frozen: ArrayShape | None) -> Place:
    """Return our place; ``frozen`` is the array's shape in run.toml (None: no array was frozen)."""
    tasks, procid = allocation.step_tasks, allocation.procid
    if allocation.array_index is None:
        return Place(procid, tasks)
    if frozen is None:
        raise _irregular(allocation) if array_shape(allocation) is None else _began_without_array(allocation)
    position = frozen.position_of(allocation.array_index)
    if position is None:
        raise BadInput(
            f"array index {allocation.array_index} is not part of this run's array {frozen}",
            why="the first task froze the array's shape in run.toml, so that the shards stay the same",
            fix=f"sbatch --array={frozen} …   (or a part of it), or use another --out for a new run",
        )
    return Place(position * tasks + procid, frozen.count * tasks, position, frozen.count, procid, tasks)


def _began_without_array(allocation: Allocation) -> BadInput:
    return BadInput(
        f"array task {allocation.job_id}_{allocation.array_index} cannot join a run that began without an array",
        why="the first task of a run decides the shards; run.toml says that it took the whole source",
        fix="badcjobs run … --shard I/N   (I from 0), or another --out for a new run",
    )


def _irregular(allocation: Allocation) -> BadInput:
    if allocation.array_indices is None:
        return BadInput(
            f"this array task ({allocation.job_id}_{allocation.array_index}) does not know its array's shape",
            why="SLURM_ARRAY_TASK_MIN, _MAX and _COUNT are not set",
            fix="badcjobs run … --shard I/N   (I from 0)",
        )
    first, last, step, count = allocation.array_indices
    # Evenly spaced it may be, but a task cannot know it: Slurm says the same of 1,3,5,7 and of 1,2,6,7.
    apart, rest = divmod(last - first, max(count - 1, 1))
    same = "" if rest else f"if the steps are even: --array={ArrayShape(first, apart, count)}; "
    return BadInput(
        "the indices of this array are a list, whose spacing Slurm hides from its tasks",
        why="the first task of a run decides the shards from the first index, the step and the count; of a list Slurm"
        f" tells only that it goes from {first} to {last}, with {count} tasks and a step of {step}",
        fix=f"sbatch --array=0-{count - 1} …   ({same}later, any of its indices may be submitted again)",
    )
