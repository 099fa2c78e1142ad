"""The supervisor and its workers: who is tried again, who is blamed, who is stopped; nothing lost, nothing twice."""

import tempfile
import threading
import time
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rooms.devices import EndTime
from rooms.model import Chunk, ChunkResult, ChunkStarted
from rooms.root import NotHere, SessionBroken
from rooms.task import TimeBudget
from rooms.workers import MemoryLimits, RetryPolicy, WorkQueue
from support.cases import read_lines
from support.facts import calls
from support.hand_clock import HandClock
from support.supervised import CLOCK, OK, Bench, acting, audio_steps, done, failed, plan_on

SOME = settings(max_examples=20, phases=[Phase.generate])  # an example that never ends is long enough once


ONCE = ["missing_audio", "empty_file", "not_audio", "broken_audio", "unreadable_file"]
PLAIN = ["bad_audio", "exit_code", "silent"]
DEATHS = ["!engine_crash", "!hang", "!worker_died", "!terminated"]


def fate_of(acts, retries):
    """Return what becomes of a chunk that is always alone: its last state, and its tries."""
    tries = []
    failures = deaths = excused = 0
    for act in acts:
        if act == "ok":
            break
        error_class = act.lstrip("!").replace("silent", "no_output")
        excuses = {"terminated": 3, "worker_died": 2}.get(error_class, 0)
        if excused < excuses:
            excused += 1
            tries.append((None, None) if error_class == "terminated" else (error_class, "lost"))
            continue
        tries.append((error_class, "failed"))
        failures += 1
        deaths += act.startswith("!") and error_class != "terminated"
        if deaths == 2 or failures > retries or error_class in ONCE:
            return ("poison" if deaths == 2 else "failed"), tries
    return "done", [*tries, OK]


@SOME
@given(
    st.lists(st.lists(st.sampled_from(["ok", *PLAIN, *ONCE, *DEATHS]), max_size=7), min_size=1, max_size=5),
    st.integers(0, 3), st.integers(1, 3),
)  # fmt: skip
def test_each_chunk_has_the_tries_and_the_end_that_it_deserves(acts, retries, many):
    """One chunk at a time, so that no one suffers from another."""
    script = {f"c{number}": deeds for number, deeds in enumerate(acts)}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), acting(script), chunks=len(acts), workers=many, retries=retries).run()
        expected = {chunk_id: fate_of(deeds, retries) for chunk_id, deeds in script.items()}
        assert bench.tries == {chunk_id: tries for chunk_id, (_, tries) in expected.items()}
        states = dict(bench.rows("SELECT chunk_id, status FROM chunk"))
        assert states == {chunk_id: end for chunk_id, (end, _) in expected.items()}
        counted = Counter[str]()  # what ended from outside is no try
        sql = "SELECT chunk_id, try_number, outcome IS NOT NULL FROM attempt ORDER BY attempt_id"
        for chunk_id, number, is_try in bench.rows(sql):
            assert number == counted[chunk_id] + 1
            counted[chunk_id] += is_try
        ends = [end for end, _ in expected.values()]
        tally = (ends.count("done"), len(ends) - ends.count("done"), counted.total())
        assert (bench.tally.done, bench.tally.failed, bench.tally.tries) == tally
        missing = [end == "failed" and tries[-1][0] in ONCE for end, tries in expected.values()]
        assert bench.tally.missing == sum(missing)
        breaks = sum(error_class is None or f"!{error_class}" in DEATHS for tries in bench.tries.values()
                     for error_class, outcome in tries if outcome != "done")  # fmt: skip
        assert len(bench.engine.sessions) <= breaks + many, "a new process after each death, and not otherwise"
        rows = bench.rows("SELECT pid, exit_code, ended_at_ms IS NULL FROM worker ORDER BY pid")
        assert rows == [(pid, 0, 0) for pid in sorted(session.pid for session in bench.engine.sessions)]
        assert all(session.closed == 1 for session in bench.engine.sessions)


# What becomes of a chunk that always acts so, and what it is charged with; "uncharged" once, and then it is well.
ENDS = {
    "ok": ("done", []), "uncharged": ("done", []), "bad_audio": ("failed", ["bad_audio"] * 3),
    "silent": ("failed", ["no_output"] * 3), "!engine_crash": ("poison", ["engine_crash"] * 2),
}  # fmt: skip


@SOME
@given(
    st.lists(st.sampled_from(["ok", "ok", "ok", *ENDS]), min_size=1, max_size=24), st.integers(1, 9), st.integers(1, 3),
    st.one_of(st.none(), st.tuples(st.sampled_from(["drain", "kill"]), st.integers(0, 30))),
)  # fmt: skip
def test_whatever_happens_each_chunk_ends_once_and_only_the_guilty_are_charged(acts, wants, workers, stop):
    """Chunks of a batch are in the engine together."""
    script = acting({f"c{n}": ["uncharged"] if act == "uncharged" else [act] * 99 for n, act in enumerate(acts)})
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder), script, chunks=len(acts), workers=workers, wants=wants)
        if stop is not None:
            bench.run(until=lambda: bench.tally.tries >= stop[1])
            getattr(bench.supervisor, stop[0])()
        bench.run()
        found = dict(bench.rows("SELECT chunk_id, status FROM chunk"))
        for (chunk_id, tries), act in zip(bench.tries.items(), acts, strict=True):
            end, charges = ENDS[act]
            assert found[chunk_id] == end or (stop and found[chunk_id] == "pending")
            assert tries.count(OK) == (found[chunk_id] == "done")
            charged = [error_class for error_class, outcome in tries if outcome == "failed"]
            assert charged == (charges if found[chunk_id] == end else charges[: len(charged)])
        assert bench.tally.done + bench.tally.failed + list(found.values()).count("pending") == len(acts)
        assert all(session.closed == 1 for session in bench.engine.sessions)


NO_REST = RetryPolicy(2, backoff_s=1000)  # what is to be tried again never comes
STORIES = read_lines("supervised_stories.txt")
ERRORS = "SELECT DISTINCT error FROM attempt WHERE outcome IN ('lost', 'failed') ORDER BY attempt_id LIMIT 2"


def test_who_is_blamed_and_when_it_is_given_up(tmp_path, pages):
    """A batch that is lost together is halved until the guilty chunk is alone."""
    lines = []
    for name, _, reported in (story.partition(": ") for story in STORIES):
        acts = {one: (args * more.pop("times", 1), more) for one, args, more in calls(reported)}
        (_, how), (usual, in_turn) = acts.pop("task"), acts.pop("others", ((), {}))
        how |= {"policy": NO_REST} if "policy" in how else {}
        script = acting({chunk_id: deeds for chunk_id, (deeds, _) in acts.items()}, *usual, **in_turn)
        bench = Bench(tmp_path, script, **how).run()
        gave_up, alike = bench.tally.gave_up, dict[str, list[str]]()
        for chunk_id, tries in bench.tries.items():  # those that were cut short say nothing
            reported = ", ".join(f"{outcome} {error_class or ''}".rstrip() for error_class, outcome in tries if outcome)
            alike.setdefault(reported or "left", []).append(chunk_id)
        lines += [
            f"# {name}: {bench.statuses}",
            *(f"  {' '.join(chunks)}: {reported}" for reported, chunks in alike.items()),
        ]
        if "wants" in how:  # else it depends on the moment which chunk comes next
            batches = [f"{len(batch)} from {batch[0]}" for batch in bench.engine.batches]
            lines.append(f"  {len(bench.engine.sessions)} processes; batches: {', '.join(batches)}")
        lines += [f"  ended: {why}" for why in [*bench.tally.retired, gave_up, bench.tally.node_fault] if why]
        lines += [f"  said: {error}" for (error,) in bench.rows(ERRORS)]
    pages({"stories.txt": "\n".join(lines)})


def test_what_a_batch_meets_while_the_node_is_at_fault_is_not_charged(tmp_path):
    acts = iter(["no_space", "exit_code"])

    def script(session, batch):
        for chunk in batch:
            yield ChunkStarted(chunk, CLOCK.now_ms())
            yield failed(chunk, act) if (act := next(acts, None)) else done(chunk)
            time.sleep(0.05)  # the next one begins within the pause

    bench = Bench(tmp_path, script, chunks=2, wants=2, policy=RetryPolicy(0, backoff_s=0.5)).run()
    assert bench.tries == {"c0": [("no_space", "lost"), OK], "c1": [("exit_code", "lost"), OK]}


def test_a_failure_after_a_fault_of_the_node_is_charged_and_a_fault_under_mps_a_day_later_is_another_one(tmp_path):
    acts = iter(["no_space", None, "exit_code"])

    def script(session, batch):
        time.sleep(0.1)  # longer than the pause
        yield ChunkStarted(batch[0], CLOCK.now_ms())
        yield failed(batch[0], act) if (act := next(acts, None)) else done(batch[0])

    bench = Bench(tmp_path, script, chunks=2, policy=RetryPolicy(0, backoff_s=0.01)).run()
    tries = [one for of_chunk in bench.tries.values() for one in of_chunk]
    assert sorted(tries, key=str) == [("exit_code", "failed"), ("no_space", "lost"), OK]
    for at_ms in (0, 4000, 86_400_000, 86_404_000):
        bench.supervisor._on_shared_fault(plan_on(0), at_ms)
    assert bench.rows("SELECT count(*) FROM decision WHERE code LIKE 'mps.%'") == [(2,)]


@pytest.mark.parametrize("error_class", ["!engine_crash", "!hang", "!gpu_error", "!worker_died", "out_of_memory"])
def test_what_may_take_others_down_is_tried_again_with_nothing_beside_it(tmp_path, error_class):
    """Its batch has no other chunk, and the engine gets no further ones meanwhile; other batches get more."""
    held, act = {True: [], False: []}, acting({"c1": [error_class]}, in_turn=True)

    def script(session, batch):
        batch, suspect = [*batch], [chunk.chunk_id for chunk in batch] == ["c1"]
        for _ in range(2):
            batch += session.more(1, idle=1)
        held[suspect].append(len(batch))
        yield from act(session, batch)

    audio = audio_steps(tmp_path, limits=MemoryLimits({}, print))
    bench = Bench(tmp_path, script, chunks=40, wants=4, audio=audio).run()
    assert (bench.statuses, held[True], max(held[False])) == ({"done": 40}, [1], 6)


def test_a_chunk_rests_before_it_is_tried_again_and_the_others_go_on(tmp_path):
    bench = Bench(tmp_path, acting({"c0": ["bad_audio"] * 9}), policy=NO_REST)
    bench.run(until=lambda: bench.tally.done == 3)
    bench.supervisor.drain()
    assert bench.run().engine.batches == [["c0"], ["c1"], ["c2"], ["c3"]]
    bench = Bench(tmp_path, acting({"c0": ["bad_audio"] * 9}), chunks=1, policy=RetryPolicy(2, backoff_s=0.02)).run()
    times = bench.rows("SELECT started_at_ms, ended_at_ms FROM attempt")
    rests_ms = [later[0] - earlier[1] for earlier, later in pairwise(times)]
    assert [rest >= least for rest, least in zip(rests_ms, (19, 39), strict=True)] == [True, True]
    rests = [RetryPolicy(backoff_s=2.0, longest_backoff_s=10.0).delay_s(failures) for failures in range(1, 6)]
    assert rests == [2.0, 4.0, 8.0, 10.0, 10.0]


def test_a_try_has_its_device_its_state_where_it_failed_and_audio_that_ends_early_is_a_decision(tmp_path):
    def script(session, batch):
        for chunk in batch:
            audio_s = short.get(chunk.chunk_id)
            yield failed(chunk) if chunk.chunk_id == "bad" else ChunkResult(chunk, 1, 2, audio_s=audio_s)

    short = {"short": 28.0, "nearly": 29.5, "whole": 28.0}
    whole = Chunk("r", "whole", "a.wav", "/a.wav", 5000, 35_000)
    cuts = [whole, *(replace(whole, chunk_id=name, is_cut=True) for name in ("short", "nearly", "bad", "same"))]
    state = {"device_state": lambda device_id, at_ms: f"{device_id} before {at_ms > 0}"}
    bench = Bench(tmp_path, script, chunks=cuts, retries=0, **state).run()
    assert bench.rows("SELECT chunk_id, device_id, gpu_state FROM attempt ORDER BY 1") == [
        ("bad", 100, "100 before True"), *((name, 100, None) for name in ("nearly", "same", "short", "whole")),
    ]  # fmt: skip
    assert bench.rows("SELECT code, subject, figures ->> 'found_s', reason FROM decision") == [
        ("short_audio", "r/short", 28.0,
         "/a.wav ends early, at 33.000 s: 28.000 s of the 30 s of this chunk exist and were analysed")
    ]  # fmt: skip
    assert bench.supervisor.audio_done_s == 28 + 29.5 + 28 + 30
    assert bench.supervisor.productive == {0}


def test_a_source_with_more_chunks_than_the_queue_holds_at_once_is_done_to_its_end(tmp_path):
    answered = threading.Event()

    def script(session, batch):
        yield from (ChunkResult(chunk, 1, 2) for chunk in batch)
        answered.set()

    bench = Bench(tmp_path, script, chunks=WorkQueue.WINDOW + 1, wants=WorkQueue.WINDOW)
    bench.start()
    assert answered.wait(60)  # so that the queue is empty before it is filled again
    assert bench.run().statuses == {"done": WorkQueue.WINDOW + 1}
    assert sum(map(len, bench.engine.batches)) == WorkQueue.WINDOW + 1


# A refusal, or the class of what breaks at its start; retries; how often it is opened.
NEVER = [("engine_crash", 2, 3), ("worker_died", 1, 10), ("terminated", 0, 5), (NotHere, 2, 3), (OSError, 0, 1)]
NEVER += [("out_of_memory", 9, 2)]  # as usual, then lean


@pytest.mark.parametrize("others", [0, 1])
@pytest.mark.parametrize(("kind", "retries", "openings"), NEVER)
def test_an_engine_that_never_starts_ends_its_worker_and_charges_nobody(tmp_path, kind, retries, openings, others):
    opened, gone = [], threading.Event()
    error = kind("no licence left") if callable(kind) else SessionBroken(kind, "no licence left", at_start=True)

    def refuse(plan):
        if plan.slot == 0:
            opened.append(plan.lean)
            gone.set() if len(opened) == openings else None
            raise error

    def script(session, batch):
        assert gone.wait(60)
        yield from (done(chunk) for chunk in batch)

    bench = Bench(tmp_path, script, workers=1 + others, retries=retries, on_open=refuse).run()
    assert opened == [False] + [openings == 2] * (openings - 1)
    assert (bench.statuses, bench.tally.retired) == ({"done" if others else "pending": 4}, [str(error)])
    assert all(tries == [OK] * others for tries in bench.tries.values())


def test_openings_that_failed_are_forgotten_as_soon_as_one_works(tmp_path):
    """Each session does one chunk; two openings fail before each. A third in a row would end the worker."""
    openings = []

    def script(session, batch):
        openings.append(1)
        if len(openings) % 3:
            raise SessionBroken("engine_crash", "the models could not be read", at_start=True)
        yield done(batch[0])
        raise SessionBroken("terminated", "SIGTERM")

    # The rests, 1 and 2 ms before each session, would add up to minutes if they grew on.
    bench = Bench(tmp_path, script, chunks=9, policy=RetryPolicy(retries=2, backoff_s=0.001)).run()
    assert (bench.statuses, len(openings)) == ({"done": 9}, 27)


def test_a_bug_in_a_session_comes_out_where_the_task_can_see_it(tmp_path):
    def script(session, batch):
        yield done(batch[0])
        raise OSError("ours, as the engine had been opened")

    with pytest.raises(OSError, match="ours"):
        Bench(tmp_path, script).run()


@pytest.mark.parametrize("how", ["drain", "kill"])
def test_stopping_keeps_what_is_done_and_leaves_the_rest_pending(tmp_path, how):
    """Two workers have a chunk in progress, and hold one more. Draining lets it finish; killing charges no one."""
    running, go_on = threading.Barrier(3), threading.Event()

    def script(session, batch):
        yield done(batch[0])
        yield ChunkStarted(batch[1], 0)
        running.wait(60)
        assert go_on.wait(60)
        if session.killed.is_set() and session.plan.slot:
            raise SessionBroken("worker_died", "killed")
        yield failed(batch[1], "worker_died") if session.killed.is_set() else done(batch[1])

    bench = Bench(tmp_path, script, chunks=20, workers=2, wants=3)
    bench.start()
    running.wait(60)
    getattr(bench.supervisor, how)()
    bench.supervisor.add_worker(plan_on(2))  # it comes too late
    go_on.set()
    assert bench.run().statuses == ({"done": 4, "pending": 16} if how == "drain" else {"done": 2, "pending": 18})
    ends = [end for tries in bench.tries.values() for end in tries]
    assert sorted(ends, key=str) == ([OK] * 4 if how == "drain" else [OK] * 2 + [(None, None)] * 2)
    stops = [(session.interrupted.is_set(), session.killed.is_set()) for session in bench.engine.sessions]
    assert (stops, bench.tally.failed) == ([(True, how == "kill")] * 2, 0)
    assert bench.rows("SELECT DISTINCT exit_code FROM worker") == [(-9 if how == "kill" else 0,)]
    assert bench.supervisor.upcoming(9) == []


@pytest.mark.parametrize("how", ["drain", "kill"])
def test_a_stop_reaches_an_engine_that_is_just_being_opened(tmp_path, how):
    def script(session, batch):
        assert (session.interrupted.is_set(), session.killed.is_set()) == (True, how == "kill")
        yield from ()

    bench = Bench(tmp_path, script, wants=9, on_open=lambda plan: getattr(bench.supervisor, how)())
    assert bench.run().statuses == {"pending": 4}
    assert bench.tries == {f"c{number}": [] for number in range(4)}


@pytest.mark.parametrize(("change", "fresh"), [("add", 0), ("retire", 2), ("none", 0)])
def test_near_the_end_the_work_is_shared_among_as_many_workers_as_there_are_now(tmp_path, change, fresh):
    """Each likes to hold four. Worker 0 asks for three more while six are left: for two workers, or for one."""
    go_on, begun = ([threading.Event(), threading.Event()] for _ in range(2))
    got = []

    def script(session, batch):
        held, slot = list(batch), session.plan.slot
        begun[slot].set()
        assert go_on[slot].wait(60)
        if slot == 0:
            got.append(len(more := session.more(3, idle=0)))
            held += more
            go_on[1].set()
        yield from (done(chunk) for chunk in held)

    bench = Bench(tmp_path, script, chunks=14, workers=1 if change == "add" else 2, wants=4)
    bench.start()
    assert begun[0].wait(60)
    if change == "add":
        bench.supervisor.add_worker(plan_on(1))
    assert begun[1].wait(60)
    if change == "retire":
        bench.supervisor.retire(1)
        bench.supervisor.retire(1)  # once is enough
    assert bench.supervisor.slots_at_work == {0: 100, **({} if change == "retire" else {1: 101})}
    go_on[0].set()
    assert (bench.run().statuses, got[0]) == ({"done": 14}, fresh)
    finished = dict(bench.rows("SELECT device_id, count(*) FROM chunk WHERE status = 'done' GROUP BY 1"))
    assert sum(finished.values()) == 14
    assert finished[101] == 4 or change != "retire", "it finishes what it has, and takes no more"
    assert bench.supervisor.slots_at_work == {}


# Lengths of chunks, how many at once, how much later it asks for more, and what it gets.
IN_TIME = [
    ([2000, 1500], 1, 0, []),  # too long after it
    ([2000, 1400], 1, 0, ["1400s-1"]),  # fits after it
    ([2000, 1400], 1, 1000, ["1400s-1"]),  # it is half done
    ([1850, 1500, 1500], 2, 0, ["1500s-2"]),  # two at once
    ([1850, 1500, 1900], 2, 0, ["1850s-0"]),  # what did not fit after one fits beside two
]


@pytest.mark.parametrize(("lengths_s", "at_once", "later_s", "more"), IN_TIME)
def test_a_worker_gets_what_it_finishes_in_time_after_what_it_has_begun(tmp_path, lengths_s, at_once, later_s, more):
    """There are 3580 s for work, a second of audio takes a second, and a tenth of a chunk is kept in reserve."""
    clock = HandClock()
    pace = TimeBudget(EndTime(clock.now_ms() + 3_600_000, "run.stop_after"), clock)
    pace.learn(lambda limit: [(100, 1.0, 1.0)])
    fresh = []

    def script(session, batch):
        yield from (ChunkStarted(chunk, clock.now_ms()) for chunk in batch)
        clock.sleep(later_s)
        held = [*batch, *session.more(1, idle=1)]
        fresh.append([chunk.chunk_id for chunk in held[len(batch) :]])
        yield from (done(chunk) for chunk in held)

    chunks = [Chunk("r", f"{s}s-{n}", "a.wav", "/a.wav", 0, 1000 * s) for n, s in enumerate(lengths_s)]
    Bench(tmp_path, script, chunks=chunks, wants=at_once, timetable=pace.fit_test).run()
    assert fresh[0] == more
