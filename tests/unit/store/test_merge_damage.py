"""Every kind of damage, done to a real file: no healthy row is lost, and every file is named with what became of it."""

from __future__ import annotations

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
from rooms.root import DatabaseProblem, SystemClock
from rooms.store import SCHEMA_VERSION, MergeOrder, SourceFile, create_live, merge
from support import damage
from support.databases import query
from support.powerless import powerless_folder
from support.task_files import TaskFile

SAMPLES, CHUNKS = 1500, 60
STATES = {f"c{n:03d}": "done" for n in range(CHUNKS)}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    TaskFile(tmp_path, index=1, states={"healthy": "done"}, samples=3).write()
    return tmp_path


@pytest.fixture
def victim(run: Path) -> Path:
    return TaskFile(run, index=0, states=STATES, samples=SAMPLES).write()


def merged(run: Path, *inputs: Path) -> dict[str, SourceFile]:
    """Merge, and return what became of each file by its name."""
    outcome = merge(MergeOrder(inputs or [run], run / "job.sqlite"), SystemClock())
    return {Path(file.path).name: file for file in outcome.files}


def count(run: Path, table: str, index: int = 0) -> int:
    sql = f"SELECT count(*) FROM {table} JOIN task USING (task_id) WHERE array_index = ?"
    return int(query(run / "job.sqlite", sql, index)[0][0])


def assert_the_other_is_whole(run: Path) -> None:
    assert (count(run, "chunk", 1), count(run, "sample", 1), count(run, "detection", 1)) == (1, 3, 1)
    assert query(run / "job.sqlite", "PRAGMA integrity_check") == [("ok",)]


def write_pragma(path: Path, pragma: str) -> None:
    """Change the header as a program does that made the file so: there is no seal that says otherwise."""
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA secure_delete = ON")  # or the bytes of the seal stay
        db.execute(f"PRAGMA {pragma}")
        db.execute("DELETE FROM meta WHERE key = 'seal'")


# --- nothing of it can be merged --------------------------------------------------------------------------------------

HOPELESS: dict[str, tuple[Callable[[Path], object], str]] = {
    "zero bytes": (damage.make_empty, "the file is empty"),
    "a text": (damage.replace_with_text, "not a SQLite database"),
    "noise": (lambda path: damage.replace_with_noise(path, 50_000, 1), "not a SQLite database"),
    "the first bytes of a header": (lambda path: os.truncate(path, 50), "not a SQLite database"),
    "somebody else's": (lambda path: write_pragma(path, "application_id = 7"), "not a badcjobs database"),
    "a newer schema": (
        lambda path: write_pragma(path, "user_version = 99"),
        f"schema 99, written by badcjobs 0.1.0; this badcjobs (0.1.0) reads schema {SCHEMA_VERSION}",
    ),
}


@pytest.mark.parametrize("kind", HOPELESS)
def test_a_file_that_gives_nothing_is_skipped_with_its_reason(run: Path, victim: Path, kind: str) -> None:
    harm, reason = HOPELESS[kind]
    harm(victim)
    before = victim.read_bytes()
    file = merged(run)[victim.name]
    assert (file.status, file.reason, file.lost_something) == ("skipped", reason, True)
    assert query(
        run / "job.sqlite", "SELECT status, reason FROM source_file WHERE path = ?", f"tasks/{victim.name}"
    ) == [("skipped", reason)]
    assert victim.read_bytes() == before
    assert_the_other_is_whole(run)


def test_a_file_we_may_not_read_is_skipped_and_read_when_we_may() -> None:
    with powerless_folder() as folder:
        TaskFile(folder, index=1, states={"healthy": "done"}).write()
        closed = TaskFile(folder, index=0, states=STATES).write()
        closed.chmod(0)
        assert merged(folder)[closed.name].reason == "Permission denied"
        closed.chmod(0o600)
        assert merged(folder)[closed.name].status == "merged"
        assert count(folder, "chunk") == CHUNKS


def test_a_folder_we_may_not_look_into_is_named_what_else_there_is_merged_and_it_is_read_when_we_may() -> None:
    with powerless_folder() as folder:
        TaskFile(folder, index=1, states={"healthy": "done"}).write()
        closed = TaskFile(folder / "tasks" / "more", index=0, states=STATES).write().parent
        closed.chmod(0)
        for _ in range(2):  # nor is it forgotten by the next merge
            name, file = next(item for item in merged(folder).items() if item[1].status != "merged")
            words = f"Permission denied; its files are not merged. try: ls -ld {closed}"
            assert (name, file.status, file.lost_something) == (closed.name, "skipped", True)
            assert file.reason == f"the folder cannot be read: {words}"
            assert count(folder, "chunk", 1) == 1
        closed.chmod(0o700)
        assert {file.status for file in merged(folder).values()} == {"merged"}
        assert count(folder, "chunk") == CHUNKS


def test_where_nothing_but_a_closed_folder_is_there_the_error_says_so() -> None:
    with powerless_folder() as folder:
        TaskFile(folder, index=0, states=STATES).write().parent.chmod(0)
        with pytest.raises(DatabaseProblem) as caught:
            merged(folder)
        assert "tasks: the folder cannot be read: Permission denied" in (caught.value.why or "")
        with pytest.raises(DatabaseProblem, match="cannot be read"):
            merged(folder / "tasks" / "x.sqlite")


def test_a_link_to_nothing_and_a_pipe_are_skipped(run: Path) -> None:
    (run / "tasks" / "gone.sqlite").symlink_to("nowhere")
    os.mkfifo(run / "tasks" / "pipe.sqlite")
    files = merged(run)
    assert files["gone.sqlite"].reason == "No such file or directory"
    assert files["pipe.sqlite"].reason == "not a file"
    assert_the_other_is_whole(run)


def test_a_recorders_half_holds_no_task(run: Path) -> None:
    with closing(create_live(run / "tasks" / "recorder.sqlite")) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    assert merged(run)["recorder.sqlite"].reason == "it contains no task"


# --- some of it can ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 0.99])
def test_of_a_truncated_file_the_whole_pages_are_saved(run: Path, victim: Path, share: float) -> None:
    damage.truncate(victim, share)
    file = merged(run)[victim.name]
    assert file.status == "salvaged"
    assert (file.reason or "").startswith("truncated: ")
    saved = {table: count(run, table) for table in ("sample", "chunk", "attempt", "detection", "host_sample")}
    assert sum(saved.values()) < 2 * SAMPLES + 3 * CHUNKS
    assert share < 0.9 or sum(saved.values()) > 0.9 * (2 * SAMPLES + 3 * CHUNKS)
    assert file.rows_lost == 2 * SAMPLES + 3 * CHUNKS + 3 - (file.rows or 0)
    assert_the_other_is_whole(run)


def test_a_bad_page_costs_the_rows_on_it_and_no_others(run: Path, victim: Path) -> None:
    samples_before = query(victim, "SELECT * FROM sample")
    page = damage.page_with(victim, b"c030.wav")
    damage.garbage_page(victim, page, 3)
    file = merged(run)[victim.name]
    assert file.status == "salvaged"
    assert 0 < count(run, "chunk") < CHUNKS
    assert (count(run, "attempt"), count(run, "detection")) == (CHUNKS, CHUNKS)
    assert count(run, "sample") == len(samples_before)
    assert file.rows_lost == CHUNKS - count(run, "chunk")
    assert_the_other_is_whole(run)


def test_a_lost_first_page_or_a_lost_root_costs_no_row(run: Path, victim: Path) -> None:
    page = damage.pages_of_kind(victim, "table interior")[0]
    damage.zero_page(victim, page)
    damage.lose_first_page(victim)
    file = merged(run)[victim.name]
    assert file.status == "salvaged"
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)
    assert_the_other_is_whole(run)


@pytest.mark.parametrize(("at", "value"), [(68, b"\0\0\0\7"), (60, b"\0\0\0\x63"), (16, b"\x20\0"), (20, b"\x10")])
def test_a_header_that_is_damaged_costs_no_row(run: Path, victim: Path, at: int, value: bytes) -> None:
    damage.overwrite(victim, at, value)
    file = merged(run)[victim.name]
    assert (file.status, file.rows_lost) == ("salvaged", 0)
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)


def test_a_flipped_bit_that_sqlite_does_not_notice_is_noticed(run: Path, victim: Path) -> None:
    damage.flip_bit_in_cell(victim, b"LOUD sound")
    assert query(victim, "PRAGMA integrity_check") == [("ok",)]
    file = merged(run)[victim.name]
    assert (file.status, file.lost_something, file.rows_lost) == ("salvaged", True, 0)
    assert "its checksum is wrong" in (file.reason or "")
    assert count(run, "detection") == CHUNKS


def test_rows_that_went_without_a_trace_are_missed(run: Path, victim: Path) -> None:
    with closing(sqlite3.connect(victim)) as db, db:
        db.execute("DELETE FROM sample WHERE rowid % 10 = 0")
    file = merged(run)[victim.name]
    assert (file.status, file.rows_lost) == ("salvaged", SAMPLES // 10)
    assert f"lost: {SAMPLES // 10} of sample" in (file.reason or "")


def test_the_figures_of_a_salvaged_task_are_those_of_the_rows_that_were_saved(run: Path, victim: Path) -> None:
    damage.truncate(victim, 0.5)
    merged(run)
    sql = "SELECT samples FROM device_summary JOIN task USING (task_id) WHERE array_index = 0"
    assert query(run / "job.sqlite", sql) in ([(count(run, "sample"),)], [])


# --- all of it can ----------------------------------------------------------------------------------------------------


def test_a_hot_journal_is_rolled_back_on_a_copy(run: Path, victim: Path) -> None:
    journal = damage.leave_hot_journal(victim)
    before = victim.read_bytes(), journal.read_bytes()
    file = merged(run)[victim.name]
    assert (file.status, file.lost_something) == ("recovered", False)
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)
    assert (victim.read_bytes(), journal.read_bytes()) == before
    assert_the_other_is_whole(run)


def test_a_hot_journal_that_was_deleted_is_damage(run: Path, victim: Path) -> None:
    damage.leave_hot_journal(victim).unlink()
    file = merged(run)[victim.name]
    assert (file.status, file.lost_something) == ("salvaged", True)


def test_what_is_only_in_a_wal_is_merged(run: Path, victim: Path) -> None:
    wal = damage.leave_wal(victim, rows=5)
    before = victim.read_bytes(), wal.read_bytes()
    file = merged(run)[victim.name]
    assert (file.status, file.lost_something) == ("recovered", False)
    assert query(run / "job.sqlite", "SELECT count(*) FROM gap WHERE reason LIKE 'only in the WAL%'") == [(5,)]
    assert (victim.read_bytes(), wal.read_bytes()) == before


def test_a_wal_that_grows_is_read_again(run: Path, victim: Path) -> None:
    damage.leave_wal(victim, rows=2)
    merged(run)
    damage.leave_wal(victim, rows=7)
    merged(run)
    (rows,) = query(run / "job.sqlite", "SELECT count(*) FROM gap WHERE reason LIKE 'only in the WAL%'")[0]
    assert rows >= 7


def test_a_stray_journal_beside_a_sealed_file_is_not_believed(run: Path, victim: Path) -> None:
    stray = victim.with_name(victim.name + "-journal")
    stray.write_bytes(b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7" + bytes(5000))
    assert merged(run)[victim.name].status == "merged"
    assert count(run, "sample") == SAMPLES


def test_a_half_published_copy_is_left_alone_in_a_folder_and_salvaged_when_named(run: Path, victim: Path) -> None:
    half = victim.with_name(f".{victim.name}.gpu1.99.tmp")
    shutil.copy(victim, half)
    damage.truncate(half, 0.6)
    victim.unlink()
    assert list(merged(run)) == ["4821_1.r0.gpu1.sqlite"]
    assert merged(run, half)[half.name].status == "salvaged"
    assert count(run, "detection") == CHUNKS


# --- two sources of one task ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damaged_first", [True, False])
def test_a_damaged_copy_beside_a_whole_one_is_no_loss(run: Path, victim: Path, damaged_first: bool) -> None:
    name = "aaa.sqlite" if damaged_first else "zzz.sqlite"
    bad = victim.with_name(name)
    shutil.copy(victim, bad)
    damage.truncate(bad, 0.7)
    for path in [bad, victim] if damaged_first else [victim, bad]:
        files = merged(run, path)
    assert (files[victim.name].status, files[name].status) == ("merged", "copy")
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)


def test_what_an_earlier_merge_had_completes_a_file_that_is_damaged_now(run: Path, victim: Path) -> None:
    merged(run)
    page = damage.page_with(victim, b"c030.wav")
    damage.zero_page(victim, page)
    damage.truncate(victim, 0.9)
    file = merged(run)[victim.name]
    assert file.status == "salvaged"
    assert "rows added from an earlier merge: " in (file.reason or "")
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)
    assert query(run / "job.sqlite", "SELECT count(*) FROM attempt") == [(CHUNKS + 1,)]


def test_two_damaged_copies_complete_each_other(run: Path, victim: Path) -> None:
    other = victim.with_name("other.sqlite")
    shutil.copy(victim, other)
    damage.truncate(victim, 0.8)
    damage.zero_page(other, damage.pages_of_kind(other, "table leaf")[8])
    files = merged(run)
    assert {files[victim.name].status, files[other.name].status} == {"salvaged", "copy"}
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)


def test_a_file_that_was_mended_is_read_again_and_is_whole(run: Path, victim: Path) -> None:
    whole = victim.read_bytes()
    damage.truncate(victim, 0.5)
    assert merged(run)[victim.name].status == "salvaged"
    victim.write_bytes(whole)
    assert merged(run)[victim.name].status == "merged"
    assert (count(run, "sample"), count(run, "chunk"), count(run, "detection")) == (SAMPLES, CHUNKS, CHUNKS)
