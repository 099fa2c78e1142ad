"""The queue of a task: chunks that wait, chunks that wait for their next try, and chunks in flight."""

from __future__ import annotations

import heapq
import itertools
import math
import threading
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from badcjobs.model import Chunk
from badcjobs.seams import Clock


class Batch(NamedTuple):
    """The chunks that a worker takes in one call."""

    chunks: list[Chunk]
    alone: bool = False  # no other chunk may be in the engine with them
    apart: bool = False  # alone, and the engine must not share its device through MPS, because they may break it


Fits = Callable[[Chunk], bool]  # whether one more chunk can be finished in time; if so, its time is reserved


class Entry(NamedTuple):
    """A waiting chunk; the smallest entry comes first."""

    is_fresh: bool
    negative_length_s: float
    number: int
    chunk: Chunk


@dataclass(eq=False)
class WorkQueue:
    """Hands out chunks to worker threads, the longest first; a chunk comes again only after ``put_back``.

    ``take`` blocks while chunks in flight may still come back, and returns None when no work is left or the queue
    drains. ``more`` never blocks: it gives further chunks to a worker that already has some.
    """

    clock: Clock
    _: KW_ONLY
    workers: int
    wants: int  # how many chunks a worker holds
    _workers_ending: int = 0  # workers that were asked to finish, so that they can take suspects
    _in_flight: int = 0
    _complete: bool = False
    _draining: bool = False
    _paused_until_s: float = -math.inf
    _shares_left: int = 1
    WINDOW = 16_384  # the most chunks that wait here: a job of a million chunks never has all in memory

    def __post_init__(self) -> None:
        self._waiting: list[Entry] = []  # sorted
        self._suspects: deque[Batch] = deque()  # batches that must be alone
        self._delayed: list[tuple[float, int, Batch]] = []
        self._sequence = itertools.count()
        self._changed = threading.Condition()
        self.change_workers(0)  # at least one, even for a task without workers

    @property
    def room(self) -> int:
        """How many more chunks the queue accepts; 0 while it is half full, so that the database is read rarely."""
        with self._changed:
            waiting = len(self._waiting)
            if waiting > self.WINDOW // 2:
                return 0
            return self.WINDOW - waiting

    def add(self, chunks: Sequence[Chunk], *, complete: bool) -> None:
        """Add fresh chunks; ``complete``: the source has no more."""
        with self._changed:
            self._waiting += [self._entry(chunk, is_fresh=True) for chunk in chunks]
            self._waiting.sort()
            self._complete = complete
            if chunks:
                self._shares_left = self.workers
            self._changed.notify_all()

    def change_workers(self, change: int) -> None:
        """Change the number of workers; wake those that wait, so that a retired one can stop."""
        with self._changed:
            self.workers = max(1, self.workers + change)
            self._changed.notify_all()

    def take(self, fits: Fits, over: Callable[[], bool]) -> Batch | None:
        """Return the next batch; block until there is one; None: no more work, or none that fits into the time.

        ``over``: whether this worker must stop; called at every change.
        """
        with self._changed:
            while not (self._draining or over()):
                pause_s = self._paused_until_s - self.clock.monotonic_s()
                if pause_s > 0:
                    self._changed.wait(pause_s)
                    continue
                batch = self._next_batch(fits)
                if batch.chunks:
                    self._in_flight += len(batch.chunks)
                    return batch
                if self._waiting or self._suspects:
                    return None  # it will not fit later either: the time left only decreases
                if self._complete and not (self._delayed or self._in_flight):
                    return None
                self._changed.wait(self._until_due_s())
            return None

    def more(self, wanted: int, *, idle: int, fits: Fits) -> list[Chunk] | None:
        """Return up to ``wanted`` chunks for a worker that has some; None: take no more, because suspects wait.

        Near the end of the work it returns only as many as the worker can start now (``idle``).
        """
        with self._changed:
            self._release_delayed()
            if self._draining or self.clock.monotonic_s() < self._paused_until_s:
                return []
            if len(self._suspects) > self._workers_ending:
                self._workers_ending += 1
                return None
            spare = len(self._waiting) - self.workers * self.wants  # beyond one batch for each worker
            fresh = self._pop_fitting(max(idle, min(wanted, spare)), fits)
            self._in_flight += len(fresh)
            return fresh

    def upcoming(self, count: int) -> list[Chunk]:
        """Return the chunks that are handed out next, without taking them; empty while the queue drains."""
        with self._changed:
            if self._draining:
                return []
            return [entry.chunk for entry in self._waiting[:count]]

    def finish(self) -> None:
        """Record that a chunk in flight is done or failed for good."""
        with self._changed:
            self._in_flight -= 1
            if self._in_flight == 0:  # a blocked ``take`` waits for this
                self._changed.notify_all()

    def put_back(
        self,
        chunks: list[Chunk],
        *,
        delay_s: float = 0.0,
        alone: bool = False,
        apart: bool = False,
    ) -> None:
        """Return chunks in flight to the queue, to be tried again after a delay.

        ``alone``: these chunks together, without others; ``apart``: and without MPS.
        """
        with self._changed:
            self._in_flight -= len(chunks)
            due_s = self.clock.monotonic_s() + delay_s
            batch = Batch(chunks, alone=alone or apart, apart=apart)
            heapq.heappush(self._delayed, (due_s, next(self._sequence), batch))
            self._changed.notify_all()

    def pause(self, seconds: float) -> None:
        """Hand out no chunk for a while."""
        with self._changed:
            self._paused_until_s = self.clock.monotonic_s() + seconds

    def drain(self) -> None:
        """Hand out no further chunk."""
        with self._changed:
            self._draining = True
            self._changed.notify_all()

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _entry(self, chunk: Chunk, *, is_fresh: bool) -> Entry:
        # A chunk of unknown length may be the longest: it comes first.
        length_s = math.inf if chunk.audio_s is None else chunk.audio_s
        return Entry(is_fresh, -length_s, next(self._sequence), chunk)

    def _pop_fitting(self, count: int, fits: Fits) -> list[Chunk]:
        """Take the next chunks that fit into the time; if the longest does not fit, a shorter one may."""
        taken: list[Chunk] = []
        too_long = math.nan  # chunks of one length all fit or all do not
        index = 0
        while len(taken) < count and index < len(self._waiting):
            entry = self._waiting[index]
            if entry.negative_length_s != too_long and fits(entry.chunk):
                taken.append(self._waiting.pop(index).chunk)
            else:
                too_long = entry.negative_length_s
                index += 1
        return taken

    def _next_batch(self, fits: Fits) -> Batch:
        self._release_delayed()
        if self._suspects and fits(self._suspects[0].chunks[0]):
            self._workers_ending = max(0, self._workers_ending - 1)
            return self._suspects.popleft()

        size = min(self.wants, math.ceil(len(self._waiting) / self._shares_left))
        if size:
            self._shares_left = self._shares_left - 1 or self.workers
        return Batch(self._pop_fitting(size, fits))

    def _until_due_s(self) -> float | None:
        """Return the time until the next delayed batch is due; None: there is none."""
        if not self._delayed:
            return None
        due_s = self._delayed[0][0]
        return max(0.0, due_s - self.clock.monotonic_s())

    def _release_delayed(self) -> None:
        now_s = self.clock.monotonic_s()
        while self._delayed and self._delayed[0][0] <= now_s:
            batch = heapq.heappop(self._delayed)[2]
            if batch.alone:
                self._suspects.append(batch)
                continue
            for chunk in batch.chunks:
                insort(self._waiting, self._entry(chunk, is_fresh=False))
