"""Readings that a disk refused: what the recorder tells of them when it cannot write even that down."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Unwritten:
    """How much is missing, why, and since when it still is (None: the disk takes readings again)."""

    lost_s: float = 0.0
    reason: str = ""
    since_ms: int | None = None

    @property
    def words(self) -> str | None:
        """The loss in words; None: there is none."""
        if self.lost_s == 0 and self.since_ms is None:
            return None
        return f"{self.lost_s:.1f} s of readings could not be written: {self.reason}"

    def gaps(self, to_ms: int) -> list[tuple[int, int, str]]:
        """Return the gap that is in no file yet, as (from, to, reason)."""
        if self.since_ms is None:
            return []
        return [(self.since_ms, max(to_ms, self.since_ms), f"could not be written: {self.reason}")]

    def to_json(self) -> str:
        """Return one line for the wrapper."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Unwritten:
        """Read the recorder's line; one that says nothing tells of no loss."""
        return cls(**json.loads(text)) if text else cls()
