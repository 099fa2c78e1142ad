"""Share one snapshot between all clients: at most one is read at a time, and one per interval.

A client of /api/events receives a snapshot first, then changes; after a reconnect, the changes that it missed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, TypeVar

from starlette.exceptions import HTTPException
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from badcjobs.errors import BadcjobsError
from badcjobs.live.documents import Documents, Item, json_text
from badcjobs.seams import Clock

Result = TypeVar("Result")
EVENTS = "text/event-stream"
# The page loads its scripts and styles from this server only, and connects to no other server.
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
_OPENING = b"retry: 2000\n\n"  # ms until a client reconnects
_END = b""
_HEARTBEAT_EVERY_S = 10.0
_MAX_LISTENERS = 256
_MAX_WAITING = 32  # events for one listener
_KEPT = 64  # events, for clients that reconnect


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
    listeners: set[EventStream] = field(default_factory=set)
    looks: int = 0
    look_ms: float | None = None
    trouble: str | None = None
    _background: Background = field(default_factory=Background)
    _pending: asyncio.Task[Documents] | None = None
    _read_at_s: float | None = None
    _closed: bool = False
    started_at_s: float = field(init=False)
    _journal: Journal = field(init=False)
    _sent_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._journal = Journal(f"{self.clock.now_ms():x}")
        self.started_at_s = self._sent_at_s = self.clock.monotonic_s()

    @property
    def last(self) -> Documents | None:
        """The newest documents, however old."""
        return self._journal.documents

    @property
    def age_s(self) -> float | None:
        """The age of the newest documents."""
        return None if self._read_at_s is None else self.clock.monotonic_s() - self._read_at_s

    async def latest(self) -> Documents:
        """Return documents not older than the interval; raise a 503 if they are not ready in time."""
        if self.last is not None and self.age_s is not None and self.age_s < self.interval_s and not self.trouble:
            return self.last
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
            raise unavailable(f"no answer within {self.patience_s:g} s: a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since
            raise unavailable(error_line(error)) from error

    def refresh(self) -> None:
        """Start reading if the newest documents are too old; do not wait."""
        if self.age_s is None or self.age_s >= self.interval_s:
            self._start_reading()

    def _start_reading(self) -> asyncio.Task[Documents]:
        """Start reading, unless that is in progress already."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._read())
            # Retrieve the exception even if no request waits for it any more.
            self._pending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._pending

    async def _read(self) -> Documents:
        began_s = self.clock.monotonic_s()
        try:
            documents = await self._background.call(self.read_documents)
        except (BadcjobsError, OSError) as error:
            self._set_trouble(error_line(error))
            raise unavailable(error_line(error)) from error
        finally:
            self._pending = None
        self._read_at_s = self.clock.monotonic_s()
        self.look_ms = 1000 * (self._read_at_s - began_s)
        self.looks += 1
        first = self.last is None
        change = self._journal.take(documents)
        for event in self._journal.catch_up(None) if first else [change] if change else []:
            self._send(event)
        self._set_trouble(None)
        return documents

    def _set_trouble(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._send_heartbeat()

    def _send_heartbeat(self) -> None:
        """Send a heartbeat: the time of the newest documents, and why there are no newer ones."""
        at_ms = None if self.last is None else self.last.snapshot.at_ms
        self._send(event_text("beat", json_text({"at_ms": at_ms, "trouble": self.trouble})))

    def _send(self, event: bytes) -> None:
        self._sent_at_s = self.clock.monotonic_s()
        for listener in self.listeners:
            listener.put(event)

    async def run(self) -> None:
        """Read repeatedly while there are listeners, until closed."""
        while not self._closed:
            if self.listeners or self.always:
                with suppress(HTTPException):
                    await self.latest()
            if self.clock.monotonic_s() - self._sent_at_s >= _HEARTBEAT_EVERY_S:
                self._send_heartbeat()
            await asyncio.sleep(self.interval_s)

    def join(self, last_id: str | None) -> EventStream:
        """Add a listener for the current state and all changes; raise a 503 if there are too many."""
        if self._closed or len(self.listeners) >= _MAX_LISTENERS:
            raise unavailable(f"too many listeners ({len(self.listeners)})")
        listener = EventStream([_OPENING, *self._journal.catch_up(last_id)], self.listeners.discard)
        self.listeners.add(listener)
        self.refresh()
        return listener

    def close(self) -> None:
        """Disconnect every listener and stop reading."""
        self._closed = True
        for listener in self.listeners:
            listener.put(_END)


class EventStream(StreamingResponse):
    """One connection to /api/events, and the events still to be sent."""

    def __init__(self, first: list[bytes], on_close: Callable[[EventStream], None]) -> None:
        super().__init__(self._events(), headers={**HEADERS, "content-type": EVENTS, "x-accel-buffering": "no"})
        self._on_close = on_close
        self._abort: Callable[[], None] = lambda: None
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        for event in first:
            self._waiting.put_nowait(event)

    def put(self, event: bytes) -> None:
        """Add an event, or the end; a listener that reads too slowly is disconnected."""
        self._waiting.put_nowait(event)
        if self._waiting.qsize() > _MAX_WAITING:
            self._abort()  # a normal close would wait forever for the unread buffer

    async def _events(self) -> AsyncIterator[bytes]:
        while event := await self._waiting.get():
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send events until the listener disconnects, is too slow, or the server ends."""
        self._abort = scope.get("state", {}).get("abort", self._abort)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close(self)


# --- events -----------------------------------------------------------------------------------------------------------


def event_text(name: str, data: str, event_id: str | None = None) -> bytes:
    """Return one server-sent event; ``data`` is JSON without line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def snapshot_text(documents: Documents) -> str:
    """Return all documents as JSON."""
    head = {"title": documents.snapshot.title, "of_run": documents.snapshot.of_run}
    return _text(head, documents, documents.tasks, documents.devices)


def change_text(before: Documents, after: Documents) -> str | None:
    """Return the changes between two states as JSON; None: nothing has changed."""
    tasks = {key: item for key, item in after.tasks.items() if before.tasks.get(key) is not item}
    devices = {key: item for key, item in after.devices.items() if before.devices.get(key) is not item}
    gone = {
        "gone_tasks": [name for name in before.tasks if name not in after.tasks],
        "gone_devices": [key for key in before.devices if key not in after.devices],
    }
    rest = [(documents.total, documents.alerts, documents.snapshot.remarks) for documents in (before, after)]
    changed = tasks or devices or any(gone.values()) or rest[0] != rest[1]
    return _text(gone, after, tasks, devices) if changed else None


def _text(head: Mapping[str, Any], documents: Documents, tasks: Mapping[str, Item], devices: Mapping[str, Item]) -> str:
    snapshot = documents.snapshot
    rest = {"at_ms": snapshot.at_ms, "total": documents.total, "alerts": documents.alerts, "remarks": snapshot.remarks}
    of_tasks, of_devices = (",".join(item.text for item in items.values()) for items in (tasks, devices))
    return f'{json_text({**head, **rest})[:-1]},"tasks":[{of_tasks}],"devices":[{of_devices}]}}'


@dataclass(slots=True)
class Journal:
    """The newest documents, and the latest change events. ``server_id`` distinguishes restarts of the server."""

    server_id: str
    documents: Documents | None = None
    _number: int = 0
    _events: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT))  # (previous id, event)

    @property
    def _id(self) -> str:
        return f"{self.server_id}-{self._number}"

    def take(self, documents: Documents) -> bytes | None:
        """Store new documents; return the change event for listeners, None if nothing has changed."""
        before, self.documents = self.documents, documents
        text = None if before is None else change_text(before, documents)
        if text is None:
            return None
        last_id = self._id
        self._number += 1
        event = event_text("change", text, self._id)
        self._events.append((last_id, event))
        return event

    def catch_up(self, last_id: str | None) -> list[bytes]:
        """Return the events that a listener needs after ``last_id``; None: it is new."""
        known = [before for before, _ in self._events]
        if last_id in known:
            return [event for _, event in self._events][known.index(last_id) :]
        if self.documents is None or last_id == self._id:
            return []
        return [event_text("snapshot", snapshot_text(self.documents), self._id)]
