"""What merge knows about one file: a row of the table ``source_file``."""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass, fields
from operator import attrgetter

MERGED = "merged"  # as it is
RECOVERED = "recovered"  # with the journal or WAL that lay beside it; nothing is lost
SALVAGED = "salvaged"  # damaged; its healthy rows
KEPT = "kept"  # cannot be read any more; its rows are those of an earlier merge
COPY = "copy"  # another file of the same task has all that this one has
SKIPPED = "skipped"  # nothing of it is here

HOLDING = (MERGED, RECOVERED, SALVAGED, KEPT)  # the rows of its task are those of this file
NOT_OURS = "a job database, not a task database"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file, read or not."""

    path: str
    task_id: int | None
    status: str
    reason: str | None = None
    size_bytes: int | None = None
    mtime_ns: int | None = None
    rows: int | None = None
    rows_lost: int | None = None
    last_sign_ms: int | None = None
    checksum: str | None = None

    @property
    def rank(self) -> tuple[int, int, str]:
        """Of two files of one task, the one that ranks higher was published later."""
        return self.last_sign_ms or 0, self.rows or 0, self.checksum or ""

    @property
    def lost_something(self) -> bool:
        """Whether rows of this file are missing, or may be; another job database has none of its own."""
        return self.status in (SALVAGED, KEPT, SKIPPED) and self.reason != NOT_OURS


def read_source_files(db: sqlite3.Connection) -> tuple[SourceFile, ...]:
    """Return what a job database says of its files; an older version may say less."""
    there = {row[1] for row in db.execute("PRAGMA table_info(source_file)")}
    names = [field.name for field in fields(SourceFile) if field.name in there]
    rows = db.execute(f"SELECT {', '.join(names)} FROM source_file ORDER BY path").fetchall()
    return tuple(SourceFile(**dict(zip(names, row, strict=True))) for row in rows)


def write_source_files(db: sqlite3.Connection, files: tuple[SourceFile, ...]) -> None:
    """Write all of them anew."""
    names = [field.name for field in fields(SourceFile)]
    db.execute("DELETE FROM source_file")
    db.executemany(
        f"INSERT INTO source_file ({', '.join(names)}) VALUES ({', '.join('?' * len(names))})",
        map(attrgetter(*names), files),
    )
