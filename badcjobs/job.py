"""The life of a job once its array has ended: merge → summarise → report."""

from __future__ import annotations

import logging
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.completeness import prove_complete
from badcjobs.errors import BadInput, DatabaseProblem
from badcjobs.model import CutShort
from badcjobs.out_of_date import merge_again
from badcjobs.paths import RunFolder, is_there
from badcjobs.report.as_html import page
from badcjobs.report.as_markdown import comparison_markdown, markdown
from badcjobs.report.as_prometheus import job_samples
from badcjobs.report.as_text import summary_text
from badcjobs.report.compare import Comparison, compare
from badcjobs.report.compare_text import comparison_text
from badcjobs.report.factors import Factors
from badcjobs.report.findings import find
from badcjobs.report.metrics import prometheus_text
from badcjobs.report.summarize import Summary, summarize
from badcjobs.seams import Clock
from badcjobs.store.exports.fresh_file import fresh_file
from badcjobs.store.job_reader import read_job
from badcjobs.store.merging.find_files import NoTaskDatabases
from badcjobs.store.merging.merge import MergeOrder, MergeOutcome, merge
from badcjobs.store.merging.remove_merged import Removal, remove_merged_files
from badcjobs.store.merging.source_file import SourceFile
from badcjobs.store.stretch_reader import read_chart_data
from badcjobs.trace import find_cut_short, find_unbegun

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What merging a job gave."""

    database: Path
    report: Path
    summary: Summary
    merged: MergeOutcome
    removed: Removal | None = None
    why_no_report: str | None = None  # the page could not be written; one that is there is of an earlier merge

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
    factors: Factors | None = None,
) -> FinishedJob:
    """Merge task databases into a job database, summarise it, write its page."""
    try:
        merged = merge(order, clock)
    except NoTaskDatabases as error:
        raise _explained(error, order.inputs) from None
    summary = summarize_database(order.target, reading_source, factors, clock.now_ms())
    # What was published while it was merged is no reason to merge again.
    news = summary.merged
    summary = replace(summary, merged=replace(news, changed=0, command=news.command if news.new else None))
    report, why_no_report = order.target.with_name("report.html"), None
    try:
        write_page(summary, report, order.target)
    except BadInput as error:
        why_no_report = error.why or error.what
        log.warning("%s could not be written: %s", report, why_no_report)  # the numbers are safe
    removed = remove_merged_files(order.target, merged.given) if remove_merged else None
    return FinishedJob(order.target, report, summary, merged, removed, why_no_report)


def _explained(error: DatabaseProblem, inputs: Sequence[Path]) -> DatabaseProblem:
    """Return why there is nothing to merge, where a submit or an emulation has left word of it."""
    above = [place.absolute().parent for place in inputs if place.absolute().name == "tasks"]
    found = next((one for one in map(find_unbegun, [*inputs, *above]) if one is not None), None)
    return error if found is None else DatabaseProblem(error.what, why=found.what, fix=found.command)


def default_target(inputs: Sequence[Path]) -> Path:
    """Return where the job database goes when nobody says: into the run folder."""
    first = inputs[0].absolute()
    folder = first if is_there(first) and first.is_dir() else first.parent
    return (folder.parent if folder.name == "tasks" else folder) / "job.sqlite"


def find_job_database(given: Path) -> Path:
    """Return the job database of a run folder, or the file itself; raises DatabaseProblem when there is none.

    The tasks/ of a run will do as well, as it does for ``badcjobs merge`` and ``monitor``.
    """
    if given.absolute().name == "tasks" and any(given.glob("*.sqlite")) and not is_there(given / "job.sqlite"):
        given = given.absolute().parent
    path = RunFolder(given).job_database if is_there(given) and given.is_dir() else given
    if is_there(path):
        return path
    begun = given.is_dir() and any(RunFolder(given).tasks.glob("*.sqlite"))
    if given.is_dir() and not begun and (found := find_unbegun(given)) is not None:
        raise DatabaseProblem(f"{path} does not exist", why=found.what, fix=found.command)
    if given.is_dir() and RunFolder(given).tasks.is_dir():
        line = shlex.join(["badcjobs", "merge", str(given)])
        raise DatabaseProblem(f"{path} does not exist", why="the run has not been merged yet", fix=line)
    what = "is no run folder: it holds neither job.sqlite nor tasks/" if given.is_dir() else "does not exist"
    above = given if given.is_dir() else next(folder for folder in given.absolute().parents if folder.is_dir())
    raise DatabaseProblem(
        f"{given} {what}",
        why="wanted is a run folder: what badcjobs run or submit got as --out; or its job.sqlite",
        fix=shlex.join(["ls", str(above)]),
    )


def job_title(database: Path) -> str:
    """Return what people call a job: the name of its run folder."""
    return database.parent.absolute().name


def summarize_database(
    database: Path,
    progress: Callable[[int], None] = lambda rows: None,
    factors: Factors | None = None,
    now_ms: int | None = None,
) -> Summary:
    """Return the summary of a job database; ``progress`` is told how many rows of its source have been read.

    ``now_ms`` tells the tasks that run from those that went silent; None: as if all that have not ended were running.
    """
    facts = read_job(database)
    proof = prove_complete(database, facts, progress)
    summary = summarize(facts, proof.missing_indices, proof, factors, now_ms)
    merged = replace(facts.merged, command=merge_again(database, facts.file_folders, facts.merged))
    cut_short = _find_cut_short(database, facts.file_folders)
    return replace(summary, findings=find(facts, summary), merged=merged, cut_short=cut_short)


def _find_cut_short(database: Path, file_folders: Sequence[str]) -> CutShort | None:
    """Return the first submit that was cut short in a run that was merged here."""
    folders = [database.parent / folder for folder in file_folders]
    found = (find_cut_short(folder.parent) for folder in folders if folder.name == "tasks")
    return next((one for one in found if one is not None), None)


@dataclass(frozen=True, slots=True)
class ReportedJob:
    """What ``badcjobs report`` says of a job, in every form; with another job beside it, of both."""

    database: Path
    title: str
    summary: Summary
    comparison: Comparison | None = None
    lossy_files: int = 0  # of both

    def to_text(self, *, colour: bool = False) -> str:
        """Return it for a terminal or a log."""
        if self.comparison is not None:
            return comparison_text(self.comparison)
        return summary_text(self.summary, self.title, colour=colour)

    def to_dict(self) -> dict[str, Any]:
        """Return it for scripts."""
        return self.summary.to_dict() if self.comparison is None else self.comparison.to_dict()

    def to_markdown(self) -> str:
        """Return it for a lab notebook."""
        if self.comparison is not None:
            return comparison_markdown(self.comparison)
        return markdown(self.summary, self.title)

    def to_prometheus(self) -> str:
        """Return the metrics of the job itself."""
        return prometheus_text(job_samples(self.summary, self.title))


def report_job(
    job: Path,
    beside: Path | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    factors: Factors | None = None,
    now_ms: int | None = None,
) -> ReportedJob:
    """Read a job database, and another one to put beside it; ``now_ms``: when, for tasks that have not ended."""
    database = find_job_database(job)
    other = None if beside is None else find_job_database(beside)
    summary = summarize_database(database, progress, factors, now_ms)
    title = job_title(database)
    if other is None or beside is None:
        return ReportedJob(database, title, summary, lossy_files=summary.lossy_files)
    against, its_title = summarize_database(other, progress, factors, now_ms), job_title(other)
    titles = (title, its_title) if title != its_title else (str(job), str(beside))
    comparison = compare(summary, titles[0], against, titles[1])
    return ReportedJob(database, title, summary, comparison, summary.lossy_files + against.lossy_files)


def write_page(summary: Summary, path: Path, database: Path) -> None:
    """Write the report as a page, with charts from the job database; raises BadInput when it cannot be written."""
    write_whole(path, page(summary, job_title(database), read_chart_data(database)))


def write_whole(path: Path, text: str) -> None:
    """Write a text under a hidden name and rename it; raises BadInput when it cannot be written.

    A link stays a link: the file that it leads to is replaced.
    """
    with fresh_file(path.resolve() if path.is_symlink() and path.is_file() else path) as file:
        file.write(text.encode("utf-8", errors="replace"))  # a name of a file may be no text at all
