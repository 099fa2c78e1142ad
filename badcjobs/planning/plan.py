"""``badcjobs plan``: read the site, the sources and the speed, make the plan, write shards and scripts, show the plan.

With --out DIR:

    DIR/plan.json             the plan as JSON
    DIR/wave-1.sbatch         the job script of the first wave; results: OUT/wave-1 with [run] out, else DIR/results
    DIR/wave-1/tasks.txt      the manifests of its tasks: each array task takes one line
    DIR/wave-1/task-0000.csv  the rows of one task
    DIR/left-out.txt          rows that cannot be planned, each with its reason; only where there are any

It is written under a temporary name and renamed at the end, so that DIR is always complete.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from badcjobs import paths as resources
from badcjobs.clock import SystemClock
from badcjobs.cluster.templates import fill_template
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.model import NO_CUTTING, Cutting
from badcjobs.paths import shell_line
from badcjobs.planning.bill import ALIKE, FASTEST, Cut, billed_start_up_s, choose, list_lengths
from badcjobs.planning.findings import FINE, apply_rules, below, folded, worst_first
from badcjobs.planning.make_plan import CampaignPlan, cut_of, make_plan, to_dict
from badcjobs.planning.place_rules import OUT, results_bytes
from badcjobs.planning.plan_speed import Speed, find_speed
from badcjobs.planning.plan_survey import Progress, RowFile, read_sources
from badcjobs.planning.plan_tasks import PlanWish, check_wish, make_margin
from badcjobs.planning.preflight_facts import PreflightFacts, look_at_folder
from badcjobs.planning.site import Site, find_site
from badcjobs.project import Project
from badcjobs.report.rules import PROBLEM, known_texts
from badcjobs.report.tables import Row, Table, columns, table_text
from badcjobs.report.words import clock, count, data_size, duration, number
from badcjobs.settings import AUTO, PlanSettings, RunSettings, SubmitSettings, absolute
from badcjobs.sources.badc_manifest import Manifest
from badcjobs.sources.open import Sources, open_sources_of
from badcjobs.workers.chunk_audio import OVERLAP_S
from badcjobs.workers.staging import MOST_STAGED_BYTES

_IN_ROWS = ("source", "root", "chunk_length", "overlap")
FillScript = Callable[[Mapping[str, object], str | None], str]  # values by key of the template, --root


@dataclass(frozen=True, slots=True)
class PlanOrder:
    """What ``badcjobs plan`` was given; None: not set."""

    flags: Mapping[str, Any]  # options of run by key: source, root, engine, chunk_length, …
    project: Project = field(default_factory=Project)
    submit: SubmitSettings = field(default_factory=SubmitSettings)
    plan: PlanSettings = field(default_factory=PlanSettings)
    site: str | None = None
    rate: float | None = None
    speed_from: Path | None = None
    out: Path | None = None  # for shards and scripts


@dataclass(frozen=True, slots=True)
class Planned:
    """The plan, and what was written of it: the script of each wave and where its results go."""

    plan: CampaignPlan
    descriptions: tuple[str, ...]
    cutting: Cutting = NO_CUTTING
    folder: Path | None = None
    written: Sequence[tuple[Path, Path]] = ()
    left_out: Path | None = None


def plan_sources(
    order: PlanOrder, environ: Mapping[str, str], cwd: Path, progress: Progress = lambda rows: None
) -> Planned:
    """Read the sources from end to end, and plan them; wrong input is refused before that."""
    site = find_site(order.site, cwd)
    settings = order.project.make(RunSettings, order.flags, "plan")
    wish = PlanWish.of(order.submit, order.plan, settings)
    check_wish(wish, site)
    fill = _script_filler(order, site, cwd)
    if order.out is not None:  # as a test, to find mistakes before a long reading
        if absolute(cwd, str(order.out)) in [absolute(cwd, one) for one in settings.source]:
            raise BadInput(f"--out {order.out} is also a SOURCE: a plan needs a folder of its own", fix="--out plan")
        numbers = dict.fromkeys(("gpus-per-node", "cpus-per-task"), 1)
        fill({"array": "0-0", "time": "1:00:00", **numbers, "mem": "1G", "source": "tasks.txt", "out": "out"}, None)
    sources = open_sources_of(settings, cwd)
    descriptions = tuple(one.replace(f"{cwd}/", "") for one in sources.descriptions)
    speed = find_speed(order.rate, order.speed_from, settings, environ, cwd)
    make_margin(speed, wish.margin).work_s(wish.longest_s(site))
    sources, cuts = _choose_cutting(sources, speed, wish, site, progress)
    if order.out is None:
        plan = make_plan(read_sources(sources, None, progress), speed, wish, site, cuts)
        return Planned(plan, descriptions, sources.cutting)
    target = cwd / order.out
    out = cwd / (order.project.get("run", "out") or target / "results")
    home = os.path.realpath(environ.get("HOME") or "/nonexistent")
    place = look_at_folder(out, SystemClock(), write=False)
    facts = PreflightFacts(site=site, out=place, home=home, on_cluster=bool(site.name))
    of_place = [one for one in apply_rules(OUT, facts) if one.severity != FINE]
    with fresh_folder(target) as draft:
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="", dir=draft) as file:
            rows = RowFile(file)
            plan = make_plan(read_sources(sources, rows, progress, draft), speed, wish, site, cuts)
            plan = replace(plan, remarks=(*plan.remarks, *of_place))
            written = write_plan(plan, rows, draft, target, out, fill)
        left_out = target / "left-out.txt" if (draft / "left-out.txt").exists() else None
    return Planned(plan, descriptions, sources.cutting, target, written, left_out)


def _choose_cutting(
    sources: Sources, speed: Speed, wish: PlanWish, site: Site, progress: Progress
) -> tuple[Sources, list[Cut]]:
    """Return the sources, cut to the length that costs least, and the lengths that were compared.

    Recordings are read for this; their headers are kept. Nothing is chosen if the user has, or if rows are listed.
    """
    lengths_s = list_lengths(speed) if site.billing and not sources.cutting.cuts_recordings else []
    if not lengths_s or any(isinstance(part, Manifest) for part in sources.parts):
        return sources, []
    sources = replace(sources, read_header=cache(sources.read_header))
    whole = read_sources(sources, None, progress).lengths
    cutting = replace(sources.cutting, overlap_s=OVERLAP_S if speed.bytes_per_s else 0.0)
    longest_s = float("inf") if whole.unknown else whole.longest_ms / 1000
    ways = {one: replace(cutting, chunk_length_s=one) for one in lengths_s if one < longest_s}
    lengths = {whole.mean_ms / 1000: whole} if longest_s <= ALIKE * max(lengths_s) else {}
    lengths |= {one: whole.cut(way) for one, way in ways.items()}
    cuts = [cut_of(some, whole.total_ms, speed, wish, site, one) for one, some in lengths.items()]
    best_s = choose(speed, wish, site, cuts)[0].chunk_s
    return replace(sources, cutting=ways.get(best_s or 0.0, sources.cutting)), cuts


# --- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Provide a temporary folder that becomes the target on success, and is removed otherwise."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"{target} exists already",
            why="running or queued jobs may use its shards",
            fix=f"--out {shell_line(target.with_name(target.name + '-2'))}",
        )
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.mkdir(parents=True)
        yield draft
        draft.rename(target)
    except OSError as error:
        why = error.strerror or str(error)
        raise BadInput(f"{target} cannot be written", why=why, fix="--out DIR in a folder of yours") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def write_plan(
    plan: CampaignPlan, rows: RowFile, draft: Path, target: Path, out: Path, fill: FillScript
) -> list[tuple[Path, Path]]:
    """Write shards and scripts to a draft of the folder; return the path of each script and of its results."""
    lines, written = rows.rows(), []
    width = len(str(len(plan.waves)))
    for wave in plan.waves:
        name = f"wave-{wave.number:0{width}}"
        (draft / name).mkdir()
        digits = max(4, len(str(wave.tasks - 1)))
        shards = [f"task-{number:0{digits}}.csv" for number in range(wave.tasks)]
        for shard, share in zip(shards, plan.sizing.shares[wave.first :], strict=False):
            with (draft / name / shard).open("w", encoding="utf-8", newline="") as file:
                file.write(rows.header)
                file.writelines(islice(lines, share.rows))
        (draft / name / "tasks.txt").write_text("".join(f"{target / name / shard}\n" for shard in shards), "utf-8")
        values: dict[str, object] = {
            "array": f"0-{wave.tasks - 1}" + (f"%{plan.parallel}" if plan.parallel else ""),
            "time": clock(plan.sizing.time_s), "gpus-per-node": plan.sizing.gpus, "cpus-per-task": plan.choice.cpus,
            "mem": f"{plan.choice.mem_gb}G", "source": target / name / "tasks.txt", "out": out / name,
        }  # fmt: skip
        values |= {"args": f"--workers-per-gpu={plan.choice.workers}"} if plan.speed.points else {}
        write_new_text(draft / f"{name}.sbatch", fill(values, rows.root))
        written.append((target / f"{name}.sbatch", out / name))
    text = json.dumps(to_dict(plan), indent=2, ensure_ascii=False)
    (draft / "plan.json").write_text(f"{text}\n", encoding="utf-8")
    return written


def _script_filler(order: PlanOrder, site: Site, cwd: Path) -> FillScript:
    """Return what fills in the script of a wave; it raises BadInput if the template does not accept the values."""
    own = f"{site.name}-array"
    usual = own if (resources.folder("templates") / f"{own}.sbatch").exists() else "array"
    template = order.plan.template or usual
    tables = ("run.", "alerts.", "recordings.", "site")  # those that a task reads
    keys = {key: value for key, value in order.project.keys.items() if key.startswith(tables)}
    keys |= {} if order.site in (order.project.site, template.removesuffix("-array")) else {"site": order.site}
    others = {key: value for key, value in keys.items() if key.removeprefix("run.") not in _IN_ROWS}
    given = {key: value for key, value in order.flags.items() if key not in _IN_ROWS}
    words = list(replace(order.project, keys=others).run_words(given, cwd))

    def fill(values: Mapping[str, object], root: str | None) -> str:
        arguments = [*words, *([] if root is None else [f"--root={root}"])]
        pairs = [*values.items(), *(("args", shlex.quote(word)) for word in arguments)]
        settings = [f"{key}={value}" for key, value in pairs]
        try:
            return fill_template(template, settings, order.project, complete=True).text
        except BadInput as error:
            if "account" not in error.what:
                raise
            why = f"the template {template} needs one; {error.what.removeprefix('--set ')}"
            fix = "the same command with --config submit.account=NAME   (or account under [submit] in badcjobs.toml)"
            raise BadInput("the job scripts have no valid account", why=why, fix=fix) from None

    return fill


# --- plan words -------------------------------------------------------------------------------------------------------

_INDENT = 14
_DAY_S = 86_400
_SHOWN_SCRIPTS, _SHOWN_CHOICES = 3, 6

# name of a line → its text, or its parts as known_texts takes them, with values of _figures; without text: left out
_LINES: dict[str, str | tuple[str, ...]] = {
    "": (
        "{all_hours:one} GPU-hours in {tasks:count array_task} and {many:count wave}",
        "; {billed_units:one} billed units",
        "; {problems:count problem?}",
    ),
    "request": "--gpus-per-node={choice.gpus} --cpus-per-task={choice.cpus} --mem={choice.mem_gb}G --time={time}"
    "{prefer}",
    "run": "{run}{shards}",
    "cost": (
        "{choice.units_per_1000_audio_hours:one?} billed units per 1,000 audio-hours, with {billed_s:,.0f} s of"
        " start-up per task, {how}: {choice.units_per_hour:g} an hour for a task",
        "{no_weights}",
        "; {choice.joules_per_audio_hour:round?} J per audio-hour",
    ),
    "choices": "(workers per GPU; units per 1,000 audio-hours and J per audio-hour include start-up; for the"
    " cheapest, estimates count 5 % more, and within 1 % the energy decides)",
    "source": "{sources}",
    "audio": "{audio_hours:one} hours in {lengths.rows:count chunk}{shared}{cut}; mean {mean_s:,.1f} s{sounding},"
    " longest {longest_s:,.1f} s",
    "speed": "{speed.audio_hours_per_gpu_hour:one} audio-hours per GPU-hour, {speed.origin}{measured}",
    "GPU time": "{work_gpu_hours:one} GPU-hours of work and {start_up_gpu_hours:one} of start-up"
    " ({billed_s:,.0f} s per task, {how}); {asked_gpu_hours:one} are requested, with a margin",
    "tasks": "{tasks:count array_task} of {sizing.gpus:count GPU} with {each} hours of audio{tasks:| each}:"
    " about {sizing.expected_s:duration} of {time}",
    "margin": "start-up {margin.start_up_s:,.0f} s ({how}), an orderly end {margin.end_s:,.0f} s, and between them"
    " each task may be {margin.factor:.2f} times as slow as the mean ({margin.why})",
    "memory": "--mem={choice.mem_gb}G: {choice.mem_why}",
    "time": "--time={time}: {time_why}",
    "waves": "{sizes}{waves_why}",
    "files": "{files:,} at most, with shards, logs and job scripts; none per chunk{quota}",
    "space": "{space}",
    "finished": (
        "not known without --parallel N; 1 GPU takes {alone}, with the start-up of the margin",
        "after {running} of running with {gpus:count GPU} at a time ({gpus_why}); time in the queue not included",
    ),
    "measured on": "{speed.devices:list}",
}


def plan_text(planned: Planned) -> str:
    """Return the plan as text; the same plan gives the same text."""
    plan, figures, lines = planned.plan, _figures(planned), list[str]()
    for name, parts in _LINES.items():
        text = "".join(known_texts((parts,) if isinstance(parts, str) else parts, figures))
        if not name:
            lines += [text, ""]
        elif name == "choices":
            lines += ["", *(_choice_lines(plan, text) if len(plan.choices) > 1 else [])]
        elif text:
            lines += folded(name, text, _INDENT)
    for remark in worst_first(plan.remarks):
        lines += ["", *folded(remark.severity, f"{remark.subject}: {remark.text}", _INDENT), *below(remark, _INDENT)]
    if planned.folder is not None:
        many = f"{count(plan.tasks, 'shard')}, {count(len(planned.written), 'job script')}"
        lines += ["", *folded("written", f"{planned.folder}: {many}", _INDENT)]
    if planned.left_out is not None:
        lines += folded("left out", f"the full list with reasons: {planned.left_out}", _INDENT)
    for script, out in planned.written[:_SHOWN_SCRIPTS]:
        lines.append(f"{'':{_INDENT}}sbatch {shell_line(script)}")
        lines.append(f"{'':{_INDENT}}badcjobs merge {shell_line(out)}   (once it has ended)")
    if (more := len(planned.written) - _SHOWN_SCRIPTS) > 0:
        lines.append(f"{'':{_INDENT}}… and {more:,} more, each after the one before has ended")
    return "\n".join(lines)


def _choice_lines(plan: CampaignPlan, note: str) -> list[str]:
    """Return the choices side by side: the cheapest, the fastest, and those that differ from the cheapest in one."""
    mine, cheapest = plan.choice, plan.choices[0]
    best = {"cheapest" if plan.site.billing else "least GPU time": cheapest, "fastest": plan.fastest}
    others = (one for one in plan.choices if one not in best.values())
    near = sorted(others, key=lambda one: sum(a != b for a, b in zip(one[:3], cheapest[:3], strict=True)))
    rows = list[Row]()
    for one in (one for one in plan.choices if one in {*best.values(), *near[:_SHOWN_CHOICES]}):
        marks = [word for word, other in best.items() if one == other]
        words = ", ".join([*marks, "measured" if one.measured else "from --rate" if plan.speed.given else "estimated"])
        counts = (f"{one.gpus}", f"{one.workers}", f"{one.cpus}", f"{one.mem_gb}G", f"{one.chunk_s or 0:,.0f} s")
        cost = (one.rate * one.gpus, 0), (one.units_per_1000_audio_hours, 1), (one.joules_per_audio_hour, 1)
        rows.append((*counts, *(number(*pair) for pair in cost), f"→ {words}" if one == mine else words))
    heads = columns("GPUs", "workers", "cores", "memory", "chunks", "× real time", "units", "J", "<")
    few, all_ = len(rows), len(plan.choices)
    more = [f"  {few} of {all_} choices; all of them: --json"] if few < all_ else []
    return [*table_text(Table("choices", "", heads, rows)), *more, *folded("", note, 4), ""]


def _figures(planned: Planned) -> dict[str, Any]:
    plan, descriptions = planned.plan, planned.descriptions
    survey, lengths, waves = plan.survey, plan.survey.lengths, plan.waves
    hours = [share.audio_ms / 3_600_000 for share in plan.sizing.shares]
    sizes = " or ".join(dict.fromkeys(f"{wave.tasks:,}" for wave in (waves[-1], waves[0])))
    measured = f" ({count(plan.speed.tasks, 'task')}, {number(plan.speed.gpu_hours, 2)} GPU-hours without start-up)"
    is_short = plan.sizing.expected_s > plan.sizing.time_s
    time_why = "at most; the fullest task needs more" if is_short else "what the fullest task needs"
    alone_s = plan.work_gpu_hours * 3600 + plan.tasks * plan.margin.start_up_s
    prefer = "the fastest" if plan.wish.prefer == FASTEST else "the cheapest" if plan.site.billing else "least GPU time"
    run = {
        "workers-per-gpu": plan.choice.workers if plan.speed.points or plan.wish.workers else AUTO,
        "chunk-length": f"{planned.cutting.chunk_length_s or 0:g}",
        "overlap": f"{planned.cutting.overlap_s:g}",
    }
    hours_of_recordings = f", out of {number(plan.recording_hours)} hours of recordings (chunks overlap)"
    return {
        **vars(plan),
        "billed_s": billed_start_up_s(plan.speed),
        "how": "measured" if plan.margin.start_up_measured else "assumed",
        "problems": sum(remark.severity == PROBLEM for remark in plan.remarks),
        "all_hours": plan.work_gpu_hours + plan.start_up_gpu_hours,  # as they are billed
        "lengths": lengths,
        "sources": ", ".join(descriptions[:3]) + (f" and {len(descriptions) - 3:,} more" if descriptions[3:] else ""),
        "cut": f", {survey.cut:,} of them cut out of longer files on the fly" if survey.cut else "",
        "shared": hours_of_recordings if survey.shared_ms else "",
        "sounding": f" (of the {lengths.rows - lengths.empty:,} with audio)" if lengths.empty else "",
        "mean_s": lengths.mean_ms / 1000,
        "longest_s": lengths.longest_ms / 1000,
        "each": " to ".join(dict.fromkeys(number(bound, 2) for bound in (min(hours), max(hours)))),
        "time": clock(plan.sizing.time_s),
        "many": len(waves),
        "sizes": "1; " if len(waves) == 1 else f"{len(waves):,} of {sizes} tasks, one after another: ",
        "quota": f"; the quota of {plan.site.name} is {plan.site.files:,}" if plan.site.files else "",
        "space": _space(plan),
        "time_why": "as requested" if plan.wish.time_s else time_why,
        "measured": "" if plan.speed.gpu_hours is None else measured,
        "alone": span(alone_s) if plan.running_s is None else None,
        "running": None if plan.running_s is None else span(plan.running_s),
        "prefer": f" ({prefer})" if len(plan.choices) > 1 else "",
        "run": " ".join(f"--{option} {value}" for option, value in run.items() if value != "0"),
        "shards": " (the shards are cut)" if planned.folder and survey.cut and planned.cutting.chunk_length_s else "",
        "no_weights": None if plan.site.billing else "not known: no --site with [billing]",
    }


def _space(plan: CampaignPlan) -> str:
    """Return the bytes of the source, of the results and of copies, and the quota."""
    size, needs = plan.survey.walk.size, results_bytes(plan.survey.lengths.rows, plan.work_gpu_hours)
    source = f"{data_size(size.total_bytes)} in {count(size.files, 'file')}"
    if size.total_bytes is None:
        source = f"not known: none of its {count(size.files, 'file')} was found here"
    elif size.unsized:
        source = f"about {source} ({size.unsized:,} were not looked at)"
    text = f"the source: {source}; results: about {data_size(needs)}; copies of audio on the disk of the node: at most"
    quota = f"; the quota of {plan.site.name} is {plan.site.space_tb:g} TB" if plan.site.space_tb else ""
    return f"{text} {data_size(MOST_STAGED_BYTES)} per task{quota}"


def span(seconds: float) -> str:
    """Return a duration; in days from two days on."""
    return duration(seconds) if seconds < 2 * _DAY_S else f"{seconds / _DAY_S:,.1f} days"
