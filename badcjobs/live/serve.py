"""Serves the live page: an address to listen on, and the server there until a signal."""

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

from badcjobs.errors import BadInput, NotHere
from badcjobs.live.answers import LiveSource
from badcjobs.seams import Clock

# Addresses that were set apart for documents (RFC 5737, RFC 3849): a route to them is the one to everybody else.
_ELSEWHERE = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_SEND_BUFFER_BYTES = 512 * 1024  # what the kernel keeps for a listener that does not read
_BACKLOG = 128
_HERE = "127.0.0.1"


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


def bind(
    host: str = _HERE, port: int = 0, token: str | None = None, asked: str = "badcjobs serve"
) -> tuple[socket.socket, Place]:
    """Take the address; raise BadInput where that is not possible or not safe.

    ``asked`` is the command without these, ready to paste.
    """
    only_here = f"{asked} --port {port}   (without --host: only this machine can reach it)"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"--host {host} is no address of this machine", why=str(error), fix=only_here) from error
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)  # both for localhost: take 127.0.0.1
    address = _address(str(where[0]))
    if not address.is_loopback and not token:
        raise BadInput(
            f"--host {host} without --token",
            why="everybody who can reach this machine would read along",
            fix=f"{with_token(asked)} --host {shlex.quote(host)} --port {port}",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        again = "" if host == _HERE else f" --host {shlex.quote(host)}"
        any_port = f"{asked}{again} --port 0   (any free port; it is printed)"
        what, why, fix = {
            errno.EADDRINUSE: (f"port {port} is in use", "another program listens on it", any_port),
            errno.EACCES: (f"port {port} may not be used", "ports below 1024 belong to root", any_port),
        }.get(error.errno or 0, (f"--host {host} cannot be listened on", error.strerror, only_here))
        raise BadInput(what, why=why, fix=fix) from error
    port = listening.getsockname()[1]
    hosts = reachable_as(also_ipv6=family == socket.AF_INET6) if address.is_unspecified else [host]
    urls = tuple(f"http://[{one}]:{port}/" if ":" in one else f"http://{one}:{port}/" for one in hosts)
    return listening, Place(urls, host, port, address.is_loopback)


def reachable_as(*, also_ipv6: bool = False) -> list[str]:
    """Return the name of this machine, if others find it under that, then its addresses; at least one of them."""
    name, found = socket.getfqdn(), list[str]()
    with suppress(OSError, UnicodeError):
        found = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    known = any(map(_is_for_others, found))
    for family, where in _ELSEWHERE:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where, 9))  # nothing is sent: our address on the way there
            found.append(str(probe.getsockname()[0]))
    wanted = [one for one in dict.fromkeys(found) if _is_for_others(one) and (also_ipv6 or ":" not in one)]
    return ([name] if known else []) + wanted or [name]


def _is_for_others(address: str) -> bool:
    one = _address(address)
    return not (one.is_loopback or one.is_link_local or one.is_unspecified)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


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

    from badcjobs.live.app import Connection, Guard, Server, make_app
    from badcjobs.live.hub import Hub

    hub = Hub(source.look, clock, interval_s=interval_s, always=source.home is None)
    config = uvicorn.Config(
        make_app(hub, source, Guard(token, place.loopback, place.port)),
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

    async def look_and_serve() -> None:
        looking = asyncio.ensure_future(hub.run())
        looking.add_done_callback(lambda task: setattr(server, "should_exit", True))  # only where we have a bug
        await server.serve(sockets=[listening])
        looking.cancel()
        with suppress(asyncio.CancelledError):
            await looking

    asyncio.run(look_and_serve())
    if server.interrupted:
        raise KeyboardInterrupt
