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
from rooms import store
from rooms.model import ChunkResult, HostReading, Reading, TaskKey
from rooms.root import BadInput, LocalFolder, RunFolder
from rooms.store import Filesystem, LiveFolder, Owner, PatientDatabase, TaskWriter, choose_live_folder, take_over
from rooms.telemetry import TelemetryWriter
from support.databases import names_in, query, seal_is_broken
from support.hand_clock import HandClock
from support.mounts import lie_about_filesystem
from support.small_disk import SmallDisk, read_only, small_disk
from support.task_files import START_MS, LiveTask, make_chunk

KEY = TaskKey("4821", 7, 0, "gpu3")
READING = Reading(utilization_percent=50, power_w=250.5)
BIG = "x" * 6000


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "run" / "tasks").mkdir(parents=True)
    return tmp_path / "run" / "tasks" / f"{KEY.name}.sqlite"


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


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


LOCAL = {"/var/spool": "xfs", "/tmp/slurm.4821": "ext4", "/tmpfoo": "xfs", "/dev/shm": "tmpfs", "/local/bob": "xfs",
         "/plain/x": "overlay", "/many/x": "btrfs"}  # fmt: skip
SHARED = {"/scratch/st-birds-1/july": "lustre", "/scratch": "lustre", "/home/ada": "nfs4", "/mnt/far": "fuse.sshfs",
          "/arc/project/birds": "gpfs", "/mnt/field data/june": "cifs", "/local/ada/tmp": "lustre",
          "/mnt/new": "shinyfs", "/tmp/over/x": "nfs"}  # fmt: skip


def test_a_folder_is_local_where_its_mount_is_known_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {path: store.parse_mountinfo(MOUNTS, path) for path in (*LOCAL, *SHARED)}
    assert {path: one.kind for path, one in found.items()} == {**LOCAL, **SHARED}
    assert [path for path, one in found.items() if one.shared] == list(SHARED)
    for text in ("", "rubbish\n", "22 1 8:2 / /\n", "a - b\n"):
        assert store.parse_mountinfo(text, "/tmp").description == "unknown, treated as shared"
    (tmp_path / "proc").symlink_to("/proc")
    assert store.read_filesystem(tmp_path / "proc").kind == "proc", "a link is followed"
    lie_about_filesystem(monkeypatch, tmp_path, "lustre")
    assert store.read_filesystem(tmp_path / "not" / "yet") == Filesystem("lustre", str(tmp_path))


def test_live_files_are_on_a_local_disk_with_room_or_beside_the_target(target: Path, node: Path) -> None:
    def beside(mode: str, place: Path) -> str:
        """Return why the files are not there, but beside the target."""
        chosen = choose_live_folder(mode, str(place), KEY, target)
        path = chosen.folder.path
        assert chosen.shared and path.parent == target.parent and path.name.startswith(f".live-{KEY.name}-")
        assert "; safe mode for shared filesystems: " in chosen.description
        assert chosen.to_meta()["live_mode"] == "shared"
        return chosen.why

    with small_disk(node) as disk:
        chosen = choose_live_folder("auto", str(node), KEY, target)
        place = chosen.folder.path
        assert (chosen.shared, chosen.is_risky, place.parent, names_in(place)) == (False, False, node, [])
        where = f"live files: {place} (tmpfs, local); WAL on node-local disk: {node} is local"
        meta = {"live_folder": str(place), "live_filesystem": "tmpfs", "live_mode": "local"}
        assert (chosen.description, chosen.to_meta()) == (where, meta)
        assert not choose_live_folder("local", str(node), KEY, target).is_risky
        assert names_in(target.parent) == []
        disk.fill()
        before = names_in(node)
        assert beside("auto", node) == f"{node} cannot be written (No space left on device)"
        assert names_in(node) == before
    assert beside("auto", Path("/proc")) == "/proc is not a node-local disk (proc, treated as shared)"
    gone = f"there is no node-local folder {node / 'gone'} (No such file or directory)"
    assert beside("auto", node / "gone") == gone
    assert beside("shared", node) == "run.live_mode = shared"
    with pytest.raises(BadInput, match="no folder can be created in"):
        choose_live_folder("local", str(node / "gone"), KEY, target)
    risky = LiveFolder(LocalFolder(node), Filesystem("lustre"), False, "run.live_mode = local")
    assert risky.is_risky and not replace(risky, shared=True).is_risky


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
        uri = store.left_behind(path, shared=False)(tmp_path)
        assert store.last_reading_ms(uri) == START_MS + 9000
        assert json.loads(store.read_device_state(uri, 1, START_MS + 1999) or "") == {
            "at_ms": START_MS + 1000, "memory_used_bytes": 9, "utilization_percent": 40,
        }  # fmt: skip
        assert store.read_device_state(uri, 1, START_MS - 1) is store.read_device_state(uri, 3, START_MS + 9000) is None
        assert store.read_memory_peaks(uri, START_MS) == {1: 9, 2: 2}
        assert store.read_memory_peaks(uri, START_MS + 1000, START_MS + 1000) == {1: 9, 2: 1}
        assert store.read_memory_peaks(uri, START_MS + 2001) == {}
        assert store.read_pulse(uri, START_MS + 1000) == (15.0, 37.5, 50.0)
        assert store.read_pulse(uri, START_MS + 9001) == (None, None, None)
    (tmp_path / "text").write_text("text" * 100)
    for bad in (None, f"file:{tmp_path / 'gone'}?mode=ro", f"file:{tmp_path / 'text'}?mode=ro"):
        assert store.last_reading_ms(bad) is store.read_device_state(bad, 1, START_MS) is None
        assert (store.read_memory_peaks(bad, 0), store.read_pulse(bad, 0)) == ({}, (None, None, None))


class Refusing:
    """A database on a small disk, and what a process that is killed now would leave."""

    def __init__(self, disk: SmallDisk, scratch: Path, *, shared: bool) -> None:
        self.disk, self._dead, self.clock = disk, scratch / "dead", HandClock()
        self.db = PatientDatabase(disk.path / "live.sqlite", shared=shared, monotonic_s=self.clock.monotonic_s)

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
    db, disk, clock = refusing.db, refusing.disk, refusing.clock
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
    clock.sleep(1.1)
    db.catch_up()
    assert 0 < db.waiting < 100
    assert refusing.kept == refusing.keys[: len(refusing.kept)] and len(refusing.keys) == 101
    (disk.path / "other").unlink()
    clock.sleep(0.9)
    refusing.add("too soon")  # not a second has passed since the last attempt
    assert db.waiting > 1
    clock.sleep(0.1)
    refusing.add("after")
    assert (db.waiting, refusing.kept) == (0, ["before", *names("k", 100), "too soon", "after"])
    assert db.on_disk().execute("SELECT 1").fetchone() == (1,)
    for seconds in (2, 2, 70, 0):  # a disk on the brink does not fill the log
        disk.fill()
        refusing.add(*names(f"{clock.now_ms()} ", 20))
        assert db.waiting > 0
        disk.make_room()
        clock.sleep(seconds)
        db.catch_up(force=not seconds)
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
    refusing.clock.sleep(2)
    with pytest.raises(sqlite3.OperationalError, match="no such table"):  # a wrong statement is no full disk
        db.write(lambda c: c.execute("INSERT INTO nowhere VALUES (1)"))
    with read_only(refusing.disk.path):
        refusing.add("meanwhile")
        assert refusing.keys == [*names("a", 60), "meanwhile"]
    refusing.clock.sleep(2)
    refusing.add("b")
    assert refusing.kept == [*names("a", 60), "meanwhile", "b"]


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_a_list_of_work_that_does_not_fit_leaves_nothing(tmp_path: Path, shared: bool) -> None:
    with small_disk(tmp_path, "3m"), closing(TaskWriter(tmp_path / "wrapper.sqlite", KEY, shared=shared)) as writer:
        with pytest.raises(sqlite3.OperationalError, match="full"):
            writer.fill((make_chunk(f"c{number}") for number in range(100_000)), lambda rows: None)
        assert writer.count_by_status() == {}


def leave(
    run: RunFolder, node: Path | None, index: int, *, job: str = "4820", tries: int = 1, **owner: object
) -> tuple[LocalFolder, Path]:
    """Leave the live folder of a task that was killed, on a node or beside its target; return it and the target."""
    key = TaskKey("4820", index, 0, "gpu1")
    target = run.tasks / f"{key.name}.sqlite"
    place = run.tasks / f".live-{job}_{index}.r0.gpu1-x" if node is None else node / f"badcjobs-{index}"
    with closing(LiveTask(place, key, shared=node is None)) as live:
        live.wrapper.fill([make_chunk("a"), make_chunk("b")], lambda rows: None)
        for chunk in live.wrapper.next_pending(tries):
            result = ChunkResult(chunk, START_MS, START_MS + 1)
            live.wrapper.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
        live.recorder.write_tick(START_MS + 500, [(live.device_ids[0], READING)], None)
    for path in place.iterdir():
        os.utime(path, (START_MS // 1000 + 7,) * 2)
    its_owner = Owner.of(target, "no such mark", shared=node is None, hostname="here")
    fd = store.hold(LocalFolder(place), replace(its_owner, **owner))  # type: ignore[arg-type]
    assert fd is not None
    os.close(fd)  # killed
    return LocalFolder(place), target


def test_what_killed_tasks_of_this_machine_left_is_published_once(tmp_path: Path, node: Path) -> None:
    run, mine, key = RunFolder(tmp_path / "run"), LocalFolder(node / "badcjobs-mine"), TaskKey("4900", 0, 0, "gpu1")
    run.create()
    mine.path.mkdir()
    rebooted = {"boot_id": "of another boot"}
    ours = [leave(run, node, 1), leave(run, None, 2), leave(run, node, 7, **rebooted)]
    idle = leave(run, node, 4, tries=0)  # it was killed while it listed its chunks
    unknown = leave(run, node, 9)
    unknown[0].owner_file.write_text("{")
    of_others = [
        unknown, leave(run, None, 5, job="4900"), leave(RunFolder(tmp_path / "elsewhere"), node, 3),
        leave(run, node, 6, hostname="there", **rebooted), leave(run, None, 8, **rebooted),
    ]  # fmt: skip  # nobody's; of our own array; of another run; of other nodes
    assert sorted(store.publish_left_behind(run, mine, key, hostname="here")) == sorted(target for _, target in ours)
    for folder, target in ours:
        words = "SELECT verdict, ended_at_ms, (SELECT count(*) FROM chunk WHERE status = 'done') FROM task"
        assert query(target, words) == [("killed", START_MS + 7000, 1)]
        gap = [(START_MS + 500, START_MS + 7000, "the recorder was killed, too")]
        assert query(target, "SELECT from_ms, to_ms, reason FROM gap") == gap
        assert (seal_is_broken(target), folder.path.exists()) == (False, False)
    there = [(folder.path.exists(), target.exists()) for folder, target in (idle, *of_others)]
    assert there == [(False, False), *[(True, False)] * len(of_others)]
    assert store.publish_left_behind(run, mine, key, hostname="here") == []


def test_a_folder_is_taken_over_only_after_its_owner_and_by_one(tmp_path: Path) -> None:
    folder = LocalFolder(tmp_path / "live")
    folder.path.mkdir()
    assert take_over(folder, 1.0, HandClock()), "there was no room for an owner file: nobody else can take it"
    owner = Owner.of(tmp_path / "x.sqlite", "mark", shared=False, hostname="here")
    (its_word, told), (waits, go) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:  # a lock is between processes
        os.close(go)
        os.write(told, b"held" if store.hold(folder, owner) is not None else b"no")
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
