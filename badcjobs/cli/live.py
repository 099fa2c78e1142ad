"""Live views of a run or of this machine's devices: ``badcjobs monitor`` (terminal), ``badcjobs serve`` (browser).

In a terminal a thread reads snapshots, keys act immediately, and the terminal is restored at the end.
"""

from __future__ import annotations

import json
import logging
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import quote

import typer
from rich.console import Console
from rich.text import Text

from badcjobs.cli.options import JsonWanted, Simulate, find_stand_in, flag, option, other_command, read_project
from badcjobs.cli.output import environ, log_to_stderr, poll_s, print_json, remark, say, shows_only_ascii
from badcjobs.clock import SystemClock
from badcjobs.cluster.slurm import QueueReader
from badcjobs.errors import BadcjobsError, BadInput, NotHere, error_line
from badcjobs.live.draw import Page, as_plain_text, draw
from badcjobs.live.snapshot import Snapshot
from badcjobs.live.ui_state import UiState, parse_keys, press
from badcjobs.live.views import MachineView, View, open_machine_view, open_run_view
from badcjobs.paths import shell_line
from badcjobs.project import Project

if TYPE_CHECKING:
    from badcjobs.live.serve import ServerAddress

Shown = Annotated[Path | None, typer.Argument(metavar="[DIR|FILE]")]
_HOST = "127.0.0.1"
_PORT = 8765
_INTERVAL_S = 2.0
_SHARE = 0.04  # of the interval, at most, for reading; with a thousand tasks only a few are read each time
_FIRST_PATIENCE_S = 1.0
_TICK_S = 0.1  # between looks for keys, signals and a new size of the terminal
_LINE_END = Text("\n", no_wrap=True, overflow="crop")


def _find_target(command: str, target: Path | None, simulate: str | None, project: Project) -> Path | None:
    """Return what to show: the argument, else ``[run] out`` of the project file; None: this machine's GPUs."""
    if target is not None and simulate is not None:
        raise BadInput(
            f"{target} and --simulate {simulate} cannot be combined",
            why="a run folder shows the GPUs of its tasks",
            fix=shell_line(*other_command(command, target)),
        )
    out = project.get("run", "out")
    if target is not None or simulate is not None or out is None or not Path(out).exists():
        return target
    remark(f"showing {out}: [run] out in {project.file}; this machine's GPUs: badcjobs gpus --all")
    return Path(out)


def _open_machine(simulate: str | None, project: Project) -> MachineView:
    """Open a view of this machine's GPUs, or of those that replace them."""
    return open_machine_view(
        environ(),
        SystemClock(),
        find_stand_in(project, simulate),
        hostname=socket.gethostname().split(".")[0],
        limits=project.alerts,
    )


def monitor(
    context: typer.Context,
    target: Shown = None,
    once: bool = flag("--once", "Print one frame as text and exit."),
    interval: float = option("S", "Seconds between updates [2].", default=_INTERVAL_S, min=0.1),
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Watch a run, or this machine's GPUs, in a terminal.

    Keys: q quits, d devices, s sort order, / filter. A run is read from its published task databases, from any machine
    that sees its folder.

    Example:
      badcjobs monitor runs/july
    """
    project = read_project(context)
    target = _find_target("monitor", target, simulate, project)
    view: View
    if target is None:
        view = _open_machine(simulate, project)
    else:
        clock = SystemClock()
        view = open_run_view(target, clock, ask_queue=QueueReader(clock))
    ascii_only = shows_only_ascii()
    can_interact = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    with closing(view):
        if json_wanted:
            print_json(view.look().to_dict())
        elif once or not can_interact or Console().is_dumb_terminal:
            print_snapshot(view.look(), ascii_only=ascii_only)
        else:
            ui = UiState.at_start(of_run=target is not None)
            return show(view, ui, interval_s=interval, ascii_only=ascii_only)
    return 0


def serve(
    context: typer.Context,
    target: Shown = None,
    port: int = option("P", "Port; 0 picks a free one [8765].", default=_PORT, min=0, max=65535),
    host: str = option("ADDRESS", "Others need BADCJOBS_TOKEN [127.0.0.1].", default=_HOST),
    simulate: Simulate = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Show a run, or this machine's GPUs, in a browser: a live page, a JSON API and metrics for Prometheus.

    A run is read from its published task databases, from any machine that sees its folder. Ctrl-C ends it.

    Example:
      badcjobs serve runs/july --port 0
    """
    _check_installed()  # before the next imports
    from badcjobs.live.documents import LiveSource, open_run
    from badcjobs.live.serve import bind
    from badcjobs.live.serve import serve as serve_view

    project = read_project(context)
    token = environ().get("BADCJOBS_TOKEN")
    target = _find_target("serve", target, simulate, project)
    shown_words = [f"--simulate={simulate}"] if simulate else filter(None, [target])
    log_to_stderr()
    listening, place = bind(host, port, token, shell_line(*other_command("serve", *shown_words)))
    with closing(listening):
        clock = SystemClock()
        if target is None:
            source = LiveSource(_open_machine(simulate, project))
        else:
            source = open_run(target, clock, QueueReader(clock))
        with closing(source.view):
            interval_s = poll_s(_INTERVAL_S)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # a normal end
            _announce(place, target, token, json_wanted=json_wanted)  # connections wait until it serves
            serve_view(source, listening, place, token=token, clock=clock, interval_s=interval_s)
    return 0


def _check_installed() -> None:
    """Raise NotHere if the packages of the extra 'serve' are missing."""
    try:
        import starlette.applications  # noqa: F401
        import uvicorn  # noqa: F401
        import wsproto  # noqa: F401
    except ImportError as error:
        raise NotHere(
            "badcjobs serve needs packages that are not installed", why=str(error), fix="pip install 'badcjobs[serve]'"
        ) from error


def _announce(place: ServerAddress, target: Path | None, token: str | None, *, json_wanted: bool) -> None:
    """Print the address, and how to open it from another computer."""
    if json_wanted:
        say(json.dumps({"url": place.url, "host": place.host, "port": place.port, "pid": os.getpid()}))
        return
    key = f"?token={quote(token, safe='')}" if token else ""
    hint = "?token=…" if token else ""  # only the first line has the token
    say(place.url + key)
    remark(f"serving {target or 'this machine'}; Ctrl-C ends it")
    for url in place.urls[1:]:
        remark(f"or {url}{hint}")
    if not place.loopback:
        name = place.url.removeprefix("http://").rpartition(":")[0]
        tunnel = f"ssh -N -L {place.port}:{name}:{place.port} YOU@LOGIN_NODE"
        remark(f"from outside the cluster: {tunnel}   then open http://127.0.0.1:{place.port}/{hint}")
        remark("the connection is not encrypted, except inside ssh")
        return
    machine = socket.gethostname()
    remark(f"from another computer: ssh -N -L {place.port}:127.0.0.1:{place.port} {machine}   then the same address")
    if not token:
        remark("every user of this machine can open it; set BADCJOBS_TOKEN to prevent that")


# --- a live view in this terminal -------------------------------------------------------------------------------------


def print_snapshot(snapshot: Snapshot, *, ascii_only: bool) -> None:
    """Print one snapshot: in colour and as wide as the terminal, or as plain text without a terminal."""
    console = Console(highlight=False)
    if not console.is_terminal:
        say(as_plain_text(snapshot, ascii_only=ascii_only))
        return
    page = draw(
        snapshot,
        UiState.at_start(of_run=snapshot.of_run),
        width=console.width,
        ascii_only=ascii_only,
    )
    console.print(_LINE_END.join(page.lines), soft_wrap=True)  # a command is not cut


def show(view: View, ui: UiState, *, interval_s: float, ascii_only: bool) -> int:
    """Show a live view until the user quits or a signal ends the program; return the exit code."""
    logging.getLogger("badcjobs").addHandler(logging.NullHandler())  # a warning would spoil the screen
    console = Console(highlight=False)
    reader = _SnapshotReader(view, interval_s)
    is_suspended = threading.Event()
    signal.signal(signal.SIGTSTP, lambda *_: is_suspended.set())
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    while not ui.quitting:
        try:
            with _keys_one_by_one(), console.screen():
                ui = _interact(console, is_suspended, reader, ui, ascii_only)
        except OSError:
            return 128 + signal.SIGHUP  # the terminal is gone
        if is_suspended.is_set():
            is_suspended.clear()
            os.kill(os.getpid(), signal.SIGSTOP)  # Ctrl-Z, with the terminal restored; fg continues here
    return 0


def _interact(
    console: Console, is_suspended: threading.Event, reader: _SnapshotReader, ui: UiState, ascii_only: bool
) -> UiState:
    """Draw what has changed and handle keys until the user quits or suspends the program."""
    drawn: object = None
    page = Page([Text("badcjobs: reading the task databases")], [], 1)
    while True:
        snapshot = reader.snapshot
        shown = snapshot, ui, console.size
        if shown != drawn:
            drawn = shown
            if snapshot is not None:
                page = draw(
                    snapshot,
                    ui,
                    width=console.width,
                    height=console.height,
                    ascii_only=ascii_only,
                )
            console.update_screen(_LINE_END.join(page.lines))
        if ui.quitting or is_suspended.is_set():
            return ui
        for key in _pressed_keys():
            ui = press(ui, key, rows=page.rows, names=page.names)


@dataclass
class _SnapshotReader:
    """Reads snapshots in a thread, so that keys never wait for a slow filesystem."""

    view: View
    interval_s: float
    last: Snapshot | None = None
    error: Exception | None = None

    def __post_init__(self) -> None:
        threading.Thread(target=self._read, name="reader", daemon=True).start()

    @property
    def snapshot(self) -> Snapshot | None:
        """The newest snapshot; None: not read yet. Raises the error of the thread."""
        if self.error is not None:
            raise self.error
        return self.last

    def _read(self) -> None:
        """Read until the program ends; a large run first in parts, so that the first tasks appear soon."""
        patience_s = _FIRST_PATIENCE_S
        last: Snapshot | None = None
        while self.error is None:
            try:
                last = self.view.look(patience_s)
                self.last = last
            except Exception as error:
                if last is None or not isinstance(error, BadcjobsError | OSError):
                    self.error = error
                else:  # the folder or its filesystem is not available: keep the last snapshot
                    reason = error_line(error)
                    self.last = replace(last, remarks=(f"{reason}; showing the last reading", *last.remarks))
            if last is not None and not last.unread:
                patience_s = _SHARE * self.interval_s
                time.sleep(self.interval_s)


def _pressed_keys() -> list[str]:
    """Wait a moment; return the keys that were pressed meanwhile."""
    ready, _, _ = select.select([sys.stdin], [], [], _TICK_S)
    if not ready:
        return []
    pressed = os.read(sys.stdin.fileno(), 4096)
    if not pressed:
        return ["q"]  # the terminal is closed
    return parse_keys(pressed.decode(errors="ignore"))


@contextmanager
def _keys_one_by_one() -> Iterator[None]:
    """Read keys one by one without echo; restore the terminal afterwards."""
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
