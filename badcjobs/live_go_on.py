"""The commands that go on with a run on which nobody works any more; ``badcjobs merge`` proves what is left of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from badcjobs.errors import BadcjobsError
from badcjobs.finish_lines import finish_lines
from badcjobs.frozen_run import FrozenRun
from badcjobs.live_array import last_job_of
from badcjobs.model import CutShort
from badcjobs.monitor.frame import TaskLine
from badcjobs.paths import RunFolder
from badcjobs.run_lock import lock_in
from badcjobs.scheduler.submitted_file import file_in
from badcjobs.trace import find_idle_emulation, find_trace


def commands_that_go_on(
    folder: RunFolder, tasks: Sequence[TaskLine], settings: str | None, check: Callable[[Path], None]
) -> tuple[str, ...]:
    """Return lines to paste, the last one without Slurm; ``settings`` are those of the task that started last, as JSON.

    None where nobody has written down what the run is (run.toml), or ``check`` does not let a file be read.
    """
    run = RunFolder(folder.path.absolute())
    logs = run.path / "logs"
    try:
        for path in (run.run_toml, file_in(run.path), logs, *logs.glob("*.json"), *logs.glob("*.lock")):
            check(path)
        frozen = FrozenRun.read(run.run_toml)
    except BadcjobsError:
        return ()
    if frozen is None or not tasks:
        return ()
    trace = find_trace(run.path, last_job_of(tasks))
    left = [task for task in tasks if task.pending or not task.begun]
    outside = any(task.job_id.startswith("local") for task in left)
    indices = () if outside else [task.array_index for task in left]
    return finish_lines(frozen, run.path, _parse_settings(settings), trace, indices)


def emulation_to_repeat(folder: RunFolder, check: Callable[[Path], None]) -> CutShort | None:
    """Return what is left of an emulation that is over and of which no task has begun; ``check`` as above."""
    run, lock = folder.path.absolute(), lock_in(folder.path)
    try:
        for path in (lock.parent, lock, file_in(run)):
            check(path)
    except BadcjobsError:
        return None
    return find_idle_emulation(run)


def _parse_settings(text: str | None) -> dict[str, Any]:
    try:
        return dict(json.loads(text or "{}"))
    except (TypeError, ValueError):
        return {}
