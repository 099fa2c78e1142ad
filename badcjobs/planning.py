"""From a source to a plan: rules of the site → sources → speed → reading → plan → shards and scripts.

What follows from the numbers is ``plan/``'s business, how they are said ``plan_words.py``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.config import AUTO, make_settings, read_toml
from badcjobs.errors import BadInput
from badcjobs.manifest import Sources, open_sources
from badcjobs.manifest.badc_manifest import Manifest
from badcjobs.manifest.surveying import Row, Surveyor, survey, survey_again
from badcjobs.plan.make import Plan, make_plan
from badcjobs.plan.margin import make_margin
from badcjobs.plan.survey import Survey
from badcjobs.plan.wish import Caps, Wish, check_wish
from badcjobs.plan_folder import Scripts, Written, fresh_folder, template_for, try_scripts, write_plan
from badcjobs.plan_left_out import LeftOut
from badcjobs.plan_rows import RowFile
from badcjobs.plan_speed import find_speed
from badcjobs.preflight.site import Site
from badcjobs.site_file import find_site

Progress = Callable[[int], None]

_SAID_BY_ROWS = ("source", "root", "chunk_length", "overlap")


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """What ``badcjobs plan`` was told; None: not said."""

    flags: Mapping[str, Any]  # of badcjobs run, by their names in TOML: source, root, engine, chunk_length, …
    config: Path | None = None
    site: str | None = None
    rate: float | None = None
    speed_from: Path | None = None
    wish: Wish = field(default_factory=Wish)
    write: Path | None = None
    out: Path | None = None
    template: str | None = None
    keys: tuple[str, ...] = ()  # KEY=VALUE of the template


@dataclass(frozen=True, slots=True)
class PlanHere:
    """Where the question is asked."""

    environ: Mapping[str, str]
    cwd: Path
    progress: Progress = lambda rows: None


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan, and what was written of it."""

    plan: Plan
    descriptions: tuple[str, ...]
    written: Written | None = None


def plan_sources(order: PlanOrder, here: PlanHere) -> Planned:
    """Read the sources once, from end to end, and plan them; everything that can be refused is refused before."""
    site = None if order.site is None else find_site(order.site, here.cwd)
    caps = Caps() if site is None else caps_of(site)
    check_wish(order.wish, caps)
    settings = make_settings(Path("results"), order.flags, order.config and here.cwd / order.config, "plan")
    if "workers_per_gpu" not in _run_table(order, here.cwd):
        settings = replace(settings, workers_per_gpu=AUTO)  # as the scripts say
    target = None if order.write is None else here.cwd / order.write
    scripts = None if target is None else _scripts(order, target, site, here.cwd)
    root = None if settings.root is None else here.cwd / settings.root
    sources = open_sources([here.cwd / path for path in settings.source], root=root, cutting=settings.cutting)
    speed = find_speed(order.rate, order.speed_from, settings, here.environ, here.cwd)
    make_margin(speed, order.wish.margin).work_s(order.wish.longest_s(caps))
    with ExitStack() as held:
        draft, rows = None, None
        if target is not None:
            draft = held.enter_context(fresh_folder(target))
            rows = held.enter_context(RowFile(draft / ".rows"))
        surveyed = read_sources(sources, rows, here.progress, draft)
        plan = make_plan(surveyed, speed, order.wish, caps)
        written = None
        if target is not None and scripts is not None and draft is not None and rows is not None:
            written = write_plan(plan, rows, draft, target, scripts)
        return Planned(plan, tuple(one.replace(f"{here.cwd}/", "") for one in sources.descriptions), written)


def caps_of(site: Site) -> Caps:
    """Return what of a site's rules a plan is made by."""
    free = None
    if site.bill_rule == "max" and site.bill_gpu and site.bill_cpu:  # the dearest of the two is paid for anyway
        free = site.bill_gpu / site.bill_cpu
        if site.node_cpus and site.node_gpus:
            free = min(free, site.node_cpus / site.node_gpus)
    return Caps(
        site=site.name,
        array_tasks=site.array_tasks,
        queued_jobs=site.queued_jobs,
        gpu_hours=site.gpu_hours,
        time_s=None if site.time_h is None else site.time_h * 3600,
        files=site.files,
        node_gpus=site.node_gpus,
        node_cpus=site.node_cpus,
        node_memory_gb=site.node_memory_gb,
        plan_time_s=None if site.plan_time_h is None else site.plan_time_h * 3600,
        plan_gpus=site.plan_gpus,
        free_cores_per_gpu=free,
    )


# --- reading ----------------------------------------------------------------------------------------------------------


def read_sources(sources: Sources, rows: RowFile | None, progress: Progress, folder: Path | None = None) -> Survey:
    """Read everything once; a second time, without them, where identities repeat. Mistakes are told, none stops it."""
    with ExitStack() as held:
        mistakes = held.enter_context(LeftOut(sources.parts, None if folder is None else folder / "left-out.txt"))
        chunks, walk = survey(sources, mistakes)
        found = _tally(chunks, rows, progress)
        if (others := survey_again(sources, walk)) is not None:
            if rows is not None:
                rows.clear()
            found = _tally(others, rows, progress)
        found.rows_alone = all(isinstance(part, Manifest) for part in sources.parts)
        mistakes.tell(found)
        return _with_remarks(found, walk)


def _tally(rows: Iterable[Row], kept: RowFile | None, progress: Progress) -> Survey:
    found = Survey()
    add, keep = found.add, None if kept is None else kept.add
    before, from_ms, until_ms = "", 0, 0
    for number, row in enumerate(rows, 1):
        start_ms, end_ms, there_ms = row.start_ms, row.end_ms, row.there_ms
        if row.unreadable and end_ms is None:
            found.add_unreadable(row.path, row.base, row.unreadable)
        elif there_ms is not None and end_ms is not None and there_ms < end_ms:
            end_ms = max(start_ms, there_ms)  # no more will be done
            found.add_broken(end_ms - start_ms, row.path, row.chunk_id)
        else:
            add(None if end_ms is None else end_ms - start_ms, row.path, row.chunk_id)
        if end_ms is not None:
            if start_ms < until_ms and row.recording_id == before:
                found.shared_ms += max(0, min(end_ms, until_ms) - max(start_ms, from_ms))
            before, from_ms, until_ms = row.recording_id, start_ms, end_ms
        if row.is_cut:
            found.cut += 1
        if keep is not None:
            keep(row)
        if not number & 0xFF:  # a call for each of a million rows would be felt
            progress(number)
    return found


def _with_remarks(found: Survey, walk: Surveyor) -> Survey:
    found.not_there, found.not_there_names = len(walk.not_there), walk.not_there[:3]
    found.measured, found.rates_hz = walk.measured, walk.rates_hz
    found.broken, found.broken_names = walk.remarks.broken, walk.remarks.broken_examples
    found.passed_over = tuple(walk.remarks.notes())
    return found


# --- writing ----------------------------------------------------------------------------------------------------------


def _scripts(order: PlanOrder, target: Path, site: Site | None, cwd: Path) -> Scripts:
    template = order.template or template_for(None if site is None else site.name)
    out = target / "results" if order.out is None else cwd / order.out
    scripts = Scripts(template, out, order.keys, tuple(_run_words(order, cwd)))
    try_scripts(scripts)
    return scripts


def _run_table(order: PlanOrder, cwd: Path) -> Mapping[str, Any]:
    table: Mapping[str, Any] = {} if order.config is None else read_toml(cwd / order.config).get("run", {})
    return table


def _run_words(order: PlanOrder, cwd: Path) -> Iterator[str]:
    """Yield the options of ``badcjobs run`` that a task needs; where chunks begin and end, its rows say."""
    if order.config is not None:
        said = _run_table(order, cwd)
        if taken := [key for key in _SAID_BY_ROWS if key in said]:
            raise BadInput(
                f"{order.config}: [run] {taken[0]} cannot be used with --write",
                why="the rows that are written say it; badcjobs run would refuse it beside them",
                fix=f"take it out of the file; --{taken[0].replace('_', '-')} {said[taken[0]]} on this command line",
            )
        yield f"--config={cwd / order.config}"
        if (workers := said.get("workers_per_gpu")) is not None:  # templates say auto before; the last counts
            yield f"--workers-per-gpu={workers}"
    for key, value in order.flags.items():
        name = key.replace("_", "-")
        if key in _SAID_BY_ROWS or value is None:
            continue
        if key == "hawkears_root":  # a task may start anywhere
            value = str(cwd / value)
        if isinstance(value, bool):
            yield f"--{name}" if value else f"--no-{name}"
            continue
        yield from (f"--{name}={one}" for one in (value if isinstance(value, list | tuple) else (value,)))
