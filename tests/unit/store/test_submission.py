"""What a submit or an emulation has left in a run folder, and what merge and report answer before any task has run."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import pytest
from rooms import store
from rooms.model import ArrayOrder, Submitted, TaskKey
from rooms.report import find_job_database, finish_job, summarize_database
from rooms.root import BadInput, DatabaseProblem, SystemClock
from rooms.store import Record, emulation_lock, find_trace, write_intent, write_record
from rooms.task import NOTES_VARIABLE, SPOOL_VARIABLE, announce
from support.databases import change, names_in, query
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
            finish_job(store.MergeOrder([given], run / "job.sqlite"), SystemClock())
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


def test_the_command_of_a_submission_has_the_options_that_are_not_defaults(pages: Pages) -> None:
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


START_S = START_MS // 1000
UNTOLD = (None, None, None)


def merged(run: Path) -> list[tuple[Any, ...]]:
    """Merge, and return what the tasks say of their end, in the order of their index and start."""
    merge_run(run)
    columns = "slurm_state, slurm_exit_code, slurm_reason"
    return query(run / "job.sqlite", f"SELECT {columns} FROM task ORDER BY array_index, started_at_ms")


RECORDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("", "{", "[]", "7", "\0\xff"), UNTOLD),
    '7\n{"a": 1}': ("ENDED", None, None),
    '{"exit_code": {"a": 1}, "written_by": 4, "state": ""}': ("ENDED", None, None),
    '{"exit_code": "0:9", "written_by": "epilog"}': ("ENDED", "0:9", "epilog"),
    '{"state": "FAILED", "exit_code": "1:0"}\n{"state": "DONE"}': ("FAILED", "1:0", None),
}


def test_the_record_beside_a_task_database_is_read_where_it_makes_sense(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, samples=0).write() for n in range(len(RECORDS) + 1)]
    for path, text in zip(files, RECORDS, strict=False):
        path.with_suffix(".slurm.json").write_text(text)
    os.mkfifo(files[-1].with_suffix(".slurm.json"))  # keeps nobody waiting
    assert merged(tmp_path) == [*RECORDS.values(), UNTOLD]
    assert [store.read_end_beside(path) for path in files] == [*(end[0] for end in RECORDS.values()), None]


def test_a_record_that_comes_later_is_news_and_what_is_known_stays_without_it(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, states={"a": "pending"}, verdict="killed")
    record = task.write().with_suffix(".slurm.json")
    assert merged(tmp_path) == [UNTOLD]
    record.write_text('{"written_by": "task_epilog"}')
    assert merged(tmp_path) == [("ENDED", None, "task_epilog")]
    record.write_text('{"written_by": "another"}')
    task.states = {"a": "done"}
    task.write()
    for _ in range(2):
        assert merged(tmp_path) == [("ENDED", None, "task_epilog")]
        record.unlink(missing_ok=True)
    assert query(tmp_path / "job.sqlite", "SELECT status FROM chunk") == [("done",)]


class Spool:
    """A shared folder, and tasks that have asked for their job's ends there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder / "spool", folder / "run"
        (self.folder / "ends").mkdir(parents=True)

    def write(self, **task: Any) -> Path:
        database = TaskFile(self.run, samples=0, **task).write()
        return change(database, "INSERT INTO meta VALUES ('slurm_spool', ?)", str(self.folder))  # unsealed by that

    def end(self, state: str, start_s: int, end_s: int, **more: object) -> None:
        told = {"array_index": 0, "state": state, "exit_code": "0:0", "start_s": start_s, "end_s": end_s, **more}
        with (self.folder / "ends" / "4821.jsonl").open("a") as file:
            file.write(json.dumps({**told, "written_by": "jobcomp"}) + "\n")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path)


def test_of_two_runs_the_one_that_began_nearer_is_the_tasks_own(spool: Spool) -> None:
    """Array index → the runs that the controller knows, from the start of the task, and which of them is its own."""
    runs: dict[int, tuple[list[tuple[int, int]], int | None]] = {
        0: ([(-60, -2), (-1, 60)], 1),  # begun when the first run had ended
        1: ([(-1, 2), (4, 60)], 0),  # ended just before the second run
        2: ([(4, 9), (99, 199)], 0),  # a clock that is 4 s ahead
        3: ([(5, 9)], 0),
        4: ([(6, 9)], None),
        5: ([(-99, -5)], 0),
        6: ([(-99, -6)], None),
        7: ([(-1, 60), (-3, 60)], 0),
    }
    for restart in range(3):  # each attempt of a requeued task has the end of its own run
        spool.write(index=9, restart=restart, started_at_ms=START_MS + restart * 100_000)
    for number, (from_s, to_s) in enumerate(((-1, 90), (99, 190))):
        spool.end(f"RUN{number}", START_S + from_s, START_S + to_s, array_index=9)
    for index, (known, _) in runs.items():
        spool.write(index=index)
        for number, (from_s, to_s) in enumerate(known):
            spool.end(f"RUN{number}", START_S + from_s, START_S + to_s, array_index=index)
    wanted = [own for _, own in runs.values()]
    assert [state and int(state[3:]) for state, _, _ in merged(spool.run)] == [*wanted, 0, 1, None]
    spool.end("COMPLETED", START_S + 199, START_S + 290, array_index=9)
    assert merged(spool.run)[-1] == ("COMPLETED", "0:0", "jobcomp")


def test_the_controller_knows_the_state_and_the_node_the_exit_code(spool: Spool) -> None:
    spool.write(index=0).with_suffix(".slurm.json").write_text('{"exit_code": "0:9", "written_by": "epilog"}')
    spool.write(index=1)
    TaskFile(spool.run, index=2, samples=0).write()  # has not asked
    local = spool.write(index=3, job_id="local17")
    (spool.folder / "ends" / "local17.jsonl").write_text('{"state": "X", "start_s": 0, "end_s": 9999999999}')
    (spool.folder / "ends" / "4821.jsonl").write_text('{"state": "TIMEOUT"}\n[]\n{"start_s": "x"}\n')
    spool.end("FAILED", START_S, START_S + 60, array_index="1")
    spool.end("OUT_OF_MEMORY", START_S, START_S + 60, exit_code=None)
    spool.end("CANCELLED", START_S, START_S + 60, array_index=1)
    spool.end("TIMEOUT", START_S, START_S + 60, array_index=2)
    ends = [("OUT_OF_MEMORY", "0:9", "jobcomp"), ("CANCELLED", "0:0", "jobcomp"), UNTOLD, UNTOLD]
    assert merged(spool.run) == ends
    local.unlink()
    spool.end("DEADLINE", START_S, START_S + 60, array_index=None)  # not an array
    spool.write(index=5)
    assert merged(spool.run) == [*ends, ("DEADLINE", "0:0", "jobcomp")]


KEY = TaskKey("4821", 7, 0, "gpu1")
DATABASE = Path("/scratch/run/tasks/4821_7.r0.gpu1.sqlite")


def test_a_task_announces_itself_only_where_it_is_invited_and_in_the_notes_of_its_own_job_alone(tmp_path: Path) -> None:
    notes, target, link = (tmp_path / name for name in ("4828.batch.0.r0.gpu1", "target", "4828.link"))
    notes.write_text("{}\n")
    target.write_text("untouched")
    link.symlink_to(target)
    (tmp_path / "wanted").mkdir()
    assert announce({"SLURM_JOB_ID": "4828"}, KEY, DATABASE) == {}
    for job in ("4828", "482", "9999"):
        announce({"SLURM_JOB_ID": job, NOTES_VARIABLE: str(notes)}, KEY, DATABASE)
    assert notes.read_text() == f"{{}}\n{DATABASE}\n"
    for refused in (link, tmp_path / "4828.none"):
        announce({"SLURM_JOB_ID": "4828", NOTES_VARIABLE: str(refused)}, KEY, DATABASE)
    assert target.read_text() == "untouched" and not (tmp_path / "4828.none").exists()
    for folder in (tmp_path, tmp_path, tmp_path / "none"):
        asked = {"SLURM_JOB_ID": "4828", SPOOL_VARIABLE: str(folder), NOTES_VARIABLE: str(folder / "none" / "4828.x")}
        assert announce(asked, KEY, DATABASE) == {"slurm_spool": str(folder)}
    assert [path.name for path in (tmp_path / "wanted").iterdir()] == ["4821"]
