"""How long all chunks of a source are, in its order: a few bytes where neighbours are equal, eight each at worst."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

_UNKNOWN = 2**32 - 1
_LONGEST_MS = 2**32 - 2  # 49 days; whatever is longer fits into no walltime, and counts in full in the sum


class Lengths:
    """The lengths of chunks, one after another; None: nobody could measure it."""

    def __init__(self) -> None:
        self.rows = 0
        self.unknown = 0
        self.empty = 0
        self.known_ms = 0
        self.longest_ms = 0
        self._ms = array("I")
        self._many = array("I")
        self._last = -1

    def add(self, length_ms: int | None) -> None:
        """Take the next chunk."""
        self.rows += 1
        if length_ms is None:
            self.unknown += 1
            length_ms = _UNKNOWN
        else:
            self.known_ms += length_ms
            if length_ms > self.longest_ms:
                self.longest_ms = length_ms
            elif not length_ms:
                self.empty += 1
            if length_ms > _LONGEST_MS:
                length_ms = _LONGEST_MS
        if length_ms == self._last:
            self._many[-1] += 1
        else:
            self._ms.append(length_ms)
            self._many.append(1)
            self._last = length_ms

    @property
    def mean_ms(self) -> int:
        """The mean of those that are known and have audio, in whole milliseconds; 0: there are none."""
        known = self.rows - self.unknown - self.empty
        return self.known_ms // known if known else 0

    @property
    def total_ms(self) -> int:
        """All of them together; one that is not known counts as the mean of the others."""
        return self.known_ms + self.unknown * self.mean_ms

    def runs(self) -> Iterator[tuple[int, int]]:
        """Yield length and number of neighbours that are equally long."""
        mean_ms = self.mean_ms
        for length_ms, many in zip(self._ms, self._many, strict=True):
            yield (mean_ms if length_ms == _UNKNOWN else length_ms), many

    def longer_than(self, limit_ms: float) -> int:
        """Count those that are longer."""
        return sum(many for length_ms, many in self.runs() if length_ms > limit_ms)
