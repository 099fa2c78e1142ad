"""Following a job: one squeue per half minute for the whole array, one line for each change, and a sure end."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rooms.cluster import (
    SlurmScheduler,
    has_ended,
    parse_job_id,
    parse_number,
    parse_states,
    progress_line,
    query_states,
    watch,
)
from rooms.model import JobStates, Submitted
from rooms.root import NotHere, Unanswered
from support.hand_clock import HandClock

JOB = Submitted("4821", "4822", (0, 1, 2))
FakeSqueue = Callable[..., Path]


@pytest.fixture
def squeue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSqueue:
    """A squeue that gives one answer after the other, the last one for ever, and writes down how it was asked."""

    def install(*answers: str) -> Path:
        for number, answer in enumerate(answers):
            (tmp_path / f"answer-{number}").write_text(answer)
        program = tmp_path / "squeue"
        program.write_text(
            f'#!/bin/sh\ncd {tmp_path}\necho "$@" >> asked\nn=$(($(wc -l < asked) - 1))\n'
            f"[ $n -lt {len(answers)} ] || n={len(answers) - 1}\n. ./answer-$n\n"
        )
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return tmp_path / "asked"

    return install


def lines(**states: str) -> str:
    rows = [f"4821_{key.removeprefix('t')}   {state}   0   None " for key, state in states.items() if key != "merge"]
    rows += [f"4822   {states['merge']}   0   Dependency "] if "merge" in states else []
    return f"cat <<END\n{chr(10).join(rows)}\nEND\n"


def scheduler() -> SlurmScheduler:
    return SlurmScheduler(["badcjobs"], lambda arguments, requeues: lambda: None)


def test_states_of_array_and_merge_job_come_from_one_answer_past_a_sites_banner() -> None:
    text = (
        "Welcome to the cluster\n\n4821_0    RUNNING   0    None\n4821_2   PENDING   0   Resources\n"
        "4822   PENDING   0   Dependency \n77_1   RUNNING   0   None\n4821_[5-9]   PENDING   0   None\n"
    )
    assert parse_states(text, JOB) == JobStates({0: "RUNNING", 2: "PENDING"}, "PENDING")


def test_the_same_answer_has_the_exit_codes_and_what_keeps_a_job_that_would_wait_for_ever() -> None:
    text = (
        "4821_0  FAILED  768  NonZeroExitCode\n4821_1  PENDING  256  JobHeldAdmin\n4821_2  PENDING  0  Priority\n"
        "4822  PENDING  0  AssocGrpGRES\n"
    )
    states = parse_states(text, JOB)
    assert (states.exit_codes, states.why_pending) == ({0: 3}, ("JobHeldAdmin",))
    assert states.why_merge_pending == "AssocGrpGRES"
    said = progress_line(JOB, states, 20, 20)
    assert said.endswith("tasks: 2 pending (JobHeldAdmin), 1 failed; merge pending (AssocGrpGRES)")


def test_a_job_is_known_by_its_script_past_blanks_and_bars() -> None:
    script = Path("/a b|c/logs/.submission_file_1.sh")
    text = f"Welcome\n7|/other.sh\n4821|{script}\n4821|{script}\n"
    assert parse_number(text, script) == "4821"
    assert parse_number(text, Path("/other")) is None


def test_slurm_is_asked_every_thirty_seconds_once_for_the_whole_array(squeue: FakeSqueue) -> None:
    asked = squeue(
        lines(t0="PENDING", t1="PENDING", t2="PENDING", merge="PENDING"),
        lines(t0="RUNNING", t1="PENDING", t2="PENDING", merge="PENDING"),
        lines(t0="RUNNING", t1="PENDING", t2="PENDING", merge="PENDING"),
        lines(t1="COMPLETED", t2="CANCELLED", merge="RUNNING"),
        lines(merge="COMPLETED"),
    )
    clock, told = HandClock(), []
    started_s = clock.monotonic_s()
    end = watch(scheduler(), JOB, clock, told.append)
    assert (
        asked.read_text().splitlines()
        == ["-h -r -t all -j 4821,4822 -O JobArrayID:40,State:20,exit_code:20,Reason:80"] * 5
    )
    assert clock.monotonic_s() - started_s == 4 * 30
    assert len(told) == 4  # one question in five had no news
    assert (end.array, end.merge) == ({}, "COMPLETED")


def test_a_controller_that_is_silent_for_a_while_is_asked_on(
    squeue: FakeSqueue, caplog: pytest.LogCaptureFixture
) -> None:
    silent = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
    squeue(lines(t0="RUNNING"), silent, silent, lines(t0="COMPLETED", merge="COMPLETED"))
    told: list[JobStates] = []
    assert watch(scheduler(), JOB, HandClock(), told.append).merge == "COMPLETED"
    assert [states.array[0] for states in told] == ["RUNNING", "COMPLETED"]
    assert [record.getMessage() for record in caplog.records].count(
        "slurm does not answer; trying again: slurm_load_jobs error: Unable to contact slurm controller"
    ) == 1


def test_a_job_that_slurm_has_forgotten_has_ended(squeue: FakeSqueue) -> None:
    squeue("echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n")
    states = query_states(JOB)
    assert states == JobStates({}, None)
    assert has_ended(states)


@pytest.mark.parametrize("state", ["PENDING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED"])
def test_a_task_that_may_still_change_is_waited_for(state: str) -> None:
    assert not has_ended(JobStates({0: "COMPLETED", 1: state}, "PENDING"))
    assert not has_ended(JobStates({0: "COMPLETED"}, state))
    assert has_ended(JobStates({0: "COMPLETED", 1: "NODE_FAIL", 2: "TIMEOUT"}, "FAILED"))


def test_where_there_is_no_squeue_the_answer_says_where_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotHere) as refused:
        query_states(JOB)
    assert refused.value.exit_code == 3


def test_an_answer_that_is_an_error_is_no_answer(squeue: FakeSqueue) -> None:
    squeue("exit 7\n")
    with pytest.raises(Unanswered, match="squeue ended with 7"):
        query_states(JOB)


def test_a_progress_line_has_the_job_a_bar_and_the_tasks_by_state() -> None:
    states = JobStates({0: "COMPLETED", 1: "RUNNING"}, "PENDING")
    assert progress_line(JOB, states, 5, 20) == (
        "4821 [#####---------------] 5 of 20 chunks; tasks: 1 running, 1 completed, 1 ended; merge pending"
    )
    full = [progress_line(JOB, states, done, 20).count("#") for done in (0, 1, 19, 20)]
    assert full == [0, 1, 19, 20]
    assert "####" in progress_line(JOB, states, 0, 0)


def test_the_order_of_states_in_a_line_does_not_depend_on_who_came_first() -> None:
    all_states = {0: "RUNNING", 1: "FAILED", 2: "PENDING"}
    seen = {progress_line(JOB, JobStates(dict(order)), 0, 1) for order in itertools.permutations(all_states.items())}
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4821\n", "4821"),
        ("4821;sockeye\n", "4821"),
        ("job 17 is before you\nSubmitted batch job 4821\n", "4821"),
        ("Submitted batch job 4821 on cluster sockeye\n", "4821"),
        ("--> Checking allocation 2400...OK\n12 jobs are before you\n4821\n", "4821"),
        ("nothing\n", None),
        ("", None),
    ],
)
def test_a_job_number_is_read_past_the_sites_banner(text: str, number: str | None) -> None:
    assert parse_job_id(text) == number
