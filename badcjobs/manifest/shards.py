"""Which rows of a source belong to this array task; where the numbers come from is the caller's business."""

from __future__ import annotations

import re
from dataclasses import dataclass

from badcjobs.errors import BadInput


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
    why = "a shard is I/N: I counts from 0 and is below N"
    if count < 1:
        return BadInput(f"no such shard: {text!r}", why=why, fix="--shard 0/1")
    return BadInput(
        f"no such shard: {text!r}", why=f"{why}; the last of {count} is {count - 1}/{count}", fix=f"--shard 0/{count}"
    )
