"""Hands one script to Slurm: calls sbatch and reads its answer, which may be that nobody knows.

As long as an sbatch lives it has a lock on its script, also where whoever called it was killed: a full queue lets it
try for two minutes, and a job that it submits then is one that nobody would look for any more.
"""

from __future__ import annotations

import fcntl
import logging
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger(__name__)

_PATIENCE_S = 180.0  # where the queue is full, sbatch itself tries for up to 120 s
_SILENCE_S = 10.0  # longer than this nobody is left without a word
_NUMBER = re.compile(r"(?:Submitted batch job )?(?P<id>[0-9]+)(?:;\S+| on cluster \S+)?")
_LOST_ANSWERS = ("timed out", "zero bytes")  # the controller was asked, and may have taken the job


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of a script."""

    job_id: str | None  # None: sbatch has named none
    said: str
    sure: bool = True  # False: there may be a job all the same; squeue would know


def call_sbatch(script: Path, *options: str, patience_s: float = _PATIENCE_S) -> Answer:
    """Call it, and wait for its answer whatever happens to the terminal.

    Ctrl-C and a closed terminal reach every process of the session, and an sbatch that dies of them may have
    submitted its job already. So it has a session of its own; the signal is for us, who hold it back meanwhile.
    """
    try:
        with _locked(script) as kept:
            done = _run(["sbatch", *options, str(script)], kept, patience_s)
    except OSError as error:
        return Answer(None, str(error))
    except subprocess.TimeoutExpired as error:
        return Answer(None, f"sbatch has not answered in {patience_s:.0f} s\n{_said(error)}".strip(), sure=False)
    said = done.stderr.strip() or done.stdout.strip()
    if done.returncode > 0:
        return Answer(None, said, sure=not any(words in said.lower() for words in _LOST_ANSWERS))
    number = None if done.returncode else parse_job_id(done.stdout)
    return Answer(number, said or f"sbatch ended with {done.returncode}", sure=number is not None)


def _run(argv: Sequence[str], kept: Sequence[int], patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run it as subprocess.run does; where it takes long, say so once, with what it has said so far."""
    pipe, silence_s = subprocess.PIPE, min(_SILENCE_S, patience_s / 2)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True, pass_fds=kept,
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


def wait_for_sbatch(script: Path) -> None:
    """Wait until no sbatch has this script any more; where nobody can tell, at once."""
    with suppress(OSError), script.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("an earlier sbatch still has %s; waiting for its end", script)
            fcntl.flock(file, fcntl.LOCK_SH)


@contextmanager
def _locked(script: Path) -> Iterator[tuple[int, ...]]:
    with script.open("rb+") as file:  # not "rb": for NFS that is not enough
        with suppress(OSError):  # this filesystem has no locks
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield (file.fileno(),)


def parse_job_id(text: str) -> str | None:
    """Read sbatch's answer past a site's banner: ``Submitted batch job 4821``, ``4821`` or ``4821;cluster``."""
    for line in reversed(text.splitlines()):
        if found := _NUMBER.fullmatch(line.strip()):
            return found["id"]
    return None
