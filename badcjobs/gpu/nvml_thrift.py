"""Asks dear questions less often: what a call costs differs by a factor of a thousand between cards and drivers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

_DEAR_S = 0.5e-3  # who takes so long is left out the next time; who takes twice as long, the next two times
_MOST_TURNS = 4


class Thrift:
    """Knows how many turns one question is still left out."""

    def __init__(self, most_turns: int = _MOST_TURNS) -> None:
        self._most_turns = most_turns
        self._turns_off = 0
        self._took_before_s = 0.0

    def is_due(self) -> bool:
        """Say whether it is asked this time, and count the turn."""
        self._turns_off -= 1
        return self._turns_off < 0

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure the question while it is asked."""
        started_s = time.perf_counter()
        yield
        took_s = time.perf_counter() - started_s
        # The shorter of the last two: one that took long may only have been interrupted.
        self._turns_off = min(self._most_turns, int(min(took_s, self._took_before_s) / _DEAR_S))
        self._took_before_s = took_s

    def hurry(self) -> None:
        """Ask it the next time, whatever it costs."""
        self._turns_off = 0
