"""``badcjobs submit``: an array and its merge job under Slurm, or an emulation of both in the foreground."""

from __future__ import annotations

import math
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from badcjobs.cli.job_signals import BatchTask, HeldSignals
from badcjobs.cli.options import ConfigWords, JsonWanted, Sources, with_settings
from badcjobs.cli.output import (
    Pace,
    colour_wanted,
    environ,
    hand_out,
    log_to_stderr,
    print_json,
    read_world,
    remark,
    say,
)
from badcjobs.cli.results import files_text
from badcjobs.clock import SystemClock
from badcjobs.cluster.array_options import ArrayOptions
from badcjobs.cluster.local import (
    Emulation,
    LocalScheduler,
    ScriptOrder,
    emulate_order,
    emulate_script,
    refuse_here,
    refuse_script_here,
    script_text,
)
from badcjobs.cluster.local_array import LocalSettings
from badcjobs.cluster.slurm import POLL_S, SlurmScheduler, has_ended
from badcjobs.cluster.submit import ArrayPlan, Handed, RunCommand, find_record, hand_in, make_plan
from badcjobs.cluster.wait_for_job import EXIT_CODES, TaskOutcome, end_lines, follow, headline, judge
from badcjobs.errors import BadInput
from badcjobs.report.summary import Summary
from badcjobs.report.text import summary_text
from badcjobs.report.words import count, plain
from badcjobs.seams import Clock, Unanswered
from badcjobs.settings import Config, make_settings, stand_in

_POLL = "BADCJOBS_POLL_S"  # for a cluster of one's own; everybody else asks every 30 s
# What a job has of its own and another one must not inherit, besides Slurm's variables.
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "TMPDIR")
# Of submit: what a job script says for itself, and what only a job under Slurm has.
_NOT_OF_SCRIPTS = ("setup", "merge_account", "merge_mem", "merge_time")
# Of run: what reaches a script, or the emulation; all others are for the badcjobs that the script starts.
_FOR_SCRIPTS = ("source", "simulate", "simulate_script", "replay")
# What only the emulation takes, and what to do instead under Slurm.
_OF_THE_EMULATION = {
    "--script": "sbatch {}",
    "--share-gpus": "--workers-per-gpu auto   (as many engines on each GPU as pay)",
    "--kill-wait": "scontrol show config | grep KillWait   (it is set for the whole cluster)",
}
_ROWS = "rows of the source read"
Clusters = Literal["slurm", "local"]


@dataclass(frozen=True, slots=True)
class SubmitFlags:
    """What is wanted of the job besides its being submitted."""

    dry_run: bool
    wait: bool
    again: bool
    json_wanted: bool


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
    log_to_stderr(quiet=True)
    options = ArrayOptions(
        tasks, array, parallel, gpus_per_task, cpus, mem, time, account, partition, constraint, tuple(sbatch or ()),
        job_name, tuple(setup or ()), requeues, merge_account, merge_mem, merge_time,
    )  # fmt: skip
    given = {"source": source, "workers_per_gpu": workers_per_gpu, **of_run}
    flags = {key: value for key, value in given.items() if value is not None}
    how = SubmitFlags(dry_run=dry_run, wait=wait, again=again, json_wanted=json_wanted)
    only_here = {"--script": script, "--share-gpus": share_gpus or None, "--kill-wait": kill_wait}
    for option in (one for one, value in only_here.items() if value is not None and cluster != "local"):
        fix = _OF_THE_EMULATION[option].format(script)
        raise BadInput(f"{option} goes with --cluster local", why="Slurm decides this itself", fix=fix)
    kill_wait_s = 30.0 if kill_wait is None else kill_wait
    if not math.isfinite(kill_wait_s):
        raise BadInput(f"--kill-wait {kill_wait_s} is not a number of seconds", fix="--kill-wait 30")
    local = LocalSettings(share_gpus=share_gpus, max_requeues=requeues, kill_wait_s=kill_wait_s, again=again)
    if script is not None:
        return _submit_script(
            script, out, flags if config is None else {**flags, "config": config}, options, local, how
        )
    if out is None:
        raise BadInput("--out DIR is missing", fix="badcjobs submit SOURCE --out runs/first")
    command = (out, flags, Config.read(config))
    if cluster == "local":
        return _submit_here(command, options, local, how)
    return _submit_to_slurm(command, options, how)


# --- under Slurm ------------------------------------------------------------------------------------------------------


def _submit_to_slurm(command: RunCommand, options: ArrayOptions, how: SubmitFlags) -> int:
    """Hand in a source as an array and its merge job, or find them again; exit 0, or with their verdict."""
    clock, scheduler = SystemClock(), SlurmScheduler([sys.executable, "-m", "badcjobs"], BatchTask, poll_s=_poll_s())
    plan = make_plan(command, options, Path.cwd(), clock, Pace(_ROWS), again=how.again, keep=not how.dry_run)
    if plan.finished is not None:
        return _tell_slurm_end({}, plan.finished, plan.finished.verdict, (), how)
    if how.dry_run:
        record = find_record(plan, scheduler, again=how.again)
        if record is not None:
            remark(f"{plan.order.out} has job {record.job.job_id} already: this command finds it, and submits nothing")
        elif plan.idle:
            remark(_notes(plan)["tasks"])
        return _show_scripts(how, script=scheduler.script(plan.order), merge_script=scheduler.merge_script(plan.order))
    if how.again and plan.anew:
        remark("--no-resume: chunks that are done already are done once more")
    with _outside_any_job():
        with HeldSignals("sbatch has the script; waiting for its answer, for there may be a job") as held:
            handed = hand_in(plan, scheduler, clock, again=how.again, hold=held.begin)
            facts = _facts(handed, scheduler)
            if not how.json_wanted:
                say(_handed_text(facts, handed))
            if held.came is not None:
                remark(f"{held.came.name}: job {handed.job.job_id} goes on; the same command finds it again")
        return _follow_up(handed, facts, scheduler, clock, how)


def _follow_up(handed: Handed, facts: dict[str, Any], scheduler: SlurmScheduler, clock: Clock, how: SubmitFlags) -> int:
    """Say how the job ends, if that is wanted or if it is over already."""
    states = None
    try:
        if how.wait:
            states = follow(handed, scheduler, clock, remark)
        elif handed.found:
            states = scheduler.states(handed.job)
    except KeyboardInterrupt:
        remark(f"job {handed.job.job_id} goes on; the same command goes on waiting for it")
        raise
    except Unanswered as error:
        remark(f"Slurm does not say whether it has ended: {error}")
    if states is None or not (how.wait or has_ended(states)):
        if how.json_wanted:
            print_json(facts)
        return 0
    return _tell_slurm_end(facts, *judge(handed, states, clock, Pace(_ROWS)), how)


def _facts(handed: Handed, scheduler: SlurmScheduler) -> dict[str, Any]:
    """Return what ``--json`` prints of a job."""
    order, job = handed.plan.order, handed.job
    return {
        "cluster": scheduler.name,
        "job_id": job.job_id,
        "merge_job_id": job.merge_job_id,
        "merge_refused": scheduler.merge_refused,
        "merge_unsure": scheduler.merge_unsure,
        "out": str(order.out),
        "logs": str(order.logs),
        "array": order.spec,
        "tasks": len(job.indices),
        "chunks": handed.plan.chunks,
        "idle_tasks": handed.plan.idle,
        "left": handed.plan.left,
        "audio_looked_at": handed.plan.looked_at,
        "found": handed.found,
        "follow": list(scheduler.follow_lines(job, order)),
        "cancel": scheduler.cancel_line(job),
    }


def _handed_text(facts: dict[str, Any], handed: Handed) -> str:
    said = "is there already" if facts["found"] else "is submitted"
    merging = f", merge job {facts['merge_job_id']}" if facts["merge_job_id"] else ""
    chunks = count(facts["chunks"], "chunk")
    if facts["left"] is not None:
        chunks = f"the {facts['left']:,} of {chunks} that {'was' if facts['left'] == 1 else 'were'} left"
    merge = None
    if facts["merge_unsure"]:
        merge = "it is not known whether there is a job for it; the same command, in a minute, looks"
    elif facts["merge_job_id"] is None:
        merge = f"there is no job for it; later: badcjobs merge {shlex.quote(facts['out'])}"
    lines = {
        "folder": facts["out"],
        **({} if handed.found else _notes(handed.plan)),
        "merge": merge,
        **dict(zip(("queue", "logs", "so far"), facts["follow"], strict=False)),
    }
    head = f"job {facts['job_id']} {said}: {count(facts['tasks'], 'array task')} for {chunks}{merging}"
    return "\n".join([head, *(f"  {name:<11} {words}" for name, words in lines.items() if words)])


def _tell_slurm_end(
    facts: dict[str, Any], summary: Summary, verdict: str, ends: Sequence[TaskOutcome], how: SubmitFlags
) -> int:
    code = int(EXIT_CODES[verdict])
    if how.json_wanted:
        told = {"verdict": verdict, "exit_code": code, "task_ends": [end.to_dict() for end in ends]}
        print_json({**facts, **told, "summary": summary.to_dict()})
        return code
    _say_end(facts.get("job_id", ""), verdict, ends, summary)
    if code:
        left = "--again submits what is left" if summary.verdict != "done" else "--again --no-resume does all once more"
        say(f"\n  the same command with {left}")
    return code


def _poll_s() -> float:
    text = environ().get(_POLL) or str(POLL_S)
    if not text.replace(".", "", 1).isdecimal() or not float(text):
        raise BadInput(f"{_POLL}={text} is no number of seconds", fix=f"unset {_POLL}")
    return float(text)


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the job we may be in: sbatch would pass its array index and its GPUs on to the new one."""
    if "SLURM_JOB_ID" not in os.environ:
        yield  # a user's own SBATCH_ACCOUNT and the like stay
        return
    from submitit.helpers import clean_env

    where = os.environ.get("SLURM_CONF")  # where Slurm itself is: that is no property of the job
    with clean_env(_OF_THE_JOB):
        if where is not None:
            os.environ["SLURM_CONF"] = where
        yield


# --- on this machine --------------------------------------------------------------------------------------------------


def _submit_here(command: RunCommand, options: ArrayOptions, settings: LocalSettings, how: SubmitFlags) -> int:
    """Run a source as an array on this machine; exit with its verdict."""
    world = read_world()
    plan = make_plan(command, options, world.cwd, world.clock, Pace(_ROWS), find=False)
    for words in () if how.json_wanted else _notes(plan).values():
        remark(words)
    if how.dry_run:
        refuse_here(plan.order.out, again=how.again)
        return _show_scripts(how, script=LocalScheduler.script(plan.order))
    devices = make_settings(*command).stand_in(world.cwd)
    done = emulate_order(plan.order, replace(settings, stand_in=devices), world, remark)
    facts = {"chunks": plan.chunks, "idle_tasks": plan.idle, "audio_looked_at": plan.looked_at}
    return _tell_local_end(done, how, facts)


def _submit_script(
    script: Path,
    out: Path | None,
    flags: Mapping[str, Any],
    options: ArrayOptions,
    settings: LocalSettings,
    how: SubmitFlags,
) -> int:
    """Run a user's job script on this machine as sbatch would; exit with its verdict."""
    world = read_world()
    lost = [name for name in _NOT_OF_SCRIPTS if getattr(options, name)] + [n for n in flags if n not in _FOR_SCRIPTS]
    if lost:
        names = ", ".join(f"--{'no-' if flags.get(name) is False else ''}{name.replace('_', '-')}" for name in lost)
        raise BadInput(
            f"{names}: not with --script",
            why="the script itself says how badcjobs is started and what comes before",
            fix=f"edit {shlex.quote(str(script))}, or leave --script out: badcjobs submit SOURCE --out DIR …",
        )
    sources = flags.get("source") or [None]
    if len(sources) > 1:
        raise BadInput(
            f"{len(sources)} sources, but a job script takes one",
            why="it reaches the script as the variable SOURCE, which is one path, blanks and all",
            fix="write the paths of audio, or of manifests, into a text file, one per line; that is the SOURCE",
        )
    order = ScriptOrder(script, _sbatch_options(options), source=sources[0], out=out)
    if how.dry_run:
        refuse_script_here(order, world, again=how.again)
        return _show_scripts(how, script=script_text(script, world))
    devices = stand_in(world.cwd, flags.get("simulate"), flags.get("simulate_script"), flags.get("replay"))
    return _tell_local_end(emulate_script(order, replace(settings, stand_in=devices), world, remark), how, {})


def _sbatch_options(options: ArrayOptions) -> tuple[str, ...]:
    """Return what of the command line goes before the script's own lines, as options of sbatch."""
    if options.parallel is not None and options.array is None:
        raise BadInput("--parallel goes with --array where a script is given", fix="--array 0-9 --parallel 4")
    array = options.array or (None if options.tasks is None else f"0-{options.tasks - 1}")
    if array is not None and options.parallel is not None:
        array = f"{array.partition('%')[0]}%{options.parallel}"
    given = {
        "array": array, "job-name": options.job_name, "cpus-per-task": options.cpus, "mem": options.mem,
        "time": options.time, "account": options.account, "partition": options.partition,
        "constraint": options.constraint,
    }  # fmt: skip
    if options.gpus_per_task is not None:  # in whichever of the ways that there are the script asks for them
        given |= {"gres": "", "gpus": "", "gpus-per-task": "", "gpus-per-node": options.gpus_per_task}
    words = [word for option in options.sbatch for word in shlex.split(option)]
    return (*(f"--{name}={value}" for name, value in given.items() if value is not None), *words)


def _tell_local_end(done: Emulation, how: SubmitFlags, facts: Mapping[str, Any]) -> int:
    if how.json_wanted:
        print_json({**done.to_dict(), **facts})
        return done.exit_code
    if done.job is None:
        say(f"job {done.job_id}: {done.verdict}")
        return done.exit_code
    _say_end(done.job_id, done.verdict, done.rows, done.job.summary)
    say("\n" + files_text(done.job))
    if done.exit_code:
        whole = done.job.summary.verdict == "done"
        say("\n  the same command " + ("starts those tasks once more" if whole else "does what is left"))
    return done.exit_code


# --- on both ----------------------------------------------------------------------------------------------------------


def _say_end(job_id: str, verdict: str, ends: Sequence[TaskOutcome], summary: Summary) -> None:
    """Say how a job ended: its tasks, above all where they failed although nothing is left, and the summary."""
    words = headline(job_id, verdict, ends) if summary.verdict == "done" else None
    lines = [f"  {plain(line)}" for line in end_lines(job_id, ends)]
    title = "the whole run" if verdict != summary.verdict else f"job {job_id}" if job_id else "the job"
    text = summary_text(summary, title, colour=colour_wanted())
    say("\n".join([words, *lines, "", text] if words else [text, *lines]), painted=True)


def _notes(plan: ArrayPlan) -> dict[str, str]:
    """Return what there is to say of a plan: tasks that have nothing to do, and audio that was not looked at."""
    notes = {}
    if plan.idle:
        idle = f"{plan.idle:,} {'has' if plan.idle == 1 else 'have'} nothing to do; --tasks {plan.chunks} is enough"
        notes["tasks"] = f"{plan.order.tasks:,} tasks for {count(plan.chunks, 'chunk')}: {idle}"
    if plan.looked_at is not None and plan.looked_at < plan.chunks:
        looked_at = f"{plan.looked_at:,} of {plan.chunks:,} chunks"
        notes["checked"] = f"looked at the audio of {looked_at}; badcjobs check looks at all"
    return notes


def _show_scripts(how: SubmitFlags, **scripts: str) -> int:
    """Show what would be submitted; change nothing."""
    if how.json_wanted:
        print_json(scripts)
    else:
        between = "\n# ---- the merge job: sbatch --dependency=afterany:JOB ----\n"
        hand_out(between.join(scripts.values()).rstrip("\n"))
    return 0
