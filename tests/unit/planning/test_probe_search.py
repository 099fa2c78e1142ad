"""Which length a probe tries next: it finds any limit, in few trials, however many devices share them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import FITS, NO_START, TOO_LONG, Trial
from rooms.planning import Bounds, ProbeStep, bracket, next_step, usual_is_over

LIMITS = st.floats(3.1, 20_000)


def fits(length_s: float, *, lean: bool = False) -> Trial:
    return Trial(length_s, lean, FITS)


def too_long(length_s: float, *, lean: bool = False) -> Trial:
    return Trial(length_s, lean, TOO_LONG)


def search(holds: Callable[[ProbeStep], bool], bounds: Bounds, devices: int = 1) -> list[Trial]:
    """Play the devices: each takes the next step as soon as it is free, the oldest trial ends first."""
    trials: list[Trial] = []
    running: list[ProbeStep] = []
    while True:
        while len(running) < devices and (step := next_step(trials, bounds, running)) is not None:
            assert step not in running
            running.append(step)
        if not running:
            assert next_step(trials, bounds) is None
            return trials
        step = running.pop(0)
        trials.append(Trial(step.length_s, step.lean, FITS if holds(step) else TOO_LONG))
        assert len(trials) < 200


def most_trials(bounds: Bounds) -> int:
    """Return how many trials one way may take: up, or down, and then in between."""
    up = math.ceil(math.log2(bounds.longest_s / bounds.start_s)) + 1
    down = math.ceil(math.log2(bounds.start_s / bounds.shortest_s)) + 1
    return max(up, down) + math.ceil(math.log2(math.log(2) / math.log(1 + bounds.tolerance))) + 1


@given(LIMITS, st.floats(3, 300), st.sampled_from([0.02, 0.05, 0.2]), st.integers(1, 5))
def test_any_limit_is_found_within_the_tolerance_and_in_few_trials(
    limit_s: float, start_s: float, tolerance: float, devices: int
) -> None:
    bounds = Bounds(start_s, 3600.0, tolerance=tolerance)
    trials = search(lambda step: step.length_s <= limit_s, bounds, devices)
    fits_s, too_long_s = bracket(trials, lean=False)
    if limit_s >= 3600:
        assert (fits_s, too_long_s) == (3600, None)
    elif fits_s is None:
        assert limit_s < 2 * bounds.shortest_s * 1.01
    else:
        assert too_long_s is not None
        assert fits_s <= limit_s < too_long_s
        assert too_long_s <= fits_s * max(1 + tolerance, 1.021)  # rounded lengths come no closer than 1 % each
    if devices == 1:
        assert len([t for t in trials if not t.lean]) <= most_trials(bounds)
        assert len([t for t in trials if t.lean]) <= most_trials(bounds)


@given(LIMITS, st.floats(1, 8))
def test_the_lean_limit_is_found_too_and_begins_where_the_usual_one_ends(limit_s: float, helps: float) -> None:
    bounds = Bounds()
    trials = search(lambda step: step.length_s <= (limit_s * helps if step.lean else limit_s), bounds)
    (usual_s, too_long_s), (lean_s, lean_too_long_s) = bracket(trials, lean=False), bracket(trials, lean=True)
    if too_long_s is None:
        assert not any(trial.lean for trial in trials)
    elif lean_s is not None and lean_too_long_s is not None:
        assert lean_s <= limit_s * helps < lean_too_long_s
        assert lean_too_long_s <= lean_s * 1.051
        assert lean_s >= (usual_s or 0)


def test_it_doubles_then_halves_what_is_in_between() -> None:
    lengths = [trial.length_s for trial in search(lambda step: step.length_s <= 1000, Bounds(60, 3600))]
    assert lengths[:7] == [60, 120, 240, 480, 960, 1920, 1358]
    assert all(960 < length < 1358 for length in lengths[7:-1])


def test_one_thread_that_does_not_help_costs_one_trial() -> None:
    trials = search(lambda step: step.length_s <= 100, Bounds(60, 3600))
    assert [trial.lean for trial in trials].count(True) == 1


def test_devices_of_one_model_never_try_the_same_and_need_fewer_rounds() -> None:
    bounds, trials = Bounds(60, 3600), [fits(60), fits(120)]
    first = next_step(trials, bounds)
    assert first == ProbeStep(False, 240)
    assert next_step(trials, bounds, [first]) == ProbeStep(False, 480)
    between = [*trials, too_long(240)]
    assert next_step(between, bounds) == ProbeStep(False, 170)
    assert next_step(between, bounds, [ProbeStep(False, 170.0)]) == ProbeStep(False, 143)


def test_nothing_is_tried_beyond_the_longest_that_was_asked_for() -> None:
    assert [t.length_s for t in search(lambda step: True, Bounds(60, 150))] == [60, 120, 150]
    assert [t.length_s for t in search(lambda step: True, Bounds(60, 20))] == [20]


def test_a_longer_end_goes_on_where_a_shorter_one_stopped() -> None:
    trials = [fits(60), fits(120)]
    assert next_step(trials, Bounds(60, 120)) is None
    assert next_step(trials, Bounds(60, 1000)) == ProbeStep(False, 240)


def test_an_engine_that_does_not_start_as_usual_is_tried_lean_and_then_not_at_all() -> None:
    trials = [Trial(60, False, NO_START)]
    assert usual_is_over(trials, Bounds())
    assert next_step(trials, Bounds()) == ProbeStep(True, 60)
    assert next_step([*trials, Trial(60, True, NO_START)], Bounds()) is None


def test_where_trials_contradict_each_other_what_did_not_fit_counts() -> None:
    assert bracket([fits(60), too_long(120), fits(240)], lean=False) == (60, 120)


@pytest.mark.parametrize(("limit_s", "shortest_s"), [(50, 30), (4, 3.75), (2, None)])
def test_a_start_that_is_too_long_is_halved(limit_s: float, shortest_s: float | None) -> None:
    trials = search(lambda step: step.length_s <= limit_s, Bounds(60, 3600))
    assert min((t.length_s for t in trials if t.outcome == FITS), default=None) == shortest_s
