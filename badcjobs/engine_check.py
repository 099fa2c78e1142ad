"""Lets the engine of a job look for its program and its models, as a task would, before any is submitted."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.check_order import CheckOrder
from badcjobs.errors import BadcjobsError
from badcjobs.preflight.facts import ScriptFacts
from badcjobs.preflight.finding import Finding, fine, problem, warning
from badcjobs.seams import Clock
from badcjobs.workers.choose import choose_engine
from badcjobs.workers.launch import SubprocessLauncher


def check_engine(
    order: CheckOrder, script: ScriptFacts | None, environ: Mapping[str, str], clock: Clock, cwd: Path
) -> Iterator[Finding]:
    """Judge the engine by what it finds from here; a warning where the script may see more than we do."""
    if script is not None and script.start is None:
        return  # it only merges, or starts badcjobs in a way that nobody can follow
    if script is not None and script.start is not None and script.start.contained:
        yield fine("engine", f"{order.engine} is in the image, which is not looked into")
        return
    try:
        _look(order, _with_venvs(environ, script.venvs if script else (), cwd), clock, cwd)
    except BadcjobsError as error:
        fix, why = error.fix or "badcjobs check --help", (error.why or "").splitlines()
        unseen = _unseen(script) if script else None
        if unseen is None:
            yield problem("engine", error.what, fix, why)
        else:
            yield warning("engine", f"{error.what}; looked for here, without {unseen}", fix, why)
    else:
        yield fine("engine", f"{order.engine} can be started here")


def _look(order: CheckOrder, environ: Mapping[str, str], clock: Clock, cwd: Path) -> None:
    assert order.engine is not None
    choose_engine(
        order.engine,
        args=order.engine_args,
        command=order.command,
        hawkears_python=order.hawkears_python,
        hawkears_root=None if order.hawkears_root is None else cwd / order.hawkears_root,
        allow_cpu=True,
        environ=environ,
        launcher=SubprocessLauncher("check"),
        clock=clock,
    ).check()


def _unseen(script: ScriptFacts) -> str | None:
    """Name what may bring another engine, or a program, that nobody sees from here."""
    start = script.start
    if script.unfollowed:
        return f"the script's {script.unfollowed[0]}"
    if start is not None and "--engine" not in start.flags and (start.hidden or "--engine" in start.named):
        return "knowing what the script's variables hold"
    return None


def _with_venvs(environ: Mapping[str, str], venvs: Sequence[str], cwd: Path) -> dict[str, str]:
    """Return the environment after a script has activated its virtual environments."""
    folders = [str(cwd / venv / "bin") for venv in reversed(venvs)]
    return {**environ, "PATH": os.pathsep.join([*folders, environ.get("PATH", os.defpath)])}
