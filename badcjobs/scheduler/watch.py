"""Follows a job to its end, whoever runs it: asks as rarely as the scheduler wishes, and tells only what is new."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence

from badcjobs.model import JobStates, Submitted
from badcjobs.scheduler.squeue import UNFINISHED, is_over
from badcjobs.seams import Clock, Scheduler, Unanswered

log = logging.getLogger(__name__)

_BAR = 20


def watch(scheduler: Scheduler, job: Submitted, clock: Clock, tell: Callable[[JobStates], None]) -> JobStates:
    """Wait until array and merge job have ended; ``tell`` hears of every change. Returns how they stood at the end."""
    before: JobStates | None = None
    silent = False
    while True:
        try:
            states = scheduler.states(job)
            silent = False
        except Unanswered as error:
            if not silent:  # a controller that restarts is silent for minutes
                log.warning("%s does not answer, asking on: %s", scheduler.name, error)
            silent = True
        else:
            if states != before:
                tell(states)
            before = states
            if has_ended(states):
                return states
        clock.sleep(scheduler.poll_s)


def has_ended(states: JobStates) -> bool:
    """Say whether neither a task nor the merge job will change any more."""
    return is_over([*states.array.values(), *filter(None, [states.merge])])


def progress_line(job: Submitted, states: JobStates, done: int, of: int) -> str:
    """Return one line: the job, a bar of its chunks, and how many tasks are in which state."""
    counts = Counter(states.array.get(index, "ENDED") for index in job.indices)
    # What is still going on first, then the ends; the same order every time.
    whys = {"PENDING": _in_brackets(states.why_pending)}
    order = sorted(counts, key=lambda s: (s not in UNFINISHED, s))
    words = [f"{counts[state]} {state.lower()}{whys.get(state, '')}" for state in order]
    why_merge = _in_brackets([states.why_merge_pending] if states.why_merge_pending else [])
    merging = f"; merge {states.merge.lower()}{why_merge}" if states.merge else ""
    full = _BAR if done >= of else _BAR * done // of
    bar = "#" * full + "-" * (_BAR - full)
    return f"{job.job_id} [{bar}] {done:,} of {of:,} chunks; tasks: {', '.join(words)}{merging}"


def _in_brackets(reasons: Sequence[str]) -> str:
    return f" ({', '.join(reasons)})" if reasons else ""
