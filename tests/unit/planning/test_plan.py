"""Plans from numbers: shares of equal length, tasks that end in time, waves under a site's caps; and from sources:
nothing lost, nothing twice, the same every time.
"""

import csv
import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from rooms import planning
from rooms.cli import app, make_parser
from rooms.cluster import fill_template
from rooms.model import FITS, NO_CUTTING, Probed, ProbeKey, ProbeResult, Trial
from rooms.planning import (
    Lengths,
    Measured,
    PlanOrder,
    PlanWish,
    Site,
    Speed,
    Survey,
    make_plan,
    plan_text,
)
from rooms.report import make_bill
from rooms.root import (
    BadcjobsError,
    BadInput,
    PlanSettings,
    Project,
    RunSettings,
    SubmitSettings,
    SystemClock,
    round_up,
)
from rooms.sources import WHOLE, Mistakes, PlannedRow, Remarks, Surveyor, open_sources, read_header
from rooms.store import DeviceWork, JobFacts, MergeOrder, StateTime, merge
from rooms.workers import Learned, subject_of, to_json
from support.brief import line, literal
from support.cases import read_data, read_parts
from support.facts import TASK, device
from support.pages import tree
from support.source_files import HEADER, read_cases, write_files
from support.task_files import START_MS, TaskFile

PARSE = make_parser(typer.main.get_command(app))
HOUR_S, HOUR_MS = 3600, 3_600_000
CURVES = (
    tuple(Measured(1, rate, chunk_s) for chunk_s, rate in ((240.0, 250.0), (30.0, 100.0), (60.0, 150.0))),
    tuple(Measured(1, rate, chunk_s) for chunk_s, rate in ((60.0, 150.0), (15.0, 50.0))),
)
SAFE = {"devices": ("V100",), "safe_s": 18.0, "best_s": 17.0}
SPEEDS = {
    "from --rate": Speed(400.0, "from --rate"), "safe": Speed(150.0, "from a probe", points=CURVES[1], **SAFE),
    "probed": Speed(250.0, "from a probe", points=CURVES[0], remedy="badcjobs probe AUDIO -- --engine=demo"),
}  # fmt: skip
SITES = {"sockeye": planning.find_site("sockeye", Path()), "x": Site("x")}


def survey_of(*lengths_ms, rows=0, sources=0, rows_alone=False):
    left_out = Mistakes(["x"])
    for number in range(rows + sources):
        left_out.add(number + 1, "is wrong")
    walk = Surveyor(WHOLE, left_out, NO_CUTTING, Remarks(), read_header)
    survey = Survey(walk, left_out, rows_alone=rows_alone)
    rows = (PlannedRow(f"r{n}", f"c{n}", f"r{n}.wav", "", 0, length_ms) for n, length_ms in enumerate(lengths_ms))
    survey.read(rows, None, lambda rows: None)
    return survey


def read_case(line):
    """Return source, speed, site and wishes: ``9×30`` are chunks of 30 s, ``speed.x`` and ``site.x`` change these."""
    lengths_ms = []
    speed, site, wish = SPEEDS["from --rate"], Site(""), dict[str, str]()
    for name, _, text in (word.partition("=") for word in shlex.split(line)):
        part, _, key = name.partition(".")
        if "×" in name:
            many, _, seconds = name.partition("×")
            lengths_ms += [None if seconds == "?" else round(float(seconds) * 1000)] * int(many)
        elif name == "speed.points":
            speed = replace(speed, points=tuple(Measured(*one) for one in literal(text)))
        elif part == "speed":
            speed = replace(speed, **{key.replace("rate", "audio_hours_per_gpu_hour"): literal(text)})
        elif part == "site":
            site = replace(site, **{key: literal(text)})
        else:
            speed, site = SPEEDS.get(name, speed), SITES.get(name, site)
            wish[name] = text
    counts = {"rows": int(wish.pop("left_out", 0)), "sources": int(wish.pop("whole", 0))}
    survey = survey_of(*lengths_ms, **counts, rows_alone="rows_alone" in wish)
    return survey, speed, site, {name: value for name, value in wish.items() if value}


def wish_of(words):
    numbers = {key: int(words[key]) for key in ("parallel", "gpus_per_task", "cpus") if key in words}
    submit = SubmitSettings(time=words.get("time"), mem=words.get("mem"), **numbers)
    margin, prefer = float(words["margin"]) if "margin" in words else None, words.get("prefer", "cheapest")
    most = int(words["max_gpus"]) if "max_gpus" in words else None
    run = RunSettings(workers_per_gpu=words.get("workers", "auto"), max_gpus=most)
    return PlanWish.of(submit, PlanSettings(prefer, margin), run)


@given(st.lists(st.none() | st.integers(0, 10**6) | st.just(30_000), min_size=1, max_size=120), st.integers(1, 150))
def test_shares_are_complete_never_empty_and_equal_to_within_one_chunk(many, tasks):
    lengths = planning.Lengths()
    for length_ms in many:
        lengths.add(length_ms)
    known = [length_ms for length_ms in many if length_ms]
    mean_ms = sum(known) // len(known) if known else 0
    whole = [mean_ms if length_ms is None else length_ms for length_ms in many]
    assert [one for length_ms, times in lengths.runs() for one in [length_ms] * times] == whole
    assert (lengths.total_ms, lengths.mean_ms, lengths.longest_ms) == (sum(whole), mean_ms, max([*known, 0]))
    assert all(lengths.longer_than(limit) == sum(one > limit for one in whole) for limit in (0, 30_000))
    shares = planning.share_out(lengths, tasks)
    assert len(shares) == min(tasks, len(many))
    first = 0
    for share in shares:
        assert share.rows >= 1
        assert share.audio_ms == sum(whole[first : first + share.rows])
        first += share.rows
    assert first == len(many)
    assert max(share.audio_ms for share in shares) <= lengths.total_ms / len(shares) + max(whole)


@settings(max_examples=150)
@given(
    many=st.lists(st.integers(1_000, 3 * HOUR_MS), min_size=1, max_size=120),
    rate=st.floats(0.5, 500),
    wish=st.builds(
        PlanWish, time_s=st.none() | st.integers(20, 168 * 60).map(lambda minutes: 60 * minutes),
        gpus_per_task=st.none() | st.integers(1, 4), parallel=st.none() | st.integers(1, 20),
        margin=st.none() | st.floats(1, 3),
    ),
    site=st.builds(
        Site, st.just("x"), array_tasks=st.none() | st.integers(1, 150), queued_jobs=st.none() | st.integers(2, 150),
        gpu_hours=st.none() | st.integers(700, 2_000), time_h=st.none() | st.floats(0.4, 168),
        plan_time_h=st.none() | st.floats(0.4, 168), node_gpus=st.none() | st.just(4),
        plan_gpus=st.none() | st.integers(1, 40),
    ),
)  # fmt: skip
def test_every_plan_covers_all_audio_and_ends_in_time(many, rate, wish, site):
    try:
        planning.check_wish(wish, site)
    except BadInput:
        return
    plan = make_plan(survey_of(*many), Speed(rate, "x"), wish, site)
    sizing, margin, waves = plan.sizing, plan.margin, plan.waves
    # all audio, in order, once
    assert [task for wave in waves for task in range(wave.first, wave.first + wave.tasks)] == list(range(plan.tasks))
    assert [wave.number for wave in waves] == list(range(1, len(waves) + 1))
    assert sum(share.rows for share in sizing.shares) == sum(wave.rows for wave in waves) == len(many)
    assert sum(share.audio_ms for share in sizing.shares) == sum(wave.audio_ms for wave in waves) == sum(many)
    # within the limits: the merge job of a wave is queued, too
    sizes, task_hours = [wave.tasks for wave in waves], sizing.gpus * sizing.time_s / HOUR_S
    affordable = int((site.gpu_hours or 10**9) / task_hours + 1e-9)
    most = min(site.array_tasks or 1000, (site.queued_jobs or 10**9) - 1, affordable)
    assert max(sizes) <= most and len(waves) == -(-plan.tasks // most) and max(sizes) - min(sizes) <= 1
    allowed_s = HOUR_S * (site.time_h or 1000)
    longest_s = wish.time_s or min(HOUR_S * (site.plan_time_h or 12), allowed_s)
    assert 60 <= sizing.time_s <= min(longest_s, allowed_s) + 1e-3
    assert sizing.time_s % 300 == 0 or sizing.time_s == int(longest_s / 60 + 1e-6) * 60, "or the longest"
    assert sizing.gpus == wish.gpus_per_task or sizing.gpus == (site.node_gpus or 1)
    # in time, however slow within the margin, even with the longest chunk last; fewer tasks would not do
    fullest_ms = max((share.audio_ms for share in sizing.shares if share.rows > 1), default=0)
    needs_s = margin.start_up_s + margin.factor * fullest_ms / 1000 / rate / sizing.gpus
    assert needs_s <= sizing.time_s - margin.end_s + 1
    longest_chunk_s = margin.work_s(wish.longest_s(site)) * rate
    assert sizing.longest_chunk_s == pytest.approx(longest_chunk_s)
    assert any(one.subject == "long chunks" for one in plan.remarks) == (max(many) > longest_chunk_s * 1000)
    assert plan.asked_gpu_hours * HOUR_S == pytest.approx(plan.tasks * sizing.gpus * sizing.time_s, rel=1e-12)
    if wish.parallel is None and plan.gpus is not None:
        assert plan.gpus <= min(max(sizes) * sizing.gpus, max(site.plan_gpus or 10**9, sizing.gpus))
    if wish.parallel is not None:
        assert plan.gpus == min(wish.parallel, max(sizes)) * sizing.gpus
        rounds = [-(-size // wish.parallel) for size in sizes]
        fullest = [max(one.audio_ms for one in sizing.shares[w.first : w.first + w.tasks]) for w in waves]
        running = [n * (300 + ms / 1000 / rate / sizing.gpus) for n, ms in zip(rounds, fullest, strict=True)]
        assert plan.running_s == pytest.approx(sum(running))
    assert json.loads(json.dumps(planning.to_dict(plan)))["tasks"]["count"] == plan.tasks


def test_a_plan_has_null_for_what_is_not_known():
    speed = Speed(400.0, "x", points=(Measured(1, 400.0),))
    document = planning.to_dict(make_plan(survey_of(30_000, None), speed, PlanWish(), Site("x")))
    assert document["speed"]["curve"] == [[None, 400.0]]
    assert document["speed"]["bytes_per_s"] is document["gpus_at_a_time"] is document["billed_units"] is None
    assert document["source"]["longest_s"] == 30.0
    assert planning.to_facts(survey_of(None))["longest_s"] is None


def test_shares_are_balanced_by_length_and_times_rounded_up_to_five_minutes_or_half_hours():
    for lengths_ms, tasks, rows in (
        ([1_000] * 900 + [9_000] * 100, 2, [900, 100]), ([10] * 10 + [100_000] + [10] * 300, 4, [10, 1, 150, 150]),
        ([10] * 7, 3, [2, 3, 2]), ([100_000] * 2 + [10] * 10, 4, [1, 1, 5, 5]), ([0] * 5 + [10] * 2, 2, [6, 1]),
        ([2**33] + [10] * 3, 2, [1, 3]),
    ):  # fmt: skip
        assert [share.rows for share in planning.share_out(survey_of(*lengths_ms).lengths, tasks)] == rows
    asked = (1, 300, 300.5, 10_799, 10_800, 10_801, 12_600, 12_601)
    assert [round_up(one) for one in asked] == [300, 300, 600, 10_800, 10_800, 12_600, 12_600, 14_400]


# After the first plan on the page: what was decided, and why; amounts stand in the line of figures.
WEIGHTY = re.compile(r"\n?  (request|margin|memory|time|waves|finished|problem|warning|note) ")


def test_a_plan_says_what_it_takes_why_and_what_is_odd_or_is_refused_with_what_can_be_planned(pages):
    said, seen = ["(what an earlier plan on this page says is left out)\n"], set[str]()
    for case in read_data("plan_cases.txt").splitlines():
        said.append(f"## {case}")
        survey, speed, site, words = read_case(case.partition(": ")[2])
        try:
            planning.check_wish(wish_of(words), site)
            plan = make_plan(survey, speed, wish_of(words), site)
        except BadInput as error:
            said.append(f"refused: {error.what}\n{error.why}\ntry: {error.fix}\n")
            continue
        document = planning.to_dict(plan)
        choices = [(one["units_per_1000_audio_hours"] or 0.0, one["measured"]) for one in document["choices"]]
        cheapest, *costs = (units * (1.0 if measured else 1.05) for units, measured in choices)
        assert cheapest <= 1.0101 * min([cheapest, *costs]), "it comes first"
        assert choices[1:] == sorted(choices[1:], key=lambda one: one[0])
        tasks = document["tasks"]
        source = {key: value for key, value in document["source"].items() if value}
        keys = ("gpu_hours", "start_up_gpu_hours", "asked_gpu_hours", "running_s")
        waves = f"{[wave.tasks for wave in plan.waves]}, {plan.wish.parallel} tasks, {plan.gpus} GPUs ({plan.gpus_why})"
        shares = [tasks[key] for key in ("rows_least", "rows_most", "audio_hours_least", "audio_hours_most")]
        parts = re.split(r"\n(?=  \w|\n)", plan_text(planning.Planned(plan, ("x",), NO_CUTTING)))
        said += [part.strip("\n") for part in parts if part not in seen and (not seen or WEIGHTY.match(part))]
        said += [row for row in parts if "→" in row for row in row.splitlines() if "→" in row]
        said.append(f"  {waves}; {shares}; {[document[key] for key in keys]}; {source}\n")
        seen |= {*parts}
    pages({"plans.txt": "\n".join(said)})


def job_of(*tasks, start_up_s=(300.0, 200.0)):
    starts = [StateTime(seconds, 0.0, None, None) for seconds in start_up_s]
    known = [(task.name, n) for task in tasks for n in range(task.devices)]
    devices = [replace(device(n, name), states={"start_up": starts[n]}) for name, n in known]
    return JobFacts(tuple(tasks), tuple(devices), {"done": 1}, 0.0, 0, 1, (), (), (), ())


def task_of(number, audio_s, **changes):
    return replace(TASK, name=f"4821_{number}.r0.gpu1", array_index=number, audio_s=audio_s, verdict="done", **changes)


def test_the_speed_of_a_job_is_that_of_its_working_gpus_and_its_slowest_twentieth_the_margin(pages):
    measured = {"memory_peak_bytes": 10 * 2**30, "cpu_mean_cores": 6.0, "done": 100}
    tasks = [task_of(n, 670_000.0) for n in range(39)]
    jobs = {
        "two tasks, one measured": job_of(task_of(0, 670_000.0, **measured), task_of(1, 670_000.0, done=100)),
        "one task has no spread": job_of(task_of(0, 670_000.0, done=0)),
        "one of forty may be a broken node": job_of(*tasks, task_of(39, 67_000.0)),
        "two of forty are not": job_of(*tasks[:38], task_of(38, 335_000.0), task_of(39, 335_000.0)),
        "other workers are no slow nodes": job_of(*tasks[:20], *(task_of(n, 335_000.0, workers=8) for n in (20, 21))),
        "one task of each kind has no spread": job_of(tasks[0], task_of(1, 335_000.0, workers=8)),
        "a slow start": job_of(*tasks, start_up_s=(100.0, 400.0)),
        "no GPU": job_of(task_of(0, 100.0, devices=0)),
        "nothing is done": job_of(task_of(0, 0.0)),
    }
    for wall_ms in (309_990, 310_000):  # a minute of work on two devices, less start-up
        brief = [task_of(n, 6_000.0, last_sign_ms=TASK.started_at_ms + wall_ms) for n in (10, 11)]
        jobs[f"two slow tasks of {wall_ms} ms"] = job_of(*tasks[:10], *brief)
    said = []
    for name, job in jobs.items():
        try:
            speed = planning.speed_of(job, "runs/first")
            margins = [planning.make_margin(speed, wanted) for wanted in (None, 3.0)]
            assert margins[0].start_up_measured
            said.append(f"{name}: {line(speed)}\n    {'; '.join(f'{one.factor:.4g} {one.why}' for one in margins)}")
        except ValueError as error:
            said.append(f"{name}: {error}")
    pages({"speeds.txt": "\n".join(said)})
    one, two = (job_of(task_of(0, 670_000.0, done=100, workers=3, devices=many)) for many in (1, 2))
    for asked, in_all in (('{"max_gpus": 1}', 3), (None, 6)):  # the second: too few chunks
        (task,), unused = two.tasks, replace(two.devices[1], work=DeviceWork(0), energy_counter_j=9.0)
        job = replace(two, tasks=(replace(task, workers=in_all, settings=asked),), devices=(two.devices[0], unused))
        assert planning.speed_of(job, "x") == planning.speed_of(one, "x"), "a GPU without work does not count"
    assert not planning.make_margin(SPEEDS["from --rate"], None).start_up_measured


def test_each_length_that_recordings_were_cut_to_is_measured_and_a_mean_is_none(tmp_path):
    """Of 1,000 s in chunks of 300, the mean is 250: no one has run that."""
    cut = [(60.0, 1_000.0, 20), (300.0, 1_000.0, 4), (300.0, 3_000.0, 12), (None, 900.0, 2)]
    tasks = [
        task_of(n, audio_s, done=done, workers=2, settings=json.dumps({"chunk_length": length_s}))
        for n, (length_s, audio_s, done) in enumerate(cut)
    ]
    speed = planning.speed_of(job_of(*tasks), "x")
    assert [(one.workers, one.cut_s, one.chunk_s) for one in speed.points] == [
        (1, 300.0, 250.0), (1, 60.0, 50.0), (1, 0.0, 450.0)
    ]  # fmt: skip
    assert (speed.audio_hours_per_gpu_hour, speed.chunk_s) == (speed.points[0].rate, 250.0), "both of the same chunks"
    assert planning.list_lengths(speed) == [60.0, 300.0]
    assert planning.list_lengths(planning.speed_of(job_of(tasks[3]), "x")) == []
    few = [task_of(n, 900.0, done=9, workers=workers) for n, workers in enumerate((4, 12, 12))]
    assert [one.workers for one in planning.speed_of(job_of(*few), "x").points] == [6, 2], "each as it was"
    write_files("a.wav: 300 s at 100 Hz\nb.wav: 302 s at 100 Hz", tmp_path)
    planned = plan(tmp_path, "a.wav", "b.wav", site="sockeye")
    assert {one.chunk_s for one in planned.plan.choices} == {294.0, 301.0}, "as they are, or cut"
    assert not planned.cutting.cuts_recordings, "into 294 s and 12 s"


USUAL_ORDER = PlanOrder({}, Project(), SubmitSettings(), PlanSettings(), None, None, None, None)


def plan(cwd, *sources, environ=None, rate=400.0, **order):
    flags = {"source": [str(one) for one in sources], **order.pop("flags", {})}
    project = Project.read([str(order.pop("config"))], cwd) if "config" in order else Project()
    order = USUAL_ORDER._replace(flags=flags, project=project, rate=rate, **order)
    return planning.plan_sources(order, environ or {}, cwd, lambda rows: None)


def tasks_of(folder):
    """Return what the tasks of a plan would do, each with nothing but its own shard and the options of its script."""
    found = []
    for script in sorted(folder.glob("wave-*.sbatch")):
        (root,) = re.findall(r"^    --root=(.*)$", script.read_text(), re.M) or [None]
        many = len((folder / script.stem / "tasks.txt").read_text().splitlines())
        assert re.findall(r"^#SBATCH --array=0-(\d+)", script.read_text(), re.M) == [str(many - 1)]
        for task in range(many):
            sources = open_sources([folder / script.stem / "tasks.txt"], root=root and Path(root), position=task)
            found += sources.chunks(WHOLE)
    return found


def fields_of(chunks):
    return [(one.key, one.audio_path, one.start_ms, one.end_ms, one.is_cut, one.fingerprint) for one in chunks]


OF_SOURCE = re.compile(r"\n?  (run|source|audio|written|left out|problem|warning|note) ")


def test_a_source_is_planned_named_or_refused(short_path, monkeypatch, pages):
    said, seen = ["(what an earlier plan on this page says is left out)\n"], set[str]()
    for number, (name, files, sources, options) in enumerate(read_cases("plans")):
        here = short_path / f"{number:02}"
        here.mkdir()
        monkeypatch.chdir(here)
        write_files(files)
        before = sorted(here.rglob("*"))
        said.append(f"## {name}")
        flags = {key: float(options[key]) for key in ("chunk_length", "overlap") if key in options}
        rate = None if options.get("rate") == "none" else float(options.get("rate", 400))
        settings = PlanSettings(template=options["template"]) if "template" in options else PlanSettings()
        order = {"flags": flags, "rate": rate, "submit": SubmitSettings(time=options.get("time")), "plan": settings}
        try:
            planned = plan(here, *sources, out=Path(options.get("out", "p")), site=options.get("site"), **order)
        except BadInput as error:
            text = f"refused: {error.what}\n{error.why}\ntry: {error.fix}"
            assert sorted(here.rglob("*")) == before
        else:
            parts = re.split(r"\n(?=  \w|\n)", plan_text(planned))
            written = [*sorted((here / "p").rglob("*.csv")), *here.glob("p/left-out.txt")]
            text = "\n".join(part for part in parts if part not in seen and (not seen or OF_SOURCE.match(part)))
            text += "".join(f"\n--- {path.name}\n{path.read_text()}" for path in written)
            seen |= {*parts}
        said.append(text.replace(str(here), "HERE") + "\n")
    pages({"plans.txt": "\n".join(said)})


NAMES = st.text(st.sampled_from("ab ,\"'\n\ré"), min_size=1, max_size=4).filter(str.strip)


@settings(max_examples=15, phases=[Phase.generate])  # to shrink an example of files takes minutes
@given(
    chunks=st.lists(st.tuples(NAMES, NAMES, st.integers(0, 70_000), st.integers(1, 40_000)), min_size=1, max_size=12,
                    unique_by=lambda row: row[:2]),
    files=st.lists(st.sampled_from(["./long.wav", "own.wav"]), min_size=12, max_size=12),
    extra=st.sampled_from(["", "observer", "observer,station", "badcjobs_cut"]),
    minutes=st.sampled_from([11, 15, 60]),
    more=st.sampled_from([(), ("list.txt",), ("other/m.csv",)]),
)  # fmt: skip
def test_the_tasks_of_a_plan_do_every_chunk_once(tmp_path_factory, chunks, files, extra, minutes, more):
    here = tmp_path_factory.mktemp("plan")
    names = extra.split(",") if extra else []
    table = [[*HEADER.split(","), *names]]
    for (recording, chunk, start, length), file in zip(chunks, files, strict=False):
        values = [("yes" if "own" in file else "") if name == "badcjobs_cut" else "?" for name in names]
        table.append([recording, chunk, file, start, start + length, 0, "", "x", *values])
    with (here / "m.csv").open("w", newline="") as manifest:
        csv.writer(manifest).writerows(table)
    write_files(read_cases("long_and_own")[0].files, here)
    whole = list(open_sources([here / name for name in ("m.csv", *more)], root=None).chunks(WHOLE))
    order = {"rate": 0.05, "submit": SubmitSettings(time=str(minutes))}
    planned = plan(here, "m.csv", *more, out=Path("p"), **order)
    assert sum(share.rows for share in planned.plan.sizing.shares) == len(whole)
    assert fields_of(tasks_of(here / "p")) == fields_of(whole)
    shards = [line for path in sorted((here / "p").glob("wave-*/tasks.txt")) for line in path.read_text().splitlines()]
    plan(here, *shards, out=Path("q"), **order, flags={"root": str(here)})
    assert fields_of(tasks_of(here / "q")) == fields_of(whole), "also in a plan of a plan"
    again = plan(here, "m.csv", *more, out=Path("r"), **order)
    texts = [{name: text.replace(f"{here}/r", f"{here}/p") for name, text in tree(here / one).items()} for one in "pr"]
    assert texts[0] == texts[1] and plan_text(planned) == plan_text(again).replace(f"{here}/r", f"{here}/p")


def test_shards_and_scripts_follow_the_project(short_path, monkeypatch, pages):
    monkeypatch.chdir(short_path)
    (project,) = read_cases("project")
    write_files(project.files)
    plan(short_path, *project.sources, out=Path("columns"), flags={"root": str(short_path)})
    assert [one.key[1] for one in tasks_of(short_path / "columns")] == ["c3", "c0", "c1", "c2"]
    order = USUAL_ORDER._replace(project=Project.read([], short_path), rate=400.0, out=Path("cut"))
    planning.plan_sources(order, {}, short_path, lambda rows: None)
    assert [one.start_ms for one in tasks_of(short_path / "cut")] == [0, 20_000, 40_000]
    planned = plan(
        short_path, "waves.csv", rate=0.0015, site="sockeye", out=Path("waves"), config="x.toml",
        submit=SubmitSettings(time="24:00:00", parallel=10),
        flags={"engine": "demo", "engine_arg": ["--burn-s=0.1"]},
    )  # fmt: skip
    sizes = [wave.tasks for wave in planned.plan.waves]
    assert sizes[0] > sizes[-1] and len(sizes) > 3, "waves of different sizes"
    shards = sorted((short_path / "waves").glob("wave-*/task-*.csv"))
    written = [row.removesuffix(",") for path in shards for row in path.read_text().splitlines()[1:]]
    assert written == Path("waves.csv").read_text().splitlines()[1:]
    with pytest.raises(BadInput, match="exists already"):
        plan(short_path, "plain.csv", out=Path("columns"))
    (short_path / "new").mkdir()
    assert plan(short_path, "plain.csv", out=Path("new")).written[0][0].exists(), "an empty folder may be used"
    shown = ("columns/wave-1/task-0000.csv", "cut/wave-1.sbatch", "cut/wave-1/tasks.txt", "waves/wave-2.sbatch")
    said = {name: (short_path / name).read_text().replace(str(short_path), "HERE") for name in shown}
    pages({**said, "said.txt": plan_text(planned).replace(str(short_path), "HERE")})


def probed(text, subject, here):
    """Return a probe of each line: model, GiB, version, workers, rate, day; without a rate nothing was found."""
    found = []
    for model, gib, version, workers, rate, day in (row.split(" | ") for row in text.strip().splitlines()):
        speed = float(rate) if rate != "-" else None
        trials = (Trial(300.0, False, FITS, 3, 2.0, speed, host_peak_bytes=3 * 2**30),)
        key = ProbeKey(model, int(gib) * 2**30, "x", version.replace("THIS", here), subject, int(workers), int(workers))
        result = ProbeResult(600.0, None, 600.0, 300.0, speed) if speed else None
        found.append(Probed(key, trials, result, True, f"2026-07-{day}"))
    return found


STORES = read_parts("probes.txt")


def test_the_speed_is_that_of_the_best_probe(tmp_path, monkeypatch, pages):
    monkeypatch.chdir(tmp_path)
    write_files("m.csv: rows\n  4 × r#,c#,audio/r#.wav,0,30000,0,,x\nprog: lines\n  #!/bin/sh")
    for workers in (1, 2):
        Path(f"w{workers}.toml").write_text(f"[run]\nworkers_per_gpu = {workers}\n")
    flags = {"engine": "command", "command": f"sh {tmp_path / 'prog'} {{input}} {{output}}"}
    settings = Project().make(RunSettings, {"source": ["m.csv"], **flags}, "plan")
    here, mine = planning.version_here(settings, {}, tmp_path), subject_of(settings)
    assert here is not None and here.startswith("sh prog ")
    os.utime(tmp_path / "prog", (1, 1))
    assert planning.version_here(settings, {}, tmp_path) == here, "a copy is the same program"
    said = []

    def tell(name, **order):
        try:
            made = plan(tmp_path, "m.csv", **{"rate": None, "flags": flags, **order}).plan
            speed = made.speed
            lines = [f"{speed.audio_hours_per_gpu_hour:g} {speed.origin}; {made.choice.mem_gb} GB; {speed.remedy}"]
            lines += [f"{remark.text} try: {remark.fix}" for remark in made.remarks if remark.subject == "speed"]
        except BadcjobsError as error:
            lines = [f"refused: {error.what}", *(error.why or "").splitlines(), f"try: {error.fix}"]
        said.append("\n".join([f"## {name}", *lines, ""]).replace(here, "THIS").replace(str(tmp_path), "HERE"))

    def store(path, probes):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(to_json(probes))
        return Path(path)

    for name, text in STORES.items():
        tell(name, speed_from=store("p.json", probed(text, mine, here)), config="w1.toml")
    others = [one for subject in ("other --x", "b", "c", "d") for one in probed(STORES["other workers"], subject, here)]
    tell("other engines", speed_from=store("p.json", others), config="w1.toml")
    four = store("my probes.json", probed(STORES["mine of four"], mine, here))
    tell("any workers", speed_from=four)
    tell("a rate beside a probe", speed_from=four, rate=7.0)
    Path("damaged.json").write_text("{")
    tell("damaged", speed_from=Path("damaged.json"))
    tell("not there", speed_from=Path("gone.json"), flags={**flags, "engine_arg": ["--burn-s=1"]})
    tell("a rate alone", rate=7.0)
    tell("nothing is known", environ={"HOME": str(tmp_path)})
    store(".cache/badcjobs/probe.json", probed(STORES["two models"], "hawkears", here)[:1])
    tell("from the cache", environ={"HOME": str(tmp_path)}, flags={}, config="w2.toml")
    tell("the cache, but another engine", environ={"HOME": str(tmp_path)})
    (tmp_path / "raw" / "tasks").mkdir(parents=True)
    tell("never merged", speed_from=Path("raw"))
    tell("no database", speed_from=Path("prog"))
    tell("a manifest", speed_from=Path("m.csv"))
    for name, engine in (("june", "demo"), ("july", "command")):
        task = TaskFile(tmp_path / name, states={"a": "done"}, ended_at_ms=None, engine=engine).write()
        merge(MergeOrder([tmp_path / name], tmp_path / name / "job.sqlite"), SystemClock())
    tell("of a job with another engine", speed_from=Path("june"))
    tell("of such a job, for the default engine and with a rate", speed_from=Path("june"), flags={}, rate=7.0)
    tell("of a job", speed_from=Path("july"))
    odd = {"settings": '{"engine_arg": ["--fast"]}', "states": {"a": "done", "b": "failed"}}
    TaskFile(tmp_path / "odd", ended_at_ms=None, engine="command", **odd).write()
    merge(MergeOrder([tmp_path / "odd"], tmp_path / "odd" / "job.sqlite"), SystemClock())
    tell("with other options, and half of it in vain", speed_from=Path("odd"))
    tell("of one task", speed_from=task)
    os.utime(task, (START_MS // 1000 + 9000,) * 2)  # published again
    tell("of a job that went on", speed_from=Path("july"))
    pages({"speeds.txt": re.sub(r"as of \S+ \S+ UTC", "as of NOW", "\n".join(said))})


def plan_of_probe(cwd, *sources, **order):
    """Plan for Sockeye, by the speed of the probe in p.json."""
    (cwd / "x.toml").write_text('[submit]\naccount = "st-lab-1-gpu"\n')
    return plan(cwd, *sources, rate=None, speed_from=Path("p.json"), site="sockeye", **order)


def test_recordings_are_cut_to_the_cheapest_length_and_the_script_has_the_workers_of_the_plan(short_path, pages):
    """What a probe has measured with 2 and with 6 workers, of two lengths, is compared by the bill of Sockeye."""
    write_files("july/a.wav: 1734 s at 100 Hz\njuly/b.wav: 294 s at 100 Hz", short_path)
    found = []
    for workers, rates in ((2, (590.0, 600.0)), (6, (1700.0, 1800.0))):
        lengths = zip((294.0, 1806.0), rates, (1.4, 2.6), strict=True)
        trials = tuple(
            Trial(s, False, FITS, 9, 3.0, rate, 1, round(workers * gib * 2**30), 12.0) for s, rate, gib in lengths
        )
        key = ProbeKey("V100", 32 * 2**30, "hawkears", "2.3.0", "hawkears", workers, workers)
        result = ProbeResult(3600.0, None, 3600.0, 1806.0, rates[1])
        found.append(Probed(key, trials, result, True, f"2026-07-0{workers}"))
    (short_path / "p.json").write_text(to_json(found))
    said = {}
    for name, prefer, starts in (
        ("cheap", "cheapest", [*range(0, 1_728_000, 288_000), 0]),
        ("fast", "fastest", [0, 0]),
    ):
        planned = plan_of_probe(short_path, "july", out=Path(name), config="x.toml", plan=PlanSettings(prefer))
        said[f"{name}.txt"] = plan_text(planned).replace(str(short_path), "HERE")
        assert [one.start_ms for one in tasks_of(short_path / name)] == starts
        script, choice = (short_path / name / "wave-1.sbatch").read_text(), planned.plan.choice
        lines = (f"cpus-per-task={choice.cpus}", f"mem={choice.mem_gb}G", f"gpus-per-node={choice.gpus}")
        assert all(f"#SBATCH --{one}\n" in script for one in lines)
        assert f"    --workers-per-gpu={choice.workers}\n" in script
        assert " --config=site=sockeye " in script, "so that the report of the run shows its bill"
        document = json.loads((short_path / name / "plan.json").read_text())
        assert {one["chunk_s"] for one in document["choices"]} == {294, 1014}, "no longer than the recordings"
        assert choice.chunk_s == (planned.cutting.chunk_length_s or 1014)
        billed = choice.units_per_1000_audio_hours * (1734 + 294) / 3_600_000
        assert planned.plan.billed_units == pytest.approx(billed), "per hour of recordings: overlaps cost more"
        assert document["tasks"]["units_per_1000_audio_hours"] == pytest.approx(choice.units_per_1000_audio_hours)
    kept = plan_of_probe(short_path, "july", flags={"chunk_length": 300.0})
    assert kept.cutting.chunk_length_s == 300 and kept.plan.survey.lengths.rows == 7, "as it was asked for"
    write_files("m.csv: rows\n  1 × r#,c#,july/a.wav,0,582000,0,,x", short_path)
    beside = plan_of_probe(short_path, "july", "m.csv")
    assert beside.cutting.chunk_length_s is None and {one.chunk_s for one in beside.plan.choices} == {870}
    tables = [re.findall(r"^ {5}\d .*ed$", text.replace("→ ", ""), re.M) for text in said.values()]
    assert tables[0] == tables[1], "only the arrow moves"
    for text, label in zip(said.values(), ("cheapest", "fastest"), strict=True):
        assert [row.split("→ ")[1].split(",")[0] for row in text.splitlines() if "→ " in row] == [label]
    pages(said)


def test_memory_is_that_of_the_longest_chunks_and_of_the_most_workers_that_were_measured(short_path):
    """A task begins with the longest: all of its workers may have one. With more workers, each needs less by itself."""
    lengths = Lengths()
    for length_ms, many in ((30_000, 100), (1_800_000, 3), (None, 2)):
        lengths.add(length_ms, many)
    assert [lengths.held_s(many) for many in (1, 3, 4)] == [1800.0, 1800.0, (3 * 1800 + lengths.guess_ms / 1000) / 4]
    points = tuple(Measured(many, 60.0 * many, device_bytes=8 * 2**30) for many in (1, 4, 2))
    assert Speed(60.0, "", memory_bytes=16 * 2**30, points=points).device_room(30.0) == 7
    write_files("july/a.wav: 1800 s at 100 Hz\njuly/b.wav: 30 s at 100 Hz", short_path)
    asked = {"chunk_length": 294.0, "overlap": 6.0}
    one, other = (plan(short_path, "july", rate=400.0, site="sockeye", flags=flags).plan for flags in ({}, asked))
    assert (one.choice.mem_gb, one.billed_units) == (other.choice.mem_gb, other.billed_units), "the same cutting"
    flags = {**asked, "workers_per_gpu": "1"}
    alone = plan(short_path, "july", rate=400.0, submit=SubmitSettings(cpus=1), flags=flags).plan
    assert (alone.choice.cpus, alone.choice.fits) == (1, True), "a worker needs one core"


PROBED_S = {60.0: 1000.0, 240.0: 1200.0, 960.0: 1190.0}


@pytest.mark.parametrize(
    ("recordings_s", "offered_s", "cheapest", "fastest"),
    [((30, 30), {30}, (30, None), (30, None)), ((240, 100), {60, 170}, (170, None), (170, None)),
     ((600, 250), {60, 240, 425}, (425, None), (425, None)), ((60, 60), {60}, (60, None), (60, None)),
     ((2000, 1900), {60, 240, 960}, (240, 240), (240, 240))],
)  # fmt: skip
@pytest.mark.parametrize("prefer", ["cheapest", "fastest"])
def test_row_arrow_speed_cost_run_line_and_shards_are_one_choice(
    short_path, recordings_s, offered_s, cheapest, fastest, prefer
):  # fmt: skip
    """Of a probe of several lengths, recordings are cut to those that are shorter, or not at all."""
    chosen = cheapest if prefer == "cheapest" else fastest
    write_files("\n".join(f"july/r{n}.wav: {s} s at 100 Hz" for n, s in enumerate(recordings_s)), short_path)
    trials = tuple(Trial(s, False, FITS, 9, 3.0, rate, 1, 2**30, 12.0) for s, rate in PROBED_S.items())
    key = ProbeKey("V100", 32 * 2**30, "demo", "0.1.0", "demo", 3, 3)
    probes = [Probed(key, trials, ProbeResult(960.0, None, 960.0, 240.0, 1200.0), True)]
    (short_path / "p.json").write_text(to_json(probes))
    how = {"config": "x.toml", "flags": {"engine": "demo"}, "plan": PlanSettings(prefer)}
    planned = plan_of_probe(short_path, "july", out=Path("p"), **how)
    made, text = planned.plan, plan_text(planned)
    assert {one.chunk_s for one in made.choices} == offered_s
    assert (made.choice.chunk_s, planned.cutting.chunk_length_s) == chosen
    assert made.choice.rate == made.speed.audio_hours_per_gpu_hour
    assert f"--chunk-length {chosen[1]} (the shards are cut)\n" in text or chosen[1] is None
    assert ("--chunk-length" in text) is (chosen[1] is not None)
    (arrow,) = [line for line in text.splitlines() if "→" in line]
    units = f"{made.choice.units_per_1000_audio_hours:,.1f}"
    assert f" {chosen[0]} s " in arrow and f" {units} " in arrow and f"  cost        {units} billed" in text
    assert f"→ {prefer}" in arrow or f", {prefer}, " in arrow
    assert max(one.gpus * one.rate for one in made.choices) == made.fastest.gpus * made.fastest.rate
    longest_ms = max(one.end_ms - one.start_ms for one in tasks_of(short_path / "p"))
    assert longest_ms == 1000 * (chosen[1] or max(recordings_s))


def test_what_is_not_planned_asks_for_the_workers_that_it_will_have(tmp_path):
    """Of a probe in the cache, if there is one; without any the first values are used, and no speed is known."""
    sockeye, run = planning.find_site("sockeye", tmp_path), RunSettings(source=("x",), workers_per_gpu="auto")

    def ask(settings=run, prefer="cheapest", site=sockeye, longest_s=0, **submit):
        lengths = Lengths()
        lengths.add(longest_s * 1000, int(longest_s > 0))
        given = (SubmitSettings(**submit), prefer, settings, site, {"HOME": str(tmp_path)}, tmp_path, lengths)
        made = planning.usual_request(*given)
        return made.workers, made.cpus, made.mem_gb, made.rate

    cut = replace(run, chunk_length_s=300.0)
    assert ask() == (2, 2, 7, 1.0) and ask(gpus_per_task=4) == (2, 8, 27, 1.0), "nothing is cut: of any length"
    assert ask(cut) == (2, 2, 5, 1.0) and ask(longest_s=7200) == (2, 2, 17, 1.0)
    assert ask(cut, "fastest", gpus_per_task=4) == (6, 24, 53, 1.0), "one worker per core"
    assert ask(replace(run, workers_per_gpu="3")) == (3, 3, 10, 1.0)
    assert ask(replace(run, chunk_length_s=1800.0)) == (2, 2, 8, 1.0)
    assert ask(mem="4G")[:3] == (1, 2, 4) and ask(site=Site("")) == (2, 2, 7, 1.0), "of two, 4 GB hold one"
    trial = Trial(300.0, False, FITS, 3, 2.0, 1500.0, host_peak_bytes=6 * 2**30)
    key = ProbeKey("V100", 32 * 2**30, "hawkears", "2.3.0", "hawkears", 4, 4)
    (tmp_path / ".cache" / "badcjobs").mkdir(parents=True)
    store = tmp_path / ".cache" / "badcjobs" / "probe.json"
    store.write_text(to_json([Probed(key, (trial,), ProbeResult(600.0, None, 600.0, 300.0, 1500.0), True)]))
    assert ask(cut) == (4, 4, 8, 1500.0)
    assert ask() == (3, 3, 10, 1125.0), "what 300 s need says nothing about recordings of any length"
    assert ask(cut, mem="5G", cpus=4) == (2, 4, 5, 750.0), "as many as the memory holds"
    facts = {"rates": {"2": 600.0, "6": 1700.0}, "worker_bytes": round(1.5 * 2**30), "chunk_s": 290.0}
    lessons = Learned("hawkears", [tmp_path / ".cache" / "badcjobs" / "learned.json"])
    lessons.note("V100", alone_s=900.0)
    lessons.note("V100, 6 cores, chunks of 290 s", **facts)
    assert ask(cut) == (6, 6, 11, 1700.0), "a run has learned more than a probe"
    for memory_gib, wanted in ((16, (6, 6, 11, 1700.0)), (11, (4, 4, 8, 1150.0)), (1, (1, 2, 3, 300.0))):
        lessons.note("V100, 6 cores, chunks of 290 s", device_bytes=2 * 2**30, memory_bytes=memory_gib * 2**30)
        assert ask(cut, prefer="fastest") == wanted, "as many as the memory of a device holds, a tenth of it left free"
    lessons.note("V100, 6 cores, chunks of 290 s", device_bytes=None)
    assert ask(cut) == (6, 6, 11, 1700.0), "what a worker needs on a device is not known"
    assert planning.find_speed(None, None, run, {"HOME": str(tmp_path)}, tmp_path).devices == ["V100"]
    lessons.note("H200, 6 cores, chunks of 290 s", **facts)
    assert ask(cut) == (4, 4, 8, 1500.0), "which of the two models it will be is not known"


def test_a_plan_with_the_request_of_a_job_costs_what_the_report_bills_for_that_job():
    """And with what the plan asks for itself, what the report says the same work would have cost."""
    site, gib = planning.find_site("sockeye", Path()), 2**30
    asked = {"workers": 12, "cpus": 12, "memory_limit_bytes": 64 * gib, "done": 100}
    job = job_of(
        task_of(0, 670_000.0, **asked, memory_peak_bytes=17 * gib, cpu_mean_cores=6.0), start_up_s=(300.0, 300.0)
    )
    bill, speed, wish = make_bill(job, site.billing), planning.speed_of(job, "x"), PlanWish(gpus_per_task=2, workers=6)
    for wanted, units in ((replace(wish, cpus=12, mem_gb=64), bill.units_per_1000_audio_hours),
                          (wish, bill.advised_units_per_1000_audio_hours)):  # fmt: skip
        made = make_plan(survey_of(*[6_700_000] * 100), speed, wanted, site)
        assert made.choice.units_per_1000_audio_hours == pytest.approx(units) and made.choice.measured
        assert made.billed_units == pytest.approx(units * 670_000 / 3_600_000)
    assert (made.choice.mem_gb, made.choice.cpus) == (bill.advised_mem_gb, bill.advised_cpus)


def test_a_plan_lists_no_workers_that_the_memory_of_a_gpu_does_not_hold():
    """With 6 workers a GPU has used 12 of its 16 GiB, so that 7 leave a tenth free; a wish for more is a problem."""
    gib, site = 2**30, planning.find_site("sockeye", Path())
    job = job_of(task_of(0, 670_000.0, done=100, workers=6, cpus=12, devices=1, memory_peak_bytes=9 * gib))
    cards = tuple(replace(one, memory_total_bytes=16 * gib, memory_peak_bytes=12 * gib) for one in job.devices)
    unknown = tuple(replace(one, memory_total_bytes=None) for one in cards)
    other = replace(job.tasks[0], name="4821_1.r0.gpu2")
    large = replace(cards[0], task=other.name, memory_total_bytes=80 * gib, memory_peak_bytes=40 * gib)
    mixed = replace(job, tasks=(*job.tasks, other), devices=(*cards, large))
    assert planning.speed_of(mixed, "x").device_room(6_700.0) == 7, "the peak of a larger card says nothing about it"
    for devices, most, fits in ((cards, 7, False), (unknown, 12, True)):
        speed = planning.speed_of(replace(job, devices=devices), "x")
        made = make_plan(survey_of(6_700_000), speed, PlanWish(gpus_per_task=1, cpus=12), site)
        assert made.fastest.workers == max(one.workers for one in made.choices) == most
        made = make_plan(survey_of(6_700_000), speed, PlanWish(gpus_per_task=1, workers=8), site)
        said = [(one.text, one.fix) for one in made.remarks if one.severity == "problem"]
        text = f"8 per GPU, but its memory holds {most} by what was measured"
        assert said == ([] if fits else [(text, f"-- --workers-per-gpu {most}")])


def test_the_same_request_is_billed_the_same_by_plan_check_and_a_template(short_path):
    write_files("july/a.wav: 582 s at 100 Hz\njuly/b.wav: 294 s at 100 Hz", short_path)
    (short_path / "x.toml").write_text('[submit]\naccount = "st-lab-1-gpu"\n[run]\nchunk_length = 294\n')
    (short_path / "mine.toml").write_text('name = "mine"\n[billing]\ngpu = 1\n')
    plan(short_path, "july", out=Path("own"), site="mine.toml", config="x.toml")
    assert f"\n    --config=site={short_path}/mine.toml\n" in (short_path / "own" / "wave-1.sbatch").read_text()
    made = plan(short_path, "july", out=Path("cheap"), site="sockeye", config="x.toml").plan
    choice = made.choice
    assert made.start_up_gpu_hours > made.work_gpu_hours / 4, "with so little audio"
    asked = {"gpus_per_task": choice.gpus, "cpus": choice.cpus, "mem": f"{choice.mem_gb}G", "tasks": made.tasks}
    values = {
        "account": "st-lab-1-gpu",
        "gpus-per-node": choice.gpus,
        "cpus-per-task": choice.cpus,
        "mem": asked["mem"],
    }
    words = [f"{key}={value}" for key, value in values.items()]
    (short_path / "t.sbatch").write_text(fill_template("sockeye-array", words, Project(), complete=True).text)
    settings = RunSettings(source=("july",), out=Path("o"), chunk_length_s=294.0)
    for order in ({"submit": SubmitSettings(**asked)}, {"script": "t.sbatch"}, {"script": "cheap/wave-1.sbatch"}):
        here = planning.CheckOrder(
            settings, {}, SystemClock(), short_path, "sockeye", quick=False, progress=lambda rows: None, parse=PARSE,
            prefer="cheapest", trust=None, site_trust=None, **order,
        )  # fmt: skip
        found = planning.check(here).findings
        (bill,) = [one.text for one in found if one.subject == "billing"]
        assert bill.endswith(f"; the largest counts: {choice.units_per_hour:g} an hour for each task"), order
