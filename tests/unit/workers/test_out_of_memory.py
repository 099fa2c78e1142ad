"""Out of memory, as the supervisor sees it: each try with less than the one before, and others know better."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkStarted, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.workers import MemoryLimit, MemoryLimits, RetryPolicy, Supervisor
from support.audio import make_wav
from support.scripted_engine import (
    CLOCK,
    News,
    Notebook,
    Script,
    ScriptedEngine,
    ScriptedSession,
    audio_steps,
    done,
    failed,
)

MODEL = "Tesla V100"


class Bench:
    """A supervisor over a scripted engine with little memory; chunks are named after their length."""

    def __init__(
        self,
        folder: Path,
        script: Script,
        lengths_s: Sequence[float],
        *,
        known: Mapping[str, MemoryLimit] | None = None,
        workers: int = 1,
        wants: int = 1,
        retries: int = 0,
    ) -> None:
        self.learned: dict[str, MemoryLimit] = {}
        self.engine = ScriptedEngine(script, wants=wants)
        self.chunks = [self._chunk(folder / "audio", number, length_s) for number, length_s in enumerate(lengths_s)]
        self.notes = Notebook(self.chunks)
        limits = MemoryLimits(known, self.learned.__setitem__)
        self.supervisor = Supervisor(
            self.engine,
            [WorkerPlan(n, Device(str(n), "test", name=MODEL), n, 2) for n in range(workers)],
            self.notes,
            clock=CLOCK,
            policy=RetryPolicy(retries, 0.005),
            scratch=folder / "scratch",
            audio=audio_steps(folder, limits=limits),
        )

    def _chunk(self, folder: Path, number: int, length_s: float) -> Chunk:
        name = f"{length_s:g}s-{number}"
        path = make_wav(folder / f"{name}.wav", length_s, 500, loud=[]) if length_s > 15 else folder / "short.wav"
        return Chunk("r", name, path.name, str(path), 0, round(length_s * 1000))

    def run(self) -> Bench:
        self.supervisor.start()
        end_s = time.monotonic() + 60
        while self.supervisor.busy:
            assert time.monotonic() < end_s, f"it never ends: {self.notes.status}"
            self.supervisor.handle_events(timeout_s=0.02)
        return self

    @property
    def kinds(self) -> list[bool]:
        """Whether each session was lean, in order."""
        return [session.plan.lean for session in self.engine.sessions]

    def tries_of(self, number: int) -> list[tuple[str | None, str | None]]:
        chunk = self.chunks[number]
        return [(attempt.status, attempt.error_class) for attempt in self.notes.tries_of(chunk.chunk_id)]

    def statuses(self) -> set[str]:
        return set(self.notes.status.values())


def with_room(room_s: float) -> Script:
    """Make an engine with so much room when it is lean, and a third of it when it is not."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, CLOCK.now_ms())
            too_long = (chunk.audio_s or 0) > (room_s if session.plan.lean else room_s / 3)
            yield failed(chunk, "out_of_memory") if too_long else done(chunk)

    return script


FAILED, DONE = ("pending", "out_of_memory"), ("done", None)


def test_tries_with_less_are_attempts_but_no_retries(tmp_path: Path) -> None:
    bench = Bench(tmp_path, with_room(40), [60, 5, 5], retries=0).run()
    assert bench.statuses() == {"done"}
    assert bench.tries_of(0) == [FAILED, FAILED, DONE]
    assert bench.supervisor.tally.tries == 5
    assert bench.learned == {MODEL: MemoryLimit(crowded_s=60, alone_s=60)}


def test_what_fits_lean_is_not_cut(tmp_path: Path) -> None:
    bench = Bench(tmp_path, with_room(40), [30, 5]).run()
    assert bench.tries_of(0) == [FAILED, DONE]
    assert bench.learned == {MODEL: MemoryLimit(crowded_s=30)}
    assert not any("~" in chunk_id for batch in bench.engine.batches for chunk_id in batch)


def test_a_known_limit_is_heeded_at_the_first_try(tmp_path: Path) -> None:
    known = {MODEL: MemoryLimit(crowded_s=20, alone_s=41)}
    bench = Bench(tmp_path, with_room(40), [60, 30, 5, 5, 5, 5], known=known, wants=3).run()
    assert bench.statuses() == {"done"}
    assert all(bench.tries_of(number) == [DONE] for number in range(6))
    assert bench.kinds == [True, False], "both that need it in one lean session, then the usual one"
    assert sorted(bench.engine.sessions[0].batches) == [["30s-1"], ["60s-0~0s"], ["60s-0~27s"]]


def test_what_was_learned_serves_the_next_chunk_of_the_same_task(tmp_path: Path) -> None:
    bench = Bench(tmp_path, with_room(40), [60, 60, 60, 60, *[5] * 10]).run()
    assert bench.statuses() == {"done"}
    assert sum(len(bench.tries_of(number)) for number in range(4)) <= 4 + 2 + 3, (
        "the worker's next one may be on its way"
    )
    assert all(len(bench.tries_of(number)) == 1 for number in range(4, 14))


def test_chunks_that_come_while_a_usual_session_works_wait_for_a_lean_one(tmp_path: Path) -> None:
    """They are of the length that is learned while the others are in progress."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            yield from with_room(40)(session, [held.pop(0)])
            held += session.more(2 - len(held), idle=1)

    known = {MODEL: MemoryLimit(crowded_s=20)}
    bench = Bench(tmp_path, script, [5, 5, 5, 30, 30, 5, 5, 30], known=known, workers=2, wants=2).run()
    assert bench.statuses() == {"done"}
    assert all(bench.tries_of(number) == [DONE] for number in range(8))
    for session in bench.engine.sessions:
        lengths = {chunk_id.startswith("30s") for batch in session.batches for chunk_id in batch}
        assert lengths <= {session.plan.lean}


@pytest.mark.parametrize("company", [1, 4])
def test_an_engine_that_dies_of_it_climbs_the_same_ladder(tmp_path: Path, company: int) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            yield ChunkStarted(chunk, CLOCK.now_ms())
        if any((chunk.audio_s or 0) > 40 for chunk in batch):
            raise SessionBroken("out_of_memory", "CUDA out of memory")
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, [60, 5, 5, 5], wants=company).run()
    assert bench.statuses() == {"done"}
    assert [one for one in bench.tries_of(0) if one[1] != "batch_lost"] == [FAILED, FAILED, DONE]


def test_where_no_way_is_left_the_chunk_fails_at_once_however_many_retries_there_are(tmp_path: Path) -> None:
    bench = Bench(tmp_path, with_room(12), [60, 3], retries=5).run()
    assert bench.notes.status == {"60s-0": "failed", "3s-1": "done"}
    assert bench.tries_of(0) == [FAILED] * 4 + [("failed", "out_of_memory")]
    assert bench.learned == {}


def test_a_chunk_that_kills_its_worker_in_pieces_is_poison_like_any_other(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield ChunkStarted(batch[0], CLOCK.now_ms())
        if batch[0].chunk_id.endswith("~27s"):
            raise SessionBroken("engine_crash", "segmentation fault")
        yield done(batch[0])

    known = {MODEL: MemoryLimit(alone_s=40)}
    bench = Bench(tmp_path, script, [60, 5, 5], known=known, retries=5).run()
    assert bench.notes.status == {"60s-0": "poison", "5s-1": "done", "5s-2": "done"}
    assert bench.tries_of(0) == [("pending", "engine_crash"), ("poison", "engine_crash")]


def test_models_that_do_not_fit_as_usual_are_loaded_with_less_and_the_worker_goes_on_so(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if not session.plan.lean:
            raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, [5] * 6, wants=2).run()
    assert bench.statuses() == {"done"}
    assert bench.kinds == [False, True]
    assert bench.supervisor.tally.retired == []


def test_a_device_that_is_full_ends_its_worker_and_the_others_go_on(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.slot == 0:
            raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
        time.sleep(0.005)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, [5] * 30, workers=2, retries=9).run()
    assert bench.statuses() == {"done"}
    assert [session.plan.lean for session in bench.engine.sessions if session.plan.slot == 0] in (
        [False],
        [False, True],
    )
    assert bench.supervisor.tally.retired in ([], ["no room for the models"])
    assert all(attempt.error_class is None for attempt in bench.notes.attempts)
