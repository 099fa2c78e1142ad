"""Looks into task and job databases from tests, as anyone with the sqlite3 shell would; and changes them."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from rooms.store import (
    TABLES,
    create_tables,
    follow_changes,
    is_job_database,
    is_published,
    move_into_place,
    note_changes,
    read_publication,
    settle_overlaps,
    write_row_counts,
)


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Return the rows of one query."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(sql, values).fetchall()


def change(database: Path, sql: str, *values: object) -> Path:
    """Run one statement; a published file is published again, so that a merge takes the changed rows, too.

    In a job database, detections are joined again, as after a merge.
    """
    was_published = database.is_file() and is_published(database)
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(sql, values)
        if is_job_database(db) and re.search("chunk|detection|rarity", sql):
            join_again(db)
        if was_published and "'rows'" not in sql:
            write_row_counts(db)
    if was_published:
        copy = database.with_name(".republished")
        move_into_place(database, copy)
        copy.rename(database)
    return database


def join_again(db: sqlite3.Connection) -> None:
    """Join the detections of all recordings of a job database."""
    follow_changes(db)
    for (task_id,) in db.execute("SELECT task_id FROM task").fetchall():
        note_changes(db, ["chunk"], task_id)
    for table in ("recording_detection", "recording_rarity", "overlap"):
        db.execute(f"DELETE FROM {table}")
    settle_overlaps(db)


def unpublish(database: Path) -> Path:
    """Make a published file one that was never published, like a live file."""
    live = database.with_name(".live")
    with closing(sqlite3.connect(live, isolation_level=None)) as db:
        create_tables(db)
        db.execute("ATTACH ? AS published", (str(database),))
        for table in TABLES:
            db.execute(f"INSERT INTO {table} SELECT * FROM published.{table}")
        db.execute("DELETE FROM meta WHERE key = 'rows'")
    return live.rename(database)


def canonical(database: Path) -> str:
    """Return the whole logical content of a database, the same whatever order its rows were written in."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return "\n".join(sorted(db.iterdump()))


def is_undamaged(path: Path) -> bool:
    """Return whether a file is exactly one publication."""
    return read_publication(path) is not None


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
