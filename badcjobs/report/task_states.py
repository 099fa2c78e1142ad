"""What became of an array task: its own verdict, else Slurm's word, else whether it is still heard of. Pure."""

from __future__ import annotations

from collections.abc import Collection

from badcjobs.model import TaskFacts, is_silent
from badcjobs.report.words import moment

RUNNING, SILENT, KILLED = "running", "silent", "killed"
OUTDATED = "outdated"  # had not ended at the merge; its file has changed since, and it runs no more
_NOT_KILLED = frozenset({"COMPLETED", "COMPLETING", "ENDED", "RUNNING", "PENDING", "SUSPENDED"})


def was_killed(task: TaskFacts) -> bool:
    """Say whether a task came to its end by somebody else's hand."""
    if task.verdict in ("done", "failed", "stopped"):
        return False
    return task.verdict == KILLED or tells_of_a_kill(task.slurm_state)


def tells_of_a_kill(slurm_state: str | None) -> bool:
    """Say whether Slurm's word for the end of a task that has no verdict means that somebody else has ended it."""
    word = (slurm_state or "").split()
    return bool(word) and word[0] not in _NOT_KILLED


def state_of(task: TaskFacts, now_ms: int | None) -> str:
    """Return its verdict or, while it has none, killed, silent, outdated or running; no ``now_ms``: nobody is late."""
    if task.verdict is not None:
        return task.verdict
    if was_killed(task):
        return KILLED
    if not is_silent(task.heard_at_ms, task.silent_after_s, now_ms):
        return RUNNING
    return OUTDATED if task.changed else SILENT  # a file that has changed may well tell its end


def is_running(task: TaskFacts, silent: Collection[str]) -> bool:
    """Say whether a task runs, as far as anybody knows; ``silent`` are the names of those that are."""
    return task.verdict is None and not was_killed(task) and task.name not in silent


def state_words(task: TaskFacts, silent: Collection[str]) -> str:
    """Return what became of it in words."""
    if task.name in silent and task.heard_at_ms is not None:
        return f"{SILENT}, last heard of {moment(task.heard_at_ms)}"
    going_on = "not ended when it was merged" if task.changed else RUNNING
    return task.verdict or (KILLED if was_killed(task) else going_on)
