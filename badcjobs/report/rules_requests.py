"""Findings about requested and used resources: GPUs, memory, time and cores, with #SBATCH lines for next time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from badcjobs.model import LEAST_CPUS, Billing, advised_gb
from badcjobs.report.progress import is_running, was_killed
from badcjobs.report.rules import (
    LOW,
    NOTE,
    PROBLEM,
    SERIOUS_S,
    WARNING,
    Cases,
    Rule,
    after_start_up,
    busy_share,
    by_task,
    labels,
    share,
    topic,
    was_used,
    without_unused,
)
from badcjobs.report.summary import Bill, Summary, count_devices, devices_words, ratio
from badcjobs.report.words import clock, count, round_up
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts

# --- work on the CPU although there were GPUs -------------------------------------------------------------------------

_NEVER_BUSY = 0.01
_LEAST_CHUNKS, _LEAST_WORK_S = 3, 60.0
_CONTEXT_BYTES = 100 * 2**20  # a CUDA context takes more than this on any GPU
_EMPTY_BYTES = 2**30  # without any process, the driver reports less than this as used


def never_worked(device: DeviceFacts) -> bool:
    """Say whether chunks were assigned to a device that was never used for them.

    Utilization can read 0 at light load, so the memory must not have grown, either.
    """
    working = device.states.get("working")
    held = device.metrics.get("memory_used_bytes")
    if working is None or working.total_s < _LEAST_WORK_S or device.work.done < _LEAST_CHUNKS or held is None:
        return False
    busy = busy_share([device])
    was_empty = held.maximum < _EMPTY_BYTES and held.maximum - held.minimum < _CONTEXT_BYTES
    return busy is not None and busy < _NEVER_BUSY and was_empty


@topic(
    Rule(
        "ran_on_cpu", PROBLEM,
        when="never_used",
        says="The engine never used {devices:count GPU} assigned to its workers.",
        evidence=(
            "{chunks:count chunk} done in {gpu_s:gpu_time}; GPUs busy: {busy} of the time",
            "device memory never grew by more than {rise:memory}",
        ),
        fix="The program runs on the CPU. Install it with CUDA, and let it use the device in CUDA_VISIBLE_DEVICES.",
        lines=("badcjobs check",),
    ),
    Rule(
        "ran_on_cpu", PROBLEM,
        when="turned_to_it",
        says="The engine could not use {error.devices:count GPU} and fell back to the CPU; these workers were stopped.",
        evidence=("{error.tries:count try tries} affected", "engine error: {error.example:last_line}"),
        fix="Find out why CUDA does not work there: the driver, the module, or a container without --nv.",
        lines=("badcjobs check", "nvidia-smi"),
    ),
    Rule(
        "ran_on_cpu", NOTE,
        when="all_tasks",
        says="No GPU was used: {s.facts.cpu_tries:count chunk} ran on the CPU.",
        evidence=(
            "{s.facts.cpu_audio_s:hours} hours of audio in {without:count task}",
            "{workers:count worker} planned, none on a GPU",
        ),
        fix="Request a GPU for every task if there are GPUs: the engine is many times faster on them.",
        lines=("#SBATCH --gpus-per-node=1",),
    ),
    Rule(
        "ran_on_cpu", WARNING,
        when="some_tasks",
        says="{without:count task} had no GPU and ran on the CPU.",
        evidence=(
            "{s.facts.cpu_tries:count chunk}, {s.facts.cpu_audio_s:hours} hours of audio on the CPU",
            "{without:whole} of {s.tasks:count task} without a GPU",
        ),
        fix="Request a GPU for every task. Without --cpu-workers, a task without a GPU stops immediately.",
        lines=("#SBATCH --gpus-per-node=1",),
    ),
)  # fmt: skip
def _on_cpu(facts: JobFacts, summary: Summary) -> Cases:
    if idle := [device for device in facts.devices if never_worked(device)]:
        held = [device.metrics["memory_used_bytes"] for device in idle]
        yield {
            "never_used": True,
            "devices": count_devices(idle),
            "chunks": sum(device.work.done for device in idle),
            "gpu_s": sum(device.total_s for device in idle),
            "busy": share(busy_share(idle) or 0.0, 1.0),
            "rise": round(max(one.maximum - one.minimum for one in held)),
            "subjects": labels(idle),
        }
    yield from ({"turned_to_it": True, "error": error} for error in facts.errors if error.error_class == "ran_on_cpu")
    tasks = [task for task in facts.tasks if task.engine and not task.devices and task.done]
    if facts.cpu_tries and tasks:
        others = any(task.devices for task in facts.tasks)
        wanted = facts.last_settings.get("cpu_workers")  # requested with --cpu-workers
        yield {
            "some_tasks": others,
            "all_tasks": not others and not wanted,
            "without": len(tasks),
            "workers": sum(task.workers or 0 for task in tasks),
            "subjects": [task.name for task in tasks],
        }


# --- devices without work ---------------------------------------------------------------------------------------------

_UNUSED_S = 60.0  # per device; a task with nothing to do ends earlier
_UNUSED = Rule(
    "unused_gpus", "{severity}",
    when="workers",
    says="{unused:whole} of {granted} never had a chunk to work on.",
    evidence=(
        "{cost_s:gpu_time} unused",
        "{started}, no chunk tried",
        "{different:count different_device}",
    ),
    fix="Read the task log to see why their workers did nothing.",
)  # fmt: skip


@topic(
    _UNUSED,
    replace(
        _UNUSED, when="", lines=("#SBATCH --gpus-per-node={used}",),
        fix="Request only as many GPUs as you use. To use them all, omit --max-gpus and have more chunks than GPUs.",
    ),
)  # fmt: skip
def _unused(facts: JobFacts, summary: Summary) -> Cases:
    devices, unused = by_task(facts.devices), list[DeviceFacts]()
    granted, silent = list[DeviceFacts](), frozenset(summary.tasks_silent)
    for task in facts.tasks:
        own = devices[task.name]
        if task.engine is not None and (task.pending or any(map(was_used, own))):
            granted += own
            # Engines of a running task may still be starting.
            ready = after_start_up if is_running(task, silent) else lambda device: device
            unused += [d for d in own if not was_used(d) and ready(d).total_s >= _UNUSED_S]
    if unused:
        gpu_s, different = sum(device.total_s for device in unused), count_devices(unused)
        workers = sum(device.work.workers for device in unused)
        used = max(sum(map(was_used, devices[name])) for name in {device.task for device in unused})
        yield {
            "severity": PROBLEM if gpu_s >= SERIOUS_S else WARNING,
            "unused": len(unused),
            "granted": devices_words(granted, "GPU"),
            "cost_s": gpu_s,
            "workers": workers,
            "started": f"{count(workers, 'worker')} started" if workers else "no worker started",
            "different": different if different < len(unused) else None,
            "used": used or None,
            "subjects": labels(unused),
        }


# --- memory, time and cores -------------------------------------------------------------------------------------------

_GIB = 2**30
_LEAST_S = 300.0  # a shorter task does not show what it needs
_TIME_MARGIN, _CPU_MARGIN = 1.3, 1.3
_NEAR = 0.9
_FAR_MEMORY, _FAR_MEMORY_GIB = 2.0, 4
_FAR_TIME, _FAR_TIME_S = 3.0, 3600.0
_FAR_CORES = 8  # fewer are not worth a finding
_STOPPED_NEAR = 0.75  # an orderly stop reserves the last part of the time for chunks in progress


def _all_ended(summary: Summary) -> bool:
    """Say whether no task is running; what a running task will need is not known."""
    silent = frozenset(summary.tasks_silent)
    return not any(is_running(task, silent) for task in summary.facts.tasks)


def _showed(tasks: Sequence[TaskFacts]) -> bool:
    return max(task.wall_s for task in tasks) >= _LEAST_S


def needed_more(task: TaskFacts) -> bool:
    """Say whether a task ended because it had requested too little memory or time: that is a finding of its own."""
    return _out_of_memory(task) or bool(task.time_limit_s and _ran_out(task))


def _out_of_memory(task: TaskFacts) -> bool:
    known = task.memory_limit_bytes and task.memory_peak_bytes
    return bool(known) and (task.slurm_state or "").startswith("OUT_OF_ME")


_MORE_MEMORY = Rule(
    "memory_request", PROBLEM,
    when="killed",
    says="Slurm killed {killed:count task} for using more memory than requested.",
    evidence=(
        "requested {asked:memory}, peak use {peak:memory} ({of_asked} of the request)",
        "peak in {fullest.name}; {known:count task} measured",
    ),
    fix="Request more memory, or run fewer workers.",
    lines=("#SBATCH --mem={more}G",),
    wants=("+memory", "-workers"),
)  # fmt: skip


@topic(
    _MORE_MEMORY,
    replace(_MORE_MEMORY, when="starved", says="The node ran out of memory."),
    replace(_MORE_MEMORY, severity=WARNING, when="near",
            says="The tasks used nearly all the memory they requested."),
    replace(_MORE_MEMORY, severity=NOTE, when="far",
            says="The job requested much more memory than it used.",
            fix="Request less: such tasks wait less in the queue, and many sites bill memory.",
            lines=("#SBATCH --mem={wanted}G",), wants=("-memory",)),
)  # fmt: skip
def _memory(facts: JobFacts, summary: Summary) -> Cases:
    known = [t for t in facts.tasks if t.memory_limit_bytes and t.memory_peak_bytes]
    if not known:
        return
    asked = max(t.memory_limit_bytes or 0 for t in known)
    fullest = max(known, key=lambda t: t.memory_peak_bytes or 0)
    peak = fullest.memory_peak_bytes or 0
    wanted = advised_gb(peak)
    killed = list(filter(_out_of_memory, known))
    starved = any(error.error_class == "host_memory" for error in facts.errors)
    far = asked >= max(_FAR_MEMORY * wanted, wanted + _FAR_MEMORY_GIB) * _GIB and _showed(known)
    yield {
        "killed": len(killed),
        "starved": starved,
        "near": peak >= _NEAR * asked,
        "far": far and _all_ended(summary),
        "asked": asked,
        "peak": peak,
        "of_asked": share(peak, asked),
        "fullest": fullest,
        "known": len(known),
        "more": max(wanted, math.ceil((1.5 if killed or starved else 1.2) * asked / _GIB)),
        "wanted": wanted,
        "subjects": [task.name for task in killed or [fullest]],
    }


_TIME_USED = Rule(
    "time_request", NOTE,
    when="near",
    says="The tasks ended shortly before their time limit.",
    evidence=(
        "requested {asked_s:duration}, longest task {longest.wall_s:duration} ({of_asked} of the request)",
        "longest: {longest.name}; {ended:count task} ended normally",
    ),
    fix="Request a little more time; if a task reaches the limit, submit again to do the rest.",
    lines=("#SBATCH --time={time}",),
    wants=("+time",),
)  # fmt: skip


@topic(
    Rule(
        "time_request", "{severity}",
        when="over",
        says="{over:count task} reached {over:its|their} time limit before the work was done.",
        evidence=("requested {asked_s:duration}", "{done:count chunk} done, {left:whole} left"),
        fix="Submit again to do the rest. For the next job request more time, or split the source into more tasks."
            "{in_order}",
        lines=("#SBATCH --time={time}", "#SBATCH --signal={signal}"),
        wants=("+time", "+tasks"),
    ),
    _TIME_USED,
    replace(_TIME_USED, when="far",
            says="The job requested much more time than it used.",
            fix="Request less: short tasks fit into gaps in the schedule and start earlier.", wants=("-time",)),
)  # fmt: skip
def _time(facts: JobFacts, summary: Summary) -> Cases:
    known = [t for t in facts.tasks if t.time_limit_s]
    if over := [t for t in known if _ran_out(t)]:
        needed_s = max(t.wall_s * (1 + t.pending / t.done) if t.done else 2 * t.wall_s for t in over)
        severity = PROBLEM if _all_ended(summary) else WARNING
        killed = any(map(was_killed, over))  # their work in progress was lost
        in_order = " With a signal before the end, and exec before badcjobs, tasks stop in order and lose no work."
        yield {
            "over": len(over),
            "severity": severity if summary.left else NOTE,
            "in_order": in_order if killed else "",
            "signal": "B:USR1@300" if killed else None,
            "asked_s": max(t.time_limit_s or 0.0 for t in over),
            "done": sum(t.done for t in over),
            "left": sum(t.pending for t in over),
            "time": clock(round_up(_TIME_MARGIN * needed_s + 300)),
            "subjects": [task.name for task in over],
        }
        return
    ended = [t for t in known if t.verdict in ("done", "failed") and t.done]
    if not ended or len(ended) < len([t for t in known if t.verdict is not None and t.done]):
        return
    for_good = all(t.verdict is not None for t in known)  # how long the others will take is not known
    longest = max(ended, key=lambda t: t.wall_s)
    asked_s, wanted_s = max(t.time_limit_s or 0.0 for t in ended), round_up(_TIME_MARGIN * longest.wall_s + 300)
    near = longest.wall_s >= _NEAR * asked_s
    yield {
        "over": 0,
        "near": near,
        "far": for_good and asked_s >= max(_FAR_TIME * wanted_s, wanted_s + _FAR_TIME_S) and _showed(ended),
        "asked_s": asked_s,
        "longest": longest,
        "of_asked": share(longest.wall_s, asked_s),
        "ended": len(ended),
        "time": clock(round_up(max(wanted_s, 1.2 * asked_s) if near else wanted_s)),
        "subjects": [longest.name],
    }


def _ran_out(task: TaskFacts) -> bool:
    if (task.slurm_state or "").startswith("TIMEOUT"):
        return True
    at_end = task.wall_s >= _STOPPED_NEAR * (task.time_limit_s or math.inf)
    return task.verdict in ("stopped", "killed") and task.pending > 0 and at_end


@topic(Rule(
    "cpus_request", NOTE,
    says="The job requested many more cores than it used.",
    evidence=(
        "requested {asked} cores, {used:one} busy on average ({of_asked} of the request)",
        "most in {most.name}; {known:count task} measured",
    ),
    fix="Request fewer: such tasks wait less in the queue.",
    lines=("#SBATCH --cpus-per-task={wanted}",),
    wants=("-cores",),
))  # fmt: skip
def _cores(facts: JobFacts, summary: Summary) -> Cases:
    known = [t for t in facts.tasks if t.cpus and t.cpu_mean_cores is not None]
    busy = busy_share(facts.devices)
    if not _all_ended(summary) or not known or not _showed(known) or (busy is not None and busy < LOW):
        return  # GPUs with little to do need more workers, and those need the cores
    asked = max(t.cpus or 0 for t in known)
    most = max(known, key=lambda t: t.cpu_mean_cores or 0.0)
    used = most.cpu_mean_cores or 0.0
    wanted = math.ceil(max(_CPU_MARGIN * used + 1, most.workers or 0))
    if wanted <= asked / 2 and asked - wanted >= _FAR_CORES:
        yield {
            "asked": asked,
            "used": used,
            "of_asked": share(used, asked),
            "most": most,
            "known": len(known),
            "wanted": wanted,
            "subjects": [most.name],
        }


def make_bill(facts: JobFacts, billing: Billing | None) -> Bill | None:
    """Return what the tasks are billed, and what they would be with the memory and GPUs used and a core per worker."""
    tasks = [task for task in facts.tasks if task.devices or task.audio_s]
    if billing is None or not tasks:
        return None
    memory = "memory request", billing.memory_gb, [task.memory_limit_bytes for task in tasks]
    cores = "number of cores", billing.cpu, [task.cpus for task in tasks]
    if unknown := [what for what, weight, values in (memory, cores) if weight and None in values]:
        return Bill(why_unknown=f"no {unknown[0]} was recorded")
    used = without_unused(facts).tasks
    largest = max(used, key=lambda task: (task.audio_s > 0, task.devices or 0, task.workers or 0))
    gpus, workers = largest.devices or 0, largest.workers or largest.cpus or 0
    peak = max((task.memory_peak_bytes or 0 for task in tasks), default=0)
    busy = max((task.cpu_mean_cores or 0.0 for task in tasks), default=0.0)
    mem_gb = advised_gb(peak) if peak else None
    cpus = round(max(LEAST_CPUS, workers, busy))  # as a plan with so many workers
    units, advised, hours = 0.0, 0.0, sum(task.audio_s for task in tasks) / 3_600_000
    steps = {(task.job_id, task.array_index, task.restart, task.node, task.procid) for task in facts.tasks}
    sharing = Counter(step[:-1] for step in steps)  # the processes of a step share what was requested on their node
    for task in tasks:
        many = sharing[task.job_id, task.array_index, task.restart, task.node]
        asked_gb = (task.memory_limit_bytes or 0) / _GIB / many
        units += task.wall_s / 3600 * billing.per_hour(task.devices or 0, asked_gb, task.cpus or 0)
        advised += task.wall_s / 3600 * billing.per_hour(min(gpus, task.devices or 0), mem_gb or asked_gb, cpus)
    return Bill(units, ratio(units, hours), ratio(advised, hours) if mem_gb else None, gpus, cpus, mem_gb)


TOPICS = (_on_cpu, _unused, _memory, _time, _cores)
