"""Plans from numbers: shares of equal length, tasks that end in time, waves under a site's caps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rooms.model import NO_CUTTING
from rooms.planning import (
    CampaignPlan,
    LeftOut,
    Lengths,
    PlanWish,
    Site,
    Speed,
    Survey,
    at_length,
    check_wish,
    make_margin,
    make_plan,
    round_up,
    share_out,
    size_tasks,
    speed_of,
    to_dict,
)
from rooms.root import BadInput, PlanSettings, SubmitSettings
from rooms.sources import Surveyor, read_header
from rooms.store import JobFacts, StateTime, TaskFacts
from support.summaries import TASK, device

HOUR_S = 3600
SPEED = Speed(400.0, "as --rate says")
SOCKEYE = Site(
    "sockeye", array_tasks=10_000, queued_jobs=10_000, gpu_hours=2_400, time_h=168, files=10_000_000,
    node_gpus=4, node_cpus=24, node_memory_gb=180, plan_time_h=24, bill_rule="max", bill_gpu=6, bill_cpu=1,
)  # fmt: skip
ANYWHERE = Site("")
some_lengths = st.lists(st.one_of(st.none(), st.integers(0, 10**6), st.just(30_000)), min_size=1, max_size=200)


def lengths_of(many: Sequence[int | None]) -> Lengths:
    lengths = Lengths()
    for length_ms in many:
        lengths.add(length_ms)
    return lengths


def empty_survey(rows: int = 0, sources: int = 0) -> Survey:
    """Return the survey of a source of which so much is left out."""
    left_out = LeftOut(())
    left_out.rows, left_out.whole = rows, set(range(sources))
    return Survey(Surveyor(left_out, NO_CUTTING, read_header), left_out)


def survey_of(*runs: tuple[int | None, int]) -> Survey:
    """Return the survey of chunks, given as length in milliseconds and how many of it."""
    survey = empty_survey()
    for length_ms, many in runs:
        for _ in range(many):
            survey.add(length_ms, f"r{survey.lengths.rows}.wav", f"c{survey.lengths.rows}")
    return survey


def plan_of(survey: Survey, speed: Speed = SPEED, site: Site = SOCKEYE, **wish: Any) -> CampaignPlan:
    return make_plan(survey, speed, PlanWish(**wish), site)


# --- shares -----------------------------------------------------------------------------------------------------------


@given(some_lengths, st.integers(1, 250))
def test_shares_are_complete_never_empty_and_as_long_as_each_other_to_within_one_chunk(
    many: list[int | None], tasks: int
) -> None:
    lengths = lengths_of(many)
    shares = share_out(lengths, tasks)
    assert len(shares) == min(tasks, len(many))
    assert sum(share.rows for share in shares) == len(many)
    assert min(share.rows for share in shares) >= 1
    assert sum(share.audio_ms for share in shares) == lengths.total_ms
    assert max(share.audio_ms for share in shares) <= lengths.total_ms / len(shares) + lengths.longest_ms


def test_shares_are_balanced_by_length_and_not_by_number() -> None:
    lengths = lengths_of([1_000] * 900 + [9_000] * 100)
    shares = share_out(lengths, 2)
    assert [share.audio_ms for share in shares] == [900_000, 900_000]
    assert [share.rows for share in shares] == [900, 100]


def test_one_very_long_chunk_leaves_the_tasks_behind_it_their_equal_part() -> None:
    shares = share_out(lengths_of([10] * 10 + [100_000] + [10] * 300), 4)
    assert [share.rows for share in shares] == [10, 1, 150, 150]


def test_a_length_that_nobody_knows_counts_as_the_mean_of_the_others() -> None:
    lengths = lengths_of([10_000, None, 20_000])
    assert (lengths.mean_ms, lengths.total_ms, lengths.unknown) == (15_000, 45_000, 1)
    assert list(lengths.runs()) == [(10_000, 1), (15_000, 1), (20_000, 1)]


# --- tasks that end in time -------------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.integers(1_000, 3 * 3_600_000), min_size=1, max_size=150),
    st.floats(0.5, 2000),
    st.integers(1, 4),
    st.integers(20 * 60, 168 * HOUR_S),
)
def test_even_a_task_as_slow_as_the_margin_ends_inside_its_time(
    many: list[int], rate: float, gpus: int, time_s: int
) -> None:
    lengths, wish = lengths_of(many), PlanWish(time_s=time_s, gpus_per_task=gpus)
    speed = replace(SPEED, audio_hours_per_gpu_hour=rate)
    margin = make_margin(speed, None)
    sizing = size_tasks(lengths, speed, margin, wish, ANYWHERE)
    for share in sizing.shares:
        if share.rows > 1:
            slow_s = margin.start_up_s + margin.factor * share.audio_ms / 1000 / rate / gpus
            assert slow_s <= time_s - margin.end_s + 1


def test_no_more_tasks_are_made_than_the_time_limit_wants() -> None:
    hours = int(400 * (24 * HOUR_S - 600) / 1.5 / HOUR_S)  # start-up, end and margin are kept back
    assert plan_of(survey_of((3_600_000, hours)), site=ANYWHERE, time_s=24 * HOUR_S).tasks == 1
    assert plan_of(survey_of((3_600_000, hours + 1)), site=ANYWHERE, time_s=24 * HOUR_S).tasks == 2


def test_a_time_limit_that_nobody_gave_is_what_the_fullest_task_needs() -> None:
    plan = plan_of(survey_of((30_000, 480)), site=ANYWHERE)  # 4 hours of audio: 36 s of work
    assert (plan.tasks, plan.sizing.time_s, plan.sizing.chosen) == (1, 15 * 60, True)
    assert round_up(3 * HOUR_S + 1) == 3.5 * HOUR_S


@settings(max_examples=60)
@given(st.integers(20 * 60, 30 * HOUR_S), st.integers(1, 3_000), st.sampled_from(["time_h", "plan_time_h"]))
def test_a_time_limit_that_is_rounded_up_stays_within_the_one_of_the_site(cap_s: int, chunks: int, cap: str) -> None:
    plan = plan_of(
        survey_of((600_000, chunks)), replace(SPEED, audio_hours_per_gpu_hour=40.0), Site("", **{cap: cap_s / HOUR_S})
    )
    assert plan.sizing.time_s <= cap_s


def test_a_time_limit_is_rounded_to_half_hours_only_from_three_hours_on() -> None:
    assert [round_up(seconds) for seconds in (1, 300, 300.5, 3 * HOUR_S - 1)] == [300, 300, 600, 3 * HOUR_S]
    assert [round_up(3 * HOUR_S + seconds) / HOUR_S for seconds in (1, 1800, 1801)] == [3.5, 3.5, 4]


def test_a_walltime_shorter_than_the_start_up_is_refused_with_one_that_would_do() -> None:
    with pytest.raises(BadInput) as refused:
        plan_of(survey_of((30_000, 10)), time_s=540)
    assert "9 min leaves no time for work" in refused.value.what
    assert "start-up takes 300 s (assumed" in (refused.value.why or "")
    assert refused.value.fix == "--time 0:40:00"


def test_a_chunk_that_no_task_could_finish_is_named_and_still_planned() -> None:
    survey = survey_of((30_000, 100), (90 * 3_600_000, 1))
    plan = plan_of(survey, replace(SPEED, audio_hours_per_gpu_hour=2.0), time_s=24 * HOUR_S)
    (remark,) = (one for one in plan.remarks if one.subject == "long chunks")
    assert remark.severity == "problem"
    assert remark.text.startswith("1 chunk longer than the 31.78 hours")
    assert remark.details == ("c100 in r100.wav (90.00 hours)",)
    assert remark.fix == "-- --chunk-length 3600   (whole recordings are cut on the fly), or --time 68:00:00"
    assert sum(share.rows for share in plan.sizing.shares) == 101


def test_what_is_advised_against_long_chunks_helps() -> None:
    slow = replace(SPEED, audio_hours_per_gpu_hour=0.05)
    survey = survey_of((300_000, 10))
    survey.rows_alone = True  # --chunk-length would change nothing
    (remark,) = plan_of(survey, slow, ANYWHERE, time_s=HOUR_S).remarks
    assert remark.text.startswith("10 chunks longer than the 100 s of audio")
    assert (remark.fix or "").startswith("--time 2:40:00, or a faster GPU")
    assert (remark.fix or "").endswith("whole recordings instead of this manifest, with -- --chunk-length 100")
    assert plan_of(survey, slow, ANYWHERE, time_s=2 * HOUR_S + 40 * 60).remarks == ()
    (remark,) = plan_of(survey, slow, Site("", time_h=2), time_s=HOUR_S).remarks
    assert "--time" not in (remark.fix or "")
    assert plan_of(survey_of((100_000, 10)), slow, ANYWHERE, time_s=HOUR_S).remarks == ()


def test_more_tasks_are_made_where_there_are_gpus_for_them_and_each_is_worth_its_start_up() -> None:
    survey = survey_of((3_600_000, 4000))  # 10 GPU-hours
    assert plan_of(survey, site=ANYWHERE).tasks == 2
    assert plan_of(survey, site=ANYWHERE, parallel=8).tasks == 8
    assert plan_of(survey, site=ANYWHERE, parallel=800).tasks == 12  # 50 min each, ten times the start-up


# --- waves and the end ------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 400),
    st.one_of(st.none(), st.integers(1, 150)),
    st.one_of(st.none(), st.integers(2, 150)),
    st.one_of(st.none(), st.integers(12, 2_000)),
)
def test_every_task_is_in_exactly_one_wave_and_every_wave_fits_the_caps(
    tasks: int, array_tasks: int | None, queued_jobs: int | None, gpu_hours: int | None
) -> None:
    site = Site("x", array_tasks=array_tasks, queued_jobs=queued_jobs, gpu_hours=gpu_hours)
    one_chunk_per_task = replace(SPEED, audio_hours_per_gpu_hour=0.2)
    plan = plan_of(survey_of((3_600_000, tasks)), one_chunk_per_task, site, time_s=12 * HOUR_S)
    waves = plan.waves
    assert plan.tasks == tasks
    assert [task for wave in waves for task in range(wave.first, wave.first + wave.tasks)] == list(range(tasks))
    assert [wave.number for wave in waves] == list(range(1, len(waves) + 1))
    assert sum(wave.rows for wave in waves) == tasks
    assert sum(wave.audio_ms for wave in waves) == tasks * 3_600_000
    sizes = [wave.tasks for wave in waves]
    assert max(sizes) - min(sizes) <= 1
    most = min(array_tasks or 1_000, (queued_jobs or 10_000) - 1, (gpu_hours or 100_000) // 12)  # a merge job is queued
    assert max(sizes) <= most
    assert len(waves) == -(-tasks // most), "no more waves than needed"


def test_the_merge_job_of_a_wave_counts_in_the_queue_limit() -> None:
    plan = plan_of(
        survey_of((3_600_000, 10)), replace(SPEED, audio_hours_per_gpu_hour=0.2), Site("x", queued_jobs=10),
        time_s=12 * HOUR_S,
    )  # fmt: skip
    assert [wave.tasks for wave in plan.waves] == [5, 5], "10 tasks and a merge job are 11 jobs"


def test_waves_stay_under_the_cap_on_gpu_hours_and_are_equally_large() -> None:
    plan = plan_of(survey_of((36_000_000, 10_000)), replace(SPEED, audio_hours_per_gpu_hour=10.0), time_s=24 * HOUR_S)
    waves = plan.waves
    assert plan.tasks == 168  # 10,000 GPU-hours of work, 60 in each task: its last hour may be for one GPU alone
    assert [wave.tasks for wave in waves] == [24] * 7
    assert all(wave.tasks * 4 * 24 <= 2_400 for wave in waves)
    assert [wave.first for wave in waves] == [0, 24, 48, 72, 96, 120, 144]
    assert sum(wave.rows for wave in waves) == 10_000
    assert "2,400 GPU-hours" in plan.waves_why


@pytest.mark.parametrize(
    ("site", "waves", "why"),
    [
        (ANYWHERE, 3, "the default limit of Slurm"),
        (Site("x", array_tasks=2_000), 2, "arrays of 2,000"),
        (Site("x", array_tasks=5_000, queued_jobs=801), 4, "queues 801 jobs"),
    ],
)
def test_waves_stay_under_the_limits_of_arrays_and_queues(site: Site, waves: int, why: str) -> None:
    survey = survey_of((3_600_000, 2_500))
    plan = plan_of(survey, replace(SPEED, audio_hours_per_gpu_hour=0.2), site, time_s=12 * HOUR_S)
    assert (plan.tasks, len(plan.waves)) == (2_500, waves)
    assert why in plan.waves_why


def test_the_end_is_reckoned_with_the_gpus_there_are_at_a_time_or_not_at_all() -> None:
    survey, slow = survey_of((3_600_000, 1_000)), replace(SPEED, audio_hours_per_gpu_hour=10.0)
    alone = plan_of(survey, slow, ANYWHERE, time_s=12 * HOUR_S)
    assert alone.running_s is None
    plan = plan_of(survey, slow, ANYWHERE, time_s=12 * HOUR_S, parallel=5)
    assert plan.tasks == 13
    rounds, task_s = 3, 300 + 77 * 360
    assert plan.running_s == pytest.approx(rounds * task_s)
    assert plan.parallel == 5
    assert plan_of(survey, slow, time_s=12 * HOUR_S).gpus == 16  # all four tasks of the one wave


def test_a_site_file_may_say_how_many_gpus_one_gets() -> None:
    plan = plan_of(survey_of((3_600_000, 100)), site=replace(SOCKEYE, plan_gpus=40))
    assert plan.gpus == 40
    assert "site file of sockeye" in plan.gpus_why


# --- what a job has measured ------------------------------------------------------------------------------------------


def job_of(*tasks: TaskFacts, start_up_s: float = 300.0) -> JobFacts:
    devices = [
        replace(device(n, task.name), states={"start_up": StateTime(start_up_s, 0.0, None, None)})
        for task in tasks
        for n in range(task.devices)
    ]
    audio_s = sum(task.audio_s for task in tasks)
    return JobFacts(tuple(tasks), tuple(devices), {"done": 1}, audio_s, 0, 1, (), (), (), ())


def task_of(number: int, audio_s: float, **changes: Any) -> TaskFacts:
    return replace(TASK, name=f"4821_{number}.r0.gpu1", array_index=number, audio_s=audio_s, verdict="done", **changes)


def test_the_speed_of_a_job_is_what_its_gpus_did_once_they_worked() -> None:
    speed = speed_of(job_of(task_of(0, 660_000.0), task_of(1, 660_000.0)), "runs/first")
    assert speed.audio_hours_per_gpu_hour == pytest.approx(100.0)  # an hour of two devices, less 300 s of start-up
    assert (speed.start_up_s, speed.slowness, speed.tasks) == (300.0, 1.0, 2)
    assert speed.gpu_hours == pytest.approx(2 * 6600 / 3600)
    assert speed.devices == ("4 × Tesla V100-SXM2-16GB",)
    assert speed.origin == "measured in runs/first"


def test_the_slowest_twentieth_decides_how_slow_a_task_may_be() -> None:
    tasks = [task_of(n, 660_000.0) for n in range(39)]
    one = speed_of(job_of(*tasks, task_of(39, 66_000.0)), "x")
    assert one.slowness == pytest.approx(1.0, abs=0.03)  # one of forty may be a broken node
    two = speed_of(job_of(*tasks[:38], task_of(38, 330_000.0), task_of(39, 330_000.0)), "x")
    assert two.slowness == pytest.approx(1.95, abs=0.01)
    assert make_margin(two, None).factor == two.slowness
    assert make_margin(one, None).factor == 1.25
    assert make_margin(two, 3.0).factor == 3.0
    assert make_margin(SPEED, None).factor == 1.5


def test_a_job_without_gpus_or_without_results_says_nothing_about_speed() -> None:
    with pytest.raises(ValueError, match="none of its tasks had a GPU"):
        speed_of(job_of(task_of(0, 100.0, devices=0)), "x")
    with pytest.raises(ValueError, match="nothing is done"):
        speed_of(job_of(task_of(0, 0.0)), "x")


def test_memory_and_cores_are_those_that_were_measured_for_as_many_gpus() -> None:
    measured = task_of(0, 660_000.0, memory_peak_bytes=10 * 2**30, cpu_mean_cores=6.0)
    speed = speed_of(job_of(measured), "x")
    asking = plan_of(survey_of((30_000, 10)), speed, ANYWHERE, gpus_per_task=4).asking
    assert (asking.mem_gb, asking.cpus) == (25, 17)  # 1.2 × 5 GiB × 4 + 1, and 1.3 × 3 × 4 + 1
    assert "measured" in asking.mem_why
    assert "measured" in asking.cpus_why


def test_without_a_measurement_they_are_what_submit_asks_for_and_that_is_said() -> None:
    asking = plan_of(survey_of((30_000, 10)), site=ANYWHERE, gpus_per_task=2).asking
    assert (asking.mem_gb, asking.cpus) == (8, 4)
    assert "the default of submit: not measured" in asking.mem_why
    assert "the default of submit: not measured" in asking.cpus_why


def test_cores_that_cost_nothing_beside_the_gpus_are_taken_and_a_node_is_never_exceeded() -> None:
    assert plan_of(survey_of((30_000, 10))).asking.cpus == 24
    greedy = replace(SPEED, memory_bytes_per_gpu=100 * 2**30, cores_per_gpu=30.0)
    asking = plan_of(survey_of((30_000, 10)), greedy).asking
    assert (asking.cpus, asking.mem_gb) == (24, 180)
    assert "all of a node (481 GB would be requested" in asking.mem_why


# --- wrong input ------------------------------------------------------------------------------------------------------


def test_impossible_wishes_are_refused_all_at_once() -> None:
    wish = PlanWish(time_s=200 * HOUR_S, gpus_per_task=8, cpus=30, mem_gb=500)
    with pytest.raises(BadInput) as refused:
        check_wish(wish, SOCKEYE)
    why = refused.value.why or ""
    for word in ("--time asks for 200 h", "8 GPUs, but a node", "30 cores, but a node", "500 GB, but a node"):
        assert word in why
    assert refused.value.fix == "--time 168:00:00 --gpus-per-task 4 --config submit.cpus=24 --config submit.mem=180G"


def test_tasks_without_a_gpu_and_times_and_sizes_that_are_none_are_refused() -> None:
    with pytest.raises(BadInput, match="only tasks with GPUs can be planned"):
        check_wish(PlanWish(gpus_per_task=0), ANYWHERE)
    for submit, words in ((SubmitSettings(time="0"), "0"), (SubmitSettings(mem="much"), "--mem=much")):
        with pytest.raises(BadInput) as refused:
            PlanWish.of(submit, PlanSettings())
        assert words in (refused.value.why or "")


def test_one_task_that_is_larger_than_the_cap_is_refused_with_the_time_that_fits() -> None:
    with pytest.raises(BadInput) as refused:
        check_wish(PlanWish(time_s=30 * HOUR_S), replace(SOCKEYE, gpu_hours=100.0))
    assert "one task of 4 GPUs × 30 h is 120 GPU-hours, but sockeye allows 100" in refused.value.what
    assert refused.value.fix == "--time 25:00:00"


@pytest.mark.parametrize(
    ("survey", "words"),
    [
        (survey_of((None, 2)), "the length of the audio is not known: 2 files without a length"),
        (survey_of((0, 3)), "there is no audio in the source: its 3 chunks have none"),
        (empty_survey(4), "nothing to plan: 4 rows cannot be used"),
        (empty_survey(1, 2), "nothing to plan: 1 row and 2 whole sources cannot be used"),
    ],
)
def test_a_source_without_any_length_cannot_be_planned(survey: Survey, words: str) -> None:
    with pytest.raises(BadInput) as refused:
        plan_of(survey)
    assert words in refused.value.what


def test_what_is_odd_about_a_source_is_said_with_examples() -> None:
    survey = survey_of((30_000, 5), (None, 23), (0, 1))
    survey.walk.rates_hz.update({48_000: 3, 44_100: 7})
    said = {remark.subject: remark for remark in plan_of(survey).remarks}
    assert said["unknown length"].details == (*(f"r{number}.wav" for number in range(5, 25)), "… and 3 more")
    assert "planned with the mean of the others, 30.0 s" in said["unknown length"].text
    assert said["empty"].details == ("r28.wav",)
    assert "planned with 0 s" in said["empty"].text
    assert "7 files with 44,100 Hz, 3 files with 48,000 Hz" in said["sample rates"].text
    assert {remark.severity for remark in said.values()} == {"note"}


def test_more_files_than_the_quota_are_a_problem_and_a_campaign_on_a_short_measurement_a_note() -> None:
    slow = Speed(0.2, "x", tasks=1, gpu_hours=0.01)
    plan = plan_of(survey_of((3_600_000, 100)), slow, replace(SOCKEYE, files=100), gpus_per_task=1)
    said = {remark.subject: remark for remark in plan.remarks}
    assert said["files"].severity == "problem"
    assert "run one task of this plan first" in said["speed"].text


CURVE = ((30.0, 100.0), (60.0, 150.0), (240.0, 250.0))


@pytest.mark.parametrize(
    ("length_s", "rate", "how"),
    [
        (60, 150.0, "(tried)"),
        (120, 200.0, "between trials of 60 and 240 s"),  # half-way in the logarithm
        (900, 250.0, "no faster than the longest trial, of 240 s"),
        (10, 10 / (0.2 + 10 / 300), "shorter than any trial: estimated with 0.2 s for each chunk"),  # 30 s take 0.3 s
    ],
)
def test_the_speed_of_a_probe_is_that_of_chunks_as_long_as_planned(length_s: int, rate: float, how: str) -> None:
    plan = plan_of(survey_of((length_s * 1000, 5000)), Speed(250.0, "as a probe has found", curve=CURVE))
    assert plan.speed.audio_hours_per_gpu_hour == pytest.approx(rate)
    assert plan.work_gpu_hours == pytest.approx(length_s * 5000 / 3600 / rate)
    assert f"for chunks of {length_s} s" in plan.speed.origin
    assert how in plan.speed.origin
    assert [remark.subject for remark in plan.remarks] == (["speed"] if length_s < 30 else [])


def test_of_one_trial_all_the_time_may_be_the_cost_of_a_chunk_and_shorter_ones_are_never_faster() -> None:
    assert at_length(Speed(400.0, "x", curve=((300.0, 400.0),)), 30).audio_hours_per_gpu_hour == pytest.approx(40)
    falling = Speed(100.0, "x", curve=((60.0, 100.0), (120.0, 50.0)))
    assert at_length(falling, 6).audio_hours_per_gpu_hour == 100.0


@pytest.mark.parametrize(
    ("length_s", "rate", "how"),
    [
        (40, 80.0, "longer than is safe, so with one thread: tried"),
        (500, 90.0, "longer than is safe, so with one thread in pieces of 60 s: tried"),
    ],
)
def test_chunks_longer_than_is_safe_get_the_speed_of_one_thread_and_the_length_that_is(
    length_s: int, rate: float, how: str
) -> None:
    speed = Speed(150.0, "as a probe has found", devices=("Tesla V100",), curve=((15.0, 50.0), (60.0, 150.0)),
                  lean_curve=((40.0, 80.0), (60.0, 90.0)), safe_s=18.0, lean_safe_s=60.0, best_s=17.0)  # fmt: skip
    assert plan_of(survey_of((18_000, 50)), speed).remarks == ()
    plan = plan_of(survey_of((length_s * 1000, 50)), speed)
    assert plan.speed.audio_hours_per_gpu_hour == pytest.approx(rate)
    assert how in plan.speed.origin
    (remark,) = plan.remarks
    assert (remark.severity, remark.subject) == ("note", "chunk length")
    assert "50 of 50 chunks are longer than the 18 s that are safe on Tesla V100" in remark.text
    assert "longer than 60 s in pieces" in remark.text
    assert remark.fix is not None and remark.fix.startswith("-- --chunk-length 15 ")  # its last chunk may have 3 s more
    assert len(remark.details) == 3


@pytest.mark.parametrize(("measured_s", "said"), [(170.0, True), (30.0, False), (None, False)])
def test_a_speed_that_was_measured_with_other_chunks_is_a_note(measured_s: float | None, said: bool) -> None:
    plan = plan_of(survey_of((20_000, 100)), Speed(400.0, "measured in runs/first", chunk_s=measured_s))
    assert [remark.subject for remark in plan.remarks] == (["speed"] if said else [])
    assert all("with chunks of 170 s on average, and those of this plan have 20 s" in one.text for one in plan.remarks)


def test_the_document_is_json_and_the_same_every_time() -> None:
    import json

    first, second = (json.dumps(to_dict(plan_of(survey_of((30_000, 1000), (None, 3))))) for _ in range(2))
    assert first == second
    document = json.loads(first)
    assert document["source"]["chunks"] == 1003
    assert document["audio_hours"] == pytest.approx(1003 * 30 / 3600, abs=1e-6)
    assert document["gpu_hours"] == pytest.approx(1003 * 30 / 3600 / 400, abs=1e-6)
