"""Share one snapshot between all clients: at most one is read at a time, and one per interval.

A client of /ws gets everything first, then changes; after a reconnect, everything again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from badcjobs.errors import BadcjobsError, error_line
from badcjobs.live.documents import Documents, Items, json_text
from badcjobs.live.snapshot import Document
from badcjobs.seams import Clock

Result = TypeVar("Result")
_HEARTBEAT_EVERY_S = 10.0
_TOO_SLOW = "no answer in time: many files to read, or a file system or a driver hangs"
_PAUSE_S = 0.05  # between the parts of a large run


def unavailable(why: str) -> HTTPException:
    """Return a 503 response: there is no data now."""
    return HTTPException(503, why, {"retry-after": "5"})


class Background:
    """Run functions one after another in a thread, outside the event loop."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A daemon thread: Python would wait for the threads of an executor at exit.
        threading.Thread(target=self._work, name="badcjobs reader", daemon=True).start()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Return the result of a function, or raise its exception."""
        future: Future[Result] = Future()
        self._jobs.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, function = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # raised in the caller
                    future.set_exception(error)


@dataclass
class Hub:
    """The newest documents, and the clients of /ws that follow them."""

    read_documents: Callable[[], Documents]
    clock: Clock
    interval_s: float = 2.0
    patience_s: float = 10.0  # how long a request waits for data
    sending_s: float = 60.0  # a listener that takes longer for one message is disconnected
    listeners: int = 0
    last: Documents | None = None  # the newest, however old
    looks: int = 0
    trouble: str | None = None
    _background: Background = field(default_factory=Background)
    _pending: asyncio.Task[Documents] | None = None
    _read_at_s: float | None = None
    started_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at_s = self.clock.monotonic_s()

    # --- reading ---

    @property
    def age_s(self) -> float | None:
        """The age of the newest documents."""
        if self._read_at_s is None:
            return None
        return self.clock.monotonic_s() - self._read_at_s

    @property
    def _is_partial(self) -> bool:
        """Whether a large run is being read for the first time, in parts."""
        return self.last is not None and self.last.snapshot.unread > 0

    async def run(self) -> None:
        """Read repeatedly, also without clients, so that there is a history to show."""
        while True:
            with suppress(HTTPException):
                await self.latest()
            await asyncio.sleep(self.interval_s)

    async def latest(self) -> Documents:
        """Return documents not older than the interval, or what is read so far; raise a 503 if not ready in time."""
        if self._pending is not None and self.trouble:
            raise unavailable(self.trouble)  # reading hangs: only one request waits for it
        self.refresh()
        if self.last is not None and not self.trouble and (self._is_partial or self._pending is None):
            return self.last
        try:
            return await asyncio.wait_for(asyncio.shield(self._start_reading()), self.patience_s)
        except asyncio.TimeoutError:
            self.trouble = _TOO_SLOW
            raise unavailable(_TOO_SLOW) from None

    async def read(self, function: Callable[[], Result]) -> Result:
        """Read something else in the background; raise a 503 if that fails or takes too long."""
        try:
            return await asyncio.wait_for(self._background.call(function), self.patience_s)
        except asyncio.TimeoutError:
            raise unavailable(_TOO_SLOW) from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since
            raise unavailable(error_line(error)) from error

    def refresh(self) -> None:
        """Start reading if the newest documents are too old or not complete; do not wait."""
        age_s = self.age_s
        if age_s is None or age_s >= self.interval_s or self._is_partial:
            self._start_reading()

    def _start_reading(self) -> asyncio.Task[Documents]:
        """Start reading, unless that is in progress already."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
            # Retrieve the exception even if no request waits for it any more.
            self._pending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._pending

    async def _read(self) -> Documents:
        try:
            documents = await self._background.call(self.read_documents)
        except (BadcjobsError, OSError) as error:
            self.trouble = error_line(error)
            raise unavailable(self.trouble) from error
        finally:
            self._pending = None

        self._read_at_s = self.clock.monotonic_s()
        self.looks += 1
        self.last = documents
        self.trouble = None
        if self._is_partial:
            asyncio.get_running_loop().call_later(_PAUSE_S, self.refresh)
        return documents

    # --- listeners ---

    async def follow(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages to a listener until it leaves, reads too slowly, or the server ends; an ASGI application."""
        socket = WebSocket(scope, receive, send)
        self.listeners += 1
        try:
            await socket.accept()
            work = [asyncio.ensure_future(part) for part in (self._push(socket), _wait_for_end(socket))]
            finished, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
            for task in finished:
                task.result()  # raises its exception
        except asyncio.TimeoutError:
            scope["state"]["abort"]()  # a normal close would wait forever for the unread buffer
        except WebSocketDisconnect:
            pass
        finally:
            self.listeners -= 1

    async def _push(self, socket: WebSocket) -> None:
        """Send everything, then what has changed; after a while without changes, and at new trouble, a beat."""
        sent: Documents | None = None
        sent_trouble: str | None = None
        sent_at_s = self.clock.monotonic_s()
        while True:
            message = None
            with suppress(HTTPException):
                documents = await self.latest()
                message = message_of_change(sent, documents)
                sent = documents
            is_quiet = self.clock.monotonic_s() - sent_at_s >= _HEARTBEAT_EVERY_S
            if message is None and (is_quiet or self.trouble != sent_trouble):
                at_ms = self.last and self.last.snapshot.at_ms
                message = _message("beat", json_text({"at_ms": at_ms, "trouble": self.trouble}))
            if message is not None:
                sent_trouble = self.trouble
                sent_at_s = self.clock.monotonic_s()
                await asyncio.wait_for(socket.send_text(message), self.sending_s)
            await asyncio.sleep(_PAUSE_S if self._is_partial else self.interval_s)


async def _wait_for_end(socket: WebSocket) -> None:
    """Ignore what a client sends until it leaves."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


def message_of_change(before: Documents | None, now: Documents) -> str | None:
    """Return the message with what has changed, or with everything; None: nothing has changed."""
    if before is None:
        return _message("snapshot", _state_text(now.state, now.tasks, now.devices))
    tasks = _changed(before.tasks, now.tasks)
    devices = _changed(before.devices, now.devices)
    gone = {
        "gone_tasks": [name for name in before.tasks if name not in now.tasks],
        "gone_devices": [key for key in before.devices if key not in now.devices],
    }
    is_same = before.state | {"at_ms": 0} == now.state | {"at_ms": 0}
    if is_same and not tasks and not devices and not any(gone.values()):
        return None
    return _message("change", _state_text(now.state | gone, tasks, devices))


def _message(event: str, data: str) -> str:
    """Return one message for /ws; ``data`` is JSON."""
    text = f'{{"event":"{event}","data":{data}}}'
    return text.encode("utf-8", "replace").decode()  # a file name may not be valid Unicode


def _changed(before: Items, now: Items) -> Items:
    return {key: item for key, item in now.items() if before.get(key) is not item}


def _state_text(state: Document, tasks: Items, devices: Items) -> str:
    """Return the state as JSON, with some of the tasks and devices, whose texts are ready."""
    begin = json_text(state).removesuffix("}")
    task_texts = ",".join(item.text for item in tasks.values())
    device_texts = ",".join(item.text for item in devices.values())
    return f'{begin},"tasks":[{task_texts}],"devices":[{device_texts}]}}'
