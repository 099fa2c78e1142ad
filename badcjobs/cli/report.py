"""``badcjobs report``: the summary of a merged job, in the wanted form."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs report runs/july --html july.html"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="report", short_help="Say what a merged job's numbers mean.", epilog=_EXAMPLE)(report)


def report(
    job: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A merged run folder, or its job.sqlite.")],
    html: Annotated[Path | None, typer.Option(help="Write the page to this file.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Say what a merged job's numbers mean.

    Exit code 0 when every file that was merged was read whole, 4 when something was lost (each is named).
    """
    import shlex

    from badcjobs.cli.output import RowCounter, log_to_stderr, print_json, say
    from badcjobs.errors import BadInput, ExitCode
    from badcjobs.job import find_job_database, summarize_database, write_page
    from badcjobs.report.as_text import summary_text

    log_to_stderr(quiet=True)
    database = find_job_database(job)
    summary = summarize_database(database, RowCounter("rows of the source read"))
    title = database.parent.absolute().name
    if html is not None:
        try:
            write_page(summary, html, title=title)
        except OSError as error:
            line = ["badcjobs", "report", str(job), "--html", "report.html"]
            if isinstance(error, FileNotFoundError):
                line = ["mkdir", "-p", str(html.parent)]
            raise BadInput(f"--html {html} cannot be written", why=error.strerror, fix=shlex.join(line)) from error
    if json_wanted:
        print_json(summary.to_dict())
    else:
        say(summary_text(summary, title))
    return ExitCode.DATABASE if summary.lossy_files else ExitCode.DONE
