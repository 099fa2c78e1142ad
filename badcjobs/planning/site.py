"""A site's rules, from a TOML file, ours or the user's own; and ``badcjobs init``, which writes badcjobs.toml."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from badcjobs import paths as resources
from badcjobs.clock import SystemClock
from badcjobs.devices.listing import list_granted
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Billing, StandIn
from badcjobs.project import Project
from badcjobs.seams import Environ
from badcjobs.settings import OPTIONS_ONLY, SETTINGS, Setting, convert, find_problem, read_toml, to_toml
from badcjobs.trust import Trust
from badcjobs.words import count

Hours = float  # of a time limit


@dataclass(frozen=True)
class Site:
    """The rules of a cluster; None and (): not in its file."""

    name: str
    array_tasks: int | None = None
    queued_jobs: int | None = None
    gpu_hours: float | None = None  # running and queued together, per allocation
    time_h: Hours | None = None
    files: int | None = None  # quota of files where results are written
    space_tb: float | None = None  # quota of bytes there
    node_gpus: int | None = None
    node_cpus: int | None = None
    node_memory_gb: float | None = None
    read_only: tuple[str, ...] = ()  # folders that compute nodes cannot write
    writable: tuple[str, ...] = ()  # the only shared folders that they can
    no_submit: tuple[str, ...] = ()  # folders from which sbatch is refused
    node_local: str | None = None  # the variable that names the disk of the node
    cache: str | None = None  # XDG_CACHE_HOME of jobs, where they cannot write to home; the shell fills in variables
    example: str = "/a/folder/that/all/nodes/can/write"  # a folder for results
    account_ends_with: str | None = None
    modules: tuple[str, ...] = ()  # what a job script loads, in this order
    bill_cpu: float | None = None
    bill_memory_gb: float | None = None
    bill_gpu: float | None = None
    bill_rule: Literal["max", "sum"] = "sum"  # "max" where PriorityFlags has MAX_TRES
    plan_time_h: Hours | None = None  # default time limit of a task
    plan_gpus: int | None = None  # usual number at a time

    @property
    def billing(self) -> Billing | None:
        """How it bills; None: not in its file."""
        if not (self.bill_gpu or self.bill_memory_gb or self.bill_cpu):
            return None
        return Billing(
            self.bill_gpu or 0.0,
            self.bill_memory_gb or 0.0,
            self.bill_cpu or 0.0,
            self.bill_rule,
        )

    @property
    def cores_per_gpu(self) -> int | None:
        """The cores of a node for each of its GPUs."""
        if not self.node_cpus or not self.node_gpus:
            return None
        return max(1, self.node_cpus // self.node_gpus)

    def time_limit_s(self, hours: float) -> int:
        """Return the time limit for so many hours, but within the site's: whole minutes, at least one."""
        return 60 * max(1, int(60 * min(hours, self.time_h or hours) + 1e-6))

    def task_limits(self) -> list[tuple[int, str]]:
        """Return how many tasks may be submitted at a time, and who says so."""
        limits = []
        if self.array_tasks:
            limits.append((self.array_tasks, f"{self.name} allows arrays of {self.array_tasks:,}"))
        if self.queued_jobs:
            why = f"{self.name} queues {self.queued_jobs:,} jobs, the merge job too"
            limits.append((max(1, self.queued_jobs - 1), why))
        return limits


# table of the file → its keys, each with the field of Site
_TABLES = {
    "limits": {key: key for key in ("array_tasks", "queued_jobs", "gpu_hours", "time_h", "files", "space_tb")},
    "node": {key: f"node_{key}" for key in ("gpus", "cpus", "memory_gb")},
    "folders": {key: key for key in ("read_only", "writable", "no_submit", "node_local", "example", "cache")},
    "account": {"ends_with": "account_ends_with"},
    "modules": {"load": "modules"},
    "billing": {key: f"bill_{key}" for key in ("cpu", "memory_gb", "gpu", "rule")},
    "plan": {key: f"plan_{key}" for key in ("time_h", "gpus")},
}
_FIELDS = Site.__dataclass_fields__
# type of the field → what a value must be
_KINDS = {
    "int": Setting("count", "", least=1, most=1e9),
    "float": Setting("number", "", least=0, most=1e9),
    "Hours": Setting("number", "", least=1 / 60, most=1e9),  # Slurm counts minutes
    "str": Setting("text", "", check=lambda text: None if text else "must not be empty"),
    "tuple": Setting("texts", "", check=lambda texts: None if all(texts) else "must not have an empty string"),
    "Literal": Setting("text", "", among=("max", "sum")),
}


def find_site(
    name: str | None,
    cwd: Path,
    option: str = "--site ",
    trust: Trust | None = None,
) -> Site:
    """Read a site file that comes with badcjobs, by its name, or the user's own, by its path; ``option`` names it.

    None: a site without any rules. ``trust``: refuse modules, which are programs, of a file that is not trusted.
    """
    if name is None:
        return Site("")
    if name.endswith(".toml"):
        path = cwd / name
    else:
        path = resources.folder("sites") / f"{name}.toml"
        names = sorted(file.stem for file in path.parent.glob("*.toml"))
        if name not in names:
            raise BadInput(
                f"there is no site {name!r}",
                why=f"sites are {', '.join(names)}, or a file whose name ends in .toml",
                fix=f"the same command with {option}{names[0]}   (or ./{name}.toml; see badcjobs guide sockeye)",
            )
    document, _, status = read_toml(path)
    site = parse_site(document, str(path))
    if trust is not None and name.endswith(".toml") and site.modules:
        trust.check(path, status, {"modules.load": ", ".join(site.modules)})
    return site


def find_billing(project: Project, cwd: Path) -> Billing | None:
    """Return the weights of the project's site; None: it has none, or the file of the project names a missing one."""
    try:
        return find_site(project.site, cwd, "--config site=").billing
    except BadInput:
        if "site" in project.keys:
            raise
        return None


def parse_site(document: Mapping[str, Any], where: str) -> Site:
    """Read a site file; unknown keys and wrong values are named all at once."""
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    for table, content in document.items():
        if table in ("name", "about"):
            problem = find_problem(_KINDS["str"], content)
            if problem:
                mistakes.append(f"{table} {problem}")
        elif table not in _TABLES:
            mistakes.append(f"unknown key {table}; known are name, about, [{'], ['.join(_TABLES)}]")
        elif not isinstance(content, dict):
            mistakes.append(f"{table} must be a table: [{table}]")
        else:
            values |= _parse_table(table, content, mistakes)
    if "name" not in document:
        mistakes.append("name is missing")
    if mistakes:
        raise BadInput(
            f"{where} has {count(len(mistakes), 'mistake')}",
            why="\n".join(mistakes),
            fix="badcjobs guide sockeye   (all keys of a site file)",
        )
    return Site(name=document["name"], **values)


def _parse_table(
    table: str,
    content: Mapping[str, Any],
    mistakes: list[str],
) -> dict[str, Any]:
    """Return the values of a table by the fields of Site; add wrong ones to ``mistakes``."""
    values: dict[str, Any] = {}
    for key, value in content.items():
        if key not in _TABLES[table]:
            mistakes.append(f"[{table}] {key}: unknown key; known are {', '.join(_TABLES[table])}")
            continue
        field = _TABLES[table][key]
        setting = _KINDS[re.split(r"\W", str(_FIELDS[field].type))[0]]
        values[field] = convert(setting, value)
        problem = find_problem(setting, values[field])
        if problem:
            mistakes.append(f"[{table}] {key} = {to_toml(value)} {problem}")
    return values


# --- badcjobs init: what is here, as a commented badcjobs.toml ------------------------------------------------------


_HEAD = """\
# badcjobs.toml: the settings of a project. Every command reads the nearest one, from the working folder upwards.
# A key is an option's name with _ for -; the option wins. Relative paths start at this file. Every key is optional:
# lines that begin with # show the default, or an example. All keys are explained in: badcjobs guide settings
"""


Values = dict[str, dict[str, Any]]  # by table and key


def find_here(
    environ: Environ,
    cwd: Path,
    site: str | None,
) -> tuple[list[tuple[str, str]], Values]:
    """Find the site, Slurm, the GPUs and HawkEars; return sentences for the user, and values of settings."""
    path = environ.get("PATH")
    values: Values = {"": {}, "submit": {}}
    sentences = []
    name = site or _known_site()
    if name is not None:
        rules = find_site(name, cwd)
        values[""]["site"] = name
        modules = rules.modules and f"module load {' '.join(rules.modules)}"
        cache = rules.cache and f'export XDG_CACHE_HOME="{rules.cache}"'
        submit = {"gpus_per_task": rules.node_gpus, "setup": [line for line in (modules, cache) if line]}
        values["submit"] = {key: value for key, value in submit.items() if value}
        sentences.append(("site", rules.name))
    if shutil.which("sbatch", path=path) is not None:
        sentences.append(("Slurm", "sbatch found: badcjobs submit makes a job array"))
    else:
        values["submit"]["cluster"] = "local"
        sentences.append(("Slurm", "sbatch not found: badcjobs submit runs the array on this machine"))
    try:
        devices = list_granted(environ, SystemClock(), StandIn()).devices
    except NotHere:
        devices = ()
    names = sorted({device.name or "unknown model" for device in devices})
    sentences.append(("GPUs", f"{len(devices)} here: {', '.join(names)}" if devices else "none here"))
    program = shutil.which("hawkears", path=path)
    state = f"found: {program}"
    if program is None:
        state = "not found on PATH: set hawkears_python, or engine"
    return [*sentences, ("HawkEars", state)], values


def _known_site() -> str | None:
    """Return the site whose folders all exist here; None: no site that we know."""
    for path in sorted(resources.folder("sites").glob("*.toml")):
        rules = find_site(path.stem, path.parent)
        folders = [Path(folder) for folder in (*rules.read_only, *rules.writable) if folder.startswith("/")]
        if folders and all(folder.is_dir() for folder in folders):
            return path.stem
    return None


def project_text(values: Values) -> str:
    """Return the text of a badcjobs.toml: what was found as values, every other key as a comment with its default."""
    lines = [_HEAD]
    for table, settings in SETTINGS.items():
        if table:
            lines.append(f"\n[{table}]")
        own = values.get(table, {})
        for key, setting in settings.items():
            if key in own:
                lines.append(_line(key, setting, own[key]))
            elif key not in OPTIONS_ONLY:
                lines.append(f"# {_line(key, setting, _shown_default(setting))}")
    return "\n".join(lines) + "\n"


def _line(key: str, setting: Setting, value: Any) -> str:
    """Return ``key = value   # help``."""
    return f"{f'{key} = {to_toml(value)}':<36} # {setting.help}"


def _shown_default(setting: Setting) -> Any:
    """Return the default of a setting, or an example of a value where it has none."""
    if setting.default not in (None, ()):
        return setting.default
    if setting.example is None:
        return setting.unset
    return setting.example
