"""The results of a job: ``badcjobs merge``, ``badcjobs report`` and ``badcjobs export``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from badcjobs.cli.options import (
    JsonWanted,
    Targets,
    find_run,
    flag,
    is_stdout,
    option,
    read_project,
    refuse_data,
    sources_of,
)
from badcjobs.cli.output import (
    Pace,
    colour_wanted,
    log_to_stderr,
    print_document,
    print_json,
    remark,
    say,
    say_next,
    shown,
    text_width,
)
from badcjobs.clock import SystemClock
from badcjobs.cluster.slurm import QueueReader
from badcjobs.errors import BadInput, ExitCode
from badcjobs.planning.site import find_billing
from badcjobs.store.atomic_write import cannot_write
from badcjobs.words import count

if TYPE_CHECKING:
    from badcjobs.report.export import ExportOrder
    from badcjobs.report.job import FinishedJob
    from badcjobs.report.summary import Summary

ROWS = "rows of the source read"
JobPath = Annotated[Path | None, typer.Argument(metavar="DIR|FILE")]
Form = Literal["csv", "json", "jsonl", "parquet", "badc", "hawkears", "audacity", "raven"]


def merge(
    context: typer.Context,
    inputs: list[Path] | None = typer.Argument(None, metavar="DIR|FILE"),
    out: Path | None = option("FILE", "Job database [job.sqlite in DIR].", "--out", "-o"),
    mix: bool = flag("--mix", "Allow files of different runs."),
    remove_merged: bool = flag("--remove-merged", "Delete task databases that are fully merged."),
    json_wanted: JsonWanted = False,
) -> int:
    """Join all task databases of a run into job.sqlite and print the summary.

    It can be repeated at any time: only new and changed files are read. Exit code 4: a file could not be read
    completely; each one is named.

    Example:
      badcjobs merge runs/july
    """
    from badcjobs.report.job import SummaryOptions, default_target, finish_job
    from badcjobs.store.merge import MergeOrder

    log_to_stderr()
    project = read_project(context)
    places = inputs or [find_run(None, project, "merge")]
    order = MergeOrder(places, out or default_target(places), mix, progress=Pace("task databases merged"), tell=remark)
    clock = SystemClock()
    billing = find_billing(project, Path.cwd())
    options = SummaryOptions(Pace(ROWS), QueueReader(clock), billing)
    job = finish_job(order, clock, options, remove_merged=remove_merged)
    if json_wanted:
        print_json({**job.to_dict(streamed=True), "why_no_report": job.why_no_report})
    else:
        _say_merged(job)
    # A second copy of a task is no loss.
    if any(file.lost_something for file in job.merged.files):
        return ExitCode.DATABASE
    return ExitCode.DONE


def _say_merged(job: FinishedJob) -> None:
    """Print the summary of a merged job, with its files."""
    from badcjobs.report.job import job_title
    from badcjobs.report.text import removal_text

    more = [files_text(job)]
    if job.removed is not None:
        more.append(removal_text(job.removed.removed, job.removed.left, text_width()))
    say_summary(job.summary, job_title(job.database), more)


def say_summary(summary: Summary, title: str, more: Sequence[str]) -> None:
    """Print the summary of a job, with more lines about it."""
    from badcjobs.report.text import summary_text

    text = summary_text(summary, title, colour=colour_wanted(), more=more, width=text_width())
    say(text, painted=True)


def files_text(job: FinishedJob) -> str:
    """Return the paths of the job database and the page, or why the page was not written."""
    page = shown(job.report)
    if job.why_no_report is not None:
        left = f"; {page} is from an earlier merge" if job.report.is_file() else ""
        page = f"not written: {job.why_no_report}{left}"
    return f"  database    {shown(job.database)}\n  report      {page}"


def report(
    context: typer.Context,
    job: JobPath = None,
    html: Path | None = option("FILE", "Write a page with charts."),
    markdown: Path | None = option("FILE", "Write Markdown."),
    prometheus: Path | None = option("FILE", "Write metrics for the textfile collector."),
    compare: Path | None = option("DIR|FILE", "Compare with another job."),
    json_wanted: JsonWanted = False,
) -> int:
    """Print the summary of a merged job, of a task database or of a recording, or write it to files (- is stdout).

    Exit code 4: a merged file could not be read completely.

    Example:
      badcjobs report runs/july --compare runs/june --markdown july.md
    """
    from badcjobs.report.job import SummaryOptions, report_job

    log_to_stderr()
    project = read_project(context)
    job = find_run(job, project, "report")
    targets = {"--html": html, "--markdown": markdown, "--prometheus": prometheus}
    printed = _check_targets(targets, [job, *filter(None, [compare])], json_wanted=json_wanted)
    billing = find_billing(project, Path.cwd())
    clock = SystemClock()
    options = SummaryOptions(Pace(ROWS), QueueReader(clock), billing)
    with report_job(job, clock, compare, options) as forms:
        for path, make in ((html, forms.to_html), (markdown, forms.to_markdown), (prometheus, forms.to_prometheus)):
            if path is not None:
                _write(path, make())
    if json_wanted:
        print_json(forms.to_dict(streamed=True))
    elif not printed:
        say(forms.to_text(colour=colour_wanted(), width=text_width()), painted=True)
    if forms.lossy_files:
        return ExitCode.DATABASE
    return ExitCode.DONE


def _check_targets(targets: Targets, runs: Sequence[Path], *, json_wanted: bool) -> list[str]:
    """Return the options that print a document, at most one; refuse files that have data."""
    printed = [f"{option} {path}" for option, path in targets.items() if is_stdout(path)]
    if json_wanted:
        printed.append("--json")
    if len(printed) > 1:
        what = f"{' and '.join(printed)} cannot be printed together"
        raise BadInput(what, why="stdout holds one document", fix="--markdown report.md   (into a file)")
    refuse_data(targets, [*runs, *chain.from_iterable(map(sources_of, runs))])
    return printed


def _write(path: Path, text: str | Iterable[str]) -> None:
    """Write a document to stdout or, in one step, to its file; a closed pipe is not an error."""
    from badcjobs.report.job import write_whole

    if is_stdout(path):
        print_document(text)
        return
    try:
        write_whole(path, text)
        remark(f"{path} is written")
    except BadInput as error:
        if not isinstance(error.__cause__, BrokenPipeError):
            raise


def export(
    context: typer.Context,
    out: Path = option("PATH", "File, folder, or - for stdout.", "--out", "-o", default=...),
    source: JobPath = None,
    form: Form | None = option("NAME", "csv|json[l]|parquet|badc|hawkears|audacity|raven.", "--format"),
    table: list[str] | None = option("NAME|all", "Another table or view; repeatable."),
    species: str | None = option("LIST", "Only these species: ROPT,RUGR."),
    min_score: float | None = option("X", "Only detections with this score or more."),
    by_study_area: bool = flag("--by-study-area", "One file per study area, in folder -o."),
) -> int:
    """Write the detections of a job for other programs.

    Times are those of the recording, overlaps are counted once, and each row has recording, study area, location, date
    and UTC time. With --table, write any other table.

    Example:
      badcjobs export runs/july --min-score 0.8 --out july.csv
    """
    from badcjobs.report.export import ExportOrder, form_of

    log_to_stderr()
    project = read_project(context)
    job = find_run(source, project, "export")
    tables = tuple(table or ())
    named = form or form_of(out, several=by_study_area or len(tables) > 1 or "all" in tables)
    refuse_data({"--out": out}, [job, *sources_of(job), *filter(None, [project.file])])
    order = ExportOrder(
        job,
        named,
        None if is_stdout(out) else out,
        tables,
        by_study_area,
        () if species is None else tuple(dict.fromkeys(name.strip() for name in species.split(","))),
        min_score,
        project.patterns,
        project.time_zone,
        project.get("run", "hawkears_root"),
    )
    _carry_out(order, out)
    return 0


def _carry_out(order: ExportOrder, out: Path) -> None:
    """Write an export, and print what was written and what to do next."""
    from badcjobs.report.export import export as carry_out

    try:
        written, notes = carry_out(order, sys.stdout.buffer, _tell_progress(out))
        sys.stdout.flush()
        if not is_stdout(out):
            for file in written:
                say(f"{file.path}: {count(file.rows, 'row')} ({file.table})")
    except OSError as error:  # of stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # no error at exit
        if isinstance(error, BrokenPipeError):
            return  # a reader that stops early (`| head -1`) is not an error
        raise cannot_write(Path("stdout"), error) from error
    for note in notes:
        remark(note)
    if order.form == "badc":
        say_next("badc", "infer", "aggregate", out)
    elif order.form == "hawkears":
        say_next("hawkears", "gui", note="Import analysis results")
    elif not is_stdout(out):
        say_next("badcjobs", "guide", "export", note="how to read it")


def _tell_progress(out: Path) -> Callable[[str, int, int | None], None]:
    """Return a function that prints the progress of an export: its table, the rows done, and of how many."""
    pace = Pace("rows", 1.0 if sys.stderr.isatty() else 10.0)

    def tell(table: str, rows: int, of: int | None) -> None:
        if of is not None and not rows:
            remark(f"{count(of, 'chunk file')} will be written to {out}, one for each chunk that is done or failed")
        what = "chunk files written"
        if of is None:
            what = f"rows of {table}"
        pace(rows, of, what=what)

    return tell
