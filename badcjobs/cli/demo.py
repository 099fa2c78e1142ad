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
    """Run a small array on simulated GPUs, over audio it makes, to the merged summary and report.html.

    In a folder that holds a demo already it goes on as any run does: what is done stays done.
    """
    from badcjobs.cli.demo_job import run_demo
    from badcjobs.cli.merge import files_text
    from badcjobs.cli.output import colour_wanted, print_json, remark, say
    from badcjobs.cli.world import read_world
    from badcjobs.report.text import paste_lines, summary_text

    folder = out or _new_folder()
    if folder.exists():
        remark(f"{folder} is there already: what is done in it stays done; without --out a new folder is made")
    remark("making audio, then an array of 4 tasks on 4 simulated GPUs (about 10 s) …")
    done = run_demo(folder, read_world())
    if json_wanted:
        print_json(done.job.summary.to_dict())
        return done.exit_code
    say(summary_text(done.job.summary, folder.name, colour=colour_wanted()), painted=True)
    say("\n".join(["", "  each task", *paste_lines(done.command, 4), ""]))
    say(files_text(done.job))
    return done.exit_code


def _new_folder() -> Path:
    """Return a folder that does not exist yet, so that a second demo starts afresh."""
    folder = Path("badcjobs-demo")
    number = 2
    while folder.exists():
        folder = Path(f"badcjobs-demo-{number}")
        number += 1
    return folder
