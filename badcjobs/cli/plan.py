"""``badcjobs plan``: GPU-hours, array size, memory and the day it would be finished, before anything is submitted."""

from __future__ import annotations

import time as clock
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from badcjobs.planning.plan import Planned
    from badcjobs.planning.plan_tasks import PlanWish

_EXAMPLE = (
    "Example: badcjobs plan july.csv --site sockeye --from runs/first --gpus 40"
    " --account st-pi-1-gpu --write plans/july"
)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command(name="plan", short_help="Say what a campaign takes; write its shards and scripts.", epilog=_EXAMPLE)(
        plan
    )


def plan(
    source: Annotated[
        list[str],
        typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list of either."),
    ],
    site: Annotated[str | None, typer.Option(help="sockeye, or a site file of your own: ./mysite.toml.")] = None,
    speed_from: Annotated[
        Path | None,
        typer.Option("--from", metavar="JOB", help="Whose speed it is: a run folder, a job database, a probe.toml."),
    ] = None,
    rate: Annotated[float | None, typer.Option(help="The speed instead: audio-hours per GPU-hour.")] = None,
    time: Annotated[
        str | None,
        typer.Option(help="Time limit of a task, as sbatch takes it; default: what it needs, at most the site's."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs at a time; default: as many as the site's cap allows.")] = None,
    gpus_per_task: Annotated[
        int | None, typer.Option(help="GPUs of each task; default: a node of the site, or 1.")
    ] = None,
    margin: Annotated[
        float | None,
        typer.Option(help="A task may be so many times as slow as the mean; default: as measured, or 1.5."),
    ] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each task; default: as measured, or 2 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task; default: as measured, or 4G per GPU.")] = None,
    root: Annotated[str | None, typer.Option(help="Where relative source_paths start from.")] = None,
    chunk_length: Annotated[
        float | None, typer.Option(help="Cut whole recordings into chunks of so many seconds, on the fly.")
    ] = None,
    overlap: Annotated[float | None, typer.Option(help="With --chunk-length: seconds that neighbours share.")] = None,
    cut: Annotated[
        bool | None,
        typer.Option("--cut/--no-cut", help="Rows of a manifest are parts of longer files, or never; default: look."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="hawkears (default), hawkears1, command or demo.")] = None,
    command: Annotated[str | None, typer.Option(help="For --engine command: 'prog {input} {output}'.")] = None,
    engine_arg: Annotated[list[str] | None, typer.Option(help="An argument for the engine; repeatable.")] = None,
    hawkears_python: Annotated[str | None, typer.Option(help="The Python that has HawkEars.")] = None,
    hawkears_root: Annotated[str | None, typer.Option(help="Folder with HawkEars' data/ and yaml/.")] = None,
    write: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the rows of each task and a job script per wave.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="With --write: results of wave N go to OUT/wave-N; default DIR/results.")
    ] = None,
    account: Annotated[str | None, typer.Option(help="With --write: who pays; on Sockeye it ends in -gpu.")] = None,
    constraint: Annotated[str | None, typer.Option(help="With --write: which nodes, such as gpu_mem_32.")] = None,
    template: Annotated[
        str | None, typer.Option(help="With --write: which template; default: the site's, or array.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file with a table [run], for the tasks; flags win over it.")
    ] = None,
    json_wanted: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> int:
    """Say what a source takes: audio-hours, GPU-hours, array tasks, memory, files, waves, and when it is finished.

    The source is read once, as a stream; lengths come from rows and headers alone. The same source gives the same plan.
    Exit code 0, with notes on what is odd, such as files that will fail because they are empty or break off. 1 where
    the plan has a problem: rows left out, chunks longer than a task can finish, more files than the quota.
    """
    from badcjobs.cli.job_signals import HeldSignals
    from badcjobs.cli.output import log_to_stderr
    from badcjobs.cli.world import environ
    from badcjobs.errors import BadInput
    from badcjobs.planning.plan import PlanOrder, plan_sources

    log_to_stderr(quiet=True)
    of_scripts = {"--out": out, "--account": account, "--constraint": constraint, "--template": template}
    loose = [name for name, value in of_scripts.items() if value]
    if loose and write is None:
        raise BadInput(f"{', '.join(loose)}: only with --write DIR", fix=f"--write plans/first {loose[0]} …")
    flags = {
        "source": source,
        "root": root,
        "cut": cut,
        "chunk_length": chunk_length,
        "overlap": overlap,
        "engine": engine,
        "command": command,
        "engine_arg": engine_arg or None,
        "hawkears_python": hawkears_python,
        "hawkears_root": hawkears_root,
    }
    keys = {"account": account, "constraint": constraint}
    order = PlanOrder(
        flags=flags,
        config=config,
        site=site,
        rate=rate,
        speed_from=speed_from,
        wish=_wish(time, mem, gpus_per_task, gpus, margin, cpus),
        write=write,
        out=out,
        template=template,
        keys=tuple(f"{key}={value}" for key, value in keys.items() if value is not None),
    )
    with HeldSignals():  # so that the draft of --write is taken away, whatever ends this
        planned = plan_sources(order, environ(), Path.cwd(), ReadingPace("chunks read"))
    return _tell(planned, json_wanted)


def _tell(planned: Planned, json_wanted: bool) -> int:
    from datetime import datetime, timezone

    from badcjobs.cli.output import print_json, remark, say
    from badcjobs.clock import SystemClock
    from badcjobs.errors import ExitCode
    from badcjobs.planning.make_plan import to_dict
    from badcjobs.planning.plan import plan_text
    from badcjobs.report.rules import PROBLEM

    made, ends = planned.plan, None
    if made.running_s is not None:
        end_s = SystemClock().now_ms() / 1000 + made.running_s
        ends = datetime.fromtimestamp(end_s, tz=timezone.utc).astimezone().isoformat("T", "minutes")
    if json_wanted:
        more = {
            "sources": list(planned.descriptions),
            "finished_at": ends,
            "folder": planned.folder and str(planned.folder),
            "scripts": [str(script) for script, _ in planned.written] or None,
        }
        print_json({**to_dict(made), **more})
    else:
        say(plan_text(planned))
        if ends is not None:
            remark(f"finished on {ends} if the first task starts now and nothing ever waits")
    has_problem = any(one.severity == PROBLEM for one in made.remarks)
    return int(ExitCode.CHUNKS_FAILED if has_problem else ExitCode.DONE)


def _wish(
    time: str | None,
    mem: str | None,
    gpus_per_task: int | None,
    gpus: int | None,
    margin: float | None,
    cpus: int | None,
) -> PlanWish:
    from badcjobs.cluster.sbatch_options import parse_memory, parse_minutes
    from badcjobs.errors import BadInput
    from badcjobs.planning.plan_tasks import PlanWish

    try:
        time_s = None if time is None else 60 * parse_minutes(time)
    except ValueError as error:
        why = "write minutes, H:M:S or D-H:M:S"
        raise BadInput(f"--time {time} is no time limit", why=why, fix="--time 12:00:00") from error
    try:
        mem_gb = None if mem is None else parse_memory(mem) / 1024
    except ValueError as error:
        raise BadInput(f"--mem {mem} is no amount of memory", why=str(error), fix="--mem 16G") from error
    return PlanWish(time_s, gpus_per_task, gpus, margin, cpus, mem_gb)


class ReadingPace:
    """Says on stderr how far a reading is, every few seconds, and how fast."""

    def __init__(self, what: str, every_s: float = 3.0) -> None:
        self._what = what
        self._every_s = every_s
        self._started_s = clock.monotonic()
        self._next_s = self._started_s + every_s

    def __call__(self, rows: int) -> None:
        now_s = clock.monotonic()
        if now_s >= self._next_s:
            from badcjobs.cli.output import remark

            self._next_s = now_s + self._every_s
            remark(f"{rows:,} {self._what}, {rows / (now_s - self._started_s):,.0f} a second")
