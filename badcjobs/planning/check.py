"""``badcjobs check``: collect facts (preflight_facts.py), and turn them into findings (the ``*_rules.py``).

Without a job script the settings are those of the command line and of badcjobs.toml; with one, those that the
``badcjobs run`` in the script would have.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster import sbatch_options
from badcjobs.cluster.job_script import BatchScript, ParsedWords, parse_plainly, read_script, read_text
from badcjobs.cluster.sbatch_options import OF_SUBMIT, Asked, parse_array
from badcjobs.errors import BadcjobsError, BadInput, ExitCode, SlowStart
from badcjobs.model import default_cpus, default_mem
from badcjobs.paths import RunFolder, shell_line, user_cache
from badcjobs.planning import place_rules, preflight_facts, request_rules, script_rules
from badcjobs.planning.bill import FASTEST, Choice, usual_request
from badcjobs.planning.findings import Remark, apply_rules, fine, not_checked, problem, warning, worst_first
from badcjobs.planning.preflight_facts import FolderFacts, PreflightFacts, SourceFacts, check_source
from badcjobs.planning.site import Site, find_site
from badcjobs.processes import Launcher
from badcjobs.project import Project
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.run_toml import FrozenRun, real_places
from badcjobs.seams import Clock
from badcjobs.settings import SETTINGS, RunSettings, SubmitSettings, absolute, check_values, contradictions, nearest
from badcjobs.small_files import parse_json, read_small
from badcjobs.store.submission_record import find_cut_short
from badcjobs.trust import Trust
from badcjobs.workers.engines import choose_engine

_NEW = "--out another folder, for a new run"
_ENGINE_START_S = 300.0  # less than in a job: someone waits for it
_ARGUMENTS = "BADCJOBS_ARGS"  # options of run for a script
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "count": int, "number": float, "texts": lambda value: tuple(value) if isinstance(value, list | tuple) else (value,)
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What ``badcjobs check`` looks at, and the machine and the folder in which it runs."""

    settings: RunSettings  # source (): there is no SOURCE
    environ: Mapping[str, str]
    clock: Clock
    cwd: Path
    submit: SubmitSettings = field(default_factory=SubmitSettings)
    site: str | None = None
    script: str | None = None
    run_words: tuple[str, ...] = ()  # options of run, for the script
    quick: bool = False
    progress: Callable[[int], None] = lambda rows: None
    parse: Callable[[Sequence[str]], ParsedWords] = parse_plainly  # parses the words after badcjobs
    prefer: str = "cheapest"  # of [plan]
    trust: Trust | None = None
    site_trust: Trust | None = None  # None: the user named the site


@dataclass(frozen=True, slots=True)
class Checked:
    """All findings, and what they are based on."""

    findings: tuple[Remark, ...]
    site: str | None
    asked: Asked
    source: SourceFacts | None

    def count(self, severity: str) -> int:
        return sum(one.severity == severity for one in self.findings)

    @property
    def exit_code(self) -> int:
        """1 if there is a problem, as for a job with failed chunks; warnings do not count."""
        return ExitCode.CHUNKS_FAILED if self.count(PROBLEM) else ExitCode.DONE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs check --json``, the worst findings first."""
        ranked, source = worst_first(self.findings), None
        if self.source is not None:
            source = asdict(replace(self.source, lengths=None))
            del source["lengths"]
        return {
            "verdict": "not ready" if self.count(PROBLEM) else "ready",
            "not_checked": not_checked(ranked),
            "problems": self.count(PROBLEM),
            "warnings": self.count(WARNING),
            "site": self.site,
            "asked": asdict(self.asked),
            "source": source,
            "findings": [asdict(one) for one in ranked],
        }


def check(order: CheckOrder) -> Checked:
    """Collect the facts and apply all rules; only wrong usage raises."""
    site = find_site(order.site, order.cwd, trust=order.site_trust)
    script, asked = _read_request(order)
    settings, of_settings = (order.settings, []) if script is None else _read_settings(script, order)
    source, findings = None, list[Remark]()
    if settings.source:
        source, findings = check_source(settings, order.cwd, quick=order.quick, progress=order.progress)
    elif script and (start := script.start) and start.sources != ():
        why = "is inside an image" if start.sources else "cannot be read from here"
        line = f"badcjobs check {shell_line(Path(script.name))} SOURCE"
        findings = [fine("source", f"not checked: the source in line {start.line} {why}; try: {line}")]
    if script is not None and script.unset:
        line = f"badcjobs check {shell_line(Path(script.name))} SOURCE --out DIR"
        text = f"{' and '.join(script.unset)} must have a value: every task would stop at once"
        findings = [problem("script", text, f"{line}   (or write them into the script)")]
    of_run = _check_run_folder(settings, asked, order.cwd)
    facts = _collect_facts(settings, order, site, script, asked, source)
    findings += check_facts(replace(facts, has_begun=any(one.subject == "run.toml" for one in of_run)), of_run)
    findings += of_settings
    if not {"config", "settings"} & {one.subject for one in of_settings}:
        findings += _check_engine(settings, script, order)
    if script is None:
        findings = [one if one.fix is None else replace(one, fix=for_submit(one.fix)) for one in findings]
    return Checked(tuple(findings), site.name or None, asked, source)


def check_facts(facts: PreflightFacts, of_run: Iterable[Remark] = ()) -> list[Remark]:
    """Apply all rules; ``of_run``: findings about the run folder."""
    about_job = (request_rules.SPACING, *place_rules.PLACES, request_rules.check_request, request_rules.SHARES)
    about_script = (script_rules.check_script, script_rules.GRACE, *script_rules.MODULES)
    others = apply_rules((*about_job, *about_script, *place_rules.MACHINE), facts)
    return [*apply_rules(place_rules.OUT, facts), *of_run, *others]


def for_submit(fix: str) -> str:
    """Return a fix as an option of submit, where no script has a line for it."""

    def option(found: re.Match[str]) -> str:
        word, name, value = found.groups()
        if name == "array" and value.startswith("0-"):
            return f"--tasks {int(value[2:]) + 1}"
        key = OF_SUBMIT.get(name)
        return f"--sbatch={word}" if key is None else f"{SETTINGS['submit'][key].option} {value}"

    return re.sub(r"#SBATCH (--([\w-]+)=(\S+))", option, fix)


# --- what the job asks for, and its settings --------------------------------------------------------------------------


def _read_request(order: CheckOrder) -> tuple[BatchScript | None, Asked]:
    """Return the script, if there is one, and what the job asks of Slurm; options of submit win over the script."""
    submit, mistakes = order.submit, list[str]()
    if order.script is None and order.settings.source:  # what submit asks for by itself
        gpus = 1 if submit.gpus_per_task is None else submit.gpus_per_task
        cpus, mem = submit.cpus or default_cpus(gpus), submit.mem or default_mem(gpus)
        submit = replace(submit, gpus_per_task=gpus, cpus=cpus, mem=mem, time=submit.time or "12:00:00")
    words = sbatch_options.submit_words(submit)
    given = {"account": order.environ["SBATCH_ACCOUNT"]} if order.environ.get("SBATCH_ACCOUNT") else {}
    given |= sbatch_options.read_options(words, mistakes)
    asked = sbatch_options.read_asked(given, sbatch_options.read_values(given, mistakes), mistakes)
    if mistakes:
        raise BadInput("\n".join(mistakes), fix="badcjobs check … --time 12:00:00 --mem 16G")
    if order.script is None:
        if asked.gpus_per_task == 0 and (submit.gpus_per_task is None or order.settings.cpu_workers):
            asked = replace(asked, gpus_per_task=None)  # not set, or not needed
        return None, replace(asked, merge_account=submit.merge_account)
    script = _open_script(order.script, words, order)
    return script, script.asked


def _open_script(name: str, words: Sequence[str], order: CheckOrder) -> BatchScript:
    """Read the job script; SOURCE, --out and options of run reach it as variables."""
    text = read_text(Path(name), order.cwd)
    if order.run_words and _ARGUMENTS not in text:
        raise BadInput(
            f"{name} does not use {_ARGUMENTS}",
            why="options after -- reach a job script in this variable",
            fix=f"add {shell_line(*order.run_words)} to the line with badcjobs run",
        )
    settings = order.settings
    variables = {
        "SOURCE": settings.source[0] if settings.source else None,
        "OUT": None if settings.out is None else str(settings.out),
        _ARGUMENTS: " ".join(order.run_words) or None,
    }
    environ = {**order.environ, **{key: value for key, value in variables.items() if value is not None}}
    return read_script(text, name, environ, str(order.cwd), order.parse, words)


def _read_settings(script: BatchScript, order: CheckOrder) -> tuple[RunSettings, list[Remark]]:
    """Return the settings of the ``badcjobs run`` in a script, as far as they can be read, and what is wrong with them.

    SOURCE and --out of the command line win: a script may take its own from variables that are not known.
    """
    given, start, findings, mistakes = order.settings, script.start, list[Remark](), list[str]()
    if start is None:
        return given, []
    where, project = f"{script.name} line {start.line}", Project()
    try:
        trust = order.trust and replace(order.trust, without=f"{start.text} --config ''")
        project = Project.read(start.values.get("config", ()), order.cwd, trust, ("run",))
    except BadInput as error:
        text = f"{error.what}: {error.why}" if error.why else error.what
        findings.append(problem("config", text, error.fix or "badcjobs guide settings"))
    words = {}
    for key, value in start.values.items():
        if key in SETTINGS["run"] and (value is not True or SETTINGS["run"][key].kind == "switch"):
            words[key] = value
            with suppress(ValueError):  # a wrong value stays as it is, and is refused below
                words[key] = _PARSERS.get(SETTINGS["run"][key].kind, lambda same: same)(value)
    known = check_values("run", words, lambda key: SETTINGS["run"][key].option, mistakes)
    values = {**project.values.get("run", {}), **known}
    sources = start.sources or ()
    if start.contained and not all((order.cwd / one).exists() for one in sources):
        sources = ()  # absolute paths may be folders in the image
    named = start.named & SETTINGS["run"].keys()
    if not (start.hidden or script.wrong_calls or named - start.values.keys()):
        its = ["?"] if start.sources is None else start.sources or values.get("source")
        mistakes += contradictions({**values, "source": its})
        if not values.get("out"):
            missing = f"{where} has no --out, which badcjobs run needs"
            findings.append(problem("out", missing, f"{start.text} --out results"))
    if mistakes and not script.wrong_calls:  # which may have been read wrongly
        text, *more = mistakes if len(mistakes) == 1 else ["these settings cannot be used", *mistakes]
        fix = "badcjobs run --help"
        engines = SETTINGS["run"]["engine"].among
        if (engine := words.get("engine")) is not None and engine not in engines:
            fix = start.text.replace(engine, nearest(engine, engines) or engines[0])
        findings.append(problem("settings", f"{where}: {text}", fix, tuple(more)))
    values.setdefault("engine", "command" if values.get("command") else "hawkears")
    values["source"] = given.source or sources or tuple(values.get("source", ()))
    values["out"] = given.out or (Path(values["out"]) if values.get("out") else None)
    return RunSettings(**{SETTINGS["run"][key].name: value for key, value in values.items()}), findings


# --- sources, places, the run folder ----------------------------------------------------------------------------------


def _collect_facts(
    settings: RunSettings, order: CheckOrder, site: Site, script: BatchScript | None, asked: Asked,
    source: SourceFacts | None,
) -> PreflightFacts:  # fmt: skip
    """Look up what the rules need."""
    start, options = script.start if script else None, script.options if script else {}
    here = script is None and order.submit.cluster == "local"  # then Slurm is not used
    slurm = None if here else preflight_facts.query_slurm(order.environ, order.clock)
    answers = slurm is not None and slurm.trouble is None
    trial = None
    if answers and script is not None and not script.mistakes and not sbatch_options.submit_words(order.submit):
        trial = preflight_facts.query_sbatch(order.cwd / script.name, order.environ, order.cwd)
    modules = (script.modules if script else ()) or (site.modules if not (start and start.contained) else ())
    logs = dict.fromkeys(posixpath.dirname(options.get(log, "")) for log in ("output", "error"))
    temporary, cache = order.environ.get("TMPDIR"), user_cache(order.environ)
    own = SubmitSettings(gpus_per_task=asked.gpus_per_node or asked.gpus_per_task)
    mem = f"{asked.memory_gb_per_node * (asked.nodes or 1) * 1024:.0f}M" if asked.memory_gb_per_node else None
    # A run starts as many workers as its cores and its memory hold, but one on each GPU.
    whole = SubmitSettings(gpus_per_task=asked.gpus_per_task, cpus=asked.cpus, mem=mem)
    few = replace(settings, workers_per_gpu=str(settings.workers_wanted or 1))
    on_a_node = (replace(own, cpus=asked.cpus_per_node), FASTEST) if asked.cpus_per_node else (own, order.prefer)
    orders = (*on_a_node, settings, site), (whole, FASTEST, settings, site), (own, FASTEST, few, Site(""))
    needed, had, least = (usual_request(*one, order.environ, order.cwd, source, asked.tasks or 1) for one in orders)
    if script is not None:
        with suppress(OSError, ValueError, KeyError, TypeError):  # it was not planned
            plan = parse_json(read_small((order.cwd / script.name).with_name("plan.json")))
            planned = Choice(**{name: plan["tasks"][name] for name in Choice._fields})
            workers = settings.workers_wanted or (None if plan["speed"]["points"] else planned.workers)
            had = planned if (planned.gpus, planned.workers) == (had.gpus, workers) else had  # else it was edited
    usual = usual_request(*orders[0], order.environ, order.cwd)  # without a look at the source, as submit and templates
    is_hawkears = settings.engine == "hawkears"
    is_known = settings.workers_wanted or (is_hawkears and source and source.longest_s)
    if any("XDG_CACHE_HOME" in one for one in order.submit.setup):
        cache = None  # the jobs have another one

    def folder(*path: str, write: bool = False) -> FolderFacts:
        return preflight_facts.look_at_folder(order.cwd.joinpath(*path), order.clock, write=write)

    return PreflightFacts(
        asked=asked,
        site=site,
        script=script,
        start=start,
        source=source,
        out=None if settings.out is None else folder(str(settings.out), write=True),
        submit=folder(),
        log_folders=tuple(  # absolute paths may differ on other machines
            folder(options.get("chdir", ""), log) for log in logs if log and "%" not in log and not posixpath.isabs(log)
        ),
        temporary=folder(temporary) if temporary else None,
        home=os.path.realpath(order.environ.get("HOME") or "/nonexistent"),
        cache=None if cache is None else os.path.realpath(cache),
        on_cluster=bool(site.name) or answers,
        live_mode=settings.live_mode,
        grace_s=settings.grace_s,
        slurm=slurm,
        cluster=preflight_facts.query_nodes(order.environ) if answers else None,
        trial=trial,
        modules=preflight_facts.load_modules(modules, order.environ) if modules else None,
        needed_gb=max(needed.mem_gb, usual.mem_gb),
        workers=least.gpus * least.workers if is_known and asked.gpus_per_task else None,
        workers_gb=least.mem_gb if is_hawkears else 0,
        rate=had.rate,
        task_hours=had.hours_per_1000_audio_hours / 1000,
        gpus=preflight_facts.look_at_gpus(order.environ, order.clock, settings.stand_in(order.cwd)),
    )


def _check_run_folder(settings: RunSettings, asked: Asked, cwd: Path) -> list[Remark]:
    """Compare with what the first task of an earlier run in the same folder has frozen."""
    found: list[Remark] = []
    if settings.out is None:
        return found
    folder = cwd / settings.out
    if (cut_short := find_cut_short(folder)) is not None:
        found.append(warning("submit", cut_short.what, cut_short.command))  # two arrays would do the same chunks
    try:
        frozen = FrozenRun.read(RunFolder(folder).run_toml)
    except BadcjobsError as error:
        return [*found, problem("run.toml", f"{error.what}: {error.why}", error.fix or _NEW)]
    if frozen is None:
        return found
    array, given = frozen.array, tuple(absolute(cwd, one) for one in settings.source)
    beyond = array is not None and (asked.tasks or 0) > array.count
    if array is not None and asked.array is not None:
        beyond = any(array.position_of(index) is None for index in parse_array(asked.array).indices)
    if given and real_places(frozen.settings.get("source")) != real_places(given):
        there = " ".join(map(str, frozen.settings.get("source", ())))
        found.append(problem("run.toml", f"{folder} holds a run of another source ({there})", _NEW))
    elif beyond:
        text = f"{folder} holds a run of the array {array}; other indices are refused"
        found.append(problem("run.toml", text, f"#SBATCH --array={array}   (or {_NEW})"))
    else:
        found.append(fine("run.toml", f"{folder} holds a run already: finished chunks are not repeated"))
    return found


# --- the engine -------------------------------------------------------------------------------------------------------


def _check_engine(settings: RunSettings, script: BatchScript | None, order: CheckOrder) -> Iterator[Remark]:
    """Let the engine look for its program and models; a warning if the script may set up more than is visible here."""
    start = script.start if script else None
    if script is not None and start is None:
        return  # it only merges, or starts badcjobs in a way that cannot be read
    if start is not None and start.contained:
        yield fine("engine", f"{settings.engine} is in the image, which is not checked")
        return
    # As a task would, in the virtual environments that the script activates.
    folders = [str(order.cwd / venv / "bin") for venv in reversed(script.venvs if script else ())]
    path = os.pathsep.join([*folders, order.environ.get("PATH", os.defpath)])
    environ, launcher = {**order.environ, "PATH": path}, Launcher("check")
    try:
        engine = choose_engine(
            settings, environ, launcher, order.clock, cwd=order.cwd, allow_cpu=True, start_s=_ENGINE_START_S
        )
        engine.check()
        yield fine("engine", f"{settings.engine} can be started here")
    except BadcjobsError as error:
        fix, why = error.fix or "badcjobs check --help", tuple((error.why or "").splitlines())
        unseen = None  # what may change the engine in the job, and has no effect here
        if script is not None and script.set_up_by:
            unseen = f"the script's {script.set_up_by}"
        elif start is not None and "engine" not in start.values and (start.hidden or "engine" in start.named):
            unseen = "the values of the script's variables"
        text = error.what if unseen is None else f"{error.what}; checked here without {unseen}"
        certain = unseen is None and not isinstance(error, SlowStart)
        yield (problem if certain else warning)("engine", text, fix, why)
