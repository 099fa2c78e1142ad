"""Slurm: its programs, what they are asked and how their answers are read; and the scheduler that hands in an array.

The array goes in through submitit, the merge job behind it with sbatch. submitit writes the batch script and requeues
a task that runs out of time; what runs in the job is the caller's (``task``), and so is the environment that sbatch
passes on. What a task is to do submitit reads from a file with the task's number in its name. It is the same for all,
so one file is written, and each task links its own name to it.

As long as an sbatch lives it has a lock on its script, also where the process that called it was killed: a full queue
lets it try for two minutes, and it may submit its job after that.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster.sbatch_options import batch_text, extra_options
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.seams import Unanswered

log = logging.getLogger(__name__)

POLL_S = 30.0  # squeue is everybody's: one question per half minute for a whole array is what a site can bear
_WORK = "array.pkl"  # a run folder has one array at a time
_ENDLESS = 1_000_000  # submitit's own count of time-outs; ours is ArrayOrder.requeues
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


# --- the scheduler ----------------------------------------------------------------------------------------------------


class SlurmRefused(BadcjobsError):
    """Slurm did not take a job."""

    exit_code = ExitCode.SLURM


class SubmissionUnknown(SlurmRefused):
    """Nobody knows whether Slurm has taken a job."""


class SlurmScheduler:
    """Hands arrays to Slurm.

    ``task`` makes, of a command and the number of requeues, the picklable callable that each array task calls;
    ``program`` is badcjobs as compute nodes start it, by its full path.
    """

    name = "slurm"

    def __init__(
        self, program: Sequence[str], task: Callable[[tuple[str, ...], int], Callable[[], None]], poll_s: float = POLL_S
    ) -> None:
        self._program = tuple(program)
        self._task = task
        self.poll_s = poll_s
        self.merge_refused: str | None = None  # why the last array that was submitted has no merge job
        self.merge_unsure = False  # it may have one all the same: nobody knows

    def script(self, order: ArrayOrder) -> str:
        """Return the batch script of the array, as submitit writes it."""
        from submitit import SlurmExecutor

        class ArrayExecutor(SlurmExecutor):
            """The one place that knows the protected parts of submitit."""

            @classmethod
            def affinity(cls) -> int:
                return 2  # a script can be made where there is no srun, too

            def array_script(self) -> str:
                self.parameters["map_count"] = 2  # it is an array: logs are named after its tasks
                return str(self._make_submission_file_text(self._submitit_command_str, ""))

        if "%" in str(order.logs):
            raise BadInput(
                f"{order.out} has a % in its name",
                why="Slurm would put something else in its place wherever it writes a log",
                fix="badcjobs submit … --out DIR   (a name without %)",
            )
        executor = ArrayExecutor(order.logs, python=shlex.quote(self._program[0]))
        executor.update_parameters(**_parameters(order))
        return executor.array_script()

    def merge_script(self, order: ArrayOrder) -> str:
        """Return the batch script that merges; sbatch gets the array's number on its command line."""
        options = {
            "job-name": f"{order.name}-merge",
            "account": order.merge_account or order.account,
            "partition": order.partition,
            "ntasks": 1,
            "mem": order.merge_mem,
            "time": order.merge_time_min,
            "output": order.logs / "%j_merge.out",
            "open-mode": "append",
        }
        merging = f"exec {shlex.join([*self._program, 'merge', str(order.out)])}"
        why = "# Merges the task databases once the array has ended, in whatever way (afterany)."
        return batch_text(options, [*order.setup, merging], [why])

    def submit(self, order: ArrayOrder, about_to: Callable[[Path], None] = lambda script: None) -> Submitted:
        """Hand in the array; its merge job comes then, by ``submit_merge``.

        ``about_to`` is called with the script right before sbatch gets it: from then on there may be a job, and
        ``find_array`` finds its number where nothing has written it down.
        """
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise NotHere(
                "there is no Slurm here: no program sbatch, or no srun",
                why="a job is submitted from a login node of the cluster",
                fix="the same command with --cluster local, to run the array on this machine",
            )
        script = self._write(order)
        about_to(script)
        answer = call_sbatch(script)
        if answer.job_id is None and answer.sure:
            script.unlink()
            (order.logs / _WORK).unlink()
            raise SlurmRefused("Slurm did not take the array", why=answer.said, fix="the same command with --dry-run")
        job_id = answer.job_id or (_find_by_script(script) or answer).job_id
        if job_id is None:
            raise SubmissionUnknown(
                "nobody knows whether Slurm has taken the array",
                why=answer.said,
                fix="the same command, in a minute: it looks for that job first",
            )
        rename_script(script, job_id)
        return Submitted(job_id, None, order.indices)

    def _write(self, order: ArrayOrder) -> Path:
        """Write what each task is to do, and the script, which it returns; its name is that of no other submission."""
        from submitit.helpers import DelayedSubmission

        order.logs.mkdir(parents=True, exist_ok=True)
        draft = order.logs / f".{_WORK}"
        work = DelayedSubmission(self._task((*self._program, *order.run_arguments), order.requeues))
        work.set_timeout(order.time_min, _ENDLESS)
        work.dump(draft)
        draft.replace(order.logs / _WORK)
        script = order.logs / f".submission_file_{uuid.uuid4().hex}.sh"
        script.write_text(self.script(order), encoding="utf-8")
        return script

    def find_array(self, script: Path) -> str | None:
        """Return the number of an array that nobody has written down; None: Slurm never took it, or it is over."""
        try:
            return query_number(script)
        except Unanswered as error:
            raise SubmissionUnknown(
                "nobody knows whether Slurm has taken the array that was being submitted here",
                why=f"that submit was killed, or its answer was lost, and now Slurm does not answer: {error}",
                fix="squeue   (and, once it answers, the same command)",
            ) from error

    def submit_merge(self, order: ArrayOrder, job: Submitted) -> Submitted:
        """Hand in the job that merges what this array does; where that may have been done before, look for it.

        Without a merge job the array goes on, and a warning says what to do later.
        """
        script = order.logs / f"{job.job_id}_merge.sh"
        answer = _find_by_script(script) if script.exists() else None
        if answer is None:
            script.write_text(self.merge_script(order), encoding="utf-8")
            answer = call_sbatch(script, "--parsable", f"--dependency=afterany:{job.job_id}")
            if not answer.sure and answer.job_id is None:
                answer = replace(answer, job_id=(_find_by_script(script) or answer).job_id)
        self.merge_refused = answer.said if answer.job_id is None else None
        self.merge_unsure = answer.job_id is None and not answer.sure
        if answer.job_id is None:
            known = "nobody knows whether its merge job is, too" if self.merge_unsure else "but not its merge job"
            log.warning("the array %s is submitted, %s: %s", job.job_id, known, answer.said)
        return replace(job, merge_job_id=answer.job_id)

    def states(self, job: Submitted) -> JobStates:
        """Ask squeue once."""
        return query_states(job)

    def follow_lines(self, job: Submitted, order: ArrayOrder) -> tuple[str, ...]:
        """Return how to see the queue, the logs, and what is done so far."""
        ids = ",".join(filter(None, [job.job_id, job.merge_job_id]))
        logs = f"{shlex.quote(str(order.logs))}/{job.job_id}_*_log.out"
        return f"squeue -j {ids}", f"tail -F {logs}", f"badcjobs merge {shlex.quote(str(order.out))}"


def _find_by_script(script: Path) -> Answer | None:
    """Return what squeue says of a script; None: it has none of this name."""
    try:
        job_id = query_number(script)
    except (Unanswered, NotHere) as error:
        return Answer(None, str(error), sure=False)
    return None if job_id is None else Answer(job_id, "")


def cancel_line(job: Submitted) -> str:
    """Return the scancel for array and merge job."""
    return shlex.join(["scancel", *filter(None, [job.job_id, job.merge_job_id])])


def rename_script(script: Path, job_id: str) -> None:
    """Name the script of an array after its job; before, its own name is what Slurm knows the job by."""
    if script.exists():
        script.rename(script.with_name(f"{job_id}_submission.sh"))


def _parameters(order: ArrayOrder) -> dict[str, Any]:
    """Return the order in submitit's words."""
    own = shlex.quote(str(order.logs)) + '/"${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_submitted.pkl"'
    return {
        "job_name": order.name,
        "time": order.time_min,
        "nodes": 1,
        "cpus_per_task": order.cpus,
        "gpus_per_node": order.gpus_per_task or None,
        "mem": order.mem,
        "account": order.account,
        "constraint": order.constraint,
        "signal_delay_s": order.warning_s,
        "stderr_to_stdout": True,
        "wckey": None,
        # A shell that dies of TERM takes the step with it before badcjobs has stopped in order; this one waits.
        "setup": [
            "trap : TERM  # cancelled or out of time: wait until badcjobs has stopped in order",
            f"ln -s {_WORK} {own} 2>/dev/null  # what to do; after a requeue it is there already",
            *order.setup,
        ],
        # Since Slurm 22.05 a step does not inherit this from sbatch, and would get a single core.
        "srun_args": None if order.cpus is None else [f"--cpus-per-task={order.cpus}"],
        "additional_parameters": {"array": order.spec, "requeue": True, **extra_options(order.extra_sbatch)},
    }
