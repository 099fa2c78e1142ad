"""Looks into a run folder's databases for what earlier tasks have done."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs.store.connect import complain_about, open_sealed
from badcjobs.store.job_file import open_job_database

# A checksum, where both sides have one, outlives a move or a copy without its times; else path and time must agree. A
# path may be written in another way, or begin elsewhere, not both. What an older version wrote has no fingerprint, and
# counts as the same.
_SAME = """(o.audio_bytes IS NULL OR c.audio_bytes IS NULL OR (
        o.audio_bytes = c.audio_bytes AND o.start_ms = c.start_ms AND o.end_ms IS c.end_ms
        AND CASE WHEN o.audio_sha256 IS NOT NULL AND c.audio_sha256 IS NOT NULL THEN o.audio_sha256 = c.audio_sha256
            ELSE o.audio_mtime_ns = c.audio_mtime_ns
                AND (o.source_path = c.source_path OR o.audio_path = c.audio_path) END))"""
# A chunk that failed in one database may be done in the next, so those that are skipped with an error count as open.
_SETTLED = """
    SELECT c.rowid, o.status, o.error_class, o.error, {same}
    FROM main.chunk c CROSS JOIN other.chunk o ON o.recording_id = c.recording_id AND o.chunk_id = c.chunk_id
    WHERE c.rowid > ? AND (c.status = 'pending' OR c.error_class IS NOT NULL)
        AND (o.status = 'done' OR ? AND o.status IN ('failed', 'poison'))
    ORDER BY c.rowid LIMIT 10000"""


@dataclass(frozen=True, slots=True)
class Settled:
    """A chunk of ours, by its row, that another task has done or given up."""

    row: int
    status: str
    error_class: str | None
    error: str | None
    same_audio: bool

    @property
    def reason(self) -> tuple[str | None, str | None]:
        """Return class and text of what went wrong there; two times None: nothing did."""
        return (None, None) if self.status == "done" else (self.error_class or "unknown", self.error)


def find_settled(db: sqlite3.Connection, *, failed_too: bool) -> Iterator[list[Settled]]:
    """Yield, in batches, our open chunks that the database attached as ``other`` knows as done (or as failed)."""
    there = {row[1] for row in db.execute("PRAGMA other.table_info(chunk)")}
    query, last = _SETTLED.format(same=_SAME if "audio_bytes" in there else "1"), 0
    while rows := db.execute(query, (last, failed_too)).fetchall():
        last = rows[-1][0]
        yield [Settled(row, status, kind, text, bool(same)) for row, status, kind, text, same in rows]


def merged_files(job_database: Path) -> set[str]:
    """Return the names of the task databases that job.sqlite holds already; none if it cannot be read.

    Not those of tasks that were still running when they were merged: they may have done more since.
    """
    if not job_database.exists() or complaint(job_database) is not None:
        return set()
    try:
        with closing(open_job_database(job_database)) as db:
            rows = db.execute(
                """SELECT path FROM source_file JOIN task USING (task_id)
                   WHERE status != 'skipped' AND verdict IS NOT NULL"""
            ).fetchall()
    except sqlite3.Error:
        return set()
    return {Path(path).name for (path,) in rows}


def complaint(database: Path) -> str | None:
    """Return why a database cannot be looked into; None: it can."""
    try:
        with closing(open_sealed(database)) as db:
            return complain_about(database, db)
    except (OSError, sqlite3.Error) as error:
        return str(error)
