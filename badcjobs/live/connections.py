"""Who may ask (the token, the name of the host, the headers that keep other pages away), and the server itself."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from badcjobs.live.answers import json_text

EVENTS = "text/event-stream"
# The page, its script and its style come from here and talk to nobody else.
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self';"
        " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cache-control": "no-store",
}
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


@dataclass(frozen=True, slots=True)
class Guard:
    """The rules of one server."""

    token: str | None
    loopback: bool  # bound to an address that only this machine reaches
    port: int

    def knows_host(self, header: str | None) -> bool:
        """Whether somebody asked for us by a name of this machine.

        A page from elsewhere can make its own name point to 127.0.0.1 and then read what we say. It cannot choose what
        the browser writes into the header Host. Another port is fine: that is how a tunnel looks.
        """
        if not self.loopback:
            return True
        name = host_name(header or "")
        return name in _LOCAL_NAMES or _is_loopback(name)

    def lets_in(self, headers: Mapping[str, str]) -> bool:
        """Whether a request carries the token, as a header or as our cookie."""
        if self.token is None:
            return True
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self.is_token(given.strip()):
            return True
        return _same(_cookies(headers.get("cookie", "")).get(self.cookie_name, ""), self._cookie_value)

    def is_token(self, given: str) -> bool:
        """Compare in a time that says nothing about how much of it was right."""
        return self.token is not None and _same(given, self.token)

    @property
    def cookie_name(self) -> str:
        """A name of its own for each port: browsers share cookies between the ports of a host."""
        return f"badcjobs_{self.port}"

    @property
    def cookie(self) -> str:
        """The header that lets a browser in until it is closed; no script can read it, no other site can send it."""
        return f"{self.cookie_name}={self._cookie_value}; HttpOnly; SameSite=Strict; Path=/"

    @property
    def _cookie_value(self) -> str:
        """Something that only who has the token can make, but not the token itself."""
        return hmac.new((self.token or "").encode(), b"badcjobs cookie", hashlib.sha256).hexdigest()


def host_name(header: str) -> str:
    """Return the name in a Host header, without its port."""
    text = header.strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.partition(":")[0].strip() if text.count(":") == 1 else text


def _is_loopback(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _cookies(header: str) -> dict[str, str]:
    try:
        return {name: morsel.value for name, morsel in SimpleCookie(header).items()}
    except CookieError:
        return {}


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), wanted.encode())


# --- server -----------------------------------------------------------------------------------------------------------


class Server(uvicorn.Server):
    """A server that tells others when it begins and ends."""

    def __init__(self, config: uvicorn.Config, *, started: Callable[[], None], ending: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell_started = started
        self._tell_ending = ending
        self.interrupted = False  # by Ctrl-C

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then say so."""
        await super().startup(sockets)
        self._tell_started()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let the listeners go first: nobody waits for connections that never end by themselves."""
        self._tell_ending()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End in an orderly way; at a second signal at once. Who started us learns of Ctrl-C, not of TERM."""
        self.interrupted = self.interrupted or sig == signal.SIGINT
        self.force_exit = self.should_exit
        self.stop()

    def stop(self) -> None:
        """End soon."""
        self.should_exit = True


class Connection(H11Protocol):
    """A connection that whoever answers on it can cut, even while something is waiting to be sent."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP, as everything else is refused: in JSON."""
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True  # its beginning was understood and is being answered: to nobody
            self.cycle.message_event.set()
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()  # it has had an answer, or is in the middle of one
            return
        body = json_text({"status": 400, "error": _what_is_wrong(sys.exc_info()[1])}).encode()
        more = {"content-type": "application/json", "content-length": str(len(body)), "connection": "close"}
        headers = {**HEADERS, **more}
        answer = h11.Response(status_code=400, headers=list(headers.items()), reason=b"Bad Request")
        for part in (answer, h11.Data(data=body), h11.EndOfMessage()):
            self.transport.write(self.conn.send(part) or b"")
        self.transport.close()


def _what_is_wrong(error: BaseException | None) -> str:
    """Return it in words; uvicorn keeps to itself what h11 has told it, but still handles that as it calls us."""
    if isinstance(error, h11.ProtocolError) and error.error_status_hint == 431:
        return "the first lines of the request are longer than 64 KiB"
    if "Host:" in str(error):
        return "a request has exactly one header Host, such as Host: localhost"
    return "this is no HTTP request"
