"""Call the programs of Slurm: sbatch, squeue, sacct, sinfo and scontrol. No other module calls them.

Each function asks one question and returns the text of the answer; ``cluster/`` and ``allocation.py`` parse it.

A running sbatch holds a lock on its script, even if the process that called it was killed: with a full queue it tries
for two minutes and may still submit the job.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.errors import NotHere
from badcjobs.locks import try_lock, wait_for_lock
from badcjobs.model import Allocation
from badcjobs.seams import Environ, Unanswered
from badcjobs.small_files import open_regular

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # a busy controller answers late
_TASK_PATIENCE_S = 10.0  # a task must not wait long for its end time
_VIEW_PATIENCE_S = 2.5  # nor the first screen of a live view
_SBATCH_PATIENCE_S = 180.0  # if the queue is full, sbatch itself retries for up to 120 s
_SILENCE_S = 10.0  # without an answer for this long, log a line
_NUMBER = re.compile(r"(?:Submitted batch job )?(?P<id>[0-9]+)(?:;\S+| on cluster \S+)?")
_LOST_ANSWERS = ("timed out", "zero bytes")  # the controller may have accepted the job
_IN_SECONDS = {"SLURM_TIME_FORMAT": "%s"}  # since 1970: a local date is ambiguous for an hour each autumn
_LOGIN_NODE = "run this on a login node of the cluster"


def ask(
    argv: Sequence[str], environ: Environ | None = None, *, fix: str = _LOGIN_NODE, patience_s: float = _PATIENCE_S
) -> str:
    """Return the output of a program; raise NotHere if it is missing, Unanswered if it does not answer now."""
    program = argv[0]
    try:
        done = run_to_end(argv, environ, patience_s)
    except FileNotFoundError as error:
        raise NotHere("there is no Slurm here", why=f"the program {program} is not on PATH", fix=fix) from error
    except OSError as error:
        raise Unanswered(f"{program} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{program} did not answer within {patience_s:.0f} s") from error
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise Unanswered(done.stderr.strip() or f"{program} ended with {done.returncode}")
    return done.stdout  # an invalid job id: the job ended long ago


def run_to_end(
    argv: Sequence[str], environ: Environ | None, patience_s: float, **more: Any
) -> subprocess.CompletedProcess[str]:
    """Run a program without input; return its exit code and texts."""
    return subprocess.run(
        argv,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
        timeout=patience_s,
        check=False,
        **more,
    )


def is_here() -> bool:
    """Say whether jobs can be submitted here."""
    return shutil.which("sbatch") is not None and shutil.which("srun") is not None


# --- questions --------------------------------------------------------------------------------------------------------


def list_states(job_ids: str) -> str:
    """Ask for number, state, exit code and reason of each task of these jobs."""
    fields = "JobArrayID:40,State:20,exit_code:20,Reason:80"
    return ask(["squeue", "-h", "-r", "-t", "all", "-j", job_ids, "-O", fields])


def list_queue(user_id: int) -> str:
    """Ask for number, state and reason of all array tasks of a user."""
    return ask(["squeue", "-h", "-r", "-u", str(user_id), "-o", "%F|%T|%r"], patience_s=_VIEW_PATIENCE_S)


def list_scripts(user_id: int) -> str:
    """Ask for number and script of all jobs of a user, also of those that have just ended."""
    return ask(["squeue", "-h", "-t", "all", "-u", str(user_id), "-o", "%F|%o"])


def list_final_states(job_id: str) -> str:
    """Ask the accounting for number and state of each task of a job."""
    return ask(["sacct", "-n", "-X", "-P", "-j", job_id, "-o", "JobID,State"])


def show_end_time(allocation: Allocation, environ: Environ) -> str:
    """Ask for the end time of this task only, not of its whole array; empty: there is no answer."""
    index = "" if allocation.array_index is None else f"_{allocation.array_index}"
    question = ["squeue", "-h", "-j", f"{allocation.job_id}{index}", "-o", "%e"]
    try:
        return ask(question, {**environ, **_IN_SECONDS}, patience_s=_TASK_PATIENCE_S)
    except (NotHere, Unanswered) as error:
        log.info("squeue failed, so the end of the job is not known: %s", error)
        return ""


def show_settings(environ: Environ) -> str:
    """Ask the controller for its settings, with its clock in seconds."""
    return ask(["scontrol", "show", "config"], {**environ, **_IN_SECONDS})


def list_nodes(fields: str, environ: Environ) -> str:
    """Ask for these fields of each node."""
    # A user's SINFO_FORMAT or SINFO_PARTITION would change the output.
    env = {name: value for name, value in environ.items() if not name.startswith("SINFO_")}
    return ask(["sinfo", "-N", "-h", "-O", fields], env, fix="badcjobs gpus --all   (the devices of this machine)")


def test_script(script: Path, environ: Environ, cwd: Path) -> tuple[int, str] | None:
    """Let sbatch check a script without submitting it; return exit code and output, None: there is no answer."""
    try:
        done = run_to_end(["sbatch", "--test-only", str(script)], environ, _PATIENCE_S, cwd=cwd)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.returncode, done.stdout + done.stderr


# --- sbatch -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The answer of sbatch for a script."""

    job_id: str | None  # None: sbatch printed no number
    said: str
    sure: bool = True  # False: there may be a job nevertheless; squeue would list it


def call_sbatch(
    script: Path, *options: str, environ: Environ | None = None, patience_s: float = _SBATCH_PATIENCE_S
) -> Answer:
    """Call sbatch and wait for its answer, whatever happens to the terminal.

    Ctrl-C and a closed terminal signal every process of the session, and an sbatch that ends by a signal may already
    have submitted its job. So it gets its own session; this process delays the signal (``DelayedSignals``).
    """
    command = ["sbatch", *options, str(script)]
    report = "sbatch has not answered yet; waiting up to %.0f s"
    timer = threading.Timer(min(_SILENCE_S, patience_s / 2), log.warning, [report, patience_s])
    try:
        with script.open("rb+") as file:  # NFS needs write access for a lock
            with suppress(OSError):  # a filesystem without locks
                try_lock(file.fileno())
            timer.start()
            done = run_to_end(command, environ, patience_s, start_new_session=True, pass_fds=[file.fileno()])
    except OSError as error:
        return Answer(None, str(error))
    except subprocess.TimeoutExpired as error:
        message = f"sbatch did not answer within {patience_s:.0f} s\n{_output_of(error)}"
        return Answer(None, message.strip(), sure=False)
    finally:
        timer.cancel()
    message = done.stderr.strip() or done.stdout.strip()
    if done.returncode > 0:
        is_lost = any(words in message.lower() for words in _LOST_ANSWERS)
        return Answer(None, message, sure=not is_lost)
    number = None if done.returncode else parse_job_id(done.stdout)
    return Answer(number, message or f"sbatch ended with {done.returncode}", sure=number is not None)


def _output_of(error: subprocess.TimeoutExpired) -> str:
    output = error.stderr or ""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    return text.strip()


def parse_job_id(text: str) -> str | None:
    """Find the job number in sbatch's output: ``Submitted batch job 4821``, ``4821`` or ``4821;cluster``.

    Other lines are a banner of the site.
    """
    for line in reversed(text.splitlines()):
        if number := _NUMBER.fullmatch(line.strip()):
            return number["id"]
    return None


def wait_for_sbatch(script: Path) -> None:
    """Wait for an sbatch that is still submitting this script because its caller was killed."""
    with suppress(OSError), os.fdopen(open_regular(script, os.O_RDWR)) as file:  # else there are no locks here
        if not try_lock(file.fileno()):
            log.warning("an earlier sbatch is still submitting %s; waiting for it", script)
            wait_for_lock(file.fileno())
