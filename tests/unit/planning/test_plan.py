"""Plans from numbers: shares of equal length, tasks that end in time, waves under a site's caps, and remarks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
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
    Planned,
    PlanWish,
    Site,
    Speed,
    Survey,
    at_length,
    check_wish,
    make_margin,
    make_plan,
    plan_text,
    round_up,
    share_out,
    speed_of,
    to_dict,
)
from rooms.root import BadInput, PlanSettings, SubmitSettings
from rooms.sources import Surveyor, read_header
from rooms.store import JobFacts, StateTime, TaskFacts
from support.pages import Pages
from support.summaries import TASK, device

HOUR_S, HOUR_MS = 3600, 3_600_000
SPEED = Speed(400.0, "from --rate")
SLOW = replace(SPEED, audio_hours_per_gpu_hour=0.2)
SOCKEYE = Site(
    "sockeye", array_tasks=10_000, queued_jobs=10_000, gpu_hours=2_400, time_h=168, files=10_000_000,
    node_gpus=4, node_cpus=24, node_memory_gb=180, plan_time_h=24, bill_rule="max", bill_gpu=6, bill_cpu=1,
)  # fmt: skip
ANYWHERE = Site("")
Runs = Sequence[tuple[int | None, int]]  # length in milliseconds, and how many of it


def survey_of(*runs: tuple[int | None, int], rows: int = 0, sources: int = 0, rows_alone: bool = False) -> Survey:
    left_out = LeftOut(())
    left_out.rows, left_out.whole = rows, set(range(sources))
    survey = Survey(Surveyor(left_out, NO_CUTTING, read_header), left_out, rows_alone=rows_alone)
    for length_ms, many in runs:
        for _ in range(many):
            survey.add(length_ms, f"r{survey.lengths.rows}.wav", f"c{survey.lengths.rows}")
    return survey


def plan_of(survey: Survey | Runs, speed: Speed = SPEED, site: Site = SOCKEYE, **wish: Any) -> CampaignPlan:
    found = survey if isinstance(survey, Survey) else survey_of(*survey)
    return make_plan(found, speed, PlanWish(**wish), site)


# --- for every source, speed and site ---------------------------------------------------------------------------------


@given(
    st.lists(st.one_of(st.none(), st.integers(0, 10**6), st.just(30_000)), min_size=1, max_size=120),
    st.integers(1, 150),
)
def test_shares_are_complete_never_empty_and_as_long_as_each_other_to_within_one_chunk(
    many: list[int | None], tasks: int
) -> None:
    lengths = Lengths()
    for length_ms in many:
        lengths.add(length_ms)
    known = [length_ms for length_ms in many if length_ms]
    mean_ms = sum(known) // len(known) if known else 0
    whole = [mean_ms if length_ms is None else length_ms for length_ms in many]
    assert [one for length_ms, times in lengths.runs() for one in [length_ms] * times] == whole
    assert (lengths.total_ms, lengths.mean_ms, lengths.longest_ms) == (sum(whole), mean_ms, max([*known, 0]))
    assert [lengths.longer_than(limit) for limit in (0, 30_000)] == [
        sum(one > limit for one in whole) for limit in (0, 30_000)
    ]
    shares = share_out(lengths, tasks)
    assert len(shares) == min(tasks, len(many))
    first = 0
    for share in shares:
        assert share.rows >= 1
        assert share.audio_ms == sum(whole[first : first + share.rows])
        first += share.rows
    assert first == len(many)
    assert max(share.audio_ms for share in shares) <= lengths.total_ms / len(shares) + max(whole)


caps = st.one_of(st.none(), st.integers(1, 150))


@settings(max_examples=150)
@given(
    many=st.lists(st.integers(1_000, 3 * HOUR_MS), min_size=1, max_size=120),
    rate=st.floats(0.5, 500),
    wish=st.builds(
        PlanWish,
        time_s=st.one_of(st.none(), st.integers(20, 168 * 60).map(lambda minutes: 60 * minutes)),
        gpus_per_task=st.one_of(st.none(), st.integers(1, 4)),
        parallel=st.one_of(st.none(), st.integers(1, 20)),
        margin=st.one_of(st.none(), st.floats(1, 3)),
    ),
    site=st.builds(
        Site, st.just("x"), array_tasks=caps, queued_jobs=st.one_of(st.none(), st.integers(2, 150)),
        gpu_hours=st.one_of(st.none(), st.integers(700, 2_000)), time_h=st.one_of(st.none(), st.floats(0.4, 168)),
        plan_time_h=st.one_of(st.none(), st.floats(0.4, 168)), node_gpus=st.one_of(st.none(), st.just(4)),
        plan_gpus=st.one_of(st.none(), st.integers(1, 40)),
    ),
)  # fmt: skip
def test_every_plan_covers_all_audio_once_within_the_limits_and_every_task_ends_in_time(
    many: list[int], rate: float, wish: PlanWish, site: Site
) -> None:
    try:
        check_wish(wish, site)
    except BadInput:
        return
    plan = make_plan(survey_of(*((length_ms, 1) for length_ms in many)), Speed(rate, "x"), wish, site)
    sizing, margin, waves = plan.sizing, plan.margin, plan.waves
    # all audio, in order, once
    assert [task for wave in waves for task in range(wave.first, wave.first + wave.tasks)] == list(range(plan.tasks))
    assert [wave.number for wave in waves] == list(range(1, len(waves) + 1))
    assert sum(share.rows for share in sizing.shares) == sum(wave.rows for wave in waves) == len(many)
    assert sum(share.audio_ms for share in sizing.shares) == sum(wave.audio_ms for wave in waves) == sum(many)
    # within the limits: the merge job of a wave is queued, too
    sizes, task_hours = [wave.tasks for wave in waves], sizing.gpus * sizing.time_s / HOUR_S
    most = min(
        site.array_tasks or 1000, (site.queued_jobs or 10**9) - 1, int((site.gpu_hours or 10**9) / task_hours + 1e-9)
    )
    assert max(sizes) <= most and len(waves) == -(-plan.tasks // most) and max(sizes) - min(sizes) <= 1
    longest_s = wish.time_s or min(
        HOUR_S * (site.plan_time_h or 10**9), HOUR_S * (site.time_h or 12) if site.plan_time_h is None else 10**9
    )
    assert sizing.time_s <= longest_s
    assert sizing.time_s == wish.time_s or sizing.time_s == int(longest_s) or sizing.time_s % 300 == 0
    assert sizing.gpus == wish.gpus_per_task or sizing.gpus == (site.node_gpus or 1)
    # in time, however slow within the margin, even with the longest chunk last; fewer tasks would not do
    needs_s = [
        margin.start_up_s + margin.factor * share.audio_ms / 1000 / rate / sizing.gpus for share in sizing.shares
    ]
    assert all(
        s <= sizing.time_s - margin.end_s + 1 for s, share in zip(needs_s, sizing.shares, strict=True) if share.rows > 1
    )
    longest_chunk_s = margin.work_s(wish.longest_s(site)) * rate
    assert sizing.longest_chunk_s == pytest.approx(longest_chunk_s)
    assert any(one.subject == "long chunks" for one in plan.remarks) == (max(many) > longest_chunk_s * 1000)
    if wish.parallel is not None:
        assert plan.gpus == wish.parallel * sizing.gpus
        rounds = [-(-size // wish.parallel) for size in sizes]
        fullest = [max(one.audio_ms for one in sizing.shares[w.first : w.first + w.tasks]) for w in waves]
        running = [n * (300 + ms / 1000 / rate / sizing.gpus) for n, ms in zip(rounds, fullest, strict=True)]
        assert plan.running_s == pytest.approx(sum(running))
    assert json.loads(json.dumps(to_dict(plan)))["tasks"]["count"] == plan.tasks


def test_shares_are_balanced_by_length_and_one_very_long_chunk_leaves_the_others_their_part() -> None:
    for runs, tasks, rows in (
        ([(1_000, 900), (9_000, 100)], 2, [900, 100]), ([(10, 10), (100_000, 1), (10, 300)], 4, [10, 1, 150, 150]),
        ([(10, 7)], 3, [2, 3, 2]), ([(100_000, 2), (10, 10)], 4, [1, 1, 5, 5]), ([(0, 5), (10, 2)], 2, [6, 1]),
            ([(2**33, 1), (10, 3)], 2, [1, 3]),
    ):  # fmt: skip
        assert [share.rows for share in share_out(survey_of(*runs).lengths, tasks)] == rows


def test_times_are_rounded_up_to_five_minutes_and_from_three_hours_on_to_half_hours() -> None:
    seconds = {
        1: 300,
        300: 300,
        300.5: 600,
        10_799: 10_800,
        10_800: 10_800,
        10_801: 12_600,
        12_600: 12_600,
        12_601: 14_400,
    }
    assert {one: round_up(one) for one in seconds} == seconds


# --- plans ------------------------------------------------------------------------------------------------------------


def rates() -> Survey:
    survey = survey_of((30_000, 5), (None, 23), (0, 1))
    survey.walk.rates_hz.update({48_000: 3, 44_100: 7})
    return survey


CURVE = ((30.0, 100.0), (60.0, 150.0), (240.0, 250.0))
PROBED = Speed(250.0, "from a probe", curve=CURVE, remedy="badcjobs probe AUDIO -- --engine=demo")
LEAN = Speed(150.0, "from a probe", devices=("V100",), curve=((15.0, 50.0), (60.0, 150.0)),
             lean_curve=((40.0, 80.0), (60.0, 90.0)), safe_s=18.0, lean_safe_s=60.0, best_s=17.0)  # fmt: skip
FEW = [(30_000, 10)]
DAY = {"time_s": 24 * HOUR_S}
# name → source, speed, site, wishes
PLANS: dict[str, tuple[Survey | Runs, Speed, Site, dict[str, Any]]] = {
    "as long as the work needs": ([(30_000, 480)], SPEED, ANYWHERE, {}),
    "one task is enough": ([(HOUR_MS, int(400 * (24 * HOUR_S - 600) / 1.5 / HOUR_S))], SPEED, ANYWHERE, DAY),
    "one is just not": ([(HOUR_MS, int(400 * (24 * HOUR_S - 600) / 1.5 / HOUR_S) + 1)], SPEED, ANYWHERE, DAY),
    "more GPUs, more tasks": ([(HOUR_MS, 4000)], SPEED, ANYWHERE, {"parallel": 8}),
    "but not such short ones": ([(HOUR_MS, 4000)], SPEED, ANYWHERE, {"parallel": 800}),
    "rounds of five": ([(HOUR_MS, 1000)], replace(SPEED, audio_hours_per_gpu_hour=10.0), ANYWHERE, {"parallel": 5,
        "time_s": 12 * HOUR_S}),
    "waves by GPU-hours": ([(36_000_000, 10_000)], replace(SPEED, audio_hours_per_gpu_hour=10.0), SOCKEYE, DAY),
    "waves by Slurm's own limit": ([(HOUR_MS, 2500)], SLOW, ANYWHERE, {"time_s": 12 * HOUR_S}),
    "waves by arrays": ([(HOUR_MS, 2500)], SLOW, Site("x", array_tasks=2000), {"time_s": 12 * HOUR_S}),
    "waves by the queue, with the merge job": ([(HOUR_MS, 10)], SLOW, Site("x", array_tasks=50, queued_jobs=10),
        {"time_s": 12 * HOUR_S}),
    "a queue of one": ([(HOUR_MS, 2)], SLOW, Site("x", queued_jobs=1), {"time_s": 12 * HOUR_S}),
    "GPUs of a site": ([(HOUR_MS, 4000)], SPEED, replace(SOCKEYE, plan_gpus=40), {}),
    "few GPUs of a site": ([(HOUR_MS, 100)], SPEED, replace(SOCKEYE, plan_gpus=2, gpu_hours=None), {}),
    "all tasks of a wave": ([(HOUR_MS, 1000)], replace(SPEED, audio_hours_per_gpu_hour=10.0), SOCKEYE,
        {"time_s": 12 * HOUR_S}),
    "two days": ([(HOUR_MS, 48)], replace(SPEED, audio_hours_per_gpu_hour=1.0), ANYWHERE, {"parallel": 1}),
    "a time of the site": (FEW, SLOW, Site("", time_h=0.4, plan_time_h=0.35), {}),
    "cores and memory measured": (FEW, replace(SPEED, memory_bytes_per_gpu=5 * 2**30, cores_per_gpu=3.0), ANYWHERE,
        {"gpus_per_task": 4}),
    "cores and memory of a node": (FEW, replace(SPEED, memory_bytes_per_gpu=100 * 2**30, cores_per_gpu=30.0), SOCKEYE,
        {}),
    "cores and memory wanted": (FEW, SPEED, SOCKEYE, {"cpus": 5, "mem_gb": 7.5, "gpus_per_task": 2, "margin": 2.0}),
    "cores that cost nothing": (FEW, replace(SPEED, cores_per_gpu=5.0), replace(SOCKEYE, node_cpus=None), {}),
    "a chunk too long for any task": ([(30_000, 100), (90 * HOUR_MS, 1)], replace(SPEED, audio_hours_per_gpu_hour=2.0),
        SOCKEYE, DAY),
    "rows too long": (survey_of((300_000, 10), rows_alone=True), replace(SPEED, audio_hours_per_gpu_hour=0.05),
        ANYWHERE, {"time_s": HOUR_S}),
    "rows too long for the site": (survey_of((300_000, 10), rows_alone=True), replace(SPEED,
        audio_hours_per_gpu_hour=0.05), Site("", time_h=2), {"time_s": HOUR_S}),
    "as long as can be": ([(100_000, 10)], replace(SPEED, audio_hours_per_gpu_hour=0.05), ANYWHERE, {"time_s": HOUR_S}),
    "just too long": ([(100_050, 1), (100_000, 1)], replace(SPEED, audio_hours_per_gpu_hour=0.05), ANYWHERE,
        {"time_s": HOUR_S}),
    "odd files": (rates(), SPEED, SOCKEYE, {}),
    "files over the quota": ([(HOUR_MS, 100)], Speed(0.2, "x", tasks=1, gpu_hours=0.01), replace(SOCKEYE, files=1223),
        {"gpus_per_task": 1}),
    "files of the quota": ([(HOUR_MS, 100)], Speed(0.2, "x", tasks=1, gpu_hours=0.5), replace(SOCKEYE, files=1224),
        {"gpus_per_task": 1}),
    "several models": ([(20_000, 100)], Speed(400.0, "measured", chunk_s=40.0, devices=("1 × A", "2 × B")), ANYWHERE,
        {}),
    "measured with longer chunks": ([(20_000, 100)], Speed(400.0, "measured", chunk_s=40.1), ANYWHERE, {}),
    "measured with shorter chunks": ([(20_000, 100)], Speed(400.0, "measured", chunk_s=9.9, doubts=("the merge is old",
        ), remedy="badcjobs merge x"), ANYWHERE, {}),
    "as a probe has tried": ([(60_000, 50)], PROBED, ANYWHERE, {}),
    "between trials": ([(120_000, 50)], PROBED, ANYWHERE, {}),
    "longer than any trial": ([(900_000, 50)], PROBED, ANYWHERE, {}),
    "shorter than any trial": ([(10_000, 50)], PROBED, ANYWHERE, {}),
    "as long as is safe": ([(18_000, 50)], LEAN, ANYWHERE, {}),
    "longer than is safe": ([(40_000, 50)], LEAN, ANYWHERE, {}),
    "longer than is safe with one thread": (survey_of((500_000, 50), rows_alone=True), LEAN, ANYWHERE, {}),
    "never with one thread": ([(20_000, 1), (10_000, 3)], replace(LEAN, lean_safe_s=9.0, safe_s=9.0, best_s=None),
        ANYWHERE, {}),
    "always with one thread": ([(20_000, 1), (10_000, 3)], replace(LEAN, lean_safe_s=None, safe_s=9.1), ANYWHERE, {}),
}  # fmt: skip


def test_a_plan_says_what_it_takes_why_and_what_is_odd(pages: Pages) -> None:
    said, seen = ["(what an earlier plan on this page says is left out)\n"], set[str]()
    for name, (source, speed, site, wish) in PLANS.items():
        plan = plan_of(source, speed, site, **wish)
        document = to_dict(plan)
        waves = f"{[wave.tasks for wave in plan.waves]}, {plan.parallel} tasks, {plan.gpus} GPUs ({plan.gpus_why})"
        shares = " ".join(
            str(document["tasks"][key]) for key in ("rows_least", "rows_most", "audio_hours_least", "audio_hours_most")
        )
        hours = " ".join(
            str(document[key]) for key in ("gpu_hours", "start_up_gpu_hours", "asked_gpu_hours", "running_s")
        )
        hours += f"; {document['source']}"
        parts = re.split(r"\n(?=  \w|\n)", plan_text(Planned(plan, ("x",))))
        said += [f"## {name}", *(part for part in parts if part not in seen), f"  {waves}; {shares}; {hours}\n"]
        seen |= {*parts}
    pages({"plans.txt": "\n".join(said)})


REFUSED: dict[str, Callable[[], object]] = {
    "no lengths": lambda: plan_of([(None, 2)]),
    "one empty chunk": lambda: plan_of([(0, 1)]),
    "no audio": lambda: plan_of([(0, 3)]),
    "rows that cannot be used": lambda: plan_of(survey_of(rows=4)),
    "sources that cannot be used": lambda: plan_of(survey_of(rows=1, sources=2)),
    "no time for work": lambda: plan_of(FEW, time_s=600),
    "no time for measured start-up": lambda: plan_of(FEW, replace(SPEED, start_up_s=1000.0), time_s=1200),
    "all at once": lambda: check_wish(PlanWish(time_s=200 * HOUR_S, gpus_per_task=8, cpus=30, mem_gb=500), SOCKEYE),
    "no GPU": lambda: check_wish(PlanWish(gpus_per_task=0), ANYWHERE),
    "over the cap": lambda: check_wish(PlanWish(time_s=30 * HOUR_S), replace(SOCKEYE, gpu_hours=100.0)),
    "far over the cap": lambda: check_wish(PlanWish(), replace(SOCKEYE, gpu_hours=1.0)),
    "no such time": lambda: PlanWish.of(SubmitSettings(time="0"), PlanSettings()),
    "no such memory": lambda: PlanWish.of(SubmitSettings(mem="much"), PlanSettings()),
}


def test_what_cannot_be_planned_is_refused_with_what_can(pages: Pages) -> None:
    said = []
    for name, make in REFUSED.items():
        with pytest.raises(BadInput) as refused:
            make()
        said.append(f"## {name}\n{refused.value.what}\n{refused.value.why}\ntry: {refused.value.fix}\n")
    pages({"refusals.txt": "\n".join(said)})
    check_wish(PlanWish(time_s=168 * HOUR_S, gpus_per_task=4, cpus=24, mem_gb=180), SOCKEYE)
    check_wish(PlanWish(time_s=25 * HOUR_S), replace(SOCKEYE, gpu_hours=100.0))
    wish = PlanWish.of(
        SubmitSettings(time="1:30:00", mem="512M", cpus=3, parallel=2, gpus_per_task=1), PlanSettings(margin=2.0)
    )
    assert wish == PlanWish(5400, 1, 2, 2.0, 3, 0.5)


# --- what a job has measured ------------------------------------------------------------------------------------------


def job_of(*tasks: TaskFacts, start_up_s: Sequence[float] = (300.0, 200.0)) -> JobFacts:
    devices = [
        replace(device(n, task.name), states={"start_up": StateTime(start_up_s[n], 0.0, None, None)})
        for task in tasks
        for n in range(task.devices)
    ]
    return JobFacts(tuple(tasks), tuple(devices), {"done": 1}, 0.0, 0, 1, (), (), (), ())


def task_of(number: int, audio_s: float, **changes: Any) -> TaskFacts:
    return replace(TASK, name=f"4821_{number}.r0.gpu1", array_index=number, audio_s=audio_s, verdict="done", **changes)


def test_the_speed_of_a_job_is_what_its_gpus_did_once_they_worked() -> None:
    measured = {"memory_peak_bytes": 10 * 2**30, "cpu_mean_cores": 6.0, "done": 100}
    speed = speed_of(job_of(task_of(0, 670_000.0, **measured), task_of(1, 670_000.0, done=100)), "runs/first")
    assert speed == Speed(
        pytest.approx(100.0), "measured in runs/first", 300.0, 1.0, 2, pytest.approx(2 * 6700 / 3600),
        ("4 × Tesla V100-SXM2-16GB",), 5 * 2**30, 3.0, 6700.0,
    )  # fmt: skip
    assert speed_of(job_of(task_of(0, 670_000.0, done=0)), "x").slowness is None, "one task has no spread"
    for task, words in (
        (task_of(0, 100.0, devices=0), "none of its tasks had a GPU"),
        (task_of(0, 0.0), "nothing is done"),
    ):
        with pytest.raises(ValueError, match=words):
            speed_of(job_of(task), "x")


def test_the_slowest_twentieth_decides_how_slow_a_task_may_be() -> None:
    tasks = [task_of(n, 670_000.0) for n in range(39)]
    one = speed_of(job_of(*tasks, task_of(39, 67_000.0)), "x")
    assert one.slowness == pytest.approx(1.0, abs=0.03), "one of forty may be a broken node"
    two = speed_of(job_of(*tasks[:38], task_of(38, 335_000.0), task_of(39, 335_000.0)), "x")
    assert two.slowness == pytest.approx(1.95, abs=0.01)
    for wall_ms, slowness in ((309_990, 1.0), (310_000, 2.0)):  # a minute of work on two devices, less start-up
        brief = [task_of(n, 6_000.0, last_sign_ms=TASK.started_at_ms + wall_ms) for n in (10, 11)]
        short = speed_of(job_of(*tasks[:10], *brief), "x")
        assert short.slowness == pytest.approx(slowness, abs=0.1), "shorter tasks say little about their node"
    assert [make_margin(speed, wanted).factor for speed, wanted in ((one, None), (two, None), (two, 3.0), (SPEED,
        None))] == [
        1.25, two.slowness, 3.0, 1.5,
    ]  # fmt: skip
    assert make_margin(one, None).why.endswith("and at least 1.25 is kept for slow nodes")
    assert make_margin(one, None).start_up_measured and not make_margin(SPEED, None).start_up_measured
    slow_start = speed_of(job_of(*tasks, start_up_s=(100.0, 400.0)), "x")
    assert slow_start.start_up_s == 400.0


def test_of_one_trial_all_the_time_may_be_the_cost_of_a_chunk_and_shorter_ones_are_never_faster() -> None:
    assert at_length(Speed(400.0, "x", curve=((300.0, 400.0),)), 30).audio_hours_per_gpu_hour == pytest.approx(40)
    assert at_length(Speed(100.0, "x", curve=((60.0, 100.0), (120.0, 50.0))), 6).audio_hours_per_gpu_hour == 100.0
    assert at_length(SPEED, 30) == SPEED
    assert at_length(PROBED, 0) == PROBED
