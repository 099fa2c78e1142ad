"""Before a job is submitted: ``badcjobs check`` finds mistakes, ``plan`` the size, ``probe`` the best chunk length."""

from __future__ import annotations

import re
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
    this_command,
)
from badcjobs.clock import SystemClock
from badcjobs.errors import BadInput, ExitCode
from badcjobs.model import parse_stop_after
from badcjobs.paths import shell_line
from badcjobs.project import Project
from badcjobs.settings import PlanSettings, ProbeSettings, RunSettings, SubmitSettings, nearest, option_words

if TYPE_CHECKING:
    from badcjobs.cluster.job_script import ParsedWords, Parser
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
    from badcjobs.cli.submit import complete
    from badcjobs.cluster.job_script import is_job_script
    from badcjobs.planning.check import CheckOrder
    from badcjobs.planning.check import check as check_all
    from badcjobs.planning.findings import remarks_text

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
        submit = complete(own, project, flags, site)
        submit = submit if sources else replace(own, merge_account=submit.merge_account)
    trust = read_trust("--config", "")
    order = CheckOrder(
        of_run, environ(), SystemClock(), Path.cwd(), submit, site or project.site, script, run_words, quick,
        Pace("chunks checked"), make_parser(context.find_root().command),
        project.make(PlanSettings, {}, "check").prefer,
        trust, None if site or "site" in project.keys else trust,
    )  # fmt: skip
    found = check_all(order)
    answer(json_wanted, found.to_dict(), remarks_text(found.findings))
    if not json_wanted:
        words = _after_check(sources, out or project.get("run", "out"), script, run_words, ready=not found.exit_code)
        say_next(*words, note="once the problems are fixed" if found.exit_code else "")
    return found.exit_code


def _after_check(
    sources: Sequence[str], out: object, script: str | None, run_words: Sequence[str], *, ready: bool
) -> Sequence[str | Path]:
    """Return the command that submits what was checked; the same check again, if it found problems."""
    if not ready or not sources:
        return this_command(*([] if sources else ["SOURCE"]))
    if script is not None:
        given = {"SOURCE": "".join(sources[1:2]), "OUT": out or "", "BADCJOBS_ARGS": " ".join(run_words)}
        values = [f"{name}={value}" for name, value in given.items() if value]
        return *(["env", *values] if values else []), "sbatch", Path(script)
    new = [] if out else [f"--out=runs/{Path(sources[0]).stem}"]
    words = "\0".join(this_command(*new, name="submit", without=["--quick"]))
    return re.sub("--site[=\0]", "--config=site=", words).split("\0")


def make_parser(group: Any) -> Parser:
    """Return a function that parses words of a script as the program itself would; nothing is run."""
    from badcjobs.cluster.job_script import ParsedWords

    names = group.list_commands(None)

    def parse(words: Sequence[str]) -> ParsedWords:
        found = _parse(group, words, "")
        if found.wrong or not found.operands:
            return found
        given, *rest = found.operands
        name = given if given in names else nearest(given, names)
        if name is None:
            return ParsedWords(wrong=(f"badcjobs has no command {given}", given, ""))
        parsed = _parse(group.get_command(None, name), rest, name)
        wrong = (f"badcjobs has no command {given}", given, name) if name != given else parsed.wrong
        return ParsedWords(name, parsed.values, parsed.operands, wrong)

    return parse


def _parse(command: Any, words: Sequence[str], name: str) -> ParsedWords:
    from badcjobs.cli.options import explain_moved_option
    from badcjobs.cluster.job_script import ParsedWords, parse_plainly

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
        return ParsedWords(values=parse_plainly(words).values, wrong=(message, wrong, near or ""))
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
    asked = {"parallel": parallel, "gpus_per_task": gpus_per_task, "time": time}
    order = PlanOrder(
        flags=run_options(context, source=source, root=root),
        project=project,
        submit=project.make(SubmitSettings, asked, "plan"),
        plan=project.make(PlanSettings, {}, "plan"),
        site=site or project.site,
        rate=rate,
        speed_from=speed_from,
        out=out,
    )
    with DelayedSignals():  # so that the unfinished folder of --out is removed, whatever ends this
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
            remark(f"finished on {ends} if the first task starts now and no task waits in the queue")
    has_problem = any(one.severity == PROBLEM for one in made.remarks)
    fixed = "once the problems are fixed" if has_problem else ""
    if not json_wanted and planned.written:
        say_next("sbatch", planned.written[0][0], note=fixed)
    elif not json_wanted:
        ending = None if order.submit.account else made.site.account_ends_with
        words = ["--out=plan", *([f"--config=submit.account=NAME{ending}"] if ending else [])]
        say_next(*this_command(*([] if has_problem else words)), note=fixed)
    return ExitCode.CHUNKS_FAILED if has_problem else ExitCode.DONE


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
    known = [probed for probed in end.probes if probed.trials]
    if end.problems and not known:
        raise end.problems[0]
    kept = f"{shown(end.store)}; {describe_readers(end.store, world.environ)}"
    answer(json_wanted, _document(end), probe_text(known, kept, end.notes))
    for problem in end.problems:
        logging.getLogger(__name__).error("%s", problem)
    if html is not None:
        write_whole(html, probe_page(known, end.notes))
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
