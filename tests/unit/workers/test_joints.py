"""Where audio is cut, and how what was heard in the pieces is put together."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.model import Detection
from rooms.workers import (
    GRID_S,
    OVERLAP_S,
    WIDE_GRID_S,
    join_detections,
    longest_piece_s,
    pieces_shorter_than,
    plan_pieces,
)

SHORTEST_S = GRID_S + OVERLAP_S

lengths_s = st.floats(min_value=0.1, max_value=90_000)


def heard(start_s: float, end_s: float, label: str = "ROPT", score: float | None = 0.9) -> Detection:
    return Detection(round(start_s * 1000), round(end_s * 1000), label, score)


# --- where it is cut --------------------------------------------------------------------------------------------------


def test_a_minute_in_halves() -> None:
    assert plan_pieces(60, 2) == [(0, 33), (27, 60)]


@given(lengths_s, st.integers(1, 64))
def test_pieces_cover_all_of_it_and_share_enough(audio_s: float, pieces: int) -> None:
    stretches = plan_pieces(audio_s, pieces)
    assert 1 <= len(stretches) <= pieces
    assert (stretches[0][0], stretches[-1][1]) == (0, audio_s)
    for (start_s, end_s), (next_start_s, next_end_s) in pairwise(stretches):
        assert end_s - next_start_s == OVERLAP_S
        assert next_start_s % GRID_S == 0
        assert end_s - start_s >= SHORTEST_S
        assert next_end_s - next_start_s > OVERLAP_S


@given(st.floats(1200, 90_000))
def test_long_pieces_begin_where_the_windows_of_all_models_do(audio_s: float) -> None:
    assert all(start_s % WIDE_GRID_S == 0 for start_s, _ in plan_pieces(audio_s, 4))


@given(lengths_s, st.floats(0.1, 90_000))
def test_pieces_are_shorter_than_the_limit_and_no_more_than_needed(audio_s: float, limit_s: float) -> None:
    pieces = pieces_shorter_than(audio_s, limit_s)
    if pieces is None:
        assert limit_s <= SHORTEST_S + OVERLAP_S or audio_s <= SHORTEST_S
        return
    assert longest_piece_s(audio_s, pieces) < min(limit_s, audio_s)
    assert pieces & (pieces - 1) == 0
    assert pieces == 2 or longest_piece_s(audio_s, pieces // 2) >= limit_s


def test_nobody_waits_for_the_pieces_of_a_length_that_cannot_be() -> None:
    assert pieces_shorter_than(2.0**63 / 44100, 60) is None


@pytest.mark.parametrize("audio_s", [0.5, 6, 14.9, 15])
def test_what_is_short_already_is_not_cut(audio_s: float) -> None:
    assert pieces_shorter_than(audio_s, audio_s) is None


# --- how it is put together -------------------------------------------------------------------------------------------

HALVES = plan_pieces(60, 2)  # 0–33 and 27–60: the joint is at 30 s


def joined(first: list[Detection], second: list[Detection]) -> list[Detection]:
    return list(join_detections([(HALVES[0], first), (HALVES[1], second)]))


def test_what_was_heard_in_a_piece_is_where_it_is_in_the_whole() -> None:
    assert joined([heard(1, 2)], [heard(10, 11, "WIPT")]) == [heard(1, 2), heard(37, 38, "WIPT")]


def test_what_both_heard_around_the_joint_is_there_once_with_the_higher_score() -> None:
    assert joined([heard(29, 31, score=0.6)], [heard(2, 4, score=0.8)]) == [heard(29, 31, score=0.8)]


def test_what_goes_on_across_the_joint_is_one() -> None:
    assert joined([heard(12, 33)], [heard(0, 20, score=0.7)]) == [heard(12, 47)]


def test_beyond_the_joint_the_other_piece_knows_better() -> None:
    assert joined([heard(30.5, 31.5), heard(32, 33)], [heard(3.6, 4.4, score=0.7)]) == [heard(30.6, 31.4, score=0.7)]
    assert joined([heard(28, 29)], [heard(0, 1), heard(1.1, 2.2)]) == [heard(28, 29)]


def test_what_only_one_heard_across_the_joint_stays() -> None:
    assert joined([heard(29, 31)], []) == [heard(29, 31)]
    assert joined([], [heard(2, 4)]) == [heard(29, 31)]


def test_two_kinds_at_the_same_moment_are_two() -> None:
    assert joined([heard(29, 31)], [heard(2, 4, "WIPT")]) == [heard(29, 31), heard(29, 31, "WIPT")]


def test_windows_that_overlap_each_other_find_their_twins() -> None:
    """Engines that report windows instead of stretches have several across the joint."""
    windows = [heard(start_s, start_s + 3, score=start_s / 100) for start_s in (26, 27, 28, 29)]
    assert (
        joined(windows, [heard(d.start_ms / 1000 - 27, d.end_ms / 1000 - 27, score=d.score) for d in windows[1:]])
        == windows
    )


def test_a_score_that_nobody_gave_loses_and_stays_unknown() -> None:
    assert joined([heard(29, 31, score=None)], [heard(2, 4, score=0.1)]) == [heard(29, 31, score=0.1)]
    assert joined([heard(29, 31, score=None)], [heard(2, 4, score=None)]) == [heard(29, 31, score=None)]


calls_s = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), max_size=12)


@given(st.integers(16, 300), calls_s, st.sampled_from([2, 4, 8]))
def test_a_detector_that_hears_stretches_hears_the_same_in_pieces(
    audio_s: int, calls: list[tuple[int, int]], pieces: int
) -> None:
    """Calls of tenths of a second, grown together where they touch, as a detector would report them."""
    loud = sorted({tenth for start, length in calls for tenth in range(start, start + length) if tenth < audio_s * 10})

    def detect(first: int, last: int) -> list[Detection]:
        found: list[Detection] = []
        for tenth in (tenth for tenth in loud if first <= tenth < last):
            start_ms = (tenth - first) * 100
            if found and found[-1].end_ms == start_ms:
                found[-1] = Detection(found[-1].start_ms, start_ms + 100, "LOUD", 1.0)
            else:
                found.append(Detection(start_ms, start_ms + 100, "LOUD", 1.0))
        return found

    parts = [(s, detect(round(s[0] * 10), round(s[1] * 10))) for s in plan_pieces(audio_s, pieces)]
    assert list(join_detections(parts)) == detect(0, audio_s * 10)
