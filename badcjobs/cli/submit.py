"""``badcjobs submit``: a source as an array with its merge job, under Slurm or emulated on this machine."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from badcjobs.cli.run import run

_EXAMPLE = (
    "Example: badcjobs submit manifest.csv --out /scratch/st-pi-1/july --cluster slurm --tasks 20 --gpus-per-task 4"
    " --account st-pi-1-gpu --merge-account st-pi-1 --constraint gpu_mem_32 --setup 'module load gcc cuda'"
)
CLUSTERS = ("slurm", "local")
# Of `badcjobs run`: they choose for one task what the array chooses for all.
_NOT_FOR_ARRAYS = ("shard", "free", "min_memory_mib", "max_utilization", "wait", "time_left")


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    command = _with_options_of_run(submit)
    app.command(name="submit", short_help="Submit an array and its merge job.", epilog=_EXAMPLE)(command)


def submit(
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list of either."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder: logs/, tasks/, later job.sqlite.")] = None,
    cluster: Annotated[str, typer.Option(help="slurm (default), or local: an emulation on this machine.")] = "slurm",
    tasks: Annotated[int | None, typer.Option(help="How many array tasks share the source; default 1.")] = None,
    array: Annotated[
        str | None, typer.Option(help="The indices instead, as sbatch takes them: 1-20:2, 0-19%4; later a part: 3,7.")
    ] = None,
    parallel: Annotated[int | None, typer.Option(help="Let at most N tasks run at a time.")] = None,
    gpus_per_task: Annotated[int | None, typer.Option(help="GPUs of each task; default 1.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each task; default 2 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task; default 4G per GPU. It is billed.")] = None,
    time: Annotated[
        str | None, typer.Option(help="Time limit of each task: minutes, H:M:S or D-H:M:S; default 12:00:00.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="Who pays; on Sockeye it ends in -gpu.")] = None,
    partition: Annotated[str | None, typer.Option(help="On many sites better left to Slurm.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Which nodes: gpu_mem_32.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Another option for the array; repeatable: --sbatch=--qos=high.")
    ] = None,
    job_name: Annotated[str | None, typer.Option(help="What squeue calls it; default badcjobs.")] = None,
    setup: Annotated[
        list[str] | None, typer.Option(help="A line of shell before the work; repeatable: 'module load gcc cuda'.")
    ] = None,
    requeues: Annotated[
        int, typer.Option(help="How often a task that stopped in order, with work left, is started again.")
    ] = 10,
    merge_account: Annotated[
        str | None, typer.Option(help="Who pays for the merge job, which has no GPU; on Sockeye without -gpu.")
    ] = None,
    merge_mem: Annotated[str | None, typer.Option(help="Memory of the merge job; default 4G.")] = None,
    merge_time: Annotated[str | None, typer.Option(help="Time limit of the merge job; default 1:00:00.")] = None,
    script: Annotated[
        Path | None,
        typer.Option(
            help="With --cluster local: run this job script, as sbatch would; --time and the like win over it."
        ),
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="With --cluster local: let several tasks use one GPU.")
    ] = False,
    kill_wait: Annotated[
        float | None,
        typer.Option(help="With --cluster local: seconds between TERM and KILL, as Slurm's KillWait; default 30."),
    ] = None,
    workers_per_gpu: Annotated[
        str | None, typer.Option(help="Engine processes per device: N, or auto (as many as pay); default auto.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to the end; exit with its verdict.")] = False,
    again: Annotated[
        bool,
        typer.Option(
            "--again",
            help="Submit what is left, once the job of this run folder has ended, or with --no-resume all once more;"
            " other --time, --mem, … may be given.",
        ),
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [run]; flags win over it.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **of_run: Any,
) -> int:
    """Submit a source as an array of tasks, and a job that merges what they did.

    The source is read here once, from end to end; each task then does its share, and what was stopped by the clock is
    started again. All options of `badcjobs run` that make sense for an array are passed on to its tasks.

    The same command finds its job again, from DIR/submitted.json, and submits nothing twice: while the job is there it
    says how to follow it (with --wait it goes on waiting), afterwards how it ended. To submit what is left then, add
    --again: array tasks that have nothing left to do are left out. A job keeps what it was submitted with, so other
    options need --again, too (scancel ends a job that you do not want to wait for).
    """
    from badcjobs.cli.output import log_to_stderr
    from badcjobs.cli.submit_job import SubmitFlags, submit_here, submit_script, submit_to_slurm
    from badcjobs.cluster.array_options import ArrayOptions
    from badcjobs.cluster.local_array import LocalSettings
    from badcjobs.cluster.submit import RunCommand
    from badcjobs.errors import BadInput

    if cluster not in CLUSTERS:
        fix = f"--cluster {CLUSTERS[0]}   (or {CLUSTERS[1]}, on this machine)"
        raise BadInput(f"--cluster {cluster} is not known", why=f"clusters are {', '.join(CLUSTERS)}", fix=fix)
    log_to_stderr(quiet=True)
    options = ArrayOptions(
        tasks, array, parallel, gpus_per_task, cpus, mem, time, account, partition, constraint, tuple(sbatch or ()),
        job_name, tuple(setup or ()), requeues, merge_account, merge_mem, merge_time,
    )  # fmt: skip
    given = {"source": source, "workers_per_gpu": workers_per_gpu, **of_run}
    flags = {key: value for key, value in given.items() if value not in (None, [])}
    how = SubmitFlags(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted)
    if cluster != "local":
        _refuse_for_slurm(script, share_gpus=share_gpus, kill_wait=kill_wait)
    kill_wait = 30.0 if kill_wait is None else kill_wait
    if not 0 <= kill_wait < math.inf:
        raise BadInput(f"--kill-wait {kill_wait} is no number of seconds", fix="--kill-wait 30")
    local = LocalSettings(share_gpus=share_gpus, max_requeues=requeues, kill_wait_s=kill_wait, again=again)
    if script is not None:
        given = {**flags, **({} if config is None else {"config": config})}
        return submit_script(script, out, given, options, local, how)
    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs submit SOURCE --out runs/first")
    command = RunCommand(out, flags, config)
    if cluster == "local":
        return submit_here(command, options, local, how)
    return submit_to_slurm(command, options, how)


def _refuse_for_slurm(script: Path | None, *, share_gpus: bool, kill_wait: float | None) -> None:
    """Refuse options that mean something to the emulation only; without a word they would change nothing."""
    from badcjobs.errors import BadInput

    if script is not None:
        raise BadInput("--script goes with --cluster local", fix=f"sbatch {script}")
    if share_gpus:
        raise BadInput(
            "--share-gpus goes with --cluster local",
            why="which tasks share a GPU is for Slurm to say",
            fix="the same command without it; --workers-per-gpu auto starts as many engines on each GPU as pay",
        )
    if kill_wait is not None:
        raise BadInput(
            "--kill-wait goes with --cluster local",
            why="how long Slurm waits between TERM and KILL is set for the whole cluster",
            fix="scontrol show config | grep KillWait   (and the same command without it)",
        )


def _with_options_of_run(command: Callable[..., int]) -> Callable[..., int]:
    """Return the command with the options of ``badcjobs run`` behind its own, so that none is missing."""
    own = inspect.signature(command, eval_str=True).parameters
    theirs = inspect.signature(run, eval_str=True).parameters
    parameters = [parameter for parameter in own.values() if parameter.kind is not parameter.VAR_KEYWORD]
    parameters += [theirs[name] for name in theirs if name not in own and name not in _NOT_FOR_ARRAYS]

    def with_all(**given: Any) -> int:
        return command(**given)

    with_all.__doc__ = command.__doc__
    with_all.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters} | {"return": int}
    with_all.__signature__ = inspect.Signature(parameters, return_annotation=int)  # type: ignore[attr-defined]
    return with_all
