"""What we ask of uvicorn beyond serving: to say when it is ready, to end at once, and to cut a connection."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from badcjobs.web.access import HEADERS
from badcjobs.web.look import json_text

_NO_REQUEST = "this is no HTTP request"
_TOO_LONG = "the first lines of the request are longer than 64 KiB"
_NO_HOST = "a request has exactly one header Host, such as Host: localhost"


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


class _Connection(H11Protocol):
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
        return _TOO_LONG
    return _NO_HOST if "Host:" in str(error) else _NO_REQUEST


def connection_class() -> type[asyncio.Protocol]:
    """Return the class of our connections."""
    return _Connection
