"""Merging again: only what is new is read, and the content follows from the set of tasks, not from the order."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import MergeOrder, MergeOutcome, merge, remove_merged_files
from support.databases import canonical, query
from support.task_files import START_MS, TaskFile


def merged(run: Path, *inputs: Path, **options: bool) -> MergeOutcome:
    return merge(MergeOrder(inputs or [run], run / "job.sqlite", **options), SystemClock())


def write_rivals(run: Path) -> list[Path]:
    """Write attempts that disagree: a requeued task, two live copies after a node failure, a skipped listing."""
    states = [
        {"a": "done", "b": "failed", "c": "pending", "d": "pending"},
        {"a": "skipped", "b": "done", "c": "done", "d": "failed"},
        {"a": "done", "b": "done", "c": "poison", "e": "pending"},
        {"a": "pending", "d": "failed", "e": "skipped"},
    ]
    return [
        TaskFile(
            run, restart=n, states=told, labels=(f"L{n}",) * (n + 1), chunk_ended_at_ms=START_MS + (n * 7) % 5
        ).write()
        for n, told in enumerate(states)
    ]


def test_any_order_and_any_grouping_gives_the_same_content(tmp_path: Path) -> None:
    original = write_rivals(tmp_path / "source")
    whole = tmp_path / "whole"
    shutil.copytree(tmp_path / "source", whole)
    merged(whole)
    for number, order in enumerate(itertools.permutations(range(len(original)))):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "source", run)  # keeps the times of the files
        files = [run / "tasks" / original[index].name for index in order]
        groups = [files] if number % 3 == 0 else [files[:2], files[2:]] if number % 3 == 1 else [[f] for f in files]
        for group in groups:
            merged(run, *group)
        assert canonical(run / "job.sqlite") == canonical(whole / "job.sqlite"), order


def test_each_chunk_has_one_state_and_its_detections_once_and_the_rivals_are_kept(tmp_path: Path) -> None:
    write_rivals(tmp_path)
    merged(tmp_path)
    job = tmp_path / "job.sqlite"
    states = query(job, "SELECT chunk_id, status, restart FROM chunk JOIN task USING (task_id) ORDER BY 1")
    # b is done twice: the one that ended last counts (restart 2 at +4 ms, restart 1 at +2 ms); a likewise.
    assert states == [("a", "done", 2), ("b", "done", 2), ("c", "done", 1), ("d", "failed", 1), ("e", "pending", 2)]
    heard = query(job, "SELECT chunk_id, label, count(*) FROM detection GROUP BY 1, 2 ORDER BY 1")
    assert heard == [("a", "L2", 3), ("b", "L2", 3), ("c", "L1", 2)]
    assert query(job, "SELECT count(*) FROM rival_chunk WHERE status = 'done'") == [(2,)]
    assert query(job, "SELECT chunk_id, label, count(*) FROM rival_detection GROUP BY 1, 2 ORDER BY 1") == [
        ("a", "L0", 1),
        ("b", "L1", 2),
    ]


def test_files_that_have_not_changed_are_not_opened(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}).write() for n in range(5)]
    assert merged(tmp_path).read == 5
    before = (tmp_path / "job.sqlite").stat()
    for path in files:
        path.chmod(0)  # whoever opens them now is told (unless root asks); their times stay
    assert merged(tmp_path).read == 0
    after = (tmp_path / "job.sqlite").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns), "it was written for nothing"
    TaskFile(tmp_path, index=9, states={"late": "done"}).write()
    assert merged(tmp_path).read == 1
    assert query(tmp_path / "job.sqlite", "SELECT count(*) FROM task") == [(6,)]


def test_a_task_that_went_on_is_read_again_and_replaces_what_it_said_before(tmp_path: Path) -> None:
    other = TaskFile(tmp_path, index=1, states={"a": "done", "b": "failed"}, labels=("OLD",)).write()
    running = TaskFile(tmp_path, states={"a": "pending", "b": "pending"}, ended_at_ms=None, samples=2)
    running.write()
    merged(tmp_path)
    running.states = {"a": "done", "b": "done"}
    running.labels = ("NEW",)
    running.samples, running.ended_at_ms = 5, START_MS + 20_000
    running.chunk_ended_at_ms = START_MS + 15_000
    running.write()
    outcome = merged(tmp_path)
    assert outcome.read == 1
    fresh = tmp_path / "fresh.sqlite"
    merge(MergeOrder([tmp_path / "tasks"], fresh), SystemClock())
    assert canonical(tmp_path / "job.sqlite") == canonical(fresh)
    assert query(fresh, "SELECT DISTINCT label FROM detection") == [("NEW",)]
    assert other.exists()


def test_a_winner_that_takes_its_word_back_gives_way_to_its_rival(tmp_path: Path) -> None:
    """Published rows only grow, but a file may be replaced by hand: the content still follows from the files."""
    TaskFile(tmp_path, index=1, states={"a": "done"}, labels=("SECOND",)).write()
    first = TaskFile(tmp_path, states={"a": "done"}, labels=("FIRST",), chunk_ended_at_ms=START_MS + 9_000)
    first.write()
    merged(tmp_path)
    assert query(tmp_path / "job.sqlite", "SELECT label FROM detection") == [("FIRST",)]
    first.states = {"a": "pending"}
    first.write()
    merged(tmp_path)
    assert query(tmp_path / "job.sqlite", "SELECT label FROM detection") == [("SECOND",)]
    assert query(tmp_path / "job.sqlite", "SELECT status, array_index FROM chunk JOIN task USING (task_id)") == [
        ("done", 1)
    ]
    assert query(tmp_path / "job.sqlite", "SELECT count(*) FROM rival_detection") == [(0,)]


def test_of_two_copies_of_a_task_the_later_one_counts_whichever_is_met_first(tmp_path: Path) -> None:
    task = TaskFile(tmp_path / "a", states={"a": "pending"}, samples=2, ended_at_ms=None)
    early = Path(shutil.copy(task.write(), tmp_path / "early.sqlite"))
    task.states, task.samples, task.ended_at_ms = {"a": "done"}, 4, START_MS + 10_000
    late = Path(shutil.copy(task.write(), tmp_path / "late.sqlite"))
    contents = []
    for number, order in enumerate([(early, late), (late, early)]):
        run = tmp_path / f"run{number}"
        (run / "tasks").mkdir(parents=True)
        for path in order:
            merged(run, Path(shutil.copy2(path, run / "tasks")))
        contents.append(canonical(run / "job.sqlite"))
        assert query(run / "job.sqlite", "SELECT path, status FROM source_file ORDER BY 1") == [
            ("tasks/early.sqlite", "copy"),
            ("tasks/late.sqlite", "merged"),
        ]
        assert query(run / "job.sqlite", "SELECT status FROM chunk") == [("done",)]
    assert contents[0] == contents[1]


def test_a_folder_that_was_moved_is_recognised_by_its_content(tmp_path: Path) -> None:
    TaskFile(tmp_path / "a", states={"a": "done"}).write()
    merged(tmp_path / "a")
    shutil.move(tmp_path / "a", tmp_path / "b")
    assert merged(tmp_path / "b").read == 0


def test_one_file_spelled_in_two_ways_is_one_file(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}).write()
    merged(tmp_path, tmp_path / "tasks" / ".." / "tasks" / path.name)
    assert merged(tmp_path).read == 0
    assert query(tmp_path / "job.sqlite", "SELECT path FROM source_file") == [(f"tasks/{path.name}",)]


def test_the_folder_of_the_target_is_made_and_places_that_do_not_exist_are_named_together(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    merge(MergeOrder([tmp_path], tmp_path / "new" / "folder" / "job.sqlite"), SystemClock())
    assert (tmp_path / "new" / "folder" / "job.sqlite").exists()
    with pytest.raises(DatabaseProblem, match=r"one, .*two do not exist"):
        merge(MergeOrder([tmp_path / "one", tmp_path, tmp_path / "two"], tmp_path / "x.sqlite"), SystemClock())


def test_another_job_database_in_the_folder_is_not_mistaken_for_a_task(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    merge(MergeOrder([tmp_path], tmp_path / "backup.sqlite"), SystemClock())
    outcome = merged(tmp_path)
    assert not any(file.lost_something for file in outcome.files)
    assert query(tmp_path / "job.sqlite", "SELECT count(*) FROM task") == [(1,)]
    assert merged(tmp_path).read == 0


@pytest.mark.parametrize("what", ["a task database", "another program's database"])
def test_merge_never_replaces_what_is_not_a_job_database(tmp_path: Path, what: str) -> None:
    task = TaskFile(tmp_path, states={"a": "done"}).write()
    target = tmp_path / "precious.sqlite"
    shutil.copy(task, target)
    if what != "a task database":
        content = bytearray(target.read_bytes())
        content[68:72] = b"\0\0\0\7"
        target.write_bytes(content)
    before = target.read_bytes()
    with pytest.raises(DatabaseProblem, match=what):
        merge(MergeOrder([task], target), SystemClock())
    assert target.read_bytes() == before


def test_a_job_database_of_a_newer_badcjobs_is_left_alone(tmp_path: Path) -> None:
    TaskFile(tmp_path, states={"a": "done"}).write()
    merged(tmp_path)
    content = bytearray((tmp_path / "job.sqlite").read_bytes())
    content[60:64] = (99).to_bytes(4, "big")
    (tmp_path / "job.sqlite").write_bytes(content)
    TaskFile(tmp_path, index=1, states={"b": "done"}).write()
    with pytest.raises(DatabaseProblem, match="schema 99"):
        merged(tmp_path)
    assert (tmp_path / "job.sqlite").read_bytes() == content


# --- --remove-merged --------------------------------------------------------------------------------------------------


def test_merged_files_are_removed_and_the_job_database_keeps_all_their_rows(tmp_path: Path) -> None:
    files = [TaskFile(tmp_path, index=n, states={f"c{n}": "done"}).write() for n in range(3)]
    shutil.copy2(files[0], tmp_path / "tasks" / "twin.sqlite")
    outcome = merged(tmp_path)
    before = canonical(tmp_path / "job.sqlite")
    removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
    assert len(removal.removed) == 4
    assert removal.left == ()
    assert list((tmp_path / "tasks").iterdir()) == []
    assert merged(tmp_path).read == 0
    TaskFile(tmp_path, index=8, states={"new": "done"}).write()
    merged(tmp_path)
    assert query(tmp_path / "job.sqlite", "SELECT count(*) FROM chunk") == [(4,)]
    assert "c0" in before


def test_a_file_that_is_damaged_running_or_changed_is_never_removed(tmp_path: Path) -> None:
    damaged = TaskFile(tmp_path, index=0, states={"a": "done"}, samples=500).write()
    damaged.write_bytes(damaged.read_bytes()[:-9000])
    running = TaskFile(tmp_path, index=1, states={"b": "done"}, ended_at_ms=None).write()
    changed = TaskFile(tmp_path, index=2, states={"c": "done"}).write()
    noise = tmp_path / "tasks" / "noise.sqlite"
    noise.write_bytes(random.Random(1).randbytes(5000))
    outcome = merged(tmp_path)
    os.utime(changed)
    removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
    assert removal.removed == ()
    reasons = {Path(path).name: why for path, why in removal.left}
    assert "truncated" in reasons[damaged.name]
    assert "had not ended" in reasons[running.name]
    assert "has changed since" in reasons[changed.name]
    assert reasons[noise.name] == "not a SQLite database"
    assert all(path.exists() for path in (damaged, running, changed, noise))


def test_rows_that_are_not_all_in_the_job_database_keep_their_file(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}, samples=5).write()
    outcome = merged(tmp_path)
    with closing(sqlite3.connect(tmp_path / "job.sqlite")) as db, db:
        db.execute("DELETE FROM sample WHERE at_ms = (SELECT max(at_ms) FROM sample)")
    removal = remove_merged_files(tmp_path / "job.sqlite", outcome.given)
    assert path.exists()
    assert "rows are in the job database" in removal.left[0][1]
