"""What became of each array task, and what is left of the job and when it will be done. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from badcjobs.model import ChartData, Progress, Stretches, expected_end_ms, is_silent
from badcjobs.report.words import moment
from badcjobs.store.accounting import StateTime
from badcjobs.store.read_model import Completeness, DeviceFacts, JobFacts, TaskFacts, UnderWay

RUNNING, SILENT, KILLED = "running", "silent", "killed"
OUTDATED = "outdated"  # had not ended at the merge; its file has changed since, and it runs no more
_NOT_KILLED = frozenset({"COMPLETED", "COMPLETING", "ENDED", "RUNNING", "PENDING", "SUSPENDED"})


def was_killed(task: TaskFacts) -> bool:
    """Say whether a task did not end by itself."""
    if task.verdict in ("done", "failed", "stopped"):
        return False
    return task.verdict == KILLED or tells_of_a_kill(task.slurm_state)


def tells_of_a_kill(slurm_state: str | None) -> bool:
    """Say whether Slurm's state of a task that has no verdict means that it was ended from outside."""
    word = (slurm_state or "").split()
    return bool(word) and word[0] not in _NOT_KILLED


def state_of(task: TaskFacts, now_ms: int | None) -> str:
    """Return its verdict or, while it has none, killed, silent, outdated or running; no ``now_ms``: nobody is late."""
    if task.verdict is not None:
        return task.verdict
    if was_killed(task):
        return KILLED
    if not is_silent(task.heard_at_ms, task.silent_after_s, now_ms):
        return RUNNING
    return OUTDATED if task.changed else SILENT  # a file that has changed may well tell its end


def is_running(task: TaskFacts, silent: Collection[str]) -> bool:
    """Say whether a task runs, as far as anybody knows; ``silent`` are the names of those that are."""
    return task.verdict is None and not was_killed(task) and task.name not in silent


def state_words(task: TaskFacts, silent: Collection[str]) -> str:
    """Return what became of it in words."""
    if task.name in silent and task.heard_at_ms is not None:
        return f"{SILENT}, last heard of {moment(task.heard_at_ms)}"
    going_on = "not ended when it was merged" if task.changed else RUNNING
    return task.verdict or (KILLED if was_killed(task) else going_on)


# --- work that was under way in a task that runs no more is lost ------------------------------------------------------


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
    spent, nothing = device.under_way, StateTime()
    working, lost = device.states.get("working", nothing), device.states.get("lost", nothing)
    # For how long the power of a try was measured is not known: as far as that of all of them.
    measured_s = working.measured_s * spent.alone_s / working.total_s if working.total_s else 0.0
    # A moment in which another chunk was done as well is no lost one: as in all accounts, good work names the state.
    alone = spent.alone_s / spent.total_s if spent.total_s else 0.0
    busy_s, energy_j = (None if value is None else value * alone for value in (spent.busy_s, spent.energy_j))
    moved = StateTime(spent.alone_s, measured_s, busy_s, energy_j)
    states = {**device.states, "working": working.plus(moved, -1), "lost": lost.plus(moved)}
    states = {state: time for state, time in states.items() if time.total_s > _ROUNDING_S}
    work = replace(device.work, lost=device.work.lost + spent.tries)
    return replace(device, states=states, work=work, under_way=_NONE)


# --- what is left -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is left; None where there is nothing to judge it by."""

    chunks: int
    whole_source: bool  # False: only what tasks have listed is known
    audio_hours: float | None
    gpu_hours: float | None
    wall_s: float | None  # at the pace of the tasks that run, the slowest one's part; when none does, as before
    end_at_ms: int | None  # while tasks are running, and it lies ahead


def look_ahead(
    job: JobFacts, completeness: Completeness | None, gpu_s: float, wall_s: float, now_ms: int | None = None
) -> Outlook | None:
    """Return what is left of the whole source, as far as it is known; None: nothing."""
    pending = job.chunks.get("pending", 0)
    not_listed = completeness.not_listed if completeness is not None else None
    left = pending + (not_listed or 0)
    if not left:
        return None
    # Chunks of unknown length count as the mean of those done, else of the others left.
    done, guessed = (
        job.chunks.get("done", 0) - job.done_of_unknown_length,
        (not_listed or 0) + job.left_of_unknown_length,
    )
    others, audio_s = pending - job.left_of_unknown_length, None
    if not guessed or done > 0:
        audio_s = job.audio_left_s + (guessed * job.audio_done_s / done if guessed else 0.0)
    elif job.audio_left_s and others > 0:
        audio_s = job.audio_left_s * (1 + guessed / others)

    def at_the_same_speed(took_s: float) -> float | None:
        known = audio_s is not None and job.audio_done_s > 0 and took_s > 0
        return audio_s * took_s / job.audio_done_s if known and audio_s is not None else None

    gpu_left_s = at_the_same_speed(gpu_s)
    running = [task for task in job.tasks if state_of(task, now_ms) == RUNNING]
    last_sign_ms = max((task.last_sign_ms for task in running), default=0)
    # At the pace of the tasks that run; the chunks left count as so many of those done, by their length.
    length = audio_s / left / (job.audio_done_s / done) if audio_s and done > 0 and job.audio_done_s > 0 else 1.0
    paces = [task.done / task.wall_s for task in job.tasks if task.done and task.wall_s > 0]
    end_ms = expected_end_ms([progress_of(task) for task in running], left * length, paces)
    wall_left_s = None if end_ms is None else (end_ms - last_sign_ms) / 1000
    if wall_left_s is None:
        at_work = sum(task.devices or 0 for task in running)
        wall_left_s = gpu_left_s / at_work if gpu_left_s is not None and at_work else None
        wall_left_s = wall_left_s or at_the_same_speed(wall_s)
    end_at_ms = None if wall_left_s is None or not running else last_sign_ms + round(1000 * wall_left_s)
    passed = end_at_ms is not None and now_ms is not None and end_at_ms <= now_ms  # then it was no good guess
    return Outlook(
        chunks=left,
        whole_source=not_listed is not None,
        audio_hours=None if audio_s is None else audio_s / 3600,
        gpu_hours=None if gpu_left_s is None else gpu_left_s / 3600,
        wall_s=wall_left_s,
        end_at_ms=None if passed else end_at_ms,
    )


def progress_of(task: TaskFacts) -> Progress:
    """Return how far a task is, as of its last sign or, while nothing is done, as of its last news."""
    at_ms = task.last_sign_ms if task.done else task.heard_at_ms or task.last_sign_ms
    return Progress(task.started_at_ms, at_ms, task.done, task.pending, task.chunks > 0, task.workers)
