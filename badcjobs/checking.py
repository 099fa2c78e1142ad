"""The preflight behind ``badcjobs check``: look at everything a job needs, judge it, and say what would go wrong.

``looking.py`` looks, ``preflight/`` judges; here is which judgement gets which facts.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from badcjobs.check_order import CheckOrder, complete_order, open_script
from badcjobs.engine_check import check_engine
from badcjobs.errors import ExitCode
from badcjobs.looking import ask_nodes, ask_slurm, look_at_folder, look_at_gpus, try_modules, try_script
from badcjobs.own_line import Grammar
from badcjobs.preflight.billing import judge_billing
from badcjobs.preflight.facts import Asked, FolderFacts, ScriptFacts, SlurmFacts, SourceFacts
from badcjobs.preflight.finding import PROBLEM, SEVERITIES, WARNING, Finding, fine, problem, warning
from badcjobs.preflight.folders import judge_files, judge_live, judge_log_folder, judge_out, judge_submit
from badcjobs.preflight.machine import judge_gpus, judge_slurm
from badcjobs.preflight.modules import judge_modules
from badcjobs.preflight.names import hear_sbatch, judge_names
from badcjobs.preflight.request import (
    judge_account,
    judge_array,
    judge_gpu_hours,
    judge_merge_account,
    judge_node,
    judge_shares,
    judge_spread,
    judge_time,
)
from badcjobs.preflight.script import judge_grace, judge_script
from badcjobs.preflight.site import Site
from badcjobs.run_check import check_run_folder, check_settings, doubted, judge_engine_name
from badcjobs.seams import Clock
from badcjobs.site_file import find_site
from badcjobs.source_check import check_source
from badcjobs.trace import find_cut_short

_GRACE_S = 20.0  # the default of --grace


@dataclass(frozen=True, slots=True)
class Here:
    """Where the question is asked."""

    environ: Mapping[str, str]
    clock: Clock
    cwd: Path
    progress: Callable[[int], None] = lambda rows: None
    grammar: Grammar | None = None  # of badcjobs itself; None: nobody judges how a script calls it


@dataclass(frozen=True, slots=True)
class Checked:
    """All findings, and what they were judged by."""

    findings: tuple[Finding, ...]
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


def check(order: CheckOrder, here: Here) -> Checked:
    """Look at everything and judge it; only wrong usage raises."""
    site = None if order.site is None else find_site(order.site, here.cwd)
    script = None
    if order.script is not None:
        script = open_script(here.cwd / order.script, order.script, here.environ, here.cwd, here.grammar)
    given, order = order, complete_order(order, script, here.environ, here.cwd)
    facts = script.facts if script else None
    slurm = ask_slurm(here.environ, here.clock)
    on_cluster = site is not None or (slurm is not None and slurm.trouble is None)
    source, findings = _check_sources(order, here, None if given.sources else facts)
    findings += _check_places(order, here, site, facts, on_cluster=on_cluster)
    findings += _check_request(order, given, here, site, facts, slurm)
    findings += judge_shares(order.asked, source) if source else ()
    findings += _check_script(order, here, site, facts, slurm)
    findings += judge_slurm(slurm, site_named=site is not None)
    findings += judge_gpus(look_at_gpus(here.environ, here.clock), on_cluster=on_cluster)
    findings += check_settings(order, facts, here.cwd)
    if order.config_trouble is None:
        unknown = judge_engine_name(order, facts)
        findings += [unknown] if unknown else check_engine(order, facts, here.environ, here.clock, here.cwd)
    else:
        fix = "badcjobs run … --config FILE.toml   (one that can be read)"
        findings.append(problem("config", order.config_trouble, fix))
    return Checked(tuple(findings), site.name if site else None, order.asked, source)


def _check_sources(
    order: CheckOrder, here: Here, script: ScriptFacts | None
) -> tuple[SourceFacts | None, list[Finding]]:
    """Read the sources; ``script`` is the one that names them, unless the command line does."""
    start = script.start if script else None
    if order.sources:
        root = None if order.root is None else here.cwd / order.root
        paths = [here.cwd / path for path in order.sources]
        source, findings = check_source(paths, root, progress=here.progress, quick=order.quick, cutting=order.cutting)
        return source, doubted(findings, start)
    if script is None or start is None or start.sources == ():
        return None, []
    why = "names it inside an image" if start.sources else "does not say it so that it can be seen from here"
    look = f"badcjobs check SOURCE --script {script.name}"
    return None, [fine("source", f"not looked at, for line {start.line} {why}; try: {look}")]


def _check_places(
    order: CheckOrder, here: Here, site: Site | None, script: ScriptFacts | None, *, on_cluster: bool
) -> Iterator[Finding]:
    home = os.path.realpath(here.environ.get("HOME") or "/nonexistent")
    out: FolderFacts | None = None
    if order.out is not None:
        out = look_at_folder(here.cwd / order.out, here.clock, write=True)
        yield from judge_out(out, site, home, on_cluster=on_cluster)
        yield from _check_submitted(here.cwd / order.out)
    yield from check_run_folder(order, script, here.cwd)
    if order.asked.tasks is not None:
        yield from judge_files(out, site, order.asked.tasks)
    yield from judge_submit(look_at_folder(here.cwd, here.clock, write=False), site, home, script)
    if script is not None:
        yield from _check_log_folder(script, here)
    yield from _check_live(here, site, script)


def _check_submitted(out: Path) -> Iterator[Finding]:
    """Look for a submit in the same folder that was cut short: its array and another would do the same chunks."""
    if (cut_short := find_cut_short(out)) is not None:
        yield warning("submit", cut_short.what, cut_short.command)


def _check_live(here: Here, site: Site | None, script: ScriptFacts | None) -> Iterator[Finding]:
    """Look at what TMPDIR will name in the job: sbatch hands it on, unless the script has its own."""
    temporary = here.environ.get("TMPDIR") if script is None or script.temporary is None else script.temporary
    if temporary and "$" in temporary:
        return
    live = look_at_folder(here.cwd / temporary, here.clock, write=False) if temporary else None
    yield from judge_live(live, site, live_mode=_flag(script, "--live-mode", "auto"))


def _check_log_folder(script: ScriptFacts, here: Here) -> Iterator[Finding]:
    """Look for the folder of a log that is named from where the job is submitted; other machines have others."""
    for folder in dict.fromkeys(posixpath.dirname(log or "") for log in (script.output, script.error)):
        if folder and "%" not in folder and not posixpath.isabs(folder):
            path = here.cwd / (script.chdir or "") / folder
            yield from judge_log_folder(look_at_folder(path, here.clock, write=False), script)


def _check_request(
    order: CheckOrder,
    given: CheckOrder,
    here: Here,
    site: Site | None,
    script: ScriptFacts | None,
    slurm: SlurmFacts | None,
) -> list[Finding]:
    """Judge what is asked of Slurm; ``given`` is the command line alone."""
    asked, answers = order.asked, slurm is not None and slurm.trouble is None
    nodes, names = ask_nodes(here.environ, asked.partition) if answers else (None, None)
    trial = None
    if answers and script is not None and not script.mistakes and replace(given.asked, merge_account=None) == Asked():
        trial = try_script(here.cwd / script.name, here.environ, here.cwd)
    found = [
        *judge_array(asked, site, slurm),
        *judge_time(asked, site),
        *judge_gpu_hours(asked, site),
        *judge_node(asked, site, nodes),
        *judge_spread(asked, site, script),
        *judge_billing(asked, site),
        *judge_account(asked, site, has_script=script is not None),
        *judge_merge_account(asked, site, script),
    ]
    name, all_work = script.name if script else "", names is not None and names.all_work
    return hear_sbatch(found, judge_names(asked, names), trial, name, all_work=all_work)


def _check_script(
    order: CheckOrder, here: Here, site: Site | None, script: ScriptFacts | None, slurm: SlurmFacts | None
) -> Iterator[Finding]:
    if script is not None:
        yield from judge_script(script, order.asked)
    if script is None or script.start is not None or "run" in script.other_commands:  # a merge has no chunk to end
        yield from judge_grace(slurm, _number(_flag(script, "--grace", ""), _GRACE_S))
    contained = script is not None and script.start is not None and script.start.contained
    wanted = (script.modules if script else ()) or (site.modules if site and not contained else ())
    yield from judge_modules(script, site, try_modules(wanted, here.environ) if wanted else None)


def _flag(script: ScriptFacts | None, name: str, default: str) -> str:
    return script.start.flags.get(name, default) if script and script.start else default


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default
