"""``badcjobs gpus``: the devices this task really has, or the freest ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from badcjobs.devices.free import DeviceWish
    from badcjobs.devices.listing import Listing
    from badcjobs.model import StandIn

_EXAMPLE = (
    "Example: CUDA_VISIBLE_DEVICES=2 badcjobs gpus --simulate 4 --json"
    "   (or, on a shared machine: badcjobs gpus --free 2 --wait 600)"
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="gpus", short_help="Show the devices this task really has.", epilog=_EXAMPLE)(gpus)


def gpus(
    simulate: Annotated[int | None, typer.Option(min=1, help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their load and faults.")] = None,
    replay: Annotated[str | None, typer.Option(help="Pretend that the devices are those of a task database.")] = None,
    everything: Annotated[
        bool, typer.Option("--all", help="Every card of the machine, granted or not, with its processes.")
    ] = False,
    free: Annotated[int | None, typer.Option(help="Only the N devices that are most free.")] = None,
    min_memory_mib: Annotated[
        int | None, typer.Option(min=1, help="With --free: at least so much free memory each.")
    ] = None,
    max_utilization: Annotated[
        float | None, typer.Option(help="With --free: at most so many percent busy, 0 to 100.")
    ] = None,
    wait: Annotated[float | None, typer.Option(help="With --free: wait so many seconds for them; default 0.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Show the devices this task really has, and how we know; with --free the best ones that nobody uses."""
    from pathlib import Path

    from badcjobs.cli.output import print_json, say
    from badcjobs.errors import NotHere
    from badcjobs.report.text import devices_text
    from badcjobs.settings import stand_in

    wish = _wish(free, everything, min_memory_mib=min_memory_mib, max_utilization=max_utilization, wait=wait)
    try:
        found = _find(stand_in(Path.cwd(), simulate, simulate_script, replay), wish, everything)
    except NotHere as error:
        if not json_wanted:
            raise
        why = "\n".join(filter(None, [error.what, error.why]))
        reader = {"backend": getattr(error, "backend", "none"), "backend_why": getattr(error, "backend_why", "")}
        print_json({"devices": [], "why": why, **reader})
        return int(error.exit_code)
    if json_wanted:
        print_json(found.to_dict())
        return 0 if found.devices else int(NotHere.exit_code)
    if not found.devices:
        raise NotHere(
            "no GPU here", why=found.why, fix="badcjobs gpus --simulate 2   (to see how it looks), or ask Slurm for one"
        )
    say(devices_text(found.to_dict(), processes=everything, to_take=wish is not None))
    return 0


def _wish(free: int | None, everything: bool, **limits: Any) -> DeviceWish | None:
    from badcjobs.devices.free import DeviceWish, check_wish
    from badcjobs.errors import BadInput

    if free is None:
        given = [f"--{name.replace('_', '-')}" for name, value in limits.items() if value is not None]
        if given:
            raise BadInput(f"{' and '.join(given)} without --free", fix="badcjobs gpus --free 1 --wait 60")
        return None
    if everything:
        raise BadInput(
            "--all and --free together",
            why="one shows every card, the other the best ones of ours",
            fix=f"badcjobs gpus --free {free}   (or: badcjobs gpus --all)",
        )
    wish = DeviceWish(free, limits["min_memory_mib"], limits["max_utilization"], limits["wait"] or 0.0)
    check_wish(wish)
    return wish


def _find(devices: StandIn, wish: DeviceWish | None, everything: bool) -> Listing:
    from badcjobs.cli.output import remark
    from badcjobs.cli.world import environ
    from badcjobs.clock import SystemClock
    from badcjobs.devices.allocation import parse_allocation
    from badcjobs.devices.free import Waiting, list_free
    from badcjobs.devices.listing import list_granted
    from badcjobs.devices.locks import DeviceLocks, lock_folder

    clock, variables = SystemClock(), environ()
    if wish is None:
        return list_granted(variables, clock, stand_in=devices, everything=everything)
    in_slurm = parse_allocation(variables, hostname="", pid=0, started_at_ms=0).in_slurm
    view = DeviceLocks(lock_folder(variables), clock, None)
    return list_free(variables, devices, wish, view, Waiting(clock, remark), in_slurm=in_slurm)
