"""A published file carries a seal: its row counts, and a checksum that one changed bit breaks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rooms.store import TABLES, checksum, read_checksum, read_stated
from support.databases import query, seal_is_broken
from support.task_files import TaskFile


@pytest.fixture
def published(tmp_path: Path) -> Path:
    return TaskFile(tmp_path, states={"a": "done", "b": "failed"}, samples=200).write()


def test_a_published_file_is_sealed_and_opens_as_any_other(published: Path) -> None:
    assert seal_is_broken(published) is False
    assert query(published, "PRAGMA integrity_check") == [("ok",)]


def test_the_seal_says_how_many_rows_every_table_has(published: Path) -> None:
    ((text,),) = query(published, "SELECT value FROM meta WHERE key = 'rows'")
    tables = [table.name for table in TABLES if table.name != "meta"]
    assert json.loads(text) == {name: query(published, f"SELECT count(*) FROM {name}")[0][0] for name in tables}


def test_what_a_seal_states_is_read_without_the_other_bytes(published: Path, tmp_path: Path) -> None:
    assert read_stated(published) == read_checksum(published)[0]
    (tmp_path / "text").write_text("no database")
    assert read_stated(tmp_path / "text") is None
    assert read_stated(tmp_path / "nothing") is None


def test_any_changed_bit_breaks_the_seal(published: Path) -> None:
    whole = published.read_bytes()
    chance = random.Random(3)
    for _ in range(200):
        at = chance.randrange(len(whole))
        published.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << chance.randrange(8)]) + whole[at + 1 :])
        # Without the mark there is no seal to break; then the file is checked as one that never had any.
        assert seal_is_broken(published) in (True, None), at
        assert seal_is_broken(published) or whole[at - 20 : at + 20].find(b"crc32:") >= 0


def test_a_missing_end_breaks_the_seal(published: Path) -> None:
    published.write_bytes(published.read_bytes()[:-4096])
    assert seal_is_broken(published) is True


def test_a_file_without_a_seal_is_not_called_broken(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"no seal here")
    assert seal_is_broken(tmp_path / "x") is None


@pytest.mark.parametrize("block", [1, 2, 7, 17, 18, 19, 1000])
def test_the_checksum_does_not_depend_on_the_size_of_the_blocks(block: int) -> None:
    data = b"x" * 25 + b"sealcrc32:0a1b2c3d" + b"y" * 40
    seal_at, stated, whole = checksum([data])
    parts = [data[at : at + block] for at in range(0, len(data), block)]
    assert checksum(parts) == (seal_at, stated, whole)
    assert (stated, seal_at) == ("0a1b2c3d", 35)
