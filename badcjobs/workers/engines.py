"""The engines by name, with the demo engine; an engine's version, and how many chunks it works on at once."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from badcjobs import __version__
from badcjobs.model import WorkerPlan
from badcjobs.processes import worker_environment
from badcjobs.seams import Clock, Engine, Launcher
from badcjobs.workers.command import CommandEngine
from badcjobs.workers.demo_worker import parse_arguments
from badcjobs.workers.hawkears import HawkEarsEngine, python_of, sized_arguments, threads_of
from badcjobs.workers.hawkears1 import HawkEars1Engine
from badcjobs.workers.stream_session import Patience, StreamSession

_HAWKEARS = ("hawkears", "hawkears1")


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
    given: dict[str, Any] = {"args": args, "environ": environ, "launcher": launcher, "clock": clock}
    if name == "demo":
        return DemoEngine(**given)
    if name == "command":
        return CommandEngine(command or "", **given)
    given.update(root=hawkears_root, allow_cpu=allow_cpu)
    if name == "hawkears1":
        return HawkEars1Engine(hawkears_python or "python3", **given)
    script = shutil.which("hawkears", path=environ.get("PATH"))
    return HawkEarsEngine(hawkears_python or (script and python_of(Path(script))), **given)


def lanes_of(engine: str, args: Sequence[str], plan: WorkerPlan) -> int:
    """Return on how many chunks one worker of this engine works at the same time."""
    return threads_of(sized_arguments(args, plan)) if engine in _HAWKEARS else 1


@dataclass(eq=False)
class DemoEngine:
    """Runs our own small detector, one long-lived process per worker (``demo_worker``).

    Finds loud stretches in WAV files with the standard library alone, in FLAC files with the extra ``audio``.
    """

    args: Sequence[str]
    _: KW_ONLY
    environ: Mapping[str, str]
    launcher: Launcher
    clock: Clock
    name: str = "demo"
    version: str | None = __version__  # it is ours
    wants: int = 2  # one at work, one behind it
    patience: Patience = field(default_factory=Patience)

    def check(self) -> None:
        """Refuse wrong arguments now, not once per worker."""
        parse_arguments(self.args)

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process; it gets to know how little memory to take, and how much there is."""
        place = ["--lean"] if plan.lean else []
        if plan.device is not None and plan.device.memory_total_bytes is not None:
            place += [f"--device={plan.device.pin}", f"--device-bytes={plan.device.memory_total_bytes}"]
        return StreamSession(
            [sys.executable, "-m", "badcjobs.workers.demo_worker", *self.args, *place],
            env=worker_environment(self.environ, plan),
            cwd=None,
            log_file=scratch / "demo.log",
            launcher=self.launcher,
            clock=self.clock,
            patience=self.patience,
        )
