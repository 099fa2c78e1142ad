"""The wrapper's half of a task database: every try, every state, and which chunks are done already."""

import json
import logging
import sqlite3
import threading
import time
from ast import literal_eval
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rooms import model, store
from rooms.model import Chunk, ChunkResult, Fingerprint, HostReading, Reading, TaskKey
from rooms.root import RunFolder
from rooms.store import TaskWriter
from rooms.task import Records
from rooms.telemetry import TelemetryWriter
from support.behaviour import tables
from support.cases import read_lines
from support.databases import change, names_in, query
from support.filesystems import small_disk
from support.hand_clock import HandClock
from support.task_files import LOUD, START_MS, TaskFile, make_chunk, make_device, merge_run
from support.waiting import wait_for

KEY = TaskKey("4821", 7, 1, "gpu3")
both_modes = pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])


@pytest.fixture
def writer(tmp_path):
    with closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY)) as writer:
        yield writer


def fill(writer, *names):
    chunks = [make_chunk(name) for name in names]
    assert writer.fill(chunks, lambda rows: None) == len(chunks)
    return chunks


def done(chunk, audio_s=29.5):
    return ChunkResult(chunk, START_MS + 1000, START_MS + 2000, (LOUD, LOUD), audio_s)


def failed(chunk, *, charged=True):
    times = (START_MS + 1000, START_MS + 2000)
    return ChunkResult(chunk, *times, error_class="bad_audio", error="no luck", charged=charged)


def end(writer, result, status, try_number=1, **more):
    writer.attempt_ended(result, status=status, try_number=try_number, worker_id=5, device_id=9, **more)


def test_tables_of_a_task(writer, pages):
    """A task writes what it knows as it becomes known; what is unknown is null."""
    given = model.Allocation(True, "4821", "gpu3", restart=1, array_index=7, cpus=6, facts={"SLURM_JOB_ID": "4828"})
    facts = {"pid": 42, "version": "0.1.0", "engine": "demo", "telemetry": True, "memory_limit_bytes": 2**31}
    writer.begin_task(given, started_at_ms=START_MS, time_limit_s=1800.5, **facts)
    assert writer.counts().start_up_s == 0.0
    writer.add_devices([make_device(0), make_device(1), replace(make_device(2), uuid=None, index=None, name=None)])
    workers = [writer.worker_started(device_id=9, pid=pid, engine="demo", at_ms=START_MS) for pid in (11, 12)]
    writer.worker_ended(workers[0], exit_code=-9, at_ms=START_MS + 5)
    assert writer.workers_started == 2
    writer.add_gap(None, 5, 9, "the recorder died")
    writer.add_decision(model.Decision.of(model.Code.TRY_MORE_WORKERS, "V100", workers=3, more=1, tried=None), START_MS)
    writer.add_usage(model.UsageReading(None, 5 * 2**30, None, 9, "pss"), 1000)
    marks = [writer.begin_mark(name, START_MS) for name in ("warm", "cold")]
    writer.end_mark(marks[0], START_MS + 7)
    writer.write_meta({"a": "1"})
    writer.write_meta({"a": "2", "b": "3"})
    good, bad, quiet, lost = fill(writer, "good", "bad", "quiet", "lost")
    writer.attempt_started(good, try_number=1, worker_id=5, device_id=9, at_ms=START_MS + 500)
    begun = tables(writer.path)
    assert (writer.count_by_status(), writer.under_way()) == ({"pending": 4}, {9: ["rec/good"]})
    end(writer, failed(good, charged=False), "pending", 1)
    end(writer, failed(good), "pending", 2, gpu_state="{}")
    assert (writer.counts().retrying, writer.counts().start_up_s) == (1, 1.0)
    end(writer, done(good), "done", 3)
    end(writer, failed(bad), "poison")
    end(writer, replace(done(quiet, audio_s=None), detections=(), pieces=2), "done")
    writer.attempt_started(lost, try_number=1, worker_id=6, device_id=None, at_ms=START_MS)
    writer.update_task(shard_index=3, shard_count=8)
    writer.update_task(devices=4, workers=2, ended_at_ms=START_MS + 9, exit_code=75, verdict="stopped")
    pages({"begun.txt": begun, "ended.txt": tables(writer.path)})
    assert writer.count_by_status() == {"done": 2, "pending": 1, "poison": 1}
    assert (writer.counts().audio_done_s, writer.done_by_device()) == (59.5, {9: (2, 59.5)})
    assert (writer.counts().retrying, writer.under_way()) == (0, {None: ["rec/lost"]})
    assert writer.recent_work(9) == [(9, 30.0, 1.0), (9, 29.5, 1.0)]
    assert writer.recent_work(1) == [(9, 30.0, 1.0)]
    assert writer.failed_chunks(10) == [("rec", "bad", "bad_audio", "no luck")]


def test_the_chunks_of_the_source_are_written_as_pending_and_come_back_once_in_its_order(writer):
    counted = []
    odd = Chunk("été", "c 1", "../x.wav", "/data/x.wav", 500, None, Fingerprint(1000, 17), is_cut=True)
    chunks = [make_chunk("c"), make_chunk("a"), odd, make_chunk("b", seconds=None), make_chunk("d")]
    assert writer.fill(chunks, counted.append) == 5
    assert (counted, writer.count_by_status()) == ([1, 2, 3, 4, 5], {"pending": 5})
    assert [writer.next_pending(2) for _ in range(4)] == [chunks[:2], chunks[2:4], chunks[4:], []]
    with pytest.raises(AttributeError):  # a source that turns out wrong half way leaves nothing
        writer.fill([make_chunk("x"), None], lambda rows: None)  # type: ignore[list-item]
    fill(writer, "a")  # the source itself reports what it has twice
    assert writer.count_by_status() == {"pending": 5}


def test_a_recording_has_one_row_with_what_its_path_tells_and_what_is_missing_is_counted(writer):
    names = {"r1": ("Gameti", "G1", "2026-05-01T06:00:00", "{study_area}/*"), "r2": (None,) * 4,
             "r3": ("Gameti", None, "2026-05-01", None)}  # fmt: skip
    chunks = [make_chunk(name[2:], name[:2]) for name in ("r1a", "r1b", "r2c", "r3d", "r1e")]
    writer.fill(chunks, lambda rows: None, lambda chunk: model.RecordingName(*names[chunk.recording_id]))
    columns = "recording_id, study_area, location, recorded_at, pattern, source_path"
    found = query(writer.path, f"SELECT {columns} FROM recording ORDER BY 1")
    assert found == [(name, *names[name], path) for name, path in (("r1", "a.wav"), ("r2", "c.wav"), ("r3", "d.wav"))]
    assert writer.name_gaps() == model.NameGaps(3, 1, "c.wav", 1, "c.wav", 2, "c.wav", 1, "d.wav")


def audio(case, words):
    """Return a chunk with what is known of its audio."""
    facts = {name: literal_eval(value) for name, value in (word.split("=") for word in words.split())}
    size, mtime, digit = (facts.pop(name, known) for name, known in (("bytes", 1000), ("mtime", 17), ("sum", None)))
    return replace(make_chunk("a"), chunk_id=case, fingerprint=Fingerprint(size, mtime, digit and digit * 64), **facts)


THEN = audio("a", "")
CASES = [line.split(":") for line in read_lines("resumed_audio.txt")]
AUDIO = {case: (*(audio(case, words) for words in known.split(">")), word == " same") for case, known, word in CASES}


def earlier_task(path, *chunks, state="done"):
    """Write what a task before ours has left."""
    with closing(TaskWriter(path, TaskKey("4820", 0, 0, "gpu1"))) as earlier:
        earlier.fill(chunks, lambda rows: None)
        for chunk in chunks:
            end(earlier, done(chunk) if state == "done" else failed(chunk), state)
    return path


def test_a_chunk_is_done_if_its_audio_is_what_it_was(writer, tmp_path):
    then, now = ([case[place] for case in AUDIO.values()] for place in (0, 1))
    earlier = earlier_task(tmp_path / "earlier.sqlite", *then)
    writer.fill([*now, replace(THEN, recording_id="another"), replace(THEN, chunk_id="new")], lambda rows: None)
    same = [name for name, case in AUDIO.items() if case[2]]
    assert [writer.skip_done_in(earlier) for _ in range(2)] == [len(same), 0]
    skipped = query(writer.path, "SELECT chunk_id FROM chunk WHERE status = 'skipped' ORDER BY rowid")
    assert [name for (name,) in skipped] == same
    assert writer.changed == len(AUDIO) - len(same)
    left = [name for name, case in AUDIO.items() if not case[2]]
    assert [chunk.chunk_id for chunk in writer.next_pending(99)] == [*left, "a", "new"]
    again = earlier_task(tmp_path / "again.sqlite", *(chunk for chunk in now if chunk.chunk_id in left))
    assert (writer.skip_done_in(again), writer.changed) == (len(left), 0), "done again since it changed"
    columns = "audio_bytes, audio_mtime_ns, audio_sha256"
    sums = query(writer.path, f"SELECT {columns} FROM chunk WHERE chunk_id IN ('no sum any more', 'another sum')")
    assert sorted(sums, key=repr) == [(1000, 17, "b" * 64), (1000, 17, None)]


def test_failures_elsewhere_are_skipped_only_where_asked(writer, tmp_path):
    states = {"a": "done", "b": "failed", "c": "poison", "d": "pending", "e": "skipped"}
    earlier = TaskFile(tmp_path, states=states).write()
    before = earlier.read_bytes()
    fill(writer, *states, "f")
    assert [writer.skip_done_in(earlier) for _ in range(2)] == [1, 0]
    assert (writer.count_by_status(), writer.counts().failed_before) == ({"pending": 5, "skipped": 1}, 0)
    assert writer.skip_done_in(earlier, retry_failed=False) == 2
    assert (writer.count_by_status(), writer.counts().failed_before) == ({"pending": 3, "skipped": 3}, 2)
    errors = [("rec", name, "bad_audio", f"{name}: no luck") for name in ("b", "c")]
    assert (writer.failed_chunks(10), writer.failed_chunks(1)) == (errors, errors[:1])
    assert writer.skip_done_in(TaskFile(tmp_path, index=1, states={"b": "done"}).write(), retry_failed=False) == 1
    assert (writer.failed_chunks(10), writer.counts().failed_before) == (errors[1:], 1), "done there beats failed here"
    now = replace(THEN, chunk_id="g", fingerprint=Fingerprint(1000, 18))
    other = earlier_task(tmp_path / "other.sqlite", replace(now, fingerprint=Fingerprint(1000, 17)), state="failed")
    writer.fill([now], lambda rows: None)
    assert (writer.skip_done_in(other, retry_failed=False), writer.changed) == (0, 0), "it failed with other audio"
    assert [chunk.chunk_id for chunk in writer.next_pending(10)] == ["d", "e", "f", "g"]
    assert earlier.read_bytes() == before


@pytest.mark.parametrize("done", [10_000, 10_001, 20_001])
def test_many_databases_with_many_chunks_are_looked_into(writer, tmp_path, done):
    """SQLite attaches ten files at most; chunks are looked up ten thousand at a time."""
    names, earlier = [f"c{number}" for number in range(11 + done)], tmp_path / "earlier.sqlite"
    with closing(TaskWriter(earlier, TaskKey("4820", 0, 0, "gpu1"))) as other:
        fill(other, *names)
    fill(writer, *names, "last")
    change(earlier, "UPDATE chunk SET status = 'done' WHERE rowid > 11")
    assert [writer.skip_done_in(earlier) for _ in range(12)] == [done, *[0] * 11]
    assert writer.count_by_status() == {"skipped": done, "pending": 12}


def test_what_a_later_run_takes_from_a_merge_is_what_cannot_change_any_more(tmp_path):
    run = RunFolder(tmp_path)
    assert store.merged_files(run.job_database) == set()
    ended = TaskFile(tmp_path, index=0, states={"a": "done"}, samples=0).write()
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, samples=0, ended_at_ms=None).write()
    (tmp_path / "tasks" / "4821_9.r0.gpu1.sqlite").write_text("damaged")
    merge_run(tmp_path)
    assert store.merged_files(run.job_database) == {ended.name}
    left = run.earlier_databases(TaskKey("4822", 0, 0, "gpu1"), store.merged_files(run.job_database))
    assert running in left and ended not in left
    lengths = "(1, 'a', '', 30.0), (2, 'a', '', 30.0), (1, 'b', '', 30.0), (2, 'b', '', 31.0), (1, 'c', '', NULL)"
    columns = "task_id, recording_id, source_path, duration_s"
    change(run.job_database, f"INSERT INTO task_recording ({columns}) VALUES {lengths}")
    assert store.known_lengths(run.job_database) == {"a": 30.0}


def test_the_safe_mode_takes_no_lock_and_leaves_no_log_and_no_shared_memory(tmp_path):
    live = tmp_path / "wrapper.sqlite"
    with closing(TaskWriter(live, KEY, shared=True)) as writer:
        writer.fill([make_chunk("a")], lambda rows: None)
        with writer.batch():
            writer.add_gap(None, 1, 2, "x")
            locks = Path("/proc/locks").read_text().splitlines()
            assert not [line for line in locks if line.split()[5].endswith(f":{live.stat().st_ino}")]
        assert names_in(tmp_path) == ["wrapper.sqlite", "wrapper.sqlite-journal"]
        assert (tmp_path / "wrapper.sqlite-journal").stat().st_size == 0, "nothing is half written"


@both_modes
def test_a_snapshot_has_all_that_is_committed_or_is_not_there_at_all(tmp_path, shared):
    (tmp_path / "live").mkdir()
    with closing(TelemetryWriter(tmp_path / "live" / "recorder.sqlite", 7, shared=shared)) as writer:
        with writer.batch():
            for tick in range(2000):  # more than one step of the copy
                writer.write_tick(tick, [(device, Reading(power_w=250.5)) for device in range(8)], None)
        (tmp_path / "folder.sqlite").mkdir()
        with pytest.raises(OSError, match="Is a directory"):
            writer.snapshot(tmp_path / "folder.sqlite")
        (tmp_path / ".copy.sqlite.tmp").write_text("of a process that was killed")
        writer.snapshot(tmp_path / "copy.sqlite")
        assert query(tmp_path / "copy.sqlite", "SELECT count(*) FROM sample") == [(16_000,)]
        assert query(tmp_path / "copy.sqlite", "PRAGMA journal_mode") == [("delete",)]
    assert names_in(tmp_path) == ["copy.sqlite", "folder.sqlite", "live"]


def test_the_newest_readings_are_those_since_a_moment_and_unknown_where_there_are_none(tmp_path):
    path = tmp_path / "recorder.sqlite"
    with closing(TelemetryWriter(path, 7)) as writer:
        for tick, (used, load) in enumerate([(5, 20), (9, 40), (None, 60)]):
            reading = Reading(memory_used_bytes=used, utilization_percent=load)
            host = HostReading(10.0 * tick, 2**30 * tick, 2**32)
            writer.write_tick(START_MS + tick * 1000, [(1, reading), (2, Reading(memory_used_bytes=tick))], host)
        writer.write_tick(START_MS + 9000, [(2, Reading())], None)
        uri = store.left_behind(path, shared=False)(tmp_path)
        assert store.last_reading_ms(uri) == START_MS + 9000
        assert json.loads(store.read_device_state(uri, 1, START_MS + 1999) or "") == {
            "at_ms": START_MS + 1000, "memory_used_bytes": 9, "utilization_percent": 40,
        }  # fmt: skip
        assert store.read_device_state(uri, 1, START_MS - 1) is store.read_device_state(uri, 3, START_MS + 9000) is None
        assert store.read_memory_peaks(uri, START_MS) == {1: 9, 2: 2}
        assert store.read_memory_peaks(uri, START_MS + 1000, START_MS + 1000) == {1: 9, 2: 1}
        assert store.read_memory_peaks(uri, START_MS + 2001) == {}
        world = SimpleNamespace(clock=HandClock(START_MS + 32_000))
        records = SimpleNamespace(readings_at_hand=lambda: uri, world=world)
        assert Records.memory_peaks(records, 30.0) == {2: 2} != Records.memory_peaks(records, 31.0)
        assert store.read_pulse(uri, START_MS + 1000) == (15.0, 37.5, 50.0)
        assert store.read_pulse(uri, START_MS + 9001) == (None, None, None)
    (tmp_path / "text").write_text("text" * 100)
    for bad in (None, f"file:{tmp_path / 'gone'}?mode=ro", f"file:{tmp_path / 'text'}?mode=ro"):
        assert store.last_reading_ms(bad) is store.read_device_state(bad, 1, START_MS) is None
        assert (store.read_memory_peaks(bad, 0), store.read_pulse(bad, 0)) == ({}, (None, None, None))


@both_modes
def test_a_full_disk_pauses_the_writer_and_what_waited_is_written_whole_when_there_is_room(tmp_path, caplog, shared):
    caplog.set_level(logging.INFO)
    with (
        small_disk(tmp_path / "disk", "5m") as disk,
        closing(TaskWriter(disk.path / "live.sqlite", KEY, shared=shared)) as writer,
    ):
        writer.patience_s = 60.0
        disk.fill()

        def write_much():
            with writer.batch():
                for number in range(20):
                    writer.write_meta({f"key {number}": "x" * 6000})

        thread = threading.Thread(target=write_much)
        thread.start()
        wait_for(lambda: "the work pauses" in caplog.text, "the disk refuses")
        time.sleep(1.5)
        assert thread.is_alive()
        copy = writer.half(tmp_path)
        with closing(sqlite3.connect(copy, uri=True)) as db:
            assert db.execute("SELECT count(*) FROM meta").fetchone() == (0,), "nothing is half written"
        disk.make_room()
        thread.join(10)
        assert query(disk.path / "live.sqlite", "SELECT count(*) FROM meta") == [(20,)]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_a_disk_that_stays_full_ends_the_pause_and_an_error_in_a_batch_drops_it(tmp_path):
    with small_disk(tmp_path / "disk", "5m") as disk, closing(TaskWriter(disk.path / "live.sqlite", KEY)) as writer:
        with pytest.raises(ZeroDivisionError), writer.batch():
            writer.write_meta({"never": "x"})
            raise ZeroDivisionError
        disk.fill()
        writer.patience_s = 1.0
        for shortest_s, longest_s in ((1.0, 5.0), (0.0, 0.9)):
            began_s = time.monotonic()
            with pytest.raises(sqlite3.OperationalError, match="full"):
                writer.write_meta({"much": "x" * 500_000})
            assert shortest_s <= time.monotonic() - began_s < longest_s
        disk.make_room()
        writer.write_meta({"later": "x"})
        assert query(disk.path / "live.sqlite", "SELECT key FROM meta") == [("later",)]


@both_modes
def test_a_list_of_work_that_does_not_fit_leaves_nothing(tmp_path, shared):
    with small_disk(tmp_path, "3m"), closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY, shared=shared)) as writer:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            writer.fill((make_chunk(f"c{number}") for number in range(100_000)), lambda rows: None)
        assert writer.count_by_status() == {}
