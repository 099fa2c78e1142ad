"""What fits into a GPU model: each try with less than the one before, learned when less has worked."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import Chunk, ChunkStarted, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut
from rooms.workers import MemoryLimit, MemoryLimits, Way, longest_piece_s
from support.audio import make_wav
from support.pages import Pages
from support.scripted_engine import CLOCK, News, Script, ScriptedSession, audio_steps, done, failed
from support.supervised import Bench

V100 = "Tesla V100"
WAYS = {"usual": Way(), "lean": Way(True), "in2": Way(True, 2), "in4": Way(True, 4), "in8": Way(True, 8)}
LENGTHS_S = (2, 3, 14, 15, 20, 30, 32, 33, 49, 50, 59, 60, 299.9, 300, 399, 400, 599, 600, 1000, 2000, None)
# name | what is known: too long as usual, too long lean | what happened to which chunk of which length, on which way
STORIES = """
nothing is known | - - |
known limits decide at once | 300 600 |
known only with the usual threads | 300 - |
known only lean | - 60 |
so short that it cannot be cut | - 3 |
others of its length follow a chunk in trouble at once | - - | oom A 60 usual
step by step | - - | oom A 60 usual; oom A 60 lean
again | - - | oom A 60 usual; oom A 60 lean; oom A 60 in2
until it cannot be cut any smaller, which proves nothing | - - | oom A 60 lean; oom A 60 in2; oom A 60 in4; oom A 60 in8
lean works: too long for the usual threads | - - | oom A 600 usual; fits A 600 lean
pieces work: too long even lean | - - | oom A 60 usual; oom A 60 lean; oom A 60 in2; fits A 60 in4
a limit only falls | 100 - | oom A 600 usual; fits A 600 lean; oom B 50 usual; fits B 50 lean
never raised by what comes through later | - - | oom B 600 lean; oom C 400 lean; fits C 400 in2; fits B 600 in2
a GPU that others fill: what has fitted fits | - - | fits B 30 usual; oom A 30 usual; oom A 30 lean; fits A 30 in2
what has fitted lean is not too long | - - | fits B 600 lean; fits B 500 lean; oom A 400 lean; fits A 400 in2
what fits meanwhile is followed instead | - - | oom A 30 usual; fits B 30 usual
pieces that fit say nothing about the whole | - - | oom A 60 lean; fits B 90 in2
beside a longer one it is that one which is too long | - - | oom A 30 usual beside 600; fits A 30 lean
with other troubles it is followed by nobody and goes on with less | - - | oom A 60 usual; fails A
and teaches nothing | - - | oom A 60 usual; fails A; fits A 60 lean
troubles of a chunk that had room are no news | - - | fails A
unknown length: lean | - - | oom A - usual
unknown length: then given up | - - | oom A - usual; oom A - lean
what cannot be cut has no way left | - - | oom A 600 lean; uncut A
another model is another matter | - - | oom B 60 usual on H200; oom C 600 usual
it takes the way of its length where that needs less than its own | - - | oom A 60 usual; oom B 60 lean
"""


def seconds(word: str) -> float | None:
    return None if word == "-" else float(word)


def happen(limits: MemoryLimits, deed: str) -> None:
    verb, name, *words = deed.split()
    key = ("r", name)
    if verb == "oom":
        on, beside_s = (words[-1] if one in words else None for one in ("on", "beside"))
        longest_s = None if beside_s is None else float(beside_s)
        limits.note_out_of_memory(on or V100, key, seconds(words[0]), WAYS[words[1]], beside_s=longest_s)
    elif verb == "fits":
        limits.note_success(V100, key, seconds(words[0]), WAYS[words[1]])
    elif verb == "fails":
        limits.note_other_failure(key)
    else:
        limits.note_cannot_cut(V100, key)


def test_ways_follow_from_what_fitted_and_what_did_not(pages: Pages) -> None:
    """For each story: how chunks of other lengths are done, chunk A of 60 s, and what was learned."""
    names, lines = {way: name for name, way in WAYS.items()}, []
    for line in STORIES.strip().splitlines():
        name, known, deeds = map(str.strip, line.split("|"))
        lessons: dict[MemoryLimit, str] = {}
        limit = MemoryLimit(*map(seconds, known.split()))
        limits = MemoryLimits({V100: limit}, lambda model, limit, lessons=lessons: lessons.update({limit: model}))
        for deed in filter(None, deeds.split("; ")):
            happen(limits, deed)
        ways: dict[str, list[str]] = {}
        for audio_s in LENGTHS_S:
            way = limits.way_of(V100, ("r", "new"), audio_s)
            ways.setdefault(names.get(way, f"in{way.pieces}"), []).append("?" if audio_s is None else f"{audio_s:g}")
        told = "; ".join(f"{way}: {' '.join(of)}" for way, of in ways.items())
        mine = "no way left" if limits.ways_left(("r", "A")) is False else names[limits.way_of(V100, ("r", "A"), 60)]
        learned = "; ".join(f"usual < {one.crowded_s}, lean < {one.alone_s}" for one in lessons)
        lines += [f"# {name} ({known}; {deeds})", f"  {told}", f"  A: {mine}; learned: {learned or 'nothing'}"]
        assert limits.ways_left(("r", "new")) is None
    pages({"ways.txt": "\n".join(lines)})


@settings(max_examples=50)
@given(st.floats(30, 100_000), st.floats(30, 10_000))
def test_pieces_are_strictly_shorter_than_what_did_not_fit(audio_s: float, alone_s: float) -> None:
    way = MemoryLimits({V100: MemoryLimit(alone_s=alone_s)}).way_for_length(V100, audio_s)
    assert longest_piece_s(audio_s, way.pieces) < alone_s
    probed, learned = MemoryLimit(crowded_s=audio_s), MemoryLimit(crowded_s=alone_s, alone_s=600)
    assert probed.lower(learned) == learned.lower(probed) == MemoryLimit(min(audio_s, alone_s), 600)


# --- in a task --------------------------------------------------------------------------------------------------------


def with_room(room_s: float, *, dies: bool = False) -> Script:
    """Make an engine with so much room when it is lean, and a third of it when it is not; it says so, or dies."""

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        held = list(batch)
        while held:
            chunk = held.pop(0)
            yield ChunkStarted(chunk, CLOCK.now_ms())
            too_long = (chunk.audio_s or 99) > (room_s if session.plan.lean else room_s / 3)
            if too_long and dies:
                raise SessionBroken("out_of_memory", "CUDA out of memory")
            yield failed(chunk, "out_of_memory") if too_long else done(chunk)
            held += session.more(2 - len(held), idle=1)

    return script


def dies_together(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    yield from (ChunkStarted(chunk, CLOCK.now_ms()) for chunk in batch)
    if any((chunk.audio_s or 0) > 40 for chunk in batch):
        raise SessionBroken("out_of_memory", "CUDA out of memory")
    yield from (done(chunk) for chunk in batch)


def crashes_in_a_piece(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    yield ChunkStarted(batch[0], CLOCK.now_ms())
    if batch[0].chunk_id.endswith("~27s"):
        raise SessionBroken("engine_crash", "segmentation fault")
    yield done(batch[0])


def crashes_when_lean(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    yield ChunkStarted(batch[0], CLOCK.now_ms())
    if session.plan.lean:
        raise SessionBroken("engine_crash", "it was not the memory after all")
    yield failed(batch[0], "out_of_memory")


def only_lean(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    if not session.plan.lean:
        raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
    yield from (done(chunk) for chunk in batch)


class NoCuts(AudioCutter):
    """Knows how long everything is, and cuts nothing."""

    def __init__(self, problem: Exception) -> None:
        super().__init__(None)
        self.problem = problem

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        raise self.problem


FULL = OSError(errno.ENOSPC, "No space left on device")
TASKS: dict[str, tuple[Script, list[int], dict[str, Any]]] = {
    "in pieces": (with_room(40), [60, 5, 5], {}),
    "lean": (with_room(40), [30, 5], {}),
    "as usual": (with_room(40), [10, 5], {}),
    "in quarters": (with_room(40), [120], {}),
    "in many": (with_room(40), [500], {}),
    "known, so heeded at once": (with_room(40), [60, 30, 5, 5, 5, 5], {"known": MemoryLimit(20, 41), "wants": 3}),
    "known, lean": (with_room(40), [5, 5, 5, 30, 30, 5, 5, 30], {"known": MemoryLimit(20), "wants": 2}),
    "no way left": (with_room(12), [60, 3], {}),
    "too short to be cut": (with_room(2), [5], {}),
    "of unknown length": (with_room(40), [-60], {}),
    "it dies of it": (with_room(40, dies=True), [60, 5, 5, 5], {}),
    "it dies beside others": (dies_together, [60, 5, 5, 5], {"wants": 4}),
    "a piece kills its worker": (crashes_in_a_piece, [60, 5, 5], {"known": MemoryLimit(alone_s=40), "retries": 5}),
    "another trouble with less": (crashes_when_lean, [30], {"retries": 1}),
    "models that do not fit": (only_lean, [30, *[5] * 6], {"known": MemoryLimit(crowded_s=20), "wants": 2}),
    "it cannot be cut": (with_room(40), [60], {"cutter": NoCuts(CannotCut("a.mp3: ffmpeg is not on PATH"))}),
    "known, but it cannot be cut": (
        with_room(70),
        [60],
        {"cutter": NoCuts(CannotCut("no")), "known": MemoryLimit(20, 40)},
    ),
    "a full disk": (with_room(40), [60], {"cutter": NoCuts(FULL)}),
}


def test_a_chunk_that_runs_out_of_memory_is_tried_with_less_and_others_of_its_length_at_once(
    tmp_path: Path, pages: Pages
) -> None:
    """A try with less is an attempt, but no retry: there are none here. A length below 0 stands in no manifest."""
    lines = []
    for number, (name, (script, lengths_s, how)) in enumerate(TASKS.items()):
        folder, learned = tmp_path / str(number), dict[str, MemoryLimit]()
        folder.mkdir()
        chunks = []
        for length_s in lengths_s:
            path = (
                make_wav(folder / f"{len(chunks)}.wav", abs(length_s), 500, loud=[]) if abs(length_s) > 15 else folder
            )
            end_ms = length_s * 1000 if length_s > 0 else None
            chunks.append(Chunk("r", f"{length_s}s-{len(chunks)}", path.name, str(path), 0, end_ms))
        limits = MemoryLimits({V100: how.pop("known", MemoryLimit())}, learned.__setitem__)
        audio = audio_steps(folder, limits=limits, cutter=how.pop("cutter", None))
        plans = [WorkerPlan(0, Device("0", "test", name=V100), 100, 2)]
        bench = Bench(folder, script, chunks=chunks, workers=plans, audio=audio, **{"retries": 0, **how}).run()
        lines.append(
            f"# {name}: {bench.statuses}; learned: {[(one.crowded_s, one.alone_s) for one in learned.values()]}"
        )
        for chunk in chunks:
            sql = f"SELECT outcome, error_class, pieces, error FROM attempt WHERE chunk_id = '{chunk.chunk_id}'"
            tries = bench.rows(f"{sql} ORDER BY attempt_id")
            told = [
                f"{end}{f' {why}' if why else ''}{f' in {pieces}' if pieces else ''}" for end, why, pieces, _ in tries
            ]
            lines.append(f"  {chunk.chunk_id}: {', '.join(told)}")
            lines += [f"    {line}" for line in (tries[-1][3] or "").splitlines()]
        assert not list(folder.rglob("*~*")), "no piece is left"
    pages({"tasks.txt": "\n".join(lines)})


def test_of_several_of_the_same_length_only_the_first_has_to_find_out(tmp_path: Path) -> None:
    path = make_wav(tmp_path / "long.wav", 60, 500, loud=[])
    chunks = [Chunk("r", f"{n}", "a", str(path), 0, 60_000 if n < 4 else 5_000) for n in range(14)]
    plans = [WorkerPlan(slot, Device("0", "test", name=V100), 100, 2) for slot in range(2)]
    audio = audio_steps(tmp_path, limits=MemoryLimits())
    bench = Bench(tmp_path, with_room(40), chunks=chunks, workers=plans, audio=audio, retries=0).run()
    assert bench.statuses == {"done": 14}
    assert sum(map(len, bench.tries.values())) <= 14 + 2 * 3, "each worker may have one on its way"
