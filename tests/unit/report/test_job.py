"""A job from its files: what is new since the merge, which file a path means, where the page is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import files_text
from rooms.model import Submitted
from rooms.report import default_target, find_job_database, finish_job, page, report_job, summarize_database, write_page
from rooms.root import BadInput, DatabaseProblem
from rooms.store import MergeOrder, Record, merge, read_job, write_record
from support.damage import garbage_page, page_with
from support.hand_clock import HandClock
from support.pages import Pages
from support.powerless import powerless_folder
from support.small_disk import largest_file
from support.task_files import START_MS, TaskFile

START_S, LATE_S = START_MS // 1000, START_MS // 1000 + 9 * 3600
CLOCK = HandClock()


def task(folder: Path, index: int = 0, state: str = "pending", ended: bool = False, **changes: Any) -> Path:
    ends = {} if ended else {"ended_at_ms": None}
    path = TaskFile(folder, index=index, states={f"{index}": state}, samples=1, **ends, **changes).write()
    os.utime(path, (START_S, START_S))
    return path


def merged(folder: Path, target: Path | None = None) -> Path:
    target = target or folder / "job.sqlite"
    merge(MergeOrder([folder], target), CLOCK)
    os.utime(target, (START_S + 30,) * 2)
    return target


# --- since the merge --------------------------------------------------------------------------------------------------


def test_what_has_happened_to_task_databases_since_the_merge_is_told(tmp_path: Path, pages: Pages) -> None:
    said = []

    def tell(what: str, job: Path, at_s: int = LATE_S) -> None:
        summary = summarize_database(job, now_ms=1000 * at_s)
        news = summary.merged
        said.append(
            f"{what}: {dict(summary.tasks_by_verdict)}, {news.changed} changed, {news.new} new, {news.gone} gone"
        )
        said.extend([] if news.command is None else [f"  {news.command}".replace(str(tmp_path), "")])

    run = tmp_path / "run"
    files = [task(run, index) for index in (0, 1, 2)]
    job = merged(run)
    tell("merged", job)
    os.utime(files[0], (START_S + 60,) * 2)  # published again: what it says now, a merge would know
    tell("one is published again, a minute ago", job, START_S + 100)
    tell("one is published again, long ago", job)
    merged(run)
    tell("merged again", job)
    task(run, 0, "done", ended=True, restart=1)
    (run / "tasks" / "notes.sqlite").touch()
    tell("a new one", job)
    tell("a new one, and the job elsewhere", Path(shutil.copy(job, run / "elsewhere.sqlite")))
    other = tmp_path / "other"
    files = [task(other, 0), task(other, 1, "failed", ended=True), task(other, 2)]
    for file in files[1:]:
        os.utime(file, (LATE_S,) * 2)
    job = merged(other)
    copy = shutil.copytree(other, tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (copy / "job.sqlite", *(copy / "tasks" / file.name for file in files)):
        os.utime(path, (LATE_S,) * 2)
    tell("a copy with new times", copy / "job.sqlite")
    with (copy / "tasks" / files[1].name).open("ab") as grown:
        grown.write(bytes(4096))
    tell("a copy that has grown", copy / "job.sqlite")
    (tmp_path / "laptop").mkdir()
    tell("a copy of the job alone", Path(shutil.copy(job, tmp_path / "laptop" / "job.sqlite")))
    pages({"news.txt": "\n".join(said)})


def test_a_folder_that_is_closed_to_us_is_neither_up_to_date_nor_missing() -> None:
    with powerless_folder() as folder:
        (folder / "m.csv").write_text("recording_id,chunk_id,source_path,start_ms,end_ms\n")
        (folder / "run.toml").write_text(f'[run]\nsource = ["{folder}/m.csv"]\n\n[array]\nfirst=0\nstep=1\ncount=2\n')
        file = task(folder, 0, "done", ended=True)
        job = merged(folder)
        before = summarize_database(job)
        file.parent.chmod(0)
        after = summarize_database(job)
        file.parent.chmod(0o700)
    assert before.merged.closed is None and [finding.kind for finding in before.findings] == ["tasks_missing"]
    assert after.merged.closed == f"{file.parent} cannot be read: Permission denied"
    assert after.findings == ()


# --- paths ------------------------------------------------------------------------------------------------------------


def answer(ask: Callable[[], object], folder: Path) -> str:
    try:
        found = str(ask())
    except DatabaseProblem as error:
        found = f"{error.what}\n    why: {error.why}\n    try: {error.fix}"
    return found.replace(str(folder), "")


def test_every_path_that_means_a_job_finds_it_and_others_are_answered(tmp_path: Path, pages: Pages) -> None:
    for name in ("submitted", "begun"):
        (tmp_path / name / "tasks").mkdir(parents=True)
        job = Submitted("4821", None, (0, 1))
        write_record(tmp_path / name, Record("slurm", job, ("run", "m.csv"), 8, START_MS))
    (tmp_path / "empty").mkdir()
    (tmp_path / "neither" / "tasks").mkdir(parents=True)
    files = [task(tmp_path / name, 0, "done", ended=True) for name in ("begun", "merged")]
    merged(tmp_path / "merged")
    given = ["submitted", "submitted/tasks", "begun", "begun/tasks", "merged", "merged/tasks", "merged/job.sqlite",
             f"merged/tasks/{files[1].name}", "empty", "neither", "neither/tasks", "no/where"]  # fmt: skip
    said = [f"report {one}: {answer(lambda one=one: find_job_database(tmp_path / one), tmp_path)}" for one in given]
    for one in ("submitted", "submitted/tasks", "empty", "neither/tasks"):
        order = MergeOrder([tmp_path / one], tmp_path / "job.sqlite")
        said.append(f"merge {one}: {answer(lambda order=order: finish_job(order, CLOCK).database, tmp_path)}")
    for path in (tmp_path / "merged", tmp_path / "merged" / "tasks", *files, tmp_path / "x.sqlite"):
        said.append(f"default target of {path}: {default_target([path])}".replace(str(tmp_path), ""))
    garbled = {"run/job.sqlite": "a", "run/july.db": "b", "job.sqlite": "c"}
    for name, place in garbled.items():
        TaskFile(tmp_path / place / "run", states={"a-chunk-that-failed": "failed"}).write()
        job_path = merged(tmp_path / place / "run", tmp_path / place / name)
        garbage_page(job_path, page_with(job_path, b"a-chunk-that-failed: no luck"), seed=3)
        said.append(f"read {name}: {answer(lambda path=job_path: read_job(path), tmp_path)}")
        with pytest.raises(DatabaseProblem), report_job(job_path, CLOCK):
            pass
    pages({"paths.txt": "\n".join(said)})


# --- the page ---------------------------------------------------------------------------------------------------------


def test_a_page_is_written_whole_or_not_at_all_and_a_link_to_it_stays(tmp_path: Path) -> None:
    task(tmp_path / "run", 0, "done", ended=True)
    job = merged(tmp_path / "run")
    summary, web = summarize_database(job), tmp_path / "web"
    web.mkdir()
    (web / "june.html").write_text("the page of yesterday")
    (tmp_path / "report.html").symlink_to("web/june.html")
    with largest_file(20_000), pytest.raises(BadInput, match="cannot be written"):
        write_page(summary, tmp_path / "report.html", job)
    assert [path.read_text() for path in web.iterdir()] == ["the page of yesterday"]
    write_page(summary, tmp_path / "report.html", job)
    assert (tmp_path / "report.html").is_symlink()
    assert (web / "june.html").read_text().startswith("<!doctype html>")
    assert "<title>june?" in page(summary, "june\udcff"), "a name that is not valid text"


def test_merge_says_where_the_page_is_or_why_there_is_none(tmp_path: Path) -> None:
    task(tmp_path, 0, "done", ended=True)
    order, page_path = MergeOrder([tmp_path], tmp_path / "job.sqlite"), tmp_path / "report.html"
    page_path.mkdir()
    assert files_text(finish_job(order, CLOCK)).endswith("\n  report      not written: Is a directory")
    page_path.rmdir()
    done = finish_job(order, CLOCK, remove_merged=True)
    assert f"\n  report      {page_path}" in files_text(done)
    document = done.to_dict()
    assert document["files"] == {"read_now": 0, "by_status": {"merged": 1}}
    assert len(document["removed"]["removed"]) == 1 and list((tmp_path / "tasks").iterdir()) == []
