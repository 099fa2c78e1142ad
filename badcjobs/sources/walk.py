"""What one pass over all sources carries along: how to cut, the row number, the keys seen, the mistakes."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace

from badcjobs.errors import BadInput
from badcjobs.model import AS_IT_COMES, Chunk, Cutting
from badcjobs.sources.audio_files import NoAudio, ReadHeader, read_header
from badcjobs.sources.look_ahead import stay
from badcjobs.sources.mistakes import Mistakes, Remarks


@dataclass(frozen=True, slots=True)
class Shard:
    """Share number ``index`` (from 0) of ``count``.

    Row numbers count from 0 over all sources, so the shards of one count are disjoint and together complete.
    """

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise _refusal(f"{self.index}/{self.count}", self.count)

    def takes(self, row_number: int) -> bool:
        return row_number % self.count == self.index

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


WHOLE = Shard(0, 1)


def parse_shard(text: str) -> Shard:
    """Read ``2/8``: the third of eight shards."""
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text.strip())
    if match is None:
        raise _refusal(text, 8)
    return Shard(int(match[1]), int(match[2]))


def _refusal(text: str, count: int) -> BadInput:
    last = f"; the last of {count} is {count - 1}/{count}" if count else ""
    why = f"a shard is I/N: I counts from 0 and is below N{last}"
    return BadInput(f"no such shard: {text!r}", why=why, fix=f"--shard 0/{count or 1}")


# --- walk -------------------------------------------------------------------------------------------------------------

_BUCKETS = 64  # looking for repeats takes memory for one bucket at a time


class SeenKeys:
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

    def __init__(
        self,
        shard: Shard,
        mistakes: Mistakes,
        cutting: Cutting = AS_IT_COMES,
        remarks: Remarks | None = None,
        read_header: ReadHeader = read_header,
        while_waiting: Callable[[], None] = stay,
    ) -> None:
        self.mistakes = mistakes
        self.remarks = remarks or Remarks()
        self.cutting = cutting
        self.seen = SeenKeys()
        self.read_header = read_header  # may be called by several threads
        self.while_waiting = while_waiting  # called now and then while files are slow; may raise, which ends the walk
        self.rows = 0  # so many have been counted; what is yielded may lag behind
        self.row = 0  # the number of that whose chunks are being yielded; only recordings have one
        self._shard = shard

    def takes(self, recording_id: str, chunk_id: str) -> bool:
        """Count one more row and say whether it is ours."""
        row_number = self.rows
        self.rows += 1
        if recording_id and chunk_id:
            self.seen.add((recording_id, chunk_id))
        return self._shard.takes(row_number)

    def takes_recording(self, recording_id: str) -> bool:
        """Count one more recording that is cut into chunks, and say whether it is ours, with all of them."""
        return self.takes(recording_id, recording_id)

    def miss(self, line: int, text: str, problem: NoAudio, row: Chunk, fix: str | None = None) -> Iterator[Chunk]:
        """Note a row without audio; yield it all the same where such rows are to fail later, and alone.

        It is listed as a stretch of its file, so that no engine gets more than the row should the file come back.
        """
        self.mistakes.add(line, text, fix=fix or problem.fix, missing=problem.missing_at is not None)
        if problem.missing_at is not None and self.remarks.keeps_missing:
            yield replace(row, audio_path=problem.missing_at, is_cut=True)

    def known_length_s(self, recording_id: str) -> float | None:
        """Return how long a recording is that nobody needs to look at any more; None: look."""
        return None
