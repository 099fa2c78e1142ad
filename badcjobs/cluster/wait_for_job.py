"""Wait for a submitted array and decide on its verdict, from its chunks and from how its tasks ended.

The end of a task comes from Slurm, else from the databases it has left: squeue lists a task only for some minutes
after its end, and many sites have no accounting. The job database also has what the hooks in slurm/ wrote, if a site
has installed them.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from badcjobs.cluster.scheduler import UNFINISHED, Ends, Scheduler, count_done, has_ended, no_task_started, verdict_of
from badcjobs.cluster.submit import Progress, SubmitResult
from badcjobs.model import JobStates, Queue, Submitted
from badcjobs.paths import RunFolder
from badcjobs.report.job import SummaryOptions, finish_job
from badcjobs.report.summary import Summary
from badcjobs.seams import Clock, Unanswered
from badcjobs.store.merge import MergeOrder

log = logging.getLogger(__name__)

Tell = Callable[[str], None]  # prints a line


def follow(scheduler: Scheduler, result: SubmitResult, clock: Clock, poll_s: float, tell: Tell) -> JobStates:
    """Wait for the end of array and merge job, asking every ``poll_s``; ``tell`` gets one line for each change.

    Returns the final states of all tasks that were listed, also of those that Slurm no longer lists.
    """
    # If the job does chunks of earlier jobs again, only its own databases count.
    pattern = f"{result.job.job_id}_*.sqlite" if result.plan.redo_all else "[!.]*.sqlite"
    tasks = RunFolder(result.plan.order.out).tasks
    last_states: dict[int, str] = {}
    exit_codes: dict[int, int] = {}
    before = None
    while True:
        states = _ask_until_answered(scheduler, result.job, clock, poll_s)
        if states != before:
            last_states.update(states.array)
            exit_codes.update(states.exit_codes)
            done = min(count_done(tasks.glob(pattern)), result.plan.survey.chunks)
            tell(progress_line(result.job, states, done, result.plan.survey.chunks))
        if has_ended(states):
            final = {index: state for index, state in last_states.items() if state not in UNFINISHED}
            return replace(states, array=final, exit_codes=exit_codes)
        before = states
        clock.sleep(poll_s)


def _ask_until_answered(scheduler: Scheduler, job: Submitted, clock: Clock, poll_s: float) -> JobStates:
    """Return the states of a job; a controller that restarts does not answer for minutes."""
    is_warned = False
    while True:
        try:
            return scheduler.states(job)
        except Unanswered as error:
            if not is_warned:
                log.warning("slurm does not answer; trying again: %s", error)
            is_warned = True
            clock.sleep(poll_s)


def evaluate_job(
    scheduler: Scheduler, result: SubmitResult, states: JobStates, clock: Clock, progress: Progress
) -> tuple[Summary, str, Ends]:
    """Return the summary of the run, the verdict on this job and the ends of its tasks; merge what is new."""
    folder = RunFolder(result.plan.order.out)
    if not any(folder.tasks.glob("*.sqlite")) and not folder.job_database.exists():
        ends = scheduler.ends(result.job, states, folder)
        raise no_task_started(result.job.job_id, ends, then="the same command with --again")

    order = MergeOrder([folder.path], folder.job_database)
    summary = finish_job(order, clock, SummaryOptions(progress, ask_queue=lambda *_: Queue())).summary
    ends = scheduler.ends(result.job, states, folder)
    # An earlier job may have done every chunk, although no task of this job started.
    verdict = verdict_of(ends) if summary.verdict == "done" else summary.verdict
    return summary, verdict, ends


def progress_line(job: Submitted, states: JobStates, done: int, of: int) -> str:
    """Return one line: the job, its chunks, and the number of tasks in each state."""
    counts = Counter(states.array.get(index, "ENDED") for index in job.indices)
    parts = []
    # Unfinished states first; always in the same order.
    for state in sorted(counts, key=lambda state: (state not in UNFINISHED, state)):
        part = f"{counts[state]} {state.lower()}"
        if state == "PENDING" and states.why_pending:
            part += f" ({', '.join(states.why_pending)})"
        parts.append(part)
    line = f"{job.job_id}: {done:,} of {of:,} chunks; tasks: {', '.join(parts)}"
    if states.merge:
        line += f"; merge {states.merge.lower()}"
    return line
