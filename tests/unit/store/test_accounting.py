"""Where a device's time and energy went: nothing is counted twice, nothing is forgotten, and unknown is not zero."""

from collections import Counter
from contextlib import closing
from dataclasses import astuple
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rooms import store
from rooms.model import ChunkResult, HostReading, Reading, TaskKey, UsageReading
from rooms.store import Cumulated, Span, StateTime, busy_steps, make_spans, power_steps, sum_by_state
from support.behaviour import some_rows
from support.databases import query
from support.task_files import START_MS, LiveTask, TaskFile, make_chunk, merge_run

END_MS = 100_000
STRETCH = st.tuples(st.integers(-5000, END_MS + 5000), st.integers(0, 30_000)).map(lambda s: (s[0], s[0] + s[1]))
CHUNK_STATES = ("working", "failed", "lost")
TRIES = st.lists(st.tuples(STRETCH, st.sampled_from(CHUNK_STATES)), max_size=12).map(
    lambda drawn: [(number, *stretch, state) for number, (stretch, state) in enumerate(drawn)]
)
LIVES = st.lists(st.tuples(STRETCH, st.none() | st.integers(0, 40_000)), max_size=4).map(
    lambda drawn: [(begin, None if wait is None else begin + wait, end) for (begin, end), wait in drawn]
)
POINTS = st.lists(st.tuples(st.integers(1, 20_000), st.none() | st.floats(0, 100)), max_size=30).map(
    lambda steps: [(sum(step for step, _ in steps[: n + 1]), value) for n, (_, value) in enumerate(steps)]
)


@given(TRIES, LIVES, st.integers(200, 50_000))
@settings(max_examples=60)
def test_every_moment_has_exactly_the_state_that_a_look_at_it_finds(tries, lives, width_ms):
    spans = list(make_spans(7, END_MS, tries, lives))
    assert (spans[0].from_ms, spans[-1].to_ms) == (7, END_MS)
    assert all(a.to_ms == b.from_ms for a, b in pairwise(spans))
    seconds = Counter()
    for span in spans:
        assert span.from_ms < span.to_ms
        at = (span.from_ms + span.to_ms) / 2
        flying = [one for one in tries if one[1] <= at < one[2]]
        starting = any(begin <= at < (end if began is None else began) for begin, began, end in lives)
        starting = starting or (bool(lives) and at < min(life[0] for life in lives))
        alive = any(begin <= at < end for begin, _, end in lives)
        expected = next((state for state in CHUNK_STATES if state in {one[3] for one in flying}), None)
        assert span.state == (expected or ("start_up" if starting else "waiting" if alive else "idle"))
        assert sorted(span.attempt_ids) == [one[0] for one in flying]
        seconds[span.state] += (span.to_ms - span.from_ms) / 1000
    total = Counter()
    for number, part in store.state_seconds(spans, 7, width_ms).items():
        whole_s = min(width_ms, END_MS - 7 - number * width_ms) / 1000
        assert sum(part.values()) == pytest.approx(whole_s), "stretches have no holes"
        total += part
    assert dict(total) == {state: pytest.approx(found) for state, found in seconds.items()}


@given(TRIES, LIVES, POINTS, POINTS)
@settings(max_examples=60)
def test_what_is_shared_out_adds_up_to_what_there_was(tries, lives, watts, busy):
    power, used = list(power_steps(watts)), list(busy_steps(busy))
    to_ms = max([END_MS, *(at for at, _ in [*watts, *busy])])
    by_state, by_try = sum_by_state(make_spans(0, to_ms, tries, lives), Cumulated(used), Cumulated(power))
    states = by_state.values()
    assert sum(time.total_s for time in states) == pytest.approx(to_ms / 1000)
    assert sum(time.energy_j or 0.0 for time in states) == pytest.approx(sum(step[2] for step in power))
    assert sum(time.busy_s or 0.0 for time in states) == pytest.approx(sum(step[2] for step in used))
    assert sum(time.measured_s for time in states) == pytest.approx(sum(b - a for a, b, _ in power) / 1000)
    for what in ("total_s", "energy_j", "busy_s", "measured_s"):
        in_chunks = sum(getattr(by_state[state], what) or 0.0 for state in CHUNK_STATES if state in by_state)
        assert sum(getattr(time, what) or 0.0 for time in by_try.values()) == pytest.approx(in_chunks)


@given(POINTS)
@example([(1, 100.0), (15_001, 200.0), (30_002, 300.0)])
@settings(max_examples=40)
def test_power_is_integrated_over_near_neighbours_and_never_across_a_hole(points):
    known = [(at, value) for at, value in points if value is not None]
    near = [(a, b) for a, b in pairwise(known) if b[0] - a[0] <= 15_000]
    joules = [(a[0], b[0], pytest.approx((a[1] + b[1]) / 2 * (b[0] - a[0]) / 1000)) for a, b in near]
    assert list(power_steps(points)) == joules
    busy = [(a[0], b[0], pytest.approx(b[1] / 100 * (b[0] - a[0]) / 1000)) for a, b in near]
    assert list(busy_steps(points)) == busy
    total = Cumulated(power_steps(points)).total
    assert total == (pytest.approx(sum(part[2].expected for part in joules)) if joules else None)


@given(st.lists(st.integers(0, 100), min_size=1, max_size=120))
@settings(max_examples=40)
def test_mean_and_percentiles_are_those_of_the_sorted_values(values):
    ordered = sorted(values)
    p50, p95 = (ordered[-(-len(values) * share // 100) - 1] for share in (50, 95))  # nearest rank
    mean = pytest.approx(sum(values) / len(values))
    assert store.distribution(Counter(values)) == (len(values), ordered[0], mean, p50, p95, ordered[-1])


def test_what_was_not_measured_is_unknown_and_tries_at_once_share_what_was():
    power = Cumulated(power_steps([(10_000, 100.0), (14_000, 100.0)]))
    assert [power.until(at) for at in (9_999, 10_000, 12_000, 20_000)] == [(0, 0), (0, 0), (200, 2000), (400, 4000)]
    spans = [Span(0, 5000, "start_up"), Span(5000, 12_000, "working", (1, 2)), Span(12_000, 20_000, "working", (1,))]
    by_state, by_try = sum_by_state(spans, Cumulated([]), power)
    assert {state: astuple(time) for state, time in by_state.items()} == {
        "start_up": (5.0, 0.0, None, None), "working": (15.0, 4.0, None, 400.0),
    }  # fmt: skip
    assert {number: astuple(time) for number, time in by_try.items()} == {
        1: (11.5, 3.0, None, 300.0), 2: (3.5, 1.0, None, 100.0),
    }  # fmt: skip
    some = StateTime(5.0, 4.0, None, 30.0)
    assert some.plus(StateTime(2.0, 1.0, 3.0, None), 0.5) == StateTime(6.0, 4.5, 1.5, 30.0)
    assert some.plus(StateTime(2.0, 9.0, 3.0, 20.0), -1.0) == StateTime(3.0, 0.0, None, 10.0), "never below 0"
    assert Cumulated([]).total is None


KEY = TaskKey("4821", 0, 0, "gpu1")
ALERT = {"kind": "thermal", "severity": "warning", "started_at_ms": START_MS + 2000, "peak": 90.0, "threshold": 83.0}


def publish_task(run, *, verdict=None, worker_died=False):
    """Publish ten seconds of a task: one chunk done in the second to the fourth, one begun in the fifth.

    One device is read every second, with a hole of 16 s at the end; a second one is never read.
    """
    with closing(LiveTask(run / "live", KEY, devices=2)) as live:
        writer, telemetry, on = live.wrapper, live.recorder, live.device_ids[0]
        writer.update_task(devices=2, workers=1)
        writer.fill([make_chunk("a"), make_chunk("b")], lambda rows: None)
        worker = writer.worker_started(device_id=on, pid=7, engine="demo", at_ms=START_MS + 1000)
        result = ChunkResult(make_chunk("a"), START_MS + 2000, START_MS + 4000, (), 30.0)
        writer.attempt_ended(result, status="done", try_number=1, worker_id=worker, device_id=on)
        begun = START_MS + 5000
        writer.attempt_started(make_chunk("b"), try_number=1, worker_id=worker, device_id=on, at_ms=begun)
        if worker_died:
            writer.worker_ended(worker, at_ms=START_MS + 8000, exit_code=-9)
        for at_ms, cores, memory, read in ((1000, None, 10, None), (2000, 1.0, 30, 10.0), (4000, 4.0, 20, 70.0)):
            writer.add_usage(UsageReading(cores, memory, read, 3, "pss"), START_MS + at_ms)
        for second in (*range(11), 27):
            reading = Reading(
                utilization_percent=min(100, 8 * second), power_w=100.0 + second, temperature_c=40 + second,
                busy_percent=None if second % 3 else min(100.0, 6.5 * second),
                throttle_reasons=0x41 if second % 2 else 0, memory_used_bytes=2**30 + second,
                energy_j=1000.0 + 90 * second if second % 5 == 0 else None,
            )  # fmt: skip
            telemetry.write_tick(START_MS + second * 1000, [(on, reading)], HostReading(5.0 * second, 2**30, 2**33))
        hotter = {"severity": "critical", "peak": 95.0, "ended_at_ms": START_MS + 3000, "message": "at 95 °C"}
        for more in ({"ended_at_ms": None, "message": "at 85 °C"}, hotter):
            telemetry.write_alert({**ALERT, "device_id": on, **more})
        target = run / "tasks" / f"{KEY.name}.sqlite"
        target.parent.mkdir(parents=True)
        store.publish(live.paths, target, closing={} if verdict is None else {"verdict": verdict})
    return target


def test_figures(tmp_path, pages):
    """All that is computed at a publication, of a task that runs."""
    path = publish_task(tmp_path)
    devices = [str(row[0]) for row in query(path, "SELECT device_id FROM device ORDER BY token")]
    numbers = {devices[0]: "device0", devices[1]: "device1", str(KEY.task_id): "task", str(START_MS)[:-5]: "T"}
    said = {}
    for table in store.DERIVED:
        text = some_rows(list(store.columns_of(table)), query(path, f"SELECT * FROM {table} ORDER BY 1, 2, 3"))
        for number, name in numbers.items():
            text = text.replace(number, name)
        said[f"{table}.txt"] = text
    pages(said)


STATES = {
    (None, False): {"start_up": 2.0, "working": 24.0, "waiting": 1.0},
    ("killed", False): {"start_up": 2.0, "working": 2.0, "waiting": 1.0, "lost": 22.0},
    (None, True): {"start_up": 2.0, "working": 2.0, "waiting": 1.0, "lost": 3.0, "idle": 19.0},
}


@pytest.mark.parametrize(("verdict", "worker_died"), STATES)
def test_what_was_begun_is_work_or_lost(tmp_path, verdict, worker_died):
    path = publish_task(tmp_path, verdict=verdict, worker_died=worker_died)
    times = "SELECT state, total_s FROM device_time JOIN device USING (device_id) WHERE device_index = 0"
    assert dict(query(path, times)) == STATES[verdict, worker_died]
    merge_run(tmp_path)
    job = store.read_job(tmp_path / "job.sqlite")
    device, blind = job.devices
    runs = verdict is None and not worker_died
    assert (device.work.done, device.work.lost, device.work.under_way) == (1, int(not runs), int(runs))
    assert (job.cost.tries, job.cost.gpu_s_mean, job.cost.energy_j_mean) == (1, 2.0, pytest.approx(206.0))
    assert device.throttled == {"gpu_idle": 6, "hw_thermal_slowdown": 6}
    assert (blind.energy_j, blind.energy_source, blind.samples, blind.work.done) == (None, None, 0, 0)
    (alert,) = job.alerts
    assert (alert.severity, alert.alerts, alert.peak, alert.example) == ("critical", 2, 95.0, "at 95 °C")
    assert (alert.longest_s, alert.still_open) == (25.0, int(verdict is None)), "as long as anybody looked"


def test_the_samples_of_twelve_hours_are_read_in_several_blocks_and_the_counter_may_begin_again(tmp_path):
    seconds, target = 40_001, tmp_path / "long.sqlite"  # two blocks and one sample
    with closing(LiveTask(tmp_path / "live", KEY)) as live:
        live.wrapper.update_task(devices=1, workers=1)
        with live.recorder.batch():
            for second in range(seconds):
                counted_j = 90.0 * (second % 30_000)
                reading = Reading(utilization_percent=second // 20_000, power_w=100.0, energy_j=counted_j)
                live.recorder.write_tick(START_MS + 1000 * second, [(live.device_ids[0], reading)], None)
        store.publish(live.paths, target)
    totals = "samples, (last_at_ms - first_at_ms) / 1000, energy_counter_j, energy_counter_span_s, energy_integrated_j"
    assert query(target, f"SELECT {totals} FROM device_total") == [(seconds, 40_000, 90.0 * 39_999, 40_000, 4_000_000)]
    assert query(target, "SELECT utilization_percent, samples FROM utilization_count") == [
        (0, 20_000),
        (1, 20_000),
        (2, 1),
    ]


def test_a_long_task_has_at_most_120_stretches_of_full_seconds(tmp_path):
    for seconds, many, width_s in ((1, 1, 1), (120, 120, 1), (1080, 120, 9), (1081, 109, 10)):
        path = TaskFile(tmp_path, index=seconds, samples=0, ended_at_ms=START_MS + seconds * 1000).write()
        found = query(path, "SELECT count(*), max(to_ms - from_ms), sum(to_ms - from_ms) FROM device_stretch")
        assert found == [(many, width_s * 1000, seconds * 1000)]
