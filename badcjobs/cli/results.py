"""The results of a job: ``badcjobs merge``, ``badcjobs report`` and ``badcjobs export``."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from badcjobs.cli.options import ConfigWords, JsonWanted, Target, is_stdout, refuse_data, sources_of
from badcjobs.cli.output import Pace, colour_wanted, hand_out, log_to_stderr, print_json, remark, say, shown
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode
from badcjobs.settings import Config, refuse

if TYPE_CHECKING:
    from badcjobs.report.job import FinishedJob

_ROWS = "rows of the source read"
Forms = Literal["csv", "json", "parquet", "badc"]


def merge(
    inputs: Annotated[list[Path], typer.Argument(metavar="DIR|FILE", help="Run folders or task databases.")],
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Job database [DIR/job.sqlite].")] = None,
    remove_merged: Annotated[bool, typer.Option("--remove-merged", help="Remove what is merged whole.")] = False,
    json_wanted: JsonWanted = False,
) -> int:
    """Join all task databases of a run into job.sqlite and say what happened.

    Repeatable, in any order; files that have not changed since the last merge are not read again. Exit code 0 when
    every file was read whole, 4 when something was lost (each file is named with its reason).

    Example: badcjobs merge runs/july
    """
    from badcjobs.report.job import default_target, finish_job, job_title
    from badcjobs.report.text import removal_text, summary_text
    from badcjobs.store.merge import MergeOrder

    log_to_stderr(quiet=True)
    counter = Pace("task databases merged")
    order = MergeOrder(inputs, output or default_target(inputs), progress=counter, tell=remark)
    job = finish_job(order, SystemClock(), remove_merged=remove_merged, reading_source=Pace(_ROWS))
    if json_wanted:
        print_json({**job.to_dict(), "why_no_report": job.why_no_report})
    else:
        say(summary_text(job.summary, job_title(job.database), colour=colour_wanted()), painted=True)
        say("\n" + files_text(job))
        if job.removed is not None:
            say(removal_text(job.removed.removed, job.removed.left))
    return ExitCode.DATABASE if job.lossy else ExitCode.DONE


def files_text(job: FinishedJob) -> str:
    """Return where the job database and the page are; or why there is no page, or only an earlier one."""
    page = shown(job.report)
    if job.why_no_report is not None:
        left = f"; {page} is of an earlier merge" if job.report.is_file() else ""
        page = f"not written: {job.why_no_report}{left}"
    return f"  database    {shown(job.database)}\n  report      {page}"


# --- report -----------------------------------------------------------------------------------------------------------


def report(
    job: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A merged run folder, or its job.sqlite.")],
    compare: Annotated[Path | None, typer.Option(metavar="DIR|FILE", help="Compare with another job.")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a page with charts; - is stdout.")] = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write Markdown; - is stdout.")] = None,
    prometheus: Annotated[Path | None, typer.Option(metavar="FILE", help="Write metrics; - is stdout.")] = None,
    json_wanted: JsonWanted = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no text: only write the files.")] = False,
) -> int:
    """Say what a merged job's numbers mean.

    What each number is: badcjobs guide report. Exit code 0 when every file that was merged was read whole, 4 when
    something was lost (each is named).

    Example: badcjobs report runs/july --compare runs/june --markdown july.md
    """
    from badcjobs.report.job import job_title, report_job
    from badcjobs.report.page import page
    from badcjobs.store.read_tasks import read_chart_data

    log_to_stderr(quiet=True)
    targets = (
        Target("--html", html, "report.html"),
        Target("--markdown", markdown, "report.md"),
        Target("--prometheus", prometheus, "report.prom"),
    )
    to_stdout = _refuse_two_results(job, json_wanted, targets)
    jobs = [one for one in (job, compare) if one is not None]
    refuse_data(targets, [*jobs, *(source for one in jobs for source in sources_of(one))])
    found = report_job(job, compare, Pace(_ROWS), SystemClock().now_ms())
    forms: tuple[Callable[[], str], ...] = (
        lambda: page(found.summary, job_title(found.database), read_chart_data(found.database)),
        found.to_markdown,
        found.to_prometheus,
    )
    for target, make in zip(targets, forms, strict=True):
        if target.path is not None:
            _write(target.path, make())
    if json_wanted:
        print_json(found.to_dict())
    elif not to_stdout and not quiet:
        say(found.to_text(colour=colour_wanted()), painted=True)
    return ExitCode.DATABASE if found.lossy_files else ExitCode.DONE


def _refuse_two_results(job: Path, json_wanted: bool, targets: Sequence[Target]) -> bool:
    """Say whether stdout is taken by a document; stop when it would be by more than one."""
    wanted = ["--json"] if json_wanted else []
    wanted += [f"{target.option} {target.path}" for target in targets if is_stdout(target.path)]
    if len(wanted) > 1:
        again = f"badcjobs report {shlex.quote(str(job))} {wanted[0]}   (and the others into files)"
        raise BadInput(f"{' and '.join(wanted)} cannot be printed together", why="stdout holds one document", fix=again)
    return bool(wanted)


def _write(path: Path, text: str) -> None:
    """Write a document, to stdout or whole to its file; a reader who has seen enough of a pipe is no failure."""
    from badcjobs.report.job import write_whole

    if is_stdout(path):
        hand_out(text.rstrip("\n"))
        return
    try:
        write_whole(path, text)
    except BadInput as error:
        if not isinstance(error.__cause__, BrokenPipeError):
            raise


# --- export -----------------------------------------------------------------------------------------------------------


def export(
    source: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A merged run folder, or a database.")],
    form: Annotated[Forms, typer.Option("--format", help="badc: the files that BADC reads.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="File, folder, or - for stdout.")],
    table: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A table or view; repeatable.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every table and view, a file each.")] = False,
    by_study_area: Annotated[bool, typer.Option("--by-study-area", help="One file per study area.")] = False,
    species: Annotated[str | None, typer.Option(metavar="ROPT,RUGR", help="Only these species.")] = None,
    min_score: Annotated[float | None, typer.Option(metavar="X", help="Only detections scored X or more.")] = None,
    config: ConfigWords = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite what was heard in an earlier export.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print what was written as JSON.")] = False,
) -> int:
    """Write tables of a task or job database as CSV, JSON or Parquet, or as the files that BADC reads.

    With --by-study-area, --species, --min-score or --config: detections on the clock of their recordings, with study
    area, location and date; the table [recordings] of --config reads those anew. With --by-study-area, or if -o has no
    ending, -o is a folder with a file per study area; else one file (-o x.csv), or stdout (-o -).
    JSON into a file that ends in .jsonl is an object per line.
    More, with sqlite-utils, Datasette, pandas and DuckDB: badcjobs guide export.

    Example: badcjobs export runs/july --format csv --by-study-area --min-score 0.8 -o july-detections
    """
    from dataclasses import asdict

    from badcjobs.report.export import ExportOrder
    from badcjobs.report.export import export as carry_out
    from badcjobs.report.words import count
    from badcjobs.store.atomic_write import cannot_write
    from badcjobs.store.export_tables import DetectionFilter

    log_to_stderr(quiet=True)
    to_stdout = is_stdout(output)
    if to_stdout and json_wanted:
        raise BadInput(f"--json and -o {output} both want stdout", fix="-o FILE")
    instead = f"export.{form}" if output.suffix and form != "badc" else "exported"
    chosen, mistakes = Config.read(config), list[str]()
    *_, patterns = chosen.read_tables(mistakes)
    if chosen != Config() and not patterns and not mistakes:
        mistakes.append("--config: [recordings] has no patterns")
    refuse(mistakes, "badcjobs guide recordings")
    refuse_data(
        [Target("-o", output, instead)],
        [source, *sources_of(source), *([] if chosen.file is None else [chosen.file])],
    )
    listed = tuple(dict.fromkeys(word.strip() for word in (species or "").split(",") if word.strip()))
    order = ExportOrder(
        source,
        form,
        None if to_stdout else output,
        tuple(table or ()),
        everything,
        by_study_area,
        DetectionFilter(() if species is None else listed or ("",), min_score),
        patterns,
        chosen,
        force,
    )
    pace = Pace("rows", 1.0 if sys.stderr.isatty() else 10.0)
    try:
        written, notes, never_heard = carry_out(
            order, sys.stdout.buffer, lambda table, rows: pace(rows, what=f"rows of {table} written")
        )
        sys.stdout.flush()
        if json_wanted:
            heard = {"never_heard": never_heard} if order.heard else {}
            files = [asdict(file) for file in written]
            print_json({"format": form, "files": files, **heard, "notes": notes})
        elif not to_stdout:
            for file in written:
                say(f"{file.path}: {count(file.rows, 'row')} ({file.table})")
    except OSError as error:  # of stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing else complains, at exit
        if isinstance(error, BrokenPipeError):
            return 0  # a reader who has seen enough (`| head -1`) is no failure
        raise cannot_write(Path("stdout"), error) from error
    for note in notes:
        remark(note)
    return 0
