"""Looks into task and job databases from tests, as anyone with the sqlite3 shell would; and changes them."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from rooms.store import follow_changes, is_job_database, is_stamped, note_changes, read_checksum, settle_overlaps
from support import damage


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of one query."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(sql, values).fetchall()


def change(database: Path, sql: str, *values: object) -> Path:
    """Run one statement; a published file loses its stamps, so that a merge takes the changed rows, too.

    In a job database, detections are joined again, as after a merge.
    """
    was_published = database.is_file() and is_stamped(database)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(sql, values)
        if is_job_database(db) and re.search("chunk|detection|rarity", sql):
            join_again(db)
    return damage.unstamp(database) if was_published else database


def join_again(db: sqlite3.Connection) -> None:
    """Join the detections of all recordings of a job database."""
    follow_changes(db)
    for (task_id,) in db.execute("SELECT task_id FROM task").fetchall():
        note_changes(db, ["chunk"], task_id)
    for table in ("recording_detection", "recording_rarity", "overlap"):
        db.execute(f"DELETE FROM {table}")
    settle_overlaps(db)


def unseal(database: Path) -> Path:
    """Remove the seal, with its bytes, and the stamps: what is left is like a live file."""
    with closing(sqlite3.connect(database)) as db, db:
        db.execute("PRAGMA secure_delete = ON")
        db.execute("DELETE FROM meta WHERE key = 'seal'")
    return damage.unstamp(database)


def canonical(database: Path) -> str:
    """Return the whole logical content of a database, the same whatever order its rows were written in."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return "\n".join(sorted(db.iterdump()))


def is_sealed(path: Path) -> bool:
    """Return whether a file has a seal, and the bytes that were sealed."""
    stated, computed = read_checksum(path)
    return stated is not None and stated == computed


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
