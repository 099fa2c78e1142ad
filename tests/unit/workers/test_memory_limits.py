"""What fits into a GPU model: each try with less than the one before, learned when less has worked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk, ChunkStarted, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.workers import LEAN, USUAL, MemoryLimit, MemoryLimits, Way, longest_piece_s
from support.audio import make_wav
from support.scripted_engine import CLOCK, News, Script, ScriptedSession, audio_steps, done, failed
from support.supervised import OK, Bench

V100, H200, A, B, C = "Tesla V100", "NVIDIA H200", ("r", "a"), ("r", "b"), ("r", "c")
HALVES, QUARTERS, EIGHTHS = Way(True, 2), Way(True, 4), Way(True, 8)
Deed = Callable[[MemoryLimits], None]


def oom(key: tuple[str, str], audio_s: float | None, *ways: Way, on: str = V100, beside_s: float | None = None) -> Deed:
    def deed(limits: MemoryLimits) -> None:
        for way in ways:
            limits.note_out_of_memory(on, key, audio_s, way, beside_s=beside_s)

    return deed


def fits(key: tuple[str, str], audio_s: float | None, way: Way) -> Deed:
    return lambda limits: limits.note_success(V100, key, audio_s, way)


def fails(key: tuple[str, str]) -> Deed:
    return lambda limits: limits.note_other_failure(key)


# What happened; then the way of other chunks by length, the way of chunk A of 60 s (None: none is left), what was
# learned.
STORIES: list[tuple[str, MemoryLimit, list[Deed], dict[float | None, Way], Way | None, list[MemoryLimit]]] = [
    ("nothing is known", MemoryLimit(), [], {1: USUAL, 86_400: USUAL, None: USUAL}, USUAL, []),
    ("known limits decide at once", MemoryLimit(300, 600), [],
     {299.9: USUAL, 300: LEAN, 599: LEAN, 600: HALVES, 1000: HALVES, 2000: QUARTERS, None: USUAL}, USUAL, []),
    ("known only with the usual threads", MemoryLimit(300), [], {299: USUAL, 300: LEAN, 9000: LEAN}, USUAL, []),
    ("known only lean", MemoryLimit(None, 60), [], {59: USUAL, 60: HALVES}, HALVES, []),
    ("so short that it cannot be cut", MemoryLimit(None, 3), [], {2: USUAL, 3: LEAN, 20: LEAN}, LEAN, []),
    ("others of its length follow a chunk in trouble at once", MemoryLimit(), [oom(A, 60, USUAL)],
     {59: USUAL, 60: LEAN}, LEAN, []),
    ("step by step", MemoryLimit(), [oom(A, 60, USUAL, LEAN)], {14: USUAL, 59: USUAL, 60: HALVES}, HALVES, []),
    ("again", MemoryLimit(), [oom(A, 60, USUAL, LEAN, HALVES)], {32: USUAL, 33: HALVES, 60: QUARTERS}, QUARTERS, []),
    ("until it cannot be cut any smaller, which proves nothing", MemoryLimit(),
     [oom(A, 60, USUAL, LEAN, HALVES, QUARTERS, EIGHTHS)], {60: USUAL, 600: USUAL}, None, []),
    ("lean works: too long for the usual threads", MemoryLimit(), [oom(A, 600, USUAL), fits(A, 600, LEAN)],
     {599: USUAL, 600: LEAN}, USUAL, [MemoryLimit(600)]),
    ("pieces work: too long even lean", MemoryLimit(), [oom(A, 60, USUAL, LEAN, HALVES), fits(A, 60, QUARTERS)],
     {32: USUAL, 33: HALVES, 60: QUARTERS}, QUARTERS, [MemoryLimit(60, 33)]),
    ("a limit only falls", MemoryLimit(100), [oom(A, 600, USUAL), fits(A, 600, LEAN), oom(B, 50, USUAL),
     fits(B, 50, LEAN)], {49: USUAL, 50: LEAN}, LEAN, [MemoryLimit(50)]),
    ("never raised by longer audio that comes through later", MemoryLimit(), [oom(B, 600, LEAN), oom(C, 400, LEAN),
     fits(C, 400, HALVES), fits(B, 600, HALVES)], {399: USUAL, 400: HALVES, 599: HALVES}, USUAL,
     [MemoryLimit(None, 400)]),
    ("a GPU that others fill: what has fitted before would fit again", MemoryLimit(), [fits(B, 30, USUAL),
     oom(A, 30, USUAL, LEAN), fits(A, 30, HALVES)], {30: USUAL}, USUAL, []),
    ("what has fitted lean is not too long", MemoryLimit(), [fits(B, 600, LEAN), fits(B, 500, LEAN), oom(A, 400, LEAN),
     fits(A, 400, HALVES)], {400: USUAL}, USUAL, []),
    ("what fits meanwhile is followed instead", MemoryLimit(), [oom(A, 30, USUAL), fits(B, 30, USUAL)],
     {30: USUAL}, LEAN, []),
    ("pieces that fit say nothing about the whole", MemoryLimit(), [oom(A, 60, LEAN), fits(B, 90, HALVES)],
     {60: HALVES}, HALVES, []),
    ("beside a longer one it is that one which is too long", MemoryLimit(), [oom(A, 30, USUAL, beside_s=600),
     fits(A, 30, LEAN)], {599: USUAL, 600: LEAN}, USUAL, [MemoryLimit(600)]),
    ("with other troubles it is followed by nobody and goes on with less", MemoryLimit(), [oom(A, 60, USUAL), fails(A)],
     {60: USUAL}, LEAN, []),
    ("and teaches nothing", MemoryLimit(), [oom(A, 60, USUAL), fails(A), fits(A, 60, LEAN)], {60: USUAL}, USUAL, []),
    ("troubles of a chunk that had room are no news", MemoryLimit(), [fails(A)], {60: USUAL}, USUAL, []),
    ("unknown length: lean", MemoryLimit(), [oom(A, None, USUAL)], {60: USUAL}, LEAN, []),
    ("unknown length: then given up", MemoryLimit(), [oom(A, None, USUAL, LEAN)], {60: USUAL}, None, []),
    ("what cannot be cut has no way left", MemoryLimit(),
     [oom(A, 600, LEAN), lambda limits: limits.note_cannot_cut(V100, A)], {600: USUAL}, None, []),
    ("another model is another matter", MemoryLimit(), [oom(B, 60, USUAL, on=H200), oom(C, 600, USUAL)],
     {60: USUAL, 600: LEAN}, USUAL, []),
    ("it takes the way of its length where that needs less than its own", MemoryLimit(), [oom(A, 60, USUAL),
     oom(B, 60, LEAN)], {59: USUAL, 60: HALVES}, HALVES, []),
]  # fmt: skip


@pytest.mark.parametrize(
    ("known", "deeds", "ways", "way", "learned"), [case[1:] for case in STORIES], ids=[case[0] for case in STORIES]
)
def test_ways_follow_from_what_fitted_and_what_did_not(
    known: MemoryLimit, deeds: list[Deed], ways: dict[float | None, Way], way: Way | None, learned: list[MemoryLimit]
) -> None:
    lessons: list[tuple[str, MemoryLimit]] = []
    limits = MemoryLimits({V100: known}, lambda model, limit: lessons.append((model, limit)))
    for deed in deeds:
        deed(limits)
    assert {audio_s: limits.way_of(V100, ("r", "new"), audio_s) for audio_s in ways} == ways
    assert (None if limits.ways_left(A) is False else limits.way_of(V100, A, 60)) == way
    assert lessons == [(V100, limit) for limit in learned]
    assert limits.ways_left(("r", "new")) is None


@settings(max_examples=50)
@given(st.floats(30, 100_000), st.floats(30, 10_000))
def test_pieces_are_strictly_shorter_than_what_did_not_fit(audio_s: float, alone_s: float) -> None:
    way = MemoryLimits({V100: MemoryLimit(alone_s=alone_s)}).way_for_length(V100, audio_s)
    assert longest_piece_s(audio_s, way.pieces) < alone_s


def test_of_two_limits_of_a_model_the_shorter_one_counts_each_way() -> None:
    probed, learned = MemoryLimit(crowded_s=300), MemoryLimit(crowded_s=400, alone_s=600)
    assert probed.lower(learned) == learned.lower(probed) == MemoryLimit(crowded_s=300, alone_s=600)


# --- in a task --------------------------------------------------------------------------------------------------------


class OnOneGpu(Bench):
    """A supervisor over a scripted engine with little memory; chunks are named after their length."""

    def __init__(
        self, folder: Path, script: Script, lengths_s: Sequence[float], known: MemoryLimit | None = None, **how: Any
    ) -> None:
        self.learned: dict[str, MemoryLimit] = {}
        limits = MemoryLimits({V100: known or MemoryLimit()}, self.learned.__setitem__)
        chunks = []
        for number, length_s in enumerate(lengths_s):
            path = make_wav(folder / f"{number}.wav", length_s, 500, loud=[]) if length_s > 15 else folder / "short.wav"
            chunks.append(Chunk("r", f"{length_s:g}s-{number}", path.name, str(path), 0, round(length_s * 1000)))
        device = Device("0", "test", name=V100)
        plans = [WorkerPlan(slot, device, 100, 2) for slot in range(how.pop("workers", 1))]
        audio = audio_steps(folder, limits=limits)
        super().__init__(folder, script, chunks=chunks, workers=plans, audio=audio, **how)

    @property
    def kinds(self) -> list[bool]:
        """Whether each session was lean, in order."""
        return [session.plan.lean for session in self.engine.sessions]


def with_room(room_s: float) -> Script:
    """Make an engine with so much room when it is lean, and a third of it when it is not."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            chunk = held.pop(0)
            yield ChunkStarted(chunk, CLOCK.now_ms())
            too_long = (chunk.audio_s or 0) > (room_s if session.plan.lean else room_s / 3)
            yield failed(chunk, "out_of_memory") if too_long else done(chunk)
            held += session.more(2 - len(held), idle=1)

    return script


OOM = ("out_of_memory", "failed")


@pytest.mark.parametrize(
    ("room_s", "lengths_s", "known", "wants", "tries", "learned", "kinds"),
    [
        # A try with less is an attempt, but no retry: there are none here.
        (40, [60, 5, 5], None, 1, {0: [OOM, OOM, OK]}, MemoryLimit(60, 60), [False, True]),
        (40, [30, 5], None, 1, {0: [OOM, OK]}, MemoryLimit(30), [False, True]),
        # A known limit is heeded at the first try; those that need it share one lean session.
        (40, [60, 30, 5, 5, 5, 5], MemoryLimit(20, 41), 3, {}, None, [True, False]),
        (40, [5, 5, 5, 30, 30, 5, 5, 30], MemoryLimit(20), 2, {}, None, [True, False]),
        (12, [60, 3], None, 1, {0: [OOM] * 5}, None, [False, True]),
    ],
)  # fmt: skip
def test_a_chunk_that_runs_out_of_memory_is_tried_with_less_and_others_of_its_length_at_once(
    tmp_path: Path, room_s: float, lengths_s: list[float], known: MemoryLimit | None, wants: int,
    tries: Mapping[int, list[tuple[str, str]]], learned: MemoryLimit | None, kinds: list[bool],
) -> None:  # fmt: skip
    bench = OnOneGpu(tmp_path, with_room(room_s), lengths_s, known, wants=wants, retries=0).run()
    assert list(bench.tries.values()) == [tries.get(number, [OK]) for number in range(len(lengths_s))]
    assert bench.learned == ({} if learned is None else {V100: learned})
    assert bench.kinds[:2] == kinds
    assert bench.tally.failed == (room_s == 12), "where no way is left it fails at once"


def test_of_several_of_the_same_length_only_the_first_has_to_find_out(tmp_path: Path) -> None:
    bench = OnOneGpu(tmp_path, with_room(40), [60, 60, 60, 60, *[5] * 10], retries=0, workers=2).run()
    assert bench.statuses == {"done": 14}
    assert sum(map(len, bench.tries.values())) <= 14 + 2 * 3, "each worker may have one on its way"


@pytest.mark.parametrize("company", [1, 4])
def test_an_engine_that_dies_of_it_climbs_the_same_ladder(tmp_path: Path, company: int) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (ChunkStarted(chunk, CLOCK.now_ms()) for chunk in batch)
        if any((chunk.audio_s or 0) > 40 for chunk in batch):
            raise SessionBroken("out_of_memory", "CUDA out of memory")
        yield from (done(chunk) for chunk in batch)

    bench = OnOneGpu(tmp_path, script, [60, 5, 5, 5], wants=company, retries=0).run()
    assert bench.statuses == {"done": 4}
    assert [one for one in bench.tries["60s-0"] if one[1] != "lost"] == [OOM, OOM, OK]


def test_a_chunk_that_kills_its_worker_in_pieces_is_poison_like_any_other(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], CLOCK.now_ms())
        if batch[0].chunk_id.endswith("~27s"):
            raise SessionBroken("engine_crash", "segmentation fault")
        yield done(batch[0])

    bench = OnOneGpu(tmp_path, script, [60, 5, 5], MemoryLimit(alone_s=40), retries=5).run()
    assert bench.statuses == {"poison": 1, "done": 2}
    assert bench.tries["60s-0"] == [("engine_crash", "failed")] * 2


def test_models_that_do_not_fit_as_usual_are_loaded_with_less_and_the_worker_goes_on_so(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if not session.plan.lean:
            raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
        yield from (done(chunk) for chunk in batch)

    bench = OnOneGpu(tmp_path, script, [30, *[5] * 6], MemoryLimit(crowded_s=20), wants=2).run()
    assert (bench.statuses, bench.kinds[-2:], bench.tally.retired) == ({"done": 7}, [False, True], [])
