"""Salvage: of a damaged task database, exactly the rows that SQLite can reach, and never one that was not there."""

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rooms.model import Reading
from rooms.store import DERIVED, TABLES, columns_of, grouped, move_into_place, salvage
from support import damage
from support.databases import names_in, query, unpublish
from support.task_files import TaskFile, merge_run

FULL = Reading(80, 41, 12 * 2**30, 67, 251.0, 1_234_567.5, 1410, 1215, 4, 55.5, 33.25)
LONG_NAME = "a chunk with a name that no page can hold " * 200
TABLE_NAMES = [table for table in TABLES if table not in DERIVED]
CHUNKS, SAMPLES, LABELS = 30, 110, ("OVEN", "BTNW", "HETH", "WTSP")
STATUS = columns_of("chunk").index("status") + 1  # after the rowid

Rows = set[tuple[str, tuple[Any, ...]]]  # (table, rowid and values)


def rows_of(path):
    """Return everything in a healthy file, but not what it says about its own rows."""
    found = {
        (table, row)
        for table in TABLE_NAMES
        for row in query(path, f"SELECT rowid, {', '.join(columns_of(table))} FROM {table}")
    }
    return {(table, row) for table, row in found if table != "meta" or row[1] != "rows"}


class BornTaskFile(TaskFile):
    """A task whose id is made of its name and its start, as a real one's is."""

    @property
    def key(self):
        return replace(super().key, started_at_ms=self.started_at_ms)


@dataclass(frozen=True)
class Original:
    """A healthy task database and all that is in it."""

    path: Path
    content: bytes = field(repr=False)
    rows: Rows = field(repr=False)
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
    """Salvage, look into the clean file, and remove it: how many rows are lost, and the rows."""
    clean, before = damaged.with_name("clean.sqlite"), damaged.read_bytes()
    clean.unlink(missing_ok=True)
    lost = salvage(damaged, clean)
    assert query(clean, "PRAGMA integrity_check") == [("ok",)]
    rows = rows_of(clean)
    clean.unlink()
    assert damaged.read_bytes() == before
    return lost, rows


def as_read(rows):
    """Leave out what differs: a chunk whose detections are lost is pending."""
    return {(table, row[:STATUS] if table == "chunk" else row) for table, row in rows}


@pytest.fixture(scope="module")
def lying_on(original, tmp_path_factory):
    """Page → the rows that need it, as SQLite says; None: the list of tables or the row of the task needs it."""
    found, scratch = dict[int, Any]({1: None}), tmp_path_factory.mktemp("scratch")
    for number in range(2, damage.page_count(original.path) + 1):
        copy = original.copy(scratch)
        with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
            db.execute("SELECT * FROM task LIMIT 0")  # now it knows the tables, and has read nothing else
            damage.zero_page(copy, number)
            found[number] = {row for row in original.rows if not _is_given(db, *row)}
        with closing(sqlite3.connect(f"file:{copy}?mode=ro&immutable=1", uri=True)) as db:
            try:
                assert db.execute("SELECT count(*) FROM task").fetchone() == (1,)
            except sqlite3.DatabaseError:
                found[number] = None
    return found


def _is_given(db, table, row):
    try:
        found = db.execute(f"SELECT rowid, {', '.join(columns_of(table))} FROM {table} WHERE rowid = ?", row[:1])
        return bool(found.fetchall() == [row])
    except sqlite3.DatabaseError:
        return False


def test_a_healthy_file_is_salvaged_whole(original, copy):
    assert salvaged(copy) == ({}, original.rows)


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
    needed = [lying_on[number] for number in pages]
    try:
        lost, saved = salvaged(copy)
    except (sqlite3.Error, ValueError):
        assert None in needed
        return
    left_rows = as_read(original.rows) - as_read(set().union(*filter(None, needed)))
    rows = as_read(saved)
    assert rows <= left_rows
    gone = Counter(table for table, _ in as_read(original.rows) - rows if table != "meta")
    assert {table: number for table, number in lost.items() if table not in DERIVED} in ({}, gone)
    if len(pages) == 1:
        beside = grouped((table, row) for table, row in left_rows - rows if table != "detection")
        assert all(len(lost_rows) <= 2 for lost_rows in beside.values()), "one on each side of the damage"


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
        assert as_read(salvaged(path)[1]) < rows


def reported(rows, table):
    """Return what the rows of a table say, without what is not known."""
    found = sorted(row[1:] for name, row in rows if name == table)
    return [{n: v for n, v in zip(columns_of(table), row, strict=True) if v is not None} for row in found]


def test_a_chunk_whose_detections_are_lost_is_to_be_done_again(original, copy):
    pages = {n: original.content[(n - 1) * 4096 : n * 4096] for n in damage.table_leaves(copy)}
    damage.zero_page(copy, next(n for n, page in pages.items() if page.count(b"OVEN") > 3))
    lost, rows = salvaged(copy)
    assert list(lost) == ["detection"]
    heard = [row["chunk_id"] for row in reported(rows, "detection")]
    chunks = [chunk for chunk in reported(rows, "chunk") if chunk["chunk_id"].startswith("chunk-")]
    for chunk in chunks:
        wanted = ("done", 4) if heard.count(chunk["chunk_id"]) == 4 else ("pending", None)
        assert (chunk["status"], chunk.get("detections")) == wanted
    assert (len(chunks), {chunk["status"] for chunk in chunks}) == (CHUNKS, {"done", "pending"})


ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i AS task_id, * FROM n"
HOSTILE = [  # a table, some of its SQL, and what a stranger writes there
    ("detection", "label TEXT", "label TEXT CHECK (label != '\ngo\n.shell touch RAN\n')"),
    ("detection", "label TEXT", "label TEXT CHECK (label != '\n.system touch RAN\n')"),
    ("host_sample", "cpu_percent REAL", "cpu_percent REAL AS (length(hex(zeroblob(400000000))))"),
    ("gap", "CREATE TABLE gap (", f"CREATE VIEW gap AS {ENDLESS} /*"),
]


@pytest.mark.parametrize("kind", ["damaged", "published", "live"])
def test_nothing_that_a_file_says_is_run(original, tmp_path, monkeypatch, kind):
    program = tmp_path / "bin" / "sqlite3"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {tmp_path}/RAN\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    monkeypatch.chdir(tmp_path)
    for number, (table, old, new) in enumerate(HOSTILE):
        run = tmp_path / str(number)
        TaskFile(run, index=1, states={"healthy": "done"}).write()
        copy = original.copy(run / "tasks")
        if kind == "live":
            unpublish(copy)
        with closing(sqlite3.connect(copy, isolation_level=None)) as db:
            db.execute("PRAGMA writable_schema = ON")
            db.execute("UPDATE sqlite_master SET sql = replace(sql, ?, ?) WHERE name = ?", (old, new, table))
        if kind == "published":
            move_into_place(copy, copy.with_name("again"))
            copy.with_name("again").rename(copy)
        files = {Path(file.path).name: file for file in merge_run(run).files}
        assert files[copy.name].status == "skipped", new
        assert "RAN" not in names_in(tmp_path), new


def test_where_no_row_is_left_there_is_an_error(original, tmp_path):
    header, size = original.content[:4096], len(original.content)
    for ruin in (b"", b"text " * 5000, b"\x17", damage.noise(5000, 2), bytes(size), header):
        copy = original.copy(tmp_path)
        copy.write_bytes(ruin)
        with pytest.raises((sqlite3.Error, ValueError)):
            salvaged(copy)
