"""``badcjobs run``: one array task."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

_EXAMPLE = "Example: badcjobs run manifest.csv --out runs/july --engine hawkears --engine-arg=--region=CA-NT"


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="run", short_help="Run one array task, inside sbatch or outside.", epilog=_EXAMPLE)(run)


def run(
    source: Annotated[
        list[str] | None,
        typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list of either."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="The run folder: run.toml, tasks/, later job.sqlite.")] = None,
    engine: Annotated[str | None, typer.Option(help="hawkears (default), hawkears1, command or demo.")] = None,
    command: Annotated[
        str | None,
        typer.Option(help="For --engine command: 'prog {input} {output}' per chunk, or {inputs} {outputs} per batch."),
    ] = None,
    engine_arg: Annotated[
        list[str] | None, typer.Option(help="An argument for the engine; repeatable: --engine-arg=--threads=3.")
    ] = None,
    hawkears_python: Annotated[
        str | None, typer.Option(help="The Python that has HawkEars; default: hawkears on PATH.")
    ] = None,
    hawkears_root: Annotated[str | None, typer.Option(help="Folder with HawkEars' data/ and yaml/.")] = None,
    root: Annotated[str | None, typer.Option(help="Where relative source_paths start from.")] = None,
    cut: Annotated[
        bool | None,
        typer.Option("--cut/--no-cut", help="Rows of a manifest are cut out of longer files; default: those that are."),
    ] = None,
    chunk_length: Annotated[
        float | None,
        typer.Option(help="Cut whole recordings into chunks of so many seconds; default: each is one chunk."),
    ] = None,
    overlap: Annotated[
        float | None, typer.Option(help="With --chunk-length: seconds that neighbouring chunks share; default 0.")
    ] = None,
    simulate: Annotated[int | None, typer.Option(help="Pretend that this machine has N GPUs.")] = None,
    simulate_script: Annotated[str | None, typer.Option(help="TOML file: their load and faults.")] = None,
    replay: Annotated[str | None, typer.Option(help="Pretend that the devices are those of a task database.")] = None,
    free: Annotated[int | None, typer.Option(help="Without Slurm: take the N devices that are most free.")] = None,
    min_memory_mib: Annotated[int | None, typer.Option(help="With --free: at least so much free memory each.")] = None,
    max_utilization: Annotated[float | None, typer.Option(help="With --free: at most so many percent busy.")] = None,
    wait: Annotated[float | None, typer.Option(help="With --free: wait so many seconds for them; default 0.")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="Use at most N of the granted devices.")] = None,
    workers_per_gpu: Annotated[
        str | None, typer.Option(help="Engine processes per device: N, or auto (as many as pay); default 1.")
    ] = None,
    cpu_workers: Annotated[int | None, typer.Option(help="Without any GPU, go on with N workers on the CPU.")] = None,
    interval: Annotated[float | None, typer.Option(help="Seconds between samples; default 1.")] = None,
    retries: Annotated[int | None, typer.Option(help="How often a failed chunk is tried again; default 2.")] = None,
    backoff: Annotated[
        float | None, typer.Option(help="Seconds before the first retry, then doubled; default 1.")
    ] = None,
    publish_every: Annotated[
        float | None, typer.Option(help="Seconds between publications of the task database; default 30.")
    ] = None,
    heartbeat_every: Annotated[float | None, typer.Option(help="Seconds between heartbeat lines; default 60.")] = None,
    grace: Annotated[
        float | None, typer.Option(help="Seconds that running chunks get after SIGTERM or Ctrl-C; default 20.")
    ] = None,
    shard: Annotated[str | None, typer.Option(help="I/N: take part I (from 0) of N, whatever Slurm says.")] = None,
    resume: Annotated[
        bool | None,
        typer.Option("--resume/--no-resume", help="Skip what is done in --out with the same audio; default: skip."),
    ] = None,
    retry_failed: Annotated[
        bool | None,
        typer.Option("--retry-failed/--no-retry-failed", help="Try what failed in earlier tasks; default: try."),
    ] = None,
    time_left: Annotated[
        str | None,
        typer.Option(help="Stop in order within this time: seconds, M:S or H:M:S; default: what Slurm gives the job."),
    ] = None,
    live_mode: Annotated[
        str | None, typer.Option(help="Where live files lie: auto (default), local, or shared (no node-local disk).")
    ] = None,
    stage: Annotated[
        str | None,
        typer.Option(
            help="Copy audio to the node before it is needed: auto (default: from shared filesystems), always, never."
        ),
    ] = None,
    engine_prefix: Annotated[
        str | None, typer.Option(help="Run the engine under a program: 'nsys profile -o OUT/{worker}', numactl, ….")
    ] = None,
    emit_gpu_telemetry: Annotated[
        bool | None,
        typer.Option("--emit-gpu-telemetry/--no-emit-gpu-telemetry", help="Record the devices; default: record."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file with a table [run]; flags win over it.")] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Run one array task: inside sbatch, or anywhere else as a task of its own.

    Finds the devices it really has, runs one engine process per device, records them meanwhile,
    writes everything to DIR/tasks/, and goes on where an earlier run stopped.
    """
    flags = {k: v for k, v in locals().items() if k not in ("out", "config", "json_wanted")}
    return _run(out, {k: v for k, v in flags.items() if v != []}, config, json_wanted)


def _run(out: Path | None, flags: dict[str, Any], config: Path | None, json_wanted: bool) -> int:
    from dataclasses import replace

    from badcjobs.cli.output import log_to_stderr, print_json, say
    from badcjobs.cli.progress_bars import ProgressBars
    from badcjobs.cli.world import read_world
    from badcjobs.errors import BadInput
    from badcjobs.report.text import task_end_text
    from badcjobs.settings import make_settings
    from badcjobs.task.run_task import run_task

    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs run SOURCE --out runs/first")
    settings = make_settings(out, flags, config)
    log_to_stderr()
    with ProgressBars(wanted=not json_wanted) as bars:
        end = run_task(settings, replace(read_world(), show=bars.show))
    if json_wanted:
        print_json(end)
    else:
        say(task_end_text(end))
    return int(end["exit_code"])
