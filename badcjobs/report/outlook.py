"""What is left of a job and when it will be done, at the speed it had so far. Pure; always said as 'about'."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.model import Completeness, JobFacts, Progress, TaskFacts, expected_end_ms
from badcjobs.report.task_states import RUNNING, state_of


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
    audio_s = _audio_left_s(job, pending, not_listed or 0)
    gpu_left_s = _at_the_same_speed(audio_s, job.audio_done_s, gpu_s)
    running = [task for task in job.tasks if state_of(task, now_ms) == RUNNING]
    wall_left_s = _at_their_pace_s(running, job, left, audio_s)
    if wall_left_s is None:
        wall_left_s = _wall_s(gpu_left_s, running) or _at_the_same_speed(audio_s, job.audio_done_s, wall_s)
    return Outlook(
        chunks=left,
        whole_source=not_listed is not None,
        audio_hours=None if audio_s is None else audio_s / 3600,
        gpu_hours=None if gpu_left_s is None else gpu_left_s / 3600,
        wall_s=wall_left_s,
        end_at_ms=_end_ms(wall_left_s, running, now_ms),
    )


def _end_ms(wall_left_s: float | None, running: Sequence[TaskFacts], now_ms: int | None) -> int | None:
    """Return when it will be done; an end that has passed without it was no good guess."""
    if wall_left_s is None or not running:
        return None
    end_ms = max(task.last_sign_ms for task in running) + round(1000 * wall_left_s)
    return end_ms if now_ms is None or end_ms > now_ms else None


def _at_their_pace_s(
    running: Sequence[TaskFacts], job: JobFacts, left: int, audio_left_s: float | None
) -> float | None:
    """Return how long the tasks that run take, from the last sign of any of them; None: none has a pace to go by."""
    usual_left = left * _length(job, left, audio_left_s)
    end_ms = expected_end_ms([_progress(task) for task in running], usual_left, _paces(job.tasks))
    return None if end_ms is None else (end_ms - max(task.last_sign_ms for task in running)) / 1000


def _length(job: JobFacts, left: int, audio_left_s: float | None) -> float:
    """Return how long the chunks that are left are on average, in those that are done; 1 where nobody knows."""
    of_known_length = job.chunks.get("done", 0) - job.done_of_unknown_length
    if not audio_left_s or of_known_length <= 0 or job.audio_done_s <= 0:
        return 1.0
    return audio_left_s / left / (job.audio_done_s / of_known_length)


def _progress(task: TaskFacts) -> Progress:
    at_ms = task.last_sign_ms if task.done else task.heard_at_ms or task.last_sign_ms
    listed = task.done + task.failed + task.pending > 0
    return Progress(task.started_at_ms, at_ms, task.done, task.pending, listed, task.workers)


def _paces(tasks: Sequence[TaskFacts]) -> list[float]:
    return [task.done / task.wall_s for task in tasks if task.done and task.wall_s > 0]


def _audio_left_s(job: JobFacts, pending: int, not_listed: int) -> float | None:
    """Return the audio that is left; of unknown length counts as the mean of those done, else of the others left."""
    of_known_length = job.chunks.get("done", 0) - job.done_of_unknown_length
    guessed = not_listed + job.left_of_unknown_length
    if not guessed:
        return job.audio_left_s
    if of_known_length > 0:
        return job.audio_left_s + guessed * job.audio_done_s / of_known_length
    of_those_left = pending - job.left_of_unknown_length
    return job.audio_left_s * (1 + guessed / of_those_left) if job.audio_left_s and of_those_left > 0 else None


def _at_the_same_speed(audio_s: float | None, done_s: float, took_s: float) -> float | None:
    return audio_s * took_s / done_s if audio_s is not None and done_s > 0 and took_s > 0 else None


def _wall_s(gpu_left_s: float | None, running: Sequence[TaskFacts]) -> float | None:
    at_work = sum(task.devices for task in running)
    return gpu_left_s / at_work if gpu_left_s is not None and at_work else None
