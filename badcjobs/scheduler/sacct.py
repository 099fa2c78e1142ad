"""Asks Slurm's accounting how array tasks have ended, once, where there is accounting and squeue has forgotten them."""

from __future__ import annotations

import subprocess

from badcjobs.model import Submitted

_PATIENCE_S = 60.0


def query_ends(job: Submitted) -> dict[int, str]:
    """Return the states by array index; none where there is no accounting, or it does not answer."""
    argv = ["sacct", "-n", "-X", "-P", "-j", job.job_id, "-o", "JobID,State"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, errors="replace", timeout=_PATIENCE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return {} if done.returncode else parse_ends(done.stdout, job)


def parse_ends(text: str, job: Submitted) -> dict[int, str]:
    """Read ``sacct -nXP -o JobID,State``: ``4821_7|CANCELLED by 1000``; other lines are a site's banner."""
    ends: dict[int, str] = {}
    for line in text.splitlines():
        name, _, state = line.strip().partition("|")
        number, _, index = name.partition("_")
        if number == job.job_id and index.isascii() and index.isdecimal() and state:
            ends[int(index)] = state.split()[0]
    return ends
