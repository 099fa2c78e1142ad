"""``badcjobs report``: the summary of a merged job, in the wanted form."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from badcjobs.cli.targets import Target, is_stdout

if TYPE_CHECKING:
    from badcjobs.report.job import ReportedJob

_EXAMPLE = "Example: badcjobs report runs/july --compare runs/june --markdown july.md"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="report", short_help="Say what a merged job's numbers mean.", epilog=_EXAMPLE)(report)


def report(
    job: Annotated[Path, typer.Argument(metavar="DIR|FILE", help="A merged run folder, or its job.sqlite.")],
    compare: Annotated[
        Path | None, typer.Option(metavar="DIR|FILE", help="Put another merged job beside it: faster, or slower?")
    ] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page to this file; - is stdout.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write it for a lab notebook; - is stdout.")
    ] = None,
    prometheus: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write metrics for Prometheus' textfile collector; - is stdout.")
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print no text: only write the files.")] = False,
) -> int:
    """Say what a merged job's numbers mean.

    What each number is: badcjobs guide report. Exit code 0 when every file that was merged was read whole, 4 when
    something was lost (each is named).
    """
    from badcjobs.cli.output import RowCounter, colour_wanted, log_to_stderr, print_json, say
    from badcjobs.clock import SystemClock
    from badcjobs.errors import ExitCode
    from badcjobs.report.job import report_job

    log_to_stderr(quiet=True)
    targets = (
        Target("--html", html, "report.html"),
        Target("--markdown", markdown, "report.md"),
        Target("--prometheus", prometheus, "report.prom"),
    )
    to_stdout = _refuse_two_results(job, json_wanted, targets)
    _refuse_inputs(targets, job, compare)
    now_ms = SystemClock().now_ms()
    found = report_job(job, compare, RowCounter("rows of the source read"), now_ms)
    forms: tuple[Callable[[], str], ...] = (partial(_page, found), found.to_markdown, found.to_prometheus)
    for target, make in zip(targets, forms, strict=True):
        if target.path is not None:
            _write(target, target.path, make(), job)
    if json_wanted:
        print_json(found.to_dict())
    elif not to_stdout and not quiet:
        say(found.to_text(colour=colour_wanted()), painted=True)
    return ExitCode.DATABASE if found.lossy_files else ExitCode.DONE


def _refuse_two_results(job: Path, json_wanted: bool, targets: Sequence[Target]) -> bool:
    """Say whether stdout is taken by a document; stop when it would be by more than one."""
    import shlex

    from badcjobs.errors import BadInput

    wanted = ["--json"] if json_wanted else []
    wanted += [f"{target.option} {target.path}" for target in targets if is_stdout(target.path)]
    if len(wanted) > 1:
        kept = wanted[0].split()  # the others go into files
        files = [word for target in targets if is_stdout(target.path) for word in (target.option, target.instead)]
        raise BadInput(
            f"{' and '.join(wanted)} cannot be printed together",
            why="stdout holds one document",
            fix=shlex.join(["badcjobs", "report", str(job), *kept, *(files if json_wanted else files[2:])]),
        )
    return bool(wanted)


def _page(found: ReportedJob) -> str:
    from badcjobs.report.job import job_title
    from badcjobs.report.page import page
    from badcjobs.store.read_devices import read_chart_data

    return page(found.summary, job_title(found.database), read_chart_data(found.database))


def _refuse_inputs(targets: Sequence[Target], job: Path, compare: Path | None) -> None:
    from badcjobs.cli.targets import refuse_data, sources_of

    jobs = [one for one in (job, compare) if one is not None]
    sources = [source for one in jobs for source in sources_of(one)]
    refuse_data(targets, [*jobs, *sources])


def _write(target: Target, path: Path, text: str, job: Path) -> None:
    """Write a document, to stdout or whole to its file; a reader who has seen enough of a pipe is no failure."""
    import errno
    import shlex

    from badcjobs.cli.output import hand_out
    from badcjobs.errors import BadInput
    from badcjobs.report.job import write_whole

    if is_stdout(path):
        hand_out(text.rstrip("\n"))
        return
    try:
        write_whole(path, text)
    except BadInput as error:
        if isinstance(error.__cause__, BrokenPipeError):
            return
        fix, again = error.fix, ["badcjobs", "report", str(job), target.option]
        if isinstance(error.__cause__, IsADirectoryError):
            fix = shlex.join([*again, target.instead])
        elif isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EFBIG:
            fix = f"ulimit -f unlimited && {shlex.join([*again, str(path)])}"
        raise BadInput(f"{target.option} {error.what}", why=error.why, fix=fix) from error
