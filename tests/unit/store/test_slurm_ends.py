"""What the scripts in slurm/ have written about a task's end, as merge reads it: every file optional, none trusted."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from rooms.model import TaskKey
from rooms.store import read_end_beside
from rooms.task import NOTES_VARIABLE, SPOOL_VARIABLE, announce
from support.databases import change, query
from support.task_files import START_MS, TaskFile, merge_run

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
    assert [read_end_beside(path) for path in files] == [*(end[0] for end in RECORDS.values()), None]


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


def test_of_two_runs_the_one_that_began_nearer_is_the_tasks_own(
    spool: Spool,
) -> None:
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


def test_the_controller_knows_the_state_and_the_node_the_exit_code(
    spool: Spool,
) -> None:
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
