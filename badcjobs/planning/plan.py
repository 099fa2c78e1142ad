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

import csv
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs import paths as resources
from badcjobs.cluster.sbatch_options import Asked, range_of
from badcjobs.cluster.templates import fill_template, find_template
from badcjobs.errors import BadInput
from badcjobs.masking import write_new_text
from badcjobs.model import Cutting
from badcjobs.paths import shell_line
from badcjobs.planning.bill import ALIKE, FASTEST, Choice, Cut, billed_start_up_s, choose, list_lengths
from badcjobs.planning.findings import FINE, Remark, below, folded, worst_first
from badcjobs.planning.make_plan import CampaignPlan, cut_of, make_plan, to_dict
from badcjobs.planning.place_rules import check_out, results_bytes
from badcjobs.planning.plan_speed import Speed, find_speed
from badcjobs.planning.plan_survey import Progress, RowFile, read_sources
from badcjobs.planning.plan_tasks import PlanWish, check_wish, make_margin
from badcjobs.planning.preflight_facts import Job, home_folder, look_at_folder
from badcjobs.planning.site import Site, find_site
from badcjobs.project import Project
from badcjobs.report.rules import PROBLEM
from badcjobs.report.tables import WIDTH, Row, Table, columns, table_text
from badcjobs.seams import Environ
from badcjobs.settings import AUTO, PlanSettings, RunSettings, SubmitSettings
from badcjobs.sources.badc_manifest import Manifest
from badcjobs.sources.open import Sources, open_sources_of
from badcjobs.sources.places import place_sources
from badcjobs.store.atomic_write import fresh_folder
from badcjobs.words import clock, count, data_size, duration, first_names, number
from badcjobs.workers.chunk_audio import OVERLAP_S
from badcjobs.workers.staging import MOST_STAGED_BYTES

_LEFT_OUT = "left-out.txt"
_IN_ROWS = ("source", "root", "chunk_length", "overlap")
# To see whether a template accepts the values of a script: 1 can be any of them.
_EXAMPLE = dict.fromkeys(("array", "time", "gpus-per-node", "cpus-per-task", "mem", "source", "out"), 1)
FillScript = Callable[[Mapping[str, object], str | None], str]  # values by key of the template, --root


class PlanOrder(NamedTuple):
    """What ``badcjobs plan`` was given; None: not set."""

    flags: Mapping[str, Any]  # options of run by key: source, root, engine, chunk_length, …
    project: Project
    submit: SubmitSettings
    plan: PlanSettings
    site: str | None
    rate: float | None
    speed_from: Path | None
    out: Path | None  # for shards and scripts


class Planned(NamedTuple):
    """The plan, and what was written of it: the script of each wave and where its results go."""

    plan: CampaignPlan
    descriptions: tuple[str, ...]
    cutting: Cutting
    folder: Path | None = None
    written: Sequence[tuple[Path, Path]] = ()


def plan_sources(order: PlanOrder, environ: Environ, cwd: Path, progress: Progress) -> Planned:
    """Read the sources from end to end, and plan them; wrong input is refused before that."""
    site = find_site(order.site, cwd)
    settings = order.project.make(RunSettings, order.flags, "plan")
    wish = PlanWish.of(order.submit, order.plan, settings)
    check_wish(wish, site)
    fill = _script_filler(order, site, cwd)
    if order.out is not None:  # before a long reading
        _refuse_used(cwd / order.out)
        fill(_EXAMPLE, None)
    sources = place_sources(settings, open_sources_of(settings, cwd), cwd)
    descriptions = tuple(text.replace(f"{cwd}/", "") for text in sources.descriptions)
    speed = find_speed(order.rate, order.speed_from, settings, environ, cwd)
    make_margin(speed, wish.margin).work_s(wish.longest_s(site))
    sources, cuts = _choose_cutting(sources, speed, wish, site, progress)
    if order.out is None:
        plan = make_plan(read_sources(sources, progress), speed, wish, site, cuts)
        return Planned(plan, descriptions, sources.cutting)

    target = cwd / order.out
    out = cwd / (order.project.get("run", "out") or target / "results")
    about_out = _check_results(out, settings, site, environ)
    with fresh_folder(target) as draft:
        left_out_path = draft / _LEFT_OUT
        with (
            tempfile.TemporaryFile("w+", encoding="utf-8", newline="", dir=draft) as file,
            left_out_path.open("w", encoding="utf-8", errors="backslashreplace") as left_out,
        ):
            rows = RowFile(file, has_places=any(part.has_places for part in sources.parts))
            survey = read_sources(sources, progress, rows, left_out)
            plan = make_plan(survey, speed, wish, site, cuts)
            plan = plan._replace(remarks=(*plan.remarks, *about_out))
            written = write_plan(plan, rows, draft, target, out, fill)
        if not survey.mistakes.count:
            left_out_path.unlink()
    return Planned(plan, descriptions, sources.cutting, target, written)


def _check_results(
    out: Path,
    settings: RunSettings,
    site: Site,
    environ: Environ,
) -> list[Remark]:
    """Return what is wrong with the folder of the results."""
    folder = look_at_folder(out)
    job = Job(Asked(), site, settings, out=folder, home=home_folder(environ))
    return [remark for remark in check_out(job) if remark.severity != FINE]


def _choose_cutting(
    sources: Sources,
    speed: Speed,
    wish: PlanWish,
    site: Site,
    progress: Progress,
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
    whole = read_sources(sources, progress).lengths
    longest_s = math.inf if whole.unknown else whole.longest_ms / 1000
    ways = []
    if longest_s <= ALIKE * max(lengths_s):
        ways.append((sources.cutting, cut_of(whole, whole.total_ms, speed, wish, site)))
    overlap_s = OVERLAP_S if speed.bytes_per_s else 0.0
    for length_s in lengths_s:
        if length_s < longest_s:
            cutting = replace(sources.cutting, chunk_length_s=length_s, overlap_s=overlap_s)
            ways.append((cutting, cut_of(whole.cut(cutting), whole.total_ms, speed, wish, site, length_s)))
    cuts = [cut for _, cut in ways]
    best, *_ = choose(speed, wish, site, cuts)
    cuttings = {cut.chunk_s: cutting for cutting, cut in ways}
    return replace(sources, cutting=cuttings[best.chunk_s]), cuts


# --- writing ----------------------------------------------------------------------------------------------------------


def _refuse_used(target: Path) -> None:
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(
            f"{target} exists already",
            why="it is not empty, and running or queued jobs may use its shards",
            fix=f"--out {shell_line(target.with_name(target.name + '-2'))}",
        )


def write_plan(
    plan: CampaignPlan,
    rows: RowFile,
    draft: Path,
    target: Path,
    out: Path,
    fill: FillScript,
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
                writer = csv.writer(file)
                writer.writerow(rows.columns)
                writer.writerows(islice(lines, share.rows))
        (draft / name / "tasks.txt").write_text("".join(f"{target / name / shard}\n" for shard in shards), "utf-8")
        values = {
            "array": range_of(wave.tasks, plan.wish.parallel),
            "time": clock(plan.sizing.time_s),
            "gpus-per-node": plan.sizing.gpus,
            "cpus-per-task": plan.choice.cpus,
            "mem": f"{plan.choice.mem_gb}G",
            "source": target / name / "tasks.txt",
            "out": out / name,
        }
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
    keys = {key: value for key, value in order.project.keys.items() if key.removeprefix("run.") not in _IN_ROWS}
    if order.site not in (order.project.site, template.removesuffix("-array")):
        keys["site"] = order.site
    flags = {key: value for key, value in order.flags.items() if key not in _IN_ROWS}
    run_words = list(replace(order.project, keys=keys).run_words(flags, cwd))

    def fill(values: Mapping[str, object], root: str | None) -> str:
        if order.project.get("submit", "account") is None and "account" in find_template(template).open:
            raise BadInput(
                "the job scripts have no account",
                why=f"the template {template} needs one",
                fix="the same command with --config submit.account=NAME   (or account under [submit] in badcjobs.toml)",
            )
        arguments = run_words if root is None else [*run_words, f"--root={root}"]
        settings = [f"{key}={value}" for key, value in values.items()]
        settings += [f"args={shlex.quote(word)}" for word in arguments]
        return fill_template(template, settings, order.project, complete=True).text

    return fill


# --- the plan as text ------------------------------------------------------------------------------------------------

_INDENT = 14
_DAY_S = 86_400
_SHOWN_SCRIPTS = 3
_SHOWN_CHOICES = 8
_SHOWN_SOURCES = 3
_ABOUT_CHOICES = (
    "(workers per GPU; units per 1,000 audio-hours and J per audio-hour include start-up; for the cheapest, estimates"
    " count 5 % more, and between equal costs the energy decides)"
)


def plan_text(planned: Planned, width: int = WIDTH) -> str:
    """Return the plan as text; the same plan gives the same text."""
    plan = planned.plan
    lines = [_headline(plan), ""]
    for label, text in _request_lines(planned):
        lines += folded(label, text, _INDENT, width)
    lines += ["", *_choice_lines(plan, width)]
    for label, text in (*_work_lines(planned), *_task_lines(plan)):
        lines += folded(label, text, _INDENT, width)
    for remark in worst_first(plan.remarks):
        text = f"{remark.subject}: {remark.text}"
        lines += ["", *folded(remark.severity, text, _INDENT, width), *below(remark, _INDENT)]
    return "\n".join([*lines, *_written_lines(planned, width)])


def _headline(plan: CampaignPlan) -> str:
    gpu_hours = number(plan.work_gpu_hours + plan.start_up_gpu_hours)  # as they are billed
    parts = [f"{gpu_hours} GPU-hours in {count(plan.tasks, 'array task')} and {count(len(plan.waves), 'wave')}"]
    if plan.billed_units is not None:
        parts.append(f"{number(plan.billed_units)} billed units")
    problems = sum(remark.severity == PROBLEM for remark in plan.remarks)
    if problems:
        parts.append(count(problems, "problem"))
    return "; ".join(parts)


def _request_lines(planned: Planned) -> Iterator[tuple[str, str]]:
    """Yield what a task requests, with which options it runs, and what it costs."""
    plan = planned.plan
    choice = plan.choice
    request = f"--gpus-per-node={choice.gpus} --cpus-per-task={choice.cpus} --mem={choice.mem_gb}G"
    request += f" --time={clock(plan.sizing.time_s)}"
    if len(plan.choices) > 1:
        request += f" (the {FASTEST if plan.wish.prefer == FASTEST else _cheapest(plan.site)})"
    yield "request", request

    workers = choice.workers if plan.speed.points or plan.wish.workers else AUTO
    options = f"--workers-per-gpu {workers}"
    cutting = planned.cutting
    if cutting.chunk_length_s:
        options += f" --chunk-length {cutting.chunk_length_s:g}"
    if cutting.overlap_s:
        options += f" --overlap {cutting.overlap_s:g}"
    if planned.folder and plan.survey.cut and cutting.chunk_length_s:
        options += " (the shards are cut)"
    yield "run", options

    cost = "not known: no --site with [billing]"
    if choice.units_per_1000_audio_hours is not None:
        cost = f"{number(choice.units_per_1000_audio_hours)} billed units per 1,000 audio-hours, with"
        cost += f" {_start_up(plan)}: {choice.units_per_hour:g} an hour for a task"
    if choice.joules_per_audio_hour:
        cost += f"; {choice.joules_per_audio_hour:,.0f} J per audio-hour"
    yield "cost", cost


def _start_up(plan: CampaignPlan) -> str:
    return f"{billed_start_up_s(plan.speed):,.0f} s of start-up per task, {plan.margin.start_up_origin}"


def _choice_lines(plan: CampaignPlan, width: int) -> list[str]:
    """Return the choices side by side: the cheapest ones and the fastest."""
    if len(plan.choices) == 1:
        return []
    best = {_cheapest(plan.site): plan.choices[0], FASTEST: plan.fastest}
    shown = {*best.values(), plan.choice, *plan.choices[:_SHOWN_CHOICES]}
    rows = [_choice_row(choice, plan, best) for choice in plan.choices if choice in shown]
    heads = columns(
        "GPUs",
        "workers",
        "cores",
        "memory",
        "chunks",
        "× real time",
        "units",
        "J",
        "<",
    )
    lines = table_text(Table("choices", "", heads, rows), width)
    if len(rows) < len(plan.choices):
        lines.append(f"  {len(rows)} of {len(plan.choices)} choices; all of them: --json")
    return [*lines, *folded("", _ABOUT_CHOICES, 4, width), ""]


def _choice_row(choice: Choice, plan: CampaignPlan, best: Mapping[str, Choice]) -> Row:
    marks = [name for name, best_choice in best.items() if choice == best_choice]
    marks.append("measured" if choice.measured else "estimated")
    arrow = "→ " if choice == plan.choice else ""
    return (
        f"{choice.gpus}",
        f"{choice.workers}",
        f"{choice.cpus}",
        f"{choice.mem_gb}G",
        f"{number(choice.chunk_s, 0)} s",
        number(choice.rate * choice.gpus, 0),
        number(choice.units_per_1000_audio_hours, 1),
        number(choice.joules_per_audio_hour, 1),
        arrow + ", ".join(marks),
    )


def _cheapest(site: Site) -> str:
    if site.billing:
        return "cheapest"
    return "least GPU time"


def _work_lines(planned: Planned) -> Iterator[tuple[str, str]]:
    """Yield what the source has, and the GPU time that it takes."""
    plan = planned.plan
    survey = plan.survey
    lengths = survey.lengths
    speed = plan.speed
    yield "source", first_names(planned.descriptions, _SHOWN_SOURCES)

    audio = f"{number(plan.audio_hours)} hours in {count(lengths.rows, 'chunk')}"
    if survey.shared_ms:
        audio += f", out of {number(plan.recording_hours)} hours of recordings (chunks overlap)"
    if survey.cut:
        audio += f", {survey.cut:,} of them cut out of longer files on the fly"
    yield "audio", f"{audio}; mean {lengths.mean_ms / 1000:,.1f} s, longest {number(lengths.longest_s)} s"

    origin = f"{number(speed.audio_hours_per_gpu_hour)} audio-hours per GPU-hour, {speed.origin}"
    if speed.gpu_hours is not None:
        origin += f" ({count(speed.tasks, 'task')}, {number(speed.gpu_hours, 2)} GPU-hours without start-up)"
    if speed.devices:
        origin += f", on {', '.join(speed.devices)}"
    yield "speed", origin
    gpu_time = f"{number(plan.work_gpu_hours)} GPU-hours of work and {number(plan.start_up_gpu_hours)} of start-up"
    requested = f"{number(plan.asked_gpu_hours)} are requested, with a margin"
    yield "GPU time", f"{gpu_time} ({_start_up(plan)}); {requested}"


def _task_lines(plan: CampaignPlan) -> Iterator[tuple[str, str]]:
    """Yield the tasks, their limits and waves, what they leave, and when they end."""
    sizing = plan.sizing
    margin = plan.margin
    waves = plan.waves
    site = plan.site
    hours = [share.audio_ms / 3_600_000 for share in sizing.shares]
    each = " to ".join(dict.fromkeys([number(min(hours), 2), number(max(hours), 2)]))
    tasks = f"{count(plan.tasks, 'array task')} of {count(sizing.gpus, 'GPU')} with {each} hours of audio each"
    yield "tasks", f"{tasks}: about {duration(sizing.expected_s)} of {clock(sizing.time_s)}"

    kept = f"start-up {margin.start_up_s:,.0f} s ({margin.start_up_origin}), an orderly end {margin.end_s:,.0f} s"
    slower = f"each task may be {margin.factor:.2f} times as slow as the mean ({margin.why})"
    yield "margin", f"{kept}, and between them {slower}"
    yield "memory", f"--mem={plan.choice.mem_gb}G: {plan.choice.mem_why}"

    sizes = "1"
    if len(waves) > 1:
        sizes = f"{len(waves):,} of at most {waves[0].tasks:,} tasks, one after another"
    yield "waves", f"{sizes}; {plan.waves_why}"

    files = f"{plan.files:,} at most, with shards, logs and job scripts; none per chunk"
    if site.files:
        files += f"; the quota of {site.name} is {site.files:,}"
    yield "files", files
    size = plan.survey.walk.size
    results = data_size(results_bytes(plan.survey.lengths.rows, plan.work_gpu_hours))
    space = f"the source: {data_size(size.total_bytes)} in {count(size.files, 'file')}; results: about {results};"
    space += f" copies of audio on the disk of the node: at most {data_size(MOST_STAGED_BYTES)} per task"
    if site.space_tb:
        space += f"; the quota of {site.name} is {site.space_tb:g} TB"
    yield "space", space
    running_s = plan.running_s
    if running_s is None:
        alone_s = plan.work_gpu_hours * 3600 + plan.tasks * margin.start_up_s
        yield "finished", f"not known without --parallel N; 1 GPU takes {_span(alone_s)}, with start-up"
    else:
        at_a_time = f"{count(plan.gpus or 0, 'GPU')} at a time ({plan.gpus_why})"
        yield "finished", f"after {_span(running_s)} of running with {at_a_time}; time in the queue not included"


def _span(seconds: float) -> str:
    """Return a duration; in days from two days on."""
    if seconds < 2 * _DAY_S:
        return duration(seconds)
    return f"{seconds / _DAY_S:,.1f} days"


def _written_lines(planned: Planned, width: int) -> list[str]:
    """Return what was written, and the commands to paste."""
    lines = []
    if planned.folder is not None:
        files = f"{count(planned.plan.tasks, 'shard')}, {count(len(planned.written), 'job script')}"
        lines += ["", *folded("written", f"{planned.folder}: {files}", _INDENT, width)]
        if planned.plan.survey.mistakes.count:
            text = f"the full list with reasons: {planned.folder / _LEFT_OUT}"
            lines += folded("left out", text, _INDENT, width)
    margin = " " * _INDENT
    for script, out in planned.written[:_SHOWN_SCRIPTS]:
        lines.append(f"{margin}sbatch {shell_line(script)}")
        lines.append(f"{margin}badcjobs merge {shell_line(out)}   (once it has ended)")
    hidden = len(planned.written) - _SHOWN_SCRIPTS
    if hidden > 0:
        lines.append(f"{margin}… and {hidden:,} more, each after the one before has ended")
    return lines
