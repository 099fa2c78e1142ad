"""Salvage: of a damaged task database, exactly the rows that SQLite can reach, and never one that was not there."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.model import Reading, TaskKey
from rooms.store import DERIVED, TABLES, columns_of, salvage
from support import damage
from support.databases import query
from support.task_files import START_MS, TaskFile

FULL = Reading(80, 41, 12 * 2**30, 67, 251.0, 1_234_567.5, 1410, 1215, 4, 55.5, 33.25)
MADE_ANEW = "its row was lost; restored from its samples"
LONG_NAME = "a chunk with a name that no page can hold " * 200
TABLE_NAMES = [table.name for table in TABLES if table.name not in DERIVED]
CHUNKS, SAMPLES, LABELS = 30, 110, ("OVEN", "BTNW", "HETH", "WTSP")
STATUS = columns_of("chunk").index("status") + 1  # after the rowid

Rows = set[tuple[str, tuple[Any, ...]]]  # (table, rowid and values)
Result = tuple[dict[str, int], dict[str, int] | None]  # rows that were read, and that are lost, by table


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
    """A task whose id is made of its name and its start, as a real one's is."""

    @property
    def key(self) -> TaskKey:
        return replace(super().key, started_at_ms=self.started_at_ms)


@dataclass(frozen=True)
class Original:
    """A healthy task database and all that is in it."""

    path: Path
    content: bytes
    rows: Rows
    task_id: int

    def copy(self, folder: Path) -> Path:
        copy = folder / self.path.name
        copy.write_bytes(self.content)
        return copy


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Original:
    """Two devices, chunks that heard something, some to do, and one with a name longer than a page."""
    states = {f"chunk-{number:03d}": "done" for number in range(CHUNKS)} | {LONG_NAME: "failed"}
    states |= {f"a chunk that is still to be done, number {number:03d}": "pending" for number in range(45)}
    gaps = [(number * 1000, number * 1000 + 500, f"no answer, {number}") for number in range(50)]
    folder = tmp_path_factory.mktemp("original")
    task = BornTaskFile(folder, states=states, labels=LABELS, devices=2, samples=SAMPLES, reading=FULL, gaps=gaps)
    path = task.write()
    return Original(path, path.read_bytes(), rows_of(path), task.key.task_id)


@pytest.fixture
def copy(original: Original, tmp_path: Path) -> Path:
    return original.copy(tmp_path)


def salvaged(damaged: Path) -> tuple[Result, Rows]:
    """Salvage, look into the clean file, and remove it."""
    clean = damaged.with_name("clean.sqlite")
    before = damaged.read_bytes()
    result = salvage(damaged, clean)
    assert result is not None
    assert damaged.read_bytes() == before
    assert query(clean, "PRAGMA integrity_check") == [("ok",)]
    rows = rows_of(clean)
    clean.unlink()
    assert [path.name for path in damaged.parent.iterdir()] == [damaged.name], "no scratch file stays"
    return result, rows


def is_lost(damaged: Path) -> bool:
    """Say whether nothing can be salvaged, and nothing is written then."""
    clean = damaged.with_name("clean.sqlite")
    return salvage(damaged, clean) is None and not clean.exists()


def as_read(rows: Rows) -> Rows:
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
    scratch, found = tmp_path_factory.mktemp("scratch"), {}
    for number in range(1, damage.page_count(original.path) + 1):
        copy = original.copy(scratch)
        with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
            db.execute("SELECT * FROM task LIMIT 0")  # now it knows the tables, and has read nothing else
            damage.zero_page(copy, number)
            found[number] = {row for row in original.rows if number > 1 and not _is_given(db, *row)}
    return found


def _is_given(db: sqlite3.Connection, table: str, row: tuple[Any, ...]) -> bool:
    try:
        found = db.execute(f"SELECT rowid, {', '.join(columns_of(table))} FROM {table} WHERE rowid = ?", row[:1])
        return bool(found.fetchall() == [row])
    except sqlite3.DatabaseError:
        return False


# --- exactly the healthy rows -----------------------------------------------------------------------------------------


def test_a_healthy_file_is_salvaged_whole_but_for_its_seal_and_its_figures(original: Original, copy: Path) -> None:
    result, rows = salvaged(copy)
    assert rows == original.rows
    counts = {name: sum(table == name for table, _ in rows) for name in TABLE_NAMES}
    assert result == (counts | {"meta": counts["meta"] + 1}, {})
    assert salvage(copy, copy.with_name("clean.sqlite")) is not None
    for table in DERIVED:
        assert query(copy.with_name("clean.sqlite"), f"SELECT count(*) FROM {table}") == [(0,)]
    assert "seal" not in dict(query(copy.with_name("clean.sqlite"), "SELECT key, value FROM meta"))
    copy.with_name("clean.sqlite").unlink()
    assert salvaged(copy.rename(copy.with_name("under any name.sqlite")))[1] == original.rows


def test_every_page_that_is_lost_alone_costs_exactly_the_rows_that_need_it(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path
) -> None:
    for number, gone in lying_on.items():
        copy = original.copy(tmp_path)
        if number % 2:
            damage.zero_page(copy, number)
        else:
            damage.garbage_page(copy, number, seed=number)
        _, rows = salvaged(copy)
        assert as_read(rows) == as_read(original.rows) - as_read(gone), f"page {number}"
    kinds = {damage.page_kind(original.path, number) for number in lying_on}
    assert kinds >= {"table leaf", "table interior", "index leaf", "overflow"}


@given(bad=st.sets(st.integers(1, 60), min_size=2, max_size=12), kind=st.sampled_from(["zeros", "noise", "a leaf"]))
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_set_of_lost_pages_costs_the_rows_that_need_them_and_no_others(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path, bad: set[int], kind: str
) -> None:
    """Noise in the shape of a leaf may hide its neighbours from SQLite; a row that never was it does not make."""
    copy, pages = original.copy(tmp_path), bad & set(lying_on)
    for number in pages:
        match kind:
            case "zeros":
                damage.zero_page(copy, number)
            case "noise":
                damage.garbage_page(copy, number, number)
            case _:
                damage.garbage_leaf_page(copy, number, number)
    left = as_read(original.rows) - as_read(set().union(*(lying_on[number] for number in pages)))
    clean = tmp_path / "clean.sqlite"
    rows = as_read(rows_of(clean)) if salvage(copy, clean) else set()
    clean.unlink(missing_ok=True)
    assert rows <= as_read(original.rows)
    assert kind == "a leaf" or rows == left or not any(table != "meta" for table, _ in left)


@pytest.mark.parametrize("cut", [damage.truncate, damage.half_copied], ids=["cut off", "zeros"])
def test_a_file_cut_short_gives_the_rows_of_the_pages_before_the_cut(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path, cut: Callable[[Path, float], int]
) -> None:
    counts = []
    for percent in (1, 12, 27, 41, 55, 68, 77, 86, 93, 99):
        copy = original.copy(tmp_path)
        whole_pages, rest = divmod(cut(copy, percent / 100), 4096)
        gone = as_read(set().union(*(rows for n, rows in lying_on.items() if n > whole_pages)))
        half = whole_pages + 1 if rest else None
        surely_gone = set().union(*(rows for n, rows in lying_on.items() if n > whole_pages and n != half))
        clean = tmp_path / "clean.sqlite"
        rows = rows_of(clean) if salvage(copy, clean) else set()
        clean.unlink(missing_ok=True)
        left = as_read(original.rows) - gone
        if any(table != "meta" for table, _ in left):
            assert left <= as_read(rows), f"{percent} %"
        assert as_read(rows) <= as_read(original.rows - surely_gone), f"{percent} %"
        counts.append(len(rows))
    assert counts == sorted(counts) and counts[0] == 0 and counts[-1] > len(original.rows) * 0.9


@given(flips=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 7)), min_size=1, max_size=4))
@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_flipped_bits_cost_at_most_the_rows_that_need_their_pages(
    original: Original, lying_on: dict[int, Rows], tmp_path: Path, flips: list[tuple[float, int]]
) -> None:
    """The list of tables is left alone: without the program sqlite3 a wrong page number there costs its table."""
    copy, roots = original.copy(tmp_path), dict(query(original.path, "SELECT rootpage, name FROM sqlite_master"))
    content, touched = bytearray(original.content), set[int]()
    for place, bit in flips:
        at = int(place * len(content))
        if (page := at // 4096 + 1) > max(roots):
            content[at] ^= 1 << bit
            touched.add(page)
    copy.write_bytes(content)
    _, rows = salvaged(copy)
    harmed = set().union(*(lying_on[page] for page in touched)) if touched else set()
    assert as_read(original.rows) - as_read(harmed) <= as_read(rows)


# --- what cannot be true ----------------------------------------------------------------------------------------------


def forge(copy: Path, table: str, **values: object) -> Path:
    """Give one row of a table values that no task would write."""
    with closing(sqlite3.connect(copy)) as db, db:
        assignments = ", ".join(f"{name} = ?" for name in values)
        sql = f"UPDATE {table} SET {assignments} WHERE rowid = (SELECT max(rowid) FROM {table})"
        assert db.execute(sql, tuple(values.values())).rowcount == 1
    return copy


YEAR_2000_MS, YEAR_2100_MS = 946_684_800_000, 4_102_444_800_000
POSSIBLE: dict[str, dict[str, tuple[object, ...]]] = {
    "sample": {
        "at_ms": (YEAR_2000_MS, YEAR_2100_MS - 1), "utilization_percent": (0, 100, None), "power_w": (0.0, -1.5, None),
        "memory_used_bytes": (0,), "sm_activity_percent": (100.0,), "device_id": (0,), "throttle_reasons": (-1,),
    },
    "attempt": {"outcome": ("lost", None)}, "gap": {"metric": ("power_w", None)},
    "chunk": {"status": ("poison", "skipped"), "start_ms": (0,), "audio_s": (-1.0,)},
    "task": {"verdict": ("done", "failed", "stopped", "killed", None)},
}  # fmt: skip
IMPOSSIBLE: dict[str, dict[str, tuple[object, ...]]] = {
    "sample": {
        "at_ms": (12, YEAR_2000_MS - 1, YEAR_2100_MS), "utilization_percent": (101, -1), "device_id": (-5,),
        "sm_activity_percent": (100.5,), "memory_used_bytes": (-1,), "power_w": (float("inf"),), "task_id": (12345,),
    },
    "host_sample": {"cpu_percent": (200.0,)}, "gap": {"from_ms": (0,), "reason": ("no ans\0\0\0\0",)},
    "chunk": {"status": ("dome",)}, "attempt": {"outcome": ("faiied",)}, "worker": {"started_at_ms": (2**60,)},
    "device": {"task_id": (1,)}, "task": {"verdict": ("dome",)},
}  # fmt: skip


def test_a_row_with_a_value_that_cannot_be_is_dropped_and_no_other(tmp_path: Path) -> None:
    states = {"a": "done", "b": "failed"}
    path = BornTaskFile(tmp_path / "x", states=states, samples=3, reading=FULL, gaps=[(1, 2, "no answer")]).write()
    content, whole = path.read_bytes(), rows_of(path)
    folder = tmp_path / "copies"
    folder.mkdir()
    for is_possible, cases in ((True, POSSIBLE), (False, IMPOSSIBLE)):
        for table, columns in cases.items():
            for column, values in columns.items():
                for value in values:
                    copy = folder / path.name
                    copy.write_bytes(content)
                    forge(copy, table, **{column: value})
                    lost = [name for name, _ in rows_of(copy) - salvaged(copy)[1]]
                    assert lost == ([] if is_possible else [table]), (table, column, value)
    assert {("real",)} == set(query(path, "SELECT DISTINCT typeof(power_w) FROM sample")) and whole


# --- whose rows -------------------------------------------------------------------------------------------------------


def lose_task_row(path: Path) -> Path:
    damage.zero_page(path, damage.page_with(path, path.stem.encode()))
    return path


def test_a_lost_task_row_is_made_anew_from_the_name_of_the_file_and_counts_as_lost(
    original: Original, copy: Path, tmp_path: Path
) -> None:
    forge(copy, "sample", task_id=original.task_id ^ 1 << 40)  # a flipped bit is no second task
    result, rows = salvaged(lose_task_row(copy))
    assert (result[0]["task"], result[1]) == (0, {"task": 1, "sample": 1})
    ((_, *values),) = (row for table, row in rows if table == "task")
    task = {name: value for name, value in zip(columns_of("task"), values, strict=True) if value is not None}
    assert task == {
        "task_id": original.task_id, "name": copy.stem, "job_id": "4821", "array_index": 0, "restart": 0,
        "node": "gpu1", "telemetry": 1, "version": "unknown", "started_at_ms": START_MS,
    }  # fmt: skip
    assert [table for table, _ in as_read(original.rows) - as_read(rows)] == ["sample"]
    silent = lose_task_row(TaskFile(tmp_path / "x", states={"a": "done"}, samples=0).write())
    assert salvage(silent, tmp_path / "clean.sqlite") is not None
    assert query(tmp_path / "clean.sqlite", "SELECT telemetry, started_at_ms FROM task") == [(0, START_MS)]


def test_rows_that_do_not_say_whose_they_are_are_not_given_to_any_task(copy: Path, tmp_path: Path) -> None:
    lose_task_row(copy)
    content = copy.read_bytes()
    for name in ("copy of my file.sqlite", f".{copy.name}.gpu1.99.sqlite", ".4821_0.r0.gpu1.sqlite"):
        renamed = tmp_path / name
        renamed.write_bytes(content)
        assert is_lost(renamed), "its name tells no task, or an unfinished copy"
    other = BornTaskFile(tmp_path / "other", index=9, states={"z": "done"}, samples=200).write()
    damage.overwritten_by(copy, other, share=1.0)
    assert is_lost(copy), "it is another task's"
    mixed = BornTaskFile(tmp_path / "mixed", samples=30).write()
    with closing(sqlite3.connect(mixed)) as db, db:
        db.execute("UPDATE sample SET task_id = 12345 WHERE rowid % 2")
    assert is_lost(lose_task_row(mixed)), "they disagree"
    first, second = (TaskFile(tmp_path / "two", index=index).write() for index in (1, 2))
    with closing(sqlite3.connect(first)) as db, db:
        db.execute("ATTACH ? AS other", (str(second),))
        db.execute("INSERT INTO task SELECT * FROM other.task")
    assert is_lost(Path(shutil.copy(first, tmp_path / "job.sqlite"))), "a job database has several"


def test_lost_devices_are_made_anew_from_their_samples(original: Original, copy: Path) -> None:
    devices = sorted(row[1] for table, row in original.rows if table == "device")
    damage.zero_page(copy, damage.page_with(copy, b"Tesla V100"))
    result, rows = salvaged(copy)
    assert as_read(rows) == as_read({row for row in original.rows if row[0] != "device"})
    made = [dict(zip(columns_of("device"), row[1:], strict=True)) for table, row in rows if table == "device"]
    told = [{name: value for name, value in row.items() if value is not None} for row in made]
    facts = {"task_id": original.task_id, "token": "?", "backend": "none", "why": MADE_ANEW}
    assert sorted(told, key=lambda row: row["device_id"]) == [{"device_id": device, **facts} for device in devices]
    assert (result[0]["device"], result[1]) == (0, {"device": 2})


def test_a_chunk_whose_detections_are_lost_is_to_be_done_again(original: Original, copy: Path, tmp_path: Path) -> None:
    leaf = next(n for n in damage.pages_of_kind(copy, "table leaf")
                if original.content[(n - 1) * 4096 : n * 4096].count(b"OVEN") > 3)  # fmt: skip
    damage.zero_page(copy, leaf)
    saved, lost = salvage(copy, tmp_path / "clean.sqlite") or ({}, None)
    assert lost == {"detection": CHUNKS * len(LABELS) - saved["detection"]}
    heard = "(SELECT count(*) FROM detection d WHERE d.chunk_id = c.chunk_id)"
    told = query(
        tmp_path / "clean.sqlite",
        f"SELECT {heard} = 4, status, detections, count(*) FROM chunk c WHERE chunk_id LIKE 'chunk-%' GROUP BY 1, 2, 3",
    )
    assert [row[:3] for row in told] == [(0, "pending", None), (1, "done", 4)]
    assert sum(row[3] for row in told) == CHUNKS


# --- how much is lost -------------------------------------------------------------------------------------------------


def with_published_rows(path: Path, text: str | None) -> Path:
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("INSERT OR REPLACE INTO meta VALUES ('rows', ?)", (text,))
    return path


def test_what_a_file_says_about_its_rows_is_believed_only_where_it_makes_sense(copy: Path) -> None:
    for text in (None, "", "12", "[]", '{"sample": "many"}', '{"sample": nu'):
        assert salvaged(with_published_rows(copy, text))[0][1] is None, text
    result, _ = salvaged(with_published_rows(copy, json.dumps({"sample": 100, "gap": 52, "task": 1})))
    assert (result[0]["sample"], result[1]) == (2 * SAMPLES, {"gap": 2}), "more rows than stated are read all the same"


def test_a_list_of_tables_on_other_pages_is_read_as_far_as_it_goes(original: Original, tmp_path: Path) -> None:
    """As in a copy made by another program."""
    copy = tmp_path / original.path.name
    with closing(sqlite3.connect(original.path)) as old, closing(sqlite3.connect(copy)) as new:
        new.executescript("\n".join(old.iterdump()))  # in the order of their names
    damage.truncate(copy, 0.5)
    result, rows = salvaged(copy)
    assert result[0]["attempt"] > 0
    assert as_read(rows) <= as_read(original.rows)


# --- the program sqlite3, and nothing at all --------------------------------------------------------------------------

FAKE_SQLITE3 = """#!{python}
import sqlite3, sys
if sys.argv[2:] == [".recover"]:
    print({sql!r})
else:
    sqlite3.connect(sys.argv[1]).executescript(sys.stdin.read())
"""


def test_rows_that_only_the_program_sqlite3_finds_are_added_to_the_one_table_that_they_fit(
    original: Original, copy: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages above others are lost; .recover gives the rows below them, some without the name of their table."""
    hosts = sorted(row for table, row in original.rows if table == "host_sample")
    workers = sorted(row for table, row in original.rows if table == "worker")
    (device,) = (row for table, row in original.rows if table == "device" and row[3:5] == ("GPU-0", 0))
    found = [(0, 7, len(row) - 1, *row) for row in hosts] + [(0, 8, len(device) - 1, device[0], None, *device[2:])]
    found += [(0, 9, 2, 5, "fits", "meta"), (0, 9, 3, 5, "fits", "nothing", 1)]
    rows = [
        f"({', '.join('NULL' if v is None else repr(v) for v in (*row, *[None] * (24 - len(row))))})" for row in found
    ]
    columns = ", ".join(f"c{number}" for number in range(20))
    sql = f"CREATE TABLE lost_and_found (rootpgno, pgno, nfield, id, {columns});"
    sql += "".join(f"INSERT INTO lost_and_found VALUES {row};" for row in rows)
    sql += f"CREATE TABLE worker ({', '.join(columns_of('worker'))});"
    sql += "".join(
        f"INSERT INTO worker VALUES ({', '.join('NULL' if v is None else repr(v) for v in row[1:])});"
        for row in workers
    )
    program = tmp_path_factory.mktemp("program") / "sqlite3"
    program.write_text(FAKE_SQLITE3.format(python=sys.executable, sql=sql))
    program.chmod(0o755)
    root = dict(query(copy, "SELECT name, rootpage FROM sqlite_master WHERE type = 'table'"))
    lost = ("host_sample", "device", "worker")
    for table in lost:
        damage.zero_page(copy, root[table])
    assert [salvaged(copy)[0][0][table] for table in lost] == [0, 0, 0]
    monkeypatch.setenv("PATH", str(program.parent))
    result, rows_then = salvaged(copy)
    assert [result[0][table] for table in lost] == [SAMPLES, 1, len(workers)]
    assert {row for row in rows_then if row[0] == "host_sample"} == {("host_sample", row) for row in hosts}
    assert ("meta", ("fits", "meta")) in {(table, row[1:]) for table, row in rows_then}


RUINS: dict[str, Callable[[Path], object]] = {
    "empty": damage.make_empty,
    "text": damage.replace_with_text,
    "a byte": lambda path: damage.replace_with_noise(path, 1, seed=1),
    "5 kB of noise": lambda path: damage.replace_with_noise(path, 5000, seed=2),
    "zeros": lambda path: damage.half_copied(path, 0),
    "the first page only": lambda path: damage.truncate(path, 0.01),
}


def test_where_no_row_is_left_nothing_is_written(original: Original, tmp_path: Path) -> None:
    for name, ruin in RUINS.items():
        copy = original.copy(tmp_path)
        ruin(copy)
        assert is_lost(copy), name
    other = tmp_path / "4821_9.r0.gpu1.sqlite"
    with closing(sqlite3.connect(other)) as db, db:
        db.execute("CREATE TABLE people (name TEXT, born INTEGER)")
    assert is_lost(other)
