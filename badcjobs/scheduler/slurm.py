"""Slurm as a scheduler: the array goes in through submitit, the merge job behind it with sbatch.

submitit writes the batch script, keeps what a task is to do in a file beside it, and requeues a task that runs out of
time; what runs in the job is the caller's (``task``), and so is the environment that sbatch passes on.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from badcjobs.errors import BadcjobsError, BadInput, ExitCode, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.scheduler.squeue import query_states

log = logging.getLogger(__name__)

POLL_S = 30.0  # squeue is everybody's: one question per half minute for a whole array is what a site can bear
_ENDLESS = 1_000_000  # submitit's own count of time-outs; ours is ArrayOrder.requeues
_PATIENCE_S = 120.0
_OURS = ("array", "output", "error", "signal", "open-mode", "requeue", "job-name", "dependency")


class SlurmRefused(BadcjobsError):
    """Slurm did not take a job."""

    exit_code = ExitCode.SLURM


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

    def script(self, order: ArrayOrder) -> str:
        """Return the batch script of the array."""
        executor = self._executor(order)
        executor.parameters["map_count"] = 2  # it is an array: logs are named after its tasks
        return str(executor._make_submission_file_text(executor._submitit_command_str, ""))

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
        lines = ["#!/bin/bash", "# Merges the task databases once the array has ended, in whatever way (afterany)."]
        lines += [f"#SBATCH --{key}={shlex.quote(str(value))}" for key, value in options.items() if value is not None]
        lines += ["", *order.setup, f"exec {shlex.join([*self._program, 'merge', str(order.out)])}", ""]
        return "\n".join(lines)

    def submit(self, order: ArrayOrder, note: Callable[[Submitted], None] = lambda job: None) -> Submitted:
        """Hand in both; without a merge job the array goes on, and a warning says what to do later."""
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise NotHere(
                "there is no Slurm here: no program sbatch, or no srun",
                why="a job is submitted from a login node of the cluster",
                fix="the same command with --cluster local, to run the array on this machine",
            )
        order.logs.mkdir(parents=True, exist_ok=True)
        job_id = self._submit_array(order)
        note(Submitted(job_id, None, order.indices))
        return Submitted(job_id, self._submit_merge(order, job_id), order.indices)

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

    def _submit_array(self, order: ArrayOrder) -> str:
        from submitit.core.utils import FailedJobError, FailedSubmissionError

        task = self._task((*self._program, *order.run_arguments), order.requeues)
        try:
            # At least two, as of a single one submitit makes a job without an array; --array says how many there are.
            jobs = self._executor(order).submit_array([task] * max(2, len(order.indices)))
        except (FailedJobError, FailedSubmissionError) as error:
            raise SlurmRefused(
                "Slurm did not take the array", why=str(error).strip() or None, fix="the same command with --dry-run"
            ) from error
        job_id = str(jobs[0].job_id).partition("_")[0]
        _name_by_index([job.paths.submitted_pickle for job in jobs], job_id, order)
        return job_id

    def _submit_merge(self, order: ArrayOrder, job_id: str) -> str | None:
        script = order.logs / f"{job_id}_merge.sh"
        script.write_text(self.merge_script(order), encoding="utf-8")
        argv = ["sbatch", "--parsable", f"--dependency=afterany:{job_id}", str(script)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_PATIENCE_S, check=False)
            number = None if done.returncode else parse_job_id(done.stdout)
            said = done.stderr.strip() or done.stdout.strip()
        except (OSError, subprocess.TimeoutExpired) as error:
            number, said = None, str(error)
        if number is None:
            later = f"badcjobs merge {shlex.quote(str(order.out))}"
            log.warning("the array %s is submitted, but not its merge job: %s; later: %s", job_id, said, later)
        return number

    def _executor(self, order: ArrayOrder) -> Any:
        from submitit import SlurmExecutor

        if "%" in str(order.logs):
            raise BadInput(
                f"{order.out} has a % in its name",
                why="Slurm would put something else in its place wherever it writes a log",
                fix="badcjobs submit … --out DIR   (a name without %)",
            )

        class Executor(SlurmExecutor):
            @classmethod
            def affinity(cls) -> int:
                return 2  # a script can be made where there is no srun, too

        executor = Executor(order.logs, max_num_timeout=_ENDLESS, python=shlex.quote(self._program[0]))
        executor.update_parameters(**_parameters(order))
        return executor


def _parameters(order: ArrayOrder) -> dict[str, Any]:
    """Return the order in submitit's words."""
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
        "setup": ["trap : TERM  # cancelled or out of time: wait until badcjobs has stopped in order", *order.setup],
        # Since Slurm 22.05 a step does not inherit this from sbatch, and would get a single core.
        "srun_args": None if order.cpus is None else [f"--cpus-per-task={order.cpus}"],
        "additional_parameters": {"array": order.spec, "requeue": True, **extra_options(order.extra_sbatch)},
    }


def extra_options(given: Sequence[str]) -> dict[str, str | bool]:
    """Return options of sbatch by name: ``--qos=high`` and ``--exclusive``; raise ValueError for what cannot be."""
    options: dict[str, str | bool] = {}
    for text in given:
        name, equals, value = text.removeprefix("--").partition("=")
        if not text.startswith("--") or not name or any(letter.isspace() for letter in name):
            raise ValueError(f"{text!r} is no option of sbatch; write --name=value")
        if name in _OURS:
            raise ValueError(f"--{name} is set by badcjobs itself")
        options[name] = value if equals else True
    return options


def _name_by_index(pickles: Sequence[Path], job_id: str, order: ArrayOrder) -> None:
    """Give each array index its file; submitit names them from 0 on. All hold the same, and tasks wait for theirs."""
    wanted = {order.logs / f"{job_id}_{index}_submitted.pkl" for index in order.indices}
    spare = [path for path in pickles if path not in wanted]
    lacking = sorted(wanted - set(pickles))
    for mine, yours in zip(spare, lacking, strict=False):
        mine.rename(yours)
    for path in spare[len(lacking) :]:
        path.unlink()


def parse_job_id(text: str) -> str | None:
    """Read ``sbatch --parsable`` past a site's banner: ``4821`` or ``4821;cluster``; None: there is no number."""
    for line in reversed(text.splitlines()):
        number = line.strip().partition(";")[0]
        if number.isascii() and number.isdecimal():
            return number
    return None
