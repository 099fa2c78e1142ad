"""Chunks that do not fit into a GPU: tried with less, cut, put together; and what is learned when less has worked."""

import errno
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from rooms import workers
from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, WorkerPlan
from rooms.root import SessionBroken
from rooms.sources import AudioCutter, CannotCut
from rooms.workers import Circumstance, MemoryLimit, MemoryLimits, Way, plan_pieces
from support import supervised
from support.audio import make_wav
from support.cases import read_lines
from support.facts import calls
from support.supervised import Bench, ScriptedEngine, audio_steps, done, failed

V100 = "Tesla V100"
USUAL = WorkerPlan(0, Device("0", "test", name=V100), 100, 2)
LEAN = replace(USUAL, lean=True)
OVERLAP_S, GRID_S, WIDE_GRID_S, SHORTEST_S = 6, 9, 36, 15  # measured: see the comments of the product
lengths_s = st.floats(min_value=0.1, max_value=90_000)


def test_pieces_of_some_lengths(pages):
    cases = ((60, 1), (60, 2), (60, 64), (14, 2), (15, 2), (15.1, 2), (582, 4), (581, 4), (1200, 2))
    lines = [f"{audio_s} s in {pieces}: {plan_pieces(audio_s, pieces)}" for audio_s, pieces in cases]
    for audio_s, limit_s in ((60, 60), (60, 33), (60, 33.1), (60, 15), (15, 15), (2e14, 60)):
        lines.append(f"{audio_s} s, shorter than {limit_s} s: {workers.pieces_shorter_than(audio_s, limit_s)}")
    pages({"pieces.txt": "\n".join(lines)})


@given(lengths_s, st.integers(1, 64))
@settings(max_examples=60)
def test_pieces_cover_all_of_it_and_share_enough(audio_s, pieces):
    stretches = plan_pieces(audio_s, pieces)
    assert 1 <= len(stretches) <= pieces and (stretches[0][0], stretches[-1][1]) == (0, audio_s)
    wide = (audio_s - OVERLAP_S) / pieces >= 4 * WIDE_GRID_S
    for (start_s, end_s), (next_start_s, next_end_s) in pairwise(stretches):
        assert end_s - next_start_s == OVERLAP_S and end_s - start_s >= SHORTEST_S
        assert next_start_s % (WIDE_GRID_S if wide else GRID_S) == 0 and next_end_s - next_start_s > OVERLAP_S


@given(lengths_s, st.floats(0.1, 90_000))
@settings(max_examples=60)
def test_pieces_are_shorter_than_the_limit_and_no_more_than_needed(audio_s, limit_s):
    pieces = workers.pieces_shorter_than(audio_s, limit_s)
    if pieces is None:
        assert limit_s <= SHORTEST_S + OVERLAP_S or audio_s <= SHORTEST_S
        return
    assert workers.longest_piece_s(audio_s, pieces) < min(limit_s, audio_s)
    probed, learned = MemoryLimit(crowded_s=audio_s), MemoryLimit(crowded_s=limit_s, alone_s=600)
    assert probed.lower(learned) == learned.lower(probed) == MemoryLimit(min(audio_s, limit_s), 600)
    assert pieces == 2 or workers.longest_piece_s(audio_s, pieces // 2) >= limit_s


def parsed(text):
    found = []
    for one in filter(None, text.strip().split(", ")):
        span, label, score = one.split()
        start_ms, end_ms = (round(float(second) * 1000) for second in span.split("-"))
        found.append(Detection(start_ms, end_ms, label, None if score == "-" else float(score)))
    return found


def test_a_minute_in_halves_is_joined_at_its_middle(pages):
    lines = []
    for line in read_lines("joined_halves.txt"):
        first, second = map(parsed, line.split("|"))
        whole = workers.join_detections([((0.0, 33.0), first), ((27.0, 60.0), second)])
        reported = (f"{one.start_ms / 1000:g}-{one.end_ms / 1000:g} {one.label} {one.score}" for one in whole)
        lines += [line, f"  = {', '.join(reported)}"]
    pages({"joined.txt": "\n".join(lines)})


calls_s = st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 40)), max_size=12)


@given(st.integers(16, 300), calls_s, st.sampled_from([2, 4, 8]))
@settings(max_examples=60)
def test_a_detector_that_hears_stretches_hears_the_same_in_pieces(audio_s, calls, pieces):
    """Calls of tenths of a second, grown together where they touch, as a detector would report them."""
    loud = sorted({tenth for start, length in calls for tenth in range(start, start + length) if tenth < audio_s * 10})

    def detect(first, last):
        found = []
        for start_ms in ((tenth - first) * 100 for tenth in loud if first <= tenth < last):
            if found and found[-1].end_ms == start_ms:
                found[-1] = Detection(found[-1].start_ms, start_ms + 100, "LOUD", 1.0)
            else:
                found.append(Detection(start_ms, start_ms + 100, "LOUD", 1.0))
        return found

    parts = [(s, detect(round(s[0] * 10), round(s[1] * 10))) for s in plan_pieces(audio_s, pieces)]
    assert list(workers.join_detections(parts)) == detect(0, audio_s * 10)


WAYS = {"usual": Way(), "lean": Way(True), "in2": Way(True, 2), "in4": Way(True, 4), "in8": Way(True, 8)}
LENGTHS_S = (2, 3, 14, 15, 20, 30, 32, 33, 49, 50, 59, 60, 299.9, 300, 399, 400, 599, 600, 1000, 2000, None)


def seconds(word):
    return None if word == "-" else float(word)


def happen(limits, deed):
    verb, name, *words = deed.split()
    key = ("r", name)
    if verb == "oom":
        on = words[-1] if "on" in words else V100
        limits.note_out_of_memory(on, key, seconds(words[0]), WAYS[words[1]])
    elif verb == "fits":
        limits.note_success(V100, key, seconds(words[0]), WAYS[words[1]])
    else:
        limits.note_out_of_memory(V100, key, None, WAYS["lean"])


def test_ways_follow_from_what_fitted_and_what_did_not(pages):
    """For each story: how chunks of other lengths are done, chunk A of 60 s, and what was learned."""
    names, lines = {way: name for name, way in WAYS.items()}, []
    for line in read_lines("memory_stories.txt"):
        name, known, deeds = map(str.strip, line.split("|"))
        lessons = {}
        limit = MemoryLimit(*map(seconds, known.split()))
        limits = MemoryLimits({V100: limit}, lambda model, limit, lessons=lessons: lessons.update({limit: model}))
        for deed in filter(None, deeds.split("; ")):
            happen(limits, deed)
        ways = {}
        for audio_s in LENGTHS_S:
            way = limits.way_of(V100, ("r", "new"), audio_s)
            ways.setdefault(names.get(way, f"in{way.pieces}"), []).append("?" if audio_s is None else f"{audio_s:g}")
        reported = "; ".join(f"{way}: {' '.join(of)}" for way, of in ways.items())
        is_smallest = limits.circumstances(("r", "A")) == {Circumstance.SMALLEST_WAY}
        mine = "no way left" if is_smallest else names[limits.way_of(V100, ("r", "A"), 60)]
        learned = "; ".join(f"usual < {one.crowded_s}, lean < {one.alone_s}" for one in lessons)
        lines += [f"# {name} ({known}; {deeds})", f"  {reported}", f"  A: {mine}; learned: {learned or 'nothing'}"]
        assert not limits.circumstances(("r", "new"))
    pages({"ways.txt": "\n".join(lines)})


def with_room(room_s, *, dies=False):
    """Make an engine with so much room when it is lean, and a third of it when it is not; it says so, or dies."""

    def script(session, batch):
        held = list(batch)
        while held:
            chunk = held.pop(0)
            yield ChunkStarted(chunk, 0)
            too_long = (chunk.audio_s or 99) > (room_s if session.plan.lean else room_s / 3)
            if too_long and dies:
                raise SessionBroken("out_of_memory", "CUDA out of memory")
            yield failed(chunk, "out_of_memory") if too_long else done(chunk)
            held += session.more(2 - len(held), idle=1)

    return script


def dies_together(session, batch):
    yield from (ChunkStarted(chunk, 0) for chunk in batch)
    if any((chunk.audio_s or 0) > 40 for chunk in batch):
        raise SessionBroken("out_of_memory", "CUDA out of memory")
    yield from (done(chunk) for chunk in batch)


def dies_before_any_news(session, batch):
    if not session.plan.lean and any((chunk.audio_s or 0) > 40 for chunk in batch):
        raise SessionBroken("out_of_memory", "CUDA out of memory")
    yield from (done(chunk) for chunk in batch)


def in_its_piece(at, error_class, *, breaks=True):
    def script(session, batch):
        is_it, failure = batch[0].chunk_id.endswith(at), f"cannot hear {batch[0].audio_path}"
        if is_it and breaks:
            raise SessionBroken(error_class, "segmentation fault", at_start=True)
        yield ChunkStarted(batch[0], 0)
        yield replace(failed(batch[0], error_class), error=failure) if is_it else done(batch[0])

    return script


def crashes_when_lean(session, batch):
    yield ChunkStarted(batch[0], 0)
    if session.plan.lean:
        raise SessionBroken("engine_crash", "it was not the memory after all")
    yield failed(batch[0], "out_of_memory")


def only_lean(session, batch):
    if not session.plan.lean:
        raise SessionBroken("out_of_memory", "no room for the models", at_start=True)
    yield from (done(chunk) for chunk in batch)


class NoCuts(AudioCutter):
    def __init__(self, problem):
        super().__init__(None)
        self.problem = problem

    def cut(self, source, start_s, end_s, target):
        raise self.problem


SCRIPTS = {one.__name__: one for one in (with_room, in_its_piece, dies_together, dies_before_any_news,
                                         crashes_when_lean, only_lean)}  # fmt: skip
NO_CUTS = {
    "no ffmpeg": NoCuts(CannotCut("a.mp3: ffmpeg is not on PATH")),
    "a full disk": NoCuts(OSError(errno.ENOSPC, "No space left on device")),
}


def test_a_chunk_that_runs_out_of_memory_is_tried_with_less_and_others_of_its_length_at_once(tmp_path, pages):
    """A try with less is an attempt, but no retry: there are none here. A length below 0 stands in no manifest."""
    lines = []
    for number, line in enumerate(read_lines("too_long_tasks.txt")):
        name, _, task = line.partition(": ")
        (engine, args, more), *others = calls(task)
        script = SCRIPTS[engine](*args, **more) if args else SCRIPTS[engine]
        reported = {what: (args, values) for what, args, values in others}
        folder, learned, chunks = tmp_path / str(number), dict[str, MemoryLimit](), list[Chunk]()
        folder.mkdir()
        for length_s in reported["lengths"][0]:
            path = folder / f"{len(chunks)}.wav"
            if abs(length_s) > 15:
                make_wav(path, abs(length_s), 500, loud=[])
            end_ms = length_s * 1000 if length_s > 0 else None
            chunks.append(Chunk("r", f"{length_s}s-{len(chunks)}", path.name, str(path), 0, end_ms))
        (known, known_s), (cutter, _), (_, how) = (reported.get(what, ((), {})) for what in ("known", "cutter", "task"))
        limits = MemoryLimits({V100: MemoryLimit(*known, **known_s)}, learned.__setitem__)
        audio = audio_steps(folder, limits=limits, cutter=NO_CUTS.get(*cutter) if cutter else None)
        bench = Bench(folder, script, chunks=chunks, workers=[USUAL], audio=audio, **{"retries": 0, **how}).run()
        lessons = [(one.crowded_s, one.alone_s) for one in learned.values()]
        lines += [f"# {name}: {bench.statuses}; learned: {lessons}", *map(str, bench.tally.retired)]
        for chunk in chunks:
            sql = "SELECT outcome, error_class, 'in ' || pieces, error FROM attempt"
            tries = bench.rows(f"{sql} WHERE chunk_id = '{chunk.chunk_id}' ORDER BY attempt_id")
            lines.append(f"  {chunk.chunk_id}: {', '.join(' '.join(filter(None, one[:3])) for one in tries)}")
            lines += [f"    {line}" for line in ((tries or [("",)])[-1][-1] or "").splitlines()]
        assert not list(folder.rglob("*~*")), "no piece is left"
    pages({"tasks.txt": "\n".join(lines).replace(str(tmp_path), "/…")})


def test_of_several_of_the_same_length_only_the_first_has_to_find_out(tmp_path):
    path = make_wav(tmp_path / "long.wav", 60, 500, loud=[])
    chunks = [Chunk("r", f"{n}", "a", str(path), 0, 60_000 if n < 4 else 5_000) for n in range(14)]
    plans, audio = [USUAL, replace(USUAL, slot=1)], audio_steps(tmp_path, limits=MemoryLimits({}, print))
    bench = Bench(tmp_path, with_room(40), chunks=chunks, workers=plans, audio=audio, retries=0).run()
    assert bench.statuses == {"done": 14}
    assert sum(map(len, bench.tries.values())) <= 14 + 2 * 3, "each worker may have one on its way"


def test_a_chunk_with_a_start_and_no_end_has_the_rest_of_its_file(tmp_path):
    path = make_wav(tmp_path / "long.wav", 20, 500, loud=[])
    chunk = Chunk("r", "late", path.name, str(path), 12_000, None, is_cut=True)
    assert workers.available_s(chunk, AudioCutter()) == 8
    assert workers.available_s(replace(chunk, is_cut=False), AudioCutter()) == 20, "the file is the chunk"


class Fed:
    """A session that is fed through the steps of audio, over a scripted one: 20 s need a lean one, 40 s pieces."""

    def __init__(self, folder, make):
        def script(session, batch):
            for chunk in [*batch, *session.more(3, idle=1)]:
                yield ChunkStarted(chunk, 5)
                if (event := make(session, chunk)) is not None:
                    yield event

        self.folder, self.inner = folder, ScriptedEngine(script, wants=7)
        self.steps = audio_steps(folder, limits=MemoryLimits({V100: MemoryLimit(crowded_s=20, alone_s=40)}, print))

    def open(self, plan=LEAN):
        return supervised.open_feed(self.inner, plan, self.folder, self.steps)

    def chunk(self, name, seconds):
        path = make_wav(self.folder / f"{name}.wav", seconds, 1000)
        return Chunk("r", name, path.name, str(path), 5000, 5000 + round(seconds * 1000))


def test_pieces_are_chunks_of_their_own_and_gone_when_they_are_done(tmp_path):
    seen = []

    def look(session, piece):
        path, others = Path(piece.audio_path), len(list(tmp_path.rglob("*~*")))
        length_s = AudioCutter(None).length_s(path)
        seen.append((path.name, piece.chunk_id, piece.piece_of, piece.start_ms, piece.end_ms, length_s, others))
        return ChunkResult(piece, 77, 99, (Detection(1000, 2000, "ROPT", 0.9),), 33.0)

    fed = Fed(tmp_path, look)
    chunk = fed.chunk("dawn", 60)
    assert list(fed.open().process([chunk])) == [
        ChunkStarted(chunk, 5),
        ChunkResult(chunk, 5, 99, (Detection(1000, 2000, "ROPT", 0.9),), 60.0, pieces=2),
    ], "28 s is before the joint, where the first piece rules"
    assert seen == [
        ("dawn~0s.wav", "dawn~0s", "dawn", 5000, 38_000, 33.0, 1),
        ("dawn~27s.wav", "dawn~27s", "dawn", 32_000, 65_000, 33.0, 1),
    ]
    assert not list(tmp_path.rglob("*~*"))


def test_a_lean_session_has_one_chunk_at_a_time_in_pieces_if_it_does_not_fit(tmp_path):
    for plan, batches in (
        (USUAL, [["a", "long", "c"]]),
        (LEAN, [["a"], ["long~0s"], ["long~27s"], ["c"]]),
    ):
        fed = Fed(tmp_path, lambda session, chunk: done(chunk))
        waiting = [fed.chunk("a", 5), fed.chunk("long", 60), fed.chunk("c", 5)]
        found = fed.open(plan).process(waiting, lambda wanted, *, idle=0: [])
        assert [one.chunk.chunk_id for one in found if isinstance(one, ChunkResult)] == ["a", "long", "c"]
        assert fed.inner.batches == batches


def test_an_interrupt_lets_a_chunk_in_pieces_end_and_a_kill_leaves_it_unanswered(tmp_path):
    fed = Fed(tmp_path, lambda session, one: None if session.killed.is_set() else done(one))
    session, early, killed = fed.open(), fed.open(), fed.open()
    events = []
    for event in session.process([fed.chunk("a", 60), fed.chunk("b", 60)]):
        events.append((type(event).__name__, event.chunk.chunk_id))
        session.interrupt()
    assert events == [("ChunkStarted", "a"), ("ChunkResult", "a")]
    early.interrupt()
    for stopped in (session, early):
        assert list(stopped.process([fed.chunk("c", 60)])) == []
    assert [one.interrupted.is_set() for one in fed.inner.sessions] == [True, True, False]
    events = []
    for event in killed.process([fed.chunk("a", 60)]):
        events.append((type(event).__name__, event.chunk.chunk_id))
        killed.kill()
    assert events == [("ChunkStarted", "a")]


def test_a_chunk_that_is_not_charged_with_full_memory_is_put_back_once(tmp_path):
    tries = []

    def script(session, batch):
        for chunk in batch:
            tries.append(chunk.chunk_id)
            yield ChunkStarted(chunk, 0)
            is_first = tries.count("c0") == 1 and chunk.chunk_id == "c0"
            yield failed(chunk, "out_of_memory", charged=False) if is_first else done(chunk)

    bench = Bench(tmp_path, script, chunks=8, workers=[USUAL, replace(USUAL, slot=1)]).run()
    assert (bench.tally.done, tries.count("c0")) == (8, 2)
