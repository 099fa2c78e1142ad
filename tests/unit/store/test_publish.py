"""Publishing: two live files become one sealed file, and no reader ever sees half of it."""

import json
import logging
import os
import shutil
import sqlite3
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms import store
from rooms.model import Reading, TaskKey
from rooms.root import BadInput, LocalFolder, RunFolder, read_boot_id
from rooms.store import Filesystem, LiveHalf, choose_live_folder, publish, take_over
from support.cases import read_data
from support.databases import is_undamaged, names_in, query
from support.filesystems import largest_file, lie_about_filesystem, small_disk
from support.hand_clock import HandClock
from support.task_files import START_MS, LiveTask, make_chunk
from support.waiting import wait_for

KEY = TaskKey("4821", 7, 0, "gpu3")
CONTENT = "SELECT count(*), (SELECT count(*) FROM sample) FROM chunk WHERE status = 'done'"


@pytest.fixture
def live(tmp_path):
    with closing(LiveTask(tmp_path / "local", KEY, devices=2)) as files:
        yield files


@pytest.fixture
def target(tmp_path):
    (tmp_path / "tasks").mkdir()
    return tmp_path / "tasks" / f"{KEY.name}.sqlite"


def test_the_published_file_has_what_is_committed_in_both_and_is_undamaged_and_alone(live, target):
    for number in range(4):
        live.add(number)
    live.wrapper.add_gap(None, 1, 2, "the wrapper's")
    live.recorder.open_gap(None, None, 3, 4, "the recorder's")
    with live.wrapper.batch():
        live.wrapper.add_gap(None, 1, 2, "not committed yet")
        assert publish(live.paths, target, gaps=[(5, 9, "of the publishing user")]) == target.stat().st_size
    assert query(target, CONTENT) == [(4, 4)]
    by_device = "SELECT device_index, at_ms - ?, utilization_percent FROM sample JOIN device USING (device_id)"
    assert sorted(query(target, by_device, START_MS)) == [(0, 0, 0), (0, 2000, 2), (1, 1000, 1), (1, 3000, 3)]
    ids = [device_id for (device_id,) in query(target, "SELECT device_id FROM sample ORDER BY rowid")]
    assert ids == sorted(ids), "device by device"
    gaps = [(1, 2, "the wrapper's"), (3, 4, "the recorder's"), (5, 9, "of the publishing user")]
    found = query(target, "SELECT task_id, device_id, from_ms, to_ms, reason FROM gap ORDER BY from_ms, reason")
    assert found == [(KEY.task_id, None, *gap) for gap in gaps]
    assert query(target, "SELECT samples FROM device_total") == [(2,), (2,)]
    pragmas = {"journal_mode": "delete", "user_version": store.SCHEMA_VERSION, "integrity_check": "ok"}
    assert {name: query(target, f"PRAGMA {name}")[0][0] for name in pragmas} == pragmas
    ((text,),) = query(target, "SELECT value FROM meta WHERE key = 'rows'")
    tables = [table for table in store.TABLES if table != "meta"]
    assert json.loads(text) == {name: query(target, f"SELECT count(*) FROM {name}")[0][0] for name in tables}
    assert is_undamaged(target)
    assert names_in(target.parent) == [target.name]
    assert {name.partition(".")[0] for name in names_in(live.folder)} == {"recorder", "wrapper"}


def test_closing_words_fill_only_what_is_open_and_leave_the_live_file_as_it_is(live, target):
    words = {"ended_at_ms": START_MS + 7, "verdict": "killed"}
    columns = "SELECT ended_at_ms, verdict, exit_code FROM task"
    publish(live.paths, target, closing=words)
    assert query(target, columns) == [(START_MS + 7, "killed", None)]
    assert query(live.paths[0], columns) == [(None, None, None)]
    live.wrapper.update_task(ended_at_ms=START_MS + 5, exit_code=0)
    publish(live.paths, target, closing=words)
    assert query(target, columns) == [(START_MS + 5, "killed", 0)]


def test_a_recorders_file_is_optional_the_wrappers_is_not(live, target):
    live.add(0)
    young, broken = live.folder / "young.sqlite", live.folder / "broken.sqlite"
    broken.write_bytes(b"SQLite format 3\0" + b"rubbish" * 1000)
    with closing(sqlite3.connect(young)) as db:
        db.execute("PRAGMA journal_mode = WAL")
        for missing in (live.folder / "not-yet.sqlite", young):
            publish([live.paths[0], missing], target)
            assert (query(target, CONTENT), query(target, "SELECT * FROM gap")) == ([(1, 0)], [])
    publish([live.paths[0], broken], target)
    assert query(target, CONTENT) == [(1, 0)]
    ((from_ms, to_ms, reason),) = query(target, "SELECT from_ms, to_ms, reason FROM gap")
    assert (from_ms, to_ms) == (START_MS, START_MS), "from its start to the last sign of the wrapper"
    assert reason.startswith("the recorder's file cannot be read: ")
    before = target.read_bytes()
    with pytest.raises(sqlite3.Error):
        publish([broken, live.paths[1]], target)
    for kind in ("left", "sealed", "local"):
        with pytest.raises(FileNotFoundError):
            publish([LiveHalf(live.folder / "gone.sqlite", kind), live.paths[1]], target)
    assert (target.read_bytes(), names_in(target.parent)) == (before, [target.name])


@pytest.mark.parametrize("shared", [False, True], ids=["local", "shared"])
def test_what_killed_writers_leave_is_published_whole(tmp_path, target, shared):
    with closing(LiveTask(tmp_path / "live", KEY, shared=shared, devices=2)) as live:
        live.add(0)
        live.killed(tmp_path / "old")
        live.add(1)
        live.killed(tmp_path / "new")
        publish([live.wrapper.half], target, workplace=tmp_path)

    def publish_left(name):
        store.publish_killed(LocalFolder(tmp_path / name), target, START_MS, [], shared=shared)
        assert is_undamaged(target) and names_in(target.parent) == [target.name]
        return query(target, "SELECT verdict, (SELECT count(*) FROM chunk), (SELECT count(*) FROM sample) FROM task")

    for gone in ("old", "gone"):
        assert publish_left(gone) == [(None, 2, 0)], "more was published: a power cut"
    assert [publish_left("new"), publish_left("new")] == [[("killed", 2, 2)]] * 2, "nothing is doubled"
    target.unlink()
    assert publish_left("old") == [("killed", 1, 1)]


def test_what_a_killed_writer_left_half_written_is_undone(tmp_path, target):
    with closing(LiveTask(tmp_path / "live", KEY, shared=True, devices=2)) as live:
        live.add(0)
        with pytest.raises(ZeroDivisionError), live.recorder.batch():
            for _ in range(200):  # more than the cache holds: the file is changed, and only the journal knows
                live.recorder.open_gap(None, None, 1, 2, "x" * 20_000)
            dead = live.killed(tmp_path / "dead")
            raise ZeroDivisionError
    assert dead[1].with_name("recorder.sqlite-journal").stat().st_size > 0
    publish([LiveHalf(file, "left") for file in dead], target)
    assert query(target, "SELECT count(*) FROM chunk") == [(1,)]
    assert query(target, "SELECT count(*) FROM gap") == [(0,)]


def test_a_file_whose_own_disk_has_no_room_even_for_reading_is_read_from_a_copy(tmp_path, target):
    with small_disk(tmp_path / "node") as disk, closing(LiveTask(disk.path / "local", KEY, devices=2)) as live:
        live.add(0)
        dead = live.killed(disk.path / "dead")
        disk.fill()
        publish(dead, target)
    assert query(target, CONTENT) == [(1, 1)]


def test_what_cannot_be_built_or_put_in_place_leaves_the_old_file_and_no_copy(live, target):
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
    (folder / "something").mkdir(parents=True)
    for refused in (folder, target.parent / "gone" / "x.sqlite"):
        with pytest.raises(OSError):
            publish(live.paths, refused)
    assert (names_in(target.parent), names_in(live.folder)) == ([target.name, folder.name], there)


def test_only_what_killed_publishers_left_of_this_file_is_removed(target):
    for name in (target.name, f".{target.name}.gpu3.99.tmp", "neighbour.log", ".neighbour.sqlite.x.tmp"):
        (target.parent / name).write_bytes(b"half")
    (target.parent / f".{target.name}.x.tmp" / "joined").mkdir(parents=True)
    at_work = store.unfinished_name(target, str(os.getppid()))
    for unfinished in (at_work, store.unfinished_name(target)):
        unfinished.touch()
    store.remove_unfinished(target)
    assert names_in(target.parent) == [at_work.name, ".neighbour.sqlite.x.tmp", target.name, "neighbour.log"]


def test_a_file_is_on_disk_before_it_gets_its_name(live, target, monkeypatch):
    """Or a power cut leaves an empty file under the right name."""
    synced, fsync = list[tuple[str, bool]](), os.fsync

    def watched(fd):
        synced.append((str(Path(f"/proc/self/fd/{fd}").readlink()), target.exists()))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", watched)
    publish(live.paths, target)
    (file, was_there), *folder = synced
    assert Path(file).parent == target.parent and Path(file).name.startswith(f".{target.name}.") and not was_there
    assert folder == [(str(target.parent), True)]


@given(at=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_changed_bit_shows(live, target, at, bit):
    if not target.exists():
        publish(live.paths, target)
    content = target.read_bytes()
    changed = bytearray(content)
    changed[int(at * len(content))] ^= 1 << bit
    copy = target.with_name("changed")
    copy.write_bytes(changed)
    assert store.read_publication(copy) is None
    assert store.is_published(copy)
    copy.write_bytes(content + content[:4096])
    assert store.read_publication(copy) is None
    copy.write_bytes(content)
    assert store.read_publication(copy) == store.read_publication(target) is not None


def test_samples_as_text(live, target, pages):
    for number in (7, 0, 3):
        live.add(number)
    files = [target.with_suffix(suffix) for suffix in (".csv", ".jsonl")]
    for path in files:
        publish(live.paths, path)
    pages({f"samples{path.suffix}": path.read_bytes().decode().replace("\r\n", "\\r\\n\n") for path in files})


def test_a_publisher_writes_at_every_interval_and_warns_once(live, target, caplog):
    def levels():
        return [record.levelname for record in caplog.records if "publish" in record.getMessage()]

    rare = store.Publisher(live.paths, target, base_interval_s=600)
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
        often = store.Publisher(live.paths, target, base_interval_s=0.05)
        often.start()
        assert [often.publish_now() for _ in range(3)] == [False] * 3
        away.rename(target.parent)
        live.add(2)
        wait_for(lambda: target.exists() and query(target, CONTENT) == [(3, 3)], "the interval")
        wait_for(lambda: "INFO" in levels(), "it says so")
        target.parent.rename(away)
        wait_for(lambda: len(levels()) == 3, "a second warning")
        often.stop()
    assert levels() == ["WARNING", "INFO", "WARNING"]


PLACES = "/var/spool;/tmp/slurm.4821;/tmpfoo;/dev/shm;/local/bob;/plain/x;/many/x;/scratch/st-birds-1/july;/scratch"
PLACES += ";/home/ada;/mnt/far;/arc/project/birds;/mnt/field data/june;/local/ada/tmp;/mnt/new;/tmp/over/x"


def test_a_folder_is_local_where_its_mount_is_known_to_be(tmp_path, monkeypatch, pages):
    mounts = read_data("mountinfo.txt")
    found = [(path, store.parse_mountinfo(mounts, path)) for path in PLACES.split(";")]
    pages({"kinds.txt": "\n".join(f"{path}: {one.kind}, {'shared' if one.shared else 'local'}" for path, one in found)})
    for text in ("", "rubbish\n", "22 1 8:2 / /\n", "a - b\n"):
        assert store.parse_mountinfo(text, "/tmp").description == "unknown, treated as shared"
    (tmp_path / "proc").symlink_to("/proc")
    assert store.read_filesystem(tmp_path / "proc").kind == "proc", "a link is followed"
    lie_about_filesystem(monkeypatch, tmp_path, "lustre")
    assert store.read_filesystem(tmp_path / "not" / "yet") == Filesystem("lustre", str(tmp_path))


def test_live_files_are_on_a_local_disk_with_room_or_beside_the_target(target, tmp_path):
    def beside(mode, place):
        """Return why the files are not there, but beside the target."""
        chosen = choose_live_folder(mode, str(place), KEY, target)
        path = chosen.folder.path
        assert chosen.shared and path.parent == target.parent and path.name.startswith(f".live-{KEY.name}-")
        assert "; safe mode for shared filesystems: " in chosen.description
        assert chosen.to_meta()["live_mode"] == "shared"
        return chosen.why

    with small_disk(node := tmp_path / "node") as disk:
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
    risky = store.LiveFolder(LocalFolder(node), Filesystem("lustre"), False, "run.live_mode = local")
    assert risky.is_risky and not risky._replace(shared=True).is_risky


def leave(run, node, index, *, job="4820", tries=1, **owner):
    """Leave the live folder of a task that was killed, on a node or beside its target; return it and the target."""
    key = TaskKey("4820", index, 0, "gpu1")
    target = run.tasks / f"{key.name}.sqlite"
    place = run.tasks / f".live-{job}_{index}.r0.gpu1-x" if node is None else node / f"badcjobs-{index}"
    with closing(LiveTask(place, key, shared=node is None)) as live:
        live.wrapper.fill([make_chunk("b")], lambda rows: None)
        for number in range(tries):
            live.add(number)
        live.recorder.write_tick(START_MS + 500, [(live.device_ids[0], Reading(power_w=250.5))], None)
    for path in place.iterdir():
        os.utime(path, (START_MS // 1000 + 7,) * 2)
    its_owner = store.Owner(str(target), "no such mark", node is None, "here", read_boot_id())
    fd = store.hold(LocalFolder(place), replace(its_owner, **owner))  # type: ignore[arg-type]
    assert fd is not None
    os.close(fd)  # killed
    return LocalFolder(place), target


def test_what_killed_tasks_of_this_machine_left_is_published_once(tmp_path, monkeypatch):
    node, run, key = tmp_path / "node", RunFolder(tmp_path / "run"), TaskKey("4900", 0, 0, "gpu1")
    mine = LocalFolder(node / "badcjobs-mine")
    run.create()
    mine.path.mkdir(parents=True)
    rebooted = {"boot_id": "of another boot"}
    ours = [leave(run, node, 1), leave(run, None, 2), leave(run, node, 7, **rebooted)]
    idle = leave(run, node, 4, tries=0)  # it was killed while it listed its chunks
    unknown = leave(run, node, 9)
    unknown[0].owner_file.write_text("{")
    of_others = [
        unknown, leave(run, None, 5, job="4900"), leave(RunFolder(tmp_path / "elsewhere"), node, 3),
        leave(run, node, 6, hostname="there", **rebooted), leave(run, None, 8, **rebooted),
    ]  # fmt: skip  # of no run; of our own array; of another run; of other nodes
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        store.publish_left_behind(run, mine, key, hostname="here")
    assert not [*run.tasks.glob("*.sqlite")], "all folders are of another user"
    store.publish_left_behind(run, mine, key, hostname="here")
    for folder, target in ours:
        words = "SELECT verdict, ended_at_ms, (SELECT count(*) FROM chunk WHERE status = 'done') FROM task"
        assert query(target, words) == [("killed", START_MS + 7000, 1)]
        gap = [(START_MS + 500, START_MS + 7000, "the recorder was killed, too")]
        assert query(target, "SELECT from_ms, to_ms, reason FROM gap") == gap
        assert (is_undamaged(target), folder.path.exists()) == (True, False)
    there = [(folder.path.exists(), target.exists()) for folder, target in (idle, *of_others)]
    assert there == [(False, False), *[(True, False)] * len(of_others)]
    assert [path.name for path in sorted(run.tasks.glob("*.sqlite"))] == [target.name for _, target in ours]


def lock_elsewhere(lock, then=lambda: None):
    """Let another process lock a folder, and return what lets it go on to its end."""
    (its_word, reported), (waits, go) = os.pipe(), os.pipe()
    if (child := os.fork()) == 0:
        os.close(go)
        with lock():
            os.write(reported, b".")
            os.read(waits, 1)
            then()
        os._exit(0)
    os.read(its_word, 1)
    return lambda: (os.close(go), os.waitpid(child, 0))


@pytest.mark.parametrize(("holder", "key", "replaced", "pauses"), [
    ("publisher", "4820_1.r1.gpu1", (), 3), ("publisher", "4900_1.r0.gpu1", (), 3),
    ("publisher", "4820_2.r1.gpu1", (), 0), ("owner", "4900_1.r0.gpu1", (), 0),
    ("owner", "4820_1.r1.gpu1", ("4820_1.r0.gpu1",), 3),
])  # fmt: skip
def test_what_may_have_our_chunks_is_waited_for_while_another_process_publishes_it(
    tmp_path, holder, key, replaced, pauses
):
    run, node, slept = RunFolder(tmp_path / "run"), tmp_path / "node", []
    run.create()
    left, target = leave(run, node, 1)
    folder = LocalFolder(left.path.rename(node / "badcjobs-4820_1.r0.gpu1-x"))
    owner = store.Owner(str(target), "no such mark", False, "here", read_boot_id())
    lock = partial(store.locked, folder) if holder == "publisher" else lambda: nullcontext(store.hold(folder, owner))
    end = lock_elsewhere(lock, lambda: (target.touch(), folder.remove()))

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 3:
            end()

    options = {"hostname": "here", "replaced": replaced, "sleep": sleep}
    store.publish_left_behind(run, LocalFolder(node / "badcjobs-mine"), TaskKey.parse(key), **options)
    assert (target.exists(), len(slept)) == (pauses > 0, pauses)
    if not slept:
        end()


def test_a_recorder_that_was_killed_while_it_created_its_file_does_not_keep_the_work_from_being_published(tmp_path):
    run, made = RunFolder(tmp_path / "run"), tmp_path / "made.sqlite"
    run.create()
    folder, target = leave(run, tmp_path / "node", 1)
    for path in folder.path.glob(f"{folder.recorder_file.name}*"):
        path.unlink()
    with closing(sqlite3.connect(made)) as db:
        db.executescript("PRAGMA cache_size = 1; BEGIN; CREATE TABLE t AS SELECT zeroblob(99999)")
        for ending in ("", "-journal"):
            shutil.copyfile(f"{made}{ending}", f"{folder.recorder_file}{ending}")
    store.publish_left_behind(run, LocalFolder(tmp_path / "node" / "badcjobs-mine"), KEY, hostname="here")
    words = "SELECT verdict, (SELECT count(*) FROM chunk WHERE status = 'done'), (SELECT count(*) FROM gap) FROM task"
    assert query(target, words) == [("killed", 1, 0)]
    assert not folder.path.exists()


class Killed(BaseException):
    """Ends a call as kill -9 ends a process."""


def is_killed_after(removals, call, monkeypatch):
    """Call something that removes files, and end it when so many have gone; return whether that was in time."""
    numbers = count(1)

    def followed(remove):
        def remove_and_count(*args, **options):
            remove(*args, **options)
            if next(numbers) == removals:
                raise Killed

        return remove_and_count

    with monkeypatch.context() as patch:
        for name in ("unlink", "rmdir"):
            patch.setattr(os, name, followed(getattr(os, name)))
        try:
            call()
        except Killed:
            return True
    return False


def test_what_is_left_by_a_task_that_is_killed_while_it_removes_its_folder_is_removed_by_the_next(
    tmp_path, monkeypatch
):
    node, run, key = tmp_path / "node", RunFolder(tmp_path / "run"), TaskKey("4900", 0, 0, "gpu1")
    run.create()
    for removals in count(1):
        folder, target = leave(run, node, removals)
        publish([folder.wrapper_file, folder.recorder_file], target)
        published = target.read_bytes()
        (folder.scratch / "worker-0").mkdir(parents=True)
        if not is_killed_after(removals, folder.remove, monkeypatch):
            break
        store.publish_left_behind(run, LocalFolder(node / "badcjobs-mine"), key, hostname="here")
        assert list(folder.path.glob("*")) == [], "at most an empty folder, in the last moment"
        assert target.read_bytes() == published, "not again, from what was left of the files"
    assert removals > 5


def test_a_folder_is_taken_over_only_after_its_owner_and_by_one(tmp_path):
    folder = LocalFolder(tmp_path / "live")
    folder.path.mkdir()
    assert not take_over(folder, 1.0, HandClock()), "there is nothing to publish"
    folder.wrapper_file.touch()
    assert take_over(folder, 1.0, HandClock()), "there was no room for an owner file: no one else can take it"
    owner = store.Owner(str(tmp_path / "x.sqlite"), "mark", False, "here", read_boot_id())
    end = lock_elsewhere(lambda: nullcontext(store.hold(folder, owner)))
    clock = HandClock()
    before_s = clock.monotonic_s()
    assert not take_over(folder, 3.0, clock)
    assert clock.monotonic_s() - before_s == pytest.approx(3.0, abs=0.2)
    end()
    assert take_over(folder, 3.0, clock)
    assert clock.monotonic_s() - before_s == pytest.approx(3.0, abs=0.2), "it does not wait without a reason"
    folder.remove()
    assert not take_over(folder, 1.0, HandClock()), "it is published already"
