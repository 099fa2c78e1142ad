"""What Slurm's programs answer, and what is made of it: states, ends, numbers, a verdict; one line for each change."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from rooms.cluster import (
    ArrayPlan,
    SlurmScheduler,
    SubmitResult,
    TaskOutcome,
    call_sbatch,
    end_lines,
    find_ends,
    finished_all_chunks,
    follow,
    has_ended,
    headline,
    made_progress,
    make_order,
    no_task_started,
    parse_job_id,
    parse_number,
    progress_line,
    query_states,
    verdict_of,
    watch,
)
from rooms.model import JobStates, Submitted
from rooms.root import NotHere, RunFolder, SubmitSettings, SystemClock, Unanswered
from rooms.store import MergeOrder, merge
from support.brief import page
from support.hand_clock import HandClock
from support.pages import Pages
from support.task_files import START_MS, TaskFile

JOB = Submitted("4821", "4822", (0, 1, 2))
Programs = Callable[..., Path]
SILENT = "echo 'slurm_load_jobs error: Unable to contact slurm controller' >&2; exit 1\n"
FORGOTTEN = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1\n"


@pytest.fixture
def answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    """Install a program that gives one answer after the other, the last one for ever; return how it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def install(*texts: str, name: str = "squeue") -> Path:
        cases = "".join(f"{number}) {text}\n;;\n" for number, text in enumerate(texts[:-1], 1))
        asked = folder / f"{name}.asked"
        asked.unlink(missing_ok=True)
        (folder / name).write_text(
            f'#!/bin/sh\nprintf "%s\\n" "$*" >> {asked}\ncase $(wc -l < {asked}) in\n{cases}*) {texts[-1]}\n;;\nesac\n'
        )
        (folder / name).chmod(0o755)
        return asked

    return install


def lines(*rows: str) -> str:
    return f"cat <<'END'\n{chr(10).join(rows)}\nEND"


ASKED = "-h -r -t all -j 4821,4822 -O JobArrayID:40,State:20,exit_code:20,Reason:80"
BANNER = "Welcome to the cluster\n\n77_1   RUNNING   0   None\n4821_[5-9]   PENDING   0   None\n4821_x RUNNING 0\n"
STATES = {
    "past a banner": BANNER
    + "4821_0   RUNNING  0  None\n4821_2  PENDING  0  Resources\n4822  PENDING  0  Dependency \n",
    "why it waits": "4821_0  FAILED  768  NonZeroExitCode\n4821_1  PENDING  256  JobHeldAdmin\n"
    "4821_2  PENDING  0  Priority\n4822  PENDING  0  AssocGrpGRES\n",
    "exit codes": "4821_0  FAILED  9\n4821_1  FAILED  3:0\n4821_2  FAILED  0:15\n4822 FAILED 139\n4821_3 COMPLETED 0\n",
    "new exit codes": "4821_0  RUNNING  3:0\n4821_1 FAILED 0:137\n4821_2 FAILED x\n4821_3\n",
    "nothing": "",
}


def test_states_reasons_and_exit_codes_come_from_one_answer(answers: Programs, pages: Pages) -> None:
    found = {}
    for name, text in STATES.items():
        asked = answers(lines(*text.splitlines()))
        states = query_states(JOB)
        assert asked.read_text() == f"{ASKED}\n"
        found[name] = [states, "ended" if has_ended(states) else "not ended", progress_line(JOB, states, 7, 20)]
    for many, of in ((0, 20), (1, 20), (19, 20), (20, 20), (21, 20), (1999, 2000), (0, 0)):
        found[f"{many} of {of}"] = progress_line(JOB, JobStates({0: "COMPLETED", 1: "RUNNING"}, "PENDING"), many, of)
    pages({"states.txt": page(found)})
    every = {0: "RUNNING", 1: "FAILED", 2: "PENDING"}
    orders = itertools.permutations(every.items())
    assert len({progress_line(JOB, JobStates(dict(order)), 0, 1) for order in orders}) == 1


def test_what_may_still_change_is_waited_for_and_what_slurm_has_forgotten_has_ended(
    answers: Programs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "CONFIGURING"):
        assert not has_ended(JobStates({0: "COMPLETED", 1: state}, None))
        assert not has_ended(JobStates({0: "COMPLETED"}, state))
    assert has_ended(JobStates({0: "COMPLETED", 1: "NODE_FAIL", 2: "TIMEOUT"}, "FAILED"))
    answers(FORGOTTEN)
    assert query_states(JOB) == JobStates({}, None) and has_ended(JobStates({}, None))
    answers("exit 7")
    with pytest.raises(Unanswered, match="squeue ended with 7"):
        query_states(JOB)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(NotHere) as refused:
        query_states(JOB)
    assert (refused.value.exit_code, refused.value.fix) == (3, "run this on a login node of the cluster")


def scheduler() -> SlurmScheduler:
    return SlurmScheduler(["badcjobs"], lambda arguments, requeues: lambda: None)


def test_slurm_is_asked_every_thirty_seconds_and_a_silent_controller_is_asked_on(
    answers: Programs, caplog: pytest.LogCaptureFixture
) -> None:
    running = lines("4821_0 RUNNING 0", "4821_1 PENDING 0", "4822 PENDING 0")
    ended = lines("4822 COMPLETED 0")
    asked = answers(lines("4821_0 PENDING 0"), running, running, SILENT, SILENT, running, SILENT, ended)
    clock, told = HandClock(), []
    started_s = clock.monotonic_s()
    end = watch(scheduler(), JOB, clock, told.append)
    assert asked.read_text().splitlines() == [ASKED] * 8
    assert clock.monotonic_s() - started_s == 7 * 30
    assert [states.array.get(0) for states in told] == ["PENDING", "RUNNING", None], "one for each change"
    assert (end.array, end.merge) == ({}, "COMPLETED")
    assert len([one for one in caplog.messages if one.startswith("slurm does not answer; trying again: ")]) == 2


def test_a_followed_job_counts_chunks_as_they_are_published_and_remembers_who_was_seen_to_end(
    answers: Programs, tmp_path: Path
) -> None:
    run, told = tmp_path / "run", []
    TaskFile(run, index=0, states={"c0": "done", "c1": "failed"}).write()
    TaskFile(run, index=0, job_id="4000", states={"c5": "done", "c6": "done"}).write()
    order = make_order(SubmitSettings(tasks=3), out=run, run_arguments=("run",))

    def tell(line: str) -> None:
        told.append(line)
        if len(told) == 1:
            TaskFile(run, index=1, states={"c2": "done", "c3": "skipped"}).write()
            (run / "tasks" / "4821_2.r0.gpu1.sqlite").write_bytes(b"x" * 4096)

    for redo_all in (False, True):
        answers(lines("4821_0 TIMEOUT 0", "4821_1 FAILED 512", "4821_2 RUNNING 0"), lines("4822 COMPLETED 0"))
        result = SubmitResult(JOB, ArrayPlan(order, 20, {}, redo_all=redo_all), found=False)
        end = follow(result, scheduler(), HandClock(), tell)
        assert (end.array, end.exit_codes, end.merge) == ({0: "TIMEOUT", 1: "FAILED"}, {1: 2}, "COMPLETED")
    assert [line.partition(" of 20")[0].rpartition("] ")[2] for line in told] == ["3", "4", "2", "2"]


# --- the numbers that sbatch and squeue tell --------------------------------------------------------------------------


def test_a_job_number_is_read_past_a_banner_and_a_job_is_known_by_its_script() -> None:
    for text, number in (
        ("4821\n", "4821"), ("4821;sockeye\n", "4821"), ("job 17 is before you\nSubmitted batch job 4821\n", "4821"),
        ("Submitted batch job 4821 on cluster sockeye\n", "4821"), ("12 jobs\n4821\nWelcome 7\n", "4821"),
        ("1\n2\n", "2"), ("nothing\n", None), ("", None),
    ):  # fmt: skip
        assert parse_job_id(text) == number
    script = Path("/a b|c/logs/.submission_file_1.sh")
    text = f"Welcome\n7|/other.sh\nx|{script}\n4821|{script}\n"
    assert (parse_number(text, script), parse_number(text, Path("/other"))) == ("4821", None)


def test_an_answer_of_sbatch_is_sure_unless_it_may_have_been_lost(
    answers: Programs, tmp_path: Path, pages: Pages
) -> None:
    script, found = tmp_path / "job.sh", {}
    script.touch()
    for text in (
        "echo Submitted batch job 7", "echo Welcome; echo 7 >&2; echo 8", "echo 'Invalid account' >&2; exit 1",
        "echo 'Socket timed out on send/recv' >&2; exit 1", "echo 'Zero Bytes were transmitted' >&2; exit 2",
        "kill -9 $$", "true", "echo what",
    ):  # fmt: skip
        asked = answers(text, name="sbatch")
        found[text] = call_sbatch(script, "--parsable")
        assert asked.read_text() == f"--parsable {script}\n"
    found["no script"] = call_sbatch(Path("/nowhere/job.sh"))
    pages({"answers.txt": page(found)})


def test_of_an_sbatch_that_does_not_answer_its_own_words_are_told_and_kept(
    answers: Programs, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "job.sh").touch()
    answers("echo Slurm temporarily unable to accept job >&2; exec sleep 60", name="sbatch")
    answer = call_sbatch(tmp_path / "job.sh", patience_s=0.6)
    assert (answer.job_id, answer.sure) == (None, False)
    assert answer.said.splitlines() == ["sbatch did not answer within 1 s", "Slurm temporarily unable to accept job"]
    assert caplog.messages == [
        "sbatch has not answered yet; waiting up to 1 s: Slurm temporarily unable to accept job"
    ], "long before"


# --- how the tasks ended ----------------------------------------------------------------------------------------------


def end(state: str | None, exit_code: int | None = None, index: int | None = 0, *, worked: bool = False) -> TaskOutcome:
    return TaskOutcome(index, state, exit_code, Path("/nowhere/4821_0_0_log.out"), worked)


def test_the_end_of_a_task_is_what_squeue_says_or_accounting_or_the_last_attempt_of_its_own_job(
    answers: Programs, tmp_path: Path
) -> None:
    job, run = Submitted("4821", None, (0, 1, 2, 3)), RunFolder(tmp_path / "run")

    def ends(codes: dict[int, int] | None = None, **known: str) -> list[tuple[str | None, int | None, bool]]:
        array = {int(key.removeprefix("t")): state for key, state in known.items()}
        found = find_ends(job, JobStates(array, None, codes or {}), run, run.path / "logs")
        assert [one.log.name for one in found] == [f"4821_{index}_0_log.out" for index in range(4)]
        return [(one.state, one.exit_code, one.worked) for one in found]

    unknown = (None, None, False)
    assert ends() == [unknown] * 4
    assert ends({0: 3, 1: 4}, t0="FAILED", t1="COMPLETED", t2="RUNNING") == [
        ("FAILED", 3, False), ("COMPLETED", None, False), unknown, unknown,
    ]  # fmt: skip
    TaskFile(run.path, index=0, verdict="stopped", states={"c0": "pending"}).write()
    TaskFile(run.path, index=0, restart=1, states={"c0": "done"}, started_at_ms=START_MS + 60_000).write()
    TaskFile(run.path, index=1, verdict="failed", states={"c1": "failed"}).write()
    TaskFile(run.path, index=2, job_id="4000", states={"c2": "done"}).write()
    merge(MergeOrder([run.path], run.job_database), SystemClock())
    own = [("COMPLETED", 0, False), ("FAILED", 0, False), unknown, unknown]
    assert ends() == own
    assert ends(t0="TIMEOUT", t1="OUT_OF_MEMORY") == [("TIMEOUT", 0, True), ("OUT_OF_MEMORY", 0, False), *own[2:]]
    said = lines("Welcome", "4821_0|FAILED", "4821_2|CANCELLED by 1000", "4821_3|PENDING", "77_3|FAILED", "4821_3|")
    asked = answers(said, name="sacct")
    assert [state for state, *_ in ends(t0="TIMEOUT")] == ["TIMEOUT", "FAILED", "CANCELLED", None]
    assert asked.read_text() == "-n -X -P -j 4821 -o JobID,State\n"
    ends(t0="COMPLETED", t1="COMPLETED", t2="COMPLETED", t3="FAILED")
    assert asked.read_text().count("\n") == 1, "nobody is asked what is known"


def test_a_task_has_worked_when_its_last_attempt_has_left_nothing_undone(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert not finished_all_chunks(run, "4821", 0)
    TaskFile(tmp_path, index=0, verdict="stopped", states={"c0": "done", "c3": "pending"}).write()
    assert not finished_all_chunks(run, "4821", 0)
    TaskFile(tmp_path, index=0, restart=1, verdict="killed", states={"c0": "skipped", "c3": "done"}).write()
    assert finished_all_chunks(run, "4821", 0) and finished_all_chunks(run, "4821", None), "killed, but after its work"
    TaskFile(tmp_path, index=0, restart=10, verdict="stopped", states={"c0": "pending"}).write()
    assert not finished_all_chunks(run, "4821", 0)
    TaskFile(tmp_path, index=1, states={}, verdict="killed").write()
    assert not finished_all_chunks(run, "4821", 1), "killed before it had read what there is to do"
    TaskFile(tmp_path, index=2, states={}, verdict="done").write()
    assert finished_all_chunks(run, "4821", 2), "there was nothing to do for it"
    (run.tasks / "4821_3.r0.gpu1.sqlite").write_bytes(b"x" * 4096)
    assert not finished_all_chunks(run, "4821", 3)
    known = [made_progress(run.tasks, f"4821_{name}") for name in ("0.r0", "0.r10", "3.r0", "9.r0")]
    assert known == [True, False, None, None]


def test_the_verdict_the_headline_and_the_lines_follow_from_the_ends(tmp_path: Path, pages: Pages) -> None:
    log = tmp_path / "4821_1_0_log.out"
    failed = TaskOutcome(1, "FAILED", 9, log)
    cases = {
        "all well": [end("COMPLETED"), end("COMPLETED")],
        "one failed": [end("COMPLETED"), end("FAILED", 1)],
        "failed without a code": [end("FAILED"), end("FAILED")],
        "work is left": [end("FAILED", 75), end("COMPLETED")],
        "time limit": [end("COMPLETED"), end("TIMEOUT")],
        "nobody knows": [end("FAILED"), end(None, 3)],
        "after its work": [end("COMPLETED"), end("FAILED", 137, worked=True)],
        "both after their work": [end("FAILED", 137, worked=True), end(None, 75, 1, worked=True)],
        "one failed, one after its work": [end("FAILED", 1), end("FAILED", 75, worked=True)],
        "no array": [end("FAILED", 1, None)],
        "many": [end("FAILED", 1, index) for index in range(12)],
        "none": [],
    }
    told = {
        name: [verdict_of(ends), headline("4821", verdict_of(ends), ends), *end_lines("4821", ends)]
        for name, ends in cases.items()
    }
    ends = [end("COMPLETED"), failed]
    for name, text in (("no log", None), ("an empty log", ""), ("a log", "x" * 3000 + "\nmodule: command not found\n")):
        if text is not None:
            log.write_text(text)
        error = no_task_started("4821", ends, then="the same command")
        told[f"nobody began, {name}"] = [
            error.exit_code,
            *re.sub("x{9,}", lambda one: f"{len(one[0])} × x", str(error)).splitlines(),
        ]
    told["with a log"] = end_lines("4821", ends)
    pages({"ends.txt": page(told).replace(str(tmp_path), "LOGS")})
