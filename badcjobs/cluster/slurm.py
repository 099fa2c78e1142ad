"""Slurm as a scheduler: the array goes in through submitit, the merge job behind it with sbatch.

submitit writes the batch script and requeues a task that runs out of time; what runs in the job is the caller's
(``task``), and so is the environment that sbatch passes on. What a task is to do submitit reads from a file with the
task's number in its name. It is the same for all, so one file is written, and each task links its own name to it.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from badcjobs.cluster.array_options import extra_options
from badcjobs.cluster.sbatch_options import batch_text
from badcjobs.cluster.slurm_commands import Answer, call_sbatch, query_number, query_states
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.seams import Unanswered

log = logging.getLogger(__name__)

POLL_S = 30.0  # squeue is everybody's: one question per half minute for a whole array is what a site can bear
_WORK = "array.pkl"  # a run folder has one array at a time
_ENDLESS = 1_000_000  # submitit's own count of time-outs; ours is ArrayOrder.requeues


class SlurmRefused(BadcjobsError):
    """Slurm did not take a job."""

    exit_code = ExitCode.SLURM


class SlurmSilent(SlurmRefused):
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
        return array_script(order, self._program[0])

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
        job_id = answer.job_id or (_look_for(script) or answer).job_id
        if job_id is None:
            raise SlurmSilent(
                "nobody knows whether Slurm has taken the array",
                why=answer.said,
                fix="the same command, in a minute: it looks for that job first",
            )
        keep_script(script, job_id)
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
            raise SlurmSilent(
                "nobody knows whether Slurm has taken the array that was being submitted here",
                why=f"that submit was killed, or its answer was lost, and now Slurm does not answer: {error}",
                fix="squeue   (and, once it answers, the same command)",
            ) from error

    def submit_merge(self, order: ArrayOrder, job: Submitted) -> Submitted:
        """Hand in the job that merges what this array does; where that may have been done before, look for it.

        Without a merge job the array goes on, and a warning says what to do later.
        """
        script = order.logs / f"{job.job_id}_merge.sh"
        answer = _look_for(script) if script.exists() else None
        if answer is None:
            script.write_text(self.merge_script(order), encoding="utf-8")
            answer = call_sbatch(script, "--parsable", f"--dependency=afterany:{job.job_id}")
            if not answer.sure and answer.job_id is None:
                answer = replace(answer, job_id=(_look_for(script) or answer).job_id)
        self.merge_refused = answer.said if answer.job_id is None else None
        self.merge_unsure = answer.job_id is None and not answer.sure
        if answer.job_id is None:
            known = "nobody knows whether its merge job is, too" if self.merge_unsure else "but not its merge job"
            log.warning("the array %s is submitted, %s: %s", job.job_id, known, answer.said)
        return replace(job, merge_job_id=answer.job_id)

    def states(self, job: Submitted) -> JobStates:
        """Ask squeue once."""
        return query_states(job)

    def cancel_line(self, job: Submitted) -> str:
        """Return the scancel for array and merge job."""
        return shlex.join(["scancel", *filter(None, [job.job_id, job.merge_job_id])])

    def follow_lines(self, job: Submitted, order: ArrayOrder) -> tuple[str, ...]:
        """Return how to see the queue, the logs, and what is done so far."""
        ids = ",".join(filter(None, [job.job_id, job.merge_job_id]))
        logs = f"{shlex.quote(str(order.logs))}/{job.job_id}_*_log.out"
        return f"squeue -j {ids}", f"tail -F {logs}", f"badcjobs merge {shlex.quote(str(order.out))}"


def _look_for(script: Path) -> Answer | None:
    """Return what squeue says of a script; None: it has none of this name."""
    try:
        job_id = query_number(script)
    except (Unanswered, NotHere) as error:
        return Answer(None, str(error), sure=False)
    return None if job_id is None else Answer(job_id, "")


def keep_script(script: Path, job_id: str) -> None:
    """Name the script of an array after its job; before, its own name is what Slurm knows the job by."""
    if script.exists():
        script.rename(script.with_name(f"{job_id}_submission.sh"))


def array_script(order: ArrayOrder, python: str) -> str:
    """Return the batch script of an array, as submitit writes it."""
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
    executor = ArrayExecutor(order.logs, python=shlex.quote(python))
    executor.update_parameters(**_parameters(order))
    return executor.array_script()


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
        "partition": order.partition,
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
