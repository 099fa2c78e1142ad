"""``badcjobs merge``: task databases → job database, then the summary."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs merge runs/july"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="merge", short_help="Join task databases and say what happened.", epilog=_EXAMPLE)(merge)


def merge(
    inputs: Annotated[list[Path], typer.Argument(metavar="DIR|FILE", help="Run folders or task databases.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="The job database; default: job.sqlite in the run folder.")
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Join all task databases of a run into job.sqlite and say what happened.

    Repeatable, in any order. Exit code 0 when every file was read, 4 when one was not (it is named).
    """
    from badcjobs.cli.output import FileCounter, log_to_stderr, print_json, say, shown
    from badcjobs.errors import ExitCode
    from badcjobs.job import finish_job
    from badcjobs.report.as_text import summary_text

    log_to_stderr(quiet=True)
    job = finish_job(inputs, output, FileCounter("task databases merged"))
    if json_wanted:
        print_json(job.summary.to_dict())
    else:
        say(summary_text(job.summary, job.database.parent.absolute().name))
        say(f"\n  database    {shown(job.database)}\n  report      {shown(job.report)}")
    return ExitCode.DATABASE if job.unread else ExitCode.DONE
