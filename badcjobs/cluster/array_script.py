"""The batch scripts of an array and of its merge job.

submitit writes the script of the array and requeues a task that runs out of time. It reads the work of each task from a
file with the task's number in its name; the work is the same for all tasks, so one file is written and each task links
its own name to it.
"""

from __future__ import annotations

import shlex
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from badcjobs.cluster.sbatch_options import batch_text
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.model import ArrayOrder
from badcjobs.processes import PYTHON
from badcjobs.store.submission_record import DRAFT

PROGRAM = (*PYTHON, "-m", "badcjobs")  # with its full path, as compute nodes start it
WORK = "array.pkl"  # a run folder has one array at a time
_ENDLESS = 1_000_000  # submitit's own limit of requeues; ours is ArrayOrder.requeues

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

    if not {"%", "\n"}.isdisjoint(str(order.logs)):
        raise BadInput(
            f"{str(order.out)!r} has a % or a line break in its name",
            why="logs of Slurm cannot be written there",
            fix="badcjobs submit … --out DIR   (another name)",
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


def write_array(order: ArrayOrder, task: NewTask) -> Path:
    """Write the work of each task, and the script with a unique name; return the path of the script."""
    from submitit.helpers import DelayedSubmission

    order.logs.mkdir(parents=True, exist_ok=True)
    draft = order.logs / f".{WORK}"
    draft.unlink(missing_ok=True)
    draft.touch(mode=0o600)  # its command may have a secret
    work = DelayedSubmission(task((*PROGRAM, *order.run_arguments), order.requeues))
    work.set_timeout(order.time_min, _ENDLESS)
    work.dump(draft)
    draft.replace(order.logs / WORK)
    script = order.logs / DRAFT.format(uuid.uuid4().hex)
    write_new_text(script, array_script(order))
    return script


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
            f"ln -s {WORK} {own} 2>/dev/null  # the work of the task; after a requeue the link exists",
            *order.setup,
        ],
        # Since Slurm 22.05 a step does not inherit this from sbatch and would get one core.
        "srun_args": order.cpus and [f"--cpus-per-task={order.cpus}"],
        "additional_parameters": {"array": order.spec, "requeue": True, **order.extra_sbatch},
    }
