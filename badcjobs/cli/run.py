"""The work itself: ``badcjobs run``, one array task, and ``badcjobs submit``, an array with its merge job."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from badcjobs.cli.options import ConfigWords, JsonWanted, Sources, with_settings
from badcjobs.cli.output import answer, log_to_stderr, read_world
from badcjobs.errors import BadInput
from badcjobs.settings import Config, make_settings

Clusters = Literal["slurm", "local"]


@with_settings()
def run(
    source: Sources = None,
    out: Annotated[Path | None, typer.Option(help="The run folder: run.toml, tasks/, later job.sqlite.")] = None,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Run one array task: inside sbatch, or anywhere else as a task of its own.

    Finds the devices it really has, runs one engine process per device, records them meanwhile,
    writes everything to DIR/tasks/, and goes on where an earlier run stopped.

    Example: badcjobs run manifest.csv --out runs/july --engine hawkears --engine-arg=--region=CA-NT
    """
    from dataclasses import replace

    from badcjobs.cli.progress_bars import ProgressBars
    from badcjobs.report.text import task_end_text
    from badcjobs.task.run_task import run_task

    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs run SOURCE --out runs/first")
    chosen = make_settings(out, {"source": source, **settings}, Config.read(config))
    log_to_stderr()
    with ProgressBars(wanted=not json_wanted) as bars:
        end = run_task(chosen, replace(read_world(), show=bars.show))
    answer(json_wanted, lambda: end, lambda: task_end_text(end))
    return int(end["exit_code"])


@with_settings(but=("shard", "free"))  # they choose for one task what the array chooses for all
def submit(
    source: Sources = None,
    out: Annotated[Path | None, typer.Option(help="The run folder: logs/, tasks/, later job.sqlite.")] = None,
    cluster: Annotated[Clusters, typer.Option(help="Slurm, or emulated on this machine.")] = "slurm",
    tasks: Annotated[int | None, typer.Option(help="How many array tasks share the source; default 1.")] = None,
    array: Annotated[str | None, typer.Option(help="The indices instead, as for sbatch: 1-20:2, 0-19%4.")] = None,
    parallel: Annotated[int | None, typer.Option(help="Let at most N tasks run at a time.")] = None,
    gpus_per_task: Annotated[int | None, typer.Option(help="GPUs of each task; default 1.")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each task; default 2 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task; default 4G per GPU. It is billed.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of each task; default 12:00:00.")] = None,
    account: Annotated[str | None, typer.Option(help="Who pays; on Sockeye it ends in -gpu.")] = None,
    partition: Annotated[str | None, typer.Option(help="On many sites better left to Slurm.")] = None,
    constraint: Annotated[str | None, typer.Option(help="Which nodes: gpu_mem_32.")] = None,
    sbatch: Annotated[list[str] | None, typer.Option(help="Any other sbatch option; repeatable.")] = None,
    job_name: Annotated[str | None, typer.Option(help="What squeue calls it; default badcjobs.")] = None,
    setup: Annotated[list[str] | None, typer.Option(help="Shell line before the work; repeatable.")] = None,
    requeues: Annotated[int, typer.Option(help="Restarts of a task that stopped in order with work left.")] = 10,
    merge_account: Annotated[str | None, typer.Option(help="Who pays for the merge job, which has no GPU.")] = None,
    merge_mem: Annotated[str | None, typer.Option(help="Memory of the merge job; default 4G.")] = None,
    merge_time: Annotated[str | None, typer.Option(help="Time limit of the merge job; default 1:00:00.")] = None,
    script: Annotated[Path | None, typer.Option(help="With --cluster local: run this job script.")] = None,
    share_gpus: Annotated[bool, typer.Option("--share-gpus", help="With --cluster local: share GPUs.")] = False,
    kill_wait: Annotated[float | None, typer.Option(min=0, help="With --cluster local: TERM to KILL [30 s].")] = None,
    workers_per_gpu: Annotated[str | None, typer.Option(help="Engine processes per device; default auto.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the scripts, and change nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Follow it to the end; exit with its verdict.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Submit what is left after the job has ended.")] = False,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **of_run: Any,
) -> int:
    """Submit a source as an array of tasks, and a job that merges what they did.

    The source is read here once, from end to end; each task then does its share, and what was stopped by the clock is
    started again. All options of `badcjobs run` that make sense for an array are passed on to its tasks.

    The same command finds its job again, from DIR/submitted.json, and submits nothing twice: while the job is there it
    says how to follow it (with --wait it goes on waiting), afterwards how it ended. To submit what is left then, add
    --again, perhaps with other --time or --mem: array tasks that have nothing left to do are left out; with --no-resume
    all is done once more. A job keeps what it was submitted with, so other options need --again, too (scancel ends a
    job that you do not want to wait for).

    Example: badcjobs submit manifest.csv --out /scratch/st-pi-1/july --cluster slurm --tasks 20 --gpus-per-task 4
    --account st-pi-1-gpu --merge-account st-pi-1 --constraint gpu_mem_32 --setup 'module load gcc cuda'
    """
    from badcjobs.cli.submit import SubmitFlags, refuse_for_slurm, submit_here, submit_script, submit_to_slurm
    from badcjobs.cluster.array_options import ArrayOptions
    from badcjobs.cluster.local_array import LocalSettings

    log_to_stderr(quiet=True)
    options = ArrayOptions(
        tasks, array, parallel, gpus_per_task, cpus, mem, time, account, partition, constraint, tuple(sbatch or ()),
        job_name, tuple(setup or ()), requeues, merge_account, merge_mem, merge_time,
    )  # fmt: skip
    given = {"source": source, "workers_per_gpu": workers_per_gpu, **of_run}
    flags = {key: value for key, value in given.items() if value is not None}
    how = SubmitFlags(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted)
    if cluster != "local":
        refuse_for_slurm({"--script": script, "--share-gpus": share_gpus or None, "--kill-wait": kill_wait})
    kill_wait_s = 30.0 if kill_wait is None else kill_wait
    if not math.isfinite(kill_wait_s):
        raise BadInput(f"--kill-wait {kill_wait_s} is not a number of seconds", fix="--kill-wait 30")
    local = LocalSettings(share_gpus=share_gpus, max_requeues=requeues, kill_wait_s=kill_wait_s, again=again)
    if script is not None:
        return submit_script(script, out, flags if config is None else {**flags, "config": config}, options, local, how)
    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs submit SOURCE --out runs/first")
    command = (out, flags, Config.read(config))
    if cluster == "local":
        return submit_here(command, options, local, how)
    return submit_to_slurm(command, options, how)
