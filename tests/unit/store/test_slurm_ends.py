"""What the scripts in slurm/ have written about a task's end, as merge reads it: every file optional, none trusted."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from rooms.model import TaskKey
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge
from rooms.task import NOTES_VARIABLE, SPOOL_VARIABLE, announce
from support.databases import query
from support.task_files import START_MS, TaskFile

START_S = START_MS // 1000
UNTOLD = (None, None, None)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "run"


def merged(run: Path) -> list[tuple[Any, ...]]:
    """Merge, and return what the tasks say of their end, in the order of their start."""
    merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
    columns = "slurm_state, slurm_exit_code, slurm_reason"
    return query(run / "job.sqlite", f"SELECT {columns} FROM task ORDER BY started_at_ms, name")


def record(database: Path, text: str | None = None, **told: object) -> Path:
    path = database.with_suffix(".slurm.json")
    path.write_text(json.dumps(told) if text is None else text)
    return path


def test_without_any_hook_nothing_is_known(run: Path) -> None:
    TaskFile(run).write()
    assert merged(run) == [UNTOLD]


def test_the_record_beside_a_task_database_is_read(run: Path) -> None:
    record(TaskFile(run).write(), exit_code="0:9", written_by="epilog")
    assert merged(run) == [("ENDED", "0:9", "epilog")]


def test_a_record_that_comes_after_the_merge_is_news_for_the_next_one(run: Path) -> None:
    database = TaskFile(run).write()
    assert merged(run) == [UNTOLD]
    record(database, written_by="task_epilog")
    assert merged(run) == [("ENDED", None, "task_epilog")]


def test_what_is_known_stays_when_the_record_is_gone_and_the_task_is_published_again(run: Path) -> None:
    task = TaskFile(run, states={"a": "pending"}, verdict="killed")
    path = record(task.write(), written_by="task_epilog")
    assert merged(run) == [("ENDED", None, "task_epilog")]
    path.unlink()
    task.states = {"a": "done"}
    task.write()
    assert merged(run) == [("ENDED", None, "task_epilog")]
    assert query(run / "job.sqlite", "SELECT status FROM chunk") == [("done",)]


@pytest.mark.parametrize("text", ["", "{", "[]", "7", "\0\xff", '{"exit_code": {"a": 1}, "written_by": 4}'])
def test_a_record_that_makes_no_sense_never_stops_a_merge(run: Path, text: str) -> None:
    record(TaskFile(run).write(), text)
    assert merged(run) in ([UNTOLD], [("ENDED", None, None)])


def test_a_pipe_of_that_name_keeps_nobody_waiting(run: Path) -> None:
    import os

    os.mkfifo(TaskFile(run).write().with_suffix(".slurm.json"))
    assert merged(run) == [UNTOLD]


# --- what the controller has written ----------------------------------------------------------------------------------


class Spool:
    """A shared folder, and a task that has asked for its job's ends there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "ends").mkdir(parents=True)

    def write(self, task: TaskFile) -> Path:
        database = task.write()
        with (
            closing(sqlite3.connect(database)) as db,
            db,
        ):  # unsealed by that, which merge says, and reads it all the same
            db.execute("INSERT INTO meta VALUES ('slurm_spool', ?)", (str(self.folder),))
        return database

    def end(self, job: str, state: str, start_s: int, end_s: int, **more: object) -> None:
        told = {"array_index": 0, "state": state, "exit_code": "0:0", "start_s": start_s, "end_s": end_s, **more}
        with (self.folder / "ends" / f"{job}.jsonl").open("a") as file:
            file.write(json.dumps({**told, "written_by": "jobcomp"}) + "\n")


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    return Spool(tmp_path / "spool")


def test_each_attempt_of_a_requeued_task_has_the_end_of_its_own_run(run: Path, spool: Spool) -> None:
    for restart in range(3):
        spool.write(TaskFile(run, restart=restart, started_at_ms=START_MS + restart * 100_000))
    spool.end("4821", "NODE_FAIL", START_S - 1, START_S + 90)
    spool.end("4821", "PREEMPTED", START_S + 99, START_S + 190)
    assert merged(run) == [("NODE_FAIL", "0:0", "jobcomp"), ("PREEMPTED", "0:0", "jobcomp"), UNTOLD]
    spool.end("4821", "COMPLETED", START_S + 199, START_S + 290)
    assert merged(run)[2] == ("COMPLETED", "0:0", "jobcomp")


@pytest.mark.parametrize(
    ("first", "second", "its_own"),
    [
        ((START_S - 60, START_S - 2), (START_S - 1, START_S + 60), "COMPLETED"),  # begun when the first run had ended
        ((START_S - 1, START_S + 2), (START_S + 4, START_S + 60), "NODE_FAIL"),  # ended just before the second run
        ((START_S + 4, START_S + 9), (START_S + 99, START_S + 199), "NODE_FAIL"),  # a clock that is 4 s ahead
    ],
)
def test_of_two_runs_in_quick_succession_the_one_that_began_nearer_is_the_tasks_own(
    run: Path, spool: Spool, first: tuple[int, int], second: tuple[int, int], its_own: str
) -> None:
    spool.write(TaskFile(run))
    spool.end("4821", "NODE_FAIL", *first)
    spool.end("4821", "COMPLETED", *second)
    assert merged(run) == [(its_own, "0:0", "jobcomp")]


def test_every_array_task_has_its_own_end(run: Path, spool: Spool) -> None:
    for index in (0, 1):
        spool.write(TaskFile(run, index=index))
    spool.end("4821", "TIMEOUT", START_S, START_S + 60, array_index=1)
    assert merged(run) == [UNTOLD, ("TIMEOUT", "0:0", "jobcomp")]


def test_the_controller_knows_the_state_and_the_node_the_exit_code(run: Path, spool: Spool) -> None:
    record(spool.write(TaskFile(run)), exit_code="0:9", written_by="epilog")
    spool.end("4821", "OUT_OF_MEMORY", START_S, START_S + 60, array_index=None, exit_code=None)
    assert merged(run) == [("OUT_OF_MEMORY", "0:9", "jobcomp")]


def test_lines_that_make_no_sense_are_passed_over(run: Path, spool: Spool) -> None:
    spool.write(TaskFile(run))
    (spool.folder / "ends" / "4821.jsonl").write_text('{"state": "TIMEOUT"}\n[]\n{"start_s": "x"}\n')
    spool.end("4821", "FAILED", START_S, START_S + 60, array_index="0")
    spool.end("4821", "CANCELLED", START_S, START_S + 60)
    assert merged(run) == [("CANCELLED", "0:0", "jobcomp")]


# --- what a task announces --------------------------------------------------------------------------------------------

KEY = TaskKey("4821", 7, 0, "gpu1")
DATABASE = Path("/scratch/run/tasks/4821_7.r0.gpu1.sqlite")


def test_a_task_that_nobody_invited_announces_nothing() -> None:
    assert announce({"SLURM_JOB_ID": "4828"}, KEY, DATABASE) == {}


def test_a_task_adds_its_database_to_the_notes_of_its_own_job_alone(tmp_path: Path) -> None:
    notes = tmp_path / "4828.batch.0.r0.gpu1"
    notes.write_text("{}\n")
    for job in ("4828", "482", "9999"):
        announce({"SLURM_JOB_ID": job, NOTES_VARIABLE: str(notes)}, KEY, DATABASE)
    assert notes.read_text() == f"{{}}\n{DATABASE}\n"


def test_a_task_follows_no_link_and_makes_no_notes_of_its_own(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "4828.link"
    target.write_text("untouched")
    link.symlink_to(target)
    for notes in (link, tmp_path / "4828.none"):
        announce({"SLURM_JOB_ID": "4828", NOTES_VARIABLE: str(notes)}, KEY, DATABASE)
    assert target.read_text() == "untouched"
    assert not (tmp_path / "4828.none").exists()


def test_the_tasks_of_an_array_ask_once_for_their_jobs_ends(tmp_path: Path) -> None:
    (tmp_path / "wanted").mkdir()
    for _ in range(2):
        assert announce({SPOOL_VARIABLE: str(tmp_path)}, KEY, DATABASE) == {"slurm_spool": str(tmp_path)}
    assert [path.name for path in (tmp_path / "wanted").iterdir()] == ["4821"]


def test_a_folder_that_is_not_there_stops_nobody(tmp_path: Path) -> None:
    gone = {SPOOL_VARIABLE: str(tmp_path / "none"), NOTES_VARIABLE: str(tmp_path / "none" / "4828.x")}
    assert announce({"SLURM_JOB_ID": "4828", **gone}, KEY, DATABASE) == {"slurm_spool": str(tmp_path / "none")}
