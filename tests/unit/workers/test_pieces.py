"""Chunks that do not fit: cut, done one piece after the other, and put together, as if nothing had happened."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut
from rooms.workers import (
    MemoryLimit,
    MemoryLimits,
    SessionFeed,
    join_detections,
    longest_piece_s,
    pieces_shorter_than,
    plan_pieces,
)
from support.audio import make_wav
from support.scripted_engine import (
    News,
    Script,
    ScriptedEngine,
    ScriptedSession,
    audio_steps,
    done,
    failed,
    open_feed,
)

USUAL = WorkerPlan(0, Device("0", "test", name="Tesla V100"), 1, 2)
LEAN = replace(USUAL, lean=True)
SMALL = {"Tesla V100": MemoryLimit(crowded_s=20, alone_s=40)}
OVERLAP_S, GRID_S, WIDE_GRID_S, SHORTEST_S = 6, 9, 36, 15  # measured: see the comments of the product
lengths_s = st.floats(min_value=0.1, max_value=90_000)


# --- where it is cut --------------------------------------------------------------------------------------------------


def test_pieces_of_some_lengths() -> None:
    for audio_s, pieces, expected in [
        (60, 1, [(0, 60)]),
        (60, 2, [(0, 33), (27, 60)]),
        (60, 64, [(0, 15), (9, 24), (18, 33), (27, 42), (36, 51), (45, 60)]),
        (14, 2, [(0, 14)]),
        (15, 2, [(0, 15)]),
        (15.1, 2, [(0, 15), (9, 15.1)]),
        (582, 4, [(0, 150), (144, 294), (288, 438), (432, 582)]),
        (581, 4, [(0, 150), (144, 294), (288, 438), (432, 581)]),
        (1200, 2, [(0, 618), (612, 1200)]),
    ]:
        assert plan_pieces(audio_s, pieces) == expected
    shorter = [pieces_shorter_than(*case) for case in ((60, 60), (60, 33), (60, 33.1), (60, 15), (15, 15), (2e14, 60))]
    assert shorter == [2, 4, 2, None, None, None]


@given(lengths_s, st.integers(1, 64))
@settings(max_examples=60)
def test_pieces_cover_all_of_it_and_share_enough(audio_s: float, pieces: int) -> None:
    stretches = plan_pieces(audio_s, pieces)
    assert 1 <= len(stretches) <= pieces and (stretches[0][0], stretches[-1][1]) == (0, audio_s)
    wide = (audio_s - OVERLAP_S) / pieces >= 4 * WIDE_GRID_S
    for (start_s, end_s), (next_start_s, next_end_s) in pairwise(stretches):
        assert end_s - next_start_s == OVERLAP_S and end_s - start_s >= SHORTEST_S
        assert next_start_s % (WIDE_GRID_S if wide else GRID_S) == 0 and next_end_s - next_start_s > OVERLAP_S


@given(lengths_s, st.floats(0.1, 90_000))
@settings(max_examples=60)
def test_pieces_are_shorter_than_the_limit_and_no_more_than_needed(audio_s: float, limit_s: float) -> None:
    pieces = pieces_shorter_than(audio_s, limit_s)
    if pieces is None:
        assert limit_s <= SHORTEST_S + OVERLAP_S or audio_s <= SHORTEST_S
        return
    assert longest_piece_s(audio_s, pieces) < min(limit_s, audio_s)
    assert pieces == 2 or longest_piece_s(audio_s, pieces // 2) >= limit_s


# --- how it is put together -------------------------------------------------------------------------------------------


def heard(start_s: float, end_s: float, label: str = "ROPT", score: float | None = 0.9) -> Detection:
    return Detection(round(start_s * 1000), round(end_s * 1000), label, score)


WINDOWS = [heard(start_s, start_s + 3, score=start_s / 100) for start_s in (26, 27, 28, 29)]


@pytest.mark.parametrize(
    ("first", "second", "whole"),
    [
        ([heard(1, 2)], [heard(10, 11, "WIPT")], [heard(1, 2), heard(37, 38, "WIPT")]),
        ([heard(29, 31, score=0.6)], [heard(2, 4, score=0.8)], [heard(29, 31, score=0.8)]),
        ([heard(29, 31, score=0.8)], [heard(2, 4, score=0.6)], [heard(29, 31, score=0.8)]),
        ([heard(12, 33)], [heard(0, 20, score=0.7)], [heard(12, 47)]),
        ([heard(30.5, 31.5), heard(32, 33)], [heard(3.6, 4.4)], [heard(30.6, 31.4)]),
        ([heard(28, 29)], [heard(0, 1), heard(1.1, 2.2)], [heard(28, 29)]),
        ([heard(28, 30)], [heard(1, 3)], [heard(28, 30)]),
        ([heard(30, 31)], [heard(3, 4)], [heard(30, 31)]),
        ([heard(29, 31)], [], [heard(29, 31)]),
        ([], [heard(2, 4)], [heard(29, 31)]),
        ([heard(29, 31)], [heard(2, 4, "WIPT")], [heard(29, 31), heard(29, 31, "WIPT")]),
        (WINDOWS, [heard(n - 27, n - 24, score=n / 100) for n in (27, 28, 29)], WINDOWS),
        ([heard(29, 31, score=None)], [heard(2, 4, score=0.1)], [heard(29, 31, score=0.1)]),
        ([heard(29, 31, score=None)], [heard(2, 4, score=None)], [heard(29, 31, score=None)]),
        (
            [heard(9, 10, "Z"), heard(9, 10, "A"), heard(8, 12)],
            [],
            [heard(8, 12), heard(9, 10, "A"), heard(9, 10, "Z")],
        ),
    ],
)
def test_a_minute_in_halves_is_joined_at_its_middle(
    first: list[Detection], second: list[Detection], whole: list[Detection]
) -> None:
    assert list(join_detections([((0.0, 33.0), first), ((27.0, 60.0), second)])) == whole


calls_s = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), max_size=12)


@given(st.integers(16, 300), calls_s, st.sampled_from([2, 4, 8]))
@settings(max_examples=60)
def test_a_detector_that_hears_stretches_hears_the_same_in_pieces(
    audio_s: int, calls: list[tuple[int, int]], pieces: int
) -> None:
    """Calls of tenths of a second, grown together where they touch, as a detector would report them."""
    loud = sorted({tenth for start, length in calls for tenth in range(start, start + length) if tenth < audio_s * 10})

    def detect(first: int, last: int) -> list[Detection]:
        found: list[Detection] = []
        for start_ms in ((tenth - first) * 100 for tenth in loud if first <= tenth < last):
            if found and found[-1].end_ms == start_ms:
                found[-1] = Detection(found[-1].start_ms, start_ms + 100, "LOUD", 1.0)
            else:
                found.append(Detection(start_ms, start_ms + 100, "LOUD", 1.0))
        return found

    parts = [(s, detect(round(s[0] * 10), round(s[1] * 10))) for s in plan_pieces(audio_s, pieces)]
    assert list(join_detections(parts)) == detect(0, audio_s * 10)


# --- a session that is fed pieces -------------------------------------------------------------------------------------


@dataclass
class BadCutter:
    """Knows how long everything is, and cuts nothing."""

    problem: Exception

    def length_s(self, path: Path) -> float | None:
        return 60.0

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        raise self.problem


@dataclass
class Bench:
    """A session that is fed through the steps of audio, over a scripted one."""

    folder: Path
    script: Script
    limits: MemoryLimits = field(default_factory=lambda: MemoryLimits(SMALL))
    cutter: object = field(default_factory=lambda: AudioCutter(None))

    def __post_init__(self) -> None:
        self.inner = ScriptedEngine(self.script, wants=7)
        self.steps = audio_steps(self.folder, limits=self.limits, cutter=self.cutter)  # type: ignore[arg-type]
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir(exist_ok=True)

    def open(self, plan: WorkerPlan = LEAN) -> SessionFeed:
        return open_feed(self.inner, plan, self.scratch, self.steps)

    def chunk(self, name: str, seconds: float, *, told: bool = True) -> Chunk:
        path = make_wav(self.folder / f"{name}.wav", seconds, 1000)
        return Chunk("r", name, path.name, str(path), 5000, 5000 + round(seconds * 1000) if told else None)

    def needs_lean(self, chunk: Chunk) -> bool:
        return self.limits.way_of("Tesla V100", chunk.key, chunk.audio_s).lean

    def climb(self, chunk: Chunk) -> tuple[ChunkResult, int]:
        """Try again as long as there is another way, as the supervisor does; return the last result and the tries."""
        for tries in range(1, 12):
            (result,) = results(self.open(LEAN if self.needs_lean(chunk) else USUAL).process([chunk]))
            if result.ok or not self.limits.ways_left(result.chunk.key):
                return result, tries
        raise AssertionError("it climbs for ever")

    @property
    def left_over(self) -> list[Path]:
        return [path for path in self.scratch.rglob("*") if path.is_file()]


def results(events: Iterator[News]) -> list[ChunkResult]:
    return [one for one in events if isinstance(one, ChunkResult)]


def answer(make: Callable[[ScriptedSession, Chunk], News | None]) -> Script:
    """Make a session that says of each chunk that it began, and what ``make`` says."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, 5)
            if (event := make(session, chunk)) is not None:
                yield event

    return script


def fits(room_s: float) -> Script:
    """Make a session with so much room: lean it has all of it, as usual a third."""

    def judge(session: ScriptedSession, chunk: Chunk) -> News:
        too_long = (chunk.audio_s or 0) > (room_s if session.plan.lean else room_s / 3)
        return failed(chunk, "out_of_memory") if too_long else done(chunk)

    return answer(judge)


def test_pieces_are_chunks_of_their_own_and_gone_when_they_are_done(tmp_path: Path) -> None:
    seen = []

    def look(session: ScriptedSession, piece: Chunk) -> News:
        length_s = AudioCutter(None).length_s(Path(piece.audio_path))
        name = Path(piece.audio_path).name
        seen.append(
            (name, piece.chunk_id, piece.piece_of, piece.start_ms, piece.end_ms, length_s, len(bench.left_over))
        )
        return ChunkResult(piece, 77, 99, (Detection(1000, 2000, "ROPT", 0.9),), 33.0)

    bench = Bench(tmp_path, answer(look))
    chunk = bench.chunk("dawn", 60)
    assert list(bench.open().process([chunk])) == [
        ChunkStarted(chunk, 5),
        ChunkResult(chunk, 5, 99, (Detection(1000, 2000, "ROPT", 0.9),), 60.0, pieces=2),
    ], "28 s is before the joint, where the first piece rules"
    assert seen == [
        ("dawn~0s.wav", "dawn~0s", "dawn", 5000, 38_000, 33.0, 1),
        ("dawn~27s.wav", "dawn~27s", "dawn", 32_000, 65_000, 33.0, 1),
    ]
    assert bench.left_over == []


def test_what_fits_passes_through_and_what_does_not_waits_for_the_rest(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (done(chunk) for chunk in [*batch, *session.more(3, idle=1)])

    for plan, order, batches in (
        (USUAL, ["a", "b", "long", "c"], [["a"]]),
        (LEAN, ["a", "b", "c", "long"], [["a"], ["long~0s"], ["long~27s"]]),
    ):
        bench = Bench(tmp_path, script)
        waiting = [bench.chunk("b", 5), bench.chunk("long", 60), bench.chunk("c", 5)]
        found = bench.open(plan).process([bench.chunk("a", 5)], lambda wanted, *, idle=0, w=waiting: w[:wanted])  # type: ignore[misc]
        assert [result.chunk.chunk_id for result in results(found)] == order
        assert bench.inner.batches == batches


@pytest.mark.parametrize(("seconds", "tries"), [(10, 1), (30, 2), (60, 3), (120, 5), (500, 7)])
def test_a_chunk_is_done_at_the_first_step_that_fits(tmp_path: Path, seconds: float, tries: int) -> None:
    bench = Bench(tmp_path, fits(40), MemoryLimits())
    chunk = bench.chunk("long", seconds)
    result, tried = bench.climb(chunk)
    assert (result.chunk, result.ok, tried) == (chunk, True, tries), result.error
    again, tried = bench.climb(bench.chunk("as long", seconds))
    assert (again.ok, tried) == (True, 1), "the second one knows better"


def test_where_nothing_fits_the_chunk_fails_and_says_so_also_of_unknown_length(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fits(2), MemoryLimits())
    for seconds, tries, said in [
        (60, 5, ("in its piece from 0 s to 15 s: no luck", "even alone, in pieces of 15 s, the smallest possible")),
        (5, 2, ("even alone, and cannot be cut into pieces",)),
    ]:
        result, tried = bench.climb(bench.chunk(f"{seconds} s", seconds))
        assert (result.error_class, tried) == ("out_of_memory", tries)
        assert all(words in (result.error or "") for words in said)
    unknown = answer(lambda _, one: failed(one, "out_of_memory") if one.audio_s is None else done(one))
    result, tried = Bench(tmp_path, unknown, MemoryLimits()).climb(bench.chunk("a", 60, told=False))
    assert (result.ok, tried, result.audio_s, result.pieces) == (True, 3, 60.0, 2)


def test_an_engine_that_dies_for_want_of_memory_teaches_only_what_is_sure(tmp_path: Path) -> None:
    def die(session: ScriptedSession, chunk: Chunk) -> News:
        if (chunk.audio_s or 0) > 40:
            raise SessionBroken("out_of_memory", "CUDA out of memory")
        return done(chunk)

    bench = Bench(tmp_path, answer(die), MemoryLimits())
    chunk = bench.chunk("long", 60)
    for plan in (USUAL, LEAN):
        with pytest.raises(SessionBroken):
            list(bench.open(plan).process([chunk]))
        assert bench.limits.ways_left(chunk.key)
    assert results(bench.open().process([chunk]))[0].ok

    def crowd(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (ChunkStarted(chunk, 0) for chunk in batch)
        raise SessionBroken("out_of_memory", "CUDA out of memory")

    bench = Bench(tmp_path, crowd, MemoryLimits())
    both = [bench.chunk("a", 5), bench.chunk("b", 5)]
    with pytest.raises(SessionBroken):
        list(bench.open(USUAL).process(both))
    assert [bench.limits.ways_left(chunk.key) for chunk in both] == [None, None], "either may have been too long"

    def otherwise(session: ScriptedSession, chunk: Chunk) -> News:
        if session.plan.lean:
            raise SessionBroken("engine_crash", "segmentation fault")
        return failed(chunk, "out_of_memory")

    bench = Bench(tmp_path, answer(otherwise), MemoryLimits())
    chunk, other = bench.chunk("a", 30), bench.chunk("b", 30)
    list(bench.open(USUAL).process([chunk]))
    assert bench.needs_lean(other)
    with pytest.raises(SessionBroken):
        list(bench.open().process([chunk]))
    assert (bench.needs_lean(chunk), bench.needs_lean(other)) == (True, False), "it was not the memory after all"


def test_a_piece_that_fails_or_breaks_the_session_does_so_for_the_whole_chunk(tmp_path: Path) -> None:
    def judge(session: ScriptedSession, piece: Chunk) -> News:
        why = f"cannot hear {piece.audio_path}"
        is_second = piece.chunk_id.endswith("~27s")
        return ChunkResult(piece, 6, 7, error_class="bad_audio", error=why) if is_second else done(piece)

    bench = Bench(tmp_path, answer(judge))
    chunk = bench.chunk("long", 60)
    start, result = bench.open().process([chunk])
    said = f"in its piece from 27 s to 60 s: cannot hear {chunk.audio_path}"
    assert (start, result) == (
        ChunkStarted(chunk, 5), ChunkResult(chunk, 5, 7, error_class="bad_audio", error=said, pieces=2),
    )  # fmt: skip
    for breaks_at, at_start in (("~0s", True), ("~27s", False)):

        def die(session: ScriptedSession, batch: Sequence[Chunk], at: str = breaks_at) -> Iterator[News]:
            if batch[0].chunk_id.endswith(at):
                raise SessionBroken("worker_died", "killed", at_start=True)
            yield from (ChunkStarted(batch[0], 5), done(batch[0]))

        bench = Bench(tmp_path, die)
        with pytest.raises(SessionBroken) as broken:
            list(bench.open().process([chunk]))
        assert (broken.value.error_class, broken.value.at_start) == ("worker_died", at_start)
        assert bench.left_over == []


def test_an_interrupt_lets_a_chunk_in_pieces_end_and_a_kill_leaves_it_unanswered(tmp_path: Path) -> None:
    bench = Bench(tmp_path, answer(lambda session, one: None if session.killed.is_set() else done(one)))
    session, events = bench.open(), []
    for event in session.process([bench.chunk("a", 60), bench.chunk("b", 60)]):
        events.append((type(event).__name__, event.chunk.chunk_id))
        session.interrupt()
    assert events == [("ChunkStarted", "a"), ("ChunkResult", "a")] and bench.inner.sessions[0].interrupted.is_set()
    assert list(session.process([bench.chunk("c", 60)])) == []
    early, killed = bench.open(), bench.open()
    early.interrupt()
    assert bench.inner.sessions[1].interrupted.is_set() and list(early.process([bench.chunk("a", 60)])) == []
    events = []
    for event in killed.process([bench.chunk("a", 60)]):
        events.append(event)
        killed.kill()
    assert [type(event) for event in events] == [ChunkStarted]


def test_audio_that_cannot_be_cut_is_tried_whole_and_a_full_disk_is_not_the_memorys_fault(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fits(40), cutter=BadCutter(CannotCut("a.mp3: ffmpeg is not on PATH")))
    result, tries = bench.climb(bench.chunk("a", 60))
    assert (result.error_class, tries, bench.inner.batches) == ("out_of_memory", 2, [["a"]])
    assert "cannot be cut into pieces: a.mp3: ffmpeg is not on PATH" in (result.error or "")
    full = Bench(tmp_path, fits(40), cutter=BadCutter(OSError(errno.ENOSPC, "No space left on device")))
    (result,) = results(full.open().process([full.chunk("a", 60)]))
    assert (result.error_class, full.limits.ways_left(result.chunk.key)) == ("no_space", None)
    (tmp_path / "b.wav").write_bytes(b"this is not audio")
    unread = Bench(tmp_path, answer(lambda session, one: failed(one, "bad_audio")))
    chunk = Chunk("r", "b", "b.wav", str(tmp_path / "b.wav"), 0, 60_000)
    (result,) = results(unread.open().process([chunk]))
    assert (result.chunk, result.error_class) == (chunk, "bad_audio"), "the engine judges it"
