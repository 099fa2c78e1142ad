"""The state of each array task, what is left of the job, and when it will be done. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from badcjobs.model import ChartData, Progress, Stretches, expected_end_ms, is_silent, not_none
from badcjobs.report.words import moment
from badcjobs.store.accounting import StateTime
from badcjobs.store.read_model import Completeness, DeviceFacts, JobFacts, TaskFacts, UnderWay

RUNNING, SILENT, KILLED = "running", "silent", "killed"
OUTDATED = "outdated"  # had not ended at the merge; its file has changed since, and it is no longer running
_NOT_KILLED = frozenset({"COMPLETED", "COMPLETING", "ENDED", "RUNNING", "PENDING", "SUSPENDED"})


def was_killed(task: TaskFacts) -> bool:
    """Say whether a task did not end by itself."""
    if task.verdict in ("done", "failed", "stopped"):
        return False
    return task.verdict == KILLED or means_killed(task.slurm_state)


def means_killed(slurm_state: str | None) -> bool:
    """Say whether the Slurm state of a task without a verdict means that it was killed."""
    word = (slurm_state or "").split()
    return bool(word) and word[0] not in _NOT_KILLED


def state_of(task: TaskFacts, now_ms: int | None) -> str:
    """Return the verdict or, if there is none, killed, silent, outdated or running; without ``now_ms`` never silent."""
    if task.verdict is not None:
        return task.verdict
    if was_killed(task):
        return KILLED
    if not is_silent(task.heard_at_ms, task.silent_after_s, now_ms):
        return RUNNING
    return OUTDATED if task.changed else SILENT  # a changed file may contain its end


def is_running(task: TaskFacts, silent: Collection[str]) -> bool:
    """Say whether a task is running, as far as known; ``silent``: the names of silent tasks."""
    return task.verdict is None and not was_killed(task) and task.name not in silent


def state_words(task: TaskFacts, silent: Collection[str]) -> str:
    """Return the state of a task in words."""
    if task.name in silent and task.heard_at_ms is not None:
        return f"{SILENT}, last update {moment(task.heard_at_ms)}"
    going_on = "not ended when it was merged" if task.changed else RUNNING
    return task.verdict or (KILLED if was_killed(task) else going_on)


# --- work in progress of a task that is no longer running is lost -----------------------------------------------------


_NONE = UnderWay()
_ROUNDING_S = 0.001


def mark_lost_work(job: JobFacts, silent: Collection[str]) -> JobFacts:
    """Return the facts with that time and energy in the state lost; ``silent``: the names of silent tasks."""
    running = _running(job.tasks, silent)
    lost_s = sum(device.under_way.total_s for device in job.devices if device.task not in running)
    devices = tuple(
        device if device.task in running or device.under_way == _NONE else _cut(device) for device in job.devices
    )
    return replace(job, devices=devices, lost_gpu_s=job.lost_gpu_s + lost_s)


def over_time(
    data: ChartData, tasks: Iterable[TaskFacts], silent: Collection[str]
) -> Callable[[DeviceFacts], Stretches | None]:
    """Return a function that reads the timeline of a device, with the same time lost as in the numbers."""
    running = _running(tasks, silent)

    def read(device: DeviceFacts) -> Stretches | None:
        found = None if device.task in running else data.given_up(device.device_id)
        return found or data.stretches(device.device_id)

    return read


def _running(tasks: Iterable[TaskFacts], silent: Collection[str]) -> set[str]:
    names = frozenset(silent)
    return {task.name for task in tasks if is_running(task, names)}


def _cut(device: DeviceFacts) -> DeviceFacts:
    spent, nothing = device.under_way, StateTime()
    working, lost = device.states.get("working", nothing), device.states.get("lost", nothing)
    # How long the power of one try was measured is not known: use the share of all tries.
    measured_s = working.measured_s * spent.alone_s / working.total_s if working.total_s else 0.0
    # Time shared with a chunk that was done is not lost: successful work decides the state.
    alone = spent.alone_s / spent.total_s if spent.total_s else 0.0
    busy_s, energy_j = (value and value * alone for value in (spent.busy_s, spent.energy_j))
    moved = StateTime(spent.alone_s, measured_s, busy_s, energy_j)
    states = {**device.states, "working": working.plus(moved, -1), "lost": lost.plus(moved)}
    states = {state: time for state, time in states.items() if time.total_s > _ROUNDING_S}
    work = replace(device.work, lost=device.work.lost + spent.tries)
    return replace(device, states=states, work=work, under_way=_NONE)


# --- what is left -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is left; None: not known."""

    chunks: int
    whole_source: bool  # False: only the chunks that tasks have listed
    audio_hours: float | None
    gpu_hours: float | None
    wall_s: float | None  # at the speed of the slowest running task; without one, at the speed so far
    end_at_ms: int | None  # only while tasks are running, and only in the future


def estimate_rest(
    job: JobFacts, completeness: Completeness | None, gpu_s: float, wall_s: float, now_ms: int | None
) -> Outlook | None:
    """Return what is left of the source, as far as known; None: nothing."""
    pending = job.chunks.get("pending", 0)
    not_listed = completeness.not_listed if completeness is not None else None
    left = pending + (not_listed or 0)
    if not left:
        return None
    # Chunks of unknown length count as the mean of those done, else of the others left.
    done, guessed = job.chunks.get("done", 0) - job.done_of_unknown_length, left - pending + job.left_of_unknown_length
    others, audio_s = pending - job.left_of_unknown_length, None
    if not guessed or done > 0:
        audio_s = job.audio_left_s + (guessed * job.audio_done_s / done if guessed else 0.0)
    elif job.audio_left_s and others > 0:
        audio_s = job.audio_left_s * (1 + guessed / others)

    def at_the_same_speed(took_s: float) -> float | None:
        if audio_s is None or job.audio_done_s <= 0 or took_s <= 0:
            return None
        return audio_s * took_s / job.audio_done_s

    gpu_left_s = at_the_same_speed(gpu_s)
    running = [task for task in job.tasks if state_of(task, now_ms) == RUNNING]
    last_sign_ms = max((task.last_sign_ms for task in running), default=0)
    # At the speed of the running tasks; the chunks left are weighted by their length.
    length = audio_s / left / (job.audio_done_s / done) if audio_s and done > 0 and job.audio_done_s > 0 else 1.0
    paces = [task.done / task.wall_s for task in job.tasks if task.done and task.wall_s > 0]
    end_ms = expected_end_ms([progress_of(task) for task in running], left * length, paces)
    wall_left_s = None if end_ms is None else (end_ms - last_sign_ms) / 1000
    if wall_left_s is None:
        # Without running tasks, those that have chunks left would be submitted again, with as many GPUs.
        again = () if not_listed else {task.part: task for task in job.tasks if task.pending}.values()
        at_work = sum(task.devices or 0 for task in running or again)
        wall_left_s = gpu_left_s / at_work if gpu_left_s is not None and at_work else None
        wall_left_s = wall_left_s or at_the_same_speed(wall_s)
    if wall_left_s is not None:
        wall_left_s = with_start_and_longest(wall_left_s, job.tasks, starts=not running)
    end_at_ms = None if wall_left_s is None or not running else last_sign_ms + round(1000 * wall_left_s)
    passed = end_at_ms is not None and now_ms is not None and end_at_ms <= now_ms  # the estimate was wrong
    return Outlook(
        chunks=left,
        whole_source=not_listed is not None,
        audio_hours=audio_s and audio_s / 3600,
        gpu_hours=gpu_left_s and gpu_left_s / 3600,
        wall_s=wall_left_s,
        end_at_ms=None if passed else end_at_ms,
    )


def with_start_and_longest(wall_s: float, tasks: Sequence[TaskFacts], *, starts: bool) -> float:
    """Return a time that is not shorter than the longest chunk so far; ``starts``: tasks must start up first."""
    known = not_none(task.startup_s for task in tasks)
    startup_s = sum(known) / len(known) if known and starts else 0.0
    return startup_s + max([wall_s, *(task.longest_s or 0.0 for task in tasks)])


def progress_of(task: TaskFacts) -> Progress:
    """Return the progress of a task at its last sign or, while nothing is done, at its last update."""
    at_ms = task.last_sign_ms if task.done else task.heard_at_ms or task.last_sign_ms
    return Progress(task.started_at_ms, at_ms, task.done, task.pending, task.chunks > 0, task.workers)
