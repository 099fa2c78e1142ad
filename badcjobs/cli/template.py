"""``badcjobs template``: a ready batch script, or the list of those that there are."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.cluster.templates import Template

_EXAMPLE = "Example: badcjobs template sockeye-array --set account=st-pi-1-gpu --set time=12:00:00 -o job.sbatch"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="template", short_help="Fill in a batch script for sbatch.", epilog=_EXAMPLE)(template)


def template(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Which one; without it: the list.")] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Fill in a key; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="Write it to this file.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Print a batch script that sbatch takes, filled in as far as --set says; without NAME, list the templates.

    The keys are the names of its #SBATCH options and, in small letters, of its variables; an unknown or missing one is
    named. What is left open can be edited, or named when the script is submitted.
    """
    from badcjobs.cli.output import hand_out, print_json, remark, say
    from badcjobs.cli.targets import Target, refuse_data
    from badcjobs.cluster.templates import fill_template, list_templates, write_script
    from badcjobs.errors import BadInput

    if name is None:
        if settings or output:
            raise BadInput("which template? NAME is missing", fix="badcjobs template")
        shelf = list_templates()
        if json_wanted:
            print_json({"templates": [one.to_dict() for one in shelf]})
        else:
            say(_list_text(shelf))
        return 0
    filled = fill_template(name, settings or [], complete=bool(settings) or output is not None)  # else it is looked at
    if output is not None:
        refuse_data([Target("-o", output, "job.sbatch")])
        write_script(output, filled.text, force=force)
    if json_wanted:
        print_json({**filled.to_dict(), "text": filled.text, "file": None if output is None else str(output)})
        return 0
    if output is None:
        hand_out(filled.text.rstrip("\n"))
    else:
        say(f"{output} is written; next: sbatch {output}")
    if filled.open:
        remark(f"still open, to edit or to name in sbatch --export: {', '.join(filled.open)}")
    return 0


def _list_text(shelf: list[Template]) -> str:
    width = max(len(one.name) for one in shelf)
    lines = [f"  {one.name:<{width}}  {one.about}" for one in shelf]
    return "\n".join(["Templates (badcjobs template NAME --set KEY=VALUE -o job.sbatch):", "", *lines])
