"""What earlier tasks of a run have done, and what of its source no task has listed yet."""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.store.connect import open_job_database, published_uri, reading


def merged_files(job_database: Path) -> set[str]:
    """Return the names of the task databases that job.sqlite holds already; none if it cannot be read.

    Not those of tasks that were still running when they were merged: they may have done more since.
    """
    sql = """SELECT path FROM source_file JOIN task USING (task_id)
             WHERE status != 'skipped' AND verdict IS NOT NULL"""
    try:
        with reading(job_database) as db:
            return {Path(path).name for (path,) in db.execute(sql)}
    except DatabaseProblem:
        return set()


NOT_LISTED = "not listed"  # the state of a row that is in no task
_EXAMPLES = 5
_BATCH = 10_000

_STATES = f"""
    SELECT r.position, coalesce(c.status, '{NOT_LISTED}'), count(*)
    FROM main.row r LEFT JOIN job.chunk c ON c.recording_id = r.recording_id AND c.chunk_id = r.chunk_id
    GROUP BY 1, 2"""
_ONLY_IN = """
    SELECT recording_id, chunk_id FROM {0} a WHERE NOT EXISTS (
        SELECT 1 FROM {1} b WHERE b.recording_id = a.recording_id AND b.chunk_id = a.chunk_id)
    ORDER BY recording_id, chunk_id LIMIT ?"""


class SourceRows:
    """The rows so far; memory holds one batch and SQLite's cache."""

    def __init__(self, db: sqlite3.Connection) -> None:
        for setting in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -65536"):
            db.execute(f"PRAGMA {setting}")
        db.execute(
            "CREATE TABLE row (recording_id TEXT, chunk_id TEXT, position INTEGER,"
            " PRIMARY KEY (recording_id, chunk_id)) WITHOUT ROWID"
        )
        self._db = db
        self._batch: list[tuple[str, str, int]] = []

    def add(self, key: tuple[str, str], position: int) -> None:
        """Take a row and the position in the array that it falls to."""
        self._batch.append((*key, position))
        if len(self._batch) == _BATCH:
            self._flush()

    def compare_with(self, job_database: Path) -> None:
        """Have the chunks of a job database at hand for the questions below."""
        self._flush()
        self._db.execute("ATTACH ? AS job", (published_uri(job_database),))

    def states(self) -> list[tuple[int, str, int]]:
        """Return position, state and number of the rows."""
        return self._db.execute(_STATES).fetchall()

    def only_in_source(self) -> tuple[str, ...]:
        """Return the first rows that no task has listed."""
        return self._names("main.row", "job.chunk")

    def only_in_job(self) -> tuple[str, ...]:
        """Return the first chunks that are no rows of the source."""
        return self._names("job.chunk", "main.row")

    def _flush(self) -> None:
        """Write what is still in memory; a row that repeats another counts once, as it would be done once."""
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR IGNORE INTO row VALUES (?, ?, ?)", self._batch)
        self._db.execute("COMMIT")
        self._batch.clear()

    def _names(self, here: str, not_here: str) -> tuple[str, ...]:
        found = self._db.execute(_ONLY_IN.format(here, not_here), (_EXAMPLES,)).fetchall()
        return tuple(recording if recording == chunk else f"{recording} {chunk}" for recording, chunk in found)


def known_lengths(job_database: Path) -> dict[str, float]:
    """Return the seconds of the recordings whose headers the tasks have read, by recording_id.

    Not of those that had two lengths.
    """
    sql = """SELECT recording_id, min(duration_s) FROM recording WHERE duration_s IS NOT NULL
             GROUP BY recording_id HAVING min(duration_s) = max(duration_s)"""
    with closing(open_job_database(job_database)) as db:
        return dict(db.execute(sql))


@contextmanager
def scratch_rows() -> Iterator[SourceRows]:
    """Give an empty table, which is gone afterwards."""
    with (
        tempfile.TemporaryDirectory(prefix="badcjobs-complete-") as folder,
        closing(sqlite3.connect(Path(folder) / "rows.sqlite", isolation_level=None, uri=True)) as db,
    ):
        yield SourceRows(db)
