"""The state of each array task, what is left of the job, and when it will be done. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from badcjobs.model import is_silent, not_none
from badcjobs.store.figures import StateTime
from badcjobs.store.read_model import Completeness, DeviceFacts, JobFacts, TaskFacts
from badcjobs.words import moment

RUNNING = "running"
SILENT = "silent"
KILLED = "killed"
OUTDATED = "outdated"  # had not ended at the merge; its file has changed since, and it is no longer running
NOT_ENDED = (RUNNING, OUTDATED)  # as far as known
_NOT_KILLED = frozenset({"COMPLETED", "COMPLETING", "ENDED", "RUNNING", "PENDING", "SUSPENDED"})


def means_killed(slurm_state: str | None) -> bool:
    """Say whether the Slurm state of a task without a verdict means that it was killed."""
    return (slurm_state or "ENDED").split()[0] not in _NOT_KILLED


def state_of(task: TaskFacts, now_ms: int | None) -> str:
    """Return the verdict or, if there is none, killed, silent, outdated or running; without ``now_ms`` never silent."""
    if task.verdict is not None:
        return task.verdict
    if means_killed(task.slurm_state):
        return KILLED
    if not is_silent(task.heard_at_ms, task.silent_after_s, now_ms):
        return RUNNING
    return OUTDATED if task.changed else SILENT  # a changed file may contain its end


def state_words(task: TaskFacts) -> str:
    """Return the state of a task in words."""
    if task.state == SILENT and task.heard_at_ms is not None:
        return f"{SILENT}, last update {moment(task.heard_at_ms)}"
    if task.state in NOT_ENDED and task.changed:
        return "not ended when it was merged"
    return task.state


# --- work in progress of a task that is no longer running is lost -----------------------------------------------------

_ROUNDING_S = 0.001


def mark_lost_work(job: JobFacts) -> JobFacts:
    """Return the facts with that time and energy in the state lost."""
    running = names_of_running(job.tasks)
    devices = []
    lost_s = job.lost_gpu_s
    for device in job.devices:
        if device.task not in running and device.work.under_way:
            lost_s += device.work.under_way_s
            device = _with_lost_work(device)
        devices.append(device)
    return replace(job, devices=tuple(devices), lost_gpu_s=lost_s)


def names_of_running(tasks: Iterable[TaskFacts]) -> set[str]:
    """Return the names of the tasks whose work in progress is not lost."""
    return {task.name for task in tasks if task.state in NOT_ENDED}


def _with_lost_work(device: DeviceFacts) -> DeviceFacts:
    """Return a device with its work in progress in the state lost."""
    working = device.states.get("working", StateTime())
    lost = device.states.get("lost", StateTime())
    # What was measured during one try is not known: use the averages of all tries.
    work = device.work
    share = work.under_way_s / working.total_s if working.total_s else 0.0
    states = {**device.states, "working": working.plus(working, -share), "lost": lost.plus(working, share)}
    states = {state: time for state, time in states.items() if time.total_s > _ROUNDING_S}
    work = replace(work, lost=work.lost + work.under_way, under_way=0, under_way_s=0.0)
    return replace(device, states=states, work=work)


# --- what is left -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outlook:
    """What is left; None: not known."""

    chunks: int
    whole_source: bool  # False: only the chunks that tasks have listed
    audio_hours: float | None
    gpu_hours: float | None
    wall_s: float | None  # at the speed of the slowest running task; without one, at the speed so far
    end_at_ms: int | None  # only while tasks are running, and only in the future


def estimate_rest(
    job: JobFacts, completeness: Completeness, gpu_s: float, wall_s: float, now_ms: int | None
) -> Outlook | None:
    """Return what is left of the source, as far as known; None: nothing."""
    not_listed = completeness.not_listed
    left = job.chunks.get("pending", 0) + (not_listed or 0)
    if not left:
        return None

    done = job.chunks.get("done", 0) - job.done_of_unknown_length
    audio_left_s = _audio_left_s(job, done, left)
    rest = 0.0  # over what is done; 0: not known
    if audio_left_s and job.audio_processed_s > 0:
        rest = audio_left_s / job.audio_processed_s
    wall_left_s = rest * wall_s

    # At the speed of the running tasks; the chunks left are weighted by their length.
    running = [task for task in job.tasks if task.state == RUNNING]
    last_sign_ms = max((task.last_sign_ms for task in running), default=0)
    end_ms = expected_end_ms(job.tasks, rest * done or left)
    if end_ms is not None:
        wall_left_s = (end_ms - last_sign_ms) / 1000
    if wall_left_s:
        wall_left_s = with_start_and_longest(wall_left_s, job.tasks, starts=not running)
    end_at_ms = last_sign_ms + round(1000 * wall_left_s)
    is_ahead = running and wall_left_s and end_at_ms > (now_ms or 0)  # otherwise the estimate was wrong
    return Outlook(
        chunks=left,
        whole_source=not_listed is not None,
        audio_hours=audio_left_s and audio_left_s / 3600,
        gpu_hours=rest * gpu_s / 3600 or None,
        wall_s=wall_left_s or None,
        end_at_ms=end_at_ms if is_ahead else None,
    )


def _audio_left_s(job: JobFacts, done: int, left: int) -> float | None:
    """Return the audio in the chunks left; those of unknown length count as the mean of those ``done``."""
    unknown = left - job.chunks.get("pending", 0) + job.left_of_unknown_length
    if not unknown:
        return job.audio_left_s
    return job.audio_left_s + unknown * job.audio_processed_s / done if done > 0 else None


def with_start_and_longest(wall_s: float, tasks: Sequence[TaskFacts], *, starts: bool) -> float:
    """Return a time that is not shorter than the longest chunk so far; ``starts``: tasks must start up first."""
    longest_s = max([wall_s, *(task.longest_s or 0.0 for task in tasks)])
    startups_s = not_none(task.startup_s for task in tasks)
    if not starts or not startups_s:
        return longest_s
    return longest_s + sum(startups_s) / len(startups_s)


def expected_end_ms(tasks: Sequence[TaskFacts], left: float) -> int | None:
    """Return when all work is done: when the last running task ends, or later if more work is left than they have.

    ``left`` is counted in chunks of the average length of those done. None: no pace is known. A running task without a
    done chunk counts as fast as the others on average (if none has a pace: as all tasks), but not so fast that each of
    its workers would have done more than one chunk by now.
    """
    running = [task for task in tasks if task.state == RUNNING]
    paces = not_none(task.chunks_per_s for task in running) or not_none(task.chunks_per_s for task in tasks)
    if not left or not paces:
        return None
    usual = sum(paces) / len(paces)
    pace_of_all = 0.0
    ends_ms = []
    for task in running:
        if task.chunks and not task.pending and not task.chunks_per_s:
            continue
        pace = task.chunks_per_s or _first_pace(task, usual)
        pace_of_all += pace
        if task.pending:
            ends_ms.append(task.counted_at_ms + 1000 * task.pending / pace)
    if not ends_ms:
        return None
    last_look_ms = max(task.counted_at_ms for task in running)
    return round(max(*ends_ms, last_look_ms + 1000 * left / pace_of_all))


def _first_pace(task: TaskFacts, usual: float) -> float:
    elapsed_ms = task.counted_at_ms - task.started_at_ms
    if elapsed_ms <= 0:
        return usual
    return min(usual, 1000 * (task.workers or 1) / elapsed_ms)
