"""The life of a job once its array has ended: merge → summarise → report."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from badcjobs.completeness import prove_complete
from badcjobs.errors import DatabaseProblem
from badcjobs.paths import RunFolder
from badcjobs.report.as_html import page
from badcjobs.report.summarize import Summary, summarize
from badcjobs.seams import Clock
from badcjobs.store.job_reader import read_job
from badcjobs.store.merging.merge import MergeOrder, MergeOutcome, merge
from badcjobs.store.merging.remove_merged import Removal, remove_merged_files
from badcjobs.store.merging.source_file import SourceFile

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What merging a job gave."""

    database: Path
    report: Path
    summary: Summary
    merged: MergeOutcome
    removed: Removal | None = None

    @property
    def lossy(self) -> list[SourceFile]:
        """The files of which rows are missing, or may be; a second copy of a task is no loss."""
        return [file for file in self.merged.files if file.lost_something]

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs merge --json``: the summary, and what became of the files."""
        statuses = Counter(file.status for file in self.merged.files)
        files = {"read_now": self.merged.read, "by_status": dict(sorted(statuses.items()))}
        removed = None if self.removed is None else asdict(self.removed)
        return {**self.summary.to_dict(), "files": files, "removed": removed}


def finish_job(
    order: MergeOrder,
    clock: Clock,
    *,
    remove_merged: bool = False,
    reading_source: Callable[[int], None] = lambda rows: None,
) -> FinishedJob:
    """Merge task databases into a job database, summarise it, write its page."""
    merged = merge(order, clock)
    summary = summarize_database(order.target, reading_source)
    report = order.target.with_name("report.html")
    try:
        write_page(summary, report, title=order.target.parent.absolute().name)
    except OSError as error:
        log.warning("%s could not be written: %s", report, error)  # the numbers are safe
    removed = remove_merged_files(order.target, merged.given) if remove_merged else None
    return FinishedJob(order.target, report, summary, merged, removed)


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


def summarize_database(database: Path, progress: Callable[[int], None] = lambda rows: None) -> Summary:
    """Return the summary of a job database; ``progress`` is told how many rows of its source have been read."""
    facts = read_job(database)
    proof = prove_complete(database, facts, progress)
    return summarize(facts, proof.missing_indices, proof)


def write_page(summary: Summary, path: Path, *, title: str) -> None:
    """Write the report as a page."""
    path.write_text(page(summary, title), encoding="utf-8")
