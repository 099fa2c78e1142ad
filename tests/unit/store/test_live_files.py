"""The live files of a task: where they are, how they are written, what a full disk does, and who may take them over."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.model import Allocation, Chunk, ChunkResult, HostReading, Reading, TaskKey
from rooms.root import BadInput, LocalFolder, RunFolder
from rooms.store import (
    UNKNOWN,
    Filesystem,
    LiveFolder,
    Owner,
    PatientDatabase,
    TaskWriter,
    choose_live_folder,
    hold,
    last_reading_ms,
    left_behind,
    parse_mountinfo,
    publish_left_behind,
    read_device_state,
    read_filesystem,
    read_memory_peaks,
    read_pulse,
    take_over,
)
from rooms.telemetry import TelemetryWriter
from support.databases import query, seal_is_broken
from support.hand_clock import HandClock
from support.mounts import lie_about_filesystem
from support.small_disk import SmallDisk, read_only, small_disk
from support.task_files import LOUD, START_MS, make_chunk, make_device

KEY = TaskKey("4821", 7, 0, "gpu3")
READING = Reading(utilization_percent=50, power_w=250.5)
BIG = "x" * 6000


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "run" / "tasks").mkdir(parents=True)
    return tmp_path / "run" / "tasks" / f"{KEY.name}.sqlite"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


# --- which filesystem -------------------------------------------------------------------------------------------------

MOUNTS = r"""22 1 8:2 / / rw,relatime shared:1 - xfs /dev/sda2 rw,attr2,inode64,logbufs=8,noquota
61 22 8:5 / /tmp rw,nosuid,nodev shared:30 - ext4 /dev/sda5 rw
62 61 0:90 / /tmp/over rw shared:31 - ext4 /dev/sdx rw
63 61 0:91 / /tmp/over rw shared:31 - nfs server:/tmp rw
27 25 0:22 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs tmpfs rw,inode64
143 22 0:63 / /scratch rw,relatime shared:78 - lustre 10.10.1.1@o2ib:10.10.1.2@o2ib:/scratch rw,flock
150 22 0:64 / /home rw,relatime shared:80 - nfs4 10.20.0.5:/export/home rw,vers=4.2,hard,proto=tcp
171 22 0:70 / /arc/project rw,relatime shared:90 - gpfs arc rw,relatime
190 22 0:72 / /mnt/field\040data rw,relatime shared:92 - cifs //lab/field rw,vers=3.1.1,cache=strict
200 22 0:73 / /mnt/far rw,nosuid,nodev,relatime shared:93 - fuse.sshfs user@far:/ rw,user_id=1000
210 22 0:63 /users/ada /local/ada rw,relatime shared:78 - lustre 10.10.1.1@o2ib:/scratch rw,flock
36 35 98:0 / /plain rw,noatime - overlay /dev/sdb rw
37 35 98:1 / /many rw,noatime shared:1 master:2 propagate_from:3 - btrfs /dev/sdc rw
220 22 0:74 / /mnt/new rw,relatime shared:94 - shinyfs shiny rw
rubbish
22 1 8:2 / / - short
"""


def test_a_folder_is_on_the_longest_and_last_mount_above_it_and_only_known_local_ones_are_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = {"/var/spool": "xfs", "/tmp/slurm.4821": "ext4", "/tmpfoo": "xfs", "/dev/shm": "tmpfs", "/local/bob": "xfs",
             "/plain/x": "overlay", "/many/x": "btrfs"}  # fmt: skip
    shared = {"/scratch/st-birds-1/july": "lustre", "/scratch": "lustre", "/home/ada": "nfs4", "/mnt/far": "fuse.sshfs",
              "/arc/project/birds": "gpfs", "/mnt/field data/june": "cifs", "/local/ada/tmp": "lustre",
              "/mnt/new": "shinyfs", "/tmp/over/x": "nfs"}  # fmt: skip
    for kinds, is_shared in ((local, False), (shared, True)):
        for path, kind in kinds.items():
            found = parse_mountinfo(MOUNTS, path)
            assert (found.kind, found.shared) == (kind, is_shared), path
    for text in ("", "rubbish\n", "22 1 8:2 / /\n", "a - b\n"):
        assert parse_mountinfo(text, "/tmp") == Filesystem(UNKNOWN)
    assert Filesystem(UNKNOWN).description == "unknown, treated as shared"
    (tmp_path / "proc").symlink_to("/proc")
    assert read_filesystem(tmp_path / "proc").kind == "proc", "a link is followed"
    lie_about_filesystem(monkeypatch, tmp_path, "lustre")
    assert read_filesystem(tmp_path / "not" / "yet") == Filesystem("lustre", str(tmp_path))


def test_live_files_are_on_a_node_local_disk_with_room_and_else_beside_the_target_in_the_safe_mode(
    target: Path, node: Path
) -> None:
    def beside(chosen: LiveFolder) -> bool:
        path = chosen.folder.path
        return chosen.shared and path.parent == target.parent and path.name.startswith(f".live-{KEY.name}-")

    with small_disk(node) as disk:
        chosen = choose_live_folder("auto", str(node), KEY, target)
        assert (chosen.shared, chosen.is_risky, chosen.folder.path.parent) == (False, False, node)
        where = f"live files: {chosen.folder.path} (tmpfs, local)"
        assert chosen.description == f"{where}; WAL on node-local disk: {node} is local"
        meta = {"live_folder": str(chosen.folder.path), "live_filesystem": "tmpfs", "live_mode": "local"}
        assert chosen.to_meta() == meta
        assert names_in(chosen.folder.path) == []
        assert not choose_live_folder("local", str(node), KEY, target).is_risky
        assert names_in(target.parent) == []
        disk.fill()
        before = names_in(node)
        full = choose_live_folder("auto", str(node), KEY, target)
        assert beside(full) and full.why == f"{node} cannot be written (No space left on device)"
        assert names_in(node) == before
    other = choose_live_folder("auto", "/proc", KEY, target)
    assert beside(other) and other.why == "/proc is not a node-local disk (proc, treated as shared)"
    assert "; safe mode for shared filesystems: " in other.description and other.to_meta()["live_mode"] == "shared"
    gone = choose_live_folder("auto", str(node / "gone"), KEY, target)
    assert beside(gone) and gone.why == f"there is no node-local folder {node / 'gone'} (No such file or directory)"
    asked = choose_live_folder("shared", str(node), KEY, target)
    assert beside(asked) and asked.why == "run.live_mode = shared"
    with pytest.raises(BadInput, match="no folder can be created in"):
        choose_live_folder("local", str(node / "gone"), KEY, target)
    risky = LiveFolder(LocalFolder(node), Filesystem("lustre"), False, "run.live_mode = local")
    assert risky.is_risky and not replace(risky, shared=True).is_risky


# --- how they are written ---------------------------------------------------------------------------------------------


def test_the_safe_mode_takes_no_lock_and_leaves_no_log_and_no_shared_memory(tmp_path: Path) -> None:
    live = tmp_path / "wrapper.sqlite"
    with closing(TaskWriter(live, KEY, shared=True)) as writer:
        writer.fill([make_chunk("a")], lambda rows: None)
        with writer.batch():
            writer.add_gap(None, 1, 2, "x")
            locks = Path("/proc/locks").read_text().splitlines()
            assert not [line for line in locks if line.split()[5].endswith(f":{live.stat().st_ino}")]
        assert names_in(tmp_path) == ["wrapper.sqlite", "wrapper.sqlite-journal"]
        assert (tmp_path / "wrapper.sqlite-journal").stat().st_size == 0, "nothing is half written"


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_snapshot_has_all_that_is_committed_or_is_not_there_at_all(tmp_path: Path, shared: bool) -> None:
    (tmp_path / "live").mkdir()
    with closing(TelemetryWriter(tmp_path / "live" / "recorder.sqlite", 7, shared=shared)) as writer:
        with writer.batch():
            for tick in range(2000):  # more than one step of the copy
                writer.write_tick(tick, [(device, READING) for device in range(8)], None)
        (tmp_path / "folder.sqlite").mkdir()
        with pytest.raises(OSError, match="Is a directory"):
            writer.snapshot(tmp_path / "folder.sqlite")
        (tmp_path / ".copy.sqlite.tmp").write_text("of a process that was killed")
        writer.snapshot(tmp_path / "copy.sqlite")
        assert query(tmp_path / "copy.sqlite", "SELECT count(*) FROM sample") == [(16_000,)]
        assert query(tmp_path / "copy.sqlite", "PRAGMA journal_mode") == [("delete",)]
    assert names_in(tmp_path) == ["copy.sqlite", "folder.sqlite", "live"]


def test_the_newest_readings_are_those_since_a_moment_and_unknown_where_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "recorder.sqlite"
    with closing(TelemetryWriter(path, 7)) as writer:
        for tick, (used, load) in enumerate([(5, 20), (9, 40), (None, 60)]):
            reading = Reading(memory_used_bytes=used, utilization_percent=load)
            host = HostReading(10.0 * tick, 2**30 * tick, 2**32)
            writer.write_tick(START_MS + tick * 1000, [(1, reading), (2, Reading(memory_used_bytes=tick))], host)
        writer.write_tick(START_MS + 9000, [(2, Reading())], None)
        uri = left_behind(path, shared=False)(tmp_path)
        assert last_reading_ms(uri) == START_MS + 9000
        assert json.loads(read_device_state(uri, 1, START_MS + 1999) or "") == {
            "at_ms": START_MS + 1000, "memory_used_bytes": 9, "utilization_percent": 40,
        }  # fmt: skip
        assert read_device_state(uri, 1, START_MS - 1) is read_device_state(uri, 3, START_MS + 9000) is None
        assert read_memory_peaks(uri, START_MS) == {1: 9, 2: 2}
        assert read_memory_peaks(uri, START_MS + 1000, START_MS + 1000) == {1: 9, 2: 1}
        assert read_memory_peaks(uri, START_MS + 2001) == {}
        assert read_pulse(uri, START_MS + 1000) == (15.0, 37.5, 50.0)
        assert read_pulse(uri, START_MS + 9001) == (None, None, None)
    (tmp_path / "text").write_text("text" * 100)
    for bad in (None, f"file:{tmp_path / 'gone'}?mode=ro", f"file:{tmp_path / 'text'}?mode=ro"):
        assert last_reading_ms(bad) is read_device_state(bad, 1, START_MS) is None
        assert (read_memory_peaks(bad, 0), read_pulse(bad, 0)) == ({}, (None, None, None))


# --- a disk that refuses ----------------------------------------------------------------------------------------------


class HandOfTime:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Refusing:
    """A database on a small disk, and what a process that is killed now would leave."""

    def __init__(self, disk: SmallDisk, scratch: Path, *, shared: bool) -> None:
        self.disk, self._dead, self.time_s = disk, scratch / "dead", HandOfTime()
        self.db = PatientDatabase(disk.path / "live.sqlite", shared=shared, monotonic_s=self.time_s)

    def add(self, *keys: str) -> None:
        for key in keys:
            self.db.write(lambda c, key=key: c.execute("INSERT INTO meta VALUES (?, ?)", (key, BIG)))  # type: ignore[misc]

    @property
    def keys(self) -> list[str]:
        return [key for (key,) in self.db.now.execute("SELECT key FROM meta ORDER BY rowid")]

    @property
    def kept(self) -> list[str]:
        shutil.rmtree(self._dead, ignore_errors=True)
        shutil.copytree(self.disk.path, self._dead, ignore=shutil.ignore_patterns("*-shm", ".stone", "other"))
        return [key for (key,) in query(self._dead / "live.sqlite", "SELECT key FROM meta ORDER BY rowid")]


@pytest.fixture(params=["local", "shared"])
def refusing(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Refusing]:
    with small_disk(tmp_path / "disk", "5m") as disk:
        one = Refusing(disk, tmp_path, shared=request.param == "shared")
        with closing(one.db):
            yield one


def names(prefix: str, many: int) -> list[str]:
    return [f"{prefix}{number}" for number in range(many)]


def test_what_a_full_disk_refuses_is_kept_in_order_and_written_when_there_is_room(
    refusing: Refusing, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    db, disk, time_s = refusing.db, refusing.disk, refusing.time_s
    caplog.set_level(logging.INFO)
    refusing.add("before")
    disk.fill()
    refusing.add(*names("k", 100))
    assert 0 < db.waiting <= 100
    assert refusing.keys == ["before", *names("k", 100)]
    assert refusing.kept == refusing.keys[: 101 - db.waiting]
    db.snapshot(tmp_path / "copy.sqlite")
    assert query(tmp_path / "copy.sqlite", "SELECT count(*) FROM meta") == [(101,)]
    with pytest.raises(sqlite3.OperationalError, match="the disk cannot be written"):
        db.on_disk()
    disk.make_room()
    (disk.path / "other").write_bytes(bytes(disk.free_bytes - 300_000))  # room for some of it
    time_s.now_s += 1.1
    db.catch_up()
    assert 0 < db.waiting < 100
    assert refusing.kept == refusing.keys[: len(refusing.kept)] and len(refusing.keys) == 101
    (disk.path / "other").unlink()
    time_s.now_s += 0.9
    refusing.add("too soon")  # not a second has passed since the last attempt
    assert db.waiting > 1
    time_s.now_s += 0.1
    refusing.add("after")
    assert (db.waiting, refusing.kept) == (0, ["before", *names("k", 100), "too soon", "after"])
    assert db.on_disk().execute("SELECT 1").fetchone() == (1,)
    for seconds in (2, 2, 70):  # a disk on the brink does not fill the log
        disk.fill()
        refusing.add(*names(f"{time_s.now_s} ", 20))
        disk.make_room()
        time_s.now_s += seconds
        db.catch_up()
    disk.fill()
    refusing.add(*names("last ", 20))
    assert db.waiting > 0
    disk.make_room()
    db.catch_up(force=True)
    assert db.waiting == 0
    assert [record.levelname for record in caplog.records].count("WARNING") == 2


def test_a_transaction_is_kept_whole_or_not_at_all_wherever_it_was_refused(refusing: Refusing) -> None:
    db = refusing.db
    db.on_disk().execute("PRAGMA cache_size = 5")  # so that the disk refuses in the middle, not only at the commit
    refusing.disk.fill()
    with db.transaction():
        refusing.add(*names("a", 60))
    with pytest.raises(ZeroDivisionError), db.transaction():
        refusing.add("never")
        raise ZeroDivisionError
    with db.transaction():
        pass
    assert (db.waiting, refusing.keys, refusing.kept) == (1, names("a", 60), [])
    refusing.disk.make_room()
    refusing.time_s.now_s += 2
    with pytest.raises(sqlite3.OperationalError, match="no such table"):  # a wrong statement is no full disk
        db.write(lambda c: c.execute("INSERT INTO nowhere VALUES (1)"))
    with read_only(refusing.disk.path):
        refusing.add("meanwhile")
        assert refusing.keys == [*names("a", 60), "meanwhile"]
    refusing.time_s.now_s += 2
    refusing.add("b")
    assert refusing.kept == [*names("a", 60), "meanwhile", "b"]


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_the_run_is_steered_by_what_was_done_not_by_what_the_disk_knows(tmp_path: Path, shared: bool) -> None:
    def result(chunk: Chunk, *, ok: bool) -> ChunkResult:
        if ok:
            return ChunkResult(chunk, START_MS, START_MS + 1, (LOUD,) * 300, audio_s=30.0)
        return ChunkResult(chunk, START_MS, START_MS + 1, error_class="bad_audio", error="x" * 9000)

    with small_disk(tmp_path / "disk", "3m") as disk:
        live = disk.path / "wrapper.sqlite"
        with closing(TaskWriter(live, KEY, shared=shared)) as writer:
            writer.fill([make_chunk(f"c{number:02d}") for number in range(30)], lambda rows: None)
            first = writer.next_pending(20)
            disk.fill()
            for number, chunk in enumerate(first):
                ok = number % 4 > 0
                status = "done" if ok else "failed"
                writer.attempt_ended(result(chunk, ok=ok), status=status, try_number=1, worker_id=5, device_id=9)
            assert writer.waiting > 0
            assert writer.count_by_status() == {"done": 15, "failed": 5, "pending": 10}
            assert writer.audio_done_s() == 15 * 30.0
            assert [row[1] for row in writer.failed_chunks(10)] == ["c00", "c04", "c08", "c12", "c16"]
            assert [chunk.chunk_id for chunk in writer.next_pending(50)] == [f"c{n}" for n in range(20, 30)]
            disk.make_room()
        found = "SELECT count(*), (SELECT count(*) FROM detection) FROM chunk WHERE status = 'done'"
        assert query(live, found) == [(15, 15 * 300)]
        with closing(TaskWriter(disk.path / "other.sqlite", KEY, shared=shared)) as writer:
            with pytest.raises(sqlite3.OperationalError, match="full"):
                writer.fill((make_chunk(f"c{number}") for number in range(100_000)), lambda rows: None)
            assert writer.count_by_status() == {}, "a list of work that does not fit leaves nothing"


# --- files of killed tasks --------------------------------------------------------------------------------------------


class Left:
    """The live folder of a task that was killed, on this machine unless said otherwise."""

    def __init__(self, run: Path, place: Path, index: int = 3, *, shared: bool = False, tries: int = 1) -> None:
        self.key = TaskKey("4820", index, 0, "gpu1")
        self.target = run / "tasks" / f"{self.key.name}.sqlite"
        self.folder = LocalFolder(place)
        place.mkdir(parents=True)
        with (
            closing(TaskWriter(self.folder.wrapper_file, self.key, shared=shared)) as writer,
            closing(TelemetryWriter(self.folder.recorder_file, self.key.task_id, shared=shared)) as recorder,
        ):
            allocation = Allocation(True, "4820", "gpu1", array_index=index)
            writer.begin_task(allocation, started_at_ms=START_MS, pid=1, version="0", engine="demo", telemetry=True)
            writer.add_devices([make_device()])
            writer.fill([make_chunk("a"), make_chunk("b")], lambda rows: None)
            for chunk in writer.next_pending(tries):
                result = ChunkResult(chunk, START_MS, START_MS + 1)
                writer.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
            recorder.write_tick(START_MS + 500, [(writer.device_id(make_device()), READING)], None)
        for path in place.iterdir():
            os.utime(path, (START_MS // 1000 + 7,) * 2)
        self.owner = Owner.of(self.target, "no such mark", shared=shared, hostname="here")
        self.write_owner()

    def write_owner(self, **changes: object) -> None:
        self.folder.owner_file.unlink(missing_ok=True)
        fd = hold(self.folder, replace(self.owner, **changes))  # type: ignore[arg-type]
        assert fd is not None
        os.close(fd)  # killed


def test_what_killed_tasks_of_this_machine_left_is_published_once_with_its_end_and_its_gap(
    tmp_path: Path, node: Path
) -> None:
    run = RunFolder(tmp_path / "run")
    run.create()
    mine, key = LocalFolder(node / "badcjobs-mine"), TaskKey("4900", 0, 0, "gpu1")
    mine.path.mkdir()
    local = Left(run.path, node / "badcjobs-dead", 1)
    beside = Left(run.path, run.tasks / ".live-4820_2.r0.gpu1-x", 2, shared=True)
    mate = Left(run.path, run.tasks / ".live-4900_5.r0.gpu1-x", 5, shared=True)  # another task of our own array
    other_run = Left(tmp_path / "elsewhere", node / "badcjobs-elsewhere", 3)
    idle = Left(run.path, node / "badcjobs-idle", 4, tries=0)
    far = Left(run.path, node / "badcjobs-far", 6)
    far.write_owner(boot_id="of another boot", hostname="there")
    rebooted = Left(run.path, node / "badcjobs-rebooted", 7)
    rebooted.write_owner(boot_id="of another boot")
    far_beside = Left(run.path, run.tasks / ".live-4820_8.r0.gpu1-x", 8, shared=True)
    far_beside.write_owner(boot_id="of another boot")
    unknown = Left(run.path, node / "badcjobs-unknown", 9)
    unknown.folder.owner_file.write_text("{")
    published = publish_left_behind(run, mine, key, hostname="here")
    assert sorted(published) == sorted(one.target for one in (local, beside, rebooted))
    for one in (local, beside, rebooted):
        assert not one.folder.path.exists()
        words = "SELECT verdict, ended_at_ms, (SELECT count(*) FROM chunk WHERE status = 'done') FROM task"
        assert query(one.target, words) == [("killed", START_MS + 7000, 1)]
        gap = [(START_MS + 500, START_MS + 7000, "the recorder was killed, too")]
        assert query(one.target, "SELECT from_ms, to_ms, reason FROM gap") == gap
        assert seal_is_broken(one.target) is False
    assert not idle.folder.path.exists() and not idle.target.exists(), "it was killed while it listed its chunks"
    for one in (mate, other_run, far, far_beside, unknown):
        assert one.folder.path.exists() and not one.target.exists()
    assert publish_left_behind(run, mine, key, hostname="here") == []


def test_a_folder_is_taken_over_only_after_its_owner_and_by_one(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "live")
    folder.path.mkdir()
    assert take_over(folder, 1.0, HandClock()), "there was no room for an owner file: nobody else can take it"
    owner = Owner.of(tmp_path / "x.sqlite", "mark", shared=False, hostname="here")
    (its_word, told), (waits, go) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:  # a lock is between processes
        os.close(go)
        os.write(told, b"held" if hold(folder, owner) is not None else b"no")
        os.read(waits, 1)
        os._exit(0)
    assert os.read(its_word, 9) == b"held"
    clock = HandClock()
    before_s = clock.monotonic_s()
    assert not take_over(folder, 3.0, clock)
    assert clock.monotonic_s() - before_s == pytest.approx(3.0, abs=0.2)
    os.close(go)
    os.waitpid(child, 0)
    assert take_over(folder, 3.0, clock)
    assert clock.monotonic_s() - before_s == pytest.approx(3.0, abs=0.2), "it does not wait for nobody"
    folder.remove()
    assert not take_over(folder, 1.0, HandClock()), "it is published already"
