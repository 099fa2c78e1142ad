"""Looks at the job database that an earlier merge has left: to be continued, taken over, put aside or left alone?"""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.store.connect import SQLITE_MAGIC, version_complaint
from badcjobs.store.job_file import open_job_database
from badcjobs.store.job_schema import is_job_database
from badcjobs.store.merging.source_file import SKIPPED, SourceFile, read_source_files
from badcjobs.store.schema import APPLICATION_ID, SCHEMA_VERSION


@dataclass(frozen=True, slots=True)
class OldJob:
    """``state``: none, current (go on with a copy), older (take its rows over) or damaged (put aside)."""

    state: str
    files: tuple[SourceFile, ...] = ()


def look_at_old(target: Path) -> OldJob:
    """Look; refuse to replace what is not a job database of ours, or is a newer one."""
    if not target.exists():
        return OldJob("none")
    try:
        with target.open("rb") as file:
            if file.read(16) != SQLITE_MAGIC:
                return _not_sqlite(target)
        with closing(open_job_database(target)) as db:
            _refuse_what_is_not_ours(target, db)
            files = read_source_files(db)
            (version,) = db.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error as error:
        return _damaged(target, str(error))
    return OldJob("current" if version == SCHEMA_VERSION else "older", files)


def _refuse_what_is_not_ours(target: Path, db: sqlite3.Connection) -> None:
    (application,) = db.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID or not is_job_database(db):
        what = "a task database" if application == APPLICATION_ID else "somebody else's database"
        raise DatabaseProblem(
            f"{target} is {what}, not a job database",
            why="merge would replace it",
            fix="badcjobs merge RUN_FOLDER -o another/name.sqlite",
        )
    complaint = version_complaint(db)
    if complaint is not None:
        raise DatabaseProblem(f"{target} has {complaint}", fix="pip install --upgrade badcjobs")


def _damaged(target: Path, why: str) -> OldJob:
    aside = damaged_name(target).name
    reason = f"the earlier job database could not be read ({why}); made anew, and the old one put aside"
    return OldJob("damaged", (SourceFile(aside, None, SKIPPED, reason),))


def _not_sqlite(target: Path) -> OldJob:
    """Put aside what is called like a database and may have lost its first page; never touch anything else."""
    if target.suffix not in (".sqlite", ".db"):
        raise DatabaseProblem(
            f"{target} is not a database", why="merge would replace it", fix="badcjobs merge … -o another/name.sqlite"
        )
    return _damaged(target, "not a SQLite database")


def damaged_name(target: Path) -> Path:
    """Return where a damaged job database is kept: rows whose task files are gone may still be in it."""
    for number in count(1):
        name = target.with_name(f"{target.name}.damaged" + (f".{number}" if number > 1 else ""))
        if not name.exists():
            return name
    raise AssertionError("count() has no end")
