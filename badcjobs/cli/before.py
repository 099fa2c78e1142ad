"""Before a job is submitted: ``badcjobs check`` finds mistakes, ``plan`` the size, ``probe`` the best chunk length."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import CHUNKS, ENGINE, ConfigWords, JsonWanted, Sources, Target, refuse_data, with_settings
from badcjobs.cli.output import Pace, answer, environ, log_to_stderr, print_json, read_world, remark, say, shown
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode
from badcjobs.settings import Config, make_settings, nearest, refuse, replaced_option

if TYPE_CHECKING:
    from badcjobs.cluster.job_script import ParsedWords
    from badcjobs.planning.probe import ProbeEnd, ProbeOrder

_DEVICES = ("simulate", "simulate_script", "max_gpus", "workers_per_gpu", "cpu_workers", "emit_gpu_telemetry")
_INTERVAL_S = 0.1  # a trial may be short, and its peak shorter
# Of the options that are numbers: from where, to where, and in words.
_LIMITS = {
    "max_minutes": (1e-9, 9_999, "a number of minutes above 0"),
    "start_length": (3, 86_400, "from 3 to 86400 seconds"),
    "max_length": (3, 86_400, "from 3 to 86400 seconds"),
    "margin": (0, 90, "from 0 to 90 percent"),
    "trial_seconds": (1e-9, 3600, "a number of seconds above 0"),
}


@with_settings(*CHUNKS, *ENGINE)
def check(
    context: typer.Context,
    source: Sources = None,
    out: Annotated[str | None, typer.Option(help="The run folder; default: what the script says.")] = None,
    site: Annotated[str | None, typer.Option(help="sockeye, or a site file of your own: ./mysite.toml.")] = None,
    script: Annotated[str | None, typer.Option(help="The job script that would be submitted.")] = None,
    tasks: Annotated[int | None, typer.Option(min=1, help="Tasks of the array; default: the script's --array.")] = None,
    gpus_per_task: Annotated[int | None, typer.Option(min=1, help="GPUs of each task, on all its nodes.")] = None,
    cpus: Annotated[int | None, typer.Option(min=1, help="Cores of each task, on one node.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each task on one node, as sbatch takes it: 16G.")] = None,
    time: Annotated[str | None, typer.Option(help="Time of each task, as sbatch takes it: 12:00:00.")] = None,
    account: Annotated[str | None, typer.Option(help="The account that pays.")] = None,
    merge_account: Annotated[str | None, typer.Option(help="The one that pays for submit's merge job.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Read the source, but look at no audio file.")] = False,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Say what would go wrong, each with the line that fixes it; nothing is submitted, nothing is left behind.

    Exit code 0 when nothing is a problem (there may be warnings), 1 when something is, 2 for wrong usage.

    Example: badcjobs check manifest.csv --out /scratch/st-lab-1/july --site sockeye --script job.sbatch
    """
    from badcjobs.cluster.sbatch_options import Asked, parse_limit, parse_memory
    from badcjobs.model import Cutting
    from badcjobs.planning.check import CheckOrder, Here
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text

    log_to_stderr(quiet=True)
    try:
        time_s = None if time is None else parse_limit(time)
        memory_gb = None if mem is None else parse_memory(mem) / 1024
    except ValueError as error:
        raise BadInput(str(error), fix="badcjobs check … --time 12:00:00 --mem 16G") from error
    mistakes: list[str] = []
    said = Config.read(config).read_tables(mistakes)[0]
    refuse(mistakes, "badcjobs check --help")
    said |= {key: value for key, value in settings.items() if value is not None}
    order = CheckOrder(
        sources=tuple(source or said.get("source", ())),
        out=out,
        cutting=Cutting(said.get("cut"), said.get("chunk_length"), said.get("overlap") or 0.0),
        site=site,
        script=script,
        engine_args=tuple(said.get("engine_arg", ())),
        **{key: said.get(key) for key in ("root", "engine", "command", "hawkears_python", "hawkears_root")},
        asked=Asked(
            tasks=tasks,
            gpus_per_task=gpus_per_task,
            cpus_per_node=cpus,
            memory_gb_per_node=memory_gb,
            time_s=time_s,
            no_time_limit=time is not None and time_s is None,
            account=account,
            merge_account=merge_account,
        ),
        quick=quick,
    )
    parse = make_parser(context.find_root().command)
    here = Here(environ(), SystemClock(), Path.cwd(), Pace("chunks looked at"), parse)
    found = check_all(order, here)
    answer(json_wanted, found.to_dict, lambda: remarks_text(found.findings))
    return int(found.exit_code)


def make_parser(group: Any) -> Callable[[Sequence[str]], ParsedWords]:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    from badcjobs.cluster.job_script import ParsedWords

    names = group.list_commands(None)

    def parse(words: Sequence[str]) -> ParsedWords:
        found = _parse(group, words, "badcjobs")
        if found.wrong or not found.operands:
            return found
        said, *rest = found.operands
        name = said if said in names else nearest(said, names)
        if name is None:
            return ParsedWords(wrong=(f"badcjobs has no command {said}", said, ""))
        parsed = _parse(group.get_command(None, name), rest, f"badcjobs {name}")
        wrong = (f"badcjobs has no command {said}", said, name) if name != said else parsed.wrong
        return ParsedWords(name, parsed.values, parsed.operands, wrong)

    return parse


def _parse(command: Any, words: Sequence[str], whose: str) -> ParsedWords:
    from badcjobs.cluster.job_script import ParsedWords, parse_plainly

    context = command.context_class(command, info_name=whose)
    try:
        values, operands, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # another error than wrong usage
            raise
        wrong = getattr(error, "option_name", None) or ""
        near = nearest(wrong, getattr(error, "possibilities", None) or ())
        if "does not take a value" in error.format_message():
            wrong, near = next((word for word in words if word.startswith(f"{wrong}=")), wrong), wrong
        said = f"{whose}: {error.format_message()}"
        wrong, near = replaced_option(wrong, words) or (wrong, near)
        return ParsedWords(values=parse_plainly(words).values, wrong=(said, wrong, near or ""))
    listed = [word for name, value in values.items() if isinstance(value, tuple) for word in value]
    kept = {name: value for name, value in values.items() if value is not None and not isinstance(value, tuple)}
    return ParsedWords(values=kept, operands=(*listed, *operands))


# --- plan -------------------------------------------------------------------------------------------------------------


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


# --- probe ------------------------------------------------------------------------------------------------------------


@with_settings(*ENGINE, *_DEVICES)
def probe(
    audio: Annotated[list[str], typer.Argument(metavar="AUDIO", help="Recordings to try with; short ones repeat.")],
    max_minutes: Annotated[float, typer.Option(help="Stop after so many minutes; the same command goes on.")] = 10.0,
    max_length: Annotated[float, typer.Option(help="Try nothing longer than so many seconds.")] = 3600.0,
    start_length: Annotated[float, typer.Option(help="Begin with so many seconds.")] = 60.0,
    margin: Annotated[float, typer.Option(help="Percent by which a safe chunk is shorter than the longest.")] = 10.0,
    trial_seconds: Annotated[float, typer.Option(help="Let the chunks of a trial take about so long.")] = 3.0,
    store: Annotated[Path | None, typer.Option(metavar="FILE", help="Result file [probe.toml in the cache].")] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIR", help="Folder for the database of the trials.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Forget what was found before.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the curve as a page.")] = None,
    config: ConfigWords = None,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Find the longest chunk that each GPU model can take with this engine and its settings, and the best one.

    Doubles the length until the memory runs out, then searches in between. What is found is kept: later runs cut
    what is longer before it fails. More: badcjobs guide probe.

    Example: badcjobs probe july/GNWT-01.wav --hawkears-root /scratch/lab/hawkears --html probe.html
    """
    from badcjobs.planning.probe import ProbeOrder
    from badcjobs.planning.probe_search import Bounds
    from badcjobs.store.atomic_write import cannot_write, try_to_write

    given, chosen = dict(locals()), Config.read(config)
    refuse(
        [
            f"--{name.replace('_', '-')} {given[name]:g} must be {words}"
            for name, (least, most, words) in _LIMITS.items()
            if not least <= given[name] <= most
        ],
        "badcjobs probe --help",
    )
    flags = {"source": audio, "interval": _INTERVAL_S, **settings}
    order = ProbeOrder(
        make_settings(keep or Path("probe"), flags, chosen, "probe"),
        Bounds(start_length, max_length),
        margin_percent=margin,
        most_s=max_minutes * 60,
        trial_s=trial_seconds,
        store=store,
        keep=keep,
        again=again,
    )
    inputs = [*map(Path, audio), *([] if chosen.file is None else [chosen.file])]
    refuse_data([Target("--store", store, "probe.toml"), Target("--html", html, "probe.html")], inputs)
    if html is not None:
        try:
            try_to_write(html)  # before minutes of trials
        except OSError as error:
            raise cannot_write(html, error) from error
    return _probe(order, html, json_wanted)


def _probe(order: ProbeOrder, html: Path | None, json_wanted: bool) -> int:
    import logging

    from badcjobs.planning.probe import run_probe
    from badcjobs.planning.probe_page import probe_page, probe_text
    from badcjobs.report.job import write_whole
    from badcjobs.workers.learned import describe_readers

    log_to_stderr()
    # A chunk that does not fit is what we are after: no error, and said in a line of our own.
    for noisy in ("supervise", "stream_session"):
        logging.getLogger(f"badcjobs.workers.{noisy}").setLevel(logging.CRITICAL)
    world = read_world()
    end = run_probe(order, world)
    known = [probed for probed in end.probes if probed.trials]
    if end.problems and not known:
        raise end.problems[0]
    kept = f"{shown(end.store)}; {describe_readers(end.store, world.environ)}"
    answer(json_wanted, lambda: _document(end), lambda: probe_text(known, kept, end.notes))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        write_whole(html, probe_page(known, end.notes))
    return end.exit_code


def _document(end: ProbeEnd) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        "version": 1,
        "exit_code": end.exit_code,
        "store": str(end.store),
        "set_aside": None if end.aside is None else str(end.aside),
        "gpus": [
            {**asdict(probed.key), "at": probed.at, "finished": probed.finished,
             "result": None if probed.result is None else asdict(probed.result),
             "trials": [asdict(trial) for trial in sorted(probed.trials, key=lambda one: (one.lean, one.length_s))]}
            for probed in end.probes
        ],
        "problems": [{"what": problem.what, "why": problem.why, "fix": problem.fix} for problem in end.problems],
        "notes": list(end.notes),
    }  # fmt: skip
