"""The synthetic job while it goes on: tasks that are done, tasks at work on every node, tasks that wait."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rooms.model import Submitted
from rooms.store import Record, write_record
from support.synthetic_job import CHUNKS, JOB_ID, Planned, schedule, write_source, write_template, write_variant
from support.task_files import START_MS

_SILENT = 22  # every so many tasks at work one has published nothing for a while
_SILENCE_MS = 1_500_000


def write_mid_run(folder: Path, tasks: int, *, now_ms: int, share: float = 0.55, chunks: int = CHUNKS) -> None:
    """Write the folder of the job as it looks when this share of its time is over, which is now."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        plan = list(schedule(Path(local), tasks, chunks))
        at_ms = round(share * max(one.begin_ms + one.lasted_ms for one in plan))
        at_work = [one for one in plan if one.begin_ms < at_ms < one.begin_ms + one.lasted_ms]
        old = [one for one in at_work if one.begin_ms + _SILENCE_MS < at_ms]
        silent = {one.key for one in old[len(old) // 3 :: _SILENT]}
        for one in plan:
            if one.begin_ms < at_ms:
                late_ms = _SILENCE_MS if one.key in silent else 0
                _write(Path(local), folder, one, at_ms - late_ms, now_ms - late_ms, chunks)
    write_source(folder, tasks, chunks=chunks)
    job = Submitted(JOB_ID, None, tuple(range(tasks)))
    write_record(folder, Record("slurm", job, ("run", "june.csv"), tasks * chunks, now_ms - at_ms - 60_000))


def _write(local: Path, folder: Path, one: Planned, at_ms: int, now_ms: int, chunks: int) -> None:
    """Write a task that is done, or one that has got as far as it has."""
    template, later_ms = one.template, now_ms - START_MS - at_ms + one.begin_ms
    elapsed_s = max(60, (at_ms - one.begin_ms) // 1000)
    if at_ms < one.begin_ms + one.lasted_ms:
        # Given for as many chunks as the whole job has; a smaller one gets there sooner.
        so_far = replace(one.shape, killed_at_s=round(elapsed_s * CHUNKS / chunks), goes_on=True)
        template, _ = write_template(local, so_far, chunks)
    path = write_variant(template, one.key, later_ms, folder / "tasks")
    os.utime(path, (now_ms / 1000,) * 2)
