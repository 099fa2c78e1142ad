"""The two ways of writing live files: WAL on node-local disk, and the safe mode where other machines see the file."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import Allocation, ChunkResult, HostReading, Reading, TaskKey
from rooms.root import BadInput, LocalFolder
from rooms.store import (
    Filesystem,
    LiveFolder,
    LiveHalf,
    TaskWriter,
    choose_live_folder,
    left_behind,
    publish,
    work_left_behind,
)
from rooms.telemetry import TelemetryWriter
from support.databases import query, seal_is_broken
from support.live_files import grow
from support.small_disk import small_disk
from support.task_files import START_MS, make_chunk

KEY = TaskKey("4821", 7, 0, "gpu3")
READING = Reading(utilization_percent=50, power_w=250.5)


def begin(writer: TaskWriter) -> None:
    allocation = Allocation(True, "4821", "gpu3", array_index=7)
    writer.begin_task(allocation, started_at_ms=START_MS, pid=42, version="0.1.0", engine="demo", telemetry=True)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- which folder, which mode -----------------------------------------------------------------------------------------


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "run" / "tasks").mkdir(parents=True)
    return tmp_path / "run" / "tasks" / f"{KEY.name}.sqlite"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def is_beside(chosen: LiveFolder, target: Path) -> bool:
    return chosen.folder.path.parent == target.parent and chosen.folder.path.name.startswith(f".live-{KEY.name}-")


def test_a_node_local_disk_is_used_and_the_log_says_so(target: Path, node: Path) -> None:
    with small_disk(node) as disk:
        chosen = choose_live_folder("auto", str(disk.path), KEY, target)
        assert (chosen.shared, chosen.folder.path.parent) == (False, node)
        assert chosen.description == (
            f"live files: {chosen.folder.path} (tmpfs, local); WAL on node-local disk: {node} is local"
        )
        assert chosen.to_meta() == {
            "live_folder": str(chosen.folder.path), "live_filesystem": "tmpfs", "live_mode": "local",
        }  # fmt: skip
        assert names_in(chosen.folder.path) == []
    assert names_in(target.parent) == []


def test_a_folder_on_a_filesystem_that_is_not_known_to_be_local_is_not_used(target: Path) -> None:
    chosen = choose_live_folder("auto", "/proc", KEY, target)
    assert chosen.shared and is_beside(chosen, target)
    assert "/proc is not a node-local disk (proc, treated as shared" in chosen.description
    assert chosen.to_meta()["live_mode"] == "shared"


def test_a_folder_that_does_not_exist_is_not_used(target: Path, node: Path) -> None:
    chosen = choose_live_folder("auto", str(node / "gone"), KEY, target)
    assert chosen.shared and is_beside(chosen, target)
    assert "there is no node-local folder" in chosen.why and "No such file" in chosen.why


def test_a_disk_without_room_is_not_used(target: Path, node: Path) -> None:
    with small_disk(node) as disk:
        disk.fill()
        chosen = choose_live_folder("auto", str(node), KEY, target)
        assert chosen.shared and is_beside(chosen, target)
        assert "No space left" in chosen.why
        assert names_in(node) == [".stone"]


def test_a_mode_that_is_asked_for_is_taken(target: Path, node: Path) -> None:
    forced = choose_live_folder("shared", str(node), KEY, target)
    assert forced.shared and is_beside(forced, target)
    with small_disk(node):
        local = choose_live_folder("local", str(node), KEY, target)
        assert (local.shared, local.is_risky) == (False, False)
    with pytest.raises(BadInput, match="no folder can be created in"):
        choose_live_folder("local", str(node / "gone"), KEY, target)


def test_whoever_insists_on_wal_where_it_is_not_known_to_be_safe_is_warned(tmp_path: Path) -> None:
    risky = LiveFolder(LocalFolder(tmp_path), Filesystem("lustre"), False, "run.live_mode = local")
    assert risky.is_risky
    assert not LiveFolder(LocalFolder(tmp_path), Filesystem("lustre"), True, "").is_risky


# --- the safe mode ----------------------------------------------------------------------------------------------------


def test_the_safe_mode_leaves_no_log_and_no_shared_memory(tmp_path: Path) -> None:
    with closing(TelemetryWriter(tmp_path / "recorder.sqlite", 7, shared=True)) as writer:
        with writer.batch():
            writer.write_tick(START_MS, [(1, READING)], None)
        assert names_in(tmp_path) == ["recorder.sqlite", "recorder.sqlite-journal"]
        assert (tmp_path / "recorder.sqlite-journal").stat().st_size == 0, "nothing is half written"


def test_the_safe_mode_takes_no_lock(tmp_path: Path) -> None:
    """Where locks do not work, asking for one is an error or a lie."""
    live = tmp_path / "wrapper.sqlite"
    with closing(TaskWriter(live, KEY, shared=True)) as writer:
        writer.fill([make_chunk("a")], lambda rows: None)
        with writer.batch():
            writer.add_gap(None, 1, 2, "x")
            locks = Path("/proc/locks").read_text().splitlines()
            assert not [line for line in locks if line.split()[5].endswith(f":{live.stat().st_ino}")]


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_snapshot_at_any_moment_is_whole_while_the_writer_writes_on(tmp_path: Path, shared: bool) -> None:
    devices = range(8)
    with closing(TelemetryWriter(tmp_path / "recorder.sqlite", 7, shared=shared)) as writer:
        with writer.batch():
            for tick in range(5_000):
                writer.write_tick(tick, [(device, READING) for device in devices], None)
        over, said, trouble = threading.Event(), [5_000], []

        def look() -> None:
            number = 0
            while not over.is_set():
                copy, at_least = tmp_path / f"copy{number}.sqlite", said[0]
                writer.snapshot(copy)
                at_most, number = said[0] + 1, number + 1
                ((check,),) = query(copy, "PRAGMA integrity_check")
                ((samples, ticks),) = query(copy, "SELECT count(*), count(DISTINCT at_ms) FROM sample")
                if check != "ok" or samples != 8 * ticks or not at_least <= ticks <= at_most:
                    trouble.append((check, samples, ticks, at_least, at_most))
                copy.unlink()
                seen.append(ticks)

        seen: list[int] = []
        looker = threading.Thread(target=look)
        looker.start()
        end_s = time.monotonic() + 2
        while time.monotonic() < end_s:
            with writer.batch():
                writer.write_tick(said[0], [(device, READING) for device in devices], None)
            said[0] += 1
            time.sleep(0.0005)  # a writer that never rests is in a transaction all the time
        over.set()
        looker.join()
    assert trouble == []
    assert len(seen) >= 3


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_snapshot_that_cannot_be_put_in_place_leaves_no_draft(tmp_path: Path, shared: bool) -> None:
    (tmp_path / "snapshot.sqlite").mkdir()
    (tmp_path / "live").mkdir()
    with closing(TelemetryWriter(tmp_path / "live" / "recorder.sqlite", 7, shared=shared)) as writer:
        with writer.batch():
            writer.write_tick(START_MS, [(1, READING)], None)
        with pytest.raises(OSError, match="Is a directory"):
            writer.snapshot(tmp_path / "snapshot.sqlite")
    assert names_in(tmp_path) == ["live", "snapshot.sqlite"]


def test_what_a_killed_writer_left_half_written_is_undone_by_whoever_reads_it(tmp_path: Path, target: Path) -> None:
    code = f"""
import os, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from pathlib import Path
from support.task_files import make_chunk
from badcjobs.model.arrays import Allocation, TaskKey
from badcjobs.store.task_writer import TaskWriter
writer = TaskWriter(Path({str(tmp_path / "wrapper.sqlite")!r}), TaskKey("4821", 7, 0, "gpu3"), shared=True)
writer.begin_task(Allocation(False, "4821", "gpu3"), started_at_ms=1, pid=1, version="0", engine="x", telemetry=True)
writer.fill([make_chunk(f"c{{n}}") for n in range(500)], lambda rows: None)
writer._db.on_disk().execute("PRAGMA cache_size = 5")
def die(rows):
    if rows == 3000:
        os.kill(os.getpid(), 9)
writer.fill((make_chunk(f"d{{n}}") for n in range(5000)), die)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert (tmp_path / "wrapper.sqlite-journal").stat().st_size > 0
    publish([LiveHalf(tmp_path / "wrapper.sqlite", "left")], target)
    assert query(target, "SELECT count(*) FROM chunk") == [(500,)]
    assert query(target, "PRAGMA integrity_check") == [("ok",)]


def test_the_halves_of_the_safe_mode_are_joined_without_opening_a_live_file(tmp_path: Path, target: Path) -> None:
    with (
        closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY, shared=True)) as wrapper,
        closing(TelemetryWriter(tmp_path / "recorder.sqlite", KEY.task_id, shared=True)) as recorder,
    ):
        chunk = make_chunk("a")
        wrapper.fill([chunk], lambda rows: None)
        wrapper.attempt_ended(
            ChunkResult(chunk, START_MS, START_MS + 1), status="done", try_number=1, worker_id=5, device_id=9
        )
        with recorder.batch():
            recorder.write_tick(START_MS, [(1, READING)], HostReading(1.0, 2, 3))
        halves = [wrapper.half, LiveHalf(tmp_path / "snapshot.sqlite", "sealed")]
        publish(halves, target, workplace=tmp_path)
        assert query(target, "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk") == [(1, 0)]
        recorder.snapshot(tmp_path / "snapshot.sqlite")
        publish(halves, target, workplace=tmp_path)
        assert query(target, "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk") == [(1, 1)]
    assert names_in(target.parent) == [target.name]


def test_nothing_is_never_published_over_something(tmp_path: Path, target: Path) -> None:
    target.write_bytes(b"something")
    with pytest.raises(FileNotFoundError):
        publish([LiveHalf(tmp_path / "wrapper.sqlite", "left"), LiveHalf(tmp_path / "recorder.sqlite", "left")], target)
    assert target.read_bytes() == b"something"


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_what_was_published_from_memory_is_not_replaced_by_the_older_file_of_a_dead_wrapper(
    tmp_path: Path, target: Path, shared: bool
) -> None:
    file, chunks = tmp_path / "wrapper.sqlite", [make_chunk(name) for name in ("a", "b")]
    with closing(TaskWriter(file, KEY, shared=shared)) as wrapper:
        begin(wrapper)
        wrapper.fill(chunks, lambda rows: None)
        for number, chunk in enumerate(chunks):
            result = ChunkResult(chunk, START_MS, START_MS + 1)
            wrapper.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
            if number == 0:
                wrapper.half(tmp_path)
                assert work_left_behind(file, target, shared=shared) == left_behind(file, shared=shared)
        publish([wrapper.half], target, workplace=tmp_path)
    assert work_left_behind(file, target, shared=shared) == left_behind(file, shared=shared), "they are equal"
    stale = work_left_behind(tmp_path / "own.sqlite", target, shared=shared)
    assert stale == LiveHalf(target, "sealed")
    with closing(TelemetryWriter(tmp_path / "recorder.sqlite", KEY.task_id, shared=shared)) as recorder:
        recorder.write_tick(START_MS, [(1, READING)], None)
    for _ in range(2):  # nothing is doubled, however often
        publish(
            [stale, left_behind(tmp_path / "recorder.sqlite", shared=shared)], target, closing={"verdict": "killed"}
        )
    assert query(target, "SELECT count(*) FROM chunk WHERE status = 'done'") == [(2,)]
    assert query(target, "SELECT count(*), (SELECT verdict FROM task) FROM sample") == [(1, "killed")]
    assert seal_is_broken(target) is False


# --- samples on time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_publication_delays_no_tick(tmp_path: Path, target: Path, shared: bool) -> None:
    """Ten ticks a second into a file of megabytes, published back to back: what does a tick wait for?"""
    live = tmp_path / "recorder.sqlite"
    grow(live, KEY.task_id, megabytes=12, shared=shared)
    wrapper = TaskWriter(tmp_path / "wrapper.sqlite", KEY, shared=shared)
    wrapper.fill([make_chunk("a")], lambda rows: None)
    over, published_s = threading.Event(), list[float]()
    with closing(TelemetryWriter(live, KEY.task_id, shared=shared)) as writer:

        def publish_on() -> None:
            while not over.is_set():
                began_s = time.monotonic()
                if shared:
                    writer.snapshot(tmp_path / "snapshot.sqlite")
                    publish(
                        [wrapper.half, LiveHalf(tmp_path / "snapshot.sqlite", "sealed")],
                        target,
                        workplace=tmp_path,
                    )
                else:
                    publish([tmp_path / "wrapper.sqlite", live], target)
                published_s.append(time.monotonic() - began_s)

        publisher = threading.Thread(target=publish_on)
        publisher.start()
        waits_s = []
        for tick in range(200):
            if tick >= 15 and len(published_s) >= 2:
                break
            start_s = time.monotonic()
            with writer.batch():
                writer.write_tick(START_MS + tick, [(device, READING) for device in range(8)], None)
            waits_s.append(time.monotonic() - start_s)
            time.sleep(max(0.0, 0.1 - waits_s[-1]))
        over.set()
        publisher.join()
    wrapper.close()
    print(
        f"{'shared' if shared else 'local'}: {len(published_s)} publications of {target.stat().st_size / 1e6:.0f} MB,"
    )
    print(f"a tick's transaction took {1000 * max(waits_s):.1f} ms at most")
    assert len(published_s) >= 2
    # On a machine that does other things, too, every tick may be late; who waits for a publication waits to its end.
    assert max(waits_s) < max(0.1, min(published_s) / 2), "a publication has delayed a sample by more than one tick"
