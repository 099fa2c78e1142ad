"""Removes task databases whose rows are all in the job database, once that has been seen to be true."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import DatabaseProblem
from badcjobs.store.job_file import open_job_database
from badcjobs.store.merging.find_files import full_path
from badcjobs.store.merging.source_file import COPY, MERGED, SourceFile, read_source_files
from badcjobs.store.merging.task_rows import count_rows
from badcjobs.store.schema import DERIVED


@dataclass(frozen=True, slots=True)
class Removal:
    """What was removed, and what was not and why."""

    removed: tuple[str, ...]
    left: tuple[tuple[str, str], ...]


def remove_merged_files(job_database: Path, given: Collection[str]) -> Removal:
    """Count every task's rows in the job database as it lies there now; remove the files of those that are complete.

    Only of those ``given`` to this merge, and never the only file that says so: sealed ones, read to the last bit.
    """
    removed, left = [], []
    try:
        with closing(open_job_database(job_database)) as db:
            files = read_source_files(db)
            holders = {file.task_id: file for file in files if file.status == MERGED}
            for file in (file for file in files if file.path in given):
                path = job_database.parent / file.path
                if not path.exists():
                    continue
                why_not = _why_not(db, file, holders.get(file.task_id)) or _why_not_here(path, file, job_database)
                if why_not is None:
                    path.unlink()
                    path.with_suffix(".slurm.json").unlink(missing_ok=True)
                    removed.append(file.path)
                else:
                    left.append((file.path, why_not))
    except (OSError, sqlite3.Error) as error:
        raise DatabaseProblem(f"not all merged files could be removed: {error}") from error
    return Removal(tuple(removed), tuple(left))


def _why_not(db: sqlite3.Connection, file: SourceFile, holder: SourceFile | None) -> str | None:
    if file.status not in (MERGED, COPY) or holder is None or file.task_id is None:
        return file.reason or f"it was {file.status}"
    if file.checksum is None or file.checksum != holder.checksum:
        return "it has no seal" if file.checksum is None else "it is not the file whose rows are in the job database"
    (verdict,) = db.execute("SELECT verdict FROM task WHERE task_id = ?", (file.task_id,)).fetchone()
    if verdict is None:
        return "its task had not ended when it was merged"
    counted = sum(count_rows(db, file.task_id, leave_out=DERIVED).values())
    return None if counted == holder.rows else f"{counted:,} of its {holder.rows:,} rows are in the job database"


def _why_not_here(path: Path, file: SourceFile, job_database: Path) -> str | None:
    status = path.stat()
    if (status.st_size, status.st_mtime_ns) != (file.size_bytes, file.mtime_ns):
        return "it has changed since it was merged"
    folder = path.parent
    if folder.name == "tasks" and full_path(folder.parent / "job.sqlite") != full_path(job_database):
        return f"only {folder.parent}/job.sqlite tells a later run what is done; merge into that"
    return None
