"""``badcjobs submit``: a source as an array with its merge job, under Slurm or emulated on this machine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from badcjobs.cli.run import run

_EXAMPLE = (
    "Example: badcjobs submit manifest.csv --out /scratch/st-pi-1/july --cluster slurm --tasks 20 --gpus-per-task 4"
    " --account st-pi-1-gpu --constraint gpu_mem_32 --setup 'module load gcc cuda'"
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
    gpus_per_task: Annotated[int, typer.Option(help="GPUs of each task.")] = 1,
    cpus: Annotated[int | None, typer.Option(help="Cores of each task; default 2 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task; default 4G per GPU. It is billed.")] = None,
    time: Annotated[str, typer.Option(help="Time limit of each task: minutes, H:M:S or D-H:M:S.")] = "12:00:00",
    account: Annotated[str | None, typer.Option(help="Who pays; on Sockeye it ends in -gpu.")] = None,
    partition: Annotated[str | None, typer.Option(help="On many sites better left to Slurm.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Which nodes: gpu_mem_32.")] = None,
    sbatch: Annotated[
        list[str] | None, typer.Option(help="Another option for the array; repeatable: --sbatch=--qos=high.")
    ] = None,
    job_name: Annotated[str, typer.Option(help="What squeue calls it.")] = "badcjobs",
    setup: Annotated[
        list[str] | None, typer.Option(help="A line of shell before the work; repeatable: 'module load gcc cuda'.")
    ] = None,
    requeues: Annotated[
        int, typer.Option(help="How often a task that stopped in order, with work left, is started again.")
    ] = 10,
    merge_account: Annotated[str | None, typer.Option(help="Who pays for the merge job, which has no GPU.")] = None,
    merge_mem: Annotated[str, typer.Option(help="Memory of the merge job.")] = "4G",
    merge_time: Annotated[str, typer.Option(help="Time limit of the merge job.")] = "1:00:00",
    script: Annotated[
        Path | None, typer.Option(help="With --cluster local: run this job script, as sbatch would.")
    ] = None,
    share_gpus: Annotated[
        bool, typer.Option("--share-gpus", help="With --cluster local: let several tasks use one GPU.")
    ] = False,
    kill_wait: Annotated[
        float, typer.Option(help="With --cluster local: seconds between TERM and KILL, as Slurm's KillWait.")
    ] = 30.0,
    workers_per_gpu: Annotated[
        str | None, typer.Option(help="Engine processes per device: N, or auto (as many as pay); default auto.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts and submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to the end; exit with its verdict.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="The job of this run folder has ended: submit what is left.")
    ] = False,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [run]; flags win over it.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    **of_run: Any,
) -> int:
    """Submit a source as an array of tasks, and a job that merges what they did.

    The source is read here once, from end to end; each task then does its share, and what was stopped by the clock is
    started again. The same command finds its job again: with --wait it goes on waiting. All options of `badcjobs run`
    that make sense for an array are passed on to its tasks.
    """
    from badcjobs.cli.output import log_to_stderr
    from badcjobs.cli.submit_local import LocalOptions, submit_here, submit_script
    from badcjobs.cli.submit_slurm import How, submit_to_slurm
    from badcjobs.errors import BadInput
    from badcjobs.scheduler.wishes import Wishes
    from badcjobs.submitting import Command

    if cluster not in CLUSTERS:
        fix = f"--cluster {CLUSTERS[0]}   (or {CLUSTERS[1]}, on this machine)"
        raise BadInput(f"--cluster {cluster} is not known", why=f"clusters are {', '.join(CLUSTERS)}", fix=fix)
    log_to_stderr(quiet=True)
    wishes = Wishes(
        tasks, array, parallel, gpus_per_task, cpus, mem, time, account, partition, constraint, tuple(sbatch or ()),
        job_name, tuple(setup or ()), requeues, merge_account, merge_mem, merge_time,
    )  # fmt: skip
    given = {"source": source, "workers_per_gpu": workers_per_gpu, **of_run}
    flags = {key: value for key, value in given.items() if value not in (None, [])}
    local = LocalOptions(share_gpus, kill_wait, requeues, again, dry_run, json_wanted)
    if script is not None:
        if cluster != "local":
            raise BadInput("--script goes with --cluster local", fix=f"sbatch {script}")
        return submit_script(script, out, flags, wishes, local)
    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs submit SOURCE --out runs/first")
    command = Command(out, flags, config)
    if cluster == "local":
        return submit_here(command, wishes, local)
    return submit_to_slurm(command, wishes, How(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted))


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
