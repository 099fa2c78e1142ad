"""Resolve a ``badcjobs submit`` into one value, before anything is written or submitted.

It goes through the project file, the options, the site, what was learned from earlier runs, the job that a run folder
already has, and the source.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.cluster.sbatch_options import read_options, read_request, submit_words
from badcjobs.cluster.submit import ArrayPlan, plan_array
from badcjobs.planning.bill import FASTEST, usual_request
from badcjobs.planning.job_rules import check_billing, with_needs
from badcjobs.planning.preflight_facts import Job
from badcjobs.planning.site import Site, find_site
from badcjobs.project import Project
from badcjobs.run_toml import digest_filelist
from badcjobs.seams import Environ
from badcjobs.settings import PlanSettings, RunSettings, SubmitSettings, absolute
from badcjobs.store.submission_record import Record, read_intent, read_record


class SubmitWish(NamedTuple):
    """What the user asks for, and where."""

    flags: Mapping[str, Any]  # the options of run by key
    options: SubmitSettings
    project: Project
    cwd: Path
    environ: Environ
    again: bool  # --again
    mistakes: Sequence[str]  # in the options
    progress: Callable[[int], None]

    @property
    def out(self) -> Path:
        """The run folder."""
        return self.cwd / str(self.flags.get("out") or self.project.get("run", "out"))

    def run_arguments(self, filelist_digest: str | None) -> tuple[str, ...]:
        """Return the arguments of each task's badcjobs; paths are absolute, so that tasks may start in any folder."""
        flags = {**self.flags, "filelist_digest": filelist_digest}
        sources = flags.get("source") or self.project.get("run", "source") or ()
        paths = [absolute(self.cwd, source) for source in sources]
        return ("run", *paths, f"--out={self.out}", *self.project.run_words(flags, self.cwd))


class ResolvedSubmit(NamedTuple):
    """The inputs of a submission, all known before anything is written."""

    plan: ArrayPlan
    options: SubmitSettings  # with what the site and earlier runs say
    settings: RunSettings  # of each task
    site: Site


def resolve_submit(wish: SubmitWish) -> ResolvedSubmit:
    """Return what a command would submit; raise one BadInput per kind of problem."""
    mistakes = list(wish.mistakes)
    is_local = wish.options.cluster == "local"
    site = find_site(wish.project.site, wish.cwd, "--config site=")
    submission = None
    if not wish.again:
        intent = read_intent(wish.out)  # of a submit that was interrupted
        submission = read_record(wish.out) if intent is None else intent[1]
    settings = wish.project.make(RunSettings, wish.flags, "submit", mistakes)
    prefer = wish.project.make(PlanSettings, {}, "submit").prefer
    options = complete(wish.options, prefer, settings, site, wish.environ, wish.cwd, submission)
    if settings.stop_after:
        mistakes.append("[run] stop_after is for one task, not for an array")
    # The source of a job that exists was checked when it was submitted.
    record = None if wish.again or is_local else read_record(wish.out)
    plan = plan_array(
        settings,
        options,
        out=wish.out,
        run_arguments=wish.run_arguments(digest_filelist(settings, wish.cwd) or None),
        record=record,
        cwd=wish.cwd,
        progress=wish.progress,
        mistakes=mistakes,
    )
    return ResolvedSubmit(plan, options, settings, site)


def complete(
    options: SubmitSettings,
    prefer: str,
    settings: RunSettings,
    site: Site,
    environ: Environ,
    cwd: Path,
    submission: Record | None = None,
) -> SubmitSettings:
    """Return the options with what is not given: the account of the merge job, cores and memory for the workers.

    The merge is paid by the account without the site's ending for GPUs. A job that exists keeps what it was submitted
    with, whatever was learned since.
    """
    ending = site.account_ends_with
    account = options.account or ""
    if ending and options.merge_account is None and account.endswith(ending):
        options = replace(options, merge_account=account.removesuffix(ending))

    if submission is not None and submission.asked is not None:
        cpus = options.cpus or submission.asked.get("--cpus")
        return replace(options, cpus=cpus, mem=options.mem or submission.asked.get("--mem"))
    if options.gpus_per_task == 0 or options.cluster == "local":
        return options
    choice = usual_request(options, prefer, settings, site, environ, cwd)
    return replace(options, cpus=options.cpus or choice.cpus, mem=options.mem or f"{choice.mem_gb}G")


def bill_lines(resolved: ResolvedSubmit, environ: Environ, cwd: Path) -> list[str]:
    """Return what a task is billed, as check does."""
    options = resolved.options
    gpus = 1 if options.gpus_per_task is None else options.gpus_per_task
    sbatch_words = submit_words(replace(options, gpus_per_task=gpus))
    job = Job(read_request(read_options(sbatch_words), []).asked, resolved.site, resolved.settings)
    lines = []
    for remark in check_billing(with_needs(job, FASTEST, environ, cwd)):
        line = f"billing: {remark.text}"
        if remark.fix:
            line += f"\n  try: {remark.fix}"
        lines.append(line)
    return lines
