"""Chunks that do not fit: cut, done one piece after the other, and put together, as if nothing had happened."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut
from rooms.workers import MemoryLimit, MemoryLimits, SessionFeed
from support.audio import make_wav
from support.scripted_engine import (
    CLOCK,
    News,
    Script,
    ScriptedEngine,
    ScriptedSession,
    audio_steps,
    done,
    failed,
    open_feed,
)

V100 = Device("0", "test", name="Tesla V100")
USUAL = WorkerPlan(0, V100, 1, 2)
LEAN = replace(USUAL, lean=True)
SMALL = {"Tesla V100": MemoryLimit(crowded_s=20, alone_s=40)}


def fits(room_s: float) -> Script:
    """Make a session with so much room: lean it has all of it, as usual a third."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, CLOCK.now_ms())
            too_long = (chunk.audio_s or 0) > (room_s if session.plan.lean else room_s / 3)
            yield failed(chunk, "out_of_memory") if too_long else done(chunk)

    return script


@dataclass
class Bench:
    """A piecewise session over a scripted one, and audio to cut."""

    folder: Path
    script: Script
    limits: MemoryLimits = field(default_factory=MemoryLimits)
    cutter: AudioCutter = field(default_factory=lambda: AudioCutter(None))

    def __post_init__(self) -> None:
        self.inner = ScriptedEngine(self.script, wants=7)
        self.steps = audio_steps(self.folder, limits=self.limits, cutter=self.cutter)
        self.scratch = self.folder / "scratch"
        self.scratch.mkdir()

    def open(self, plan: WorkerPlan = LEAN) -> SessionFeed:
        return open_feed(self.inner, plan, self.scratch, self.steps)

    def needs_lean(self, chunk: Chunk) -> bool:
        return self.limits.way_of("Tesla V100", chunk.key, chunk.audio_s).lean

    def chunk(self, name: str, seconds: float, *, told: bool = True) -> Chunk:
        path = make_wav(self.folder / f"{name}.wav", seconds, 1000)
        return Chunk("r", name, path.name, str(path), 5000, 5000 + round(seconds * 1000) if told else None)

    @property
    def left_over(self) -> list[Path]:
        return [path for path in self.scratch.rglob("*") if path.is_file()]


def results(news: list[News]) -> list[ChunkResult]:
    return [one for one in news if isinstance(one, ChunkResult)]


def started(news: list[News]) -> list[str]:
    return [one.chunk.chunk_id for one in news if isinstance(one, ChunkStarted)]


# --- what passes through ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", [USUAL, LEAN], ids=["usual", "lean"])
def test_what_fits_passes_through_untouched(tmp_path: Path, plan: WorkerPlan) -> None:
    bench = Bench(tmp_path, fits(100))
    batch = [bench.chunk("a", 5), bench.chunk("b", 6)]
    news = list(bench.open(plan).process(batch))
    assert started(news) == ["a", "b"]
    assert [result.chunk for result in results(news)] == batch
    assert all(one.chunk in batch for one in news)


def test_passing_through_costs_next_to_nothing(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, 0)
            yield ChunkResult(chunk, 0, 0)

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    batch = [Chunk("r", str(number), "a.wav", "/a.wav", 0, 1000) for number in range(5000)]
    start_s = time.process_time()
    assert not any(bench.needs_lean(chunk) for chunk in batch)
    assert len(list(bench.open(USUAL).process(batch))) == 10_000
    assert (time.process_time() - start_s) / 5000 < 0.001


def test_a_session_gets_more_while_it_works(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in [*batch, *session.more(3, idle=1)]:
            yield done(chunk)

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    waiting = [bench.chunk("b", 5), bench.chunk("long", 60), bench.chunk("c", 5)]
    news = list(bench.open().process([bench.chunk("a", 5)], lambda wanted, *, idle=0: waiting[:wanted]))
    assert [result.chunk.chunk_id for result in results(news)] == ["a", "b", "c", "long"]
    assert bench.inner.batches == [["a"], ["long~0s"], ["long~27s"]]


# --- the ladder -------------------------------------------------------------------------------------------------------


def climb(bench: Bench, chunk: Chunk) -> tuple[ChunkResult, int]:
    """Do as the supervisor does: try again as long as there is another way; return the last result and the tries."""
    tries = 0
    while True:
        tries += 1
        session = bench.open(LEAN if bench.needs_lean(chunk) else USUAL)
        (result,) = results(list(session.process([chunk])))
        session.close()
        if result.ok or not bench.limits.ways_left(result.chunk.key):
            return result, tries
        assert tries < 12


@pytest.mark.parametrize(("seconds", "tries"), [(10, 1), (30, 2), (60, 3), (120, 5), (500, 7)])
def test_a_chunk_is_done_at_the_first_step_that_fits(tmp_path: Path, seconds: float, tries: int) -> None:
    bench = Bench(tmp_path, fits(40))
    chunk = bench.chunk("long", seconds)
    result, tried = climb(bench, chunk)
    assert result.ok, result.error
    assert (result.chunk, tried) == (chunk, tries)
    again, tried = climb(bench, bench.chunk("as long", seconds))
    assert (again.ok, tried) == (True, 1), "the second one knows better"


def test_a_chunk_of_unknown_length_goes_the_same_way(tmp_path: Path) -> None:
    lengths: list[float | None] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        lengths.append(batch[0].audio_s)
        yield failed(batch[0], "out_of_memory") if batch[0].audio_s is None else done(batch[0])

    bench = Bench(tmp_path, script)
    result, tries = climb(bench, bench.chunk("a", 60, told=False))
    assert (result.ok, tries, result.audio_s) == (True, 3, 60.0)
    assert lengths == [None, None, 33.0, 33.0]


def test_where_nothing_fits_the_chunk_fails_and_says_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fits(2))
    result, tries = climb(bench, bench.chunk("long", 60))
    assert (result.error_class, tries) == ("out_of_memory", 5)
    assert "in its piece from 0 s to 15 s: no luck" in (result.error or "")
    assert "even alone, in pieces of 15 s, the smallest possible" in (result.error or "")
    short, tries = climb(bench, bench.chunk("short", 5))
    assert (short.error_class, tries) == ("out_of_memory", 2)
    assert "even alone, and cannot be cut into pieces" in (short.error or "")


def test_an_engine_that_dies_for_want_of_memory_climbs_the_same_ladder(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, 0)
            if (chunk.audio_s or 0) > 40:
                raise SessionBroken("out_of_memory", "CUDA out of memory")
            yield done(chunk)

    bench = Bench(tmp_path, script)
    chunk = bench.chunk("long", 60)
    for plan in (USUAL, LEAN):
        with pytest.raises(SessionBroken):
            list(bench.open(plan).process([chunk]))
        assert bench.limits.ways_left(chunk.key)
    assert results(list(bench.open().process([chunk])))[0].ok


def test_a_chunk_that_fails_otherwise_after_it_ran_out_teaches_nothing(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 0)
        if session.plan.lean:
            raise SessionBroken("engine_crash", "segmentation fault")
        yield failed(batch[0], "out_of_memory")

    bench = Bench(tmp_path, script)
    chunk, other = bench.chunk("a", 30), bench.chunk("b", 30)
    list(bench.open(USUAL).process([chunk]))
    assert bench.needs_lean(other)
    with pytest.raises(SessionBroken):
        list(bench.open().process([chunk]))
    assert bench.needs_lean(chunk)
    assert not bench.needs_lean(other)


def test_of_several_in_progress_nobody_is_the_one_that_was_too_long(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield from (ChunkStarted(chunk, 0) for chunk in batch)
        raise SessionBroken("out_of_memory", "CUDA out of memory")

    bench = Bench(tmp_path, script)
    batch = [bench.chunk("a", 5), bench.chunk("b", 5)]
    with pytest.raises(SessionBroken):
        list(bench.open(USUAL).process(batch))
    assert [bench.limits.ways_left(chunk.key) for chunk in batch] == [None, None]


# --- the pieces -------------------------------------------------------------------------------------------------------


def test_pieces_are_chunks_of_their_own_and_gone_when_they_are_done(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int | None, float | None, int]] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        (piece,) = batch
        length_s = AudioCutter(None).length_s(Path(piece.audio_path))
        seen.append((Path(piece.audio_path).name, piece.start_ms, piece.end_ms, length_s, len(bench.left_over)))
        yield ChunkStarted(piece, 77)
        yield ChunkResult(piece, 77, 99, (Detection(1000, 2000, "ROPT", 0.9),), 33.0)

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    chunk = bench.chunk("2025-06-01 dawn", 60)
    news = list(bench.open().process([chunk]))
    assert seen == [
        ("2025-06-01 dawn~0s.wav", 5000, 38_000, 33.0, 1),
        ("2025-06-01 dawn~27s.wav", 32_000, 65_000, 33.0, 1),
    ]
    heard = (Detection(1000, 2000, "ROPT", 0.9),)
    assert news[0] == ChunkStarted(chunk, 77)
    assert news[1:] == [ChunkResult(chunk, 77, 99, heard, 60.0, pieces=2)], (
        "28 s is before the joint, where the first piece rules"
    )
    assert bench.left_over == []


def test_a_piece_that_fails_is_the_whole_chunks_failure(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 5)
        if batch[0].chunk_id.endswith("~27s"):
            yield ChunkResult(batch[0], 6, 7, error_class="bad_audio", error=f"cannot hear {batch[0].audio_path}")
        else:
            yield done(batch[0])

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    chunk = bench.chunk("long", 60)
    news = list(bench.open().process([chunk]))
    (result,) = results(news)
    assert started(news) == ["long"]
    assert (result.chunk, result.started_at_ms, result.error_class) == (chunk, 5, "bad_audio")
    assert result.error == f"in its piece from 27 s to 60 s: cannot hear {chunk.audio_path}"
    assert bench.left_over == []


@pytest.mark.parametrize("before", ["first piece", "second piece"])
def test_a_session_that_breaks_at_a_piece_breaks_at_the_whole_chunk(tmp_path: Path, before: str) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if before == "second piece" and batch[0].chunk_id.endswith("~0s"):
            yield ChunkStarted(batch[0], 5)
            yield done(batch[0])
        else:
            raise SessionBroken("worker_died", "killed", at_start=True)

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    news: list[News] = []
    with pytest.raises(SessionBroken) as broken:
        news.extend(bench.open().process([bench.chunk("long", 60)]))
    assert broken.value.error_class == "worker_died"
    assert broken.value.at_start == (before == "first piece"), "a chunk that has begun is no start"
    assert bench.left_over == []


def test_an_interrupt_lets_a_chunk_in_pieces_come_to_its_end_and_begins_no_other(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.interrupted.is_set():
            return
        yield ChunkStarted(batch[0], 5)
        yield done(batch[0])

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    session = bench.open()
    answered: list[str] = []
    for one in session.process([bench.chunk("a", 60), bench.chunk("b", 60)]):
        if isinstance(one, ChunkStarted):
            session.interrupt()
        else:
            answered.append(one.chunk.chunk_id)
    assert answered == ["a"]
    assert bench.inner.sessions[0].interrupted.is_set()
    assert list(session.process([bench.chunk("c", 60)])) == []


def test_an_interrupt_before_a_piece_has_begun_reaches_the_engine_at_once(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fits(40), MemoryLimits(SMALL))
    session = bench.open()
    session.interrupt()
    assert bench.inner.sessions[0].interrupted.is_set()
    assert list(session.process([bench.chunk("a", 60)])) == []


def test_a_kill_reaches_the_engine_and_the_chunk_has_no_answer(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], 5)
        if not session.killed.is_set():
            yield done(batch[0])

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    session = bench.open()
    news: list[News] = []
    for one in session.process([bench.chunk("a", 60)]):
        news.append(one)
        session.kill()
    assert started(news) == ["a"]
    assert results(news) == []


# --- audio that cannot be cut -----------------------------------------------------------------------------------------


@dataclass
class BadCutter:
    """Knows how long everything is, and cuts nothing."""

    problem: Exception
    seconds: float | None = 60.0

    def length_s(self, path: Path) -> float | None:
        return self.seconds

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        raise self.problem


def test_audio_that_cannot_be_cut_is_tried_whole_and_then_fails_with_the_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path, fits(40), MemoryLimits(SMALL), BadCutter(CannotCut("a.mp3: ffmpeg is not on PATH")))
    result, tries = climb(bench, bench.chunk("a", 60))
    assert (result.error_class, tries) == ("out_of_memory", 2)
    assert bench.inner.batches == [["a"]]
    assert "cannot be cut into pieces: a.mp3: ffmpeg is not on PATH" in (result.error or "")


def test_audio_that_cannot_be_read_is_left_to_the_engine_to_judge(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0], "bad_audio")

    bench = Bench(tmp_path, script, MemoryLimits(SMALL))
    (tmp_path / "a.wav").write_bytes(b"this is not audio")
    chunk = Chunk("r", "a", "a.wav", str(tmp_path / "a.wav"), 0, 60_000)
    (result,) = results(list(bench.open().process([chunk])))
    assert (result.chunk, result.error_class) == (chunk, "bad_audio")


def test_a_full_disk_is_not_the_memorys_fault(tmp_path: Path) -> None:
    full = BadCutter(OSError(errno.ENOSPC, "No space left on device"))
    bench = Bench(tmp_path, fits(40), MemoryLimits(SMALL), full)
    (result,) = results(list(bench.open().process([bench.chunk("a", 60)])))
    assert result.error_class == "no_space"
    assert bench.limits.ways_left(result.chunk.key) is None
