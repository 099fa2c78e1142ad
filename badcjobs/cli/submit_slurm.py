"""``badcjobs submit --cluster slurm``: hand the array in, say how to follow it, and wait for its verdict if wanted."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from badcjobs.following import Judged
    from badcjobs.handing_in import Handed
    from badcjobs.model import JobStates
    from badcjobs.scheduler.slurm import SlurmScheduler
    from badcjobs.scheduler.wishes import Wishes
    from badcjobs.seams import Clock, Scheduler
    from badcjobs.submitting import Command, Plan

_POLL = "BADCJOBS_POLL_S"  # for a cluster of one's own; everybody else asks every 30 s
# What a job has of its own and another one must not inherit, besides Slurm's variables.
_OF_THE_JOB = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "TMPDIR")


@dataclass(frozen=True, slots=True)
class How:
    """What is wanted of the job besides its being submitted."""

    dry_run: bool
    wait: bool
    again: bool
    json_wanted: bool


def submit_to_slurm(command: Command, wishes: Wishes, how: How) -> int:
    """Hand in a source as an array and its merge job, or find them again; exit 0, or with their verdict."""
    from badcjobs.cli.held_signals import HeldSignals
    from badcjobs.cli.output import RowCounter, remark
    from badcjobs.clock import SystemClock
    from badcjobs.following import Judged
    from badcjobs.handing_in import hand_in
    from badcjobs.submitting import make_plan

    clock, reading, scheduler = SystemClock(), RowCounter("rows of the source read"), _scheduler()
    plan = make_plan(command, wishes, Path.cwd(), clock, reading, again=how.again, keep=not how.dry_run)
    if plan.finished is not None:
        return _tell_end({}, Judged(plan.finished, plan.finished.verdict), how)
    if how.dry_run:
        return _show_scripts(plan, scheduler, how)
    if how.again and plan.anew:
        remark("--no-resume: chunks that are done already are done once more")
    with _outside_any_job():
        with HeldSignals("sbatch has the script; waiting for its answer, for there may be a job") as held:
            handed = hand_in(plan, scheduler, clock, again=how.again, hold=held.begin)
            facts = _tell_handed(handed, scheduler, how)
            if held.came is not None:
                remark(f"{held.came.name}: job {handed.job.job_id} goes on; the same command finds it again")
        return _follow_up(handed, facts, scheduler, clock, how)


def _tell_handed(handed: Handed, scheduler: SlurmScheduler, how: How) -> dict[str, Any]:
    from badcjobs.cli.output import say
    from badcjobs.cli.submit_local import idle_words, look_words

    facts = _facts(handed, scheduler)
    if not how.json_wanted:
        said = {"tasks": None if handed.found else idle_words(handed.plan), "checked": look_words(handed.plan)}
        say(_handed_text(facts, {name: words for name, words in said.items() if words}))
    return facts


def _follow_up(handed: Handed, facts: dict[str, Any], scheduler: SlurmScheduler, clock: Clock, how: How) -> int:
    """Say how the job ends, if that is wanted or if it is over already."""
    from badcjobs.cli.output import RowCounter, print_json, remark
    from badcjobs.following import follow, judge
    from badcjobs.scheduler.watch import has_ended

    states: JobStates | None
    if how.wait:
        try:
            states = follow(handed, scheduler, clock, remark)
        except KeyboardInterrupt:
            remark(f"job {handed.job.job_id} goes on; the same command goes on waiting for it")
            raise
    elif not handed.found or (states := _ask(handed, scheduler)) is None or not has_ended(states):
        if how.json_wanted:
            print_json(facts)
        return 0
    return _tell_end(facts, judge(handed, states, clock, RowCounter("rows of the source read")), how)


def _ask(handed: Handed, scheduler: Scheduler) -> JobStates | None:
    from badcjobs.cli.output import remark
    from badcjobs.seams import Unanswered

    try:
        return scheduler.states(handed.job)
    except Unanswered as error:
        remark(f"nobody knows whether it has ended: {error}")
        return None


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


def _handed_text(facts: dict[str, Any], said_of_source: dict[str, str]) -> str:
    from badcjobs.report.words import count

    said = "is there already" if facts["found"] else "is submitted"
    merging = f", merge job {facts['merge_job_id']}" if facts["merge_job_id"] else ""
    tasks, chunks = count(facts["tasks"], "array task"), count(facts["chunks"], "chunk")
    if facts["left"] is not None:
        chunks = f"the {facts['left']:,} of {chunks} that {'was' if facts['left'] == 1 else 'were'} left"
    lines = [
        f"job {facts['job_id']} {said}: {tasks} for {chunks}{merging}",
        f"  folder      {facts['out']}",
        *(f"  {name:<11} {words}" for name, words in said_of_source.items()),
    ]
    if facts["merge_unsure"]:
        lines.append("  merge       nobody knows whether there is a job for it; the same command, in a minute, looks")
    elif facts["merge_job_id"] is None:
        lines.append(f"  merge       there is no job for it; later: badcjobs merge {shlex.quote(facts['out'])}")
    names = ("queue", "logs", "so far")
    return "\n".join([*lines, *(f"  {name:<11} {line}" for name, line in zip(names, facts["follow"], strict=False))])


def _tell_end(facts: dict[str, Any], judged: Judged, how: How) -> int:
    from badcjobs.cli.colour import colour_wanted
    from badcjobs.cli.output import print_json, say
    from badcjobs.ends import end_lines, headline
    from badcjobs.report.as_text import summary_text
    from badcjobs.report.words import plain

    summary, code = judged.summary, judged.exit_code
    if how.json_wanted:
        ends = [end.to_dict() for end in judged.ends]
        verdict = {"verdict": judged.verdict, "exit_code": code, "task_ends": ends}
        print_json({**facts, **verdict, "summary": summary.to_dict()})
        return code
    job_id = facts.get("job_id", "")
    words = headline(job_id, judged.verdict, judged.ends) if summary.verdict == "done" else None
    lines = [f"  {plain(line)}" for line in end_lines(job_id, judged.ends)]
    title = "the whole run" if judged.verdict != summary.verdict else f"job {job_id}" if facts else "the job"
    told = [summary_text(summary, title, colour=colour_wanted())]
    say("\n".join(["", words, *lines, "", *told] if words else [*told, *lines]), painted=True)
    if code:
        left = "--again submits what is left" if summary.verdict != "done" else "--again --no-resume does all once more"
        say(f"\n  the same command with {left}")
    return code


def _show_scripts(plan: Plan, scheduler: SlurmScheduler, how: How) -> int:
    """Show what would be submitted, and say so where it would be nothing; change nothing."""
    from badcjobs.cli.output import hand_out, print_json, remark
    from badcjobs.cli.submit_local import idle_words
    from badcjobs.handing_in import find_record

    out, record = plan.order.out, find_record(plan, scheduler, again=how.again)
    if record is not None:
        remark(f"{out} has job {record.job.job_id} already: this command finds it, and submits nothing")
    elif idle := idle_words(plan):
        remark(idle)
    array, merge = scheduler.script(plan.order), scheduler.merge_script(plan.order)
    if how.json_wanted:
        print_json({"script": array, "merge_script": merge})
    else:
        hand_out(f"{array}\n# ---- the merge job: sbatch --dependency=afterany:JOB ----\n{merge}".rstrip("\n"))
    return 0


def _scheduler() -> SlurmScheduler:
    import sys

    from badcjobs.cli.batch_task import BatchTask
    from badcjobs.scheduler.slurm import SlurmScheduler

    return SlurmScheduler([sys.executable, "-m", "badcjobs"], BatchTask, poll_s=_poll_s())


def _poll_s() -> float:
    from badcjobs.cli.world import environ
    from badcjobs.errors import BadInput
    from badcjobs.scheduler.slurm import POLL_S

    text = environ().get(_POLL) or str(POLL_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise BadInput(f"{_POLL}={text} is no number of seconds", fix=f"unset {_POLL}")
    return seconds


@contextmanager
def _outside_any_job() -> Iterator[None]:
    """Hide the job we may be in: sbatch would pass its array index and its GPUs on to the new one."""
    import os

    if "SLURM_JOB_ID" not in os.environ:
        yield  # a user's own SBATCH_ACCOUNT and the like stay
        return
    from submitit.helpers import clean_env

    where = os.environ.get("SLURM_CONF")  # where Slurm itself is: that is no property of the job
    with clean_env(_OF_THE_JOB):
        if where is not None:
            os.environ["SLURM_CONF"] = where
        yield
