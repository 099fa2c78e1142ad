"""``badcjobs monitor``: a run, or this machine's devices, live in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.live.machine_view import MachineView
    from badcjobs.live.run_view import View
    from badcjobs.live.ui_state import UiState
    from badcjobs.model import StandIn

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

    from badcjobs.cli.live_screen import can_show, print_snapshot, show, shows_only_ascii
    from badcjobs.cli.output import print_json
    from badcjobs.settings import stand_in

    view = _open(target, stand_in(Path.cwd(), simulate, simulate_script, replay))
    ui = _ui_state(target, devices, sort, show_only)
    ascii_only = shows_only_ascii() if ascii_only is None else ascii_only
    with closing(view):
        if json_wanted:
            print_json(view.look().to_dict())
        elif once or not can_show():
            print_snapshot(view.look(), ui, ascii_only=ascii_only)
        else:
            return show(view, ui, interval_s=interval, ascii_only=ascii_only)
    return 0


def _open(target: Path | None, devices: StandIn) -> View:
    from badcjobs.clock import SystemClock
    from badcjobs.live.run_view import open_run_view

    if target is None:
        return open_machine(devices)
    refuse_stand_in(target, devices, "monitor")
    return open_run_view(target, SystemClock())


def open_machine(devices: StandIn) -> MachineView:
    """Look at the devices of this machine, or at those that stand in for them."""
    import socket

    from badcjobs.cli.world import environ
    from badcjobs.clock import SystemClock
    from badcjobs.live.machine_view import open_machine_view

    return open_machine_view(environ(), SystemClock(), devices, hostname=socket.gethostname().split(".")[0])


def refuse_stand_in(target: Path, devices: StandIn, command: str) -> None:
    """Raise BadInput for a run folder together with devices that stand in for this machine's."""
    import shlex

    from badcjobs.errors import BadInput
    from badcjobs.model import StandIn

    if devices != StandIn():
        line = shlex.join(["badcjobs", command, str(target)])
        raise BadInput(
            f"{target} together with devices that stand in for this machine's",
            why="a run folder shows the devices of its tasks",
            fix=f"{line}   (or without it: badcjobs {command} --simulate 4)",
        )


def _ui_state(target: Path | None, devices: bool, order: str, wanted: str) -> UiState:
    import shlex
    from dataclasses import replace

    from badcjobs.errors import BadInput
    from badcjobs.live.ui_state import DEVICES, UiState

    ui = UiState.at_start(of_run=target is not None)
    ui = replace(ui, wanted=wanted, page=DEVICES if devices else ui.page)
    found = next((known for known in ui.orders if known.lower() == order.lower()), None)
    if found is None:
        words = ["badcjobs", "monitor", *([str(target)] if target else []), *(["--devices"] if devices else [])]
        fix = shlex.join([*words, "--sort", "task"])
        raise BadInput(f"--sort {order} is not known", why="orders are " + ", ".join(ui.orders), fix=fix)
    return replace(ui, order=found)
