"""The programs of Slurm: what they are asked, and how their answers are read. sbatch, squeue, sacct, scontrol.

As long as an sbatch lives it has a lock on its script, also where the process that called it was killed: a full queue
lets it try for two minutes, and it may submit its job after that.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.model import JobStates, Submitted
from badcjobs.seams import Unanswered

log = logging.getLogger(__name__)

_PATIENCE_S = 60.0  # a controller under load answers late
_ON_A_LOGIN_NODE = "run this on a login node of the cluster"
_SBATCH_PATIENCE_S = 180.0  # where the queue is full, sbatch itself tries for up to 120 s
_SILENCE_S = 10.0  # after this long without an answer a line says so
_NUMBER = re.compile(r"(?:Submitted batch job )?(?P<id>[0-9]+)(?:;\S+| on cluster \S+)?")
_LOST_ANSWERS = ("timed out", "zero bytes")  # the controller was asked, and may have taken the job
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


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a script."""

    job_id: str | None  # None: sbatch has named none
    said: str
    sure: bool = True  # False: there may be a job all the same; squeue would know


def call_sbatch(script: Path, *options: str, patience_s: float = _SBATCH_PATIENCE_S) -> Answer:
    """Call it, and wait for its answer whatever happens to the terminal.

    Ctrl-C and a closed terminal reach every process of the session, and an sbatch that dies of them may have
    submitted its job already. So it has a session of its own; the signal is for us, who hold it back meanwhile.
    """
    try:
        with script.open("rb+") as file:  # not "rb": for NFS that is not enough
            with suppress(OSError):  # this filesystem has no locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = _run(["sbatch", *options, str(script)], file.fileno(), patience_s)
    except OSError as error:
        return Answer(None, str(error))
    except subprocess.TimeoutExpired as error:
        return Answer(None, f"sbatch has not answered in {patience_s:.0f} s\n{_said(error)}".strip(), sure=False)
    said = done.stderr.strip() or done.stdout.strip()
    if done.returncode > 0:
        return Answer(None, said, sure=not any(words in said.lower() for words in _LOST_ANSWERS))
    number = None if done.returncode else parse_job_id(done.stdout)
    return Answer(number, said or f"sbatch ended with {done.returncode}", sure=number is not None)


def _run(argv: Sequence[str], lock: int, patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run it as subprocess.run does; where it takes long, say so once, with what it has said so far."""
    pipe, silence_s = subprocess.PIPE, min(_SILENCE_S, patience_s / 2)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True, pass_fds=(lock,),
    ) as process:  # fmt: skip
        try:
            try:
                stdout, stderr = process.communicate(timeout=silence_s)
            except subprocess.TimeoutExpired as error:
                words = _said(error) or "it has said nothing"
                log.warning("sbatch has no answer yet; waiting for it, %.0f s at most: %s", patience_s, words)
                stdout, stderr = process.communicate(timeout=patience_s - silence_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def _said(error: subprocess.TimeoutExpired) -> str:
    words = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
    return words.strip()


def parse_job_id(text: str) -> str | None:
    """Read sbatch's answer past a site's banner: ``Submitted batch job 4821``, ``4821`` or ``4821;cluster``."""
    for line in reversed(text.splitlines()):
        if found := _NUMBER.fullmatch(line.strip()):
            return found["id"]
    return None


# Many clusters, Sockeye's login nodes among them at times, have no accounting to ask, so states come from squeue. It
# forgets what has ended after some minutes (MinJobAge): a task that is missing from its answer has ended.


def query_states(job: Submitted) -> JobStates:
    """Ask once; raise Unanswered when Slurm has no answer now."""
    ids = ",".join(filter(None, [job.job_id, job.merge_job_id]))  # one line per array task
    fields = "JobArrayID:40,State:20,exit_code:20,Reason:80"
    return parse_states(ask(["squeue", "-h", "-r", "-t", "all", "-j", ids, "-O", fields]), job)


def query_number(script: Path) -> str | None:
    """Return the number of the job that was submitted with this script, of which no other has the name; None: none.

    An sbatch that still has it, because its caller was killed, is waited for; without locks, it is not.
    """
    with suppress(OSError), script.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("an earlier sbatch still has %s; waiting for its end", script)
            fcntl.flock(file, fcntl.LOCK_SH)
    return parse_number(ask(["squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%F|%o"]), script)


def ask(argv: Sequence[str], env: Mapping[str, str] | None = None, *, instead: str = _ON_A_LOGIN_NODE) -> str:
    """Return what a program of Slurm prints; raise NotHere without it, Unanswered where it has no answer now."""
    program = argv[0]
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_PATIENCE_S, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        why = f"the program {program} is not on PATH"
        raise NotHere("there is no Slurm here", why=why, fix=instead) from error
    except OSError as error:
        raise Unanswered(f"{program} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{program} has not answered in {_PATIENCE_S:.0f} s") from error
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise Unanswered(done.stderr.strip() or f"{program} ended with {done.returncode}")
    return done.stdout  # invalid: all of it has ended and is forgotten


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


def has_ended(states: JobStates) -> bool:
    """Say whether neither a task nor the merge job will change any more."""
    return UNFINISHED.isdisjoint([*states.array.values(), states.merge])


def query_ends(job: Submitted) -> dict[int, str]:
    """Return the states by array index; none where there is no accounting, or it does not answer."""
    try:
        return parse_ends(ask(["sacct", "-n", "-X", "-P", "-j", job.job_id, "-o", "JobID,State"]), job)
    except (NotHere, Unanswered):
        return {}


def parse_ends(text: str, job: Submitted) -> dict[int, str]:
    """Read ``sacct -nXP -o JobID,State``: ``4821_7|CANCELLED by 1000``; other lines are a site's banner."""
    ends: dict[int, str] = {}
    for line in text.splitlines():
        name, _, state = line.strip().partition("|")
        number, _, index = name.partition("_")
        if number == job.job_id and index.isascii() and index.isdecimal() and state:
            ends[int(index)] = state.split()[0]
    return ends
