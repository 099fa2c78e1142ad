"""A database whose disk refuses: nothing is forgotten, and whoever asks hears the truth."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, TaskKey
from rooms.store import PatientDatabase, TaskWriter
from support.databases import query
from support.small_disk import SmallDisk, read_only, small_disk
from support.task_files import LOUD, START_MS, make_chunk

KEY = TaskKey("4821", 7, 0, "gpu3")
BIG = "x" * 6000


@pytest.fixture(params=["local", "shared"])
def shared(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "shared")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "3m") as disk:
        yield disk


class HandOfTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def time_s() -> HandOfTime:
    return HandOfTime()


@pytest.fixture
def db(disk: SmallDisk, time_s: HandOfTime, shared: bool) -> Iterator[PatientDatabase]:
    with closing(PatientDatabase(disk.path / "live.sqlite", shared=shared, monotonic_s=time_s)) as db:
        yield db


def add(db: PatientDatabase, key: str, value: str = BIG) -> None:
    db.write(lambda c: c.execute("INSERT INTO meta VALUES (?, ?)", (key, value)))


def keys(db: sqlite3.Connection) -> list[str]:
    return [key for (key,) in db.execute("SELECT key FROM meta ORDER BY rowid")]


def on_disk(db: PatientDatabase, folder: Path) -> list[str]:
    """Return what a process that is killed now would leave."""
    dead = folder / "dead"
    dead.mkdir(exist_ok=True)
    for path in db._path.parent.glob("live.sqlite*"):
        if not path.name.endswith("-shm"):
            (dead / path.name).write_bytes(path.read_bytes())
    with closing(sqlite3.connect(dead / "live.sqlite")) as left:
        return keys(left)


def test_what_a_full_disk_refuses_is_kept_and_written_when_there_is_room(
    db: PatientDatabase, disk: SmallDisk, time_s: HandOfTime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    add(db, "before")
    disk.fill()
    with caplog.at_level(logging.INFO):
        for number in range(40):
            add(db, f"k{number}")
        assert db.waiting > 0
        assert keys(db.now) == ["before", *(f"k{number}" for number in range(40))]
        assert len(on_disk(db, tmp_path)) == 41 - db.waiting
        disk.make_room()
        add(db, "too soon")  # not a second has passed
        assert db.waiting > 1
        time_s.now_s += 1.1
        add(db, "after")
    assert db.waiting == 0
    assert on_disk(db, tmp_path) == ["before", *(f"k{number}" for number in range(40)), "too soon", "after"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"], "one warning per episode"


def test_a_disk_on_the_brink_does_not_fill_the_log(
    db: PatientDatabase, disk: SmallDisk, time_s: HandOfTime, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(5):
        disk.fill()
        for part in range(30):
            add(db, f"{number} {part}")
        assert db.waiting > 0
        disk.make_room()
        time_s.now_s += 2
        db.catch_up()
        assert db.waiting == 0
    assert [record.levelname for record in caplog.records].count("WARNING") == 1


def test_a_transaction_is_kept_whole_wherever_it_was_refused(
    db: PatientDatabase, disk: SmallDisk, time_s: HandOfTime, tmp_path: Path
) -> None:
    db.on_disk().execute("PRAGMA cache_size = 5")  # so that the disk refuses in the middle, not only at the commit
    disk.fill()
    with db.transaction():
        for number in range(60):
            add(db, f"a{number}")
    with pytest.raises(ZeroDivisionError), db.transaction():
        add(db, "never")
        raise ZeroDivisionError
    assert db.waiting == 1
    assert len(keys(db.now)) == 60
    assert on_disk(db, tmp_path) == []
    disk.make_room()
    time_s.now_s += 2
    add(db, "b")
    assert on_disk(db, tmp_path) == [*(f"a{number}" for number in range(60)), "b"]


def test_room_for_some_of_it_takes_some_of_it_in_order(
    db: PatientDatabase, disk: SmallDisk, time_s: HandOfTime, tmp_path: Path
) -> None:
    disk.fill()
    for number in range(100):
        add(db, f"k{number}")
    disk.make_room()
    (disk.path / "other").write_bytes(bytes(disk.free_bytes - 300_000))
    time_s.now_s += 2
    db.catch_up()
    assert 0 < db.waiting < 100
    left = on_disk(db, tmp_path)
    assert left == [f"k{number}" for number in range(len(left))]
    assert len(keys(db.now)) == 100
    (disk.path / "other").unlink()
    time_s.now_s += 2
    db.catch_up()
    assert (db.waiting, len(on_disk(db, tmp_path))) == (0, 100)


def test_a_snapshot_has_what_the_disk_would_not_take(db: PatientDatabase, disk: SmallDisk, tmp_path: Path) -> None:
    add(db, "before")
    disk.fill()
    for number in range(60):
        add(db, f"k{number}")
    assert db.waiting > 0
    db.snapshot(tmp_path / "copy.sqlite")
    assert query(tmp_path / "copy.sqlite", "SELECT count(*) FROM meta") == [(61,)]
    assert query(tmp_path / "copy.sqlite", "PRAGMA integrity_check") == [("ok",)]


def test_a_folder_that_is_read_only_for_a_while_loses_nothing(
    db: PatientDatabase, disk: SmallDisk, time_s: HandOfTime, tmp_path: Path
) -> None:
    add(db, "before")
    with read_only(disk.path):
        add(db, "meanwhile")
        assert keys(db.now) == ["before", "meanwhile"]
    time_s.now_s += 2
    add(db, "after")
    assert on_disk(db, tmp_path) == ["before", "meanwhile", "after"]


def test_a_statement_that_is_wrong_is_not_taken_for_a_full_disk(db: PatientDatabase) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        db.write(lambda c: c.execute("INSERT INTO nowhere VALUES (1)"))
    add(db, "after")
    assert keys(db.now) == ["after"]


# --- the task's own rows ----------------------------------------------------------------------------------------------


def result(chunk: Chunk, *, ok: bool) -> ChunkResult:
    if ok:
        return ChunkResult(chunk, START_MS, START_MS + 1, (LOUD,) * 300, audio_s=30.0)
    return ChunkResult(chunk, START_MS, START_MS + 1, error_class="bad_audio", error="x" * 9000)


def test_the_run_is_steered_by_what_was_done_not_by_what_the_disk_knows(disk: SmallDisk, shared: bool) -> None:
    with closing(TaskWriter(disk.path / "wrapper.sqlite", KEY, shared=shared)) as writer:
        writer.fill([make_chunk(f"c{number:02d}") for number in range(30)], lambda rows: None)
        first = writer.next_pending(20)
        disk.fill()
        for number, chunk in enumerate(first):
            good = number % 4 > 0
            writer.attempt_ended(
                result(chunk, ok=good), status="done" if good else "failed", try_number=1, worker_id=5, device_id=9
            )
        assert writer.waiting > 0
        assert writer.count_by_status() == {"done": 15, "failed": 5, "pending": 10}
        assert writer.audio_done_s() == 15 * 30.0
        assert [row[1] for row in writer.failed_chunks(10)] == ["c00", "c04", "c08", "c12", "c16"]
        assert [chunk.chunk_id for chunk in writer.next_pending(50)] == [f"c{number}" for number in range(20, 30)]
        disk.make_room()
    with closing(sqlite3.connect(disk.path / "wrapper.sqlite")) as left:
        assert left.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchone() == (15,)
        assert left.execute("SELECT count(*) FROM detection").fetchone() == (15 * 300,)


def test_a_list_of_work_that_does_not_fit_is_refused_and_leaves_nothing(disk: SmallDisk, shared: bool) -> None:
    with closing(TaskWriter(disk.path / "wrapper.sqlite", KEY, shared=shared)) as writer:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            writer.fill((make_chunk(f"c{number}") for number in range(100_000)), lambda rows: None)
        assert writer.count_by_status() == {}
