"""Serves the live page: a view to look at, an address to listen on, and the application between them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import shlex
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from badcjobs.errors import BadInput, NotHere
from badcjobs.live_source import LiveSource
from badcjobs.own_addresses import is_wildcard, reachable_as
from badcjobs.seams import Clock

_SEND_BUFFER_BYTES = 512 * 1024  # what the kernel keeps for somebody who does not read
_BACKLOG = 128
_HERE = "127.0.0.1"


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

    from badcjobs.web.access import Guard
    from badcjobs.web.app import make_app
    from badcjobs.web.background import Background
    from badcjobs.web.hub import Hub
    from badcjobs.web.server import Server, connection_class

    background = Background()
    hub = Hub(source.look, background, clock, interval_s=interval_s, always=not source.folders)
    app = make_app(hub, source, background, Guard(token, place.loopback, place.port))
    config = uvicorn.Config(
        app,
        http=connection_class(),
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
