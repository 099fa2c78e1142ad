"""Looks once for everybody: however many ask or listen, there is one look at a time and one per interval.

Who listens (/api/events) gets a snapshot first, then what changes; who comes back gets what was missed."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

from badcjobs.errors import BadcjobsError
from badcjobs.live.answers import Item, Look, json_text
from badcjobs.live.connections import EVENTS, HEADERS
from badcjobs.seams import Clock

Result = TypeVar("Result")
Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]
Receive = Callable[[], Awaitable[Message]]
_Job = tuple[asyncio.AbstractEventLoop, "asyncio.Future[Any]", Callable[[], Any]]
_OPENING = b"retry: 2000\n\n"  # how long to wait before coming back, in ms
_BEAT_EVERY_S = 10.0
_MOST_LISTENERS = 256
_MOST_WAITING = 32  # events for one listener
_KEPT = 64  # events, for those who lost their connection for a moment


class NoLook(Exception):
    """There is nothing to tell now; the text says why."""


class Background:
    """Calls functions one after the other, away from the event loop."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        # A thread of an executor would be waited for at exit.
        threading.Thread(target=self._work, name="looking", daemon=True).start()

    async def call(self, function: Callable[[], Result]) -> Result:
        """Return what a function returns, or raise what it raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        self._jobs.put((loop, future, function))
        return await future

    def _work(self) -> None:
        while True:
            loop, future, function = self._jobs.get()
            result, problem = None, None
            try:
                result = function()
            except Exception as error:  # who asked gets it
                problem = error
            try:
                loop.call_soon_threadsafe(_settle, future, result, problem)
            except RuntimeError:
                return  # the loop is closed: the server has ended


def _settle(future: asyncio.Future[Any], result: Any, problem: Exception | None) -> None:
    if future.done():
        return
    if problem is None:
        future.set_result(result)
    else:
        future.set_exception(problem)


class Hub:
    """The newest look, and those who want to hear of the next."""

    def __init__(
        self,
        look: Callable[[], Look],
        background: Background,
        clock: Clock,
        *,
        interval_s: float = 2.0,
        always: bool = False,  # look also while nobody listens, so that there is something to show when somebody comes
        patience_s: float = 10.0,  # how long a question waits for a look, and a listener may leave an event unread
    ) -> None:
        self._take_look = look
        self._background = background
        self._clock = clock
        self.interval_s = interval_s
        self.patience_s = patience_s
        self._always = always
        self._journal = Journal(f"{clock.now_ms():x}")
        self._pending: asyncio.Task[Look] | None = None
        self._looked_at_s: float | None = None
        self._spoke_at_s = clock.monotonic_s()
        self._closed = False
        self._started_at_s = clock.monotonic_s()
        self.listeners: set[EventStream] = set()
        self.looks = 0
        self.look_ms: float | None = None
        self.trouble: str | None = None

    @property
    def last(self) -> Look | None:
        """The newest look, however old."""
        return self._journal.look

    @property
    def age_s(self) -> float | None:
        """How old it is."""
        return None if self._looked_at_s is None else self._clock.monotonic_s() - self._looked_at_s

    @property
    def uptime_s(self) -> float:
        """How long this goes on."""
        return self._clock.monotonic_s() - self._started_at_s

    async def latest(self) -> Look:
        """Return a look that is not older than the interval; raise NoLook when there is none in time."""
        if self.last is not None and self.age_s is not None and self.age_s < self.interval_s and not self.trouble:
            return self.last
        if self._pending is not None and self.trouble:
            raise NoLook(self.trouble)  # it hangs: nobody else needs to wait for it
        try:
            return await asyncio.wait_for(asyncio.shield(self._begin()), self.patience_s)
        except asyncio.TimeoutError:
            many = "" if self.last else "there are many files to read, or "
            self._complain(f"no answer within {self.patience_s:g} s: {many}a file system or a driver hangs")
            raise NoLook(self.trouble) from None

    def look_soon(self) -> None:
        """Have a look taken if the last one is old, and wait for nothing."""
        if self.age_s is None or self.age_s >= self.interval_s:
            self._begin()

    def _begin(self) -> asyncio.Task[Look]:
        """Begin to look, unless somebody has."""
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._look())
            # A failure is taken note of even where the one who asked has left.
            self._pending.add_done_callback(lambda task: None if task.cancelled() else task.exception())
        return self._pending

    async def _look(self) -> Look:
        began_s = self._clock.monotonic_s()
        try:
            look = await self._background.call(self._take_look)
        except (BadcjobsError, OSError) as error:
            words = error.what if isinstance(error, BadcjobsError) else str(error)
            self._complain(words)
            raise NoLook(words) from error
        finally:
            self._pending = None
        self._looked_at_s = self._clock.monotonic_s()
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
            self._tell(self._beat())

    def _beat(self) -> bytes:
        """Return a sign of life: when the last look was, and why there is no newer one."""
        at_ms = None if self.last is None else self.last.snapshot.at_ms
        return event_text("beat", json_text({"at_ms": at_ms, "trouble": self.trouble}))

    def _tell(self, event: bytes) -> None:
        self._spoke_at_s = self._clock.monotonic_s()
        for listener in self.listeners:
            listener.put(event)

    async def run(self) -> None:
        """Look again and again while somebody listens, until closed."""
        while not self._closed:
            if self.listeners or self._always:
                with suppress(NoLook):
                    await self.latest()
            if self._clock.monotonic_s() - self._spoke_at_s >= _BEAT_EVERY_S:
                self._tell(self._beat())
            await asyncio.sleep(self.interval_s)

    def join(self, last_id: str | None) -> EventStream:
        """Begin to listen, to what is known now and to what follows; raise NoLook when too many do."""
        if self._closed or len(self.listeners) >= _MOST_LISTENERS:
            raise NoLook(f"{len(self.listeners)} listen already")
        listener = EventStream(self._journal.catch_up(last_id), self.patience_s, self.listeners.discard)
        self.listeners.add(listener)
        self.look_soon()
        return listener

    def close(self) -> None:
        """Let every listener go and look no more."""
        self._closed = True
        for listener in self.listeners:
            listener.end()


class EventStream:
    """One connection to /api/events: what it has not been sent yet, and the answer to it as an ASGI application."""

    def __init__(self, first: list[bytes], patience_s: float, leave: Callable[[EventStream], None]) -> None:
        self._waiting = deque([_OPENING, *first])
        self._patience_s = patience_s
        self._leave = leave
        self._news = asyncio.Event()
        self._too_slow = False
        self._over = False

    def put(self, event: bytes) -> None:
        """Add an event; a listener that lets too many pile up is given up."""
        self._waiting.append(event)
        self._too_slow = self._too_slow or len(self._waiting) > _MOST_WAITING
        self._news.set()

    def end(self) -> None:
        """Let the connection end after what is waiting."""
        self._over = True
        self._news.set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Talk until the listener leaves, is too slow, or the server ends."""
        talk = asyncio.ensure_future(self._talk(send))
        left = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({talk, left}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._leave(self)
            for task in (talk, left):
                task.cancel()
            await asyncio.gather(talk, left, return_exceptions=True)
        if self._too_slow and (abort := scope.get("state", {}).get("abort")):
            abort()  # what it has not taken is still in a buffer: an ordinary end would wait for it for ever

    async def _talk(self, send: Send) -> None:
        headers = {**HEADERS, "content-type": EVENTS, "x-accel-buffering": "no"}
        encoded = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": 200, "headers": encoded})
        while not self._too_slow:
            while self._waiting and not self._too_slow:
                body = {"type": "http.response.body", "body": self._waiting.popleft(), "more_body": True}
                try:
                    await asyncio.wait_for(send(body), self._patience_s)
                except asyncio.TimeoutError:
                    self._too_slow = True
            if self._over:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
                return
            self._news.clear()
            await self._news.wait()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


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
    tasks, devices = _new(before.tasks, after.tasks), _new(before.devices, after.devices)
    gone = {
        "gone_tasks": [name for name in before.tasks if name not in after.tasks],
        "gone_devices": [key for key in before.devices if key not in after.devices],
    }
    rest = [(look.total, look.alerts, look.snapshot.remarks) for look in (before, after)]
    news = tasks or devices or any(gone.values()) or rest[0] != rest[1]
    return _text(gone, after, tasks, devices) if news else None


def _new(before: Mapping[str, Item], after: Mapping[str, Item]) -> dict[str, Item]:
    return {key: item for key, item in after.items() if before.get(key) is not item}


def _text(head: Mapping[str, Any], look: Look, tasks: Mapping[str, Item], devices: Mapping[str, Item]) -> str:
    snapshot = look.snapshot
    rest = {"at_ms": snapshot.at_ms, "total": look.total, "alerts": look.alerts, "remarks": snapshot.remarks}
    of_tasks, of_devices = (",".join(item.text for item in items.values()) for items in (tasks, devices))
    return f'{json_text({**head, **rest})[:-1]},"tasks":[{of_tasks}],"devices":[{of_devices}]}}'


class Journal:
    """The newest look, and the events that led to it. ``life`` tells this server's events from those of another."""

    def __init__(self, life: str) -> None:
        self._life = life
        self._number = 0
        self._events: deque[tuple[int, bytes]] = deque(maxlen=_KEPT)
        self.look: Look | None = None

    def take(self, look: Look) -> bytes | None:
        """Take note of a look; return the event for those who know the one before, None if there is nothing to say."""
        before, self.look = self.look, look
        text = None if before is None else change_text(before, look)
        if text is None:
            return None
        self._number += 1
        event = event_text("change", text, self._id)
        self._events.append((self._number, event))
        return event

    def catch_up(self, last_id: str | None) -> list[bytes]:
        """Return what somebody needs who knows all up to an event, or who knows nothing."""
        missed = self._since(last_id)
        if missed is not None:
            return missed
        return [] if self.look is None else [event_text("snapshot", snapshot_text(self.look), self._id)]

    @property
    def _id(self) -> str:
        return f"{self._life}-{self._number}"

    def _since(self, last_id: str | None) -> list[bytes] | None:
        life, _, number = (last_id or "").rpartition("-")
        if life != self._life or not (number.isascii() and number.isdecimal() and len(number) < 16):
            return None
        wanted = range(int(number) + 1, self._number + 1)
        found = [event for event_number, event in self._events if event_number in wanted]
        return found if len(found) == len(wanted) and int(number) <= self._number else None
