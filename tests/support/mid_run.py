"""The synthetic job while it goes on: tasks that are done, tasks at work on every node, tasks that wait."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rooms.model import Submitted
from rooms.store import Record, write_record
from support.story import JOB_ID
from support.synthetic_job import CHUNKS, Planned, Templates, schedule, write_source
from support.task_files import START_MS

_SILENT = 22  # every so many tasks at work one has published nothing for a while
_SILENCE_S = 1500


def write_mid_run(folder: Path, tasks: int, *, now_ms: int, share: float = 0.55, chunks: int = CHUNKS) -> None:
    """Write the folder of the job as it looks when this share of its time is over, which is now."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        templates, plan = Templates(Path(local)), list(schedule(tasks, chunks))
        at_s = share * max(one.end_s for one in plan)
        old = [one for one in plan if one.begin_s + _SILENCE_S < at_s < one.end_s]
        silent = {one.key for one in old[len(old) // 3 :: _SILENT]}
        for one in plan:
            if one.begin_s < at_s:
                late_s = _SILENCE_S if one.key in silent else 0
                _write(templates, folder / "tasks", one, at_s - late_s, now_ms / 1000 - late_s)
    write_source(folder, tasks, chunks=chunks)
    job = Submitted(JOB_ID, None, tuple(range(tasks)))
    write_record(
        folder, Record("slurm", job, ("run", "june.csv"), tasks * chunks, now_ms - round(1000 * at_s) - 60_000)
    )


def _write(templates: Templates, folder: Path, one: Planned, at_s: float, now_s: float) -> None:
    """Write a task that is done, or one that has got as far as it has."""
    story = one.story
    if at_s < one.end_s:
        under_way = round(max(60, at_s - one.begin_s))
        story = replace(story, killed_s=None, slurm_state=None, under_way_s=under_way)
    path = templates.write(story, one.key, now_s - START_MS / 1000 - at_s + one.begin_s, folder)
    os.utime(path, (now_s,) * 2)
