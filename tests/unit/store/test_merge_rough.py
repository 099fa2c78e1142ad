"""Rough usage of merge that once lost or doubled something: each of these was found by somebody who tried."""

from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import HostReading
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import (
    MergeOrder,
    MergeOutcome,
    SourceFile,
    TaskWriter,
    merge,
    merge_lock,
    read_job,
    remove_merged_files,
)
from rooms.telemetry import TelemetryWriter
from support import damage
from support.databases import canonical, query
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile

STATES = {f"c{n:03d}": "done" for n in range(60)}


def merged(run: Path, *inputs: Path, target: str = "job.sqlite") -> MergeOutcome:
    return merge(MergeOrder(inputs or [run], run / target), SystemClock())


def by_name(outcome: MergeOutcome) -> dict[str, SourceFile]:
    return {Path(file.path).name: file for file in outcome.files}


def count(run: Path, table: str, where: str = "true") -> int:
    return int(query(run / "job.sqlite", f"SELECT count(*) FROM {table} WHERE {where}")[0][0])


# --- two files of one name, live files --------------------------------------------------------------------------------


def test_another_task_of_the_same_name_is_never_taken_for_a_copy(tmp_path: Path) -> None:
    """Two runs inside one Slurm job, as an earlier version wrote them: the same name, the same id."""
    first = TaskFile(tmp_path / "one", states={"a": "done"}).write()
    second = TaskFile(tmp_path / "two", states={"b": "done"}, started_at_ms=START_MS + 5000).write()
    outcome = merged(tmp_path, first, second)
    skipped = [file for file in outcome.files if file.status == "skipped"]
    assert [(file.lost_something, "another task of the same name" in (file.reason or "")) for file in skipped] == [
        (True, True)
    ]
    assert remove_merged_files(tmp_path / "job.sqlite", outcome.given).removed == ()


def test_live_files_left_behind_complete_the_published_one_and_take_nothing_away(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, states={"a": "done", "b": "pending"}, samples=5, ended_at_ms=None)
    published = task.write()
    left = tmp_path / "left"
    left.mkdir()
    key = task.key
    with closing(sqlite3.connect(published)) as db:
        device_id = db.execute("SELECT device_id FROM device").fetchone()[0]
    later = TaskFile(tmp_path / "x", states={"a": "done", "b": "done"}, samples=0, ended_at_ms=None).write()
    with closing(TaskWriter(left / "wrapper.sqlite", key)):
        pass
    with closing(sqlite3.connect(left / "wrapper.sqlite", isolation_level=None)) as db:
        db.execute("ATTACH ? AS later", (str(later),))
        for table in ("task", "device", "worker", "chunk", "attempt", "detection"):
            db.execute(f"INSERT INTO {table} SELECT * FROM later.{table}")
    with closing(TelemetryWriter(left / "recorder.sqlite", key.task_id)) as telemetry:
        for tick in range(9):
            telemetry.write_tick(START_MS + tick * 1000, [(device_id, task.reading)], None)
    wrapper, recorder = left / "wrapper.sqlite", left / "recorder.sqlite"
    for order in ([published, left], [left, published], [wrapper, published, recorder], [published, recorder, wrapper]):
        (tmp_path / "job.sqlite").unlink(missing_ok=True)
        for place in order:
            outcome = merged(tmp_path, place)
        outcome = merged(tmp_path, *order)
        assert (count(tmp_path, "sample"), count(tmp_path, "chunk", "status = 'done'")) == (9, 2), order
        assert count(tmp_path, "detection") == 2
        assert not any(file.lost_something for file in outcome.files), outcome.files
        removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
        assert removal.removed == ()


def test_a_recorders_half_alone_is_skipped_and_taken_when_its_task_comes(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, states={"a": "done"}, samples=1)
    with closing(TelemetryWriter(tmp_path / "recorder.sqlite", task.key.task_id)) as telemetry:
        telemetry.write_tick(START_MS + 77, [], HostReading(1.0, 2, 3))
    TaskFile(tmp_path, index=5, states={"z": "done"}).write()
    half = by_name(merged(tmp_path))["recorder.sqlite"]
    assert (half.status, half.reason) == ("skipped", "a recorder's live file; the file of its task was not given")
    task.write()
    assert by_name(merged(tmp_path))["recorder.sqlite"].status == "copy"
    assert count(tmp_path, "host_sample", f"at_ms = {START_MS + 77}") == 1


def test_a_file_that_is_published_again_while_it_is_merged_is_looked_at_again(tmp_path: Path) -> None:
    tasks = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}, samples=300) for n in range(12)]
    for task in tasks:
        task.write()
    over = threading.Event()

    def publish_on() -> None:
        while not over.is_set():
            for task in tasks[:6]:
                task.samples += 1
                task.write()

    publisher = threading.Thread(target=publish_on)
    publisher.start()
    try:
        for number in range(6):
            outcome = merged(tmp_path, target=f"job{number}.sqlite")
            lost = [
                file for file in outcome.files if file.lost_something and "still being written" not in str(file.reason)
            ]
            assert lost == []
    finally:
        over.set()
        publisher.join()
    merged(tmp_path)
    assert count(tmp_path, "sample") == sum(task.samples for task in tasks)


# --- damage after a good merge ----------------------------------------------------------------------------------------


def test_what_rots_after_a_good_merge_does_not_overwrite_what_was_right(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states=STATES, samples=50).write()
    merged(tmp_path)
    before = query(tmp_path / "job.sqlite", "SELECT * FROM detection ORDER BY chunk_id")
    content = path.read_bytes()
    path.write_bytes(content.replace(b"LOUD", b"LOUE"))
    assert path.read_bytes() != content
    file = by_name(merged(tmp_path))[path.name]
    assert (file.status, file.lost_something) == ("salvaged", True)
    assert query(tmp_path / "job.sqlite", "SELECT * FROM detection ORDER BY chunk_id") == before


def test_rows_that_a_good_merge_had_are_never_lost_whichever_page_goes(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states=STATES, labels=("A", "B", "B", "C"), samples=200).write()
    merged(tmp_path)
    whole, job = path.read_bytes(), (tmp_path / "job.sqlite").read_bytes()
    tables = ("sample", "host_sample", "chunk", "attempt", "detection", "device", "worker", "task", "gap")
    before = {table: Counter(query(tmp_path / "job.sqlite", f"SELECT * FROM {table}")) for table in tables}
    for page in damage.pages_of_kind(path, "table leaf"):
        path.write_bytes(whole)
        (tmp_path / "job.sqlite").write_bytes(job)
        damage.zero_page(path, page)
        merged(tmp_path)
        after = {table: Counter(query(tmp_path / "job.sqlite", f"SELECT * FROM {table}")) for table in tables}
        assert after == before, page


def test_detections_of_a_chunk_whose_row_is_lost_are_not_doubled_by_a_second_attempt(tmp_path: Path) -> None:
    first = TaskFile(tmp_path, states=STATES, samples=5).write()
    TaskFile(tmp_path, restart=1, states=STATES, samples=5, chunk_ended_at_ms=START_MS + 9000).write()
    damage.zero_page(first, damage.page_with(first, b"c030.wav"))
    for files in ([tmp_path], sorted((tmp_path / "tasks").iterdir()), sorted((tmp_path / "tasks").iterdir())[::-1]):
        (tmp_path / "job.sqlite").unlink(missing_ok=True)
        for file in files:
            merged(tmp_path, file)
        assert count(tmp_path, "detection") == len(STATES)
        assert query(tmp_path / "job.sqlite", "SELECT sum(detections) FROM chunk") == [(len(STATES),)]


def test_an_earlier_publication_and_two_damaged_copies_give_the_same_in_any_order(tmp_path: Path) -> None:
    task = TaskFile(tmp_path / "t", states=dict.fromkeys(STATES, "pending"), samples=50, ended_at_ms=None)
    earlier = Path(shutil.copy(task.write(), tmp_path / "earlier.sqlite"))
    task.states, task.samples, task.ended_at_ms = STATES, 400, START_MS + 500_000
    late = task.write()
    bad = [Path(shutil.copy(late, tmp_path / f"bad{n}.sqlite")) for n in range(2)]
    leaves = damage.pages_of_kind(late, "table leaf")
    damage.zero_page(bad[0], damage.page_with(late, b"c010.wav"))
    damage.zero_page(bad[1], leaves[-3])
    contents = set()
    for order in ([earlier, *bad], [*bad, earlier], [bad[1], earlier, bad[0]], [bad[0], earlier, bad[1]]):
        run = tmp_path / "run"
        shutil.rmtree(run, ignore_errors=True)
        run.mkdir()
        for path in order:
            merged(run, path)
        assert count(run, "chunk", "status = 'done'") == len(STATES), order
        assert (count(run, "detection"), count(run, "sample")) == (len(STATES), 400)
        contents.add(repr(query(run / "job.sqlite", "SELECT * FROM chunk ORDER BY chunk_id")))
    assert len(contents) == 1


# --- the lock, and who may replace what -------------------------------------------------------------------------------


def test_a_merge_that_was_taken_for_dead_replaces_nothing(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    lock = tmp_path / ".job.sqlite.lock"

    def steal(files: int, of: int, rows: int) -> None:
        lock.write_text("another-node 1")

    with pytest.raises(DatabaseProblem, match="another merge has taken over"):
        merge(MergeOrder([tmp_path], tmp_path / "job.sqlite", progress=steal), SystemClock())
    assert sorted(path.name for path in tmp_path.iterdir()) == [".job.sqlite.lock", "tasks"]
    lock.unlink()
    merged(tmp_path)
    before = canonical(tmp_path / "job.sqlite")
    TaskFile(tmp_path, index=1, states={"b": "done"}).write()  # a few more: in place
    with pytest.raises(DatabaseProblem, match="another merge has taken over"):
        merge(MergeOrder([tmp_path], tmp_path / "job.sqlite", progress=steal), SystemClock())
    assert canonical(tmp_path / "job.sqlite") == before


@pytest.mark.parametrize("kind", ["folder", "empty"])
def test_a_lock_that_says_nothing_keeps_nobody_in_a_loop(tmp_path: Path, kind: str) -> None:
    lock = tmp_path / ".job.sqlite.lock"
    lock.mkdir() if kind == "folder" else lock.touch()
    clock, said = HandClock(), list[str]()
    with merge_lock(tmp_path / "job.sqlite", clock, tell=said.append):
        assert lock.is_file()
    assert said == ["another merge is running on an unknown node, process unknown; waiting for it"]
    assert clock.monotonic_s() - HandClock().monotonic_s() >= 60


def test_a_reader_who_does_not_stop_does_not_stop_the_merge(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    merged(tmp_path)
    TaskFile(tmp_path, index=1, states={"b": "done"}).write()
    with closing(sqlite3.connect(tmp_path / "job.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM task").fetchone() == (1,)
        merged(tmp_path)
        assert reader.execute("SELECT count(*) FROM task").fetchone() == (1,)
    assert count(tmp_path, "task") == 2


def test_only_files_given_are_removed_and_only_where_a_later_run_will_look(tmp_path: Path) -> None:
    base = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}).write() for n in range(3)]
    merged(tmp_path)
    other = TaskFile(tmp_path / "other", index=9, states={"z": "done"}).write()
    outcome = merged(tmp_path, other)
    removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
    assert removal.removed == ()
    assert "a later run looks for finished work only in" in removal.left[0][1]
    assert all(path.exists() for path in (*base, other))


def test_a_file_that_is_no_database_is_never_replaced_and_nothing_put_aside_is_overwritten(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    notes = tmp_path / "manifest.csv"
    notes.write_text("precious")
    with pytest.raises(DatabaseProblem, match="is not a database"):
        merge(MergeOrder([tmp_path], notes), SystemClock())
    assert notes.read_text() == "precious"
    for text in ("first", "second"):
        (tmp_path / "job.sqlite").write_text(text)
        merged(tmp_path)
    assert (tmp_path / "job.sqlite.damaged").read_text() == "first"
    assert (tmp_path / "job.sqlite.damaged.2").read_text() == "second"


def test_a_link_to_nothing_is_named_every_time(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    (tmp_path / "tasks" / "gone.sqlite").symlink_to("nowhere")
    for _ in range(4):
        assert by_name(merged(tmp_path))["gone.sqlite"].status == "skipped"


def test_a_name_that_is_not_utf8_costs_nothing(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}).write()
    os.rename(path, os.fsencode(path.parent) + b"/bad\xff.sqlite")  # noqa: PTH104
    outcome = merged(tmp_path)
    assert [file.path for file in outcome.files] == ["tasks/bad\\udcff.sqlite"]
    assert count(tmp_path, "task") == 1


def test_a_folder_as_target_is_refused(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    with pytest.raises(DatabaseProblem, match="is a folder"):
        merge(MergeOrder([tmp_path], Path("/")), SystemClock())


def test_a_merge_killed_in_the_middle_of_its_transaction_leaves_a_journal_and_the_old_content(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}, samples=300).write()
    merged(tmp_path)
    before = canonical(tmp_path / "job.sqlite")
    for index in range(1, 4):
        TaskFile(tmp_path, index=index, states={f"c{index}": "done"}, samples=3000).write()
    code = f"""
import os, signal
from pathlib import Path
from badcjobs.clock import SystemClock
from badcjobs.store.merge import MergeOrder, merge
run = Path({str(tmp_path)!r})
die = lambda files, of, rows: files == 2 and os.kill(os.getpid(), signal.SIGKILL)
merge(MergeOrder([run], run / "job.sqlite", progress=die), SystemClock())
"""
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    assert (tmp_path / "job.sqlite-journal").exists()
    assert len(read_job(tmp_path / "job.sqlite").tasks) == 1  # opened by us, it is as it was
    assert canonical(tmp_path / "job.sqlite") == before
    merged(tmp_path)
    assert count(tmp_path, "task") == 4
