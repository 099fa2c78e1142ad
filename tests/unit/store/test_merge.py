"""Merging: the job database follows from the set of tasks, however often and in whatever order they were merged."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.model import HostReading
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import (
    JOB_TABLES,
    MergeOrder,
    MergeOutcome,
    TaskWriter,
    columns_of,
    merge,
    open_job_database,
    remove_merged_files,
)
from rooms.telemetry import TelemetryWriter
from support.databases import query
from support.mounts import lie_about_filesystem
from support.task_files import START_MS, TaskFile

Rows = Counter[tuple[Any, ...]]


def merged(run: Path, *inputs: Path, target: str = "job.sqlite") -> MergeOutcome:
    return merge(MergeOrder(inputs or [run], run / target), SystemClock())


def statuses(outcome: MergeOutcome) -> dict[str, str]:
    return {Path(file.path).name: file.status for file in outcome.files}


def reasons(outcome: MergeOutcome) -> dict[str, str | None]:
    return {Path(file.path).name: file.reason for file in outcome.files if file.status != "merged"}


def count(run: Path, table: str, where: str = "true") -> int:
    return int(query(run / "job.sqlite", f"SELECT count(*) FROM {table} WHERE {where}")[0][0])


# --- any order, any number of times -----------------------------------------------------------------------------------

CHUNKS = ("a", "b", "c", "d", "e")
STRENGTH = ("skipped", "pending", "failed", "poison", "done")  # a later one beats an earlier one
SECONDS = ((0, 5), (0, 5), (2, 5), (0, 7), (3, 4), (0, 5))  # when each task starts, and when its chunks end


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Path]]:
    """Publications of six tasks that disagree about their chunks: one while it runs, one after its end."""
    files = []
    for n, (start_s, end_s) in enumerate(SECONDS):
        states = {name: STRENGTH[(n * (place + 2) + place) % 5] for place, name in enumerate(CHUNKS[n % 2 :])}
        publications = []
        for late in (0, 1):
            task = TaskFile(
                tmp_path_factory.mktemp("pool"), index=n // 2, restart=n % 2, labels=(f"L{n}",) * (n + 1),
                states=states if late else dict.fromkeys(states, "pending"), samples=2 + late, devices=n % 3,
                started_at_ms=START_MS + 1000 * start_s, chunk_ended_at_ms=START_MS + 1000 * end_s,
                ended_at_ms=START_MS + 9000 if late else None, gaps=[(n, n + 1, "x")] * late,
            )  # fmt: skip
            publications.append(task.write())
            os.utime(publications[-1], (START_MS // 1000 + late,) * 2)
        files.append((publications[0], publications[1]))
    return files


def rows_of(path: Path, table: str) -> list[dict[str, Any]]:
    return [dict(zip(columns_of(table), row, strict=True)) for row in query(path, f"SELECT * FROM {table}")]


def expected(files: list[Path]) -> dict[str, Rows]:
    """Return what the rule makes of files: every row of every task, and for each chunk the strongest result."""
    found: dict[str, Rows] = {table.name: Counter() for table in JOB_TABLES}
    results: dict[tuple[str, str], list[tuple[Any, ...]]] = {}
    for path in files:
        ((started_ms,),) = query(path, "SELECT started_at_ms FROM task")
        for name in (name for name in found if name not in ("meta", "source_file", "task_meta", "chunk", "detection")):
            if not name.startswith("rival_"):
                found[name].update(tuple(row.values()) for row in rows_of(path, name))
        for row in rows_of(path, "chunk"):
            strength = (STRENGTH.index(row["status"]), row["ended_at_ms"] or 0, started_ms, row["task_id"])
            heard = [d for d in rows_of(path, "detection") if d["chunk_id"] == row["chunk_id"]]
            results.setdefault((row["recording_id"], row["chunk_id"]), []).append((strength, row, heard))
    for rivals in results.values():
        ordered = sorted(rivals, key=lambda rival: rival[0])
        for place, (_, row, heard) in enumerate(ordered, 1):
            rival = "" if place == len(ordered) else "rival_"
            found[f"{rival}chunk"][tuple(row.values())] += 1
            found[f"{rival}detection"].update(tuple(d.values()) for d in heard)
    return found


def content(job: Path) -> dict[str, Rows]:
    return {
        table.name: Counter(query(job, f"SELECT * FROM {table.name}"))
        for table in JOB_TABLES
        if table.name not in ("meta", "source_file", "task_meta")
    }


STEP = st.tuples(st.integers(0, len(SECONDS) - 1), st.integers(0, 1), st.booleans(), st.booleans(), st.booleans())


@given(steps=st.lists(STEP, min_size=1, max_size=5), kind=st.sampled_from(["xfs", "lustre"]))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_history_of_publications_copies_and_merges_gives_what_the_rule_says(
    pool: list[tuple[Path, Path]], tmp_path_factory: pytest.TempPathFactory, steps: list[Any], kind: str
) -> None:
    run = tmp_path_factory.mktemp("run")
    newest: dict[int, int] = {}
    with pytest.MonkeyPatch.context() as patch:
        lie_about_filesystem(patch, run, kind)
        for task, late, as_copy, alone, twice in steps:
            late = max(late, newest.get(task, 0)) if not as_copy else late  # a published file only grows
            name = f"{'copy' if as_copy else 'task'}{task}.{late * as_copy}.sqlite"
            path = Path(shutil.copy2(pool[task][late], run / name))
            newest[task] = max(late, newest.get(task, 0))
            for _ in range(1 + twice):
                merged(run, *([path] if alone else []))
        outcome = merged(run)
        assert merged(run).read == 0, "nothing has changed"
    files = [pool[task][late] for task, late in newest.items()]
    assert content(run / "job.sqlite") == {
        name: rows for name, rows in expected(files).items() if name not in ("meta", "source_file", "task_meta")
    }
    assert set(statuses(outcome).values()) <= {"merged", "copy"}
    assert sum(file.status == "merged" for file in outcome.files) == len(files)
    once = run / "once"
    once.mkdir()
    merge(MergeOrder([run], once / "job.sqlite"), SystemClock())
    told = "SELECT replace(path, ?, ''), task_id, status, rows, rows_lost, last_sign_ms, checksum FROM source_file"
    assert sorted(query(once / "job.sqlite", told, f"{run}/")) == sorted(query(run / "job.sqlite", told, f"{run}/"))


def test_every_pair_of_states_and_every_tie_has_the_winner_of_the_rule(tmp_path: Path) -> None:
    """One chunk per pair, in two tasks of which the weaker one starts and ends later: that does not help it."""
    pairs = {f"{weak}-{strong}": (weak, strong) for n, strong in enumerate(STRENGTH) for weak in STRENGTH[:n]}
    TaskFile(tmp_path, index=0, states={name: strong for name, (_, strong) in pairs.items()}, samples=0).write()
    later = {"started_at_ms": START_MS + 1000, "chunk_ended_at_ms": START_MS + 99_000}
    weak = {name: weak for name, (weak, _) in pairs.items()}
    TaskFile(tmp_path, index=1, states={**weak, "tie": "done"}, samples=0, **later).write()
    TaskFile(tmp_path, index=2, states={"tie": "done"}, samples=0, chunk_ended_at_ms=START_MS + 99_001).write()
    merged(tmp_path)
    won = query(tmp_path / "job.sqlite", "SELECT chunk_id, status, array_index FROM chunk JOIN task USING (task_id)")
    assert sorted(won) == sorted([*((name, strong, 0) for name, (_, strong) in pairs.items()), ("tie", "done", 2)])


def test_a_winner_that_is_replaced_by_hand_gives_way_to_the_strongest_of_its_rivals(tmp_path: Path) -> None:
    for index, label in ((1, "SECOND"), (2, "THIRD")):
        ended = START_MS + 6_000 + index
        TaskFile(tmp_path, index=index, states={"a": "done"}, labels=(label,), chunk_ended_at_ms=ended).write()
    first = TaskFile(tmp_path, states={"a": "done"}, labels=("FIRST",), chunk_ended_at_ms=START_MS + 9_000)
    for state, heard, rivals in (
        ("done", "FIRST", ["SECOND", "THIRD"]),
        ("pending", "THIRD", ["SECOND"]),
        ("done", "FIRST", ["SECOND", "THIRD"]),
    ):
        first.states = {"a": state}
        first.write()
        merged(tmp_path)
        job = tmp_path / "job.sqlite"
        assert query(job, "SELECT label, detections FROM detection JOIN chunk USING (chunk_id)") == [(heard, 1)]
        assert query(job, "SELECT label FROM rival_detection ORDER BY 1") == [(label,) for label in rivals]


# --- which files ------------------------------------------------------------------------------------------------------


def test_only_what_has_changed_is_read_and_every_row_is_counted_while_it_is_copied(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}).write() for n in range(5)]
    told: list[tuple[int, int, int]] = []
    order = MergeOrder([tmp_path], tmp_path / "job.sqlite", progress=lambda *counts: told.append(counts))
    assert merge(order, SystemClock()).read == 5
    rows = sum(query(path, "SELECT sum(value) FROM json_each((SELECT value FROM meta WHERE key = 'rows'))")[0][0]
               for path in files)  # fmt: skip
    assert told == [(n, 5, rows * n // 5) for n in range(1, 6)]
    before = (tmp_path / "job.sqlite").stat()
    assert merged(tmp_path).read == 0
    after = (tmp_path / "job.sqlite").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it was written for nothing"
    touched = files[2].stat().st_mtime_ns + 1
    os.utime(files[2], ns=(touched, touched))
    files[3].write_bytes(files[3].read_bytes() + b"x")
    TaskFile(tmp_path, index=9, states={"late": "done"}).write()
    assert merged(tmp_path).read == 3
    assert count(tmp_path, "task") == 6


def test_files_folders_links_and_odd_names_are_found_once_and_their_content_is_never_touched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    run, other = tmp_path / "run", TaskFile(tmp_path / "august", index=7, states={"b": "done"}).write()
    files = [TaskFile(run, index=index, states={"a": "done"}).write() for index in range(3)]
    os.rename(files[2], os.fsencode(files[2].parent) + b"/bad\xff.sqlite")  # noqa: PTH104
    for name in (f".{files[0].name}.gpu1.99.tmp", ".hidden.sqlite", "notes.txt", "elsewhere/job.sqlite"):
        (run / "tasks" / name).parent.mkdir(exist_ok=True)
        (run / "tasks" / name).touch()
    (run / "tasks" / ".live-x").mkdir()
    shutil.copy(files[0], run / "tasks" / ".live-x" / "wrapper.sqlite")
    merge(MergeOrder([run / "tasks"], run / "backup.sqlite"), SystemClock())
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in [*files[:2], other]}
    outcome = merged(run, run / "tasks" / ".." / "tasks" / files[1].name, run, other)
    assert {file.path: file.status for file in outcome.files} == {
        str(other): "merged", "backup.sqlite": "skipped", "tasks/4821_0.r0.gpu1.sqlite": "merged",
        "tasks/4821_1.r0.gpu1.sqlite": "merged", "tasks/bad\\udcff.sqlite": "merged",
    }  # fmt: skip
    assert not any(file.lost_something for file in outcome.files), "a job database is no task"
    assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in before} == before
    shutil.move(run, tmp_path / "moved")
    assert merged(tmp_path / "moved").read == 0, "paths are relative to the job database"
    assert sorted(path.name for path in (tmp_path / "moved").iterdir()) == ["backup.sqlite", "job.sqlite", "tasks"]
    assert list((tmp_path / "scratch").iterdir()) == []


def test_a_file_that_is_gone_or_belongs_to_another_task_now_keeps_the_rows_it_gave(tmp_path: Path) -> None:
    first = TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    second = TaskFile(tmp_path, index=1, states={"b": "done"}).write()
    text = tmp_path / "tasks" / "text.sqlite"
    text.write_text("no database")
    merged(tmp_path)
    first.unlink()
    text.unlink()
    shutil.copy(TaskFile(tmp_path / "x", index=2, states={"c": "done"}).write(), second)
    for _ in range(2):
        assert statuses(merged(tmp_path, tmp_path / "tasks")) == {
            first.name: "merged", second.name: "merged",
            f"{second.name} (before 4821_2.r0.gpu1 replaced it)": "merged",
        }  # fmt: skip
        assert query(tmp_path / "job.sqlite", "SELECT chunk_id FROM detection ORDER BY 1") == [("a",), ("b",), ("c",)]


def test_another_task_of_the_same_name_is_named_and_never_taken_for_a_copy(tmp_path: Path) -> None:
    first = TaskFile(tmp_path / "one", states={"a": "done"}).write()
    second = TaskFile(tmp_path / "two", states={"b": "done"}, started_at_ms=START_MS + 5000).write()
    outcome = merged(tmp_path, first, second)
    assert {file.path: file.reason for file in outcome.files if file.lost_something} == {
        "two/tasks/4821_0.r0.gpu1.sqlite": "another task of the same name as the one in "
        "one/tasks/4821_0.r0.gpu1.sqlite; merge it into another job database"
    }
    assert query(tmp_path / "job.sqlite", "SELECT chunk_id FROM chunk") == [("a",)]


def test_live_files_left_behind_complete_the_published_one_and_take_nothing_away(tmp_path: Path) -> None:
    task = TaskFile(tmp_path, states={"a": "done", "b": "pending"}, samples=5, ended_at_ms=None)
    published, left, key = task.write(), tmp_path / "left", task.key
    left.mkdir()
    ((device_id,),) = query(published, "SELECT device_id FROM device")
    later = TaskFile(tmp_path / "x", states={"a": "done", "b": "done"}, samples=0, ended_at_ms=None).write()
    wrapper, recorder = left / "wrapper.sqlite", left / "recorder.sqlite"
    TaskWriter(wrapper, key).close()
    with closing(sqlite3.connect(wrapper, isolation_level=None)) as db:
        db.execute("ATTACH ? AS later", (str(later),))
        for table in ("task", "device", "worker", "chunk", "attempt", "detection"):
            db.execute(f"INSERT INTO {table} SELECT * FROM later.{table}")
    with closing(TelemetryWriter(recorder, key.task_id)) as telemetry:
        for tick in range(9):
            telemetry.write_tick(START_MS + tick * 1000, [(device_id, task.reading)], HostReading(1.0, 2, 3))
    for order in ([published, left], [recorder, wrapper, published], [published, recorder, wrapper]):
        (tmp_path / "job.sqlite").unlink(missing_ok=True)
        if order[0] == recorder:
            TaskFile(tmp_path, index=5, states={"z": "done"}).write()
            alone = merged(tmp_path, recorder, tmp_path / "tasks" / "4821_5.r0.gpu1.sqlite")
            assert reasons(alone) == {recorder.name: "a recorder's live file; the file of its task was not given"}
        for place in order:
            merged(tmp_path, place)
        outcome = merged(tmp_path, *order)
        ours = f"task_id = {key.task_id}"
        assert [count(tmp_path, table, ours) for table in ("sample", "host_sample", "chunk", "detection")] == [
            9,
            9,
            2,
            2,
        ]
        assert count(tmp_path, "chunk", f"{ours} AND status = 'done'") == 2
        assert not any(file.lost_something for file in outcome.files), outcome.files
        assert query(tmp_path / "job.sqlite", f"SELECT samples FROM device_total WHERE {ours}") == [(9,)]
        assert remove_merged_files(tmp_path / "job.sqlite", outcome.given).removed == ()


def test_a_file_that_is_published_again_while_it_is_merged_is_read_as_one_or_the_other(tmp_path: Path) -> None:
    tasks = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}, samples=30) for n in range(3)]
    for task in tasks:
        task.write()
    again = tasks[2].path.with_name("again")

    def publish_again(files: int, of: int, rows: int) -> None:
        tasks[2].samples += 5
        tasks[2].path.rename(again)
        tasks[2].write()

    outcome = merge(MergeOrder([tmp_path], tmp_path / "job.sqlite", progress=publish_again), SystemClock())
    assert set(statuses(outcome).values()) == {"merged"}
    assert count(tmp_path, "sample") in (95, 100)
    assert merged(tmp_path).read <= 1
    assert count(tmp_path, "sample") == 60 + tasks[2].samples


# --- what may be replaced ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "more", "in_place"),
    [("xfs", 1, True), ("tmpfs", 10, True), ("xfs", 11, False), ("lustre", 1, False), ("shinyfs", 1, False)],
)
def test_a_job_database_is_changed_in_place_only_for_a_few_files_on_a_disk_that_is_known_to_be_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, more: int, in_place: bool
) -> None:
    lie_about_filesystem(monkeypatch, tmp_path, kind)
    TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    merged(tmp_path)
    with (tmp_path / "job.sqlite").open("rb") as still_open:
        before = still_open.read()
        for index in range(1, more + 1):
            TaskFile(tmp_path, index=index, states={f"b{index}": "done"}).write()
        merged(tmp_path)
        still_open.seek(0)
        assert (still_open.read() != before) is in_place
    assert count(tmp_path, "chunk") == more + 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sqlite", "tasks"]
    journal = tmp_path / "job.sqlite-journal"
    journal.write_bytes(b"left by a merge on another node")
    open_job_database(tmp_path / "job.sqlite").close()
    assert journal.exists() is (kind in ("lustre", "shinyfs")), "a reader changes nothing that others see"


def test_in_place_is_not_for_files_without_a_seal_nor_where_a_reader_does_not_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inode() -> int:
        return (tmp_path / "job.sqlite").stat().st_ino

    def unsealed(index: int, restart: int = 0) -> Path:
        path = TaskFile(tmp_path, index=index, restart=restart, states={f"u{index}": "done"}).write()
        with closing(sqlite3.connect(path)) as db, db:
            db.execute("PRAGMA secure_delete = ON")
            db.execute("DELETE FROM meta WHERE key = 'seal'")
        return path

    TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    merged(tmp_path)
    with (tmp_path / "job.sqlite").open("rb"):  # so that its number is not given to the next one
        before = inode()
        unsealed(1)
        merged(tmp_path)
        assert inode() != before
    with (tmp_path / "job.sqlite").open("rb"):
        before = inode()
        TaskFile(tmp_path, index=1, states={"u1": "done"}, samples=9).write()  # its old rows have no seal
        merged(tmp_path)
        assert inode() != before
    connect = sqlite3.connect  # with a hundredth of the patience
    monkeypatch.setattr(sqlite3, "connect", lambda *a, timeout=5.0, **more: connect(*a, timeout=timeout / 100, **more))
    with closing(connect(tmp_path / "job.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM task").fetchone() == (2,)
        TaskFile(tmp_path, index=2, states={"b": "done"}).write()
        merged(tmp_path)
        assert reader.execute("SELECT count(*) FROM task").fetchone() == (2,)
    assert (count(tmp_path, "task"), count(tmp_path, "sample")) == (3, 3 + 9 + 3)


# What a disk that does not keep everything would do to a table, as a trigger.
LOSE = "CREATE TRIGGER lose AFTER INSERT ON {0} BEGIN DELETE FROM {0} WHERE {1}; END"
TWICE = """CREATE TRIGGER twice AFTER INSERT ON {0} WHEN new.label != 'AGAIN' BEGIN
    INSERT INTO {0} (task_id, recording_id, chunk_id, start_ms, end_ms, label)
    VALUES (new.task_id, new.recording_id, new.chunk_id, 0, 1, 'AGAIN'); END"""
HARM = {
    ("host_sample", 1): (LOSE, "3, in job.sqlite: 0"), ("attempt", 1): (LOSE, "1, in job.sqlite: 0"),
    ("sample", 1): (LOSE, "3, in job.sqlite: 0"), ("gap", 11): (LOSE, "1, in job.sqlite: 0"),
    ("attempt", 11): (LOSE, "1, in job.sqlite: 0"), ("chunk", 1): (LOSE, "1, in job.sqlite: 0"),
    ("detection", 1): (TWICE, "1, in job.sqlite: 2"),
}  # fmt: skip


@pytest.mark.parametrize("harm", HARM, ids=str)
def test_rows_that_do_not_arrive_or_arrive_twice_are_an_error_and_the_old_file_stays(
    tmp_path: Path, harm: tuple[str, int]
) -> None:
    (table, more), (trigger, words) = harm, HARM[harm]
    TaskFile(tmp_path, index=0, states={"a": "done"}).write()
    merged(tmp_path)
    same = {"host_sample": "at_ms = new.at_ms", "attempt": "attempt_id = new.attempt_id"}
    with closing(sqlite3.connect(tmp_path / "job.sqlite")) as db, db:
        db.execute(trigger.format(table, same.get(table, "rowid = new.rowid")))
    before = (tmp_path / "job.sqlite").read_bytes()
    for index in range(1, more + 1):
        TaskFile(tmp_path, index=index, states={f"b{index}": "done"}, gaps=[(1, 2, "x")]).write()
    with pytest.raises(DatabaseProblem, match=f"the row check .* failed: {table} rows in its file: {words}") as refused:
        merged(tmp_path)
    assert refused.value.exit_code == 4
    assert (tmp_path / "job.sqlite").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sqlite", "tasks"], "no draft, journal or lock"


def test_two_readings_of_one_instant_do_not_cost_the_task(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}, samples=2).write()
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("sample", "host_sample"):
            db.execute(f"INSERT INTO {table} SELECT * FROM {table} LIMIT 1")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("DELETE FROM meta WHERE key IN ('seal', 'rows')")
    assert reasons(merged(tmp_path)) == {}
    assert (count(tmp_path, "sample"), count(tmp_path, "host_sample")) == (3, 2)


def forge(path: Path, at: int, value: bytes) -> None:
    content = bytearray(path.read_bytes())
    content[at : at + 4] = value
    path.write_bytes(content)


def refusals(run: Path) -> Iterator[tuple[Path, str]]:
    """Yield targets that merge never replaces, and why."""
    task = TaskFile(run, states={"a": "done"}).write()
    for name, at, value, why in (
        ("task.sqlite", 68, b"BADC", "a task database, not a job database"),
        ("other.sqlite", 68, b"\0\0\0\7", "another program's database, not a job database"),
        ("newer.sqlite", 60, b"\0\0\0\x63", "has schema 99"),
    ):
        if name == "newer.sqlite":
            merged(run, run / "tasks", target=name)
        else:
            shutil.copy(task, run / name)
        forge(run / name, at, value)
        yield run / name, why
    (run / "manifest.csv").write_text("precious")
    yield run / "manifest.csv", "is not a database"


def test_merge_never_replaces_what_is_not_its_own_and_says_what_it_cannot_write(tmp_path: Path) -> None:
    for target, why in refusals(tmp_path):
        before = target.read_bytes()
        with pytest.raises(DatabaseProblem, match=why) as refused:
            merge(MergeOrder([tmp_path / "tasks"], target), SystemClock())
        assert (refused.value.why, refused.value.exit_code) == ("merge would replace it", 4)
        assert target.read_bytes() == before
    cases = {
        ("tasks", "manifest.csv/job.sqlite"): ("cannot be written", "badcjobs merge … -o /a/folder/with/space/job"),
        ("tasks", "."): ("is a folder", f"badcjobs merge … -o {tmp_path}/job.sqlite"),
        ("one two", "x.sqlite"): ("one, .*/two do not exist", f"ls {tmp_path}"),
        ("one/two/three", "x.sqlite"): ("one/two/three does not exist", f"ls {tmp_path}"),
        ("empty", "x.sqlite"): ("no task database in .*/empty", "badcjobs merge RUN_FOLDER "),
    }
    (tmp_path / "empty").mkdir()
    for (inputs, target_name), (words, fix) in cases.items():
        with pytest.raises(DatabaseProblem, match=words) as refused:
            merge(MergeOrder([tmp_path / name for name in inputs.split()], tmp_path / target_name), SystemClock())
        assert (refused.value.fix or "").startswith(fix)
    merge(MergeOrder([tmp_path / "tasks"], tmp_path / "new" / "folder" / "job.sqlite"), SystemClock())
    assert (tmp_path / "new" / "folder" / "job.sqlite").is_file()


def test_a_job_database_that_cannot_be_read_is_put_aside_and_never_overwrites_another(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}).write()
    for number, text in enumerate(("first", "second"), 1):
        (tmp_path / "job.sqlite").write_text(text)
        outcome = merged(tmp_path)
        aside = "job.sqlite.damaged" + (".2" if number == 2 else "")
        assert statuses(outcome) == {path.name: "merged", aside: "skipped"}
        assert [file.path for file in outcome.files if file.lost_something] == [aside]
        assert (tmp_path / aside).read_text() == text
    assert statuses(merged(tmp_path)) == {path.name: "merged", aside: "skipped"}
    (tmp_path / aside).unlink()
    assert statuses(merged(tmp_path)) == {path.name: "merged"}, "what is gone is forgotten"


def test_a_disk_that_fills_up_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    """No file may grow beyond a limit, as on a full disk."""
    import resource

    for index in range(3):
        TaskFile(tmp_path, index=index, states={f"c{n}": "done" for n in range(100)}, samples=400).write()
    merged(tmp_path)
    size = (tmp_path / "job.sqlite").stat().st_size
    (tmp_path / "job.sqlite").write_bytes(b"old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for share in (0.3, 0.95):
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(share * size), hard))
        try:
            with pytest.raises(DatabaseProblem, match="cannot be written") as refused:
                merged(tmp_path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert refused.value.fix == "badcjobs merge … -o /a/folder/with/space/job.sqlite"
        assert (tmp_path / "job.sqlite").read_bytes() == b"old"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sqlite", "tasks"]


# --- removing merged files --------------------------------------------------------------------------------------------


def test_merged_files_are_removed_only_when_their_rows_are_safe_and_found_by_later_runs(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={"a": "done", f"c{n}": "done"}).write() for n in range(6)]
    files.append(Path(shutil.copy(files[5], tmp_path / "tasks" / "z-copy.sqlite")))
    running = TaskFile(tmp_path, index=7, states={"r": "done"}, ended_at_ms=None).write()
    unsealed = TaskFile(tmp_path, index=8, states={"u": "done"}).write()
    with closing(sqlite3.connect(unsealed)) as db, db:
        db.execute("PRAGMA secure_delete = ON")
        db.execute("DELETE FROM meta WHERE key = 'seal'")
    (tmp_path / "tasks" / "text.sqlite").write_text("text")
    earlier = TaskFile(tmp_path / "x", index=9, states={"e": "pending"}, ended_at_ms=None).write()
    shutil.copy(earlier, tmp_path / "tasks" / "z-earlier.sqlite")
    last = TaskFile(tmp_path, index=9, states={"e": "done"}).write()
    far = TaskFile(tmp_path / "other", index=10, states={"z": "done"}).write()
    files[0].with_suffix(".slurm.json").write_text("{}")
    given = [tmp_path / "tasks" / path.name for path in (tmp_path / "tasks").glob("*.sqlite") if path != files[4]]
    merged(tmp_path, tmp_path / "tasks")
    outcome = merged(tmp_path, *given, far)
    os.utime(files[1])
    files[2].unlink()
    with closing(sqlite3.connect(tmp_path / "job.sqlite")) as db, db:
        db.execute("DELETE FROM sample WHERE at_ms > ? AND task_id = (SELECT task_id FROM task WHERE array_index = 3)",
                   (START_MS + 1000,))  # fmt: skip
    before = content(tmp_path / "job.sqlite")
    removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
    elsewhere = f"{tmp_path}/other/job.sqlite; merge into that file first"
    assert {Path(path).name for path in removal.removed} == {files[0].name, files[5].name, "z-copy.sqlite", last.name}
    total = query(tmp_path / "job.sqlite", "SELECT rows FROM source_file WHERE path = ?", f"tasks/{files[3].name}")[0][
        0
    ]
    assert {Path(path).name: why for path, why in removal.left} == {
        files[1].name: "it has changed since it was merged",
        files[3].name: f"{total - 1} of its {total} rows are in the job database",
        running.name: "its task had not ended when it was merged",
        unsealed.name: "it has no seal",
        "text.sqlite": "not a SQLite database",
        "z-earlier.sqlite": "it is not the file whose rows are in the job database",
        far.name: f"a later run looks for finished work only in {elsewhere}",
    }
    assert not files[0].with_suffix(".slurm.json").exists()
    assert all(path.exists() for path in (files[1], files[3], files[4], running, unsealed, far))
    merged(tmp_path, tmp_path / "tasks")
    assert content(tmp_path / "job.sqlite") == before
