"""Live views of a run or of this machine's devices: ``badcjobs monitor`` (terminal), ``badcjobs serve`` (browser)."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from badcjobs.cli.options import JsonWanted, Simulate, find_stand_in, read_project
from badcjobs.cli.output import environ, log_to_stderr, poll_s, print_json, remark, say
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.paths import shell_line

if TYPE_CHECKING:
    from badcjobs.live.serve import ServerAddress
    from badcjobs.live.views import MachineView
    from badcjobs.project import Project

Shown = Annotated[Path | None, typer.Argument(metavar="[DIR|FILE]")]
_HOST, _PORT, _INTERVAL_S = "127.0.0.1", 8765, 2.0
_TOKEN = "BADCJOBS_TOKEN"


def _find_target(target: Path | None, simulate: str | None, project: Project) -> Path | None:
    """Return what to show: the argument, else ``[run] out`` of the project file; None: this machine's GPUs."""
    out = project.get("run", "out")
    if target is not None or simulate is not None or out is None or not Path(out).exists():
        return target
    remark(f"showing {out}: [run] out in {project.file}; this machine's GPUs: badcjobs gpus --all")
    return Path(out)


def _open_machine(command: str, target: Path | None, simulate: str | None, project: Project) -> MachineView | None:
    """Open a view of this machine's GPUs, or of those that replace them; None: a run is shown."""
    import socket

    from badcjobs.live.views import open_machine_view

    if target is None:
        hostname = socket.gethostname().split(".")[0]
        stand_in = find_stand_in(project, simulate)
        return open_machine_view(environ(), SystemClock(), stand_in, hostname=hostname, limits=project.alerts)
    if simulate is not None:
        line = shell_line("badcjobs", command, target)
        raise BadInput(
            f"{target} and --simulate {simulate} cannot be combined",
            why="a run folder shows the GPUs of its tasks",
            fix=f"{line}   (or without it: badcjobs {command} --simulate {simulate})",
        )
    return None


def monitor(
    context: typer.Context,
    target: Shown = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame as text and exit.")] = False,
    interval: Annotated[float, typer.Option(min=0.1, metavar="S", help="Seconds between updates [2].")] = _INTERVAL_S,
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Watch a run, or this machine's GPUs, in a terminal.

    Keys: q quits, d devices, s sort order, / filter. A run is read from its published task databases, from any machine
    that sees its folder.

    Example:
      badcjobs monitor runs/july
    """
    from contextlib import closing

    from badcjobs.cli.live_screen import can_show, print_snapshot, show, shows_only_ascii
    from badcjobs.cluster.slurm import QueueReader
    from badcjobs.live.ui_state import UiState
    from badcjobs.live.views import open_run_view

    project = read_project(context)
    target = _find_target(target, simulate, project)
    view = _open_machine("monitor", target, simulate, project) or open_run_view(
        target or Path(), SystemClock(), ask_queue=QueueReader(SystemClock())
    )
    ui, ascii_only = UiState.at_start(of_run=target is not None), shows_only_ascii()
    with closing(view):
        if json_wanted:
            print_json(view.look().to_dict())
        elif once or not can_show():
            print_snapshot(view.look(), ui, ascii_only=ascii_only)
        else:
            return show(view, ui, interval_s=interval, ascii_only=ascii_only)
    return 0


def serve(
    context: typer.Context,
    target: Shown = None,
    port: Annotated[int, typer.Option(min=0, max=65535, metavar="P", help="Port; 0 picks a free one [8765].")] = _PORT,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="Others need BADCJOBS_TOKEN [127.0.0.1].")] = _HOST,
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Show a run, or this machine's GPUs, in a browser: a live page, a JSON API and metrics for Prometheus.

    A run is read from its published task databases, from any machine that sees its folder. Ctrl-C ends it.

    Example:
      badcjobs serve runs/july --port 0
    """
    from contextlib import closing

    from badcjobs.live.serve import MIN_TOKEN, bind, check_installed, with_token
    from badcjobs.live.serve import serve as serve_view

    check_installed()  # before the next import
    from badcjobs.cluster.slurm import QueueReader
    from badcjobs.live.hub import LiveSource, open_run

    project, token = read_project(context), environ().get(_TOKEN)
    target = _find_target(target, simulate, project)
    words = [one for one in (target, simulate and f"--simulate={simulate}") if one is not None]
    command = shell_line("badcjobs", "serve", *words)
    if token is not None and not (token and token.isascii() and token.isprintable() and " " not in token):
        # Its value is not shown: it is a secret.
        raise BadInput(f"{_TOKEN} must be printable ASCII without spaces", fix=with_token(command))
    log_to_stderr(quiet=True)
    listening, place = bind(host, port, token, command)
    if token is not None and len(token) < MIN_TOKEN:
        remark(f"warning: a {_TOKEN} of fewer than {MIN_TOKEN} characters can be guessed")
    with closing(listening):
        machine = _open_machine("serve", target, simulate, project)
        clock = SystemClock()
        source = open_run(target or Path(), clock, QueueReader(clock)) if machine is None else LiveSource(machine)
        with closing(source.view):
            tell = partial(_announce, place, target, token, json_wanted=json_wanted)
            serve_view(
                source, listening, place, token=token, clock=SystemClock(), interval_s=poll_s(_INTERVAL_S), ready=tell
            )
    return 0


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
        remark(f"or {other}{'?token=…' if key else ''}")  # the line above has the token
    # How to open it from another computer.
    if not place.loopback:
        name = place.url.removeprefix("http://").rpartition(":")[0]
        tunnel = f"ssh -N -L {place.port}:{name}:{place.port} YOU@LOGIN_NODE"
        here = f"http://127.0.0.1:{place.port}/{'?token=…' if key else ''}"
        remark(f"from outside the cluster: {tunnel}   then open {here}")
        remark("the connection is not encrypted, except inside ssh")
        return
    name = socket.getfqdn()
    machine = "THIS_MACHINE" if name.startswith("localhost") else name
    remark(f"from another computer: ssh -N -L {place.port}:127.0.0.1:{place.port} {machine}   then the same address")
    if not key:
        remark("every user of this machine can open it; set BADCJOBS_TOKEN to prevent that")
