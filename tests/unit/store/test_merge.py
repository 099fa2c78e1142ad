"""Merging: the job database follows from the set of tasks, however often and in whatever order they were merged."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from collections import Counter
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import store
from rooms.report import summarize_database
from rooms.root import BadcjobsError, DatabaseProblem, Holder, SystemClock, find_process
from rooms.store import columns_of, merge_lock, remove_merged_files
from support.databases import change, names_in, query, unpublish
from support.filesystems import largest_file, lie_about_filesystem, read_only
from support.hand_clock import HandClock
from support.task_files import START_MS, TaskFile, merge_run

from badcjobs import __version__

Rows = Counter[tuple[Any, ...]]
NOT_OF_ONE_TASK = ("meta", "source_file", "task_meta", "recording")
JOINED = ("recording_detection", "recording_rarity", "overlap", "job_figure", "label_total", "job_stretch")
TABLES = [table.name for table in store.JOB_TABLES if table.name not in (*NOT_OF_ONE_TASK, *JOINED)]


def written(run, index, *chunks, **more):
    """Write the file of a task that has done some chunks."""
    return TaskFile(run, index=index, states=dict.fromkeys(chunks, "done"), **more).write()


def reported(outcome, what="status"):
    return {Path(file.path).name: getattr(file, what) for file in outcome.files if getattr(file, what)}


def count(run, table, where="true"):
    return int(query(run / "job.sqlite", f"SELECT count(*) FROM {table} WHERE {where}")[0][0])


def grown(run, more, harm=""):
    """Merge one task, publish more of them, perhaps harm the job database, and return its bytes."""
    written(run, 0, "a")
    merge_run(run)
    for index in range(1, more + 1):
        written(run, index, f"b{index}", gaps=[(1, 2, "x")])
    return change(run / "job.sqlite", harm or "SELECT 1").read_bytes()


CHUNKS = ("a", "b", "c", "d", "e")
STRENGTH = ("skipped", "pending", "failed", "poison", "done")  # a later one beats an earlier one
SECONDS = ((0, 5), (0, 5), (2, 5), (0, 7), (3, 4), (0, 5))  # when each task starts, and when its chunks end


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Publications of six tasks that disagree about their chunks: one while it runs, one after its end."""
    files = []
    for n, (start_s, end_s) in enumerate(SECONDS):
        states = {name: STRENGTH[(n * (place + 2) + place) % 5] for place, name in enumerate(CHUNKS[n % 2 :])}
        files.append([])
        for late in (0, 1):
            task = TaskFile(
                tmp_path_factory.mktemp("pool"), index=n // 2, restart=n % 2, labels=(f"L{n}",) * (n + 1),
                states=states if late else dict.fromkeys(states, "pending"), samples=2 + late, devices=n % 3,
                started_at_ms=START_MS + 1000 * start_s, chunk_ended_at_ms=START_MS + 1000 * end_s,
                ended_at_ms=START_MS + 9000 if late else None, gaps=[(n, n + 1, "x")] * late,
            )  # fmt: skip
            files[n].append(task.write())
            os.utime(files[n][late], (START_MS // 1000 + late,) * 2)
    return files


def expected(files):
    """Return what the rule makes of files: every row of every task, and for each chunk the strongest result."""
    found = {name: Counter() for name in TABLES}
    results = {}
    for path in files:
        ((started_ms,),) = query(path, "SELECT started_at_ms FROM task")
        for name in (name for name in TABLES if not name.startswith("rival_") and name not in ("chunk", "detection")):
            found[name].update(query(path, f"SELECT * FROM {'recording' if name == 'task_recording' else name}"))
        detections = query(path, "SELECT * FROM detection")
        for row in query(path, "SELECT * FROM chunk"):
            one = dict(zip(columns_of("chunk"), row, strict=True))
            strength = (STRENGTH.index(one["status"]), one["ended_at_ms"] or 0, started_ms, one["task_id"])
            heard = [detection for detection in detections if one["chunk_id"] in detection]
            results.setdefault((one["recording_id"], one["chunk_id"]), []).append((strength, row, heard))
    for rivals in results.values():
        ordered = sorted(rivals, key=lambda rival: rival[0])
        for place, (_, row, heard) in enumerate(ordered, 1):
            rival = "" if place == len(ordered) else "rival_"
            found[f"{rival}chunk"][row] += 1
            found[f"{rival}detection"].update(heard)
    return found


def content(job):
    return {name: Counter(query(job, f"SELECT * FROM {name}")) for name in TABLES}


STEP = st.tuples(st.integers(0, len(SECONDS) - 1), st.integers(0, 1), st.booleans(), st.booleans(), st.booleans())


@given(steps=st.lists(STEP, min_size=1, max_size=5), kind=st.sampled_from(["xfs", "lustre"]))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_publications_copies_and_merges_gives_what_the_rule_says(pool, tmp_path_factory, steps, kind):
    run = tmp_path_factory.mktemp("run")
    newest = {}
    with pytest.MonkeyPatch.context() as patch:
        lie_about_filesystem(patch, run, kind)
        for task, late, as_copy, alone, twice in steps:
            late = late if as_copy else max(late, newest.get(task, 0))  # a published file only grows
            name = f"{'copy' if as_copy else 'task'}{task}.{late * as_copy}.sqlite"
            path = Path(shutil.copy2(pool[task][late], run / name))
            newest[task] = max(late, newest.get(task, 0))
            for _ in range(1 + twice):
                merge_run(run, *([path] if alone else []))
        outcome = merge_run(run)
        assert merge_run(run).read == 0, "nothing has changed"
    files = [pool[task][late] for task, late in newest.items()]
    assert content(run / "job.sqlite") == expected(files)
    statuses = Counter(file.status for file in outcome.files)
    assert statuses["merged"] == len(files) == statuses.total() - statuses["copy"]
    (run / "once").mkdir()
    merge_run(run, target="once/job.sqlite")
    sql = "SELECT replace(path, ?, ''), task_id, status, rows, rows_lost, last_sign_ms, checksum FROM source_file"
    at_once, in_steps = (sorted(query(one / "job.sqlite", sql, f"{run}/")) for one in (run / "once", run))
    assert at_once == in_steps
    for table in JOINED:
        at_once, in_steps = (sorted(query(one / "job.sqlite", f"SELECT * FROM {table}")) for one in (run / "once", run))
        assert at_once == in_steps


def test_overlaps_of_tasks_are_joined_in_whatever_order_they_are_merged(tmp_path):
    """LOUD is heard by three chunks of 30 s; the first of them is done again later."""

    def write(run, index, again=0):
        path = written(run, index, f"c{index}", samples=0, restart=again, chunk_ended_at_ms=START_MS + 5000 + again)
        change(path, "UPDATE chunk SET start_ms = ?1, end_ms = ?1 + 30000", 20_000 * index)
        change(path, "UPDATE detection SET start_ms = ?, end_ms = 30000", 6000 * (index == 2))  # after the joint
        return path

    for number, order in enumerate([(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2), (2, 0, 3, 1)]):
        run = tmp_path / str(number)
        for task in order:
            write(run, task % 3, again=task // 3)
            merge_run(run, mix=True)
        job = run / "job.sqlite"
        assert query(job, "SELECT start_ms, end_ms, chunk_id FROM recording_detection") == [(0, 70_000, "c0")]
        assert query(job, "SELECT chunk_id, overlap_s FROM overlap ORDER BY 1") == [("c1", 10.0), ("c2", 10.0)]
        assert query(job, "SELECT detections, audio_hours * 3600 FROM job_summary") == [(1, 70.0)]
        summary = summarize_database(job)
        assert (summary.detections, summary.facts.audio_done_s, summary.times_real_time) == (1, 70.0, 7.0)
        assert sum(task.audio_s for task in summary.facts.tasks) == 70.0
        assert sum(device.work.audio_s for device in summary.facts.devices) == 100.0, "what was done twice is work, too"


def test_every_pair_of_states_and_every_tie_has_the_winner_of_the_rule(tmp_path):
    """One chunk per pair, in two tasks of which the weaker one starts and ends later: that does not help it."""
    pairs = {f"{weak}-{strong}": (weak, strong) for n, strong in enumerate(STRENGTH) for weak in STRENGTH[:n]}
    TaskFile(tmp_path, index=0, states={name: strong for name, (_, strong) in pairs.items()}, samples=0).write()
    weak = {**{name: weak for name, (weak, _) in pairs.items()}, "tie": "done"}
    later = {"started_at_ms": START_MS + 1000, "chunk_ended_at_ms": START_MS + 99_000}
    TaskFile(tmp_path, index=1, states=weak, samples=0, **later).write()
    written(tmp_path, 2, "tie", samples=0, chunk_ended_at_ms=START_MS + 99_001)
    merge_run(tmp_path)
    won = query(tmp_path / "job.sqlite", "SELECT chunk_id, status, array_index FROM chunk JOIN task USING (task_id)")
    assert sorted(won) == sorted([*((name, strong, 0) for name, (_, strong) in pairs.items()), ("tie", "done", 2)])


def test_a_winner_that_is_replaced_by_hand_gives_way_to_the_strongest_of_its_rivals(tmp_path):
    for index, label in ((1, "SECOND"), (2, "THIRD")):
        written(tmp_path, index, "a", labels=(label,), chunk_ended_at_ms=START_MS + 6_000 + index)
    for state, *heard in (("done", "FIRST", "SECOND", "THIRD"), ("pending", "THIRD", "SECOND")) * 2:
        TaskFile(tmp_path, states={"a": state}, labels=("FIRST",), chunk_ended_at_ms=START_MS + 9_000).write()
        merge_run(tmp_path)
        won = query(tmp_path / "job.sqlite", "SELECT label, detections FROM detection JOIN chunk USING (chunk_id)")
        rivals = query(tmp_path / "job.sqlite", "SELECT label FROM rival_detection ORDER BY 1")
        assert (won, [label for (label,) in rivals]) == ([(heard[0], 1)], heard[1:])
        assert store.read_job(tmp_path / "job.sqlite").conflicts == 1, "a chunk, however often it was done"


def test_a_recording_has_one_row_with_what_the_last_task_knows_that_knows_it(tmp_path):
    facts = ((60.0, "pond", None), (None, "lake", 8000), (None, None, None))
    sql = """INSERT INTO recording (task_id, recording_id, source_path, duration_s, location, sample_rate_hz)
             SELECT task_id, 'rec', 'rec.wav', ?, ?, ? FROM task"""
    files = [written(tmp_path, n, f"c{n}", started_at_ms=START_MS + n) for n in range(3)]
    for path, known in zip(files, facts, strict=True):
        change(path, sql, *known)
    joined = """SELECT count(*), (SELECT count(*) FROM detection), min(duration_s), min(location), min(sample_rate_hz)
                FROM detection JOIN recording USING (recording_id)"""
    for number, inputs in enumerate(([tmp_path / "tasks"], files, files[::-1])):
        for one in inputs:
            merge_run(tmp_path, one, target=f"{number}.sqlite")
        assert query(tmp_path / f"{number}.sqlite", joined) == [(3, 3, 60.0, "lake", 8000)]
    change(files[1], "UPDATE recording SET location = NULL")
    (tmp_path / "0.sqlite").unlink()
    merge_run(tmp_path, tmp_path / "tasks", target="0.sqlite")
    assert query(tmp_path / "0.sqlite", joined) == [(3, 3, 60.0, "pond", 8000)]


def test_only_what_has_changed_is_read_and_every_row_is_counted_while_it_is_copied(tmp_path):
    files = [written(tmp_path, n, f"c{n}") for n in range(5)]
    counts = []
    assert merge_run(tmp_path, progress=lambda *seen: counts.append(seen)).read == 5
    stated = "SELECT sum(value) FROM json_each((SELECT value FROM meta WHERE key = 'rows'))"
    rows = sum(query(path, stated)[0][0] for path in files)
    assert counts == [(n, 5, rows * n // 5) for n in range(1, 6)]
    before = (tmp_path / "job.sqlite").stat()
    assert merge_run(tmp_path).read == 0
    after = (tmp_path / "job.sqlite").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it was written for nothing"
    os.utime(files[2], ns=(files[2].stat().st_mtime_ns + 1,) * 2)
    files[3].write_bytes(files[3].read_bytes() + b"x")
    running = TaskFile(tmp_path, index=9)
    for running.ended_at_ms, verdict, state, read in ((None, None, "pending", 3), (START_MS + 9, "done", "done", 1)):
        running.states = {"late": state}
        running.write()
        assert (merge_run(tmp_path).read, count(tmp_path, "task")) == (read, 6)
        its_row = "SELECT task.ended_at_ms, verdict, status FROM task JOIN chunk USING (task_id) WHERE array_index = 9"
        assert query(tmp_path / "job.sqlite", its_row) == [(running.ended_at_ms, verdict, state)]


def test_files_are_found_once_and_never_touched(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    run, other = tmp_path / "run", written(tmp_path / "august", 7, "b")
    files = [written(run, index, "a") for index in range(3)]
    os.rename(files[2], os.fsencode(files[2].parent) + b"/bad\xff.sqlite")  # noqa: PTH104
    for name in (f".{files[0].name}.gpu1.99.tmp", ".hidden.sqlite", "notes.txt", "elsewhere/job.sqlite"):
        (run / "tasks" / name).parent.mkdir(exist_ok=True)
        (run / "tasks" / name).touch()
    (run / "tasks" / ".live-x").mkdir()
    shutil.copy(files[0], run / "tasks" / ".live-x" / "wrapper.sqlite")
    merge_run(run, run / "tasks", target="backup.sqlite")
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in [*files[:2], other]}
    outcome = merge_run(run, run / "tasks" / ".." / "tasks" / files[1].name, run, other)
    assert {file.path: file.status for file in outcome.files} == {
        str(other): "merged", "backup.sqlite": "skipped", "tasks/4821_0.r0.gpu1.sqlite": "merged",
        "tasks/4821_1.r0.gpu1.sqlite": "merged", "tasks/bad\\udcff.sqlite": "merged",
    }  # fmt: skip
    assert not any(file.lost_something for file in outcome.files), "a job database is no task"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    shutil.move(run, tmp_path / "moved")
    assert merge_run(tmp_path / "moved").read == 0, "paths are relative to the job database"
    assert names_in(tmp_path / "moved") == ["backup.sqlite", "job.sqlite", "tasks"]
    assert names_in(tmp_path / "scratch") == []


def test_a_file_that_is_gone_or_belongs_to_another_task_now_keeps_the_rows_it_gave(tmp_path):
    first, second, text = written(tmp_path, 0, "a"), written(tmp_path, 1, "b"), tmp_path / "tasks" / "text.sqlite"
    text.write_text("no database")
    merge_run(tmp_path)
    first.unlink()
    text.unlink()
    shutil.copy(written(tmp_path / "x", 2, "c"), second)
    names = (first.name, second.name, f"{second.name} (before 4821_2.r0.gpu1 replaced it)")
    for _ in range(2):
        assert reported(merge_run(tmp_path, tmp_path / "tasks")) == dict.fromkeys(names, "merged")
        assert query(tmp_path / "job.sqlite", "SELECT chunk_id FROM detection ORDER BY 1") == [("a",), ("b",), ("c",)]


@pytest.mark.parametrize("is_merged_before", [False, True])
@pytest.mark.parametrize(("healthy", "victim"), [(0, 1), (1, 0)])
def test_a_file_that_was_overwritten_with_that_of_another_task_is_the_copy(tmp_path, is_merged_before, healthy, victim):
    files = [written(tmp_path, index, f"c{index}") for index in (0, 1)]
    if is_merged_before:
        merge_run(tmp_path)
    shutil.copy(files[healthy], files[victim])
    statuses = reported(merge_run(tmp_path))
    assert (statuses[files[healthy].name], statuses[files[victim].name]) == ("merged", "copy")


def test_what_a_killed_merge_leaves_is_removed_by_the_next_merge_into_the_same_file(tmp_path):
    run = tmp_path / "run"
    written(run, 0, "a")
    merge_run(run)
    for kill in range(2):  # in a merge that has something to do, and in one that has not
        (run / "job.sqlite").unlink()
        wanted = {"progress": lambda *_: os.kill(os.getpid(), signal.SIGKILL)}
        killed = multiprocessing.get_context("fork").Process(target=merge_run, args=[run], kwargs=wanted)
        killed.start()
        killed.join()
        left = names_in(run)
        assert len(left) == 4, "a draft, a folder and a lock beside the tasks"
        merge_run(run, target="other.sqlite")
        assert {*names_in(run)} == {*left, "other.sqlite"}, "that merge may still run"
        if kill:
            shutil.copy(run / "other.sqlite", run / "job.sqlite")
        (run / "other.sqlite").unlink()
        merge_run(run)
        assert names_in(run) == ["job.sqlite", "tasks"]


def test_live_files_left_behind_count_instead_of_the_published_one_if_they_have_more_rows(tmp_path):
    task = TaskFile(tmp_path, states={"a": "done", "b": "pending"}, samples=5, ended_at_ms=None)
    published, left, ours = task.write(), tmp_path / "left", f"task_id = {task.key.task_id}"
    wrapper, recorder = replace(task, states={"a": "done", "b": "done"}, samples=9).write_live(left)
    alone = merge_run(tmp_path, recorder, written(tmp_path, 5, "z"))
    assert reported(alone, "reason") == {recorder.name: "it contains no task"}
    for order in ([published, left], [left, published], [published, wrapper]):
        (tmp_path / "job.sqlite").unlink()
        for place in order:
            merge_run(tmp_path, place)
        outcome = merge_run(tmp_path, *order)
        counts = {table: count(tmp_path, table, ours) for table in ("sample", "host_sample", "chunk", "detection")}
        assert counts == {"sample": 9, "host_sample": 9, "chunk": 2, "detection": 2}
        assert count(tmp_path, "chunk", f"{ours} AND status = 'done'") == 2
        assert not any(file.lost_something for file in outcome.files), outcome.files
        assert query(tmp_path / "job.sqlite", f"SELECT samples FROM device_total WHERE {ours}") == [(9,)]
        assert remove_merged_files(tmp_path / "job.sqlite", outcome.given).removed == ()
    before = sorted(path.name for path in left.iterdir())
    merge_run(tmp_path, left)
    assert sorted(path.name for path in left.iterdir()) == before


def test_a_file_that_is_published_again_while_it_is_merged_is_read_as_one_or_the_other(tmp_path):
    tasks = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}, samples=30) for n in range(3)]
    for task in tasks:
        task.write()

    def publish_again(*seen):
        tasks[2].samples += 5
        (tmp_path / f"before-{tasks[2].samples}").hardlink_to(tasks[2].path)  # its number is not given to the next one
        tasks[2].write()

    assert set(reported(merge_run(tmp_path, progress=publish_again)).values()) == {"merged"}
    assert count(tmp_path, "sample") in (95, 100)
    assert merge_run(tmp_path).read <= 1
    assert count(tmp_path, "sample") == 60 + tasks[2].samples


def test_the_figures_of_a_live_file_are_added_up(tmp_path):
    whole, live = (written(tmp_path / name, 0, "a", samples=9) for name in ("whole", "live"))
    for table in store.DERIVED:
        change(unpublish(live), f"DELETE FROM {table}")
    figures = []
    for run in (database.parent.parent for database in (whole, live)):
        merge_run(run)
        figures.append({table: query(run / "job.sqlite", f"SELECT * FROM {table}") for table in store.DERIVED})
    assert figures[0] == figures[1] and any(figures[0].values())


@pytest.mark.parametrize("kind", ["xfs", "lustre"])
def test_a_job_database_is_replaced_and_a_reader_keeps_the_old_one(tmp_path, monkeypatch, kind):
    lie_about_filesystem(monkeypatch, tmp_path, kind)
    before = grown(tmp_path, 1)
    with (
        (tmp_path / "job.sqlite").open("rb") as still_open,
        closing(store.open_sealed(tmp_path / "job.sqlite")) as reader,
    ):
        merge_run(tmp_path)
        assert still_open.read() == before
        assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (1,)
    assert (count(tmp_path, "chunk"), names_in(tmp_path)) == (2, ["job.sqlite", "tasks"])


# What a disk that does not keep everything would do to a table, as a trigger.
LOSE = "CREATE TRIGGER lose AFTER INSERT ON {0} BEGIN DELETE FROM {0} WHERE {1}; END"
TWICE = """CREATE TRIGGER twice AFTER INSERT ON {0} WHEN new.label != 'AGAIN' BEGIN
    INSERT INTO {0} (task_id, recording_id, chunk_id, start_ms, end_ms, label)
    VALUES (new.task_id, new.recording_id, new.chunk_id, 0, 1, 'AGAIN'); END"""
# the table, how many more files, what happens, how many rows its file has and how many have come
HARM = [
    ("host_sample", 1, LOSE, 3, 0), ("attempt", 1, LOSE, 1, 0), ("sample", 1, LOSE, 3, 0), ("gap", 11, LOSE, 1, 0),
    ("attempt", 11, LOSE, 1, 0), ("chunk", 1, LOSE, 1, 0), ("detection", 1, TWICE, 1, 2),
]  # fmt: skip


@pytest.mark.parametrize(("table", "more", "trigger", "sent", "came"), HARM)
def test_a_file_whose_rows_do_not_arrive_or_arrive_twice_is_left_out_and_named(
    tmp_path, table, more, trigger, sent, came
):
    same = {"host_sample": "at_ms = new.at_ms", "attempt": "attempt_id = new.attempt_id"}
    grown(tmp_path, more, trigger.format(table, same.get(table, "rowid = new.rowid")))
    outcome = merge_run(tmp_path)
    assert Counter(reported(outcome).values()) == {"merged": 1, "skipped": more}
    words = f"{table} rows in the file: {sent}, in job.sqlite: {came}"
    assert all(words in reason for reason in reported(outcome, "reason").values())
    assert [count(tmp_path, name) for name in ("task", "chunk", "sample", "detection", "gap")] == [1, 1, 3, 1, 0]
    assert names_in(tmp_path) == ["job.sqlite", "tasks"], "no draft, journal or lock"


# the target, made of which file, with bytes at which place
FOREIGN = [
    ("task.sqlite", "tasks/4821_0.r0.gpu1.sqlite", 68, b"BADC"), ("newer.sqlite", "job.sqlite", 60, b"\0\0\0\x63"),
    ("other.sqlite", "tasks/4821_0.r0.gpu1.sqlite", 68, b"\0\0\0\7"), ("manifest.csv", "job.sqlite", 0, b"precious"),
]  # fmt: skip
# what is given, and the target
WRONG = [("tasks", "manifest.csv/job.sqlite"), ("tasks", "."), ("one two", "x.sqlite"), ("one/two/three", "x.sqlite"),
         ("empty", "x.sqlite")]  # fmt: skip


def test_merge_never_replaces_what_is_not_its_own_and_says_what_it_cannot_write(tmp_path, pages):
    def refusal(inputs, target):
        with pytest.raises(BadcjobsError) as refused:
            merge_run(tmp_path, *(tmp_path / name for name in inputs.split()), target=target)
        assert refused.value.exit_code == (2 if inputs == "empty" else 4)
        said = f"{inputs} into {target}\n{refused.value}\n"
        return said.replace(str(tmp_path), "RUN").replace(__version__, "VERSION")

    written(tmp_path, 0, "a")
    merge_run(tmp_path, target="new/folder/job.sqlite")
    merge_run(tmp_path, tmp_path / "tasks")
    (tmp_path / "empty").mkdir()
    said = []
    for name, source, at, value in FOREIGN:
        made = bytearray((tmp_path / source).read_bytes())
        made[at : at + len(value)] = value
        (tmp_path / name).write_bytes(made)
        said.append(refusal("tasks", name))
        assert (tmp_path / name).read_bytes() == made
    pages({"said.txt": "\n".join([*said, *(refusal(*wrong) for wrong in WRONG)])})


def test_a_job_database_that_cannot_be_read_is_put_aside_and_never_overwrites_another(tmp_path):
    path = written(tmp_path, 0, "a")
    for aside in ("job.sqlite.damaged", "job.sqlite.damaged.2"):
        (tmp_path / "job.sqlite").write_text(aside)
        outcome = merge_run(tmp_path)
        assert reported(outcome) == {path.name: "merged", aside: "skipped"}
        assert [file.path for file in outcome.files if file.lost_something] == [aside]
        assert (tmp_path / aside).read_text() == aside
    assert reported(merge_run(tmp_path)) == {path.name: "merged", aside: "skipped"}
    (tmp_path / aside).unlink()
    assert reported(merge_run(tmp_path)) == {path.name: "merged"}, "what is gone is forgotten"


def test_a_disk_that_fills_up_or_is_read_only_leaves_the_old_file_and_nothing_else(tmp_path):
    for index in range(3):
        written(tmp_path, index, *(f"c{n}" for n in range(100)), samples=400)
    merge_run(tmp_path)
    size = (tmp_path / "job.sqlite").stat().st_size
    (tmp_path / "job.sqlite").write_bytes(b"old")
    for refusing in (largest_file(int(0.3 * size)), largest_file(int(0.95 * size)), read_only(tmp_path)):
        with refusing, pytest.raises(DatabaseProblem, match="cannot be written") as refused:
            merge_run(tmp_path)
        assert refused.value.fix == "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        assert (tmp_path / "job.sqlite").read_bytes() == b"old"
        assert names_in(tmp_path) == ["job.sqlite", "tasks"]


def test_merged_files_are_removed_only_when_their_rows_are_safe_and_found_by_later_runs(tmp_path):
    files = [written(tmp_path, n, "a", f"c{n}") for n in range(6)]
    shutil.copy(files[5], tmp_path / "tasks" / "z-copy.sqlite")
    running = written(tmp_path, 7, "r", ended_at_ms=None)
    live = unpublish(written(tmp_path, 8, "u"))
    (tmp_path / "tasks" / "text.sqlite").write_text("text")
    earlier = TaskFile(tmp_path / "x", index=9, states={"e": "pending"}, ended_at_ms=None).write()
    shutil.copy(earlier, tmp_path / "tasks" / "z-earlier.sqlite")
    last, far = written(tmp_path, 9, "e"), written(tmp_path / "other", 10, "z")
    files[0].with_suffix(".slurm.json").write_text("{}")
    given = [path for path in (tmp_path / "tasks").glob("*.sqlite") if path != files[4]]
    merge_run(tmp_path, tmp_path / "tasks")
    outcome = merge_run(tmp_path, *given, far)
    os.utime(files[1])
    files[2].unlink()
    job, fourth = tmp_path / "job.sqlite", "(SELECT task_id FROM task WHERE array_index = 3)"
    change(job, f"DELETE FROM sample WHERE at_ms > ? AND task_id = {fourth}", START_MS + 1000)
    before = content(job)
    removal = remove_merged_files(job, outcome.given)
    assert {Path(path).name for path in removal.removed} == {files[0].name, files[5].name, "z-copy.sqlite", last.name}
    ((total,),) = query(job, f"SELECT rows FROM source_file WHERE task_id = {fourth}")
    assert {Path(path).name: why for path, why in removal.left} == {
        files[1].name: "it has changed since it was merged",
        files[3].name: f"{total - 1} of its {total} rows are in the job database",
        running.name: "its task had not ended when it was merged",
        live.name: "not published; completed on a copy",
        "text.sqlite": "not a SQLite database",
        "z-earlier.sqlite": "it is not the file whose rows are in the job database",
        far.name: f"a later run looks for finished work only in {far.parents[1]}/job.sqlite; merge into that file "
        "first",
    }
    assert not files[0].with_suffix(".slurm.json").exists()
    assert all(path.exists() for path in (files[1], files[3], files[4], running, live, far))
    merge_run(tmp_path, tmp_path / "tasks")
    assert content(job) == before


def test_a_merge_waits_for_another_one_until_that_has_ended_or_is_silent(tmp_path):
    target, here = tmp_path / "job.sqlite", find_process(os.getpid())
    for pid, process, passes_s in ((77, here, 0), (77, None, 31), (os.getpid(), here, 31)):
        holder = Holder("a-node", pid, process, 10.0, START_MS, works=True)
        (tmp_path / ".merge-job.sqlite-0").write_text(json.dumps(asdict(holder)))
        clock, reported = HandClock(), list[str]()
        began_s = clock.monotonic_s()
        with merge_lock(target, clock, tell=reported.append):
            assert len(names_in(tmp_path)) == 1
        assert names_in(tmp_path) == [], "nothing is left"
        assert clock.monotonic_s() - began_s == pytest.approx(passes_s, abs=1.1)
        assert reported == [f"another merge is running on a-node, process {pid}; waiting for it"] * (passes_s > 0)
    with largest_file(0), pytest.raises(OSError), merge_lock(target, HandClock(), tell=print):
        pass
    assert names_in(tmp_path) == [], "no empty lease for which there was no room"


class QuickClock(SystemClock):
    """A clock of which a second takes a twentieth."""

    def monotonic_s(self):
        return 20 * super().monotonic_s()

    def sleep(self, seconds):
        super().sleep(seconds / 20)


def test_merges_take_turns(tmp_path):
    """Also those that are waiting: each works, none at the same time as another."""
    target, at_work, turns = tmp_path / "job.sqlite", list[int](), list[int]()

    def work(number):
        with merge_lock(target, QuickClock(), tell=lambda text: None):
            at_work.append(number)
            time.sleep(0.05)
            turns.append(len(at_work))
            at_work.remove(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert turns == [1, 1, 1]
    assert names_in(tmp_path) == []


def test_a_merge_that_was_taken_for_dead_replaces_nothing(tmp_path):
    target, before = tmp_path / "job.sqlite", grown(tmp_path, 1)

    def take_over(*_seen):
        for lease in tmp_path.glob(".merge-job.sqlite-*"):
            lease.unlink()

    with pytest.raises(DatabaseProblem, match="another merge has taken over") as refused:
        merge_run(tmp_path, progress=take_over)
    assert refused.value.why == "this merge has replaced nothing"
    assert target.read_bytes() == before
    assert names_in(tmp_path) == [target.name, "tasks"]
