"""From a source to a submitted array: check → hand in. What comes then is following.py's business.

Whatever needs the whole source is checked here, once, and not in every task.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.config import RunSettings, make_settings, read_toml, settings_by_key
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.frozen_run import FrozenRun, check_against
from badcjobs.job import finish_job
from badcjobs.manifest import Shard, open_sources
from badcjobs.model import ArrayOrder, Submitted
from badcjobs.paths import RunFolder
from badcjobs.report.summarize import Summary
from badcjobs.scheduler.array_spec import parse_array
from badcjobs.scheduler.submitted_file import Record, read_record, write_record
from badcjobs.scheduler.watch import has_ended
from badcjobs.scheduler.wishes import Known, Wishes, make_order
from badcjobs.seams import Clock, Scheduler, Unanswered
from badcjobs.store.merging.merge import MergeOrder

Progress = Callable[[int], None]

_LOOKED_AT = 2000  # audio files; a look at each of twenty million would take Lustre an hour
_PATHS = ("root", "hawkears_root", "simulate_script", "replay")
_OF_ONE_TASK = ("shard", "free", "time_left")


@dataclass(frozen=True, slots=True)
class Command:
    """What each task is told: the flags of ``badcjobs run`` by TOML name (None: not given), and its file."""

    out: Path
    flags: Mapping[str, Any]
    config: Path | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """An order whose source was read from end to end."""

    order: ArrayOrder
    chunks: int
    finished: Summary | None = None  # the run as it is, where nothing is left to submit again


@dataclass(frozen=True, slots=True)
class Handed:
    """A job that is with the scheduler; ``found``: it was there before this command."""

    job: Submitted
    plan: Plan
    found: bool


# --- check ------------------------------------------------------------------------------------------------------------


def make_plan(
    command: Command, wishes: Wishes, cwd: Path, clock: Clock, progress: Progress, *, again: bool = False
) -> Plan:
    """Check settings, source, run folder and options; raise one BadInput for each kind of trouble.

    ``again``: of a run that has stopped, only the array indices that have work left.
    """
    out, flags, config = cwd / command.out, command.flags, command.config
    mistakes: list[str] = []
    settings = _settings(out, flags, config, mistakes)
    chunks, listed = 0, None
    if (record := read_record(out)) is not None and not again:
        chunks = record.chunks  # that was checked when it was submitted
    elif settings is not None:
        chunks, listed = read_source(settings, cwd, progress)
    run_toml = RunFolder(out).run_toml
    frozen = FrozenRun.read(run_toml)
    known = Known(frozen is not None, frozen.array if frozen else None, listed)
    arguments = run_arguments(out, flags, config, cwd)
    order = make_order(wishes, known, out=out, run_arguments=arguments, mistakes=mistakes)
    if frozen is not None and settings is not None:
        check_against(frozen, FrozenRun.of(settings, order.shape, cwd), run_toml)
    return _what_is_left(Plan(order, chunks), clock) if again and not order.only else Plan(order, chunks)


def _settings(out: Path, flags: Mapping[str, Any], config: Path | None, mistakes: list[str]) -> RunSettings | None:
    try:
        settings = make_settings(out, flags, config)
    except BadInput as error:
        mistakes += (error.why or error.what).splitlines()
        return None
    for key in _OF_ONE_TASK:
        if getattr(settings, key) is not None:
            mistakes.append(f"{key} in {config} is for one task, not for an array")
    return settings


def read_source(settings: RunSettings, cwd: Path, progress: Progress) -> tuple[int, int | None]:
    """Read every row and look at some of the audio; return how many rows, and how many manifests a list names."""
    root = None if settings.root is None else cwd / settings.root
    sources = open_sources([cwd / path for path in settings.source], root=root)
    rows = 0

    def count(row: int, _part: int, _key: tuple[str, str]) -> None:
        nonlocal rows
        rows = row + 1
        progress(rows)

    sources.read_identities(count)
    for _ in sources.chunks(Shard(0, max(1, rows // _LOOKED_AT))):  # finds rows that repeat, too
        pass
    return rows, sources.manifests_listed


def run_arguments(out: Path, flags: Mapping[str, Any], config: Path | None, cwd: Path) -> tuple[str, ...]:
    """Return what each task's badcjobs is called with; paths are absolute, so that tasks may start anywhere."""
    given = {key: value for key, value in flags.items() if value is not None}
    words = ["run", *(str(cwd / path) for path in given.pop("source", ())), f"--out={out}"]
    if config is not None:
        words.append(f"--config={cwd / config}")
    if "workers_per_gpu" not in given and not (config and "workers_per_gpu" in read_toml(config).get("run", {})):
        given["workers_per_gpu"] = "auto"
    for key in (key for key in settings_by_key() if key in given):
        words += _flag(key, str(cwd / given[key]) if key in _PATHS else given[key])
    return tuple(words)


def _flag(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    return [f"--{name}={one}" for one in (value if isinstance(value, list | tuple) else [value])]


def _what_is_left(plan: Plan, clock: Clock) -> Plan:
    """Return the plan for the array indices that have work left; all of them where no task has got that far."""
    folder = RunFolder(plan.order.out)
    if not folder.run_toml.exists() or not any(folder.tasks.glob("*.sqlite")):
        return plan
    summary = finish_job(MergeOrder([folder.path], folder.job_database), clock).summary
    if summary.verdict == "done":
        return replace(plan, finished=summary)
    lines = summary.completeness.finish if summary.completeness else ()
    found = next((match[1] for line in lines if (match := re.match(r"sbatch --array=(\S+)", line))), None)
    left = () if found is None else parse_array(found).indices
    return plan if len(left) == plan.order.tasks else replace(plan, order=replace(plan.order, only=left))


# --- hand in ----------------------------------------------------------------------------------------------------------


def hand_in(plan: Plan, scheduler: Scheduler, clock: Clock, *, again: bool = False) -> Handed:
    """Submit the array and its merge job; without ``again`` a job that this run folder has already is found instead."""
    out = plan.order.out

    def note(job: Submitted) -> None:
        write_record(out, Record(scheduler.name, job, plan.order.run_arguments, plan.chunks, clock.now_ms()))

    with _alone_in(out):
        record = read_record(out)
        if record is not None and not again:
            _check_same(record, plan, scheduler)
            return Handed(record.job, plan, found=True)
        if record is not None and record.cluster == scheduler.name:
            _check_ended(record, scheduler)
        _check_writable(out)
        job = scheduler.submit(plan.order, note)
        note(job)
        return Handed(job, plan, found=False)


@contextmanager
def _alone_in(out: Path) -> Iterator[None]:
    """Let one submit after the other look into a run folder: the second finds the job of the first."""
    if not out.is_dir():
        _check_writable(out)
    try:
        lock = os.open(out, os.O_RDONLY)
    except OSError:
        yield
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # this filesystem has no locks
        yield
    finally:
        os.close(lock)


def _check_same(record: Record, plan: Plan, scheduler: Scheduler) -> None:
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


def _check_ended(record: Record, scheduler: Scheduler) -> None:
    try:
        ended = has_ended(scheduler.states(record.job))
    except Unanswered as error:
        raise BadcjobsError(f"nobody knows whether job {record.job.job_id} has ended", why=str(error)) from error
    if not ended:
        raise BadInput(
            f"job {record.job.job_id} has not ended yet",
            why="a second one would do the same chunks once more",
            fix=f"{scheduler.cancel_line(record.job)}   (or the same command with --wait, without --again)",
        )


def _check_writable(out: Path) -> None:
    RunFolder(out).create()
    try:
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise BadInput(
            f"--out {out} cannot be written", why=error.strerror, fix="--out a folder you may write to"
        ) from error
