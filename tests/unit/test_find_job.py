"""Which job database a report is of, and what helps whoever has named something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.task_files import TaskFile

from badcjobs.clock import SystemClock
from badcjobs.errors import DatabaseProblem
from badcjobs.job import find_job_database, summarize_database
from badcjobs.store.merging.merge import MergeOrder, merge


def test_the_tasks_of_a_run_stand_for_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, job = TaskFile(tmp_path).write().parent, tmp_path / "job.sqlite"
    with pytest.raises(DatabaseProblem, match="does not exist") as unmerged:
        find_job_database(tasks)
    assert unmerged.value.fix == f"badcjobs merge {tmp_path}"
    merge(MergeOrder([tmp_path], job), SystemClock())
    monkeypatch.chdir(tasks)
    for given in (tmp_path, job, tasks, Path()):
        assert find_job_database(given).samefile(job)


def test_a_run_folder_may_be_called_tasks_itself(tmp_path: Path) -> None:
    run = tmp_path / "tasks"
    TaskFile(run).write()
    merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
    assert find_job_database(run) == run / "job.sqlite"
    (run / "job.sqlite").unlink()
    with pytest.raises(DatabaseProblem) as unmerged:
        find_job_database(run)
    assert unmerged.value.fix == f"badcjobs merge {run}"


def test_whoever_names_another_file_of_the_run_is_told_of_its_job_database(tmp_path: Path) -> None:
    TaskFile(tmp_path).write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    (tmp_path / "run.toml").write_text("[run]" + " " * 4096)
    (tmp_path / "empty").touch()
    for name in ("run.toml", "empty"):
        with pytest.raises(DatabaseProblem) as refused:
            summarize_database(tmp_path / name)
        assert refused.value.fix == f"the same command with {tmp_path}/job.sqlite"
    (tmp_path / "job.sqlite").write_bytes(bytes(4096))
    with pytest.raises(DatabaseProblem) as damaged:
        summarize_database(tmp_path / "job.sqlite")
    assert damaged.value.fix == f"badcjobs merge {tmp_path}"
