"""Asks Slurm where a job stands: one squeue for the whole array and its merge job, and all about it; no sacct.

Many clusters, Sockeye's login nodes among them at times, have no accounting to ask. squeue forgets what has ended after
some minutes (MinJobAge), so whoever is missing from its answer has ended.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.model import JobStates, Submitted
from badcjobs.scheduler.sbatch import wait_for_sbatch
from badcjobs.seams import Unanswered

_PATIENCE_S = 60.0
_STATUS = re.compile(r"[0-9]+(:[0-9]+)?")
# Everything else is an end.
UNFINISHED = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    }
)  # fmt: skip
# What everybody waits for; all other reasons are worth a word.
_USUAL = frozenset({"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobArrayTaskLimit"})


def query_states(job: Submitted) -> JobStates:
    """Ask once; raise Unanswered when Slurm has no answer now."""
    return parse_states(_ask(squeue_question(job)), job)


def query_number(script: Path) -> str | None:
    """Return the number of the job that was submitted with this script, of which no other has the name; None: none.

    An sbatch that still has it, because whoever called it was killed, is waited for.
    """
    wait_for_sbatch(script)
    return parse_number(_ask(["squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%F|%o"]), script)


def _ask(argv: Sequence[str]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False)
    except FileNotFoundError as error:
        raise NotHere("there is no squeue here", why="it is part of Slurm", fix="run this on a login node") from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"squeue has not answered in {_PATIENCE_S:.0f} s") from error
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise Unanswered(done.stderr.strip() or f"squeue ended with {done.returncode}")
    return done.stdout  # invalid: all of it has ended and is forgotten


def squeue_question(job: Submitted) -> list[str]:
    """Return the command that asks for array and merge job at once, one line per array task."""
    ids = job.job_id if job.merge_job_id is None else f"{job.job_id},{job.merge_job_id}"
    fields = "JobArrayID:40,State:20,exit_code:20,Reason:80"
    return ["squeue", "-h", "-r", "-t", "all", "-j", ids, "-O", fields]


def parse_states(text: str, job: Submitted) -> JobStates:
    """Read ``squeue -O JobArrayID,State,exit_code,Reason``; other lines are a site's banner."""
    array: dict[int, str] = {}
    codes: dict[int, int] = {}
    reasons: set[str] = set()
    merge, merge_reason = None, None
    for line in text.splitlines():
        name, state, status, reason = (*line.split(maxsplit=3), "", "", "", "")[:4]
        number, _, index = name.partition("_")
        told = reason.strip() if state == "PENDING" and reason.strip() not in _USUAL else None
        if not state or not _STATUS.fullmatch(status):
            continue
        if number == job.job_id and index.isascii() and index.isdecimal():
            array[int(index)] = state
            reasons |= {told} if told else set()
            if state not in UNFINISHED and (code := parse_exit_code(status)):
                codes[int(index)] = code
        elif name == job.merge_job_id:
            merge, merge_reason = state, told
    return JobStates(array, merge, codes, tuple(sorted(reasons)), merge_reason)


def parse_exit_code(status: str) -> int:
    """Read 768, as wait(2) has it, or 3:0 as newer versions of squeue do; 128 + n for signal n."""
    code, _, signum = status.partition(":")
    exit_code, number = (int(code), int(signum)) if signum else divmod(int(code), 256)
    return 128 + number % 128 if number % 128 else exit_code


def parse_number(text: str, script: Path) -> str | None:
    """Read ``squeue -o '%F|%o'``: the job and, for a batch job, its script."""
    for line in text.splitlines():
        number, _, command = line.strip().partition("|")
        if command == str(script) and number.isascii() and number.isdecimal():
            return number
    return None


def is_over(states: Iterable[str]) -> bool:
    """Say whether none of these will change any more."""
    return not any(state in UNFINISHED for state in states)
