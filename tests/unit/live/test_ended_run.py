"""A run on which nobody works any more: what it says of itself, which devices it shows, and how it goes on."""

from __future__ import annotations

import json
import re
import shutil
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.live import (
    DEVICES,
    TASK,
    TASKS,
    Snapshot,
    UiState,
    arrange_devices,
    as_plain_text,
    device_document,
    draw,
    open_run_view,
)
from rooms.model import Reading, Submitted
from rooms.root import DatabaseProblem
from rooms.store import Record, emulation_lock, file_in, write_intent, write_record
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

ARRAY_OF_FOUR = "[array]\nfirst = 0\nstep = 1\ncount = 4\n"
SUBMIT = ("badcjobs", "submit", "m.csv")
LATER_MS = START_MS + 10_000_000
ALL_DONE = {"a": "done", "b": "done"}
HALF_DONE = {"a": "done", "b": "pending"}


def look(folder: Path, now_ms: int = LATER_MS) -> Snapshot:
    return open_run_view(folder, HandClock(now_ms)).look()


def states_in(frame: Snapshot) -> list[str]:
    return [task.state for task in frame.tasks]


def freeze(folder: Path, array: str = "") -> None:
    (folder / "run.toml").write_text(f'[run]\nsource = ["/data/m.csv"]\nengine = "demo"\n{array}')


def one_idle_at_the_end(folder: Path, **changes: object) -> Path:
    """Write a task whose device was busy until its last sample, as it is when its work is done."""
    values: dict[str, object] = {"states": ALL_DONE, "samples": 9, **changes}
    path = TaskFile(folder, **values).write()  # type: ignore[arg-type]
    with closing(sqlite3.connect(path)) as db, db:
        db.execute(
            "UPDATE sample SET utilization_percent = 0, power_w = 60 WHERE at_ms = (SELECT max(at_ms) FROM sample)"
        )
    return path


def test_a_run_that_has_ended_says_when_how_long_it_ran_and_how_fast_it_was(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=ALL_DONE).write()
    hours_later = START_MS + 9_000_000
    again = TaskFile(tmp_path, index=1, states={"c": "done"}, started_at_ms=hours_later)
    replace(again, ended_at_ms=hours_later + 10_000, chunk_ended_at_ms=hours_later + 5_000).write()
    total = look(tmp_path).total
    assert (total.ended_at_ms, total.ran_s) == (hours_later + 10_000, 20.0)  # not the hours between
    assert total.speed == pytest.approx(90 / 20)
    assert (total.rate, total.ends_at_ms, total.standstill) == (None, None, None)


def test_what_is_over_is_not_called_now_and_has_no_eta(tmp_path: Path) -> None:
    one_idle_at_the_end(tmp_path)
    frame = look(tmp_path)
    shown = as_plain_text(frame)
    assert re.search(r"100%  2/2\+? chunks  6\.0×$", shown, re.MULTILINE)
    assert "after 0:00:10" in shown
    assert "no active GPU" not in shown
    for page in (TASKS, DEVICES, TASK):
        text = "\n".join(
            line.plain for line in draw(frame, UiState(page=page, opened=frame.tasks[0].name), width=120).lines
        )
        assert not re.search(r"\bnow\b|ETA", text)


def test_a_device_of_a_task_that_has_ended_shows_its_means_and_not_the_idle_end(tmp_path: Path) -> None:
    one_idle_at_the_end(tmp_path)
    (device,) = look(tmp_path).devices
    assert (device.reading.utilization_percent, device.shown.utilization_percent) == (0, 80)
    assert device_document(device)["means"]["utilization_percent"] == 80
    row = draw(look(tmp_path), UiState(page=DEVICES), width=120).lines[-1].plain
    assert " 80% " in row
    assert "250/300 W" in row
    assert " 80%" in as_plain_text(look(tmp_path)).splitlines()[-1]


def test_a_device_at_work_shows_its_last_reading(tmp_path: Path) -> None:
    one_idle_at_the_end(tmp_path, states=HALF_DONE, ended_at_ms=None)
    (device,) = look(tmp_path, START_MS + 9_000).devices
    assert device.shown is device.reading
    assert device_document(device)["means"] is None


def test_in_the_order_of_tasks_devices_come_by_job_and_index_whoever_ended_last(tmp_path: Path) -> None:
    for job_id, index, start_s in (("998", 2, 0), ("998", 10, 900), ("1002", 1, 300)):
        start_ms = START_MS + 1000 * start_s
        TaskFile(tmp_path, index=index, job_id=job_id, devices=2, states={str(index): "done"}, started_at_ms=start_ms,
                 ended_at_ms=start_ms + 10_000).write()  # fmt: skip
    by_task = ["998_2 0", "998_2 1", "998_10 0", "998_10 1", "1002_1 0", "1002_1 1"]
    for backwards, wanted in ((False, by_task), (True, by_task[::-1])):
        arranged = arrange_devices(look(tmp_path).devices, UiState(reverse=backwards))
        assert [f"{(device.task or '').split('.')[0]} {device.index}" for device in arranged] == wanted


def test_the_course_of_a_task_that_has_ended_begins_at_the_left_of_its_column(tmp_path: Path) -> None:
    one_idle_at_the_end(tmp_path)
    frame = look(tmp_path)
    for page in (TASKS, DEVICES):
        *_, titles, row = [line.plain for line in draw(frame, UiState(page=page), width=160).lines]
        at = titles.index("history")
        assert row[at] in "▁▂▃▄▅▆▇█"
        assert row[at - 1] == " "
        assert " node " in titles
    devices = replace(frame, devices=tuple(replace(device, node="vm") for device in frame.devices))
    assert " node " in draw(devices, UiState(page=DEVICES), width=120).lines[-2].plain  # not n…


# --- work is left -----------------------------------------------------------------------------------------------------


def test_work_that_is_left_without_a_running_task_is_told_with_the_command_that_goes_on(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=HALF_DONE, verdict="stopped", job_id="local1").write()
    freeze(tmp_path)
    frame = look(tmp_path)
    assert frame.total.standstill == "no task is running: 1 chunk left"
    assert frame.total.go_on == (f"badcjobs run /data/m.csv --out={tmp_path} --engine=demo",)
    shown = as_plain_text(frame, width=400)
    assert "! no task is running: 1 chunk left" in shown
    assert frame.total.go_on[0] in shown
    assert json.loads(json.dumps(frame.to_dict()))["total"]["go_on"] == [frame.total.go_on[0]]


def test_of_an_array_the_tasks_that_have_work_left_are_named(tmp_path: Path) -> None:
    for index, states in ((0, ALL_DONE), (1, {"c": "pending"})):
        TaskFile(tmp_path, index=index, states=states, verdict="stopped").write()
    freeze(tmp_path, ARRAY_OF_FOUR)
    total = look(tmp_path).total
    assert total.standstill == "no task is running: ~4 chunks left, 2 tasks not started"  # 1.5 in each of two parts
    assert total.go_on[0] == "sbatch --array=1-3 …"
    assert total.ended_at_ms is None  # two may still come


def test_array_tasks_that_an_emulation_will_not_start_any_more_are_said_to_be_unbegun(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=HALF_DONE, verdict="stopped", job_id="1794").write()
    freeze(tmp_path, ARRAY_OF_FOUR)
    with emulation_lock(tmp_path, SUBMIT):
        (tmp_path / "logs" / "1794.json").write_text('{"tasks": []}')
        frame = look(tmp_path)
        assert states_in(frame) == ["stopped", "waiting", "waiting", "waiting"]
        assert (frame.total.standstill, frame.total.go_on) == (None, ()), "it is about to start the next one"
    frame = look(tmp_path)
    assert states_in(frame) == ["stopped", "unbegun", "unbegun", "unbegun"]
    left = "no task is running: ~7 chunks left, 3 tasks not started, and the emulation has ended"
    assert (frame.total.standstill, frame.total.go_on) == (left, ("badcjobs submit m.csv",))
    assert "1 stopped · 3 unbegun" in as_plain_text(frame, width=120)
    record = Record("slurm", Submitted("4821", "4822", (0, 1, 2, 3)), (), 8, START_MS + 60_000)
    write_record(tmp_path, record)
    assert states_in(look(tmp_path)) == ["waiting"] * 4, "Slurm has them since"
    file_in(tmp_path).unlink()
    write_intent(tmp_path, tmp_path / "job.sh", record)
    assert states_in(look(tmp_path))[1:] == ["waiting"] * 3, "Slurm may have them"


def test_an_emulation_that_was_killed_before_its_first_task_had_begun_has_left_all_unbegun(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    freeze(tmp_path, ARRAY_OF_FOUR)
    with emulation_lock(tmp_path, SUBMIT):
        assert look(tmp_path).total.standstill is None
    frame = look(tmp_path)
    assert states_in(frame) == ["unbegun"] * 4
    assert frame.total.standstill == "no task is running: 4 tasks not started, and the emulation has ended"
    assert frame.total.go_on == ("badcjobs submit m.csv",)


def test_an_emulation_that_was_killed_before_anybody_wrote_what_the_run_is_has_left_its_command(tmp_path: Path) -> None:
    with emulation_lock(tmp_path, SUBMIT):
        assert look(tmp_path).total.standstill is None, "it is about to start its first task"
    frame = look(tmp_path)
    assert frame.total.standstill == "no task is running and none will start: the emulation is over"
    assert frame.total.go_on == ("badcjobs submit m.csv",)
    record = Record("slurm", Submitted("4821", "4822", (0,)), (), 8, START_MS)
    write_record(tmp_path, record)
    assert look(tmp_path).total.standstill is None, "Slurm has it since"


def test_where_all_is_done_nobody_is_told_to_repeat_a_submit_that_was_cut_short(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, states=ALL_DONE)
    write_intent(tmp_path, tmp_path / "job.sh", Record("slurm", Submitted("", None, (0,)), (), 2, START_MS))
    for states, told in ((HALF_DONE, True), ({"a": "done", "b": "failed"}, True), (ALL_DONE, False)):
        replace(task, states=states, verdict="done" if states == ALL_DONE else "stopped").write()
        frame = look(tmp_path)
        assert (frame.total.standstill is not None, bool(frame.total.go_on)) == (told, told), states
        assert frame.remarks[0].startswith("a submit was interrupted here")


def test_while_a_task_runs_nobody_says_that_its_emulation_is_over(tmp_path: Path) -> None:
    """Its lock may be held on another machine, where this filesystem shows it to nobody else."""
    TaskFile(tmp_path, states=HALF_DONE, ended_at_ms=None, job_id="1794").write()
    freeze(tmp_path, ARRAY_OF_FOUR)
    with emulation_lock(tmp_path, SUBMIT):
        (tmp_path / "logs" / "1794.json").write_text('{"tasks": []}')
    assert states_in(look(tmp_path, START_MS + 60_000)) == ["running", "waiting", "waiting", "waiting"]
    assert states_in(look(tmp_path, 2 * LATER_MS)) == ["silent", "unbegun", "unbegun", "unbegun"]


def test_a_task_that_was_killed_without_a_word_leaves_the_run_standing_still(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=HALF_DONE, ended_at_ms=None).write()
    freeze(tmp_path)
    assert look(tmp_path, START_MS + 60_000).total.standstill is None
    assert look(tmp_path, 2 * LATER_MS).total.standstill == "no task is running: 1 chunk left, 1 task silent"


def test_parts_of_the_source_that_no_task_has_listed_are_work_that_is_left(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states=ALL_DONE, job_id="local1", shard=(0, 8)).write()
    freeze(tmp_path)
    frame = look(tmp_path)
    total = frame.total
    assert total.standstill == "no task is running: 7 of 8 parts of the source without a task (~14 chunks)"
    assert total.go_on == (f"badcjobs run /data/m.csv --out={tmp_path} --engine=demo",)
    assert (total.chunks_known, total.parts_listed, total.parts, total.share) == (False, 1, 8, 0.125)
    assert (total.chunks, total.source_chunks, total.to_dict()["source_chunks"]) == (2, 16, 16)
    assert total.ended_at_ms is None
    shown = as_plain_text(frame, width=160)
    assert "~12.5%  2/~16 chunks  1 of 8 parts" in shown
    assert total.go_on[0] in shown
    alone = look(path).total  # nobody expects the others in it
    assert (alone.parts, alone.standstill, alone.ended_at_ms) == (None, None, START_MS + 10_000)


@pytest.mark.parametrize("again", [False, True])
def test_a_part_that_was_done_twice_is_one_part(tmp_path: Path, again: bool) -> None:
    for index in range(3):
        TaskFile(tmp_path, index=index, states={f"{index}a": "done"}, shard=(index, 4)).write()
    number = 2 if again else 3
    TaskFile(tmp_path, job_id="local1", states={f"{number}a": "done"}, shard=(number, 4)).write()
    total = look(tmp_path).total
    assert (total.parts_listed, total.parts) == ((3, 4) if again else (0, None))
    assert (total.share == 1, total.standstill is None) == (not again, not again)


def test_an_array_task_that_died_before_it_had_listed_anything_keeps_the_run_from_being_complete(
    tmp_path: Path,
) -> None:
    TaskFile(tmp_path, index=0, states=ALL_DONE, shard=(0, 2)).write()
    TaskFile(tmp_path, index=1, states={}, verdict="killed").write()
    freeze(tmp_path, "[array]\nfirst = 0\nstep = 1\ncount = 2\n")
    total = look(tmp_path).total
    assert (total.share, total.chunks_known) == (0.5, False)
    assert total.standstill == "no task is running: 1 of 2 parts of the source without a task (~2 chunks)"


def test_of_a_list_of_manifests_each_array_task_has_one_part(tmp_path: Path) -> None:
    TaskFile(tmp_path, index=0, states=ALL_DONE, shard=(0, 1)).write()
    freeze(tmp_path, ARRAY_OF_FOUR)
    total = look(tmp_path).total
    assert (total.share, total.parts_listed, total.parts) == (0.25, 1, 4)
    assert total.standstill == "no task is running: ~6 chunks left, 3 tasks not started"


def test_how_much_is_in_parts_that_no_task_has_listed_is_told_exactly_where_submit_has_counted_it(
    tmp_path: Path,
) -> None:
    TaskFile(tmp_path, states=HALF_DONE, shard=(0, 8), verdict="stopped").write()
    said = "no task is running: 1 chunk left, 7 of 8 parts of the source without a task (~14 chunks)"
    assert look(tmp_path).total.standstill == said
    job = {"job_id": "4821", "merge_job_id": None, "indices": [0]}
    record = {"cluster": "slurm", "job": job, "run_arguments": [], "chunks": 19, "submitted_at_ms": START_MS - 1}
    (tmp_path / "submitted.json").write_text(json.dumps(record))
    total = look(tmp_path).total
    assert (total.source_chunks, total.standstill) == (19, "no task is running: 18 chunks left")


def test_parts_that_are_listed_and_empty_say_nothing_of_the_others(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={}, shard=(0, 8)).write()
    total = look(tmp_path).total
    assert total.source_chunks is None
    assert total.standstill == "no task is running: 7 of 8 parts of the source without a task"


@pytest.mark.parametrize("states", [ALL_DONE, {"a": "done", "b": "failed"}, {"a": "skipped"}])
def test_a_run_without_work_left_stands_not_still(tmp_path: Path, states: dict[str, str]) -> None:
    TaskFile(tmp_path, states=states).write()
    assert look(tmp_path).total.standstill is None


def test_before_the_first_task_has_begun_nothing_stands_still(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    freeze(tmp_path, ARRAY_OF_FOUR)
    assert look(tmp_path).total.standstill is None


def test_a_command_is_shown_in_lines_that_can_be_pasted_or_merge_is_named(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=HALF_DONE, verdict="stopped", job_id="local1").write()
    freeze(tmp_path)
    frame = look(tmp_path)
    command = "badcjobs run '/data/a b.csv' --out=/runs/july " + " ".join(f"--engine-arg=--x{n}=1" for n in range(6))
    frame = replace(frame, title="july", total=replace(frame.total, go_on=(command,)))

    def lines(width: int, height: int) -> list[str]:
        page = draw(frame, UiState(), width=width, height=height).lines
        return [line.plain.strip() for line in page if "badcjobs run" in line.plain or "--" in line.plain]

    told = lines(60, 50)
    assert len(told) > 2
    assert all(line.endswith(" \\") for line in told[:-1])
    assert " ".join(line.removesuffix("\\").strip() for line in told) == command
    assert lines(60, 16) == []
    assert "badcjobs merge july" in "\n".join(line.plain for line in draw(frame, UiState(), width=60, height=16).lines)


# --- a run that is gone -----------------------------------------------------------------------------------------------


def test_a_run_folder_that_was_removed_is_gone_and_not_empty(tmp_path: Path) -> None:
    TaskFile(tmp_path / "july", states=ALL_DONE).write()
    view = open_run_view(tmp_path / "july", HandClock(LATER_MS))
    view.look()
    (tmp_path / "july").rename(tmp_path / "june")
    with pytest.raises(DatabaseProblem, match="july is gone"):
        view.look()
    (tmp_path / "june").rename(tmp_path / "july")
    assert len(view.look().tasks) == 1
    shutil.rmtree(tmp_path / "july" / "tasks")
    assert view.look().remarks == ("no task has published anything yet",)


def test_one_file_that_was_removed_is_gone(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states=ALL_DONE).write()
    view = open_run_view(path, HandClock(LATER_MS))
    view.look()
    path.unlink()
    with pytest.raises(DatabaseProblem, match="is gone"):
        view.look()


def test_unknown_stays_unknown_in_the_means(tmp_path: Path) -> None:
    TaskFile(tmp_path, states=ALL_DONE, reading=Reading(utilization_percent=50)).write()
    (device,) = look(tmp_path).devices
    assert device.means == Reading(utilization_percent=50)
