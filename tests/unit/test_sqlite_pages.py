"""Rows read from bare pages: exactly those that SQLite wrote, and never a crash on what it did not."""

from __future__ import annotations

import io
import random
import sqlite3
import struct
import tempfile
import time
import tracemalloc
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import damage

from badcjobs.store.merging.sqlite_pages import read_rows

EDGES = [0, 1, -1, 127, 128, -128, -129, 2**15, -(2**15) - 1, 2**23, 2**31, 2**47, -(2**47) - 1, 2**63 - 1, -(2**63)]
INTEGERS = st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1)
LONG = st.builds(lambda unit, times: unit * times, st.text(min_size=1, max_size=8), st.integers(50, 3000))
TEXTS = st.text(max_size=40) | LONG
BLOBS = st.binary(max_size=40) | st.builds(bytes, st.integers(0, 9000))
VALUES = st.none() | INTEGERS | st.floats(allow_nan=False) | TEXTS | BLOBS

MARKER = 7  # in the first column of every row that a test wrote, so that sqlite_master's rows can be told


def write(path: Path, rows: list[tuple[Any, ...]], *, page_size: int = 4096, rowids: list[int] | None = None) -> None:
    """Write rows with SQLite into columns that keep every value as it is."""
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(f"PRAGMA page_size = {page_size}")
        width = len(rows[0])
        db.execute(f"CREATE TABLE t (marker, {', '.join(f'c{i}' for i in range(width))})")
        db.execute("BEGIN")
        for number, row in enumerate(rows):
            rowid = rowids[number] if rowids else number + 1
            marks = ", ".join("?" * width)
            db.execute(f"INSERT INTO t (rowid, marker, {', '.join(f'c{i}' for i in range(width))}) "
                       f"VALUES (?, {MARKER}, {marks})", (rowid, *row))  # fmt: skip
        db.execute("COMMIT")


def read(path: Path, **how: bool) -> dict[int, tuple[Any, ...]]:
    with path.open("rb") as file:
        return {rowid: values[1:] for _, rowid, values in read_rows(file, **how) if values and values[0] == MARKER}


def shape(row: tuple[Any, ...]) -> list[tuple[type, Any]]:
    """1, 1.0 and True are equal in Python, and so are 0.0 and -0.0; on disk they are not."""
    return [(type(value), struct.pack(">d", value) if isinstance(value, float) else value) for value in row]


@st.composite
def tables(draw: st.DrawFn) -> dict[int, tuple[Any, ...]]:
    width = draw(st.integers(1, 20))
    rowids = draw(st.lists(INTEGERS, min_size=1, max_size=12, unique=True))
    return {rowid: tuple(draw(VALUES) for _ in range(width)) for rowid in rowids}


@settings(max_examples=80, deadline=None)
@given(rows=tables(), page_size=st.sampled_from([512, 1024, 4096, 8192, 65536]))
def test_every_row_that_sqlite_wrote_is_read_back_exactly(rows: dict[int, tuple[Any, ...]], page_size: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "any.sqlite"
        write(path, list(rows.values()), rowids=list(rows), page_size=page_size)
        found = read(path)
    assert found.keys() == rows.keys()
    assert {rowid: shape(row) for rowid, row in found.items()} == {rowid: shape(row) for rowid, row in rows.items()}


def test_thousands_of_rows_over_interior_pages_are_read_back(tmp_path: Path) -> None:
    rows = [(number * 1_000_003, f"row {number}", number / 7, None) for number in range(5000)]
    write(tmp_path / "many.sqlite", rows)
    assert damage.pages_of_kind(tmp_path / "many.sqlite", "table interior")
    assert list(read(tmp_path / "many.sqlite").values()) == rows


def test_bytes_reserved_at_the_end_of_each_page_are_not_taken_for_rows(tmp_path: Path) -> None:
    path = tmp_path / "reserved.sqlite"
    path.write_bytes(b"")
    rows = [("x" * 3000, number) for number in range(20)] + [("y" * 9000, 20)]
    _write_with_reserved_bytes(path, rows, reserved=32)
    assert list(read(path).values()) == rows


def _write_with_reserved_bytes(path: Path, rows: list[tuple[Any, ...]], reserved: int) -> None:
    """Python cannot ask for reserved bytes, but SQLite keeps those that an empty database's header has."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 1")
    damage.overwrite(path, 20, bytes([reserved]))
    damage.overwrite(path, 105, struct.pack(">H", 4096 - reserved))  # where the cells of the empty page begin
    write(path, rows)
    assert path.read_bytes()[20] == reserved


def test_the_page_a_row_lay_on_is_told(tmp_path: Path) -> None:
    path = tmp_path / "pages.sqlite"
    write(path, [(f"here is row {number};" + "." * 700,) for number in range(30)])
    with path.open("rb") as file:
        told = {rowid: page for page, rowid, values in read_rows(file) if values[0] == MARKER}
    assert told == {rowid: damage.page_with(path, b"here is row %d;" % (rowid - 1)) for rowid in range(1, 31)}
    assert len(set(told.values())) > 3


# --- damage -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """300 rows of about 100 bytes, and one that spreads over five pages."""
    path = tmp_path / "rows.sqlite"
    write(path, [(f"row {number} " + "." * 90,) for number in range(300)] + [("long " * 4000,)])
    return path


def test_a_page_cut_in_the_middle_still_gives_the_rows_that_are_whole(file: Path) -> None:
    before = read(file)
    number = damage.pages_of_kind(file, "table leaf")[1]
    on_the_page = [rowid for page, rowid, _ in read_rows(file.open("rb")) if page == number]
    with file.open("r+b") as cut:
        cut.truncate(number * 4096 - 1)  # cells lie from the end of a page backwards: the first has lost a byte
    after = read(file)
    assert {rowid: before[rowid] for rowid in after} == after
    assert set(on_the_page) - set(after) == {min(on_the_page)}


def test_zeros_at_the_end_of_a_page_are_a_hole_only_when_asked(file: Path) -> None:
    before = read(file)
    number = damage.pages_of_kind(file, "table leaf")[1]
    damage.overwrite(file, number * 4096 - 20, bytes(20))
    half_a_row = set(read(file).values()) - set(before.values())
    assert len(half_a_row) == 1
    assert set(read(file, holes=True).items()) == set(read(file).items()) & set(before.items())
    assert len(read(file, holes=True)) == len(before) - 1


@pytest.mark.parametrize("spoil", [lambda next_page: 0, lambda next_page: 10**6, lambda next_page: next_page - 1])
def test_a_chain_that_ends_early_leads_nowhere_or_runs_in_a_circle_costs_only_its_own_row(
    file: Path, spoil: Any
) -> None:
    before = read(file)
    chain = damage.pages_of_kind(file, "overflow")
    assert len(chain) >= 4
    second = chain[1]
    damage.overwrite(file, (second - 1) * 4096, struct.pack(">I", spoil(chain[2])))
    assert read(file) == {rowid: row for rowid, row in before.items() if rowid != 301}


def test_a_chain_with_a_garbage_page_at_its_end_costs_its_row(file: Path) -> None:
    damage.garbage_page(file, damage.pages_of_kind(file, "overflow")[-1], seed=3)
    assert 301 not in read(file)
    assert len(read(file)) == 300


def test_a_chain_that_goes_on_after_its_end_costs_its_row(file: Path) -> None:
    last = damage.pages_of_kind(file, "overflow")[-1]
    damage.overwrite(file, (last - 1) * 4096, struct.pack(">I", 2))
    assert 301 not in read(file)
    assert len(read(file)) == 300


def test_a_chain_cut_short_within_its_last_page_costs_its_row(file: Path) -> None:
    assert damage.pages_of_kind(file, "overflow")[-1] == damage.page_count(file)
    with file.open("r+b") as cut:
        cut.truncate((damage.page_count(file) - 1) * 4096 + 100)
    assert len(read(file)) == 300


def test_a_row_that_claims_to_be_longer_than_the_file_is_not_followed_in_circles(file: Path) -> None:
    circle = damage.pages_of_kind(file, "overflow")[0]
    damage.overwrite(file, (circle - 1) * 4096, struct.pack(">I", circle))
    leaf = next(n for n in damage.pages_of_kind(file, "table leaf") if n > 1)
    size = 489 + 4092 * 2**40  # so that 489 bytes of it lie in the page
    varint = bytes([size >> shift & 0x7F | 0x80 for shift in range(49, 6, -7)]) + bytes([size & 0x7F])
    varint = bytes([0x80]) * (8 - len(varint)) + varint
    cell = varint + b"\x01" + bytes(489) + struct.pack(">I", circle)
    page = b"\x0d\0\0\0\x01\x08\x00\0" + struct.pack(">H", 2048)
    damage.overwrite(file, (leaf - 1) * 4096, page.ljust(2048, b"\0") + cell.ljust(2048, b"\0"))
    started_s = time.perf_counter()
    assert 1 not in read(file)
    assert time.perf_counter() - started_s < 60


def test_a_record_that_is_longer_than_its_values_is_none(file: Path) -> None:
    before = read(file)
    text = f"row 7 {'.' * 90}".encode()
    kind = len(text) * 2 + 13  # how a record says that this text follows, in two bytes
    good, bad = (bytes([number >> 7 | 0x80, number & 0x7F]) for number in (kind, kind - 2))
    at = file.read_bytes().index(good + bytes([MARKER]) + text)
    damage.overwrite(file, at, bad)
    assert read(file) == {rowid: row for rowid, row in before.items() if rowid != 8}


def test_pages_of_noise_that_begin_like_a_leaf_give_no_row_and_no_error(file: Path) -> None:
    before = read(file)
    for seed in range(300):
        number = damage.pages_of_kind(file, "table leaf")[-1]
        damage.garbage_leaf_page(file, number, seed)
        assert set(read(file).items()) <= set(before.items())


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 99, 100, 107, 108, 512, 4095, 4096, 4097, 100_000])
def test_noise_of_any_size_has_no_rows(size: int) -> None:
    noise = random.Random(size).randbytes(size)
    assert list(read_rows(io.BytesIO(noise))) == []
    assert list(read_rows(io.BytesIO(b"SQLite format 3\x00" + noise))) == []


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), places=st.integers(1, 200))
def test_bytes_changed_anywhere_are_never_an_error(seed: int, places: int) -> None:
    data = bytearray(_small_file())
    chance = random.Random(seed)
    for _ in range(places):
        data[chance.randrange(len(data))] = chance.randrange(256)
    for page, _, values in read_rows(io.BytesIO(bytes(data))):
        assert page >= 1
        assert all(value is None or isinstance(value, int | float | str | bytes) for value in values)


_SMALL: list[bytes] = []


def _small_file() -> bytes:
    if not _SMALL:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "small.sqlite"
            write(path, [(number, "text" * number, number / 3, None) for number in range(60)], page_size=512)
            _SMALL.append(path.read_bytes())
    return _SMALL[0]


@pytest.mark.parametrize("size", [b"\x00\x00", b"\x00\x03", b"\x0f\xff", b"\xff\xff"])
def test_a_header_that_tells_an_impossible_page_size_is_not_believed(file: Path, size: bytes) -> None:
    before = read(file)
    damage.overwrite(file, 16, size)
    assert read(file) == before


@pytest.mark.parametrize(("at", "content"), [(16, b"\x20\x00"), (16, b"\x02\x00"), (20, b"\x10")])
def test_whoever_knows_the_size_of_the_pages_is_believed_before_the_header(file: Path, at: int, content: bytes) -> None:
    before = read(file)
    damage.overwrite(file, at, content)
    with file.open("rb") as opened:
        rows = list(read_rows(opened, page_bytes=4096))
    assert {rowid: values[1:] for _, rowid, values in rows if values[0] == MARKER} == before
    assert read(file) != before


def test_without_a_first_page_the_rest_is_read_with_our_page_size(file: Path) -> None:
    before = read(file)
    damage.lose_first_page(file)
    assert read(file) == before
    damage.lose_first_page(file, seed=1)
    assert read(file) == before


def test_a_disk_that_refuses_one_page_costs_that_page(file: Path) -> None:
    number = damage.pages_of_kind(file, "table leaf")[1]

    class BadBlock(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() == (number - 1) * 4096:
                raise OSError(5, "Input/output error")
            return super().read(size)

    whole = list(read_rows(io.BytesIO(file.read_bytes())))
    assert list(read_rows(BadBlock(file.read_bytes()))) == [row for row in whole if row.page_number != number]
    assert any(row.page_number == number for row in whole)


def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.sqlite"
    write(path, [(f"{number:06d}" + "." * 1500,) for number in range(6000)])
    tracemalloc.start()
    with path.open("rb") as opened:
        count = sum(1 for _ in read_rows(opened))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > 6000
    assert path.stat().st_size > 9_000_000
    assert peak_bytes < 2_000_000
