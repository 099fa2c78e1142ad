"""Whether somebody else goes on with the work of tasks that came to no end of their own."""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.model import JobFacts, TaskFacts
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import RUNNING


def others_words(tasks: Sequence[TaskFacts], summary: Summary) -> str:
    """Return who has done the work of these tasks, or does it."""
    if not summary.left:
        return "others have done their work"
    one = len(tasks) == 1
    if not summary.tasks_by_verdict.get(RUNNING):
        return "a later attempt went on, and has ended, too" if one else "later attempts went on, and have ended, too"
    return "another attempt has taken over its work" if one else "other attempts have taken over their work"


def rest_words(summary: Summary) -> str:
    """Return what is to be done about it where others have begun on that work since."""
    if not summary.left:
        return "nothing of it is left to do"
    if not summary.tasks_by_verdict.get(RUNNING):
        return "what is left stands under 'to finish it'"
    return "there is nothing to do about it"


def leave_work(tasks: Sequence[TaskFacts], facts: JobFacts, summary: Summary) -> bool:
    """Say whether somebody has to see to it that the work of these tasks is done."""
    return summary.verdict == "stopped" and any(task.pending or not _is_followed(task, facts) for task in tasks)


def _is_followed(task: TaskFacts, facts: JobFacts) -> bool:
    """Say whether another attempt has begun on the same part of the source since, or on the whole of it."""
    return any(
        other.started_at_ms > task.last_sign_ms and (other.array_index == task.array_index or other.shard_count == 1)
        for other in facts.tasks
    )
