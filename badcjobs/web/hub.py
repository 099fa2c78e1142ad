"""Looks once for everybody: however many ask or listen, there is one look at a time and one per interval."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from badcjobs.errors import BadcjobsError
from badcjobs.seams import Clock
from badcjobs.web.background import Background
from badcjobs.web.changes import Journal, beat_text
from badcjobs.web.look import Look

BEAT_EVERY_S = 10.0
_MOST_LISTENERS = 256
_MOST_WAITING = 32  # events for one listener


class NoLook(Exception):
    """There is nothing to tell now; the text says why."""


class Listener:
    """One connection to /api/events: what it has not been sent yet."""

    def __init__(self, first: list[bytes]) -> None:
        self.waiting = deque(first)
        self.news = asyncio.Event()
        self.too_slow = False
        self.over = False

    def put(self, event: bytes) -> None:
        """Add an event; whoever lets too many pile up is given up."""
        self.waiting.append(event)
        self.too_slow = self.too_slow or len(self.waiting) > _MOST_WAITING
        self.news.set()

    def end(self) -> None:
        """Let the connection end after what is waiting."""
        self.over = True
        self.news.set()


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
        self.listeners: set[Listener] = set()
        self.looks = 0
        self.look_ms: float | None = None
        self.trouble: str | None = None

    @property
    def last(self) -> Look | None:
        """The newest look, however old."""
        return self._journal.look

    @property
    def _at_ms(self) -> int | None:
        return None if self.last is None else self.last.at_ms

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
            self._pending.add_done_callback(_heard)
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
            self._tell(beat_text(self._at_ms, trouble))

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
            if self._clock.monotonic_s() - self._spoke_at_s >= BEAT_EVERY_S:
                self._tell(beat_text(self._at_ms, self.trouble))
            await asyncio.sleep(self.interval_s)

    def join(self, last_id: str | None) -> Listener:
        """Begin to listen, to what is known now and to what follows; raise NoLook when too many do."""
        if self._closed or len(self.listeners) >= _MOST_LISTENERS:
            raise NoLook(f"{len(self.listeners)} listen already")
        listener = Listener(self._journal.catch_up(last_id))
        self.listeners.add(listener)
        if self.age_s is None or self.age_s >= self.interval_s:
            self._begin()
        return listener

    def leave(self, listener: Listener) -> None:
        """Stop listening."""
        self.listeners.discard(listener)

    def close(self) -> None:
        """Let every listener go and look no more."""
        self._closed = True
        for listener in self.listeners:
            listener.end()


def _heard(task: asyncio.Task[Look]) -> None:
    """Take note of a failure even if whoever asked has left."""
    if not task.cancelled():
        task.exception()
