"""What a submit or an emulation has left in a run folder, and what merge and report answer before any task has run."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import IO, Any

import pytest
from rooms.model import ArrayOrder, Submitted
from rooms.report import find_job_database, finish_job, summarize_database
from rooms.root import BadInput, DatabaseProblem, SystemClock
from rooms.store import (
    MergeOrder,
    Record,
    asked_of,
    differences,
    emulated_command,
    emulation_lock,
    find_trace,
    find_unbegun,
    folder_lock,
    forget_intent,
    is_emulated_now,
    is_emulation_over,
    last_submission,
    lock_file_in,
    merge,
    read_intent,
    read_record,
    refuse_during_emulation,
    submit_command,
    undo_on_error,
    write_intent,
    write_record,
)
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

ASKED = {"--sbatch=--array": "0-2", "--gpus-per-task": 1}


def record_in(out: Path, job_id: str = "4821", **more: Any) -> Record:
    words = ("run", "/data/m.csv", f"--out={out}", "--config=run.grace_s=2")
    return Record("slurm", Submitted(job_id, None, (0, 1, 2)), words, 6, START_MS, ASKED, **more)


def line_for(out: Path) -> str:
    return f"badcjobs submit /data/m.csv --out={out} --config=run.grace_s=2 --cluster=slurm --sbatch=--array=0-2"


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


def test_before_any_task_report_and_merge_name_what_was_submitted_and_the_command_that_helps(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    assert find_unbegun(tmp_path) is None
    record, monitor = record_in(tmp_path), f"badcjobs monitor {tmp_path}"
    write_intent(tmp_path, tmp_path / "job.sh", record)
    why = "a submit was interrupted here, or is still running; the same command finds its job"
    assert refusals(tmp_path) == {(why, line_for(tmp_path))}
    write_record(tmp_path, record)
    why = "the submit of job 4821 was interrupted, or is still running; the same command does the rest"
    assert refusals(tmp_path) == {(why, line_for(tmp_path))}
    forget_intent(tmp_path)
    why = "job 4821 was submitted; none of its tasks has published anything yet"
    assert refusals(tmp_path) == {(why, monitor)}
    (tmp_path / "submitted.json").unlink()
    with emulation_lock(tmp_path, ["badcjobs", "submit", "m.csv", f"--out={tmp_path}"]):
        assert refusals(tmp_path) == {
            ("an emulation is running; none of its tasks has published anything yet", monitor)
        }
    why = "no task is running and none will start: the emulation is over"
    assert refusals(tmp_path) == {(why, f"badcjobs submit m.csv --out={tmp_path}")}
    TaskFile(tmp_path).write()
    with pytest.raises(DatabaseProblem) as unmerged:
        find_job_database(tmp_path)
    assert unmerged.value.fix == f"badcjobs merge {tmp_path}"


def test_a_run_its_tasks_and_its_job_database_stand_for_the_same_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for run in (tmp_path / "run", tmp_path / "tasks"):  # a run folder may be called tasks itself
        tasks, job = TaskFile(run).write().parent, run / "job.sqlite"
        with pytest.raises(DatabaseProblem, match="does not exist") as unmerged:
            find_job_database(tasks)
        assert unmerged.value.fix == f"badcjobs merge {run}"
        merge(MergeOrder([run], job), SystemClock())
        monkeypatch.chdir(tasks)
        for given in (run, job, tasks, Path()):
            assert find_job_database(given).samefile(job)
    (run / "run.toml").write_text("[run]" + " " * 4096)
    with pytest.raises(DatabaseProblem) as refused:
        summarize_database(run / "run.toml")
    assert refused.value.fix == f"the same command with {job}"
    job.write_bytes(bytes(4096))
    with pytest.raises(DatabaseProblem) as damaged:
        summarize_database(job)
    assert damaged.value.fix == f"badcjobs merge {run}"


def test_a_report_knows_of_a_submit_that_was_cut_short_in_the_run_folder(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "july", tmp_path / "elsewhere.sqlite"
    TaskFile(run, states={"a": "done", "b": "pending"}).write()
    write_intent(run, run / "logs" / "job.sh", record_in(run, ""))
    merge(MergeOrder([run], elsewhere), HandClock(START_MS))
    summary = summarize_database(elsewhere)
    assert summary.cut_short is not None
    assert summary.cut_short.what.startswith("a submit was interrupted here")
    assert summary.cut_short.command == line_for(run)
    forget_intent(run)
    assert summarize_database(elsewhere).cut_short is None


# --- the record of a submission ---------------------------------------------------------------------------------------


def test_a_record_comes_back_as_it_was_written_and_a_damaged_one_is_refused_with_what_helps(tmp_path: Path) -> None:
    assert read_record(tmp_path) is read_intent(tmp_path) is None
    record = record_in(tmp_path, listed=3, left=5)
    write_record(tmp_path, record)
    write_intent(tmp_path, Path("job.sh"), record)
    assert (read_record(tmp_path), read_intent(tmp_path)) == (record, (Path("job.sh"), record))
    assert sorted(path.name for path in tmp_path.iterdir()) == [".submitting.json", "submitted.json"]
    for text in ("", "[]", "{}", '{"job": 1}', json.dumps({"job": {"indices": [1]}})):
        (tmp_path / "submitted.json").write_text(text)
        (tmp_path / ".submitting.json").write_text(text)
        with pytest.raises(BadInput, match="is damaged") as refused:
            read_record(tmp_path)
        path = tmp_path / "submitted.json"
        assert refused.value.fix == f"mv {path} {path}.old   (badcjobs then forgets that job)"
        assert read_intent(tmp_path) is None


def test_a_job_number_that_was_not_written_is_found_by_its_script(tmp_path: Path) -> None:
    def found(numbers: dict[str, str]) -> str | None:
        record = last_submission(tmp_path, lambda script: numbers.get(str(script)))
        return record and record.job.job_id

    old, new = record_in(tmp_path, "1"), record_in(tmp_path, "")
    assert found({}) is None
    write_intent(tmp_path, Path("job.sh"), Record(**{**vars_of(new), "submitted_at_ms": START_MS + 1}))
    assert (found({}), found({"job.sh": "2"})) == (None, "2")
    write_record(tmp_path, old)
    assert (found({}), found({"job.sh": "2"})) == ("1", "2")
    write_intent(tmp_path, Path("job.sh"), old)
    assert found({"job.sh": "2"}) == "1", "it was written"


def vars_of(record: Record) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_the_command_of_a_submission_has_the_options_that_are_not_defaults_and_differences_name_both_values() -> None:
    order = ArrayOrder(
        Path("/out"), (), tasks=2, gpus_per_task=2, cpus=7, mem="9G", time_min=90, account="a",
        extra_sbatch=("--qos=x",), setup=("module load x",), requeues=5,
    )  # fmt: skip
    asked = asked_of(order)
    words = ("run", "m.csv", "--out=/out", "--engine=demo", "--config=a.b=1")
    command = submit_command("slurm", words, asked)
    assert command == (
        "badcjobs", "submit", "m.csv", "--out=/out", "--config=a.b=1", "--cluster=slurm",
        *(word for word in command if word.startswith("--sbatch=--array")), "--gpus-per-task=2", "--cpus=7",
        "--mem=9G", "--time=90", "--account=a", "--sbatch=--qos=x",
        *(word for word in command if "job-name" in word), *(word for word in command if "submit.setup" in word),
        "--config=submit.requeues=5", "--", "--engine=demo",
    )  # fmt: skip
    assert differences(asked, asked) == []
    assert differences(asked, {**asked, "--account": None, "--sbatch": [], "--cpus": 8}) == [
        "--cpus was 7, now 8", "--account was a, now not given", "--sbatch was --qos=x, now not given",
    ]  # fmt: skip


# --- an emulation -----------------------------------------------------------------------------------------------------


def test_one_emulation_at_a_time_works_on_a_run_and_asking_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_emulated_now(tmp_path) and not is_emulation_over(tmp_path, "")
    assert (list(tmp_path.iterdir()), emulated_command(tmp_path)) == ([], ())
    with emulation_lock(tmp_path, ["badcjobs", "submit"]):
        assert is_emulated_now(tmp_path) and not is_emulation_over(tmp_path, "")
        with pytest.raises(BadInput, match=r"another emulation, process .*, is working on"):
            refuse_during_emulation(tmp_path)
        with pytest.raises(BadInput, match="is working on"), emulation_lock(tmp_path, ["another"]):
            pass
    refuse_during_emulation(tmp_path)
    assert not is_emulated_now(tmp_path) and is_emulation_over(tmp_path, "")
    assert not is_emulation_over(tmp_path, "1794"), "of another job"
    assert emulated_command(tmp_path) == ("badcjobs", "submit")
    looker, real = lock_file_in(tmp_path).open(), fcntl.flock
    real(looker, fcntl.LOCK_SH)  # who only looks does not stop an emulation

    def flock(file: IO[str], kind: int) -> None:
        if kind & fcntl.LOCK_SH:
            looker.close()
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with emulation_lock(tmp_path, ["x"]):
        assert looker.closed
    assert emulated_command(tmp_path) == ("x",)


def test_new_folders_of_a_run_are_removed_when_its_start_fails_but_never_what_is_in_them(tmp_path: Path) -> None:
    for keeps in (None, "tasks/x", "logs/x.out", "x"):
        out = tmp_path / str(keeps).replace("/", "-")
        with pytest.raises(ZeroDivisionError), undo_on_error(out), folder_lock(out), emulation_lock(out, ["x"]):
            if keeps:
                (out / keeps).parent.mkdir(exist_ok=True)
                (out / keeps).touch()
            raise ZeroDivisionError
        assert out.exists() is bool(keeps)
        assert keeps is None or (out / keeps).exists()
    there = tmp_path / "there"
    there.mkdir()
    with pytest.raises(ZeroDivisionError), undo_on_error(there):
        raise ZeroDivisionError
    assert there.exists()


def test_the_traces_of_a_job_are_for_the_folder_in_which_they_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def command(out: Path) -> tuple[str, ...]:
        return ("badcjobs", "submit", "m.csv", f"--out={out}", "--cluster=local")

    with emulation_lock(old, command(old)):
        logs = (old / "logs" / "1794_0.out", tmp_path / "own.log", tmp_path / "gone.log")
        states = ("PENDING", "RUNNING", "FAILED")
        rows = [
            {"index": n, "state": state, "log": str(log)}
            for n, (state, log) in enumerate(zip(states, logs, strict=True))
        ]
        rows.append({"index": 3, "state": "FAILED", "log": "x", "note": "exit code 4"})
        (old / "logs" / "1794.json").write_text(json.dumps({"tasks": rows}))
        for log in logs[:2]:
            log.touch()
        goes_on = {0: "waiting for its turn", 1: "has started", 2: "no information", 3: "exit code 4"}
        assert find_trace(old, "1794").notes == goes_on
    trace = find_trace(old, "1794")
    killed = {0: "never started: the emulation was killed", 1: "had started when the emulation was killed"}
    assert (trace.emulated, trace.notes, trace.command) == (True, goes_on | killed, command(old))
    assert is_emulation_over(old, "1794")
    old.rename(new)
    trace = find_trace(new, "1794")
    assert (trace.command, find_trace(new, "").command) == (command(new), command(new))
    assert [trace.log_of(index) for index in range(5)] == [
        str(new / "logs" / "1794_0.out"),
        str(logs[1]),
        None,
        None,
        None,
    ]
    old.symlink_to(new)
    assert find_trace(new, "1794").command == command(old), "it is the same folder: its own words are kept"
    write_record(new, record_in(Path("/gone/july")))
    write_intent(new, Path("/gone/july/logs/job.sh"), record_in(Path("/gone/july")))
    monkeypatch.chdir(new)
    found, trace = find_unbegun(Path()), find_trace(Path(), "4821")
    assert found is not None and found.command == trace.line() == line_for(new)
    assert trace.line("--resume").endswith(" --resume") and not trace.emulated
    assert trace.logs == {index: Path("logs") / f"4821_{index}_0_log.out" for index in (0, 1, 2)}
    assert find_trace(Path(), "4822").line() == "", "another job"
