"""One connection to /api/events: sends what is waiting, and gives up on whoever does not read."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from badcjobs.web.access import HEADERS
from badcjobs.web.changes import opening_text
from badcjobs.web.hub import Hub, Listener
from badcjobs.web.operations import EVENTS

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]


class EventStream:
    """The answer to a listener, as an ASGI application."""

    def __init__(self, hub: Hub, listener: Listener) -> None:
        self._hub = hub
        self._listener = listener

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Talk until the listener leaves, is too slow, or the server ends."""
        talk = asyncio.ensure_future(self._talk(send))
        left = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({talk, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._hub.leave(self._listener)
            for task in (talk, left):
                task.cancel()
            await asyncio.gather(talk, left, return_exceptions=True)
        if self._listener.too_slow:
            # What it has not taken is still in a buffer: an ordinary end would wait for it for ever.
            scope.get("state", {}).get("abort", _nothing)()

    async def _talk(self, send: Send) -> None:
        headers = {**HEADERS, "content-type": EVENTS, "x-accel-buffering": "no"}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        await self._say(send, opening_text())
        listener = self._listener
        while not listener.too_slow:
            while listener.waiting and not listener.too_slow:
                await self._say(send, listener.waiting.popleft())
            if listener.over:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            listener.news.clear()
            await listener.news.wait()

    async def _say(self, send: Send, text: bytes) -> None:
        try:
            body: Message = {"type": "http.response.body", "body": text, "more_body": True}
            await asyncio.wait_for(send(body), self._hub.patience_s)
        except asyncio.TimeoutError:
            self._listener.too_slow = True


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _nothing() -> None:
    """Be what ends a connection where the server gives us no way to."""
