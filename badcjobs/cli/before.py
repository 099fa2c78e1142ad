"""Before a job is submitted: ``badcjobs check`` finds mistakes, ``plan`` the size, ``probe`` the best chunk length."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from badcjobs.cli.options import (
    JsonWanted,
    Root,
    Sources,
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
from badcjobs.errors import BadInput, ExitCode
from badcjobs.model import Probed, parse_stop_after
from badcjobs.paths import shell_line
from badcjobs.project import Project
from badcjobs.settings import PlanSettings, ProbeSettings, RunSettings, SubmitSettings, nearest, option_words

if TYPE_CHECKING:
    from badcjobs.cluster.job_script import ParsedWords, Parser
    from badcjobs.planning.plan import Planned
    from badcjobs.planning.probe import ProbeEnd

_INTERVAL_S = 0.1  # a trial may be short, and its memory peak shorter
SiteRules = Annotated[str | None, option("NAME|FILE", "Rules of the cluster: sockeye, or a TOML file.", "--site")]


@with_settings("submit", hidden=True)
def check(
    context: typer.Context,
    source: Sources = None,
    site: SiteRules = None,
    quick: Annotated[bool, flag("--quick", "Read SOURCE, but open no audio file.")] = False,
    json_wanted: JsonWanted = False,
    out: Annotated[str | None, typer.Option("--out", "-o", hidden=True)] = None,
    root: Annotated[str | None, typer.Option(hidden=True)] = None,
    again: Annotated[bool, typer.Option("--again", hidden=True)] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", hidden=True)] = False,
    wait: Annotated[bool, typer.Option("--wait", hidden=True)] = False,
    **settings: Any,
) -> int:
    """Find what would go wrong with a job, and how to fix it; nothing is submitted.

    Takes the line of submit with all its options; SOURCE may also be a job script. The exit code is 1 if there is a
    problem.

    Example:
      badcjobs check july.csv --out runs/july --tasks 20 --site sockeye
    """
    from badcjobs.cluster.job_script import is_job_script
    from badcjobs.planning.check import CheckOrder
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text
    from badcjobs.planning.resolve_submit import complete
    from badcjobs.planning.site import find_site

    log_to_stderr()
    project, flags = read_project(context, "run", "submit"), run_options(context, out=out, root=root)
    sources = tuple(source or project.get("run", "source") or ())
    script, run_words = None, tuple[str, ...]()
    if sources and is_job_script(sources[0]):
        script, *others = sources
        run_words = tuple(option_words(flags))
        of_line = Project.parse({}, keys=project.keys)  # a script says for itself what the file would say
        submit = of_line.make(SubmitSettings, settings, "check")
        of_run = RunSettings(out=None if out is None else Path(out), source=tuple(others))  # type: ignore[arg-type]
    else:
        # A check without SOURCE looks at everything else; the settings would be refused without one.
        of_run = project.make(RunSettings, {**flags, "source": sources or ("?",)}, "check")
        of_run = replace(of_run, source=sources)
        own = project.make(SubmitSettings, settings, "check")
        rules = find_site(site or project.site, Path.cwd(), "--site " if site else "--config site=")
        submit = complete(own, project, flags, rules, environ(), Path.cwd())
        submit = submit if sources else replace(own, merge_account=submit.merge_account)
    trust = read_trust("--config", "")
    order = CheckOrder(
        of_run, environ(), SystemClock(), Path.cwd(), submit, site or project.site, script, run_words, quick,
        Pace("chunks checked"), make_parser(context.find_root().command),
        project.make(PlanSettings, {}, "check").prefer,
        trust, None if site or "site" in project.keys else trust,
    )  # fmt: skip
    found = check_all(order)
    answer(json_wanted, found.to_dict(), remarks_text(found.findings, text_width()))
    if not json_wanted:
        run_here = shutil.which("sbatch", path=environ().get("PATH")) is None and not any(settings.values())
        name = "run" if run_here and submit.cluster == "slurm" else "submit"
        words = _after_check(
            sources, out or project.get("run", "out"), script, run_words, name=name, ready=not found.exit_code
        )
        say_next(*words, note="once the problems are fixed" if found.exit_code else "")
    return found.exit_code


def _after_check(
    sources: Sequence[str], out: object, script: str | None, run_words: Sequence[str], *, name: str, ready: bool
) -> Sequence[str | Path]:
    """Return the command that submits or runs what was checked; the same check again, if it found problems."""
    if not ready or not sources:
        return this_command(*([] if sources else ["SOURCE"]))
    if script is not None:
        given = {"SOURCE": "".join(sources[1:2]), "OUT": out or "", "BADCJOBS_ARGS": " ".join(run_words)}
        values = [f"{name}={value}" for name, value in given.items() if value]
        return *(["env", *values] if values else []), "sbatch", Path(script)
    new = [] if out else [f"--out=runs/{Path(sources[0]).stem}"]
    without = ["--quick", "--"] if name == "run" else ["--quick"]
    words = "\0".join(this_command(*new, name=name, without=without))
    return re.sub("--site[=\0]", "--config=site=", words).split("\0")


def make_parser(group: Any) -> Parser:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    from badcjobs.cluster.job_script import ParsedWords, WrongWord

    names = group.list_commands(None)

    def parse(words: Sequence[str]) -> ParsedWords:
        parsed = _parse(group, words, "")
        if parsed.wrong or not parsed.operands:
            return parsed
        word, *rest = parsed.operands
        name = word if word in names else nearest(word, names)
        misspelled = WrongWord(f"badcjobs has no command {word}", word, name or "")
        if name is None:
            return ParsedWords(wrong=misspelled)
        parsed = _parse(group.get_command(None, name), rest, name)
        wrong = parsed.wrong if name == word else misspelled
        return ParsedWords(name, parsed.values, parsed.operands, wrong)

    return parse


def _parse(command: Any, words: Sequence[str], name: str) -> ParsedWords:
    from badcjobs.cli.options import explain_moved_option
    from badcjobs.cluster.job_script import ParsedWords, WrongWord

    context = command.context_class(command, info_name=name)
    try:
        values, operands, _ = command.make_parser(context).parse_args(list(words))
    except Exception as error:
        if not hasattr(error, "format_message"):  # another error than wrong usage
            raise
        wrong = getattr(error, "option_name", None) or ""
        near = nearest(wrong, getattr(error, "possibilities", None) or ())
        message = f"badcjobs {name}: {error.format_message()}"
        if "does not take a value" in message:
            wrong, near = next((word for word in words if word.startswith(f"{wrong}=")), wrong), wrong
        elif moved := explain_moved_option(wrong, words, name):
            near = moved[1]
            pair = f"{wrong} {near.rpartition('=')[2]}"  # the option and its value, which near has at its end
            wrong = pair if pair in " ".join(words) else next(word for word in words if word.startswith(wrong))
        return ParsedWords(wrong=WrongWord(message, wrong, near or ""))
    listed = [word for value in values.values() if isinstance(value, tuple) for word in value]
    kept = {key: value for key, value in values.items() if value is not None and not isinstance(value, tuple)}
    return ParsedWords(values=kept, operands=(*listed, *operands))


def plan(
    context: typer.Context,
    source: Sources = None,
    out: Annotated[Path | None, option("DIR", "Write the shards and a job script per wave.", "--out", "-o")] = None,
    speed_from: Annotated[Path | None, option("RUN", "Measured speed: a run or a probe result.", "--from")] = None,
    rate: Annotated[float | None, option("X", "Speed in audio-hours per GPU-hour.")] = None,
    site: SiteRules = None,
    parallel: Annotated[int | None, option("N", "Tasks that run at a time [the site's limit].")] = None,
    gpus_per_task: Annotated[int | None, option("N", "GPUs of each task [the cheapest, or 1].")] = None,
    time: Annotated[str | None, option("TIME", "Time limit of each task [what it needs].")] = None,
    root: Root = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Estimate what SOURCE takes: GPU-hours, array tasks, memory, files, waves, and when it is finished.

    Lengths come from rows and audio headers alone. The exit code is 1 if the plan has a problem, such as rows left out.

    Example:
      badcjobs plan july.csv --site sockeye --rate 400 --parallel 10
    """
    from badcjobs.cli.job_signals import DelayedSignals
    from badcjobs.planning.make_plan import to_dict
    from badcjobs.planning.plan import PlanOrder, plan_sources, plan_text
    from badcjobs.report.rules import PROBLEM

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
    finished_at = None
    if planned.plan.running_s is not None:
        end_s = SystemClock().now_ms() / 1000 + planned.plan.running_s
        finished_at = datetime.fromtimestamp(end_s, tz=timezone.utc).astimezone().isoformat("T", "minutes")
    has_problem = any(remark.severity == PROBLEM for remark in planned.plan.remarks)
    if json_wanted:
        more = {
            "sources": list(planned.descriptions),
            "finished_at": finished_at,
            "folder": planned.folder and str(planned.folder),
            "scripts": [str(script) for script, _ in planned.written] or None,
        }
        print_json({**to_dict(planned.plan), **more})
    else:
        say(plan_text(planned, text_width()))
        if finished_at is not None:
            remark(f"finished on {finished_at} if the first task starts now and no task waits in the queue")
        _say_next_after_plan(planned, order.submit.account, has_problem=has_problem)
    return ExitCode.CHUNKS_FAILED if has_problem else ExitCode.DONE


def _say_next_after_plan(planned: Planned, account: str | None, *, has_problem: bool) -> None:
    """Print the command that submits what was planned, or that writes it."""
    note = "once the problems are fixed" if has_problem else ""
    if planned.written:
        script, _ = planned.written[0]
        say_next("sbatch", script, note=note)
        return
    options = []
    if not has_problem:
        options.append("--out=plan")
        ending = planned.plan.site.account_ends_with
        if ending and not account:
            options.append(f"--config=submit.account=NAME{ending}")
    say_next(*this_command(*options), note=note)


def probe(
    context: typer.Context,
    audio: Annotated[list[str], typer.Argument(metavar="AUDIO")],
    out: Annotated[Path | None, option("FILE", "Result file [probe.toml in the user's cache].", "--out", "-o")] = None,
    time: Annotated[str, option("TIME", "Stop after TIME; run it again to continue [10].")] = "10",
    again: Annotated[bool, flag("--again", "Discard earlier results.")] = False,
    html: Annotated[Path | None, option("FILE", "Write memory and speed as a page.")] = None,
    json_wanted: JsonWanted = False,
) -> int:
    """Find the longest chunk that fits each GPU model with this engine and its options, and the fastest length.

    Short recordings are repeated. Later runs read the result and cut longer chunks before they fail.

    Example:
      badcjobs probe july/night.wav --html probe.html -- --max-gpus 1
    """
    import logging

    from badcjobs.planning.plan_speed import probe_line
    from badcjobs.planning.probe import ProbeOrder, run_probe
    from badcjobs.planning.probe_page import probe_page, probe_text
    from badcjobs.report.job import write_whole
    from badcjobs.store.atomic_write import cannot_write, try_to_write
    from badcjobs.workers.learned import describe_readers

    project = read_project(context, "run", "alerts")
    most_s = parse_stop_after(time)
    if not most_s:
        raise BadInput(f"--time {time} is not a time", why="write minutes, H:M:S or D-H:M:S", fix="--time 10")
    flags = run_options(context, source=audio, interval=_INTERVAL_S)
    order = ProbeOrder(
        project.make(RunSettings, flags, "probe"),
        project.make(ProbeSettings, {}, "probe"),
        most_s=most_s,
        store=out,
        again=again,
    )
    inputs = [*map(Path, audio), *([] if project.file is None else [project.file])]
    refuse_data([("--out", out, "probe.toml"), ("--html", html, "probe.html")], inputs)
    if html is not None:
        try:
            try_to_write(html)  # before minutes of trials
        except OSError as error:
            raise cannot_write(html, error) from error
    log_to_stderr(quiet=False)
    # A chunk that does not fit is a result here, not an error; the probe logs it itself.
    for noisy in ("supervise", "stream_session"):
        logging.getLogger(f"badcjobs.workers.{noisy}").setLevel(logging.CRITICAL)
    world = read_world()
    end = run_probe(order, world)
    probes = [probed for probed in end.probes if probed.trials]
    if end.problems and not probes:
        raise end.problems[0]
    kept = f"{shown(end.store)}; {describe_readers(end.store, world.environ)}"
    answer(json_wanted, _document(end), probe_text(probes, kept, end.notes, text_width()))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        write_whole(html, probe_page(probes, end.notes))
    if not json_wanted:
        continued = this_command(without=["--again"])
        plan_words = shell_line("plan", "SOURCE", *(() if out is None else ("--from", out)))
        planned = probe_line(order.settings, order.settings.workers_wanted, None).replace("probe AUDIO", plan_words, 1)
        say(f"next: {shell_line(*continued) if end.exit_code else planned}")
    return end.exit_code


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
    trials = sorted(probed.trials, key=lambda trial: (trial.lean, trial.length_s))
    return {
        **asdict(probed.key),
        "at": probed.at,
        "finished": probed.finished,
        "result": None if probed.result is None else asdict(probed.result),
        "trials": [asdict(trial) for trial in trials],
    }
