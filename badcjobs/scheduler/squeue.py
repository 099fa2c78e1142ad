"""Asks Slurm where a job stands: one squeue for the whole array and its merge job, no sacct.

Many clusters, Sockeye's login nodes among them at times, have no accounting to ask. squeue forgets what has ended after
some minutes (MinJobAge), so whoever is missing from its answer has ended.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable

from badcjobs.errors import NotHere
from badcjobs.model import JobStates, Submitted
from badcjobs.seams import Unanswered

_PATIENCE_S = 60.0
# Everything else is an end.
UNFINISHED = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    }
)  # fmt: skip


def query_states(job: Submitted) -> JobStates:
    """Ask once; raise Unanswered when Slurm has no answer now."""
    argv = squeue_question(job)
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise NotHere("there is no squeue here", why="it is part of Slurm", fix="run this on a login node") from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"squeue has not answered in {_PATIENCE_S:.0f} s") from error
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise Unanswered(done.stderr.strip() or f"squeue ended with {done.returncode}")
    return parse_states(done.stdout, job)  # invalid: all of it has ended and is forgotten


def squeue_question(job: Submitted) -> list[str]:
    """Return the command that asks for array and merge job at once, one line per array task."""
    ids = job.job_id if job.merge_job_id is None else f"{job.job_id},{job.merge_job_id}"
    return ["squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", "%F|%K|%T"]


def parse_states(text: str, job: Submitted) -> JobStates:
    """Read ``squeue -o '%F|%K|%T'``: job, array index (N/A without one), state; other lines are a site's banner."""
    array: dict[int, str] = {}
    merge = None
    for line in text.splitlines():
        number, _, rest = line.strip().partition("|")
        index, bar, state = rest.partition("|")
        if not bar:
            continue
        if number == job.job_id and index.isdecimal():
            array[int(index)] = state
        elif number == job.merge_job_id:
            merge = state
    return JobStates(array, merge)


def is_over(states: Iterable[str]) -> bool:
    """Say whether none of these will change any more."""
    return not any(state in UNFINISHED for state in states)
