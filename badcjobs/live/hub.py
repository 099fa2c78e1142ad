"""Looks once for everybody: however many ask or listen, there is one look at a time and one per interval.

Who listens (/api/events) gets a snapshot first, then what changes; who comes back gets what was missed."""

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
from badcjobs.live.answers import Item, Look, json_text
from badcjobs.seams import Clock

Result = TypeVar("Result")
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
_OPENING = b"retry: 2000\n\n"  # how long to wait before coming back, in ms
_END = b""
_BEAT_EVERY_S = 10.0
_MOST_LISTENERS = 256
_MOST_WAITING = 32  # events for one listener
_KEPT = 64  # events, for those who lost their connection for a moment


def no_look(why: str) -> HTTPException:
    """Return the answer where there is nothing to show now."""
    return HTTPException(503, why, {"retry-after": "5"})


def what_is_wrong(error: BadcjobsError | OSError) -> str:
    """Return an error in one line."""
    return error.what if isinstance(error, BadcjobsError) else str(error)


class Background:
    """Calls functions one after the other, away from the event loop."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A thread of an executor would be waited for at exit.
        threading.Thread(target=self._work, name="looking", daemon=True).start()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns, or raise what it raises."""
        future: Future[Result] = Future()
        self._jobs.put((future, function))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, function = self._jobs.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # for the caller
                    future.set_exception(error)


@dataclass(slots=True)
class Hub:
    """The newest look, and those who want to hear of the next."""

    take_look: Callable[[], Look]
    clock: Clock
    interval_s: float = 2.0
    always: bool = False  # look also without listeners, so that there is a past to show when one comes
    patience_s: float = 10.0  # how long a question waits for a look
    listeners: set[EventStream] = field(default_factory=set)
    looks: int = 0
    look_ms: float | None = None
    trouble: str | None = None
    _background: Background = field(default_factory=Background)
    _pending: asyncio.Task[Look] | None = None
    _looked_at_s: float | None = None
    _closed: bool = False
    _journal: Journal = field(init=False)
    _started_at_s: float = field(init=False)
    _spoke_at_s: float = field(init=False)

    def __post_init__(self) -> None:
        self._journal = Journal(f"{self.clock.now_ms():x}")
        self._started_at_s = self._spoke_at_s = self.clock.monotonic_s()

    @property
    def last(self) -> Look | None:
        """The newest look, however old."""
        return self._journal.look

    @property
    def age_s(self) -> float | None:
        """How old it is."""
        return None if self._looked_at_s is None else self.clock.monotonic_s() - self._looked_at_s

    @property
    def uptime_s(self) -> float:
        """How long this goes on."""
        return self.clock.monotonic_s() - self._started_at_s

    async def latest(self) -> Look:
        """Return a look that is not older than the interval; raise a 503 when there is none in time."""
        if self.last is not None and self.age_s is not None and self.age_s < self.interval_s and not self.trouble:
            return self.last
        if self._pending is not None and self.trouble:
            raise no_look(self.trouble)  # it hangs: one waits for it, the others need not
        try:
            return await asyncio.wait_for(asyncio.shield(self._begin()), self.patience_s)
        except asyncio.TimeoutError:
            many = "" if self.last else "there are many files to read, or "
            trouble = f"no answer within {self.patience_s:g} s: {many}a file system or a driver hangs"
            self._complain(trouble)
            raise no_look(trouble) from None

    async def read(self, function: Callable[[], Result]) -> Result:
        """Read something besides the look; raise a 503 where that fails or takes too long."""
        try:
            return await asyncio.wait_for(self._background.call(function), self.patience_s)
        except asyncio.TimeoutError:
            raise no_look(f"no answer within {self.patience_s:g} s: a file system hangs") from None
        except (BadcjobsError, OSError) as error:  # the run was moved or removed since the look
            raise no_look(what_is_wrong(error)) from error

    def look_soon(self) -> None:
        """Have a look taken if the last one is old, and wait for nothing."""
        if self.age_s is None or self.age_s >= self.interval_s:
            self._begin()

    def _begin(self) -> asyncio.Task[Look]:
        """Begin to look, unless a look is under way."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._look())
            # A failure is taken note of even where the one who asked has left.
            self._pending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._pending

    async def _look(self) -> Look:
        began_s = self.clock.monotonic_s()
        try:
            look = await self._background.call(self.take_look)
        except (BadcjobsError, OSError) as error:
            self._complain(what_is_wrong(error))
            raise no_look(what_is_wrong(error)) from error
        finally:
            self._pending = None
        self._looked_at_s = self.clock.monotonic_s()
        self.look_ms = 1000 * (self._looked_at_s - began_s)
        self.looks += 1
        first = self.last is None
        change = self._journal.take(look)
        for event in self._journal.catch_up(None) if first else [change] if change else []:
            self._tell(event)
        self._complain(None)
        return look

    def _complain(self, trouble: str | None) -> None:
        if trouble != self.trouble:
            self.trouble = trouble
            self._beat()

    def _beat(self) -> None:
        """Send a sign of life: when the last look was, and why there is no newer one."""
        at_ms = None if self.last is None else self.last.snapshot.at_ms
        self._tell(event_text("beat", json_text({"at_ms": at_ms, "trouble": self.trouble})))

    def _tell(self, event: bytes) -> None:
        self._spoke_at_s = self.clock.monotonic_s()
        for listener in self.listeners:
            listener.put(event)

    async def run(self) -> None:
        """Look again and again while there are listeners, until closed."""
        while not self._closed:
            if self.listeners or self.always:
                with suppress(HTTPException):
                    await self.latest()
            if self.clock.monotonic_s() - self._spoke_at_s >= _BEAT_EVERY_S:
                self._beat()
            await asyncio.sleep(self.interval_s)

    def join(self, last_id: str | None) -> EventStream:
        """Begin to listen, to what is known now and to what follows; raise a 503 when too many do."""
        if self._closed or len(self.listeners) >= _MOST_LISTENERS:
            raise no_look(f"{len(self.listeners)} listen already")
        listener = EventStream([_OPENING, *self._journal.catch_up(last_id)], self.listeners.discard)
        self.listeners.add(listener)
        self.look_soon()
        return listener

    def close(self) -> None:
        """Let every listener go and look no more."""
        self._closed = True
        for listener in self.listeners:
            listener.put(_END)


class EventStream(StreamingResponse):
    """One connection to /api/events, and the events that it has not been sent yet."""

    def __init__(self, first: list[bytes], leave: Callable[[EventStream], None]) -> None:
        super().__init__(self._events(), headers={**HEADERS, "content-type": EVENTS, "x-accel-buffering": "no"})
        self._leave = leave
        self._abort: Callable[[], None] = lambda: None
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue()
        for event in first:
            self._waiting.put_nowait(event)

    def put(self, event: bytes) -> None:
        """Add an event, or the end; a listener that lets too many pile up is cut off."""
        self._waiting.put_nowait(event)
        if self._waiting.qsize() > _MOST_WAITING:
            self._abort()  # what it has not read is still in a buffer: an ordinary end would wait for it for ever

    async def _events(self) -> AsyncIterator[bytes]:
        while event := await self._waiting.get():
            yield event

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Talk until the listener leaves, is too slow, or the server ends."""
        self._abort = scope.get("state", {}).get("abort", self._abort)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave(self)


# --- events -----------------------------------------------------------------------------------------------------------


def event_text(name: str, data: str, event_id: str | None = None) -> bytes:
    """Return one server-sent event; JSON text has no line breaks."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {name}\ndata: {data}\n\n".encode("utf-8", "replace")


def snapshot_text(look: Look) -> str:
    """Return all of a look."""
    return _text({"title": look.snapshot.title, "of_run": look.snapshot.of_run}, look, look.tasks, look.devices)


def change_text(before: Look, after: Look) -> str | None:
    """Return what is new since another look; None: nothing."""
    tasks = {key: item for key, item in after.tasks.items() if before.tasks.get(key) is not item}
    devices = {key: item for key, item in after.devices.items() if before.devices.get(key) is not item}
    gone = {
        "gone_tasks": [name for name in before.tasks if name not in after.tasks],
        "gone_devices": [key for key in before.devices if key not in after.devices],
    }
    rest = [(look.total, look.alerts, look.snapshot.remarks) for look in (before, after)]
    news = tasks or devices or any(gone.values()) or rest[0] != rest[1]
    return _text(gone, after, tasks, devices) if news else None


def _text(head: Mapping[str, Any], look: Look, tasks: Mapping[str, Item], devices: Mapping[str, Item]) -> str:
    snapshot = look.snapshot
    rest = {"at_ms": snapshot.at_ms, "total": look.total, "alerts": look.alerts, "remarks": snapshot.remarks}
    of_tasks, of_devices = (",".join(item.text for item in items.values()) for items in (tasks, devices))
    return f'{json_text({**head, **rest})[:-1]},"tasks":[{of_tasks}],"devices":[{of_devices}]}}'


@dataclass(slots=True)
class Journal:
    """The newest look, and the events that led to it. ``life`` tells this server's events from those of another."""

    life: str
    look: Look | None = None
    _number: int = 0
    _events: deque[tuple[str, bytes]] = field(default_factory=lambda: deque(maxlen=_KEPT))  # with the id before each

    @property
    def _id(self) -> str:
        return f"{self.life}-{self._number}"

    def take(self, look: Look) -> bytes | None:
        """Take note of a look; return the event for those who know the one before, None if there is nothing to say."""
        before, self.look = self.look, look
        text = None if before is None else change_text(before, look)
        if text is None:
            return None
        last_id = self._id
        self._number += 1
        event = event_text("change", text, self._id)
        self._events.append((last_id, event))
        return event

    def catch_up(self, last_id: str | None) -> list[bytes]:
        """Return what a listener needs that knows all up to an event, or nothing yet."""
        known = [before for before, _ in self._events]
        if last_id in known:
            return [event for _, event in self._events][known.index(last_id) :]
        if self.look is None or last_id == self._id:
            return []
        return [event_text("snapshot", snapshot_text(self.look), self._id)]
