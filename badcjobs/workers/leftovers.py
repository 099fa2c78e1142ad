"""Finds and ends what a task has left running: every process below its workers carries the task's name."""

from __future__ import annotations

import psutil

from badcjobs.workers.launch import TASK_MARK


def end_leftovers(mark: str) -> int:
    """Kill every process that carries this task's mark; return how many there were."""
    ended = 0
    for process in psutil.process_iter():
        try:
            if process.environ().get(TASK_MARK) == mark:
                process.kill()
                ended += 1
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's
    return ended
