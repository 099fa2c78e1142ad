"""What is found in a job, at each threshold and just below it, from facts.

The pages say all of it: after each ``##`` a rule, then for each value what is found. Neighbouring numbers must differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

import pytest
from rooms import store
from rooms.cli import read_topic
from rooms.model import MemoryHeld
from rooms.report import Finding, Summary, find, list_findings, summarize
from rooms.store import AlertFacts, DeviceFacts, DeviceWork, ErrorFacts, GapFacts, JobFacts, StateTime, TaskFacts
from rooms.workers import Ramp, plan_start
from support.pages import Pages

START_MS, HOUR_S, GIB = 1_800_000_000_000, 3600.0, 2**30
END_MS = START_MS + 3_600_000
TASK = TaskFacts(
    "1_0.r0.gpu1", "1", 0, 0, "gpu1", None, "done", 0, 1, 1, START_MS, END_MS, 500, 0, 0, 1e6,
    engine="hawkears", workers=2, cpus=8, cpu_mean_cores=2.0,
)  # fmt: skip
UNENDED = replace(TASK, verdict=None, exit_code=None)
KILLED = replace(TASK, verdict="killed", exit_code=None)
SILENT = replace(UNENDED, pending=9, heard_at_ms=END_MS, silent_after_s=120.0)
WORK = DeviceWork(2, 500, 0, 0, 1e6, 14.0, 16.0, 20.0, END_MS)
Variants = Mapping[object, JobFacts | Summary]


def spent(busy: float, **seconds: float) -> dict[str, StateTime]:
    """Return the times of a device that is busy for this share of its work, and never else."""
    return {name: StateTime(s, s, s * busy if name == "working" else 0.0, None) for name, s in seconds.items()}


DEVICE = DeviceFacts(
    TASK.name, "gpu1", 0, "GPU-1", "0", "Tesla V100", "nvml", 32 * GIB, 3600, 4 * GIB, 60, 200.0, None, None,
    HOUR_S, 0.0, work=WORK, states=spent(0.9, working=HOUR_S),
)  # fmt: skip
IDLE = replace(DEVICE, states=spent(0.2, working=HOUR_S))


def with_work(device: DeviceFacts = DEVICE, **changes: object) -> DeviceFacts:
    return replace(device, work=replace(device.work, **changes))


def lasting(task: TaskFacts, seconds: float, **changes: object) -> TaskFacts:
    return replace(task, last_sign_ms=task.started_at_ms + round(1000 * seconds), **changes)


def job(*tasks: TaskFacts, devices: Iterable[DeviceFacts] = (DEVICE,), **more: object) -> JobFacts:
    tasks = tasks or (TASK,)
    chunks = {"done": sum(t.done for t in tasks), "pending": sum(t.pending for t in tasks)}
    facts = JobFacts(tasks, tuple(devices), chunks, sum(t.audio_s for t in tasks), 0, 500, (), (), (), ())
    return replace(facts, **more)


def many(task: TaskFacts, number: int, **changes: object) -> list[TaskFacts]:
    return [replace(task, name=f"1_{n}", array_index=n, **changes) for n in range(number)]


def proof(**changes: object) -> store.Completeness:
    return replace(store.Completeness(None, None, 9, 0, 0, 0, 9, 0), **changes)


def at(make: Callable[..., JobFacts | Summary], *values: object) -> Variants:
    return {value: make(value) for value in values}


def late(facts: JobFacts, seconds: float = 600.0, **more: object) -> Summary:
    return summarize(facts, now_ms=max(task.last_sign_ms for task in facts.tasks) + round(1000 * seconds), **more)


# --- tasks and chunks -------------------------------------------------------------------------------------------------


def failed(
    number: int, error_class: str = "bad_audio", error: str = "no header", **more: str
) -> list[store.FailedChunk]:
    return [store.FailedChunk(f"r{n}", more.get("chunk", f"r{n}"), more.get("status", "failed"), 3, error_class, error)
            for n in range(number)]  # fmt: skip


def with_failed(those: Iterable[store.FailedChunk], done: int = 10, **more: object) -> JobFacts:
    listed = tuple(those)
    poison = sum(chunk.status == "poison" for chunk in listed)
    counts = {"done": done, "failed": len(listed) - poison, "poison": poison}
    return job(**{"failed": listed, "chunks": counts, **more})


def of_tasks() -> dict[str, Variants]:
    again = replace(UNENDED, name="1_0.r1.gpu2", pending=8, started_at_ms=END_MS + 60_000, last_sign_ms=END_MS + 90_000)
    first = replace(SILENT, pending=0)
    notes = ("exit code 1", "exit code 1", "b", "c", "d", "e")
    lost, short = (with_work(lost=3),), lasting(TASK, 1000)
    oom = ErrorFacts("out_of_memory", 7, 4, 3, 1, "CUDA out of memory")
    died = ErrorFacts("worker_died", 40, 40, 40, 1, "first\nKilled  \n")
    beyond = ("/a.wav has 61.000 s of audio and nothing after 70.000 s",
              "/a.wav ends at 61.000 s, before the end of the chunk from 55.000 s to 65.000 s", "RIFF?")  # fmt: skip
    limits = tuple(store.DecisionFacts("memory_limit", name, value, "two tries failed", 1)
                   for name, value in (("V100", 900.0), (None, 610.4), ("A100", None)))  # fmt: skip
    classes = (*("bad_audio",) * 2, "missing_audio", "no_space", "host_memory", "configuration", "gpu_error", "")

    def doing(left: int, **changes: object) -> Summary:
        """An attempt that went silent, while another one does the rest."""
        return late(job(first, replace(again, pending=left, **changes), chunks={"done": 10, "pending": left}), 60)

    def followed(of: TaskFacts = KILLED, **changes: object) -> JobFacts:
        return job(replace(of, done=4), replace(again, **changes), chunks={"done": 4, "pending": 8})

    def submitted(cluster: str) -> Summary:
        finish = (f"badcjobs submit m.csv --cluster={cluster}",)
        return summarize(job(), (3, 4), proof(missing_indices=(3, 4), finish=finish))

    return {
        "tasks without a database": {
            "three": summarize(job(), (1, 2, 7)),
            "others are running, and it may be in the queue": summarize(job(replace(UNENDED, pending=9)), (3,)),
            "one, and a command": summarize(job(), (3,), proof(missing_indices=(3,), finish=("sbatch --array=3 …",))),
            "the folder cannot be read": summarize(job(merged=store.Freshness(closed="no permission")), (3,)),
            "of an emulation": summarize(job(), range(6), proof(missing_indices=tuple(range(6)), missing_notes=notes)),
            **at(submitted, "local", "slurm"),
        },
        "silent": {
            **at(lambda s: late(job(SILENT), s), 120, 121),
            **at(lambda ms: late(job(SILENT, replace(SILENT, name="b", heard_at_ms=END_MS - ms))), 59_999, 60_000),
            "not started by Slurm": late(job(replace(SILENT, job_id="local18-7"))),
            "a command": late(job(SILENT), completeness=proof(finish=("badcjobs submit m.csv --cluster=local",))),
            "all its chunks are done, in a job that is not": late(job(first, chunks={"done": 500, "pending": 1})),
            "another attempt does the rest": doing(8),
            "another attempt did the rest": doing(0),
            "another attempt has ended too early": doing(8, verdict="stopped"),
            "an attempt of another index": doing(8, array_index=1, shard_count=2),
            "an attempt of all": doing(8, array_index=1, shard_count=1),
        },
        "what a silent task had under way": {
            late_s: late(job(SILENT, devices=[replace(DEVICE, under_way=store.UnderWay(2, 900.0, 600.0))]), late_s)
            for late_s in (60, 600)
        },
        "killed": {
            **at(lambda state: job(replace(KILLED, pending=5, slurm_state=state)), "TIMEOUT", "OUT_OF_MEMORY",
                 "NODE_FAIL", "PREEMPTED", "CANCELLED by 123", "BOOT_FAIL", None),
            **at(lambda state: job(replace(UNENDED, pending=5, slurm_state=state)), "FAILED", "COMPLETING"),
            "several states": job(TASK, *(replace(lasting(KILLED, 60 * n), name=f"{n}", pending=1, slurm_state=state)
                                  for n, state in enumerate(("TIMEOUT", "TIMEOUT", "A", "B", "C", "D"), start=1))),
            "thousands": job(TASK, *many(KILLED, 24, pending=1), *many(TASK, 1975)),
            "not started by Slurm": job(replace(KILLED, job_id="local18-7", pending=5)),
            "its work was done by another": job(KILLED, TASK),
            "another attempt does the rest": followed(),
            "another attempt has ended too early": followed(verdict="stopped", exit_code=130),
            "an attempt of another index": followed(array_index=1, shard_count=2),
            "an attempt of all": followed(replace(KILLED, array_index=1), shard_count=1),
            "an attempt that began before its end": followed(started_at_ms=END_MS),
        },
        "lost work: 2 % of the GPU time": at(lambda s: job(devices=lost, lost_gpu_s=s), 72.0, 71.9),
        "lost work: a minute": at(lambda s: job(short, devices=lost, lost_gpu_s=s), 60.0, 59.9),
        "lost work: in tries that have ended": {1: job(devices=lost, lost_gpu_s=900), 0: job(lost_gpu_s=900.0)},
        "done again: 2 % of the GPU time": at(lambda s: job(conflicts=3, again_gpu_s=s), 72.0, 71.9),
        "done again: a minute": at(lambda s: job(short, conflicts=3, again_gpu_s=s), 60.0, 59.9),
        "done again: a tenth of the chunks": at(lambda n: job(conflicts=n), 50, 49),
        "done again: serious": at(lambda s: job(conflicts=1, again_gpu_s=s), 36_000.0, 35_999.0),
        "done again: two jobs, without resume": {
            resume: job(TASK, replace(TASK, job_id="2"), conflicts=300, last_settings={"resume": resume})
            for resume in (False, True)
        },
        "poison": {
            "one": with_failed([*failed(1, "hang", status="poison")]),
            "many": with_failed([c for n, kind in enumerate("abcd", 1) for c in failed(n, kind, status="poison")]),
            "not read": with_failed([], chunks={"done": 9, "poison": 2}),
        },
        "out of memory": {
            "failed for good": with_failed(failed(2, "out_of_memory"), errors=(oom,), decisions=limits[:1]),
            "no tries are known": with_failed(failed(2, "out_of_memory")),
            "not done yet": job(errors=(oom,), decisions=limits),
            "done in the end": job(errors=(replace(oom, rescued=4),), failed_gpu_s=900.0),
        },
        "failed for good: 1 % of the chunks": at(lambda n: with_failed(failed(n), done=500 - n), 6, 5),
        "failed for good: a minute of GPU time": at(lambda s: with_failed(failed(1), failed_gpu_s=s), 60.0, 59.9),
        "failed for good: by class": {
            "all": with_failed(chunk for error_class in classes for chunk in failed(1, error_class)),
            "others": with_failed([*failed(1, "gpu_error"), *failed(2, ""), *failed(1, "x", "a\x07\n\x1b[2J")]),
            "rows beyond the end": with_failed([c for text in beyond for c in failed(1, error=text, chunk=text[:3])]),
        },
        "failed for good: only some are read": {
            "all of one class": with_failed(failed(10), chunks={"done": 10, "failed": 30}),
            "of two": with_failed([*failed(9), *failed(1, "no_space")], chunks={"done": 10, "failed": 20, "poison": 4}),
        },
        "failed tries: 5 minutes": at(lambda s: job(errors=(died, oom), failed_gpu_s=s), 300.0, 299.9),
        "failed tries: 5 % of the GPU time": at(
            lambda s: job(lasting(TASK, 10 * HOUR_S), errors=(died,), failed_gpu_s=s), 1800.0, 1799.9
        ),
        "failed tries: known advice": {
            name: job(errors=(ErrorFacts(name, 9, 9, 9, 1, ""),), failed_gpu_s=900.0) for name in ("bad_audio", "x")
        },
    }  # fmt: skip


# --- devices ----------------------------------------------------------------------------------------------------------


def clock(p50: float, most: float = 1000.0) -> dict[str, store.MetricFacts]:
    return {"sm_clock_mhz": store.MetricFacts(3600, 100.0, p50, p50, most, most)}


def throttled(device: DeviceFacts = DEVICE, mhz: float = 900.0, **samples: int) -> JobFacts:
    return job(devices=[replace(device, throttled=samples, metrics=clock(mhz))])


def hot_nodes(hot: int, nodes: int, **more: object) -> JobFacts:
    devices = [replace(DEVICE, node=f"gpu{n:02}", throttled={"hw_thermal_slowdown": 1800 * (n < hot)})
               for n in range(nodes)]  # fmt: skip
    return job(replace(TASK, node="gpu00"), devices=devices, **more)


def peers(*rates: float, p50: float = 20.0, per_node: int = 1, slow: Mapping[str, object] | None = None,
          **work: object) -> JobFacts:  # fmt: skip
    """Devices of these speeds, the last ones slow; ``p50``: their seconds for a chunk, where others take 10."""
    devices = []
    for n, rate in enumerate(rates):
        own = {"audio_s": rate * HOUR_S, "chunk_p50_s": p50 if rate < 8 else 10.0, **(work if rate < 8 else {})}
        one = replace(
            DEVICE, node=f"gpu{n // per_node}", uuid=f"GPU-{n}", index=n % per_node, work=replace(WORK, **own)
        )
        devices.append(replace(one, **(slow or {})) if rate < 8 else one)
    return job(replace(TASK, devices=len(rates)), devices=devices)


def without_readings(gap_s: float, wall_s: float = HOUR_S, samples: int = 9, **more: object) -> JobFacts:
    gaps = tuple(GapFacts(f"reason {n}", None, n, 60.4 * n, 1) for n in (1, 2, 3, 4))
    devices = [replace(DEVICE, gap_s=gap_s, samples=samples, **more), replace(DEVICE, device_id=2, uuid="GPU-2")]
    devices = [replace(one, states=spent(0.9, working=wall_s)) for one in devices]
    return job(lasting(TASK, wall_s, devices=2), devices=devices, gaps=(GapFacts("no", "power_w", 1, 9, 1), *gaps))


def counted(joules: float, counted_s: float = HOUR_S, power_s: float = HOUR_S, **more: object) -> JobFacts:
    """A device whose power readings say 200 W."""
    times = spent(0.9, working=power_s)
    device = replace(DEVICE, energy_counter_j=joules, energy_counter_span_s=counted_s, states=times, **more)
    return job(devices=[replace(device, energy_integrated_j=200.0 * power_s)])


def of_devices() -> dict[str, Variants]:
    alert = AlertFacts("ecc", "critical", 2, 1, 90.0, 3.0, None, "device 0 has new uncorrected memory errors (3)")
    kinds = ("lost", "fault", "ecc", "thermal")
    short = replace(DEVICE, span_s=600.0, samples=600, states=spent(0.9, working=600.0))
    gone = replace(with_work(gave_up="gpu_lost", lost=2), node="gpu7")
    cold = [replace(DEVICE, throttled={"sw_thermal_slowdown": 900}, temperature_max_c=91, metrics=clock(700.4)),
            replace(DEVICE, node="gpu2", throttled={"hw_thermal_slowdown": 400}, metrics=clock(650.0, 990.0)),
            replace(DEVICE, node="gpu3", name="A100", metrics=clock(1400.0, 1410.0)),
            replace(DEVICE, node="gpu3", uuid="GPU-2", metrics=clock(800.0, 1005.0))]  # fmt: skip
    capped = [replace(DEVICE, throttled={"hw_power_brake": 900}, power_limit_w=watts, metrics={}, index=n)
              for n, watts in enumerate((250.0, 199.6, None))]  # fmt: skip
    process = store.ForeignProcess("t", "gpu1", 0, 77, "python", "ann", 90.0, GIB)

    def foreign(*others: store.ForeignProcess) -> JobFacts:
        return job(foreign=others)

    return {
        "hardware that failed": {
            **at(lambda kind: job(alerts=(replace(alert, kind=kind),), alert_nodes={kind: ("gpu7", "gpu6")}), *kinds),
            "an instant, on one node": job(alerts=(replace(alert, longest_s=0.0),), alert_nodes={"ecc": ("gpu7",)}),
            "CUDA": job(devices=[gone, replace(gone, task=TASK.name)]),
            "an alert says so, too": job(devices=[gone], alerts=(replace(alert, kind="lost"),)),
            "CUDA, and another alert": job(devices=[gone], alerts=(replace(alert, kind="memory"),)),
        },
        "hot: 5 % of the time": at(lambda n: throttled(hw_thermal_slowdown=n), 180, 179),
        "hot: a minute": at(lambda n: throttled(short, sw_thermal_slowdown=n), 60, 59),
        "hot: several": {"all known": job(devices=cold), "unknown": throttled(
            replace(DEVICE, temperature_max_c=None), sw_thermal_slowdown=900, hw_thermal_slowdown=1800)},
        "hot: without samples": {1: throttled(hw_thermal_slowdown=900),
                                 0: throttled(replace(DEVICE, samples=0), hw_thermal_slowdown=900)},
        "nodes to exclude": {
            f"{hot} of {nodes}": hot_nodes(hot, nodes)
            for hot, nodes in ((1, 1), (4, 44), (5, 60), (2, 20), (3, 20), (2, 19))
        },
        "nodes to exclude, by two findings": {
            "slurm": hot_nodes(2, 44, alerts=(alert,), alert_nodes={"ecc": ("gpu07",)}),
            "local": replace(hot_nodes(2, 44), tasks=(replace(TASK, job_id="local18-7"),)),
        },
        "power: braked": at(lambda n: throttled(hw_power_brake=n), 180, 179),
        "power: a slowdown without heat": at(lambda n: throttled(hw_slowdown=n, hw_thermal_slowdown=100), 280, 279),
        "power: capped for 30 % of the time": at(lambda n: throttled(mhz=700, sw_power_cap=n), 1080, 1079),
        "power: capped, and far below the clock": at(lambda mhz: throttled(mhz=mhz, sw_power_cap=3600), 799, 800),
        "power: no clock is known": {
            "braked": job(devices=capped), "capped": job(devices=[replace(DEVICE, throttled={"sw_power_cap": 3600})]),
        },
        "other processes: 10 seconds": at(lambda s: foreign(replace(process, seconds=s)), 10.0, 9.9),
        "other processes: memory": at(lambda n: foreign(replace(process, memory_peak_bytes=n)), GIB - 1, GIB, None),
        "other processes: several": {
            3: foreign(replace(process, name=None, user=None), replace(process, device_index=1, memory_peak_bytes=None),
                       replace(process, node="gpu2", memory_peak_bytes=2 * GIB), replace(process, seconds=1.0)),
        },
        "slow: below 75 % of the median": at(lambda x: peers(10, 10, 10, 10, x), 7.4, 7.5),
        "slow: by more than chance": at(lambda x: peers(9, 9.5, 10, 10, 10.5, 11, x), 7.40, 7.42),
        "slow: also by the chunk": at(lambda s: peers(10, 10, 10, 10, 7, p50=s), 11.01, 11.0),
        "slow: very slow": at(lambda x: peers(10, 10, 10, 10, x), 4.99, 5.0),
        "slow: at least 4 peers": {4: peers(10, 10, 10, 6), 3: peers(10, 10, 6)},
        "slow: at least 10 chunks": at(lambda n: peers(10, 10, 10, 10, 6, done=n), 10, 9),
        "slow: at least a minute": at(
            lambda s: peers(10, 10, 10, 10, 6, slow={"states": spent(0.9, working=s)}, audio_s=5 * s), 60.0, 59.9
        ),
        "slow: digits": {10: peers(10, 10, 10, 10, 6), 9.9: peers(9.9, 9.9, 9.9, 9.9, 6)},
        "slow: lengths that are not known": {True: peers(10, 10, 10, 10, 6, audio_s=0.0, done=10), False: job()},
        "slow: nodes": {
            "of three": peers(10, 10, 10, 10, 6, 7, per_node=2, slow={"throttled": {"sw_power_cap": 9, "gpu_idle": 9}}),
            "of two": peers(10, 10, 6, 7, per_node=2),
            "half a node": peers(10, 10, 10, 10, 10, 6, per_node=2),
            "two, and a device": peers(*[10] * 11, 3, 7, 7, 7, 7, per_node=2, slow={"name": DEVICE.name}),
        },
        "slow: another model": at(lambda name: peers(10, 10, 10, 10, 6, slow={"name": name}), "Tesla V100", "A100"),
        "gaps: 5 % of the time": at(without_readings, 360.0, 359.9),
        "gaps: a minute": at(lambda s: without_readings(s, 500.0), 60.0, 59.9),
        "gaps: more than half": at(lambda s: job(devices=[replace(DEVICE, gap_s=s)]), 1801.0, 1800.0, 9999.0),
        "gaps: no reading at all": at(lambda n: without_readings(400.0, samples=n), 0, 1),
        "gaps: without telemetry there are none": {
            n: job(replace(TASK, telemetry=n), devices=[replace(DEVICE, gap_s=900.0)]) for n in (1, 0)
        },
        "energy: 5 % more, or less": at(counted, 757_000.0, 755_000.0, 683_000.0, 685_000.0),
        "energy: two minutes": {s: counted(300.0 * s, s, s) for s in (120.0, 119.0)},
        "energy: measured at other times": at(lambda s: counted(230.0 * s, s), 3300.0, 3200.0),
        "energy: of slices": at(lambda uuid: counted(9e5, uuid=uuid), "GPU-1", "MIG-1", None),
        "energy: not both": {"both": counted(9e5), "no counter": counted(0.0), "no span": counted(9e5, 0.0)},
        "energy: the worst of several": {
            2: job(devices=[counted(9e5, index=1).devices[0], counted(4e5, uuid="GPU-9").devices[0]]),
        },
    }  # fmt: skip


# --- idle devices -----------------------------------------------------------------------------------------------------


def idle(task: TaskFacts = TASK, device: DeviceFacts = IDLE, **more: object) -> JobFacts:
    return job(task, devices=[device], **more)


def busy(share: float, **seconds: float) -> JobFacts:
    return idle(device=replace(DEVICE, states=spent(share, **seconds)))


def with_cores(used: float | None, cpus: int = 8, **changes: object) -> JobFacts:
    return idle(replace(TASK, cpu_mean_cores=used, cpus=cpus, **changes))


def ramp(reason: str, value: float | None = 2.0) -> dict[str, object]:
    other = store.DecisionFacts("other", None, 9.0, reason, 1)
    return {"decisions": (other, store.DecisionFacts("workers_per_gpu", "Tesla V100", value, reason, 1))}


def busy_job(waiting_h: float, starting_h: float = 0.0, tasks: int = 1, working_h: float = 950.0) -> JobFacts:
    """A job that works for ``working_h`` hours on each device; with more tasks the first ones lose most."""
    parts = many(TASK, tasks)
    devices = []
    for n, task in enumerate(parts):
        weight = (tasks - n) / sum(range(tasks + 1))
        lost = {"waiting": weight * waiting_h * HOUR_S, "start_up": weight * starting_h * HOUR_S}
        parts[n] = lasting(task, sum(lost.values()) + working_h * HOUR_S)
        work = replace(WORK, last_end_ms=parts[n].last_sign_ms)
        devices.append(
            replace(DEVICE, task=task.name, states=spent(1.0, **lost, working=working_h * HOUR_S), work=work)
        )
    return job(*parts, devices=devices)


def uneven(wall_s: float, audio_s: float = 2e5, number: int = 4, usual_s: float = 600.0, **changes: object) -> JobFacts:
    tasks = [lasting(task, usual_s, audio_s=1e5) for task in many(TASK, number)]
    return job(*tasks[1:], lasting(tasks[0], wall_s, audio_s=audio_s, **changes), devices=[])


def starts(tasks: int, start_s: float = 900.0, wall_s: float = 1500.0, **work: object) -> JobFacts:
    """Tasks of which each spends most of its time with the start of its engines."""
    parts = [lasting(task, wall_s) for task in many(TASK, tasks)]
    times = spent(0.9, start_up=start_s, working=wall_s - start_s)
    return job(*parts, devices=[with_work(replace(DEVICE, task=t.name, uuid=t.name, states=times),
                                          last_end_ms=t.last_sign_ms, **work) for t in parts])  # fmt: skip


def at_rest(own_end_s: float, other_end_s: float, other: DeviceFacts = IDLE, **work: object) -> JobFacts:
    """Two devices in an hour; one works for ten minutes and has its last chunk at ``own_end_s``."""
    ends = (START_MS + round(1000 * end_s) for end_s in (own_end_s, other_end_s))
    resting = replace(DEVICE, states=spent(0.9, working=600.0, waiting=2000.0, idle=1000.0))
    own, other = (with_work(device, last_end_ms=end) for device, end in zip((resting, other), ends, strict=True))
    devices = [with_work(own, **work), replace(other, uuid="GPU-2")]
    return job(replace(TASK, devices=2, read_mean_bytes_per_s=3.14e6), devices=devices)


def of_waiting() -> dict[str, Variants]:
    took_back = "2 per device changed the rate by +1% against 1"
    no_memory = "3 workers need 40 GiB of main memory and the job has 32 GiB"
    both = spent(0.5, working=900.0, start_up=600.0, waiting=1500.0, idle=600.0)
    command = replace(TASK, engine="command", cpu_mean_cores=5.0)
    unknown = {"working": StateTime(HOUR_S, 0.0, None, None)}
    light = {"working": StateTime(HOUR_S, 0.0, 0.2 * HOUR_S, None)}  # it does not tell its power
    pauses = {"working": StateTime(2400.0, 2400.0, 240.0, None), "idle": StateTime(1200.0, 1200.0, 0.0, None)}
    pausing = replace(DEVICE, states=pauses)
    starting = spent(0.9, start_up=2000.0, working=1500.0)

    def shares(second: float) -> JobFacts:
        """Idle while working for 1,000 s, and starting up for ``second``."""
        return busy(0.2, working=1250.0, start_up=second)

    def beside(seconds: float) -> JobFacts:
        """A task of an hour, and a short one whose device did nearly nothing."""
        other = lasting(TASK, seconds, name="1_1", array_index=1, done=5)
        device = replace(IDLE, task="1_1", states=spent(0.1, working=seconds))
        return job(TASK, other, devices=[DEVICE, with_work(device, last_end_ms=other.last_sign_ms)])

    working = replace(TASK, cpu_mean_cores=5.0)

    def held(used_gib: float, **more: object) -> JobFacts:
        device = replace(IDLE, memory_peak_bytes=round(used_gib * GIB), memory_total_bytes=20 * GIB)
        return job(replace(TASK, cpu_mean_cores=5.0, cpus=64), devices=[replace(device, **more), IDLE])

    def cores(busy: float, gpus: int, cpus: int = 8) -> JobFacts:
        devices = [replace(DEVICE, uuid=f"GPU-{n}", states=spent(busy, working=HOUR_S)) for n in range(gpus)]
        return job(
            replace(TASK, devices=gpus, cpus=cpus, cpu_mean_cores=float(cpus), workers=3 * gpus), devices=devices
        )

    return {
        "busy for less than half": at(lambda x: busy(x, working=HOUR_S), 0.499, 0.5),
        "two minutes": at(lambda s: busy(0.1, working=s), 120.0, 119.0),
        "a tenth of the job": at(beside, 400.0, 399.0),
        "serious": at(lambda s: busy(0.2, working=s), 45_000.0, 44_999.0),
        "what is not known": {
            "no power": idle(device=replace(DEVICE, states=light)),
            "no load": idle(device=replace(DEVICE, states=unknown)),
            "no try ended": idle(device=with_work(IDLE, done=0)),
            "failed tries only": idle(device=with_work(IDLE, done=0, failed=1)),
            "no engine": idle(replace(TASK, engine=None)),
        },
        "cause: a program for each chunk": {
            **at(lambda s: idle(command, with_work(IDLE, chunk_p50_s=s)), 60.0, 60.1),
            "two devices": job(command, devices=[with_work(IDLE, chunk_p50_s=s) for s in (61.0, 59.0, None)]),
            **at(lambda s: idle(command, replace(IDLE, states=spent(0.2, working=1000.0, start_up=s))), 790.0, 801.0),
        },
        "cause: the cores of the node": {
            p: with_cores(None, host_cpu_mean_percent=p) for p in (85.0, 84.9, None)
        },
        "cause: how many workers is not known": {n: with_cores(7.5, workers=n) for n in (1, None)},
        "cause: 85 % of the cores": at(with_cores, 6.8, 6.79),
        "cause: half a core to spare": {
            **at(lambda x: with_cores(x, 2), 1.51, 1.5), "of one": with_cores(0.66, 1, workers=1),
            "of none": with_cores(0.66, 0, workers=1),
        },
        "cause: 0.65 cores per worker": at(with_cores, 1.29, 1.3),
        "cause: while they have a chunk": at(lambda cores: idle(
            replace(TASK, cpu_mean_cores=cores), with_work(pausing, last_end_ms=START_MS + 2_400_000)), 0.95, 0.8),
        "cause: what the ramp has found": {
            "nothing": idle(working), "no cores": idle(working, **ramp("no cores for more")),
            "no gain": idle(working, **ramp(took_back)),
            "no memory": idle(replace(working, memory_limit_bytes=round(16.2 * GIB)), **ramp(no_memory)),
            "no memory, nor a request": idle(working, **ramp(no_memory)),
            "12 workers, by its decision": idle(replace(working, devices=2), **ramp("so", 6.0)),
            "no number": idle(working, **ramp("so", None)),
        },
        "a second cause: a fifth": at(shares, 250.0, 249.0),
        "start-up: fewer tasks": {
            **at(starts, 5, 4), "12, each of ten minutes": starts(12, 400.0, 600.0),
            "10, each of two hours": starts(10, 4000.0, 7200.0),
        },
        "start-up: started again": at(lambda n: starts(1, workers=n), 4, 3),
        "start-up: of a running task": {"ended": job(devices=[replace(DEVICE, states=starting)]),
                                        "running": job(UNENDED, devices=[replace(DEVICE, states=starting)])},
        "cores: twice as many, or fewer GPUs": {
            f"busy {busy}, {gpus} of {cpus}": cores(busy, gpus, cpus)
            for busy, gpus, cpus in ((0.46, 1, 7), (0.45, 2, 8), (0.2, 1, 7), (0.2, 8, 12), (0.02, 2, 8), (0.46, 4, 9))
        },
        "memory of the device: 85 %": {
            **at(held, 17.01, 17.0), "not known": held(0.0, memory_total_bytes=None),
        },
        "at rest": {
            "waiting for another": at_rest(650, 3600), "waiting for the end": at_rest(600, 600, other=DEVICE),
            "waiting for audio": at_rest(3500, 3600), "some of each": at_rest(2600, 3000, replace(IDLE, states=both)),
            "given up": at_rest(100, 3600, gave_up="x"), "no chunk has ended": at_rest(0, 3600, last_end_ms=None),
        },
        "failures are told elsewhere": {
            s: busy(0.5, working=900.0, failed=s, lost=s) for s in (100.0, 300.0)
        },
        "large losses: 10 hours": at(lambda h: busy_job(h, working_h=100.0), 10.0, 9.99),
        "large losses: 2 % of the GPU time": at(lambda h: busy_job(h, working_h=980.0), 20.0, 19.9),
        "large losses: 5 %": at(lambda h: busy_job(h), 50.0, 49.9),
        "large losses: 100 hours": at(lambda h: busy_job(h, working_h=4000.0), 100.0, 99.9),
        "large losses: several, the larger first": {"starting": busy_job(60.0, 80.0), "waiting": busy_job(65.0, 40.0)},
        "large losses: in many tasks": at(lambda n: busy_job(200.0, tasks=n, working_h=100.0), 31, 34),
        "large losses: at the end of others": {
            h: job(lasting(TASK, 4 * h * HOUR_S, devices=2), devices=[
                with_work(replace(DEVICE, uuid=str(end_h), states=spent(0.9, working=end_h * HOUR_S, waiting=own_s)),
                          last_end_ms=START_MS + round(end_h * 3_600_000))
                for end_h, own_s in ((4 * h, 0.0), (3 * h, h * HOUR_S))]) for h in (12.0, 9.0)
        },
        "uneven: twice as long": at(lambda s: uneven(s, usual_s=900.0), 1800.0, 1799.0),
        "uneven: ten minutes": at(lambda s: uneven(s, usual_s=500.0), 1100.0, 1099.0),
        "uneven: twice the audio": at(lambda s: uneven(1800.0, s), 2e5, 1.99e5),
        "uneven: four tasks": at(lambda n: uneven(1800.0, number=n), 4, 3),
        "uneven: tasks that ended": at(lambda verdict: uneven(1800.0, verdict=verdict), "failed", "stopped"),
        "uneven: not beside another finding": {0: uneven(1800.0), 1: replace(uneven(1800.0), devices=(
            replace(IDLE, task="1_1"),))},
    }  # fmt: skip


# --- requests ---------------------------------------------------------------------------------------------------------


def asleep(done: int = 3, busy: float = 0.009, working_s: float = 60.0, low: float = 200 * 2**20,
           high: float = 250 * 2**20) -> JobFacts:  # fmt: skip
    held = {"memory_used_bytes": store.MetricFacts(60, low, high, high, high, high)}
    return idle(device=with_work(replace(DEVICE, states=spent(busy, working=working_s), metrics=held), done=done))


def with_unused(idle_s: float = 60.0, number: int = 1, task: TaskFacts = TASK, **changes: object) -> JobFacts:
    unused = [replace(DEVICE, uuid=f"GPU-u{n}", index=n + 1, work=DeviceWork(), states=spent(0.0, idle=idle_s))
              for n in range(number)]  # fmt: skip
    return job(replace(task, devices=1 + number), devices=[DEVICE, *(replace(one, **changes) for one in unused)])


def memory_of(asked_gib: float, peak_gib: float, task: TaskFacts = TASK, **more: object) -> JobFacts:
    limits = {"memory_limit_bytes": round(asked_gib * GIB), "memory_peak_bytes": round(peak_gib * GIB)}
    return job(replace(task, **limits), **more)


def time_of(asked_s: float, wall_s: float = HOUR_S, task: TaskFacts = TASK, **changes: object) -> JobFacts:
    return job(lasting(task, wall_s, time_limit_s=asked_s, **changes), devices=[])


def of_requests() -> dict[str, Variants]:
    on_cpu, working = replace(TASK, devices=0, cpus=2), replace(TASK, cpu_mean_cores=5.1)
    starting = {"states": spent(0.0, start_up=50.0, idle=20.0)}
    starved = (ErrorFacts("host_memory", 4, 4, 4, 1, "std::bad_alloc"),)
    stopped = replace(TASK, verdict="stopped", pending=100)
    big = {"memory_limit_bytes": 64 * GIB, "memory_peak_bytes": 10 * GIB}
    much = replace(TASK, **big, time_limit_s=72 * HOUR_S, cpus=64, cpu_mean_cores=4.0)
    other = replace(much, name="1_1", array_index=1)
    small = replace(TASK, name="1_1", array_index=1, memory_limit_bytes=70 * GIB, memory_peak_bytes=9 * GIB)

    def without_gpu(*others: TaskFacts, **settings: object) -> JobFacts:
        return job(on_cpu, *others, devices=[], cpu_tries=500, cpu_audio_s=7200.0, last_settings=settings)

    return {
        "never used: a minute of work": at(lambda s: asleep(working_s=s), 60.0, 59.9),
        "never used: three chunks": at(asleep, 3, 2),
        "never used: busy for 1 %": at(lambda x: asleep(busy=x, working_s=200.0), 0.0099, 0.01),
        "never used: memory that was empty": at(lambda n: asleep(low=n - 1, high=n, working_s=200.0), GIB - 1.0, GIB),
        "never used: memory that grew": {n: asleep(low=200 * 2**20, high=(200 + n) * 2**20 - 1, working_s=200.0)
                                         for n in (100, 101)},
        "never used: its memory is not known": {
            1: asleep(), 0: replace(asleep(), devices=(replace(asleep().devices[0], metrics={}),))},
        "on the CPU": {
            "fell back": job(errors=(ErrorFacts("ran_on_cpu", 4, 4, 4, 2, "no CUDA\ndriver too old\n"),)),
            "all tasks": without_gpu(), "as wanted": without_gpu(cpu_workers=4), "some tasks": without_gpu(TASK),
            "nothing done": job(replace(on_cpu, done=0), devices=[], cpu_tries=5),
        },
        "unused: a minute": at(with_unused, 60.0, 59.9),
        "unused: serious": at(with_unused, 36_000.0, 35_999.0),
        "unused: three, of which two are one": {3: with_unused(600.0, 3, uuid="GPU-u")},
        "unused: workers that did nothing": {n: with_unused(work=DeviceWork(n)) for n in (2, 1)},
        "unused: a try makes it used": {
            state: with_unused(states=spent(0.0, idle=60.0, **{state: 1.0})) for state in ("waiting", "lost")
        },
        "unused: all of them": {pending: job(replace(TASK, pending=pending), devices=[
            replace(DEVICE, work=DeviceWork(), states=spent(0.0, idle=900.0))]) for pending in (1, 0)},
        "unused: the start-up of a running task": {
            "ended": with_unused(task=TASK, **starting), "running": with_unused(task=UNENDED, **starting)},
        "memory: killed": {
            "one": memory_of(16.0, 15.0, replace(KILLED, pending=5, slurm_state="OUT_OF_MEMORY")),
            "peak above the request": memory_of(16.0, 30.0, replace(KILLED, pending=5, slurm_state="OUT_OF_ME+")),
            "the node ran out": memory_of(16.0, 8.0, errors=starved),
        },
        "memory: 90 % used": at(lambda n: memory_of(20.0, n), 18.0, 17.99),
        "memory: twice too much": at(lambda n: memory_of(n, 10.0), 26.0, 25.9),
        "memory: 4 GiB too much": at(lambda n: memory_of(n, 1.0), 7.0, 6.9),
        "memory: not from 5 minutes": {s: memory_of(64.0, 10.0, lasting(TASK, s)) for s in (300.0, 299.0)},
        "memory: the largest of all": {2: job(much, small), 1: job(TASK, replace(small, memory_peak_bytes=None))},
        "time: stopped at 75 % of the limit": at(lambda s: time_of(4000.0, s, stopped), 3000.0, 2999.0),
        "time: stopped with work left": at(lambda n: time_of(4000.0, task=replace(stopped, pending=n)), 1, 0),
        "time: killed": at(lambda state: time_of(9000.0, task=replace(UNENDED, pending=1000, slurm_state=state)),
                           "TIMEOUT", "RUNNING"),
        "time: the rest was done": {done: time_of(3700.0, done=done, verdict="killed", pending=0, slurm_state="TIMEOUT")
                                    for done in (500, 0)},
        "time: near": {**at(time_of, 4000.0, 4001.0), "short of the next half hour": time_of(10_000.0, 9900.0)},
        "time: three times too much": at(time_of, 15_300.0, 15_299.0),
        "time: an hour too much": at(lambda s: time_of(s, 500.0), 4800.0, 4799.0),
        "time: rounded up": {s: time_of(72 * HOUR_S, s) for s in (600.0, 8076.0, 8077.0)},
        "time: not from 5 minutes": {s: time_of(72 * HOUR_S, s) for s in (300.0, 299.0)},
        "time: of tasks that ended": {
            "all": time_of(72 * HOUR_S), "one was killed": job(replace(much, **dict.fromkeys(big)),
            replace(KILLED, name="1_1", time_limit_s=9e5))},
        "while a task goes on": {
            "ended": job(much, other), "running": job(much, replace(other, verdict=None, exit_code=None, pending=9))},
        "cores: half of them": {n: job(replace(TASK, cpus=n, cpu_mean_cores=6.0)) for n in (18, 17)},
        "cores: eight": {n: job(replace(TASK, cpus=n, cpu_mean_cores=1.0)) for n in (11, 10)},
        "cores: not from 5 minutes": {s: job(lasting(TASK, s, cpus=48)) for s in (300.0, 299.0)},
        "cores: idle devices need them": {"busy": job(replace(TASK, cpus=48)), "idle": idle(replace(TASK, cpus=48))},
        "cores: the most of all": {2: job(replace(TASK, cpus=48), replace(working, name="b", cpus=40))},
    }  # fmt: skip


# --- the pages --------------------------------------------------------------------------------------------------------


def told(findings: Iterable[Finding], known: set[str]) -> str:
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


@pytest.mark.parametrize("topic", [of_tasks, of_devices, of_waiting, of_requests], ids=lambda topic: topic.__name__)
def test_each_finding_is_made_at_its_threshold_and_not_below(
    pages: Pages, topic: Callable[[], dict[str, Variants]]
) -> None:
    said, known = [], set[str]()
    for name, variants in topic().items():
        said.append(f"## {name}")
        before = None
        for value, facts in variants.items():
            found = find(facts if isinstance(facts, Summary) else summarize(facts))
            assert found != before or isinstance(value, str), f"{name}: at {value} the same is found as before"
            before = found
            said.append(f"{value}:\n{told(found, known)}")
    pages({"findings.txt": "\n".join(said)})


def test_what_the_ramp_says_is_understood() -> None:
    """The reasons come from another room: here they are as it writes them."""

    def last_step(rates: list[float], cores: int, **memory: object) -> str:
        tried, now_s, work, step = Ramp(1, cores, 1, settled=False, **memory), 0.0, 0.0, None
        held = MemoryHeld(at_s=0.0, memory_bytes=11 * GIB) if memory else None
        while not tried.settled and now_s < 3000:
            rate = rates[tried.workers - 1]
            for _ in range(2):
                step = tried.observe(now_s, work_done=work, chunks_done=round(work), chunks_left=10**6, all_warm=True,
                                     memory_share=0.1, memory_held=held and replace(held, at_s=now_s))  # fmt: skip
                now_s, work = now_s + 100, work + 100 * rate
        assert step is not None
        return str(step.reason)

    granted = {"granted_bytes": 16 * GIB}
    begun = plan_start(cpus=32, devices=4, memory_bytes=139 * GIB, known=None, **granted)
    task = replace(TASK, cpu_mean_cores=5.0, memory_limit_bytes=16 * GIB)
    more_memory = ("too_few_workers", ("#SBATCH --mem=32G",))
    for reason, wanted in (
        (last_step([10, 18, 18.1], 16), ("low_busy", ())),
        (last_step([10, 18, 26, 33, 40], 5), ("cpu_bound", ("#SBATCH --cpus-per-task=16",))),
        (last_step([1, 1], 8, **granted), more_memory),
        (begun[2], more_memory),
    ):
        (finding,) = find(summarize(idle(task, **ramp(reason, 1.0))))
        assert (finding.kind, finding.lines) == wanted, reason


def test_the_guide_says_what_each_kind_of_finding_says(pages: Pages) -> None:
    assert list_findings() in read_topic("report")
    pages({"kinds.txt": list_findings()})
