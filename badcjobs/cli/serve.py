"""``badcjobs serve``: the live page, its JSON API, and metrics for Prometheus."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from badcjobs.live.answers import LiveSource
    from badcjobs.live.serve import Place
    from badcjobs.model import StandIn

_EXAMPLE = "Example: badcjobs serve runs/july --port 0   (then open the address that it prints; Ctrl-C ends it)"
_HOST, _PORT, _INTERVAL_S = "127.0.0.1", 8765, 2.0
_DEFAULTS = {"host": _HOST, "port": _PORT, "interval": _INTERVAL_S}


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="serve", short_help="Show a run, or this machine's GPUs, in a browser.", epilog=_EXAMPLE)(serve)


def serve(
    target: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR|FILE]", help="A run folder or a database; without: this machine's GPUs."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Where to listen; 0: any free port.")] = _PORT,
    host: Annotated[str, typer.Option(help="Address to listen on; any but loopback needs --token.")] = _HOST,
    token: Annotated[
        str | None,
        typer.Option(
            envvar="BADCJOBS_TOKEN",
            show_envvar=True,
            help="Answer only who knows this (ps shows it; the variable not).",
        ),
    ] = None,
    interval: Annotated[float, typer.Option(min=0.1, max=3600, help="Seconds between looks.")] = _INTERVAL_S,
    json_wanted: Annotated[
        bool, typer.Option("--json", help="Print the address as one line of JSON when it is ready.")
    ] = False,
    simulate: Annotated[int | None, typer.Option(min=1, help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their load and faults.")] = None,
    replay: Annotated[str | None, typer.Option(help="Pretend that the devices are those of a task database.")] = None,
) -> int:
    """Show a run, or this machine's GPUs, in a browser: live page, JSON API, metrics for Prometheus.

    A run is read from its published task databases: from any machine that sees its folder. Only this machine can reach
    the page unless --host says otherwise. Ends with Ctrl-C.
    """
    from contextlib import closing

    from badcjobs.cli.output import log_to_stderr
    from badcjobs.clock import SystemClock
    from badcjobs.live.serve import bind, check_installed
    from badcjobs.live.serve import serve as serve_view
    from badcjobs.settings import stand_in

    check_installed()
    given = {"simulate": simulate, "simulate-script": simulate_script, "replay": replay, "interval": interval}
    asked = _asked(target, given, json_wanted)
    _check_token(token, _asked(target, {**given, "host": host, "port": port}, json_wanted))
    log_to_stderr(quiet=True)
    listening, place = bind(host, port, token, asked)
    with closing(listening):
        source = _open(target, stand_in(Path.cwd(), simulate, simulate_script, replay))
        with closing(source.view):
            serve_view(
                source,
                listening,
                place,
                token=token,
                clock=SystemClock(),
                interval_s=interval,
                ready=lambda: _announce(place, target, token, json_wanted=json_wanted),
            )
    return 0


def _asked(target: Path | None, named: Mapping[str, object], json_wanted: bool) -> str:
    """Return the command as it was given, with these options."""
    import shlex

    words = [] if target is None else [str(target)]
    words += [f"--{name}={value}" for name, value in named.items() if value not in (None, _DEFAULTS.get(name))]
    return shlex.join(["badcjobs", "serve", *words, *(["--json"] if json_wanted else [])])


def _check_token(token: str | None, asked: str) -> None:
    from badcjobs.cli.output import remark
    from badcjobs.errors import BadInput
    from badcjobs.live.serve import with_token

    if token is None:
        return
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise BadInput(
            "--token must be letters, digits and signs without spaces",  # its value is nobody's business
            fix=with_token(asked),
        )
    if len(token) < 16:
        remark("warning: a token of fewer than 16 letters can be guessed")


def _open(target: Path | None, devices: StandIn) -> LiveSource:
    from badcjobs.cli.monitor import open_machine, refuse_stand_in
    from badcjobs.clock import SystemClock
    from badcjobs.live.answers import LiveSource, open_run

    if target is None:
        return LiveSource(open_machine(devices))
    refuse_stand_in(target, devices, "serve")
    return open_run(target, SystemClock())


def _announce(place: Place, target: Path | None, token: str | None, *, json_wanted: bool) -> None:
    import json
    import os
    from urllib.parse import quote

    from badcjobs.cli.output import remark, say

    if json_wanted:
        say(json.dumps({"url": place.url, "host": place.host, "port": place.port, "pid": os.getpid()}))
        return
    key = f"?token={quote(token, safe='')}" if token else ""
    say(place.url + key)
    remark(f"serving {target or 'this machine'}; Ctrl-C ends it")
    for other in place.urls[1:]:
        remark(f"or {other}{'?token=…' if key else ''}")  # it is in the line above
    for line in _ways(place, key):
        remark(line)


def _ways(place: Place, key: str) -> Iterator[str]:
    """Yield how to get there from another computer."""
    here = f"http://127.0.0.1:{place.port}/"
    if not place.loopback:
        tunnel = f"ssh -N -L {place.port}:{place.name}:{place.port} YOU@LOGIN_NODE"
        yield f"from outside the cluster: {tunnel}   then open {here}{'?token=…' if key else ''}"
        yield "what is sent is not encrypted, but for the part inside ssh"
        return
    import socket

    name = socket.getfqdn()
    machine = "THIS_MACHINE" if name.startswith("localhost") else name
    tunnel = f"ssh -N -L {place.port}:127.0.0.1:{place.port} {machine}"
    yield f"from another computer: {tunnel}   then the same address"
    if not key:
        yield "everybody who is logged in here can open it; a token (BADCJOBS_TOKEN) keeps them out"
