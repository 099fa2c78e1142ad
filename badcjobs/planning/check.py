"""``badcjobs check``: look at everything a job needs, judge it, and say what would go wrong.

``preflight_facts.py`` looks, the ``*_rules.py`` judge; ``check()`` is which judgement gets which facts. What the
command line does not say is taken from the job script, then from the script's --config.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.cluster.job_script import BatchScript, ParsedWords, parse_plainly, read_script
from badcjobs.cluster.sbatch_options import Asked, parse_array
from badcjobs.errors import BadcjobsError, BadInput, ExitCode
from badcjobs.model import NO_CUTTING, Cutting
from badcjobs.paths import RunFolder
from badcjobs.planning import place_rules, preflight_facts, request_rules, script_rules
from badcjobs.planning.findings import SEVERITIES, Remark, fine, judge_all, problem, warning
from badcjobs.planning.preflight_facts import FolderFacts, PreflightFacts, SourceFacts, check_source
from badcjobs.planning.site import Site, find_site
from badcjobs.processes import SubprocessLauncher
from badcjobs.report.rules import PROBLEM, WARNING
from badcjobs.seams import Clock
from badcjobs.settings import ENGINES, Config, FrozenRun, RunSettings, make_settings, nearest, settings_by_key
from badcjobs.store.submission_record import find_cut_short
from badcjobs.workers.engines import choose_engine

_NEW = "--out another folder, for a new run"


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What ``badcjobs check`` is to look at; None: not said, so the script is asked."""

    sources: tuple[str, ...] = ()
    out: str | None = None
    root: str | None = None
    cutting: Cutting = NO_CUTTING
    site: str | None = None
    script: str | None = None
    engine: str | None = None
    engine_args: tuple[str, ...] = ()
    command: str | None = None
    hawkears_python: str | None = None
    hawkears_root: str | None = None
    asked: Asked = field(default_factory=Asked)
    quick: bool = False


@dataclass(frozen=True, slots=True)
class Here:
    """Where the question is asked."""

    environ: Mapping[str, str]
    clock: Clock
    cwd: Path
    progress: Callable[[int], None] = lambda rows: None
    parse: Callable[[Sequence[str]], ParsedWords] = parse_plainly  # of badcjobs' own words


@dataclass(frozen=True, slots=True)
class Checked:
    """All findings, and what they were judged by."""

    findings: tuple[Remark, ...]
    site: str | None
    asked: Asked
    source: SourceFacts | None

    def count(self, severity: str) -> int:
        return sum(one.severity == severity for one in self.findings)

    @property
    def exit_code(self) -> int:
        """1 where something is a problem, as for a job with failed chunks; warnings do not count."""
        return ExitCode.CHUNKS_FAILED if self.count(PROBLEM) else ExitCode.DONE

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON document of ``badcjobs check --json``, the worst findings first."""
        ranked = sorted(self.findings, key=lambda one: SEVERITIES.index(one.severity))
        return {
            "verdict": "not ready" if self.count(PROBLEM) else "ready",
            "problems": self.count(PROBLEM),
            "warnings": self.count(WARNING),
            "site": self.site,
            "asked": asdict(self.asked),
            "source": None if self.source is None else asdict(self.source),
            "findings": [asdict(one) for one in ranked],
        }


def check(given: CheckOrder, here: Here) -> Checked:
    """Look at everything and judge it; only wrong usage raises."""
    site = Site("") if given.site is None else find_site(given.site, here.cwd)
    script = None if given.script is None else _open_script(given.script, here)
    config, config_trouble = Config(), None
    try:
        config = Config.read(script.start.values.get("config") if script and script.start else None, here.cwd)
    except BadInput as error:
        config_trouble = f"{error.what}: {error.why}" if error.why else error.what
    of_run = config.read_tables([])[0]  # what is wrong with it, the settings themselves say
    order = _complete(given, script, of_run, here)
    source, findings = _check_sources(order, here, None if given.sources else script)
    facts = _look(order, given, here, site, script, source, of_run)
    findings += judge_all(place_rules.OUT, facts)
    if order.out is not None and (cut_short := find_cut_short(here.cwd / order.out)) is not None:
        findings.append(warning("submit", cut_short.what, cut_short.command))  # two arrays would do the same chunks
    findings += _check_run_folder(order, facts, here.cwd)
    findings += judge_all(place_rules.PLACES, facts)
    findings += request_rules.judge_request(facts)
    findings += request_rules.SHARES(facts)
    findings += script_rules.judge_script(facts)
    findings += judge_all((script_rules.GRACE, *script_rules.MODULES, *place_rules.MACHINE), facts)
    if config_trouble is not None:
        fix = "badcjobs run … --config FILE.toml   (one that can be read)"
        findings.append(problem("config", config_trouble, fix))
    else:
        findings += _check_settings(script, config)
        findings += _check_engine(order, script, here)
    return Checked(tuple(findings), site.name or None, order.asked, source)


# --- what is to be looked at ------------------------------------------------------------------------------------------


def _open_script(name: str, here: Here) -> BatchScript:
    try:
        with (here.cwd / name).open(encoding="utf-8", newline="") as file:  # its line ends are part of what is judged
            return read_script(file.read(), name, here.environ, str(here.cwd), here.parse)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--script {name} cannot be read", why=str(error), fix=f"ls -l {name}") from error


def _complete(order: CheckOrder, script: BatchScript | None, of_run: Mapping[str, Any], here: Here) -> CheckOrder:
    """Take from the script, its --config (``of_run``) and sbatch's own variables what the command line does not say.

    An unknown engine is wrong usage on the command line of ``check``, and a finding in a script.
    """
    if order.engine is not None and order.engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise BadInput(f"--engine {order.engine} is not known", why=f"engines are {known}", fix="--engine hawkears")
    asked = replace(order.asked, account=order.asked.account or here.environ.get("SBATCH_ACCOUNT"))
    start = script.start if script else None
    said = {**of_run, **(start.values if start else {})}
    cutting = order.cutting
    if cutting == NO_CUTTING:
        chunk_length, overlap = (_number(said.get(name), float, None) for name in ("chunk_length", "overlap"))
        cutting = Cutting(said.get("cut"), chunk_length, overlap or 0.0)
    sources = (start.sources if start else None) or ()
    if start and start.contained and not all((here.cwd / one).exists() for one in sources):
        sources = ()  # absolute paths may be those of folders in the image
    texts = ("out", "root", "command", "hawkears_python", "hawkears_root")
    known_texts: dict[str, Any] = {name: getattr(order, name) or said.get(name) for name in texts}
    return replace(
        order,
        sources=order.sources or sources or _list(said.get("source")),
        asked=_merged(asked, script.asked if script else Asked()),
        cutting=cutting,
        engine=order.engine or said.get("engine") or ("command" if known_texts["command"] else "hawkears"),
        engine_args=order.engine_args or _list(said.get("engine_arg")),
        **known_texts,
    )


def _number(text: object, kind: type, default: Any) -> Any:
    """Return a text as a number; what is wrong with another text, the settings themselves say."""
    try:
        return default if text is None else kind(str(text))
    except ValueError:
        return default


def _list(value: object) -> tuple[str, ...]:
    return tuple(value) if isinstance(value, list | tuple) else ()


def _merged(asked: Asked, in_script: Asked) -> Asked:
    """Put what the command line says over what the script says."""
    said = {key: one for key, one in asdict(asked).items() if one is not None and one is not False and one != ()}
    of_the_array = ("last_index", "array", "array_range")
    forgotten: dict[str, Any] = dict.fromkeys(of_the_array) if "tasks" in said else {}
    if "time_s" in said or "no_time_limit" in said:
        forgotten |= {"time_s": None, "no_time_limit": False}
    merged = replace(in_script, **(forgotten | said))
    if asked.cpus_per_node is not None:
        merged = replace(merged, cpus=asked.cpus_per_node * (merged.nodes or 1))
    if asked.gpus_per_task is not None:
        merged = replace(merged, gpus_per_node=-(-asked.gpus_per_task // (merged.nodes or 1)))
    return merged


# --- sources, places, the request -------------------------------------------------------------------------------------


def _check_sources(
    order: CheckOrder, here: Here, script: BatchScript | None
) -> tuple[SourceFacts | None, list[Remark]]:
    """Read the sources; ``script`` is the one that names them, unless the command line does."""
    if order.sources:
        root = None if order.root is None else here.cwd / order.root
        paths = [here.cwd / path for path in order.sources]
        return check_source(paths, root, progress=here.progress, quick=order.quick, cutting=order.cutting)
    start = script.start if script else None
    if script is None or start is None or start.sources == ():
        return None, []
    why = "names it inside an image" if start.sources else "does not say it so that it can be seen from here"
    look = f"badcjobs check SOURCE --script {script.name}"
    return None, [fine("source", f"not looked at, for line {start.line} {why}; try: {look}")]


def _look(
    order: CheckOrder,
    given: CheckOrder,
    here: Here,
    site: Site,
    script: BatchScript | None,
    source: SourceFacts | None,
    of_run: Mapping[str, Any],
) -> PreflightFacts:
    """Look up what the rules judge; ``given`` is the command line alone, ``of_run`` the script's --config."""
    start, options = script.start if script else None, script.options if script else {}
    slurm = preflight_facts.ask_slurm(here.environ, here.clock)
    answers = slurm is not None and slurm.trouble is None
    trial = None
    if answers and script is not None and not script.mistakes and replace(given.asked, merge_account=None) == Asked():
        trial = preflight_facts.try_script(here.cwd / script.name, here.environ, here.cwd)
    modules = (script.modules if script else ()) or (site.modules if not (start and start.contained) else ())
    logs = dict.fromkeys(posixpath.dirname(options.get(log, "")) for log in ("output", "error"))
    temporary = here.environ.get("TMPDIR")

    def folder(*path: str, write: bool = False) -> FolderFacts:
        return preflight_facts.look_at_folder(here.cwd.joinpath(*path), here.clock, write=write)

    return PreflightFacts(
        asked=order.asked,
        site=site,
        script=script,
        start=start,
        source=source,
        out=None if order.out is None else folder(order.out, write=True),
        submit=folder(),
        log_folders=tuple(  # on other machines absolute paths may be others
            folder(options.get("chdir", ""), log) for log in logs if log and "%" not in log and not posixpath.isabs(log)
        ),
        temporary=folder(temporary) if temporary else None,
        home=os.path.realpath(here.environ.get("HOME") or "/nonexistent"),
        on_cluster=bool(site.name) or answers,
        live_mode=of_run.get("live_mode", "auto"),
        grace_s=of_run.get("grace_s", RunSettings(Path()).grace_s),
        slurm=slurm,
        cluster=preflight_facts.ask_nodes(here.environ) if answers else None,
        trial=trial,
        modules=preflight_facts.try_modules(modules, here.environ) if modules else None,
        gpus=preflight_facts.look_at_gpus(here.environ, here.clock),
    )


def _check_run_folder(order: CheckOrder, facts: PreflightFacts, cwd: Path) -> Iterator[Remark]:
    """Compare with what the first task of an earlier run in the same folder has frozen."""
    frozen = None
    try:
        frozen = None if order.out is None else FrozenRun.read(RunFolder(cwd / order.out).run_toml)
    except BadcjobsError as error:
        yield problem("run.toml", f"{error.what}: {error.why}", error.fix or _NEW)
    if frozen is None:
        yield from request_rules.SPACING(facts)
        return
    folder, array, asked = f"{cwd / (order.out or '')}", frozen.array, order.asked
    given = tuple(os.path.abspath(cwd / one) for one in order.sources)  # noqa: PTH100 - as frozen: links stay
    beyond = array is not None and (asked.tasks or 0) > array.count
    if array is not None and asked.array is not None:
        beyond = any(array.position_of(index) is None for index in parse_array(asked.array).indices)
    if given and frozen.settings.get("source") != given:
        there = " ".join(map(str, frozen.settings.get("source", ())))
        yield problem("run.toml", f"{folder} holds a run of another source ({there})", _NEW)
    elif beyond:
        text = f"{folder} holds a run of the array {array}; other indices are refused"
        yield problem("run.toml", text, f"#SBATCH --array={array}   (or {_NEW})")
    else:
        yield fine("run.toml", f"{folder} holds a run already: what is done stays done")


# --- badcjobs run and its engine --------------------------------------------------------------------------------------


def _check_settings(script: BatchScript | None, config: Config) -> Iterator[Remark]:
    """Judge the values of the script's own options, as ``badcjobs run`` would before it begins."""
    start = script.start if script else None
    if script is None or start is None or start.hidden or script.wrong_calls:
        return  # with what cannot be seen from here it may all be right
    where = f"{script.name} line {start.line}"
    if "out" not in start.named:
        yield problem("out", f"{where} has no --out, which badcjobs run needs", f"{start.text} --out results")
    known = settings_by_key()
    values: dict[str, Any] = {"source": start.sources or (("?",) if start.sources is None else None)}
    for key in start.named & known.keys():
        kind = known[key].metadata["kind"]
        if key not in start.values and kind is not bool:
            return
        value = start.values.get(key)
        if kind is not bool and (key != "engine" or value in ENGINES):  # another engine has a finding of its own
            values[key] = _list(value) if kind is list else value if kind is str else _number(value, kind, value)
    try:
        make_settings(Path("results"), values, config)
    except BadInput as error:
        details = tuple((error.why or "").splitlines())
        yield problem("settings", f"{where}: {error.what}", error.fix or "badcjobs run --help", details)


def _check_engine(order: CheckOrder, script: BatchScript | None, here: Here) -> Iterator[Remark]:
    """Let the engine look for its program and models; a warning where the script may see more than we do."""
    start = script.start if script else None
    if order.engine not in ENGINES:
        name = order.engine or ""
        text = f"--engine {name} is not known; engines are {', '.join(ENGINES)}"
        right = nearest(name, ENGINES) or ENGINES[0]
        if script and start and start.values.get("engine") == name:
            yield problem("engine", f"{script.name} line {start.line}: {text}", start.text.replace(name, right))
        else:
            yield problem("engine", text, f'engine = "{right}"   (in the table [run] of its --config)')
    elif script is not None and start is None:
        return  # it only merges, or starts badcjobs in a way that cannot be read
    elif start is not None and start.contained:
        yield fine("engine", f"{order.engine} is in the image, which is not looked into")
    else:
        try:
            _try_engine(order, script.venvs if script else (), here)
            yield fine("engine", f"{order.engine} can be started here")
        except BadcjobsError as error:
            fix, why = error.fix or "badcjobs check --help", tuple((error.why or "").splitlines())
            unseen = f"the script's {script.set_up_by}" if script and script.set_up_by else None
            if start is not None and "engine" not in start.values and (start.hidden or "engine" in start.named):
                unseen = unseen or "knowing what the script's variables hold"
            text = error.what if unseen is None else f"{error.what}; looked for here, without {unseen}"
            yield (problem if unseen is None else warning)("engine", text, fix, why)


def _try_engine(order: CheckOrder, venvs: Sequence[str], here: Here) -> None:
    """Ask the engine as a task would, in the virtual environments that the script activates."""
    folders = [str(here.cwd / venv / "bin") for venv in reversed(venvs)]
    path = os.pathsep.join([*folders, here.environ.get("PATH", os.defpath)])
    settings = RunSettings(
        here.cwd,
        engine=order.engine or "",
        engine_args=order.engine_args,
        command=order.command,
        hawkears_python=order.hawkears_python,
        hawkears_root=order.hawkears_root,
    )
    environ, launcher = {**here.environ, "PATH": path}, SubprocessLauncher("check")
    choose_engine(settings, environ, launcher, here.clock, cwd=here.cwd, allow_cpu=True).check()
