"""The wrapper's half of a task database: every try, every state, and which chunks are done already."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import (
    Allocation,
    Chunk,
    ChunkResult,
    Fingerprint,
    NameGaps,
    RecordingName,
    TaskKey,
    UsageReading,
)
from rooms.root import RunFolder, SystemClock
from rooms.store import MergeOrder, TaskWriter, known_lengths, merge, merged_files
from rooms.task import DeviceWorkNow, TaskProgress, count_progress
from support.databases import query
from support.task_files import LOUD, START_MS, TaskFile, make_chunk, make_device

KEY = TaskKey("4821", 7, 1, "gpu3")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TaskWriter]:
    with closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY)) as writer:
        yield writer


def begin(writer: TaskWriter, facts: dict[str, str] | None = None, **more: object) -> None:
    allocation = Allocation(True, "4821", "gpu3", restart=1, array_index=7, cpus=6, facts=facts or {})
    values = {"pid": 42, "version": "0.1.0", "engine": "demo", "telemetry": True, **more}
    writer.begin_task(allocation, started_at_ms=START_MS, **values)


def fill(writer: TaskWriter, *names: str) -> list[Chunk]:
    chunks = [make_chunk(name) for name in names]
    assert writer.fill(chunks, lambda rows: None) == len(chunks)
    return chunks


def done(chunk: Chunk, audio_s: float | None = 29.5) -> ChunkResult:
    return ChunkResult(chunk, START_MS + 1000, START_MS + 2000, (LOUD, LOUD), audio_s)


def failed(chunk: Chunk, *, charged: bool = True) -> ChunkResult:
    times = (START_MS + 1000, START_MS + 2000)
    return ChunkResult(chunk, *times, error_class="bad_audio", error="no luck", charged=charged)


def end(writer: TaskWriter, result: ChunkResult, status: str, try_number: int = 1, **more: str) -> None:
    writer.attempt_ended(result, status=status, try_number=try_number, worker_id=5, device_id=9, **more)


# --- the task ---------------------------------------------------------------------------------------------------------


def test_a_task_is_written_as_it_becomes_known_and_what_is_unknown_is_null(writer: TaskWriter) -> None:
    begin(writer, {"SLURM_JOB_ID": "4828"}, memory_limit_bytes=2**31, time_limit_s=1800.5)
    task = "SELECT task_id, name, job_id, array_index, restart, node, procid, pid, engine, telemetry, cpus FROM task"
    assert query(writer.path, task) == [(KEY.task_id, "4821_7.r1.gpu3", "4821", 7, 1, "gpu3", None, 42, "demo", 1, 6)]
    later = """SELECT memory_limit_bytes, time_limit_s, started_at_ms, shard_index, shard_count, devices, workers,
               ended_at_ms, exit_code, verdict FROM task"""
    assert query(writer.path, later) == [(2**31, 1800.5, START_MS, *[None] * 7)]
    ((environment,),) = query(writer.path, "SELECT value FROM meta WHERE key = 'environment'")
    assert json.loads(environment) == {"SLURM_JOB_ID": "4828"}
    writer.update_task(shard_index=3, shard_count=8)
    writer.update_task(devices=4, workers=2, ended_at_ms=START_MS + 9, exit_code=75, verdict="stopped")
    assert query(writer.path, later)[0][3:] == (3, 8, 4, 2, START_MS + 9, 75, "stopped")
    writer.write_meta({"a": "1"})
    writer.write_meta({"a": "2", "b": "3"})
    assert query(writer.path, "SELECT key, value FROM meta WHERE key < 'c' ORDER BY 1") == [("a", "2"), ("b", "3")]


def test_devices_workers_gaps_decisions_usage_and_marks_have_rows_and_ids_of_this_task_alone(tmp_path: Path) -> None:
    seen = set[int]()
    devices = [make_device(0), make_device(1), replace(make_device(2), uuid=None, index=None, name=None)]
    for key in (KEY, replace(KEY, array_index=8), replace(KEY, started_at_ms=START_MS)):
        with closing(TaskWriter(tmp_path / f"{len(seen)}.sqlite", key)) as writer:
            writer.add_devices(devices)
            workers = [writer.worker_started(device_id=9, pid=pid, engine="demo", at_ms=START_MS) for pid in (11, 12)]
            writer.worker_ended(workers[0], exit_code=-9, at_ms=START_MS + 5)
            writer.add_gap(None, 5, 9, "the recorder died")
            writer.add_decision("workers_per_gpu", "V100", 3.0, "memory", START_MS)
            writer.add_usage(UsageReading(None, 5 * 2**30, None, 9, "pss"), 1000)
            marks = [writer.begin_mark(name, START_MS) for name in ("warm", "cold")]
            writer.end_mark(marks[0], START_MS + 7)
            assert writer.workers_started == 2
            found = query(
                writer.path, "SELECT device_id, uuid, device_index, token, backend FROM device ORDER BY token"
            )
            rows = [("GPU-0", 0, "0", "nvml"), ("GPU-1", 1, "1", "nvml"), (None, None, "2", "nvml")]
            assert found == [(writer.device_id(device), *row) for device, row in zip(devices, rows, strict=True)]
            seen |= {writer.task_id, *workers, *(row[0] for row in found)}
            task = writer.task_id
        tables = {
            "worker": [(workers[0], task, 9, 11, "demo", START_MS, START_MS + 5, -9),
                       (workers[1], task, 9, 12, "demo", START_MS, None, None)],
            "gap": [(task, None, None, 5, 9, "the recorder died")],
            "decision": [(task, START_MS, "workers_per_gpu", "V100", 3.0, "memory")],
            "usage_sample": [(task, 1000, None, 5 * 2**30, None, 9, "pss")],
            "mark": [(task, "warm", START_MS, START_MS + 7), (task, "cold", START_MS, None)],
        }  # fmt: skip
        for table, wanted in tables.items():
            assert sorted(query(writer.path, f"SELECT * FROM {table}"), key=str) == sorted(wanted, key=str)
    assert len(seen) == 3 * 6


# --- the list of work -------------------------------------------------------------------------------------------------


def test_the_chunks_of_the_source_are_written_as_pending_and_come_back_once_in_its_order(writer: TaskWriter) -> None:
    counted: list[int] = []
    odd = Chunk("été", "c 1", "../x.wav", "/data/x.wav", 500, None, Fingerprint(1000, 17), is_cut=True)
    chunks = [make_chunk("c"), make_chunk("a"), odd, make_chunk("b", seconds=None), make_chunk("d")]
    assert writer.fill(chunks, counted.append) == 5
    assert counted == [1, 2, 3, 4, 5]
    columns = "chunk_id, source_path, audio_path, start_ms, end_ms, audio_s, status, attempts, detections, is_cut"
    assert query(writer.path, f"SELECT {columns} FROM chunk ORDER BY rowid LIMIT 4") == [
        ("c", "c.wav", "/data/c.wav", 0, 30_000, 30.0, "pending", 0, None, 0),
        ("a", "a.wav", "/data/a.wav", 0, 30_000, 30.0, "pending", 0, None, 0),
        ("c 1", "../x.wav", "/data/x.wav", 500, None, None, "pending", 0, None, 1),
        ("b", "b.wav", "/data/b.wav", 0, None, None, "pending", 0, None, 0),
    ]
    assert [writer.next_pending(2) for _ in range(4)] == [chunks[:2], chunks[2:4], chunks[4:], []]


def test_a_source_that_turns_out_wrong_half_way_leaves_nothing(writer: TaskWriter) -> None:
    def broken() -> Iterator[Chunk]:
        yield make_chunk("a")
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        writer.fill(broken(), lambda rows: None)
    assert writer.count_by_status() == {}
    fill(writer, "a")
    assert writer.fill([make_chunk("a")], lambda rows: None) == 1, "the source itself reports what it has twice"
    assert writer.count_by_status() == {"pending": 1}


def test_a_recording_has_one_row_with_what_its_path_tells_and_what_is_missing_is_counted(writer: TaskWriter) -> None:
    names = {
        "r1": RecordingName("Gameti", "G1", "2026-05-01T06:00:00", "{study_area}/*"),
        "r2": RecordingName(None, None, None, None), "r3": RecordingName("Gameti", None, "2026-05-01", None),
    }  # fmt: skip
    chunks = [make_chunk(chunk, recording) for recording, chunk in (("r1", "a"), ("r1", "b"), ("r2", "c"), ("r3", "d"),
              ("r1", "e"))]  # fmt: skip
    writer.fill(chunks, lambda rows: None, lambda chunk: names[chunk.recording_id])
    columns = "recording_id, source_path, study_area, location, recorded_at, pattern"
    assert query(writer.path, f"SELECT {columns} FROM recording ORDER BY 1") == [
        ("r1", "a.wav", "Gameti", "G1", "2026-05-01T06:00:00", "{study_area}/*"),
        ("r2", "c.wav", None, None, None, None),
        ("r3", "d.wav", "Gameti", None, "2026-05-01", None),
    ]
    assert writer.name_gaps() == NameGaps(3, 1, "c.wav", 1, "c.wav", 2, "c.wav", 1, "d.wav")


# --- what is done already ---------------------------------------------------------------------------------------------

SHA, OTHER_SHA = "a" * 64, "b" * 64
THEN = replace(make_chunk("a"), fingerprint=Fingerprint(1000, 17, None))
SUMMED = replace(THEN, fingerprint=Fingerprint(1000, 17, SHA))
ELSEWHERE = {"source_path": "x.wav", "audio_path": "/data/x.wav"}
# the audio then, the audio now, whether it counts as the same
AUDIO = {
    "nothing changed": (THEN, THEN, True),
    "size": (THEN, replace(THEN, fingerprint=Fingerprint(1001, 17)), False),
    "time": (THEN, replace(THEN, fingerprint=Fingerprint(1000, 18)), False),
    "start": (THEN, replace(THEN, start_ms=500), False),
    "end": (THEN, replace(THEN, end_ms=31_000), False),
    "end not known": (THEN, replace(THEN, end_ms=None), False),
    "no end then or now": (replace(THEN, end_ms=None), replace(THEN, end_ms=None), True),
    "path written in another way": (THEN, replace(THEN, source_path="/data/a.wav"), True),
    "moved": (THEN, replace(THEN, audio_path="/project/a.wav"), True),
    "another file": (THEN, replace(THEN, **ELSEWHERE), False),
    "sum, another time": (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1000, 99, SHA)), True),
    "sum, another file": (SUMMED, replace(SUMMED, **ELSEWHERE), True),
    "another sum": (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1000, 17, OTHER_SHA)), False),
    "same sum, another size": (SUMMED, replace(SUMMED, fingerprint=Fingerprint(1001, 17, SHA)), False),
    "no sum any more": (SUMMED, THEN, True),
    "a sum now, another time": (THEN, replace(SUMMED, fingerprint=Fingerprint(1000, 18, SHA)), False),
    "nothing known of then": (make_chunk("a"), THEN, True),
    "nothing known of now": (THEN, make_chunk("a"), True),
}


def earlier_task(path: Path, *chunks: Chunk, state: str = "done") -> Path:
    """Write what a task before ours has left."""
    with closing(TaskWriter(path, TaskKey("4820", 0, 0, "gpu1"))) as earlier:
        earlier.fill(chunks, lambda rows: None)
        for chunk in chunks:
            end(earlier, done(chunk) if state == "done" else failed(chunk), state)
    return path


def test_a_chunk_is_done_if_its_audio_is_what_it_was(writer: TaskWriter, tmp_path: Path) -> None:
    then = [replace(case[0], chunk_id=name) for name, case in AUDIO.items()]
    now = [replace(case[1], chunk_id=name) for name, case in AUDIO.items()]
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
    assert query(writer.path, f"SELECT {columns} FROM chunk WHERE chunk_id = 'no sum any more'") == [(1000, 17, None)]
    assert query(writer.path, f"SELECT {columns} FROM chunk WHERE chunk_id = 'another sum'") == [(1000, 17, OTHER_SHA)]


def test_only_what_is_done_elsewhere_is_skipped_and_failures_only_where_asked(
    writer: TaskWriter, tmp_path: Path
) -> None:
    states = {"a": "done", "b": "failed", "c": "poison", "d": "pending", "e": "skipped"}
    earlier = TaskFile(tmp_path, states=states).write()
    before = earlier.read_bytes()
    fill(writer, *states, "f")
    assert [writer.skip_done_in(earlier) for _ in range(2)] == [1, 0]
    assert (writer.count_by_status(), writer.count_failed_before()) == ({"pending": 5, "skipped": 1}, 0)
    assert writer.skip_done_in(earlier, retry_failed=False) == 2
    assert (writer.count_by_status(), writer.count_failed_before()) == ({"pending": 3, "skipped": 3}, 2)
    errors = [("rec", name, "bad_audio", f"{name}: no luck") for name in ("b", "c")]
    assert (writer.failed_chunks(10), writer.failed_chunks(1)) == (errors, errors[:1])
    assert writer.skip_done_in(TaskFile(tmp_path, index=1, states={"b": "done"}).write(), retry_failed=False) == 1
    assert (writer.failed_chunks(10), writer.count_failed_before()) == (errors[1:], 1), "done there outdoes failed here"
    now = replace(THEN, chunk_id="g", fingerprint=Fingerprint(1000, 18))
    other = earlier_task(tmp_path / "other.sqlite", replace(now, fingerprint=Fingerprint(1000, 17)), state="failed")
    writer.fill([now], lambda rows: None)
    assert (writer.skip_done_in(other, retry_failed=False), writer.changed) == (0, 0), "it failed with other audio"
    assert [chunk.chunk_id for chunk in writer.next_pending(10)] == ["d", "e", "f", "g"]
    assert earlier.read_bytes() == before


def test_many_databases_with_many_chunks_are_looked_into_one_after_the_other(
    writer: TaskWriter, tmp_path: Path
) -> None:
    """SQLite attaches ten files at most; chunks are looked up ten thousand at a time."""
    names = [f"c{number}" for number in range(10_003)]
    earlier = tmp_path / "earlier.sqlite"
    with closing(TaskWriter(earlier, TaskKey("4820", 0, 0, "gpu1"))) as other:
        fill(other, *names)
    fill(writer, *names, "last")
    with closing(sqlite3.connect(earlier)) as db, db:
        db.execute("UPDATE chunk SET status = 'done' WHERE rowid > 11")
    assert [writer.skip_done_in(earlier) for _ in range(12)] == [len(names) - 11, *[0] * 11]
    assert writer.count_by_status() == {"skipped": len(names) - 11, "pending": 12}


def test_what_a_later_run_takes_from_a_merge_is_what_cannot_change_any_more(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert merged_files(run.job_database) == set()
    ended = TaskFile(tmp_path, index=0, states={"a": "done"}, samples=0).write()
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, samples=0, ended_at_ms=None).write()
    (tmp_path / "tasks" / "4821_9.r0.gpu1.sqlite").write_text("damaged")
    merge(MergeOrder([tmp_path], run.job_database), SystemClock())
    assert merged_files(run.job_database) == {ended.name}
    left = run.earlier_databases(TaskKey("4822", 0, 0, "gpu1"), merged_files(run.job_database))
    assert running in left and ended not in left
    with closing(sqlite3.connect(run.job_database)) as db, db:
        insert = "INSERT INTO recording (task_id, recording_id, source_path, duration_s) VALUES (?, ?, '', ?)"
        db.executemany(insert, [(1, "a", 30.0), (2, "a", 30.0), (1, "b", 30.0), (2, "b", 31.0), (1, "c", None)])
    assert known_lengths(run.job_database) == {"a": 30.0}


# --- tries ------------------------------------------------------------------------------------------------------------


def test_every_try_is_kept_and_the_chunk_shows_the_last(writer: TaskWriter) -> None:
    begin(writer)
    good, bad, quiet, lost = fill(writer, "good", "bad", "quiet", "lost")
    writer.attempt_started(good, try_number=1, worker_id=5, device_id=9, at_ms=START_MS + 500)
    begun = "attempt_id, chunk_id, try_number, worker_id, device_id, started_at_ms, ended_at_ms, outcome"
    assert query(writer.path, f"SELECT {begun} FROM attempt") == [(1, "good", 1, 5, 9, START_MS + 500, None, None)]
    assert (writer.count_by_status(), writer.under_way()) == ({"pending": 4}, {9: ["rec/good"]})
    end(writer, failed(good, charged=False), "pending", 1)
    end(writer, failed(good), "pending", 2, gpu_state="{}")
    assert (writer.count_retrying(), writer.start_up_s()) == (1, 1.0)
    end(writer, done(good), "done", 3)
    end(writer, failed(bad), "poison")
    end(writer, replace(done(quiet, audio_s=None), detections=(), pieces=2), "done")
    writer.attempt_started(lost, try_number=1, worker_id=6, device_id=None, at_ms=START_MS)
    tries = (
        "SELECT attempt_id, chunk_id, try_number, ended_at_ms - ?, outcome, error_class, gpu_state, pieces FROM attempt"
    )
    assert query(writer.path, tries, START_MS) == [
        (1, "good", 1, 2000, "lost", "bad_audio", None, None), (2, "good", 2, 2000, "failed", "bad_audio", "{}", None),
        (3, "good", 3, 2000, "done", None, None, None), (4, "bad", 1, 2000, "failed", "bad_audio", None, None),
        (5, "quiet", 1, 2000, "done", None, None, 2), (6, "lost", 1, None, None, None, None, None),
    ]  # fmt: skip
    columns = "chunk_id, status, attempts, device_id, worker_id, ended_at_ms, audio_s, detections, error_class, error"
    assert query(writer.path, f"SELECT {columns} FROM chunk") == [
        ("good", "done", 3, 9, 5, START_MS + 2000, 29.5, 2, None, None),
        ("bad", "poison", 1, 9, 5, START_MS + 2000, 30.0, None, "bad_audio", "no luck"),
        ("quiet", "done", 1, 9, 5, START_MS + 2000, 30.0, 0, None, None),
        ("lost", "pending", 0, None, None, None, 30.0, None, None, None),
    ]
    assert query(writer.path, "SELECT * FROM detection") == [
        (KEY.task_id, "rec", "good", 100, 600, "LOUD", "Loud sound", 0.9)
    ] * 2  # fmt: skip
    assert writer.count_by_status() == {"done": 2, "pending": 1, "poison": 1}
    assert (writer.audio_done_s(), writer.done_by_device()) == (59.5, {9: (2, 59.5)})
    assert (writer.count_retrying(), writer.under_way()) == (0, {None: ["rec/lost"]})
    assert writer.recent_work(9) == [(9, 30.0, 1.0), (9, 29.5, 1.0)]
    assert writer.recent_work(1) == [(9, 30.0, 1.0)]
    assert writer.failed_chunks(10) == [("rec", "bad", "bad_audio", "no luck")]


def test_a_batch_is_seen_whole_or_not_at_all_and_a_kill_loses_nothing_that_was_written(writer: TaskWriter) -> None:
    one, two = fill(writer, "a", "b")
    with writer.batch():
        end(writer, done(one), "done")
        assert query(writer.path, "SELECT count(*) FROM attempt") == [(0,)]
        end(writer, done(two), "done")
    assert query(writer.path, "SELECT count(*) FROM attempt") == [(2,)], "another process sees it at once"
    with pytest.raises(ZeroDivisionError), writer.batch():
        writer.add_gap(None, 1, 2, "never")
        raise ZeroDivisionError
    assert query(writer.path, "SELECT count(*) FROM gap") == [(0,)]


def test_how_far_the_work_is_counts_what_is_not_settled_apart(writer: TaskWriter) -> None:
    begin(writer)
    cpu, chunks = DeviceWorkNow("CPU", 0, 0.0), fill(writer, "a", "b", "c", "d")
    assert writer.start_up_s() is None
    assert count_progress(writer, 20.0) == TaskProgress(0, 4, 0.0, 20.0, devices=(cpu,))
    for chunk, status in zip(chunks, ("done", "pending", "failed"), strict=False):
        times = {"started_at_ms": START_MS + 30_000, "ended_at_ms": START_MS + 31_000}
        end(writer, replace(done(chunk) if status == "done" else failed(chunk), **times), status)
    expected = TaskProgress(2, 4, 29.5, 32.0, start_up_s=30.0, failed=1, retrying=1, devices=(cpu,))
    assert count_progress(writer, 32.0) == expected
    assert count_progress(writer, 32.0).eta_s == 2.0
