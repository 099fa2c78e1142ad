"""Findings about GPUs that were often idle: what they waited for, and how much GPU time that cost."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from badcjobs.model import not_none
from badcjobs.report.progress import is_running
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
    gpu_time,
    has_tried,
    seen_s,
    share,
    topic,
)
from badcjobs.report.rules_requests import never_worked
from badcjobs.report.summary import Summary, count_devices
from badcjobs.report.words import count, number
from badcjobs.store.read_model import DeviceFacts, JobFacts, TaskFacts

LEAST_S = 120.0  # of GPU time: less does not show how busy a device can be
_LEAST_SHARE = 0.1  # of the GPU time of the job: a last, short task does not count
_ALL_CORES = 0.85
_SPARE_CORES = 0.5
_AT_WORK = 0.65  # of a core per worker: an engine that waits uses about 0.5, one at its limit about 0.8
_PROGRAM_S = 60.0  # a program that takes longer than this per chunk spends its time on work, not on starting
_SECOND = 0.2  # of the loss: a second cause is worth a line
_FULL = 0.85  # of a device's memory
_GOOD_TASK_S = 1800.0
# As in workers/autoscale.py.
_TOOK_BACK = re.compile(r"per device changed the rate by \S+ against \d+$|fewer are not slower")
_NO_MEMORY = re.compile(r"main memory .*the job has|the job has .* of main memory")
_CAUSES = {
    "start_up": "start-up",
    "waiting_for_audio": "waiting for audio",
    "cpu_bound": "waiting for cores",
    "too_few_workers": "too few workers to fill the GPU",
    "tail": "waiting for the last chunks of others",
    "low_busy": "unknown cause",
    "ending": "the end of the task",
    "failures": "failed chunks",
}
_Group = tuple[TaskFacts, Sequence[DeviceFacts]]  # a task, and its devices that were used and measured

# --- what is said -----------------------------------------------------------------------------------------------------

_OPTIONS = "Add these options to badcjobs run."
_READ_AHEAD = (
    "Let badcjobs copy audio to the local disk ahead of time (--config run.stage=always), and use fewer, larger files."
    f" With more workers per GPU, one works while another waits. {_OPTIONS}"
)
_READ_AHEAD_OPTIONS = ("--config run.stage=always --workers-per-gpu auto",)
_EVEN_CHUNKS = "Cut long recordings into chunks of about the same length, or request fewer GPUs per task."
_CPU = (
    "{used_cores:one}{of_cores} cores busy with {each:count worker}{of_tasks}",
    "all cores of the node: {host_percent:.0f} % busy (median)",
)
_BUSY = "busy {busy} of {measured_s:gpu_time} on {where}"
_LARGE = ("{cost_s:gpu_time} of {gpu_s:gpu_time}", "half of it in {worst:whole} of {s.tasks:count task}")


def _cause(name: str, says: str, *evidence: str, only: str = "", **more: Any) -> Rule:
    """Return the rule for a main cause; ``only``: a figure that must be set as well."""
    return Rule(
        name, "{severity}", says, (_BUSY, *evidence, "{beside}"), **more,
        when=f"main_{name} {only}",
    )  # fmt: skip


def _large(name: str, what: str, fix: str, lines: tuple[str, ...] = (), wants: tuple[str, ...] = ()) -> Rule:
    """Return the rule for a large loss in a busy job."""
    says = f"{what} took {{of_time}} of the GPU time."
    return Rule(name, "{severity}", says, _LARGE, fix, lines, f"large_{name}", wants)


_FEW_WORKERS = (
    "Too few workers: with {per_gpu:round} per GPU, the GPUs are busy only {busy} of the time.",
    "idle for this reason: {of_idle}", *_CPU, "peak device memory: {memory_used:memory} of {memory_total:memory}",
)  # fmt: skip
_STARTS = (
    "Engine start-up took {starting} of the GPU time.",
    "start-up: {of_idle}", "median run time of a task: {wall_s:duration}",
)  # fmt: skip
_UNKNOWN = (
    "The GPUs are busy only {busy} of the time.", "idle while working on chunks: {of_idle}", *_CPU,
)  # fmt: skip
_AUTO = ("--workers-per-gpu auto",)
_MORE_WORKERS, _FEWER_TASKS = ("+workers", "+memory", "+cores"), ("-tasks", "+time")


@topic(
    _cause(
        "start_up", "Every chunk starts a new program, so the GPUs are busy only {busy} of the time.",
        "median time per chunk: {p50_s:one} s, including the start of the program", only="each_chunk",
        fix="Use an engine that keeps running: --engine hawkears starts once per worker. For another program, make the"
            f" chunks longer. {_OPTIONS}",
        lines=("--engine hawkears --workers-per-gpu auto",), wants=("+length",),
    ),
    _cause(
        "start_up", *_STARTS, "{started:whole} engine starts for {places:count worker}", only="started",
        fix="Engines ended and were started again. First find out why tries failed or were lost (job.sqlite, table"
            " attempt).",
    ),
    _cause(
        "start_up", *_STARTS,
        fix="Use fewer array tasks for the same work, so that each runs for at least half an hour.",
        lines=("#SBATCH --array=0-{last_index}",), wants=_FEWER_TASKS,
    ),
    _cause(
        "waiting_for_audio", "The GPUs wait for audio: they are busy only {busy} of the time.",
        "waiting: {of_idle}", *_CPU, "median read rate: {read_mb:one} MB/s per task",
        fix=_READ_AHEAD, lines=_READ_AHEAD_OPTIONS, wants=_MORE_WORKERS,
    ),
    _cause(
        "cpu_bound", "The CPU limits the engine: the GPUs are busy only {busy} of the time.",
        "waiting for cores: {of_idle}", *_CPU,
        fix="Request more cores per GPU{now}, or fewer or smaller GPUs.",
        lines=("#SBATCH --cpus-per-task={cores}", "#SBATCH --gpus-per-node={gpus}"), wants=("+cores",),
    ),
    _cause(
        "too_few_workers", *_FEW_WORKERS, only="full",
        fix="There is no device memory for more workers. Use shorter chunks or fewer models, then more workers."
            f" {_OPTIONS}",
        lines=_AUTO, wants=_MORE_WORKERS,
    ),
    _cause(
        "too_few_workers", *_FEW_WORKERS, "why not more workers: {short}", only="short",
        fix="Request more main memory: there was too little to add workers.",
        lines=("#SBATCH --mem={more_gib}G",), wants=_MORE_WORKERS,
    ),
    _cause(
        "too_few_workers", *_FEW_WORKERS,
        fix=f"Run more workers per GPU; auto adds workers as long as they help. {_OPTIONS}",
        lines=_AUTO, wants=_MORE_WORKERS,
    ),
    _cause(
        "tail", "At the end of a task most GPUs wait while one still works on its last chunk.",
        "waiting for others: {of_idle}", "longest chunk {longest_s:duration}, median {p50_s:duration}",
        fix=_EVEN_CHUNKS,
    ),
    _cause(
        "low_busy", *_UNKNOWN, "one more worker was tried: {tried}", only="tried",
        fix="One more worker per GPU did not help: this engine does not fill this GPU. A smaller GPU (a MIG slice) does"
            " the same work.",
    ),
    _cause(
        "low_busy", *_UNKNOWN,
        fix="The cause was not measured. Try more workers per GPU: auto adds workers as long as they help."
            f" {_OPTIONS}",
        lines=_AUTO, wants=_MORE_WORKERS,
    ),
    _large("waiting_for_audio", "Waiting for the next chunk", _READ_AHEAD, _READ_AHEAD_OPTIONS, _MORE_WORKERS),
    _large("start_up", "Engine start-up",
           "Each task starts its engines once. Half as many tasks for the same work need half of that time.",
           wants=_FEWER_TASKS),
    _large("tail", "Waiting for the last chunks of other GPUs", _EVEN_CHUNKS),
    Rule(
        "tail", NOTE,
        says="The work is unevenly distributed: one task ran {times:one} times as long as the median.",
        evidence=(
            "{last.name}: {last.wall_s:duration}, {last.audio_s:hours} hours of audio",
            "median of {done:count task}: {usual_s:duration}, {usual_audio_s:hours} hours",
        ),
        fix="Give each task the same amount of audio. badcjobs splits one source into equal parts; it does not split a"
            " list of manifests.",
    ),
)  # fmt: skip
def _waiting(facts: JobFacts, summary: Summary) -> Cases:
    """Yield the main cause of idle GPUs, then large losses in a busy job; if there are none, uneven tasks."""
    of_task, silent, groups = by_task(facts.devices), frozenset(summary.tasks_silent), list[_Group]()
    for task in facts.tasks:
        own = of_task[task.name]
        if is_running(task, silent):  # its start-up may pay off: how long it will work is not known
            own = list(map(after_start_up, own))
        used = [d for d in own if has_tried(d) and not never_worked(d) and busy_share([d]) is not None]
        groups += [(task, used)] if task.engine is not None and used else []
    low = [(task, devices) for task, devices in groups if (busy_share(devices) or 0.0) < LOW]
    low_s, all_s = (sum(device.total_s for _, own in some for device in own) for some in (low, groups))
    main = None
    if low_s >= max(LEAST_S, _LEAST_SHARE * all_s):
        figures = _loss(low, facts)
        restarted = figures["cause"] == "start_up" and figures["started"] and summary.failed
        if figures["cause"] not in ("ending", "failures") and not restarted:  # failures have findings of their own
            main = figures["cause"]
            yield figures
    large = [case for case in _large_losses(groups, 3600 * summary.gpu_hours) if case["large"] != main]
    yield from large
    if main is None and not large:
        yield from _uneven(facts)


# --- the main cause ---------------------------------------------------------------------------------------------------


def _loss(groups: Sequence[_Group], facts: JobFacts) -> dict[str, Any]:
    """Return the idle seconds by cause, and the figures that the rules need."""
    by_cause: dict[str, float] = defaultdict(float)
    for task, own in groups:
        while_working = cause_of_idle_work(task, own, task.workers, facts)
        for device in own:
            idle = {state: seen_s(time) - (time.busy_s or 0.0) for state, time in device.states.items()}
            for name, its_s in _lost_at_rest(idle, device, (task, own)).items():
                by_cause[name] += its_s
            by_cause[while_working] += idle.get("working", 0.0)
            by_cause["failures"] += idle.get("failed", 0.0) + idle.get("lost", 0.0)
    tasks, devices = [task for task, _ in groups], [device for _, own in groups for device in own]
    cause, lost_s = max(by_cause, key=lambda name: by_cause[name]), sum(by_cause.values())
    others_s, other = max(((its_s, name) for name, its_s in by_cause.items() if name != cause), default=(0.0, ""))
    beside = f"{share(others_s, lost_s)} of the idle time: {_CAUSES[other]}" if others_s else None
    starts, in_tasks = _start_up_figures(tasks, devices, facts), f" in {count(len(tasks), 'task')}"
    return {
        "cause": cause,
        f"main_{cause}": True,
        "severity": PROBLEM if lost_s >= SERIOUS_S else WARNING,
        "busy": share(busy_share(devices) or 0.0, 1.0),
        "measured_s": sum(seen_s(time) for device in devices for time in device.states.values()),
        "where": count(count_devices(devices), "device") + (in_tasks if len(tasks) > 1 else ""),
        "of_idle": f"{gpu_time(by_cause[cause])}, {share(by_cause[cause], lost_s)} of the idle time",
        "beside": beside if others_s >= _SECOND * lost_s else None,
        "subjects": [task.name for task in tasks],
        "cost_s": by_cause[cause],
        "each_chunk": starts["programs"] and starts["starting_s"] < 0.5 * by_cause["start_up"],
        **starts,
        **_worker_figures(tasks, devices, facts),
    }


def _lost_at_rest(seconds: Mapping[str, float], device: DeviceFacts, group: _Group) -> dict[str, float]:
    """Return the seconds without a chunk by cause.

    After its last chunk a device waits first for other devices, then for the end of the task.
    """
    task, devices = group
    resting_s = seconds.get("waiting", 0.0) + seconds.get("idle", 0.0)
    own_ms = device.work.last_end_ms
    rests: list[tuple[str, int]] = []
    if own_ms is not None and device.work.gave_up is not None:
        rests = [("failures", task.last_sign_ms - own_ms)]
    elif own_ms is not None:
        last_ms = max(not_none(other.work.last_end_ms for other in devices))
        rests = [("tail", last_ms - own_ms), ("ending", task.last_sign_ms - last_ms)]
    found = {"start_up": seconds.get("start_up", 0.0)}
    for cause, rested_ms in rests:
        found[cause] = min(resting_s, rested_ms / 1000)
        resting_s -= found[cause]
    return {**found, "waiting_for_audio": resting_s}


def cause_of_idle_work(task: TaskFacts, devices: Sequence[DeviceFacts], workers: float | None, facts: JobFacts) -> str:
    """Return what devices wait for while chunks are in progress: cores, another worker, or audio."""
    p50_s = not_none(device.work.chunk_p50_s for device in devices)
    if task.engine == "command" and p50_s and min(p50_s) <= _PROGRAM_S:
        return "start_up"  # one program per chunk
    cpu = task.cpu_mean_cores
    if cpu is None or not workers:
        crowded = (task.host_cpu_mean_percent or 0.0) >= 100 * _ALL_CORES
        return "cpu_bound" if crowded else "low_busy"
    if task.cpus and (cpu >= _ALL_CORES * task.cpus or (task.cpus >= 2 and task.cpus - cpu < _SPARE_CORES)):
        return "cpu_bound"
    # The share of the time after start-up in which devices had a chunk.
    working_s = sum(d.states["working"].total_s for d in devices if "working" in d.states)
    begun_s = sum(after_start_up(device).total_s for device in devices)
    at_work = max(0.05, working_s / begun_s) if begun_s > 0 else 1.0
    if cpu / (workers * at_work) < _AT_WORK:
        return "waiting_for_audio"
    if _ramp_reasons(facts, re.compile("no cores for more|one per core")):
        return "cpu_bound"
    return "low_busy" if _ramp_reasons(facts, _TOOK_BACK) else "too_few_workers"


def _ramp_reasons(facts: JobFacts, pattern: re.Pattern[str]) -> list[str]:
    """Return the reasons of ``--workers-per-gpu auto`` that match a pattern."""
    reasons = [decision.reason for decision in facts.decisions if decision.kind == "workers_per_gpu"]
    return [reason for reason in reasons if pattern.search(reason)]


def _start_up_figures(tasks: Sequence[TaskFacts], devices: Sequence[DeviceFacts], facts: JobFacts) -> dict[str, Any]:
    """Return how long engine starts and chunks took, and the array size that starts fewer engines."""
    starting_s = sum(device.state_s.get("start_up", 0.0) for device in devices)
    p50_s = not_none(device.work.chunk_p50_s for device in devices)
    rates = not_none(task.read_mean_bytes_per_s for task in tasks)
    many = len({(task.job_id, task.array_index) for task in facts.tasks})
    wanted = max(1, min(many // 5, int(sum(task.wall_s for task in facts.tasks) // _GOOD_TASK_S)))
    return {
        "starting_s": starting_s,
        "starting": share(starting_s, sum(device.total_s for device in devices)),
        "programs": any(task.engine == "command" for task in tasks),
        "wall_s": median(task.wall_s for task in tasks),
        "last_index": wanted - 1 if many >= 5 else None,
        "p50_s": median(p50_s) if p50_s else None,
        "longest_s": max(not_none(d.work.chunk_max_s for d in devices), default=None),
        "read_mb": median(rates) / 1e6 if rates else None,
    }


def _worker_figures(tasks: Sequence[TaskFacts], devices: Sequence[DeviceFacts], facts: JobFacts) -> dict[str, Any]:
    """Return the cores and the memory for workers, and the result of trying more workers."""
    workers = sum(task.workers or 1 for task in tasks)
    cores, granted = max(task.cpus or 0 for task in tasks), max(task.devices or 0 for task in tasks)
    short_by, started = 0.9 / max(busy_share(devices) or 0.0, 0.01), sum(d.work.workers for d in devices)
    fewer_gpus = granted > 1 and short_by >= 2  # no node has so many cores: fewer GPUs get more cores each
    held = [
        (d.memory_peak_bytes, d.memory_total_bytes) for d in devices if d.memory_peak_bytes and d.memory_total_bytes
    ]
    used, total = max(held, key=lambda pair: pair[0] / pair[1], default=(None, None))
    asked, short = max(task.memory_limit_bytes or 0 for task in tasks), _ramp_reasons(facts, _NO_MEMORY)
    used_cores = not_none(task.cpu_mean_cores for task in tasks)
    all_cores = [task.cpus for task in tasks if task.cpus]
    host = not_none(task.host_cpu_mean_percent for task in tasks)
    return {
        "used_cores": median(used_cores) if used_cores else None,
        "of_cores": f" of {number(median(all_cores), 0)}" if all_cores else "",
        "each": round(workers / len(tasks)),
        "of_tasks": " (median of all tasks)" if len(used_cores) > 1 else "",
        "host_percent": median(host) if host and not used_cores else None,
        "started": started if started >= 2 * workers else None,
        "places": workers,
        "now": f" (now {number(cores / max(1, granted), 1)})" if cores else "",
        "cores": math.ceil(cores * min(2.0, short_by)) if cores and not fewer_gpus else None,
        "gpus": max(1, round(granted / short_by)) if cores and fewer_gpus else None,
        "memory_used": used,
        "memory_total": total,
        "full": used is not None and total is not None and used > _FULL * total,
        "per_gpu": workers / max(1, len(devices)),
        "short": short[-1] if short and asked else None,
        "more_gib": math.ceil(2 * asked / 2**30),
        "tried": next(iter(_ramp_reasons(facts, _TOOK_BACK)), None),
    }


# --- GPU time lost in a busy job: a small share of a large job is a lot -----------------------------------------------

_WORTH_S, _WORTH = 10 * 3600.0, 0.02  # both
_FEW = 10  # tasks that can be listed
_MUCH_S, _MUCH = 100 * 3600.0, 0.05  # either


def _large_losses(groups: Sequence[_Group], gpu_s: float) -> Iterator[dict[str, object]]:
    """Yield the causes for which devices had no chunk for 10 GPU-hours or more."""
    for cause in ("waiting_for_audio", "start_up", "tail"):
        lost: dict[str, float] = defaultdict(float)  # task → seconds
        for task, devices in groups:
            for device in devices:
                seconds = {state: time.total_s for state, time in device.states.items()}
                lost[task.name] += _lost_at_rest(seconds, device, (task, devices)).get(cause, 0.0)
        lost_s = sum(lost.values())
        if lost_s >= max(_WORTH_S, _WORTH * gpu_s):
            names = sorted(lost, key=lambda name: -lost[name])
            so_far_s = accumulate(lost[name] for name in names)
            worst = names[: 1 + sum(one_s < lost_s / 2 for one_s in so_far_s)]  # the fewest with half of it
            yield {
                "large": cause,
                f"large_{cause}": True,
                "severity": WARNING if lost_s >= min(_MUCH_S, _MUCH * gpu_s) else NOTE,
                "of_time": share(lost_s, gpu_s),
                "cost_s": lost_s,
                "gpu_s": gpu_s,
                "worst": len(worst),
                "subjects": worst if len(worst) <= _FEW else (),
            }


_UNEVEN, _UNEVEN_S = 2.0, 600.0
_LEAST_TASKS = 4


def _uneven(facts: JobFacts) -> Cases:
    """Yield a task that had much more to do than the others: no GPU is idle, but the job ends late."""
    done = [task for task in facts.tasks if task.verdict in ("done", "failed") and task.done]
    if len(done) < _LEAST_TASKS:
        return
    last, usual_s = max(done, key=lambda task: task.wall_s), median(task.wall_s for task in done)
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
