"""``badcjobs merge``: task databases → job database, then the summary."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.report.job import FinishedJob

_EXAMPLE = "Example: badcjobs merge runs/july"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="merge", short_help="Join task databases and say what happened.", epilog=_EXAMPLE)(merge)


def merge(
    inputs: Annotated[list[Path], typer.Argument(metavar="DIR|FILE", help="Run folders or task databases.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The job database; default: job.sqlite in the run folder.")
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse, and change nothing, when a file cannot be read whole.")
    ] = False,
    remove_merged: Annotated[
        bool,
        typer.Option("--remove-merged", help="Remove task databases whose rows are all in it."),
    ] = False,
    wait: Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for another merge of the same job.")] = True,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Join all task databases of a run into job.sqlite and say what happened.

    Repeatable, in any order; files that have not changed since the last merge are not read again. Exit code 0 when
    every file was read whole, 4 when something was lost (each file is named with its reason).
    """
    from badcjobs.cli.output import FileCounter, RowCounter, colour_wanted, log_to_stderr, print_json, remark, say
    from badcjobs.clock import SystemClock
    from badcjobs.errors import ExitCode
    from badcjobs.report.job import default_target, finish_job, job_title
    from badcjobs.report.text import removal_text, summary_text
    from badcjobs.store.merge import MergeOrder

    log_to_stderr(quiet=True)
    counter = FileCounter("task databases merged")
    order = MergeOrder(inputs, output or default_target(inputs), strict, wait, progress=counter, tell=remark)
    reading = RowCounter("rows of the source read")
    job = finish_job(order, SystemClock(), remove_merged=remove_merged, reading_source=reading)
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
    from badcjobs.cli.output import shown

    page = shown(job.report)
    if job.why_no_report is not None:
        left = f"; {page} is of an earlier merge" if job.report.is_file() else ""
        page = f"not written: {job.why_no_report}{left}"
    return f"  database    {shown(job.database)}\n  report      {page}"
