"""The life of a job once its array has ended: merge → summarise → report."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.frozen_run import FrozenRun
from badcjobs.model import JobFacts
from badcjobs.paths import RunFolder
from badcjobs.report.as_html import page
from badcjobs.report.summarize import Summary, summarize
from badcjobs.store.job_reader import read_job
from badcjobs.store.merge import SourceFile, find_task_databases, merge

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What merging a job gave."""

    database: Path
    report: Path
    summary: Summary
    files: Sequence[SourceFile]

    @property
    def unread(self) -> list[SourceFile]:
        """The files that could not be read; a second copy of a task is no loss."""
        return [f for f in self.files if f.status == "skipped" and not (f.reason or "").startswith("the same task")]


def finish_job(
    inputs: Sequence[Path], target: Path | None = None, progress: Callable[[int, int], None] = lambda done, of: None
) -> FinishedJob:
    """Merge task databases into a job database, summarise it, write its page."""
    target = target or default_target(inputs)
    files = merge(find_task_databases(inputs, target), target, progress)
    summary = summarize_database(target)
    report = target.with_name("report.html")
    try:
        write_page(summary, report, title=target.parent.absolute().name)
    except OSError as error:
        log.warning("%s could not be written: %s", report, error)  # the numbers are safe
    return FinishedJob(target, report, summary, files)


def default_target(inputs: Sequence[Path]) -> Path:
    """Return where the job database goes when nobody says: into the run folder."""
    first = inputs[0].absolute()
    folder = first if first.is_dir() else first.parent
    return (folder.parent if folder.name == "tasks" else folder) / "job.sqlite"


def find_job_database(given: Path) -> Path:
    """Return the job database of a run folder, or the file itself."""
    path = RunFolder(given).job_database if given.is_dir() else given
    if not path.exists():
        raise DatabaseProblem(f"{path} does not exist", fix=f"badcjobs merge {given}")
    return path


def summarize_database(database: Path) -> Summary:
    """Return the summary of a job database."""
    facts = read_job(database)
    return summarize(facts, missing_indices(facts, RunFolder(database.parent)))


def missing_indices(facts: JobFacts, run: RunFolder) -> list[int]:
    """Return the array indices, of those frozen in run.toml, that left no database.

    None are missing once a task outside the array has taken the whole source: then every chunk is in the database.
    """
    frozen = FrozenRun.read(run.run_toml)
    outside = [task for task in facts.tasks if task.job_id.startswith("local")]
    if frozen is None or frozen.array is None or any(task.shard_count == 1 for task in outside):
        return []
    shape = frozen.array
    seen = {task.array_index for task in facts.tasks if task not in outside}
    return [i for i in range(shape.first, shape.first + shape.count * shape.step, shape.step) if i not in seen]


def write_page(summary: Summary, path: Path, *, title: str) -> None:
    """Write the report as a page."""
    path.write_text(page(summary, title), encoding="utf-8")
