"""What every Clock promises: the system's, and the one that tests move by hand."""

from __future__ import annotations

import time

import pytest
from rooms.root import Clock, SystemClock
from support.hand_clock import HandClock


@pytest.mark.parametrize("kind", [SystemClock, HandClock])
def test_time_goes_forward_by_what_was_slept_in_whole_milliseconds_of_this_century(kind: type[Clock]) -> None:
    clock = kind()
    assert type(clock.now_ms()) is int
    assert 1_600_000_000_000 < clock.now_ms() < 5_000_000_000_000
    seen = []
    for seconds in (0.02, 0, -1, -0.5, *[0.0002] * 20):
        seen.append((clock.now_ms(), clock.monotonic_s()))
        clock.sleep(seconds)
    assert seen == sorted(seen)
    assert seen[1][0] - seen[0][0] >= 19 and seen[1][1] - seen[0][1] >= 0.0199


def test_the_system_clock_tells_utc_and_a_step_of_the_system_time_does_not_reorder_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SystemClock()
    before_ms, wall_s = clock.now_ms(), time.time()
    assert abs(before_ms - wall_s * 1000) < 500
    monkeypatch.setattr(time, "time", lambda: wall_s - 3600)
    assert clock.now_ms() >= before_ms
