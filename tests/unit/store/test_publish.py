"""Publishing: two live files become one sealed file, and no reader ever sees half of it."""

from __future__ import annotations

import csv
import json
import logging
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import Allocation, ChunkResult, HostReading, Reading, TaskKey, publish_interval_s
from rooms.store import SCHEMA_VERSION, LiveHalf, Publisher, TaskWriter, join_files, publish, remove_unfinished
from rooms.telemetry import TelemetryWriter
from support.databases import query
from support.small_disk import small_disk
from support.task_files import START_MS, make_chunk, make_device
from support.waiting import wait_for

KEY = TaskKey("4821", 7, 0, "gpu3")


class LiveFiles:
    """The two files of a task that is running."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True)
        self.wrapper = TaskWriter(folder / "wrapper.sqlite", KEY)
        self.recorder = TelemetryWriter(folder / "recorder.sqlite", KEY.task_id)
        self.paths = [folder / "wrapper.sqlite", folder / "recorder.sqlite"]
        allocation = Allocation(True, "4821", "gpu3", array_index=7)
        self.wrapper.begin_task(
            allocation, started_at_ms=START_MS, pid=42, version="0.1.0", engine="demo", telemetry=True
        )
        self.device = make_device()
        self.wrapper.add_devices([self.device])

    def add(self, number: int) -> None:
        """Do one chunk and write one tick."""
        chunk = make_chunk(f"c{number}")
        self.wrapper.fill([chunk], lambda rows: None)
        result = ChunkResult(chunk, START_MS, START_MS + number)
        self.wrapper.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
        reading = Reading(utilization_percent=number % 101, power_w=250.5)
        with self.recorder.batch():
            self.recorder.write_tick(
                START_MS + number * 1000, [(self.wrapper.device_id(self.device), reading)], HostReading(1.0, 2, 3)
            )

    def close(self) -> None:
        self.wrapper.close()
        self.recorder.close()


@pytest.fixture
def live(tmp_path: Path) -> Iterator[LiveFiles]:
    files = LiveFiles(tmp_path / "local")
    yield files
    files.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks" / f"{KEY.name}.sqlite"


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- the join ---------------------------------------------------------------------------------------------------------


def test_the_published_file_is_the_join_of_both(live: LiveFiles, target: Path) -> None:
    for number in range(3):
        live.add(number)
    live.wrapper.add_gap(None, 1, 2, "the wrapper's")
    live.recorder.open_gap(None, None, 3, 4, "the recorder's")
    size = publish(live.paths, target)
    assert size == target.stat().st_size
    assert query(target, "SELECT count(*) FROM chunk WHERE status = 'done'") == [(3,)]
    assert query(target, "SELECT at_ms - ?, utilization_percent FROM sample ORDER BY 1", START_MS) == [
        (0, 0), (1000, 1), (2000, 2)
    ]  # fmt: skip
    assert query(target, "SELECT reason FROM gap ORDER BY 1") == [("the recorder's",), ("the wrapper's",)]
    assert query(target, "SELECT name FROM task") == [("4821_7.r0.gpu3",)]
    assert query(target, "PRAGMA integrity_check") == [("ok",)]


def test_the_published_file_is_sealed_and_alone(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    assert names_in(target.parent) == [target.name]
    assert query(target, "PRAGMA journal_mode") == [("delete",)]
    assert query(target, "PRAGMA user_version") == [(SCHEMA_VERSION,)]
    assert names_in(live.folder) == sorted(
        f"{name}.sqlite{end}" for name in ("recorder", "wrapper") for end in ("", "-shm", "-wal")
    )


def test_a_recorder_that_has_written_nothing_yet_is_no_obstacle(live: LiveFiles, target: Path, tmp_path: Path) -> None:
    live.add(0)
    publish([live.paths[0], tmp_path / "local" / "not-yet.sqlite"], target)
    assert query(target, "SELECT count(*) FROM chunk") == [(1,)]
    assert query(target, "SELECT count(*) FROM sample") == [(0,)]


def test_publishing_while_the_writers_go_on_takes_only_what_is_committed(live: LiveFiles, target: Path) -> None:
    live.add(0)
    with live.wrapper.batch():
        live.wrapper.add_gap(None, 1, 2, "not yet")
        publish(live.paths, target)
    assert query(target, "SELECT count(*) FROM gap") == [(0,)]
    publish(live.paths, target)
    assert query(target, "SELECT count(*) FROM gap") == [(1,)]


def test_files_whose_writers_were_killed_are_published_with_all_they_had(live: LiveFiles, target: Path) -> None:
    live.add(0)
    # A copy of database and log is what a killed process leaves behind.
    dead = live.folder.with_name("dead")
    dead.mkdir()
    for path in live.folder.iterdir():
        if not path.name.endswith("-shm"):
            (dead / path.name).write_bytes(path.read_bytes())
    publish([dead / path.name for path in live.paths], target)
    assert query(target, "SELECT count(*) FROM chunk WHERE status = 'done'") == [(1,)]
    assert query(target, "SELECT count(*) FROM sample") == [(1,)]


def test_a_recorders_file_that_cannot_be_read_is_a_gap_and_the_work_is_published(live: LiveFiles, target: Path) -> None:
    live.add(0)
    broken = live.folder / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + b"rubbish" * 1000)
    publish([live.paths[0], broken], target)
    assert query(target, "SELECT count(*) FROM chunk WHERE status = 'done'") == [(1,)]
    [(reason,)] = query(target, "SELECT reason FROM gap")
    assert str(reason).startswith("the recorder's file cannot be read: ")


def test_a_recorders_file_without_tables_yet_is_no_obstacle(live: LiveFiles, target: Path) -> None:
    live.add(0)
    young = live.folder / "young.sqlite"
    with closing(sqlite3.connect(young)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        publish([live.paths[0], young], target)
    assert query(target, "SELECT count(*) FROM chunk") == [(1,)]
    assert query(target, "SELECT count(*) FROM gap") == [(0,)]


def test_a_wrappers_file_that_cannot_be_read_is_never_published_over_the_old_one(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    before = target.read_bytes()
    broken = live.folder / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + b"rubbish" * 1000)
    with pytest.raises(sqlite3.Error):
        publish([broken, live.paths[1]], target)
    assert target.read_bytes() == before
    assert names_in(target.parent) == [target.name]


# --- closing words ----------------------------------------------------------------------------------------------------


def test_closing_fills_what_a_killed_wrapper_left_open(live: LiveFiles, target: Path) -> None:
    publish(live.paths, target, closing={"ended_at_ms": START_MS + 7, "verdict": "killed"})
    assert query(target, "SELECT ended_at_ms, verdict, exit_code FROM task") == [(START_MS + 7, "killed", None)]


def test_closing_never_overwrites_what_the_wrapper_said(live: LiveFiles, target: Path) -> None:
    live.wrapper.update_task(ended_at_ms=START_MS + 5, exit_code=0, verdict="done")
    publish(live.paths, target, closing={"ended_at_ms": START_MS + 7, "verdict": "killed"})
    assert query(target, "SELECT ended_at_ms, verdict, exit_code FROM task") == [(START_MS + 5, "done", 0)]


def test_closing_leaves_the_live_file_as_it_is(live: LiveFiles, target: Path) -> None:
    publish(live.paths, target, closing={"verdict": "killed"})
    assert query(live.paths[0], "SELECT verdict FROM task") == [(None,)]


def test_a_gap_that_no_file_could_take_is_added_by_whoever_publishes_last(live: LiveFiles, target: Path) -> None:
    publish(live.paths, target, gaps=[(START_MS + 1, START_MS + 9, "could not be written: full")])
    assert query(target, "SELECT task_id, device_id, from_ms, to_ms, reason FROM gap") == [
        (KEY.task_id, None, START_MS + 1, START_MS + 9, "could not be written: full")
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def test_samples_as_csv_have_a_header_and_empty_cells_for_what_is_unknown(live: LiveFiles, target: Path) -> None:
    live.add(7)
    table = target.with_suffix(".csv")
    publish(live.paths, table)
    with table.open(newline="") as file:
        [row] = csv.DictReader(file)
    assert row["at"] == "2027-01-15T08:00:07.000Z"
    assert (row["uuid"], row["utilization_percent"], row["power_w"], row["temperature_c"]) == (
        "GPU-0",
        "7",
        "250.5",
        "",
    )


def test_samples_as_json_lines_have_null_for_what_is_unknown(live: LiveFiles, target: Path) -> None:
    for number in range(2):
        live.add(number)
    lines = target.with_suffix(".jsonl")
    publish(live.paths, lines)
    documents = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [document["utilization_percent"] for document in documents] == [0, 1]
    assert documents[0]["temperature_c"] is None


# --- readers and kills ------------------------------------------------------------------------------------------------


def test_a_reader_never_sees_a_torn_or_missing_file(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    over = threading.Event()
    seen: list[int] = []
    trouble: list[str] = []

    def read() -> None:
        while not over.is_set():
            try:
                with closing(sqlite3.connect(f"file:{target}?mode=ro&immutable=1", uri=True)) as db:
                    [(check,)] = db.execute("PRAGMA integrity_check").fetchall()
                    [(count,)] = db.execute("SELECT count(*) FROM sample").fetchall()
                    assert check == "ok", check
                    seen.append(count)
            except Exception as error:
                trouble.append(repr(error))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 51):
        live.add(number)
        publish(live.paths, target)
    over.set()
    for reader in readers:
        reader.join()
    assert trouble == []
    assert len(seen) >= 20
    assert query(target, "SELECT count(*) FROM sample") == [(51,)]


def test_a_kill_at_any_moment_leaves_the_old_file_or_the_new_one(live: LiveFiles, target: Path) -> None:
    for number in range(300):
        live.add(number)
    publish(live.paths, target)
    code = f"""
from pathlib import Path
from badcjobs.store.live_files import LiveHalf
from badcjobs.store.publish import publish
while True:
    publish([Path({str(live.paths[0])!r}), Path({str(live.paths[1])!r})], Path({str(target)!r}))
    print("published", flush=True)
"""
    chance = random.Random(7)
    for _ in range(6):
        publisher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert publisher.stdout is not None and publisher.stdout.readline()
        time.sleep(chance.random() * 0.05)
        publisher.kill()
        publisher.wait()
        publisher.stdout.close()
        assert query(target, "PRAGMA integrity_check") == [("ok",)]
        assert query(target, "SELECT count(*) FROM sample") == [(300,)]
    assert [name for name in names_in(target.parent) if not name.startswith(".")] == [target.name]


def test_what_a_killed_publisher_left_half_copied_is_removed(target: Path) -> None:
    for name in (
        f".{target.name}.gpu3.99.tmp",
        f".{target.name}.gpu3.100.tmp",
        "neighbour.log",
        ".neighbour.sqlite.x.tmp",
    ):
        (target.parent / name).write_bytes(b"half")
    target.write_bytes(b"whole")
    remove_unfinished(target)
    assert names_in(target.parent) == [".neighbour.sqlite.x.tmp", target.name, "neighbour.log"]


# --- failures ---------------------------------------------------------------------------------------------------------


def test_a_folder_that_is_gone_is_an_error_that_leaves_nothing(live: LiveFiles, tmp_path: Path) -> None:
    before = names_in(live.folder)
    with pytest.raises(OSError):
        publish(live.paths, tmp_path / "gone" / "x.sqlite")
    assert not (tmp_path / "gone").exists()
    assert names_in(live.folder) == before


def test_a_target_that_cannot_be_replaced_stays_and_no_copy_remains(live: LiveFiles, target: Path) -> None:
    target.mkdir()
    (target / "something").touch()
    with pytest.raises(OSError):
        publish(live.paths, target)
    assert names_in(target.parent) == [target.name]


def test_a_disk_that_is_full_half_way_leaves_the_old_file_and_no_copy(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish(live.paths, target)
    before = target.read_bytes()
    with live.recorder.batch():
        for number in range(3000):
            live.recorder.write_tick(START_MS + number, [(1, Reading(power_w=1.5))], None)
    joined = live.folder / "joined.sqlite"
    join_files(live.paths, joined)
    code = f"""
import resource
from pathlib import Path
from badcjobs.store.live_files import LiveHalf
from badcjobs.store.atomic_write import move_into_place
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # no file may grow beyond this, as on a full disk
move_into_place(Path({str(joined)!r}), Path({str(target)!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "File too large" in done.stderr
    assert target.read_bytes() == before
    assert names_in(target.parent) == [target.name]


# --- now and then -----------------------------------------------------------------------------------------------------


def test_a_file_is_there_from_the_beginning_and_follows_the_live_ones(live: LiveFiles, target: Path) -> None:
    publisher = Publisher(live.paths, target, base_interval_s=0.1)
    publisher.start()
    assert query(target, "SELECT count(*) FROM sample") == [(0,)]
    live.add(0)
    wait_for(lambda: query(target, "SELECT count(*) FROM sample") == [(1,)], "the sample")
    publisher.stop()


def test_soon_does_not_wait_for_the_interval(live: LiveFiles, target: Path) -> None:
    publisher = Publisher(live.paths, target, base_interval_s=60)
    publisher.start()
    live.add(0)
    publisher.publish_soon()
    wait_for(lambda: query(target, "SELECT count(*) FROM sample") == [(1,)], "the sample")
    publisher.stop()


def test_stopping_is_quick_and_the_last_word_is_the_callers(live: LiveFiles, target: Path) -> None:
    publisher = Publisher(live.paths, target, base_interval_s=60)
    publisher.start()
    live.add(0)
    start_s = time.monotonic()
    publisher.stop()
    assert time.monotonic() - start_s < 40
    assert publisher.publish_now()
    assert query(target, "SELECT count(*) FROM sample") == [(1,)]


def test_a_disk_that_comes_back_is_written_to_again(live: LiveFiles, target: Path) -> None:
    away = target.parent.with_name("away")
    target.parent.rename(away)
    publisher = Publisher(live.paths, target, base_interval_s=0.1)
    publisher.start()
    assert not publisher.publish_now()
    away.rename(target.parent)
    wait_for(target.exists, "the file")
    publisher.stop()


def test_a_folder_that_stays_away_is_told_once_and_its_return_too(
    live: LiveFiles, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(live.paths, target, base_interval_s=60)
    away = target.parent.with_name("away")
    target.parent.rename(away)
    with caplog.at_level(logging.INFO):
        assert [publisher.publish_now() for _ in range(3)] == [False] * 3
        away.rename(target.parent)
        assert publisher.publish_now()
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


def test_what_has_no_room_beside_the_live_files_is_built_beside_the_target(live: LiveFiles, target: Path) -> None:
    live.add(0)
    publish([live.wrapper.half, LiveHalf(live.paths[1])], target, workplace=live.folder / "gone")
    assert query(target, "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk") == [(1, 1)]
    assert names_in(target.parent) == [target.name]


def test_a_file_whose_own_disk_has_no_room_even_for_reading_is_read_from_a_copy(tmp_path: Path, target: Path) -> None:
    with small_disk(tmp_path / "node") as disk:
        files = LiveFiles(disk.path / "local")
        files.add(0)
        dead = disk.path / "dead"
        dead.mkdir()
        for path in files.folder.iterdir():  # what killed processes leave behind
            if not path.name.endswith("-shm"):
                (dead / path.name).write_bytes(path.read_bytes())
        disk.fill()
        publish([dead / path.name for path in files.paths], target)
        files.close()
    assert query(target, "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk") == [(1, 1)]


@pytest.mark.parametrize(
    ("size_bytes", "interval_s"),
    [(0, 30.0), (1_000_000, 30.0), (5_000_000, 100.0), (22_000_000, 440.0), (10**9, 480.0)],
)
def test_large_files_are_published_less_often_but_never_more_than_eight_minutes_apart(
    size_bytes: int, interval_s: float
) -> None:
    assert publish_interval_s(size_bytes, 30.0) == interval_s
