"""The audio length from which a chunk no longer fits into the memory of a GPU model, learned from failures.

How a chunk that runs out of memory is followed:

    feed            SessionFeed notes the failure here: device model, length of the audio, the way that failed
    here            note_out_of_memory chooses the way of its next try, or finds that no way needs less memory
    supervise       asks circumstances: is there a smaller way? policy.POLICY has the response to the answer
    work_queue      puts it back, to be alone; a try with less memory is not counted as a retry
    worker_loop     asks way_of for each chunk in hand: one that must be lean goes back, for a session of its own
    feed            asks way_of once more: whole, or cut into pieces (``chunk_audio.PieceRun``)
    here            note_success keeps the limit that its failures give; ``learned`` passes it on to later tasks

The ways: usual → lean (one thread, no other chunk) → in 2 pieces, lean → in 4 → … Waiting chunks of its length follow
immediately. The limit is kept for later tasks only after a step has worked, and only if no audio of that length has
ever fitted: a GPU that is full of other processes gives no limit for its model.

Whether a chunk is processed lean is decided here and nowhere else.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from badcjobs.model import ChunkKey, WorkerPlan, not_none
from badcjobs.workers.chunk_audio import longest_piece_s, pieces_shorter_than
from badcjobs.workers.policy import Circumstance


@dataclass(frozen=True)
class MemoryLimit:
    """The shortest audio that did not fit into a GPU model; None: all of it fitted."""

    crowded_s: float | None = None  # with the usual threads
    alone_s: float | None = None  # lean

    def lower(self, other: MemoryLimit) -> MemoryLimit:
        """Return the stricter of two limits."""
        return MemoryLimit(
            crowded_s=_shorter(self.crowded_s, other.crowded_s),
            alone_s=_shorter(self.alone_s, other.alone_s),
        )


class Way(NamedTuple):
    """How an engine gets a chunk; a greater way needs less memory."""

    lean: bool = False
    pieces: int = 1


USUAL = Way()
LEAN = Way(lean=True)


@dataclass
class _OutOfMemory:
    """A chunk that ran out of memory: the device model, the way of its next try, the lengths that failed."""

    model: str
    way: Way = LEAN
    is_smallest: bool = False  # its last try failed, and no way needs less memory
    crowded_s: float | None = None
    alone_s: float | None = None


def model_of(plan: WorkerPlan) -> str:
    """Return the device model of a worker, the key of its limits."""
    if plan.device is None:
        return "cpu"
    return plan.device.name or "unknown"


@dataclass(eq=False)
class MemoryLimits:
    """Decides the way of each chunk on each GPU model; shared by all threads of a task."""

    limits: dict[str, MemoryLimit]  # by device model; at the start those that earlier tasks have learned
    learned: Callable[[str, MemoryLimit], None]  # gets each lower limit; must not raise

    def __post_init__(self) -> None:
        # (model, lean) → the longest audio that fitted in one piece
        self._fitted = defaultdict[tuple[str, bool], float](float)
        self._failures: dict[ChunkKey, _OutOfMemory] = {}
        self._lock = threading.Lock()

    def way_of(self, model: str, key: ChunkKey, audio_s: float | None) -> Way:
        """Return the way for this chunk: by its length, or one step after the way that failed."""
        with self._lock:
            limit = self._limit_now(model)
            failure = self._failures.get(key)
        way = _way_by_length(limit, audio_s)
        if failure is None:
            return way
        return max(way, failure.way)

    def circumstances(self, key: ChunkKey) -> set[Circumstance]:
        """Return whether a chunk that ran out of memory can be tried with less; nothing about other chunks."""
        failure = self._failures.get(key)
        if failure is None:
            return set()
        return {Circumstance.SMALLEST_WAY if failure.is_smallest else Circumstance.SMALLER_WAY}

    def note_out_of_memory(
        self,
        model: str,
        key: ChunkKey,
        audio_s: float | None,
        way: Way,
    ) -> None:
        """Record that a chunk did not fit; ``audio_s`` None: its length is not known, or it cannot be cut."""
        with self._lock:
            failure = self._failures.setdefault(key, _OutOfMemory(model))
            failure.model = model
            if not way.lean:
                failure.crowded_s = audio_s
                return

            failure.is_smallest = True
            if audio_s is None:
                return
            failure.alone_s = longest_piece_s(audio_s, way.pieces)
            pieces = pieces_shorter_than(audio_s, failure.alone_s)
            if pieces is not None:
                failure.way = Way(lean=True, pieces=pieces)
                failure.is_smallest = False

    def note_success(
        self,
        model: str,
        key: ChunkKey,
        audio_s: float | None,
        way: Way,
    ) -> None:
        """Record that a chunk was done; after a try with less memory, keep the limits that its failures give."""
        with self._lock:
            if way.pieces == 1 and audio_s is not None:
                for lean in {way.lean, True}:  # what fits with the usual threads fits lean, too
                    self._fitted[model, lean] = max(audio_s, self._fitted[model, lean])
            failure = self._failures.pop(key, None)
            if failure is None:
                return
            before = self.limits.get(model, MemoryLimit())
            after = self._lower(before, failure)
            self.limits[model] = after
        if after != before:
            self.learned(model, after)

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _limit_now(self, model: str) -> MemoryLimit:
        """Return the limit for waiting chunks, lower as long as failed chunks have a way left."""
        limit = self.limits.get(model, MemoryLimit())
        for failure in self._failures.values():
            if failure.model == model and not failure.is_smallest:
                limit = self._lower(limit, failure)
        return limit

    def _lower(self, limit: MemoryLimit, failure: _OutOfMemory) -> MemoryLimit:
        """Return a limit with the lengths that failed, unless audio of that length has fitted."""
        crowded_s, alone_s = failure.crowded_s, failure.alone_s
        if crowded_s is not None and crowded_s <= self._fitted[failure.model, False]:
            crowded_s = None
        if alone_s is not None and alone_s <= self._fitted[failure.model, True]:
            alone_s = None
        return limit.lower(MemoryLimit(crowded_s, alone_s))


def _way_by_length(limit: MemoryLimit, audio_s: float | None) -> Way:
    if audio_s is None:
        return USUAL
    if limit.alone_s is not None and audio_s >= limit.alone_s:
        return Way(lean=True, pieces=pieces_shorter_than(audio_s, limit.alone_s) or 1)
    if limit.crowded_s is not None and audio_s >= limit.crowded_s:
        return LEAN
    return USUAL


def _shorter(first_s: float | None, second_s: float | None) -> float | None:
    return min(not_none((first_s, second_s)), default=None)
