"""How the tasks of a job ended, put together from what there is; as users meet it: flow/test_submit_verdict.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.cluster import (
    TaskOutcome,
    end_lines,
    find_ends,
    finished_all_chunks,
    headline,
    no_task_started,
    parse_ends,
    parse_exit_code,
    verdict_of,
)
from rooms.model import JobStates, Submitted
from rooms.root import RunFolder, SystemClock
from rooms.store import MergeOrder, merge
from support.task_files import START_MS, TaskFile

JOB = Submitted("4821", None, (0, 1, 2))


@pytest.fixture(autouse=True)
def no_accounting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))


def states(run: Path, **known: str) -> list[str | None]:
    array = {int(key.removeprefix("t")): state for key, state in known.items()}
    return [end.state for end in find_ends(JOB, JobStates(array), RunFolder(run), run / "logs")]


def end(state: str | None, exit_code: int | None = None, index: int | None = 0, *, worked: bool = False) -> TaskOutcome:
    return TaskOutcome(index, state, exit_code, Path("/nowhere/4821_0_0_log.out"), worked)


def test_without_any_word_nobody_knows(tmp_path: Path) -> None:
    assert states(tmp_path) == [None, None, None]
    assert states(tmp_path, t0="COMPLETED", t1="RUNNING") == ["COMPLETED", None, None]


def test_the_last_attempt_of_its_own_job_counts(tmp_path: Path) -> None:
    TaskFile(tmp_path, index=0, verdict="stopped", states={"c0": "pending"}).write()
    TaskFile(tmp_path, index=0, restart=1, states={"c0": "done"}, started_at_ms=START_MS + 60_000).write()
    TaskFile(tmp_path, index=1, verdict="failed", states={"c1": "failed"}).write()
    TaskFile(tmp_path, index=2, job_id="4000", states={"c2": "done"}).write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    assert states(tmp_path) == ["COMPLETED", "FAILED", None]
    assert states(tmp_path, t1="OUT_OF_MEMORY") == ["COMPLETED", "OUT_OF_MEMORY", None]


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ([end("COMPLETED"), end("COMPLETED")], "done"),
        ([end("COMPLETED"), end("FAILED", 1)], "failed"),
        ([end("FAILED"), end("FAILED")], "failed"),
        ([end("FAILED", 75), end("COMPLETED")], "stopped"),
        ([end("COMPLETED"), end("TIMEOUT")], "stopped"),
        ([end("FAILED"), end(None)], "stopped"),
        ([end("COMPLETED"), end("FAILED", 137, worked=True), end(None, worked=True)], "done"),
        ([end("FAILED", 1), end("FAILED", 75, worked=True)], "stopped"),
        ([], "done"),
    ],
)
def test_the_verdict_on_the_tasks_is_that_of_the_emulation(ends: list[TaskOutcome], verdict: str) -> None:
    assert verdict_of(ends) == verdict


def test_accounting_is_read_past_a_banner_and_other_jobs() -> None:
    mine = ["4821_0|COMPLETED", "4821_1|CANCELLED by 1000", "4821_[2-9%4]|PENDING", "4821_2|"]
    others = ["Welcome to the cluster", "48210_1|FAILED", "4822|COMPLETED", ""]
    assert parse_ends("\n".join([*others, *mine]), JOB) == {0: "COMPLETED", 1: "CANCELLED"}


def test_of_many_bad_ends_some_are_named_and_the_others_counted() -> None:
    lines = end_lines("4821", [end("FAILED", 3, index) for index in range(14)])
    assert len(lines) == 11
    assert lines[0] == "task 4821_0: FAILED, exit code 3; no log"
    assert lines[-1] == "… and 4 more (--json has them all)"


def test_a_task_has_worked_when_its_last_attempt_has_left_nothing_undone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not finished_all_chunks(run, "4821", 0), "of which there is nothing"
    TaskFile(tmp_path, index=0, verdict="killed", states={"c0": "done", "c3": "pending"}).write()
    assert not finished_all_chunks(run, "4821", 0)
    TaskFile(tmp_path, index=0, restart=1, verdict="killed", states={"c0": "skipped", "c3": "done"}).write()
    assert finished_all_chunks(run, "4821", 0), "killed, but after its work"
    TaskFile(tmp_path, index=0, restart=10, verdict="stopped", states={"c0": "pending"}).write()
    assert not finished_all_chunks(run, "4821", 0)
    TaskFile(tmp_path, index=1, states={}, verdict="killed").write()
    assert not finished_all_chunks(run, "4821", 1), "killed before it had read what there is to do"
    TaskFile(tmp_path, index=2, states={}, verdict="done").write()
    assert finished_all_chunks(run, "4821", 2), "there was nothing to do for it"
    run.tasks.joinpath("4821_3.r0.gpu1.sqlite").write_bytes(b"x" * 4096)
    assert not finished_all_chunks(run, "4821", 3)


def test_exit_codes_are_read_as_old_and_new_versions_of_squeue_write_them() -> None:
    assert [parse_exit_code(text) for text in ("768", "9", "3:0", "0:15", "0")] == [3, 137, 3, 143, 0]


def test_of_a_task_that_failed_without_a_word_slurms_exit_code_is_told(tmp_path: Path) -> None:
    states = JobStates({0: "FAILED", 1: "COMPLETED", 2: "FAILED"}, None, {0: 3})
    told = find_ends(JOB, states, RunFolder(tmp_path), tmp_path / "logs")
    assert [end.exit_code for end in told] == [3, None, None]


def test_what_every_chunk_done_means_depends_on_who_did_them() -> None:
    both = [end("FAILED", 137, worked=True), end("FAILED", 75, 1, worked=True)]
    assert headline("4821", "done", both) == "every chunk is done; 2 tasks failed after their last chunk:"
    assert headline("4821", "done", both[:1]) == "every chunk is done; 1 task failed after its last chunk:"
    assert headline("4821", "done", [end("COMPLETED")]) is None
    assert "did not complete" in str(headline("4821", "failed", [end("FAILED", 1)]))
    assert end_lines("4821", [end("FAILED", 1, None)]) == ["job 4821: FAILED, exit code 1; no log"]


def test_where_nobody_began_the_first_that_failed_speaks_for_all(tmp_path: Path) -> None:
    log = tmp_path / "4821_1_0_log.out"
    ends = [end("COMPLETED"), TaskOutcome(1, "FAILED", 9, log)]
    told = no_task_started("4821", ends, then="the same command")
    assert (told.exit_code, told.why) == (
        3,
        "task 4821_1: FAILED, exit code 9\nthere is no log; the task may have been cancelled before it started",
    )
    log.touch()
    assert str(no_task_started("4821", ends, then="x").why).endswith("its log is empty")
    log.write_text("module: command not found\n")
    told = no_task_started("4821", ends, then="the same command")
    assert str(told.why).endswith("exit code 9\nmodule: command not found")
    assert told.fix == f"less {log}   (then the same command)"
