"""The numbers of the report: time and energy by state, what is left, what it cost, and None for what nobody knows."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rooms.model import Reading
from rooms.report import Summary, finish_job, headlines, summarize
from rooms.root import SystemClock
from rooms.store import Completeness, CostFacts, JobFacts, MergeOrder, StateTime
from support.summaries import HOUR_MS, JOB, PROOF, START_MS, TASK, device
from support.task_files import TaskFile

STATES = ("working", "failed", "lost", "start_up", "waiting", "idle")


def assert_adds_up(summary: Summary) -> None:
    """Check that the states add up to the GPU time and to the energy within 1 %, for the job and for each device."""
    assert sum(state.gpu_hours for state in summary.states.values()) == pytest.approx(summary.gpu_hours, rel=0.01)
    energies = [state.energy_wh for state in summary.states.values() if state.energy_wh is not None]
    assert sum(energies) == pytest.approx(summary.energy_wh or 0.0, rel=0.01)
    for found in summary.devices:
        assert sum(found.state_energy_j.values()) == pytest.approx(found.energy_j or 0.0, rel=0.01)
    if summary.states:
        assert sum(state.share_percent or 0.0 for state in summary.states.values()) == pytest.approx(100.0)


# --- time and energy by state -----------------------------------------------------------------------------------------


def test_the_states_of_all_devices_add_up_to_the_gpu_time_and_to_the_energy_of_their_counters() -> None:
    summary = summarize(JOB)
    assert_adds_up(summary)
    assert summary.states["working"].gpu_hours == 1.5
    assert summary.states["working"].share_percent == 75.0
    # The readings of power say 630 of 720 kJ, the counter says that all of it was 734.4 kJ.
    assert summary.states["working"].energy_wh == pytest.approx(2 * 630_000 * 1.02 / 3600)
    assert summary.states["working"].energy_share_percent == pytest.approx(87.5)
    assert summary.states["idle"].busy_hours is None
    assert list(summary.states) == ["working", "failed", "start_up", "waiting", "idle"]


@settings(deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(STATES),
            st.tuples(st.floats(0, 1e6), st.one_of(st.none(), st.floats(0, 1e9))),
        ),
        max_size=4,
    ),
    st.one_of(st.none(), st.floats(0, 1e9)),
)
@example([{"working": (0.0, 5e-324)}], 0.5)
def test_the_energy_of_a_device_is_shared_out_whole_whatever_was_measured(
    found: list[dict[str, tuple[float, float | None]]], counter_j: float | None
) -> None:
    devices = tuple(
        replace(
            device(n),
            energy_counter_j=counter_j,
            energy_integrated_j=None,
            states={state: StateTime(total_s, total_s, None, joules) for state, (total_s, joules) in states.items()},
        )
        for n, states in enumerate(found)
    )
    wall_s = max((sum(total_s for total_s, _ in states.values()) for states in found), default=0.0)
    task = replace(TASK, devices=len(devices), last_sign_ms=START_MS + round(wall_s * 1000))
    summary = summarize(replace(JOB, tasks=(task,), devices=devices))
    energies = [state.energy_wh for state in summary.states.values() if state.energy_wh is not None]
    assert sum(energies) == pytest.approx(summary.energy_wh or 0.0)
    assert sum(state.gpu_hours for state in summary.states.values()) == pytest.approx(summary.gpu_hours, abs=1 / 1800)


def test_time_of_a_device_whose_rows_are_gone_is_not_known_instead_of_not_there() -> None:
    summary = summarize(replace(JOB, devices=(device(0),)))
    assert summary.states["unknown"].gpu_hours == pytest.approx(1.0)
    assert summary.states["unknown"].energy_wh is None
    assert_adds_up(summary)


def test_energy_that_no_reading_of_power_explains_is_in_no_state() -> None:
    dark = replace(device(), states={"working": StateTime(3600.0, 0.0, None, None)})
    summary = summarize(replace(JOB, tasks=(replace(TASK, devices=1),), devices=(dark,)))
    assert summary.states["working"].energy_wh is None
    assert summary.states["unknown"].energy_wh == pytest.approx(734_400 / 3600)
    assert_adds_up(summary)


def test_a_job_without_devices_has_no_states() -> None:
    summary = summarize(replace(JOB, tasks=(replace(TASK, devices=0),), devices=()))
    assert summary.states == {}
    assert (summary.kwh_per_1000_audio_hours, summary.devices_at_once) == (None, 0.0)


def test_published_files_add_up_as_well(tmp_path: Path) -> None:
    for index in range(3):
        TaskFile(
            tmp_path, index=index, states={f"a{index}": "done", f"b{index}": "failed"}, devices=2, samples=11,
            reading=Reading(utilization_percent=80, power_w=100.0 + index),
        ).write()  # fmt: skip
    summary = finish_job(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock()).summary
    assert_adds_up(summary)
    assert {"working", "idle"} <= set(summary.states)
    assert summary.devices[0].spark == (80.0,) * 10
    assert summary.devices[0].last["power_w"] == 100.0
    assert summary.chunk_s is not None
    assert (summary.chunk_s.p50, summary.chunk_s.samples) == (1.0, 3)


# --- per audio-hour, per chunk ----------------------------------------------------------------------------------------


def test_energy_per_audio_hour_is_that_of_all_devices_over_all_audio() -> None:
    assert summarize(JOB).kwh_per_1000_audio_hours == pytest.approx(2 * 734.4 / 3600 / 100 * 1000)


def test_where_a_device_keeps_silent_energy_per_audio_hour_is_that_of_the_others() -> None:
    silent = replace(device(1), energy_counter_j=None, energy_integrated_j=None)
    summary = summarize(replace(JOB, devices=(device(0), silent)))
    assert summary.kwh_per_1000_audio_hours == pytest.approx(734.4 / 3600 / 50 * 1000)
    idle = replace(device(0), work=replace(device(0).work, audio_s=0.0))
    assert summarize(replace(JOB, devices=(idle, silent))).kwh_per_1000_audio_hours is None


def test_the_joules_of_a_chunk_are_in_the_same_measure_as_those_of_the_states() -> None:
    cost = summarize(JOB).chunk_cost
    assert (cost.gpu_s_mean, cost.tries) == (54.0, 100)
    assert cost.energy_j_mean == pytest.approx(12_600 * 1.02)
    assert (cost.energy_j_mean or 0) * cost.tries == pytest.approx(
        (summarize(JOB).states["working"].energy_wh or 0) * 3600, rel=0.01
    )
    unknown = summarize(replace(JOB, cost=CostFacts(tries=3, gpu_s_mean=2.0))).chunk_cost
    assert (unknown.gpu_s_mean, unknown.energy_j_mean) == (2.0, None)


def test_how_long_tries_took_is_described_from_their_counts() -> None:
    took = summarize(JOB).chunk_s
    assert took is not None
    assert (took.samples, took.minimum, took.p50, took.p95, took.maximum) == (100, 50.0, 50.0, 60.0, 80.0)
    assert took.mean == pytest.approx((60 * 50 + 38 * 60 + 2 * 80) / 100)
    assert summarize(replace(JOB, durations={})).chunk_s is None


# --- what is left -----------------------------------------------------------------------------------------------------


def left(job: JobFacts, proof: Completeness | None = PROOF) -> str:
    return dict(headlines(summarize(job, (), proof)))["left"]


def test_what_is_left_counts_pending_chunks_and_those_in_no_task_at_the_speed_so_far() -> None:
    outlook = summarize(JOB, (), PROOF).outlook
    assert outlook is not None
    # 100 audio-hours in 2 GPU-hours; 40 hours are pending, and 60 rows in no task are an hour long on average.
    assert (outlook.chunks, outlook.audio_hours, outlook.gpu_hours) == (100, 100.0, pytest.approx(2.0))
    assert outlook.wall_s == pytest.approx(3600.0)  # by the two devices that are at work
    assert outlook.end_at_ms == START_MS + 2 * HOUR_MS
    assert "about 100.0 audio-hours and 2.0 GPU-hours; expected end: about 2027-01-15 10:00 UTC" in left(JOB)


def test_the_end_is_not_before_that_of_the_slowest_task_at_its_own_pace() -> None:
    quick, slow = replace(TASK, done=99, pending=0), replace(TASK, name="1_1.r0.gpu2", done=10, pending=30)
    outlook = summarize(replace(JOB, tasks=(quick, slow)), (), PROOF).outlook
    assert outlook is not None
    assert outlook.gpu_hours == pytest.approx(4.0)  # an hour for the four devices, if they could share it
    assert (outlook.wall_s, outlook.end_at_ms) == (pytest.approx(3 * 3600.0), START_MS + 4 * HOUR_MS)
    ended = (quick, replace(slow, verdict="stopped"))
    outlook = summarize(replace(JOB, tasks=ended), (), PROOF).outlook  # its part waits for whoever begins it again
    assert outlook is not None
    assert outlook.wall_s == pytest.approx(2 * 3600.0)


def test_where_no_task_is_running_there_is_a_duration_and_no_end() -> None:
    ended = replace(JOB, tasks=(replace(TASK, verdict="stopped"),))
    outlook = summarize(ended, (), PROOF).outlook
    assert outlook is not None
    assert (outlook.end_at_ms, outlook.wall_s) == (None, pytest.approx(3600.0))
    assert left(ended).endswith("about 1 h 00 min at the speed so far")


def test_no_end_is_told_that_has_passed_and_none_of_a_task_that_went_silent() -> None:
    last_ms = START_MS + HOUR_MS
    for heard_at_ms, now_ms, end_ms in (
        (last_ms, last_ms + 60_000, last_ms + HOUR_MS),
        (last_ms + HOUR_MS, last_ms + HOUR_MS, None),  # it runs on, later than anybody thought
        (last_ms, last_ms + 200_000, None),
    ):
        running = replace(TASK, heard_at_ms=heard_at_ms, silent_after_s=120.0)
        outlook = summarize(replace(JOB, tasks=(running,)), (), PROOF, now_ms=now_ms).outlook
        assert outlook is not None
        assert (outlook.end_at_ms, outlook.wall_s) == (end_ms, pytest.approx(3600.0))


def test_chunks_of_unknown_length_count_as_long_as_those_that_are_done() -> None:
    unknown = replace(JOB, audio_left_s=0.0, left_of_unknown_length=40)
    outlook = summarize(unknown, (), replace(PROOF, not_listed=0)).outlook
    assert outlook is not None
    assert outlook.audio_hours == pytest.approx(40.0)


def test_of_the_chunks_left_only_those_of_unknown_length_are_guessed() -> None:
    # 30 pending chunks are known to be two hours long; 10 and those in no task are an hour, as those that are done.
    partly = replace(JOB, audio_left_s=30 * 7200.0, left_of_unknown_length=10)
    outlook = summarize(partly, (), PROOF).outlook
    assert outlook is not None
    assert outlook.audio_hours == pytest.approx(60.0 + 10.0 + 60.0)
    # With nothing done yet, the others that are left say how long one is.
    fresh = replace(partly, chunks={"pending": 40}, audio_done_s=0.0)
    outlook = summarize(fresh, (), PROOF).outlook
    assert outlook is not None
    assert outlook.audio_hours == pytest.approx(60.0 + (10 + 60) * 2.0)


def test_before_anything_is_done_nobody_knows_how_long_the_rest_will_take() -> None:
    fresh = replace(JOB, tasks=(replace(TASK, done=0),), chunks={"pending": 40}, audio_done_s=0.0, audio_left_s=0.0)
    assert left(replace(fresh, left_of_unknown_length=40)) == "100 chunks; remaining time not known yet"
    listed = summarize(replace(fresh, audio_left_s=144_000.0), (), PROOF).outlook
    assert listed is not None
    assert (listed.audio_hours, listed.gpu_hours, listed.wall_s, listed.end_at_ms) == (100.0, None, None, None)


def test_where_the_source_is_not_known_only_listed_chunks_are_told() -> None:
    proof = replace(PROOF, expected=None, why_unknown="gone", not_listed=None, strangers=None)
    assert left(JOB, proof).startswith("40 chunks listed by tasks, about 40.0 audio-hours")


def test_a_job_that_is_done_has_nothing_left() -> None:
    done = replace(JOB, chunks={"done": 100})
    assert summarize(done, (), replace(PROOF, not_listed=0)).outlook is None


def test_a_job_on_the_cpu_has_no_gpu_hours_left_but_an_end() -> None:
    on_cpu = replace(JOB, tasks=(replace(TASK, devices=0),), devices=())
    outlook = summarize(on_cpu, (), PROOF).outlook
    assert outlook is not None
    assert (outlook.gpu_hours, outlook.wall_s) == (None, pytest.approx(3600.0))


# --- the document -----------------------------------------------------------------------------------------------------


def test_the_document_never_holds_what_json_does_not_have() -> None:
    odd = replace(device(), power_mean_w=math.nan, spark=(math.inf, 1.0), read_at_ms=None)
    odd = replace(odd, reading=Reading(power_w=-math.inf))
    document = summarize(replace(JOB, devices=(odd,))).to_dict()
    text = json.dumps(document, allow_nan=False)
    [found] = json.loads(text)["devices"]
    assert (found["power_mean_w"], found["spark"], found["last"]) == (None, [None, 1.0], {"power_w": None})


def test_everything_of_version_1_is_still_in_the_document() -> None:
    document = summarize(JOB, (), PROOF).to_dict()
    first = {
        "version", "verdict", "tasks", "tasks_by_verdict", "tasks_missing", "tasks_without_telemetry", "chunks", "done",
        "failed", "left", "skipped", "tries", "conflicts", "audio_hours", "chunks_of_unknown_length", "wall_s",
        "gpu_hours", "audio_hours_per_gpu_hour", "times_real_time", "energy_wh", "energy_devices", "detections",
        "task_list", "devices", "gaps", "labels", "failed_chunks", "file_remarks", "lossy_files", "completeness",
    }  # fmt: skip
    assert first <= set(document)
    assert document["version"] == 2
