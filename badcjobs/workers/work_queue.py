"""The one queue of a task: chunks waiting, resting before their next try, and in flight."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Sequence

from badcjobs.model import Chunk
from badcjobs.seams import Clock


class WorkQueue:
    """Hands out batches to worker threads; a chunk is handed out again only after ``put_back``.

    ``take`` blocks while others' chunks in flight may still come back, and returns None when there
    is nothing left to do or the queue drains.
    """

    # Whole shares are cut here, so that a million chunks are never in memory at once.
    LONGEST_SHARE = 20_000

    def __init__(self, clock: Clock, *, workers: int, whole_share: bool) -> None:
        self._clock = clock
        self._workers = max(1, workers)
        self._whole_share = whole_share
        self._waiting: deque[Chunk] = deque()
        self._ready: deque[list[Chunk]] = deque()  # batches that must stay together, and alone
        self._resting: list[tuple[float, int, list[Chunk]]] = []
        self._sequence = itertools.count()
        self._shares_left = self._workers
        self._in_flight = 0
        self._complete = False
        self._draining = False
        self._changed = threading.Condition()

    @property
    def room(self) -> int:
        """How many more chunks the queue would like to hold."""
        wanted = self.LONGEST_SHARE * self._workers if self._whole_share else 64 * self._workers
        with self._changed:
            return max(0, wanted - len(self._waiting))

    def add(self, chunks: Sequence[Chunk], *, complete: bool) -> None:
        """Add fresh chunks; ``complete``: the source has no more."""
        with self._changed:
            self._waiting.extend(chunks)
            self._complete = complete
            if chunks:
                self._shares_left = self._workers
            self._changed.notify_all()

    def take(self) -> list[Chunk] | None:
        """Return the next batch; block until there is one; None: no more work."""
        with self._changed:
            while not self._draining:
                batch = self._next_batch()
                if batch:
                    self._in_flight += len(batch)
                    return batch
                if self._is_over():
                    return None
                self._changed.wait(self._rest_s())
            return None

    def finish(self, count: int = 1) -> None:
        """Take note that chunks in flight are settled."""
        with self._changed:
            self._in_flight -= count
            self._changed.notify_all()

    def put_back(self, batch: list[Chunk], *, rest_s: float = 0.0) -> None:
        """Return chunks in flight to the queue, to be tried again together after a rest."""
        with self._changed:
            self._in_flight -= len(batch)
            heapq.heappush(self._resting, (self._clock.monotonic_s() + rest_s, next(self._sequence), batch))
            self._changed.notify_all()

    def drain(self) -> None:
        """Hand out nothing any more."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    def _next_batch(self) -> list[Chunk]:
        now_s = self._clock.monotonic_s()
        while self._resting and self._resting[0][0] <= now_s:
            self._ready.append(heapq.heappop(self._resting)[2])
        if self._ready:
            return self._ready.popleft()
        size = min(self._fair_share(), len(self._waiting))
        return [self._waiting.popleft() for _ in range(size)]

    def _fair_share(self) -> int:
        if not self._whole_share:
            return 1
        share = math.ceil(len(self._waiting) / self._shares_left)
        self._shares_left = max(1, self._shares_left - 1)
        return min(share, self.LONGEST_SHARE)

    def _is_over(self) -> bool:
        return self._complete and not (self._waiting or self._ready or self._resting or self._in_flight)

    def _rest_s(self) -> float | None:
        return max(0.0, self._resting[0][0] - self._clock.monotonic_s()) if self._resting else None
