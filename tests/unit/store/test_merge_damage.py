"""Every kind of damage, done to a real file: no healthy row is lost, and every file is named with what became of it."""

import os
import random
import re
import shutil
from collections import Counter
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.report import summarize_database
from rooms.root import DatabaseProblem
from rooms.store import create_live, read_job
from support import damage
from support.databases import change, query, unpublish
from support.filesystems import powerless_folder
from support.task_files import START_MS, TaskFile, merge_run

from badcjobs import __version__

SAMPLES, CHUNKS = 400, 60
STATES = {f"c{n:03d}": "done" for n in range(CHUNKS)}
WHOLE = {"sample": SAMPLES, "host_sample": SAMPLES, "chunk": CHUNKS, "attempt": CHUNKS, "detection": CHUNKS, "gap": 0}
ROWS = 2 * SAMPLES + 3 * CHUNKS + 3  # and a task, a device, a worker


@dataclass(frozen=True)
class Run:
    """A folder with a healthy task, and one that a test may harm."""

    folder: Path
    victim: Path

    def merge(self, *inputs):
        outcome = merge_run(self.folder, *inputs)
        assert self.counts(1) == {**dict.fromkeys(WHOLE, 1), "sample": 3, "host_sample": 3, "gap": 0}, "the other"
        return {Path(file.path).name: file for file in outcome.files}

    def counts(self, index=0):
        task = "SELECT task_id FROM task WHERE array_index = ?"
        sql = f"SELECT count(*) FROM {{0}} WHERE task_id IN ({task})"
        return {table: query(self.folder / "job.sqlite", sql.format(table), index)[0][0] for table in WHOLE}


def write_healthy(folder):
    return TaskFile(folder, index=1, states={"healthy": "done"}, samples=3).write()


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("template")
    write_healthy(folder)
    TaskFile(folder, index=0, states=STATES, samples=SAMPLES).write()
    return folder


def copy_of(template, folder):
    shutil.copytree(template, folder)
    return Run(folder, folder / "tasks" / "4821_0.r0.gpu1.sqlite")


@pytest.fixture
def run(template, tmp_path):
    return copy_of(template, tmp_path / "run")


def bytes_at(at, content):
    return lambda path: damage.overwrite(path, at, content)


def sql(*statements, live=False):
    """Return what changes a database, which is then published again; ``live``: it was never published."""

    def harm(path):
        if live:
            unpublish(path)
        for statement in statements:
            change(path, statement)

    return harm


SECOND_TASK = """INSERT INTO task (task_id, name, job_id, array_index, restart, node, telemetry, version, started_at_ms)
                 VALUES (7, 'x', '1', 0, 0, 'n', 1, '0', 0)"""
TWICE = [f"INSERT INTO {table} SELECT * FROM {table} LIMIT 1" for table in ("sample", "host_sample")]
EMPTY = [f"DELETE FROM {table}" for table in ("task", "sample", "host_sample")]
HARMS = {
    "nothing": lambda path: None,
    "zero bytes": lambda path: os.truncate(path, 0),
    "a text": lambda path: path.write_text("CANCELLED\n" * 1000),
    "99 bytes": lambda path: os.truncate(path, 99),
    "100 bytes": lambda path: os.truncate(path, 100),
    "another program's": sql("PRAGMA application_id = 7", live=True),
    "a newer schema": sql("PRAGMA user_version = 99", live=True),
    "no rows": sql(*EMPTY),
    "two tasks": sql(SECOND_TASK, live=True),
    "a wrong application": bytes_at(68, b"\0\0\0\7"),
    "a wrong schema": bytes_at(60, b"\0\0\0\x63"),
    "a wrong page size": bytes_at(16, b"\x20\0"),
    "a flipped bit": lambda path: path.write_bytes(path.read_bytes().replace(b"LOUD sound", b"LOUE sound", 1)),
    "a broken list of tables": lambda path: path.write_bytes(
        path.read_bytes().replace(b"CREATE TABLE chunk", b"CREATE TABLE \xd2hunk")
    ),
    "another id of the task": sql("UPDATE task SET task_id = task_id + 1"),
    "a chunk of another task": sql("UPDATE chunk SET task_id = task_id + 1 WHERE rowid = 7"),
    "a live file that has an instant twice": sql(*TWICE, live=True),
    "a lost first page": bytes_at(0, bytes(4096)),
    "a stray journal": lambda path: path.with_name(f"{path.name}-journal").write_bytes(bytes(5000)),
    "a live file with a hot journal": lambda path: damage.leave_hot_journal(unpublish(path)),
    "a published file that another program was changing": damage.leave_hot_journal,
    "a flipped bit and a stray journal": lambda path: [
        HARMS[f"a {kind}"](path) for kind in ("flipped bit", "stray journal")
    ],
    "a wrong byte on every page": lambda path: [
        damage.overwrite(path, at, b"!") for at in range(4000, path.stat().st_size, 4096)
    ],
    "a live file with a log": lambda path: damage.leave_wal(unpublish(path)),
}


def test_what_becomes_of_a_file_is_said_and_it_is_never_changed(template, tmp_path, pages):
    said = []
    for kind, harm in HARMS.items():
        run = copy_of(template, tmp_path / kind)
        harm(run.victim)
        before = {path: path.read_bytes() for path in run.victim.parent.iterdir()}
        file = run.merge()[run.victim.name]
        assert {path: path.read_bytes() for path in run.victim.parent.iterdir()} == before
        reported = "SELECT status, reason FROM source_file WHERE path = ?"
        assert query(run.folder / "job.sqlite", reported, f"tasks/{run.victim.name}") == [(file.status, file.reason)]
        assert query(run.folder / "job.sqlite", "PRAGMA integrity_check") == [("ok",)]
        assert file.lost_something is (file.status in ("skipped", "salvaged"))
        said.append(f"{kind}: {file.status}, {file.rows_lost} rows lost; {file.reason}")
        counts = run.counts()
        said.append(f"    {'all rows' if counts == WHOLE else counts if any(counts.values()) else 'no rows'}")
    text = re.sub(r"[\d,]+ of [\d,]+ bytes", "N of M bytes", "\n".join(said))
    pages({"files.txt": text.replace(__version__, "VERSION").replace("0.1.0", "VERSION")})
    before = run.victim.stat()
    damage.leave_wal(run.victim, rows=7)
    os.utime(run.victim, ns=(before.st_atime_ns, before.st_mtime_ns))  # only the log has changed
    run.merge()
    assert run.counts()["gap"] >= 7, "a log that grows is read again"


PLACES = st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=3)


@given(kind=st.sampled_from(["cut", "zeros", "noise", "flips"]), places=PLACES)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_noticed_counted_and_healed_by_an_earlier_merge_or_the_whole_file(
    template, tmp_path_factory, kind, places
):
    run = copy_of(template, tmp_path_factory.mktemp("any") / "run")
    whole, pages = run.victim.read_bytes(), damage.page_count(run.victim)
    for place in places:
        if kind == "cut":
            damage.truncate(run.victim, place)
        elif kind == "flips":
            at = int(place * len(whole))
            damage.overwrite(run.victim, at, bytes([whole[at] ^ 1 << at % 8]))
        else:
            (damage.zero_page if kind == "zeros" else damage.garbage_page)(run.victim, 1 + int(place * pages))
    damaged = run.victim.read_bytes()
    file = run.merge()[run.victim.name]
    if damaged != whole and file.status != "skipped":
        assert (file.status, file.lost_something) == ("salvaged", True)
        assert file.rows_lost is None or file.rows_lost >= ROWS - 3 - sum(run.counts().values())
    os.utime(run.victim, (1, 1))
    run.victim.write_bytes(whole)
    assert run.merge()[run.victim.name].status == "merged", "a file that is repaired is read again"
    assert run.counts() == WHOLE
    run.victim.write_bytes(damaged)
    run.merge()
    assert run.counts() == WHOLE, "what an earlier merge had is not lost"


def harm_at_random(path, chance):
    """Flip a bit, cut the file off, or fill a page with zeros or with one of any task."""
    kind, at = chance.choice(("flip", "flip", "flip", "cut", "zeros", "stray", "stray")), chance.random()
    page = int(at * damage.page_count(path))
    if kind == "cut":
        damage.truncate(path, at)
    elif kind == "zeros":
        damage.zero_page(path, 1 + page)
    elif kind == "stray":
        stray = chance.choice(sorted(path.parent.glob("*.sqlite"))).read_bytes()
        start = damage.PAGE * chance.randrange(1 + len(stray) // damage.PAGE)
        damage.overwrite(path, damage.PAGE * page, stray[start : start + damage.PAGE])
    else:
        at = int(at * path.stat().st_size)
        damage.overwrite(path, at, bytes([path.read_bytes()[at] ^ 1 << chance.randrange(8)]))


SAME_CHUNK = "SELECT task_id, recording_id, chunk_id, source_path, start_ms, end_ms, ended_at_ms, audio_s FROM chunk"
WRITTEN = {table: f"SELECT * FROM {table}" for table in ("sample", "host_sample", "attempt", "detection", "worker")}
WRITTEN |= {"chunk": SAME_CHUNK}  # it may be pending again


def test_no_damaged_byte_in_any_file_costs_a_row_of_a_healthy_one_or_makes_a_row(tmp_path, seed):
    """300 files, each damaged in one place; by hand with other places: BADCJOBS_TEST_SEED=7 pytest -k damaged_byte."""
    chance = random.Random(seed)
    files = [TaskFile(tmp_path / "start", index=n, states=dict.fromkeys("ab", "done")).write() for n in range(17)]
    tables = ("sample", "attempt", "host_sample", "device_time")
    rows = [(table, Counter(query(path, f"SELECT * FROM {table}"))) for table in tables for path in files[:2]]
    written = {table: {row for path in files for row in query(path, sql)} for table, sql in WRITTEN.items()}
    for number in range(20):
        run = shutil.copytree(tmp_path / "start", tmp_path / str(number))
        for path in files[2:]:
            harm_at_random(run / "tasks" / path.name, chance)
        statuses = {Path(file.path).name: file.status for file in merge_run(run).files}
        assert [statuses.pop(path.name) for path in files[:2]] == ["merged"] * 2
        whole = {path.name for path in files if path.read_bytes() == (run / "tasks" / path.name).read_bytes()}
        assert {name for name, status in statuses.items() if status == "merged"} <= whole
        got = {table: Counter(query(run / "job.sqlite", f"SELECT * FROM {table}")) for table in tables}
        assert all(healthy <= got[table] for table, healthy in rows)
        for table, sql in WRITTEN.items():
            assert written[table].issuperset(query(run / "job.sqlite", sql)), table
        assert query(run / "job.sqlite", "PRAGMA integrity_check") == [("ok",)]
        summary = summarize_database(run / "job.sqlite")
        assert {Path(path).name for path, _ in summary.facts.file_remarks} == set(statuses) - whole


def test_values_that_rot_after_a_good_merge_do_not_replace_those_that_were_right(run):
    run.merge()
    job, victim = run.folder / "job.sqlite", run.victim
    before = Counter(query(job, "SELECT * FROM detection"))
    victim.write_bytes(victim.read_bytes().replace(b"LOUD", b"LOUE"))
    assert run.merge()[victim.name].status == "kept"
    assert Counter(query(job, "SELECT * FROM detection")) == before
    os.truncate(victim, 0)
    file = run.merge()[victim.name]
    assert (file.status, file.reason) == ("kept", "kept from an earlier merge; the file now: the file is empty")
    assert (file.lost_something, run.counts()) == (True, WHOLE)
    assert Counter(query(job, "SELECT * FROM detection")) == before


def test_a_later_publication_that_is_damaged_takes_back_no_chunk_that_is_done(tmp_path):
    half = {chunk: "done" if chunk < "c030" else "pending" for chunk in STATES}
    task = TaskFile(tmp_path, states=half, samples=50, ended_at_ms=None)
    task.write()
    merge_run(tmp_path)
    done = "SELECT chunk_id FROM chunk WHERE status = 'done' ORDER BY 1"
    detections = Counter(query(tmp_path / "job.sqlite", "SELECT * FROM detection"))
    task.states, task.samples, task.ended_at_ms = STATES, 200, START_MS + 500_000
    late = task.write()
    whole = late.read_bytes()
    for chunk, status in ((b"c003.wav", "kept"), (b"c050.wav", "salvaged")):
        late.write_bytes(whole)
        damage.zero_page(late, damage.page_with(late, chunk))
        assert [file.status for file in merge_run(tmp_path).files] == [status]
        assert {f"c{n:03d}" for n in range(30)} <= {chunk for (chunk,) in query(tmp_path / "job.sqlite", done)}
        assert detections <= Counter(query(tmp_path / "job.sqlite", "SELECT * FROM detection"))


def test_a_half_published_copy_is_salvaged_only_when_named(run):
    half = run.victim.with_name(f".{run.victim.name}.gpu1.99.tmp")
    run.victim.rename(half)
    damage.truncate(half, 0.87)
    assert list(run.merge()) == ["4821_1.r0.gpu1.sqlite"]
    assert run.merge(half)[half.name].status == "salvaged"
    saved, job = run.counts(), run.folder / "job.sqlite"
    samples = "SELECT samples FROM device_summary JOIN task USING (task_id) WHERE array_index = 0"
    assert query(job, samples) == [(saved["sample"],)] and 0 < saved["sample"] < SAMPLES
    assert (ROWS // 3 < sum(saved.values()) < ROWS, read_job(job).lossy_files) == (True, 1)


def test_what_is_no_file_is_named_every_time_and_what_may_not_be_read_is_read_when_we_may():
    with powerless_folder() as folder:
        other = write_healthy(folder)
        closed = TaskFile(folder, index=0, states=STATES).write()
        hidden = TaskFile(folder / "tasks" / "more", index=2, states={"z": "done"}).write().parent
        odd = [folder / "tasks" / f"{name}.sqlite" for name in ("gone", "pipe", "empty", "huge")]
        odd[0].symlink_to("nowhere")
        os.mkfifo(odd[1])
        with closing(create_live(odd[2])) as db:
            db.execute("PRAGMA journal_mode = DELETE")
        odd[3].write_bytes(other.read_bytes())
        os.truncate(odd[3], 50 << 30)  # reading it would take minutes
        (folder / "tasks" / "folder.sqlite").mkdir()
        never = f"not a badcjobs database: 53,687,091,200 bytes instead of {other.stat().st_size:,}"
        closed.chmod(0)
        hidden.chmod(0)
        run, denied = Run(folder, closed), "the folder cannot be read: Permission denied"
        for _ in range(2):
            assert {name: file.reason for name, file in run.merge().items() if file.lost_something} == {
                closed.name: "Permission denied", "gone.sqlite": "No such file or directory",
                "pipe.sqlite": "not a file", "empty.sqlite": "it contains no task", "huge.sqlite": never,
                hidden.name: f"{denied}; its files are not merged. try: ls -ld {hidden}",
            }  # fmt: skip
        closed.chmod(0o600)
        hidden.chmod(0o700)
        for path in odd:
            path.unlink()
        (folder / "tasks" / "folder.sqlite").rmdir()
        assert {file.status for file in run.merge().values()} == {"merged"}
        assert run.counts()["chunk"] == CHUNKS
        closed.chmod(0)
        write_healthy(folder)
        assert run.merge()[closed.name].status == "merged", "it has not changed: no one needs to open it"
        closed.chmod(0o600)
        (folder / "job.sqlite").unlink()
        other.parent.chmod(0)
        with pytest.raises(DatabaseProblem, match="none of the given files is a readable task database") as caught:
            merge_run(folder)
        assert f"tasks: {denied}" in (caught.value.why or "")
        with pytest.raises(DatabaseProblem, match="cannot be read") as caught:
            merge_run(folder, other)
        assert (caught.value.fix, (folder / "job.sqlite").exists()) == (f"ls -ld {other.parent}", False)


def test_of_damaged_copies_and_earlier_publications_the_one_with_most_rows_counts_in_any_order(tmp_path):
    task = TaskFile(tmp_path / "t", states=dict.fromkeys(STATES, "pending"), samples=50, ended_at_ms=None)
    earlier = Path(shutil.copy(task.write(), tmp_path / "earlier.sqlite"))
    task.states, task.samples, task.ended_at_ms = STATES, 200, START_MS + 500_000
    late = task.write()
    bad = Path(shutil.copy(late, tmp_path / "bad.sqlite"))
    damage.zero_page(bad, damage.table_leaves(late)[-3])
    tables = ("task", "chunk", "attempt", "detection", "sample", "host_sample", "worker", "device", "device_time")
    wanted = {}
    for number, order in enumerate(([bad], [earlier, bad], [bad, earlier], [late], [bad, late], [late, earlier, bad])):
        for path in order:
            outcome = merge_run(tmp_path, path, target=f"{number}/job.sqlite")
        rows = {table: Counter(query(tmp_path / f"{number}/job.sqlite", f"SELECT * FROM {table}")) for table in tables}
        best = "late" if late in order else "bad"
        assert rows == wanted.setdefault(best, rows), order
        assert Counter(file.status for file in outcome.files)["copy"] == len(order) - 1
    assert wanted["bad"]["sample"] <= wanted["late"]["sample"]


def test_a_whole_file_with_a_chunk_that_a_damaged_one_has_lost_counts_in_any_order(tmp_path):
    half = {chunk: "done" if chunk < "c030" else "pending" for chunk in STATES}
    task = TaskFile(tmp_path / "t", states=half, samples=50, ended_at_ms=None)
    whole = Path(shutil.copy(task.write(), tmp_path / "whole.sqlite"))
    task.states, task.samples, task.ended_at_ms = STATES, 200, START_MS + 500_000
    bad = task.write()
    damage.zero_page(bad, damage.page_with(bad, b"c003.wav"))
    rival = TaskFile(tmp_path, restart=1, states=STATES, started_at_ms=START_MS - 1).write()  # it has them done, too
    for number, order in enumerate(([whole, bad], [bad, whole], [rival, whole, bad], [rival, bad, whole])):
        for path in order:
            statuses = {
                Path(file.path).name: file.status for file in merge_run(tmp_path, path, target=str(number)).files
            }
        wanted = {rival.name: "merged", whole.name: "merged", bad.name: "copy"}
        assert statuses == {path.name: wanted[path.name] for path in order}, order


def test_detections_of_a_chunk_whose_row_is_lost_are_not_doubled_by_a_second_attempt(tmp_path):
    first = TaskFile(tmp_path, states=STATES, samples=5).write()
    second = TaskFile(tmp_path, restart=1, states=STATES, samples=5, chunk_ended_at_ms=START_MS + 9000).write()
    damage.zero_page(first, damage.page_with(first, b"c030.wav"))
    for number, inputs in enumerate(([tmp_path / "tasks"], [first, second], [second, first])):
        for path in inputs:
            merge_run(tmp_path, path, target=f"{number}.sqlite")
        sums = "SELECT count(*), (SELECT sum(detections) FROM chunk) FROM detection"
        assert query(tmp_path / f"{number}.sqlite", sums) == [(CHUNKS, CHUNKS)], inputs
