"""What was heard, as the end of the story: a row per detection with its place and date, sorted by study area.

The rows come from the view ``recording_detection``; how they are written, and to which files, is left to others.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from badcjobs.model import NameGaps, RecordingName
from badcjobs.store.exports.tables import Row
from badcjobs.store.live.recording_rows import EACH_ONCE, count_gaps

VIEW = "recording_detection"
# The names that were asked for come first, and stay.
COLUMNS = {
    "study_area": "TEXT",
    "location": "TEXT",
    "recording_date_time": "TEXT",
    "start_s": "REAL",
    "end_s": "REAL",
    "species_code": "TEXT",
    "species_name": "TEXT",
    "score": "REAL",
    "recording_id": "TEXT",
    "chunk_id": "TEXT",
}
_RENAMED = "temp.renamed_recording"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which detections; no species: all of them."""

    species: tuple[str, ...] = ()
    min_score: float | None = None

    def condition(self) -> tuple[str, list[object]]:
        """Return the SQL condition, and its values."""
        parts, values = ["true"], list[object]()
        if self.species:
            marks = ", ".join("?" * len(self.species))
            parts.append(f"(v.label COLLATE NOCASE IN ({marks}) OR v.label_name COLLATE NOCASE IN ({marks}))")
            values += [*self.species, *self.species]
        if self.min_score is not None:  # a score that nobody gave is not above it
            parts.append("v.score >= ?")
            values.append(self.min_score)
        return " AND ".join(parts), values


class Heard:
    """The detections of a job database."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        self._renamed = False

    def rename(self, name_of: Callable[[str, str, str], RecordingName]) -> None:
        """Read the paths of all recordings anew; the database itself stays as it is."""
        self._db.execute(
            f"""CREATE TABLE {_RENAMED} (
                    recording_id TEXT PRIMARY KEY, source_path, study_area, location, recorded_at, pattern
                ) WITHOUT ROWID"""
        )
        paths = self._db.execute("SELECT recording_id, min(source_path), audio_path FROM chunk GROUP BY recording_id")
        rows = (
            (r, s, n.study_area, n.location, n.recorded_at, n.pattern) for r, s, a in paths for n in [name_of(r, s, a)]
        )
        self._db.executemany(f"INSERT INTO {_RENAMED} VALUES (?, ?, ?, ?, ?, ?)", rows)
        self._renamed = True

    @property
    def _recordings(self) -> str:
        """One row for each recording."""
        return _RENAMED if self._renamed else EACH_ONCE

    def gaps(self) -> NameGaps:
        """Return of how many recordings the paths do not tell enough."""
        return count_gaps(self._db, self._recordings)

    def study_areas(self) -> list[str | None]:
        """Return all study areas in the order of the rows; None: that of recordings without one."""
        recordings = _RENAMED if self._renamed else "recording"
        found = self._db.execute(f"SELECT DISTINCT study_area FROM {recordings} ORDER BY study_area")
        return [area for (area,) in found]

    def count_chunks(self) -> tuple[int, int]:
        """Return how many chunks there are, and how many of them are not done."""
        many, undone = self._db.execute("SELECT count(*), total(status != 'done') FROM chunk").fetchone()
        return int(many), int(undone)

    def never_heard(self, species: Iterable[str]) -> list[str]:
        """Return those that no chunk of the job has heard, whatever the score."""
        there = set()
        for names in self._db.execute("SELECT DISTINCT label, label_name FROM detection"):
            there |= {name.upper() for name in names if name is not None}
        return [name for name in species if name.upper() not in there]

    def batches(self, wanted: Wanted, size: int) -> Iterator[tuple[str | None, Sequence[Row]]]:
        """Yield the rows in their order, so many at a time, those of one study area together with its name."""
        where, values = wanted.condition()
        place, join = ("n", f"LEFT JOIN {_RENAMED} n USING (recording_id)") if self._renamed else ("v", "")
        cursor = self._db.execute(
            f"""SELECT {place}.study_area, {place}.location, {place}.recorded_at, v.start_ms / 1000.0,
                       v.end_ms / 1000.0, v.label, v.label_name, v.score, v.recording_id, v.chunk_id
                FROM {VIEW} v {join} WHERE {where}
                ORDER BY 1, 2, 3, v.recording_id, v.start_ms, v.end_ms, v.label, v.score, v.chunk_id""",
            values,
        )
        while batch := cursor.fetchmany(size):
            for area, rows in groupby(batch, key=lambda row: row[0]):
                yield area, list(rows)
