"""Tasks that had much more to do than the others."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from badcjobs.model import NOTE, Finding, JobFacts
from badcjobs.report.words import count, duration, number

_UNEVEN, _UNEVEN_S = 2.0, 600.0
_LEAST_TASKS = 4


def uneven_tasks(facts: JobFacts) -> Iterator[Finding]:
    """Yield that some tasks had much more to do than the others: nobody idles, but the job is late."""
    done = [task for task in facts.tasks if task.verdict in ("done", "failed") and task.done]
    if len(done) < _LEAST_TASKS:
        return
    last, usual_s = max(done, key=lambda task: task.wall_s), median(task.wall_s for task in done)
    usual_audio_s = median(task.audio_s for task in done)
    if last.wall_s < max(_UNEVEN * usual_s, usual_s + _UNEVEN_S) or last.audio_s < _UNEVEN * usual_audio_s:
        return
    yield Finding(
        "tail", NOTE, f"The work is uneven: one task ran {number(last.wall_s / usual_s, 1)} × as long as the median.",
        (
            f"{last.name}: {duration(last.wall_s)}, {number(last.audio_s / 3600, 1)} hours of audio",
            f"median of {count(len(done), 'task')}: {duration(usual_s)}, {number(usual_audio_s / 3600, 1)} hours",
        ),
        "Give each task the same amount of audio: one source for the whole array is cut into equal parts, a list of"
        " manifests is not.",
        (), (last.name,),
    )  # fmt: skip
