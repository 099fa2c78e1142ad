"""Before a job is submitted: ``badcjobs check`` finds mistakes, ``plan`` the size, ``probe`` the best chunk length."""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from badcjobs.cli.options import (
    JsonWanted,
    Root,
    Sources,
    explain_moved_option,
    flag,
    option,
    read_project,
    read_trust,
    refuse_data,
    run_options,
    with_settings,
)
from badcjobs.cli.output import (
    Pace,
    answer,
    environ,
    log_to_stderr,
    print_json,
    read_world,
    remark,
    say,
    say_next,
    shown,
    text_width,
    this_command,
)
from badcjobs.clock import SystemClock
from badcjobs.cluster.job_script import Mistake, ParsedWords, Parser, is_job_script, script_variables
from badcjobs.errors import BadInput, ExitCode
from badcjobs.model import Probed, parse_stop_after
from badcjobs.paths import shell_line
from badcjobs.project import Project
from badcjobs.settings import PlanSettings, ProbeSettings, RunSettings, SubmitSettings, nearest, option_words

if TYPE_CHECKING:
    from badcjobs.planning.check import CheckOrder
    from badcjobs.planning.plan import Planned
    from badcjobs.planning.probe import ProbeEnd, ProbeOrder

_INTERVAL_S = 0.1  # a trial may be short, and its memory peak shorter
SITE = option("NAME|FILE", "Rules of the cluster: sockeye, or a TOML file.")


@with_settings("submit", hidden=True)
def check(
    context: typer.Context,
    source: Sources = None,
    site: str | None = SITE,
    quick: bool = flag("--quick", "Read SOURCE, but open no audio file."),
    json_wanted: JsonWanted = False,
    out: str | None = typer.Option(None, "--out", "-o", hidden=True),
    root: str | None = typer.Option(None, hidden=True),
    again: bool = typer.Option(False, "--again", hidden=True),
    dry_run: bool = typer.Option(False, "--dry-run", hidden=True),
    wait: bool = typer.Option(False, "--wait", hidden=True),
    **settings: Any,
) -> int:
    """Find what would go wrong with a job, and how to fix it; nothing is submitted.

    Takes the line of submit with all its options; SOURCE may also be a job script. The exit code is 1 if there is a
    problem.

    Example:
      badcjobs check july.csv --out runs/july --tasks 20 --site sockeye
    """
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text

    log_to_stderr()
    project = read_project(context, "run", "submit")
    sources = tuple(source or project.get("run", "source") or ())
    flags = run_options(context, out=out, root=root)
    order = _check_order(context, project, sources, flags, settings, site=site, quick=quick)
    checked = check_all(order)
    answer(json_wanted, checked.to_dict(), remarks_text(checked.findings, text_width()))
    if json_wanted:
        return checked.exit_code
    if checked.exit_code or not sources:
        note = "once the problems are fixed" if checked.exit_code else ""
        say_next(*this_command(*(["SOURCE"] if not sources else [])), note=note)
    else:
        say_next(*_after_check(order, out or project.get("run", "out"), on_line=any(settings.values())))
    return checked.exit_code


def _check_order(
    context: typer.Context,
    project: Project,
    sources: tuple[str, ...],
    flags: dict[str, Any],
    options: dict[str, Any],
    *,
    site: str | None,
    quick: bool,
) -> CheckOrder:
    """Return what to check: a job script, or what would be submitted."""
    from badcjobs.planning.check import CheckOrder

    trust = read_trust("--config", "")
    order = CheckOrder(
        settings=RunSettings(),
        environ=environ(),
        clock=SystemClock(),
        cwd=Path.cwd(),
        site=site or project.site,
        quick=quick,
        progress=Pace("chunks checked"),
        parse=make_parser(context.find_root().command),
        prefer=project.make(PlanSettings, {}, "check").prefer,
        trust=trust,
        site_trust=None if site or "site" in project.keys else trust,
    )
    if sources and is_job_script(sources[0]):
        # A job script says for itself what the project file would say.
        out = flags.get("out")
        return order._replace(
            settings=RunSettings(out=out and Path(out), source=tuple(sources[1:])),  # type: ignore[arg-type]
            submit=Project.parse({}, keys=project.keys).make(SubmitSettings, options, "check"),
            script=sources[0],
            run_words=tuple(option_words(flags)),
        )
    return _with_source(order, sources, project, flags, options, "--site " if site else "--config site=")


def _with_source(
    order: CheckOrder,
    sources: tuple[str, ...],
    project: Project,
    flags: dict[str, Any],
    options: dict[str, Any],
    site_option: str,
) -> CheckOrder:
    """Add a source; a check without SOURCE looks at everything else, and settings without one would be refused."""
    from badcjobs.planning.resolve_submit import complete
    from badcjobs.planning.site import find_site

    settings = project.make(RunSettings, {**flags, "source": sources or ("?",)}, "check")
    submit = project.make(SubmitSettings, options, "check")
    site = find_site(order.site, order.cwd, site_option)
    completed = complete(submit, order.prefer, settings, site, order.environ, order.cwd)
    if not sources:
        completed = replace(submit, merge_account=completed.merge_account)
    return order._replace(settings=replace(settings, source=sources), submit=completed)


def _after_check(order: CheckOrder, out: str | None, *, on_line: bool) -> Sequence[str | Path]:
    """Return the command that submits or runs what was checked; ``on_line``: the line has options of submit."""
    source = order.settings.source
    if order.script is not None:
        values = script_variables(next(iter(source), None), out, order.run_words)
        variables = [f"{name}={value}" for name, value in values.items()]
        env = ["env", *variables] if variables else []
        return *env, "sbatch", Path(order.script)
    new = [] if out else [f"--out=runs/{Path(source[0]).stem}"]
    has_sbatch = shutil.which("sbatch", path=order.environ.get("PATH")) is not None
    if has_sbatch or on_line or order.submit.cluster != "slurm":
        command = this_command(*new, name="submit", without=["--quick"])
    else:
        command = this_command(*new, name="run", without=["--quick", "--"])
    line = "\0".join(command)
    return re.sub("--site[=\0]", "--config=site=", line).split("\0")


def make_parser(group: Any) -> Parser:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    names = group.list_commands(None)

    def parse(words: Sequence[str]) -> ParsedWords:
        parsed = _parse(group, words, "")
        if parsed.wrong or not parsed.operands:
            return parsed
        name, *rest = parsed.operands
        if name in names:
            return replace(_parse(group.get_command(None, name), rest, name), command=name)
        near = nearest(name, names)
        hint = f"; did you mean {near}?" if near else ""
        return ParsedWords(wrong=Mistake(f"badcjobs has no command {name}{hint}", "badcjobs --help"))

    return parse


def _parse(command: Any, words: Sequence[str], name: str) -> ParsedWords:
    context = command.context_class(command, info_name=name)
    try:
        values, operands, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # another error than wrong usage
            raise
        moved = explain_moved_option(getattr(error, "option_name", None) or "", words, name)
        program = f"badcjobs {name}".strip()
        fix = moved[1] if moved else f"{program} --help"
        return ParsedWords(wrong=Mistake(f"{program}: {error.format_message()}", fix))
    listed = [word for value in values.values() if isinstance(value, tuple) for word in value]
    kept = {key: value for key, value in values.items() if value is not None and not isinstance(value, tuple)}
    return ParsedWords(values=kept, operands=(*listed, *operands))


def plan(
    context: typer.Context,
    source: Sources = None,
    out: Path | None = option("DIR", "Write the shards and a job script per wave.", "--out", "-o"),
    speed_from: Path | None = option("RUN", "Measured speed: a run or a probe result.", "--from"),
    rate: float | None = option("X", "Speed in audio-hours per GPU-hour."),
    site: str | None = SITE,
    parallel: int | None = option("N", "Tasks that run at a time [the site's limit]."),
    gpus_per_task: int | None = option("N", "GPUs of each task [the cheapest, or 1]."),
    time: str | None = option("TIME", "Time limit of each task [what it needs]."),
    root: Root = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Estimate what SOURCE takes: GPU-hours, array tasks, memory, files, waves, and when it is finished.

    Lengths come from rows and audio headers alone. The exit code is 1 if the plan has a problem, such as rows left out.

    Example:
      badcjobs plan july.csv --site sockeye --rate 400 --parallel 10
    """
    from badcjobs.cli.job_signals import DelayedSignals
    from badcjobs.planning.plan import PlanOrder, plan_sources

    log_to_stderr()
    project = read_project(context, "run", "submit")
    request = {"parallel": parallel, "gpus_per_task": gpus_per_task, "time": time}
    order = PlanOrder(
        flags=run_options(context, source=source, root=root),
        project=project,
        submit=project.make(SubmitSettings, request, "plan"),
        plan=project.make(PlanSettings, {}, "plan"),
        site=site or project.site,
        rate=rate,
        speed_from=speed_from,
        out=out,
    )
    with DelayedSignals():  # so that the unfinished folder of --out is removed, whatever ends this
        planned = plan_sources(order, environ(), Path.cwd(), Pace("chunks read"))
    return _print_plan(planned, order.submit.account, json_wanted=json_wanted)


def _print_plan(planned: Planned, account: str | None, *, json_wanted: bool) -> int:
    """Print a plan, and when it is finished if its first task starts now; return the exit code."""
    from badcjobs.planning.make_plan import to_dict
    from badcjobs.planning.plan import plan_text
    from badcjobs.report.rules import PROBLEM

    has_problem = any(remark.severity == PROBLEM for remark in planned.plan.remarks)
    code = ExitCode.CHUNKS_FAILED if has_problem else ExitCode.DONE

    finished_at = None
    if planned.plan.running_s is not None:
        end_s = SystemClock().now_ms() / 1000 + planned.plan.running_s
        finished_at = datetime.fromtimestamp(end_s, tz=timezone.utc).astimezone().isoformat("T", "minutes")
    if not json_wanted:
        say(plan_text(planned, text_width()))
        if finished_at is not None:
            remark(f"finished on {finished_at} if the first task starts now and no task waits in the queue")
        _say_next_after_plan(planned, account, code)
        return code
    more = {
        "sources": list(planned.descriptions),
        "finished_at": finished_at,
        "folder": planned.folder and str(planned.folder),
        "scripts": [str(script) for script, _ in planned.written] or None,
    }
    print_json({**to_dict(planned.plan), **more})
    return code


def _say_next_after_plan(planned: Planned, account: str | None, code: ExitCode) -> None:
    """Print the command that submits what was planned, or that writes it."""
    note = "once the problems are fixed" if code else ""
    if planned.written:
        script, _ = planned.written[0]
        say_next("sbatch", script, note=note)
        return
    options = []
    if not code:
        options.append("--out=plan")
        ending = planned.plan.site.account_ends_with
        if ending and not account:
            options.append(f"--config=submit.account=NAME{ending}")
    say_next(*this_command(*options), note=note)


def probe(
    context: typer.Context,
    audio: list[str] = typer.Argument(..., metavar="AUDIO"),
    out: Path | None = option("FILE", "Result file [probe.json in the user's cache].", "--out", "-o"),
    time: str = option("TIME", "Stop after TIME; run it again to continue [10].", default="10"),
    again: bool = flag("--again", "Discard earlier results."),
    html: Path | None = option("FILE", "Write memory and speed as a page."),
    json_wanted: JsonWanted = False,
) -> int:
    """Find the longest chunk that fits each GPU model with this engine and its options, and the fastest length.

    Short recordings are repeated. Later runs read the result and cut longer chunks before they fail.

    Example:
      badcjobs probe july/night.wav --html probe.html -- --max-gpus 1
    """
    from badcjobs.planning.probe import ProbeOrder, run_probe

    project = read_project(context, "run", "alerts")
    most_s = parse_stop_after(time)
    if not most_s:
        raise BadInput(f"--time {time} is not a time", why="write minutes, H:M:S or D-H:M:S", fix="--time 10")
    order = ProbeOrder(
        project.make(RunSettings, run_options(context, source=audio, interval=_INTERVAL_S), "probe"),
        project.make(ProbeSettings, {}, "probe"),
        most_s=most_s,
        store=out,
        again=again,
    )
    inputs = [*map(Path, audio), *filter(None, [project.file])]
    refuse_data({"--out": out, "--html": html}, inputs)
    if html is not None:
        _check_page(html)
    log_to_stderr(quiet=False)
    # A chunk that does not fit is a result here, not an error; the probe logs it itself.
    for noisy in ("supervise", "stream_session"):
        logging.getLogger(f"badcjobs.workers.{noisy}").setLevel(logging.CRITICAL)
    end = run_probe(order, read_world())
    _print_probe(end, order, html, json_wanted=json_wanted)
    return end.exit_code


def _check_page(html: Path) -> None:
    """Refuse a page that cannot be written, before minutes of trials."""
    from badcjobs.store.atomic_write import cannot_write, try_to_write

    try:
        try_to_write(html)
    except OSError as error:
        raise cannot_write(html, error) from error


def _print_probe(end: ProbeEnd, order: ProbeOrder, html: Path | None, *, json_wanted: bool) -> None:
    """Print the result of the trials, and write their page; raise the first problem if there was no trial."""
    from badcjobs.planning.probe_page import probe_page, probe_text
    from badcjobs.report.job import write_whole
    from badcjobs.workers.learned import describe_readers

    probes = [probed for probed in end.probes if probed.trials]
    if end.problems and not probes:
        raise end.problems[0]
    kept = f"{shown(end.store)}; {describe_readers(end.store, environ())}"
    answer(json_wanted, _document(end), probe_text(probes, kept, end.notes, text_width()))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        write_whole(html, probe_page(probes, end.notes))
    if not json_wanted:
        _say_next_after_probe(end, order)


def _say_next_after_probe(end: ProbeEnd, order: ProbeOrder) -> None:
    """Print the command that continues the probe, or the line that plans with its result."""
    from badcjobs.planning.plan_speed import probe_line

    if end.exit_code:
        say_next(*this_command(without=["--again"]))
        return
    plan_words = ["plan", "SOURCE"]
    if order.store is not None:
        plan_words += ["--from", str(order.store)]
    line = probe_line(order.settings, order.settings.workers_wanted, None)
    say(f"next: {line.replace('probe AUDIO', shell_line(*plan_words), 1)}")


def _document(end: ProbeEnd) -> dict[str, Any]:
    return {
        "version": 1,
        "exit_code": end.exit_code,
        "store": str(end.store),
        "gpus": [_probe_document(probed) for probed in end.probes],
        "problems": [{"what": problem.what, "why": problem.why, "fix": problem.fix} for problem in end.problems],
        "notes": list(end.notes),
    }


def _probe_document(probed: Probed) -> dict[str, Any]:
    document = asdict(probed)
    return {**document.pop("key"), **document}
