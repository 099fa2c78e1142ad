"""Call the programs of Slurm, parse their output, and submit an array with its merge job.

submitit writes the batch script of the array and requeues a task that runs out of time; sbatch submits the merge job.
submitit reads the work of each task from a file with the task's number in its name. The work is the same for all tasks,
so one file is written and each task links its own name to it.

A running sbatch holds a lock on its script, even if the process that called it was killed: with a full queue it tries
for two minutes and may still submit the job.
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.cluster.job_script import read_script, read_text
from badcjobs.cluster.sbatch_options import batch_text, extra_options
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.masking import write_new_text
from badcjobs.model import ArrayOrder, JobStates, Queue, Submitted
from badcjobs.paths import RunFolder
from badcjobs.processes import PYTHON
from badcjobs.seams import Clock, Unanswered
from badcjobs.small_files import open_regular
from badcjobs.store import submission_record as records

log = logging.getLogger(__name__)

PROGRAM = (*PYTHON, "-m", "badcjobs")  # with its full path, as compute nodes start it
POLL_S = 30.0  # squeue loads the controller, which all users share
_WORK = "array.pkl"  # a run folder has one array at a time
_ENDLESS = 1_000_000  # submitit's own limit of requeues; ours is ArrayOrder.requeues
_PATIENCE_S = 60.0  # a busy controller answers late
_VIEW_PATIENCE_S = 2.5  # the first screen of a live view must not wait long
_SBATCH_PATIENCE_S = 180.0  # if the queue is full, sbatch itself retries for up to 120 s
_SILENCE_S = 10.0  # without an answer for this long, log a line
_NUMBER = re.compile(r"(?:Submitted batch job )?(?P<id>[0-9]+)(?:;\S+| on cluster \S+)?")
_LOST_ANSWERS = ("timed out", "zero bytes")  # the controller may have accepted the job
_TOO_MANY = re.compile(r"Submit\w*Limit|submit limit|MaxArraySize|array specification", re.IGNORECASE)
_STATUS = re.compile(r"[0-9]+(:[0-9]+)?")
# All other states are final.
UNFINISHED = frozenset(
    {
        "PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "REQUEUED", "REQUEUE_HOLD",
        "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "SPECIAL_EXIT", "RESV_DEL_HOLD", "POWER_UP_NODE",
    }
)  # fmt: skip
# Usual reasons for waiting, which are not shown.
_USUAL = frozenset({"", "None", "Priority", "Resources", "Dependency", "BeginTime", "JobArrayTaskLimit"})


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of sbatch for a script."""

    job_id: str | None  # None: sbatch printed no number
    said: str
    sure: bool = True  # False: there may be a job nevertheless; squeue would list it


def call_sbatch(script: Path, *options: str, patience_s: float = _SBATCH_PATIENCE_S) -> Answer:
    """Call sbatch and wait for its answer, whatever happens to the terminal.

    Ctrl-C and a closed terminal signal every process of the session, and an sbatch that ends by a signal may already
    have submitted its job. So it gets its own session; this process delays the signal (``DelayedSignals``).
    """
    try:
        with script.open("rb+") as file:  # NFS needs write access for a lock
            with suppress(OSError):  # a filesystem without locks
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            done = _run(["sbatch", *options, str(script)], file.fileno(), patience_s)
    except OSError as error:
        return Answer(None, str(error))
    except subprocess.TimeoutExpired as error:
        return Answer(None, f"sbatch did not answer within {patience_s:.0f} s\n{_said(error)}".strip(), sure=False)
    said = done.stderr.strip() or done.stdout.strip()
    if done.returncode > 0:
        return Answer(None, said, sure=not any(words in said.lower() for words in _LOST_ANSWERS))
    number = None if done.returncode else parse_job_id(done.stdout)
    return Answer(number, said or f"sbatch ended with {done.returncode}", sure=number is not None)


def _run(argv: Sequence[str], lock: int, patience_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program as subprocess.run does; if it takes long, log that once, with its output so far."""
    pipe, silence_s = subprocess.PIPE, min(_SILENCE_S, patience_s / 2)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace",
        start_new_session=True, pass_fds=(lock,),
    ) as process:  # fmt: skip
        try:
            try:
                stdout, stderr = process.communicate(timeout=silence_s)
            except subprocess.TimeoutExpired as error:
                words = _said(error) or "no output so far"
                log.warning("sbatch has not answered yet; waiting up to %.0f s: %s", patience_s, words)
                stdout, stderr = process.communicate(timeout=patience_s - silence_s)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)


def _said(error: subprocess.TimeoutExpired) -> str:
    words = error.stderr.decode(errors="replace") if isinstance(error.stderr, bytes) else error.stderr or ""
    return words.strip()


def parse_job_id(text: str) -> str | None:
    """Find the job number in sbatch's output: ``Submitted batch job 4821``, ``4821`` or ``4821;cluster``.

    Other lines are a banner of the site.
    """
    for line in reversed(text.splitlines()):
        if found := _NUMBER.fullmatch(line.strip()):
            return found["id"]
    return None


# Many clusters have no accounting, and Sockeye's login nodes sometimes cannot reach it, so states come from squeue. It
# lists ended tasks only for some minutes (MinJobAge): a task that is missing in its output has ended.


def query_states(job: Submitted) -> JobStates:
    """Call squeue once; raise Unanswered if Slurm does not answer now."""
    ids = ",".join(filter(None, [job.job_id, job.merge_job_id]))  # one line per array task
    fields = "JobArrayID:40,State:20,exit_code:20,Reason:80"
    text = ask(["squeue", "-h", "-r", "-t", "all", "-j", ids, "-O", fields])
    array: dict[int, str] = {}
    codes: dict[int, int] = {}
    reasons: set[str] = set()
    merge, merge_reason = None, None
    for line in text.splitlines():  # other lines are a banner of the site
        name, state, status, reason = (*line.split(maxsplit=3), "", "", "", "")[:4]
        number, _, index = name.partition("_")
        unusual = reason.strip() if state == "PENDING" and reason.strip() not in _USUAL else None
        if not state or not _STATUS.fullmatch(status):
            continue
        if number == job.job_id and index.isascii() and index.isdecimal():
            array[int(index)] = state
            reasons |= {unusual} if unusual else set()
            # 768, a status of wait(2), or 3:0 of newer versions of squeue; 128 + n for signal n.
            first, _, second = status.partition(":")
            code, signum = (int(first), int(second)) if second else divmod(int(first), 256)
            code = 128 + signum % 128 if signum % 128 else code
            if state not in UNFINISHED and code:
                codes[int(index)] = code
        elif name == job.merge_job_id:
            merge, merge_reason = state, unusual
    return JobStates(array, merge, codes, tuple(sorted(reasons)), merge_reason)


class QueueReader:
    """Asks squeue what Slurm has of a run, at most every 30 s; a squeue that fails is no error: not known."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last: tuple[object, float, Queue | None] = (None, 0.0, None)

    def __call__(self, run: Path, job_ids: Iterable[str]) -> Queue | None:
        """Return what Slurm has of the jobs with these numbers, and of others whose script has this run folder."""
        with suppress(OSError, ValueError, BadInput):
            record, now_s = records.read_record(run), self._clock.monotonic_s()
            own = Submitted("", None, ()) if record is None else record.job
            ids = {one for one in (own.job_id, *job_ids) if one.isdecimal() and not records.rows_in(run, one).exists()}
            if self._last[0] != (run, ids, own) or now_s >= self._last[1]:
                self._last = (run, ids, own), now_s + POLL_S, query_queue(run, ids, own.merge_job_id) if ids else None
            return self._last[2]
        return None


def query_queue(run: Path, job_ids: Collection[str], merge_job_id: str | None) -> Queue:
    """Call squeue once for the jobs of the owner of a run folder."""
    wanted = ["squeue", "-h", "-r", "-u", str(run.stat().st_uid), "-o", "%F|%T|%r|%Z|%o"]
    try:
        text = ask(wanted, patience_s=_VIEW_PATIENCE_S)
    except (NotHere, Unanswered):
        return Queue(known=False)
    rows = [fields for line in text.splitlines() if len(fields := line.strip().split("|", 4)) == 5]
    scripts = {(place, script) for number, _, _, place, script in rows if number not in job_ids}
    of_run = {one for one in scripts if _is_script_of(run, *one)}
    mine = [row for row in rows if row[0] in job_ids or (row[3], row[4]) in of_run]
    waiting = [reason for _, state, reason, _, _ in mine if state == "PENDING"]
    reasons, jobs = tuple(sorted({*waiting} - _USUAL)), tuple(sorted({row[0] for row in mine}))
    merge = merge_job_id if merge_job_id in {row[0] for row in rows} else None
    return Queue(True, jobs, len(waiting), len(mine) - len(waiting), reasons, merge)


def _is_script_of(run: Path, place: str, script: str) -> bool:
    """Say whether a job script, submitted in a folder, runs badcjobs with this run folder."""
    with suppress(OSError, BadInput):
        found = read_script(read_text(Path(script), Path(place)), script, {}, place)
        if found.calls and found.start is None:
            return False  # a merge job
        named = (found.start.values.get("out") if found.start else None) or found.out
        return bool(named) and Path(place, str(named)).samefile(run)
    return False


def query_number(script: Path) -> str | None:
    """Return the number of the job that was submitted with this script; None: there is no such job.

    The name of the script is unique. If its sbatch is still running because its caller was killed, wait for it; that
    needs a filesystem with locks.
    """
    with suppress(OSError), os.fdopen(open_regular(script), "rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("an earlier sbatch is still submitting %s; waiting for it", script)
            fcntl.flock(file, fcntl.LOCK_SH)
    for line in ask(["squeue", "-h", "-t", "all", "-u", str(os.getuid()), "-o", "%F|%o"]).splitlines():
        number, _, command = line.strip().partition("|")
        if command == str(script) and number.isascii() and number.isdecimal():
            return number
    return None


def ask(
    argv: Sequence[str],
    env: Mapping[str, str] | None = None,
    *,
    instead: str = "run this on a login node of the cluster",
    patience_s: float = _PATIENCE_S,
) -> str:
    """Return the output of a Slurm program; raise NotHere if it is missing, Unanswered if it does not answer now."""
    program = argv[0]
    try:
        done = subprocess.run(
            argv, env=env, stdin=subprocess.DEVNULL, capture_output=True, errors="replace",
            timeout=patience_s, check=False,
        )  # fmt: skip
    except FileNotFoundError as error:
        why = f"the program {program} is not on PATH"
        raise NotHere("there is no Slurm here", why=why, fix=instead) from error
    except OSError as error:
        raise Unanswered(f"{program} cannot be run: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"{program} did not answer within {patience_s:.0f} s") from error
    if done.returncode and "invalid job id" not in done.stderr.lower():
        raise Unanswered(done.stderr.strip() or f"{program} ended with {done.returncode}")
    return done.stdout  # an invalid job id: the job ended long ago


def has_ended(states: JobStates) -> bool:
    """Say whether all tasks and the merge job have ended."""
    return UNFINISHED.isdisjoint([*states.array.values(), states.merge])


def query_ends(job: Submitted) -> dict[int, str]:
    """Return the final states by array index; empty without accounting, or if it does not answer."""
    try:
        text = ask(["sacct", "-n", "-X", "-P", "-j", job.job_id, "-o", "JobID,State"])
    except (NotHere, Unanswered):
        return {}
    ends: dict[int, str] = {}
    for line in text.splitlines():  # 4821_7|CANCELLED by 1000; other lines are a banner of the site
        name, _, state = line.strip().partition("|")
        number, _, index = name.partition("_")
        if number == job.job_id and index.isascii() and index.isdecimal() and state:
            ends[int(index)] = state.split()[0]
    return ends


# --- submit ---------------------------------------------------------------------------------------------------------


class SlurmRefused(BadcjobsError):
    """Slurm did not accept a job."""

    exit_code = ExitCode.SLURM


class SubmissionUnknown(SlurmRefused):
    """It is not known whether Slurm accepted a job."""


NewTask = Callable[[tuple[str, ...], int], Callable[[], None]]  # the work of a task: its command, its requeues


def array_script(order: ArrayOrder) -> str:
    """Return the batch script of an array, as submitit writes it."""
    from submitit import SlurmExecutor

    class ArrayExecutor(SlurmExecutor):
        """The only user of protected parts of submitit."""

        @classmethod
        def affinity(cls) -> int:
            return 2  # make scripts also on machines without srun

        def text(self) -> str:
            self.parameters["map_count"] = 2  # it is an array: logs are named after its tasks
            return str(self._make_submission_file_text(self._submitit_command_str, ""))

    if "%" in str(order.logs):
        raise BadInput(
            f"{order.out} has a % in its name",
            why="Slurm replaces % in the names of logs",
            fix="badcjobs submit … --out DIR   (a name without %)",
        )
    executor = ArrayExecutor(order.logs, python=shlex.join(PYTHON))
    executor.update_parameters(**_parameters(order))
    return executor.text()


def merge_script(order: ArrayOrder) -> str:
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
    merging = f"exec {shlex.join([*PROGRAM, 'merge', str(order.out)])}"
    why = "# Merges the task databases when the array has ended, with success or without (afterany)."
    return batch_text(options, [*order.setup, merging], [why])


def submit_array(order: ArrayOrder, task: NewTask, about_to: Callable[[Path], None]) -> str:
    """Submit an array and return its number; ``submit_merge`` submits its merge job.

    ``task`` is called in this process; submitit pickles what it returns. ``about_to`` is called with the script right
    before sbatch: from then on there may be a job, and ``find_array`` finds its number if it was not recorded.
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise NotHere(
            "there is no Slurm here: no program sbatch, or no srun",
            why="a job is submitted from a login node of the cluster",
            fix="the same command with --cluster local, to run the array on this machine",
        )
    script = _write(order, task)
    about_to(script)
    answer = _submit(script)
    if answer.job_id is None and answer.sure:
        (order.logs / _WORK).unlink()
        fix = "the same command with --dry-run"
        if _TOO_MANY.search(answer.said):
            begun = RunFolder(order.out).run_toml.exists()  # then its number of tasks cannot change
            fewer = f"with --tasks {(order.tasks + 1) // 2}   (fewer, larger tasks)"
            fix = f"the same command {'when squeue --me lists fewer jobs' if begun else fewer}"
        raise SlurmRefused("Slurm did not accept the array", why=answer.said, fix=fix)
    if answer.job_id is None:
        raise SubmissionUnknown(
            "it is not known whether Slurm accepted the array",
            why=answer.said,
            fix="the same command in a minute: it looks for that job first",
        )
    rename_script(script, answer.job_id)
    return answer.job_id


def _write(order: ArrayOrder, task: NewTask) -> Path:
    """Write the work of each task, and the script with a unique name; return its path."""
    from submitit.helpers import DelayedSubmission

    order.logs.mkdir(parents=True, exist_ok=True)
    draft = order.logs / f".{_WORK}"
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)  # its command may have a secret
    work = DelayedSubmission(task((*PROGRAM, *order.run_arguments), order.requeues))
    work.set_timeout(order.time_min, _ENDLESS)
    work.dump(draft)
    draft.replace(order.logs / _WORK)
    script = order.logs / records.DRAFT.format(uuid.uuid4().hex)
    write_new_text(script, array_script(order))
    return script


def find_array(script: Path) -> str | None:
    """Return the number of an array that was not recorded; None: Slurm did not accept it, or it ended long ago."""
    try:
        return query_number(script)
    except Unanswered as error:
        raise SubmissionUnknown(
            "it is not known whether Slurm accepted the array of an interrupted submit",
            why=f"it was killed, or its answer was lost, and now Slurm does not answer: {error}",
            fix="squeue   (when it answers, the same command)",
        ) from error


def submit_merge(order: ArrayOrder, job_id: str) -> Answer:
    """Submit the merge job of an array, or find it if it may already exist.

    Without a merge job the array continues, and a warning is logged.
    """
    script = order.logs / f"{job_id}_merge.sh"
    answer = _find_by_script(script) if script.exists() else None
    if answer is None:
        script.unlink(missing_ok=True)
        write_new_text(script, merge_script(order))
        answer = _submit(script, "--parsable", f"--dependency=afterany:{job_id}")
    if answer.job_id is None:
        known = "but not its merge job" if answer.sure else "it is not known whether its merge job is"
        log.warning("array %s is submitted, %s: %s", job_id, known, answer.said)
    return answer


def _submit(script: Path, *options: str) -> Answer:
    """Call sbatch; if its answer was lost, look for the job of the script."""
    answer = call_sbatch(script, *options)
    found = None if answer.sure else _find_by_script(script)
    return found if found is not None and found.sure else answer


def _find_by_script(script: Path) -> Answer | None:
    """Look for the job of a script with squeue; None: there is none."""
    try:
        job_id = query_number(script)
    except (Unanswered, NotHere) as error:
        return Answer(None, str(error), sure=False)
    return None if job_id is None else Answer(job_id, "")


def cancel_line(job: Submitted) -> str:
    """Return the scancel for array and merge job."""
    return shlex.join(["scancel", *filter(None, [job.job_id, job.merge_job_id])])


def rename_script(script: Path, job_id: str) -> None:
    """Rename the script of an array after its job; until then its unique name identifies the job."""
    if script.exists():
        script.rename(script.with_name(f"{job_id}_submission.sh"))


def _parameters(order: ArrayOrder) -> dict[str, Any]:
    """Return the order as parameters of submitit."""
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
        # If TERM ended the shell, the step would end before badcjobs has stopped; so the shell ignores it.
        "setup": [
            "trap : TERM  # cancelled or out of time: wait until badcjobs has stopped",
            f"ln -s {_WORK} {own} 2>/dev/null  # the work of the task; after a requeue the link exists",
            *order.setup,
        ],
        # Since Slurm 22.05 a step does not inherit this from sbatch and would get one core.
        "srun_args": None if order.cpus is None else [f"--cpus-per-task={order.cpus}"],
        "additional_parameters": {"array": order.spec, "requeue": True, **extra_options(order.extra_sbatch)},
    }
