"""The scheduler of a machine without Slurm: an array of emulated tasks, run to its end by the process that submits it.

Whether the work is wrapped in a job script of ours or in somebody's own makes no difference: both are read as sbatch
reads them. Who keeps the machine's devices apart, and what counts as progress, comes in as an argument.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadInput, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.scheduler.device_pool import DevicePool
from badcjobs.scheduler.job_script import JobRequest, read_request
from badcjobs.scheduler.local_array import LocalArray
from badcjobs.scheduler.local_environment import Node, cores_of
from badcjobs.scheduler.local_job import LocalJob, StopSignals, Terms
from badcjobs.scheduler.local_state import TaskRow, read_pid, read_states
from badcjobs.scheduler.local_text import array_text, merge_text
from badcjobs.seams import Clock

_FOLDER = "slurm-emulation-"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where the emulation runs, and what it takes from outside."""

    environ: Mapping[str, str]
    clock: Clock
    stop: StopSignals
    node: Node
    open_pool: Callable[[int], DevicePool]  # given how many devices a task asks for
    tell: Callable[[str], None]
    claim_numbers: Callable[[int], int] | None = None  # so many for a job; None: by the clock, for want of better


@dataclass(frozen=True, slots=True)
class JobEnd:
    """An emulated job that is over."""

    job_id: str
    request: JobRequest
    rows: tuple[TaskRow, ...]


class LocalScheduler:
    """Runs arrays on this machine; ``submit`` returns when the array has ended."""

    name = "local"
    poll_s = 0.5

    def __init__(self, machine: Machine, terms: Terms) -> None:
        self._machine = machine
        self._terms = terms
        self._state_files: dict[str, Path] = {}

    def script(self, order: ArrayOrder) -> str:
        """Return the text of the array's script."""
        return array_text(order)

    def merge_script(self, order: ArrayOrder) -> str:
        """Return the text of a script that would merge; here whoever submits merges."""
        return merge_text(order)

    def submit(self, order: ArrayOrder, note: Callable[[Submitted], None] = lambda job: None) -> Submitted:
        """Run the array to its end; there is nothing to note before that."""
        order.logs.mkdir(parents=True, exist_ok=True)
        terms = replace(self._terms, max_requeues=order.requeues)
        done = self.run_script(self.script(order), name=order.name, state_folder=order.logs, terms=terms)
        return Submitted(done.job_id, None, order.indices)

    def run_script(
        self,
        script: str,
        *,
        name: str,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
        state_folder: Path | None = None,
        terms: Terms | None = None,
        keep: Sequence[int] = (),
        unasked: Collection[str] = (),
    ) -> JobEnd:
        """Run a job script to its end, as ``sbatch OPTIONS SCRIPT ARGUMENTS`` would.

        ``keep`` are open files of the caller whose locks must hold until the last process of the job is gone, even if
        this process is killed; ``unasked`` are options of the script that nobody has asked for, so that nobody need be
        told that they count for nothing here.
        """
        machine, request = self._machine, read_request(script, options)
        pool = open_whole_pool(machine, request) if request.exclusive else machine.open_pool(request.gpus)
        request = replace(request, gpus=len(pool)) if request.exclusive else request
        job_id, folder = self._claim(1 if request.array is None else 1 + len(request.array.indices))
        job = LocalJob(
            job_id=job_id,
            name=request.name or name,
            request=request,
            script=script,
            arguments=tuple(arguments),
            node=machine.node,
            environ=machine.environ,
            folder=folder,
            state_file=None if state_folder is None else state_folder / f"{job_id}.json",
            keep=tuple(keep),
        )
        if job.state_file is not None:
            self._state_files[str(job_id)] = job.state_file
        try:
            array = LocalArray(
                job, pool, terms or self._terms, clock=machine.clock, stop=machine.stop, tell=machine.tell
            )
            check_log_folder(array.rows[0].log)
            tell_limits(job, array.rows[0].log.parent, machine.tell, share=pool.share, unasked=unasked)
        except BaseException:
            folder.rmdir()
            raise
        return JobEnd(str(job_id), request, tuple(array.run()))

    def states(self, job: Submitted) -> JobStates:
        """Return how the tasks of an array stand; of one that this machine has forgotten, nothing."""
        try:
            return JobStates(read_states(self._state_files[job.job_id]))
        except (KeyError, OSError, ValueError):
            return JobStates({})

    def cancel_line(self, job: Submitted) -> str:
        """Return how to end the job: it is the process that submitted it."""
        try:
            return f"kill {read_pid(self._state_files[job.job_id])}"
        except (KeyError, OSError, ValueError):
            return f"Ctrl-C where job {job.job_id} runs"

    def follow_lines(self, job: Submitted, order: ArrayOrder) -> tuple[str, ...]:
        """Return the commands to look at the job with."""
        return (
            f"tail -f {order.logs}/{job.job_id}_{order.indices[0]}.out",
            f"badcjobs merge {order.out}",
            f"badcjobs report {order.out}",
        )

    def _claim(self, count: int) -> tuple[int, Path]:
        """Take numbers that no other emulation of this machine has, and a folder with the name of the first."""
        machine, number = self._machine, 0
        parent = Path(machine.environ.get("TMPDIR") or tempfile.gettempdir())
        while True:
            first = machine.clock.now_ms() // 1000 if machine.claim_numbers is None else machine.claim_numbers(count)
            number = max(first, number)
            folder = parent / f"{_FOLDER}{number}"
            try:
                folder.mkdir(mode=0o700)
            except FileExistsError:
                number += 1
                continue
            except OSError as error:
                raise BadInput(
                    f"there is no folder for the emulation: {parent}", why=error.strerror, fix="export TMPDIR=/tmp"
                ) from error
            return number, folder


def open_whole_pool(machine: Machine, request: JobRequest) -> DevicePool:
    """Return all devices there are, for a job that wants the machine for itself; there may be none."""
    try:
        return machine.open_pool(max(1, request.gpus))
    except NotHere:
        if request.gpus:
            raise
        return machine.open_pool(0)


def check_log_folder(log: Path) -> None:
    """Refuse a folder that is not there: Slurm does not make it either, and fails every task without a word."""
    if not log.parent.is_dir():
        raise BadInput(
            f"the folder of the logs does not exist: {log.parent}",
            why="Slurm does not make it: every task would fail without a word",
            fix=f"mkdir -p {log.parent}",
        )


def tell_limits(
    job: LocalJob, logs: Path, tell: Callable[[str], None], *, share: bool = False, unasked: Collection[str] = ()
) -> None:
    """Say what this machine cannot give, or does not do."""
    request, cores = job.request, job.node.cores
    many = 1 if request.array is None else len(request.array.indices)
    tell(f"job {job.job_id}: {many} task{'' if many == 1 else 's'} on this machine, logs in {logs}")
    if request.cores > cores:
        tell(f"each task asks for {request.cores} CPUs, this machine has {cores}: that is what it gets")
    if not request.exclusive and (share or not request.gpus):
        _tell_of_cores(job, many, tell, share=share)
    if request.exclusive:
        tell(f"--exclusive: one task at a time, with all there is: {cores} CPUs, {request.gpus} GPUs")
    if request.warning is not None and not request.warning.to_script:
        tell("--signal without B: reaches srun steps only; the script hears nothing (write --signal=B:USR1@180)")
    if ignored := [f"--{name}" for name in request.ignored if name not in unasked]:
        tell("left to Slurm, without effect here: " + ", ".join(ignored))


def _tell_of_cores(job: LocalJob, many: int, tell: Callable[[str], None], *, share: bool) -> None:
    """Say where the cores let fewer tasks run at a time than somebody has asked for."""
    array, cores = job.request.array, job.node.cores
    each = cores_of(job.request, job.node)
    wanted = min(many, array.parallel if array and array.parallel else many if share else 1)
    if wanted > (room := cores // each):
        fewer = f"; --cpus {cores // wanted} lets {wanted} run" if cores >= wanted else ""
        tell(f"no more than {room} at a time, for want of cores: each task asks for {each} of {cores}{fewer}")
