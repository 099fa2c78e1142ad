"""What tasks had under way when they were last heard of is lost once they run no more. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from badcjobs.model import ChartData, DeviceFacts, JobFacts, StateTime, Stretches, TaskFacts, UnderWay
from badcjobs.report.task_states import is_running

_NONE = UnderWay()
_ROUNDING_S = 0.001


def give_up(job: JobFacts, silent: Collection[str]) -> JobFacts:
    """Return the facts with that time and energy in the state lost; ``silent`` are the names of tasks that are."""
    running = _running(job.tasks, silent)
    lost_s = sum(device.under_way.total_s for device in job.devices if device.task not in running)
    devices = tuple(
        device if device.task in running or device.under_way == _NONE else _cut(device) for device in job.devices
    )
    return replace(job, devices=devices, lost_gpu_s=job.lost_gpu_s + lost_s)


def over_time(
    data: ChartData, tasks: Iterable[TaskFacts], silent: Collection[str]
) -> Mapping[tuple[str, str], Stretches]:
    """Return what is drawn of each device over time: the same time is lost as in the figures."""
    running = _running(tasks, silent)
    return {**data.stretches, **{device: found for device, found in data.given_up.items() if device[0] not in running}}


def _running(tasks: Iterable[TaskFacts], silent: Collection[str]) -> set[str]:
    return {task.name for task in tasks if is_running(task, silent)}


def _cut(device: DeviceFacts) -> DeviceFacts:
    spent, nothing = device.under_way, StateTime(0.0, 0.0, None, None)
    working, lost = device.states.get("working", nothing), device.states.get("lost", nothing)
    # Of a try nobody knows for how long its power was measured: as far as that of all of them.
    measured_s = working.measured_s * spent.alone_s / working.total_s if working.total_s else 0.0
    # A moment in which another chunk was done as well is no lost one: as in all accounts, good work names the state.
    alone = spent.alone_s / spent.total_s if spent.total_s else 0.0
    moved = StateTime(spent.alone_s, measured_s, _part(spent.busy_s, alone), _part(spent.energy_j, alone))
    states = {**device.states, "working": _less(working, moved), "lost": _more(lost, moved)}
    states = {state: time for state, time in states.items() if time.total_s > _ROUNDING_S}
    work = replace(device.work, lost=device.work.lost + spent.tries)
    return replace(device, states=states, work=work, under_way=_NONE)


def _more(one: StateTime, other: StateTime) -> StateTime:
    return StateTime(
        one.total_s + other.total_s,
        one.measured_s + other.measured_s,
        _sum(one.busy_s, other.busy_s),
        _sum(one.energy_j, other.energy_j),
    )


def _less(one: StateTime, other: StateTime) -> StateTime:
    return StateTime(
        max(0.0, one.total_s - other.total_s),
        max(0.0, one.measured_s - other.measured_s),
        None if one.busy_s is None else max(0.0, one.busy_s - (other.busy_s or 0.0)),
        None if one.energy_j is None else max(0.0, one.energy_j - (other.energy_j or 0.0)),
    )


def _part(value: float | None, share: float) -> float | None:
    return None if value is None else value * share


def _sum(one: float | None, other: float | None) -> float | None:
    return other if one is None else one + (other or 0.0)
