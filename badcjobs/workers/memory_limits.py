"""The audio length from which a chunk no longer fits into the memory of a GPU model, learned from failures. Pure.

A chunk that runs out of memory is tried with less: usual → lean (one thread, no other chunk) → in 2 pieces, lean → in
4 → … Waiting chunks of its length follow immediately. The limit is kept for later tasks only after a step has worked,
and only if no audio of that length has ever fitted: a GPU that is full of other processes gives no limit for its model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from badcjobs.model import ChunkKey, WorkerPlan
from badcjobs.workers.chunk_audio import longest_piece_s, pieces_shorter_than


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The shortest audio that did not fit into a GPU model; None: all of it fitted."""

    crowded_s: float | None = None  # with the usual threads
    alone_s: float | None = None  # lean

    def lower(self, other: MemoryLimit) -> MemoryLimit:
        """Return the stricter of two limits."""
        return MemoryLimit(_least(self.crowded_s, other.crowded_s), _least(self.alone_s, other.alone_s))


class Way(NamedTuple):
    """How an engine gets a chunk; a greater way needs less memory."""

    lean: bool = False
    pieces: int = 1


USUAL, LEAN = Way(), Way(lean=True)


@dataclass(slots=True)
class _OutOfMemory:
    """A chunk that ran out of memory: the device model, its next way (None: no way left), the lengths that failed."""

    model: str
    way: Way | None = None
    crowded_s: float | None = None
    alone_s: float | None = None


def model_of(plan: WorkerPlan) -> str:
    """Return the device model of a worker, the key of its limits."""
    return "cpu" if plan.device is None else plan.device.name or "unknown"


@dataclass(eq=False)
class MemoryLimits:
    """Decides the way of each chunk on each GPU model; shared by all threads of a task."""

    known: Mapping[str, MemoryLimit] | None = None  # from earlier tasks, by device model
    learned: Callable[[str, MemoryLimit], None] = lambda model, limit: None  # gets each lower limit; must not raise

    def __post_init__(self) -> None:
        self._limits = dict(self.known or {})
        self._fitted: dict[tuple[str, bool], float] = {}  # (model, lean) → the longest audio that fitted in one piece
        self._failures: dict[ChunkKey, _OutOfMemory] = {}
        self._lock = threading.Lock()

    def way_of(self, model: str, key: ChunkKey, audio_s: float | None) -> Way:
        """Return the way for this chunk: by its length, or one step after the way that failed."""
        with self._lock:
            limit, failure, way = self._limit_now(model), self._failures.get(key), USUAL
        if audio_s is not None and limit.alone_s is not None and audio_s >= limit.alone_s:
            way = Way(True, pieces_shorter_than(audio_s, limit.alone_s) or 1)
        elif audio_s is not None and limit.crowded_s is not None and audio_s >= limit.crowded_s:
            way = LEAN
        return way if failure is None or failure.way is None else max(way, failure.way)

    def ways_left(self, key: ChunkKey) -> bool | None:
        """Return whether a chunk that ran out of memory can be tried with less; None: it did not run out of memory."""
        failure = self._failures.get(key)
        return None if failure is None else failure.way is not None

    def note_out_of_memory(
        self, model: str, key: ChunkKey, audio_s: float | None, way: Way, *, beside_s: float | None = None
    ) -> None:
        """Record that a chunk did not fit; ``beside_s``: the longest audio in the engine at that moment.

        ``audio_s`` None: its length is not known, or it cannot be cut.
        """
        with self._lock:
            failure = self._failures.setdefault(key, _OutOfMemory(model))
            failure.model = model
            if not way.lean:
                longest_s = max((length for length in (audio_s, beside_s) if length is not None), default=None)
                failure.crowded_s = _least(failure.crowded_s, longest_s)
                failure.way = LEAN
            elif audio_s is None:
                failure.way = None
            else:
                piece_s = longest_piece_s(audio_s, way.pieces)
                failure.alone_s = _least(failure.alone_s, piece_s)
                pieces = pieces_shorter_than(audio_s, piece_s)
                failure.way = None if pieces is None else Way(True, pieces)

    def note_other_failure(self, key: ChunkKey) -> None:
        """Record that a chunk failed for another reason too: it gives no limit."""
        with self._lock:
            if (failure := self._failures.get(key)) is not None:
                failure.crowded_s = failure.alone_s = None

    def note_success(self, model: str, key: ChunkKey, audio_s: float | None, way: Way) -> None:
        """Record that a chunk was done; after a try with less memory, keep the limits that its failures give."""
        with self._lock:
            if way.pieces == 1 and audio_s is not None:
                self._fitted[model, way.lean] = max(audio_s, self._fitted.get((model, way.lean), 0.0))
            if (failure := self._failures.pop(key, None)) is None:
                return
            before = self._limits.get(model, MemoryLimit())
            after = self._limits[model] = self._lower(before, failure, way)
        if after != before:
            self.learned(model, after)

    # --- with the lock held ---------------------------------------------------------------------------------------

    def _limit_now(self, model: str) -> MemoryLimit:
        """Return the limit for waiting chunks, lower as long as failed chunks have a way left."""
        limit = self._limits.get(model, MemoryLimit())
        for failure in self._failures.values():
            if failure.model == model and failure.way is not None:
                limit = self._lower(limit, failure, failure.way)
        return limit

    def _lower(self, limit: MemoryLimit, failure: _OutOfMemory, way: Way) -> MemoryLimit:
        """Return the limit after a failed chunk was done this way."""
        usual_s, lean_s = (self._fitted.get((failure.model, lean), 0.0) for lean in (False, True))
        is_crowded = way.lean and (failure.crowded_s or 0.0) > usual_s
        is_alone = way.pieces > 1 and (failure.alone_s or 0.0) > max(usual_s, lean_s)
        found = MemoryLimit(failure.crowded_s if is_crowded else None, failure.alone_s if is_alone else None)
        return limit.lower(found)


def _least(one: float | None, other: float | None) -> float | None:
    return min((value for value in (one, other) if value is not None), default=None)
