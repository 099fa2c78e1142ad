"""Jobs of which the cause is known, because they were written that way: each is diagnosed right, and nothing else."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rooms.report import KINDS, Finding, find, summarize
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge, read_job
from support.story import H200, IN_MEMORY, MIG, RTX4000, V100, Story, write_story
from support.task_files import START_MS

OF_LOW_BUSY = ("start_up", "waiting_for_audio", "cpu_bound", "too_few_workers", "tail", "low_busy")
UGLY = re.compile(
    r"\b(?:None|nan|inf)\b| -\d|\b1 (?:chunks|tasks|devices|GPUs|nodes|workers|tries|gaps|alerts|processes)\b"
)
OPTION = re.compile(
    r"#SBATCH --(mem=\d+G|time=\d+:\d\d:00|cpus-per-task=\d+|gpus-per-node=\d+|array=0-\d+|exclude=[\w,.\[\]-]+"
    r"|signal=B:USR1@\d+)|[^#…]*"
)
Labelled = tuple[str, list[Story], Mapping[str, object]]  # what must and (?) may be found; tasks; how it is looked at


def job(found: str, *tasks: Story, **when: object) -> Labelled:
    return found, list(tasks), when


def array(story: Story, many: int, per_node: int = 1) -> list[Story]:
    return [
        replace(story, index=n, node=f"gpu{n // per_node:02d}", seed=story.seed + 31 * n, started_s=0.7 * n)
        for n in range(many)
    ]


def each(numbers: range | tuple[int, ...], *errors: str) -> dict[int, tuple[str, ...]]:
    return dict.fromkeys(numbers, errors)


PLAIN = Story(chunks=(3600.0,) * 158)  # a quarter of an hour of two V100
ONE = replace(PLAIN, devices=1, cores=6, chunks=(3600.0,) * 35)  # six minutes
FOUR = replace(PLAIN, devices=4, cores=24, chunks=(3600.0,) * 200)
LONG = Story(devices=2, workers=4, cores=16, chunks=(18000.0,) * 60)
TINY = Story(card=H200, workers=2, chunks=(30.0,) * 12, start_up_s=0.4, prepare_s=0.3, end_s=0.2)
RUNNING = replace(ONE, under_way_s=200.0, time_limit_s=72 * 3600.0)
AGAIN = replace(ONE, restart=1, node="gpu2", started_s=900.0, seed=6)
SETTLED = ("workers_per_gpu", H200.name, 3.0, "4 per device changed the rate by +2% against 3")
LEARNED = ("memory_limit", V100.name, 300.0, "300 s of audio ran out of memory; in pieces it fits")
BAD, POISON = each((5, 77, 130), *["bad_audio"] * 3), each((9, 60), *["engine_crash"] * 2)
PAIRS = array(replace(PLAIN, cores=12, chunks=(3600.0,) * 58), 3)

JOBS: dict[str, Labelled] = {
    # all is well, odd as it may be
    "two V100, four workers each": job("", PLAIN),
    "a MIG slice that tells next to nothing": job(
        "", replace(PLAIN, card=MIG, devices=1, workers=2, cores=4, chunks=(300.0,) * 200)),
    "on the CPU, on purpose": job(
        "", Story(devices=0, workers=4, cores=4, chunks=(120.0,) * 400, settings={"cpu_workers": 4})),
    "chunks of 40 ms": job("", replace(PLAIN, devices=1, cores=6, chunks=(6.0,) * 1500, read_s=0.002)),
    "a demo of two seconds": job("", TINY, replace(TINY, index=1, seed=9)),
    "at its power limit, at full speed": job("", replace(PLAIN, throttle={0: 0x4, 1: 0x4}, seed=11)),
    "without telemetry": job("", replace(PLAIN, telemetry=False)),
    "two tasks that run, half way": job("", *array(RUNNING, 2), seen_s=230.0),
    "a first chunk that takes long": job(
        "", Story(devices=2, workers=1, cores=4, chunks=(50000.0,) * 4, under_way_s=86.0), seen_s=100.0),
    "two tasks run, others wait in the queue": job("", *array(RUNNING, 2), missing=(2, 3, 4), seen_s=230.0),
    # devices wait for engines to start, for audio, for each other, or for cores
    "five tasks with next to nothing to do": job(
        "start_up", *array(Story(devices=1, cores=6, chunks=(300.0,) * 15), 5)),
    "engines that crash all the time": job(
        "start_up ?failed_chunks", Story(workers=1, cores=4, cpu_s=0.05, chunks=(600.0,) * 240,
                                         fails=each(range(4, 240, 6), "engine_crash"))),
    "workers that have to wait for their next chunk": job(
        "waiting_for_audio", Story(workers=1, cores=2, cpu_s=0.04, pause_s=5.0, chunks=(600.0,) * 200)),
    "one recording of a whole day at the end": job(
        "tail", Story(devices=4, workers=3, chunks=(*(300.0,) * 300, 86400.0))),
    "eight workers on four cores": job(
        "cpu_bound", Story(card=H200, devices=1, workers=8, cores=4, chunks=(3600.0,) * 100)),
    "one worker, one big card": job("too_few_workers", Story(card=H200, devices=1, workers=1, chunks=(600.0,) * 200)),
    "as many workers as pay, on a card that is too big": job(
        "low_busy", Story(card=H200, devices=1, workers=3, chunks=(1200.0,) * 200, decisions=(SETTLED,))),
    # work that failed, got lost, or was never done
    "out of memory, rescued": job(
        "out_of_memory", replace(PLAIN, fails=each(range(0, 158, 8), "out_of_memory"), decisions=(LEARNED,))),
    "three broken files": job("failed_chunks", replace(PLAIN, fails=BAD, hopeless=dict.fromkeys(BAD, "failed"))),
    "two chunks that kill the engine": job(
        "poison_chunks", replace(PLAIN, fails=POISON, hopeless=dict.fromkeys(POISON, "poison"))),
    "killed at its time limit, with long chunks": job(
        "tasks_killed time_request lost_work",
        replace(LONG, killed_s=900.0, slurm_state="TIMEOUT", time_limit_s=900.0)),
    "submitted again without what was done": job("done_again", ONE, AGAIN),
    "stopped in order at its time limit": job("time_request", replace(PLAIN, stopped_s=590.0, time_limit_s=660.0)),
    "Slurm killed it for its memory": job(
        "tasks_killed memory_request",
        replace(PLAIN, killed_s=420.0, slurm_state="OUT_OF_MEMORY", memory_limit_gib=20.0)),
    "the engine did not use its GPU": job("ran_on_cpu", replace(PLAIN, on_cpu=True, chunks=(300.0,) * 90)),
    "one ended, and two left no word": job("tasks_missing", ONE, missing=(1, 2)),
    "one of two tasks went silent": job("tasks_silent", ONE, replace(ONE, index=1, under_way_s=200.0)),
    "silent, with long chunks under way": job("tasks_silent lost_work", replace(LONG, under_way_s=900.0)),
    "a silent attempt, whose next one did the rest": job(
        "tasks_silent", replace(ONE, under_way_s=200.0), replace(AGAIN, done_before=17, chunks=(3600.0,) * 18)),
    # trouble on a device, a slow one, or a request far from what was used
    "one device too hot": job(
        "throttled_thermal ?straggler_device", replace(FOUR, throttle={2: 0x20}, slowness={2: 1.8})),
    "a low power limit": job(
        "throttled_power",
        replace(PLAIN, throttle={0: 0x4, 1: 0x4}, slowness={0: 1.6, 1: 1.6}, chunks=(3600.0,) * 100)),
    "one GPU of two used": job(
        "unused_gpus", replace(PLAIN, idle_devices=frozenset({1}), chunks=(3600.0,) * 75, cores=6)),
    "one slow node of three": job("straggler_node", *PAIRS[:2], replace(PAIRS[2], slowness={0: 1.9, 1: 1.9})),
    "one slow device in a task of four": job("straggler_device", replace(FOUR, slowness={3: 2.2})),
    "three days and a whole node": job(
        "time_request memory_request", replace(ONE, time_limit_s=72 * 3600.0, memory_limit_gib=180)),
    "24 cores for one busy card": job(
        "cpus_request", replace(PLAIN, card=RTX4000, devices=1, workers=2, cores=24, chunks=(3600.0,) * 42)),
    "somebody else on our device": job("foreign_process", replace(PLAIN, foreign=((1, 100.0, 500.0, 6.0),))),
    "the recorder was gone for a while": job(
        "telemetry_gaps", replace(PLAIN, gaps=((200.0, 500.0, "the recorder died"),))),
    "an energy counter that counts half": job("energy_disagrees", replace(PLAIN, counter_factor=0.5)),
    "a GPU that fell off the bus": job(
        "device_lost ?device_fault ?telemetry_gaps", replace(FOUR, lost={1: 200.0}, faults={195.0: (1, "Xid 79")})),
    "a GPU that fell off the bus just now": job(
        "device_lost", replace(FOUR, lost={1: 195.0}, under_way_s=200.0), seen_s=210.0),
    "a GPU that reports faults": job(
        "device_fault", replace(PLAIN, faults={300.0: (0, "Xid 31"), 400.0: (0, "Xid 31")})),
    "memory errors": job("ecc_errors", replace(PLAIN, ecc={1: 250.0})),
}  # fmt: skip


def diagnose(tasks: list[Story], missing: tuple[int, ...] = (), seen_s: float = 365 * 86400.0) -> tuple[Finding, ...]:
    """Write the task databases, merge them, and look at the job so long after the start of its first task."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        for story in tasks:
            write_story(Path(name), story)
        merge(MergeOrder([Path(name)], Path(name) / "job.sqlite"), SystemClock())
        facts = read_job(Path(name) / "job.sqlite")
    return find(summarize(facts, missing, now_ms=START_MS + round(1000 * seen_s)))


def test_every_labelled_job_is_diagnosed_right_in_sentences_with_numbers_and_something_to_do() -> None:
    misses, labelled = {}, set[str]()
    for name, (label, tasks, when) in JOBS.items():
        wanted = [kind for kind in label.split() if kind[0] != "?"]
        allowed = {kind.lstrip("?") for kind in label.split()}
        found = diagnose(tasks, **when)
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
    assert labelled == set(KINDS), "each kind of finding has a labelled job"
