"""``badcjobs plan``: GPU-hours, array size, memory and the day it would be finished, before anything is submitted."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated, Any

import typer

from badcjobs.cli.options import CHUNKS, ENGINE, ConfigWords, JsonWanted, with_settings
from badcjobs.cli.output import Pace, environ, log_to_stderr, print_json, remark, say
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode
from badcjobs.settings import Config


@with_settings(*CHUNKS, *ENGINE)
def plan(
    source: Annotated[list[str], typer.Argument(metavar="SOURCE", help="Manifest CSV, folder of audio, or a list.")],
    site: Annotated[str | None, typer.Option(help="sockeye, or a site file of your own: ./mysite.toml.")] = None,
    speed_from: Annotated[Path | None, typer.Option("--from", metavar="RUN", help="Speed of a run or a probe.")] = None,
    rate: Annotated[float | None, typer.Option(help="The speed instead: audio-hours per GPU-hour.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit of each task; default: what it needs.")] = None,
    gpus: Annotated[int | None, typer.Option(help="GPUs at a time; default: as many as the site's cap allows.")] = None,
    gpus_per_task: Annotated[int | None, typer.Option(help="GPUs of each task; default: a node's, or 1.")] = None,
    margin: Annotated[float | None, typer.Option(help="Slowest task against the mean [measured, or 1.5].")] = None,
    cpus: Annotated[int | None, typer.Option(help="Cores of each task; default: as measured, or 2 per GPU.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task; default: as measured, or 4G per GPU.")] = None,
    write: Annotated[Path | None, typer.Option(metavar="DIR", help="Write the shards and a script per wave.")] = None,
    out: Annotated[Path | None, typer.Option(help="With --write: wave N goes to OUT/wave-N [DIR/results].")] = None,
    account: Annotated[str | None, typer.Option(help="With --write: who pays; on Sockeye it ends in -gpu.")] = None,
    constraint: Annotated[str | None, typer.Option(help="With --write: which nodes, such as gpu_mem_32.")] = None,
    template: Annotated[str | None, typer.Option(help="With --write: which one [the site's, or array].")] = None,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Say what a source takes: audio-hours, GPU-hours, array tasks, memory, files, waves, and when it is finished.

    The source is read once, as a stream; lengths come from rows and headers alone. The same source gives the same plan.
    Exit code 0, with notes on what is odd, such as files that will fail because they are empty or break off. 1 where
    the plan has a problem: rows left out, chunks longer than a task can finish, more files than the quota.

    Example: badcjobs plan july.csv --site sockeye --from runs/first --gpus 40 --account st-pi-1-gpu --write
    plans/july
    """
    from badcjobs.cli.job_signals import HeldSignals
    from badcjobs.cluster.sbatch_options import parse_memory, parse_minutes
    from badcjobs.planning.make_plan import to_dict
    from badcjobs.planning.plan import PlanOrder, plan_sources, plan_text
    from badcjobs.planning.plan_tasks import PlanWish
    from badcjobs.report.rules import PROBLEM

    log_to_stderr(quiet=True)
    of_scripts = {"--out": out, "--account": account, "--constraint": constraint, "--template": template}
    loose = [name for name, value in of_scripts.items() if value]
    if loose and write is None:
        raise BadInput(f"{', '.join(loose)}: only with --write DIR", fix=f"--write plans/first {loose[0]} …")
    try:
        time_s = None if time is None else 60 * parse_minutes(time)
    except ValueError as error:
        why = "write minutes, H:M:S or D-H:M:S"
        raise BadInput(f"--time {time} is no time limit", why=why, fix="--time 12:00:00") from error
    try:
        mem_gb = None if mem is None else parse_memory(mem) / 1024
    except ValueError as error:
        raise BadInput(f"--mem {mem} is no amount of memory", why=str(error), fix="--mem 16G") from error
    order = PlanOrder(
        flags={"source": source, **settings},
        config=Config.read(config),
        site=site,
        rate=rate,
        speed_from=speed_from,
        wish=PlanWish(time_s, gpus_per_task, gpus, margin, cpus, mem_gb),
        write=write,
        out=out,
        template=template,
        keys=tuple(f"{key}={value}" for key, value in (("account", account), ("constraint", constraint)) if value),
    )
    with HeldSignals():  # so that the draft of --write is taken away, whatever ends this
        planned = plan_sources(order, environ(), Path.cwd(), Pace("chunks read"))
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
