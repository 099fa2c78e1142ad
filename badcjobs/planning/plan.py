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
import math
import os
import shlex
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from badcjobs import paths as resources
from badcjobs.clock import SystemClock
from badcjobs.cluster.templates import WrongValues, fill_template
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.model import NO_CUTTING, Cutting
from badcjobs.paths import shell_line
from badcjobs.planning.bill import ALIKE, FASTEST, Choice, Cut, billed_start_up_s, choose, list_lengths
from badcjobs.planning.findings import FINE, Remark, below, folded, worst_first
from badcjobs.planning.make_plan import CampaignPlan, cut_of, make_plan, to_dict
from badcjobs.planning.place_rules import check_out, results_bytes
from badcjobs.planning.plan_speed import Speed, find_speed
from badcjobs.planning.plan_survey import Lengths, Progress, RowFile, read_sources
from badcjobs.planning.plan_tasks import PlanWish, check_wish, make_margin
from badcjobs.planning.preflight_facts import look_at_folder
from badcjobs.planning.site import Site, find_site
from badcjobs.project import Project
from badcjobs.report.rules import PROBLEM, known_texts
from badcjobs.report.tables import WIDTH, Row, Table, columns, table_text
from badcjobs.settings import AUTO, PlanSettings, RunSettings, SubmitSettings, absolute
from badcjobs.sources.badc_manifest import Manifest
from badcjobs.sources.open import Sources, open_sources_of
from badcjobs.sources.places import place_sources
from badcjobs.store.atomic_write import fresh_folder
from badcjobs.words import clock, count, data_size, duration, number
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
    if order.out is not None:
        _check_out(order.out, settings, fill, cwd)
    sources = place_sources(settings, open_sources_of(settings, cwd), cwd)
    descriptions = tuple(text.replace(f"{cwd}/", "") for text in sources.descriptions)
    speed = find_speed(order.rate, order.speed_from, settings, environ, cwd)
    make_margin(speed, wish.margin).work_s(wish.longest_s(site))
    sources, cuts = _choose_cutting(sources, speed, wish, site, progress)
    if order.out is None:
        plan = make_plan(read_sources(sources, None, progress), speed, wish, site, cuts)
        return Planned(plan, descriptions, sources.cutting)

    target = cwd / order.out
    out = cwd / (order.project.get("run", "out") or target / "results")
    about_out = _check_results(out, site, environ)
    _refuse_used(target)
    with fresh_folder(target) as draft:
        with tempfile.TemporaryFile("w+", encoding="utf-8", newline="", dir=draft) as file:
            rows = RowFile(file)
            plan = make_plan(read_sources(sources, rows, progress, draft), speed, wish, site, cuts)
            plan = replace(plan, remarks=(*plan.remarks, *about_out))
            written = write_plan(plan, rows, draft, target, out, fill)
        left_out = target / "left-out.txt" if (draft / "left-out.txt").exists() else None
    return Planned(plan, descriptions, sources.cutting, target, written, left_out)


def _check_out(out: Path, settings: RunSettings, fill: FillScript, cwd: Path) -> None:
    """Refuse a folder that is a source, and values that the template does not accept, before a long reading."""
    if absolute(cwd, str(out)) in [absolute(cwd, source) for source in settings.source]:
        raise BadInput(f"--out {out} is also a SOURCE: a plan needs a folder of its own", fix="--out plan")
    request = {"array": "0-0", "time": "1:00:00", "gpus-per-node": 1, "cpus-per-task": 1, "mem": "1G"}
    fill({**request, "source": "tasks.txt", "out": "out"}, None)


def _check_results(out: Path, site: Site, environ: Mapping[str, str]) -> list[Remark]:
    """Return what is wrong with the folder of the results."""
    folder = look_at_folder(out, SystemClock(), write=False)
    home = os.path.realpath(environ.get("HOME") or "/nonexistent")
    remarks = check_out(folder, site, home, on_cluster=bool(site.name))
    return [remark for remark in remarks if remark.severity != FINE]


def _choose_cutting(
    sources: Sources, speed: Speed, wish: PlanWish, site: Site, progress: Progress
) -> tuple[Sources, list[Cut]]:
    """Return the sources, cut to the length that costs least, and the lengths that were compared.

    Recordings are read for this; their headers are kept. Nothing is chosen if the user has, or if rows are listed.
    """
    has_rows = any(isinstance(part, Manifest) for part in sources.parts)
    if not site.billing or sources.cutting.cuts_recordings or has_rows:
        return sources, []
    lengths_s = list_lengths(speed)
    if not lengths_s:
        return sources, []

    sources = replace(sources, read_header=cache(sources.read_header))
    whole = read_sources(sources, None, progress).lengths
    longest_s = math.inf if whole.unknown else whole.longest_ms / 1000
    lengths = {}
    if longest_s <= ALIKE * max(lengths_s):
        lengths[whole.mean_ms / 1000] = whole
    cutting = replace(sources.cutting, overlap_s=OVERLAP_S if speed.bytes_per_s else 0.0)
    cuttings = {}
    for length_s in lengths_s:
        if length_s < longest_s:
            cuttings[length_s] = replace(cutting, chunk_length_s=length_s)
            lengths[length_s] = whole.cut(cuttings[length_s])
    cuts = [cut_of(chunks, whole.total_ms, speed, wish, site, length_s) for length_s, chunks in lengths.items()]
    best, *_ = choose(speed, wish, site, cuts)
    return replace(sources, cutting=cuttings.get(best.chunk_s or 0.0, sources.cutting)), cuts


# --- writing ----------------------------------------------------------------------------------------------------------


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"{target} exists already",
            why="running or queued jobs may use its shards",
            fix=f"--out {shell_line(target.with_name(target.name + '-2'))}",
        )


def write_plan(
    plan: CampaignPlan, rows: RowFile, draft: Path, target: Path, out: Path, fill: FillScript
) -> list[tuple[Path, Path]]:
    """Write shards and scripts to a draft of the folder; return the path of each script and of its results."""
    lines = rows.rows()
    width = len(str(len(plan.waves)))
    written = []
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
        values = {
            "array": f"0-{wave.tasks - 1}",
            "time": clock(plan.sizing.time_s),
            "gpus-per-node": plan.sizing.gpus,
            "cpus-per-task": plan.choice.cpus,
            "mem": f"{plan.choice.mem_gb}G",
            "source": target / name / "tasks.txt",
            "out": out / name,
        }
        if plan.parallel:
            values["array"] = f"0-{wave.tasks - 1}%{plan.parallel}"
        if plan.speed.points:
            values["args"] = f"--workers-per-gpu={plan.choice.workers}"
        write_new_text(draft / f"{name}.sbatch", fill(values, rows.root))
        written.append((target / f"{name}.sbatch", out / name))
    text = json.dumps(to_dict(plan), indent=2, ensure_ascii=False)
    (draft / "plan.json").write_text(f"{text}\n", encoding="utf-8")
    return written


def _script_filler(order: PlanOrder, site: Site, cwd: Path) -> FillScript:
    """Return what fills in the script of a wave; it raises BadInput if the template does not accept the values."""
    template = f"{site.name}-array"
    if not (resources.folder("templates") / f"{template}.sbatch").exists():
        template = "array"
    template = order.plan.template or template
    tables = ("run.", "alerts.", "recordings.", "site")  # those that a task reads
    keys = {key: value for key, value in order.project.keys.items() if key.startswith(tables)}
    if order.site not in (order.project.site, template.removesuffix("-array")):
        keys["site"] = order.site
    keys = {key: value for key, value in keys.items() if key.removeprefix("run.") not in _IN_ROWS}
    flags = {key: value for key, value in order.flags.items() if key not in _IN_ROWS}
    words = list(replace(order.project, keys=keys).run_words(flags, cwd))

    def fill(values: Mapping[str, object], root: str | None) -> str:
        arguments = words if root is None else [*words, f"--root={root}"]
        settings = [f"{key}={value}" for key, value in values.items()]
        settings += [f"args={shlex.quote(word)}" for word in arguments]
        try:
            return fill_template(template, settings, order.project, complete=True).text
        except WrongValues as error:
            if "account" not in error.keys:
                raise
            raise BadInput(
                "the job scripts have no valid account",
                why=f"the template {template} needs one; {error.what.removeprefix('--set ')}",
                fix="the same command with --config submit.account=NAME   (or account under [submit] in badcjobs.toml)",
            ) from None

    return fill


# --- plan words -------------------------------------------------------------------------------------------------------

_INDENT = 14
_DAY_S = 86_400
_SHOWN_SCRIPTS = 3
_SHOWN_CHOICES = 6
_SHOWN_SOURCES = 3

# name of a line → its parts as known_texts takes them, with values of _figures; without text: left out
_LINES = {
    "": (
        "{all_hours:one} GPU-hours in {tasks:count array_task} and {many:count wave}",
        "; {billed_units:one} billed units",
        "; {problems:count problem?}",
    ),
    "request": (
        "--gpus-per-node={choice.gpus} --cpus-per-task={choice.cpus} --mem={choice.mem_gb}G --time={time}{prefer}",
    ),
    "run": ("{run}",),
    "cost": (
        "{choice.units_per_1000_audio_hours:one?} billed units per 1,000 audio-hours, with {billed_s:,.0f} s of"
        " start-up per task, {how}: {choice.units_per_hour:g} an hour for a task",
        "{no_weights}",
        "; {choice.joules_per_audio_hour:round?} J per audio-hour",
    ),
    "choices": (
        "(workers per GPU; units per 1,000 audio-hours and J per audio-hour include start-up; for the"
        " cheapest, estimates count 5 % more, and within 1 % the energy decides)",
    ),
    "source": ("{sources}",),
    "audio": (
        "{audio_hours:one} hours in {lengths.rows:count chunk}{shared}{cut}; mean {mean_s:,.1f} s{sounding},"
        " longest {longest_s:,.1f} s",
    ),
    "speed": ("{speed.audio_hours_per_gpu_hour:one} audio-hours per GPU-hour, {speed.origin}{measured}",),
    "GPU time": (
        "{work_gpu_hours:one} GPU-hours of work and {start_up_gpu_hours:one} of start-up"
        " ({billed_s:,.0f} s per task, {how}); {asked_gpu_hours:one} are requested, with a margin",
    ),
    "tasks": (
        "{tasks:count array_task} of {sizing.gpus:count GPU} with {each} hours of audio{tasks:| each}:"
        " about {sizing.expected_s:duration} of {time}",
    ),
    "margin": (
        "start-up {margin.start_up_s:,.0f} s ({how}), an orderly end {margin.end_s:,.0f} s, and between them"
        " each task may be {margin.factor:.2f} times as slow as the mean ({margin.why})",
    ),
    "memory": ("--mem={choice.mem_gb}G: {choice.mem_why}",),
    "time": ("--time={time}: {time_why}",),
    "waves": ("{sizes}{waves_why}",),
    "files": ("{files:,} at most, with shards, logs and job scripts; none per chunk{quota}",),
    "space": ("{space}",),
    "finished": (
        "not known without --parallel N; 1 GPU takes {alone}, with the start-up of the margin",
        "after {running} of running with {gpus:count GPU} at a time ({gpus_why}); time in the queue not included",
    ),
    "measured on": ("{speed.devices:list}",),
}


def plan_text(planned: Planned, width: int = WIDTH) -> str:
    """Return the plan as text; the same plan gives the same text."""
    plan = planned.plan
    figures = _figures(planned)
    lines: list[str] = []
    for name, parts in _LINES.items():
        text = "".join(known_texts(parts, figures))
        if not name:
            lines += [text, ""]
        elif name == "choices":
            lines += ["", *_choice_lines(plan, text, width)]
        elif text:
            lines += folded(name, text, _INDENT, width)
    for remark in worst_first(plan.remarks):
        lines += ["", *folded(remark.severity, f"{remark.subject}: {remark.text}", _INDENT, width)]
        lines += below(remark, _INDENT)
    return "\n".join([*lines, *_written_lines(planned, width)])


def _written_lines(planned: Planned, width: int) -> list[str]:
    """Return what was written, and the commands to paste."""
    lines = []
    if planned.folder is not None:
        files = f"{count(planned.plan.tasks, 'shard')}, {count(len(planned.written), 'job script')}"
        lines += ["", *folded("written", f"{planned.folder}: {files}", _INDENT, width)]
    if planned.left_out is not None:
        lines += folded("left out", f"the full list with reasons: {planned.left_out}", _INDENT, width)
    margin = " " * _INDENT
    for script, out in planned.written[:_SHOWN_SCRIPTS]:
        lines.append(f"{margin}sbatch {shell_line(script)}")
        lines.append(f"{margin}badcjobs merge {shell_line(out)}   (once it has ended)")
    hidden = len(planned.written) - _SHOWN_SCRIPTS
    if hidden > 0:
        lines.append(f"{margin}… and {hidden:,} more, each after the one before has ended")
    return lines


def _choice_lines(plan: CampaignPlan, note: str, width: int) -> list[str]:
    """Return the choices side by side: the cheapest, the fastest, and those that differ from the cheapest in one."""
    if len(plan.choices) == 1:
        return []
    cheapest = plan.choices[0]
    best = {_preferred(plan.site, "cheapest"): cheapest, FASTEST: plan.fastest}

    def differences(choice: Choice) -> int:
        return sum(value != other for value, other in zip(choice[:3], cheapest[:3], strict=True))

    near = sorted((choice for choice in plan.choices if choice not in best.values()), key=differences)
    shown = {*best.values(), *near[:_SHOWN_CHOICES]}
    rows = [_choice_row(choice, plan, best) for choice in plan.choices if choice in shown]
    heads = columns("GPUs", "workers", "cores", "memory", "chunks", "× real time", "units", "J", "<")
    lines = table_text(Table("choices", "", heads, rows), width)
    if len(rows) < len(plan.choices):
        lines.append(f"  {len(rows)} of {len(plan.choices)} choices; all of them: --json")
    return [*lines, *folded("", note, 4, width), ""]


def _choice_row(choice: Choice, plan: CampaignPlan, best: Mapping[str, Choice]) -> Row:
    marks = [word for word, other in best.items() if choice == other]
    if choice.measured:
        marks.append("measured")
    else:
        marks.append("from --rate" if plan.speed.given else "estimated")
    arrow = "→ " if choice == plan.choice else ""
    return (
        f"{choice.gpus}",
        f"{choice.workers}",
        f"{choice.cpus}",
        f"{choice.mem_gb}G",
        f"{choice.chunk_s or 0:,.0f} s",
        number(choice.rate * choice.gpus, 0),
        number(choice.units_per_1000_audio_hours, 1),
        number(choice.joules_per_audio_hour, 1),
        arrow + ", ".join(marks),
    )


def _preferred(site: Site, prefer: str) -> str:
    """Return what is preferred, in words."""
    if prefer == FASTEST:
        return FASTEST
    return "cheapest" if site.billing else "least GPU time"


def _figures(planned: Planned) -> dict[str, Any]:
    """Return what the lines of the text are filled with."""
    plan = planned.plan
    alone_s = plan.work_gpu_hours * 3600 + plan.tasks * plan.margin.start_up_s
    no_weights = None if plan.site.billing else "not known: no --site with [billing]"
    return {
        **vars(plan),
        **_source_figures(planned),
        **_task_figures(plan),
        "billed_s": billed_start_up_s(plan.speed),
        "how": "measured" if plan.margin.start_up_measured else "assumed",
        "problems": sum(remark.severity == PROBLEM for remark in plan.remarks),
        "all_hours": plan.work_gpu_hours + plan.start_up_gpu_hours,  # as they are billed
        "quota": f"; the quota of {plan.site.name} is {plan.site.files:,}" if plan.site.files else "",
        "space": _space(plan),
        "alone": span(alone_s) if plan.running_s is None else None,
        "running": None if plan.running_s is None else span(plan.running_s),
        "run": _run_options(planned),
        "no_weights": no_weights,
    }


def _source_figures(planned: Planned) -> dict[str, str | float | Lengths]:
    """Return what the source and the measured speed are, in words."""
    plan = planned.plan
    survey, speed = plan.survey, plan.speed
    lengths = survey.lengths
    hours_of_recordings = f", out of {number(plan.recording_hours)} hours of recordings (chunks overlap)"
    measured = f" ({count(speed.tasks, 'task')}, {number(speed.gpu_hours, 2)} GPU-hours without start-up)"
    sources = ", ".join(planned.descriptions[:_SHOWN_SOURCES])
    hidden = len(planned.descriptions) - _SHOWN_SOURCES
    if hidden > 0:
        sources += f" and {hidden:,} more"
    return {
        "lengths": lengths,
        "sources": sources,
        "cut": f", {survey.cut:,} of them cut out of longer files on the fly" if survey.cut else "",
        "shared": hours_of_recordings if survey.shared_ms else "",
        "sounding": f" (of the {lengths.rows - lengths.empty:,} with audio)" if lengths.empty else "",
        "mean_s": lengths.mean_ms / 1000,
        "longest_s": lengths.longest_ms / 1000,
        "measured": "" if speed.gpu_hours is None else measured,
    }


def _task_figures(plan: CampaignPlan) -> dict[str, str | int]:
    """Return what the tasks and the waves are, in words."""
    waves, sizing = plan.waves, plan.sizing
    hours = [share.audio_ms / 3_600_000 for share in sizing.shares]
    bounds = dict.fromkeys([number(min(hours), 2), number(max(hours), 2)])
    time_why = "what the fullest task needs"
    if plan.wish.time_s:
        time_why = "as requested"
    elif sizing.expected_s > sizing.time_s:
        time_why = "at most; the fullest task needs more"
    sizes = "1; "
    if len(waves) > 1:
        tasks = " or ".join(dict.fromkeys([f"{waves[-1].tasks:,}", f"{waves[0].tasks:,}"]))
        sizes = f"{len(waves):,} of {tasks} tasks, one after another: "
    prefer = _preferred(plan.site, plan.wish.prefer)
    if prefer in (FASTEST, "cheapest"):
        prefer = f"the {prefer}"
    return {
        "each": " to ".join(bounds),
        "time": clock(sizing.time_s),
        "time_why": time_why,
        "many": len(waves),
        "sizes": sizes,
        "prefer": f" ({prefer})" if len(plan.choices) > 1 else "",
    }


def _run_options(planned: Planned) -> str:
    """Return the options of run that the plan assumes."""
    plan, cutting = planned.plan, planned.cutting
    workers = plan.choice.workers if plan.speed.points or plan.wish.workers else AUTO
    options = [f"--workers-per-gpu {workers}"]
    if cutting.chunk_length_s:
        options.append(f"--chunk-length {cutting.chunk_length_s:g}")
    if cutting.overlap_s:
        options.append(f"--overlap {cutting.overlap_s:g}")
    if planned.folder and plan.survey.cut and cutting.chunk_length_s:
        options.append("(the shards are cut)")
    return " ".join(options)


def _space(plan: CampaignPlan) -> str:
    """Return the bytes of the source, of the results and of copies, and the quota."""
    size = plan.survey.walk.size
    needs = results_bytes(plan.survey.lengths.rows, plan.work_gpu_hours)
    files = count(size.files, "file")
    source = f"{data_size(size.total_bytes)} in {files}"
    if size.total_bytes is None:
        source = f"not known: none of its {files} was found here"
    elif size.unsized:
        source = f"about {source} ({size.unsized:,} were not looked at)"
    text = f"the source: {source}; results: about {data_size(needs)}; copies of audio on the disk of the node: at most"
    text += f" {data_size(MOST_STAGED_BYTES)} per task"
    if plan.site.space_tb:
        text += f"; the quota of {plan.site.name} is {plan.site.space_tb:g} TB"
    return text


def span(seconds: float) -> str:
    """Return a duration; in days from two days on."""
    return duration(seconds) if seconds < 2 * _DAY_S else f"{seconds / _DAY_S:,.1f} days"
