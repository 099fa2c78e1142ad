"""The preflight behind ``badcjobs check``: look at everything a job needs, judge it, and say what would go wrong.

``looking.py`` looks, ``preflight/`` judges; here is which judgement gets which facts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.config import ENGINES
from badcjobs.errors import BadcjobsError, BadInput, ExitCode
from badcjobs.frozen_run import FrozenRun
from badcjobs.looking import ask_slurm, look_at_folder, look_at_gpus, try_modules
from badcjobs.model import ArrayShape
from badcjobs.paths import RunFolder
from badcjobs.preflight.facts import Asked, FolderFacts, ScriptFacts, SlurmFacts, SourceFacts
from badcjobs.preflight.finding import PROBLEM, SEVERITIES, WARNING, Finding, fine, problem
from badcjobs.preflight.folders import judge_files, judge_live, judge_out, judge_submit
from badcjobs.preflight.machine import judge_gpus, judge_slurm
from badcjobs.preflight.request import (
    judge_account,
    judge_array,
    judge_billing,
    judge_gpu_hours,
    judge_node,
    judge_shares,
)
from badcjobs.preflight.script import judge_grace, judge_modules, judge_script
from badcjobs.preflight.site import Site
from badcjobs.script_facts import ReadScript, read_script
from badcjobs.seams import Clock
from badcjobs.site_file import find_site
from badcjobs.source_check import check_source
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher

_GRACE_S = 20.0  # the default of --grace


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What ``badcjobs check`` was told; None: not said, so the script is asked."""

    sources: tuple[str, ...] = ()
    out: str | None = None
    root: str | None = None
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
    script = None if order.script is None else _read_script(here.cwd / order.script, order.script, here.environ)
    order = _completed(order, script, here.environ)
    facts = script.facts if script else None
    slurm = ask_slurm(here.environ, here.clock)
    on_cluster = site is not None or (slurm is not None and slurm.trouble is None)
    source, findings = _check_sources(order, here)
    findings += _check_places(order, here, site, facts, on_cluster=on_cluster)
    findings += _check_request(order, site, slurm, has_script=script is not None)
    findings += judge_shares(order.asked, source) if source else ()
    findings += _check_script(here, site, facts, slurm)
    findings += judge_slurm(slurm, site_named=site is not None)
    findings += judge_gpus(look_at_gpus(here.environ, here.clock), on_cluster=on_cluster)
    findings += _check_engine(order, here)
    return Checked(tuple(findings), site.name if site else None, order.asked, source)


def _read_script(path: Path, name: str, environ: Mapping[str, str]) -> ReadScript:
    try:
        with path.open(encoding="utf-8", newline="") as file:  # its line ends are part of what is judged
            return read_script(file.read(), name, environ)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--script {name} cannot be read", why=str(error), fix=f"ls -l {name}") from error


def _completed(order: CheckOrder, script: ReadScript | None, environ: Mapping[str, str]) -> CheckOrder:
    """Take from the script, and from sbatch's own variables, what the command line does not say."""
    asked = order.asked
    flags = script.facts.start.flags if script and script.facts.start else {}
    if script is not None:
        said = {key: value for key, value in asdict(asked).items() if value is not None}
        asked = replace(script.asked, **({"last_index": None} if "tasks" in said else {}), **said)
    asked = replace(asked, account=order.asked.account or environ.get("SBATCH_ACCOUNT") or asked.account)
    order = replace(
        order,
        asked=asked,
        out=order.out or flags.get("--out"),
        root=order.root or flags.get("--root"),
        engine=order.engine or flags.get("--engine") or ("command" if order.command else "hawkears"),
        hawkears_python=order.hawkears_python or flags.get("--hawkears-python"),
        hawkears_root=order.hawkears_root or flags.get("--hawkears-root"),
        command=order.command or flags.get("--command"),
    )
    if order.engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise BadInput(f"--engine {order.engine} is not known", why=f"engines are {known}", fix="--engine hawkears")
    return order


def _check_sources(order: CheckOrder, here: Here) -> tuple[SourceFacts | None, list[Finding]]:
    if not order.sources:
        return None, []
    root = None if order.root is None else here.cwd / order.root
    paths = [here.cwd / path for path in order.sources]
    return check_source(paths, root, progress=here.progress, quick=order.quick)


def _check_places(
    order: CheckOrder, here: Here, site: Site | None, script: ScriptFacts | None, *, on_cluster: bool
) -> Iterator[Finding]:
    home = os.path.realpath(here.environ.get("HOME") or "/nonexistent")
    out: FolderFacts | None = None
    if order.out is not None:
        out = look_at_folder(here.cwd / order.out, here.clock, write=True)
        yield from judge_out(out, site, home, on_cluster=on_cluster)
        yield from _check_frozen(order, here.cwd)
    if order.asked.tasks is not None:
        yield from judge_files(out, site, order.asked.tasks)
    yield from judge_submit(look_at_folder(here.cwd, here.clock, write=False), site, home, script)
    temporary = here.environ.get("TMPDIR")
    live = None if not temporary else look_at_folder(here.cwd / temporary, here.clock, write=False)
    yield from judge_live(live, site, live_mode=_flag(script, "--live-mode", "auto"))


def _check_frozen(order: CheckOrder, cwd: Path) -> Iterator[Finding]:
    """Compare with what the first task of an earlier run in the same folder has frozen."""
    assert order.out is not None
    path = RunFolder(cwd / order.out).run_toml
    fix = "--out another folder, for a new run"
    try:
        frozen = FrozenRun.read(path)
    except BadcjobsError as error:
        yield problem("run.toml", f"{error.what}: {error.why}", error.fix or fix)
        return
    if frozen is None:
        return
    array = frozen.array
    given = tuple(os.path.abspath(cwd / one) for one in order.sources)  # noqa: PTH100 - as frozen: links stay
    if given and frozen.settings.get("source") != given:
        there = " ".join(map(str, frozen.settings.get("source", ())))
        yield problem("run.toml", f"{path.parent} holds a run of another source ({there})", fix)
    elif array is not None and _beyond(order.asked, array):
        text = f"{path.parent} holds a run of the array {array}; other indices are refused"
        yield problem("run.toml", text, f"#SBATCH --array={array}   (or {fix})")
    else:
        yield fine("run.toml", f"{path.parent} holds a run already: what is done stays done")


def _beyond(asked: Asked, array: ArrayShape) -> bool:
    last = array.first + (array.count - 1) * array.step
    return (asked.tasks or 0) > array.count or (asked.last_index or 0) > last


def _check_request(
    order: CheckOrder, site: Site | None, slurm: SlurmFacts | None, *, has_script: bool
) -> Iterator[Finding]:
    yield from judge_array(order.asked, site, slurm)
    yield from judge_gpu_hours(order.asked, site)
    yield from judge_node(order.asked, site)
    yield from judge_billing(order.asked, site)
    yield from judge_account(order.asked, site, has_script=has_script)


def _check_script(
    here: Here, site: Site | None, script: ScriptFacts | None, slurm: SlurmFacts | None
) -> Iterator[Finding]:
    if script is not None:
        yield from judge_script(script)
    yield from judge_grace(slurm, _number(_flag(script, "--grace", ""), _GRACE_S))
    wanted = (script.modules if script else ()) or (site.modules if site else ())
    yield from judge_modules(script, site, try_modules(wanted, here.environ) if wanted else None)


def _check_engine(order: CheckOrder, here: Here) -> Iterator[Finding]:
    """Let the engine look for its program and its models, as a task would."""
    assert order.engine is not None
    engine = choose_engine(
        order.engine,
        args=order.engine_args,
        command=order.command,
        hawkears_python=order.hawkears_python,
        hawkears_root=None if order.hawkears_root is None else here.cwd / order.hawkears_root,
        allow_cpu=True,
        environ=here.environ,
        launcher=SubprocessLauncher("check"),
        clock=here.clock,
    )
    try:
        engine.check()
    except BadcjobsError as error:
        why = (error.why or "").splitlines()
        yield problem("engine", error.what, error.fix or "badcjobs check --help", why)
    else:
        yield fine("engine", f"{order.engine} can be started here")


def _flag(script: ScriptFacts | None, name: str, default: str) -> str:
    return script.start.flags.get(name, default) if script and script.start else default


def _number(text: str, default: float) -> float:
    try:
        return float(text)
    except ValueError:
        return default
