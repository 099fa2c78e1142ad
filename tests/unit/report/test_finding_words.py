"""What findings say: devices counted once, commands said once, words a reader knows, and nothing that is not so."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from rooms.report import (
    Finding,
    find,
    headlines,
    markdown,
    page,
    straggler_table,
    summarize,
    summarize_database,
    summary_text,
)
from rooms.root import SystemClock
from rooms.store import (
    Completeness,
    CostFacts,
    DecisionFacts,
    DeviceFacts,
    ErrorFacts,
    FailedChunk,
    ForeignProcess,
    JobFacts,
    MergeOrder,
    MetricFacts,
    StateTime,
    TaskFacts,
    merge,
    read_job,
)
from support.summaries import JOB, PROOF, TASK, device
from support.task_files import START_MS, TaskFile

HOUR_S = 3600.0


def tasks_on(nodes: int, rounds: int, devices: int = 2, **more: object) -> tuple[TaskFacts, ...]:
    """Return tasks that come one after another on each node."""
    return tuple(
        replace(
            TASK, name=f"4821_{turn * nodes + n}", array_index=turn * nodes + n, node=f"gpu{n}", verdict="done",
            devices=devices, done=500, failed=0, pending=0, **more,
        )  # type: ignore[arg-type]
        for turn in range(rounds) for n in range(nodes)
    )  # fmt: skip


def devices_of(tasks: tuple[TaskFacts, ...], states: dict[str, StateTime], **more: object) -> tuple[DeviceFacts, ...]:
    return tuple(
        replace(device(index, task.name), node=task.node, device_id=10 * place + index, states=states, **more)  # type: ignore[arg-type]
        for place, task in enumerate(tasks)
        for index in range(task.devices)
    )


def job_of(tasks: tuple[TaskFacts, ...], devices: tuple[DeviceFacts, ...], **more: object) -> JobFacts:
    made = JobFacts(tasks, devices, {"done": 500 * len(tasks)}, 1e6, 0, 500, (), (), (), ())
    return replace(made, **more)  # type: ignore[arg-type]


def clock(mhz: float) -> MetricFacts:
    return MetricFacts(3600, mhz, mhz, mhz, mhz, mhz)


def found_in(facts: JobFacts, proof: Completeness | None = None) -> dict[str, Finding]:
    missing = () if proof is None else proof.missing_indices
    return {finding.kind: finding for finding in find(summarize(facts, missing, proof))}


BUSY = {"working": StateTime(HOUR_S, HOUR_S, 0.9 * HOUR_S, None)}
LAZY = {"working": StateTime(HOUR_S, HOUR_S, 0.1 * HOUR_S, None)}


# --- devices are counted once -----------------------------------------------------------------------------------------


def test_a_device_that_served_many_tasks_is_one_device() -> None:
    tasks = tasks_on(nodes=3, rounds=10)
    facts = job_of(tasks, devices_of(tasks, LAZY))
    (finding,) = found_in(facts).values()
    assert finding.evidence[0] == "busy 10 % of 60.0 GPU-hours on 6 devices in 30 tasks"
    hot = devices_of(tasks, BUSY, throttled={"hw_thermal_slowdown": 1800}, metrics={"sm_clock_mhz": clock(1005)})
    cool = replace(hot[0], node="gpu9", throttled={}, metrics={"sm_clock_mhz": clock(1530)})
    finding = found_in(job_of(tasks, (*hot, cool)))["throttled_thermal"]
    assert finding.sentence == "6 GPUs reduced their clock because of heat."
    assert finding.subjects[:2] == ("gpu0 device 0 (in 10 tasks)", "gpu0 device 1 (in 10 tasks)")
    assert len(finding.subjects) == 6
    clocks = "median clock of the slowest GPU: 1,005 MHz; highest clock of this model in the job: 1,530 MHz"
    assert clocks in finding.evidence


def test_devices_of_tasks_are_called_so() -> None:
    tasks = tasks_on(nodes=1, rounds=3)
    devices = devices_of(tasks, BUSY)
    idle = {"idle": BUSY["working"]}
    unused = tuple(replace(d, states=idle, work=replace(d.work, done=0, failed=0)) if d.index else d for d in devices)
    finding = found_in(job_of(tasks, unused))["unused_gpus"]
    assert finding.sentence == "3 of 6 GPUs (counted once per task) never had a chunk to work on."
    assert "1 different device" in finding.evidence
    alone = found_in(job_of(tasks[:1], unused[:2]))["unused_gpus"]
    assert alone.sentence == "1 of 2 GPUs never had a chunk to work on."
    assert len(alone.evidence) == 2
    text = summary_text(summarize(job_of(tasks_on(1, 9), devices_of(tasks_on(1, 9), BUSY))), "july")
    assert "the 16 least busy of 18 devices (counted once per task);" in text


def test_the_same_process_of_others_in_two_tasks_is_one_process() -> None:
    seen = [ForeignProcess(f"4821_{n}", "gpu1", 0, 77, "python", "eve", 60.0, 2**31) for n in range(2)]
    tasks = tasks_on(1, 2)
    finding = found_in(job_of(tasks, devices_of(tasks, BUSY), foreign=tuple(seen)))["foreign_process"]
    assert finding.sentence == "1 other process used the GPUs of this job."


def test_alerts_and_errors_of_a_database_count_devices_and_not_tasks(tmp_path: Path) -> None:
    for index in range(3):
        TaskFile(tmp_path, index=index, states={f"a{index}": "failed"}, samples=4, node="gpu1").write()
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    facts = read_job(tmp_path / "job.sqlite")
    assert len(facts.devices) == 3
    assert [(error.tries, error.devices) for error in facts.errors] == [(3, 1)]


def slow_one(rounds: int, of: int) -> JobFacts:
    """Return a job on six devices, the first of which is slow in so many of its tasks."""
    tasks = tasks_on(nodes=6, rounds=of, devices=1)
    devices = devices_of(tasks, BUSY)
    slow = [
        replace(d, work=replace(d.work, audio_s=60_000.0, chunk_p50_s=150.0))
        if d.node == "gpu0" and place < 6 * rounds else d
        for place, d in enumerate(devices)
    ]  # fmt: skip
    return job_of(tasks, tuple(slow))


def test_a_device_is_judged_over_all_its_tasks() -> None:
    finding = found_in(slow_one(5, of=5))["straggler_device"]
    assert finding.sentence == "1 device is slower than its peers: the slowest reaches 33 % of the median speed."
    assert finding.subjects == ("gpu0 device 0 (in 5 tasks)",)
    assert finding.evidence[1] == "median of 6 devices (Tesla V100-SXM2-16GB): 50.0 × real time"
    assert "straggler_device" not in found_in(slow_one(1, of=9))  # one bad hour is not a bad device


def test_four_tasks_on_one_device_are_no_four_peers() -> None:
    tasks = tasks_on(nodes=1, rounds=8, devices=1)
    devices = devices_of(tasks, BUSY)
    slow = replace(devices[0], work=replace(devices[0].work, audio_s=60_000.0, chunk_p50_s=150.0))
    assert found_in(job_of(tasks, (slow, *devices[1:]))) == {}


def test_where_lengths_are_not_known_speed_is_in_chunks() -> None:
    facts = slow_one(5, of=5)
    short = tuple(
        replace(d, work=replace(d.work, audio_s=0.0, done=10 if d.node == "gpu0" else 50)) for d in facts.devices
    )
    finding = found_in(replace(facts, devices=short))["straggler_device"]
    assert finding.evidence[0] == "slowest: gpu0 device 0 (in 5 tasks), 0.17 chunks per minute"
    assert "real time" not in " ".join(finding.evidence)


# --- words a reader knows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("TIMEOUT",), "Its time limit was reached: submit again to do the rest."),
        (("TIMEOUT", "TIMEOUT"), "Their time limit was reached: submit again to do the rest."),
        (("TIMEOUT", "TIMEOUT", "NODE_FAIL"), "Mostly their time limit was reached: submit again to do the rest."),
        (("OUT_OF_MEMORY",), "It used more memory than requested: request more, then submit again."),
    ],
)
def test_why_tasks_were_killed_is_told_of_one_and_of_many(words: tuple[str, ...], advice: str) -> None:
    killed = [replace(t, verdict="killed", pending=1) for t in tasks_on(len(words), 1, devices=0)]
    tasks = tuple(replace(task, slurm_state=word) for task, word in zip(killed, words, strict=True))
    facts = job_of(tasks, (), chunks={"done": 5, "pending": len(tasks)})
    assert found_in(facts)["tasks_killed"].advice == advice


@pytest.mark.parametrize("write", [summary_text, markdown, page])
def test_the_command_that_finishes_a_job_stands_once_in_every_form(write) -> None:
    killed = tuple(replace(t, verdict="killed", pending=1, slurm_state="TIMEOUT") for t in tasks_on(3, 1, devices=0))
    facts = job_of(killed, (), chunks={"done": 5, "pending": 3})
    proof = replace(PROOF, finish=("badcjobs submit m.csv --out=july --again", "badcjobs run m.csv --out=july"))
    summary = summarize(facts, (3,), proof)
    found = find(summary)
    assert {"tasks_missing", "tasks_killed"} <= {finding.kind for finding in found}
    text = write(replace(summary, findings=found), "july")
    assert all(text.count(command) == 1 for command in proof.finish)
    assert " ".join(text.split()).count("under “to finish it”") == 2
    assert re.search("to finish it, submit what is left", text, re.IGNORECASE)


def test_a_run_outside_slurm_has_no_lines_for_slurm() -> None:
    tasks = tasks_on(nodes=1, rounds=1, job_id="local1800000000000-7", cpus=4, cpu_mean_cores=3.9)
    finding = found_in(job_of(tasks, devices_of(tasks, LAZY)))["cpu_bound"]
    assert finding.lines == ()
    in_slurm = tuple(replace(task, job_id="4821") for task in tasks)
    assert found_in(job_of(in_slurm, devices_of(in_slurm, LAZY)))["cpu_bound"].lines == ("#SBATCH --gpus-per-node=1",)


def test_cores_that_nobody_counted_are_not_said_to_be_none() -> None:
    tasks = tasks_on(nodes=1, rounds=1, cpus=None, host_cpu_mean_percent=97.0)
    finding = found_in(job_of(tasks, devices_of(tasks, LAZY)))["cpu_bound"]
    assert finding.advice == "Request more cores per GPU, or fewer or smaller GPUs."


def test_what_was_decided_is_called_a_try_only_where_it_was_one() -> None:
    tasks = tasks_on(nodes=1, rounds=1, cpu_mean_cores=None)
    facts = job_of(tasks, devices_of(tasks, LAZY))
    for reason, tried in (("1 fits into the memory", False), ("2 per device changed the rate by +1% against 1", True)):
        decision = DecisionFacts("workers_per_gpu", "V100", 1, reason, 1)
        finding = found_in(replace(facts, decisions=(decision,)))["low_busy"]
        assert ("did not help" in finding.advice) == tried
        assert finding.lines == (() if tried else ("--workers-per-gpu auto",))


def test_the_array_for_next_time_goes_by_all_tasks_and_by_how_long_they_work() -> None:
    starting = {"start_up": StateTime(200.0, 200.0, 0.0, None), "working": StateTime(100.0, 100.0, 60.0, None)}
    tasks = tasks_on(nodes=60, rounds=1, devices=1, last_sign_ms=START_MS + 300_000)
    finding = found_in(job_of(tasks, devices_of(tasks, starting)))["start_up"]
    assert finding.lines == ("#SBATCH --array=0-9",)  # five hours in all: ten tasks of half an hour


def test_chunks_that_did_not_fit_are_done_only_where_they_are() -> None:
    tasks = tasks_on(nodes=1, rounds=1)
    facts = job_of(tasks, devices_of(tasks, BUSY))
    for rescued, words in ((5, "all were done in the end"), (3, "2 of them not done yet")):
        error = ErrorFacts("out_of_memory", 9, 5, rescued, 1, "CUDA out of memory")
        assert found_in(replace(facts, errors=(error,)))["out_of_memory"].sentence.endswith(f"; {words}.")


def test_of_very_many_failed_chunks_of_several_classes_the_numbers_are_about() -> None:
    classes = ("bad_audio", "out_of_memory")
    chunks = tuple(FailedChunk(f"r{n}", f"r{n}", "failed", 3, classes[n % 2], "no") for n in range(1000))
    facts = job_of(tasks_on(1, 1, devices=0), (), failed=chunks, chunks={"done": 10, "failed": 3000})
    assert found_in(facts)["failed_chunks"].sentence == "About 1,500 chunks failed for good: bad_audio."


# --- joules where they were measured ----------------------------------------------------------------------------------


def test_joules_per_chunk_say_of_how_many_tries_they_are() -> None:
    def per_chunk(**cost: object) -> str:
        return dict(headlines(summarize(replace(JOB, cost=replace(JOB.cost, **cost)))))["per chunk"]  # type: ignore[arg-type]

    assert " J (p50" in per_chunk()
    assert " J, measured in 90 of 100 tries (p50" in per_chunk(energy_tries=90)
    assert "J" not in dict(headlines(summarize(replace(JOB, cost=CostFacts(3, 2.0)))))["per chunk"]


def test_tries_between_two_readings_of_power_are_not_in_the_joules(tmp_path: Path) -> None:
    TaskFile(tmp_path, index=0, states={"a": "done", "b": "done"}, samples=11).write()
    TaskFile(tmp_path, index=1, states={"c": "done"}, samples=2).write()  # its chunk came after its last reading
    merge(MergeOrder([tmp_path], tmp_path / "job.sqlite"), SystemClock())
    summary = summarize_database(tmp_path / "job.sqlite")
    cost = summary.chunk_cost
    assert (cost.tries, cost.energy_tries) == (3, 2)
    assert cost.energy_j_mean == pytest.approx(125.0)  # 250 W for the second that two chunks shared
    said = "J, measured in 2 of 3 tries"
    assert all(said in " ".join(write(summary, "july").split()) for write in (summary_text, markdown, page))
    assert summary.to_dict()["chunk_cost"]["energy_tries"] == 2


# --- the page's stragglers --------------------------------------------------------------------------------------------


def stragglers_on_page(facts: JobFacts) -> tuple[str, str]:
    """Return the section of the page as text, and its number in the navigation."""
    text = page(summarize(facts), "july")
    section = text.partition('<section id="stragglers"')[2].partition("</section>")[0]
    number = re.search(r'href="#stragglers"><span>Stragglers</span>(.*?)</a>', text)
    assert number is not None
    return re.sub(r"<[^>]+>", " ", section), re.sub(r"<[^>]+>", "", number[1])


def test_where_no_device_was_slow_the_page_says_what_was_compared() -> None:
    tasks = tasks_on(nodes=4, rounds=1, devices=1)
    words, number = stragglers_on_page(job_of(tasks, devices_of(tasks, BUSY)))
    assert "4 devices compared with the median speed of the same model while working: 50.0 × real time" in words
    assert number == "0"


def test_where_too_few_can_be_compared_the_page_says_only_that() -> None:
    for tasks in (tasks_on(nodes=3, rounds=1, devices=1), tasks_on(nodes=1, rounds=9, devices=2)):
        words, number = stragglers_on_page(job_of(tasks, devices_of(tasks, BUSY)))
        assert "No devices were compared: this needs 4 devices of one model with the same work" in words
        assert number == ""
    words, number = stragglers_on_page(job_of(tasks_on(1, 1, devices=0), ()))
    assert "No device was used." in words and number == ""


def test_devices_that_could_not_be_compared_are_not_counted_among_those_that_were() -> None:
    tasks = tasks_on(nodes=5, rounds=1, devices=1)
    devices = devices_of(tasks, BUSY)
    other = replace(devices[0], name="Tesla T4")
    table, words = straggler_table(summarize(job_of(tasks, (other, *devices[1:]))))
    assert words.startswith("4 devices compared with")
    assert "1 other was not compared: this needs 4 devices" in words
    assert table is not None and table.rows == []


def test_the_page_and_the_findings_have_the_same_stragglers() -> None:
    facts = slow_one(5, of=5)
    table, _ = straggler_table(summarize(facts))
    assert table is not None
    assert tuple(row[0] for row in table.rows) == found_in(facts)["straggler_device"].subjects


# --- small numbers ----------------------------------------------------------------------------------------------------


def test_little_is_not_nothing() -> None:
    tasks = tasks_on(1, 1, devices=1)
    times = {**BUSY, "failed": StateTime(5.0, 5.0, 0.0, None)}
    text = summary_text(summarize(job_of(tasks, devices_of(tasks, times))), "july")
    assert re.search(r"on failed chunks +<1 min +<1%", text)
    short = replace(tasks[0], last_sign_ms=START_MS + 20_000)
    said = dict(headlines(summarize(job_of((short,), devices_of((short,), BUSY)))))["GPU time"]
    assert said.startswith("20.0 s, 0.0056 GPU-hours; ")


def test_what_was_heard_most_often_is_told_and_how_many_labels_there_are() -> None:
    labels = tuple((f"label-{n}-of-a-long-name", None, 1000 - n) for n in range(40))
    text = summary_text(summarize(replace(JOB, labels=labels)), "july")
    assert "and 30 more labels" in text
    assert max(map(len, text.splitlines())) <= 100
