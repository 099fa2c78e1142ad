"""Cuts a source into shares of equal length, not of equal number: each a stretch of neighbouring chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from badcjobs.plan.lengths import Lengths


@dataclass(frozen=True, slots=True)
class Share:
    """What one array task gets."""

    rows: int
    audio_ms: int


def share_out(lengths: Lengths, tasks: int) -> list[Share]:
    """Return the shares of so many tasks, at most one for each chunk; none is empty.

    Each task takes its part of what is left, to within half a chunk, so that one very long chunk does not leave those
    behind it with nothing. Whole numbers only: the same source gives the same shares on every machine.
    """
    tasks = max(1, min(tasks, lengths.rows))
    left_ms = sum(length_ms * many for length_ms, many in lengths.runs())
    shares, runs = [], _Runs(lengths.runs(), lengths.rows)
    for tasks_left in range(tasks, 0, -1):
        share = runs.take(left_ms, tasks_left)
        left_ms -= share.audio_ms
        shares.append(share)
    return shares


class _Runs:
    """What nobody has taken yet."""

    def __init__(self, runs: Iterator[tuple[int, int]], rows: int) -> None:
        self._runs = runs
        self._rows = rows
        self._length_ms = self._many = 0

    def take(self, left_ms: int, tasks_left: int) -> Share:
        """Take the share of the next task: a part of what is left, and at least one chunk."""
        rows = audio_ms = 0
        most = self._rows - (tasks_left - 1)  # each of the others needs one
        while rows < most:
            if not self._many:
                self._length_ms, self._many = next(self._runs)
            wanted = most - rows
            if tasks_left > 1:
                wanted = min(wanted, max(_fitting(left_ms, tasks_left, audio_ms, self._length_ms), 0 if rows else 1))
            taken = min(wanted, self._many)
            rows, audio_ms, self._many = rows + taken, audio_ms + taken * self._length_ms, self._many - taken
            if self._many:
                break
        self._rows -= rows
        return Share(rows, audio_ms)


def _fitting(left_ms: int, tasks_left: int, audio_ms: int, length_ms: int) -> int:
    """Return how many chunks of a length have their middle within the part of the next task."""
    if length_ms == 0:
        return 2**62
    room = 2 * left_ms - (2 * audio_ms + length_ms) * tasks_left
    return room // (2 * length_ms * tasks_left) + 1 if room >= 0 else 0
