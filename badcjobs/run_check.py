"""Compares a job with the run that may have begun in its folder, and its ``badcjobs run`` with what that takes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from badcjobs.check_order import CheckOrder
from badcjobs.config import ENGINES, make_settings, settings_by_key
from badcjobs.errors import BadcjobsError, BadInput
from badcjobs.frozen_run import FrozenRun
from badcjobs.model import ArrayShape
from badcjobs.own_line import nearest
from badcjobs.paths import RunFolder
from badcjobs.preflight.facts import Asked, ScriptFacts, Start
from badcjobs.preflight.finding import Finding, fine, problem
from badcjobs.preflight.request import judge_spacing
from badcjobs.scheduler.array_spec import parse_array

_NEW = "--out another folder, for a new run"


def check_run_folder(order: CheckOrder, script: ScriptFacts | None, cwd: Path) -> Iterator[Finding]:
    """Compare with what the first task of an earlier run in the same folder has frozen."""
    frozen = None
    try:
        frozen = None if order.out is None else FrozenRun.read(RunFolder(cwd / order.out).run_toml)
    except BadcjobsError as error:
        yield problem("run.toml", f"{error.what}: {error.why}", error.fix or _NEW)
    if frozen is None:
        yield from judge_spacing(order.asked, script, sure=order.out is not None)
        return
    assert order.out is not None
    folder, array = cwd / order.out, frozen.array
    given = tuple(os.path.abspath(cwd / one) for one in order.sources)  # noqa: PTH100 - as frozen: links stay
    if given and frozen.settings.get("source") != given:
        there = " ".join(map(str, frozen.settings.get("source", ())))
        yield problem("run.toml", f"{folder} holds a run of another source ({there})", _NEW)
    elif array is not None and _is_beyond(order.asked, array):
        text = f"{folder} holds a run of the array {array}; other indices are refused"
        yield problem("run.toml", text, f"#SBATCH --array={array}   (or {_NEW})")
    else:
        yield fine("run.toml", f"{folder} holds a run already: what is done stays done")


def _is_beyond(asked: Asked, array: ArrayShape) -> bool:
    if asked.array is not None:
        return any(array.position_of(index) is None for index in parse_array(asked.array).indices)
    return (asked.tasks or 0) > array.count


def check_settings(order: CheckOrder, script: ScriptFacts | None, cwd: Path) -> Iterator[Finding]:
    """Judge the values of the script's own flags, as ``badcjobs run`` would before it begins."""
    start = script.start if script else None
    if script is None or start is None or order.config_trouble is not None:
        return
    where = f"{script.name} line {start.line}"
    if "--out" not in start.named and not start.hidden:
        yield problem("out", f"{where} has no --out, which badcjobs run needs", f"{start.text} --out results")
    flags = _known_flags(start)
    if start.hidden or flags is None:
        return  # with what nobody sees from here it may all be right
    config = None if "--config" not in start.flags else cwd / start.flags["--config"]
    try:
        make_settings(Path("results"), flags, config)
    except BadInput as error:
        details = (error.why or "").splitlines()
        yield problem("settings", f"{where}: {error.what}", error.fix or "badcjobs run --help", details)


def _known_flags(start: Start) -> dict[str, Any] | None:
    """Return the script's flags under their names in TOML; None where the value of one is not known."""
    known = settings_by_key()
    found: dict[str, Any] = {"source": start.sources or (("?",) if start.sources is None else None)}
    for flag in start.named:
        key = flag[2:].replace("-", "_")
        kind = known[key].metadata["kind"] if key in known else bool
        if kind is bool:
            continue  # it has no value
        if flag not in start.flags:
            return None
        value = start.flags[flag]
        if key != "engine" or value in ENGINES:  # another engine has a finding of its own
            found[key] = (value,) if kind is list else _number(value, kind)
    return found


def _number(text: str, kind: type) -> str | int | float:
    try:
        return text if kind is str else int(text) if kind is int else float(text)
    except ValueError:
        return text


def judge_engine_name(order: CheckOrder, script: ScriptFacts | None) -> Finding | None:
    """Return what is to be said about an engine that nobody knows; None: it is known."""
    name = order.engine or ""
    if name in ENGINES:
        return None
    text = f"--engine {name} is not known; engines are {', '.join(ENGINES)}"
    right = nearest(name, ENGINES) or ENGINES[0]
    start = script.start if script else None
    if script is None or start is None or name not in start.flags.get("--engine", ""):
        return problem("engine", text, f'engine = "{right}"   (in the table [run] of its --config)')
    return problem("engine", f"{script.name} line {start.line}: {text}", start.text.replace(name, right))


def doubted(findings: list[Finding], start: Start | None) -> list[Finding]:
    """Make warnings of problems with a source that may yet be right when the script needs it."""
    if start is None or start.doubt is None:
        return findings
    return [
        replace(one, severity="warning", text=f"{one.text} ({start.doubt})") if one.severity == "problem" else one
        for one in findings
    ]
