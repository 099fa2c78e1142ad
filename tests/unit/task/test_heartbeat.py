"""The heartbeat line, letter by letter: other people's scripts read it."""

from __future__ import annotations

from typing import Any

import pytest
from rooms.task import TaskProgress, heartbeat_line


def line(progress: TaskProgress, **given: Any) -> str:
    devices = given.pop("devices", 4)
    values: dict[str, Any] = {"cpu_percent": 12.4, "memory_percent": 38.6, "gpu_percent": 85.0, **given}
    return heartbeat_line(progress, list(values.values()), devices)


def test_the_line_is_as_the_contract_shows_it() -> None:
    elapsed_s = 850 / 7  # 840 of 960 chunks are left, so this takes seven times as long again
    progress = TaskProgress(120, 960, audio_done_s=412 * elapsed_s, elapsed_s=elapsed_s)
    assert line(progress) == "heartbeat cpu=12% mem=39% gpu=85% devices=4 chunks=120/960 rate=412x eta=00:14:10"


def test_what_nobody_knows_is_a_question_mark_and_never_a_zero() -> None:
    unknown = line(TaskProgress(0, 960, 0.0, 30.0), cpu_percent=None, memory_percent=None, gpu_percent=None, devices=0)
    assert unknown == "heartbeat cpu=? mem=? gpu=? devices=0 chunks=0/960 rate=? eta=?"


def test_a_zero_that_was_measured_is_a_zero() -> None:
    assert "cpu=0% mem=39% gpu=0% " in line(TaskProgress(1, 2, 1.0, 1.0), cpu_percent=0.0, gpu_percent=0.0)


@pytest.mark.parametrize(
    ("settled", "total", "elapsed_s", "eta"),
    [
        (10, 10, 100.0, "00:00:00"),
        (1, 2, 59.6, "00:01:00"),
        (1, 2, 3599.6, "01:00:00"),
        (1, 101, 3600.0, "100:00:00"),
        (5, 10, 0.0, "00:00:00"),
    ],
)
def test_the_time_left_is_at_the_pace_so_far(settled: int, total: int, elapsed_s: float, eta: str) -> None:
    assert line(TaskProgress(settled, total, 1.0, elapsed_s)).endswith(f" eta={eta}")


def test_chunks_that_failed_move_the_work_on_but_have_no_rate() -> None:
    assert line(TaskProgress(5, 10, 0.0, 60.0)).endswith("chunks=5/10 rate=? eta=00:01:00")


def test_when_all_that_is_left_has_failed_before_the_end_is_not_known() -> None:
    assert line(TaskProgress(9, 10, 90.0, 60.0, retrying=1)).endswith("chunks=9/10 rate=2x eta=?")


@pytest.mark.parametrize(
    ("rate", "said"),
    [(1.0, "1x"), (0.999, "1x"), (0.45, "0.45x"), (0.1234, "0.12x"), (0.0042, "0.0042x"), (1e-9, "0.0001x")],
)
def test_a_rate_below_real_time_is_slow_and_never_zero(rate: float, said: str) -> None:
    assert f" rate={said} " in line(TaskProgress(1, 10, 60 * rate, 60.0))
