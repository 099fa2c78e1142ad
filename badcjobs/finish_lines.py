"""The lines to paste that do what is left of a run: those of whoever submitted it, and one that needs no Slurm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from badcjobs.frozen_run import FrozenRun
from badcjobs.report.words import index_ranges
from badcjobs.trace import Trace


def finish_lines(
    frozen: FrozenRun, out: Path, told: Mapping[str, Any], trace: Trace, left: Sequence[int]
) -> tuple[str, ...]:
    """Return the lines, the last one without Slurm.

    ``told``: the settings of the task that started last. ``left``: the array tasks that would do what is left; none
    where nobody knows them, or somebody else has to.
    """
    here = frozen.command_line(out, told)
    if trace.emulated:
        return (trace.line() or here,)
    if frozen.array is None or not left:
        return (here,)
    if trace.command:
        return trace.line("--again"), here
    return f"sbatch --array={index_ranges(left, frozen.array.step)} …", here
