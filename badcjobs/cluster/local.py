"""Run a job on a machine without Slurm: the array, the merge, the exit code.

The process that submits the array runs it to its end. ``local_array.py`` runs its tasks and assigns the devices,
``local_task.py`` starts and ends one task.
"""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.cluster.array_script import PROGRAM
from badcjobs.cluster.job_script import ARGUMENTS, read_script_request, read_text, script_variables
from badcjobs.cluster.local_array import LocalArray, LockRun
from badcjobs.cluster.local_devices import open_pool
from badcjobs.cluster.local_task import LocalJob, LocalSettings, TaskRow
from badcjobs.cluster.sbatch_options import batch_text
from badcjobs.cluster.scheduler import EXIT_CODES, Ends, did_all_chunks, has_ended, no_task_started, verdict_of
from badcjobs.cluster.slurm import Slurm, query_number
from badcjobs.cluster.wait_for_job import Tell
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import ArrayOrder, JobStates, Submitted
from badcjobs.paths import RunFolder, shell_line
from badcjobs.report.job import FinishedJob, finish_job
from badcjobs.seams import Unanswered
from badcjobs.store import submission_record as records
from badcjobs.store.merge import MergeOrder
from badcjobs.store.run_lock import check_writable, emulation_lock, folder_lock, undo_on_error
from badcjobs.task.startup import World
from badcjobs.words import count


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
        return script_variables(self.source, self.out, self.arguments)


class Emulation(NamedTuple):
    """The result of an emulated job."""

    exit_code: int
    verdict: str
    job_id: str
    rows: Sequence[TaskRow]
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


@dataclass
class LocalMachine:
    """This machine as a scheduler: it runs one array, to its end; implements Scheduler.

    ``lock`` locks a run folder as soon as it is known, until the caller has merged the results.
    """

    settings: LocalSettings
    world: World
    tell: Tell
    lock: LockRun
    rows: Sequence[TaskRow] = ()
    run_folder: RunFolder | None = None  # None: no task has named it

    def submit(self, order: ArrayOrder) -> Submitted:
        """Run an array to its end."""
        self.settings = replace(self.settings, max_requeues=order.requeues)
        return self.run_script(script_of(order), order.name, out=order.out)

    def run_script(self, text: str, name: str, options: Sequence[str] = (), out: Path | None = None) -> Submitted:
        """Run a job script to its end as ``sbatch OPTIONS SCRIPT`` would, once per index."""
        if out is not None:
            self.run_folder = RunFolder(out)
            self.lock(out)
            (out / "logs").mkdir(parents=True, exist_ok=True)
        request = read_script_request(text, options)
        name = request.options.get("job-name") or name
        job = LocalJob(self._new_number(), name, request, text, self.world, self.settings)
        holder = out or self.world.cwd
        pool = open_pool(job.gpus, self.settings.stand_in, self.world, holder, share=self.settings.share_gpus)
        array = LocalArray(job, pool, self.tell, self.lock, self.run_folder)
        self.rows = array.rows
        _check(array)
        try:
            job.folder.mkdir(mode=0o700)
        except OSError as error:
            what = f"cannot create a folder for the emulation in {job.folder.parent}"
            raise BadInput(what, why=error.strerror, fix="export TMPDIR=/tmp") from error
        array.run()
        self.run_folder = array.run_folder
        return Submitted(str(job.job_id), None, tuple(row.index or 0 for row in array.rows))

    def _new_number(self) -> int:
        """Return a job number that is new in the run folder: the time in seconds, so that it grows as Slurm's do."""
        number = self.world.clock.now_ms() // 1000
        if self.run_folder is not None:
            while records.rows_in(self.run_folder.path, str(number)).exists():
                number += 1
        return number

    def states(self, job: Submitted) -> JobStates:
        """Return the states of the tasks."""
        return JobStates({row.index or 0: str(row.state) for row in self.rows})

    def ends(self, job: Submitted, states: JobStates, run: RunFolder) -> Ends:
        """Return how each task ended."""
        for row in self.rows:
            row.did_all_chunks = did_all_chunks(run, job.job_id, row.index)
        return self.rows

    def cancel_line(self, job: Submitted) -> str:
        """Return the command that stops the process which runs the array."""
        return shlex.join(["kill", str(self.world.pid)])

    def finish(self, job: Submitted) -> Emulation:
        """Merge the results of a job that has ended, and decide on the verdict."""
        stop = self.world.stop
        run = self.run_folder
        out = None if run is None else run.path
        if stop.cut_short_by is not None:
            return Emulation(128 + stop.cut_short_by, "stopped", job.job_id, self.rows, out, None)

        merged = None
        if run is None:
            verdict = verdict_of(self.rows)
            self.tell("not merged: no badcjobs run has started, so the run folder is not known")
        else:
            verdict = verdict_of(self.ends(job, self.states(job), run))
            if any(run.tasks.glob("*.sqlite")):
                if signal.getsignal(signal.SIGINT) == stop.receive:
                    signal.signal(signal.SIGINT, signal.default_int_handler)  # a merge may be interrupted at any moment
                merged = finish_job(MergeOrder([run.path], run.job_database), self.world.clock)
                if merged.summary.verdict != "done":  # else an earlier job did all chunks, although these tasks failed
                    verdict = merged.summary.verdict
            elif verdict != "done" and stop.ended_by is None:
                raise no_task_started(job.job_id, self.rows, then="the same command")

        code = int(EXIT_CODES[verdict])
        if code and stop.ended_by is signal.SIGINT:
            code = 128 + signal.SIGINT
        return Emulation(code, verdict, job.job_id, self.rows, out, merged)


def emulate_order(order: ArrayOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run an array to its end and merge its results."""
    repeated = records.submit_command("local", order.run_arguments, records.asked_of(order))
    command = records.with_words(repeated, *settings.options)
    with run_folder_locks(command, again=settings.again) as lock:
        machine = LocalMachine(settings, world, tell, lock)
        return machine.finish(machine.submit(order))


def emulate_script(order: ScriptOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run a user's job script to its end; merge the results in the run folder that its tasks name."""
    text = read_user_script(order, world)
    command = _command_of(order, settings, world)
    own_world = replace(world, environ={**world.environ, **order.variables})
    with run_folder_locks(command, again=settings.again) as lock:
        machine = LocalMachine(settings, own_world, tell, lock)
        return machine.finish(machine.run_script(text, order.script.name, order.options, order.out))


def read_user_script(order: ScriptOrder, world: World) -> str:
    """Return the text of a user's script; refuse one that does not even name the variables that it gets."""
    text = read_text(order.script, world.cwd)
    ignored = [f"${name}" for name in order.variables if name not in text]
    if all(word.startswith("--simulate=") for word in order.arguments):  # also an option of the emulation itself
        ignored = [name for name in ignored if name != f"${ARGUMENTS}"]
    if ignored:
        raise BadInput(
            f"{order.script} does not use {' and '.join(ignored)}",
            why="SOURCE, --out and options after -- reach a job script only in these variables",
            fix=f'exec badcjobs run "$SOURCE" --out "$OUT" ${ARGUMENTS}   (in the script; or give only the script)',
        )
    with_space = [word for word in order.arguments if " " in word]
    if with_space:
        raise BadInput(
            f"{order.script} would not get {shell_line(*with_space)}",
            why=f"${ARGUMENTS} is split at spaces",
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
        **order.extra_sbatch,
    }
    return batch_text(options, [*order.setup, f"exec {shlex.join([*PROGRAM, *order.run_arguments])}"])


def _check(array: LocalArray) -> None:
    """Refuse a missing log folder; print what this machine cannot provide."""
    job = array.job
    logs = array.rows[0].log.parent
    if not logs.is_dir():
        raise BadInput(
            f"the folder of the logs does not exist: {logs}",
            why="Slurm does not create it: every task would fail without a message",
            fix=shell_line("mkdir", "-p", logs),
        )
    tasks = len(array.rows)
    array.tell(f"job {job.job_id}: {count(tasks, 'task')} on this machine, logs in {logs}")
    cores = job.request.asked.cpus or 1
    of_cores = f"each task asks for {cores} cores, and this machine has {job.world.cores}"
    parallel = min(tasks, job.parallel or (tasks if array.pool.share else 1))
    if array.most_at_a_time < parallel:
        array.tell(f"{of_cores}: at most {array.most_at_a_time} at a time")
    elif job.cores < cores:
        array.tell(of_cores)


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
                _refuse_if_slurm_has_job(out, again=again)
                locks.enter_context(emulation_lock(out, command))

        yield lock


def _refuse_if_slurm_has_job(out: Path, *, again: bool) -> None:
    """Refuse a run whose job is still in Slurm; without an answer of Slurm, ``again`` means that it has ended."""
    try:
        record = records.last_submission(out, query_number)
        if record is None or has_ended(Slurm().states(record.job)):
            return
    except (NotHere, Unanswered) as error:
        if again:
            return
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
