"""Which arrays tell their tasks enough: Slurm tells the spacing of a range, and hides that of a list. Pure."""

from __future__ import annotations

from badcjobs.model import ArrayShape
from badcjobs.scheduler.array_spec import ArraySpec


def range_instead(spec: ArraySpec) -> str | None:
    """Return the range to write in the place of a list; None: tasks can know their place in the array as it is.

    Of ``1,3,5,7`` Slurm tells a task the first index, the last, a step of 1 and a count of 4, as of ``1,2,6,7``. Where
    the indices are evenly spaced the range has the same ones, otherwise as many.
    """
    first, count = spec.indices[0], len(spec.indices)
    if _is_shape(spec, spec.step):
        return None
    step = spec.indices[1] - first
    shape = ArrayShape(first, step, count) if _is_shape(spec, step) else ArrayShape(0, 1, count)
    return f"{shape}%{spec.parallel}" if spec.parallel else str(shape)


def _is_shape(spec: ArraySpec, step: int) -> bool:
    first = spec.indices[0]
    return list(spec.indices) == list(range(first, first + len(spec.indices) * step, step))
