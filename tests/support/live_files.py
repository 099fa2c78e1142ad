"""Looks into the live files of a task from outside: what it has committed at this moment, in either mode."""

import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from support.badcjobs_program import Site


def live_folders(site: Site) -> list[Path]:
    return sorted((*site.local.glob("badcjobs-*"), *site.out.glob("tasks/.live-*")))


def committed(live: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask a copy of a live file; none of it is opened, so that nothing is repaired, locked or left in it.

    Its writer must stand still or be dead. A file without tables has no rows.
    """
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / live.name
        for ending in ("", "-wal", "-journal"):
            if (source := live.with_name(live.name + ending)).exists():
                shutil.copyfile(source, copy.with_name(copy.name + ending))
        with closing(sqlite3.connect(copy)) as db:
            if db.execute("PRAGMA user_version").fetchone() == (0,):
                return []
            return db.execute(sql).fetchall()


def live_rows(site: Site, sql: str) -> list[tuple[Any, ...]]:
    """Ask all live files of a site that runs; a copy of a file in the middle of something gives no rows."""
    found = []
    for live in (live for folder in live_folders(site) for live in halves(folder)):
        try:
            found += committed(live, sql)
        except (OSError, sqlite3.Error):
            continue
    return found


def halves(folder: Path) -> list[Path]:
    return [folder / "wrapper.sqlite", folder / "recorder.sqlite"]
