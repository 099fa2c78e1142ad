"""Publishing: two live files become one sealed file, and no reader ever sees half of it."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import Allocation, ChunkResult, HostReading, Reading, TaskKey, publish_interval_s
from rooms.store import (
    SCHEMA_VERSION,
    TABLES,
    LiveHalf,
    Publisher,
    TaskWriter,
    checksum,
    left_behind,
    publish,
    read_checksum,
    read_stated,
    remove_unfinished,
    work_left_behind,
)
from rooms.telemetry import TelemetryWriter
from support.databases import query, seal_is_broken
from support.pages import Pages
from support.small_disk import small_disk
from support.task_files import START_MS, make_chunk, make_device
from support.waiting import wait_for

KEY = TaskKey("4821", 7, 0, "gpu3")
CONTENT = "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk WHERE status = 'done'"


class LiveFiles:
    """The two files of a task that is running."""

    def __init__(self, folder: Path, *, shared: bool = False) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.paths = [folder / "wrapper.sqlite", folder / "recorder.sqlite"]
        self.wrapper = TaskWriter(self.paths[0], KEY, shared=shared)
        self.recorder = TelemetryWriter(self.paths[1], KEY.task_id, shared=shared)
        allocation = Allocation(True, "4821", "gpu3", array_index=7)
        self.wrapper.begin_task(
            allocation, started_at_ms=START_MS, pid=42, version="0.1.0", engine="demo", telemetry=True
        )
        self.devices = [make_device(0), make_device(1)]
        self.wrapper.add_devices(self.devices)

    def add(self, number: int) -> None:
        """Do one chunk and write one tick."""
        chunk = make_chunk(f"c{number}")
        self.wrapper.fill([chunk], lambda rows: None)
        result = ChunkResult(chunk, START_MS, START_MS + number)
        self.wrapper.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
        reading = Reading(utilization_percent=number % 101, power_w=250.5)
        device_id = self.wrapper.device_id(self.devices[number % 2])
        with self.recorder.batch():
            self.recorder.write_tick(START_MS + number * 1000, [(device_id, reading)], HostReading(1.0, 2, 3))

    def killed(self, folder: Path) -> list[Path]:
        """Copy databases and logs: what killed processes leave behind."""
        folder.mkdir()
        for path in self.folder.iterdir():
            if not path.name.endswith("-shm"):
                shutil.copyfile(path, folder / path.name)
        return [folder / path.name for path in self.paths]

    def close(self) -> None:
        self.wrapper.close()
        self.recorder.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveFiles]:
    with closing(LiveFiles(tmp_path / "local")) as files:
        yield files


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks" / f"{KEY.name}.sqlite"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let no file grow beyond this, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


# --- the join ---------------------------------------------------------------------------------------------------------


def test_the_published_file_has_what_is_committed_in_both_and_is_sealed_and_alone(
    live: LiveFiles, target: Path
) -> None:
    for number in range(4):
        live.add(number)
    live.wrapper.add_gap(None, 1, 2, "the wrapper's")
    live.recorder.open_gap(None, None, 3, 4, "the recorder's")
    with live.wrapper.batch():
        live.wrapper.add_gap(None, 1, 2, "not committed yet")
        assert publish(live.paths, target, gaps=[(5, 9, "of whoever publishes")]) == target.stat().st_size
    assert query(target, CONTENT) == [(4, 4)]
    by_device = "SELECT device_index, at_ms - ?, utilization_percent FROM sample JOIN device USING (device_id)"
    assert sorted(query(target, by_device, START_MS)) == [(0, 0, 0), (0, 2000, 2), (1, 1000, 1), (1, 3000, 3)]
    ids = [device_id for (device_id,) in query(target, "SELECT device_id FROM sample ORDER BY rowid")]
    assert ids == sorted(ids), "device by device"
    gaps = query(target, "SELECT task_id, device_id, from_ms, to_ms, reason FROM gap ORDER BY from_ms, reason")
    assert [row[2:] for row in gaps] == [
        (1, 2, "the wrapper's"),
        (3, 4, "the recorder's"),
        (5, 9, "of whoever publishes"),
    ]
    assert {row[:2] for row in gaps} == {(KEY.task_id, None)}
    assert query(target, "SELECT samples FROM device_total") == [(2,), (2,)]
    assert query(target, "PRAGMA journal_mode") == [("delete",)]
    assert query(target, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert query(target, "PRAGMA integrity_check") == [("ok",)]
    ((text,),) = query(target, "SELECT value FROM meta WHERE key = 'rows'")
    tables = [table.name for table in TABLES if table.name != "meta"]
    assert json.loads(text) == {name: query(target, f"SELECT count(*) FROM {name}")[0][0] for name in tables}
    assert seal_is_broken(target) is False
    assert read_stated(target) == read_checksum(target)[0]
    assert names_in(target.parent) == [target.name]
    assert {name.partition(".")[0] for name in names_in(live.folder)} == {"recorder", "wrapper"}


def test_closing_words_fill_only_what_is_open_and_leave_the_live_file_as_it_is(live: LiveFiles, target: Path) -> None:
    words = {"ended_at_ms": START_MS + 7, "verdict": "killed"}
    columns = "SELECT ended_at_ms, verdict, exit_code FROM task"
    publish(live.paths, target, closing=words)
    assert query(target, columns) == [(START_MS + 7, "killed", None)]
    assert query(live.paths[0], columns) == [(None, None, None)]
    live.wrapper.update_task(ended_at_ms=START_MS + 5, exit_code=0)
    publish(live.paths, target, closing=words)
    assert query(target, columns) == [(START_MS + 5, "killed", 0)]


def test_a_recorders_file_is_optional_and_a_broken_one_is_a_gap(live: LiveFiles, target: Path) -> None:
    live.add(0)
    young, broken = live.folder / "young.sqlite", live.folder / "broken.sqlite"
    with closing(sqlite3.connect(young)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for missing in (live.folder / "not-yet.sqlite", young):
            publish([live.paths[0], missing], target)
            assert query(target, CONTENT) == [(1, 0)]
            assert query(target, "SELECT count(*) FROM gap") == [(0,)]
    broken.write_bytes(b"SQLite format 3\0" + b"rubbish" * 1000)
    publish([live.paths[0], broken], target)
    assert query(target, CONTENT) == [(1, 0)]
    ((from_ms, to_ms, reason),) = query(target, "SELECT from_ms, to_ms, reason FROM gap")
    assert (from_ms, to_ms) == (START_MS, START_MS), "from its start to the last sign of the wrapper"
    assert reason.startswith("the recorder's file cannot be read: ")


def test_nothing_is_ever_published_over_something(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    before = target.read_bytes()
    broken = live.folder / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + b"rubbish" * 1000)
    with pytest.raises(sqlite3.Error):
        publish([broken, live.paths[1]], target)
    for kind in ("left", "sealed", "local"):
        with pytest.raises(FileNotFoundError):
            publish([LiveHalf(live.folder / "gone.sqlite", kind), live.paths[1]], target)
    assert target.read_bytes() == before
    assert names_in(target.parent) == [target.name]


# --- files of others --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_what_killed_writers_leave_is_published_whole_and_what_is_newer_is_kept(
    tmp_path: Path, target: Path, shared: bool
) -> None:
    with closing(LiveFiles(tmp_path / "live", shared=shared)) as live:
        live.add(0)
        old = live.killed(tmp_path / "old")
        live.add(1)
        new = live.killed(tmp_path / "new")
        publish([live.wrapper.half], target, workplace=tmp_path)
    sealed, halves = LiveHalf(target, "sealed"), [left_behind(path, shared=shared) for path in new]
    assert work_left_behind(new[0], target, shared=shared) == halves[0], "they are equal"
    assert work_left_behind(old[0], target, shared=shared) == sealed, "it was published from memory: a full disk"
    assert work_left_behind(tmp_path / "gone.sqlite", target, shared=shared) == sealed
    assert names_in(target.parent) == [target.name]
    for half in (sealed, sealed, halves[0]):  # nothing is doubled, however often
        publish([half, halves[1]], target, closing={"verdict": "killed"})
        assert query(target, CONTENT) == [(2, 2)]
        assert query(target, "SELECT verdict, (SELECT count(*) FROM host_sample) FROM task") == [("killed", 2)]
        assert seal_is_broken(target) is False
    target.unlink()
    assert work_left_behind(old[0], target, shared=shared) == left_behind(old[0], shared=shared)


def test_what_a_killed_writer_left_half_written_is_undone_by_whoever_reads_it(tmp_path: Path, target: Path) -> None:
    with closing(LiveFiles(tmp_path / "live", shared=True)) as live:
        live.add(0)

        def die(rows: int) -> None:
            if rows == 20_000:  # more than the cache holds: the file is changed, and only the journal knows
                live.killed(tmp_path / "dead")
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            live.wrapper.fill((make_chunk(f"d{n}") for n in range(30_000)), die)
    assert (tmp_path / "dead" / "wrapper.sqlite-journal").stat().st_size > 0
    publish([LiveHalf(tmp_path / "dead" / "wrapper.sqlite", "left")], target)
    assert query(target, "SELECT count(*) FROM chunk") == [(1,)]
    assert query(target, "PRAGMA integrity_check") == [("ok",)]


def test_a_file_whose_own_disk_has_no_room_even_for_reading_is_read_from_a_copy(tmp_path: Path, target: Path) -> None:
    with small_disk(tmp_path / "node") as disk:
        files = LiveFiles(disk.path / "local")
        files.add(0)
        dead = files.killed(disk.path / "dead")
        disk.fill()
        publish(dead, target)
        files.close()
    assert query(target, CONTENT) == [(1, 1)]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_what_cannot_be_built_or_put_in_place_leaves_the_old_file_and_no_copy(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish([live.wrapper.half, LiveHalf(live.paths[1])], target, workplace=live.folder / "gone")  # built at the target
    assert query(target, CONTENT) == [(1, 1)]
    before, there = target.read_bytes(), names_in(live.folder)
    with live.recorder.batch():
        for number in range(1000):
            live.recorder.write_tick(START_MS + number, [(1, Reading(power_w=1.5))], None)
    with largest_file(target.stat().st_size + 4096), pytest.raises((OSError, sqlite3.Error)):
        publish(live.paths, target)
    assert target.read_bytes() == before
    folder = target.with_name("folder.sqlite")
    folder.mkdir()
    (folder / "something").touch()
    for refused in (folder, target.parent / "gone" / "x.sqlite"):
        with pytest.raises(OSError):
            publish(live.paths, refused)
    assert names_in(target.parent) == [target.name, folder.name]
    assert names_in(live.folder) == there


def test_only_what_killed_publishers_left_of_this_file_is_removed(target: Path) -> None:
    for name in (f".{target.name}.gpu3.99.tmp", "neighbour.log", ".neighbour.sqlite.x.tmp"):
        (target.parent / name).write_bytes(b"half")
    (target.parent / f".{target.name}.x.tmp").mkdir()
    (target.parent / f".{target.name}.x.tmp" / "joined.sqlite").touch()
    target.write_bytes(b"whole")
    remove_unfinished(target)
    assert names_in(target.parent) == [".neighbour.sqlite.x.tmp", target.name, "neighbour.log"]


def test_a_reader_never_sees_a_torn_or_missing_file(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    over, seen, trouble = threading.Event(), list[int](), list[str]()

    def read() -> None:
        while not over.is_set():
            try:
                with closing(sqlite3.connect(f"file:{target}?mode=ro&immutable=1", uri=True)) as db:
                    assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
                    seen.append(db.execute("SELECT count(*) FROM sample").fetchone()[0])
                assert seal_is_broken(target) is False
            except Exception as error:
                trouble.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(1, 16):
        live.add(number)
        publish(live.paths, target)
    wait_for(lambda: seen and seen[-1] == 16, "the reader has seen the last one")
    over.set()
    reader.join()
    assert trouble == [] and seen == sorted(seen)


def test_a_file_is_on_disk_before_it_gets_its_name_and_its_folder_after(
    live: LiveFiles, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a power cut leaves an empty file under the right name."""
    synced, fsync = list[tuple[str, bool]](), os.fsync

    def watched(fd: int) -> None:
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), target.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    publish(live.paths, target)
    (file, was_there), *folder = synced
    assert Path(file).parent == target.parent and Path(file).name.startswith(f".{target.name}.") and not was_there
    assert folder == [(str(target.parent), True)]


# --- the seal, and text -----------------------------------------------------------------------------------------------


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_any_changed_bit_breaks_the_seal(at: float, bit: int) -> None:
    content = b"a" * 300 + b"sealcrc32:--------" + b"b" * 300
    content = content.replace(b"--------", checksum([content])[2].encode())
    assert checksum([content])[1:] == (content[310:318].decode(),) * 2
    place = int(at * len(content))
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    _, stated, computed = checksum([bytes(changed)])
    assert stated != computed
    assert (stated is None) is (300 <= place < 310), "without its mark there is no seal"


@pytest.mark.parametrize("block", [1, 7, 17, 18, 19, 1000])
def test_the_seal_is_found_wherever_the_blocks_begin_and_is_not_needed(block: int, tmp_path: Path) -> None:
    data = b"x" * 25 + b"sealcrc32:0a1b2c3d" + b"y" * 40 + b"sealcrc32:99999999"
    seal_at, stated, whole = checksum([data])
    assert (stated, seal_at) == ("0a1b2c3d", 35)
    assert checksum([data[at : at + block] for at in range(0, len(data), block)]) == (seal_at, stated, whole)
    assert checksum([data[:20]])[:2] == checksum([b"sealcrc32:0a1b2c3"])[:2] == (None, None)
    (tmp_path / "text").write_text("no database")
    assert (
        read_stated(tmp_path / "text")
        is read_stated(tmp_path / "nothing")
        is read_checksum(tmp_path / "text")[0]
        is None
    )


def test_samples_as_text(live: LiveFiles, target: Path, pages: Pages) -> None:
    for number in (7, 0, 3):
        live.add(number)
    files = [target.with_suffix(suffix) for suffix in (".csv", ".jsonl")]
    for path in files:
        publish(live.paths, path)
    pages({f"samples{path.suffix}": path.read_bytes().decode().replace("\r\n", "\\r\\n\n") for path in files})


# --- in the background ------------------------------------------------------------------------------------------------


def test_a_publisher_writes_at_once_soon_and_at_every_interval_and_warns_once_of_a_folder_that_is_away(
    live: LiveFiles, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def levels() -> list[str]:
        return [record.levelname for record in caplog.records if "publish" in record.getMessage()]

    rare = Publisher(live.paths, target, base_interval_s=600)
    rare.start()
    assert query(target, CONTENT) == [(0, 0)]
    live.add(0)
    rare.publish_soon()
    wait_for(lambda: query(target, CONTENT) == [(1, 1)], "the sample")
    live.add(1)
    rare.stop()
    assert query(target, CONTENT) == [(1, 1)], "the last word is the caller's"
    assert rare.publish_now({"verdict": "stopped"})
    assert query(target, "SELECT verdict, (SELECT count(*) FROM chunk) FROM task") == [("stopped", 2)]
    away = target.parent.with_name("away")
    target.parent.rename(away)
    with caplog.at_level(logging.INFO):
        often = Publisher(live.paths, target, base_interval_s=0.05)
        often.start()
        assert [often.publish_now() for _ in range(3)] == [False] * 3
        os.rename(away, target.parent)  # noqa: PTH104
        live.add(2)
        wait_for(lambda: target.exists() and query(target, CONTENT) == [(3, 3)], "the interval")
        wait_for(lambda: "INFO" in levels(), "it says so")
        target.parent.rename(away)
        wait_for(lambda: len(levels()) == 3, "a second warning")
        often.stop()
    assert levels() == ["WARNING", "INFO", "WARNING"]


def test_large_files_are_published_less_often_but_never_more_than_eight_minutes_apart() -> None:
    sizes = {0: 30.0, 1_000_000: 30.0, 5_000_000: 100.0, 22_000_000: 440.0, 10**9: 480.0}
    assert {size: publish_interval_s(size, 30.0) for size in sizes} == sizes
