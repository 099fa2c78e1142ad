"""A probe: which length it tries next, what its trials mean, what engines said, and what is shown."""

import math
import re
import signal
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from rooms import planning
from rooms.devices import Grant
from rooms.model import FITS, NO_START, TOO_LONG, Chunk, Device, Probed, Trial
from rooms.planning import Bounds, ProbeStep
from rooms.root import Launcher, ProbeSettings, RunSettings, SessionBroken, SystemClock
from rooms.task import StopRequest
from rooms.workers import (
    EXIT_CODE,
    OUT_OF_MEMORY,
    BatchOver,
    EngineStart,
    HawkEarsEngine,
    ProbeStore,
)
from support.behaviour import page_text
from support.brief import line
from support.cases import read_blocks
from support.probes import GIB, KEY
from support.supervised import done, failed

CASES = read_blocks("probe_cases.txt")
SEARCHES, NEXT, RESULTS, SHOWN = (text.strip().splitlines()[1:] for text in CASES)


def trials_of(text):
    """Return trials: 60=400@3 fits (× real time, GiB), 60! is too long, 60x does not start; 1:60 is with one thread."""
    found = []
    for lean, length, rate, peak, end in re.findall(r"(1:)?([\d.]+)(?:=([\d.?]+))?(?:@([\d.]+))?([!x]?)(?: |$)", text):
        outcome = {"!": TOO_LONG, "x": NO_START}.get(end, FITS)
        speed = float(rate) if rate not in ("", "?") else None
        measured = {"chunks": 4, "work_s": 3.0, "times_real_time": speed} if outcome == FITS else {}
        peak_bytes = int(float(peak) * GIB) if peak else None
        found.append(Trial(float(length), bool(lean), outcome, peak_bytes=peak_bytes, **measured))
    return found


def steps_of(text):
    return [ProbeStep(trial.lean, trial.length_s) for trial in trials_of(text)]


def show(lean, length_s):
    return f"{'1:' * lean}{length_s:g}"


def probed_of(name, text):
    trials, finished = trials_of(text), not name.startswith("not finished")
    key = replace(KEY.key, memory_bytes=None) if "no memory" in name else KEY.key
    result = planning.evaluate(trials, 10.0, finished=True) if finished else None
    return Probed(key, tuple(trials), result, finished, "2026-07-01T12:00:00Z")


def search(holds, bounds):
    """Play the device."""
    trials = []
    while (step := planning.next_step(trials, bounds)) is not None:
        trials.append(Trial(step.length_s, step.lean, FITS if holds(step) else TOO_LONG))
        assert len(trials) < 200
    return trials


@given(limit_s=st.floats(3.1, 20_000), helps=st.floats(1, 8), start_s=st.floats(3, 300))
def test_any_limit_is_found_within_five_percent_and_in_few_trials(limit_s, helps, start_s):
    bounds = Bounds(start_s, 3600.0)
    trials = search(lambda step: step.length_s <= limit_s * (helps if step.lean else 1), bounds)
    usual, lean = planning.bracket(trials, lean=False), planning.bracket(trials, lean=True)
    for (fits_s, too_long_s), limit in ((usual, limit_s), (lean, limit_s * helps)):
        if limit >= 3600:
            assert (fits_s, too_long_s) == (3600, None) or usual[1] is None
        elif fits_s is None:
            assert limit < 2 * 3.0 * 1.01
        elif too_long_s is not None:
            assert fits_s <= limit < too_long_s
            assert too_long_s <= fits_s * 1.05
    assert (usual[1] is None) == (not any(one.lean for one in trials))
    assert lean[0] is None or lean[0] >= (usual[0] or 0)
    up = math.ceil(math.log2(3600 / start_s)) + 1
    down = math.ceil(math.log2(start_s / 3.0)) + 1
    most = max(up, down) + math.ceil(math.log2(math.log(2) / math.log(1.05))) + 1
    assert all(sum(one.lean is way for one in trials) <= most for way in (False, True))


def test_it_doubles_then_halves_what_is_in_between_and_tries_one_thread_where_that_may_help(pages):
    said = []
    for case in SEARCHES:
        first_s, last_s, limit_s = map(float, case.split())
        trials = search(lambda step, limit_s=limit_s: step.length_s <= limit_s, Bounds(first_s, last_s))  # type: ignore[misc]
        said.append(f"{case}: {' '.join(show(one.lean, one.length_s) for one in trials)}")
    for case in NEXT:
        bounds, tried = (one.strip() for one in case.split("|"))
        between, trials = Bounds(*map(float, bounds.split())), trials_of(tried)
        step = planning.next_step(trials, between)
        known = [planning.bracket(trials, lean=lean) for lean in (False, True)]
        over = " (usual is over)" * planning.usual_is_over(trials, between)
        said.append(f"{case} → {step and show(*step)}{over} {known}")
    pages({"steps.txt": "\n".join(said)})


def test_the_best_is_the_shortest_about_as_fast_as_the_fastest_and_a_margin_is_kept_from_the_edge(pages):
    said = []
    for case in RESULTS:
        trials, margin = case.split(" | ")
        done, stopped = (planning.evaluate(trials_of(trials), float(margin), finished=one) for one in (True, False))
        said.append(f"{case} → {line(done)}" + (f"; stopped: {line(stopped)}" if stopped != done else ""))
    pages({"results.txt": "\n".join(said)})


def test_short_chunks_come_often_enough_to_be_measured_and_speed_counts_from_the_second_round_on():
    rounds = {None: 4, 600: 16, 60_000: 64, 30: 2, 8.1: 2, 8: 1, 5: 1}
    assert {rate: planning.count_rounds(60, 2, 3, rate) for rate in rounds} == rounds
    first = replace(trials_of("60=400")[0], chunks=8)
    short = [planning.is_too_short(replace(first, work_s=s), 3.0) for s in (1.49, 1.5, None)]
    assert short == [True, False, True]
    assert not planning.is_too_short(replace(first, outcome=TOO_LONG), 3.0)
    for case, expected in {  # lanes, then from when to when each chunk was worked on
        "2: 0-5000 0-6000 5000-7000 6000-8000": (2.0, 60.0), "2: 0-5000 0-6000": (6.0, 20.0),
        "2: 0-5000 0-6000 5000-7000": (7.0, 25.71), "1: 0-5000 4994-7000": (7.0, 17.14), "1: 5-5": (0.0, None),
        "1: 0-5000 4995-7000": (2.0, 30.0), "1: 0-6000 0-6000 0-6001 0-6000": (6.001, 39.99),
    }.items():  # fmt: skip
        results = [KEY.result(60, *map(int, one.split("-"))) for one in case[3:].split()]
        assert planning.measure(results, int(case[0])) == expected


def test_models_are_searched_apart_with_their_lanes_within_the_memory_of_the_node(tmp_path, pages):
    sizes = (("V100", 16), ("V100", 32), ("V100", 16), ("A100", 40))
    cards = [Device(str(n), "", name=name, memory_total_bytes=gib * GIB) for n, (name, gib) in enumerate(sizes)]
    said = list[str]()
    three = (cards, {"workers_per_gpu": "2"}, 24), (cards[:1], {"engine_args": ("--threads=3",)}, 1)
    for devices, options, cores in (*three, ([], {"cpu_workers": 3}, 8)):
        store = ProbeStore(tmp_path / f"{cores}.json")
        settings = RunSettings(source=("a.wav",), **{"engine": "demo", **options})  # type: ignore[arg-type]
        order = planning.ProbeOrder(settings, ProbeSettings(trial_s=3.0), 600.0, None, again=False)
        engine_words = " ".join(settings.engine_args).replace("=", " ").split()
        start = EngineStart(tuple(engine_words), {}, Launcher("test"), SystemClock())
        engine = HawkEarsEngine(start, None, tmp_path)
        for search in planning.make_searches(order, Grant(tuple(devices), ""), engine, cores, store):
            steps = steps_of("60 1:60")
            said.append(f"{line(search.key)}: {search.plan.threads} threads")
            for trials in ("", "60=400", "60=400 120=900 240=? 480!"):
                search.trials = trials_of(trials)
                chunks = [(search.lanes(one), search.chunks(one), round(search.expected_s(one), 2)) for one in steps]
                said.append(f"  {trials}: {search.rate} {chunks} {line(search.probed.result)} {search.is_over}")
            search.trials = [replace(one, host_peak_bytes=GIB) for one in trials_of("60=400 120=900")]
            for gib in (400, 8, 2, 1):
                said.append(f"  {gib} GiB: {line(search.next_step(gib * GIB))}; {search.host_note}")
    for error_class in ("exit_code", "host_memory", "no_program"):
        error = planning.explain(planning.Trouble(error_class, " it broke "), KEY.key, steps_of("90")[0])
        said.append(f"{error_class}: {error.what}; {error.why}; try: {error.fix}; exit code {int(error.exit_code)}")
    pages({"searches.txt": "\n".join(said)})


def test_out_of_memory_decides_a_trial_then_the_first_final_failure_and_nothing_after_its_end():
    chunk = Chunk("r", "a", "a.wav", "/a.wav")
    lost, final = failed(chunk, EXIT_CODE, charged=False), failed(chunk, EXIT_CODE)
    full = BatchOver([], SessionBroken(OUT_OF_MEMORY, "CUDA out of memory", at_start=True), 5, frozenset(), 1)
    for events, decides, at_start in (
        ([done(chunk), BatchOver([], None, 5, frozenset(), 0)], None, False), ([lost], None, False),
        ([lost, final], EXIT_CODE, False), ([lost, final, full], OUT_OF_MEMORY, True),
    ):  # fmt: skip
        watch = planning.TrialEvents()
        for event in events:
            watch.note(event)
        watch.closed = True
        watch.note(final)
        trouble = watch.trouble
        assert (trouble and trouble.error_class, bool(trouble and trouble.at_start)) == (decides, at_start)
        assert len(watch.done) == (events[0] is not lost)


def test_the_text_and_the_page_have_the_curve_the_best_length_and_what_is_safe(pages):
    kept = "cache/probe.json; later runs read it"
    probed = {name: probed_of(name, text) for name, text in (one.split(" | ") for one in SHOWN)}
    texts = [f"## {name}\n{planning.probe_text([one], kept)}\n" for name, one in probed.items()]
    texts.append(f"## two\n{planning.probe_text([probed['found'], probed['not finished']], 'x', ['a note'])}\n")
    narrow = planning.probe_text([probed["found"]], kept, ["a note of several words"], 70)
    assert max(map(len, narrow.splitlines())) <= 70, "as wide as the terminal"
    for came in (signal.SIGINT, None):
        stop = StopRequest(lambda: 0.0)
        if came is not None:
            stop.receive(came)
        texts.append(f"## {came and came.name}\n{planning.why_not_finished(stop)}")
    page = planning.probe_page([probed["with one thread"], [*probed.values()][-1]], ["<b>a note</b>"])
    assert 'id="chart-memory-0"' in page and 'id="chart-speed-0"' in page
    assert 'id="chart-memory-1"' not in page, "nothing was read of it, and nothing timed"
    assert "&lt;b&gt;a note" in page and "script-src 'sha256-" in page
    pages({"texts.txt": "\n".join(texts), "page.txt": page_text(page).partition("Made by")[0]})
