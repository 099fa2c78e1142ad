"""Findings about GPUs that were never used: by the engine, which ran on the CPU, or at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from badcjobs.report.device_summary import cards, rows_words
from badcjobs.report.progress import is_running
from badcjobs.report.rules import (
    NOTE,
    PROBLEM,
    SERIOUS_S,
    WARNING,
    Figures,
    Rule,
    Topic,
    after_start_up,
    busy_share,
    by_task,
    has_tried,
    labels,
    names,
    share,
    total_s,
)
from badcjobs.report.summary import Summary
from badcjobs.store.read_model import DeviceFacts, JobFacts

# --- work that was done by the CPU although there were GPUs -----------------------------------------------------------

_NEVER_BUSY = 0.01
_LEAST_CHUNKS, _LEAST_S = 3, 60.0
_CONTEXT_BYTES = 100 * 2**20  # CUDA alone takes more than that on any card
_EMPTY_BYTES = 2**30  # what a driver shows as used on a card without any process is less


def never_worked(device: DeviceFacts) -> bool:
    """Say whether chunks were done in the name of a device that did nothing for them.

    The plain utilization reads 0 at light load, so the memory has to say it, too: it never rose.
    """
    working = device.states.get("working")
    held = device.metrics.get("memory_used_bytes")
    if working is None or working.total_s < _LEAST_S or device.work.done < _LEAST_CHUNKS or held is None:
        return False
    busy = busy_share([device])
    was_empty = held.maximum < _EMPTY_BYTES and held.maximum - held.minimum < _CONTEXT_BYTES
    return busy is not None and busy < _NEVER_BUSY and was_empty


def _on_cpu(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    if idle := [device for device in facts.devices if never_worked(device)]:
        held = [device.metrics["memory_used_bytes"] for device in idle]
        yield {
            "case": "never used",
            "devices": cards(idle),
            "chunks": sum(device.work.done for device in idle),
            "gpu_s": sum(total_s(device) for device in idle),
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
            "subjects": names(tasks),
        }


ON_CPU = Topic(_on_cpu, (
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
))  # fmt: skip


# --- devices without work ---------------------------------------------------------------------------------------------

_UNUSED_S = 60.0  # each; a task that finds nothing to do is over before


def _was_used(device: DeviceFacts) -> bool:
    """Say whether any chunk was worked on on it, also one that is still under way."""
    worked = (device.states.get(state) for state in ("working", "failed", "lost"))
    return has_tried(device) or any(time is not None and time.total_s > 0 for time in worked)


def _unused(facts: JobFacts, summary: Summary) -> Iterator[Figures]:
    devices, unused = by_task(facts.devices), list[DeviceFacts]()
    granted, silent = list[DeviceFacts](), frozenset(summary.tasks_silent)
    for task in facts.tasks:
        own = devices[task.name]
        if task.engine is not None and (task.pending or any(map(_was_used, own))):
            granted += own
            # Engines of a task that runs may still be starting.
            ready = list(map(after_start_up, own)) if is_running(task, silent) else own
            unused += [d for d, had in zip(own, ready, strict=True) if not _was_used(d) and total_s(had) >= _UNUSED_S]
    if not unused:
        return
    gpu_s, different = sum(total_s(device) for device in unused), cards(unused)
    started = sum(device.work.workers for device in unused)
    used = max(sum(map(_was_used, devices[name])) for name in {device.task for device in unused})
    yield {
        "severity": PROBLEM if gpu_s >= SERIOUS_S else WARNING,
        "unused": len(unused),
        "granted": rows_words(granted, "GPU"),
        "cost_s": gpu_s,
        "started": started,
        "different": different if different < len(unused) else None,
        "used": used or None,
        "subjects": labels(unused),
    }


_UNUSED = Rule(
    "unused_gpus", "{severity}",
    says="{unused:whole} of {granted} never had a chunk to work on.",
    evidence=(
        "{cost_s:gpu_time} granted for nothing",
        "no worker was started there, no chunk was tried",
        "{different:count different_device}, each counted for every task",
    ),
    fix="Ask for as many GPUs as are used. To use them all, leave --max-gpus out and have more chunks than GPUs.",
    lines=("#SBATCH --gpus-per-node={used}",),
)  # fmt: skip
UNUSED = Topic(_unused, (
    replace(
        _UNUSED, when=lambda f: f["started"],
        evidence=(_UNUSED.evidence[0], "{started:count worker} started there, no chunk was tried", _UNUSED.evidence[2]),
        fix="Look into the log of the task why their workers did nothing.",
        lines=(),
    ),
    _UNUSED,
))  # fmt: skip
