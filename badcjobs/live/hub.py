"""Share one snapshot between all clients: at most one is read at a time, and one per interval.

A client of /ws gets everything first, then changes; after a reconnect, everything again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket

from badcjobs.errors import BadcjobsError
from badcjobs.live.documents import Documents, Items, json_text
from badcjobs.live.snapshot import Document
from badcjobs.seams import Clock

Result = TypeVar("Result")
_HEARTBEAT_EVERY_S = 10.0
_PAUSE_S = 0.05  # between the parts of a large run
_MAX_LISTENERS = 256
_MAX_WAITING = 32  # messages for one listener
_SERVER_ENDS = 1001  # the code of a closing WebSocket


def unavailable(why: str) -> HTTPException:
    """Return a 503 response: there is no data now."""
    return HTTPException(503, why, {"retry-after": "5"})


def error_line(error: BadcjobsError | OSError) -> str:
    """Return an error as one line."""
    return error.what if isinstance(error, BadcjobsError) else str(error)


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


@dataclass(slots=True)
class Hub:
    """The newest documents, and the listeners that receive the next ones."""

    read_documents: Callable[[], Documents]
    clock: Clock
    interval_s: float = 2.0
    always: bool = False  # read also without listeners, so that there is a history to show
    patience_s: float = 10.0  # how long a request waits for data
    listeners: set[Listener] = field(default_factory=set)
    last: Documents | None = None  # the newest, however old
    looks: int = 0
    trouble: str | None = None
    _background: Background = field(default_factory=Background)
    _pending: asyncio.Task[Documents] | None = None
    _read_at_s: float | None = None
    _closed: bool = False
    started_at_s: float = field(init=False)
    _sent_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.started_at_s = self._sent_at_s = self.clock.monotonic_s()

    # --- reading ---

    @property
    def age_s(self) -> float | None:
        """The age of the newest documents."""
        if self._read_at_s is None:
            return None
        return self.clock.monotonic_s() - self._read_at_s

    @property
    def _is_due(self) -> bool:
        return self.age_s is None or self.age_s >= self.interval_s

    async def latest(self) -> Documents:
        """Return documents not older than the interval, or what is read so far; raise a 503 if not ready in time."""
        last = self.last
        # A large run is being read for the first time, in parts.
        if last is not None and not self.trouble and (last.snapshot.unread or not self._is_due):
            return last
        if self._pending is not None and self.trouble:
            raise unavailable(self.trouble)  # reading hangs: only one request waits for it
        try:
            return await asyncio.wait_for(asyncio.shield(self._start_reading()), self.patience_s)
        except asyncio.TimeoutError:
            many = "" if self.last else "many files to read, or "
            trouble = f"no answer within {self.patience_s:g} s: {many}a file system or a driver hangs"
            self._set_trouble(trouble)
            raise unavailable(trouble) from None

    async def read(self, function: Callable[[], Result]) -> Result:
        """Read something else in the background; raise a 503 if that fails or takes too long."""
        try:
            return await asyncio.wait_for(self._background.call(function), self.patience_s)
        except asyncio.TimeoutError:
            raise unavailable(f"no answer within {self.patience_s:g} s: many tasks, or a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since
            raise unavailable(error_line(error)) from error

    def refresh(self) -> None:
        """Start reading if the newest documents are too old; do not wait."""
        if self._is_due:
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
            self._set_trouble(error_line(error))
            raise unavailable(error_line(error)) from error
        finally:
            self._pending = None

        self._read_at_s = self.clock.monotonic_s()
        self.looks += 1
        before = self.last
        self.last = documents
        if before is None:
            self._send(_everything(documents))
        else:
            self._send_change(before, documents)
        self._set_trouble(None)
        return documents

    async def run(self) -> None:
        """Read repeatedly while there are listeners, until closed."""
        while not self._closed:
            while self.last is not None and self.last.snapshot.unread and not self._closed:
                with suppress(HTTPException):
                    await self._start_reading()
                await asyncio.sleep(_PAUSE_S)
            if self.listeners or self.always:
                with suppress(HTTPException):
                    await self.latest()
            if self.clock.monotonic_s() - self._sent_at_s >= _HEARTBEAT_EVERY_S:
                self._send_heartbeat()
            await asyncio.sleep(self.interval_s)

    # --- messages ---

    def _send_change(self, before: Documents, now: Documents) -> None:
        """Send what has changed."""
        tasks = _changed(before.tasks, now.tasks)
        devices = _changed(before.devices, now.devices)
        gone = {
            "gone_tasks": [name for name in before.tasks if name not in now.tasks],
            "gone_devices": [key for key in before.devices if key not in now.devices],
        }
        is_same = before.state | {"at_ms": 0} == now.state | {"at_ms": 0}
        if not is_same or tasks or devices or any(gone.values()):
            self._send(_message("change", _state_text(now.state | gone, tasks, devices)))

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        """Send the time of the newest documents, and why there are no newer ones."""
        at_ms = self.last and self.last.snapshot.at_ms
        self._send(_message("beat", json_text({"at_ms": at_ms, "trouble": self.trouble})))

    def _send(self, message: str) -> None:
        self._sent_at_s = self.clock.monotonic_s()
        for listener in self.listeners:
            listener.put(message)

    # --- listeners ---

    def join(self) -> Listener:
        """Add a listener for the current state and all changes; raise a 503 if there are too many."""
        if self._closed or len(self.listeners) >= _MAX_LISTENERS:
            raise unavailable(f"too many listeners ({len(self.listeners)})")
        listener = Listener(on_close=self.listeners.discard)
        if self.last is not None:
            listener.put(_everything(self.last))
        self.listeners.add(listener)
        self.refresh()
        return listener

    def close(self) -> None:
        """Disconnect every listener and stop reading."""
        self._closed = True
        for listener in self.listeners:
            listener.put(None)


class Listener:
    """One client of /ws, and the messages still to be sent to it; an ASGI application for its connection."""

    def __init__(self, on_close: Callable[[Listener], None]) -> None:
        self._on_close = on_close
        self._abort: Callable[[], None] = lambda: None
        self._waiting: asyncio.Queue[str | None] = asyncio.Queue()

    def put(self, message: str | None) -> None:
        """Add a message, or None, the end; a client that reads too slowly is disconnected."""
        self._waiting.put_nowait(message)
        if self._waiting.qsize() > _MAX_WAITING:
            self._abort()  # a normal close would wait forever for the unread buffer

    async def messages(self) -> AsyncIterator[str]:
        """Yield messages until the end."""
        while True:
            message = await self._waiting.get()
            if message is None:
                return
            yield message

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send messages until the client leaves, reads too slowly, or the server ends."""
        self._abort = scope.get("state", {}).get("abort", self._abort)
        socket = WebSocket(scope, receive, send)
        try:
            await socket.accept()
            work = [asyncio.ensure_future(part) for part in (self._push(socket), _wait_for_end(socket))]
            await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
            for task in work:
                task.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        finally:
            self._on_close(self)

    async def _push(self, socket: WebSocket) -> None:
        async for message in self.messages():
            await socket.send_text(message)
        await socket.close(_SERVER_ENDS)


async def _wait_for_end(socket: WebSocket) -> None:
    """Ignore what a client sends until it leaves."""
    while (await socket.receive())["type"] != "websocket.disconnect":
        pass


def _everything(documents: Documents) -> str:
    """Return the message with everything."""
    return _message("snapshot", _state_text(documents.state, documents.tasks, documents.devices))


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
