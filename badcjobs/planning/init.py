"""``badcjobs init``: find what is here (Slurm, GPUs, HawkEars, the site) and write it as a commented badcjobs.toml."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from badcjobs import paths as resources
from badcjobs.clock import SystemClock
from badcjobs.devices.listing import list_granted
from badcjobs.errors import NotHere
from badcjobs.planning.site import find_site
from badcjobs.settings import OPTIONS_ONLY, SETTINGS, Setting, to_toml

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
        if rules.modules:
            values["submit"]["setup"] = [f"module load {' '.join(rules.modules)}"]
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
    if (program := shutil.which("hawkears", path=path)) is not None:
        words.append(("HawkEars", f"found: {program}"))
    else:
        words.append(("HawkEars", "not found on PATH: set hawkears_python, or engine"))
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
