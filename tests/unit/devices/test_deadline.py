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
IN_ARRAY = Allocation(True, "4821", "gpu3", array_index=7)


class FakeSqueue:
    """A squeue on PATH that writes down how it is called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.environ = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_TIME_FORMAT": "relative"}

    def says(self, answer: str) -> FakeSqueue:
        program = self._folder / "squeue"
        program.write_text(f'#!/bin/sh\necho "$SLURM_TIME_FORMAT $*" >> {self._folder}/calls\n{answer}\n')
        program.chmod(0o755)
        return self

    @property
    def calls(self) -> list[str]:
        calls = self._folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def squeue(tmp_path: Path) -> FakeSqueue:
    return FakeSqueue(tmp_path).says("echo 1800003600")


def end_of(squeue: FakeSqueue, *, stop_after: str | None = None, in_slurm: bool = True, **facts: str) -> EndTime | None:
    allocation = Allocation(in_slurm, "4821", "gpu3", array_index=7, facts=facts)
    return find_end(stop_after, allocation, squeue.environ, NOW_MS)


# --- who says when ----------------------------------------------------------------------------------------------------


def test_the_users_word_wins_over_all(squeue: FakeSqueue) -> None:
    end = end_of(squeue, stop_after="1:00", SLURM_JOB_END_TIME="1800007200")
    assert end == EndTime(NOW_MS + 60_000, "run.stop_after")
    assert squeue.calls == []


def test_where_slurm_has_said_it_nobody_asks(squeue: FakeSqueue) -> None:
    assert end_of(squeue, SLURM_JOB_END_TIME="1800007200") == EndTime(NOW_MS + 7_200_000, "SLURM_JOB_END_TIME")
    assert squeue.calls == []


def test_squeue_is_asked_once_in_a_form_that_no_setting_changes(squeue: FakeSqueue) -> None:
    assert end_of(squeue) == EndTime(NOW_MS + 3_600_000, "squeue")
    assert squeue.calls == ["%s -h -j 4821_7 -o %e"]


def test_an_old_variable_is_not_believed_but_squeue_asked(squeue: FakeSqueue) -> None:
    assert end_of(squeue, SLURM_JOB_END_TIME="1799999000") == EndTime(NOW_MS + 3_600_000, "squeue")


def test_outside_slurm_there_is_no_end_and_nobody_is_asked(squeue: FakeSqueue) -> None:
    assert end_of(squeue, in_slurm=False) is None
    assert squeue.calls == []


@pytest.mark.parametrize("answer", ["echo NONE", "echo N/A", "echo slurmctld is down >&2; exit 1", "kill -9 $$"])
def test_a_squeue_without_an_answer_is_asked_no_second_time(squeue: FakeSqueue, answer: str) -> None:
    assert end_of(squeue.says(answer)) is None
    assert len(squeue.calls) == 1


def test_a_squeue_that_cannot_be_started_is_no_harm(squeue: FakeSqueue, tmp_path: Path) -> None:
    (tmp_path / "squeue").write_bytes(b"\x7fELF, or nearly")
    assert end_of(squeue) is None
    (tmp_path / "squeue").unlink()
    squeue.environ["PATH"] = str(tmp_path)
    assert end_of(squeue) is None


# --- what may be started ----------------------------------------------------------------------------------------------


def deadline_in(seconds: float) -> tuple[TimeBudget, HandClock]:
    clock = HandClock()
    return TimeBudget(EndTime(clock.now_ms() + round(seconds * 1000), "run.stop_after"), clock), clock


def test_publishing_has_its_share_of_the_time() -> None:
    deadline, clock = deadline_in(3600)
    assert deadline.left_s == 3580
    clock.sleep(3000)
    assert deadline.left_s == 580


@pytest.mark.parametrize(
    ("expected_s", "may"),
    [(0.1, True), (3576, False), (3254, True), (3255, False), (10_000, False)],
    ids=["short", "no margin", "a tenth fits", "a tenth does not", "longer than all"],
)
def test_a_chunk_may_start_if_it_fits_with_a_margin_of_5_s_or_a_tenth(expected_s: float, may: bool) -> None:
    deadline, _ = deadline_in(3600)
    assert deadline.may_start(expected_s, expected_s) is may


def test_short_work_may_start_until_5_s_before_publishing() -> None:
    deadline, clock = deadline_in(3600)
    clock.sleep(3574)
    assert deadline.may_start(1.0, 1.0)
    clock.sleep(1)
    assert not deadline.may_start(1.0, 1.0)


def test_work_of_unknown_length_may_start_while_there_is_any_time() -> None:
    deadline, clock = deadline_in(3600)
    clock.sleep(3579)
    assert deadline.may_start(None)
    clock.sleep(1)
    assert not deadline.may_start(None)


def test_who_has_five_seconds_gets_work_done_in_them() -> None:
    deadline, clock = deadline_in(5)
    clock.sleep(3)
    assert deadline.may_start(0.3)
    clock.sleep(1)
    assert not deadline.may_start(0.3)


def test_without_any_time_nothing_is_started() -> None:
    assert not deadline_in(0)[0].may_start(None)
    assert not deadline_in(-5)[0].may_start(0.0)


# --- how long it would take -------------------------------------------------------------------------------------------


def test_before_anything_is_finished_nobody_knows() -> None:
    assert Rates().expected_s(1, 30.0) is None


def test_a_device_is_judged_by_its_own_chunks_and_an_unknown_one_by_all() -> None:
    rates = Rates([(1, 30.0, 3.0), (1, 60.0, 6.0), (2, 30.0, 30.0)])
    assert rates.expected_s(1, 600.0) == pytest.approx(60.0)
    assert rates.expected_s(2, 600.0) == pytest.approx(600.0)
    assert rates.expected_s(3, 600.0) == pytest.approx(600.0)


def test_one_chunk_in_twenty_may_be_slower_than_predicted() -> None:
    work: list[Work] = [(1, 10.0, 1.0)] * 95 + [(1, 10.0, 100.0)] * 5
    assert Rates(work).expected_s(1, 10.0) == pytest.approx(1.0)
    assert Rates([*work, (1, 10.0, 100.0)]).expected_s(1, 10.0) == pytest.approx(100.0)


def test_where_the_length_of_the_audio_is_not_known_chunks_are_compared_as_they_are() -> None:
    assert Rates([(1, None, 4.0), (1, None, 2.0)]).expected_s(1, 30.0) == 4.0
    assert Rates([(1, 30.0, 3.0), (1, 300.0, 30.0)]).expected_s(1, None) == 30.0


# --- both together ----------------------------------------------------------------------------------------------------


def test_without_a_deadline_there_is_always_time_and_nobody_is_asked_for_rates() -> None:
    pace = TimeBudget(None, HandClock())
    pace.learn(lambda limit: pytest.fail("nobody needs to know"))
    assert pace.fit_test(1, [], 1)(make_chunk("a", seconds=1e9))
    assert (pace.over, pace.out_of_time) == (False, False)


def test_a_chunk_too_long_for_the_rest_is_turned_down_and_a_short_one_is_not() -> None:
    pace = deadline_in(3600)[0]
    pace.learn(lambda limit: [(1, 30.0, 3.0)])
    assert pace.fit_test(1, [], 1)(make_chunk("short", seconds=300))
    assert not pace.out_of_time
    assert not pace.fit_test(1, [], 1)(make_chunk("long", seconds=36_000))
    assert pace.out_of_time


def test_what_a_worker_has_in_hand_comes_first_and_what_it_gets_then_is_in_hand() -> None:
    pace = deadline_in(3600)[0]
    pace.learn(lambda limit: [(1, 1.0, 1.0)])
    hand = [make_chunk(name, seconds=1200) for name in "abc"]
    room = pace.fit_test(1, [(hand[0], None)], 1)
    assert room(hand[1])
    assert not room(hand[2])


def test_a_worker_of_two_lanes_has_time_for_twice_as_much() -> None:
    pace = deadline_in(3600)[0]
    pace.learn(lambda limit: [(1, 1.0, 1.0)])
    room = pace.fit_test(1, [], 2)
    assert [room(make_chunk(name, seconds=1700)) for name in "abcde"] == [True, True, True, True, False]


def test_of_a_chunk_that_was_begun_only_the_rest_counts() -> None:
    pace, clock = deadline_in(3600)
    pace.learn(lambda limit: [(1, 1.0, 1.0)])
    begun, wanted, at_ms = make_chunk("a", seconds=1500), make_chunk("b", seconds=1500), clock.now_ms()
    clock.sleep(1000)
    assert not pace.fit_test(1, [(begun, None)], 1)(wanted)
    assert pace.fit_test(1, [(begun, at_ms)], 1)(wanted)
    clock.sleep(800)  # the one in progress is late, and may end at any time
    assert pace.fit_test(1, [(begun, at_ms)], 1)(wanted)
    clock.sleep(200)  # 1580 s are left, and however late the other is, none of them come back
    assert not pace.fit_test(1, [(begun, at_ms)], 1)(wanted)


def test_chunks_that_were_begun_keep_their_lanes_and_the_others_in_hand_follow_them() -> None:
    pace, clock = deadline_in(3600)
    at_ms = clock.now_ms()
    pace.learn(lambda limit: [(1, 1.0, 1.0)])
    nearly_done, half_done = make_chunk("a", seconds=600), make_chunk("b", seconds=2000)
    waiting = make_chunk("c", seconds=1000)
    clock.sleep(500)  # 3080 s are left; the two that were begun take 100 s and 1500 s more
    in_hand = [(waiting, None), (nearly_done, at_ms), (half_done, at_ms)]
    assert pace.fit_test(1, in_hand, 2)(make_chunk("d", seconds=1750)), "it begins in 1100 s"
    assert not pace.fit_test(1, in_hand, 2)(make_chunk("d", seconds=1850)), (
        "in 1000 s it could, but no lane is free then"
    )


def test_where_nobody_knows_how_long_a_chunk_takes_any_time_will_do() -> None:
    pace, clock = deadline_in(3600)
    clock.sleep(3570)
    room = pace.fit_test(1, [(make_chunk("a"), None)], 1)
    assert [room(make_chunk(name)) for name in "bc"] == [True, True]
    clock.sleep(20)
    assert not room(make_chunk("d"))


def test_the_time_is_over_when_nothing_is_left_but_what_publishing_takes() -> None:
    pace, clock = deadline_in(3600)
    clock.sleep(3579)
    assert (pace.over, pace.out_of_time) == (False, False)
    clock.sleep(1)
    assert (pace.over, pace.out_of_time) == (True, True)


def test_rates_are_looked_up_no_more_than_once_a_second() -> None:
    pace, clock = deadline_in(3600)
    looks: list[int] = []

    def recent_work(limit: int) -> list[Work]:
        looks.append(limit)
        return []

    for _ in range(30):
        pace.learn(recent_work)
        clock.sleep(0.1)
    assert looks == [200] * 3
