"""What one pass over all sources carries along: the row number, the keys seen, the mistakes."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator
from typing import Protocol

from badcjobs.manifest.mistakes import Mistakes
from badcjobs.manifest.shards import Shard
from badcjobs.model import Chunk

_BUCKETS = 64  # looking for repeats takes memory for one bucket at a time


class Seen:
    """Finds out whether keys repeat, with eight bytes per key.

    It keeps hashes, so a repeat is a suspicion (for a million keys, once in thirty million times a wrong one).
    """

    def __init__(self) -> None:
        self._buckets = [array("q") for _ in range(_BUCKETS)]

    def add(self, key: Hashable) -> None:
        number = hash(key)
        self._buckets[number % _BUCKETS].append(number)

    def repeated(self) -> Counter[int]:
        """Map each hash that came more than once to its number of repeats: once again is 1."""
        found: Counter[int] = Counter()
        for bucket in self._buckets:
            if len(set(bucket)) < len(bucket):
                found.update({number: times - 1 for number, times in Counter(bucket).items() if times > 1})
        return found


class Walk:
    """One reading of all sources, for the chunks of one shard."""

    def __init__(self, shard: Shard, mistakes: Mistakes) -> None:
        self.mistakes = mistakes
        self.seen = Seen()
        self.rows = 0
        self._shard = shard

    def takes(self, recording_id: str, chunk_id: str) -> bool:
        """Count one more row and say whether it is ours."""
        row_number = self.rows
        self.rows += 1
        if recording_id and chunk_id:
            self.seen.add((recording_id, chunk_id))
        return self._shard.takes(row_number)


class Source(Protocol):
    """One kind of SOURCE. Both methods read it from its beginning, in the same order, every time."""

    @property
    def name(self) -> str:
        """Return it as the user wrote it, for messages."""

    @property
    def description(self) -> str:
        """Return what it is, for logs."""

    @property
    def without_rows(self) -> str:
        """Return what to say when no row came: a phrase that goes on after the name."""

    def chunks(self, walk: Walk) -> Iterator[Chunk]:
        """Yield our rows; note the mistakes of all rows, and of our rows' audio."""

    def identities(self) -> Iterator[tuple[int, tuple[str, str]]]:
        """Yield the line (0: it has none) and identity of every row, looking at nothing else."""
