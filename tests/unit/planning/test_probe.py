"""A probe: which length it tries next, what its trials mean, what engines said, and what is shown."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rooms.devices import open_reader, simulated_uuid
from rooms.model import FITS, NO_START, TOO_LONG, Chunk, ProbeResult, StandIn, Trial, WorkerPlan
from rooms.planning import (
    Bounds,
    ProbeStep,
    TrialEvents,
    bracket,
    choose_best,
    count_rounds,
    evaluate,
    is_too_short,
    measure,
    next_step,
    probe_page,
    probe_text,
    usual_is_over,
    why_not_finished,
)
from rooms.root import SessionBroken
from rooms.task import StopRequest
from rooms.workers import BATCH_LOST, EXIT_CODE, OUT_OF_MEMORY, RetryPolicy, Supervisor, parse_arguments, take_memory
from support.behaviour import page_text
from support.hand_clock import HandClock
from support.pages import Pages
from support.probes import GIB, KEY, trial
from support.scripted_engine import CLOCK, News, Notebook, Script, ScriptedEngine, ScriptedSession, done, failed

MIB = 2**20
CHUNKS = [Chunk("r", name, f"{name}.wav", f"/{name}.wav") for name in ("a", "b")]


# --- the search -------------------------------------------------------------------------------------------------------


def search(holds: Callable[[ProbeStep], bool], bounds: Bounds, devices: int = 1) -> list[Trial]:
    """Play the devices: each takes the next step as soon as it is free, the oldest trial ends first."""
    trials: list[Trial] = []
    running: list[ProbeStep] = []
    while True:
        while len(running) < devices and (step := next_step(trials, bounds, running)) is not None:
            assert step not in running
            running.append(step)
        if not running:
            assert next_step(trials, bounds) is None
            return trials
        step = running.pop(0)
        trials.append(Trial(step.length_s, step.lean, FITS if holds(step) else TOO_LONG))
        assert len(trials) < 200


@given(
    limit_s=st.floats(3.1, 20_000), helps=st.floats(1, 8), start_s=st.floats(3, 300), devices=st.integers(1, 5),
    tolerance=st.sampled_from([0.02, 0.05, 0.2]),
)  # fmt: skip
def test_any_limit_is_found_within_the_tolerance_and_in_few_trials(
    limit_s: float, helps: float, start_s: float, devices: int, tolerance: float
) -> None:
    bounds = Bounds(start_s, 3600.0, tolerance=tolerance)
    trials = search(lambda step: step.length_s <= limit_s * (helps if step.lean else 1), bounds, devices)
    usual, lean = bracket(trials, lean=False), bracket(trials, lean=True)
    for (fits_s, too_long_s), limit in ((usual, limit_s), (lean, limit_s * helps)):
        if limit >= 3600:
            assert (fits_s, too_long_s) == (3600, None) or usual[1] is None
        elif fits_s is None:
            assert limit < 2 * bounds.shortest_s * 1.01
        elif too_long_s is not None:
            assert fits_s <= limit < too_long_s
            assert too_long_s <= fits_s * max(1 + tolerance, 1.021)  # rounded lengths come no closer than 1 % each
    assert (usual[1] is None) == (not any(one.lean for one in trials))
    assert lean[0] is None or lean[0] >= (usual[0] or 0)
    up = math.ceil(math.log2(3600 / start_s)) + 1
    down = math.ceil(math.log2(start_s / bounds.shortest_s)) + 1
    most = max(up, down) + math.ceil(math.log2(math.log(2) / math.log(1 + tolerance))) + 1
    assert devices > 1 or all(sum(one.lean is way for one in trials) <= most for way in (False, True))


def test_it_doubles_then_halves_what_is_in_between_and_tries_one_thread_where_that_may_help() -> None:
    def lengths(limit_s: float, bounds: Bounds, *, lean: bool = False) -> list[float]:
        return [one.length_s for one in search(lambda step: step.length_s <= limit_s, bounds) if one.lean is lean]

    usual = Bounds(60, 3600)
    assert lengths(1000, usual) == [60, 120, 240, 480, 960, 1920, 1358, 1142, 1047, 1003]
    assert (lengths(100, usual, lean=True), lengths(1e9, Bounds(60, 150))) == ([101], [60, 120, 150])
    assert (lengths(1e9, Bounds(60, 20)), lengths(4, usual)[:5]) == ([20], [60, 30, 15, 7.5, 3.75])
    assert (lengths(2, usual), lengths(2, usual, lean=True)) == ([60, 30, 15, 7.5, 3.75], [3.75])
    assert lengths(2, Bounds(60, 3600, 3.75)) == [60, 30, 15, 7.5, 3.75]
    tried = [Trial(60, False, FITS), Trial(120, False, FITS)]
    assert next_step(tried, Bounds(60, 120)) is None
    assert next_step(tried, Bounds(60, 1000)) == ProbeStep(False, 240), (
        "a longer end goes on where a shorter one stopped"
    )
    assert next_step(tried, usual, [ProbeStep(False, 240)]) == ProbeStep(False, 480)
    between = [*tried, Trial(240, False, TOO_LONG)]
    assert next_step(between, usual) == ProbeStep(False, 170)
    assert next_step(between, usual, [ProbeStep(False, 170.0)]) == ProbeStep(False, 143)
    none = [Trial(60, False, NO_START)]
    assert usual_is_over(none, usual) and next_step(none, usual) == ProbeStep(True, 60)
    assert next_step(none, usual, [ProbeStep(True, 60)]) == ProbeStep(True, 120)
    assert next_step([*none, Trial(60, True, NO_START)], usual) is None
    assert next_step([Trial(60, False, TOO_LONG)], usual, [ProbeStep(False, 30)]) == ProbeStep(False, 15)
    assert bracket([*between, Trial(480, False, FITS)], lean=False) == (120, 240), "what did not fit counts"
    assert bracket([Trial(60, True, TOO_LONG), Trial(30, False, FITS)], lean=True) == (30, 60)
    assert bracket([Trial(60, True, TOO_LONG), Trial(30, True, FITS)], lean=False) == (None, 60)


# --- what the trials mean ---------------------------------------------------------------------------------------------


def test_the_best_is_the_shortest_about_as_fast_as_the_fastest_that_is_safe() -> None:
    fast = [trial(60, 400), trial(120, 979), trial(240, 980), trial(480, 1000), trial(960, 999)]
    mixed = [trial(60, 400), trial(120, 800), trial(240, 2000), trial(30, 9000, lean=True)]
    for trials, at_most_s, best in ((fast, None, 240), (mixed, 200, 120), (mixed, 120, 120), (mixed[2:3], 200, 240)):
        assert getattr(choose_best(trials, at_most_s), "length_s", None) == best
    assert choose_best([trial(60, None), Trial(120, False, TOO_LONG)], None) is None


def test_the_margin_is_taken_off_what_fits_where_there_is_an_edge() -> None:
    edge = [
        trial(60, 400),
        trial(100, 800),
        Trial(105, False, TOO_LONG),
        trial(105, 700, lean=True),
        Trial(200, True, TOO_LONG),
    ]
    starts = [Trial(60, False, NO_START), Trial(60, True, NO_START)]
    for trials, margin, finished, expected in (
        (edge, 10, True, ProbeResult(100, 105, 90, 60, 400, None, 105, 200, 94, 10)),
        (edge, 25, False, ProbeResult(100, 105, 75, 60, 400, None, None, None, None, 25)),
        ([trial(60, 400), trial(120, 800, peak_bytes=7)], 10, True, ProbeResult(120, None, 120, 120, 800, 7,
            margin_percent=10)),
        ([trial(60, 400), Trial(63, False, TOO_LONG)], 10, True, ProbeResult(60, 63, 54, 54, 400, margin_percent=10)),
        ([trial(10, 400), Trial(11, False, TOO_LONG)], 12.5, True, ProbeResult(10, 11, 8.75, 8.75, 400,
            margin_percent=12.5)),
        ([trial(12.5, 400), Trial(13, False, TOO_LONG)], 20, True, ProbeResult(12.5, 13, 10, 10, 400,
            margin_percent=20)),
        (starts, 10, True, ProbeResult(None, None, None, None, None, margin_percent=10)),
    ):  # fmt: skip
        assert evaluate(trials, margin, finished=finished) == expected


def test_short_chunks_come_often_enough_to_be_measured_and_speed_counts_from_the_second_round_on() -> None:
    rounds = {None: 4, 600: 16, 60_000: 64, 30: 2, 8.1: 2, 8: 1, 5: 1}
    assert {rate: count_rounds(60, 2, 3, rate) for rate in rounds} == rounds
    first = replace(trial(60, 400), chunks=8)
    assert [is_too_short(replace(first, work_s=s), 2, 3.0) for s in (1.49, 1.5, None)] == [True, False, True]
    assert not is_too_short(replace(first, work_s=1.0), 4, 3.0) and not is_too_short(
        replace(first, outcome=TOO_LONG), 2, 3.0
    )
    two = [KEY.result(60, began, ended) for began, ended in ((0, 5000), (0, 6000), (5000, 7000), (6000, 8000))]
    late = [KEY.result(60, 0, 5000), KEY.result(60, 4994, 7000)]
    batch = [KEY.result(60, 0, ended) for ended in (6000, 6000, 6001, 6000)]
    for results, lanes, expected in (
        (two, 2, (2.0, 60.0)), (two[:2], 2, (6.0, 20.0)), (two[:3], 2, (7.0, 25.71)), (late, 1, (7.0, 17.14)),
        ([late[0], KEY.result(60, 4995, 7000)], 1, (2.0, 30.0)), (batch, 1, (6.001, 39.99)), ([KEY.result(60, 5, 5)],
            1, (0.0, None)),
    ):  # fmt: skip
        assert measure(results, lanes) == expected


# --- memory that does not exist, and what an engine said --------------------------------------------------------------


def test_a_simulated_device_shows_what_living_processes_pretend_to_have(tmp_path: Path) -> None:
    uuid = simulated_uuid(0)
    for name, text in ((f"{uuid}.{os.getpid()}", str(5 * MIB)), (f"{uuid}.1", str(MIB)), (f"{uuid}.999999999", "7"),
                       (f"{simulated_uuid(1)}.1", "9"), (f"{uuid}.{os.getppid()}", "half a num")):  # fmt: skip
        (tmp_path / name).write_text(text)
    clock = HandClock()
    reader = open_reader(StandIn(2, ledger=str(tmp_path)), clock, clock.now_ms(), None)
    assert [reader.read(simulated_uuid(index)).memory_used_bytes for index in (0, 1)] == [6 * MIB, 9]
    plain = open_reader(StandIn(1), clock, clock.now_ms(), None)
    assert (plain.read(uuid).memory_used_bytes or 0) > 100 * MIB


def test_the_demo_engine_takes_memory_by_the_second_beside_those_that_live(tmp_path: Path) -> None:
    place = ["--device=GPU-x", f"--device-bytes={100 * MIB}", f"--ledger={tmp_path}"]
    usual, lean, slow = (parse_arguments([*place, *more]) for more in (
        ["--memory-per-s=4"], ["--memory-per-s=4", "--lean"], ["--memory-per-s=1", "--lean"]))  # fmt: skip
    assert take_memory(usual, 12.5) is take_memory(lean, 25) is None
    assert (tmp_path / f"GPU-x.{os.getpid()}").read_text() == str(100 * MIB)
    assert (take_memory(usual, 12.6) or "").startswith("CUDA out of memory. Tried to allocate 101 MiB.")
    assert take_memory(lean, 25.5) is not None
    ended = os.fork()
    if not ended:
        os._exit(0)
    os.waitid(os.P_PID, ended, os.WEXITED | os.WNOWAIT)  # ended, but not yet waited for
    for owner in (f"GPU-x.{os.getppid()}", f"GPU-y.{os.getppid()}", "GPU-x.999999999", f"GPU-x.{ended}"):
        (tmp_path / owner).write_text(str(60 * MIB))
    try:
        assert "of which 40 MiB is free" in (take_memory(slow, 41) or "")
        assert take_memory(slow, 40) is take_memory(slow, 40) is None, "the second time it has it already"
    finally:
        os.waitpid(ended, 0)


def listen(script: Script, tmp_path: Path) -> tuple[TrialEvents, ScriptedEngine]:
    watch, engine = TrialEvents(), ScriptedEngine(script, wants=2)
    supervisor = Supervisor(
        engine, [WorkerPlan(0, None, None, 1, lean=True)], Notebook(CHUNKS), clock=CLOCK,
        policy=RetryPolicy(retries=0, backoff_s=0.0), scratch=tmp_path, listen=watch.note,
    )  # fmt: skip
    supervisor.start()
    while supervisor.busy and watch.trouble is None:
        supervisor.handle_events(timeout_s=0.02)
    watch.closed = True
    supervisor.kill()
    while supervisor.busy:
        supervisor.handle_events(timeout_s=0.02)
    return watch, engine


def test_out_of_memory_decides_a_trial_then_the_first_final_failure_and_nothing_after_its_end(tmp_path: Path) -> None:
    watch, engine = listen(lambda session, batch: map(done, batch), tmp_path)
    assert ([one.chunk.chunk_id for one in watch.done], watch.trouble) == (["a", "b"], None)
    assert [session.plan.lean for session in engine.sessions] == [True]

    def fail(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        yield failed(batch[0], BATCH_LOST, charged=False)
        raise SessionBroken(OUT_OF_MEMORY, "CUDA out of memory", at_start=True)

    trouble = listen(fail, tmp_path)[0].trouble
    assert trouble is not None and trouble.is_out_of_memory and trouble.at_start
    lost, final, late = TrialEvents(), TrialEvents(), TrialEvents()
    lost.note(failed(CHUNKS[0], BATCH_LOST, charged=False))
    final.note(failed(CHUNKS[0], EXIT_CODE))
    late.closed = True
    late.note(failed(CHUNKS[0], EXIT_CODE))
    assert lost.trouble is late.trouble is None
    assert final.trouble is not None and not final.trouble.is_out_of_memory


# --- what is shown ----------------------------------------------------------------------------------------------------

TRIALS = [trial(60, 400, peak_bytes=3 * GIB), trial(120, 800, peak_bytes=5 * GIB), Trial(126.0, False, TOO_LONG)]
LEAN = [*TRIALS, trial(126, 99.5, lean=True), Trial(200.0, True, TOO_LONG)]
SHOWN = {
    "found": KEY.probed(evaluate(TRIALS, 10.0), TRIALS),
    "with one thread": KEY.probed(evaluate(LEAN, 10.0), LEAN[::-1]),
    "all fits": KEY.probed(evaluate(TRIALS[:2], 10.0), TRIALS[:2]),
    "nothing fits": KEY.probed(evaluate([Trial(60, False, TOO_LONG)], 10.0), [Trial(60, False, TOO_LONG)]),
    "no start": KEY.probed(evaluate([Trial(60, False, NO_START)], 10.0), [Trial(60, False, NO_START)]),
    "not finished": KEY.probed(None, TRIALS[:1], finished=False),
    "no memory, no speed": replace(
        KEY.probed(None, [trial(60, None)], finished=False), key=replace(KEY.key, memory_bytes=None)
    ),
}


def test_the_text_and_the_page_have_the_curve_the_best_length_and_what_is_safe(pages: Pages) -> None:
    pytest.importorskip("bokeh")
    said = {f"{name}.txt": probe_text([one], "cache/probe.toml; later runs read it") for name, one in SHOWN.items()}
    said["two.txt"] = probe_text([SHOWN["found"], SHOWN["not finished"]], "x", ["a note"])
    page = probe_page([SHOWN["with one thread"], SHOWN["no memory, no speed"]], ["<b>a note</b>"])
    assert 'id="chart-memory-0"' in page and 'id="chart-speed-0"' in page
    assert 'id="chart-memory-1"' not in page, "nothing was read of it, and nothing timed"
    assert "&lt;b&gt;a note" in page and "script-src 'sha256-" in page
    pages({**said, "page.txt": page_text(page).partition("Made by")[0]})


def test_a_probe_that_is_not_finished_says_what_is_really_kept() -> None:
    again = "before the first trial ended; nothing is stored, so the same command starts again"
    for came, kept, words in (
        (signal.SIGINT, True, "stopped by SIGINT; the trials are stored, and the same command continues"),
        (signal.SIGTERM, False, f"stopped by SIGTERM {again}"),
        (None, False, f"the time is over {again}: give it more time with --time"),
    ):
        stop = StopRequest(lambda: 0.0)
        if came is not None:
            stop.receive(came)
        assert why_not_finished(stop, kept) == words
