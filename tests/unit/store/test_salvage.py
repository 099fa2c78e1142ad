"""Salvage: of a damaged task database, exactly the rows that SQLite can reach, and never one that was not there."""

import json
import shutil
import sqlite3
from ast import literal_eval
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.model import Reading
from rooms.store import DERIVED, TABLES, columns_of, grouped, salvage
from support import damage
from support.databases import change, names_in, query, unseal
from support.task_files import START_MS, TaskFile, merge_run

FULL = Reading(80, 41, 12 * 2**30, 67, 251.0, 1_234_567.5, 1410, 1215, 4, 55.5, 33.25)
MADE_ANEW = "its row was lost; restored from its samples"
LONG_NAME = "a chunk with a name that no page can hold " * 200
TABLE_NAMES = [table.name for table in TABLES if table.name not in DERIVED]
CHUNKS, SAMPLES, LABELS = 30, 110, ("OVEN", "BTNW", "HETH", "WTSP")
STATUS = columns_of("chunk").index("status") + 1  # after the rowid

Rows = set[tuple[str, tuple[Any, ...]]]  # (table, rowid and values)


def rows_of(path):
    """Return everything in a healthy file, but not what it says about its own bytes."""
    found = {
        (table, row)
        for table in TABLE_NAMES
        for row in query(path, f"SELECT rowid, {', '.join(columns_of(table))} FROM {table}")
    }
    return {(table, row) for table, row in found if table != "meta" or row[1] != "seal"}


class BornTaskFile(TaskFile):
    """A task whose id is made of its name and its start, as a real one's is."""

    @property
    def key(self):
        return replace(super().key, started_at_ms=self.started_at_ms)


@dataclass(frozen=True)
class Original:
    """A healthy task database and all that is in it."""

    path: Path
    content: bytes
    rows: Rows
    task_id: int

    def copy(self, folder):
        copy = folder / self.path.name
        copy.write_bytes(self.content)
        return copy


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """Two devices, chunks that heard something, some to do, and one with a name longer than a page."""
    states = {f"chunk-{number:03d}": "done" for number in range(CHUNKS)} | {LONG_NAME: "failed"}
    states |= {f"a chunk that is still to be done, number {number:03d}": "pending" for number in range(45)}
    gaps = [(number * 1000, number * 1000 + 500, f"no answer, {number}") for number in range(50)]
    folder = tmp_path_factory.mktemp("original")
    task = BornTaskFile(folder, states=states, labels=LABELS, devices=2, samples=SAMPLES, reading=FULL, gaps=gaps)
    path = task.write()
    return Original(path, path.read_bytes(), rows_of(path), task.key.task_id)


@pytest.fixture
def copy(original, tmp_path):
    return original.copy(tmp_path)


def salvaged(damaged):
    """Salvage, look into the clean file, and remove it: how many rows were saved and are lost, and the rows."""
    clean, before, others = damaged.with_name("clean.sqlite"), damaged.read_bytes(), names_in(damaged.parent)
    saved = salvage(damaged, clean)
    rows = set[Any]()
    if saved:
        assert query(clean, "PRAGMA integrity_check") == [("ok",)]
        assert not [row for table in DERIVED for row in query(clean, f"SELECT * FROM {table}")], "computed later"
        assert query(clean, "SELECT * FROM meta WHERE key = 'seal'") == []
        rows = rows_of(clean)
        clean.unlink()
    assert damaged.read_bytes() == before
    assert names_in(damaged.parent) == others, "no scratch file stays"
    return *(saved or ({}, None)), rows


def as_read(rows):
    """Leave out what differs: a lost task or device row is made anew, a chunk whose detections are lost is pending."""
    kept = {(table, row) for table, row in rows if table not in ("task", "chunk") and MADE_ANEW not in row}
    return kept | {(table, row[:STATUS]) for table, row in rows if table == "chunk"}


@pytest.fixture(scope="module")
def lying_on(original, tmp_path_factory):
    """Page → the rows that need it, as SQLite says; the list of tables is one that we have."""
    found, scratch = {1: set[Any]()}, tmp_path_factory.mktemp("scratch")
    for number in range(2, damage.page_count(original.path) + 1):
        copy = original.copy(scratch)
        with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
            db.execute("SELECT * FROM task LIMIT 0")  # now it knows the tables, and has read nothing else
            damage.zero_page(copy, number)
            found[number] = {row for row in original.rows if not _is_given(db, *row)}
    return found


def _is_given(db, table, row):
    try:
        found = db.execute(f"SELECT rowid, {', '.join(columns_of(table))} FROM {table} WHERE rowid = ?", row[:1])
        return bool(found.fetchall() == [row])
    except sqlite3.DatabaseError:
        return False


def test_a_healthy_file_is_salvaged_whole_under_any_name(original, copy):
    saved, lost, rows = salvaged(copy)
    assert rows == original.rows
    counts = {name: sum(table == name for table, _ in rows) for name in TABLE_NAMES}
    assert (saved, lost) == (counts | {"meta": counts["meta"] + 1}, {})
    assert salvaged(copy.rename(copy.with_name("under any name.sqlite")))[2] == original.rows


KINDS = ["zeros", "noise", "leaf", "bits", "cut", "half copied"]


@given(kind=st.sampled_from(KINDS), places=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=6))
@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_costs_the_rows_that_need_its_pages_and_those_between_two(
    original, lying_on, tmp_path, kind, places
):
    copy, last, size = original.copy(tmp_path), max(lying_on), len(original.content)
    pages = {1 + int(place * last) for place in places}
    if kind in ("cut", "half copied"):
        left = (damage.truncate if kind == "cut" else damage.half_copied)(copy, places[0])
        pages = set(range(left // 4096 + 1, last + 1))
    elif kind == "bits":
        for at in {int(place * size) for place in places}:
            damage.overwrite(copy, at, bytes([original.content[at] ^ 1 << at % 8]))
    else:
        harm = {"zeros": damage.zero_page, "noise": damage.garbage_page, "leaf": damage.garbage_leaf_page}[kind]
        for number in pages:
            harm(copy, number)
    left_rows = as_read(original.rows) - as_read(set().union(*(lying_on[number] for number in pages)))
    if not any(table != "meta" for table, _ in left_rows):
        return
    rows = as_read(salvaged(copy)[2])
    assert rows <= left_rows
    rows_in = grouped((table, row[0]) for table, row in rows)
    for table, lost in grouped((table, row[0]) for table, row in as_read(original.rows) - rows).items():
        between = [number for number in rows_in[table] if min(lost) < number < max(lost)]
        assert not between, "read from both ends"
    if len(pages) == 1:
        assert rows == left_rows


def pages_of(path):
    content = path.read_bytes()
    return [content[start : start + 4096] for start in range(0, len(content), 4096)]


def test_pages_of_another_task_or_of_an_earlier_publication_are_not_read(original, tmp_path):
    task = BornTaskFile(tmp_path, states={"a": "done"}, samples=300, reading=replace(FULL, temperature_c=66))
    earlier = pages_of(task.write())
    task.reading = FULL
    path = task.write()
    now, rows = pages_of(path), as_read(rows_of(path))
    for others in (earlier, pages_of(original.path)):
        path.write_bytes(b"".join([*now[:-5], *others[len(now) - 5 : len(now)]]))
        assert as_read(salvaged(path)[2]) < rows


def forge(copy, table, column, value):
    """Give one row of a table a value that no task would write."""
    return change(copy, f"UPDATE {table} SET {column} = ? WHERE rowid = (SELECT max(rowid) FROM {table})", value)


def test_a_row_with_a_value_that_cannot_be_is_dropped_and_no_other(tmp_path):
    states = {"a": "done", "b": "failed"}
    path = BornTaskFile(tmp_path, states=states, samples=3, reading=FULL, gaps=[(1, 2, "no answer")]).write()
    content = path.read_bytes()
    for line in (Path(__file__).parents[2] / "data" / "salvaged_values.txt").read_text().splitlines():
        fate, table, column, value = line.split(" ", 3)
        path.write_bytes(content)
        forge(path, table, column, literal_eval(value))
        lost = {name for name, _ in rows_of(path) - salvaged(path)[2]}
        again = {"chunk"} if table == "detection" else set()  # a chunk that lacks a detection is pending again
        assert lost - again == (set() if fate == "kept" else {table}), line


def lose_task_row(path):
    damage.zero_page(path, damage.page_with(path, path.stem.encode()))
    return path


def reported(rows, table):
    """Return what the rows of a table say, without what is not known."""
    found = sorted(row[1:] for name, row in rows if name == table)
    return [{n: v for n, v in zip(columns_of(table), row, strict=True) if v is not None} for row in found]


def test_a_lost_task_row_is_made_anew_and_counts_as_lost(original, copy, tmp_path):
    forge(copy, "sample", "task_id", original.task_id ^ 1 << 40)  # a flipped bit is no second task
    saved, lost, rows = salvaged(lose_task_row(copy))
    assert (saved["task"], lost) == (0, {"task": 1, "sample": 1})
    assert reported(rows, "task") == [{
        "task_id": original.task_id, "name": copy.stem, "job_id": "4821", "array_index": 0, "restart": 0,
        "node": "gpu1", "telemetry": 1, "version": "unknown", "started_at_ms": START_MS,
    }]  # fmt: skip
    assert [table for table, _ in as_read(original.rows) - as_read(rows)] == ["sample"]
    silent = lose_task_row(TaskFile(tmp_path / "x", states={"a": "done"}, samples=0).write())
    (task,) = reported(salvaged(silent)[2], "task")
    assert (task["telemetry"], task["started_at_ms"]) == (0, START_MS)


def test_rows_that_do_not_say_whose_they_are_are_not_given_to_any_task(copy, tmp_path):
    content = lose_task_row(copy).read_bytes()
    for name in ("copy of my file.sqlite", f".{copy.name}.gpu1.99.sqlite", ".4821_0.r0.gpu1.sqlite"):
        (tmp_path / name).write_bytes(content)
        assert not salvaged(tmp_path / name)[2], "its name tells no task, or an unfinished copy"
    other = BornTaskFile(tmp_path / "other", index=9, states={"z": "done"}, samples=200).write()
    damage.overwrite(copy, 0, other.read_bytes())
    assert not salvaged(damage.unstamp(copy))[2], "it is another task's"
    first, second = (TaskFile(tmp_path / "two", index=index).write() for index in (1, 2))
    (row,) = query(second, "SELECT * FROM task")
    change(first, f"INSERT INTO task VALUES ({', '.join('?' * len(row))})", *row)
    assert not salvaged(Path(shutil.copy(first, tmp_path / "job.sqlite")))[2], "a job database has several"


def test_lost_devices_are_made_anew_from_their_samples(original, copy):
    devices = sorted(row[1] for table, row in original.rows if table == "device")
    damage.zero_page(copy, damage.page_with(copy, b"Tesla V100"))
    saved, lost, rows = salvaged(copy)
    assert as_read(rows) == as_read({row for row in original.rows if row[0] != "device"})
    facts = {"task_id": original.task_id, "token": "?", "backend": "none", "why": MADE_ANEW}
    assert reported(rows, "device") == [{"device_id": device, **facts} for device in devices]
    assert (saved["device"], lost) == (0, {"device": 2})


def test_a_chunk_whose_detections_are_lost_is_to_be_done_again(original, copy):
    pages = {n: original.content[(n - 1) * 4096 : n * 4096] for n in damage.table_leaves(copy)}
    damage.zero_page(copy, next(n for n, page in pages.items() if page.count(b"OVEN") > 3))
    saved, lost, rows = salvaged(copy)
    assert lost == {"detection": CHUNKS * len(LABELS) - saved["detection"]}
    heard = [row["chunk_id"] for row in reported(rows, "detection")]
    chunks = [chunk for chunk in reported(rows, "chunk") if chunk["chunk_id"].startswith("chunk-")]
    for chunk in chunks:
        wanted = ("done", 4) if heard.count(chunk["chunk_id"]) == 4 else ("pending", None)
        assert (chunk["status"], chunk.get("detections")) == wanted
    assert (len(chunks), {chunk["status"] for chunk in chunks}) == (CHUNKS, {"done", "pending"})


def test_what_a_file_says_about_its_rows_is_believed_only_where_it_makes_sense(copy):
    for text in (None, "", "12", "[]", '{"sample": "many"}', '{"sample": nu'):
        assert salvaged(change(copy, "UPDATE meta SET value = ? WHERE key = 'rows'", text))[1] is None, text
    stated = json.dumps({"sample": 100, "gap": 52, "task": 1})
    saved, lost, _ = salvaged(change(copy, "UPDATE meta SET value = ? WHERE key = 'rows'", stated))
    assert (saved["sample"], lost) == (2 * SAMPLES, {"gap": 2}), "more rows than stated are read all the same"


def test_a_list_of_tables_on_other_pages_is_read_as_far_as_it_goes(original, tmp_path):
    """As in a copy made by another program."""
    copy = tmp_path / original.path.name
    with closing(sqlite3.connect(original.path)) as old, closing(sqlite3.connect(copy)) as new:
        new.executescript("\n".join(old.iterdump()))  # in the order of their names
    damage.truncate(copy, 0.5)
    saved, _, rows = salvaged(copy)
    assert saved["attempt"] > 0 and as_read(rows) <= as_read(original.rows)


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS task_id, * FROM n"
HOSTILE = [  # a table, some of its SQL, and what a stranger writes there
    ("detection", "label TEXT", "label TEXT CHECK (label != '\ngo\n.shell touch RAN\n')"),
    ("detection", "label TEXT", "label TEXT CHECK (label != '\n.system touch RAN\n')"),
    ("host_sample", "cpu_percent REAL", "cpu_percent REAL AS (length(hex(zeroblob(400000000))))"),
    ("gap", "CREATE TABLE gap (", f"CREATE VIEW gap AS {ENDLESS} /*"),
]


@pytest.mark.parametrize("is_sealed", [True, False])
def test_nothing_that_a_file_says_is_run(original, tmp_path, monkeypatch, is_sealed):
    program = tmp_path / "bin" / "sqlite3"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/RAN\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for number, (table, old, new) in enumerate(HOSTILE):
        run = tmp_path / str(number)
        (run / "tasks").mkdir(parents=True)
        copy = original.copy(run / "tasks")
        if not is_sealed:
            unseal(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            db.execute("PRAGMA writable_schema = ON")
            db.execute("UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?", (old, new, table))
        (file,) = merge_run(run).files
        assert file.status == "salvaged" and (file.rows or 0) > 600, new
        assert "RAN" not in names_in(tmp_path), new


def test_where_no_row_is_left_nothing_is_written(original, tmp_path):
    header, size = original.content[:4096], len(original.content)
    for ruin in (b"", b"text " * 5000, b"\x17", damage.noise(5000, 2), bytes(size), header):
        copy = original.copy(tmp_path)
        copy.write_bytes(ruin)
        assert not salvaged(copy)[2], ruin[:20]
    other = tmp_path / "4821_9.r0.gpu1.sqlite"
    assert not salvaged(change(other, "CREATE TABLE people (name TEXT, born INTEGER)"))[2]
