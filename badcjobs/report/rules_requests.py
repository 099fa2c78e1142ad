"""Findings about requested and used resources: GPUs, memory, time and cores, with #SBATCH lines for next time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from badcjobs.model import LEAST_CPUS, Billing, advised_gb
from badcjobs.report.progress import NOT_ENDED
from badcjobs.report.rules import (
    LOW,
    NOTE,
    PROBLEM,
    WARNING,
    Cases,
    Rule,
    busy_share,
    by_task,
    labels,
    severity_of,
    share,
    topic,
    was_used,
    without_unused,
)
from badcjobs.report.summary import Bill, Summary, count_devices, ratio
from badcjobs.store.figures import StateTime
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts
from badcjobs.words import clock, round_up

# --- work on the CPU although there were GPUs -------------------------------------------------------------------------

_NEVER_BUSY = 0.01
_LEAST_CHUNKS = 3
_LEAST_WORK_S = 60.0
_CONTEXT_BYTES = 100 * 2**20  # a CUDA context takes more than this on any GPU
_EMPTY_BYTES = 2**30  # without any process, the driver reports less than this as used


def never_worked(device: DeviceFacts) -> bool:
    """Say whether chunks were assigned to a device that was never used for them.

    Utilization can read 0 at light load, so the memory must not have grown, either.
    """
    working = device.states.get("working")
    held = device.metrics.get("memory_used_bytes")
    if working is None or held is None:
        return False
    if working.total_s < _LEAST_WORK_S or device.work.done < _LEAST_CHUNKS:
        return False
    if held.maximum >= _EMPTY_BYTES or held.maximum - held.minimum >= _CONTEXT_BYTES:
        return False
    busy = busy_share([device])
    return busy is not None and busy < _NEVER_BUSY


@topic(
    Rule(
        "ran_on_cpu",
        PROBLEM,
        says="The engine never used {devices:count GPU} assigned to its workers.",
        evidence=(
            "{chunks:count chunk} done in {gpu_s:gpu_time}; GPUs busy: {busy} of the time",
            "device memory never grew by more than {rise:memory}",
        ),
        fix="The program runs on the CPU. Install it with CUDA, and let it use the device in CUDA_VISIBLE_DEVICES.",
        lines=("badcjobs check",),
    )
)
def _never_used(facts: JobFacts, summary: Summary) -> Cases:
    devices = [device for device in facts.devices if never_worked(device)]
    if not devices:
        return
    memory = [device.metrics["memory_used_bytes"] for device in devices]
    yield {
        "devices": count_devices(devices),
        "chunks": sum(device.work.done for device in devices),
        "gpu_s": sum(device.total_s for device in devices),
        "busy": share(busy_share(devices) or 0.0, 1.0),
        "rise": round(max(held.maximum - held.minimum for held in memory)),
        "subjects": labels(devices),
    }


@topic(
    Rule(
        "ran_on_cpu",
        PROBLEM,
        says="The engine could not use {error.devices:count GPU} and fell back to the CPU; these workers were stopped.",
        evidence=("{error.tries:count try tries} affected", "engine error: {error.example:last_line}"),
        fix="Find out why CUDA does not work there: the driver, the module, or a container without --nv.",
        lines=("badcjobs check", "nvidia-smi"),
    )
)
def _fell_back(facts: JobFacts, summary: Summary) -> Cases:
    for error in facts.errors:
        if error.error_class == "ran_on_cpu":
            yield {"error": error}


@topic(
    Rule(
        "ran_on_cpu",
        "{severity}",
        says="{many:count task} had no GPU and ran on the CPU.",
        evidence=(
            "{s.facts.cpu_tries:count chunk}, {s.facts.cpu_audio_s:hours} hours of audio on the CPU",
            "{many:whole} of {s.tasks:count task} without a GPU",
        ),
        fix="Request a GPU for every task if there are GPUs: the engine is many times faster on them.",
        lines=("#SBATCH --gpus-per-node=1",),
    )
)
def _without_gpu(facts: JobFacts, summary: Summary) -> Cases:
    tasks = [task for task in facts.tasks if task.engine and not task.devices and task.done]
    some_had = any(task.devices for task in facts.tasks)
    requested = facts.last_settings.get("cpu_workers") and not some_had
    if tasks and facts.cpu_tries and not requested:
        yield {
            "severity": WARNING if some_had else NOTE,
            "subjects": [task.name for task in tasks],
        }


# --- devices without work ---------------------------------------------------------------------------------------------

_UNUSED_S = 60.0  # per device; a task with nothing to do ends earlier


@topic(
    Rule(
        "unused_gpus",
        "{severity}",
        says="{unused:whole} of {granted:count GPU} granted to tasks never had a chunk to work on.",
        evidence=("{cost_s:gpu_time} unused", "{workers:count worker?} started on them, no chunk tried"),
        fix="Request only as many GPUs as you use. To use them all, omit --max-gpus and have more chunks than GPUs. If"
        " workers were started on them, read the task log to see why they did nothing.",
        lines=("#SBATCH --gpus-per-node={used:?}",),
    )
)
def _unused(facts: JobFacts, summary: Summary) -> Cases:
    devices = by_task(facts.devices)
    granted = list[DeviceFacts]()
    unused = list[DeviceFacts]()
    for task in facts.tasks:
        own = devices[task.name]
        if task.engine is not None and (task.pending or any(map(was_used, own))):
            granted += own
            if task.state in NOT_ENDED:  # its engines may still be starting
                own = [replace(device, states={**device.states, "start_up": StateTime()}) for device in own]
            unused += [device for device in own if not was_used(device) and device.total_s >= _UNUSED_S]
    if not unused:
        return
    gpu_s = sum(device.total_s for device in unused)
    used = max(sum(map(was_used, devices[name])) for name in {device.task for device in unused})
    yield {
        "severity": severity_of(gpu_s),
        "unused": len(unused),
        "granted": len(granted),
        "cost_s": gpu_s,
        "workers": sum(device.work.workers for device in unused),
        "used": used,
        "subjects": labels(unused),
    }


# --- memory, time and cores -------------------------------------------------------------------------------------------

_GIB = 2**30
_LEAST_S = 300.0  # a shorter task does not show what it needs
_MARGIN = 1.3  # of time and cores
_START_S = 300
_NEAR = 0.9
_FAR = 2.0  # times as much as is needed
_FAR_GIB = 4
_FAR_S = 3600.0
_FAR_CORES = 8  # fewer are not worth a finding
_STOPPED_NEAR = 0.75  # an orderly stop reserves the last part of the time for chunks in progress


def _is_far(requested: float, advised: float, least: float, tasks: Sequence[TaskFacts], summary: Summary) -> bool:
    """Say whether much more was requested than is needed, as all tasks have ended, and one ran long enough to show."""
    if any(task.state in NOT_ENDED for task in summary.facts.tasks) or max(task.wall_s for task in tasks) < _LEAST_S:
        return False
    return requested >= max(_FAR * advised, advised + least)


def needed_more(task: TaskFacts) -> bool:
    """Say whether a task ended because it had requested too little memory or time: that is a finding of its own."""
    return _out_of_memory(task) or _ran_out(task)


def _out_of_memory(task: TaskFacts) -> bool:
    if not task.memory_limit_bytes or not task.memory_peak_bytes:
        return False
    return (task.slurm_state or "").startswith("OUT_OF_ME")


_MEMORY = Rule(
    "memory_request",
    PROBLEM,
    when="ran_out",
    says="Tasks ran out of main memory.",
    evidence=(
        "{killed:count task?} killed by Slurm for it",
        "requested {asked:memory}, peak use {peak:memory} ({of_asked} of the request)",
    ),
    fix="Request more memory, or run fewer workers.",
    lines=("#SBATCH --mem={more}G",),
    wants=("+memory", "-workers"),
)


@topic(
    _MEMORY,
    _MEMORY._replace(severity=WARNING, when="near", says="The tasks used nearly all the memory they requested."),
    _MEMORY._replace(
        severity=NOTE,
        when="far",
        says="The job requested much more memory than it used.",
        fix="Request less: such tasks wait less in the queue, and many sites bill memory.",
        lines=("#SBATCH --mem={advised}G",),
        wants=("-memory",),
    ),
)
def _memory(facts: JobFacts, summary: Summary) -> Cases:
    measured = [task for task in facts.tasks if task.memory_limit_bytes and task.memory_peak_bytes]
    if not measured:
        return
    requested = max(task.memory_limit_bytes or 0 for task in measured)
    fullest = max(measured, key=lambda task: task.memory_peak_bytes or 0)
    peak = fullest.memory_peak_bytes or 0
    advised = advised_gb(peak)
    killed = list(filter(_out_of_memory, measured))
    ran_out = bool(killed) or any(error.error_class == "host_memory" for error in facts.errors)
    factor = 1.5 if ran_out else 1.2
    yield {
        "ran_out": ran_out,
        "killed": len(killed),
        "near": peak >= _NEAR * requested,
        "far": _is_far(requested / _GIB, advised, _FAR_GIB, measured, summary),
        "asked": requested,
        "peak": peak,
        "of_asked": share(peak, requested),
        "more": max(advised, math.ceil(factor * requested / _GIB)),
        "advised": advised,
        "subjects": [task.name for task in killed or [fullest]],
    }


@topic(
    Rule(
        "time_request",
        "{severity}",
        says="{many:count task} reached {many:its|their} time limit before the work was done.",
        evidence=("requested {asked_s:duration}", "{done:count chunk} done, {left:whole} left"),
        fix="Submit again to do the rest. For the next job request more time, or split the source into more tasks. With"
        " a signal before the end, and exec before badcjobs, tasks stop in order and lose no work.",
        lines=("#SBATCH --time={time}", "#SBATCH --signal=B:USR1@300"),
        wants=("+time", "+tasks"),
    )
)
def _time_over(facts: JobFacts, summary: Summary) -> Cases:
    over = list(filter(_ran_out, facts.tasks))
    if not over:
        return
    yield {
        "severity": PROBLEM if summary.left else NOTE,
        "asked_s": max(task.time_limit_s or 0.0 for task in over),
        "done": sum(task.done for task in over),
        "left": sum(task.pending for task in over),
        "time": clock(_with_margin(max(map(_needed_s, over)))),
        "subjects": [task.name for task in over],
    }


def _needed_s(task: TaskFacts) -> float:
    """Return how long a task would have taken for all its chunks."""
    if not task.done:
        return 2 * task.wall_s
    return task.wall_s * (1 + task.pending / task.done)


def _with_margin(wall_s: float) -> int:
    return round_up(_MARGIN * wall_s + _START_S)


_TIME_USED = Rule(
    "time_request",
    NOTE,
    when="near",
    says="The tasks ended shortly before their time limit.",
    evidence=("requested {asked_s:duration}, longest task {longest.wall_s:duration} ({of_asked} of the request)",),
    fix="Request a little more time; if a task reaches the limit, submit again to do the rest.",
    lines=("#SBATCH --time={time}",),
    wants=("+time",),
)


@topic(
    _TIME_USED,
    _TIME_USED._replace(
        when="far",
        says="The job requested much more time than it used.",
        fix="Request less: short tasks fit into gaps in the schedule and start earlier.",
        wants=("-time",),
    ),
)
def _time_used(facts: JobFacts, summary: Summary) -> Cases:
    limited = [task for task in facts.tasks if task.time_limit_s]
    ended = [task for task in limited if task.verdict in ("done", "failed") and task.done]
    if not ended or any(map(_ran_out, limited)):
        return
    longest = max(ended, key=lambda task: task.wall_s)
    requested_s = max(task.time_limit_s or 0.0 for task in ended)
    advised_s = _with_margin(longest.wall_s)
    yield {
        "near": longest.wall_s >= _NEAR * requested_s,
        "far": _is_far(requested_s, advised_s, _FAR_S, ended, summary),
        "asked_s": requested_s,
        "longest": longest,
        "of_asked": share(longest.wall_s, requested_s),
        "time": clock(advised_s),
        "subjects": [longest.name],
    }


def _ran_out(task: TaskFacts) -> bool:
    """Say whether a task has reached its time limit, as far as that is known."""
    if not task.time_limit_s:
        return False
    if (task.slurm_state or "").startswith("TIMEOUT"):
        return True
    at_end = task.wall_s >= _STOPPED_NEAR * task.time_limit_s
    return task.verdict in ("stopped", "killed") and task.pending > 0 and at_end


@topic(
    Rule(
        "cpus_request",
        NOTE,
        says="The job requested many more cores than it used.",
        evidence=("requested {asked} cores, {used:one} busy on average ({of_asked} of the request)",),
        fix="Request fewer: such tasks wait less in the queue.",
        lines=("#SBATCH --cpus-per-task={wanted}",),
        wants=("-cores",),
    )
)
def _cores(facts: JobFacts, summary: Summary) -> Cases:
    measured = [task for task in facts.tasks if task.cpus and task.cpu_mean_cores is not None]
    if not measured:
        return
    busy = busy_share(facts.devices)
    if busy is not None and busy < LOW:
        return  # GPUs with little to do need more workers, and those need the cores
    requested = max(task.cpus or 0 for task in measured)
    most = max(measured, key=lambda task: task.cpu_mean_cores or 0.0)
    used = most.cpu_mean_cores or 0.0
    advised = math.ceil(max(_MARGIN * used + 1, most.workers or 0))
    if _is_far(requested, advised, _FAR_CORES, measured, summary):
        yield {
            "asked": requested,
            "used": used,
            "of_asked": share(used, requested),
            "wanted": advised,
            "subjects": [most.name],
        }


# --- the bill ---------------------------------------------------------------------------------------------------------


def make_bill(facts: JobFacts, billing: Billing | None) -> Bill | None:
    """Return what the tasks are billed, and what they would be with the memory and GPUs used and a core per worker."""
    tasks = [task for task in facts.tasks if task.devices or task.audio_s]
    if billing is None or not tasks:
        return None
    no_memory = any(task.memory_limit_bytes is None for task in tasks)
    no_cores = any(task.cpus is None for task in tasks)
    if (billing.memory_gb and no_memory) or (billing.cpu and no_cores):
        return None

    used = [task for task in without_unused(facts).tasks if task.audio_s > 0]
    gpus = max((task.devices or 0 for task in used), default=0)
    workers = max((task.workers or task.cpus or 0 for task in used), default=0)
    busy_cores = max(task.cpu_mean_cores or 0.0 for task in tasks)
    cpus = round(max(LEAST_CPUS, workers, busy_cores))  # as a plan with so many workers
    peak = max(task.memory_peak_bytes or 0 for task in tasks)
    mem_gb = advised_gb(peak) if peak else None

    units = 0.0
    advised = 0.0
    processes = {(_step(task), task.procid) for task in facts.tasks}  # one may have several databases
    processes_of_step = Counter(step for step, _ in processes)
    for task in tasks:
        hours = task.wall_s / 3600
        granted = task.devices or 0
        # The processes of a step share what was requested on their node.
        requested_gb = (task.memory_limit_bytes or 0) / _GIB / processes_of_step[_step(task)]
        units += hours * billing.per_hour(granted, requested_gb, task.cpus or 0)
        advised += hours * billing.per_hour(min(gpus, granted), mem_gb or requested_gb, cpus)
    thousand_hours = sum(task.audio_s for task in tasks) / 3_600_000
    return Bill(
        units=units,
        units_per_1000_audio_hours=ratio(units, thousand_hours),
        advised_units_per_1000_audio_hours=ratio(advised, thousand_hours) if mem_gb else None,
        advised_gpus=gpus,
        advised_cpus=cpus,
        advised_mem_gb=mem_gb,
    )


def _step(task: TaskFacts) -> tuple[str, int, int, str]:
    return task.job_id, task.array_index, task.restart, task.node


TOPICS = (_never_used, _fell_back, _without_gpu, _unused, _memory, _time_over, _time_used, _cores)
