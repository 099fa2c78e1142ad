"""The queue of a task: chunks that wait, chunks that wait for their next try, and chunks in flight."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from badcjobs.model import Chunk
from badcjobs.seams import Clock


@dataclass(frozen=True)
class Batch:
    """The chunks that a worker takes in one call."""

    chunks: list[Chunk]
    alone: bool = False  # suspects: no other chunk may be in the engine with them
    lean: bool = False  # alone, and the engine uses as little memory as possible
    apart: bool = False  # may break the engine: it must not share its device through MPS


Fits = Callable[[Chunk], bool]  # whether one more chunk can be finished in time; if so, its time is reserved


class WorkQueue:
    """Hands out chunks to worker threads, the longest first; a chunk comes again only after ``put_back``.

    ``take`` blocks while chunks in flight may still come back, and returns None when no work is left or the queue
    drains. ``more`` never blocks: it gives further chunks to a worker that already has some.
    """

    WINDOW = 16_384  # the most chunks that wait here: a job of a million chunks never has all in memory

    def __init__(self, clock: Clock, *, workers: int, wants: int) -> None:
        self._clock = clock
        self._workers = max(1, workers)
        self._wants = wants  # how many chunks a worker holds
        self._waiting: list[tuple[bool, float, int, Chunk]] = []
        self._suspects: deque[Batch] = deque()
        self._delayed: list[tuple[float, int, Batch]] = []
        self._sequence = itertools.count()
        self._shares_left = self._workers
        self._workers_ending = 0  # workers that were asked to finish, so that they can take suspects
        self._in_flight = 0
        self._complete = False
        self._draining = False
        self._paused_until_s = -math.inf
        self._changed = threading.Condition()

    @property
    def room(self) -> int:
        """How many more chunks the queue accepts; 0 while it is half full, so that the database is read rarely."""
        with self._changed:
            waiting = len(self._waiting)
            return 0 if waiting > self.WINDOW // 2 else self.WINDOW - waiting

    def add(self, chunks: Sequence[Chunk], *, complete: bool) -> None:
        """Add fresh chunks; ``complete``: the source has no more."""
        with self._changed:
            for chunk in chunks:
                self._push(chunk)
            self._complete = complete
            if chunks:
                self._shares_left = self._workers
            self._changed.notify_all()

    def change_workers(self, change: int) -> None:
        """Change the number of workers; wake those that wait, so that a retired one can stop."""
        with self._changed:
            self._workers = max(1, self._workers + change)
            self._changed.notify_all()

    def take(
        self, fits: Fits = lambda chunk: True, over: Callable[[], bool] = lambda: False, *, lean: bool = False
    ) -> Batch | None:
        """Return the next batch; block until there is one; None: no more work, or none that fits into the time.

        ``over``: whether this worker must stop; called at every change. ``lean``: whether its engine is lean now;
        lean batches are preferred then, because they need no restart.
        """
        with self._changed:
            while not (self._draining or over()):
                if (pause_s := self._paused_until_s - self._clock.monotonic_s()) > 0:
                    self._changed.wait(pause_s)
                    continue
                batch = self._next_batch(fits, lean)
                if batch.chunks:
                    self._in_flight += len(batch.chunks)
                    return batch
                if self._waiting or self._suspects:
                    return None  # it will not fit later either: the time left only decreases
                if self._complete and not (self._delayed or self._in_flight):
                    return None
                due_s = self._delayed[0][0] if self._delayed else None
                self._changed.wait(None if due_s is None else max(0.0, due_s - self._clock.monotonic_s()))
            return None

    def more(self, wanted: int, *, idle: int, fits: Fits = lambda chunk: True) -> list[Chunk] | None:
        """Return up to ``wanted`` chunks for a worker that has some; None: take no more, because suspects wait.

        Near the end of the work it returns only as many as the worker can start now (``idle``).
        """
        with self._changed:
            self._release_delayed()
            if self._draining or self._clock.monotonic_s() < self._paused_until_s:
                return []
            if len(self._suspects) > self._workers_ending:
                self._workers_ending += 1
                return None
            plenty = len(self._waiting) - self._workers * self._wants
            count = min(len(self._waiting), max(idle, min(wanted, plenty)))
            fresh = self._pop_fitting(count, fits)
            self._in_flight += len(fresh)
            return fresh

    def upcoming(self, count: int) -> list[Chunk]:
        """Return the chunks that are handed out next, without taking them; empty while the queue drains."""
        with self._changed:
            waiting = [] if self._draining else self._waiting
            # Walk down the heap: a few steps per chunk, much less than sorting all chunks.
            found: list[Chunk] = []
            frontier = [(entry, 0) for entry in waiting[:1]]
            while frontier and len(found) < count:
                (*_, chunk), index = heapq.heappop(frontier)
                found.append(chunk)
                for child in range(2 * index + 1, min(2 * index + 3, len(waiting))):
                    heapq.heappush(frontier, (waiting[child], child))
            return found

    def finish(self, count: int = 1) -> None:
        """Record that chunks in flight are done or failed for good."""
        with self._changed:
            self._in_flight -= count
            if self._in_flight == 0:  # a blocked ``take`` waits for this
                self._changed.notify_all()

    def put_back(self, chunks: list[Chunk], *, delay_s: float = 0.0, alone: bool = False, lean: bool = False) -> None:
        """Return chunks in flight to the queue, to be tried again after a delay.

        ``alone``: these chunks together, without others, and without MPS; ``lean``: without others, with as little
        memory as possible.
        """
        with self._changed:
            self._in_flight -= len(chunks)
            due_s = self._clock.monotonic_s() + delay_s
            batch = Batch(chunks, alone=alone or lean, lean=lean, apart=alone and not lean)
            heapq.heappush(self._delayed, (due_s, next(self._sequence), batch))
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Hand out no chunk for a while."""
        with self._changed:
            self._paused_until_s = self._clock.monotonic_s() + seconds

    def drain(self) -> None:
        """Hand out no further chunk."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _push(self, chunk: Chunk, *, first: bool = False) -> None:
        # A chunk of unknown length may be the longest: it comes first.
        length_s = math.inf if chunk.audio_s is None else chunk.audio_s
        heapq.heappush(self._waiting, (not first, -length_s, next(self._sequence), chunk))

    def _pop_fitting(self, count: int, fits: Fits) -> list[Chunk]:
        """Take the next chunks that fit into the time; if the longest does not fit, a shorter one may."""
        taken: list[Chunk] = []
        while len(taken) < count and self._waiting:
            if fits(self._waiting[0][3]):
                taken.append(heapq.heappop(self._waiting)[3])
                continue
            # Chunks of the same length all fit or all do not: test one of each length, the longest first.
            first_of = {entry[1]: entry for entry in reversed(self._waiting)}
            shorter = next((first_of[length] for length in sorted(first_of) if fits(first_of[length][3])), None)
            if shorter is None:
                break
            self._waiting.remove(shorter)
            heapq.heapify(self._waiting)
            taken.append(shorter[3])
        return taken

    def _next_batch(self, fits: Fits, lean: bool) -> Batch:
        self._release_delayed()
        for number, batch in enumerate(self._suspects):
            if batch.lean == lean:  # prefer batches for which the worker need not restart its engine
                self._suspects.rotate(-number)
                break
        if self._suspects and fits(self._suspects[0].chunks[0]):
            self._workers_ending = max(0, self._workers_ending - 1)
            return self._suspects.popleft()
        size = min(self._wants, math.ceil(len(self._waiting) / self._shares_left))
        if size:
            self._shares_left = self._shares_left - 1 or self._workers
        return Batch(self._pop_fitting(size, fits))

    def _release_delayed(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._delayed and self._delayed[0][0] <= now_s:
            batch = heapq.heappop(self._delayed)[2]
            if batch.alone:
                self._suspects.append(batch)
            else:
                for chunk in batch.chunks:
                    self._push(chunk, first=True)
