"""``badcjobs demo``: the whole path on this machine, with nothing installed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

_EXAMPLE = "Example: badcjobs demo --out /tmp/first-look"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="demo", short_help="The whole path on this machine, on simulated GPUs.", epilog=_EXAMPLE)(demo)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder for everything it makes; default: a new badcjobs-demo here.")
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> int:
    """Run a small array on simulated GPUs, over audio it makes, to the merged summary and report.html."""
    from badcjobs.cli.output import print_json, say, shown
    from badcjobs.cli.world import read_world
    from badcjobs.demo import run_demo
    from badcjobs.report.as_text import summary_text

    folder = out or _new_folder()
    typer.echo("badcjobs: making audio, then an array of 4 tasks on 4 simulated GPUs (about 10 s) …", err=True)
    done = run_demo(folder, read_world())
    if json_wanted:
        print_json(done.job.summary.to_dict())
        return done.exit_code
    say(summary_text(done.job.summary, folder.name))
    say(f"\n  each task   {done.command}")
    say(f"  database    {shown(done.job.database)}\n  report      {shown(done.job.report)}")
    return done.exit_code


def _new_folder() -> Path:
    """Return a folder that does not exist yet, so that a second demo starts afresh."""
    folder = Path("badcjobs-demo")
    number = 2
    while folder.exists():
        folder = Path(f"badcjobs-demo-{number}")
        number += 1
    return folder
