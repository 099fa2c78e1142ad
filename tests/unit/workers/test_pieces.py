"""Chunks that do not fit: cut, done one piece after the other, and put together, as if nothing had happened."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import workers
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter
from rooms.workers import MemoryLimit, MemoryLimits, SessionFeed, plan_pieces
from support.audio import make_wav
from support.pages import Pages
from support.scripted_engine import News, Script, ScriptedEngine, ScriptedSession, audio_steps, done, open_feed

USUAL = WorkerPlan(0, Device("0", "test", name="Tesla V100"), 1, 2)
LEAN = replace(USUAL, lean=True)
OVERLAP_S, GRID_S, WIDE_GRID_S, SHORTEST_S = 6, 9, 36, 15  # measured: see the comments of the product
lengths_s = st.floats(min_value=0.1, max_value=90_000)


# --- where it is cut --------------------------------------------------------------------------------------------------


def test_pieces_of_some_lengths(pages: Pages) -> None:
    cases = ((60, 1), (60, 2), (60, 64), (14, 2), (15, 2), (15.1, 2), (582, 4), (581, 4), (1200, 2))
    lines = [f"{audio_s} s in {pieces}: {plan_pieces(audio_s, pieces)}" for audio_s, pieces in cases]
    for audio_s, limit_s in ((60, 60), (60, 33), (60, 33.1), (60, 15), (15, 15), (2e14, 60)):
        lines.append(f"{audio_s} s, shorter than {limit_s} s: {workers.pieces_shorter_than(audio_s, limit_s)}")
    pages({"pieces.txt": "\n".join(lines)})


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
    pieces = workers.pieces_shorter_than(audio_s, limit_s)
    if pieces is None:
        assert limit_s <= SHORTEST_S + OVERLAP_S or audio_s <= SHORTEST_S
        return
    assert workers.longest_piece_s(audio_s, pieces) < min(limit_s, audio_s)
    assert pieces == 2 or workers.longest_piece_s(audio_s, pieces // 2) >= limit_s


# --- how it is put together -------------------------------------------------------------------------------------------


# A minute in halves, 0 to 33 s and 27 to 60 s: what is heard in each, as start-end label score, on its own time.
HALVES = """
1-2 A .9 | 10-11 B .9
29-31 A .6 | 2-4 A .8
29-31 A .8 | 2-4 A .6
12-33 A .9 | 0-20 A .7
30.5-31.5 A .9, 32-33 A .9 | 3.6-4.4 A .9
28-29 A .9 | 0-1 A .9, 1.1-2.2 A .9
28-30 A .9 | 1-3 A .9
30-31 A .9 | 3-4 A .9
29-31 A .9 |
| 2-4 A .9
29-31 A .9 | 2-4 B .9
26-29 A .26, 27-30 A .27, 28-31 A .28, 29-32 A .29 | 0-3 A .27, 1-4 A .28, 2-5 A .29
29-31 A - | 2-4 A .1
29-31 A - | 2-4 A -
9-10 Z .9, 9-10 A .9, 8-12 M .9 |
"""


def parsed(text: str) -> list[Detection]:
    found = []
    for one in filter(None, text.strip().split(", ")):
        span, label, score = one.split()
        start_ms, end_ms = (round(float(second) * 1000) for second in span.split("-"))
        found.append(Detection(start_ms, end_ms, label, None if score == "-" else float(score)))
    return found


def test_a_minute_in_halves_is_joined_at_its_middle(pages: Pages) -> None:
    lines = []
    for line in HALVES.strip().splitlines():
        first, second = map(parsed, line.split("|"))
        whole = workers.join_detections([((0.0, 33.0), first), ((27.0, 60.0), second)])
        told = (f"{one.start_ms / 1000:g}-{one.end_ms / 1000:g} {one.label} {one.score}" for one in whole)
        lines += [line, f"  = {', '.join(told)}"]
    pages({"joined.txt": "\n".join(lines)})


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
    assert list(workers.join_detections(parts)) == detect(0, audio_s * 10)


# --- a session that is fed pieces -------------------------------------------------------------------------------------


class Bench:
    """A session that is fed through the steps of audio, over a scripted one: 20 s need a lean one, 40 s pieces."""

    def __init__(self, folder: Path, script: Script) -> None:
        self.folder, self.inner = folder, ScriptedEngine(script, wants=7)
        self.steps = audio_steps(folder, limits=MemoryLimits({"Tesla V100": MemoryLimit(crowded_s=20, alone_s=40)}))
        self.scratch = folder / "scratch"
        self.scratch.mkdir(exist_ok=True)

    def open(self, plan: WorkerPlan = LEAN) -> SessionFeed:
        return open_feed(self.inner, plan, self.scratch, self.steps)

    def chunk(self, name: str, seconds: float) -> Chunk:
        path = make_wav(self.folder / f"{name}.wav", seconds, 1000)
        return Chunk("r", name, path.name, str(path), 5000, 5000 + round(seconds * 1000))

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
