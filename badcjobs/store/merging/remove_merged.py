"""Removes task databases whose rows are all in the job database, once that has been seen to be true."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.store.job_file import open_job_database
from badcjobs.store.merging.source_file import COPY, MERGED, SourceFile, read_source_files
from badcjobs.store.merging.task_rows import count_rows
from badcjobs.store.schema import DERIVED


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed, and what was not and why."""

    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def remove_merged_files(job_database: Path) -> Removal:
    """Count every task's rows in the job database as it lies there now; remove the files of those that are complete."""
    removed, left = [], []
    try:
        with closing(open_job_database(job_database)) as db:
            holders = {file.task_id: file for file in read_source_files(db) if file.status == MERGED}
            for file in read_source_files(db):
                path = job_database.parent / file.path
                if not path.exists():
                    continue
                why_not = _why_not(db, file, holders.get(file.task_id)) or _changed_since(path, file)
                if why_not is None:
                    path.unlink()
                    removed.append(file.path)
                else:
                    left.append((file.path, why_not))
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"not all merged files could be removed: {error}") from error
    return Removal(tuple(removed), tuple(left))


def _why_not(db: sqlite3.Connection, file: SourceFile, holder: SourceFile | None) -> str | None:
    if file.status not in (MERGED, COPY) or holder is None or file.task_id is None:
        return file.reason or f"it was {file.status}"
    (verdict,) = db.execute("SELECT verdict FROM task WHERE task_id = ?", (file.task_id,)).fetchone()
    if verdict is None:
        return "its task had not ended when it was merged"
    counted = sum(count_rows(db, file.task_id, leave_out=DERIVED).values())
    return None if counted == holder.rows else f"{counted:,} of its {holder.rows:,} rows are in the job database"


def _changed_since(path: Path, file: SourceFile) -> str | None:
    status = path.stat()
    unchanged = (status.st_size, status.st_mtime_ns) == (file.size_bytes, file.mtime_ns)
    return None if unchanged else "it has changed since it was merged"
