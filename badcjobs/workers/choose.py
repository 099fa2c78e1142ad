"""Picks the engine that a run asks for."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.seams import Clock, Engine, Launcher
from badcjobs.workers.command import CommandEngine
from badcjobs.workers.demo import DemoEngine

# Runs HawkEars' command line in a Python that has it, whether or not its script is on PATH.
_HAWKEARS_MAIN = "import sys; sys.argv[0] = 'hawkears'; from hawkears.cli import cli; cli()"


def choose_engine(
    name: str,
    *,
    args: Sequence[str],
    command: str | None,
    hawkears_python: str | None,
    hawkears_root: Path | None,
    allow_cpu: bool,
    environ: Mapping[str, str],
    launcher: Launcher,
    clock: Clock,
) -> Engine:
    """Return the engine called ``name``."""
    if name == "demo":
        return DemoEngine(args, environ=environ, launcher=launcher, clock=clock)
    if name == "command":
        return CommandEngine(command or "", args=args, environ=environ, launcher=launcher, clock=clock)
    if name == "hawkears1":
        from badcjobs.workers.hawkears1 import HawkEars1Engine

        return HawkEars1Engine(
            hawkears_python or "python3",
            root=hawkears_root,
            extra_args=args,
            environ=environ,
            launcher=launcher,
            clock=clock,
            allow_cpu=allow_cpu,
        )
    from badcjobs.workers.hawkears2 import HawkEarsEngine
    from badcjobs.workers.hawkears_python import python_of

    script = _find_hawkears(environ)
    return HawkEarsEngine(
        program=[hawkears_python, "-c", _HAWKEARS_MAIN] if hawkears_python else [script],
        python=hawkears_python or python_of(Path(script)),
        root=hawkears_root,
        extra_args=args,
        environ=environ,
        launcher=launcher,
        clock=clock,
        allow_cpu=allow_cpu,
    )


def _find_hawkears(environ: Mapping[str, str]) -> str:
    return shutil.which("hawkears", path=environ.get("PATH")) or "hawkears"
