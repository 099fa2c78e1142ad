"""Finds whatever carries a mark in its environment, whoever its parent is now, and ends it."""

from __future__ import annotations

import time
from collections.abc import Mapping

import psutil

from badcjobs.workers.launch import TASK_MARK

_EXEC_LOOKS, _EXEC_S = 20, 0.001


def end_leftovers(mark: str) -> int:
    """Kill every process that carries this task's mark; return how many there were."""
    return end_marked(TASK_MARK, mark)


def end_marked(name: str, value: str) -> int:
    """Kill every process that has this in its environment; return how many there were."""
    ended = 0
    for process in psutil.process_iter():
        try:
            if _environ(process).get(name) == value:
                process.kill()
                ended += 1
        except (psutil.Error, OSError):
            continue  # gone meanwhile, or somebody else's
    return ended


def _environ(process: psutil.Process) -> Mapping[str, str]:
    """Return a process's environment, which is empty for a moment while it becomes another program."""
    environ: Mapping[str, str] = process.environ()
    for _ in range(_EXEC_LOOKS):
        if environ or not process.exe():  # the kernel's own have neither
            break
        time.sleep(_EXEC_S)
        environ = process.environ()
    return environ
