"""What a submit has left in the run folder, told without a question to Slurm; and whether an emulation is at work."""

from __future__ import annotations

import fcntl
import json
from pathlib import Path
from typing import IO

import pytest
from rooms.model import Submitted
from rooms.report import finish_job, summarize_database
from rooms.root import BadInput
from rooms.store import (
    MergeOrder,
    Record,
    emulated_command,
    emulation_lock,
    find_cut_short,
    find_trace,
    forget_intent,
    is_emulated_now,
    lock_file_in,
    refuse_during_emulation,
    write_intent,
    write_record,
)
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile


def test_a_merge_and_a_report_know_of_a_submit_that_was_cut_short_in_the_run_folder(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "july", tmp_path / "elsewhere.sqlite"
    TaskFile(run, states={"a": "done", "b": "pending"}).write()
    asked, words = {"--array": "0-2", "--gpus-per-task": 1}, ("run", "/data/m.csv", f"--out={run}")
    record = Record("slurm", Submitted("", None, (0, 1, 2)), words, 6, START_MS, asked)
    write_intent(run, run / "logs" / "job.sh", record)
    clock = HandClock(START_MS)
    for target in (run / "job.sqlite", elsewhere):
        for summary in (finish_job(MergeOrder([run], target), clock).summary, summarize_database(target)):
            assert summary.cut_short is not None
            assert summary.cut_short.what.startswith("a submit was interrupted here")
            assert summary.cut_short.command.startswith(f"badcjobs submit /data/m.csv --out={run} ")
    forget_intent(run)
    assert summarize_database(elsewhere).cut_short is None


def test_whether_an_emulation_is_at_work_on_a_run_is_a_question_that_changes_nothing(tmp_path: Path) -> None:
    assert not is_emulated_now(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with emulation_lock(tmp_path, ["badcjobs", "submit"]):
        assert is_emulated_now(tmp_path)
        with pytest.raises(BadInput, match=r"another emulation, process .*, is working on"):
            refuse_during_emulation(tmp_path)
        with pytest.raises(BadInput, match="is working on"), emulation_lock(tmp_path, ["another"]):
            pass
    assert not is_emulated_now(tmp_path)
    refuse_during_emulation(tmp_path)
    assert emulated_command(tmp_path) == ("badcjobs", "submit")


def test_an_emulation_is_not_refused_because_somebody_looks_at_the_run_in_that_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with emulation_lock(tmp_path, ["badcjobs", "submit"]):
        pass
    looker, real = lock_file_in(tmp_path).open(), fcntl.flock
    real(looker, fcntl.LOCK_SH)

    def flock(file: IO[str], kind: int) -> None:
        if kind & fcntl.LOCK_SH:
            looker.close()
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    with emulation_lock(tmp_path, ["badcjobs", "submit"]):
        assert looker.closed


# --- a run folder that was moved or copied ----------------------------------------------------------------------------


def test_the_command_of_an_emulation_is_for_the_folder_in_which_it_is_found(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"

    def command(out: Path) -> tuple[str, ...]:
        return ("badcjobs", "submit", "m.csv", f"--out={out}", "--cluster=local")

    with emulation_lock(old, command(old)):
        rows = [{"index": i, "state": "FAILED", "log": str(log)} for i, log in enumerate(logs_in(old, tmp_path))]
        (old / "logs" / "1794.json").write_text(json.dumps({"tasks": rows}))
    assert find_trace(old, "1794").command == command(old)
    old.rename(new)
    trace = find_trace(new, "1794")
    assert (trace.command, find_trace(new, "").command) == (command(new), command(new))
    assert [trace.log_of(index) for index in (0, 1)] == [str(new / "logs" / "1794_0.out"), str(tmp_path / "own.log")]
    old.symlink_to(new)
    assert find_trace(new, "1794").command == command(old), "it is the same folder: its own words are kept"


def logs_in(out: Path, elsewhere: Path) -> tuple[Path, Path]:
    """Write two logs: one in the run folder, and one where a script wanted it."""
    logs = out / "logs" / "1794_0.out", elsewhere / "own.log"
    for log in logs:
        log.touch()
    return logs


def test_the_command_of_a_submit_is_for_the_folder_in_which_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, words = (
        {"--array": "0-2", "--gpus-per-task": 1},
        ("run", "/data/m.csv", "--out=/gone/july", "--config=run.grace_s=2"),
    )
    record = Record("slurm", Submitted("4821", None, (0, 1, 2)), words, 6, START_MS, asked)
    write_record(tmp_path, record)
    write_intent(tmp_path, Path("/gone/july/logs/job.sh"), record)
    monkeypatch.chdir(tmp_path)
    cut_short = find_cut_short(Path())
    assert cut_short is not None
    begin = f"badcjobs submit /data/m.csv --out={tmp_path} --config=run.grace_s=2 --cluster=slurm "
    for line in (cut_short.command, find_trace(Path(), "4821").line()):
        assert line.startswith(begin)
