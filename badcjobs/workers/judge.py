"""Judges one chunk at a time: done, try again (when, and in which company), failed for good, or poison.

Touches nothing; it only remembers the chunks that did not work at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from badcjobs.model import Chunk, ChunkResult
from badcjobs.workers.failures import DEATHS, OUT_OF_MEMORY, TERMINATED, WORKER_DIED

_DEATHS_OF_POISON = 2
_MOST_STEPS_DOWN = 16  # as usual, lean, in 2, 4, 8, … pieces; more is a ladder that leads nowhere
# Slurm's TERM reaches workers as well as us, and nobody but an outsider sends KILL: no chunk is guilty at once.
_FORGIVEN = {TERMINATED: 3, WORKER_DIED: 2}


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a chunk is tried again."""

    retries: int = 2
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    hopeless_after: int = 25  # chunks failed for good with none done: the engine does not work here

    def rest_s(self, failures: int) -> float:
        """Return how long a chunk rests after its n-th failure."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** (failures - 1))


@dataclass(frozen=True, slots=True)
class Sentence:
    """What becomes of a chunk: its state, and for one that is tried again its rest and its company."""

    status: str
    rest_s: float = 0.0
    alone: bool = False
    lean: bool = False  # with as little memory as can be


@dataclass
class _Record:
    """What a chunk that did not work at once has been through."""

    total: int = 0
    failures: int = 0
    deaths: int = 0
    forgiven: int = 0
    steps_down: int = 0  # out of memory, each time with less than before


class Judge:
    """Knows every chunk that did not work at once, until it is settled."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._records: dict[tuple[str, str], _Record] = {}

    def try_number(self, chunk: Chunk) -> int:
        """Return which try of this chunk the present one is, from 1."""
        record = self._records.get(chunk.key)
        return 1 if record is None else record.total + 1

    def sentence(self, result: ChunkResult, *, ways_left: bool | None = None) -> Sentence:
        """Judge a result; uncharged ones are tried again in the company that the caller chooses.

        ``ways_left``: whether a chunk that ran out of memory can be tried with less (None: nobody says). As long as it
        can, that is a step forward and no retry; when it cannot, the same again would be the same again.
        """
        if result.ok:
            self._records.pop(result.chunk.key, None)
            return Sentence("done")
        record = self._records.setdefault(result.chunk.key, _Record())
        record.total += 1
        if not result.charged:
            return Sentence("pending")
        if ways_left and record.steps_down < _MOST_STEPS_DOWN:
            record.steps_down += 1
            return Sentence("pending", alone=True, lean=True)
        if ways_left is not None:
            del self._records[result.chunk.key]
            return Sentence("failed")
        record.failures += 1
        is_death = result.error_class in DEATHS
        record.deaths += is_death
        if record.deaths < _DEATHS_OF_POISON and record.failures <= self._policy.retries:
            # What takes its process down, or does not fit beside others, is tried with nobody to take along.
            alone = is_death or result.error_class == OUT_OF_MEMORY
            return Sentence("pending", self._policy.rest_s(record.failures), alone)
        del self._records[result.chunk.key]
        return Sentence("poison" if record.deaths >= _DEATHS_OF_POISON else "failed")

    def forgives(self, chunk: Chunk, error_class: str | None) -> bool:
        """Say whether a chunk is innocent of its process' end: not if it happens to the same one again and again."""
        limit = _FORGIVEN.get(error_class or "", 0)
        if not limit:
            return False
        record = self._records.setdefault(chunk.key, _Record())
        record.forgiven += 1
        return record.forgiven <= limit
