"""The one queue of a task: chunks waiting, resting before their next try, and in flight."""

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
    """What a worker takes at once."""

    chunks: list[Chunk]
    alone: bool = False  # suspects: nothing else may be in the engine with them
    lean: bool = False  # and the engine does with as little memory as it can


Fits = Callable[[Chunk], bool]  # says whether one more chunk will be finished in time, and reckons with it if so


def anything_fits(chunk: Chunk) -> bool:
    """Be the ``fits`` of a task whose time has no end."""
    return True


class WorkQueue:
    """Hands out chunks to worker threads, the longest first; a chunk comes again only after ``put_back``.

    ``take`` blocks while others' chunks in flight may still come back, and returns None when there
    is nothing left to do or the queue drains. ``more`` never blocks: it keeps a worker fed that has some already.
    """

    WINDOW = 16_384  # so many wait here at most: a million chunks are never in memory at once

    def __init__(self, clock: Clock, *, workers: int, wants: int) -> None:
        self._clock = clock
        self._workers = max(1, workers)
        self._wants = wants  # how many chunks a worker likes to hold
        self._waiting: list[tuple[bool, float, int, Chunk]] = []
        self._suspects: deque[Batch] = deque()
        self._resting: list[tuple[float, int, Batch]] = []
        self._sequence = itertools.count()
        self._shares_left = self._workers
        self._summoned = 0  # workers that come to an end for the sake of suspects
        self._in_flight = 0
        self._complete = False
        self._draining = False
        self._changed = threading.Condition()

    @property
    def room(self) -> int:
        """How many more chunks the queue would like; 0 while it is half full, so that the source is asked rarely."""
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

    def hire(self, workers: int = 1) -> None:
        """Share out the work among so many workers more (or fewer); one that waits looks whether it is to end."""
        with self._changed:
            self._workers = max(1, self._workers + workers)
            self._changed.notify_all()

    def take(
        self, fits: Fits = anything_fits, over: Callable[[], bool] = lambda: False, *, lean: bool = False
    ) -> Batch | None:
        """Return the next batch; block until there is one; None: no more work, or none that fits into the time.

        ``over``: whether this worker is to end; it is looked at whenever something changes. ``lean``: whether its
        engine is so now, and would rather stay so than start anew.
        """
        with self._changed:
            while not (self._draining or over()):
                batch = self._next_batch(fits, lean)
                if batch.chunks:
                    self._in_flight += len(batch.chunks)
                    return batch
                if self._waiting or self._suspects:
                    return None  # what does not fit now never will: the time only gets shorter
                if self._complete and not (self._resting or self._in_flight):
                    return None
                due_s = self._resting[0][0] if self._resting else None
                self._changed.wait(None if due_s is None else max(0.0, due_s - self._clock.monotonic_s()))
            return None

    def more(self, wanted: int, *, idle: int, fits: Fits = anything_fits) -> list[Chunk] | None:
        """Return up to ``wanted`` chunks for a worker that holds some; None: come to an end, suspects wait.

        Near the end of the work there are only as many as the worker could begin now (``idle``).
        """
        with self._changed:
            self._end_rests()
            if self._draining:
                return []
            if len(self._suspects) > self._summoned:
                self._summoned += 1
                return None
            plenty = len(self._waiting) - self._workers * self._wants
            count = min(len(self._waiting), max(idle, min(wanted, plenty)))
            fresh = self._pop_fitting(count, fits)
            self._in_flight += len(fresh)
            return fresh

    def upcoming(self, count: int) -> list[Chunk]:
        """Return the chunks that are handed out next, without taking them; none while the queue drains."""
        with self._changed:
            waiting = [] if self._draining else self._waiting
            # Walk down the heap: a few steps for each, where sorting all that wait would be thousands.
            found: list[Chunk] = []
            frontier = [(entry, 0) for entry in waiting[:1]]
            while frontier and len(found) < count:
                (*_, chunk), index = heapq.heappop(frontier)
                found.append(chunk)
                for child in range(2 * index + 1, min(2 * index + 3, len(waiting))):
                    heapq.heappush(frontier, (waiting[child], child))
            return found

    def finish(self, count: int = 1) -> None:
        """Take note that chunks in flight are settled."""
        with self._changed:
            self._in_flight -= count
            if self._in_flight == 0:  # what a blocked ``take`` waits for
                self._changed.notify_all()

    def put_back(self, chunks: list[Chunk], *, rest_s: float = 0.0, alone: bool = False, lean: bool = False) -> None:
        """Return chunks in flight to the queue, to be tried again after a rest.

        ``alone``: together, without others; ``lean``: so too, and with as little memory as can be.
        """
        with self._changed:
            self._in_flight -= len(chunks)
            due_s = self._clock.monotonic_s() + rest_s
            heapq.heappush(self._resting, (due_s, next(self._sequence), Batch(chunks, alone or lean, lean)))
            self._changed.notify_all()

    def drain(self) -> None:
        """Hand out nothing any more."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _push(self, chunk: Chunk, *, first: bool = False) -> None:
        # An unknown length may be the longest of all.
        length_s = math.inf if chunk.audio_s is None else chunk.audio_s
        heapq.heappush(self._waiting, (not first, -length_s, next(self._sequence), chunk))

    def _pop_fitting(self, count: int, fits: Fits) -> list[Chunk]:
        """Take the next chunks that fit: where the longest does not, a shorter one may."""
        taken: list[Chunk] = []
        while len(taken) < count and self._waiting:
            if fits(self._waiting[0][3]):
                taken.append(heapq.heappop(self._waiting)[3])
                continue
            # Chunks of one length fit all or not at all: ask about one of each, the longest first.
            first_of = {entry[1]: entry for entry in reversed(self._waiting)}
            shorter = next((first_of[length] for length in sorted(first_of) if fits(first_of[length][3])), None)
            if shorter is None:
                break
            self._waiting.remove(shorter)
            heapq.heapify(self._waiting)
            taken.append(shorter[3])
        return taken

    def _next_batch(self, fits: Fits, lean: bool) -> Batch:
        self._end_rests()
        for number, batch in enumerate(self._suspects):
            if batch.lean == lean:  # first those for which the worker need not start its engine anew
                self._suspects.rotate(-number)
                break
        if self._suspects and fits(self._suspects[0].chunks[0]):
            self._summoned = max(0, self._summoned - 1)
            return self._suspects.popleft()
        size = min(self._wants, math.ceil(len(self._waiting) / self._shares_left))
        if size:
            self._shares_left = self._shares_left - 1 or self._workers
        return Batch(self._pop_fitting(size, fits))

    def _end_rests(self) -> None:
        now_s = self._clock.monotonic_s()
        while self._resting and self._resting[0][0] <= now_s:
            batch = heapq.heappop(self._resting)[2]
            if batch.alone:
                self._suspects.append(batch)
            else:
                for chunk in batch.chunks:
                    self._push(chunk, first=True)
