"""``badcjobs submit``: an array and its merge job in Slurm, or an emulation of both in the foreground.

    read_project          read the settings file; options of run come after --
    check_run_folder      refuse to continue the run of a user who is not trusted
    resolve_submit        complete the options for this site, read the source, and make the order of the array
    plan_what_is_left     with --again: merge, and keep only the array tasks with work left
    submit_or_find        submit the array and its merge job, or find the job that this run folder already has
    follow                with --wait: ask Slurm until all tasks have ended
    evaluate_job          merge what is new; decide on the verdict, from which the exit code follows

With --cluster local, emulate_order runs the array here after the third step; a job script needs no order, and
emulate_script runs it. --dry-run prints the scripts instead of the fifth step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

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
    other_command,
    read_project,
    require_out,
    run_options,
    with_settings,
)
from badcjobs.cli.output import (
    Pace,
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
from badcjobs.cli.results import ROWS, files_text, say_summary
from badcjobs.clock import SystemClock
from badcjobs.cluster import local as emulation
from badcjobs.cluster.array_script import array_script, merge_script
from badcjobs.cluster.job_script import is_job_script
from badcjobs.cluster.local_task import LocalSettings
from badcjobs.cluster.sbatch_options import submit_words
from badcjobs.cluster.scheduler import EXIT_CODES, POLL_S, Ends, end_lines, has_ended, headline
from badcjobs.cluster.slurm import Slurm
from badcjobs.cluster.submit import SubmitResult, find_record, plan_what_is_left, submit_or_find
from badcjobs.cluster.wait_for_job import evaluate_job, follow
from badcjobs.devices.allocation import is_in_slurm, without_job
from badcjobs.model import StandIn
from badcjobs.paths import shell_line
from badcjobs.planning.resolve_submit import ResolvedSubmit, SubmitWish, bill_lines, resolve_submit
from badcjobs.project import Project, find_project_file
from badcjobs.report.document import document_of
from badcjobs.report.summary import Summary
from badcjobs.seams import Clock, Environ, Unanswered
from badcjobs.settings import SETTINGS, SubmitSettings, refuse
from badcjobs.words import count, plain

Facts = dict[str, Any]  # the document of --json
# Keys of [submit] that have no effect on a job script, which has its own lines for them.
_NOT_FOR_SCRIPTS = ("setup", "merge_account", "merge_mem", "merge_time")


class SubmitFlags(NamedTuple):
    """The flags of the command line."""

    dry_run: bool
    wait: bool
    again: bool
    json_wanted: bool


@with_settings("submit")
def submit(
    context: typer.Context,
    source: Sources = None,
    out: str | None = option("DIR", "Run folder.", "--out", "-o"),
    root: Root = None,
    again: bool = flag("--again", "Submit what is left after the job has ended."),
    dry_run: bool = flag("--dry-run", "Print the sbatch text; submit nothing."),
    wait: bool = flag("--wait", "Follow the job; exit with its verdict."),
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
    flags = run_options(context, source=source, out=out, root=root)
    mistakes: list[str] = []
    options = project.make(SubmitSettings, settings, "submit", mistakes)
    how = SubmitFlags(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted)
    if project.file is not None and not json_wanted:
        remark(f"settings: {shown(project.file)}")

    sources = flags.get("source") or project.get("run", "source") or ()
    if sources and is_job_script(sources[0]):
        refuse(mistakes, "badcjobs submit --help")
        return _submit_script(sources, flags, project, settings, options, how)
    check_run_folder(require_out(project.get("run", "out") if out is None else out, "submit"), project, "", "logs")
    resolved = resolve_submit(SubmitWish(flags, options, project, Path.cwd(), os.environ, again, mistakes, Pace(ROWS)))
    if options.cluster == "local":
        return _submit_here(resolved, find_stand_in(project, flags.get("simulate")), how)
    return _submit_to_slurm(resolved, how)


def _local_settings(options: SubmitSettings, stand_in: StandIn, how: SubmitFlags, **more: int) -> LocalSettings:
    return LocalSettings(
        stand_in,
        share_gpus=options.share_gpus,
        kill_wait_s=options.kill_wait_s,
        again=how.again,
        **more,
    )


# --- under Slurm ------------------------------------------------------------------------------------------------------


def _submit_to_slurm(resolved: ResolvedSubmit, how: SubmitFlags) -> int:
    """Submit a source as an array with its merge job, or find the existing job; return the exit code."""
    clock = SystemClock()
    every_s = poll_s(POLL_S)
    plan = resolved.plan
    if how.again:
        plan = plan_what_is_left(plan, clock)
    if plan.finished is not None:
        return _report_slurm_end({}, plan.finished, plan.finished.verdict, (), how)
    if how.dry_run:
        record = find_record(plan, again=how.again)
        if record is not None:
            remark(f"{plan.order.out} already has job {record.job.job_id}: this command would submit nothing")
        for line in bill_lines(resolved, os.environ, Path.cwd()):
            remark(line)
        return _show_scripts(how, script=array_script(plan.order), merge_script=merge_script(plan.order))
    if how.again and plan.redo_all:
        remark("--no-resume: chunks that are done will be done again")
    slurm = Slurm(BatchTask, environ=_environ_of_sbatch())
    with DelayedSignals("sbatch is submitting the job; waiting for its answer") as held:
        submitted = submit_or_find(plan, slurm, clock, again=how.again, hold=held.begin)
        facts = _facts(submitted)
        if not how.json_wanted:
            say(_result_text(facts, submitted))
        if held.came is not None:
            remark(f"{held.came.name}: job {submitted.job.job_id} continues; the same command finds it again")
    return _follow_up(submitted, facts, clock, every_s, how)


def _follow_up(result: SubmitResult, facts: Facts, clock: Clock, every_s: float, how: SubmitFlags) -> int:
    """Print how the job ended, with --wait or if it has already ended."""
    states = None
    try:
        if how.wait:
            states = follow(Slurm(), result, clock, every_s, remark)
        elif result.found:
            states = Slurm().states(result.job)
    except KeyboardInterrupt:
        remark(f"job {result.job.job_id} continues; the same command waits for it again")
        raise
    except Unanswered as error:
        remark(f"Slurm does not answer, so it is not known whether the job has ended: {error}")
    if states is None or not (how.wait or has_ended(states)):
        if how.json_wanted:
            print_json(facts)
        else:
            say_next(*other_command("monitor", result.plan.order.out))
        return 0
    return _report_slurm_end(facts, *evaluate_job(Slurm(), result, states, clock, Pace(ROWS)), how)


def _facts(result: SubmitResult) -> Facts:
    """Return the document of ``--json`` for a submitted job."""
    order = result.plan.order
    job = result.job
    merge = result.merge
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
        "chunks": result.plan.survey.chunks,
        "left": result.plan.left,
        "audio_looked_at": result.plan.survey.looked_at,
        "found": result.found,
        "follow": [f"squeue -j {ids}", f"tail -F {shell_line(order.logs)}/{job.job_id}_*_log.out"],
        "cancel": Slurm().cancel_line(job),
    }


def _result_text(facts: Facts, result: SubmitResult) -> str:
    chunks = count(facts["chunks"], "chunk")
    if facts["left"] is not None:
        chunks = f"what is left, {facts['left']:,} of {chunks}"
    state = "is submitted"
    if facts["found"]:
        state = "exists already"
    head = f"job {facts['job_id']} {state}: {count(facts['tasks'], 'array task')} for {chunks}"
    if facts["merge_job_id"]:
        head += f", merge job {facts['merge_job_id']}"

    rows = {"folder": facts["out"]}
    if not result.found:
        rows |= result.plan.survey.notes
    if facts["merge_unsure"]:
        rows["merge"] = "it is not known whether the merge job exists; the same command in a minute looks for it"
    elif facts["merge_job_id"] is None:
        rows["merge"] = f"there is no merge job; later: {shell_line(*other_command('merge', Path(facts['out'])))}"
    rows["queue"], rows["logs"] = facts["follow"]
    return "\n".join([head, *(f"  {name:<11} {text}" for name, text in rows.items())])


def _report_slurm_end(facts: Facts, summary: Summary, verdict: str, ends: Ends, how: SubmitFlags) -> int:
    code = int(EXIT_CODES[verdict])
    if how.json_wanted:
        end = {"verdict": verdict, "exit_code": code, "task_ends": [end.to_dict() for end in ends]}
        print_json({**facts, **end, "summary": document_of(summary)})
    else:
        _say_end(facts.get("job_id", ""), verdict, ends, summary)
    return code


def _environ_of_sbatch() -> Environ:
    """Return our variables; without those of an outer job, which sbatch would pass on to the new job."""
    if not is_in_slurm(os.environ):
        return os.environ  # with a user's own SBATCH_ACCOUNT
    return {name: value for name, value in without_job(os.environ).items() if name != "TMPDIR"}


# --- on this machine --------------------------------------------------------------------------------------------------


def _submit_here(resolved: ResolvedSubmit, devices: StandIn, how: SubmitFlags) -> int:
    """Run a source as an array on this machine; exit with its verdict."""
    world = read_world()
    plan = resolved.plan
    if not how.json_wanted:
        for note in plan.survey.notes.values():
            remark(note)
    if how.dry_run:
        return _show_scripts(how, script=emulation.script_of(plan.order))
    chunks = 0 if plan.order.only else plan.survey.chunks
    settings = _local_settings(resolved.options, devices, how, chunks=chunks)
    done = emulation.emulate_order(plan.order, settings, world, remark)
    facts = {"chunks": plan.survey.chunks, "audio_looked_at": plan.survey.looked_at}
    return _report_local_end(done, how, facts)


def _submit_script(
    sources: Sequence[str],
    flags: Mapping[str, Any],
    project: Project,
    given: Mapping[str, Any],
    options: SubmitSettings,
    how: SubmitFlags,
) -> int:
    """Run a user's job script on this machine as sbatch would; exit with its verdict.

    ``given``: the options of the command line alone; a script says for itself what the project file would say.
    """
    order = _script_order(sources, flags, project, {**given, "cluster": options.cluster})
    world = read_world()
    if how.dry_run:
        return _show_scripts(how, script=emulation.read_user_script(order, world))
    devices = find_stand_in(project, flags.get("simulate"))
    requeues = project.get("submit", "requeues") or 0
    settings = _local_settings(options, devices, how, max_requeues=requeues)
    done = emulation.emulate_script(order, settings, world, remark)
    return _report_local_end(done, how, {})


def _script_order(
    sources: Sequence[str], flags: Mapping[str, Any], project: Project, given: Mapping[str, Any]
) -> emulation.ScriptOrder:
    """Return what to run; refuse options that have no effect on a job script."""
    script, *audio = sources
    options = Project.parse({}, keys=project.keys).make(SubmitSettings, given, "submit")
    sbatch_words = tuple(submit_words(options))
    mistakes = []
    if options.cluster != "local":
        mistakes.append(f"{script} is a job script: submit it with sbatch, or run it here with --cluster local")
    lost = [f"[submit] {key}" for key in _NOT_FOR_SCRIPTS if f"submit.{key}" in project.keys]
    if flags.get("root") is not None:
        lost.append("--root")
    if lost:
        mistakes.append(f"{', '.join(lost)}: not with a job script, which has its own lines for this")
    if len(audio) > 1:
        mistakes.append(f"{len(audio)} sources: a job script takes one, such as a text file with the paths")
    if options.parallel is not None and options.tasks is None:
        mistakes.append("--parallel needs --tasks if SOURCE is a job script")
    refuse(mistakes, "badcjobs guide local", f"{script} cannot be run like this")
    cwd = Path.cwd()
    if project.file == find_project_file(cwd):
        project = replace(project, word=None)  # the badcjobs in the script reads it by itself
    of_run = {key: value for key, value in flags.items() if key in SETTINGS["run"] and key not in ("source", "out")}
    out = flags.get("out")
    return emulation.ScriptOrder(
        Path(script),
        sbatch_words,
        source=next(iter(audio), None),
        out=out and cwd / out,
        arguments=tuple(project.run_words(of_run, cwd)),
    )


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
    title = f"job {job_id}" if job_id else "the job"
    if verdict != summary.verdict:
        title = "the complete run"
    tasks = [f"  {plain(line)}" for line in end_lines(job_id, ends)]
    head = headline(job_id, verdict, ends)
    if head is not None and summary.verdict == "done":
        say("\n".join([head, *tasks, ""]))
        tasks = []
    say_summary(summary, title, [*tasks, *files])


def _show_scripts(how: SubmitFlags, **scripts: str) -> int:
    """Print what would be submitted; change nothing."""
    if how.json_wanted:
        print_json(scripts)
    else:
        between = "\n# ---- the merge job: sbatch --dependency=afterany:JOB ----\n"
        print_document(between.join(scripts.values()))
        remark(f"next: {shell_line(*this_command(without=['--dry-run']))}")
    return 0
