"""Counts the chunks of a run that are done so far, for whoever follows it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.store.connect import open_sealed


@dataclass(slots=True)
class ChunkCounter:
    """Counts in the published task databases; reads each one only when it has changed."""

    tasks: Path
    names: str = "[!.]*"  # 4821_* for those of one job, where it does again what others have done
    _known: dict[str, tuple[tuple[int, int], int]] = field(default_factory=dict)

    def done(self) -> int:
        """Return how many are done by now."""
        for path in self.tasks.glob(f"{self.names}.sqlite"):
            try:
                status = path.stat()
                mark = (status.st_mtime_ns, status.st_size)
                if self._known.get(path.name, (None, 0))[0] != mark:
                    self._known[path.name] = mark, _count_done(path)
            except (OSError, sqlite3.Error):
                continue  # just being replaced; the next look will tell
        return sum(done for _, done in self._known.values())


def _count_done(database: Path) -> int:
    with closing(open_sealed(database)) as db:
        return int(db.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchone()[0])
