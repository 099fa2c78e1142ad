"""One browser, and one report of a small but eventful job, for all tests in it."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rooms.report import summarize_database, write_page
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge
from support.browser import Browser
from support.synthetic_job import write_job

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a job of 26 tasks on 104 devices: one node is slow, chunks fail, a recorder dies."""
    folder = tmp_path_factory.mktemp("june")
    write_job(folder, 26, chunks=24)
    merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    return folder / "job.sqlite"


@pytest.fixture(scope="session")
def report(job: Path) -> str:
    """The address of its page."""
    return write_report(job, job.with_name("report.html"))


@pytest.fixture
def hostile_report(job: Path, tmp_path: Path) -> str:
    """The page of a job in which every text that comes from a file would like to be a script."""
    folder = tmp_path / "<script>window.hacked = 1"
    folder.mkdir()
    database = Path(shutil.copy(job, folder))
    with closing(sqlite3.connect(database)) as db, db:
        for change in (
            "task SET name = name || ?, node = node || ?", "device SET name = ?, uuid = uuid || ?",
            "chunk SET error = ? || error, error_class = ? WHERE status = 'poison'",
            "detection SET label = label || ?, label_name = ?", "gap SET reason = ?, metric = ?",
            "task_meta SET value = json_object('source', ?, 'engine_arg', ?) WHERE key = 'settings'",
            "source_file SET status = 'skipped', reason = ?, path = path || ?",
        ):  # fmt: skip
            db.execute(f"UPDATE {change}", (HOSTILE, HOSTILE))
    return write_report(database, folder / "<img src=x>.html")


def write_report(database: Path, path: Path) -> str:
    write_page(summarize_database(database), path, database)
    return path.as_uri()
