"""A run folder, looked at again and again: which state tasks are in, what is added up, what is read anew."""

from __future__ import annotations

import json
import os
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.live import Snapshot, as_plain_text, open_machine_view, open_run_view
from rooms.model import StandIn
from rooms.report import finish_job, state_of, summarize_database
from rooms.root import BadcjobsError, DatabaseProblem, NotHere
from rooms.store import MergeOrder, merge, read_job, read_tasks
from support.hand_clock import HandClock
from support.live_run import CHUNKS, write_live_run
from support.powerless import powerless_folder
from support.task_files import START_MS, TaskFile

NOW_MS = START_MS + 10_000
HALF_DONE = {"a": "done", "b": "done", "c": "failed", "d": "pending"}


def running(folder: Path, **changes: object) -> TaskFile:
    values: dict[str, object] = {"states": HALF_DONE, "ended_at_ms": None, "samples": 11, **changes}
    return TaskFile(folder, **values)  # type: ignore[arg-type]


def look(folder: Path, now_ms: int = NOW_MS) -> Snapshot:
    return open_run_view(folder, HandClock(now_ms)).look()


def reported_end_ms(folder: Path) -> int | None:
    merge(MergeOrder([folder], folder / "job.sqlite"), HandClock(NOW_MS))
    outlook = summarize_database(folder / "job.sqlite", now_ms=NOW_MS).outlook
    return None if outlook is None else outlook.end_at_ms


def touch(path: Path, at_ms: int) -> None:
    os.utime(path, ns=(at_ms * 10**6, at_ms * 10**6))


# --- one task ---------------------------------------------------------------------------------------------------------


def test_a_running_task_shows_its_chunks_its_rate_and_when_it_will_be_done(tmp_path: Path) -> None:
    running(tmp_path).write()
    (task,) = look(tmp_path).tasks
    assert (task.state, task.done, task.failed, task.pending, task.chunks) == ("running", 2, 1, 1, 4)
    assert task.rate == pytest.approx(60 / 10)  # two chunks of 30 s in 10 s
    assert task.ends_at_ms == NOW_MS + 5_000
    assert task.label == "4821_0"


def test_a_device_shows_its_last_sample_and_its_course(tmp_path: Path) -> None:
    running(tmp_path, devices=2).write()
    first, second = look(tmp_path).devices
    assert (first.index, second.index) == (0, 1)
    assert first.read_at_ms == START_MS + 10_000
    assert (first.reading.utilization_percent, first.reading.power_w) == (80, 250.0)
    assert first.reading.temperature_c is None  # it never said: not 0
    assert set(first.trail.utilization_percent) == {80}
    assert set(first.trail.temperature_c) == {None}
    assert (first.work.done, first.rate) == (2, pytest.approx(6))


def test_the_last_sample_is_found_wherever_the_rows_lie(tmp_path: Path) -> None:
    path = running(tmp_path, devices=2).write()
    with closing(sqlite3.connect(path)) as db, db:  # as no publication of ours would leave it
        db.execute("UPDATE sample SET rowid = rowid + 1000")
    (task,) = read_tasks(path)
    assert [device.reading.utilization_percent for device in task.its_devices] == [80, 80]


def test_a_chunk_that_was_begun_is_shown_on_its_device(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE attempt SET ended_at_ms = NULL, outcome = NULL WHERE chunk_id = 'c'")
    frame = look(tmp_path)
    assert frame.devices[0].chunks == ("rec/c",)
    assert frame.tasks[0].working_on == ("rec/c",)


def test_a_task_that_should_have_published_again_is_silent(tmp_path: Path) -> None:
    touch(running(tmp_path).write(), NOW_MS)
    assert look(tmp_path, NOW_MS + 119_000).tasks[0].state == "running"  # two publications of 30 s and a minute
    late = look(tmp_path, NOW_MS + 121_000)
    assert late.tasks[0].state == "silent"
    assert late.tasks[0].ends_at_ms is None
    assert late.total.rate is None
    assert late.total.devices == 0
    assert late.devices[0].trouble == "its task is silent"


@pytest.mark.parametrize("verdict", ["done", "failed", "stopped", "killed"])
def test_a_task_that_has_ended_is_what_its_verdict_says_however_long_ago(tmp_path: Path, verdict: str) -> None:
    running(tmp_path, ended_at_ms=NOW_MS, verdict=verdict).write()
    (task,) = look(tmp_path, NOW_MS + 10**9).tasks
    assert (task.state, task.ends_at_ms) == (verdict, None)


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ({"state": "FAILED"}, "killed"),
        ({"state": "CANCELLED by 1000"}, "killed"),
        ({"state": "COMPLETED"}, "running"),
        ({"written_by": "epilog"}, "running"),
        ([], "running"),
    ],
)
def test_what_somebody_wrote_beside_a_database_about_its_end_is_believed_until_the_task_says_it(
    tmp_path: Path, told: object, state: str
) -> None:
    task = running(tmp_path)
    path = task.write()
    touch(path, NOW_MS)
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    assert view.look().total.states == {"running": 1}
    path.with_suffix(".slurm.json").write_text(json.dumps(told))
    frame, alone = view.look(), look(path)
    assert frame.total.states == alone.total.states == {state: 1}
    assert (frame.total.devices, frame.devices[0].alive) == ((0, False) if state == "killed" else (1, True))
    finished = replace(task, ended_at_ms=NOW_MS, verdict="stopped").write()
    touch(finished, NOW_MS + 1)
    assert look(tmp_path).total.states == {"stopped": 1}
    # The report, which reads the same record, says the same.
    task.write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), HandClock(NOW_MS))
    assert [state_of(one, NOW_MS) for one in read_job(tmp_path / "job.sqlite").tasks] == [state]


def test_open_alerts_of_running_tasks_are_shown_and_those_that_ended_are_not(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    with closing(sqlite3.connect(path)) as db, db:
        for kind, ended in (("thermal", None), ("memory", NOW_MS)):
            db.execute(
                """INSERT INTO alert SELECT task_id, device_id, ?, 'warning', ?, ?, 90, 83, 'too much' FROM device""",
                (kind, START_MS, ended),
            )
    (alert,) = look(tmp_path).alerts
    assert (alert.kind, alert.node, alert.device_index, alert.message) == ("thermal", "gpu1", 0, "too much")


# --- many tasks -------------------------------------------------------------------------------------------------------


def test_only_the_newest_attempt_of_an_array_task_is_shown_and_all_of_them_count(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done", "b": "pending"}, verdict="stopped").write()
    again = {"a": "skipped", "b": "pending"}
    running(tmp_path, restart=1, node="gpu2", states=again, started_at_ms=START_MS + 20_000).write()
    frame = look(tmp_path, START_MS + 30_000)
    (task,) = frame.tasks
    assert (task.name, task.before, task.pending, task.settled) == ("4821_0.r1.gpu2", 1, 1, 1)
    assert (frame.total.done, frame.total.chunks, frame.total.audio_done_s) == (1, 2, 30.0)


def test_array_tasks_that_run_toml_knows_and_nobody_has_heard_of_wait(tmp_path: Path) -> None:
    running(tmp_path, index=4).write()
    (tmp_path / "run.toml").write_text('[run]\nsource = ["m.csv"]\n[array]\nfirst = 2\nstep = 2\ncount = 3\n')
    frame = look(tmp_path)
    assert [(task.array_index, task.state) for task in frame.tasks] == [(2, "waiting"), (4, "running"), (6, "waiting")]
    assert frame.total.states == {"waiting": 2, "running": 1}
    assert not frame.total.chunks_known


def submitted(folder: Path, *, job_id: str, indices: list[int], at_ms: int, chunks: int = 40) -> None:
    job = {"job_id": job_id, "merge_job_id": None, "indices": indices}
    record = {"cluster": "slurm", "job": job, "run_arguments": [], "chunks": chunks, "submitted_at_ms": at_ms}
    (folder / "submitted.json").write_text(json.dumps(record))


def test_the_whole_source_is_known_from_the_submission(tmp_path: Path) -> None:
    running(tmp_path).write()
    submitted(tmp_path, job_id="4821", indices=[0, 1], at_ms=START_MS)
    total = look(tmp_path).total
    assert (total.chunks, total.chunks_known, total.settled) == (40, True, 3)
    assert total.ends_at_ms == NOW_MS + 185_000  # 37 chunks at two in 10 s, not the one that is listed


def test_parts_that_no_task_has_listed_take_as_long_as_if_they_were_counted(tmp_path: Path) -> None:
    running(tmp_path, shard=(0, 3)).write()
    (tmp_path / "run.toml").write_text('[run]\nsource = ["m.csv"]\n[array]\nfirst = 0\nstep = 1\ncount = 3\n')
    frame = look(tmp_path)
    assert (frame.total.chunks, frame.total.source_chunks, frame.total.share) == (4, 12, 0.25)
    assert frame.total.ends_at_ms == NOW_MS + 45_000  # nine chunks at two in 10 s; its own task ends in 5 s
    assert "~25%  3/~12 chunks  1 of 3 parts" in (shown := as_plain_text(frame, width=160))
    assert "ETA ~0:00:45" in shown
    submitted(tmp_path, job_id="4821", indices=[0, 1, 2], at_ms=START_MS, chunks=12)
    counted = look(tmp_path)
    assert counted.total.ends_at_ms == frame.total.ends_at_ms
    assert "25%  3/12 chunks  1 failed  6.0×  ETA 0:00:45" in as_plain_text(counted, width=160)


def test_a_failed_task_that_was_handed_in_again_waits(tmp_path: Path) -> None:
    TaskFile(tmp_path, index=0, states={"a": "failed"}, verdict="failed").write()
    TaskFile(tmp_path, index=1, states={"b": "done"}).write()
    submitted(tmp_path, job_id="4900", indices=[0, 1], at_ms=START_MS + 60_000)
    assert [task.state for task in look(tmp_path, START_MS + 70_000).tasks] == ["waiting", "done"]


def test_a_source_that_was_cut_in_two_ways_is_not_counted_twice(tmp_path: Path) -> None:
    for index in range(2):
        states = {f"{index}{n}": "done" for n in range(3)} | {f"{index}x": "pending"}
        path = TaskFile(tmp_path, index=index, states=states, verdict="stopped").write()
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("UPDATE task SET shard_index = ?, shard_count = 2", (index,))
    whole = {f"{index}{n}": "skipped" for index in range(2) for n in range(3)} | {"0x": "done", "1x": "pending"}
    path = running(tmp_path, job_id="local1", states=whole).write()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE task SET shard_index = 0, shard_count = 1")
    total = look(tmp_path).total
    assert (total.chunks, total.done, total.chunks_known) == (8, 7, True)


def test_the_end_is_that_of_the_slowest_task(tmp_path: Path) -> None:
    running(tmp_path, index=0, states={"a": "done", "b": "pending"}).write()
    running(tmp_path, index=1, states={"c": "done"} | {f"p{n}": "pending" for n in range(9)}).write()
    total = look(tmp_path).total
    assert total.ends_at_ms == NOW_MS + 90_000  # not 50 s, as if the first could help the second
    assert total.rate == pytest.approx(6)


def test_the_end_counts_on_tasks_that_have_nothing_done_yet_but_not_on_more_than_they_have_shown(
    tmp_path: Path,
) -> None:
    running(tmp_path, index=0, states={"a": "done"} | {f"a{n}": "pending" for n in range(9)}).write()
    for index in range(1, 5):
        running(tmp_path, index=index, states={f"{index}{n}": "pending" for n in range(10)}).write()
    running(tmp_path, index=5, states={}).write()  # has not listed its part yet
    end_ms = NOW_MS + 100_000  # not 490 s, as if the first were alone
    assert (look(tmp_path).total.ends_at_ms, reported_end_ms(tmp_path)) == (end_ms, end_ms)
    slow = running(tmp_path, index=4, states={f"4{n}": "pending" for n in range(10)}, samples=101)
    replace(slow, started_at_ms=START_MS - 90_000).write()
    end_ms = NOW_MS + 1_000_000  # not one of its ten in 100 s
    assert (look(tmp_path).total.ends_at_ms, reported_end_ms(tmp_path)) == (end_ms, end_ms)


def test_a_task_that_begins_when_the_others_have_ended_is_expected_to_work_as_they_did_in_view_and_report(
    tmp_path: Path,
) -> None:
    TaskFile(tmp_path, index=0, states={"a": "done", "b": "done"}, started_at_ms=START_MS - 10_000).write()
    running(
        tmp_path, index=1, states={f"p{n}": "pending" for n in range(3)}, samples=6, started_at_ms=NOW_MS - 5000
    ).write()
    end_ms = NOW_MS + 30_000  # three at two in 20 s
    assert (look(tmp_path).total.ends_at_ms, reported_end_ms(tmp_path)) == (end_ms, end_ms)


def test_a_report_knows_that_the_chunks_that_are_left_are_longer(tmp_path: Path) -> None:
    path = running(tmp_path, states={"a": "done", "b": "pending"}).write()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE chunk SET audio_s = 90.0 WHERE chunk_id = 'b'")
    assert look(tmp_path).total.ends_at_ms == NOW_MS + 10_000
    assert reported_end_ms(tmp_path) == NOW_MS + 30_000


# --- what is read, and when -------------------------------------------------------------------------------------------


def test_a_file_is_read_again_when_it_was_replaced_and_only_then(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    first, same = view.look(), view.look()
    assert same.tasks[0] is first.tasks[0]
    fresh = running(tmp_path / "elsewhere", states={**HALF_DONE, "d": "done"}).write()
    fresh.replace(path)
    assert view.look().tasks[0].done == 3


def test_a_file_that_is_replaced_while_it_is_read_is_read_whole(tmp_path: Path) -> None:
    """The reader holds the file that it opened; a publication puts another in its place."""
    path = running(tmp_path).write()
    fresh = running(tmp_path / "elsewhere", states=dict.fromkeys(HALF_DONE, "done")).write()
    with closing(sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)) as db:
        before = db.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchone()
        fresh.replace(path)
        assert db.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchone() == before
    assert look(tmp_path).tasks[0].done == 4


def test_what_cannot_be_read_is_named_and_the_others_are_shown(tmp_path: Path) -> None:
    running(tmp_path).write()
    (tmp_path / "tasks" / "4821_1.r0.gpu1.sqlite").write_bytes(b"SQLite format 3\0" + bytes(4000))
    (tmp_path / "tasks" / "4821_2.r0.gpu1.sqlite").write_bytes(b"")
    (tmp_path / "tasks" / ".4821_3.r0.gpu1.sqlite.tmp").write_bytes(b"half a copy")
    frame = look(tmp_path)
    assert len(frame.tasks) == 1
    assert [remark.partition(" ")[0] for remark in frame.remarks] == ["4821_1.r0.gpu1.sqlite", "4821_2.r0.gpu1.sqlite"]


def test_a_file_that_is_broken_for_a_moment_keeps_what_it_said_before(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    whole = path.read_bytes()
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    view.look()
    path.write_bytes(whole[:100])
    broken = view.look()
    assert broken.tasks[0].done == 2
    assert broken.remarks
    path.write_bytes(whole)
    assert view.look().remarks == ()


def test_a_tasks_folder_that_is_closed_to_us_is_an_error_of_ours_and_readable_again_when_it_is_not() -> None:
    with powerless_folder() as folder:
        tasks = running(folder).write().parent
        view = open_run_view(folder, HandClock(NOW_MS))
        for closed, mode in ((tasks, 0o700), (folder, 0o700)):
            closed.chmod(0)
            with pytest.raises(DatabaseProblem, match="cannot be read") as caught:
                view.look()
            assert caught.value.what.endswith(": Permission denied")
            assert caught.value.fix == f"ls -ld {caught.value.what.split()[0]}"
            with pytest.raises(BadcjobsError, match="cannot be read"):
                open_run_view(tasks, HandClock(NOW_MS))
            closed.chmod(mode)
        assert view.look().tasks[0].done == 2


def test_a_pipe_that_is_called_like_a_database_hangs_nobody(tmp_path: Path) -> None:
    tasks = running(tmp_path).write().parent
    os.mkfifo(tasks / "4821_7.r0.gpu1.sqlite")
    (tasks / "4821_8.r0.gpu1.sqlite").symlink_to("4821_7.r0.gpu1.sqlite")
    seen = open_run_view(tmp_path, HandClock(NOW_MS)).look()
    assert (len(seen.tasks), seen.remarks) == (1, ())


def test_a_folder_without_tasks_waits_for_the_first(tmp_path: Path) -> None:
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    assert view.look().remarks == ("no task has published anything yet",)
    running(tmp_path).write()
    assert view.look().remarks == ()


def test_what_there_was_no_time_for_comes_with_the_next_look(tmp_path: Path) -> None:
    write_live_run(tmp_path, 3, now_ms=NOW_MS, seconds=10)
    view = open_run_view(tmp_path, HandClock(NOW_MS))
    looks = [view.look(patience_s=0.0) for _ in range(3)]
    assert [len(frame.tasks) for frame in looks] == [1, 2, 3]
    assert [frame.unread for frame in looks] == [2, 1, 0]


def test_a_task_database_a_job_database_and_the_tasks_folder_can_be_looked_at(tmp_path: Path) -> None:
    path = running(tmp_path).write()
    TaskFile(tmp_path, index=1, states={"z": "done"}).write()
    finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), HandClock(NOW_MS))
    assert [task.array_index for task in look(path).tasks] == [0]
    assert [task.array_index for task in look(tmp_path / "tasks").tasks] == [0, 1]
    merged = look(tmp_path / "job.sqlite")
    assert [(task.array_index, task.done) for task in merged.tasks] == [(0, 2), (1, 1)]
    assert [device.reading.utilization_percent for device in merged.devices] == [80, 80]


def test_tasks_whose_files_were_removed_after_the_merge_are_shown_from_the_job_database(tmp_path: Path) -> None:
    gone = TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    TaskFile(tmp_path, index=1, states={"b": "done"}).write()
    finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), HandClock(NOW_MS))
    gone.unlink()
    frame = look(tmp_path)
    assert [task.array_index for task in frame.tasks] == [0, 1]
    assert frame.total.done == 2


def test_a_wrong_path_is_refused_with_a_line_to_paste(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "letter.txt").write_text("hello")
    for wrong in (tmp_path / "nowhere", tmp_path / "notes", tmp_path / "notes" / "letter.txt"):
        with pytest.raises(DatabaseProblem) as error:
            open_run_view(wrong, HandClock())
        assert wrong.name in error.value.what


def test_a_run_in_the_middle_of_its_work_is_added_up_state_by_state(tmp_path: Path) -> None:
    write_live_run(tmp_path, 40, now_ms=NOW_MS, waiting=2, seconds=60)
    frame = look(tmp_path)
    assert frame.total.states == {"running": 32, "silent": 2, "waiting": 2, "done": 4, "failed": 2}
    assert len(frame.devices) == 160
    assert frame.total.chunks == 40 * CHUNKS
    assert json.loads(json.dumps(frame.to_dict()))["total"]["states"]["running"] == 32


# --- this machine -----------------------------------------------------------------------------------------------------


def test_the_machine_shows_every_device_with_what_it_did_since_it_was_opened() -> None:
    clock = HandClock()
    view = open_machine_view({"CUDA_VISIBLE_DEVICES": "1"}, clock, StandIn(simulate=3), hostname="node1")
    frames = []
    for _ in range(5):
        frames.append(view.look())
        clock.sleep(2)
    view.close()
    devices = frames[-1].devices
    assert [device.index for device in devices] == [0, 1, 2]  # ours or not
    assert len(devices[0].trail.utilization_percent) == 5
    assert devices[0].trail.step_ms == 2000
    assert frames[-1].total.devices == 3
    assert frames[-1].total.power_w == pytest.approx(sum(device.reading.power_w or 0 for device in devices))


def test_a_lost_device_says_so_and_is_an_alert(tmp_path: Path) -> None:
    script = tmp_path / "script.toml"
    script.write_text("[[device]]\nindex = 1\nlost_at_s = 3.0\n")
    clock = HandClock()
    view = open_machine_view({}, clock, StandIn(script=str(script)), hostname="node1")
    view.look()
    clock.sleep(60)
    view.look()
    clock.sleep(60)
    frame = view.look()
    view.close()
    lost = frame.devices[1]
    assert lost.trouble == "GPU is lost (simulated)"
    assert lost.reading.utilization_percent is None
    assert lost.trail.utilization_percent[-1] is None
    assert [(alert.kind, alert.device_index) for alert in frame.alerts] == [("lost", 1)]


def test_a_machine_without_devices_is_not_here(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match="no GPU"):
        open_machine_view({"PATH": str(tmp_path)}, HandClock(), hostname="node1")
