"""A run, or this machine's devices, live: ``badcjobs monitor`` in a terminal, ``badcjobs serve`` in a browser."""

from __future__ import annotations

import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import DEVICES, with_settings
from badcjobs.cli.output import environ, log_to_stderr, print_json, remark, say
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.settings import stand_in

if TYPE_CHECKING:
    from collections.abc import Mapping

    from badcjobs.live.serve import ServerAddress
    from badcjobs.live.ui_state import UiState
    from badcjobs.live.views import MachineView

Shown = Annotated[
    Path | None, typer.Argument(metavar="[DIR|FILE]", help="A run folder or a database; without: this machine's GPUs.")
]
_HOST, _PORT, _INTERVAL_S = "127.0.0.1", 8765, 2.0
_DEFAULTS = {"host": _HOST, "port": _PORT, "interval": _INTERVAL_S}


def _open_machine(command: str, target: Path | None, devices: Mapping[str, Any]) -> MachineView | None:
    """Look at the devices of this machine, or at those that stand in for them; None: a run is to be shown."""
    import socket

    from badcjobs.live.views import open_machine_view

    if target is None:
        hostname = socket.gethostname().split(".")[0]
        return open_machine_view(environ(), SystemClock(), stand_in(Path.cwd(), **devices), hostname=hostname)
    if any(value is not None for value in devices.values()):
        line = shlex.join(["badcjobs", command, str(target)])
        raise BadInput(
            f"{target} together with devices that stand in for this machine's",
            why="a run folder shows the devices of its tasks",
            fix=f"{line}   (or without it: badcjobs {command} --simulate 4)",
        )
    return None


@with_settings(*DEVICES)
def monitor(
    target: Shown = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame as text and exit.")] = False,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print one frame as JSON and end.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 2.0,
    begin_with_devices: Annotated[bool, typer.Option("--devices", help="Begin with devices, not with tasks.")] = False,
    sort: Annotated[str, typer.Option(help="Begin with this order: task, state, progress, rate, ETA, GPU, …")] = "task",
    show_only: Annotated[str, typer.Option("--filter", help="Show only lines with all these words.")] = "",
    ascii_only: Annotated[bool | None, typer.Option("--ascii/--unicode", help="Default: what the locale has.")] = None,
    **devices: Any,
) -> int:
    """Watch a run, or this machine's GPUs, in a terminal.

    A run is read from its published task databases: from any machine that sees its folder. Without a terminal one
    frame is printed as plain text.

    Example: badcjobs monitor runs/july   (q quits; or, in a mail: badcjobs monitor runs/july --once)
    """
    from contextlib import closing

    from badcjobs.cli.live_screen import can_show, print_snapshot, show, shows_only_ascii
    from badcjobs.live.views import open_run_view

    view = _open_machine("monitor", target, devices) or open_run_view(target or Path(), SystemClock())
    ui = _ui_state(target, begin_with_devices, sort, show_only)
    ascii_only = shows_only_ascii() if ascii_only is None else ascii_only
    with closing(view):
        if json_wanted:
            print_json(view.look().to_dict())
        elif once or not can_show():
            print_snapshot(view.look(), ui, ascii_only=ascii_only)
        else:
            return show(view, ui, interval_s=interval, ascii_only=ascii_only)
    return 0


def _ui_state(target: Path | None, devices: bool, order: str, wanted: str) -> UiState:
    from dataclasses import replace

    from badcjobs.live.ui_state import DEVICES as PAGE_OF_DEVICES
    from badcjobs.live.ui_state import UiState

    ui = UiState.at_start(of_run=target is not None)
    ui = replace(ui, filter=wanted, page=PAGE_OF_DEVICES if devices else ui.page)
    found = next((known for known in ui.orders if known.lower() == order.lower()), None)
    if found is None:
        words = ["badcjobs", "monitor", *([str(target)] if target else []), *(["--devices"] if devices else [])]
        fix = shlex.join([*words, "--sort", "task"])
        raise BadInput(f"--sort {order} is not known", why="orders are " + ", ".join(ui.orders), fix=fix)
    return replace(ui, order=found)


@with_settings(*DEVICES)
def serve(
    target: Shown = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: any free port.")] = _PORT,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs --token.")] = _HOST,
    token: Annotated[str | None, typer.Option(envvar="BADCJOBS_TOKEN", help="Secret that readers need.")] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = _INTERVAL_S,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the address as one line of JSON.")] = False,
    **devices: Any,
) -> int:
    """Show a run, or this machine's GPUs, in a browser: live page, JSON API, metrics for Prometheus.

    A run is read from its published task databases: from any machine that sees its folder. Only this machine can reach
    the page unless --host says otherwise. Ends with Ctrl-C.

    Example: badcjobs serve runs/july --port 0   (then open the address that it prints; Ctrl-C ends it)
    """
    from contextlib import closing

    from badcjobs.live.documents import LiveSource, open_run
    from badcjobs.live.serve import bind, check_installed, with_token
    from badcjobs.live.serve import serve as serve_view

    check_installed()
    given = {**{name.replace("_", "-"): value for name, value in devices.items()}, "interval": interval}
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        again = _asked(target, {**given, "host": host, "port": port}, json_wanted)
        # Its value is not shown: it is a secret.
        raise BadInput("--token must be letters, digits and signs without spaces", fix=with_token(again))
    if token is not None and len(token) < 16:
        remark("warning: a token of fewer than 16 letters can be guessed")
    log_to_stderr(quiet=True)
    listening, place = bind(host, port, token, _asked(target, given, json_wanted))
    with closing(listening):
        machine = _open_machine("serve", target, devices)
        source = open_run(target or Path(), SystemClock()) if machine is None else LiveSource(machine)
        with closing(source.view):
            tell = partial(_announce, place, target, token, json_wanted=json_wanted)
            serve_view(source, listening, place, token=token, clock=SystemClock(), interval_s=interval, ready=tell)
    return 0


def _asked(target: Path | None, named: Mapping[str, object], json_wanted: bool) -> str:
    """Return the command as it was given, with these options."""
    words = [] if target is None else [str(target)]
    words += [f"--{name}={value}" for name, value in named.items() if value not in (None, _DEFAULTS.get(name))]
    return shlex.join(["badcjobs", "serve", *words, *(["--json"] if json_wanted else [])])


def _announce(place: ServerAddress, target: Path | None, token: str | None, *, json_wanted: bool) -> None:
    import json
    import os
    import socket
    from urllib.parse import quote

    if json_wanted:
        say(json.dumps({"url": place.url, "host": place.host, "port": place.port, "pid": os.getpid()}))
        return
    key = f"?token={quote(token, safe='')}" if token else ""
    say(place.url + key)
    remark(f"serving {target or 'this machine'}; Ctrl-C ends it")
    for other in place.urls[1:]:
        remark(f"or {other}{'?token=…' if key else ''}")  # it is in the line above
    # How to get there from another computer.
    if not place.loopback:
        name = place.url.removeprefix("http://").rpartition(":")[0]
        tunnel = f"ssh -N -L {place.port}:{name}:{place.port} YOU@LOGIN_NODE"
        here = f"http://127.0.0.1:{place.port}/{'?token=…' if key else ''}"
        remark(f"from outside the cluster: {tunnel}   then open {here}")
        remark("what is sent is not encrypted, but for the part inside ssh")
        return
    name = socket.getfqdn()
    machine = "THIS_MACHINE" if name.startswith("localhost") else name
    remark(f"from another computer: ssh -N -L {place.port}:127.0.0.1:{place.port} {machine}   then the same address")
    if not key:
        remark("everybody who is logged in here can open it; a token (BADCJOBS_TOKEN) keeps them out")
