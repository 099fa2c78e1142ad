"""Labelled jobs: each is a story of which the cause is known, because it was written that way.

``main`` is the one reason for a low busy share that must be named (None: none may be), ``also`` what else must be
found, ``may`` what may be said besides because it is true as well. Everything else that is found is wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rooms.report import Finding, find, summarize
from rooms.root import SystemClock
from rooms.store import MergeOrder, merge, read_job
from support.task_files import START_MS
from support.trace_files import IN_MEMORY, TraceWriter
from support.trace_task import H200, MIG, RTX4000, V100, Story


@dataclass(frozen=True)
class Trace:
    """A job and what is to be found in it."""

    name: str
    tasks: Sequence[Story]
    main: str | None = None
    also: frozenset[str] = frozenset()
    may: frozenset[str] = frozenset()
    missing: Sequence[int] = field(default=())
    seen_s: float = 365 * 86400.0  # after the start of its first task it was looked at; most are an old story


def diagnose(trace: Trace) -> tuple[Finding, ...]:
    """Write the job's task databases, merge them, read the job database, and return what is found."""
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as name:
        folder = Path(name)
        for story in trace.tasks:
            TraceWriter(folder, story).write()
        target = folder / "job.sqlite"
        merge(MergeOrder([folder], target), SystemClock())
        facts = read_job(target)
    return find(summarize(facts, trace.missing, now_ms=START_MS + round(1000 * trace.seen_s)))


def _trace(name: str, *tasks: Story, main: str | None = None, also: str = "", may: str = "", **when) -> Trace:
    return Trace(name, tasks, main, frozenset(also.split()), frozenset(may.split()), **when)


def _array(story: Story, many: int, *, per_node: int = 1) -> list[Story]:
    return [
        replace(story, index=n, node=f"gpu{n // per_node:02d}", seed=story.seed + 31 * n, started_s=0.7 * n)
        for n in range(many)
    ]


_SIX_MINUTES = (1200.0,) * 105  # of one V100
_QUARTER = (1200.0,) * 475  # a quarter of an hour of two V100
_PLAIN = Story(chunks=_QUARTER)


def healthy() -> list[Trace]:
    """Return jobs in which all is well, odd ones too."""
    tiny = Story(card=H200, workers=2, chunks=(30.0,) * 12, start_up_s=0.4, prepare_s=0.3, end_s=0.2)
    return [
        _trace("two V100, four workers each", _PLAIN),
        _trace("a MIG slice that tells next to nothing", replace(_PLAIN, card=MIG, devices=1, workers=2, cores=4,
                                                                chunks=(300.0,) * 200)),
        _trace("on the CPU, on purpose", Story(devices=0, workers=4, cores=4, chunks=(120.0,) * 400,
                                               settings={"cpu_workers": 4})),
        _trace("chunks of 40 ms", replace(_PLAIN, devices=1, cores=6, chunks=(6.0,) * 1500, read_s=0.002)),
        _trace("a demo of two seconds", tiny, replace(tiny, index=1, seed=9)),
        _trace("at its power limit, at full speed", replace(_PLAIN, throttle={0: 0x4, 1: 0x4}, seed=11)),
        _trace("without telemetry", replace(_PLAIN, telemetry=False)),
    ]  # fmt: skip


def starting_and_waiting() -> list[Trace]:
    """Return jobs whose devices wait for engines to start, for audio, or for each other."""
    short = Story(devices=1, cores=6, chunks=(300.0,) * 15)
    crashes = dict.fromkeys(range(4, 240, 6), ("engine_crash",))
    long_last = (*(300.0,) * 300, 86400.0)
    return [
        _trace("five tasks with next to nothing to do", *_array(short, 5), main="start_up"),
        _trace("engines that crash all the time", Story(card=V100, devices=2, workers=1, cores=4, cpu_s=0.05,
               chunks=(600.0,) * 240, fails=crashes), main="start_up", may="failed_chunks"),
        _trace("workers that have to wait for their next chunk", Story(devices=2, workers=1, cores=2, cpu_s=0.04,
               pause_s=5.0, chunks=(600.0,) * 200), main="waiting_for_audio"),
        _trace("one recording of a whole day at the end", Story(devices=4, workers=3, cores=16, chunks=long_last),
               main="tail"),
        _trace("nine long chunks for eight devices", Story(card=RTX4000, devices=8, workers=1, cores=16, cpu_s=0.08,
               chunks=(36000.0,) * 9), main="tail"),
        _trace("one task of four has most of the work", *[replace(task, chunks=(1200.0,) * (475 if n == 3 else 48))
               for n, task in enumerate(_array(replace(_PLAIN, devices=1, cores=6), 4))], main="tail",
               may="start_up"),
    ]  # fmt: skip


def cores_and_workers() -> list[Trace]:
    """Return jobs whose devices wait for the engine's own work on the CPU."""
    settled = ("workers_per_gpu", H200.name, 3.0, "4 per device changed the rate by +2% against 3")
    return [
        _trace("eight workers on four cores", Story(card=H200, devices=1, workers=8, cores=4, chunks=(1200.0,) * 300),
               main="cpu_bound"),
        _trace("one worker, one big card", Story(card=H200, devices=1, workers=1, cores=16, chunks=(600.0,) * 200),
               main="too_few_workers"),
        _trace("as many workers as pay, on a card that is too big", Story(card=H200, devices=1, workers=3, cores=16,
               chunks=(1200.0,) * 200, decisions=(settled,)), main="low_busy"),
    ]  # fmt: skip


def work_and_failures() -> list[Trace]:
    """Return jobs of which some work failed, got lost, or was never done."""
    oom = dict.fromkeys(range(0, 475, 10), ("out_of_memory",))
    learned = ("memory_limit", V100.name, 300.0, "300 s of audio ran out of memory; in pieces it fits")
    bad = dict.fromkeys((5, 77, 400), ("bad_audio",) * 3)
    poison = {9: ("engine_crash",) * 2, 60: ("engine_crash",) * 2}
    long = Story(devices=2, workers=4, cores=16, chunks=(18000.0,) * 60)
    one = replace(_PLAIN, devices=1, cores=6, chunks=_SIX_MINUTES)
    return [
        _trace("out of memory, rescued", replace(_PLAIN, fails=oom, decisions=(learned,)), also="out_of_memory"),
        _trace("three broken files", replace(_PLAIN, fails=bad, hopeless=dict.fromkeys(bad, "failed")),
               also="failed_chunks"),
        _trace("two chunks that kill the engine", replace(_PLAIN, fails=poison,
               hopeless=dict.fromkeys(poison, "poison")), also="poison_chunks"),
        _trace("killed at its time limit, with long chunks", replace(long, killed_s=900.0, slurm_state="TIMEOUT",
               time_limit_s=900.0), also="tasks_killed time_request lost_work"),
        _trace("submitted again without what was done", one, replace(one, restart=1, node="gpu2", started_s=900.0,
               seed=6), also="done_again"),
        _trace("stopped in order at its time limit", replace(_PLAIN, stopped_s=590.0, time_limit_s=660.0),
               also="time_request"),
        _trace("Slurm killed it for its memory", replace(_PLAIN, killed_s=420.0, slurm_state="OUT_OF_MEMORY",
               memory_limit_gib=20.0, worker_gib=2.4), also="tasks_killed memory_request"),
        _trace("the engine did not use its GPU", replace(_PLAIN, on_cpu=True, chunks=(300.0,) * 90), also="ran_on_cpu"),
        _trace("some tasks had no GPU", one, replace(one, index=3, node="cpu1", devices=0, cores=6,
               chunks=(120.0,) * 80), also="ran_on_cpu"),
    ]  # fmt: skip


def devices_and_requests() -> list[Trace]:
    """Return jobs with trouble on a device, a slow one, or a request far from what was used."""
    eight = _array(replace(_PLAIN, devices=1, cores=6, chunks=_SIX_MINUTES), 8)
    pairs = _array(replace(_PLAIN, cores=12, chunks=_QUARTER[:175]), 3)
    four = replace(_PLAIN, devices=4, cores=24, chunks=(1200.0,) * 600)
    slow_node = {0: 1.9, 1: 1.9}
    return [
        _trace("one device too hot", replace(four, throttle={2: 0x20}, slowness={2: 1.8}), also="throttled_thermal",
               may="straggler_device"),
        _trace("a low power limit", replace(_PLAIN, throttle={0: 0x4, 1: 0x4}, slowness={0: 1.6, 1: 1.6},
               chunks=_QUARTER[:300]), also="throttled_power"),
        _trace("one GPU of two used", replace(_PLAIN, idle_devices=frozenset({1}), chunks=_QUARTER[:225], cores=6),
               also="unused_gpus"),
        _trace("one slow node of three", *[replace(t, slowness=slow_node) if t.index == 2 else t for t in pairs],
               also="straggler_node"),
        _trace("one slow device in a task of four", replace(four, slowness={3: 2.2}), also="straggler_device"),
        _trace("three days and a whole node", *[replace(t, time_limit_s=72 * 3600.0, memory_limit_gib=180)
               for t in eight[:1]], also="time_request memory_request"),
        _trace("24 cores for one busy card", replace(_PLAIN, card=RTX4000, devices=1, workers=2, cores=24,
               chunks=(1200.0,) * 125), also="cpus_request"),
        _trace("somebody else on our device", replace(_PLAIN, foreign=((1, 100.0, 500.0, 6.0),)),
               also="foreign_process"),
        _trace("the recorder was gone for a while", replace(_PLAIN, gaps=((None, 200.0, 500.0, "the recorder died"),)),
               also="telemetry_gaps"),
        _trace("an energy counter that counts half", replace(_PLAIN, counter_factor=0.5), also="energy_disagrees"),
        _trace("a GPU that fell off the bus", replace(four, lost={1: 200.0}, faults={195.0: (1, "Xid 79")}),
               also="device_lost", may="device_fault telemetry_gaps"),
        _trace("a GPU that reports faults", replace(_PLAIN, faults={300.0: (0, "Xid 31"), 400.0: (0, "Xid 31")}),
               also="device_fault"),
        _trace("memory errors", replace(_PLAIN, ecc={1: 250.0}), also="ecc_errors"),
    ]  # fmt: skip


def under_way() -> list[Trace]:
    """Return jobs that were looked at before all of their tasks had ended, or said so."""
    one = replace(_PLAIN, devices=1, cores=6, chunks=_SIX_MINUTES)
    running = replace(one, under_way_s=200.0, time_limit_s=72 * 3600.0)
    long = Story(devices=2, workers=4, cores=16, chunks=(18000.0,) * 60)
    long_chunk = Story(devices=2, workers=1, cores=4, chunks=(50000.0,) * 4, under_way_s=86.0)
    return [
        _trace("two tasks that run, half way", *_array(running, 2), seen_s=230.0),
        _trace("a first chunk that takes long", long_chunk, seen_s=100.0),
        _trace("one ended, and two left no word", one, missing=(1, 2), also="tasks_missing"),
        _trace("two tasks run, others wait in the queue", *_array(running, 2), missing=(2, 3, 4), seen_s=230.0),
        _trace("one of two tasks went silent", one, replace(one, index=1, under_way_s=200.0), also="tasks_silent"),
        _trace("silent, with long chunks under way", replace(long, under_way_s=900.0), also="tasks_silent lost_work"),
        _trace("a silent attempt, whose next one did the rest", replace(one, under_way_s=200.0),
               replace(one, restart=1, node="gpu2", started_s=900.0, seed=6, done_before=51, chunks=_SIX_MINUTES[51:]),
               also="tasks_silent"),
    ]  # fmt: skip


def all_traces() -> list[Trace]:
    """Return all of them; every other seed makes another job of the same kind."""
    return [
        *healthy(), *starting_and_waiting(), *cores_and_workers(), *work_and_failures(), *devices_and_requests(),
        *under_way(),
    ]  # fmt: skip
