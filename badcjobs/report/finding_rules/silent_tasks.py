"""Array tasks that should have been heard of again and were not: nobody was left to say how they ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from badcjobs.model import NOTE, PROBLEM, Finding, JobFacts, TaskFacts
from badcjobs.report.finding_rules.device_time import each_once
from badcjobs.report.finding_rules.taken_over import leave_work, others_words, rest_words
from badcjobs.report.summarize import Summary
from badcjobs.report.words import count, duration, moment, period


def silent_tasks(facts: JobFacts, summary: Summary, command: str) -> Iterator[Finding]:
    """Yield that tasks went silent; ``command`` says where the line stands that does the rest."""
    names = frozenset(summary.tasks_silent)
    silent = [task for task in facts.tasks if task.name in names]
    if not silent:
        return
    left = sum(task.pending for task in silent)
    unfinished = leave_work(silent, facts, summary)
    some = "" if len(silent) == len(facts.tasks) else f"{len(silent):,} of "
    after_s = max(task.silent_after_s or 0.0 for task in silent)
    yield Finding(
        "tasks_silent", PROBLEM if unfinished else NOTE,
        f"{some}{count(len(facts.tasks), 'task')} went silent without an end"
        + (f"; {count(left, 'chunk')} left." if left else "." if unfinished else f"; {others_words(silent, summary)}."),
        (f"last heard of {_when(silent)}", f"while a task runs, it is heard of within {duration(after_s)}"),
        _advice(silent, summary, unfinished=unfinished) + (command if unfinished else ""), (),
        each_once(task.name for task in silent),
    )  # fmt: skip


def _when(silent: Sequence[TaskFacts]) -> str:
    heard_ms = [task.heard_at_ms for task in silent if task.heard_at_ms is not None]
    first_ms, last_ms = min(heard_ms), max(heard_ms)
    return moment(last_ms) if last_ms - first_ms < 60_000 else f"from {period(first_ms, last_ms)}"


def _advice(silent: Sequence[TaskFacts], summary: Summary, *, unfinished: bool) -> str:
    one = len(silent) == 1
    why = "A dead node, a disk that hangs, or " + ("it was" if one else "they were") + " killed with the recorder"
    if not unfinished:
        return f"{why}; {rest_words(summary)}."
    if all(task.job_id.startswith("local") for task in silent):
        return f"{why}. Unless still running, look at the end of the task's log, then start the run again."
    if _is_emulated(summary):
        return f"{why}. Unless still running, look at the end of the task's log, then start the emulation again."
    return f"{why}. Unless squeue --me still has {'it' if one else 'them'}: look at Slurm's output, then submit again."


def _is_emulated(summary: Summary) -> bool:
    """Say whether an emulation was to do the work: then its command stands under “to finish it”."""
    proof = summary.completeness
    return proof is not None and any("--cluster=local" in line.split() for line in proof.finish)
