"""``badcjobs gpus``: the devices this task really has."""

from __future__ import annotations

from typing import Annotated

import typer

_EXAMPLE = "Example: CUDA_VISIBLE_DEVICES=2 badcjobs gpus --simulate 4 --json"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="gpus", short_help="Show the devices this task really has.", epilog=_EXAMPLE)(gpus)


def gpus(
    simulate: Annotated[int | None, typer.Option(min=1, help="Pretend that this machine has N GPUs.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every card of the machine, granted or not.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Show the devices this task really has, and how we know."""
    from badcjobs.cli.output import print_json, say
    from badcjobs.cli.world import environ
    from badcjobs.clock import SystemClock
    from badcjobs.devices import list_granted
    from badcjobs.errors import NotHere
    from badcjobs.model import StandIn
    from badcjobs.report.as_text import devices_text

    found = list_granted(environ(), SystemClock(), stand_in=StandIn(simulate), everything=everything)
    if json_wanted:
        print_json(found.to_dict())
    elif found.devices:
        say(devices_text(found.to_dict()))
    if not found.devices and json_wanted:
        return int(NotHere.exit_code)
    if not found.devices:
        raise NotHere(
            "no GPU here", why=found.why, fix="badcjobs gpus --simulate 2   (to see how it looks), or ask Slurm for one"
        )
    return 0
