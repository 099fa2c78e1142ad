"""Bind an address and serve the live page there until a signal."""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import shlex
import socket
from contextlib import suppress
from typing import NamedTuple

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from badcjobs.errors import BadInput
from badcjobs.live.access import Guard
from badcjobs.live.app import make_app
from badcjobs.live.documents import LiveSource
from badcjobs.live.hub import Hub
from badcjobs.seams import Clock

_DOCUMENTATION_ADDRESS = "192.0.2.1"  # reserved for documentation: the route to it is the default route
_SEND_BUFFER_BYTES = 512 * 1024  # kernel buffer for a listener that does not read
_BACKLOG = 128
_LOCALHOST = "127.0.0.1"
_MIN_TOKEN = 16  # characters


# --- the address ------------------------------------------------------------------------------------------------------


class ServerAddress(NamedTuple):
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
    here = f"{command} --host {shlex.quote(host)} --port {port}"
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        addresses.sort(key=lambda entry: entry[0] != socket.AF_INET)  # for localhost, 127.0.0.1
        family, _, _, _, sockaddr = addresses[0]
        address = ipaddress.ip_address(str(sockaddr[0]).partition("%")[0])
        if token is not None or not address.is_loopback:
            _check_token(token or "", here)
        listening = socket.create_server(sockaddr, family=family, backlog=_BACKLOG)
    except (OSError, UnicodeError) as error:
        fix = f"{command} --port 0   (this machine only, any free port; it is printed)"
        raise BadInput(f"cannot listen on {host}, port {port}", why=str(error), fix=fix) from error

    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
    port = listening.getsockname()[1]
    hosts = [host]
    if address.is_unspecified:
        hosts = reachable_hosts()
    urls = tuple(_url(name, port) for name in hosts)
    return listening, ServerAddress(urls, host, port, address.is_loopback)


def _check_token(token: str, command: str) -> None:
    """Refuse a token that can be guessed, or that cannot be part of a header and of a URL; its value is not shown."""
    if len(token) < _MIN_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        what = f"BADCJOBS_TOKEN must be at least {_MIN_TOKEN} printable ASCII characters, without spaces"
        why = "without it everyone who can reach this address could read the page"
        # In a variable, so that ps does not show it.
        raise BadInput(what, why=why, fix=f"BADCJOBS_TOKEN={secrets.token_hex(16)} {command}")


def _url(host: str, port: int) -> str:
    if ":" in host:
        host = f"[{host}]"
    return f"http://{host}:{port}/"


def reachable_hosts() -> list[str]:
    """Return the address of this machine in its network, if it has one, and its name."""
    hosts = [socket.getfqdn()]
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((_DOCUMENTATION_ADDRESS, 9))  # sends nothing; selects our address for the default route
        hosts.insert(0, probe.getsockname()[0])
    return hosts


# --- the server -------------------------------------------------------------------------------------------------------


def serve(
    source: LiveSource,
    listening: socket.socket,
    address: ServerAddress,
    *,
    token: str | None,
    clock: Clock,
    interval_s: float,
) -> None:
    """Serve until a signal; uvicorn raises it again when it has shut down."""
    hub = Hub(source.look, clock, interval_s=interval_s)
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
    server = uvicorn.Server(config)

    async def read_and_serve() -> None:
        tasks = []  # keeps a reference
        if source.home is None:  # a run is read only when a client asks
            tasks.append(asyncio.ensure_future(hub.run()))
        await server.serve(sockets=[listening])

    asyncio.run(read_and_serve())


_REQUEST_TIMEOUT_S = 10.0
_MAX_CONNECTIONS = 512  # with the files that are open, fewer than the usual limit of 1,024
_TOO_MANY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Connection(H11Protocol):
    """A connection that must send its request in time, and can be aborted even while data is waiting to be sent."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        if len(self.connections) > _MAX_CONNECTIONS:
            transport.write(_TOO_MANY)
            transport.close()
        self._time_request()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._time_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_timing()

    def _time_request(self) -> None:
        """Close the connection if a request that has begun is not complete in time, however slowly it arrives."""
        is_websocket = self.transport.get_protocol() is not self  # its request is complete, whatever h11 says
        if is_websocket or self.conn.their_state not in (h11.IDLE, h11.SEND_BODY):
            self._stop_timing()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(_REQUEST_TIMEOUT_S, self.transport.abort)

    def _stop_timing(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
