"""``badcjobs submit --cluster slurm``: hand the array in, say how to follow it, and wait for its verdict if wanted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from badcjobs.model import JobStates
    from badcjobs.report.summarize import Summary
    from badcjobs.scheduler.wishes import Wishes
    from badcjobs.seams import Clock, Scheduler
    from badcjobs.submitting import Command, Handed, Plan

_POLL = "BADCJOBS_POLL_S"  # for tests on a cluster of their own; everybody else asks every 30 s
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
    from badcjobs.cli.output import RowCounter
    from badcjobs.clock import SystemClock
    from badcjobs.submitting import hand_in, make_plan

    clock, reading, scheduler = SystemClock(), RowCounter("rows of the source read"), _scheduler()
    plan = make_plan(command, wishes, Path.cwd(), clock, reading, again=how.again)
    if plan.finished is not None:
        return _tell_end({}, plan.finished, 0, how)
    if how.dry_run:
        return _show_scripts(plan, scheduler, how)
    with _outside_any_job():
        handed = hand_in(plan, scheduler, clock, again=how.again)
        return _follow_up(handed, scheduler, clock, how)


def _follow_up(handed: Handed, scheduler: Scheduler, clock: Clock, how: How) -> int:
    """Say what there is now; then, if wanted or if it is over already, how it ends."""
    from badcjobs.cli.output import RowCounter, print_json, remark, say
    from badcjobs.following import follow, judge
    from badcjobs.scheduler.watch import has_ended

    facts = _facts(handed, scheduler)
    if not how.json_wanted:
        say(_handed_text(facts))
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
    summary, code = judge(handed, states, clock, RowCounter("rows of the source read"))
    return _tell_end(facts, summary, code, how)


def _ask(handed: Handed, scheduler: Scheduler) -> JobStates | None:
    from badcjobs.cli.output import remark
    from badcjobs.seams import Unanswered

    try:
        return scheduler.states(handed.job)
    except Unanswered as error:
        remark(f"nobody knows whether it has ended: {error}")
        return None


def _facts(handed: Handed, scheduler: Scheduler) -> dict[str, Any]:
    """Return what ``--json`` prints of a job."""
    order, job = handed.plan.order, handed.job
    return {
        "cluster": scheduler.name,
        "job_id": job.job_id,
        "merge_job_id": job.merge_job_id,
        "out": str(order.out),
        "logs": str(order.logs),
        "array": order.spec,
        "tasks": len(job.indices),
        "chunks": handed.plan.chunks,
        "found": handed.found,
        "follow": list(scheduler.follow_lines(job, order)),
        "cancel": scheduler.cancel_line(job),
    }


def _handed_text(facts: dict[str, Any]) -> str:
    said = "is there already" if facts["found"] else "is submitted"
    merging = f", merge job {facts['merge_job_id']}" if facts["merge_job_id"] else ""
    lines = [
        f"job {facts['job_id']} {said}: {facts['tasks']} array tasks for {facts['chunks']:,} chunks{merging}",
        f"  folder      {facts['out']}",
    ]
    names = ("queue", "logs", "so far")
    return "\n".join([*lines, *(f"  {name:<11} {line}" for name, line in zip(names, facts["follow"], strict=False))])


def _tell_end(facts: dict[str, Any], summary: Summary, code: int, how: How) -> int:
    from badcjobs.cli.output import print_json, say
    from badcjobs.report.as_text import summary_text

    if how.json_wanted:
        print_json({**facts, "verdict": summary.verdict, "exit_code": code, "summary": summary.to_dict()})
        return code
    say(summary_text(summary, "the job" if not facts else f"job {facts['job_id']}"))
    if code:
        say("\n  the same command with --again submits what is left")
    return code


def _show_scripts(plan: Plan, scheduler: Scheduler, how: How) -> int:
    from badcjobs.cli.output import print_json, say

    array, merge = scheduler.script(plan.order), scheduler.merge_script(plan.order)
    if how.json_wanted:
        print_json({"script": array, "merge_script": merge})
    else:
        say(f"{array}\n# ---- the merge job: sbatch --dependency=afterany:JOB ----\n{merge}".rstrip("\n"))
    return 0


def _scheduler() -> Scheduler:
    import sys

    from badcjobs.cli.batch_task import BatchTask
    from badcjobs.cli.world import environ
    from badcjobs.scheduler.slurm import POLL_S, SlurmScheduler

    return SlurmScheduler([sys.executable, "-m", "badcjobs"], BatchTask, poll_s=float(environ().get(_POLL) or POLL_S))


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
