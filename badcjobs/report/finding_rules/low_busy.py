"""Why devices had little to do: where each second that was not busy belongs, and the one cause with most of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from badcjobs.model import DeviceFacts, Finding, JobFacts, TaskFacts
from badcjobs.report.finding_rules.causes import EXPLAIN, Loss
from badcjobs.report.finding_rules.device_time import (
    after_start_up,
    busy_share,
    by_task,
    has_tried,
    seen_s,
    took_back,
    total_s,
    workers_of,
)
from badcjobs.report.finding_rules.large_losses import large_losses
from badcjobs.report.finding_rules.ran_on_cpu import never_worked
from badcjobs.report.finding_rules.uneven import uneven_tasks
from badcjobs.report.summarize import Summary
from badcjobs.report.task_states import is_running

LOW = 0.5
LEAST_S = 120.0  # of GPU time: less does not show how busy a device can be
_LEAST_SHARE = 0.1  # of the job's: neither is its last, short task
_ALL_CORES = 0.85
_SPARE_CORES = 0.5
_AT_WORK = 0.65  # of a core for each worker: half is an engine that waits, 0.8 one that is at its limit
_PROGRAM_S = 60.0  # a program that is started for each chunk and takes longer is at work itself


@dataclass(frozen=True, slots=True)
class _Group:
    """A task and those of its devices that were used and measured."""

    task: TaskFacts
    devices: Sequence[DeviceFacts]

    @property
    def gpu_s(self) -> float:
        return sum(total_s(device) for device in self.devices)


def judge_low_busy(facts: JobFacts, summary: Summary) -> Iterator[Finding]:
    """Yield the main cause of a low busy share, if there is one."""
    groups = list(_measured(facts, summary))
    low = [group for group in groups if (busy_share(group.devices) or 0.0) < LOW]
    gpu_s = sum(group.gpu_s for group in low)
    told = None
    if gpu_s >= max(LEAST_S, _LEAST_SHARE * sum(group.gpu_s for group in groups)):
        loss = _add_up(low, facts)
        cause = max(loss.by_cause, key=lambda name: loss.by_cause[name], default=None)
        if cause in EXPLAIN:  # else it is failures, which have findings of their own
            told = cause
            yield EXPLAIN[cause](loss, facts)
    large = large_losses(_without_work(groups), 3600 * summary.gpu_hours, facts)
    others = [finding for finding in large if finding.kind != told]
    yield from others
    if told is None and not others:
        yield from uneven_tasks(facts)


def _without_work(groups: Sequence[_Group]) -> dict[str, dict[str, float]]:
    """Return for how long devices had no chunk: cause → task → seconds."""
    found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for group in groups:
        for device in group.devices:
            seconds = {state: time.total_s for state, time in device.states.items()}
            for cause, lost_s in _lost_at_rest(seconds, device, group).items():
                found[cause][group.task.name] += lost_s
    return found


def _measured(facts: JobFacts, summary: Summary) -> Iterator[_Group]:
    devices, silent = by_task(facts.devices), frozenset(summary.tasks_silent)
    for task in facts.tasks:
        own = devices[task.name]
        if is_running(task, silent):  # its start-up is not lost: for how long it will work is not known yet
            own = list(map(after_start_up, own))
        used = [d for d in own if has_tried(d) and not never_worked(d) and busy_share([d]) is not None]
        if task.engine is not None and used:
            yield _Group(task, used)


def _add_up(groups: Sequence[_Group], facts: JobFacts) -> Loss:
    by_cause: dict[str, float] = defaultdict(float)
    seconds: dict[str, float] = defaultdict(float)
    for group in groups:
        working = cause_of_idle_work(group.task, group.devices, workers_of(group.task, facts), facts)
        for device in group.devices:
            for state, time in device.states.items():
                seconds[state] += time.total_s
            for cause, lost_s in _lost(device, group, working).items():
                by_cause[cause] += lost_s
    devices = tuple(device for group in groups for device in group.devices)
    measured_s = sum(seen_s(time) for device in devices for time in device.states.values())
    return Loss(tuple(g.task for g in groups), devices, measured_s, dict(by_cause), dict(seconds))


def _lost(device: DeviceFacts, group: _Group, working: str) -> dict[str, float]:
    """Return how many seconds of a device belong to which cause; the busy ones belong to none."""
    idle = {state: seen_s(time) - (time.busy_s or 0.0) for state, time in device.states.items()}
    found = defaultdict(float, _lost_at_rest(idle, device, group))
    found[working] += idle.get("working", 0.0)
    found["failures"] += idle.get("failed", 0.0) + idle.get("lost", 0.0)
    return found


def _lost_at_rest(seconds: Mapping[str, float], device: DeviceFacts, group: _Group) -> dict[str, float]:
    """Return which seconds without a chunk belong to which cause."""
    resting_s = seconds.get("waiting", 0.0) + seconds.get("idle", 0.0)
    found = {"start_up": seconds.get("start_up", 0.0)}
    for cause, rested_s in _resting(device, group):
        found[cause] = min(resting_s, rested_s)
        resting_s -= found[cause]
    found["waiting_for_audio"] = resting_s
    return found


def _resting(device: DeviceFacts, group: _Group) -> Iterator[tuple[str, float]]:
    """Yield for how long a device rested after its last chunk: while others still worked, then with them."""
    ends_ms = [other.work.last_end_ms for other in group.devices if other.work.last_end_ms is not None]
    own_ms = device.work.last_end_ms
    if own_ms is None:
        return
    if device.work.gave_up is not None:
        yield "failures", (group.task.last_sign_ms - own_ms) / 1000
    else:
        yield "tail", (max(ends_ms) - own_ms) / 1000
        yield "ending", (group.task.last_sign_ms - max(ends_ms)) / 1000


def cause_of_idle_work(task: TaskFacts, devices: Sequence[DeviceFacts], workers: float | None, facts: JobFacts) -> str:
    """Return what devices wait for while chunks are worked on: cores, another worker, or audio."""
    if _starts_a_program_for_each_chunk(task, devices):
        return "start_up"
    cpu = task.cpu_mean_cores
    if cpu is None or not workers:
        crowded = (task.host_cpu_mean_percent or 0.0) >= 100 * _ALL_CORES
        return "cpu_bound" if crowded else "low_busy"
    if task.cpus and (cpu >= _ALL_CORES * task.cpus or (task.cpus >= 2 and task.cpus - cpu < _SPARE_CORES)):
        return "cpu_bound"
    if cpu / (workers * _share_at_work(devices)) < _AT_WORK:
        return "waiting_for_audio"
    return _what_more_workers_would_do(facts)


def _share_at_work(devices: Sequence[DeviceFacts]) -> float:
    """Return which share of the time in which it could have had a chunk a device had one."""
    working_s = sum(d.states["working"].total_s for d in devices if "working" in d.states)
    begun_s = sum(total_s(d) - (d.states["start_up"].total_s if "start_up" in d.states else 0.0) for d in devices)
    return max(0.05, working_s / begun_s) if begun_s > 0 else 1.0


def _starts_a_program_for_each_chunk(task: TaskFacts, devices: Sequence[DeviceFacts]) -> bool:
    p50_s = [device.work.chunk_p50_s for device in devices if device.work.chunk_p50_s is not None]
    return task.engine == "command" and bool(p50_s) and min(p50_s) <= _PROGRAM_S


def _what_more_workers_would_do(facts: JobFacts) -> str:
    """Say what keeps workers that are at their limit from being more; --workers-per-gpu auto may have tried it."""
    reasons = [decision.reason for decision in facts.decisions if decision.kind == "workers_per_gpu"]
    if any("no more cores" in reason for reason in reasons):
        return "cpu_bound"
    return "low_busy" if took_back(facts) else "too_few_workers"
