"""One worker's thread: keeps its session fed, keeps account of what it holds, and leaves nothing behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rooms.model import Chunk, ChunkResult, ChunkStarted, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.workers import BatchOver, Closed, Event, Opened, WorkerThread, WorkQueue
from support.scripted_engine import CLOCK, News, Script, ScriptedEngine, ScriptedSession, done, failed


def chunks(count: int) -> list[Chunk]:
    return [Chunk("r", f"c{number}", "a.wav", "/a.wav", 0, 30_000) for number in range(count)]


class Bench:
    """Workers over one queue; what they report is settled at once, as a supervisor would."""

    def __init__(self, tmp_path: Path, script: Script, *, count: int, workers: int = 1, wants: int = 4) -> None:
        self.queue = WorkQueue(CLOCK, workers=workers, wants=wants)
        self.queue.add(chunks(count), complete=True)
        self.engine = ScriptedEngine(script, wants=wants)
        self.events: list[tuple[int, Event]] = []
        self._lock = threading.Lock()
        self.threads = [
            WorkerThread(
                WorkerPlan(n, Device(str(n), "test"), n, 1), self.engine, self.queue, self._settle,
                clock=CLOCK, scratch=tmp_path / str(n), openings=2,
            )
            for n in range(workers)
        ]  # fmt: skip

    def _settle(self, plan: WorkerPlan, event: Event) -> None:
        with self._lock:
            self.events.append((plan.slot, event))
        if isinstance(event, ChunkResult):
            self.queue.finish()
        elif isinstance(event, BatchOver) and event.unanswered:
            self.queue.put_back(event.unanswered)

    def run(self) -> Bench:
        for thread in self.threads:
            thread.start()
        end_s = time.monotonic() + 60
        while any(thread.is_alive() for thread in self.threads):
            assert time.monotonic() < end_s, "it never ends"
            time.sleep(0.005)
        return self

    def results(self, slot: int | None = None) -> list[str]:
        return [
            event.chunk.chunk_id
            for number, event in self.events
            if isinstance(event, ChunkResult) and slot in (None, number)
        ]


def stream(holds: int, work_s: float = 0.0) -> Script:
    """Make a session that works on one chunk at a time and likes to hold some more."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            yield ChunkStarted(held[0], 0)
            time.sleep(work_s * (1 + session.plan.slot * 3))
            held += session.more(holds - len(held), idle=0)
            yield done(held.pop(0))
            held += session.more(holds - len(held), idle=0 if held else 1)

    return script


def test_a_session_that_is_fed_never_ends_its_batch_before_the_work_does(tmp_path: Path) -> None:
    bench = Bench(tmp_path, stream(4), count=300).run()
    assert sorted(bench.results()) == sorted(chunk.chunk_id for chunk in chunks(300))
    assert len(bench.engine.batches) == 1
    kinds = [type(event) for _, event in bench.events if not isinstance(event, ChunkStarted | ChunkResult)]
    assert kinds == [Opened, BatchOver, Closed]


def test_no_device_waits_for_anothers_tail(tmp_path: Path) -> None:
    """One device is four times as slow: it does a quarter of the work, and both end within a chunk of each other."""
    bench = Bench(tmp_path, stream(4, work_s=0.01), count=60, workers=2).run()
    assert len(bench.results()) == 60
    assert len(bench.results(slot=0)) > 2 * len(bench.results(slot=1))
    ends = {
        slot: max(
            event.ended_at_ms for number, event in bench.events if number == slot and isinstance(event, ChunkResult)
        )
        for slot in (0, 1)
    }
    assert abs(ends[0] - ends[1]) <= 2 * 40 + 60, "two chunks of the slow one, and a busy machine"


def test_what_came_later_is_accounted_for_like_the_batch(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.number > 1:
            yield from (done(chunk) for chunk in batch)
            return
        held = [*batch, *session.more(3, idle=3)]
        assert len(held) == 7
        yield ChunkStarted(held[0], 0)
        yield ChunkStarted(held[5], 0)
        yield done(held[0])
        raise SessionBroken("engine_crash", "segmentation fault")

    bench = Bench(tmp_path, script, count=20).run()
    first = next(event for _, event in bench.events if isinstance(event, BatchOver))
    assert [chunk.chunk_id for chunk in first.unanswered] == ["c1", "c2", "c3", "c4", "c5", "c6"]
    assert [started.chunk.chunk_id for started in first.started] == ["c5"]
    assert sorted(bench.results()) == sorted(chunk.chunk_id for chunk in chunks(20)), "none is lost, none comes twice"


def test_suspects_are_in_the_engine_alone(tmp_path: Path) -> None:
    asked: list[int] = []

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            chunk = held.pop(0)
            yield done(chunk)
            if chunk.chunk_id == "c3":
                bench.queue.put_back([bench_suspect], alone=True)
            fresh = session.more(2, idle=1)
            if chunk is bench_suspect:
                asked.append(len(fresh))
            held += fresh

    bench = Bench(tmp_path, script, count=30, wants=2)
    bench_suspect = Chunk("r", "suspect", "a.wav", "/a.wav")
    bench.queue.add([bench_suspect], complete=True)
    suspect = bench.queue.more(1, idle=1)
    assert suspect == [bench_suspect], "of unknown length, so it came first"
    bench.run()
    assert ["suspect"] in bench.engine.batches
    assert asked == [0]
    assert len(bench.results()) == 31


def test_a_session_that_gives_up_one_chunk_goes_on_with_the_others(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            chunk = held.pop(0)
            yield failed(chunk, "bad_audio") if chunk.chunk_id == "c2" else done(chunk)
            held += session.more(1, idle=1)

    bench = Bench(tmp_path, script, count=10).run()
    assert len(bench.results()) == 10
    assert len(bench.engine.sessions) == 1


def test_a_worker_whose_engine_is_killed_while_it_starts_is_patient(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.number <= 6:
            raise SessionBroken("worker_died", "SIGKILL", at_start=True)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, count=3).run()
    assert len(bench.results()) == 3
