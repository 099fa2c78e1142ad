"""Merging: every attempt is history, a chunk has one final state, and no file is left out unnamed."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from rooms.model import Reading
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import MergeOrder, SourceFile, find_task_databases, merge, open_job_database
from support.databases import query
from support.mounts import lie_about_filesystem
from support.task_files import START_MS, TaskFile, make_device


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path / "july"


def merged(run: Path, *files: Path) -> list[SourceFile]:
    """Merge these files, or the whole folder."""
    target = run / "job.sqlite"
    return list(merge(MergeOrder(files or [run], target), SystemClock()).files)


def chunk_states(run: Path) -> dict[str, tuple[str, int]]:
    """Map a chunk to its final state and the array index it comes from."""
    sql = "SELECT chunk_id, status, array_index FROM chunk JOIN task USING (task_id)"
    return {str(name): (str(status), int(str(index))) for name, status, index in query(run / "job.sqlite", sql)}


def unread(outcome: list[SourceFile]) -> dict[str, str | None]:
    return {Path(file.path).name: file.reason for file in outcome if file.status != "merged"}


# --- who wins ---------------------------------------------------------------------------------------------------------

ORDER = ["skipped", "pending", "failed", "poison", "done"]


@pytest.mark.parametrize(("loser", "winner"), list(itertools.combinations(ORDER, 2)))
@pytest.mark.parametrize("winner_first", [True, False])
def test_the_stronger_state_wins_in_either_order(run: Path, loser: str, winner: str, winner_first: bool) -> None:
    strong = TaskFile(run, index=0, states={"a": winner}, samples=0).write()
    # The weaker one started and ended later: that does not help it.
    later = {"started_at_ms": START_MS + 1000, "chunk_ended_at_ms": START_MS + 99_000}
    weak = TaskFile(run, index=1, states={"a": loser}, samples=0, **later).write()
    merged(run, *([strong, weak] if winner_first else [weak, strong]))
    assert chunk_states(run) == {"a": (winner, 0)}


@pytest.mark.parametrize("state", ["done", "failed", "poison"])
def test_among_equals_the_one_that_ended_last_wins(run: Path, state: str) -> None:
    late = TaskFile(run, index=0, states={"a": state}, samples=0, chunk_ended_at_ms=START_MS + 9000).write()
    early = TaskFile(run, index=1, states={"a": state}, samples=0, chunk_ended_at_ms=START_MS + 8000).write()
    for files in ((late, early), (early, late)):
        merged(run, *files)
        assert chunk_states(run) == {"a": (state, 0)}


@pytest.mark.parametrize("first_born_first", [True, False])
@pytest.mark.parametrize("index", range(4))  # whichever has the higher task_id
def test_what_is_left_is_left_in_the_later_attempt(run: Path, index: int, first_born_first: bool) -> None:
    early = TaskFile(run, index=index, states={"a": "pending"}, samples=0).write()
    late = TaskFile(
        run, index=index, restart=1, states={"a": "pending"}, samples=0, started_at_ms=START_MS + 1000
    ).write()
    merged(run, *([early, late] if first_born_first else [late, early]))
    assert query(run / "job.sqlite", "SELECT restart FROM chunk JOIN task USING (task_id)") == [(1,)]


def test_a_tie_is_settled_the_same_way_in_every_order(run: Path) -> None:
    files = [TaskFile(run, index=index, states={"a": "done", "b": "pending"}, samples=0).write() for index in range(4)]
    outcomes = set()
    for seed in range(6):
        random.Random(seed).shuffle(files)
        merged(run, *files)
        outcomes.add(str(chunk_states(run)))
    assert len(outcomes) == 1


def test_only_the_winners_detections_are_kept(run: Path) -> None:
    TaskFile(run, restart=0, states={"a": "done"}, labels=["OLD", "OLD"], chunk_ended_at_ms=START_MS + 1000).write()
    TaskFile(run, restart=1, states={"a": "done"}, labels=["NEW"], chunk_ended_at_ms=START_MS + 2000).write()
    TaskFile(run, restart=2, states={"a": "failed"}, chunk_ended_at_ms=START_MS + 3000).write()
    merged(run)
    assert query(run / "job.sqlite", "SELECT label FROM detection") == [("NEW",)]
    assert query(run / "job.sqlite", "SELECT status, detections FROM chunk") == [("done", 1)]


def test_every_attempt_stays_as_history(run: Path) -> None:
    for restart, state in enumerate(["failed", "failed", "done"]):
        TaskFile(run, restart=restart, states={"a": state}, samples=0).write()
    merged(run)
    assert query(run / "job.sqlite", "SELECT outcome, count(*) FROM attempt GROUP BY 1 ORDER BY 1") == [
        ("done", 1),
        ("failed", 2),
    ]
    assert query(run / "job.sqlite", "SELECT count(*) FROM task") == [(3,)]


def test_a_chunk_that_was_skipped_because_it_was_done_earlier_counts_where_it_was_done(run: Path) -> None:
    TaskFile(run, index=0, states={"a": "done"}, samples=0).write()
    TaskFile(run, job_id="4900", index=3, states={"a": "skipped", "b": "done"}, samples=0).write()
    merged(run)
    assert chunk_states(run) == {"a": ("done", 0), "b": ("done", 3)}


# --- files ------------------------------------------------------------------------------------------------------------


def test_merging_twice_gives_the_same_rows(run: Path) -> None:
    for index in range(3):
        TaskFile(run, index=index, states={f"c{index}": "done"}).write()
    merged(run)
    tables = ("task", "chunk", "attempt", "sample", "host_sample", "detection", "device", "worker", "source_file")
    before = {table: query(run / "job.sqlite", f"SELECT * FROM {table} ORDER BY 1, 2, 3") for table in tables}
    merged(run)
    assert before == {table: query(run / "job.sqlite", f"SELECT * FROM {table} ORDER BY 1, 2, 3") for table in tables}


def test_a_copy_of_a_task_is_named_and_counted_once(run: Path) -> None:
    original = TaskFile(run, states={"a": "done"}).write()
    shutil.copy(original, original.with_name("copy.sqlite"))
    assert unread(merged(run)) == {
        "copy.sqlite": "a copy, or an earlier publication, of the task in tasks/4821_0.r0.gpu1.sqlite"
    }
    assert query(run / "job.sqlite", "SELECT count(*) FROM sample") == [(3,)]
    assert query(run / "job.sqlite", "SELECT path, status FROM source_file ORDER BY path") == [
        ("tasks/4821_0.r0.gpu1.sqlite", "merged"),
        ("tasks/copy.sqlite", "copy"),
    ]


def test_two_readings_of_one_instant_do_not_cost_the_task(run: Path) -> None:
    task = TaskFile(run, states={"a": "done"}, samples=2)
    path = task.write()
    with closing(sqlite3.connect(path)) as db, db:
        for table in ("sample", "host_sample"):
            db.execute(f"INSERT INTO {table} SELECT * FROM {table} LIMIT 1")
        db.execute("DELETE FROM meta WHERE key = 'seal'")
    assert unread(merged(run)) == {}
    assert query(run / "job.sqlite", "SELECT count(*) FROM sample") == [(3,)]
    assert query(run / "job.sqlite", "SELECT count(*) FROM host_sample") == [(2,)]


def test_the_inputs_are_never_touched(run: Path) -> None:
    path = TaskFile(run, states={"a": "done"}).write()
    before = (path.read_bytes(), path.stat().st_mtime_ns)
    merged(run)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before
    assert sorted(file.name for file in path.parent.iterdir()) == [path.name]


def test_a_job_database_that_readers_have_open_is_replaced_not_changed(run: Path) -> None:
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    with closing(sqlite3.connect(f"file:{run}/job.sqlite?mode=ro&immutable=1", uri=True)) as reader:
        assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (1,)
        TaskFile(run, index=1, states={"b": "done"}).write()
        merged(run)
        assert reader.execute("SELECT count(*) FROM chunk").fetchone() == (1,)
    assert query(run / "job.sqlite", "SELECT count(*) FROM chunk") == [(2,)]
    assert sorted(path.name for path in run.iterdir()) == ["job.sqlite", "tasks"]


def test_a_target_that_cannot_be_written_is_a_database_problem(run: Path) -> None:
    path = TaskFile(run, states={"a": "done"}).write()
    (run / "file").touch()
    with pytest.raises(DatabaseProblem, match="cannot be written") as refused:
        merge(MergeOrder([path], run / "file" / "job.sqlite"), SystemClock())
    assert refused.value.exit_code == 4


@pytest.mark.parametrize("share", [0.1, 0.6, 0.95])
def test_a_disk_too_full_for_the_merge_is_a_database_problem_and_the_old_file_stays(run: Path, share: float) -> None:
    for index in range(3):
        TaskFile(run, index=index, states={f"c{n}": "done" for n in range(500)}, samples=4000).write()
    merged(run)
    room = int(share * (run / "job.sqlite").stat().st_size)
    (run / "job.sqlite").write_bytes(b"old")
    code = f"""
import resource
from pathlib import Path
from badcjobs.errors import DatabaseProblem
from badcjobs.clock import SystemClock
from badcjobs.store.merge import MergeOrder, merge
run = Path({str(run)!r})
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, {room}))  # no file may grow beyond this, as on a full disk
try:
    merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
except DatabaseProblem as problem:
    print(problem)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "job.sqlite cannot be written" in done.stdout
    assert (run / "job.sqlite").read_bytes() == b"old"


def losing_rows(database: Path, table: str) -> None:
    """Make a job database lose what is written to a table, as a disk that does not keep it would."""
    same = {"host_sample": "at_ms = new.at_ms", "attempt": "attempt_id = new.attempt_id"}.get(
        table, "rowid = new.rowid"
    )
    with closing(sqlite3.connect(database)) as db, db:
        db.execute(f"CREATE TRIGGER lose AFTER INSERT ON {table} BEGIN DELETE FROM {table} WHERE {same}; END")


@pytest.mark.parametrize(
    ("table", "more"),
    [
        *((table, 1) for table in ("host_sample", "attempt", "sample", "chunk", "detection", "gap")),
        *((table, 11) for table in ("attempt", "gap")),  # too many to be added where the job database lies
    ],
)
def test_rows_that_do_not_arrive_are_an_error_and_the_old_file_stays(run: Path, table: str, more: int) -> None:
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    losing_rows(run / "job.sqlite", table)
    before = (run / "job.sqlite").read_bytes()
    for index in range(1, more + 1):
        TaskFile(run, index=index, states={f"b{index}": "done"}, gaps=[(1, 2, "x")]).write()
    with pytest.raises(
        DatabaseProblem, match=f"the row check of .* failed: {table} rows in its file: .*, in job.sqlite: 0"
    ) as refused:
        merged(run)
    assert refused.value.exit_code == 4
    assert (run / "job.sqlite").read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == ["job.sqlite", "tasks"], "no draft, no journal, no lock"


def test_rows_that_arrive_twice_are_an_error_too(run: Path) -> None:
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    with closing(sqlite3.connect(run / "job.sqlite")) as db, db:
        db.execute(
            """CREATE TRIGGER twice AFTER INSERT ON detection WHEN new.label != 'AGAIN' BEGIN
                INSERT INTO detection (task_id, recording_id, chunk_id, start_ms, end_ms, label, score)
                VALUES (new.task_id, new.recording_id, new.chunk_id, new.start_ms, new.end_ms, 'AGAIN', 1); END"""
        )
    TaskFile(run, index=1, states={"b": "done"}).write()
    with pytest.raises(DatabaseProblem, match=r"failed: detection rows in its file: 1, in job\.sqlite: 2"):
        merged(run)


@pytest.mark.parametrize(
    ("kind", "in_place"), [("xfs", True), ("tmpfs", True), ("lustre", False), ("nfs4", False), ("shinyfs", False)]
)
def test_a_job_database_is_changed_in_place_only_on_a_disk_that_is_known_to_be_local(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: str, in_place: bool
) -> None:
    lie_about_filesystem(monkeypatch, run.parent, kind)
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    before = (run / "job.sqlite").stat().st_ino
    with (run / "job.sqlite").open("rb") as still_open:  # its number is not given to another file meanwhile
        content = still_open.read()
        TaskFile(run, index=1, states={"b": "done"}).write()
        merged(run)
        still_open.seek(0)
        assert (still_open.read() == content) is not in_place
    assert ((run / "job.sqlite").stat().st_ino == before) is in_place
    assert sorted(chunk_states(run)) == ["a", "b"]


@pytest.mark.parametrize(("kind", "is_rolled_back"), [("xfs", True), ("lustre", False)])
def test_who_reads_a_job_database_changes_nothing_on_a_filesystem_that_others_see(
    run: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_rolled_back: bool
) -> None:
    lie_about_filesystem(monkeypatch, run.parent, kind)
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    journal = run / "job.sqlite-journal"
    journal.write_bytes(b"left by a merge on another node")
    with closing(open_job_database(run / "job.sqlite")) as db:
        assert db.execute("SELECT count(*) FROM chunk").fetchone() == (1,)
    assert journal.exists() is not is_rolled_back


# --- which files ------------------------------------------------------------------------------------------------------


def test_files_and_folders_may_be_given_in_any_mixture_and_are_found_once(run: Path) -> None:
    files = [TaskFile(run, index=index, states={"a": "done"}).write() for index in range(3)]
    other = TaskFile(run.with_name("august"), states={"b": "done"}).write()
    target = run / "job.sqlite"
    assert [file.file for file in find_task_databases([run], target)] == files
    assert [file.file for file in find_task_databases([run / "tasks"], target)] == files
    assert [file.file for file in find_task_databases([files[1], run, other], target)] == sorted([*files, other])


def test_unfinished_copies_and_job_databases_are_no_task_databases(run: Path) -> None:
    path = TaskFile(run, states={"a": "done"}).write()
    (run / "tasks" / f".{path.name}.gpu1.99.tmp").touch()
    (run / "tasks" / ".hidden.sqlite").touch()
    (run / "job.sqlite").touch()
    (run / "other-job.sqlite").touch()
    assert [file.file for file in find_task_databases([run], run / "other-job.sqlite")] == [path]


@pytest.mark.parametrize("what", ["missing", "empty"])
def test_a_folder_without_task_databases_is_a_problem_with_a_line_to_paste(run: Path, what: str) -> None:
    if what == "empty":
        run.mkdir()
    with pytest.raises(DatabaseProblem) as refused:
        merge(MergeOrder([run], run / "job.sqlite"), SystemClock())
    assert str(run) in refused.value.what
    assert (refused.value.fix or "").startswith("badcjobs merge " if what == "empty" else "ls ")


def test_progress_is_told_file_by_file(run: Path) -> None:
    files = [TaskFile(run, index=index, states={"a": "done"}).write() for index in range(3)]
    told: list[tuple[int, int]] = []
    order = MergeOrder(files, run / "job.sqlite", progress=lambda done, of, rows: told.append((done, of)))
    merge(order, SystemClock())
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_nothing_is_left_in_the_scratch_space(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    merged(run, TaskFile(run, states={"a": "done"}).write())
    assert os.listdir(scratch) == []  # noqa: PTH208


# --- the views --------------------------------------------------------------------------------------------------------


def test_the_views_answer_the_common_questions(run: Path) -> None:
    TaskFile(
        run, index=0, states={"a": "done", "b": "failed", "c": "poison"}, devices=2, samples=5,
        reading=Reading(
            utilization_percent=60, memory_used_bytes=2**30, temperature_c=55, power_w=100.0, energy_j=9.0,
            busy_percent=12.5,
        ),
        gaps=[(1000, 3000, "the recorder was late")],
    ).write()  # fmt: skip
    TaskFile(run, index=1, states={"d": "done", "e": "pending"}, ended_at_ms=None, samples=0).write()
    merged(run)
    job = run / "job.sqlite"
    columns = "array_index, verdict, devices, wall_s, done, failed, pending, audio_s"
    assert query(job, f"SELECT {columns} FROM task_summary ORDER BY array_index") == [
        (0, "done", 2, 10.0, 1, 2, 0, 30.0),
        (1, None, 1, 5.0, 1, 0, 1, 30.0),  # killed: until the last word that was heard of it
    ]
    columns = (
        "device_index, samples, utilization_mean_percent, utilization_max_percent, busy_mean_percent,"
        " memory_peak_bytes, span_s, gap_s"
    )
    assert query(job, f"SELECT {columns} FROM device_summary WHERE samples > 0 ORDER BY device_index") == [
        (0, 5, 60.0, 60, 12.5, 2**30, 4.0, 2.0),
        (1, 5, 60.0, 60, 12.5, 2**30, 4.0, 2.0),
    ]
    assert query(job, "SELECT status, error_class, chunks, audio_s, detections FROM chunk_summary ORDER BY 1, 2") == [
        ("done", None, 2, 60.0, 2),
        ("failed", "bad_audio", 1, 30.0, None),
        ("pending", None, 1, 30.0, None),
        ("poison", "bad_audio", 1, 30.0, None),
    ]
    columns = "tasks, chunks, done, failed, pending, skipped, audio_hours, gpu_hours, detections"
    assert query(job, f"SELECT {columns} FROM job_summary") == [(2, 5, 2, 2, 1, 0, 60 / 3600, 25 / 3600, 2)]


def test_a_device_without_samples_is_unknown_in_its_view_not_zero(run: Path) -> None:
    TaskFile(run, samples=0).write()
    merged(run)
    columns = "samples, utilization_mean_percent, memory_peak_bytes, power_mean_w, energy_j, span_s, gap_s"
    assert query(run / "job.sqlite", f"SELECT {columns} FROM device_summary") == [
        (0, None, None, None, None, None, None)
    ]
    assert make_device().uuid == "GPU-0"


# --- what an earlier merge had ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("harm", ["damaged", "gone"])
def test_what_an_earlier_merge_had_stays_when_its_file_is_damaged_or_gone(run: Path, harm: str) -> None:
    first = TaskFile(run, index=0, states={"a": "done", "b": "done"}).write()
    TaskFile(run, index=1, states={"a": "skipped", "b": "skipped", "c": "done"}).write()
    merged(run)
    before = query(run / "job.sqlite", "SELECT * FROM detection ORDER BY 1, 2, 3")
    samples = query(run / "job.sqlite", "SELECT count(*) FROM sample")
    if harm == "gone":
        first.unlink()
    else:
        first.write_bytes(first.read_bytes()[:5000])
    outcome = merged(run)
    assert chunk_states(run) == {"a": ("done", 0), "b": ("done", 0), "c": ("done", 1)}
    assert query(run / "job.sqlite", "SELECT * FROM detection ORDER BY 1, 2, 3") == before
    assert query(run / "job.sqlite", "SELECT count(*) FROM sample") == samples
    [status] = [file.status for file in outcome if Path(file.path).name == first.name]
    assert status == ("kept" if harm == "damaged" else "merged")
    merged(run)  # and a third time
    assert chunk_states(run) == {"a": ("done", 0), "b": ("done", 0), "c": ("done", 1)}


def test_merging_one_file_more_keeps_the_others(run: Path) -> None:
    TaskFile(run, index=0, states={"a": "done"}).write()
    merged(run)
    late = TaskFile(run, index=1, states={"b": "done"}).write()
    merged(run, late)
    assert chunk_states(run) == {"a": ("done", 0), "b": ("done", 1)}


def test_a_job_database_that_cannot_be_read_is_named_and_made_anew(run: Path) -> None:
    TaskFile(run, index=0, states={"a": "done"}).write()
    (run / "job.sqlite").write_bytes(b"not a database, but long enough to look at" * 10)
    outcome = merged(run)
    assert [(file.path, file.status) for file in outcome if file.lost_something] == [("job.sqlite.damaged", "skipped")]
    assert chunk_states(run) == {"a": ("done", 0)}
    assert (run / "job.sqlite.damaged").read_bytes().startswith(b"not a database")
