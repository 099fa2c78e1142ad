from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.root import BadInput
from rooms.sources import WHOLE, Shard, parse_shard


@settings(deadline=None)  # a busy machine is not a mistake
@given(count=st.integers(1, 150), rows=st.integers(0, 500))
def test_every_row_is_in_exactly_one_shard(count: int, rows: int) -> None:
    shares = [[row for row in range(rows) if Shard(index, count).takes(row)] for index in range(count)]
    assert sorted(row for share in shares for row in share) == list(range(rows))


@settings(deadline=None)  # a busy machine is not a mistake
@given(count=st.integers(1, 150), rows=st.integers(0, 500))
def test_shards_differ_by_at_most_one_row(count: int, rows: int) -> None:
    sizes = [sum(Shard(index, count).takes(row) for row in range(rows)) for index in range(count)]
    assert max(sizes) - min(sizes) <= 1


def test_the_whole_takes_every_row() -> None:
    assert all(WHOLE.takes(row) for row in range(100))


def test_a_shard_is_written_as_index_from_zero_and_count() -> None:
    assert parse_shard("2/8") == Shard(2, 8)
    assert str(parse_shard(" 0/1 ")) == "0/1"


@pytest.mark.parametrize("text", ["8/8", "-1/8", "0/0", "2", "a/b", "1/2/3", "", "1.0/2", "٢/٨", "1/99999999999"])
def test_a_shard_that_cannot_be_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_shard(text)
    assert repr(text) in refused.value.what
    assert refused.value.exit_code == 2
    assert refused.value.fix and refused.value.fix.startswith("--shard 0/")


def test_a_shard_beyond_the_count_is_refused_however_it_is_made() -> None:
    with pytest.raises(BadInput, match="'8/8'"):
        Shard(8, 8)
