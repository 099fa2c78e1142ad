"""A job from its files: what is new since the merge, which file a path means, where the page is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rooms.cli import files_text
from rooms.model import Reading
from rooms.report import (
    Summary,
    default_target,
    find_job_database,
    finish_job,
    page,
    report_job,
    summarize_database,
    write_page,
)
from rooms.root import BadInput, DatabaseProblem
from rooms.store import MergeOrder, merge, read_job
from support.damage import garbage_page, page_with
from support.hand_clock import HandClock
from support.powerless import powerless_folder
from support.small_disk import largest_file
from support.task_files import START_MS, TaskFile

HOUR_S = 3600
START_S = START_MS // 1000
CLOCK = HandClock()


def task(folder: Path, index: int = 0, state: str = "pending", ended: bool = False, **changes: Any) -> Path:
    ends = {} if ended else {"ended_at_ms": None}
    path = TaskFile(folder, index=index, states={f"{index}": state}, samples=1, **ends, **changes).write()
    os.utime(path, (START_S, START_S))
    return path


def merged(folder: Path, target: Path | None = None, at_s: int = START_S + 30) -> Path:
    target = target or folder / "job.sqlite"
    merge(MergeOrder([folder], target), CLOCK)
    os.utime(target, (at_s, at_s))
    return target


def told(job: Path, after_s: int = 9 * HOUR_S) -> tuple[dict[str, int], int, int, int, str | None]:
    """Return how tasks are, how many files have changed, are new or gone, and the command that helps."""
    summary = summarize_database(job, now_ms=1000 * (START_S + after_s))
    news = summary.merged
    return dict(summary.tasks_by_verdict), news.changed, news.new, news.gone, news.command


def test_what_has_happened_to_task_databases_since_the_merge_is_told(tmp_path: Path) -> None:
    files = [task(tmp_path, index) for index in (0, 1, 2)]
    job, again = merged(tmp_path), f"badcjobs merge {tmp_path}"
    assert told(job) == ({"silent": 3}, 0, 0, 0, None)
    os.utime(files[0], (START_S + 60, START_S + 60))  # published again: what it says now, a merge would know
    assert told(job, 100) == ({"running": 3}, 1, 0, 0, again)
    assert told(job) == ({"outdated": 1, "silent": 2}, 1, 0, 0, again)
    merged(tmp_path)
    assert told(job) == ({"silent": 3}, 0, 0, 0, None)
    task(tmp_path, 0, "done", ended=True, restart=1)
    (tmp_path / "tasks" / "notes.sqlite").touch()
    assert told(job) == ({"silent": 3}, 0, 1, 0, again)
    elsewhere = shutil.copy(job, tmp_path / "elsewhere.sqlite")
    assert told(elsewhere)[-1] == f"badcjobs merge {tmp_path}/tasks -o {elsewhere}"


def test_a_copy_of_a_run_with_new_times_has_no_news_and_a_copy_of_the_job_alone_is_as_of_the_merge(
    tmp_path: Path,
) -> None:
    files = [task(tmp_path / "run", 0), task(tmp_path / "run", 1, "failed", ended=True), task(tmp_path / "run", 2)]
    for file in files[1:]:
        os.utime(file, (START_S + 9 * HOUR_S,) * 2)
    job, late = merged(tmp_path / "run"), (START_S + 9 * HOUR_S,) * 2
    copy = shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    for path in (copy / "job.sqlite", *(copy / "tasks" / file.name for file in files)):
        os.utime(path, late)
    assert told(copy / "job.sqlite") == ({"silent": 1, "done": 1, "running": 1}, 0, 0, 0, None)
    with (copy / "tasks" / files[1].name).open("ab") as grown:
        grown.write(bytes(4096))
    assert told(copy / "job.sqlite")[1] == 1
    (tmp_path / "laptop").mkdir()
    alone = Path(shutil.copy(job, tmp_path / "laptop" / "job.sqlite"))
    assert told(alone) == ({"silent": 1, "done": 1, "running": 1}, 0, 0, 1, None)


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


def test_a_report_of_a_job_that_has_ended_is_the_same_at_any_time_and_says_what_its_samples_say(tmp_path: Path) -> None:
    for index in range(2):
        TaskFile(tmp_path, index=index, states={f"c{index}": "done", f"d{index}": "failed"}, devices=2, samples=11,
                 reading=Reading(utilization_percent=60 + index, power_w=100.0),
                 gaps=[(2000, 5000, "the recorder was late")]).write()  # fmt: skip
    summary = summarize_database(merged(tmp_path), now_ms=START_MS)
    assert summary == summarize_database(tmp_path / "job.sqlite", now_ms=START_MS + 10**12)
    assert (summary.verdict, summary.tasks, summary.done, summary.failed) == ("failed", 2, 2, 2)
    for found in summary.devices:
        assert (found.samples, found.gap_s, found.energy_source) == (11, 3.0, "integrated power")
        assert found.energy_j == pytest.approx(1000.0)  # 100 W for the 10 s from the first sample to the last
    energies = [state.energy_wh or 0.0 for state in summary.states.values()]
    assert sum(energies) == pytest.approx(summary.energy_wh)
    assert sum(state.gpu_hours for state in summary.states.values()) == pytest.approx(summary.gpu_hours)
    assert [(gap.reason, gap.gaps, gap.seconds, gap.tasks) for gap in summary.facts.gaps] == [
        ("the recorder was late", 2, 6.0, 2)
    ]  # fmt: skip
    assert [(error.tries, error.devices) for error in summary.facts.errors] == [(2, 1)]


# --- paths ------------------------------------------------------------------------------------------------------------


def test_every_path_that_means_a_job_finds_it_and_others_are_answered(tmp_path: Path) -> None:
    run = tmp_path / "run"
    file = task(run, 0, "done", ended=True)
    for given in (run, run / "tasks"):
        with pytest.raises(DatabaseProblem, match=r"job\.sqlite does not exist") as caught:
            find_job_database(given)
        assert (caught.value.why, caught.value.fix) == ("the run has not been merged yet", f"badcjobs merge {run}")
    job = merged(run)
    assert [find_job_database(given) for given in (run, run / "tasks", job, file)] == [job, job, job, file]
    (tmp_path / "empty").mkdir()
    for given, what, fix in (
        (tmp_path / "empty", "is not a run folder", tmp_path / "empty"),
        (tmp_path / "no" / "where", "does not exist", tmp_path),
    ):
        with pytest.raises(DatabaseProblem, match=what) as caught:
            find_job_database(given)
        assert caught.value.fix == f"ls {fix}"
    targets = [default_target([given]) for given in (run, run / "tasks", file, tmp_path / "x.sqlite")]
    assert targets == [job, job, job, tmp_path / "job.sqlite"]


def test_a_task_database_is_reported_alone_and_jobs_of_one_name_are_compared_by_their_paths(tmp_path: Path) -> None:
    files = [task(tmp_path / name / "run", n, "done", ended=True) for n, name in enumerate("ab")]
    task(tmp_path / "a" / "run", 7, "failed", ended=True)
    jobs = [merged(tmp_path / name / "run") for name in "ab"]
    with report_job(files[0], CLOCK) as one:
        assert (one.title, one.summary.done, one.summary.failed, one.comparison) == (files[0].name, 1, 0, None)
        assert one.to_dict()["tasks"] == 1 and one.to_text().startswith(f"{files[0].name}: all done\n")
        assert one.to_markdown().startswith("# 4821") and 'run="4821_0' in one.to_prometheus()
    assert list((tmp_path / "a" / "run").glob("tasks/*merged*")) == []
    with report_job(jobs[0], CLOCK, jobs[1].parent) as two:
        assert two.comparison is not None
        assert (two.comparison.this["title"], two.comparison.other["title"]) == (str(jobs[0]), str(jobs[1].parent))
        assert two.to_dict()["version"] == 1 and two.to_markdown().startswith("# ")
        assert (
            f"{jobs[0]} is as fast as {jobs[1].parent}" in " ".join(two.to_text().split())
            or "cannot be" in two.to_text()
        )
    with report_job(jobs[0], CLOCK, files[1]) as two:
        assert two.comparison is not None and two.comparison.this["title"] == "run"


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("run/job.sqlite", "badcjobs merge {folder}/run"),
        ("run/july.db", "badcjobs merge {folder}/run -o {job}"),
        ("job.sqlite", "badcjobs merge RUN_FOLDER -o {job}"),
    ],
)
def test_a_damaged_job_database_is_put_aside_before_it_is_made_anew(tmp_path: Path, name: str, command: str) -> None:
    TaskFile(tmp_path / "run", states={"a-chunk-that-failed": "failed"}).write()
    job = merged(tmp_path / "run", tmp_path / name)
    garbage_page(job, page_with(job, b"a-chunk-that-failed: no luck"), seed=3)
    with pytest.raises(DatabaseProblem, match="cannot be read") as refused:
        read_job(job)
    assert refused.value.fix == f"mv {job} {job}.damaged && " + command.format(folder=tmp_path, job=job)
    with pytest.raises(DatabaseProblem), report_job(job, CLOCK):
        pass


# --- the page ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def summary(tmp_path: Path) -> Summary:
    task(tmp_path / "run", 0, "done", ended=True)
    return summarize_database(merged(tmp_path / "run"))


def test_a_page_is_written_whole_or_not_at_all_and_a_link_to_it_stays(tmp_path: Path, summary: Summary) -> None:
    web, job = tmp_path / "web", tmp_path / "run" / "job.sqlite"
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


def test_without_bokeh_the_page_has_no_charts_and_says_how_to_get_them(tmp_path: Path, summary: Summary) -> None:
    (tmp_path / "bokeh").mkdir()
    (tmp_path / "bokeh" / "__init__.py").write_text("raise ImportError('not here')\n")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import rooms\n"
        "from rooms.report import summarize_database, write_page\n"
        "job = Path(sys.argv[2]); write_page(summarize_database(job), Path(sys.argv[3]), job)\n"
    )
    argv = [sys.executable, "-c", script, str(tmp_path), str(tmp_path / "run" / "job.sqlite"), str(tmp_path / "a.html")]
    subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    text = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "pip install 'badcjobs[report]'" in text
    assert 'id="chart-data"' not in text and 'id="device-table"' in text
