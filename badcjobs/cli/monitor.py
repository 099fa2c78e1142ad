"""``badcjobs monitor``: a run, or this machine's devices, live in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.live_view import View
    from badcjobs.model import StandIn
    from badcjobs.monitor.desk import Desk

_EXAMPLE = "Example: badcjobs monitor runs/july   (q quits; or, in a mail: badcjobs monitor runs/july --once)"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="monitor", short_help="Watch a run, or this machine's GPUs, in a terminal.", epilog=_EXAMPLE)(
        monitor
    )


def monitor(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR|FILE]", help="A run folder or a database; without: this machine's GPUs."),
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", help="Print one frame and end; as where there is no terminal.")
    ] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print one frame as JSON and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
    devices: Annotated[bool, typer.Option("--devices", help="Begin with devices, not with tasks.")] = False,
    sort: Annotated[str, typer.Option(help="Begin with this order: task, state, progress, rate, ETA, GPU, …")] = "task",
    show_only: Annotated[
        str, typer.Option("--filter", help="Show only lines with all these words: 'gpu03 running'.")
    ] = "",
    ascii_only: Annotated[
        bool | None, typer.Option("--ascii/--unicode", help="Which letters to draw with; default: what the locale has.")
    ] = None,
    simulate: Annotated[int | None, typer.Option(min=1, help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their load and faults.")] = None,
    replay: Annotated[str | None, typer.Option(help="Pretend that the devices are those of a task database.")] = None,
) -> int:
    """Watch a run, or this machine's GPUs, in a terminal.

    A run is read from its published task databases: from any machine that sees its folder. Without a terminal one
    frame is printed as plain text.
    """
    from contextlib import closing

    from badcjobs.cli.live_screen import can_show, print_frame, show, shows_only_ascii
    from badcjobs.cli.output import print_json
    from badcjobs.config import stand_in

    view = _open(target, stand_in(Path.cwd(), simulate, simulate_script, replay))
    desk = _desk(target, devices, sort, show_only)
    ascii_only = shows_only_ascii() if ascii_only is None else ascii_only
    with closing(view):
        if json_wanted:
            print_json(view.look().to_dict())
        elif once or not can_show():
            print_frame(view.look(), desk, ascii_only=ascii_only)
        else:
            return show(view, desk, interval_s=interval, ascii_only=ascii_only)
    return 0


def _open(target: Path | None, devices: StandIn) -> View:
    import socket

    from badcjobs.cli.world import environ
    from badcjobs.clock import SystemClock
    from badcjobs.errors import BadInput
    from badcjobs.live_view import open_machine_view, open_run_view
    from badcjobs.model import StandIn

    if target is None:
        return open_machine_view(environ(), SystemClock(), devices, hostname=socket.gethostname().split(".")[0])
    if devices != StandIn():
        raise BadInput(
            f"{target} together with devices that stand in for this machine's",
            why="a run folder shows the devices of its tasks",
            fix=f"badcjobs monitor {target}   (or without it: badcjobs monitor --simulate 4)",
        )
    return open_run_view(target, SystemClock())


def _desk(target: Path | None, devices: bool, order: str, wanted: str) -> Desk:
    import shlex
    from dataclasses import replace

    from badcjobs.errors import BadInput
    from badcjobs.monitor.desk import DEVICES, Desk

    desk = Desk.at_start(of_run=target is not None)
    desk = replace(desk, wanted=wanted, page=DEVICES if devices else desk.page)
    found = next((known for known in desk.orders if known.lower() == order.lower()), None)
    if found is None:
        words = ["badcjobs", "monitor", *([str(target)] if target else []), *(["--devices"] if devices else [])]
        fix = shlex.join([*words, "--sort", "task"])
        raise BadInput(f"--sort {order} is not known", why="orders are " + ", ".join(desk.orders), fix=fix)
    return replace(desk, order=found)
