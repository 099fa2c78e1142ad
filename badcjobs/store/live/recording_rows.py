"""The recordings of a task, written while its work is listed: one row each, however many chunks it has."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from badcjobs.model import Chunk, NameGaps, RecordingName

# Chunks of one recording mostly come one after the other; where they do not, the first has told enough.
_INSERT = """
    INSERT INTO recording (task_id, recording_id, source_path, study_area, location, recorded_at, pattern,
                           duration_s, sample_rate_hz, channels)
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"""
_GAP = "count(*) FILTER (WHERE {0}), min(source_path) FILTER (WHERE {0})"
_GAPS = ("recorded_at IS NULL", "study_area IS NULL", "pattern IS NULL", "length(recorded_at) = length('2026-05-01')")
_KEPT = ", ".join(f"max({name}) AS {name}" for name in ("study_area", "location", "recorded_at", "pattern"))
# In a job database every task that has a part of a recording has a row of it.
EACH_ONCE = f"(SELECT recording_id, min(source_path) AS source_path, {_KEPT} FROM recording GROUP BY recording_id)"


class RecordingRows:
    """Writes a recording when its first chunk passes; ``name_of``: what its path tells (None: nobody asks)."""

    def __init__(self, db: sqlite3.Connection, task_id: int, name_of: Callable[[Chunk], RecordingName] | None) -> None:
        self._db = db
        self._task_id = task_id
        self._name_of = name_of
        self._last: str | None = None

    def note(self, chunk: Chunk) -> None:
        """Take notice of the next chunk, inside the caller's transaction."""
        if self._name_of is None or chunk.recording_id == self._last:
            return
        self._last = chunk.recording_id
        name, header = self._name_of(chunk), chunk.fingerprint.header
        self._db.execute(
            _INSERT,
            (self._task_id, chunk.recording_id, chunk.source_path, name.study_area, name.location, name.recorded_at,
             name.pattern, header.duration_s, header.sample_rate_hz, header.channels),
        )  # fmt: skip


def count_gaps(db: sqlite3.Connection, recordings: str = "recording") -> NameGaps:
    """Return of how many recordings the paths do not tell enough, with an example of each kind."""
    kinds = ", ".join(_GAP.format(gap) for gap in _GAPS)
    return NameGaps(*db.execute(f"SELECT count(*), {kinds} FROM {recordings}").fetchone())
