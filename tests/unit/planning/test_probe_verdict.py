"""What the trials of a probe say: the safe length, and the best one."""

from __future__ import annotations

import pytest
from rooms.model import NO_START, TOO_LONG, ProbeResult, Trial
from rooms.planning import choose_best, count_rounds, evaluate, measure, probe_text
from support.probes import KEY, trial


def test_the_best_is_the_shortest_within_two_percent_of_the_fastest() -> None:
    trials = [trial(60, 400), trial(120, 979), trial(240, 981), trial(480, 1000), trial(960, 999)]
    best = choose_best(trials, None)
    assert best is not None and best.length_s == 240


def test_what_is_not_safe_or_lean_is_never_the_best_unless_there_is_nothing_else() -> None:
    trials = [trial(60, 400), trial(120, 800), trial(240, 2000), trial(30, 9000, lean=True)]
    best, only = choose_best(trials, 200), choose_best(trials[2:3], 200)
    assert best is not None and best.length_s == 120
    assert only is not None and only.length_s == 240
    assert choose_best([trial(60, None), Trial(120, False, TOO_LONG)], None) is None


def test_the_margin_is_taken_off_what_fits_where_there_is_an_edge() -> None:
    trials = [trial(60, 400), trial(100, 800), Trial(105, False, TOO_LONG), trial(105, 700, lean=True)]
    result = evaluate([*trials, Trial(200, True, TOO_LONG)], 10)
    assert result == ProbeResult(100, 105, 90, 60, 400, None, 105, 200, 94, 10)
    unfinished = evaluate([*trials, Trial(200, True, TOO_LONG)], 25, finished=False)
    assert (unfinished.safe_s, unfinished.lean_safe_s, unfinished.lean_longest_s) == (75, None, None)


def test_without_an_edge_the_longest_is_safe() -> None:
    result = evaluate([trial(60, 400), trial(120, 800)], 10)
    assert (result.longest_s, result.too_long_s, result.safe_s, result.best_s) == (120, None, 120, 120)


def test_an_only_length_that_is_not_safe_lends_its_speed_to_one_that_is() -> None:
    result = evaluate([trial(60, 400), Trial(63, False, TOO_LONG)], 10)
    assert (result.safe_s, result.best_s, result.times_real_time) == (54, 54, 400)


def test_an_engine_that_never_starts_has_no_length_and_says_so() -> None:
    result = evaluate([Trial(60, False, NO_START), Trial(60, True, NO_START)], 10)
    assert (result.longest_s, result.too_long_s, result.best_s, result.lean_longest_s) == (None, None, None, None)
    text = probe_text([KEY.probed(result, [Trial(60, False, NO_START)])], "probe.toml")
    assert "no room for the models" in text and "nothing fits" in text


@pytest.mark.parametrize(("rate", "rounds"), [(None, 4), (600, 16), (60_000, 64), (30, 2), (5, 1)], ids=str)
def test_short_chunks_come_often_enough_to_be_measured_and_long_ones_once(rate: float | None, rounds: int) -> None:
    assert count_rounds(60, 2, 3, rate) == rounds


def test_speed_counts_from_the_end_of_the_first_round_on() -> None:
    done = [KEY.result(60, began, ended) for began, ended in ((0, 5000), (0, 6000), (5000, 7000), (6000, 8000))]
    assert measure(done, 2) == (2.0, 60.0)
    assert measure(done[:2], 2) == (6.0, 20.0)
    assert measure([KEY.result(60, 5, 5)], 1) == (0.0, None)


def test_a_batch_that_is_told_of_in_one_breath_counts_as_a_whole() -> None:
    done = [KEY.result(60, 0, ended) for ended in (6000, 6000, 6001, 6000)]
    assert measure(done, 1) == (6.001, 39.99)
