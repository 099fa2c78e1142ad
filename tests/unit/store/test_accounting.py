"""Where a device's time and energy went: nothing is counted twice, nothing is forgotten."""

from __future__ import annotations

from collections import Counter, namedtuple
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.store import CHUNK_STATES, Cumulated, Span, busy_steps, make_spans, power_steps, state_seconds, sum_by_state

Try = namedtuple("Try", "attempt_id from_ms to_ms state")
WorkerLife = namedtuple("WorkerLife", "from_ms began_ms to_ms")
END_MS = 100_000
STRETCH = st.tuples(st.integers(-5000, END_MS + 5000), st.integers(0, 30_000))
TRIES = st.lists(st.tuples(STRETCH, st.sampled_from(CHUNK_STATES)), max_size=12)
LIVES = st.lists(st.tuples(STRETCH, st.none() | st.integers(0, 40_000)), max_size=4)
POINTS = st.lists(st.tuples(st.integers(1, 20_000), st.none() | st.floats(0, 100)), max_size=30)


def make_tries(drawn: list[tuple[tuple[int, int], str]]) -> list[Try]:
    return [Try(number, begin, begin + length, state) for number, ((begin, length), state) in enumerate(drawn)]


def make_lives(drawn: list[tuple[tuple[int, int], int | None]]) -> list[WorkerLife]:
    return [
        WorkerLife(begin, None if wait is None else begin + wait, begin + length) for (begin, length), wait in drawn
    ]


def make_points(drawn: list[tuple[int, float | None]]) -> list[tuple[int, float | None]]:
    at_ms, points = 0, []
    for step_ms, value in drawn:
        at_ms += step_ms
        points.append((at_ms, value))
    return points


@given(TRIES, LIVES)
def test_every_moment_has_exactly_one_state(tries, lives) -> None:
    spans = list(make_spans(0, END_MS, make_tries(tries), make_lives(lives)))
    assert spans[0].from_ms == 0 and spans[-1].to_ms == END_MS
    assert all(a.to_ms == b.from_ms for a, b in pairwise(spans))
    assert all(span.from_ms < span.to_ms for span in spans)


@given(TRIES, LIVES)
def test_the_state_of_a_moment_is_what_a_look_at_that_moment_finds(tries, lives) -> None:
    tries, lives = make_tries(tries), make_lives(lives)
    for span in make_spans(0, END_MS, tries, lives):
        at = (span.from_ms + span.to_ms) / 2
        flying = [one for one in tries if one.from_ms <= at < one.to_ms]
        states = {one.state for one in flying}
        alive = [life for life in lives if life.from_ms <= at < life.to_ms]
        starting = any(
            life.from_ms <= at < (life.to_ms if life.began_ms is None else life.began_ms) for life in lives
        ) or (lives and at < min(life.from_ms for life in lives))
        expected = next((state for state in CHUNK_STATES if state in states), None)
        assert span.state == (expected or ("start_up" if starting else "waiting" if alive else "idle"))
        assert sorted(span.attempt_ids) == [one.attempt_id for one in flying]


@given(TRIES, LIVES, POINTS, POINTS)
def test_what_is_shared_out_adds_up_to_what_there_was(tries, lives, watts, busy) -> None:
    watts, busy = make_points(watts), make_points(busy)
    power, used = list(power_steps(watts, 15_000)), list(busy_steps(busy, 15_000))
    to_ms = max([END_MS, *(at for at, _ in [*watts, *busy])])
    spans = list(make_spans(0, to_ms, make_tries(tries), make_lives(lives)))
    by_state, by_try = sum_by_state(spans, Cumulated(used), Cumulated(power))
    states = by_state.values()
    assert sum(account.total_s for account in states) == pytest.approx(to_ms / 1000)
    assert sum(account.energy_j or 0.0 for account in states) == pytest.approx(sum(step[2] for step in power))
    assert sum(account.busy_s or 0.0 for account in states) == pytest.approx(sum(step[2] for step in used))
    for what in ("total_s", "energy_j", "busy_s"):
        in_chunks = sum(getattr(by_state[state], what) or 0.0 for state in CHUNK_STATES if state in by_state)
        assert sum(getattr(account, what) or 0.0 for account in by_try.values()) == pytest.approx(in_chunks)


@given(TRIES, LIVES, st.integers(200, 50_000))
def test_stretches_have_the_same_seconds_as_the_spans(tries, lives, width_ms) -> None:
    spans = list(make_spans(7, END_MS, make_tries(tries), make_lives(lives)))
    stretches = state_seconds(spans, 7, width_ms)
    total: Counter[str] = Counter()
    for number, seconds in stretches.items():
        assert sum(seconds.values()) <= width_ms / 1000 + 1e-9
        assert 0 <= number <= (END_MS - 7) // width_ms
        total += seconds
    expected: Counter[str] = Counter()
    for span in spans:
        expected[span.state] += span.seconds
    assert dict(total) == {state: pytest.approx(seconds) for state, seconds in expected.items()}


def test_what_was_not_measured_is_unknown_and_not_zero() -> None:
    power = Cumulated(power_steps([(10_000, 100.0), (11_000, 100.0)], 15_000))
    nothing = Cumulated([])
    by_state, by_try = sum_by_state([Span(0, 5000, "start_up"), Span(5000, 20_000, "working", (1,))], nothing, power)
    assert by_state["start_up"].energy_j is None and by_state["start_up"].measured_s == 0
    assert by_state["working"].energy_j == pytest.approx(100) and by_state["working"].measured_s == 1
    assert by_state["working"].busy_s is None and by_try[1].busy_s is None


def test_two_tries_at_once_share_the_device_and_a_third_pays_for_itself() -> None:
    tries = [Try(1, 0, 2000, "working"), Try(2, 0, 2000, "failed"), Try(3, 2000, 3000, "working")]
    power = Cumulated(power_steps([(0, 100.0), (3000, 100.0)], 15_000))
    by_state, by_try = sum_by_state(make_spans(0, 3000, tries, [WorkerLife(0, 0, 3000)]), Cumulated([]), power)
    assert {key: (cost.total_s, round(cost.energy_j or 0)) for key, cost in by_try.items()} == {
        1: (1.0, 100), 2: (1.0, 100), 3: (1.0, 100),
    }  # fmt: skip
    assert by_state.keys() == {"working"}


def test_a_hole_in_the_readings_has_no_energy() -> None:
    assert list(power_steps([(0, 100.0), (1000, 100.0), (30_000, 100.0), (31_000, 50.0)], 15_000)) == [
        (0, 1000, 100.0),
        (30_000, 31_000, 75.0),
    ]


def test_a_reading_that_is_missing_is_no_zero_and_no_hole_while_its_neighbours_are_near() -> None:
    watts = [(0, 100.0), (5000, None), (15_000, 50.0), (16_000, None)]
    assert list(power_steps(watts, 15_000)) == [(0, 15_000, 1125.0)]
    assert list(busy_steps([(0, 90.0), (5000, None), (10_000, 50.0), (11_000, None)], 15_000)) == [(0, 10_000, 5.0)]


def test_a_hole_in_the_readings_is_neither_busy_nor_idle() -> None:
    readings = [(0, 100.0), (1000, 100.0), (30_000, 100.0), (31_000, 50.0)]
    assert list(busy_steps(readings, 15_000)) == [(0, 1000, 1.0), (30_000, 31_000, 0.5)]
