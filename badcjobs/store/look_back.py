"""Looks into a run folder's databases for what earlier tasks have done."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from badcjobs.store.connect import complain_about, open_sealed
from badcjobs.store.job_file import open_job_database


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
