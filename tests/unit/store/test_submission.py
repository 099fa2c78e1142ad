"""What a submit or an emulation has left in a run folder, and what merge and report answer before any task has run."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from rooms import store
from rooms.model import Submitted, TaskKey
from rooms.report import find_job_database, finish_job, summarize_database
from rooms.root import BadInput, DatabaseProblem, Holder, SystemClock
from rooms.store import Record, emulation_lock, find_trace, write_intent, write_record
from rooms.task import NOTES_VARIABLE, SPOOL_VARIABLE, announce
from support.databases import change, names_in, query
from support.task_files import START_MS, TaskFile, merge_run


def record_in(out, job_id="4821", **more):
    words = ("run", "/data/m.csv", f"--out={out}", "--config=run.grace_s=2")
    asked = {"--sbatch=--array": "0-2", "--gpus-per-task": 1}
    return Record("slurm", Submitted(job_id, None, (0, 1, 2)), words, 6, START_MS, asked, **more)


def line_for(out):
    return f"badcjobs submit /data/m.csv --out={out} --config=run.grace_s=2 --cluster=slurm --sbatch=--array=0-2"


def refusal(run):
    """Return what report and merge answer alike, of the run and of its tasks/: why, and what helps."""
    with pytest.raises(DatabaseProblem, match=r"job\.sqlite does not exist") as unreported:
        find_job_database(run)
    errors = [unreported.value]
    for given in (run, run / "tasks"):
        with pytest.raises(DatabaseProblem, match="no task database in ") as unmerged:
            finish_job(store.MergeOrder([given], run / "job.sqlite"), SystemClock())
        errors.append(unmerged.value)
    (reported,) = {f"why: {error.why}\ntry: {error.fix}\n" for error in errors}
    return reported.replace(str(run), "RUN")


def test_before_any_task_the_command_that_helps_is_named(tmp_path, pages):
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


def test_a_report_knows_of_a_submit_that_was_cut_short_in_the_run_folder(tmp_path):
    run, elsewhere = tmp_path / "tasks", tmp_path / "elsewhere.sqlite"  # a run may be called so
    TaskFile(run, states={"a": "done", "b": "pending"}).write()
    write_intent(run, run / "logs" / "job.sh", record_in(run, ""))
    for target in ("job.sqlite", str(elsewhere)):
        merge_run(run, target=target)
    assert {find_job_database(given) for given in (run, run / "tasks")} == {run / "job.sqlite"}
    cut_short = summarize_database(elsewhere).cut_short
    assert cut_short is not None and cut_short.what.startswith("a submit was interrupted here")
    assert cut_short.command == line_for(run)
    store.forget_intent(run)
    assert summarize_database(elsewhere).cut_short is None


def test_a_record_comes_back_as_it_was_written_and_a_damaged_one_is_refused_with_what_helps(tmp_path):
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


def test_a_job_number_that_was_not_written_is_found_by_its_script(tmp_path):
    def found(**numbers):
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


def test_one_emulation_at_a_time_works_on_a_run(tmp_path):
    def state(job=""):
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
    with emulation_lock(tmp_path, ["x"]):
        pass
    assert store.emulated_command(tmp_path) == ("x",)


def test_an_emulation_on_another_machine_lives_as_long_as_its_lease_changes(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    lease = logs / ".emulation-0"
    lease.write_text(json.dumps(asdict(Holder("another-node", 77, "another-boot x 77 1", 10.0, START_MS, works=True))))
    assert store.is_emulated_now(tmp_path)
    with pytest.raises(BadInput, match="another emulation is working on"):
        store.refuse_during_emulation(tmp_path)
    now_s = lease.stat().st_mtime
    for silent_s, is_alive in ((25, True), (35, False)):
        os.utime(lease, (now_s - silent_s,) * 2)
        assert store.is_emulated_now(tmp_path) is is_alive
    lease.write_text("{")
    assert not store.is_emulated_now(tmp_path)


def test_new_folders_of_a_run_are_removed_when_its_start_fails_but_never_what_is_in_them(tmp_path):
    def fail(out, keeps=""):
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


def test_traces_are_for_the_folder_where_they_are_found(tmp_path, monkeypatch):
    old, new = tmp_path / "old", tmp_path / "new"

    def command(out):
        return ("badcjobs", "submit", "m.csv", f"--out={out}", "--cluster=local")

    with emulation_lock(old, command(old)):
        logs = [old / "logs" / "1794_0.out", tmp_path / "own.log", tmp_path / "gone.log", Path("x")]
        states = ("PENDING", "RUNNING", "FAILED", "FAILED")
        rows = [{"index": n, "state": states[n], "log": str(logs[n])} for n in range(4)]
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
    write_record(new, record_in(Path("/gone/july")))
    write_intent(new, Path("/gone/july/logs/job.sh"), record_in(Path("/gone/july")))
    monkeypatch.chdir(new)
    unbegun, trace = store.find_unbegun(Path()), find_trace(Path(), "4821")
    assert unbegun is not None and unbegun.command == trace.line() == line_for(new)
    assert trace.line("--resume").endswith(" --resume") and not trace.emulated
    assert trace.logs == {index: Path("logs") / f"4821_{index}_0_log.out" for index in (0, 1, 2)}
    assert find_trace(Path(), "4822").line() == "", "another job"


UNTOLD = (None, None, None)


def merged(run):
    """Merge, and return what the tasks say of their end, in the order of their index and start."""
    merge_run(run)
    columns = "slurm_state, slurm_exit_code, slurm_reason"
    return query(run / "job.sqlite", f"SELECT {columns} FROM task ORDER BY array_index, started_at_ms")


RECORDS = {
    **dict.fromkeys(("", "{", "[]", "7", "\0\xff"), UNTOLD),
    '7\n{"a": 1}': ("ENDED", None, None),
    '{"exit_code": {"a": 1}, "written_by": 4, "state": ""}': ("ENDED", None, None),
    '{"exit_code": "0:9", "written_by": "epilog"}': ("ENDED", "0:9", "epilog"),
    '{"state": "FAILED", "exit_code": "1:0"}\n{"state": "DONE"}': ("FAILED", "1:0", None),
}


def test_the_record_beside_a_task_database_is_read_where_it_makes_sense(tmp_path):
    files = [TaskFile(tmp_path, index=n, samples=0).write() for n in range(len(RECORDS) + 1)]
    for path, text in zip(files, RECORDS, strict=False):
        path.with_suffix(".slurm.json").write_text(text)
    os.mkfifo(files[-1].with_suffix(".slurm.json"))  # keeps no one waiting
    assert merged(tmp_path) == [*RECORDS.values(), UNTOLD]
    assert [store.read_end_beside(path) for path in files] == [*(end[0] for end in RECORDS.values()), None]


def test_a_record_that_comes_later_is_news_and_what_is_known_stays_without_it(tmp_path):
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


def ask(run, **task):
    """Write a task that has asked for the ends of its job in a shared folder; that unseals it."""
    database = TaskFile(run, samples=0, **task).write()
    return change(database, "INSERT INTO meta VALUES ('slurm_spool', ?)", str(run / "spool"))


def end(run, state, index, from_s=0, to_s=60, exit_code="0:0"):
    reported = {"array_index": index, "state": state, "exit_code": exit_code, "written_by": "jobcomp"}
    reported |= {"start_s": START_MS // 1000 + from_s, "end_s": START_MS // 1000 + to_s}
    ends = run / "spool" / "ends" / "4821.jsonl"
    ends.parent.mkdir(parents=True, exist_ok=True)
    with ends.open("a") as file:
        file.write(json.dumps(reported) + "\n")


# The runs that the controller knows, in seconds from the start of the task, and which of them is the task's own: begun
# when the first had ended; ended just before the second; a clock that is 4 s ahead; 5 s are near enough, 6 s are not.
RUNS = {"-60 -2, -1 60": 1, "-1 2, 4 60": 0, "4 9, 99 199": 0, "5 9": 0, "6 9": None, "-99 -5": 0, "-99 -6": None,
        "-1 60, -3 60": 0}  # fmt: skip


def test_of_two_runs_the_one_that_began_nearer_is_the_tasks_own(tmp_path):
    for restart in range(3):  # each attempt of a requeued task has the end of its own run
        ask(tmp_path, index=9, restart=restart, started_at_ms=START_MS + restart * 100_000)
    for index in range(len(RUNS)):
        ask(tmp_path, index=index)
    for index, known in [*enumerate(RUNS), (9, "-1 90, 99 190")]:
        for number, run in enumerate(known.split(", ")):
            end(tmp_path, f"RUN{number}", index, *map(int, run.split()))
    assert [state and int(state[3:]) for state, _, _ in merged(tmp_path)] == [*RUNS.values(), 0, 1, None]
    end(tmp_path, "COMPLETED", 9, 199, 290)
    assert merged(tmp_path)[-1] == ("COMPLETED", "0:0", "jobcomp")


def test_the_controller_knows_the_state_and_the_node_the_exit_code(tmp_path):
    ask(tmp_path, index=0).with_suffix(".slurm.json").write_text('{"exit_code": "0:9", "written_by": "epilog"}')
    ask(tmp_path, index=1)
    TaskFile(tmp_path, index=2, samples=0).write()  # has not asked
    local = ask(tmp_path, index=3, job_id="local17")
    end(tmp_path, "OUT_OF_MEMORY", 0, exit_code=None)
    ends = tmp_path / "spool" / "ends"
    (ends / "local17.jsonl").write_text('{"state": "X", "start_s": 0, "end_s": 9999999999}')
    with (ends / "4821.jsonl").open("a") as file:
        file.write('{"state": "TIMEOUT"}\n[]\n{"start_s": "x"}\n')
    for state, index in (("FAILED", "1"), ("CANCELLED", 1), ("TIMEOUT", 2)):
        end(tmp_path, state, index)
    known = [("OUT_OF_MEMORY", "0:9", "jobcomp"), ("CANCELLED", "0:0", "jobcomp"), UNTOLD, UNTOLD]
    assert merged(tmp_path) == known
    local.unlink()
    end(tmp_path, "DEADLINE", None)  # not an array
    ask(tmp_path, index=5)
    assert merged(tmp_path) == [*known, ("DEADLINE", "0:0", "jobcomp")]


def test_a_task_announces_itself_only_where_it_is_invited_and_in_the_notes_of_its_own_job_alone(tmp_path):
    def announced(job="4828", **asked):
        environ = {"SLURM_JOB_ID": job, **{name: str(path) for name, path in asked.items()}}
        return announce(environ, TaskKey("4821", 7, 0, "gpu1"), Path("/run/tasks/4821_7.r0.gpu1.sqlite"))

    notes, target, link = (tmp_path / name for name in ("4828.batch.0.r0.gpu1", "target", "4828.link"))
    notes.write_text("{}\n")
    target.write_text("untouched")
    link.symlink_to(target)
    (tmp_path / "wanted").mkdir()
    assert announced() == {}
    for job in ("4828", "482", "9999"):
        announced(job, **{NOTES_VARIABLE: notes})
    assert notes.read_text() == "{}\n/run/tasks/4821_7.r0.gpu1.sqlite\n"
    for refused in (link, tmp_path / "4828.none"):
        announced(**{NOTES_VARIABLE: refused})
    assert target.read_text() == "untouched" and not (tmp_path / "4828.none").exists()
    for folder in (tmp_path, tmp_path, tmp_path / "none"):
        asked = {SPOOL_VARIABLE: folder, NOTES_VARIABLE: folder / "none" / "4828.x"}
        assert announced(**asked) == {"slurm_spool": str(folder)}
    assert [path.name for path in (tmp_path / "wanted").iterdir()] == ["4821"]
