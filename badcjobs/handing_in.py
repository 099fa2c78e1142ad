"""From a plan to a job that Slurm has: find the one that is there, or submit one and write it down. Nothing twice.

From the moment in which sbatch is called until the number is written down, a signal is held back (``hold``); for who is
killed without one, what is about to be submitted was written down before. What comes then is following.py's business.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.model import Submitted
from badcjobs.run_lock import alone_in, check_writable, leaving_nothing, refuse_during_emulation
from badcjobs.scheduler.array_files import remove_left
from badcjobs.scheduler.asked import differences
from badcjobs.scheduler.slurm import SlurmRefused, SlurmScheduler, SlurmSilent
from badcjobs.scheduler.submitted_file import (
    Intent,
    Record,
    forget_intent,
    last_submission,
    read_intent,
    write_intent,
    write_record,
)
from badcjobs.scheduler.watch import has_ended
from badcjobs.seams import Clock, Unanswered
from badcjobs.submitting import Plan

_STALE_MS = 600_000  # drafts of 10,000 tasks are written in a minute or two, where the filesystem is slow


@dataclass(frozen=True, slots=True)
class Handed:
    """A job that is with the scheduler; ``found``: it was there before this command."""

    job: Submitted
    plan: Plan
    found: bool


def hand_in(
    plan: Plan,
    scheduler: SlurmScheduler,
    clock: Clock,
    *,
    again: bool = False,
    hold: Callable[[], None] = lambda: None,
) -> Handed:
    """Submit the array and its merge job; without ``again`` a job that this run folder has already is found instead.

    ``hold`` is called right before sbatch is: whoever calls this lets no signal end the process until it returns.
    """
    out = plan.order.out
    with leaving_nothing(out), alone_in(out):
        cut_short = _find_cut_short(out, scheduler)
        record = find_record(plan, scheduler, again=again)
        if record is None:
            check_writable(out)
            remove_left(plan.order.logs, clock.now_ms() - _STALE_MS)
            return Handed(_submit(plan, scheduler, clock, hold), plan, found=False)
        if cut_short and record.job.merge_job_id is None:
            hold()
            record = replace(record, job=scheduler.submit_merge(plan.order, record.job))
            write_record(out, record)
        if cut_short:
            _settle(out, scheduler)
        return Handed(record.job, replace(plan, left=record.left), found=True)


def find_record(plan: Plan, scheduler: SlurmScheduler, *, again: bool) -> Record | None:
    """Return what this command would find instead of submitting; refuse what it would refuse, and change nothing."""
    out = plan.order.out
    record = last_submission(out, scheduler.find_array)
    if record is not None and not again:
        _check_same(record, plan, scheduler)
        return record
    if record is not None and record.cluster == scheduler.name:
        _check_ended(record, scheduler)
    refuse_during_emulation(out)
    return None


def _submit(plan: Plan, scheduler: SlurmScheduler, clock: Clock, hold: Callable[[], None]) -> Submitted:
    order, now_ms = plan.order, clock.now_ms()  # the same in intent and record: they are told by it to be of one job

    def record_of(job: Submitted) -> Record:
        told, asked = order.run_arguments, dict(plan.asked)
        return Record(scheduler.name, job, told, plan.chunks, now_ms, asked, plan.listed, plan.left)

    def note(job: Submitted) -> None:
        write_record(order.out, record_of(job))

    def about_to(script: Path) -> None:
        hold()
        write_intent(order.out, Intent(script, record_of(Submitted("", None, order.indices))))

    try:
        job = scheduler.submit(order, note, about_to)
    except SlurmSilent:
        raise  # and what was intended stays: the next one looks for it
    except BadcjobsError:
        forget_intent(order.out)
        raise
    note(job)
    _settle(order.out, scheduler)
    return job


def _settle(out: Path, scheduler: SlurmScheduler) -> None:
    """Forget what was intended, unless there may be a merge job: then the next one looks for that."""
    if not scheduler.merge_unsure:
        forget_intent(out)


def _find_cut_short(out: Path, scheduler: SlurmScheduler) -> bool:
    """Look for the job of a submit that was killed while sbatch had its script; write it down where there is one.

    What was intended is forgotten only where there is none: who is refused now may get its merge job later.
    """
    intent = read_intent(out)
    if intent is None:
        return False
    record = last_submission(out, scheduler.find_array)
    if record is None or not intent.is_of(record):
        scheduler.tidy(intent.script, None)
        forget_intent(out)
        return False
    write_record(out, record)
    scheduler.tidy(intent.script, record.job)
    return True


def _check_same(record: Record, plan: Plan, scheduler: SlurmScheduler) -> None:
    out = shlex.quote(str(plan.order.out))
    if record.cluster != scheduler.name:
        raise BadInput(
            f"{out} has a job already, {record.job.job_id} of --cluster {record.cluster}",
            fix=f"the same command with --cluster {record.cluster}, or --again once that has ended",
        )
    if record.run_arguments != plan.order.run_arguments:
        raise BadInput(
            f"{out} has a job already, {record.job.job_id}, and it was told something else",
            why=f"then: {shlex.join(record.run_arguments)}\nnow: {shlex.join(plan.order.run_arguments)}",
            fix=f"{scheduler.cancel_line(record.job)}; then the same command with --again, or with another --out",
        )
    if differing := differences(record.asked, plan.asked) if record.asked is not None else []:
        raise BadInput(
            f"{out} has a job already, {record.job.job_id}, and it was submitted with other options",
            why="\n".join([*differing, "a job keeps what it was submitted with; this command would change nothing"]),
            fix=f"the same command with --again, once it has ended ({scheduler.cancel_line(record.job)} ends it)",
        )


def _check_ended(record: Record, scheduler: SlurmScheduler) -> None:
    try:
        ended = has_ended(scheduler.states(record.job))
    except Unanswered as error:
        raise SlurmRefused(
            f"nobody knows whether job {record.job.job_id} has ended",
            why=f"Slurm does not answer: {error}",
            fix=f"squeue -j {record.job.job_id}   (and, once it answers, the same command)",
        ) from error
    if not ended:
        raise BadInput(
            f"job {record.job.job_id} has not ended yet",
            why="a second one would do the same chunks once more",
            fix=f"{scheduler.cancel_line(record.job)}   (or the same command with --wait, without --again)",
        )
