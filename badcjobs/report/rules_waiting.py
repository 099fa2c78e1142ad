"""Findings about GPUs that were often idle: what they waited for, and how much GPU time that cost."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from badcjobs.model import not_none
from badcjobs.model.decisions import Code
from badcjobs.report.progress import NOT_ENDED
from badcjobs.report.rules import (
    LOW,
    NOTE,
    WARNING,
    Cases,
    Figures,
    Rule,
    by_task,
    has_tried,
    middle,
    seen_s,
    severity_of,
    share,
    topic,
)
from badcjobs.report.rules_requests import never_worked
from badcjobs.report.summary import Summary, count_devices
from badcjobs.store.figures import StateTime
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts
from badcjobs.words import gpu_time
from badcjobs.workers.engines import traits_of

Tasks = Sequence["_TaskTime"]
LEAST_S = 120.0  # of GPU time: less does not show how busy a device can be
_LEAST_SHARE = 0.1  # of the GPU time of the job: a last, short task does not count
_ALL_CORES = 0.85
_AT_WORK = 0.65  # of a core per worker: an engine that waits uses about 0.5, one at its limit about 0.8
_PROGRAM_S = 60.0  # a program that takes longer than this per chunk spends its time on work, not on starting
_GOOD_TASK_S = 1800.0
# GPU time lost in a busy job is worth a finding if it reaches both, and much if it reaches one of the other two.
_LARGE_CAUSES = ("waiting_for_audio", "start_up", "tail")
_WORTH_S = 10 * 3600.0
_WORTH = 0.02  # of the GPU time
_MUCH_S = 100 * 3600.0
_MUCH = 0.05
# What --workers-per-gpu auto has found, as its last decision about a device model.
_NO_CORES = (Code.START_ONE_PER_CORE, Code.NO_CORES_FOR_MORE)
_TOOK_BACK = (Code.MORE_WORKERS_NOT_FASTER, Code.FEWER_WORKERS_AS_FAST)
_NO_MEMORY = (Code.START_AS_MEMORY_HOLDS, Code.NO_MEMORY_FOR_MORE, Code.MEMORY_IN_USE_UNKNOWN, Code.MEMORY_TIGHT)


# --- what is said -----------------------------------------------------------------------------------------------------

_OPTIONS = "Add these options to badcjobs run."
_CPU = "{used_cores:one} of {cores_granted:round} cores busy (median), with {each:count worker}"
_BUSY = "busy {busy} of {measured_s:gpu_time} on {devices:count device} in {many:count task}"
_AUTO = ("--workers-per-gpu auto",)
_MORE_WORKERS = ("+workers", "+memory", "+cores")


def _cause(name: str, says: str, *evidence: str, only: str = "", **more: Any) -> Rule:
    """Return the rule for a main cause; ``only``: a figure that must be set as well."""
    return Rule(name, "{severity}", says, (_BUSY, *evidence), **more, when=f"{name} {only}")


_FEW_WORKERS = (
    "Too few workers: with {per_gpu:round} per GPU, the GPUs are busy only {busy} of the time.",
    "idle for this reason: {of_idle}",
    _CPU,
    "peak device memory: {memory_used:memory} of {memory_total:memory}",
)
_UNKNOWN = (
    "The GPUs are busy only {busy} of the time.",
    "idle while working on chunks: {of_idle}",
    _CPU,
)


@topic(
    _cause(
        "start_up",
        "Every chunk starts a new program, so the GPUs are busy only {busy} of the time.",
        "median time per chunk: {p50_s:one} s, including the start of the program",
        only="each_chunk",
        fix="Use an engine that keeps running: --engine hawkears starts once per worker. For another program, make the"
        f" chunks longer. {_OPTIONS}",
        lines=("--engine hawkears --workers-per-gpu auto",),
        wants=("+length",),
    ),
    _cause(
        "start_up",
        "Engine start-up took {starting} of the GPU time.",
        "start-up: {of_idle}",
        "median run time of a task: {wall_s:duration}",
        "{started:count engine_start} for {places:count worker}",
        fix="Use fewer array tasks for the same work, so that each runs for at least half an hour. If there were many"
        " more starts than workers, first find out why engines ended (job.sqlite, table attempt).",
        lines=("#SBATCH --array=0-{last_index}",),
        wants=("-tasks", "+time"),
    ),
    _cause(
        "waiting_for_audio",
        "The GPUs waited for audio; they were busy {busy} of the time.",
        "waiting: {of_idle}",
        _CPU,
        fix="Let badcjobs copy audio to the local disk ahead of time (--config run.stage=always), and use fewer, larger"
        f" files. With more workers per GPU, one works while another waits. {_OPTIONS}",
        lines=("--config run.stage=always --workers-per-gpu auto",),
        wants=_MORE_WORKERS,
    ),
    _cause(
        "cpu_bound",
        "The CPU limits the engine: the GPUs are busy only {busy} of the time.",
        "waiting for cores: {of_idle}",
        _CPU,
        fix="Request more cores per GPU, or fewer or smaller GPUs.",
        lines=("#SBATCH --cpus-per-task={cores}",),
        wants=("+cores",),
    ),
    _cause(
        "too_few_workers",
        *_FEW_WORKERS,
        "why not more workers: {short}",
        only="short",
        fix="Request more main memory: there was too little to add workers.",
        lines=("#SBATCH --mem={more_gib:?}G",),
        wants=_MORE_WORKERS,
    ),
    _cause(
        "too_few_workers",
        *_FEW_WORKERS,
        fix="Run more workers per GPU; auto adds workers as long as they help. If the device memory is full, use"
        f" shorter chunks or fewer models first. {_OPTIONS}",
        lines=_AUTO,
        wants=_MORE_WORKERS,
    ),
    _cause(
        "tail",
        "At the end of a task most GPUs wait while one still works on its last chunk.",
        "waiting for others: {of_idle}",
        "longest chunk {longest_s:duration}, median {p50_s:duration}",
        fix="Cut long recordings into chunks of about the same length, or request fewer GPUs per task.",
    ),
    _cause(
        "low_busy",
        *_UNKNOWN,
        "one more worker was tried: {tried}",
        only="tried",
        fix="One more worker per GPU did not help: this engine does not fill this GPU. A smaller GPU (a MIG slice) does"
        " the same work.",
    ),
    _cause(
        "low_busy",
        *_UNKNOWN,
        fix=f"The cause was not measured. Try more workers per GPU: auto adds workers as long as they help. {_OPTIONS}",
        lines=_AUTO,
        wants=_MORE_WORKERS,
    ),
    Rule(
        "tail",
        NOTE,
        says="The work is unevenly distributed: one task ran {times:one} times as long as the median.",
        evidence=(
            "{last.name}: {last.wall_s:duration}, {last.audio_s:hours} hours of audio",
            "median of {done:count task}: {usual_s:duration}, {usual_audio_s:hours} hours",
        ),
        fix="Give each task the same amount of audio. badcjobs splits one source into equal parts; it does not split a"
        " list of manifests.",
    ),
)
def _waiting(facts: JobFacts, summary: Summary) -> Cases:
    """Yield the main cause of idle GPUs; if there is none, a large loss in a busy job, or uneven tasks."""
    tasks = list(_at_work(facts))
    low = [task for task in tasks if task.busy_s < LOW * task.seen_s]
    if _granted_s(low) >= max(LEAST_S, _LEAST_SHARE * _granted_s(tasks)):
        by_cause = _rest_of(low)
        for task in low:
            by_cause[_cause_of_idle_work(task, facts)] += task.idle_at_work_s
            by_cause["failures"] += task.idle_in_vain_s
        cause = max(by_cause, key=by_cause.__getitem__)
        if cause not in ("ending", "failures"):  # these have findings of their own
            yield {**_loss(cause, by_cause, low, facts), "severity": severity_of(sum(by_cause.values()))}
            return
    gpu_s = 3600 * summary.gpu_hours
    by_cause = _rest_of(tasks)
    cause = max(_LARGE_CAUSES, key=by_cause.__getitem__)
    lost_s = by_cause[cause]
    if lost_s >= max(_WORTH_S, _WORTH * gpu_s):
        much = lost_s >= min(_MUCH_S, _MUCH * gpu_s)
        yield {**_loss(cause, by_cause, tasks, facts), "severity": WARNING if much else NOTE}
    else:
        yield from _uneven(facts)


# --- where the time of a task's devices went --------------------------------------------------------------------------


@dataclass
class _TaskTime:
    """The time of the devices of a task with an engine that were used and measured."""

    task: TaskFacts
    devices: list[DeviceFacts]
    granted_s: float = 0.0
    busy_s: float = 0.0
    seen_s: float = 0.0  # it is known how much of this they were busy
    idle_at_work_s: float = 0.0  # while chunks were in progress
    idle_in_vain_s: float = 0.0  # the same for chunks that failed or were lost
    rest_s: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # without a chunk, by cause


def _at_work(facts: JobFacts) -> Iterator[_TaskTime]:
    """Yield the tasks with an engine whose devices were used and measured."""
    devices = by_task(facts.devices)
    for task in facts.tasks:
        time = _time_of(task, devices[task.name])
        if time.devices and task.engine is not None:
            yield time


def _time_of(task: TaskFacts, devices: Sequence[DeviceFacts]) -> _TaskTime:
    """Add up the time of its devices; without start-up if it has not ended, because that may still pay off."""
    time = _TaskTime(task, [])
    rest = list[tuple[DeviceFacts, float]]()
    for device in devices:
        states = defaultdict(StateTime, device.states)
        if task.state in NOT_ENDED:
            states.pop("start_up", None)
        seen = {state: seen_s(one) for state, one in states.items()}
        is_measured = any(seen.values())
        if not is_measured or not has_tried(device) or never_worked(device):
            continue
        idle = {state: seen[state] - (one.busy_s or 0.0) for state, one in states.items()}
        time.devices.append(device)
        time.granted_s += sum(one.total_s for one in states.values())
        time.rest_s["start_up"] += states["start_up"].total_s
        time.seen_s += sum(seen.values())
        time.busy_s += sum(seen.values()) - sum(idle.values())
        time.idle_at_work_s += idle.get("working", 0.0)
        time.idle_in_vain_s += idle.get("failed", 0.0) + idle.get("lost", 0.0)
        rest.append((device, states["waiting"].total_s + states["idle"].total_s))
    _share_out(time.rest_s, task.last_sign_ms, rest)
    return time


def _share_out(by_cause: dict[str, float], task_ms: int, rest: Sequence[tuple[DeviceFacts, float]]) -> None:
    """Add, by cause, for how many seconds devices waited for a chunk, or had no worker.

    After its last chunk a device waits first for other devices, then for the end of the task.
    """
    last_ms = max(not_none(device.work.last_end_ms for device, _ in rest), default=task_ms)
    for device, rest_s in rest:
        if device.work.gave_up is not None:
            by_cause["failures"] += rest_s
            continue
        own_ms = device.work.last_end_ms or last_ms
        tail_s = min(rest_s, (last_ms - own_ms) / 1000)
        ending_s = min(rest_s - tail_s, (task_ms - last_ms) / 1000)
        by_cause["tail"] += tail_s
        by_cause["ending"] += ending_s
        by_cause["waiting_for_audio"] += rest_s - tail_s - ending_s


def _rest_of(tasks: Tasks) -> dict[str, float]:
    by_cause: dict[str, float] = defaultdict(float)
    for task in tasks:
        for cause, seconds in task.rest_s.items():
            by_cause[cause] += seconds
    return by_cause


def _granted_s(tasks: Tasks) -> float:
    return sum(task.granted_s for task in tasks)


# --- the main cause ---------------------------------------------------------------------------------------------------


def _loss(cause: str, by_cause: Mapping[str, float], tasks: Tasks, facts: JobFacts) -> Figures:
    """Return the figures that the rules need."""
    devices = [device for task in tasks for device in task.devices]
    cost_s = by_cause[cause]
    lost_s = sum(by_cause.values())
    starts = _start_up_figures(tasks, devices, facts)
    one_each = any(traits_of(task.task.engine).one_program_per_chunk for task in tasks)
    measured_s = sum(task.seen_s for task in tasks)
    return {
        cause: True,
        "busy": share(sum(task.busy_s for task in tasks), measured_s),
        "measured_s": measured_s,
        "devices": count_devices(devices),
        "of_idle": f"{gpu_time(cost_s)}, {share(cost_s, lost_s)} of the idle time",
        "subjects": [task.task.name for task in tasks],
        "cost_s": cost_s,
        "each_chunk": one_each and starts["starting_s"] < 0.5 * by_cause["start_up"],
        **starts,
        **_worker_figures([task.task for task in tasks], devices, facts),
    }


def _cause_of_idle_work(time: _TaskTime, facts: JobFacts) -> str:
    """Return what devices wait for while chunks are in progress: cores, another worker, or audio."""
    task = time.task
    p50_s = not_none(device.work.chunk_p50_s for device in time.devices)
    if traits_of(task.engine).one_program_per_chunk and p50_s and min(p50_s) <= _PROGRAM_S:
        return "start_up"  # one program per chunk
    cpu = task.cpu_mean_cores
    if cpu is None or not task.workers:
        return "low_busy"
    if task.cpus and cpu >= _ALL_CORES * task.cpus:
        return "cpu_bound"
    if cpu / task.workers < _AT_WORK:
        return "waiting_for_audio"
    if _reasons(facts, _NO_CORES):
        return "cpu_bound"
    return "low_busy" if _reasons(facts, _TOOK_BACK) else "too_few_workers"


def _reasons(facts: JobFacts, codes: Collection[Code]) -> list[str]:
    """Return the reasons of the decisions with these codes."""
    return [decision.reason for decision in facts.decisions if decision.code in codes]


def _start_up_figures(tasks: Tasks, devices: Sequence[DeviceFacts], facts: JobFacts) -> Figures:
    """Return how long engine starts and chunks took, and the array size that starts fewer engines."""
    starting_s = _rest_of(tasks)["start_up"]
    array_tasks = len({(task.job_id, task.array_index) for task in facts.tasks})
    run_s = sum(task.wall_s for task in facts.tasks)
    advised = max(1, min(array_tasks // 5, int(run_s // _GOOD_TASK_S)))
    return {
        "starting_s": starting_s,
        "starting": share(starting_s, _granted_s(tasks)),
        "wall_s": median(task.task.wall_s for task in tasks),
        "last_index": advised - 1 if array_tasks >= 5 else None,
        "p50_s": middle(device.work.chunk_p50_s for device in devices),
        "longest_s": max(not_none(device.work.chunk_max_s for device in devices), default=None),
    }


def _worker_figures(tasks: Sequence[TaskFacts], devices: Sequence[DeviceFacts], facts: JobFacts) -> Figures:
    """Return the workers, their cores and memory, what more of them would need, and the result of trying more."""
    workers = sum(task.workers or 1 for task in tasks)
    requested = max(task.memory_limit_bytes or 0 for task in tasks)
    return {
        "used_cores": middle(task.cpu_mean_cores for task in tasks),
        "cores_granted": middle(task.cpus or None for task in tasks),
        "cores": 2 * max(task.cpus or 0 for task in tasks) or None,
        "each": round(workers / len(tasks)),
        "started": sum(device.work.workers for device in devices),
        "places": workers,
        "memory_used": max(not_none(device.memory_peak_bytes for device in devices), default=None),
        "memory_total": max(not_none(device.memory_total_bytes for device in devices), default=None),
        "per_gpu": workers / len(devices),
        "short": _reasons(facts, _NO_MEMORY)[:1],
        "more_gib": math.ceil(2 * requested / 2**30),
        "tried": _reasons(facts, _TOOK_BACK)[:1],
    }


# --- uneven tasks -----------------------------------------------------------------------------------------------------

_UNEVEN = 2.0
_UNEVEN_S = 600.0
_LEAST_TASKS = 4


def _uneven(facts: JobFacts) -> Cases:
    """Yield a task that had much more to do than the others: no GPU is idle, but the job ends late."""
    done = [task for task in facts.tasks if task.verdict in ("done", "failed") and task.done]
    if len(done) < _LEAST_TASKS:
        return
    last = max(done, key=lambda task: task.wall_s)
    usual_s = median(task.wall_s for task in done)
    usual_audio_s = median(task.audio_s for task in done)
    if last.wall_s >= max(_UNEVEN * usual_s, usual_s + _UNEVEN_S) and last.audio_s >= _UNEVEN * usual_audio_s:
        yield {
            "last": last,
            "times": last.wall_s / usual_s,
            "done": len(done),
            "usual_s": usual_s,
            "usual_audio_s": usual_audio_s,
            "subjects": [last.name],
        }


TOPICS = (_waiting,)
