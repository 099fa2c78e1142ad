"""Serves the live page: a view to look at, an address to listen on, and the application between them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import secrets
import shlex
import socket
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from badcjobs.errors import BadInput, NotHere
from badcjobs.live.answers import Documents, Look, snapshot_samples
from badcjobs.live.run_files import Mark, leads_out, mark_at
from badcjobs.live.run_view import Accounts, View, open_run_view
from badcjobs.report.prometheus import prometheus_text
from badcjobs.seams import Clock
from badcjobs.store.read_model import ProcessFacts
from badcjobs.store.read_tasks import read_processes

# Addresses that were set apart for documents (RFC 5737, RFC 3849): a route to them is the one to everybody else.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_OnDevices = Mapping[tuple[str, str | None, str], Sequence[ProcessFacts]]  # by task, UUID and token
_LOG_BYTES = 512 * 1024  # of the end of a log; nobody reads more in a browser
_SEND_BUFFER_BYTES = 512 * 1024  # what the kernel keeps for somebody who does not read
_BACKLOG = 128
_HERE = "127.0.0.1"


def open_run(target: Path, clock: Clock) -> LiveSource:
    """Look at a run folder or one of its databases; raise DatabaseProblem for others."""
    named = target if target.name not in ("", "..") else target.resolve()  # serve . in a run folder
    view = open_run_view(named, clock, confined=True)
    folder = view.files.folder.path.absolute()
    run = folder.parent if folder.name == "tasks" else folder
    return LiveSource(view, run.name, (run / "tasks", folder), Accounts(view.files), home=run)


@dataclass(slots=True)
class LiveSource:
    """What is behind the answers: the view, and the files of the run folder that it looks at."""

    view: View
    run: str = ""
    folders: Sequence[Path] = ()  # where the databases and logs of tasks lie; none: a machine
    accounts: Accounts | None = None  # None: a machine
    home: Path | None = None  # the run folder, out of which no link is followed; None: a machine
    _documents: Documents = field(default_factory=Documents)
    _processes: dict[str, tuple[Mark | None, _OnDevices]] = field(default_factory=dict)

    def look(self) -> Look:
        """Look once."""
        return self._documents.look(self.view.look())

    def prometheus(self, look: Look) -> str:
        """Return a look, and for a run its accounts, in Prometheus' words."""
        snapshot = look.snapshot
        summary = None if self.accounts is None else self.accounts.summarize(snapshot)
        return prometheus_text(snapshot_samples(snapshot, self.run, summary))

    def processes(self, look: Look) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """Return the processes of the devices of running tasks, by device key; a file is read once."""
        found: dict[str, list[Mapping[str, Any]]] = defaultdict(list)
        devices = [item.document for item in look.devices.values() if item.document["alive"] and item.document["task"]]
        for device in devices:
            place = device["task"], device["uuid"], device["token"]
            for process in self._processes_of(str(device["task"])).get(place, ()):
                found[device["key"]].append(asdict(process))
        return found

    def _processes_of(self, task: str) -> _OnDevices:
        path = self._file(f"{task}.sqlite")
        if path is None:
            return {}
        mark, known = mark_at(path), self._processes.get(task)
        if known is None or known[0] != mark:
            known = self._processes[task] = (mark, read_processes(path))
        return known[1]

    def log_end(self, task: str, lines: int) -> tuple[Sequence[str], bool] | None:
        """Return the end of a task's log."""
        path = self._file(f"{task}.log")
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                file.seek(max(0, size - _LOG_BYTES))
                said = file.read(_LOG_BYTES).decode("utf-8", "replace").splitlines()
        except OSError:  # gone since, or not for us to read
            return None
        if size > _LOG_BYTES:
            del said[:1]  # its beginning is missing
        return said[-lines:], size <= _LOG_BYTES and len(said) <= lines

    def _file(self, name: str) -> Path | None:
        """Return a file of a task: right in one of the folders, and no link that leads elsewhere."""
        for folder in self.folders:
            if self.home is None or leads_out(folder, self.home):
                continue
            path = folder / name
            try:
                if path.parent == folder and path.is_file() and path.resolve().parent == folder.resolve():
                    return path
            except OSError:  # not for us to look at
                continue
        return None


# --- the server -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and who may come."""

    host: str = _HERE
    port: int = 0
    token: str | None = None
    asked: str = "badcjobs serve"  # the command without these, ready to paste


def with_token(asked: str) -> str:
    """Return a command with a fresh token, where ps does not show it."""
    return f"BADCJOBS_TOKEN={secrets.token_hex(16)} {asked}"


@dataclass(frozen=True, slots=True)
class Place:
    """What to say when the server is ready."""

    urls: tuple[str, ...]  # that others can open, the best first
    host: str
    port: int
    loopback: bool

    @property
    def url(self) -> str:
        """The address to open."""
        return self.urls[0]

    @property
    def name(self) -> str:
        """The name or address of the machine in it."""
        return self.url.removeprefix("http://").rpartition(":")[0]


def bind(address: Address) -> tuple[socket.socket, Place]:
    """Take the address; raise BadInput where that is not possible or not safe."""
    family, where = _resolve(address)
    loopback = ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback
    if not loopback and not address.token:
        raise BadInput(
            f"--host {address.host} without --token",
            why="everybody who can reach this machine would read along",
            fix=f"{with_token(address.asked)} --host {shlex.quote(address.host)} --port {address.port}",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise _cannot_listen(address, error) from error
    port = listening.getsockname()[1]
    hosts = reachable_as(also_ipv6=":" in address.host) if is_wildcard(address.host) else [address.host]
    return listening, Place(tuple(_url(host, port) for host in hosts), address.host, port, loopback)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"


def _resolve(address: Address) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadInput(
            f"--host {address.host} is no address of this machine",
            why=str(error),
            fix=_only_here(address),
        ) from error
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)  # both for localhost: take 127.0.0.1
    return family, where


def _cannot_listen(address: Address, error: OSError) -> BadInput:
    host = "" if address.host == _HERE else f" --host {shlex.quote(address.host)}"
    fix = f"{address.asked}{host} --port 0   (any free port; it is printed)"
    if error.errno == errno.EADDRINUSE:
        return BadInput(f"port {address.port} is in use", why="somebody listens on it already", fix=fix)
    if error.errno == errno.EACCES:
        return BadInput(f"port {address.port} may not be used", why="ports below 1024 belong to root", fix=fix)
    return BadInput(f"--host {address.host} cannot be listened on", why=error.strerror, fix=_only_here(address))


def _only_here(address: Address) -> str:
    return f"{address.asked} --port {address.port}   (without --host: only this machine can reach it)"


def check_installed() -> None:
    """Raise NotHere where the extra is missing."""
    try:
        import starlette.applications  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise NotHere(
            "badcjobs serve needs packages that are not installed",
            why=str(error),
            fix="pip install 'badcjobs[serve]'",
        ) from error


def serve(
    source: LiveSource,
    listening: socket.socket,
    place: Place,
    *,
    token: str | None,
    clock: Clock,
    interval_s: float,
    ready: Callable[[], None],
) -> None:
    """Serve until a signal; raise KeyboardInterrupt after Ctrl-C."""
    import uvicorn

    from badcjobs.live.app import make_app
    from badcjobs.live.connections import Connection, Guard, Server
    from badcjobs.live.hub import Background, Hub

    background = Background()
    hub = Hub(source.look, background, clock, interval_s=interval_s, always=not source.folders)
    app = make_app(hub, source, background, Guard(token, place.loopback, place.port))
    config = uvicorn.Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="critical",  # our own log says what matters, and never an address with a token in it
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    server = Server(config, started=ready, ending=hub.close)
    asyncio.run(_serve(server, hub, listening))
    if server.interrupted:
        raise KeyboardInterrupt


async def _serve(server: Any, hub: Any, listening: socket.socket) -> None:
    looking = asyncio.ensure_future(hub.run())
    looking.add_done_callback(lambda task: server.stop())  # it ends by itself only where we have a bug
    await server.serve(sockets=[listening])
    looking.cancel()
    with suppress(asyncio.CancelledError):
        await looking


# --- addresses --------------------------------------------------------------------------------------------------------


def is_wildcard(host: str) -> bool:
    """Say whether listening there means listening on every address of this machine."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_unspecified
    except ValueError:
        return False


def reachable_as(*, also_ipv6: bool = False) -> list[str]:
    """Return the name of this machine, if others find it under that, then its addresses; at least one of them."""
    name = socket.getfqdn()
    by_name = _look_up(name)
    families = _ELSEWHERE if also_ipv6 else _ELSEWHERE[:1]
    addresses = [*by_name, *(found for family, where in families if (found := _address_towards(family, where)))]
    wanted = [one for one in dict.fromkeys(addresses) if also_ipv6 or ":" not in one]
    return ([name] if by_name else []) + wanted or [name]


def _look_up(name: str) -> list[str]:
    """Return the addresses that a name stands for, without those that mean another machine to everybody else."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [str(where[0]) for *_, where in found if _is_for_others(str(where[0]))]


def _address_towards(family: socket.AddressFamily, where: str) -> str | None:
    """Return our address on the way to another one; nothing is sent."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where, 9))
            address = str(probe.getsockname()[0])
    except OSError:
        return None
    return address if _is_for_others(address) else None


def _is_for_others(address: str) -> bool:
    one = ipaddress.ip_address(address.partition("%")[0])
    return not (one.is_loopback or one.is_link_local or one.is_unspecified)
