"""When the time is over: what users, Slurm's variable and squeue say, and what cannot be true."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from rooms.devices import EndTime, end_time_command, parse_end
from rooms.model import Allocation, parse_stop_after

NOW_MS = 1_800_000_000_000  # 2027-01-15T08:00:00Z


@pytest.fixture
def eight_hours_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Be where the clock is 8 hours behind UTC; by rule, not by a place, whose government may change it."""
    monkeypatch.setenv("TZ", "<-08>8")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0), ("90", 5400), ("0.5", 30), ("5:00", 300), ("0:59", 59), ("1:30:00", 5400),
        ("100:00:00", 360_000), ("1-02:03:04", 93_784), ("1-06", 108_000), ("1-06:30", 109_800),
    ],
)  # fmt: skip
def test_a_time_is_read_as_sbatch_takes_it(text: str, seconds: float) -> None:
    assert parse_stop_after(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "abc", "-5", "1e3", "nan", "inf", "1:2:3:4", "1-30:60", "UNLIMITED", "2h", "٣", ":30"]
)
def test_what_is_no_time_is_refused(text: str) -> None:
    assert parse_stop_after(text) is None


def test_slurms_variable_holds_epoch_seconds() -> None:
    assert parse_end("1800003600", "SLURM_JOB_END_TIME", NOW_MS) == EndTime(NOW_MS + 3_600_000, "SLURM_JOB_END_TIME")


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "1799999999", "4294967295000", "9" * 40])
def test_an_end_that_is_past_or_no_date_is_not_known(text: str) -> None:
    assert parse_end(text, "squeue", NOW_MS) is None


@pytest.mark.parametrize("text", ["NONE\n", "Unknown\n", "N/A\n", "\n", "", "NOT_SET", "T", "10:10:56"])
def test_squeue_may_not_know_either(text: str) -> None:
    assert parse_end(text, "squeue", NOW_MS) is None


def test_squeue_says_epoch_seconds() -> None:
    assert parse_end("1800003600\n", "squeue", NOW_MS) == EndTime(NOW_MS + 3_600_000, "squeue")


@pytest.mark.usefixtures("eight_hours_behind")
def test_a_date_of_squeue_is_local_time() -> None:
    assert parse_end("2027-01-15T01:00:00\n", "squeue", NOW_MS) == EndTime(NOW_MS + 3_600_000, "squeue")


def test_of_several_lines_the_earliest_end_counts_and_a_banner_does_not() -> None:
    assert parse_end("Welcome To Sockeye\n1800007200\nNONE\n1800003600\n", "squeue", NOW_MS) == EndTime(
        NOW_MS + 3_600_000, "squeue"
    )


def test_squeue_is_asked_for_this_array_task_alone() -> None:
    assert end_time_command(Allocation(True, "4821", "gpu3")) == ["squeue", "-h", "-j", "4821", "-o", "%e"]
    assert end_time_command(Allocation(True, "4821", "gpu3", array_index=0))[3] == "4821_0"
