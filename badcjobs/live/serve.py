"""Bind an address and serve the live page there until a signal."""

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
from typing import TYPE_CHECKING

from badcjobs.errors import BadInput, NotHere
from badcjobs.seams import Clock

if TYPE_CHECKING:
    from badcjobs.live.hub import LiveSource  # it needs the packages of the extra serve

# Addresses reserved for documentation (RFC 5737, RFC 3849): the route to them is the default route.
_DOCUMENTATION_ADDRESSES = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
_SEND_BUFFER_BYTES = 512 * 1024  # kernel buffer for a listener that does not read
_BACKLOG = 128
_LOCALHOST = "127.0.0.1"
MIN_TOKEN = 16  # characters


def with_token(command: str) -> str:
    """Return a command with a new token, passed in a variable so that ps does not show it."""
    return f"BADCJOBS_TOKEN={secrets.token_hex(16)} {command}"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of the server, as printed when it is ready."""

    urls: tuple[str, ...]  # the best first
    host: str
    port: int
    loopback: bool

    @property
    def url(self) -> str:
        """The URL to open."""
        return self.urls[0]


def bind(
    host: str = _LOCALHOST, port: int = 0, token: str | None = None, command: str = "badcjobs serve"
) -> tuple[socket.socket, ServerAddress]:
    """Bind the address; raise BadInput if that is not possible or not safe.

    ``command`` is the command line without options, for error messages.
    """
    only_here = f"{command} --port {port}   (without --host: only this machine can reach it)"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise BadInput(f"--host {host} is not an address of this machine", why=str(error), fix=only_here) from error
    family, _, _, _, where = min(found, key=lambda one: one[0] != socket.AF_INET)  # for localhost, 127.0.0.1
    address = _address(str(where[0]))
    if not address.is_loopback and len(token or "") < MIN_TOKEN:
        short = f"with a BADCJOBS_TOKEN of fewer than {MIN_TOKEN} characters" if token else "without BADCJOBS_TOKEN"
        raise BadInput(
            f"--host {host} {short}",
            why=f"everyone who can reach this machine could {'guess it' if token else 'read the page'}",
            fix=f"{with_token(command)} --host {shlex.quote(host)} --port {port}",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
        listening.bind(where)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        again = "" if host == _LOCALHOST else f" --host {shlex.quote(host)}"
        any_port = f"{command}{again} --port 0   (any free port; it is printed)"
        what, why, fix = {
            errno.EADDRINUSE: (f"port {port} is in use", "another program listens on it", any_port),
            errno.EACCES: (f"port {port} is not allowed", "only root can use ports below 1024", any_port),
        }.get(error.errno or 0, (f"cannot listen on --host {host}", error.strerror, only_here))
        raise BadInput(what, why=why, fix=fix) from error
    port = listening.getsockname()[1]
    hosts = reachable_hosts(also_ipv6=family == socket.AF_INET6) if address.is_unspecified else [host]
    urls = tuple(f"http://[{one}]:{port}/" if ":" in one else f"http://{one}:{port}/" for one in hosts)
    return listening, ServerAddress(urls, host, port, address.is_loopback)


def reachable_hosts(*, also_ipv6: bool) -> list[str]:
    """Return the name of this machine if others can resolve it, then its addresses; at least one item."""
    name, found = socket.getfqdn(), list[str]()
    with suppress(OSError, UnicodeError):
        found = [str(where[0]) for *_, where in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)]
    known = any(map(_is_reachable, found))
    for family, where in _DOCUMENTATION_ADDRESSES:
        with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((where, 9))  # sends nothing; selects our address for this route
            found.append(str(probe.getsockname()[0]))
    wanted = [one for one in dict.fromkeys(found) if _is_reachable(one) and (also_ipv6 or ":" not in one)]
    return ([name] if known else []) + wanted or [name]


def _is_reachable(address: str) -> bool:
    one = _address(address)
    return not (one.is_loopback or one.is_link_local or one.is_unspecified)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text.partition("%")[0])


def check_installed() -> None:
    """Raise NotHere if the packages of the extra 'serve' are missing."""
    try:
        import starlette.applications  # noqa: F401
        import uvicorn  # noqa: F401
        import wsproto  # noqa: F401
    except ImportError as error:
        raise NotHere(
            "badcjobs serve needs packages that are not installed", why=str(error), fix="pip install 'badcjobs[serve]'"
        ) from error


def serve(
    source: LiveSource,
    listening: socket.socket,
    address: ServerAddress,
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
        make_app(hub, source, Guard(token, address.loopback, address.port)),
        http=Connection,
        ws="wsproto",
        ws_max_size=4096,  # clients have nothing to say
        lifespan="off",
        log_config=None,
        log_level="critical",  # uvicorn would log URLs that contain the token
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=1,
    )
    server = Server(config, started=ready, ending=hub.close)

    async def read_and_serve() -> None:
        reading = asyncio.ensure_future(hub.run())
        reading.add_done_callback(lambda task: setattr(server, "should_exit", True))  # it ends early only after a bug
        await server.serve(sockets=[listening])
        reading.cancel()
        with suppress(asyncio.CancelledError):
            await reading

    asyncio.run(read_and_serve())
    if server.interrupted:
        raise KeyboardInterrupt
