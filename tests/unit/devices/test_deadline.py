"""The end of the time: who is asked for it, and what may still be started before it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rooms.devices import EndTime
from rooms.model import Allocation
from rooms.task import Rates, TimeBudget, Work, find_end
from support.hand_clock import HandClock
from support.task_files import make_chunk

NOW_MS = HandClock().now_ms()


def test_the_user_says_when_the_time_ends_else_slurms_variable_else_squeue_once(tmp_path: Path) -> None:
    program, calls = tmp_path / "squeue", tmp_path / "calls"

    def ask(answer: str, stop_after: str | None = None, **facts: str) -> tuple[EndTime | None, list[str]]:
        """Return the end that was found, and how squeue was called."""
        program.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {calls}\n{answer}\n')
        program.chmod(0o755)
        calls.write_text("")
        allocation = Allocation("outside" not in facts, "4821", "gpu3", array_index=7, facts=facts)
        environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_TIME_FORMAT": "relative"}
        return find_end(stop_after, allocation, environ, NOW_MS), calls.read_text().splitlines()

    called, hour, in_two_hours = ["%s -h -j 4821_7 -o %e"], "echo 1800003600", {"SLURM_JOB_END_TIME": "1800007200"}
    by_squeue = EndTime(NOW_MS + 3_600_000, "squeue")
    assert ask(hour, "1:00", **in_two_hours) == (EndTime(NOW_MS + 60_000, "run.stop_after"), [])
    assert ask(hour, **in_two_hours) == (EndTime(NOW_MS + 7_200_000, "SLURM_JOB_END_TIME"), [])
    assert ask(hour) == ask(hour, SLURM_JOB_END_TIME="1799999000") == (by_squeue, called)
    assert ask(hour, outside="Slurm") == (None, [])
    for answer in ("echo NONE", "echo slurmctld is down >&2; exit 1", "kill -9 $$"):
        assert ask(answer) == (None, called), answer
    program.write_bytes(b"\x7fELF, or nearly")
    for path in (f"{tmp_path}", "/nowhere"):
        assert find_end(None, Allocation(True, "4821", "gpu3"), {"PATH": path}, NOW_MS) is None


def budget_of(seconds: float, *work: Work, gone: float = 0) -> tuple[TimeBudget, HandClock]:
    """Return a budget, some seconds of which are gone, that has learned from this work; 20 s are for publishing."""
    clock = HandClock()
    budget = TimeBudget(EndTime(clock.now_ms() + round(seconds * 1000), "run.stop_after"), clock)
    budget.learn(lambda limit: work)
    clock.sleep(gone)
    return budget, clock


# Seconds in all, seconds gone, how long the work takes → whether it may start.
STARTS: list[tuple[float, float, float | None, bool]] = [
    (3600, 0, 0.1, True), (3600, 0, 3254, True), (3600, 0, 3255, False), (3600, 0, 3576, False),  # a margin of a tenth
    (3600, 3574, 1.0, True), (3600, 3575, 1.0, False),  # and of 5 s at least
    (3600, 3579, None, True), (3600, 3580, None, False),
    (5, 3, 0.3, True), (5, 4, 0.3, False),  # a short time has a small margin and a small reserve
    (0, 0, None, False), (-5, 0, 0.0, False),
]  # fmt: skip


def test_work_may_start_if_it_fits_with_a_margin_before_publishing() -> None:
    for whole_s, gone_s, takes_s, may in STARTS:
        budget, _ = budget_of(whole_s, gone=gone_s)
        assert budget.may_start(takes_s, takes_s or 0.0) is may, (whole_s, gone_s, takes_s)
    budget, clock = budget_of(3600)
    seen = []
    for pause_s in (0, 3579, 1):
        clock.sleep(pause_s)
        seen.append((budget.left_s, budget.over, budget.out_of_time, budget.is_news, budget.is_news))
    assert seen == [(3580, False, False, False, False), (1, False, False, False, False), (0, True, True, True, False)]


def test_the_rate_of_a_device_is_the_slowest_but_one_in_twenty_of_its_own_chunks() -> None:
    assert Rates().expected_s(1, 30.0) is None
    rates = Rates([(1, 30.0, 3.0), (1, 60.0, 6.0), (2, 30.0, 30.0)])
    assert [rates.expected_s(device, 600.0) for device in (1, 2, 3)] == pytest.approx([60, 600, 600])
    work: list[Work] = [(1, 10.0, 1.0)] * 95 + [(1, 10.0, 100.0)] * 5
    assert Rates(work).expected_s(1, 10.0) == pytest.approx(1.0)
    assert Rates([*work, (1, 10.0, 100.0)]).expected_s(1, 10.0) == pytest.approx(100.0)
    assert Rates([(1, None, 4.0), (1, None, 2.0)]).expected_s(1, 30.0) == 4.0, "the length is not known"
    assert Rates([(1, 30.0, 3.0), (1, 300.0, 30.0)]).expected_s(1, None) == 30.0
    looks: list[int] = []
    budget, clock = budget_of(3600)
    for _ in range(30):
        clock.sleep(0.1)
        budget.learn(lambda limit: looks.append(limit) or [])
    assert looks == [200] * 3, "no more than once a second"


def accepted(budget: TimeBudget, in_hand: dict[float, int | None], lanes: int, *offered: float | None) -> list[bool]:
    """Return which chunks are accepted, one after the other, by a worker with some in hand: seconds → begun at."""
    hand = [(make_chunk("h", seconds=seconds), at_ms) for seconds, at_ms in in_hand.items()]
    fits = budget.fit_test(1, hand, lanes)
    return [fits(make_chunk("c", seconds=seconds)) for seconds in offered]


def test_a_worker_gets_only_what_it_finishes_after_what_it_has() -> None:
    realtime: Work = (1, 1.0, 1.0)
    unlimited = TimeBudget(None, HandClock())
    unlimited.learn(lambda limit: pytest.fail("nobody needs to know"))
    assert accepted(unlimited, {}, 1, 1e9) == [True] and not unlimited.over
    budget, _ = budget_of(3600, realtime)
    assert accepted(budget, {}, 1, 1700, 1700) == [True, True] and not budget.out_of_time
    assert accepted(budget, {}, 1, 36_000, 300) == [False, True] and budget.out_of_time
    assert accepted(budget, {1200: None}, 1, 1201, 1202) == [True, False]
    assert accepted(budget, {}, 2, *[1700] * 5) == [True] * 4 + [False]
    assert accepted(budget, {}, 0, 1700, 1700, 1700) == [True, True, False], "a worker has one lane at least"
    unknown, clock = budget_of(3600, gone=3570)
    assert accepted(unknown, {30: None}, 1, 30, 30) == [True, True]
    clock.sleep(20)
    assert accepted(unknown, {}, 1, 30) == [False]


def test_of_a_chunk_that_was_begun_only_the_rest_counts_and_it_keeps_its_lane() -> None:
    begun_ms = HandClock().now_ms()
    budget, clock = budget_of(3600, (1, 1.0, 1.0), gone=1000)
    assert accepted(budget, {1500: None}, 1, 1500) == [False]
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(800)  # it is late, and may end at any time
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [True]
    clock.sleep(200)
    assert accepted(budget, {1500: begun_ms}, 1, 1500) == [False], "1580 s are left"
    budget, _ = budget_of(3600, (1, 1.0, 1.0), gone=500)  # 3080 s left; those begun take 100 s and 1500 s more
    in_hand = {1000: None, 600: begun_ms, 2000: begun_ms}
    assert accepted(budget, in_hand, 2, 1750) == [True], "it begins in 1100 s"
    assert accepted(budget, in_hand, 2, 1850) == [False], "in 1000 s no lane is free"
