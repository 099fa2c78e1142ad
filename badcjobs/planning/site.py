"""A site's rules, from a TOML file, ours or the user's own; and ``badcjobs init``, which writes badcjobs.toml."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from badcjobs import paths as resources
from badcjobs.clock import SystemClock
from badcjobs.devices.listing import list_granted
from badcjobs.errors import BadInput, NotHere
from badcjobs.model import Billing
from badcjobs.project import Project
from badcjobs.settings import OPTIONS_ONLY, SETTINGS, Setting, read_toml, to_toml
from badcjobs.trust import Trust

Weight = float  # may be 0


@dataclass(frozen=True, slots=True)
class Site:
    """The rules of a cluster; None and (): not in its file."""

    name: str
    array_tasks: int | None = None
    queued_jobs: int | None = None
    gpu_hours: float | None = None  # running and queued together, per allocation
    time_h: float | None = None
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
    bill_cpu: Weight | None = None
    bill_memory_gb: Weight | None = None
    bill_gpu: Weight | None = None
    bill_rule: Literal["max", "sum"] = "sum"  # "max" where PriorityFlags has MAX_TRES
    plan_time_h: float | None = None  # default time limit of a task
    plan_gpus: int | None = None  # usual number at a time

    @property
    def billing(self) -> Billing | None:
        """How it bills; None: not in its file."""
        gpu, memory_gb, cpu = (one or 0.0 for one in (self.bill_gpu, self.bill_memory_gb, self.bill_cpu))
        return Billing(gpu, memory_gb, cpu, self.bill_rule) if gpu or memory_gb or cpu else None

    @property
    def cores_per_gpu(self) -> int | None:
        """The cores of a node for each of its GPUs."""
        return max(1, self.node_cpus // self.node_gpus) if self.node_cpus and self.node_gpus else None


# table of the file → its keys, each with the field of Site
_TABLES: dict[str, dict[str, str]] = {
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
_KINDS: dict[str, tuple[str, Callable[[Any], object]]] = {
    "int": ("a whole number from 1 to 1e9", lambda value: type(value) is int and 0 < value <= 1e9),
    "float": ("a number above 0, at most 1e9", lambda value: type(value) in (int, float) and 0 < value <= 1e9),
    "Weight": ("a number from 0 to 1e9", lambda value: type(value) in (int, float) and 0 <= value <= 1e9),
    "str": ("a string", lambda value: isinstance(value, str) and value),
    "tuple": ("a list of strings", lambda value: isinstance(value, list) and all(map(_KINDS["str"][1], value))),
    "Literal": ("one of max, sum", lambda value: value in ("max", "sum")),
}


def find_site(name: str | None, cwd: Path, option: str = "--site ", trust: Trust | None = None) -> Site:
    """Read a site file that comes with badcjobs, by its name, or the user's own, by its path; ``option`` names it.

    None: a site without any rules. ``trust``: refuse modules, which are programs, of a file that is not trusted.
    """
    if name is None:
        return Site("")
    if name.endswith(".toml"):
        path = cwd / name
    else:
        path = resources.folder("sites") / f"{name}.toml"
        known = sorted(one.stem for one in path.parent.glob("*.toml"))
        if name not in known:
            raise BadInput(
                f"there is no site {name!r}",
                why=f"sites are {', '.join(known)}, or a file whose name ends in .toml",
                fix=f"the same command with {option}{known[0]}   (or ./{name}.toml; see badcjobs guide sockeye)",
            )
    if not path.exists():
        raise BadInput(f"{path} does not exist", fix="badcjobs guide sockeye   (how to write a site file)")
    document, _, status = read_toml(path)
    site = parse_site(document, str(path))
    if trust is not None and name.endswith(".toml") and site.modules:
        trust.check(path, status, {"modules.load": ", ".join(site.modules)})
    return site


def find_billing(project: Project, cwd: Path) -> Billing | None:
    """Return the weights of the project's site; None: it has none, or the file of the project names a missing one."""
    with suppress(*(() if "site" in project.keys else (BadInput,))):
        return find_site(project.site, cwd, "--config site=").billing
    return None


def parse_site(document: Mapping[str, Any], where: str) -> Site:
    """Read a site file; unknown keys and wrong values are named all at once."""
    mistakes: list[str] = []
    values: dict[str, Any] = {}
    for table, content in document.items():
        if table in ("name", "about"):
            if not _KINDS["str"][1](content):
                mistakes.append(f"{table} must be a string")
        elif table not in _TABLES:
            mistakes.append(f"unknown key {table}; known are name, about, [{'], ['.join(_TABLES)}]")
        elif not isinstance(content, dict):
            mistakes.append(f"{table} must be a table: [{table}]")
        else:
            for key, value in content.items():
                if key not in _TABLES[table]:
                    mistakes.append(f"[{table}] {key}: unknown key; known are {', '.join(_TABLES[table])}")
                    continue
                name = _TABLES[table][key]
                words, fits = _KINDS[re.split(r"\W", str(_FIELDS[name].type))[0]]
                if fits(value):
                    values[name] = tuple(value) if isinstance(value, list) else value
                else:
                    mistakes.append(f"[{table}] {key} = {value!r} must be {words}")
    if "name" not in document:
        mistakes.append("name is missing")
    if "billing" in document and not mistakes and Site("", **values).billing is None:
        mistakes.append("[billing] has no weight above 0")
    if mistakes:
        raise BadInput(
            mistakes[0] if len(mistakes) == 1 else f"{where} has {len(mistakes)} mistakes",
            why=f"in the site file {where}" if len(mistakes) == 1 else "\n".join(mistakes),
            fix="badcjobs guide sockeye   (all keys of a site file)",
        )
    return Site(name=document["name"], **values)


# --- badcjobs init: what is here, as a commented badcjobs.toml ------------------------------------------------------


_HEAD = """\
# badcjobs.toml: the settings of a project. Every command reads the nearest one, from the working folder upwards.
# A key is an option's name with _ for -; the option wins. Relative paths start at this file. Every key is optional:
# lines that begin with # show the default, or an example. All keys are explained in: badcjobs guide settings
"""


Values = dict[str, dict[str, Any]]  # by table and key


def find_here(environ: Mapping[str, str], cwd: Path, site: str | None) -> tuple[list[tuple[str, str]], Values]:
    """Find the site, Slurm, the GPUs and HawkEars; return sentences for the user, and values of settings."""
    path = environ.get("PATH")
    values: Values = {"": {}, "run": {}, "submit": {}}
    words = []
    name = site or _known_site()
    if name is not None:
        rules = find_site(name, cwd)
        values[""]["site"] = name
        if rules.node_gpus is not None:
            values["submit"]["gpus_per_task"] = rules.node_gpus
        setup = [f"module load {' '.join(rules.modules)}"] if rules.modules else []
        if setup := [*setup, *([f'export XDG_CACHE_HOME="{rules.cache}"'] if rules.cache else [])]:
            values["submit"]["setup"] = setup
        words.append(("site", rules.name))
    if shutil.which("sbatch", path=path) is not None:
        words.append(("Slurm", "sbatch found: badcjobs submit makes a job array"))
    else:
        values["submit"]["cluster"] = "local"
        words.append(("Slurm", "sbatch not found: badcjobs submit runs the array on this machine"))
    try:
        devices = list_granted(environ, SystemClock()).devices
    except NotHere:
        devices = ()
    names = sorted({device.name or "unknown model" for device in devices})
    words.append(("GPUs", f"{len(devices)} here: {', '.join(names)}" if devices else "none here"))
    program = shutil.which("hawkears", path=path)
    words.append(("HawkEars", f"found: {program}" if program else "not found on PATH: set hawkears_python, or engine"))
    return words, values


def _known_site() -> str | None:
    """Return the site whose folders all exist here; None: no site that we know."""
    for path in sorted(resources.folder("sites").glob("*.toml")):
        rules = find_site(path.stem, path.parent)
        folders = [Path(one) for one in (*rules.read_only, *rules.writable) if one.startswith("/")]
        if folders and all(folder.is_dir() for folder in folders):
            return path.stem
    return None


def project_text(values: Values) -> str:
    """Return the text of a badcjobs.toml: what was found as values, every other key as a comment with its default."""
    lines = [_HEAD]
    for table, settings in SETTINGS.items():
        lines += [f"\n[{table}]"] if table else []
        given = values.get(table, {})
        for key, setting in settings.items():
            if key not in OPTIONS_ONLY:
                lines.append(_line(key, setting, given[key]) if key in given else f"# {_line(key, setting)}")
    return "\n".join(lines) + "\n"


def _line(key: str, setting: Setting, value: Any = None) -> str:
    """Return ``key = value   # help``."""
    shown = value if value is not None else setting.example if setting.default in (None, ()) else setting.default
    shown = setting.unset if shown is None else shown
    return f"{f'{key} = {to_toml(shown)}':<36} # {setting.help}"
