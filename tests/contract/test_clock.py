"""What every Clock promises: the system's, and the one that tests move by hand."""

from __future__ import annotations

import time

import pytest
from rooms.root import Clock, SystemClock
from support.hand_clock import HandClock


@pytest.fixture(params=[SystemClock, HandClock])
def clock(request: pytest.FixtureRequest) -> Clock:
    made: Clock = request.param()
    return made


def test_the_time_is_whole_milliseconds_of_this_century(clock: Clock) -> None:
    assert type(clock.now_ms()) is int
    assert 1_600_000_000_000 < clock.now_ms() < 5_000_000_000_000


def test_time_never_runs_backwards(clock: Clock) -> None:
    seen = []
    for _ in range(50):
        seen.append((clock.now_ms(), clock.monotonic_s()))
        clock.sleep(0.0002)
    assert seen == sorted(seen)


def test_sleeping_moves_both_times_by_at_least_what_was_asked(clock: Clock) -> None:
    before_ms, before_s = clock.now_ms(), clock.monotonic_s()
    clock.sleep(0.02)
    assert clock.now_ms() - before_ms >= 19
    assert clock.monotonic_s() - before_s >= 0.0199


@pytest.mark.parametrize("seconds", [0, 0.0, -1, -0.5])
def test_sleeping_for_no_time_or_less_returns_at_once(clock: Clock, seconds: float) -> None:
    before_ms = clock.now_ms()
    clock.sleep(seconds)
    assert 0 <= clock.now_ms() - before_ms < 500


def test_the_system_clock_tells_utc() -> None:
    assert abs(SystemClock().now_ms() - time.time() * 1000) < 500


def test_a_step_of_the_system_time_does_not_reorder_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SystemClock()
    before_ms = clock.now_ms()
    wall_s = time.time()
    monkeypatch.setattr(time, "time", lambda: wall_s - 3600)
    assert 0 <= clock.now_ms() - before_ms < 500
