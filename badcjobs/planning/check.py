"""``badcjobs check``: collect facts (preflight_facts.py), and turn them into findings (the ``*_rules.py``).

Without a job script the settings are those of the command line and of badcjobs.toml; with one, those that the
``badcjobs run`` in the script would have.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.cluster import sbatch_options
from badcjobs.cluster.job_script import ARGUMENTS, BatchScript, Call, Parser, read_script, read_text, script_variables
from badcjobs.cluster.sbatch_options import Asked, parse_array
from badcjobs.devices import allocation
from badcjobs.devices.slurm_programs import test_script
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, SlowStart
from badcjobs.model import ArrayShape, known_values, not_none
from badcjobs.paths import RunFolder, shell_line, user_cache
from badcjobs.planning import job_rules, place_rules, preflight_facts
from badcjobs.planning.findings import Remark, fine, not_checked, problem, warning, worst_first
from badcjobs.planning.job_rules import with_needs
from badcjobs.planning.preflight_facts import FolderFacts, Job, SourceFacts, check_source
from badcjobs.planning.site import find_site
from badcjobs.processes import Launcher
from badcjobs.project import Project
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.run_toml import FrozenRun, real_places
from badcjobs.seams import Clock, Environ
from badcjobs.settings import SETTINGS, RunSettings, SubmitSettings, absolute, refuse
from badcjobs.store.submission_record import find_cut_short
from badcjobs.trust import Trust
from badcjobs.workers.engines import choose_engine
from badcjobs.workers.program_start import EngineStart

_NEW = "--out another folder, for a new run"
_ENGINE_START_S = 300.0  # less than in a job: someone waits for it
_NUMBERS: dict[str, Callable[[str], float]] = {"count": int, "number": float}  # by the kind of a setting


class CheckOrder(NamedTuple):
    """What ``badcjobs check`` looks at, and the machine and the folder in which it runs."""

    settings: RunSettings  # source (): there is no SOURCE
    environ: Environ
    clock: Clock
    cwd: Path
    site: str | None
    quick: bool
    progress: Callable[[int], None]
    parse: Parser  # parses the words after badcjobs
    prefer: str  # of [plan]
    trust: Trust | None
    site_trust: Trust | None  # None: the user named the site
    submit: SubmitSettings = SubmitSettings()
    script: str | None = None
    run_words: tuple[str, ...] = ()  # options of run, for the script


class Checked(NamedTuple):
    """All findings, and what they are based on."""

    findings: Sequence[Remark]
    site: str | None
    asked: Asked
    source: SourceFacts | None

    def number_of(self, severity: str) -> int:
        return sum(finding.severity == severity for finding in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if there is a problem, as for a job with failed chunks; warnings do not count."""
        if self.number_of(PROBLEM):
            return ExitCode.CHUNKS_FAILED
        return ExitCode.DONE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs check --json``, the worst findings first."""
        ranked = worst_first(self.findings)
        return {
            "verdict": "not ready" if self.number_of(PROBLEM) else "ready",
            "not_checked": not_checked(ranked),
            "problems": self.number_of(PROBLEM),
            "warnings": self.number_of(WARNING),
            "site": self.site,
            "asked": asdict(self.asked),
            "source": self.source and self.source.document,
            "findings": [finding.to_dict() for finding in ranked],
        }


def check(order: CheckOrder) -> Checked:
    """Collect the facts and apply all rules; only wrong usage raises."""
    site = find_site(order.site, order.cwd, trust=order.site_trust)
    script, request = _read_request(order)
    settings = order.settings
    about_settings: list[Remark] = []
    if script is not None:
        settings, about_settings = _read_settings(script, order)
    source, about_source = _look_at_source(settings, script, order)
    job = Job(request, site, settings, script, source)
    about_run = list(_check_run_folder(job, order.cwd))
    job = replace(job, has_begun=any(remark.subject == "run.toml" for remark in about_run))

    job = with_needs(job, order.prefer, order.environ, order.cwd)
    job = _look_at_folders(_ask_around(job, order), order)

    findings = [*about_source, *about_run, *check_facts(job), *about_settings]
    if not {"config", "settings"} & {remark.subject for remark in about_settings}:
        findings += _check_engine(job, order)
    return Checked(findings, site.name or None, request, source)


def check_facts(job: Job) -> list[Remark]:
    """Apply all rules."""
    return [remark for rule in place_rules.RULES + job_rules.RULES for remark in rule(job)]


# --- what the job asks for --------------------------------------------------------------------------------------------


def _read_request(order: CheckOrder) -> tuple[BatchScript | None, Asked]:
    """Return the script, if there is one, and what the job asks of Slurm; options of submit win over the script."""
    submit = order.submit
    if order.script is not None:
        script = _open_script(order.script, sbatch_options.submit_words(submit), order)
        return script, script.asked
    if order.settings.source:  # what submit asks for by itself
        gpus = 1 if submit.gpus_per_task is None else submit.gpus_per_task
        submit = replace(submit, gpus_per_task=gpus, time=submit.time or "12:00:00")
    account = allocation.sbatch_options(order.environ).get("account")
    options = known_values({"account": account}) | sbatch_options.read_options(sbatch_options.submit_words(submit))
    mistakes: list[str] = []
    request = sbatch_options.read_request(options, mistakes).asked
    refuse(mistakes, "badcjobs check … --time 12:00:00 --mem 16G")
    if request.gpus_per_task == 0 and order.settings.cpu_workers:
        request = replace(request, gpus_per_task=None)
    return None, request


def _open_script(name: str, words: Sequence[str], order: CheckOrder) -> BatchScript:
    """Read the job script; SOURCE, --out and options of run reach it as variables."""
    text = read_text(Path(name), order.cwd)
    if order.run_words and ARGUMENTS not in text:
        raise BadInput(
            f"{name} does not use {ARGUMENTS}",
            why="options after -- reach a job script in this variable",
            fix=f"add {shell_line(*order.run_words)} to the line with badcjobs run",
        )
    source = next(iter(order.settings.source), None)
    environ = {**order.environ, **script_variables(source, order.settings.out, order.run_words)}
    return read_script(text, name, environ, str(order.cwd), order.parse, words)


# --- the settings of a script -----------------------------------------------------------------------------------------


def _read_settings(script: BatchScript, order: CheckOrder) -> tuple[RunSettings, list[Remark]]:
    """Return the settings of the ``badcjobs run`` in a script, as far as they can be read, and what is wrong with them.

    SOURCE and --out of the command line win: a script may take its own from variables that are not known.
    """
    start = script.start
    if start is None:
        return order.settings, []
    project, findings = _read_project(start, order)
    flags = {key: value for key, value in start.values.items() if key in SETTINGS["run"] and value is not None}
    for key, value in flags.items():
        parse = _NUMBERS.get(SETTINGS["run"][key].kind, type(value))
        with suppress(ValueError):  # a wrong value stays as it is, and is refused below
            flags[key] = parse(value)
    if start.sources != ():
        flags["source"] = start.sources or ("?",)
    mistakes: list[str] = []
    settings = project.make(RunSettings, flags, "run", mistakes)

    place = f"{script.name} line {start.line}"
    if None not in start.values.values() and not start.hidden and not script.wrong_calls:
        if not settings.out:
            text = f"{place} has no --out, which badcjobs run needs"
            findings.append(problem("out", text, f"{start.text} --out results"))
        if mistakes:
            findings.append(problem("settings", f"{place}: {'; '.join(mistakes)}", "badcjobs run --help"))
    source = order.settings.source or _sources_here(start, order.cwd) or project.get("run", "source") or ()
    settings = replace(settings, source=tuple(source), out=order.settings.out or settings.out)
    return settings, findings


def _read_project(start: Call, order: CheckOrder) -> tuple[Project, list[Remark]]:
    """Read the settings file that a call uses."""
    try:
        trust = order.trust and replace(order.trust, without=f"{start.text} --config ''")
        return Project.read(start.values.get("config") or (), order.cwd, trust, ("run",)), []
    except BadInput as error:
        text = ": ".join(filter(None, (error.what, error.why)))
        return Project(), [problem("config", text, error.fix or "badcjobs guide settings")]


def _sources_here(start: Call, cwd: Path) -> tuple[str, ...]:
    """Return the sources that a call names, unless absolute paths may be folders in an image."""
    sources = start.sources or ()
    if start.contained and not all((cwd / source).exists() for source in sources):
        return ()
    return sources


# --- the source and the run folder ------------------------------------------------------------------------------------


def _look_at_source(
    settings: RunSettings, script: BatchScript | None, order: CheckOrder
) -> tuple[SourceFacts | None, list[Remark]]:
    """Read the source, or say why it is not read."""
    start = None if script is None else script.start
    line = f"badcjobs check {shell_line(order.script or '')} SOURCE"
    if script is not None and script.unset:
        text = f"{' and '.join(script.unset)} must have a value: every task would stop at once"
        return None, [problem("script", text, f"{line} --out DIR   (or write them into the script)")]
    if settings.source:
        return check_source(settings, order.cwd, quick=order.quick, progress=order.progress)
    if start is None or start.sources == ():
        return None, []
    why = "is inside an image" if start.sources else "cannot be read from here"
    text = f"not checked: the source in line {start.line} {why}; try: {line}"
    return None, [fine("source", text, checked=False)]


def _check_run_folder(job: Job, cwd: Path) -> Iterator[Remark]:
    """Compare with what the first task of an earlier run in the same folder has frozen."""
    if job.settings.out is None:
        return
    folder = cwd / job.settings.out
    cut_short = find_cut_short(folder)
    if cut_short is not None:
        yield warning("submit", cut_short.what, cut_short.command)  # two arrays would do the same chunks
    try:
        frozen = FrozenRun.read(RunFolder(folder).run_toml)
    except BadcjobsError as error:
        yield problem("run.toml", f"{error.what}: {error.why}", error.fix or _NEW)
        return
    if frozen is None:
        return
    sources = tuple(absolute(cwd, source) for source in job.settings.source)
    before = frozen.settings.get("source") or ()
    if sources and real_places(before) != real_places(sources):
        yield problem("run.toml", f"{folder} holds a run of another source ({' '.join(before)})", _NEW)
    elif frozen.array is not None and _is_beyond(frozen.array, job.request):
        text = f"{folder} holds a run of the array {frozen.array}; other indices are refused"
        yield problem("run.toml", text, job.ask("array", frozen.array, f"or {_NEW}"))
    elif frozen.filelist_sha256 and not job.settings.filelist:
        yield problem("run.toml", f"{folder} holds a run with a list", f"--filelist FILE   (or {_NEW})")
    else:
        yield fine("run.toml", f"{folder} holds a run already: finished chunks are not repeated")


def _is_beyond(array: ArrayShape, asked: Asked) -> bool:
    """Say whether a job has tasks that the array of an earlier one did not have."""
    if asked.array is None:
        return (asked.tasks or 0) > array.count
    return any(array.position_of(index) is None for index in parse_array(asked.array).indices)


# --- the facts for the rules ------------------------------------------------------------------------------------------


def _ask_around(job: Job, order: CheckOrder) -> Job:
    """Add what Slurm, the modules and the GPUs of this machine say."""
    script = job.script
    environ = order.environ
    slurm = None
    if script is not None or order.submit.cluster == "slurm":  # else it is emulated
        slurm = preflight_facts.query_slurm(environ)
    answer = None  # of sbatch --test-only
    answers = slurm is not None and slurm.trouble is None
    if answers and script is not None and not script.mistakes and not sbatch_options.submit_words(order.submit):
        answer = test_script(order.cwd / script.name, environ, order.cwd)
    modules = job.site.modules
    if script is not None and script.modules:
        modules = script.modules
    elif job.start is not None and job.start.contained:  # an image has its own programs
        modules = ()
    return replace(
        job,
        slurm=slurm,
        trial=answer and preflight_facts.parse_trial(*answer),
        modules=preflight_facts.load_modules(modules, environ) if modules else None,
        gpus=preflight_facts.look_at_gpus(environ, order.clock, job.settings.stand_in(order.cwd)),
    )


def _look_at_folders(job: Job, order: CheckOrder) -> Job:
    """Add what is known about the folders that a job uses."""

    def folder(path: str | Path | None, clock: Clock | None = None) -> FolderFacts | None:
        if path is None:
            return None
        return preflight_facts.look_at_folder(order.cwd / path, clock)

    cache = user_cache(order.environ)
    if any("XDG_CACHE_HOME" in line for line in order.submit.setup):  # the jobs have another one
        cache = None
    return replace(
        job,
        out=folder(job.settings.out, order.clock),
        submit_folder=folder(""),
        log_folders=not_none(folder(path) for path in _log_folders(job.script)),
        temporary=folder(order.environ.get("TMPDIR") or None),
        home=preflight_facts.home_folder(order.environ),
        cache=os.path.realpath(cache) if cache else None,
    )


def _log_folders(script: BatchScript | None) -> Iterator[str]:
    """Yield the folders that a script names for Slurm's logs; absolute paths may differ on other machines."""
    if script is None:
        return
    for log in ("output", "error"):
        name = posixpath.dirname(script.options.get(log, ""))
        if name and "%" not in name and not posixpath.isabs(name):
            yield posixpath.join(script.options.get("chdir", ""), name)


# --- the engine -------------------------------------------------------------------------------------------------------


def _check_engine(job: Job, order: CheckOrder) -> Iterator[Remark]:
    """Let the engine look for its program and models; a warning if the script may set up more than is visible here."""
    settings = job.settings
    start = job.start
    if job.script is not None and start is None:
        return  # it only merges, or starts badcjobs in a way that cannot be read
    if start is not None and start.contained:
        yield fine("engine", f"{settings.engine} is in the image, which is not checked", checked=False)
        return
    try:
        engine_start = EngineStart(
            settings.engine_args,
            order.environ,
            Launcher("check"),
            order.clock,
            cwd=order.cwd,
            allow_cpu=True,
            start_s=_ENGINE_START_S,
            places=job.source is not None and job.source.has_places,
        )
        choose_engine(settings, engine_start).check()
        yield fine("engine", f"{settings.engine} can be started here")
    except BadcjobsError as error:
        unseen = _not_visible_here(job.script)
        severity = WARNING if isinstance(error, SlowStart) else PROBLEM
        text = error.what
        if unseen is not None:
            severity = WARNING
            text += f"; checked here without {unseen}"
        fix = error.fix or "badcjobs check --help"
        yield Remark(severity, "engine", text, fix, (error.why or "").splitlines())


def _not_visible_here(script: BatchScript | None) -> str | None:
    """Return what may change the engine in the job, and has no effect here."""
    if script is None:
        return None
    if script.set_up_by:
        return f"the script's {script.set_up_by}"
    start = script.start
    if start is not None and start.values.get("engine") is None and (start.hidden or "engine" in start.values):
        return "the values of the script's variables"
    return None
