"""From a submitted array to its verdict: follow → judge. Counts chunks where tasks publish them."""

from __future__ import annotations

import shlex
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.errors import ExitCode, NotHere
from badcjobs.job import finish_job, summarize_database
from badcjobs.model import JobStates
from badcjobs.paths import RunFolder
from badcjobs.report.summarize import Summary
from badcjobs.scheduler.watch import progress_line, watch
from badcjobs.seams import Clock, Scheduler
from badcjobs.store.connect import open_sealed
from badcjobs.store.merging.merge import MergeOrder
from badcjobs.submitting import Handed, Progress

_CODES = {"done": ExitCode.DONE, "failed": ExitCode.CHUNKS_FAILED, "stopped": ExitCode.RUN_ME_AGAIN}


def follow(handed: Handed, scheduler: Scheduler, clock: Clock, tell: Callable[[str], None]) -> JobStates:
    """Wait for the end of array and merge job; ``tell`` gets one line for each change."""
    counter = ChunkCounter(RunFolder(handed.plan.order.out).tasks)
    of = handed.plan.chunks

    def line(states: JobStates) -> None:
        tell(progress_line(handed.job, states, min(counter.done(), of), of))

    return watch(scheduler, handed.job, clock, line)


def judge(handed: Handed, states: JobStates, clock: Clock, progress: Progress) -> tuple[Summary, int]:
    """Return the merged summary and the exit code that says the same; merge here where no merge job has done it."""
    folder = RunFolder(handed.plan.order.out)
    if not any(folder.tasks.glob("*.sqlite")) and not folder.job_database.exists():
        raise _nobody_began(handed)
    if states.merge == "COMPLETED" and folder.job_database.exists():
        summary = summarize_database(folder.job_database, progress)
    else:
        summary = finish_job(MergeOrder([folder.path], folder.job_database), clock, reading_source=progress).summary
    return summary, int(_CODES[summary.verdict])


def _nobody_began(handed: Handed) -> NotHere:
    """Return what the first task's log says, which speaks for all."""
    job, logs = handed.job, handed.plan.order.logs
    log = next(iter(sorted(logs.glob(f"{job.job_id}_{job.indices[0]}_*.out"))), None)
    return NotHere(
        f"no task of job {job.job_id} could begin",
        why=log.read_text(errors="replace").strip()[-2000:] if log else "it left no log: cancelled before it began?",
        fix=f"less {shlex.quote(str(log or logs))}   (then the same command with --again)",
    )


@dataclass(slots=True)
class ChunkCounter:
    """Counts the chunks that are done in the published task databases; reads each one only when it has changed."""

    tasks: Path
    _known: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def done(self) -> int:
        """Return how many are done by now."""
        for path in self.tasks.glob("[!.]*.sqlite"):
            try:
                status = path.stat()
                mark = (status.st_mtime_ns, status.st_size)
                if self._known.get(path.name, (None, 0))[0] != mark:
                    self._known[path.name] = mark, _count_done(path)
            except (OSError, sqlite3.Error):
                continue  # just being replaced; the next look will tell
        return sum(done for _, done in self._known.values())


def _count_done(database: Path) -> int:
    with closing(open_sealed(database)) as db:
        return int(db.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchone()[0])
