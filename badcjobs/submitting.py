"""From a source to the order for an array: check → plan. It is handed in by handing_in.py.

Whatever needs the whole source is checked here, once, and not in every task.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.config import RunSettings, make_settings, read_toml, settings_by_key
from badcjobs.errors import BadInput
from badcjobs.frozen_run import FrozenRun, check_against
from badcjobs.job import summarize_database
from badcjobs.manifest import Shard, open_sources
from badcjobs.model import ArrayOrder
from badcjobs.paths import RunFolder
from badcjobs.report.summarize import Summary
from badcjobs.scheduler.asked import asked_of
from badcjobs.scheduler.submitted_file import read_record
from badcjobs.scheduler.wishes import Known, Wishes, count_idle, make_order
from badcjobs.seams import Clock
from badcjobs.store.merging.merge import MergeOrder, merge

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
    asked: Mapping[str, Any]  # by the options of submit, whatever part of it is submitted now
    looked_at: int | None = None  # chunks whose audio was looked at; None: when it was submitted, and not now
    listed: int | None = None  # how many manifests a list of manifests names
    finished: Summary | None = None  # the run as it is, where nothing is left to submit again
    anew: bool = False  # --no-resume: what earlier jobs have done is done once more
    left: int | None = None  # chunks of a run that has stopped; None: all, or nobody has counted

    @property
    def idle(self) -> int:
        """How many tasks have nothing to do; of a list of manifests, each has its own."""
        return count_idle(self.order, self.chunks) if self.listed is None else 0


def make_plan(
    command: Command,
    wishes: Wishes,
    cwd: Path,
    clock: Clock,
    progress: Progress,
    *,
    again: bool = False,
    find: bool = True,
    keep: bool = True,
) -> Plan:
    """Check settings, source, run folder and options; raise one BadInput for each kind of trouble.

    ``again``: of a run that has stopped, only the array indices that have work left, or with --no-resume all of them.
    ``find``: the source of a job that is there already was checked when that was submitted.
    ``keep``: what has to be merged to know what is left is merged for good; else the run folder stays as it is.
    """
    out, flags, config = cwd / command.out, command.flags, command.config
    mistakes: list[str] = []
    settings = _settings(out, flags, config, mistakes)
    source = Source(0, 0, None)
    if find and not again and (record := read_record(out)) is not None:
        source = Source(record.chunks, None, record.listed)  # that was checked when it was submitted
    elif settings is not None:
        source = read_source(settings, cwd, progress)
    run_toml = RunFolder(out).run_toml
    frozen = FrozenRun.read(run_toml)
    known = Known(frozen is not None, frozen.array if frozen else None, source.listed)
    arguments = run_arguments(out, flags, config, cwd)
    order = make_order(wishes, known, out=out, run_arguments=arguments, mistakes=mistakes)
    if frozen is not None and settings is not None:
        check_against(frozen, FrozenRun.of(settings, order.shape, cwd), run_toml)
    anew = settings is not None and not settings.resume
    plan = Plan(order, source.chunks, asked_of(order), source.looked_at, source.listed, anew=anew)
    return _what_is_left(plan, clock, keep=keep) if again and not anew and not order.only else plan


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


@dataclass(frozen=True, slots=True)
class Source:
    """What reading a source has shown."""

    chunks: int
    looked_at: int | None
    listed: int | None


def read_source(settings: RunSettings, cwd: Path, progress: Progress) -> Source:
    """Read every row, and look at the audio of some."""
    root = None if settings.root is None else cwd / settings.root
    sources = open_sources([cwd / path for path in settings.source], root=root, cutting=settings.cutting)
    rows = 0

    def count(_row: int, _part: int, _key: tuple[str, str]) -> None:
        nonlocal rows
        rows += 1
        progress(rows)

    sources.read_identities(count)
    looked_at = sum(1 for _ in sources.chunks(Shard(0, max(1, rows // _LOOKED_AT))))  # finds rows that repeat, too
    return Source(rows, looked_at, sources.manifests_listed)


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


def _what_is_left(plan: Plan, clock: Clock, *, keep: bool) -> Plan:
    """Return the plan for the array indices that have work left; all of them where no task has got that far."""
    folder = RunFolder(plan.order.out)
    if not folder.run_toml.exists() or not (folder.job_database.exists() or any(folder.tasks.glob("*.sqlite"))):
        return plan
    summary = _merged(folder, clock) if keep else _merged_aside(folder, clock)
    if summary.verdict == "done":
        return replace(plan, finished=summary)
    proof = summary.completeness
    plan = replace(plan, left=None if proof is None or proof.expected is None else proof.expected - proof.done)
    indices = proof.left_indices if proof is not None else ()
    return plan if len(indices) == plan.order.tasks else replace(plan, order=replace(plan.order, only=indices))


def _merged(folder: RunFolder, clock: Clock) -> Summary:
    merge(MergeOrder([folder.path], folder.job_database), clock)
    return summarize_database(folder.job_database)  # its page is drawn at the end, by the merge job


def _merged_aside(folder: RunFolder, clock: Clock) -> Summary:
    """Merge into a file that is gone afterwards, on top of what is merged already."""
    with tempfile.TemporaryDirectory(prefix="badcjobs-dry-run-") as name:
        aside = RunFolder(Path(name))  # where everything lies as in the run folder: merged files are named from there
        for mine, copy in ((folder.run_toml, aside.run_toml), (folder.job_database, aside.job_database)):
            if mine.exists():
                shutil.copyfile(mine, copy)
        aside.tasks.symlink_to(folder.tasks)
        merge(MergeOrder([aside.tasks], aside.job_database), clock)
        return summarize_database(aside.job_database)
