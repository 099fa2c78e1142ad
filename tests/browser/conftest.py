"""One browser, and one report of a small but eventful job, for all tests in it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rooms.report import find_job_database, summarize_database, write_page
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge
from support.browser import Browser
from support.synthetic_job import write_job

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
READY = "document.documentElement.dataset.ready === 'yes'"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="session")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of 26 tasks on 104 devices of which one is lost, one task is killed, and chunks fail; merged."""
    folder = tmp_path_factory.mktemp("june")
    write_job(folder, 26, chunks=24)
    merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    return folder


@pytest.fixture(scope="session")
def report(job: Path) -> Path:
    """The page of the job."""
    return write_report(job, job / "report.html")


@pytest.fixture(scope="session")
def hostile_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a job in which every text that comes from a file would like to be a script."""
    folder = tmp_path_factory.mktemp("hostile") / "<script>window.hacked = 1"
    write_job(folder, 9, chunks=12)
    merge(MergeOrder([folder], folder / "job.sqlite"), SystemClock())
    with closing(sqlite3.connect(folder / "job.sqlite")) as db, db:
        for change in (
            "UPDATE task SET name = name || ?, node = node || ?",
            "UPDATE device SET name = ?, uuid = uuid || ?",
            "UPDATE chunk SET error = ? || error, error_class = ? WHERE status = 'poison'",
            "UPDATE detection SET label = label || ?, label_name = ?",
            "UPDATE task_meta SET value = json_object('source', ?, 'engine_arg', ?) WHERE key = 'settings'",
            "UPDATE gap SET reason = ?, metric = ?",
            "UPDATE source_file SET status = 'skipped', reason = ?, path = path || ?",
        ):
            db.execute(change, (HOSTILE, HOSTILE))
    return write_report(folder, folder / "<img src=x>.html")


def write_report(folder: Path, path: Path) -> Path:
    database = find_job_database(folder)
    write_page(summarize_database(database), path, database)
    return path
