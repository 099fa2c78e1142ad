"""The wrapper's half of a task database: every try, every state, and which chunks are done already."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Allocation, Chunk, ChunkResult, Fingerprint, NameGaps, RecordingName, TaskKey, UsageReading
from rooms.root import RunFolder
from rooms.store import TaskWriter, known_lengths, merged_files
from rooms.task import DeviceWorkNow, TaskProgress, count_progress
from support.behaviour import tables
from support.databases import change, query
from support.pages import Pages
from support.task_files import LOUD, START_MS, TaskFile, make_chunk, make_device, merge_run

KEY = TaskKey("4821", 7, 1, "gpu3")


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[TaskWriter]:
    with closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY)) as writer:
        yield writer


def begin(writer: TaskWriter, **more: object) -> None:
    allocation = Allocation(True, "4821", "gpu3", restart=1, array_index=7, cpus=6, facts={"SLURM_JOB_ID": "4828"})
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


def test_tables_of_a_task(writer: TaskWriter, pages: Pages) -> None:
    """A task writes what it knows as it becomes known; what is unknown is null."""
    begin(writer, memory_limit_bytes=2**31, time_limit_s=1800.5)
    writer.add_devices([make_device(0), make_device(1), replace(make_device(2), uuid=None, index=None, name=None)])
    workers = [writer.worker_started(device_id=9, pid=pid, engine="demo", at_ms=START_MS) for pid in (11, 12)]
    writer.worker_ended(workers[0], exit_code=-9, at_ms=START_MS + 5)
    assert writer.workers_started == 2
    writer.add_gap(None, 5, 9, "the recorder died")
    writer.add_decision("workers_per_gpu", "V100", 3.0, "memory", START_MS)
    writer.add_usage(UsageReading(None, 5 * 2**30, None, 9, "pss"), 1000)
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
    assert (writer.count_retrying(), writer.start_up_s()) == (1, 1.0)
    end(writer, done(good), "done", 3)
    end(writer, failed(bad), "poison")
    end(writer, replace(done(quiet, audio_s=None), detections=(), pieces=2), "done")
    writer.attempt_started(lost, try_number=1, worker_id=6, device_id=None, at_ms=START_MS)
    writer.update_task(shard_index=3, shard_count=8)
    writer.update_task(devices=4, workers=2, ended_at_ms=START_MS + 9, exit_code=75, verdict="stopped")
    pages({"begun.txt": begun, "ended.txt": tables(writer.path)})
    assert writer.count_by_status() == {"done": 2, "pending": 1, "poison": 1}
    assert (writer.audio_done_s(), writer.done_by_device()) == (59.5, {9: (2, 59.5)})
    assert (writer.count_retrying(), writer.under_way()) == (0, {None: ["rec/lost"]})
    assert writer.recent_work(9) == [(9, 30.0, 1.0), (9, 29.5, 1.0)]
    assert writer.recent_work(1) == [(9, 30.0, 1.0)]
    assert writer.failed_chunks(10) == [("rec", "bad", "bad_audio", "no luck")]


def test_the_chunks_of_the_source_are_written_as_pending_and_come_back_once_in_its_order(writer: TaskWriter) -> None:
    counted: list[int] = []
    odd = Chunk("été", "c 1", "../x.wav", "/data/x.wav", 500, None, Fingerprint(1000, 17), is_cut=True)
    chunks = [make_chunk("c"), make_chunk("a"), odd, make_chunk("b", seconds=None), make_chunk("d")]
    assert writer.fill(chunks, counted.append) == 5
    assert (counted, writer.count_by_status()) == ([1, 2, 3, 4, 5], {"pending": 5})
    assert [writer.next_pending(2) for _ in range(4)] == [chunks[:2], chunks[2:4], chunks[4:], []]


def test_a_source_that_turns_out_wrong_half_way_leaves_nothing(writer: TaskWriter) -> None:
    def broken() -> Iterator[Chunk]:
        yield make_chunk("a")
        raise ValueError("line 3")

    with pytest.raises(ValueError, match="line 3"):
        writer.fill(broken(), lambda rows: None)
    assert writer.count_by_status() == {}
    for _ in range(2):  # the source itself reports what it has twice
        fill(writer, "a")
    assert writer.count_by_status() == {"pending": 1}


def test_a_recording_has_one_row_with_what_its_path_tells_and_what_is_missing_is_counted(writer: TaskWriter) -> None:
    names = {
        "r1": RecordingName("Gameti", "G1", "2026-05-01T06:00:00", "{study_area}/*"),
        "r2": RecordingName(None, None, None, None), "r3": RecordingName("Gameti", None, "2026-05-01", None),
    }  # fmt: skip
    chunks = [make_chunk(name[2:], name[:2]) for name in ("r1a", "r1b", "r2c", "r3d", "r1e")]
    writer.fill(chunks, lambda rows: None, lambda chunk: names[chunk.recording_id])
    columns = "recording_id, source_path, study_area, location, recorded_at, pattern"
    assert query(writer.path, f"SELECT {columns} FROM recording ORDER BY 1") == [
        ("r1", "a.wav", "Gameti", "G1", "2026-05-01T06:00:00", "{study_area}/*"),
        ("r2", "c.wav", None, None, None, None),
        ("r3", "d.wav", "Gameti", None, "2026-05-01", None),
    ]
    assert writer.name_gaps() == NameGaps(3, 1, "c.wav", 1, "c.wav", 2, "c.wav", 1, "d.wav")


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
    sums = query(writer.path, f"SELECT {columns} FROM chunk WHERE chunk_id IN ('no sum any more', 'another sum')")
    assert sorted(sums, key=repr) == [(1000, 17, OTHER_SHA), (1000, 17, None)]


def test_failures_elsewhere_are_skipped_only_where_asked(writer: TaskWriter, tmp_path: Path) -> None:
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


def test_many_databases_with_many_chunks_are_looked_into(writer: TaskWriter, tmp_path: Path) -> None:
    """SQLite attaches ten files at most; chunks are looked up ten thousand at a time."""
    names, earlier = [f"c{number}" for number in range(10_003)], tmp_path / "earlier.sqlite"
    with closing(TaskWriter(earlier, TaskKey("4820", 0, 0, "gpu1"))) as other:
        fill(other, *names)
    fill(writer, *names, "last")
    change(earlier, "UPDATE chunk SET status = 'done' WHERE rowid > 11")
    assert [writer.skip_done_in(earlier) for _ in range(12)] == [len(names) - 11, *[0] * 11]
    assert writer.count_by_status() == {"skipped": len(names) - 11, "pending": 12}


def test_what_a_later_run_takes_from_a_merge_is_what_cannot_change_any_more(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    assert merged_files(run.job_database) == set()
    ended = TaskFile(tmp_path, index=0, states={"a": "done"}, samples=0).write()
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, samples=0, ended_at_ms=None).write()
    (tmp_path / "tasks" / "4821_9.r0.gpu1.sqlite").write_text("damaged")
    merge_run(tmp_path)
    assert merged_files(run.job_database) == {ended.name}
    left = run.earlier_databases(TaskKey("4822", 0, 0, "gpu1"), merged_files(run.job_database))
    assert running in left and ended not in left
    for row in ((1, "a", 30.0), (2, "a", 30.0), (1, "b", 30.0), (2, "b", 31.0), (1, "c", None)):
        insert = "INSERT INTO recording (task_id, recording_id, source_path, duration_s) VALUES (?, ?, '', ?)"
        change(run.job_database, insert, *row)
    assert known_lengths(run.job_database) == {"a": 30.0}


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
    progress = count_progress(writer, 32.0)
    assert progress == TaskProgress(2, 4, 29.5, 32.0, start_up_s=30.0, failed=1, retrying=1, devices=(cpu,))
    assert progress.eta_s == 2.0
