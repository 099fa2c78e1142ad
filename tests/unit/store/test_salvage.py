"""Salvage: of a damaged task database, exactly the rows that SQLite can reach, and never one that was not there."""

from __future__ import annotations

import json
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from rooms.model import Reading, TaskKey
from rooms.store import DERIVED, TABLES, columns_of, salvage, write_figures
from support import damage
from support.databases import query
from support.task_files import START_MS, TaskFile

FULL = Reading(80, 41, 12 * 2**30, 67, 251.25, 1_234_567.5, 1410, 1215, 4, 55.5, 33.25)
MADE_ANEW = "its row was lost; restored from its samples"
LONG_NAME = "a chunk with a name that no page can hold " * 200
TABLE_NAMES = [table.name for table in TABLES if table.name not in DERIVED]

SQLITE3 = shutil.which("sqlite3")  # of this machine

Rows = set[tuple[str, tuple[Any, ...]]]  # (table, rowid and values)


def rows_of(path: Path) -> Rows:
    """Return everything in a healthy file, but not what it says about its own bytes."""
    with closing(sqlite3.connect(path)) as db:
        return {
            (table, row)
            for table in TABLE_NAMES
            for row in db.execute(f"SELECT rowid, {', '.join(columns_of(table))} FROM {table}")
            if table != "meta" or row[1] != "seal"
        }


class BornTaskFile(TaskFile):
    """A task whose id is made of its name and its start, as a real one's is; TaskFile's are those of older files."""

    @property
    def key(self) -> TaskKey:
        return replace(super().key, started_at_ms=self.started_at_ms)


@dataclass(frozen=True)
class Original:
    """A healthy task database and all that is in it."""

    path: Path
    rows: Rows
    task_id: int

    def copy(self, folder: Path) -> Path:
        copy = folder / self.path.name
        copy.write_bytes(self.path.read_bytes())
        return copy


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Two devices for five minutes; 60 chunks that heard something, some to do, one with a name longer than a page."""
    folder = tmp_path_factory.mktemp("original")
    states = {f"chunk-{number:03d}": "done" for number in range(60)} | {LONG_NAME: "failed"}
    states |= {f"a chunk that is still to be done, number {number:03d}": "pending" for number in range(90)}
    labels = ("OVEN", "BTNW", "HETH", "WTSP")
    gaps = [(number * 1000, number * 1000 + 500, f"no answer, {number}") for number in range(100)]
    task = BornTaskFile(folder, states=states, labels=labels, devices=2, samples=300, reading=FULL, gaps=gaps)
    path = task.write()
    return Original(path, rows_of(path), task.key.task_id)


@pytest.fixture
def copy(original: Original, tmp_path: Path) -> Path:
    return original.copy(tmp_path)


Result = tuple[dict[str, int], dict[str, int] | None]  # rows that were read, and that are lost, by table


def salvaged_rows(damaged: Path) -> tuple[Result, Rows]:
    """Salvage, look into the clean file, and remove it."""
    clean = damaged.with_name("clean.sqlite")
    before = damaged.read_bytes()
    result = salvage(damaged, clean)
    assert result is not None
    assert damaged.read_bytes() == before
    with closing(sqlite3.connect(clean)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    rows = rows_of(clean)
    clean.unlink()
    return result, rows


STATUS = columns_of("chunk").index("status") + 1  # after the rowid


def without_made_up(rows: Rows) -> Rows:
    """Leave out what differs: a lost task or device row is made anew, a chunk whose detections are lost is pending."""
    kept = {(table, row) for table, row in rows if table not in ("task", "chunk") and MADE_ANEW not in row}
    return kept | {(table, row[:STATUS]) for table, row in rows if table == "chunk"}


@pytest.fixture(autouse=True)
def _no_programs(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the program sqlite3 of this machine could add is another matter."""
    monkeypatch.setenv("PATH", str(tmp_path_factory.mktemp("bin")))


@pytest.fixture(scope="module")
def lying_on(original: Original, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rows]:
    """Page → the rows that need it, as SQLite says; the list of tables is one that we have."""
    scratch = tmp_path_factory.mktemp("scratch")
    needed = range(2, damage.page_count(original.path) + 1)
    return {number: rows_missing_without(original, scratch, number) for number in needed}


def rows_missing_without(original: Original, scratch: Path, number: int) -> Rows:
    """Ask SQLite, row by row, which ones it cannot give any more when a page is zeros."""
    copy = original.copy(scratch)
    with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
        db.execute("SELECT * FROM task LIMIT 0")  # now it knows the tables, and has read nothing else
        damage.zero_page(copy, number)
        return {(table, row) for table, row in original.rows if not _is_given(db, table, row)}


def _is_given(db: sqlite3.Connection, table: str, row: tuple[Any, ...]) -> bool:
    try:
        found = db.execute(f"SELECT rowid, {', '.join(columns_of(table))} FROM {table} WHERE rowid = ?", row[:1])
        return bool(found.fetchall() == [row])
    except sqlite3.DatabaseError:
        return False


# --- exactly the healthy rows -----------------------------------------------------------------------------------------


def test_a_healthy_file_is_salvaged_whole(original: Original, copy: Path) -> None:
    result, rows = salvaged_rows(copy)
    assert rows == original.rows
    assert sum(result[0].values()) >= len(original.rows)
    assert result[1] == {}


def test_figures_are_left_to_be_made_anew_from_the_samples_that_are_left(copy: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean.sqlite"
    result = salvage(copy, clean)
    assert result is not None
    assert set(result[0]) == set(TABLE_NAMES)
    for table in DERIVED:
        assert query(copy, f"SELECT count(*) > 0 FROM {table}") == [(1,)]
        assert query(clean, f"SELECT count(*) FROM {table}") == [(0,)]


def test_a_zeroed_page_costs_exactly_the_rows_that_lay_on_it(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path
) -> None:
    pages = range(1, damage.page_count(original.path) + 1)
    for number in pages:
        copy = original.copy(tmp_path)
        damage.zero_page(copy, number)
        _, rows = salvaged_rows(copy)
        gone = without_made_up(lying_on.get(number, set()))
        assert without_made_up(rows) == without_made_up(original.rows) - gone, f"page {number}"
    kinds = {damage.page_kind(original.path, number) for number in pages}
    assert kinds == {"table leaf", "table interior", "index leaf", "index interior", "overflow"}


@pytest.mark.parametrize("damage_of", [damage.truncate, damage.half_copied], ids=["cut off", "zeros"])
def test_a_file_cut_short_gives_the_rows_of_the_pages_before_the_cut(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path, damage_of: Callable[[Path, float], int]
) -> None:
    clean = tmp_path / "clean.sqlite"
    gotten = []
    for percent in range(1, 100, 3):
        copy = original.copy(tmp_path)
        whole_pages, rest = divmod(damage_of(copy, percent / 100), 4096)
        cut_page = whole_pages + 1 if rest else None
        gone = without_made_up(set().union(*(rows for n, rows in lying_on.items() if n > whole_pages)))
        surely_gone = set().union(*(rows for n, rows in lying_on.items() if n > whole_pages and n != cut_page))
        rows = rows_of(clean) if salvage(copy, clean) else set()
        clean.unlink(missing_ok=True)
        left = without_made_up(original.rows) - gone
        if any(table != "meta" for table, _ in left):
            assert left <= without_made_up(rows), f"{percent} %"
        assert without_made_up(rows) <= without_made_up(original.rows - surely_gone), f"{percent} %"
        gotten.append(len(rows))
    assert gotten == sorted(gotten)
    assert gotten[0] == 0
    assert gotten[-1] > len(original.rows) * 0.9


def test_many_bad_pages_at_once_cost_their_own_rows_only(
    original: Original, lying_on: dict[int, Rows], copy: Path
) -> None:
    bad = damage.pages_of_kind(original.path, "table leaf")[::3] + damage.pages_of_kind(original.path, "table interior")
    for number in bad:
        damage.garbage_page(copy, number, seed=number)
    _, rows = salvaged_rows(copy)
    gone = set().union(*(lying_on.get(number, set()) for number in bad))
    assert without_made_up(rows) == without_made_up(original.rows) - without_made_up(gone)
    assert 0 < len(rows) < len(original.rows)


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_without_its_first_page_no_row_is_lost(original: Original, copy: Path, seed: int | None) -> None:
    damage.lose_first_page(copy, seed)
    result, rows = salvaged_rows(copy)
    assert rows == original.rows
    assert result[1] == {}


def test_noise_in_the_shape_of_a_page_adds_no_row(original: Original, tmp_path: Path) -> None:
    number = damage.pages_of_kind(original.path, "table leaf")[-1]
    for seed in range(20):
        copy = original.copy(tmp_path)
        damage.garbage_leaf_page(copy, number, seed)
        _, rows = salvaged_rows(copy)
        assert without_made_up(rows) < without_made_up(original.rows)


# --- what cannot be true ----------------------------------------------------------------------------------------------


def forged(copy: Path, table: str, **values: object) -> Path:
    """Give one row of a table values that no task would write."""
    with closing(sqlite3.connect(copy)) as db, db:
        assignments = ", ".join(f"{name} = ?" for name in values)
        sql = f"UPDATE {table} SET {assignments} WHERE rowid = (SELECT max(rowid) FROM {table})"
        assert db.execute(sql, tuple(values.values())).rowcount == 1
    return copy


@pytest.mark.parametrize(
    ("table", "values"),
    [
        ("sample", {"at_ms": 12}),
        ("sample", {"at_ms": 4_102_444_800_001}),
        ("sample", {"utilization_percent": 101}),
        ("sample", {"memory_utilization_percent": -1}),
        ("sample", {"sm_activity_percent": 100.5}),
        ("sample", {"memory_used_bytes": -1}),
        ("sample", {"power_w": float("inf")}),
        ("sample", {"device_id": -5}),
        ("sample", {"task_id": 12345}),
        ("host_sample", {"cpu_percent": 200.0}),
        ("host_sample", {"memory_total_bytes": -(2**40)}),
        ("gap", {"from_ms": 0}),
        ("gap", {"reason": "no ans\0\0\0\0"}),
        ("chunk", {"status": "dome"}),
        ("attempt", {"outcome": "faiied"}),
        ("device", {"task_id": 1}),
        ("worker", {"started_at_ms": 2**60}),
    ],
    ids=str,
)
def test_a_row_with_a_value_that_cannot_be_is_dropped(
    original: Original, copy: Path, table: str, values: dict[str, object]
) -> None:
    _, rows = salvaged_rows(forged(copy, table, **values))
    lost = original.rows - rows
    assert [name for name, _ in lost] == [table]
    assert without_made_up(rows) < without_made_up(original.rows)


def test_a_number_without_a_fraction_comes_back_as_the_real_that_it_was(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, samples=2, reading=replace(FULL, power_w=250.0)).write()
    assert salvage(path, tmp_path / "clean.sqlite") is not None
    assert query(tmp_path / "clean.sqlite", "SELECT DISTINCT power_w, typeof(power_w) FROM sample") == [(250.0, "real")]


# --- whose rows -------------------------------------------------------------------------------------------------------


def lose_task_row(path: Path) -> None:
    damage.zero_page(path, damage.page_with(path, path.stem.encode()))


def test_a_lost_task_row_is_made_anew_from_the_name_of_the_file(original: Original, copy: Path) -> None:
    lose_task_row(copy)
    result, rows = salvaged_rows(copy)
    assert result[0]["task"] == 0
    ((_, *values),) = (row for table, row in rows if table == "task")
    task = {name: value for name, value in zip(columns_of("task"), values, strict=True) if value is not None}
    assert task == {
        "task_id": original.task_id, "name": copy.stem, "job_id": "4821", "array_index": 0, "restart": 0,
        "node": "gpu1", "telemetry": 1, "version": "unknown", "started_at_ms": START_MS,
    }  # fmt: skip
    assert without_made_up(rows) == without_made_up(original.rows)


def test_a_task_made_anew_without_samples_says_that_there_was_no_telemetry(tmp_path: Path) -> None:
    path = TaskFile(tmp_path, states={"a": "done"}, samples=0).write()
    lose_task_row(path)
    assert salvage(path, tmp_path / "clean.sqlite") is not None
    assert query(tmp_path / "clean.sqlite", "SELECT telemetry, started_at_ms FROM task") == [(0, START_MS)]


def test_a_lost_task_row_in_a_file_with_the_name_of_no_task_leaves_nothing_to_salvage(
    copy: Path, tmp_path: Path
) -> None:
    lose_task_row(copy)
    renamed = copy.rename(copy.with_name("copy of my file.sqlite"))
    assert salvage(renamed, tmp_path / "clean.sqlite") is None
    assert not (tmp_path / "clean.sqlite").exists()


def test_a_copy_under_any_name_is_salvaged_while_its_task_row_is_there(original: Original, copy: Path) -> None:
    _, rows = salvaged_rows(copy.rename(copy.with_name("copy of my file.sqlite")))
    assert rows == original.rows


def test_a_file_overwritten_with_another_tasks_is_not_taken_for_that_tasks(copy: Path, tmp_path: Path) -> None:
    other = BornTaskFile(tmp_path / "other", index=9, states={"z": "done"}, samples=200).write()
    damage.overwritten_by(copy, other, share=1.0)
    assert salvage(copy, tmp_path / "clean.sqlite") is None


def test_a_lost_task_row_is_not_made_anew_where_the_other_rows_disagree_whose_they_are(tmp_path: Path) -> None:
    path = BornTaskFile(tmp_path, samples=30).write()
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE sample SET task_id = 12345 WHERE rowid % 2")
    lose_task_row(path)
    assert salvage(path, tmp_path / "clean.sqlite") is None


def test_a_byte_that_flipped_in_the_id_of_one_row_is_no_second_task(original: Original, copy: Path) -> None:
    forged(copy, "sample", task_id=original.task_id ^ 1 << 40)
    lose_task_row(copy)
    _, rows = salvaged_rows(copy)
    assert [table for table, _ in without_made_up(original.rows - rows)] == ["sample"]
    assert [row[1] for table, row in rows if table == "task"] == [original.task_id]


def test_a_file_with_several_tasks_and_none_of_its_name_is_no_task_database(tmp_path: Path) -> None:
    first = TaskFile(tmp_path, index=1).write()
    second = TaskFile(tmp_path, index=2).write()
    with closing(sqlite3.connect(first)) as db, db:
        db.execute("ATTACH ? AS other", (str(second),))
        db.execute("INSERT INTO task SELECT * FROM other.task")
    assert salvage(first.rename(tmp_path / "job.sqlite"), tmp_path / "clean.sqlite") is None


@pytest.mark.parametrize(
    "key",
    [
        TaskKey("4821", 7, 0, "gpu1"),
        TaskKey("4821", 7, 12, "gpu1.cluster.example", 3),
        TaskKey("local1800000000000-4711", 0, 0, "my_node_2.r5.x"),
    ],
    ids=lambda key: str(key.name),
)
def test_the_name_of_a_file_tells_its_task(key: TaskKey) -> None:
    assert TaskKey.parse(key.name) == key


@pytest.mark.parametrize("name", ["job", "4821_7", "4821_7.r0", "4821_7.r0.", "4821_07.r0.gpu1", "x_1.rx.gpu1", ""])
def test_a_name_that_no_task_has_tells_none(name: str) -> None:
    assert TaskKey.parse(name) is None


def _detection_page(path: Path) -> int:
    return next(n for n in damage.pages_of_kind(path, "table leaf")
                if path.read_bytes()[(n - 1) * 4096 : n * 4096].count(b"OVEN") > 3)  # fmt: skip


# --- how much is lost -------------------------------------------------------------------------------------------------


def with_published_rows(path: Path, text: str | None) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('rows', ?)", (text,))
    return path


def test_the_rows_lost_are_told_when_the_file_says_how_many_it_had(original: Original, copy: Path) -> None:
    counts = {name: sum(table == name for table, _ in original.rows) for name in TABLE_NAMES if name != "meta"}
    with_published_rows(copy, json.dumps(counts))
    damage.zero_page(copy, _detection_page(copy))
    result, rows = salvaged_rows(copy)
    detections = sum(table == "detection" for table, _ in rows)
    assert result[1] == {"detection": counts["detection"] - detections}
    assert result[0] == counts | {"detection": detections, "meta": result[0]["meta"]}


def test_rows_beyond_the_number_that_a_damaged_file_states_are_read_all_the_same(
    original: Original, copy: Path
) -> None:
    with_published_rows(copy, json.dumps({"sample": 200}))
    result, rows = salvaged_rows(copy)
    assert result[0]["sample"] == 600
    assert {row for row in rows if row[0] != "meta"} == {row for row in original.rows if row[0] != "meta"}


def test_a_lost_task_row_counts_as_lost_though_it_is_made_anew(copy: Path) -> None:
    with_published_rows(copy, json.dumps({"task": 1, "device": 2}))
    lose_task_row(copy)
    result, _ = salvaged_rows(copy)
    assert result[1] == {"task": 1}


def test_a_lost_device_row_is_made_anew_from_its_samples_and_counts_as_lost(original: Original, copy: Path) -> None:
    devices = sorted(row[1] for table, row in original.rows if table == "device")
    damage.zero_page(copy, damage.page_with(copy, b"Tesla V100"))
    result, rows = salvaged_rows(copy)
    assert without_made_up(rows) == without_made_up({row for row in original.rows if row[0] != "device"})
    made = [dict(zip(columns_of("device"), row[1:], strict=True)) for table, row in rows if table == "device"]
    told = [{name: value for name, value in row.items() if value is not None} for row in made]
    facts = {"task_id": original.task_id, "token": "?", "backend": "none", "why": MADE_ANEW}
    assert sorted(told, key=lambda row: row["device_id"]) == [{"device_id": device, **facts} for device in devices]
    assert (result[0]["device"], result[1]) == (0, {"device": 2})


def test_samples_of_a_lost_device_are_added_up_like_those_of_any_other(copy: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean.sqlite"
    damage.zero_page(copy, damage.page_with(copy, b"Tesla V100"))
    assert salvage(copy, clean) is not None
    with closing(sqlite3.connect(clean)) as db, db:
        ((task_id,),) = db.execute("SELECT task_id FROM task").fetchall()
        write_figures(db, task_id)
    assert query(clean, "SELECT samples FROM device_total") == [(300,), (300,)]


@pytest.mark.parametrize("text", [None, "", "12", "[]", '{"sample": "many"}', '{"sample": nu'])
def test_when_the_file_cannot_say_how_many_rows_it_had_nobody_knows_the_loss(copy: Path, text: str | None) -> None:
    result, _ = salvaged_rows(with_published_rows(copy, text))
    assert result[1] is None


def test_the_clean_file_carries_no_seal_of_other_bytes(copy: Path, tmp_path: Path) -> None:
    with closing(sqlite3.connect(copy)) as db, db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('seal', 'crc32:00000000')")
    assert salvage(copy, tmp_path / "clean.sqlite") is not None
    assert "seal" not in dict(query(tmp_path / "clean.sqlite", "SELECT key, value FROM meta"))


def test_a_list_of_tables_that_is_cut_is_read_as_far_as_it_goes(original: Original, tmp_path: Path) -> None:
    """A copy made by another program has its tables on other pages than ours; its own list says where."""
    copy = tmp_path / original.path.name
    with closing(sqlite3.connect(original.path)) as old, closing(sqlite3.connect(copy)) as new:
        new.executescript("\n".join(old.iterdump()))  # in the order of their names
    damage.truncate(copy, 0.5)
    result, rows = salvaged_rows(copy)
    assert result[0]["attempt"] > 0
    assert without_made_up(rows) <= without_made_up(original.rows)


# --- chunks that are to be done again, and what the program sqlite3 adds ----------------------------------------------


def test_a_chunk_whose_detections_are_lost_is_pending_again(copy: Path, tmp_path: Path) -> None:
    clean = tmp_path / "clean.sqlite"
    damage.zero_page(copy, _detection_page(copy))
    assert salvage(copy, clean) is not None
    short = """SELECT count(*), group_concat(DISTINCT status), max(detections) FROM chunk c
               WHERE chunk_id LIKE 'chunk-%'
               AND (SELECT count(*) FROM detection d WHERE d.chunk_id = c.chunk_id) {} 4"""
    ((pending, states, told),) = query(clean, short.format("<"))
    assert (pending > 0, states, told) == (True, "pending", None)
    ((done, states, told),) = query(clean, short.format("="))
    assert (done, states, told) == (60 - pending, "done", 4)


FAKE_SQLITE3 = """#!{python}
import sqlite3, sys
if sys.argv[2:] == [".recover"]:
    print({sql!r})
else:
    sqlite3.connect(sys.argv[1]).executescript(sys.stdin.read())
"""


def test_rows_that_only_the_program_sqlite3_finds_are_added(
    original: Original, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page above others is lost; .recover gives the rows below it, without the name of their table."""
    hosts = sorted(row for table, row in original.rows if table == "host_sample")
    (device,) = (row for table, row in original.rows if table == "device" and row[3:5] == ("GPU-0", 0))
    columns = ", ".join(f"c{number}" for number in range(20))
    found = [(0, 7, len(row) - 1, *row) for row in hosts] + [(0, 8, len(device) - 1, device[0], None, *device[2:])]
    rows = [f"({', '.join(map(_literal, (*row, *[None] * (24 - len(row)))))})" for row in found]
    sql = f"CREATE TABLE lost_and_found (rootpgno, pgno, nfield, id, {columns});"
    sql += "".join(f"INSERT INTO lost_and_found VALUES {row};" for row in rows)
    program = tmp_path / "bin" / "sqlite3"
    program.parent.mkdir()
    program.write_text(FAKE_SQLITE3.format(python=sys.executable, sql=sql))
    program.chmod(0o755)
    with closing(sqlite3.connect(copy)) as db:
        root = dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"))
    damage.zero_page(copy, root["host_sample"])
    damage.zero_page(copy, root["device"])
    without, _ = salvaged_rows(copy)
    monkeypatch.setenv("PATH", str(program.parent))
    result, rows_then = salvaged_rows(copy)
    assert (without[0]["host_sample"], without[0]["device"]) == (0, 0)
    assert (result[0]["host_sample"], result[0]["device"]) == (300, 1)
    assert {row for row in rows_then if row[0] == "host_sample"} == {("host_sample", row) for row in hosts}


@pytest.mark.skipif(SQLITE3 is None, reason="the program sqlite3 is not installed")
def test_rows_below_a_lost_page_are_found_by_the_real_program(
    original: Original, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some builds have no .recover that works; then the result is what SQL alone gives."""
    tool = str(SQLITE3)
    works = subprocess.run([tool, original.path, ".recover"], capture_output=True, check=False).returncode == 0
    hosts = {(table, row) for table, row in original.rows if table == "host_sample"}
    with closing(sqlite3.connect(copy)) as db:
        root = dict(db.execute("SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"))
    damage.zero_page(copy, root["host_sample"])
    without, _ = salvaged_rows(copy)
    monkeypatch.setenv("PATH", str(Path(tool).parent))
    result, rows_then = salvaged_rows(copy)
    assert without[0]["host_sample"] == 0
    assert {row for row in rows_then if row[0] == "host_sample"} == (hosts if works else set())
    assert result[0] == {**without[0], "host_sample": len(hosts) if works else 0}, "and nothing else"


def _literal(value: object) -> str:
    return "NULL" if value is None else repr(value)


# --- nothing at all ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ruin",
    [
        damage.make_empty,
        damage.replace_with_text,
        lambda path: damage.replace_with_noise(path, 1, seed=1),
        lambda path: damage.replace_with_noise(path, 5000, seed=2),
        lambda path: damage.replace_with_noise(path, 1_000_000, seed=3),
        lambda path: damage.half_copied(path, 0),
        lambda path: damage.truncate(path, 0.01),
    ],
    ids=["empty", "text", "a byte", "5 kB of noise", "1 MB of noise", "zeros", "the first page only"],
)
def test_where_no_row_is_left_nothing_is_written(copy: Path, tmp_path: Path, ruin: Callable[[Path], object]) -> None:
    ruin(copy)
    assert salvage(copy, tmp_path / "clean.sqlite") is None
    assert not (tmp_path / "clean.sqlite").exists()


def test_somebody_elses_database_has_nothing_for_us(tmp_path: Path) -> None:
    path = tmp_path / "4821_0.r0.gpu1.sqlite"
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("CREATE TABLE people (name TEXT, born INTEGER)")
        db.executemany("INSERT INTO people VALUES (?, ?)", [("Ada", 1815), ("Grace", 1906)])
    assert salvage(path, tmp_path / "clean.sqlite") is None


# --- the damage is real -----------------------------------------------------------------------------------------------


def test_a_hot_journal_heals_for_a_writer_and_misleads_a_reader_without_locks(original: Original, copy: Path) -> None:
    journal = damage.leave_hot_journal(copy)
    with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
        wrong = db.execute("SELECT count(*) FROM sample WHERE utilization_percent = 1").fetchone()[0]
    assert wrong > 0
    assert rows_of(copy) == original.rows  # opened for writing
    assert not journal.exists()


def test_a_file_whose_hot_journal_is_gone_is_salvaged_without_the_rows_that_never_were(
    original: Original, copy: Path
) -> None:
    damage.leave_hot_journal(copy).unlink()
    _, rows = salvaged_rows(copy)
    honest = {row for row in rows if row[0] not in ("sample", "chunk")}  # those were rewritten in place, plausibly
    assert honest <= original.rows
    assert {row for row in original.rows if row[0] in ("detection", "device", "task", "worker")} <= rows


def test_rows_committed_to_a_left_behind_wal_are_in_it_alone(original: Original, copy: Path) -> None:
    log = damage.leave_wal(copy, rows=3)
    assert b"only in the WAL 2" in log.read_bytes()
    assert b"only in the WAL" not in copy.read_bytes()
    gaps = query(copy, "SELECT reason FROM gap WHERE reason LIKE 'only in the WAL%' ORDER BY reason")
    assert gaps == [(f"only in the WAL {number}",) for number in range(3)]


def test_a_flipped_bit_in_a_cell_is_one_that_sqlite_does_not_notice(original: Original, copy: Path) -> None:
    damage.flip_bit_in_cell(copy, b"BTNW sound")
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    assert len(rows_of(copy) - original.rows) == 1
