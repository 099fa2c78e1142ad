"""From a submitted array to its verdict: follow → judge. What the chunks say, and what Slurm says of the tasks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from badcjobs.chunk_counter import ChunkCounter
from badcjobs.ends import TaskEnd, find_ends, nobody_began, verdict_of
from badcjobs.errors import ExitCode
from badcjobs.handing_in import Handed
from badcjobs.job import finish_job, summarize_database
from badcjobs.model import JobStates
from badcjobs.paths import RunFolder
from badcjobs.report.summarize import Summary
from badcjobs.scheduler.squeue import UNFINISHED
from badcjobs.scheduler.watch import progress_line, watch
from badcjobs.seams import Clock, Scheduler
from badcjobs.store.merging.merge import MergeOrder
from badcjobs.submitting import Progress

_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}


@dataclass(frozen=True, slots=True)
class Judged:
    """A job that is over: ``summary`` judges all chunks of the run, ``verdict`` this job as well."""

    summary: Summary
    verdict: str
    ends: tuple[TaskEnd, ...] = ()

    @property
    def exit_code(self) -> int:
        """What says the same as the verdict."""
        return int(_CODES[self.verdict])


def follow(handed: Handed, scheduler: Scheduler, clock: Clock, tell: Callable[[str], None]) -> JobStates:
    """Wait for the end of array and merge job; ``tell`` gets one line for each change.

    Returns how all tasks stood that were seen to end, also those that Slurm has forgotten since.
    """
    names = f"{handed.job.job_id}_*" if handed.plan.anew else "[!.]*"
    counter = ChunkCounter(RunFolder(handed.plan.order.out).tasks, names)
    of = handed.plan.chunks
    seen: dict[int, str] = {}
    codes: dict[int, int] = {}

    def line(states: JobStates) -> None:
        seen.update(states.array)
        codes.update(states.exit_codes)
        tell(progress_line(handed.job, states, min(counter.done(), of), of))

    last = watch(scheduler, handed.job, clock, line)
    ended = {index: state for index, state in seen.items() if state not in UNFINISHED}
    return replace(last, array=ended, exit_codes=codes)


def judge(handed: Handed, states: JobStates, clock: Clock, progress: Progress) -> Judged:
    """Return how the job has ended; merge here where no merge job has done it."""
    folder, logs = RunFolder(handed.plan.order.out), handed.plan.order.logs
    if not any(folder.tasks.glob("*.sqlite")) and not folder.job_database.exists():
        ends = find_ends(handed.job, states, folder, logs)
        raise nobody_began(handed.job.job_id, ends, then="the same command with --again")
    if states.merge == "COMPLETED" and folder.job_database.exists():
        summary = summarize_database(folder.job_database, progress, now_ms=clock.now_ms())
    else:
        summary = finish_job(MergeOrder([folder.path], folder.job_database), clock, reading_source=progress).summary
    ends = find_ends(handed.job, states, folder, logs)
    # Every chunk may be done by an older job, while of this one no task has even begun.
    verdict = verdict_of(ends) if summary.verdict == "done" else summary.verdict
    return Judged(summary, verdict, ends)
