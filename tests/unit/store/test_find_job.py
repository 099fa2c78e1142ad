"""Which job database a report is of, and what helps whoever has named something else."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.model import Submitted
from rooms.report import find_job_database, finish_job, summarize_database
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import MergeOrder, Record, emulation_lock, forget_intent, merge, write_intent, write_record
from support.task_files import TaskFile


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


# --- no task has left anything yet ------------------------------------------------------------------------------------


def refusals(run: Path) -> set[tuple[str | None, str | None]]:
    """Return what report and merge answer, of the run and of its tasks/: why, and what helps."""
    with pytest.raises(DatabaseProblem, match=r"job\.sqlite does not exist") as unreported:
        find_job_database(run)
    errors = [unreported.value]
    for given in (run, run / "tasks"):
        with pytest.raises(DatabaseProblem, match="no task database in ") as unmerged:
            finish_job(MergeOrder([given], run / "job.sqlite"), SystemClock())
        errors.append(unmerged.value)
    return {(error.why, error.fix) for error in errors}


def test_where_a_submit_was_cut_short_before_any_task_report_and_merge_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    asked = {"--array": "0-2", "--gpus-per-task": 1}
    words = ("run", "/data/m.csv", f"--out={tmp_path}")
    record = Record("slurm", Submitted("4821", None, (0, 1, 2)), words, 6, 1, asked)
    line = f"badcjobs submit /data/m.csv --out={tmp_path} --cluster=slurm --array=0-2"
    write_intent(tmp_path, tmp_path / "job.sh", record)
    why = "a submit was interrupted here, or is still running; the same command finds its job"
    assert refusals(tmp_path) == {(why, line)}
    write_record(tmp_path, record)
    why = "the submit of job 4821 was interrupted, or is still running; the same command does the rest"
    assert refusals(tmp_path) == {(why, line)}
    forget_intent(tmp_path)
    why = "job 4821 was submitted; none of its tasks has published anything yet"
    assert refusals(tmp_path) == {(why, f"badcjobs monitor {tmp_path}")}
    TaskFile(tmp_path).write()
    with pytest.raises(DatabaseProblem) as unmerged:
        find_job_database(tmp_path)
    assert unmerged.value.fix == f"badcjobs merge {tmp_path}"


def test_where_an_emulation_was_stopped_before_any_task_report_and_merge_name_the_command(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    with emulation_lock(tmp_path, ["badcjobs", "submit", "m.csv", f"--out={tmp_path}"]):
        why = "an emulation is running; none of its tasks has published anything yet"
        assert refusals(tmp_path) == {(why, f"badcjobs monitor {tmp_path}")}
    why = "no task is running and none will start: the emulation is over"
    assert refusals(tmp_path) == {(why, f"badcjobs submit m.csv --out={tmp_path}")}
