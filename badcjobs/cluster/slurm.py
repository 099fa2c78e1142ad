"""Slurm as a scheduler: the array goes in through submitit, the merge job behind it with sbatch.

submitit writes the batch script, keeps what a task is to do in a file beside it, and requeues a task that runs out of
time; what runs in the job is the caller's (``task``), and so is the environment that sbatch passes on.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
_ENDLESS = 1_000_000  # submitit's own count of time-outs; ours is ArrayOrder.requeues
_BEFORE, _AFTER = ".submission_file_", ".sh"
_DRAFT = re.compile(r"[0-9a-f]{32}-[0-9]+\.pkl(\.save_tmp)?|\.submission_file_[0-9a-f]{32}\.sh")


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

    def submit(
        self,
        order: ArrayOrder,
        note: Callable[[Submitted], None] = lambda job: None,
        about_to: Callable[[Path], None] = lambda script: None,
    ) -> Submitted:
        """Hand in both; without a merge job the array goes on, and a warning says what to do later.

        ``about_to`` is told of the script right before sbatch gets it: from then on there may be a job, and whoever is
        killed before ``note`` has heard its number may ask ``find_array`` for it.
        """
        if shutil.which("sbatch") is None or shutil.which("srun") is None:
            raise NotHere(
                "there is no Slurm here: no program sbatch, or no srun",
                why="a job is submitted from a login node of the cluster",
                fix="the same command with --cluster local, to run the array on this machine",
            )
        order.logs.mkdir(parents=True, exist_ok=True)
        drafts = self._draft(order)
        try:
            about_to(drafts.script)
        except BaseException:
            drafts.remove()
            raise
        job = Submitted(_taken(drafts, call_sbatch(drafts.script)), None, order.indices)
        note(job)  # before a file is named: there may be thousands
        drafts.name(job.job_id, order.indices)
        return self.submit_merge(order, job)

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

    def tidy(self, script: Path, job: Submitted | None) -> None:
        """Name the files of the array that was found by its script; None: there is none, take them away."""
        if script.parent.is_dir():
            Drafts(script).remove() if job is None else Drafts(script).name(job.job_id, job.indices)

    def submit_merge(self, order: ArrayOrder, job: Submitted) -> Submitted:
        """Hand in the job that merges what this array does; where somebody may have done so before, look for it."""
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

    def _draft(self, order: ArrayOrder) -> Drafts:
        """Write what submitit would; its own submit_array names thousands of files before it tells a job's number."""
        from submitit.helpers import DelayedSubmission

        work = DelayedSubmission(self._task((*self._program, *order.run_arguments), order.requeues))
        work.set_timeout(order.time_min, _ENDLESS)
        return Drafts.write(order.logs, self.script(order), work.dump, len(order.indices))


def _look_for(script: Path) -> Answer | None:
    """Return what squeue says of a script; None: it has none of this name."""
    try:
        job_id = query_number(script)
    except (Unanswered, NotHere) as error:
        return Answer(None, str(error), sure=False)
    return None if job_id is None else Answer(job_id, "")


def _taken(drafts: Drafts, answer: Answer) -> str:
    """Return the number of the array; raise what Slurm says where it has none."""
    if answer.job_id is not None:
        return answer.job_id
    if answer.sure:
        drafts.remove()
        raise SlurmRefused("Slurm did not take the array", why=answer.said, fix="the same command with --dry-run")
    found = _look_for(drafts.script)
    if found is None or found.job_id is None:
        raise SlurmSilent(
            "nobody knows whether Slurm has taken the array",
            why=answer.said,
            fix="the same command, in a minute: it looks for that job first",
        )
    return found.job_id


# --- scripts ---------------------------------------------------------------------------------------------------------


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


# --- files -----------------------------------------------------------------------------------------------------------


# The files of an array in its logs folder are drafts while it has no number, then named after that, as submitit wants.
# All drafts of one submission carry the name of its script, by which Slurm knows the job, too.


def remove_left(logs: Path, before_ms: int) -> None:
    """Take away what submits that were killed over their drafts have left; what is younger may still be written."""
    for name in filter(_DRAFT.fullmatch, os.listdir(logs) if logs.is_dir() else ()):  # noqa: PTH208
        if (logs / name).stat().st_mtime * 1000 < before_ms:
            (logs / name).unlink()


@dataclass(frozen=True, slots=True)
class Drafts:
    """What was written for one submission."""

    script: Path

    @classmethod
    def write(cls, logs: Path, text: str, dump: Callable[[Path], None], count: int) -> Drafts:
        """Write the script, and for each of so many tasks what it is to do; ``dump`` writes that once."""
        drafts = cls(logs / f"{_BEFORE}{uuid.uuid4().hex}{_AFTER}")
        try:
            first = logs / f"{drafts._prefix}0.pkl"
            dump(first)
            content = first.read_bytes()
            for number in range(1, count):
                (logs / f"{drafts._prefix}{number}.pkl").write_bytes(content)
            drafts.script.write_text(text, encoding="utf-8")
        except BaseException:
            drafts.remove()
            raise
        return drafts

    def name(self, job_id: str, indices: Sequence[int]) -> None:
        """Give each array index its file, and the script its name at last; what is named already stays."""
        logs, names = self.script.parent, set(os.listdir(self.script.parent))  # noqa: PTH208 - 10,000 paths are slow
        wanted = (f"{job_id}_{index}_submitted.pkl" for index in indices)
        lacking = [name for name in wanted if name not in names]
        for mine, yours in zip(self._pickles(names), lacking, strict=False):
            os.rename(logs / mine, logs / yours)  # noqa: PTH104 - as above, and tasks are waiting for their file
        if self.script.exists():
            self.script.rename(logs / f"{job_id}_submission.sh")

    def remove(self) -> None:
        """Take them away again."""
        for name in os.listdir(self.script.parent):  # noqa: PTH208
            if name.startswith(self._prefix):  # also what submitit has not written to its end, .save_tmp
                (self.script.parent / name).unlink()
        self.script.unlink(missing_ok=True)

    @property
    def _prefix(self) -> str:
        return self.script.name.removeprefix(_BEFORE).removesuffix(_AFTER) + "-"

    def _pickles(self, names: Sequence[str] | set[str]) -> list[str]:
        return sorted(name for name in names if name.startswith(self._prefix) and name.endswith(".pkl"))
