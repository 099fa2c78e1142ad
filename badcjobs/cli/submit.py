"""``badcjobs submit``: an array and its merge job in Slurm, or an emulation of both in the foreground."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from badcjobs.cli.job_signals import BatchTask, DelayedSignals
from badcjobs.cli.options import (
    JsonWanted,
    Root,
    Sources,
    check_run_folder,
    find_stand_in,
    flag,
    option,
    read_project,
    require_out,
    run_options,
    with_settings,
)
from badcjobs.cli.output import (
    Pace,
    colour_wanted,
    log_to_stderr,
    poll_s,
    print_document,
    print_json,
    read_world,
    remark,
    say,
    say_next,
    shown,
    this_command,
)
from badcjobs.cli.results import ROWS, files_text
from badcjobs.clock import SystemClock
from badcjobs.cluster import local as emulation
from badcjobs.cluster.job_script import is_job_script, read_text
from badcjobs.cluster.local_array import LocalSettings
from badcjobs.cluster.sbatch_options import read_asked, read_options, submit_words
from badcjobs.cluster.slurm import POLL_S, array_script, cancel_line, has_ended, merge_script, query_states
from badcjobs.cluster.submit import ArrayPlan, RunCommand, SubmitResult, find_record, make_plan, submit_or_find
from badcjobs.cluster.wait_for_job import EXIT_CODES, Ends, end_lines, evaluate_job, follow, headline
from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.project import Project, find_project_file
from badcjobs.report.summary import Summary
from badcjobs.report.text import summary_text
from badcjobs.report.words import count, plain
from badcjobs.seams import Clock, Unanswered
from badcjobs.settings import AUTO, SETTINGS, PlanSettings, RunSettings, SubmitSettings, refuse
from badcjobs.store.submission_record import read_intent, read_record

# Variables of a job that another job must not inherit, besides those of Slurm.
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "TMPDIR")
Facts = dict[str, Any]  # the document of --json
# Keys of [submit] that have no effect on a job script, which has its own lines for them.
_NOT_FOR_SCRIPTS = ("setup", "merge_account", "merge_mem", "merge_time")


@dataclass(frozen=True, slots=True)
class SubmitFlags:
    """The flags of the command line."""

    dry_run: bool
    wait: bool
    again: bool
    json_wanted: bool


@with_settings("submit")
def submit(
    context: typer.Context,
    source: Sources = None,
    out: Annotated[str | None, option("DIR", "Run folder.", "--out", "-o")] = None,
    root: Root = None,
    again: Annotated[bool, flag("--again", "Submit what is left after the job has ended.")] = False,
    dry_run: Annotated[bool, flag("--dry-run", "Print the sbatch text; submit nothing.")] = False,
    wait: Annotated[bool, flag("--wait", "Follow the job; exit with its verdict.")] = False,
    json_wanted: JsonWanted = False,
    **settings: Any,
) -> int:
    """Submit SOURCE as an array of tasks, and a job that merges their results.

    The same command finds its job again and never submits it twice. With --cluster local, SOURCE may be a job script.

    Example:
      badcjobs submit july/ --out runs/july --tasks 20 -- --chunk-length 294
    """
    log_to_stderr()
    project = read_project(context, "run", "submit", "alerts")
    mistakes: list[str] = []
    flags = run_options(context, source=source, out=out, root=root)
    place = None if again else flags.get("out") or project.get("run", "out")
    options = project.make(SubmitSettings, settings, "submit", mistakes)
    options = complete(options, project, flags, place=place and Path.cwd() / place)
    how = SubmitFlags(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted)
    sources = flags.get("source") or project.get("run", "source") or ()
    requeues = project.get("submit", "requeues") or 0  # a script; an order has its own number
    local = LocalSettings(
        share_gpus=options.share_gpus, max_requeues=requeues, kill_wait_s=options.kill_wait_s, again=again
    )
    if project.file is not None and not json_wanted:
        remark(f"settings: {replace(project, file=Path(shown(project.file))).origin}")
    if sources and is_job_script(sources[0]):
        refuse(mistakes, "badcjobs submit --help")
        of_line = Project.parse({}, keys=project.keys)  # a script says for itself what the file would say
        own = of_line.make(SubmitSettings, {**settings, "cluster": options.cluster}, "submit")
        return _submit_script(sources, flags, project, own, local, how)
    check_run_folder(require_out(project.get("run", "out") if out is None else out, "submit"), project, "", "logs")
    if options.cluster == "local":
        return _submit_here((flags, project), options, local, how, mistakes)
    return _submit_to_slurm((flags, project), options, how, mistakes)


def complete(
    options: SubmitSettings, project: Project, flags: Mapping[str, Any], site: str | None = None,
    place: Path | None = None, *, fit: bool = False,
) -> SubmitSettings:  # fmt: skip
    """Return the options with what is not given: the account of the merge job, cores and memory for the workers.

    The merge is paid by the account without the site's ending for GPUs. ``place``: a run folder, whose job keeps what
    it was submitted with, whatever was learned since. ``fit``: at most the GPUs of a node.
    """
    from badcjobs.planning.bill import usual_request
    from badcjobs.planning.site import find_site

    name, account = site or project.site, options.account or ""
    rules = find_site(name, Path.cwd(), "--site " if site else "--config site=")
    if rules.account_ends_with and options.merge_account is None and account.endswith(rules.account_ends_with):
        options = replace(options, merge_account=account.removesuffix(rules.account_ends_with))
    if fit and rules.node_gpus:
        options = replace(options, gpus_per_task=min(options.gpus_per_task or 1, rules.node_gpus))
    known = None if place is None else (read_intent(place) or (None, read_record(place)))[1]
    if known is not None and known.asked is not None:
        return replace(
            options, cpus=options.cpus or known.asked.get("--cpus"), mem=options.mem or known.asked.get("--mem")
        )
    if options.gpus_per_task == 0 or options.cluster == "local":
        return options
    usual = {"source": ("?",), "workers_per_gpu": project.get("run", "workers_per_gpu") or AUTO}
    settings = project.make(RunSettings, {**usual, **flags}, "submit", [])  # mistakes are found later
    prefer = project.make(PlanSettings, {}, "submit").prefer
    choice = usual_request(options, prefer, settings, rules, os.environ, Path.cwd())
    return replace(options, cpus=options.cpus or choice.cpus, mem=options.mem or f"{choice.mem_gb}G")


# --- under Slurm ------------------------------------------------------------------------------------------------------


def _submit_to_slurm(command: RunCommand, options: SubmitSettings, how: SubmitFlags, mistakes: Sequence[str]) -> int:
    """Submit a source as an array with its merge job, or find the existing job; return the exit code."""
    clock = SystemClock()
    every_s = poll_s(POLL_S)
    pace, keep = Pace(ROWS), not how.dry_run
    plan = make_plan(command, options, Path.cwd(), clock, pace, again=how.again, keep=keep, mistakes=mistakes)
    if plan.finished is not None:
        return _report_slurm_end({}, plan.finished, plan.finished.verdict, (), how)
    if how.dry_run:
        record = find_record(plan, again=how.again)
        if record is not None:
            remark(f"{plan.order.out} already has job {record.job.job_id}: this command would submit nothing")
        elif plan.idle:
            remark(_notes(plan)["tasks"])
        _say_bill(command, options)
        return _show_scripts(how, script=array_script(plan.order), merge_script=merge_script(plan.order))
    if how.again and plan.redo_all:
        remark("--no-resume: chunks that are done will be done again")
    with _outside_any_job():
        with DelayedSignals("sbatch is submitting the job; waiting for its answer") as held:
            result = submit_or_find(plan, BatchTask, clock, again=how.again, hold=held.begin)
            facts = _facts(result)
            if not how.json_wanted:
                say(_result_text(facts, result))
            if held.came is not None:
                remark(f"{held.came.name}: job {result.job.job_id} continues; the same command finds it again")
        return _follow_up(result, facts, clock, every_s, how)


def _say_bill(command: RunCommand, options: SubmitSettings) -> None:
    """Print what a task is billed, as check does."""
    from badcjobs.planning.bill import FASTEST, usual_request
    from badcjobs.planning.check import for_submit
    from badcjobs.planning.preflight_facts import PreflightFacts
    from badcjobs.planning.request_rules import BILLING
    from badcjobs.planning.site import find_site

    flags, project = command
    site, settings = find_site(project.site, Path.cwd()), project.make(RunSettings, flags, "submit")
    gpus = 1 if options.gpus_per_task is None else options.gpus_per_task
    asked = read_asked(read_options(submit_words(replace(options, gpus_per_task=gpus)), []), {}, [])
    need = usual_request(replace(options, mem=None), FASTEST, settings, site, os.environ, Path.cwd())
    workers = settings.workers_wanted and need.gpus * need.workers
    for one in BILLING(PreflightFacts(asked=asked, site=site, needed_gb=need.mem_gb, workers=workers)):
        remark(f"billing: {one.text}" + (f"\n  try: {for_submit(one.fix)}" if one.fix else ""))


def _follow_up(result: SubmitResult, facts: Facts, clock: Clock, every_s: float, how: SubmitFlags) -> int:
    """Print how the job ended, with --wait or if it has already ended."""
    states = None
    try:
        if how.wait:
            states = follow(result, clock, every_s, remark)
        elif result.found:
            states = query_states(result.job)
    except KeyboardInterrupt:
        remark(f"job {result.job.job_id} continues; the same command waits for it again")
        raise
    except Unanswered as error:
        remark(f"Slurm does not answer, so it is not known whether the job has ended: {error}")
    if states is None or not (how.wait or has_ended(states)):
        if how.json_wanted:
            print_json(facts)
        else:
            say_next("badcjobs", "monitor", result.plan.order.out)
        return 0
    return _report_slurm_end(facts, *evaluate_job(result, states, clock, Pace(ROWS)), how)


def _facts(result: SubmitResult) -> Facts:
    """Return the document of ``--json`` for a submitted job."""
    order, job, merge = result.plan.order, result.job, result.merge
    ids = ",".join(filter(None, [job.job_id, job.merge_job_id]))
    return {
        "cluster": "slurm",
        "job_id": job.job_id,
        "merge_job_id": job.merge_job_id,
        "merge_refused": merge.said if merge and merge.job_id is None else None,
        "merge_unsure": merge is not None and not merge.sure,
        "out": str(order.out),
        "logs": str(order.logs),
        "array": order.spec,
        "tasks": len(job.indices),
        "chunks": result.plan.chunks,
        "idle_tasks": result.plan.idle,
        "left": result.plan.left,
        "audio_looked_at": result.plan.looked_at,
        "found": result.found,
        "follow": [f"squeue -j {ids}", f"tail -F {shell_line(order.logs)}/{job.job_id}_*_log.out"],
        "cancel": cancel_line(job),
    }


def _result_text(facts: Facts, result: SubmitResult) -> str:
    said = "exists already" if facts["found"] else "is submitted"
    merging = f", merge job {facts['merge_job_id']}" if facts["merge_job_id"] else ""
    chunks = count(facts["chunks"], "chunk")
    if facts["left"] is not None:
        chunks = f"the {facts['left']:,} of {chunks} that {'was' if facts['left'] == 1 else 'were'} left"
    merge = None
    if facts["merge_unsure"]:
        merge = "it is not known whether the merge job exists; the same command in a minute looks for it"
    elif facts["merge_job_id"] is None:
        merge = f"there is no merge job; later: badcjobs merge {shell_line(Path(facts['out']))}"
    lines = {
        "folder": facts["out"],
        **({} if result.found else _notes(result.plan)),
        "merge": merge,
        **dict(zip(("queue", "logs"), facts["follow"], strict=True)),
    }
    head = f"job {facts['job_id']} {said}: {count(facts['tasks'], 'array task')} for {chunks}{merging}"
    return "\n".join([head, *(f"  {name:<11} {words}" for name, words in lines.items() if words)])


def _report_slurm_end(facts: Facts, summary: Summary, verdict: str, ends: Ends, how: SubmitFlags) -> int:
    code = int(EXIT_CODES[verdict])
    if how.json_wanted:
        end = {"verdict": verdict, "exit_code": code, "task_ends": [end.to_dict() for end in ends]}
        print_json({**facts, **end, "summary": summary.to_dict()})
    else:
        _say_end(facts.get("job_id", ""), verdict, ends, summary)
    return code


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the variables of an outer job: sbatch would pass its array index and its GPUs on to the new job."""
    if "SLURM_JOB_ID" not in os.environ:
        yield  # keep a user's own SBATCH_ACCOUNT
        return
    from submitit.helpers import clean_env

    where = os.environ.get("SLURM_CONF")  # the configuration of Slurm, not of the job
    with clean_env(_OF_THE_JOB):
        if where is not None:
            os.environ["SLURM_CONF"] = where
        yield


# --- on this machine --------------------------------------------------------------------------------------------------


def _submit_here(
    command: RunCommand, options: SubmitSettings, settings: LocalSettings, how: SubmitFlags, mistakes: Sequence[str]
) -> int:
    """Run a source as an array on this machine; exit with its verdict."""
    world = read_world()
    plan = make_plan(command, options, world.cwd, world.clock, Pace(ROWS), find=False, mistakes=mistakes)
    for words in () if how.json_wanted else _notes(plan).values():
        remark(words)
    if how.dry_run:
        emulation.check_run_folder(plan.order.out, again=how.again)
        return _show_scripts(how, script=emulation.script_of(plan.order))
    flags, project = command
    devices = find_stand_in(project, flags.get("simulate"))
    settings = replace(settings, stand_in=devices, chunks=0 if plan.order.only else plan.chunks)
    done = emulation.emulate_order(plan.order, settings, world, remark)
    facts = {"chunks": plan.chunks, "idle_tasks": plan.idle, "audio_looked_at": plan.looked_at}
    return _report_local_end(done, how, facts)


def _submit_script(
    sources: Sequence[str],
    flags: Mapping[str, Any],
    project: Project,
    options: SubmitSettings,
    settings: LocalSettings,
    how: SubmitFlags,
) -> int:
    """Run a user's job script on this machine as sbatch would; exit with its verdict."""
    script, *others = sources
    name = shell_line(Path(script))
    if options.cluster != "local":
        raise BadInput(
            f"{script} is a job script, and --cluster is slurm", why="sbatch submits a script", fix=f"sbatch {name}"
        )
    lost = [f"[submit] {key}" for key in _NOT_FOR_SCRIPTS if f"submit.{key}" in project.keys]
    if flags.get("root") is not None:
        lost.append("--root")
    if lost:
        raise BadInput(
            f"{', '.join(lost)}: not with a job script",
            why="the script itself starts badcjobs and has its own lines for this",
            fix=f"edit {name}, or submit without it: badcjobs submit SOURCE --out DIR …",
        )
    if len(others) > 1:
        raise BadInput(
            f"{len(others)} sources, but a job script takes one",
            why="the script gets it in the variable SOURCE, which is one path",
            fix="write the paths into a text file, one per line, and give that file as SOURCE",
        )
    words = tuple(submit_words(options))
    if options.parallel is not None and not any(word.startswith("--array=") for word in words):
        raise BadInput("--parallel needs --tasks if SOURCE is a job script", fix="--tasks 10 --parallel 4")
    world = read_world()
    word = None if project.file == find_project_file(world.cwd) else project.word  # that one it reads by itself
    out, usual_out = (None if one is None else Path(one) for one in (flags.get("out"), project.get("run", "out")))
    given = {key: value for key, value in flags.items() if key in SETTINGS["run"] and key not in ("source", "out")}
    order = emulation.ScriptOrder(
        Path(script),
        words,
        source=others[0] if others else None,
        out=out,
        usual_out=usual_out,
        arguments=tuple(replace(project, word=word).run_words(given, world.cwd)),
    )
    if how.dry_run:
        emulation.check_script_folder(order, world, again=how.again)
        return _show_scripts(how, script=read_text(order.script, world.cwd))
    devices = find_stand_in(project, flags.get("simulate"))
    done = emulation.emulate_script(order, replace(settings, stand_in=devices), world, remark)
    return _report_local_end(done, how, {})


def _report_local_end(done: emulation.Emulation, how: SubmitFlags, facts: Mapping[str, Any]) -> int:
    if how.json_wanted:
        print_json({**done.to_dict(), **facts})
    elif done.job is not None:
        _say_end(done.job_id, done.verdict, done.rows, done.job.summary, [files_text(done.job)])
    else:
        say(f"job {done.job_id}: {done.verdict}")
        if done.exit_code:
            say_next(*this_command())
    return done.exit_code


# --- on both ----------------------------------------------------------------------------------------------------------


def _say_end(job_id: str, verdict: str, ends: Ends, summary: Summary, files: Sequence[str] = ()) -> None:
    """Print the tasks that did not complete, and the summary; the tasks come first if every chunk is done."""
    words = headline(job_id, verdict, ends) if summary.verdict == "done" else None
    lines = [f"  {plain(line)}" for line in end_lines(job_id, ends)]
    title = "the complete run" if verdict != summary.verdict else f"job {job_id}" if job_id else "the job"
    text = summary_text(summary, title, colour=colour_wanted(), more=[*([] if words else lines), *files])
    say("\n".join([words, *lines, "", text] if words else [text]), painted=True)


def _notes(plan: ArrayPlan) -> dict[str, str]:
    """Return notes about a plan: tasks that have nothing to do, and audio that was not checked."""
    notes = {}
    if plan.idle:
        idle = f"{plan.idle:,} {'has' if plan.idle == 1 else 'have'} nothing to do; --tasks {plan.chunks} is enough"
        notes["tasks"] = f"{plan.order.tasks:,} tasks for {count(plan.chunks, 'chunk')}: {idle}"
    if plan.looked_at is not None and plan.looked_at < plan.chunks:
        looked_at = f"{plan.looked_at:,} of {plan.chunks:,} chunks"
        notes["checked"] = f"checked the audio of {looked_at}; badcjobs check opens all"
    return notes


def _show_scripts(how: SubmitFlags, **scripts: str) -> int:
    """Print what would be submitted; change nothing."""
    if how.json_wanted:
        print_json(scripts)
    else:
        between = "\n# ---- the merge job: sbatch --dependency=afterany:JOB ----\n"
        print_document(between.join(scripts.values()).rstrip("\n"))
        remark(f"next: {shell_line(*this_command(without=['--dry-run']))}")
    return 0
