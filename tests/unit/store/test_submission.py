"""What a submit or an emulation has left in a run folder, and what merge and report answer before any task has run."""

from __future__ import annotations

import fcntl
import json
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from rooms import store
from rooms.model import ArrayOrder, Submitted
from rooms.report import find_job_database, finish_job, summarize_database
from rooms.root import BadInput, DatabaseProblem, SystemClock
from rooms.store import MergeOrder, Record, emulation_lock, find_trace, write_intent, write_record
from support.databases import names_in
from support.pages import Pages
from support.task_files import START_MS, TaskFile, merge_run


def record_in(out: Path, job_id: str = "4821", **more: Any) -> Record:
    words = ("run", "/data/m.csv", f"--out={out}", "--config=run.grace_s=2")
    asked = {"--sbatch=--array": "0-2", "--gpus-per-task": 1}
    return Record("slurm", Submitted(job_id, None, (0, 1, 2)), words, 6, START_MS, asked, **more)


def line_for(out: Path) -> str:
    return f"badcjobs submit /data/m.csv --out={out} --config=run.grace_s=2 --cluster=slurm --sbatch=--array=0-2"


def refusal(run: Path) -> str:
    """Return what report and merge answer alike, of the run and of its tasks/: why, and what helps."""
    with pytest.raises(DatabaseProblem, match=r"job\.sqlite does not exist") as unreported:
        find_job_database(run)
    errors = [unreported.value]
    for given in (run, run / "tasks"):
        with pytest.raises(DatabaseProblem, match="no task database in ") as unmerged:
            finish_job(MergeOrder([given], run / "job.sqlite"), SystemClock())
        errors.append(unmerged.value)
    (told,) = {f"why: {error.why}\ntry: {error.fix}\n" for error in errors}
    return told.replace(str(run), "RUN")


def test_before_any_task_the_command_that_helps_is_named(tmp_path: Path, pages: Pages) -> None:
    (tmp_path / "tasks").mkdir()
    assert store.find_unbegun(tmp_path) is None
    write_intent(tmp_path, tmp_path / "job.sh", record_in(tmp_path))
    said = ["a submit that was killed", refusal(tmp_path)]
    write_record(tmp_path, record_in(tmp_path))
    said += ["with a job number", refusal(tmp_path)]
    store.forget_intent(tmp_path)
    said += ["a submit", refusal(tmp_path)]
    (tmp_path / "submitted.json").unlink()
    with emulation_lock(tmp_path, ["badcjobs", "submit", "m.csv", f"--out={tmp_path}"]):
        said += ["an emulation", refusal(tmp_path)]
    said += ["that is over", refusal(tmp_path)]
    pages({"said.txt": "\n".join(said)})


def test_a_run_and_its_files_stand_for_the_same_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for run in (tmp_path / "run", tmp_path / "tasks"):  # a run folder may be called tasks itself
        tasks, job = TaskFile(run).write().parent, run / "job.sqlite"
        for given in (run, tasks):
            with pytest.raises(DatabaseProblem, match="does not exist") as unmerged:
                find_job_database(given)
            assert unmerged.value.fix == f"badcjobs merge {run}"
        merge_run(run)
        monkeypatch.chdir(tasks)
        for given in (run, job, tasks, Path()):
            assert find_job_database(given).samefile(job)
    (run / "run.toml").write_text("[run]" + " " * 4096)
    for given, fix in ((run / "run.toml", f"the same command with {job}"), (job, f"badcjobs merge {run}")):
        if given == job:
            job.write_bytes(bytes(4096))
        with pytest.raises(DatabaseProblem) as refused:
            summarize_database(given)
        assert refused.value.fix == fix


def test_a_report_knows_of_a_submit_that_was_cut_short_in_the_run_folder(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "july", tmp_path / "elsewhere.sqlite"
    TaskFile(run, states={"a": "done", "b": "pending"}).write()
    write_intent(run, run / "logs" / "job.sh", record_in(run, ""))
    merge_run(run, target=str(elsewhere))
    cut_short = summarize_database(elsewhere).cut_short
    assert cut_short is not None and cut_short.what.startswith("a submit was interrupted here")
    assert cut_short.command == line_for(run)
    store.forget_intent(run)
    assert summarize_database(elsewhere).cut_short is None


def test_a_record_comes_back_as_it_was_written_and_a_damaged_one_is_refused_with_what_helps(tmp_path: Path) -> None:
    assert store.read_record(tmp_path) is store.read_intent(tmp_path) is None
    record, path = record_in(tmp_path, listed=3, left=5), tmp_path / "submitted.json"
    write_record(tmp_path, record)
    write_intent(tmp_path, Path("job.sh"), record)
    assert (store.read_record(tmp_path), store.read_intent(tmp_path)) == (record, (Path("job.sh"), record))
    assert names_in(tmp_path) == [".submitting.json", "submitted.json"]
    for text in ("", "[]", "{}", '{"job": 1}', json.dumps({"job": {"indices": [1]}})):
        path.write_text(text)
        (tmp_path / ".submitting.json").write_text(text)
        with pytest.raises(BadInput, match="is damaged") as refused:
            store.read_record(tmp_path)
        assert refused.value.fix == f"mv {path} {path}.old   (badcjobs then forgets that job)"
        assert store.read_intent(tmp_path) is None


def test_a_job_number_that_was_not_written_is_found_by_its_script(tmp_path: Path) -> None:
    def found(**numbers: str) -> str | None:
        record = store.last_submission(tmp_path, lambda script: numbers.get(script.stem))
        return record and record.job.job_id

    old, new = record_in(tmp_path, "1"), replace(record_in(tmp_path, ""), submitted_at_ms=START_MS + 1)
    assert found() is None
    write_intent(tmp_path, Path("job.sh"), new)
    assert (found(), found(job="2")) == (None, "2")
    write_record(tmp_path, old)
    assert (found(), found(job="2")) == ("1", "2")
    write_intent(tmp_path, Path("job.sh"), old)
    assert found(job="2") == "1", "it was written"


def test_the_command_of_a_submission_has_the_options_that_are_not_defaults(
    pages: Pages,
) -> None:
    order = ArrayOrder(
        Path("/out"), (), tasks=2, gpus_per_task=2, cpus=7, mem="9G", time_min=90, account="a",
        extra_sbatch=("--qos=x",), setup=("module load x",), requeues=5,
    )  # fmt: skip
    asked, words = store.asked_of(order), ("run", "m.csv", "--out=/out", "--engine=demo", "--config=a.b=1")
    plain = store.asked_of(ArrayOrder(Path("/out"), (), tasks=2))
    said = [*store.submit_command("slurm", words, asked), "", *store.submit_command("slurm", words, plain), ""]
    assert store.differences(asked, asked) == []
    pages({"said.txt": "\n".join([*said, *store.differences(asked, plain)])})


def test_one_emulation_at_a_time_works_on_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def state(job: str = "") -> tuple[bool, bool]:
        return store.is_emulated_now(tmp_path), store.is_emulation_over(tmp_path, job)

    assert (state(), names_in(tmp_path), store.emulated_command(tmp_path)) == ((False, False), [], ())
    with emulation_lock(tmp_path, ["badcjobs", "submit"]):
        assert state() == (True, False)
        with pytest.raises(BadInput, match=r"another emulation, process .*, is working on"):
            store.refuse_during_emulation(tmp_path)
        with pytest.raises(BadInput, match="is working on"), emulation_lock(tmp_path, ["another"]):
            pass
    store.refuse_during_emulation(tmp_path)
    assert (state(), state("1794")) == ((False, True), (False, False)), "that is another job"
    assert store.emulated_command(tmp_path) == ("badcjobs", "submit")
    looker, real = store.lock_file_in(tmp_path).open(), fcntl.flock
    real(looker, fcntl.LOCK_SH)  # who only looks does not stop an emulation

    def flock(file: IO[str], kind: int) -> None:
        if kind & fcntl.LOCK_SH:
            looker.close()
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with emulation_lock(tmp_path, ["x"]):
        assert looker.closed
    assert store.emulated_command(tmp_path) == ("x",)


def test_new_folders_of_a_run_are_removed_when_its_start_fails_but_never_what_is_in_them(tmp_path: Path) -> None:
    def fail(out: Path, keeps: str = "") -> bool:
        with pytest.raises(ZeroDivisionError), store.undo_on_error(out), store.folder_lock(out):
            if keeps:
                (out / keeps).parent.mkdir(exist_ok=True)
                (out / keeps).touch()
            with emulation_lock(out, ["x"]):
                raise ZeroDivisionError
        return (out / keeps).exists()

    there = tmp_path / "there"
    there.mkdir()
    assert (fail(tmp_path / "new"), fail(there)) == (False, True)
    assert all(fail(tmp_path / keeps.replace("/", "-"), keeps) for keeps in ("tasks/x", "logs/x.out", "x"))


def test_traces_are_for_the_folder_where_they_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def command(out: Path) -> tuple[str, ...]:
        return ("badcjobs", "submit", "m.csv", f"--out={out}", "--cluster=local")

    with emulation_lock(old, command(old)):
        logs = [old / "logs" / "1794_0.out", tmp_path / "own.log", tmp_path / "gone.log", Path("x")]
        states = ("PENDING", "RUNNING", "FAILED", "FAILED")
        rows: list[dict[str, Any]] = [{"index": n, "state": states[n], "log": str(logs[n])} for n in range(4)]
        rows[3]["note"] = "exit code 4"
        (old / "logs" / "1794.json").write_text(json.dumps({"tasks": rows}))
        for log in logs[:2]:
            log.touch()
        goes_on = {0: "waiting for its turn", 1: "has started", 2: "no information", 3: "exit code 4"}
        assert find_trace(old, "1794").notes == goes_on
    trace = find_trace(old, "1794")
    killed = {0: "never started: the emulation was killed", 1: "had started when the emulation was killed"}
    assert (trace.emulated, trace.notes, trace.command) == (True, goes_on | killed, command(old))
    assert store.is_emulation_over(old, "1794")
    old.rename(new)
    trace = find_trace(new, "1794")
    assert trace.command == find_trace(new, "").command == command(new)
    found = [new / "logs" / "1794_0.out", logs[1], None, None, None]
    assert [trace.log_of(index) for index in range(5)] == [log and str(log) for log in found]
    old.symlink_to(new)
    assert find_trace(new, "1794").command == command(old), "it is the same folder: its own words are kept"
    write_record(new, record_in(Path("/gone/july")))
    write_intent(new, Path("/gone/july/logs/job.sh"), record_in(Path("/gone/july")))
    monkeypatch.chdir(new)
    unbegun, trace = store.find_unbegun(Path()), find_trace(Path(), "4821")
    assert unbegun is not None and unbegun.command == trace.line() == line_for(new)
    assert trace.line("--resume").endswith(" --resume") and not trace.emulated
    assert trace.logs == {index: Path("logs") / f"4821_{index}_0_log.out" for index in (0, 1, 2)}
    assert find_trace(Path(), "4822").line() == "", "another job"
