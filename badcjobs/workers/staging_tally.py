"""What came of copies and cuts, counted for the log."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class StagingTally:
    """What came of it."""

    staged: int = 0
    staged_bytes: int = 0
    from_source: int = 0
    cut_late: int = 0
    failed_copies: int = 0
    last_failure: str | None = None

    @property
    def words(self) -> str:
        """The same for the log."""
        text = f"staging: {self.staged} chunks were read from copies on this node ({self.staged_bytes / 1e6:.1f} MB),"
        text += f" {self.from_source} where they lie"
        text += f", {self.cut_late} were cut only when they were wanted" if self.cut_late else ""
        return text + (f"; {self.failed_copies} copies failed: {self.last_failure}" if self.failed_copies else "")
