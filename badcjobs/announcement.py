"""Tells Slurm-side scripts (folder slurm/) that badcjobs runs here, so that they record its end even if we cannot.

They invite us through two variables that their task prolog sets; without them nothing is done. What they write is read
by ``store/merging/slurm_ends.py``.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

from badcjobs.model import TaskKey
from badcjobs.store.merging.slurm_ends import SPOOL_KEY, wanted_file

log = logging.getLogger(__name__)

NOTES_VARIABLE = "BADCJOBS_SLURM_NOTES"  # a file of ours on this node: the task epilog reads where our database is
SPOOL_VARIABLE = "BADCJOBS_SLURM_SPOOL"  # a folder that the whole cluster shares: asks for the job's end state


def announce(environ: Mapping[str, str], key: TaskKey, database: Path) -> dict[str, str]:
    """Say where our task database is, to whoever wants to know; return what merge must know, for ``meta``."""
    notes, spool = environ.get(NOTES_VARIABLE), environ.get(SPOOL_VARIABLE)
    # A job that was submitted from inside another one may have inherited the other's variables.
    if notes and Path(notes).name.startswith(f"{environ.get('SLURM_JOB_ID')}."):
        _add_line(Path(notes), str(database))
    if not spool or not key.job_id.isdecimal():
        return {}
    _ask_for_ends(wanted_file(Path(spool), key.job_id))
    return {SPOOL_KEY: spool}


def _add_line(notes: Path, line: str) -> None:
    try:
        fd = os.open(notes, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.write(fd, os.fsencode(line) + b"\n")
        finally:
            os.close(fd)
    except OSError as error:
        log.debug("the task epilog will not know of this task: %s", error)


def _ask_for_ends(wanted: Path) -> None:
    """Leave an empty file; all tasks of an array ask for the same."""
    try:
        os.close(os.open(wanted, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644))
    except FileExistsError:
        pass
    except OSError as error:
        log.debug("Slurm's end states are not recorded: %s", error)
