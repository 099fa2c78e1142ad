"""What is found in a job: at each threshold, and in jobs of which the cause is known.

A line in data/finding_facts.txt is a name and what the job has: tasks and devices, each with what differs from the
usual ones below. The pages say what is found: after each ``##`` a rule, then each of its lines.
"""

import cProfile
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from rooms import store
from rooms.cli import read_topic
from rooms.model import Billing, Code, PlaceCounts
from rooms.report import Bill, find, headlines, list_findings, make_bill, summarize
from rooms.root import SystemClock
from rooms.store import DeviceFacts, DeviceWork, GapFacts, JobFacts, TaskFacts
from support import story
from support.cases import read_blocks, read_parts
from support.facts import START_MS, Lines, calls, make_device, spent
from support.story import Story

TOPICS = read_parts("finding_facts.txt")
HOUR_S, GIB = 3600.0, 2**30
END_MS = START_MS + 3_600_000
TASK = TaskFacts(
    "1_0.r0.gpu1", "1", 0, 0, "gpu1", None, "done", 0, 1, 1, START_MS, END_MS, 500, 0, 0, 1e6,
    engine="hawkears", workers=2, cpus=8, cpu_mean_cores=2.0,
)  # fmt: skip
UNENDED = replace(TASK, verdict=None, exit_code=None)
TASKS = {
    "task": TASK, "unended": UNENDED, "killed": replace(TASK, verdict="killed", exit_code=None),
    "silent": replace(UNENDED, pending=9, heard_at_ms=END_MS, silent_after_s=120.0),
}  # fmt: skip
WORK = DeviceWork(2, 500, 0, 0, 1e6, 14.0, 16.0, 20.0, END_MS)
DEVICE = DeviceFacts(
    TASK.name, "gpu1", 0, "GPU-1", "0", "Tesla V100", "nvml", 32 * GIB, 3600, 4 * GIB, 60, 200.0, None, None,
    HOUR_S, 0.0, work=WORK, states=spent(0.9, working=HOUR_S),
)  # fmt: skip
IDLE = replace(DEVICE, states=spent(0.2, working=HOUR_S))
UNUSED = replace(DEVICE, uuid="GPU-u0", index=1, work=DeviceWork(), states=spent(0.0, idle=60.0))
DEVICES = {"device": DEVICE, "idle": IDLE, "unused": UNUSED}


def job(*tasks, devices=(DEVICE,), **more):
    tasks = tasks or (TASK,)
    chunks = {"done": sum(t.done for t in tasks), "pending": sum(t.pending for t in tasks)}
    facts = JobFacts(tasks, tuple(devices), chunks, sum(t.audio_s for t in tasks), 0, 500, (), (), (), ())
    return replace(facts, **more)


def left_out(number):
    settings = {"source": ["/a/july 1"], "filelist": "/a/l.csv"}
    return job(replace(TASK, done=0), devices=[], places=PlaceCounts(5, number), last_settings=settings)


def many(number):
    return [replace(TASK, name=f"1_{n}", array_index=n) for n in range(number)]


def lasting(task, seconds, **changes):
    return replace(task, last_sign_ms=task.started_at_ms + round(1000 * seconds), **changes)


def with_work(device=DEVICE, **changes):
    return replace(device, work=replace(device.work, **changes))


def hot_nodes(hot, nodes):
    devices = [replace(DEVICE, node=f"gpu{n:02}", throttled={"hw_thermal_slowdown": 1800 * (n < hot)})
               for n in range(nodes)]  # fmt: skip
    return job(replace(TASK, node="gpu00"), devices=devices)


def peers(*rates, p50=20.0, per_node=1, slow=None, **work):
    """Devices of these speeds, the last ones slow; ``p50``: their seconds for a chunk, where others take 10."""
    devices = []
    for n, rate in enumerate(rates):
        own = {"audio_s": rate * HOUR_S, "chunk_p50_s": p50 if rate < 8 else 10.0, **(work if rate < 8 else {})}
        place = {"node": f"gpu{n // per_node}", "uuid": f"GPU-{n}", "index": n % per_node}
        devices.append(make_device(with_work(replace(DEVICE, **place), **own), slow or {} if rate < 8 else {}))
    return job(replace(TASK, devices=len(rates)), devices=devices)


def without_readings(gap_s, wall_s=HOUR_S, samples=9):
    gaps = tuple(GapFacts(f"reason {n}", None, n, 60.4 * n, 1) for n in (1, 2, 3, 4))
    devices = [replace(DEVICE, gap_s=gap_s, samples=samples), replace(DEVICE, device_id=2, uuid="GPU-2")]
    devices = [replace(one, states=spent(0.9, working=wall_s)) for one in devices]
    return job(lasting(TASK, wall_s, devices=2), devices=devices, gaps=(GapFacts("no", "power_w", 1, 9, 1), *gaps))


def busy_job(waiting_h, starting_h=0.0, tasks=1, working_h=950.0):
    """A job that works for ``working_h`` hours on each device; with more tasks the first ones lose most."""
    parts, devices = many(tasks), []
    for n, task in enumerate(parts):
        weight = (tasks - n) / sum(range(tasks + 1))
        lost = {"waiting": weight * waiting_h * HOUR_S, "start_up": weight * starting_h * HOUR_S}
        parts[n] = lasting(task, sum(lost.values()) + working_h * HOUR_S)
        states = spent(1.0, **lost, working=working_h * HOUR_S)
        devices.append(with_work(replace(DEVICE, task=task.name, states=states), last_end_ms=parts[n].last_sign_ms))
    return job(*parts, devices=devices)


def uneven(wall_s, audio_s=2e5, number=4, usual_s=600.0, **changes):
    tasks = [lasting(task, usual_s, audio_s=1e5) for task in many(number)]
    return job(*tasks[1:], lasting(tasks[0], wall_s, audio_s=audio_s, **changes), devices=[])


def starts(tasks, start_s=900.0, wall_s=1500.0, **work):
    """Tasks of which each spends most of its time with the start of its engines."""
    parts = [lasting(task, wall_s) for task in many(tasks)]
    times = spent(0.9, start_up=start_s, working=wall_s - start_s)
    return job(*parts, devices=[with_work(replace(DEVICE, task=t.name, uuid=t.name, states=times),
                                          last_end_ms=t.last_sign_ms, **work) for t in parts])  # fmt: skip


def cores(busy, gpus, cpus=8):
    devices = [replace(DEVICE, uuid=f"GPU-{n}", states=spent(busy, working=HOUR_S)) for n in range(gpus)]
    return job(replace(TASK, devices=gpus, cpus=cpus, cpu_mean_cores=float(cpus), workers=3 * gpus), devices=devices)


FACTS = Lines(
    TASKS, DEVICES, lambda tasks, devices: job(*tasks, devices=devices or [DEVICE]),
    store.Completeness(None, None, 9, 0, 0, 0, 9, 0), large={made.__name__: made for made in (
        hot_nodes, peers, without_readings, busy_job, uneven, starts, cores, left_out)},
)  # fmt: skip


def reported(findings, known):
    """Return findings as text; advice that the page has already is left out."""
    lines = []
    for one in findings:
        lines.append(f"  {one.severity} {one.kind}: {one.sentence}")
        lines += [f"    - {figure}" for figure in one.evidence]
        lines += [] if one.advice in known else [f"    → {one.advice}"]
        lines += [f"    $ {line}" for line in one.lines]
        shown = [*one.subjects[:4], *([f"{len(one.subjects)} in all"] if len(one.subjects) > 4 else [])]
        lines += [f"    @ {'; '.join(shown)}"] if shown else []
        lines += [] if one.gpu_hours is None else [f"    = {one.gpu_hours:.4g} GPU-hours"]
        known.add(one.advice)
    return "\n".join(lines) or "  nothing"


@pytest.mark.parametrize("topic", TOPICS)
def test_each_finding_is_made_at_its_threshold_and_not_below(pages, topic):
    said, known, before = [], set(), None
    for line in TOPICS[topic].splitlines():
        if line.startswith("##"):
            said.append(line)
            before = None
            continue
        name, _, facts = line.strip().partition(": ")
        found = find(FACTS.read(facts))
        assert found != before or not name.replace(".", "").isdigit(), f"{name}: the same is found as before"
        before = found
        said.append(f"{name}:\n{reported(found, known)}")
    pages({"findings.txt": "\n".join(said)})


def test_each_decision_about_the_number_of_workers_leads_to_its_advice(pages):
    task, said = replace(TASK, cpu_mean_cores=5.0, memory_limit_bytes=16 * GIB), []
    for code in [code for code in Code if code.startswith("workers.")]:
        decided = (store.DecisionFacts(code.value, "Tesla V100", {}, "its reason", 1),)
        (finding,) = find(summarize(job(task, devices=[IDLE], decisions=decided)))
        said.append(f"{code}: {' '.join((finding.kind, *finding.lines))}")
    pages({"advice.txt": "\n".join(said)})


def test_the_guide_says_what_each_kind_of_finding_says():
    assert list_findings() in read_topic("report")


OF_LOW_BUSY = ("start_up", "waiting_for_audio", "cpu_bound", "too_few_workers", "tail", "low_busy")
UGLY = re.compile(
    r"\b(?:None|nan|inf)\b| -\d|\b1 (?:(?:chunk|task|device|GPU|node|worker|gap|alert)s|tries|processes)\b"
)
OPTION = re.compile(
    r"#SBATCH --(mem=\d+G|time=\d+:\d\d:00|cpus-per-task=\d+|gpus-per-node=\d+|array=0-\d+|exclude=[\w,.\[\]-]+"
    r"|signal=B:USR1@\d+)|[^#…]*"
)


def told_by(usual, copies=None, **values):
    """Return tasks that differ in this from a usual one: ``chunks='158*3600'``, ``fails='5,77 bad_audio'``."""
    if "chunks" in values:
        runs = (part.split("*") for part in values["chunks"].split())
        values["chunks"] = [float(seconds) for many, seconds in runs for _ in range(int(many))]
    if "fails" in values:
        places, *errors = values["fails"].split()
        numbers = range(*map(int, places.split(":"))) if ":" in places else map(int, places.split(","))
        values["fails"] = dict.fromkeys(numbers, tuple(errors))
    if "hopeless" in values:
        values["hopeless"] = dict.fromkeys(values["fails"], values["hopeless"])
    if "card" in values:
        values["card"] = getattr(story, values["card"])
    one = replace(usual, **values)
    if copies is None:
        return [one]
    return [replace(one, index=n, node=f"gpu{n:02d}", seed=one.seed + 31 * n, started_s=0.7 * n) for n in range(copies)]


def diagnose(line, usual):
    """Write the task databases of a job, merge them, and look at it, a year later unless it is ``seen`` before."""
    missing, seen_s = (), 365 * 86400.0
    with tempfile.TemporaryDirectory(dir=story.IN_MEMORY) as name:
        for word, args, values in calls(line):
            if word == "seen":
                seen_s = args[0]
            elif word == "missing":
                missing = args
            elif word == "empty":
                Path(name, args[0]).touch()
            else:
                for task in told_by(usual[word], **values):
                    story.write_story(Path(name), task)
        store.merge(store.MergeOrder([Path(name)], Path(name) / "job.sqlite"), SystemClock())
        facts = store.read_job(Path(name) / "job.sqlite")
    return find(
        summarize(facts, store.Completeness(missing_indices=tuple(missing)), now_ms=START_MS + round(1000 * seen_s))
    )


def test_findings_about_ten_times_as_many_tasks_make_about_ten_times_as_many_calls():
    def calls_of(many, **end):
        tasks = [TaskFacts(f"1_{n}", "1", n, last_sign_ms=1000, heard_at_ms=1000, silent_after_s=1.0, done=1, **end)
                 for n in range(many)]  # fmt: skip
        later = [replace(task, name=f"2_{task.array_index}", started_at_ms=2000, last_sign_ms=3000) for task in tasks]
        devices = tuple(DeviceFacts(task.name, task.name, 0, "GPU-0", "0", "V100", "nvml") for task in tasks)
        facts = JobFacts((*tasks, *later), devices, {"done": many}, 0.0, 0, 0, (), (), (), ())
        profile = cProfile.Profile()
        assert profile.runcall(lambda: find(summarize(facts, now_ms=10**9)))
        return sum(entry.callcount for entry in profile.getstats())

    for end in ({"verdict": "killed"}, {}):
        assert calls_of(4000, **end) < 12 * calls_of(400, **end)


def test_every_labelled_job_is_diagnosed_right_in_sentences_with_numbers_and_something_to_do():
    """In data/labelled_jobs.txt: which findings are made and (?) may be made, then such jobs; nothing else is found."""
    first, *blocks = read_blocks("labelled_jobs.txt")
    usual, misses, labelled = {"story": Story()}, {}, set()
    for line in first.splitlines()[1:]:
        name, _, rest = line.partition(": ")
        [(base, _, values)] = calls(rest)
        [usual[name]] = told_by(usual[base], **values)
    for label, line in ((block.splitlines()[0], line) for block in blocks for line in block.splitlines()[1:]):
        words = [] if label.startswith("nothing") else label.split()
        wanted, allowed = [one for one in words if one[0] != "?"], {one.lstrip("?") for one in words}
        name, _, rest = line.partition(": ")
        found = diagnose(rest, usual)
        kinds = [finding.kind for finding in found]
        of_low_busy = [[kind for kind in those if kind in OF_LOW_BUSY][:1] for those in (wanted, kinds)]
        if of_low_busy[0] != of_low_busy[1] or not {*wanted} <= {*kinds} <= allowed:
            misses[name] = f"wanted {label}, found {kinds}"
        labelled |= {*wanted}
        for finding in found:
            texts = (finding.sentence, *finding.evidence, finding.advice, *finding.lines, *finding.subjects)
            assert finding.sentence.endswith(".") and finding.advice.endswith("."), name
            assert any(re.search(r"\d", line) for line in finding.evidence), name
            for text in texts:
                assert text and text.isprintable() and len(text) < 260 and not UGLY.search(text), text
            assert all(OPTION.fullmatch(line) for line in finding.lines), finding.lines
    assert misses == {}
    listed = {line.split()[0] for line in list_findings().splitlines() if line[4] != " "}
    assert labelled == listed, "each kind of finding has a labelled job"


def test_the_bill_is_that_of_the_site_beside_what_the_request_that_was_needed_would_have_cost():
    sockeye, unused = Billing(6, 5, 1, "max"), replace(UNUSED, task=TASK.name)
    task = replace(TASK, devices=2, cpus=24, memory_limit_bytes=64 * GIB, memory_peak_bytes=8 * GIB, audio_s=3.6e6)
    bill = make_bill(job(task, devices=(DEVICE, unused)), sockeye)
    assert bill == Bill(320.0, 320.0, 50.0, 1, 2, 10)
    assert make_bill(job(task, devices=(DEVICE, unused)), Billing(6)) == Bill(12.0, 12.0, 6.0, 1, 2, 10)
    said = dict(headlines(replace(summarize(job(task)), bill=bill)))["bill"]
    assert said.endswith("; with --gpus-per-node=1 --cpus-per-task=2 --mem=10G it would have been 50.0")
    assert make_bill(job(replace(task, memory_peak_bytes=None)), sockeye) == Bill(320.0, 320.0, None, 1, 2, None)
    waiting = replace(task, name="1_1", devices=None, audio_s=0.0)
    idle, on_cpu = replace(task, name="1_2", devices=3, audio_s=0.0), replace(task, name="1_3", devices=None)
    assert make_bill(job(task, on_cpu), sockeye).units == 640.0, "a job without GPUs is billed as well"
    assert make_bill(job(replace(task, memory_limit_bytes=None)), Billing(6, 0, 1)).units == 36.0, "it weighs nothing"
    step = [replace(task, name=f"1_0.p{number}", procid=number, devices=1, cpus=1) for number in range(2)]
    assert make_bill(job(*step), sockeye).units == 320.0, "its processes share the memory of the node"
    assert make_bill(job(step[0], replace(step[1], node="other")), sockeye).units == 640.0
    for workers, settings, cpus in ((4, '{"max_gpus": 1}', 4), (4, None, 2), (None, None, 24)):
        tasks = [replace(one, workers=workers, settings=settings) for one in (idle, task)]
        bill = make_bill(job(*tasks, waiting, devices=(DEVICE, unused)), sockeye)
        assert (bill.advised_gpus, bill.advised_cpus) == (1, cpus), "a core for each worker that had chunks"
    assert make_bill(job(task), None) is make_bill(job(waiting), sockeye) is None, "no weights, or nothing granted"
    for name in ("memory_limit_bytes", "cpus"):
        assert make_bill(job(task, replace(task, name="1_3", **{name: None})), sockeye) is None, "not known is not 0"
    known = job(replace(task, workers=9, devices=1))
    (found,) = (one for one in find(summarize(known)) if one.kind == "cpus_request")
    assert found.lines == (f"#SBATCH --cpus-per-task={make_bill(known, sockeye).advised_cpus}",), "the same advice"
    metered = replace(DEVICE, states={}, energy_integrated_j=720.0)
    summary = summarize(job(task, devices=(metered,), audio_done_s=3600.0))
    assert dict(headlines(summary))["energy"] == "0.20 kWh per 1,000 audio-hours (720 J per audio-hour)"
