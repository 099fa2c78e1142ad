"""Run a job on a machine without Slurm: the array, the merge, the exit code.

The process that submits the array runs it to its end. ``local_array.py`` runs its tasks and assigns the devices,
``local_task.py`` starts and ends one task.
"""

from __future__ import annotations

import shlex
import signal
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.cluster.array_script import PROGRAM
from badcjobs.cluster.job_script import read_request, read_text
from badcjobs.cluster.local_array import LocalArray, LocalSettings, LockRun, TaskRow
from badcjobs.cluster.local_devices import DevicePool, open_pool
from badcjobs.cluster.local_task import LocalJob
from badcjobs.cluster.outcomes import EXIT_CODES, finished_all_chunks, no_task_started, verdict_of
from badcjobs.cluster.sbatch_options import batch_text, extra_options
from badcjobs.cluster.scheduler import COMPLETED, UNFINISHED, TaskOutcome, has_ended
from badcjobs.cluster.slurm import Slurm, query_number
from badcjobs.cluster.wait_for_job import Tell
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import ArrayOrder, JobStates, Queue, Submitted
from badcjobs.paths import RunFolder, shell_line
from badcjobs.report.job import FinishedJob, finish_job
from badcjobs.seams import Unanswered
from badcjobs.store import submission_record as records
from badcjobs.store.merge import MergeOrder
from badcjobs.store.run_lock import check_writable, emulation_lock, folder_lock, refuse_during_emulation, undo_on_error
from badcjobs.task.startup import World
from badcjobs.words import count

_ARGUMENTS = "BADCJOBS_ARGS"  # our templates pass it on to badcjobs run, split at spaces


class ScriptOrder(NamedTuple):
    """A job script with the options that ``sbatch OPTIONS SCRIPT`` would get."""

    script: Path
    options: tuple[str, ...]
    source: str | None  # the variable SOURCE, which our templates read; one path, any characters
    out: Path | None  # the variable OUT, absolute; None: its tasks name their run folder
    arguments: tuple[str, ...]  # options of badcjobs run, for BADCJOBS_ARGS

    @property
    def variables(self) -> dict[str, str]:
        """The variables through which SOURCE, --out and options of run reach the script."""
        variables = {"SOURCE": self.source, "OUT": self.out and str(self.out), _ARGUMENTS: " ".join(self.arguments)}
        return {name: value for name, value in variables.items() if value}


class Emulation(NamedTuple):
    """The result of an emulated job."""

    exit_code: int
    verdict: str
    job_id: str
    rows: tuple[TaskRow, ...]
    out: Path | None
    job: FinishedJob | None  # None: nothing was merged

    def to_dict(self) -> dict[str, object]:
        """Return the JSON document of ``badcjobs submit --cluster local --json``."""
        return {
            "cluster": "local",
            "job_id": self.job_id,
            "out": self.out and str(self.out),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "tasks": [row.to_dict() for row in self.rows],
            "summary": self.job and self.job.to_dict(),
        }


class LocalMachine:
    """This machine as a scheduler: it runs one array, to its end; implements Scheduler.

    ``lock`` locks a run folder as soon as it is known, until the caller has merged the results.
    """

    def __init__(self, settings: LocalSettings, world: World, tell: Tell, lock: LockRun) -> None:
        self._settings = settings
        self._world = world
        self._tell = tell
        self._lock = lock
        self._array: LocalArray | None = None

    def submit(self, order: ArrayOrder) -> Submitted:
        """Run an array to its end."""
        self._settings = replace(self._settings, max_requeues=order.requeues)
        return self.run_script(script_of(order), order.name, (), order.out, order.out)

    def run_script(self, text: str, name: str, options: Sequence[str], out: Path | None, place: Path) -> Submitted:
        """Run a job script to its end, once per index; ``place``: as in ``new_array``."""
        if out is not None:
            self._lock(out)
            (out / "logs").mkdir(parents=True, exist_ok=True)
        array = new_array(text, name, options, self._settings, self._world, self._tell, place, self._lock)
        array.run_folder = None if out is None else RunFolder(out)
        self._array = array
        array.run()
        return Submitted(str(array.job.job_id), None, tuple(row.index or 0 for row in array.rows))

    @property
    def rows(self) -> tuple[TaskRow, ...]:
        """The tasks of the array."""
        return () if self._array is None else tuple(self._array.rows)

    @property
    def run_folder(self) -> RunFolder | None:
        """The run folder of the array; None: no task has named it."""
        return None if self._array is None else self._array.run_folder

    def states(self, job: Submitted) -> JobStates:
        """Return the states of the tasks."""
        return JobStates({row.index or 0: str(row.state) for row in self.rows})

    def queue(self, run: Path, job_ids: Collection[str], merge_job_id: str | None) -> Queue:
        """Return how many tasks wait and run now."""
        if self._array is None or str(self._array.job.job_id) not in job_ids:
            return Queue()
        states = Counter(row.state for row in self.rows)
        jobs = tuple(job_ids) if states.keys() & UNFINISHED else ()
        return Queue(True, jobs, states[records.PENDING], states[records.RUNNING])

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> tuple[TaskOutcome, ...]:
        """Return how each task ended."""
        for row in self.rows:
            row.worked = row.state != COMPLETED and finished_all_chunks(run, job.job_id, row.index)
        return self.rows

    def cancel_line(self, job: Submitted) -> str:
        """Return the command that stops the process which runs the array."""
        return shlex.join(["kill", str(self._world.pid)])


def emulate_order(order: ArrayOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run an array to its end and merge its results."""
    repeated = records.submit_command("local", order.run_arguments, records.asked_of(order))
    command = records.with_words(repeated, *settings.options)
    with run_folder_locks(command, again=settings.again) as lock:
        machine = LocalMachine(settings, world, tell, lock)
        return _merge_and_judge(machine, machine.submit(order), world, tell)


def emulate_script(order: ScriptOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run a user's job script to its end; merge the results in the run folder that its tasks name."""
    text = read_user_script(order, world)
    command = _command_of(order, settings, world)
    place = order.out or world.cwd / order.script
    own_world = replace(world, environ={**world.environ, **order.variables})
    with run_folder_locks(command, again=settings.again) as lock:
        machine = LocalMachine(settings, own_world, tell, lock)
        job = machine.run_script(text, order.script.name, order.options, order.out, place)
        return _merge_and_judge(machine, job, world, tell)


def read_user_script(order: ScriptOrder, world: World) -> str:
    """Return the text of a user's script; refuse one that does not even name the variables that it gets."""
    text = read_text(order.script, world.cwd)
    ignored = [f"${name}" for name in order.variables if name not in text]
    if all(word.startswith("--simulate=") for word in order.arguments):  # also an option of the emulation itself
        ignored = [name for name in ignored if name != f"${_ARGUMENTS}"]
    if ignored:
        raise BadInput(
            f"{order.script} does not use {' and '.join(ignored)}",
            why="SOURCE, --out and options after -- reach a job script only in these variables",
            fix=f'exec badcjobs run "$SOURCE" --out "$OUT" ${_ARGUMENTS}   (in the script; or give only the script)',
        )
    with_space = [word for word in order.arguments if " " in word]
    if with_space:
        raise BadInput(
            f"{order.script} would not get {shell_line(*with_space)}",
            why=f"${_ARGUMENTS} is split at spaces",
            fix=f"add {shell_line(*with_space)} to its line with badcjobs run",
        )
    return text


def script_of(order: ArrayOrder) -> str:
    """Return the text of an array's script, which sbatch would accept unchanged."""
    options = {
        "job-name": order.name,
        "array": order.spec,
        "nodes": 1,
        "ntasks": 1,
        "gpus-per-node": order.gpus_per_task or None,
        "cpus-per-task": order.cpus,
        "mem": order.mem,
        "time": order.time_min,
        "account": order.account,
        "constraint": order.constraint,
        "signal": f"B:USR1@{order.warning_s}",
        "output": f"{str(order.logs).replace('%', '%%')}/%A_%a.out",
        "open-mode": "append",
        **extra_options(order.extra_sbatch),
    }
    return batch_text(options, [*order.setup, f"exec {shlex.join([*PROGRAM, *order.run_arguments])}"])


def new_array(
    script: str,
    name: str,
    options: Sequence[str],
    settings: LocalSettings,
    world: World,
    tell: Tell,
    place: Path,
    lock: LockRun | None = None,
) -> LocalArray:
    """Prepare a job that runs a script as ``sbatch OPTIONS SCRIPT`` would.

    ``place``: the run folder or the script, which device locks show to other runs. ``lock`` locks the run folder that
    the first task names.
    """
    request = read_request(script, options)
    pool = open_pool(request.gpus, settings.stand_in, world, place, share=settings.share_gpus)
    job_id, folder = _new_job(world, place / "logs")
    job = LocalJob(job_id, request.given.get("job-name") or name, request, script, world, folder)
    try:
        array = LocalArray(job, pool, settings, tell, lock)
        _check(job, array.rows[0].log.parent, pool, tell)
    except BaseException:
        folder.rmdir()
        raise
    return array


def _check(job: LocalJob, logs: Path, pool: DevicePool, tell: Tell) -> None:
    """Refuse a missing log folder; print what this machine cannot provide."""
    if not logs.is_dir():
        raise BadInput(
            f"the folder of the logs does not exist: {logs}",
            why="Slurm does not create it: every task would fail without a message",
            fix=shell_line("mkdir", "-p", logs),
        )
    request = job.request
    cores = job.world.cores
    tasks = len(request.indices)
    tell(f"job {job.job_id}: {count(tasks, 'task')} on this machine, logs in {logs}")
    parallel = min(tasks, request.parallel or (tasks if pool.share else 1))
    room = cores // job.cores
    of_cores = f"each task asks for {request.cores} cores, and this machine has {cores}"
    if (pool.share or not request.gpus) and parallel > room:
        tell(f"{of_cores}: at most {room} at a time")
    elif request.cores > cores:
        tell(of_cores)


def _new_job(world: World, logs: Path) -> tuple[int, Path]:
    """Return a job number that is new in the run folder, and a folder for the job.

    The number is the time in seconds, so that it grows, as Slurm's numbers do.
    """
    number = world.clock.now_ms() // 1000
    while (logs / f"{number}.json").exists():
        number += 1
    parent = world.environ.get("TMPDIR") or tempfile.gettempdir()
    try:
        return number, Path(tempfile.mkdtemp(prefix=f"slurm-emulation-{number}-", dir=parent))
    except OSError as error:
        raise BadInput(
            f"cannot create a folder for the emulation in {parent}", why=error.strerror, fix="export TMPDIR=/tmp"
        ) from error


def _command_of(order: ScriptOrder, settings: LocalSettings, world: World) -> tuple[str, ...]:
    """Return the command that emulates a script again."""
    command = ["badcjobs", "submit", str(world.cwd / order.script)]
    if order.source is not None:
        command.append(str(world.cwd / order.source))
    command.append("--cluster=local")
    if order.out is not None:
        command.append(f"--out={order.out}")
    command += [f"--sbatch={shlex.quote(option)}" for option in order.options]  # a script's are split at spaces
    command += settings.options
    if settings.max_requeues:
        command.append(f"--config=submit.requeues={settings.max_requeues}")
    before, of_run = records.split_run_words(order.arguments)
    command += before
    return (*command, "--", *of_run) if of_run else tuple(command)


# --- one job at a time in a run folder ------------------------------------------------------------------------------


@contextmanager
def run_folder_locks(command: Sequence[str], *, again: bool) -> Iterator[LockRun]:
    """Lock run folders, to the end of the block, against others that would process the same chunks."""
    with ExitStack() as locks:

        def lock(out: Path) -> None:
            locks.enter_context(undo_on_error(out))
            with folder_lock(out):
                check_writable(out)
                sure = _refuse_if_slurm_has_job(out, again=again)
                locks.enter_context(emulation_lock(out, command))
                intent = records.read_intent(out)
                if sure and intent is not None and not intent[1].is_of(records.read_record(out)):
                    # Slurm has just answered that it has no array of this interrupted submit.
                    records.forget_intent(out)

        yield lock


def check_run_folder(out: Path, *, again: bool) -> None:
    """Refuse what an emulation in this run folder would refuse; change nothing."""
    _refuse_if_slurm_has_job(out, again=again)
    refuse_during_emulation(out)


def _refuse_if_slurm_has_job(out: Path, *, again: bool) -> bool:
    """Refuse a run whose job is still in Slurm; without an answer of Slurm, ``again`` means that it has ended.

    Return whether Slurm has answered that it has no array of this run that is not recorded.
    """
    try:
        record = records.last_submission(out, query_number)
        if record is None or has_ended(Slurm().states(record.job)):
            return record == records.read_record(out)  # else it was found by its script, and has ended
    except (NotHere, Unanswered) as error:
        if again:
            return False
        raise BadInput(
            f"{out} may have a job in Slurm",
            why=f"both would process the same chunks, and it is not known whether it has ended: {error}",
            fix="the same command with --again, once that job has ended",
        ) from error
    raise BadInput(
        f"{out} already has job {record.job.job_id} of --cluster slurm",
        why="both would process the same chunks",
        fix=f"{Slurm().cancel_line(record.job)}   (or wait: the same command with --cluster slurm --wait)",
    )


def _merge_and_judge(machine: LocalMachine, job: Submitted, world: World, tell: Tell) -> Emulation:
    """Merge the results of a job that has ended, and decide on the verdict."""
    run = machine.run_folder
    stop = world.stop
    out = None if run is None else run.path
    if stop.cut_short_by is not None:
        return Emulation(128 + stop.cut_short_by, "stopped", job.job_id, machine.rows, out, None)

    merged = None
    if run is None:
        verdict = verdict_of(machine.rows)
        tell("not merged: no badcjobs run has started, so the run folder is not known")
    else:
        ends = machine.ends(job, machine.states(job), run)
        verdict = verdict_of(ends)
        if any(run.tasks.glob("*.sqlite")):
            if signal.getsignal(signal.SIGINT) == stop.receive:
                signal.signal(signal.SIGINT, signal.default_int_handler)  # a merge may be interrupted at any moment
            merged = finish_job(MergeOrder([run.path], run.job_database), world.clock)
            if merged.summary.verdict != "done":  # else an earlier job did all chunks, although these tasks failed
                verdict = merged.summary.verdict
        elif verdict != "done" and stop.ended_by is None:
            raise no_task_started(job.job_id, ends, then="the same command")

    code = int(EXIT_CODES[verdict])
    if code and stop.ended_by is signal.SIGINT:
        code = 128 + signal.SIGINT
    return Emulation(code, verdict, job.job_id, machine.rows, out, merged)
