"""The heartbeat line, letter by letter: other people's scripts read it."""

from __future__ import annotations

from typing import Any

import pytest

from badcjobs.heartbeat import Progress, heartbeat_line


def line(progress: Progress, **given: Any) -> str:
    values: dict[str, Any] = {"cpu_percent": 12.4, "memory_percent": 38.6, "gpu_percent": 85.0, "devices": 4, **given}
    return heartbeat_line(progress, **values)


def test_the_line_is_as_the_contract_shows_it() -> None:
    elapsed_s = 850 / 7  # 840 of 960 chunks are left, so this takes seven times as long again
    progress = Progress(120, 960, audio_done_s=412 * elapsed_s, elapsed_s=elapsed_s)
    assert line(progress) == "heartbeat cpu=12% mem=39% gpu=85% devices=4 chunks=120/960 rate=412x eta=00:14:10"


def test_what_nobody_knows_is_a_question_mark_and_never_a_zero() -> None:
    unknown = line(Progress(0, 960, 0.0, 30.0), cpu_percent=None, memory_percent=None, gpu_percent=None, devices=0)
    assert unknown == "heartbeat cpu=? mem=? gpu=? devices=0 chunks=0/960 rate=? eta=?"


def test_a_zero_that_was_measured_is_a_zero() -> None:
    assert "cpu=0% mem=39% gpu=0% " in line(Progress(1, 2, 1.0, 1.0), cpu_percent=0.0, gpu_percent=0.0)


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
    assert line(Progress(settled, total, 1.0, elapsed_s)).endswith(f" eta={eta}")


def test_chunks_that_failed_move_the_work_on_but_have_no_rate() -> None:
    assert line(Progress(5, 10, 0.0, 60.0)).endswith("chunks=5/10 rate=? eta=00:01:00")
