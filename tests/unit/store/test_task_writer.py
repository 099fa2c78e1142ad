"""The wrapper's half of a task database: every try, every state, nothing lost to a kill."""

from __future__ import annotations

import json
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Allocation, Chunk, ChunkResult, Fingerprint, TaskKey
from rooms.root import RunFolder, SystemClock
from rooms.store import MergeOrder, TaskWriter, merge, merged_files
from support.databases import query
from support.task_files import LOUD, START_MS, TaskFile, make_chunk, make_device

KEY = TaskKey("4821", 7, 1, "gpu3")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TaskWriter]:
    with closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY)) as writer:
        yield writer


def begin(writer: TaskWriter, **facts: str) -> None:
    allocation = Allocation(True, "4821", "gpu3", restart=1, array_index=7, cpus=6, facts=facts)
    writer.begin_task(allocation, started_at_ms=START_MS, pid=42, version="0.1.0", engine="demo", telemetry=True)


def fill(writer: TaskWriter, *names: str) -> list[Chunk]:
    chunks = [make_chunk(name) for name in names]
    assert writer.fill(chunks, lambda rows: None) == len(chunks)
    return chunks


def done(chunk: Chunk, audio_s: float | None = 29.5) -> ChunkResult:
    return ChunkResult(chunk, START_MS + 1000, START_MS + 2000, (LOUD, LOUD), audio_s)


def failed(chunk: Chunk, *, charged: bool = True) -> ChunkResult:
    times = (START_MS + 1000, START_MS + 2000)
    return ChunkResult(chunk, *times, error_class="bad_audio", error="no luck", charged=charged)


def end(writer: TaskWriter, result: ChunkResult, status: str, try_number: int = 1) -> None:
    writer.attempt_ended(result, status=status, try_number=try_number, worker_id=5, device_id=9)


# --- the task ---------------------------------------------------------------------------------------------------------


def test_a_task_that_has_just_begun_has_no_end(writer: TaskWriter) -> None:
    begin(writer, SLURM_JOB_ID="4828")
    [row] = query(
        writer.path, "SELECT name, job_id, array_index, restart, node, procid, engine, telemetry, cpus FROM task"
    )
    assert row == ("4821_7.r1.gpu3", "4821", 7, 1, "gpu3", None, "demo", 1, 6)
    assert query(writer.path, "SELECT task_id, started_at_ms, ended_at_ms, exit_code, verdict, devices FROM task") == [
        (KEY.task_id, START_MS, None, None, None, None)
    ]
    [(environment,)] = query(writer.path, "SELECT value FROM meta WHERE key = 'environment'")
    assert json.loads(str(environment)) == {"SLURM_JOB_ID": "4828"}


def test_what_was_asked_of_slurm_is_written_where_it_is_known(writer: TaskWriter) -> None:
    allocation = Allocation(True, "4821", "gpu3")
    asked = {"memory_limit_bytes": 2**31, "time_limit_s": 1800.5}
    writer.begin_task(allocation, started_at_ms=1, pid=42, version="0", engine=None, telemetry=True, **asked)
    assert query(writer.path, "SELECT memory_limit_bytes, time_limit_s FROM task") == [(2**31, 1800.5)]


def test_shard_plan_and_end_are_written_as_they_become_known(writer: TaskWriter) -> None:
    begin(writer)
    writer.update_task(shard_index=3, shard_count=8)
    writer.update_task(devices=4, workers=2)
    writer.update_task(ended_at_ms=START_MS + 9, exit_code=75, verdict="stopped")
    columns = "shard_index, shard_count, devices, workers, ended_at_ms, exit_code, verdict"
    assert query(writer.path, f"SELECT {columns} FROM task") == [(3, 8, 4, 2, START_MS + 9, 75, "stopped")]


def test_a_device_has_one_row_per_task_and_an_id_that_no_other_task_has(writer: TaskWriter, tmp_path: Path) -> None:
    devices = [make_device(0), make_device(1), replace(make_device(2), uuid=None, index=None, name=None)]
    writer.add_devices(devices)
    told = query(writer.path, "SELECT device_id, uuid, device_index, token, backend FROM device ORDER BY token")
    assert [row[1:] for row in told] == [
        ("GPU-0", 0, "0", "nvml"),
        ("GPU-1", 1, "1", "nvml"),
        (None, None, "2", "nvml"),
    ]
    assert [row[0] for row in told] == [writer.device_id(device) for device in devices]
    with closing(TaskWriter(tmp_path / "other.sqlite", replace(KEY, array_index=8))) as other:
        assert other.device_id(devices[0]) != writer.device_id(devices[0])


def test_two_runs_of_one_name_share_no_id_of_task_device_or_worker(tmp_path: Path) -> None:
    seen: list[int] = []
    for number in range(2):
        path = tmp_path / f"{number}.sqlite"
        with closing(TaskWriter(path, replace(KEY, started_at_ms=START_MS + number))) as writer:
            begin(writer)
            writer.add_devices([make_device(0)])
            worker_id = writer.worker_started(device_id=None, pid=11, engine="demo", at_ms=START_MS)
            seen += [writer.task_id, writer.device_id(make_device(0)), worker_id]
        assert query(path, "SELECT t.task_id, d.device_id, worker_id FROM task t, device d, worker") == [
            tuple(seen[-3:])
        ]
    assert len(set(seen)) == 6


def test_workers_have_ids_of_their_own_and_end_with_a_code_or_not_at_all(writer: TaskWriter) -> None:
    ids = [writer.worker_started(device_id=9, pid=pid, engine="demo", at_ms=START_MS) for pid in (11, 12)]
    writer.worker_ended(ids[0], exit_code=-9, at_ms=START_MS + 5)
    assert query(writer.path, "SELECT worker_id, pid, ended_at_ms, exit_code FROM worker ORDER BY pid") == [
        (ids[0], 11, START_MS + 5, -9),
        (ids[1], 12, None, None),
    ]
    assert writer.workers_started == 2


def test_a_gap_that_only_the_wrapper_knows_of_is_written(writer: TaskWriter) -> None:
    writer.add_gap(None, 5, 9, "the recorder died")
    assert query(writer.path, "SELECT task_id, device_id, metric, from_ms, to_ms, reason FROM gap") == [
        (KEY.task_id, None, None, 5, 9, "the recorder died")
    ]


# --- the list of work -------------------------------------------------------------------------------------------------


def test_every_chunk_of_the_source_is_written_as_pending(writer: TaskWriter) -> None:
    counted: list[int] = []
    writer.fill([make_chunk("a"), make_chunk("b", seconds=None)], counted.append)
    columns = "recording_id, chunk_id, source_path, audio_path, start_ms, end_ms, audio_s, status, attempts, detections"
    assert query(writer.path, f"SELECT {columns} FROM chunk ORDER BY chunk_id") == [
        ("rec", "a", "a.wav", "/data/a.wav", 0, 30_000, 30.0, "pending", 0, None),
        ("rec", "b", "b.wav", "/data/b.wav", 0, None, None, "pending", 0, None),
    ]
    assert counted == [1, 2]


def test_a_source_that_turns_out_wrong_half_way_leaves_nothing(writer: TaskWriter) -> None:
    def broken() -> Iterator[Chunk]:
        yield make_chunk("a")
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        writer.fill(broken(), lambda rows: None)
    assert writer.count_by_status() == {}
    fill(writer, "a")


def test_chunks_come_in_the_order_of_the_source_each_once(writer: TaskWriter) -> None:
    fill(writer, "c", "a", "b", "e", "d")
    taken = [[chunk.chunk_id for chunk in writer.next_pending(2)] for _ in range(4)]
    assert taken == [["c", "a"], ["b", "e"], ["d"], []]


def test_a_chunk_comes_back_from_the_file_as_it_went_in(writer: TaskWriter) -> None:
    chunk = Chunk("été", "c 1", "../x.wav", "/data/x.wav", 500, None)
    writer.fill([chunk], lambda rows: None)
    assert writer.next_pending(10) == [chunk]


def test_only_what_is_done_elsewhere_is_skipped(writer: TaskWriter, tmp_path: Path) -> None:
    states = {"a": "done", "b": "failed", "c": "poison", "d": "pending", "e": "skipped"}
    earlier = TaskFile(tmp_path, states=states).write()
    before = earlier.read_bytes()
    fill(writer, "a", "b", "c", "d", "e", "f")
    assert writer.skip_done_in(earlier) == 1
    assert writer.skip_done_in(earlier) == 0
    assert writer.count_by_status() == {"pending": 5, "skipped": 1}
    assert [chunk.chunk_id for chunk in writer.next_pending(10)] == ["b", "c", "d", "e", "f"]
    assert earlier.read_bytes() == before


def test_a_chunk_of_the_same_name_in_another_recording_is_another_chunk(writer: TaskWriter, tmp_path: Path) -> None:
    earlier = TaskFile(tmp_path, states={"a": "done"}).write()
    writer.fill([make_chunk("a", recording_id="other")], lambda rows: None)
    assert writer.skip_done_in(earlier) == 0


def test_many_earlier_databases_can_be_looked_into_one_after_the_other(writer: TaskWriter, tmp_path: Path) -> None:
    fill(writer, *(f"c{number}" for number in range(15)))
    for number in range(15):  # SQLite attaches ten at most
        earlier = TaskFile(tmp_path, index=number, states={f"c{number}": "done"}, samples=0).write()
        assert writer.skip_done_in(earlier) == 1


def test_of_very_many_chunks_each_one_that_is_done_elsewhere_is_skipped(writer: TaskWriter, tmp_path: Path) -> None:
    """They are looked up ten thousand at a time."""
    names = [f"c{number}" for number in range(20_003)]
    earlier = tmp_path / "earlier.sqlite"
    with closing(TaskWriter(earlier, TaskKey("4820", 0, 0, "gpu1"))) as other:
        fill(other, *names)
    with closing(sqlite3.connect(earlier)) as db, db:
        db.execute("UPDATE chunk SET status = 'done'")
    fill(writer, *names)
    assert writer.skip_done_in(earlier) == len(names)
    assert writer.count_by_status() == {"skipped": len(names)}


def test_a_task_that_was_running_when_it_was_merged_is_looked_into_again(tmp_path: Path) -> None:
    """It may have done more since; what an ended one has done is all in the job database."""
    run = RunFolder(tmp_path)
    TaskFile(tmp_path, index=0, states={"a": "done"}, samples=0).write()
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, samples=0, ended_at_ms=None).write()
    merge(MergeOrder([tmp_path], run.job_database), SystemClock())
    assert run.earlier_databases(TaskKey("4822", 0, 0, "gpu1"), merged_files(run.job_database)) == [running]


# --- the audio of then and of now -------------------------------------------------------------------------------------

SHA, OTHER_SHA = "a" * 64, "b" * 64
THEN = replace(make_chunk("a"), fingerprint=Fingerprint(1000, 17, None))
SUMMED = replace(THEN, fingerprint=Fingerprint(1000, 17, SHA))


def earlier_task(folder: Path, chunk: Chunk, state: str = "done", index: int = 0) -> Path:
    """Write what a task before ours has left: one chunk, with the fingerprint of its audio at that time."""
    path = folder / f"earlier-{index}.sqlite"
    with closing(TaskWriter(path, TaskKey("4820", index, 0, "gpu1"))) as earlier:
        earlier.fill([chunk], lambda rows: None)
        end(earlier, done(chunk) if state == "done" else failed(chunk), state)
    return path


def test_the_fingerprint_of_the_audio_is_kept(writer: TaskWriter) -> None:
    writer.fill([SUMMED, make_chunk("b")], lambda rows: None)
    columns = "audio_bytes, audio_mtime_ns, audio_sha256"
    assert query(writer.path, f"SELECT {columns} FROM chunk ORDER BY chunk_id") == [(1000, 17, SHA), (None, None, None)]


@pytest.mark.parametrize(
    ("then", "now", "same"),
    [
        (THEN, THEN, True),
        (THEN, replace(THEN, fingerprint=Fingerprint(1001, 17)), False),
        (THEN, replace(THEN, fingerprint=Fingerprint(1000, 18)), False),
        (THEN, replace(THEN, start_ms=500), False),
        (THEN, replace(THEN, end_ms=31_000), False),
        (THEN, replace(THEN, end_ms=None), False),
        (THEN, replace(THEN, source_path="/data/a.wav"), True),
        (THEN, replace(THEN, audio_path="/project/a.wav"), True),
        (THEN, replace(THEN, source_path="x.wav", audio_path="/data/x.wav"), False),
        (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1000, 99, SHA)), True),
        (SUMMED, replace(SUMMED, source_path="x.wav", audio_path="/data/x.wav"), True),
        (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1000, 17, OTHER_SHA)), False),
        (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1001, 17, SHA)), False),
        (SUMMED, THEN, True),
        (THEN, replace(SUMMED, fingerprint=Fingerprint(1000, 18, SHA)), False),
        (make_chunk("a"), THEN, True),
        (THEN, make_chunk("a"), True),
    ],
    ids=[
        "nothing changed", "size", "time", "start", "end", "end not known", "path written in another way",
        "moved", "another file", "sum, another time", "sum, another file", "another sum", "same sum, another size",
        "no sum any more", "a sum now, another time", "nothing known of then", "nothing known of now",
    ],
)  # fmt: skip
def test_a_chunk_is_done_if_its_audio_is_what_it_was(
    writer: TaskWriter, tmp_path: Path, then: Chunk, now: Chunk, same: bool
) -> None:
    writer.fill([now], lambda rows: None)
    assert writer.skip_done_in(earlier_task(tmp_path, then)) == int(same)
    assert writer.count_by_status() == {"skipped" if same else "pending": 1}
    assert writer.changed == int(not same)


def test_a_chunk_that_was_done_again_since_it_changed_is_done(writer: TaskWriter, tmp_path: Path) -> None:
    now = replace(THEN, fingerprint=Fingerprint(1000, 18))
    writer.fill([now], lambda rows: None)
    writer.skip_done_in(earlier_task(tmp_path, THEN, index=0))
    assert writer.changed == 1
    writer.skip_done_in(earlier_task(tmp_path, now, index=1))
    assert (writer.changed, writer.count_by_status()) == (0, {"skipped": 1})


# --- what failed before -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["failed", "poison"])
def test_what_failed_before_is_tried_again_unless_told_otherwise(
    writer: TaskWriter, tmp_path: Path, state: str
) -> None:
    writer.fill([THEN], lambda rows: None)
    earlier = earlier_task(tmp_path, THEN, state)
    assert writer.skip_done_in(earlier) == 0
    assert writer.skip_done_in(earlier, retry_failed=False) == 1
    assert (writer.count_by_status(), writer.count_failed_before()) == ({"skipped": 1}, 1)
    assert writer.failed_chunks(10) == [("rec", "a", "bad_audio", "no luck")]


def test_what_failed_with_other_audio_is_tried_again_in_any_case(writer: TaskWriter, tmp_path: Path) -> None:
    writer.fill([replace(THEN, fingerprint=Fingerprint(1000, 18))], lambda rows: None)
    assert writer.skip_done_in(earlier_task(tmp_path, THEN, "failed"), retry_failed=False) == 0
    assert (writer.count_by_status(), writer.changed) == ({"pending": 1}, 0)


@pytest.mark.parametrize("order", [("failed", "done"), ("done", "failed")])
def test_done_in_one_database_outdoes_failed_in_another(
    writer: TaskWriter, tmp_path: Path, order: tuple[str, str]
) -> None:
    writer.fill([THEN], lambda rows: None)
    for index, state in enumerate(order):
        writer.skip_done_in(earlier_task(tmp_path, THEN, state, index), retry_failed=False)
    assert (writer.count_by_status(), writer.count_failed_before()) == ({"skipped": 1}, 0)
    assert writer.failed_chunks(10) == []


# --- tries ------------------------------------------------------------------------------------------------------------


def test_a_try_that_has_begun_stands_there_without_an_end(writer: TaskWriter) -> None:
    [chunk] = fill(writer, "a")
    writer.attempt_started(chunk, try_number=1, worker_id=5, device_id=9, at_ms=START_MS)
    columns = (
        "attempt_id, recording_id, chunk_id, try_number, worker_id, device_id, started_at_ms, ended_at_ms, outcome"
    )
    assert query(writer.path, f"SELECT {columns} FROM attempt") == [(1, "rec", "a", 1, 5, 9, START_MS, None, None)]
    assert writer.count_by_status() == {"pending": 1}


def test_a_chunk_that_works_has_its_detections_and_times(writer: TaskWriter) -> None:
    [chunk] = fill(writer, "a")
    writer.attempt_started(chunk, try_number=1, worker_id=5, device_id=9, at_ms=START_MS)
    end(writer, done(chunk), "done")
    columns = "status, attempts, device_id, worker_id, started_at_ms, ended_at_ms, audio_s, detections, error_class"
    assert query(writer.path, f"SELECT {columns} FROM chunk") == [
        ("done", 1, 9, 5, START_MS + 1000, START_MS + 2000, 29.5, 2, None)
    ]
    assert query(writer.path, "SELECT outcome, ended_at_ms, error FROM attempt") == [("done", START_MS + 2000, None)]
    heard = (KEY.task_id, "rec", "a", 100, 600, "LOUD", "Loud sound", 0.9)
    assert query(writer.path, "SELECT * FROM detection") == [heard, heard]
    assert writer.audio_done_s() == 29.5


def test_nothing_heard_is_zero_detections_and_not_done_is_unknown(writer: TaskWriter) -> None:
    quiet, bad = fill(writer, "a", "b")
    end(writer, replace(done(quiet), detections=()), "done")
    end(writer, failed(bad), "failed")
    assert query(writer.path, "SELECT chunk_id, detections FROM chunk ORDER BY 1") == [("a", 0), ("b", None)]


def test_a_length_that_the_engine_does_not_give_stays_as_the_source_said(writer: TaskWriter) -> None:
    [chunk] = fill(writer, "a")
    end(writer, done(chunk, audio_s=None), "done")
    assert query(writer.path, "SELECT audio_s FROM chunk") == [(30.0,)]


def test_every_try_is_kept_and_the_chunk_shows_the_last(writer: TaskWriter) -> None:
    [chunk] = fill(writer, "a")
    end(writer, failed(chunk, charged=False), "pending", 1)
    end(writer, failed(chunk), "pending", 2)
    end(writer, done(chunk), "done", 3)
    assert query(writer.path, "SELECT attempt_id, try_number, outcome, error_class FROM attempt ORDER BY 1") == [
        (1, 1, "lost", "bad_audio"),
        (2, 2, "failed", "bad_audio"),
        (3, 3, "done", None),
    ]
    assert query(writer.path, "SELECT status, attempts, error_class, error FROM chunk") == [("done", 3, None, None)]


def test_what_failed_for_good_is_named(writer: TaskWriter) -> None:
    chunks = fill(writer, "c", "b", "a")
    end(writer, failed(chunks[0]), "failed")
    end(writer, done(chunks[1]), "done")
    end(writer, failed(chunks[2]), "poison")
    assert writer.failed_chunks(10) == [("rec", "c", "bad_audio", "no luck"), ("rec", "a", "bad_audio", "no luck")]
    assert len(writer.failed_chunks(1)) == 1
    assert writer.count_by_status() == {"done": 1, "failed": 1, "poison": 1}


def test_a_try_late_in_a_long_task_costs_as_little_as_the_first(writer: TaskWriter) -> None:
    chunks = fill(writer, *(f"c{number}" for number in range(600)))

    def time_s(first: int) -> float:
        """Return the best of three: a disk that is busy with something else says nothing about us."""
        seconds = []
        for start in range(first, first + 300, 100):
            start_s = time.perf_counter()
            with writer.batch():
                for chunk in chunks[start : start + 100]:
                    end(writer, done(chunk), "done")
            seconds.append(time.perf_counter() - start_s)
        return min(seconds)

    early_s = time_s(0)
    with closing(sqlite3.connect(writer.path)) as db, db:
        db.execute(
            """WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n WHERE i < 60000)
               INSERT INTO attempt (task_id, attempt_id, recording_id, chunk_id, try_number, started_at_ms)
               SELECT ?, i, 'rec', 'x' || i, 1, 0 FROM n""",
            (KEY.task_id,),
        )
    assert time_s(300) < 10 * early_s


def test_the_work_done_last_tells_how_slow_a_device_is(writer: TaskWriter) -> None:
    chunks = fill(writer, "a", "b", "c", "d")
    for number, chunk in enumerate(chunks[:3]):
        times = (START_MS, START_MS + 1000 * (number + 1))
        end(writer, ChunkResult(chunk, *times, audio_s=10.0), "done")
    end(writer, failed(chunks[3]), "failed")
    assert writer.recent_work(2) == [(9, 10.0, 3.0), (9, 10.0, 2.0)]


# --- all or nothing ---------------------------------------------------------------------------------------------------


def test_a_batch_is_seen_whole_or_not_at_all(writer: TaskWriter) -> None:
    one, two = fill(writer, "a", "b")
    with writer.batch():
        end(writer, done(one), "done")
        assert query(writer.path, "SELECT count(*) FROM attempt") == [(0,)]
        end(writer, done(two), "done")
    assert query(writer.path, "SELECT count(*) FROM attempt") == [(2,)]
    with pytest.raises(ZeroDivisionError), writer.batch():
        writer.add_gap(None, 1, 2, "never")
        raise ZeroDivisionError
    assert query(writer.path, "SELECT count(*) FROM gap") == [(0,)]


def test_kill_9_loses_nothing_that_was_written(tmp_path: Path) -> None:
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.task_files import make_chunk
from badcjobs.model.arrays import TaskKey
from badcjobs.model.work import ChunkResult
from badcjobs.store.task_writer import TaskWriter
writer = TaskWriter(Path({str(tmp_path / "wrapper.sqlite")!r}), TaskKey("4821", 7, 1, "gpu3"))
writer.fill([make_chunk(f"c{{n}}") for n in range(5000)], lambda rows: None)
for number, chunk in enumerate(writer.next_pending(5000)):
    with writer.batch():
        writer.attempt_ended(ChunkResult(chunk, 1, 2), status="done", try_number=1, worker_id=5, device_id=9)
    print(number + 1, flush=True)
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    said = 0
    while said < 20:
        said = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    said = max([said, *(int(line) for line in process.stdout.read().split())])
    process.wait()
    process.stdout.close()
    [(kept,)] = query(tmp_path / "wrapper.sqlite", "SELECT count(*) FROM chunk WHERE status = 'done'")
    assert said <= int(str(kept)) <= said + 1
    assert query(tmp_path / "wrapper.sqlite", "PRAGMA integrity_check") == [("ok",)]
