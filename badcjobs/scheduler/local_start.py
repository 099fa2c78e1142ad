"""The start of one attempt of an emulated task: its folder, its copy of the script, its variables."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from badcjobs.model import Device
from badcjobs.scheduler.emulated_task import Launch, interpreter, launch
from badcjobs.scheduler.local_environment import Identity, inherited, make_tmpdir, task_variables
from badcjobs.scheduler.local_job import LocalJob
from badcjobs.scheduler.local_processes import MARK
from badcjobs.scheduler.local_record import invite
from badcjobs.scheduler.local_state import TaskRow


def start_attempt(job: LocalJob, row: TaskRow, mark: str, now_s: int) -> subprocess.Popen[bytes]:
    """Start the script for a task that has its devices; raises OSError where that cannot be done."""
    who, request = job.identity(row.index, row.restarts), job.request
    folder = job.attempt_folder(who)
    folder.mkdir()
    script = folder / "slurm_script"  # a copy: whoever edits the script meanwhile changes no running task
    script.write_text(job.script)
    tmp = folder / "tmp"
    tmp.mkdir()
    env = _environment(job, who, row.devices, now_s) | {"SLURM_TMPDIR": str(tmp), MARK: mark} | invite(folder, who)
    error = None if request.error is None else job.log(who, request.error)
    argv = (*interpreter(job.script), str(script), *job.arguments)
    return launch(Launch(argv, env, job.workdir, row.log, error, request.append))


def _environment(job: LocalJob, who: Identity, devices: Sequence[Device], now_s: int) -> dict[str, str]:
    limit_s = job.request.time_s
    times = {"SLURM_JOB_START_TIME": str(now_s)}
    if limit_s is not None:
        times["SLURM_JOB_END_TIME"] = str(now_s + limit_s)
    variables = task_variables(who, job.request, job.node, devices, name=job.name)
    taken_over = inherited(job.environ, job.request.export)
    places = {"PWD": str(job.workdir), "TMPDIR": make_tmpdir(taken_over.get("TMPDIR"))}
    return taken_over | variables | times | places
