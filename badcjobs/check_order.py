"""What ``badcjobs check`` is to look at: the command line first, then the job script, then the script's --config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from badcjobs.config import ENGINES, read_toml
from badcjobs.errors import BadInput
from badcjobs.manifest import AS_IT_COMES, Cutting
from badcjobs.own_line import Grammar
from badcjobs.preflight.facts import Asked
from badcjobs.script_facts import ReadScript, read_script


@dataclass(frozen=True, slots=True)
class CheckOrder:
    """What ``badcjobs check`` was told; None: not said, so the script is asked."""

    sources: tuple[str, ...] = ()
    out: str | None = None
    root: str | None = None
    cutting: Cutting = AS_IT_COMES
    site: str | None = None
    script: str | None = None
    engine: str | None = None
    engine_args: tuple[str, ...] = ()
    command: str | None = None
    hawkears_python: str | None = None
    hawkears_root: str | None = None
    asked: Asked = field(default_factory=Asked)
    quick: bool = False
    config_trouble: str | None = None  # why the settings file of the script cannot be read


def open_script(
    path: Path, name: str, environ: Mapping[str, str], cwd: Path, grammar: Grammar | None = None
) -> ReadScript:
    """Read a job script from its file."""
    try:
        with path.open(encoding="utf-8", newline="") as file:  # its line ends are part of what is judged
            return read_script(file.read(), name, environ, str(cwd), grammar)
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"--script {name} cannot be read", why=str(error), fix=f"ls -l {name}") from error


def complete_order(order: CheckOrder, script: ReadScript | None, environ: Mapping[str, str], cwd: Path) -> CheckOrder:
    """Take from the script, and from sbatch's own variables, what the command line does not say.

    An engine that nobody knows is wrong usage on the command line of ``check``, and a finding in a script.
    """
    if order.engine is not None and order.engine not in ENGINES:
        known = ", ".join(ENGINES)
        raise BadInput(f"--engine {order.engine} is not known", why=f"engines are {known}", fix="--engine hawkears")
    asked = replace(order.asked, account=order.asked.account or environ.get("SBATCH_ACCOUNT"))
    flags = script.facts.start.flags if script and script.facts.start else {}
    written, trouble = _read_config(cwd / flags["--config"]) if "--config" in flags else ({}, None)
    said = written | {flag[2:].replace("-", "_"): value for flag, value in flags.items() if flag != "--engine-arg"}
    usual = "command" if order.command or said.get("command") else "hawkears"
    return replace(
        order,
        sources=order.sources or _sources_in(script, cwd) or tuple(said.get("source", ())),
        config_trouble=trouble,
        asked=_merged(asked, script.asked if script else Asked()),
        out=order.out or said.get("out"),
        root=order.root or said.get("root"),
        cutting=_cutting(order.cutting, said, script),
        engine=order.engine or said.get("engine") or usual,
        engine_args=order.engine_args or tuple(said.get("engine_arg", ())),
        hawkears_python=order.hawkears_python or said.get("hawkears_python"),
        hawkears_root=order.hawkears_root or said.get("hawkears_root"),
        command=order.command or said.get("command"),
    )


def _cutting(given: Cutting, said: Mapping[str, Any], script: ReadScript | None) -> Cutting:
    """Return how recordings become chunks: as the command line says, else as the script does."""
    start = script.facts.start if script else None
    named = start.named if start else ()
    rows = True if "--cut" in named else False if "--no-cut" in named else said.get("cut")
    if given != AS_IT_COMES:
        return given
    numbers = {name: _seconds(said.get(name)) for name in ("chunk_length", "overlap")}
    return Cutting(rows if isinstance(rows, bool) else None, numbers["chunk_length"], numbers["overlap"] or 0.0)


def _seconds(value: object) -> float | None:
    try:
        return None if value is None else float(str(value))
    except ValueError:
        return None  # what is wrong with it, the settings themselves say


def _sources_in(script: ReadScript | None, cwd: Path) -> tuple[str, ...]:
    """Return the sources that a script names; in an image, absolute paths may be those of its own folders."""
    start = script.facts.start if script else None
    if start is None or not start.sources:
        return ()
    if start.contained and not all((cwd / one).exists() for one in start.sources if one.startswith("/")):
        return ()
    return start.sources


def _read_config(path: Path) -> tuple[dict[str, Any], str | None]:
    """Return what the file of ``badcjobs run --config`` says, or why it cannot be read."""
    try:
        written = read_toml(path)
    except BadInput as error:
        return {}, f"{error.what}: {error.why}" if error.why else error.what
    table = written.get("run")
    if not isinstance(table, dict):
        return {}, None  # what is wrong with it, the settings themselves say
    others: dict[str, Any] = {
        "engine_arg": list,
        "source": list,
        "cut": bool,
        "chunk_length": (int, float),
        "overlap": (int, float),
    }
    kinds = {key: others.get(key, str) for key in table if key != "out"}  # which only the flag can say
    return {key: table[key] for key, kind in kinds.items() if isinstance(table[key], kind)}, None


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
    if merged.gpus_per_task is None or not {"gpus_per_task", "nodes"} & said.keys():
        return merged
    return replace(merged, gpus_per_node=-(-merged.gpus_per_task // (merged.nodes or 1)))
