"""Run a job on a machine without Slurm: the array, the merge, the exit code.

The process that submits the array runs it to its end. ``local_array.py`` runs its tasks and assigns the devices,
``local_task.py`` starts and ends one task.
"""

from __future__ import annotations

import re
import shlex
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.cluster.job_script import BatchScript, JobRequest, read_request, read_script, read_text, uses_variable
from badcjobs.cluster.local_array import DevicePool, LocalArray, LocalSettings, TaskRow, open_pool
from badcjobs.cluster.local_task import COMPLETED, LocalJob
from badcjobs.cluster.sbatch_options import batch_text, extra_options
from badcjobs.cluster.slurm import PROGRAM, cancel_line, has_ended, query_number, query_states
from badcjobs.cluster.wait_for_job import EXIT_CODES, Tell, finished_all_chunks, no_task_started, verdict_of
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import ArrayOrder, default_mem
from badcjobs.paths import RunFolder, shell_line
from badcjobs.report.job import FinishedJob, finish_job
from badcjobs.seams import Unanswered
from badcjobs.store import submission_record as records
from badcjobs.store.merge import MergeOrder
from badcjobs.store.run_lock import check_writable, emulation_lock, folder_lock, refuse_during_emulation, undo_on_error
from badcjobs.task.startup import World

_ARGUMENTS = "BADCJOBS_ARGS"  # our templates pass it on to badcjobs run, split at spaces
_NAMES_DEVICES = re.compile(r"--simulate|run\.simulate|--no-emit-gpu-telemetry")


@dataclass(frozen=True, slots=True)
class ScriptOrder:
    """A job script with the options that ``sbatch OPTIONS SCRIPT`` would get."""

    script: Path
    options: tuple[str, ...]
    source: str | None  # the variable SOURCE, which our templates read; one path, any characters
    out: Path | None  # the variable OUT; None: usual_out, or as in the environment or --export
    usual_out: Path | None  # of badcjobs.toml, which the badcjobs in the script also reads
    arguments: tuple[str, ...]  # options of badcjobs run, for BADCJOBS_ARGS


@dataclass(frozen=True, slots=True)
class Emulation:
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
            "out": None if self.out is None else str(self.out),
            "verdict": self.verdict,
            "exit_code": self.exit_code,
            "tasks": [row.to_dict() for row in self.rows],
            "summary": None if self.job is None else self.job.to_dict(),
        }


def emulate_order(order: ArrayOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run an array to its end and merge its results."""
    words = records.submit_command("local", order.run_arguments, records.asked_of(order))
    command, out = records.with_words(words, *settings.options), order.out
    settings = replace(settings, max_requeues=order.requeues)
    with lock_for_emulation(out, command, again=settings.again) as lock:
        order.logs.mkdir(parents=True, exist_ok=True)
        asked = order.mem not in (None, default_mem(order.gpus_per_task))
        done = run_script(script_of(order), order.name, (), settings, world, tell, out, lock, tell_mem=asked)
        return finish_emulation(*done, out, world, tell)


def emulate_script(order: ScriptOrder, settings: LocalSettings, world: World, tell: Tell) -> Emulation:
    """Run a user's job script to its end; merge the results if their folder is known."""
    text, command = read_text(order.script, world.cwd), _command_of(order, settings, world)
    request, script, world, out = _read_order(order, text, world)
    world = _with_arguments(text, request, script, order, world)
    if (line := script.srun_line) is not None:
        tell(f"line {line} of the script calls srun, which does not work in an emulated job (badcjobs guide local)")
    name, run = order.script.name, out or world.cwd / order.script
    with nullcontext() if out is None else lock_for_emulation(out, command, again=settings.again) as lock:
        done = run_script(text, name, order.options, settings, world, tell, run, lock)
        return finish_emulation(*done, out, world, tell)


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


def run_script(
    script: str,
    name: str,
    options: Sequence[str],
    settings: LocalSettings,
    world: World,
    tell: Tell,
    run: Path,
    lock: int | None = None,
    *,
    tell_mem: bool = True,
) -> tuple[str, tuple[TaskRow, ...]]:
    """Run a job script to its end, as ``sbatch OPTIONS SCRIPT`` would; return its number and the end of each task.

    ``run``: the run folder, which device locks show to other runs; the script itself, if the folder is not known.
    ``lock``: the open lock file of that folder; its lock must last until the last process of the job has ended, even if
    this process is killed. ``tell_mem``: the user asked for memory, so a message says that it is not enforced.
    """
    request = read_request(script, options)
    pool = open_pool(request.gpus, settings, world, run)
    state_folder = None if lock is None else run / "logs"
    job_id, folder = _choose_job_number(world, state_folder)
    state_file, name = state_folder and state_folder / f"{job_id}.json", request.given.get("job-name") or name
    job = LocalJob(job_id, name, request, script, world, folder, state_file, () if lock is None else (lock,))
    try:
        array = LocalArray(job, pool, settings, RunFolder(run), tell)
        _check(job, array.rows[0].log.parent, pool, tell, tell_mem=tell_mem)
    except BaseException:
        folder.rmdir()
        raise
    return str(job_id), tuple(array.run())


def _check(job: LocalJob, logs: Path, pool: DevicePool, tell: Tell, *, tell_mem: bool) -> None:
    """Refuse a missing log folder; print what this machine cannot provide."""
    if not logs.is_dir():
        raise BadInput(
            f"the folder of the logs does not exist: {logs}",
            why="Slurm does not create it: every task would fail without a message",
            fix=shell_line("mkdir", "-p", logs),
        )
    request, cores, many = job.request, job.world.cores, len(job.request.indices)
    tell(f"job {job.job_id}: {many} task{'' if many == 1 else 's'} on this machine, logs in {logs}")
    if request.cores > cores:
        tell(f"each task asks for {request.cores} CPUs and gets {cores}: this machine has no more")
    most = request.array.parallel if request.array and request.array.parallel else many if pool.share else 1
    wanted, room = min(many, most), cores // job.cores
    if (pool.share or not request.gpus) and wanted > room:
        fewer = f"; --cpus {cores // wanted} lets {wanted} run" if cores >= wanted else ""
        tell(f"at most {room} at a time: each task asks for {job.cores} of {cores} cores{fewer}")
    if request.warning is not None and not request.warning.to_script:
        tell("--signal without B: reaches only srun steps, not the script (write --signal=B:USR1@180)")
    if ignored := [f"--{name}" for name in request.ignored if tell_mem or name != "mem"]:
        tell("without effect outside Slurm: " + ", ".join(ignored))


def _choose_job_number(world: World, state_folder: Path | None) -> tuple[int, Path]:
    """Return a job number that is new in the run folder and on this machine, and a folder for the job.

    The number is the time in seconds, so that it grows, as Slurm's numbers do.
    """
    parent = Path(world.environ.get("TMPDIR") or tempfile.gettempdir())
    number = world.clock.now_ms() // 1000
    while True:
        folder = parent / f"slurm-emulation-{number}"
        try:
            if state_folder is None or not (state_folder / f"{number}.json").exists():
                folder.mkdir(mode=0o700)
                return number, folder
        except FileExistsError:
            pass
        except OSError as error:
            raise BadInput(
                f"cannot create a folder for the emulation in {parent}", why=error.strerror, fix="export TMPDIR=/tmp"
            ) from error
        number += 1


def _command_of(order: ScriptOrder, settings: LocalSettings, world: World) -> tuple[str, ...]:
    """Return the command that emulates a script again."""
    sources = [] if order.source is None else [str(world.cwd / order.source)]
    before, of_run = records.split_run_words(order.arguments)
    return (
        *("badcjobs", "submit", str(world.cwd / order.script), *sources, "--cluster=local"),
        *([] if order.out is None else [f"--out={world.cwd / order.out}"]),
        *(f"--sbatch={shlex.quote(option)}" for option in order.options),  # a script's are split at spaces
        *settings.options,
        *([f"--config=submit.requeues={settings.max_requeues}"] if settings.max_requeues else []),
        *before,
        *(["--", *of_run] if of_run else []),
    )


# --- a user's script ------------------------------------------------------------------------------------------------


def _read_order(order: ScriptOrder, text: str, world: World) -> tuple[JobRequest, BatchScript, World, Path | None]:
    """Return what a script requests, the parsed script, the world with SOURCE and OUT, and the run folder.

    The run folder is the --out of its badcjobs, else its variable OUT; None: not known.
    """
    given = {} if order.source is None else {"SOURCE": order.source}
    given |= {} if order.out is None else {"OUT": str(world.cwd / order.out)}
    request = read_request(text, order.options)
    ignored = [f"${name}" for name in given if name in request.exports or not uses_variable(text, name)]
    if ignored:
        raise BadInput(
            f"{order.script} would ignore {' and '.join(given[name[1:]] for name in ignored)}",
            why=f"it does not use {' and '.join(ignored)}, the SOURCE and --out of a job script, or sets them",
            fix='exec badcjobs run "$SOURCE" --out "$OUT"   (in the script; or give only the script)',
        )
    if order.out is None and order.usual_out is not None:
        given["OUT"] = str(world.cwd / order.usual_out)
    world = replace(world, environ={**world.environ, **given})
    environ = {**world.environ, **request.exports}
    script = read_script(text, str(order.script), environ, str(world.cwd), options=order.options)
    named = script.start.values.get("out") if script.start else None
    out = named or script.out or environ.get("OUT")
    return request, script, world, None if not out else world.cwd / out


def _with_arguments(text: str, request: JobRequest, script: BatchScript, order: ScriptOrder, world: World) -> World:
    """Return the world with BADCJOBS_ARGS, which passes these options of run to the badcjobs inside a script.

    Our templates use that variable; a script that does not use it is refused. --simulate alone is also an option of
    the emulation: a script that starts no badcjobs, or names its simulated devices itself, need not use it.
    """
    words, starts = order.arguments, script.starts
    exported = request.exports.get(_ARGUMENTS)  # wins over the variable that we set
    only_devices = len(words) == 1 and words[0].startswith("--simulate=")
    if not words or (only_devices and (not (starts or script.unread) or _NAMES_DEVICES.search(f"{text}\n{exported}"))):
        return world
    if _ARGUMENTS in text and exported is None and not any(re.search(r"\s", word) for word in words):
        given = " ".join([*world.environ.get(_ARGUMENTS, "").split(), *words])
        return replace(world, environ={**world.environ, _ARGUMENTS: given})
    where = f"{order.script}, line {starts[0].line}" if starts else str(order.script)
    if exported is not None:
        why = f"--export sets {_ARGUMENTS}, in which options after -- reach a script"
    elif _ARGUMENTS in text:
        why = f"{_ARGUMENTS} is split at spaces, and one of these options has a space in it"
    else:
        why = f"options after -- reach a script in the variable {_ARGUMENTS}, which this one does not use"
    raise BadInput(
        f"{where}: the badcjobs there would not get {shell_line(*words)}",
        why=why,
        fix=f"add {shell_line(*words)} to its line   (or: badcjobs run … ${_ARGUMENTS})",
    )


# --- one job at a time in a run folder ------------------------------------------------------------------------------


@contextmanager
def lock_for_emulation(out: Path, command: Sequence[str], *, again: bool) -> Iterator[int]:
    """Lock a run against a second emulation or a Slurm job, which would process the same chunks.

    The process that ends the tasks if this one is killed must keep the lock file open.
    """
    with undo_on_error(out), ExitStack() as held:
        with folder_lock(out):
            check_writable(out)
            sure = _refuse_if_slurm_has_job(out, again=again)
            lock = held.enter_context(emulation_lock(out, command))
            intent = records.read_intent(out)
            if sure and intent is not None and not intent[1].is_of(records.read_record(out)):
                # Slurm has just answered that it has no array of this interrupted submit.
                records.forget_intent(out)
        yield lock.fileno()


def check_run_folder(out: Path, *, again: bool) -> None:
    """Refuse what an emulation in this run folder would refuse; change nothing."""
    _refuse_if_slurm_has_job(out, again=again)
    refuse_during_emulation(out)


def check_script_folder(order: ScriptOrder, world: World, *, again: bool) -> None:
    """Do the same for the run folder of a script, if it is known."""
    *_, out = _read_order(order, read_text(order.script, world.cwd), world)
    if out is not None:
        check_run_folder(out, again=again)


def _refuse_if_slurm_has_job(out: Path, *, again: bool) -> bool:
    """Refuse a run whose job is still in Slurm; without an answer of Slurm, ``again`` means that it has ended.

    Return whether Slurm has answered that it has no array of this run that is not recorded.
    """
    record: records.Record | None = None
    has = f"a submit with --cluster slurm was killed in {out}, or its answer was lost: there may be a job"
    why = "both would process the same chunks"
    try:
        record = records.last_submission(out, query_number)
        if record is None or has_ended(query_states(record.job)):
            return record == records.read_record(out)  # else it was found by its script, and has ended
        fix = f"{cancel_line(record.job)}   (or wait: the same command with --cluster slurm --wait)"
    except (NotHere, Unanswered) as error:
        if again:
            return False
        why += f"; it is not known whether it has ended: {error.what if isinstance(error, NotHere) else error}"
        fix = "the same command with --again, once that job has ended"
    if record is not None:
        has = f"{out} already has job {record.job.job_id} of --cluster {record.cluster}"
    raise BadInput(has, why=why, fix=fix)


def finish_emulation(job_id: str, rows: tuple[TaskRow, ...], out: Path | None, world: World, tell: Tell) -> Emulation:
    """Merge the results of the tasks and decide on the verdict."""
    stop, run = world.stop, None if out is None else RunFolder(out)
    if stop.cut_short_by is not None:
        return Emulation(128 + stop.cut_short_by, "stopped", job_id, rows, out, None)
    for row in rows:
        row.worked = row.state != COMPLETED and run is not None and finished_all_chunks(run, job_id, row.index)
    verdict = verdict_of(rows)
    job: FinishedJob | None = None
    if run is None:
        tell("not merged: the run folder of the script is not known; merge it with: badcjobs merge DIR")
    elif any(run.tasks.glob("*.sqlite")):
        if signal.getsignal(signal.SIGINT) == stop.receive:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a merge may be interrupted at any moment
        job = finish_job(MergeOrder([run.path], run.job_database), world.clock)
        # All chunks may be done although these tasks failed: an earlier job did them.
        verdict = verdict if job.summary.verdict == "done" else job.summary.verdict
    elif verdict != "done" and stop.ended_by is None:
        raise no_task_started(job_id, rows, then="the same command")
    code = int(EXIT_CODES[verdict])
    code = 128 + signal.SIGINT if code and stop.ended_by is signal.SIGINT else code
    return Emulation(code, verdict, job_id, rows, out, job)
