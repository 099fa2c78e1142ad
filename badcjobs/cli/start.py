"""First steps: ``badcjobs init``, ``demo``, ``guide`` and ``template``."""

from __future__ import annotations

import math
from array import array
from dataclasses import replace
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from badcjobs.cli.options import JsonWanted, option, other_command, read_project, refuse_data
from badcjobs.cli.output import (
    answer,
    environ,
    print_document,
    print_json,
    read_world,
    remark,
    say,
    say_next,
    this_command,
)
from badcjobs.cluster.templates import Template, fill_template, list_templates, write_new
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.model import ArrayOrder, StandIn
from badcjobs.paths import RunFolder, shell_line
from badcjobs.paths import folder as resources
from badcjobs.project import NAME
from badcjobs.settings import OPTIONS_ONLY, SETTINGS, PlanSettings, RunSettings, SubmitSettings, to_toml

if TYPE_CHECKING:
    from badcjobs.task.startup import World

_RATE = 8000
_CHUNK_S = 30
_RECORDINGS = 6
_CHUNKS_EACH = 16
_TASKS = 4
_GPUS = 4
_GPUS_PER_TASK = 2
_BURN_S = 0.1
_PROJECT = f"""# The settings of this demo. Continue it with: badcjobs run --config badcjobs.toml
[run]
source = ["audio"]
out = "."
chunk_length = {_CHUNK_S}
engine = "demo"
engine_arg = ["--burn-s={_BURN_S}"]
simulate = {_GPUS}
interval = 0.5
"""


def demo(
    out: Path | None = option("DIR", "Folder for everything [badcjobs-demo].", "--out", "-o"),
    json_wanted: JsonWanted = False,
) -> int:
    """Run a small array on simulated GPUs, on audio that it makes itself, and print the merged summary.

    It needs no Slurm, no GPU and no HawkEars, and takes less than 30 seconds.

    Example:
      badcjobs demo --out first-look
    """
    from badcjobs.cli.results import files_text, say_summary
    from badcjobs.cluster.local import emulate_order
    from badcjobs.cluster.local_task import LocalSettings
    from badcjobs.processes import last_lines
    from badcjobs.report.document import document_of

    folder = out or _new_folder()
    if folder.exists():
        remark(f"{folder} exists: chunks that are done stay done; without --out a new folder is made")
    remark("making audio, then running an array of 4 tasks on 4 simulated GPUs (about 10 s) …")
    world = _world_of_demo()
    place = world.cwd / folder
    arguments = ("run", f"--config={_write_project(place)}", f"--out={place}")
    order = ArrayOrder(place, arguments, _TASKS, gpus_per_task=_GPUS_PER_TASK, time_min=10, name="demo")
    end = emulate_order(order, LocalSettings(StandIn(simulate=_GPUS)), world, lambda line: None)
    if end.job is None or end.exit_code not in (0, 130):
        bad = next(row for row in end.rows if row.exit_code != 0)
        why = last_lines(bad.log) if bad.log.exists() else bad.note
        raise BadcjobsError(f"demo task {bad.index} failed", why=why, fix=shell_line("cat", bad.log))
    if json_wanted:
        print_json(document_of(end.job.summary))
        return end.exit_code
    more = [f"  each task   {shell_line('badcjobs', *arguments)}", files_text(end.job)]
    say_summary(end.job.summary, folder.name, more)
    return end.exit_code


def _new_folder() -> Path:
    """Return the first free name, so that a second demo starts afresh."""
    folder = Path("badcjobs-demo")
    number = 1
    while folder.exists():
        number += 1
        folder = Path(f"badcjobs-demo-{number}")
    return folder


def _world_of_demo() -> World:
    """Return the world without the GPUs of a job that the demo may run in."""
    from badcjobs.devices.allocation import ALLOCATED

    world = read_world()
    return replace(
        world, environ={name: value for name, value in world.environ.items() if not name.startswith(ALLOCATED)}
    )


def _write_project(place: Path) -> Path:
    """Create the run folder with audio and a project file; return its path."""
    RunFolder(place).create()
    project = place / "badcjobs.toml"
    make_audio(place / "audio")
    project.write_text(_PROJECT, encoding="utf-8")
    return project


def make_audio(folder: Path) -> None:
    """Write recordings of faint noise with loud chirps in them.

    If the folder exists, nothing is written: to a second demo in the same run folder the audio would be new.
    """
    import random
    import wave

    if folder.exists():
        return
    draft = folder.with_suffix(".new")
    draft.mkdir(exist_ok=True)
    noise = array("h", random.Random(2026).choices(range(-400, 401), k=_RATE * _CHUNK_S))
    chirp = array("h", (int(16_000 * math.sin(1.5 * number)) for number in range(_RATE // 3)))
    for recording in range(_RECORDINGS):
        with wave.open(str(draft / f"site{recording + 1:02d}.wav"), "wb") as audio:
            audio.setnchannels(1)
            audio.setsampwidth(2)
            audio.setframerate(_RATE)
            for chunk in range(_CHUNKS_EACH):
                samples = array("h", noise)
                for number in range((recording + chunk) % 4):
                    start = (4 + 9 * number) * _RATE
                    samples[start : start + len(chirp)] = chirp
                audio.writeframes(samples.tobytes())
    draft.rename(folder)


# --- the handbook: pages in guide/, some of them made from the code they describe -------------------------------------


# The pages in reading order, each with its line in the list; the text of a page is guide/NAME.md.
PAGES = {
    "start": "install; ten minutes from recordings and their places to species and labels",
    "slurm": "check, submit, follow and merge a job; job scripts, signals, exit codes",
    "sockeye": "rules of UBC ARC Sockeye, a complete campaign; describe another cluster",
    "settings": "every key of badcjobs.toml, with its option and its default",
    "audio": "manifests, folders and lists; places and dates; cutting; what paths mean",
    "engines": "HawkEars 2 and 1, each option of HawkEars, workers per GPU, retries, copies",
    "own-detector": "BirdNET or your own program instead of HawkEars; the tables it may write",
    "gpus": "which GPUs a task uses and why; free, simulated and recorded GPUs",
    "plan": "GPU-hours, tasks and end date of a campaign; the best chunk length",
    "local": "run a job array on one machine, without Slurm",
    "telemetry": "what is recorded about the GPUs, how exact it is, and alerts",
    "live": "watch a run in a terminal or a browser, or with Prometheus",
    "report": "merge, the summary line by line, the findings",
    "export": "CSV, Parquet, JSON; labels for HawkEars, Raven and Audacity; the Python API",
    "tables": "the files of a run; all tables and columns",
}


def guide(topic: str | None = typer.Argument(None, metavar="TOPIC")) -> int:
    """Show a page of the handbook, or the list of pages.

    Example:
      badcjobs guide start
    """
    if topic is not None:
        print_document(read_topic(topic))
        return 0
    lines = [f"  {name:<12} {about}" for name, about in PAGES.items()]
    print_document("\n".join(["Pages of the handbook, in reading order (badcjobs guide TOPIC):", "", *lines]))
    return 0


def read_topic(topic: str) -> str:
    """Return one page, with its placeholders filled in."""
    if topic not in PAGES:
        raise BadInput(f"there is no page {topic!r}", why="pages are " + ", ".join(PAGES), fix="badcjobs guide")
    text = (resources("guide") / f"{topic}.md").read_text(encoding="utf-8")
    generated = {
        "{{tables}}": lambda: _sections(views=False),
        "{{views}}": lambda: _sections(views=True),
        "{{folder:templates}}": lambda: str(resources("templates")),
        "{{settings}}": settings_text,
        "{{failures}}": failures_text,
        "{{findings}}": lambda: import_module("badcjobs.report.job").list_findings(),
        "{{report keys}}": lambda: import_module("badcjobs.report.job").list_keys(),
        "{{metrics}}": metrics_text,
    }
    for placeholder, make in generated.items():
        if placeholder in text:  # imports only what this page needs
            text = text.replace(placeholder, make())
    return text.rstrip()


def _sections(*, views: bool) -> str:
    from badcjobs.store.job_schema import JOB_TABLES, JOB_VIEWS

    described = JOB_VIEWS if views else JOB_TABLES
    sections = []
    for table in described:
        width = max(map(len, table.meanings))
        rows = [f"    {name:<{width}}  {meaning}" for name, meaning in table.meanings.items()]
        sections.append("\n".join([f"## {table.name}", "", table.help, "", *rows]))
    return "\n\n".join(sections)


def failures_text() -> str:
    """Return what happens after each failure: two lines for each rule of the policy."""
    from badcjobs.workers.policy import ALL, EXCUSES, POLICY, Circumstance

    lines = []
    for rule in POLICY:
        conditions = ["any class" if rule.errors == ALL else " ".join(rule.errors)]
        conditions += sorted(circumstance.value for circumstance in rule.circumstances)
        if Circumstance.FIRST_TIMES in rule.circumstances:
            counts = sorted({str(EXCUSES[error_class]) for error_class in rule.errors})
            conditions[-1] += f" ({' or '.join(counts)})"
        steps = [rule.chunk.text]
        if rule.charged:
            steps.append("counted")
        if rule.worker.value:
            steps.append(f"worker: {rule.worker.value}")
        if rule.task.value:
            steps.append(f"task: {rule.task.value}")
        lines += [f"    {'; '.join(conditions)}", f"        {'; '.join(steps)}"]
    return "\n".join(lines)


def settings_text() -> str:
    """Return every key of badcjobs.toml: a row each, with a star if it is an option as well, its help and default."""
    lines = []
    for table, settings in SETTINGS.items():
        lines += ["", f"## [{table}]" if table else "## At the top", ""]
        for key, setting in settings.items():
            if key in OPTIONS_ONLY:
                continue
            about = setting.help
            if not about.endswith("..."):
                about = about.rstrip(".")
            if " [" not in about and setting.default not in (None, ()):
                about += f" [{to_toml(setting.default).removesuffix('.0')}]"
            star = " *" if setting.heading else ""
            lines.append(f"    {key + star:<21} {about}")
    return "\n".join(lines).strip()


def metrics_text() -> str:
    """Return every Prometheus metric: a row each, with its meaning, its unit and its own labels."""
    from badcjobs.report.prometheus import METRICS

    width = max(len(metric.name) for metric in METRICS)
    lines = []
    for labels, metrics in groupby(METRICS, lambda metric: metric.labels[: len(metric.labels) - len(metric.by)]):
        lines += ["", f"Labels: {', '.join(labels)}", ""]
        for metric in metrics:
            notes = [metric.unit, *(f"by {label}" for label in metric.by)]
            if metric.where:
                notes.append(f"only in {metric.where}")
            lines.append(f"    {metric.name:<{width}}  {metric.help} ({', '.join(notes)})")
    return "\n".join(lines).strip()


def init(site: str | None = option("NAME|FILE", "Start from the rules of this cluster.")) -> int:
    """Write a commented badcjobs.toml into this folder, from what is found here: Slurm, GPUs, HawkEars, the site.

    It never replaces a file.

    Example:
      badcjobs init --site sockeye
    """
    from badcjobs.planning.site import find_here, project_text

    findings, values = find_here(environ(), Path.cwd(), site)
    write_new(Path(NAME), project_text(values), f"less {NAME}")
    say("\n".join([f"{NAME} is written", *(f"  {name:<9} {text}" for name, text in findings)]))
    say_next("badcjobs", "check", "SOURCE", note="after editing it")
    return 0


def template(
    context: typer.Context,
    name: str | None = typer.Argument(None, metavar="NAME"),
    out: Path | None = option("FILE", "Write to FILE; never replaces a file.", "--out", "-o"),
    settings: list[str] | None = option("KEY=VALUE", "Fill in a value; repeatable.", "--set"),
    json_wanted: JsonWanted = False,
) -> int:
    """Print a job script for sbatch, filled in from badcjobs.toml and --set; without NAME, list the templates.

    A value that is still open can be edited, or given with sbatch --export.

    Example:
      badcjobs template sockeye-array --set account=st-lab-1-gpu -o job.sbatch
    """
    from badcjobs.planning.resolve_submit import complete as complete_options
    from badcjobs.planning.site import find_site

    is_used = bool(settings) or out is not None  # else it is only looked at
    if name is None and not is_used:
        return _list_templates(json_wanted=json_wanted)
    project = read_project(context, "submit")
    site = find_site(project.site, Path.cwd(), "--config site=")
    run_settings = project.make(RunSettings, {}, "template", [])  # without SOURCE, which is a mistake elsewhere
    prefer = project.make(PlanSettings, {}, "template").prefer

    def request(options: SubmitSettings, fit: bool) -> SubmitSettings:
        if fit and site.node_gpus:
            options = replace(options, gpus_per_task=min(options.gpus_per_task or 1, site.node_gpus))
        return complete_options(options, prefer, run_settings, site, environ(), Path.cwd())

    filled = fill_template(name or "", settings or [], project, complete=is_used, request=request)
    if out is not None:
        refuse_data({"--out": out})
        write_new(out, filled.text)
    if json_wanted:
        print_json({**filled.to_dict(), "text": filled.text, "file": None if out is None else str(out)})
        return 0
    _say_filled(filled, out)
    return 0


def _say_filled(filled: Template, out: Path | None) -> None:
    """Print the script, or where it is, and the next command."""
    if filled.open:
        remark(f"still open, to edit or to give in sbatch --export: {', '.join(filled.open)}")
    if out is None:
        print_document(filled.text)
        remark(f"next: {shell_line(*this_command('--out=job.sbatch'))}")
        return
    say(f"{out} is written")
    if filled.open:
        say_next(*other_command("check", out))
    else:
        say_next("sbatch", out)


def _list_templates(*, json_wanted: bool) -> int:
    templates = list_templates()
    width = max(len(template.name) for template in templates)
    rows = [f"  {template.name:<{width}}  {template.about}" for template in templates]
    ending = ["", "next: badcjobs template array -o job.sbatch"]
    text = "\n".join(["Templates, to fill in with --set KEY=VALUE:", "", *rows, *ending])
    answer(json_wanted, {"templates": [template.to_dict() for template in templates]}, text)
    return 0
