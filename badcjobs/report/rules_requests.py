"""Findings about what was asked of Slurm against what was used: GPUs, memory, time and cores; lines for next time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from badcjobs.report.progress import is_running
from badcjobs.report.rules import (
    LOW,
    NOTE,
    PROBLEM,
    SERIOUS_S,
    WARNING,
    Figures,
    Rule,
    after_start_up,
    busy_share,
    by_task,
    has_tried,
    labels,
    share,
    topic,
)
from badcjobs.report.summary import Summary, cards, devices_words
from badcjobs.report.words import count
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts

# --- work that was done by the CPU although there were GPUs -----------------------------------------------------------

_NEVER_BUSY = 0.01
_LEAST_CHUNKS, _LEAST_WORK_S = 3, 60.0
_CONTEXT_BYTES = 100 * 2**20  # CUDA alone takes more than that on any card
_EMPTY_BYTES = 2**30  # what a driver shows as used on a card without any process is less


def never_worked(device: DeviceFacts) -> bool:
    """Say whether chunks were done in the name of a device that did nothing for them.

    The plain utilization reads 0 at light load, so the memory has to say it, too: it never rose.
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
        when=lambda f: f["case"] == "never used",
        says="The engine never used {devices:count GPU} that its workers were given.",
        evidence=(
            "{chunks:count chunk} done in {gpu_s:gpu_time}, the GPUs busy {busy}",
            "their memory never rose by more than {rise:memory}",
        ),
        fix="The program runs on the CPU: install it with CUDA, and give it the device it is shown"
            " (CUDA_VISIBLE_DEVICES).",
        lines=("badcjobs check",),
    ),
    Rule(
        "ran_on_cpu", PROBLEM,
        when=lambda f: f["case"] == "turned to it",
        says="The engine could not use {error.devices:count GPU} and turned to the CPU: these workers ended.",
        evidence=("{error.tries:count try tries} there", "it said: {error.example:last_line}"),
        fix="Look why CUDA does not work there: the driver, the module, a container without --nv.",
        lines=("badcjobs check", "nvidia-smi"),
    ),
    Rule(
        "ran_on_cpu", NOTE,
        when=lambda f: f["case"] == "all tasks",
        says="No GPU was used: {s.facts.cpu_tries:count chunk} on the CPU.",
        evidence=(
            "{s.facts.cpu_audio_s:hours} hours of audio, in {without:count task}",
            "{workers:count worker} planned, none on a GPU",
        ),
        fix="Where there are GPUs, ask for one in every task: the engine is many times as fast there.",
        lines=("#SBATCH --gpus-per-node=1",),
    ),
    Rule(
        "ran_on_cpu", WARNING,
        when=lambda f: f["case"] == "some tasks",
        says="{without:count task} had no GPU and worked on the CPU.",
        evidence=(
            "{s.facts.cpu_tries:count chunk}, {s.facts.cpu_audio_s:hours} hours of audio on the CPU",
            "{without:whole} of {s.tasks:count task} without a GPU",
        ),
        fix="Ask Slurm for a GPU in every task; without --cpu-workers such a task ends at once instead.",
        lines=("#SBATCH --gpus-per-node=1",),
    ),
)  # fmt: skip
def _on_cpu(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    if idle := [device for device in facts.devices if never_worked(device)]:
        held = [device.metrics["memory_used_bytes"] for device in idle]
        yield {
            "case": "never used",
            "devices": cards(idle),
            "chunks": sum(device.work.done for device in idle),
            "gpu_s": sum(device.total_s for device in idle),
            "busy": share(busy_share(idle) or 0.0, 1.0),
            "rise": round(max(one.maximum - one.minimum for one in held)),
            "subjects": labels(idle),
        }
    yield from ({"case": "turned to it", "error": error} for error in facts.errors if error.error_class == "ran_on_cpu")
    tasks = [task for task in facts.tasks if task.engine and not task.devices and task.done]
    if facts.cpu_tries and tasks:
        others = any(task.devices for task in facts.tasks)
        wanted = facts.last_settings.get("cpu_workers")  # --cpu-workers: it was asked for
        yield {
            "case": "some tasks" if others else "wanted" if wanted else "all tasks",
            "without": len(tasks),
            "workers": sum(task.workers or 0 for task in tasks),
            "subjects": [task.name for task in tasks],
        }


# --- devices without work ---------------------------------------------------------------------------------------------

_UNUSED_S = 60.0  # each; a task that finds nothing to do is over before
_UNUSED = Rule(
    "unused_gpus", "{severity}",
    when=lambda f: f["workers"],
    says="{unused:whole} of {granted} never had a chunk to work on.",
    evidence=(
        "{cost_s:gpu_time} granted for nothing",
        "{started} started there, no chunk was tried",
        "{different:count different_device}, each counted for every task",
    ),
    fix="Look into the log of the task why their workers did nothing.",
)  # fmt: skip


@topic(
    _UNUSED,
    replace(
        _UNUSED, when=lambda f: True, lines=("#SBATCH --gpus-per-node={used}",),
        fix="Ask for as many GPUs as are used. To use them all, leave --max-gpus out and have more chunks than GPUs.",
    ),
)  # fmt: skip
def _unused(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    devices, unused = by_task(facts.devices), list[DeviceFacts]()
    granted, silent = list[DeviceFacts](), frozenset(summary.tasks_silent)
    for task in facts.tasks:
        own = devices[task.name]
        if task.engine is not None and (task.pending or any(map(_was_used, own))):
            granted += own
            # Engines of a task that runs may still be starting.
            ready = list(map(after_start_up, own)) if is_running(task, silent) else own
            unused += [d for d, had in zip(own, ready, strict=True) if not _was_used(d) and had.total_s >= _UNUSED_S]
    if unused:
        gpu_s, different = sum(device.total_s for device in unused), cards(unused)
        workers = sum(device.work.workers for device in unused)
        used = max(sum(map(_was_used, devices[name])) for name in {device.task for device in unused})
        yield {
            "severity": PROBLEM if gpu_s >= SERIOUS_S else WARNING,
            "unused": len(unused),
            "granted": devices_words(granted, "GPU"),
            "cost_s": gpu_s,
            "workers": workers,
            "started": count(workers, "worker") if workers else "no worker was",
            "different": different if different < len(unused) else None,
            "used": used or None,
            "subjects": labels(unused),
        }


def _was_used(device: DeviceFacts) -> bool:
    """Say whether any chunk was worked on on it, also one that is still under way."""
    worked = (device.states.get(state) for state in ("working", "failed", "lost"))
    return has_tried(device) or any(time is not None and time.total_s > 0 for time in worked)


# --- memory, time and cores -------------------------------------------------------------------------------------------

_GIB = 2**30
_LEAST_S = 300.0  # a task that ran for less has not shown what it needs
_MEMORY_MARGIN, _TIME_MARGIN, _CPU_MARGIN = 1.2, 1.3, 1.3
_NEAR = 0.9
_FAR_MEMORY, _FAR_MEMORY_GIB = 2.0, 4
_FAR_TIME, _FAR_TIME_S = 3.0, 3600.0
_FAR_CORES = 8  # fewer are not worth a line
_STOPPED_NEAR = 0.75  # an orderly stop leaves the last part of the time for what is in progress


def _all_ended(facts: JobFacts, summary: Summary) -> bool:
    """Say whether no task goes on: what one will still need is not known, so nothing is too much."""
    return not any(is_running(task, summary.tasks_silent) for task in facts.tasks)


def _showed(tasks: Sequence[TaskFacts]) -> bool:
    return max(task.wall_s for task in tasks) >= _LEAST_S


_MORE_MEMORY = Rule(
    "memory_request", PROBLEM,
    when=lambda f: f["killed"],
    says="Slurm killed {killed:count task} that used more memory than asked for.",
    evidence=(
        "asked for {asked:memory}, used {peak:memory} at most, {of_asked}",
        "{fullest.name}; {known:count task} measured",
    ),
    fix="Ask for more memory, or run fewer workers.",
    lines=("#SBATCH --mem={more}G",),
)  # fmt: skip


@topic(
    _MORE_MEMORY,
    replace(_MORE_MEMORY, when=lambda f: f["starved"], says="The node's memory ran out."),
    replace(_MORE_MEMORY, severity=WARNING, when=lambda f: f["near"],
            says="The tasks come close to the memory they asked for."),
    replace(_MORE_MEMORY, severity=NOTE, when=lambda f: f["far"],
            says="Much more memory was asked for than was used.",
            fix="Ask for less: such tasks wait less in the queue, and many sites bill memory.",
            lines=("#SBATCH --mem={wanted}G",)),
)  # fmt: skip
def _memory(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.memory_limit_bytes and t.memory_peak_bytes]
    if not known:
        return
    asked = max(t.memory_limit_bytes or 0 for t in known)
    fullest = max(known, key=lambda t: t.memory_peak_bytes or 0)
    peak = fullest.memory_peak_bytes or 0
    wanted = math.ceil((_MEMORY_MARGIN * peak + _GIB) / _GIB)
    killed = [t for t in known if (t.slurm_state or "").startswith("OUT_OF_ME")]
    starved = any(error.error_class == "host_memory" for error in facts.errors)
    far = asked >= max(_FAR_MEMORY * wanted, wanted + _FAR_MEMORY_GIB) * _GIB and _showed(known)
    yield {
        "killed": len(killed),
        "starved": starved,
        "near": peak >= _NEAR * asked,
        "far": far and _all_ended(facts, summary),
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
    when=lambda f: f["near"],
    says="The tasks ended shortly before their time was over.",
    evidence=(
        "asked for {asked_s:duration}, used {longest.wall_s:duration} at most, {of_asked}",
        "{longest.name}; {ended:count task} ended in order",
    ),
    fix="Ask for a little more; what is left when the time is over is done by submitting again.",
    lines=("#SBATCH --time={time}",),
)  # fmt: skip


@topic(
    Rule(
        "time_request", "{severity}",
        when=lambda f: f["over"],
        says="The time of {over:count task} was over before the work was done.",
        evidence=("asked for {asked_s:duration}", "{done:count chunk} done in it, {left:whole} left"),
        fix="Submit again, which does the rest; or ask for more time, or cut the source into more tasks.",
        lines=("#SBATCH --time={time}",),
    ),
    _TIME_USED,
    replace(_TIME_USED, when=lambda f: f["far"],
            says="Much more time was asked for than was used.",
            fix="Ask for less: short tasks fit into gaps of the queue."),
)  # fmt: skip
def _time(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.time_limit_s]
    if over := [t for t in known if _ran_out(t)]:
        needed_s = max(t.wall_s * (1 + t.pending / t.done) if t.done else 2 * t.wall_s for t in over)
        yield {
            "over": len(over),
            "severity": WARNING if summary.left else NOTE,
            "asked_s": max(t.time_limit_s or 0.0 for t in over),
            "done": sum(t.done for t in over),
            "left": sum(t.pending for t in over),
            "time": _time_option(_TIME_MARGIN * needed_s + 300),
            "subjects": [task.name for task in over],
        }
        return
    ended = [t for t in known if t.verdict in ("done", "failed") and t.done]
    if not ended or len(ended) < len([t for t in known if t.verdict is not None and t.done]):
        return
    for_good = all(t.verdict is not None for t in known)  # what the others will have taken is not known
    longest = max(ended, key=lambda t: t.wall_s)
    asked_s, wanted_s = max(t.time_limit_s or 0.0 for t in ended), _round_up(_TIME_MARGIN * longest.wall_s + 300)
    near = longest.wall_s >= _NEAR * asked_s
    yield {
        "over": 0,
        "near": near,
        "far": for_good and asked_s >= max(_FAR_TIME * wanted_s, wanted_s + _FAR_TIME_S) and _showed(ended),
        "asked_s": asked_s,
        "longest": longest,
        "of_asked": share(longest.wall_s, asked_s),
        "ended": len(ended),
        "time": _time_option(max(wanted_s, 1.2 * asked_s) if near else wanted_s),
        "subjects": [longest.name],
    }


def _ran_out(task: TaskFacts) -> bool:
    if (task.slurm_state or "").startswith("TIMEOUT"):
        return True
    at_end = task.wall_s >= _STOPPED_NEAR * (task.time_limit_s or math.inf)
    return task.verdict in ("stopped", "killed") and task.pending > 0 and at_end


def _round_up(seconds: float) -> float:
    """Return a time that people would ask for: in steps of 5 minutes, of half an hour from 3 h on."""
    step_s = 300 if seconds < 3 * 3600 else 1800
    return math.ceil(seconds / step_s) * step_s


def _time_option(seconds: float) -> str:
    minutes = round(_round_up(seconds) / 60)
    return f"{minutes // 60}:{minutes % 60:02d}:00"


@topic(Rule(
    "cpus_request", NOTE,
    says="Many more cores were asked for than were used.",
    evidence=(
        "asked for {asked} cores, {used:one} busy on average, {of_asked}",
        "{most.name}; {known:count task} measured",
    ),
    fix="Ask for fewer: such tasks wait less in the queue.",
    lines=("#SBATCH --cpus-per-task={wanted}",),
))  # fmt: skip
def _cores(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    known = [t for t in facts.tasks if t.cpus and t.cpu_mean_cores is not None]
    busy = busy_share(facts.devices)
    if not _all_ended(facts, summary) or not known or not _showed(known) or (busy is not None and busy < LOW):
        return  # devices with little to do need more workers, and these need the cores
    asked = max(t.cpus or 0 for t in known)
    most = max(known, key=lambda t: t.cpu_mean_cores or 0.0)
    used = most.cpu_mean_cores or 0.0
    wanted = math.ceil(_CPU_MARGIN * used) + 1
    if wanted <= asked / 2 and asked - wanted >= _FAR_CORES:
        found = {"asked": asked, "used": used, "of_asked": share(used, asked), "most": most, "known": len(known)}
        yield {**found, "wanted": wanted, "subjects": [most.name]}


TOPICS = (_on_cpu, _unused, _memory, _time, _cores)
