"""``badcjobs.open_job``: a merged job, for people who go on in Python."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput
from badcjobs.job import find_job_database, summarize_database
from badcjobs.store.job_file import open_job_database


def open_job(path: str | os.PathLike[str]) -> Job:
    """Return a merged job: ``path`` is its job.sqlite, or the run folder that holds it.

        >>> from badcjobs import open_job
        >>> job = open_job("runs/july")                                               # doctest: +SKIP
        >>> job.summary()["audio_hours_per_gpu_hour"]                                 # doctest: +SKIP
        >>> job.query("select label, count(*) as many from detection group by 1")     # doctest: +SKIP

    Raises ``badcjobs.errors.DatabaseProblem`` when there is no such place, or it is not merged yet.
    """
    return Job(find_job_database(Path(path)))


class Job:
    """A job database; nothing here changes it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"Job({str(self.path)!r})"

    def summary(self) -> dict[str, Any]:
        """Return what ``badcjobs report --json`` prints; raises DatabaseProblem when the file cannot be read."""
        return summarize_database(self.path, now_ms=SystemClock().now_ms()).to_dict()

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of its tables and views; `badcjobs guide tables` explains them."""
        found = self.query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view') ORDER BY name")
        return tuple(str(row["name"]) for row in found)

    def query(self, sql: str, *values: object) -> list[dict[str, Any]]:
        """Return the rows of a query, each as a dictionary; raises BadInput when SQLite does not understand it."""
        try:
            with closing(open_job_database(self.path)) as db:
                cursor = db.execute(sql, values)
                names = [column[0] for column in cursor.description or ()]
                return [dict(zip(names, row, strict=True)) for row in cursor]
        except sqlite3.Error as error:
            raise BadInput(f"{self.path.name}: {sql}", why=str(error), fix="badcjobs guide tables") from error
