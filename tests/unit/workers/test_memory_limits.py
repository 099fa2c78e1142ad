"""What fits into a GPU model: learned from what did not, believed when less has worked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rooms.workers import LEAN, USUAL, MemoryLimit, MemoryLimits, Way, longest_piece_s

V100, A, B = "Tesla V100", ("r", "a"), ("r", "b")
HALVES = Way(True, 2)


class Lessons(list[tuple[str, MemoryLimit]]):
    def __call__(self, model: str, limit: MemoryLimit) -> None:
        self.append((model, limit))


def test_where_nothing_is_known_everything_goes_as_usual() -> None:
    limits = MemoryLimits()
    assert [limits.way_for_length(V100, audio_s) for audio_s in (1, 86_400, None)] == [USUAL] * 3


def test_a_known_limit_decides_at_once() -> None:
    limits = MemoryLimits({V100: MemoryLimit(crowded_s=300, alone_s=600)})
    ways = {299.9: USUAL, 300: LEAN, 599: LEAN, 600: HALVES, 1000: HALVES, 2000: Way(True, 4)}
    assert {audio_s: limits.way_for_length(V100, audio_s) for audio_s in ways} == ways
    assert limits.way_for_length("NVIDIA H200", 2000) == USUAL
    assert limits.way_for_length(V100, None) == USUAL


@given(st.floats(30, 100_000), st.floats(30, 10_000))
def test_pieces_are_strictly_shorter_than_what_did_not_fit(audio_s: float, alone_s: float) -> None:
    way = MemoryLimits({V100: MemoryLimit(alone_s=alone_s)}).way_for_length(V100, audio_s)
    assert longest_piece_s(audio_s, way.pieces) < alone_s


def test_a_chunk_goes_down_step_by_step_until_it_cannot_be_cut_any_smaller() -> None:
    limits = MemoryLimits()
    ways = [limits.way_of(V100, A, 60)]
    assert limits.ways_left(A) is None
    limits.note_out_of_memory(V100, A, 60, ways[-1])
    while limits.ways_left(A):
        ways.append(limits.way_of(V100, A, 60))
        limits.note_out_of_memory(V100, A, 60, ways[-1])
        assert len(ways) < 10
    assert ways == [USUAL, LEAN, HALVES, Way(True, 4), Way(True, 8)]
    assert limits.way_of(V100, B, 60) == USUAL, "what nothing has proved is no rule for others"


def test_others_of_the_same_length_follow_a_chunk_in_trouble_at_once_and_only_while_it_is() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    ways = []
    limits.note_out_of_memory(V100, A, 60, USUAL)
    while limits.ways_left(A):
        ways.append(limits.way_of(V100, B, 60))
        assert limits.way_of(V100, B, 14) == limits.way_of("NVIDIA H200", B, 60) == USUAL
        limits.note_out_of_memory(V100, A, 60, limits.way_of(V100, A, 60))
    assert ways == [LEAN, HALVES, Way(True, 4), Way(True, 8)]
    assert limits.way_of(V100, B, 60) == USUAL
    assert lessons == []


def test_lean_that_works_teaches_what_is_too_long_for_the_usual_threads() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    limits.note_out_of_memory(V100, A, 600, USUAL)
    assert lessons == []
    limits.note_success(V100, A, 600, LEAN)
    assert lessons == [(V100, MemoryLimit(crowded_s=600))]
    assert limits.way_of(V100, B, 600) == LEAN
    assert limits.way_of(V100, B, 599) == USUAL


def test_pieces_that_work_teach_what_is_too_long_even_lean() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    for way in (USUAL, LEAN, HALVES):
        limits.note_out_of_memory(V100, A, 60, way)
    limits.note_success(V100, A, 60, Way(True, 4))
    assert lessons == [(V100, MemoryLimit(crowded_s=60, alone_s=33))]
    assert limits.way_of(V100, B, 60) == Way(True, 4)
    assert limits.way_of(V100, B, 33) == HALVES


def test_a_limit_only_falls() -> None:
    lessons = Lessons()
    limits = MemoryLimits({V100: MemoryLimit(crowded_s=100)}, lessons)
    limits.note_out_of_memory(V100, A, 600, USUAL)
    limits.note_success(V100, A, 600, LEAN)
    assert lessons == []
    limits.note_out_of_memory(V100, B, 50, USUAL)
    limits.note_success(V100, B, 50, LEAN)
    assert lessons == [(V100, MemoryLimit(crowded_s=50))]


def test_what_is_too_long_even_lean_is_never_raised_by_longer_audio_that_comes_through_later() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    for key, audio_s in ((A, 600), (B, 400)):
        limits.note_out_of_memory(V100, key, audio_s, LEAN)
    limits.note_success(V100, B, 400, HALVES)
    limits.note_success(V100, A, 600, HALVES)
    assert lessons == [(V100, MemoryLimit(alone_s=400))]
    assert [limits.way_for_length(V100, audio_s) for audio_s in (399, 400, 599)] == [USUAL, HALVES, HALVES]


def test_what_has_fitted_lean_is_not_too_long_when_something_shorter_runs_out_later() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    limits.note_success(V100, B, 600, LEAN)
    limits.note_out_of_memory(V100, A, 400, LEAN)
    limits.note_success(V100, A, 400, HALVES)
    assert lessons == []
    assert limits.way_for_length(V100, 400) == USUAL


def test_a_chunk_in_trouble_on_one_model_says_nothing_about_another() -> None:
    limits = MemoryLimits()
    limits.note_out_of_memory(V100, A, 60, USUAL)
    limits.note_out_of_memory("NVIDIA H200", B, 600, USUAL)
    assert [limits.way_for_length("NVIDIA H200", audio_s) for audio_s in (60, 600)] == [USUAL, LEAN]


def test_a_chunk_in_trouble_takes_the_way_of_its_length_where_that_needs_less_memory_than_its_own() -> None:
    limits = MemoryLimits()
    limits.note_out_of_memory(V100, A, 600, USUAL)
    assert limits.way_of(V100, A, 600) == LEAN
    limits.note_out_of_memory(V100, B, 600, LEAN)
    assert limits.way_of(V100, A, 600) == HALVES


def test_of_two_limits_of_a_model_the_shorter_one_counts_each_way() -> None:
    probed, learned = MemoryLimit(crowded_s=300), MemoryLimit(crowded_s=400, alone_s=600)
    assert probed.lower(learned) == learned.lower(probed) == MemoryLimit(crowded_s=300, alone_s=600)


def test_a_gpu_that_somebody_else_fills_teaches_nothing() -> None:
    """What has fitted before would fit again: it was not the length."""
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    limits.note_success(V100, B, 30, USUAL)
    for way in (USUAL, LEAN):
        limits.note_out_of_memory(V100, A, 30, way)
    limits.note_success(V100, A, 30, HALVES)
    assert lessons == []
    assert limits.way_of(V100, B, 30) == USUAL


def test_a_gpu_on_which_nothing_ever_fits_teaches_nothing() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    for number in range(20):
        for way in (USUAL, LEAN, HALVES, Way(True, 4)):
            limits.note_out_of_memory(V100, ("r", str(number)), 30, way)
    assert lessons == []
    assert limits.way_for_length(V100, 30) == USUAL


def test_a_short_chunk_beside_a_long_one_is_not_what_was_too_long() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    limits.note_out_of_memory(V100, A, 30, USUAL, beside_s=600)
    limits.note_success(V100, A, 30, LEAN)
    assert lessons == [(V100, MemoryLimit(crowded_s=600))]


def test_a_chunk_with_other_troubles_is_followed_by_nobody_and_goes_on_with_less() -> None:
    lessons = Lessons()
    limits = MemoryLimits(learned=lessons)
    limits.note_out_of_memory(V100, A, 30, USUAL)
    assert limits.way_of(V100, B, 30) == LEAN
    limits.note_other_failure(A)
    assert (limits.way_of(V100, A, 30), limits.way_of(V100, B, 30)) == (LEAN, USUAL)
    limits.note_success(V100, A, 30, LEAN)
    assert lessons == []


def test_what_fits_meanwhile_is_followed_instead() -> None:
    limits = MemoryLimits()
    limits.note_out_of_memory(V100, A, 30, USUAL)
    limits.note_success(V100, B, 30, USUAL)
    assert limits.way_of(V100, ("r", "c"), 30) == USUAL


def test_audio_of_unknown_length_is_tried_lean_and_then_given_up() -> None:
    limits = MemoryLimits()
    limits.note_out_of_memory(V100, A, None, USUAL)
    assert limits.way_of(V100, A, None) == LEAN
    limits.note_out_of_memory(V100, A, None, LEAN)
    assert limits.ways_left(A) is False


def test_what_cannot_be_cut_has_no_way_left() -> None:
    limits = MemoryLimits()
    limits.note_out_of_memory(V100, A, 600, LEAN)
    limits.note_cannot_cut(V100, A)
    assert limits.ways_left(A) is False
