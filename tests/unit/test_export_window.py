"""The time window of an export: how it is written, and which moments are in it."""

from __future__ import annotations

import sqlite3

import pytest

from badcjobs.errors import BadInput
from badcjobs.store.export_tables import Window, condition, parse_moment, parse_window

JULY_MS = 1_782_864_000_000  # 2026-07-01T00:00:00Z


@pytest.mark.parametrize(
    ("text", "milliseconds"),
    [
        ("2026-07-01", JULY_MS),
        ("2026-07-01T00:00", JULY_MS),
        ("2026-07-01 00:00:01", JULY_MS + 1000),
        ("2026-07-01T00:00:00.250", JULY_MS + 250),
        ("2026-07-01T00:00:00Z", JULY_MS),
        ("2026-07-01T00:00:00z", JULY_MS),
        ("2026-06-30T17:00:00-07:00", JULY_MS),
        (" 1782864000000 ", JULY_MS),
        ("0", 0),
        ("-1000", -1000),
    ],
)
def test_a_moment_is_a_date_a_time_with_or_without_offset_or_milliseconds(text: str, milliseconds: int) -> None:
    assert parse_moment(text) == milliseconds


@pytest.mark.parametrize("text", ["", "yesterday", "2026-13-01", "2026", "202607", "20260701", "1e3", "9" * 19, "1.5"])
def test_what_is_no_moment_is_refused_and_a_date_in_digits_is_not_taken_for_milliseconds(text: str) -> None:
    with pytest.raises(ValueError):
        parse_moment(text)


def test_both_ends_of_a_wrong_window_are_named_at_once() -> None:
    with pytest.raises(BadInput) as refused:
        parse_window("yesterday", "20260701")
    assert "--from yesterday" in refused.value.what
    assert "--to 20260701" in refused.value.what
    assert "2026-07-01" in (refused.value.why or "")


@pytest.mark.parametrize(("start", "end"), [("2026-07-02", "2026-07-01"), ("2026-07-01", "2026-07-01T00:00Z")])
def test_a_window_that_is_reversed_or_empty_is_refused(start: str, end: str) -> None:
    with pytest.raises(BadInput, match=f"--from {start} is not before --to {end}"):
        parse_window(start, end)


def test_a_window_may_be_open_at_either_end_or_both() -> None:
    assert parse_window(None, None) == Window()
    assert not parse_window(None, None)
    assert parse_window("0", None) == Window(0, None)  # 0 is a moment, not nothing
    assert parse_window("0", None)
    assert parse_window(None, "0") == Window(None, 0)


def answers(sql: str, **values: int | None) -> bool:
    names = ", ".join(f":{name} AS {name}" for name in values)
    with sqlite3.connect(":memory:") as db:
        return bool(db.execute(f"SELECT {sql} FROM (SELECT {names})", values).fetchone()[0])


@pytest.mark.parametrize(("at_ms", "inside"), [(99, False), (100, True), (199, True), (200, False)])
def test_an_instant_is_inside_from_the_first_moment_until_just_before_the_last(at_ms: int, inside: bool) -> None:
    assert answers(Window(100, 200).overlaps("at_ms", "at_ms"), at_ms=at_ms) is inside


@pytest.mark.parametrize(
    ("start", "end", "inside"),
    [
        (0, 99, False),
        (0, 100, False),  # ended as the window opens
        (0, 101, True),
        (100, 100, True),  # no length, on the edge that belongs to the window
        (150, 160, True),
        (199, 300, True),
        (200, 300, False),
        (200, 200, False),
        (0, 300, True),
        (0, None, True),  # it goes on
        (250, None, False),
        (None, None, False),  # it never started
    ],
)
def test_a_stretch_is_inside_when_it_has_a_moment_in_the_window(
    start: int | None, end: int | None, inside: bool
) -> None:
    assert answers(Window(100, 200).overlaps("s", "e"), s=start, e=end) is inside


def test_windows_that_meet_share_no_instant_and_lose_none() -> None:
    first, second = Window(None, 100), Window(100, None)
    for at_ms in (99, 100, 101):
        assert answers(first.overlaps("at_ms", "at_ms"), at_ms=at_ms) != answers(
            second.overlaps("at_ms", "at_ms"), at_ms=at_ms
        )


def test_each_table_has_its_own_time_or_none() -> None:
    window = Window(1, 2)
    assert condition("sample", ["task_id", "at_ms"], window) == window.overlaps("at_ms", "at_ms")
    assert condition("gap", ["from_ms", "to_ms"], window) == window.overlaps("from_ms", "to_ms")
    assert condition("alert", ["started_at_ms", "ended_at_ms"], window) == window.overlaps(
        "started_at_ms", "ended_at_ms"
    )
    assert "FROM chunk" in (condition("detection", ["start_ms", "end_ms"], window) or "")
    assert condition("meta", ["key", "value"], window) is None
