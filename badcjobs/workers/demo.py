"""The demo engine: our own small detector of loud stretches, one long-lived process per worker.

It speaks the protocol that every streaming engine of ours speaks; ``stream_session`` has the other end.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs import __version__
from badcjobs.model import WorkerPlan
from badcjobs.seams import Clock, Launcher
from badcjobs.workers.launch import worker_environment
from badcjobs.workers.patience import Patience
from badcjobs.workers.stream_session import StreamSession


class DemoEngine:
    """Finds loud stretches in WAV files with the standard library alone, in FLAC files with the extra ``audio``."""

    name = "demo"
    version = __version__  # it is ours
    wants = 2  # one at work, one behind it

    def __init__(self, args: Sequence[str], *, environ: Mapping[str, str], launcher: Launcher, clock: Clock) -> None:
        self._args = list(args)
        self._environ = environ
        self._launcher = launcher
        self._clock = clock
        self._patience = Patience()

    def check(self) -> None:
        """Refuse wrong arguments now, not once per worker."""
        from badcjobs.workers.demo_worker import parse_arguments

        parse_arguments(self._args)

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process."""
        return StreamSession(
            [sys.executable, "-m", "badcjobs.workers.demo_worker", *self._args, *_place_of(plan)],
            env=worker_environment(self._environ, plan),
            cwd=None,
            log_file=scratch / "demo.log",
            launcher=self._launcher,
            clock=self._clock,
            patience=self._patience,
        )


def _place_of(plan: WorkerPlan) -> list[str]:
    """Return what a worker is told of its place: how little memory to take, and how much there is."""
    args = ["--lean"] if plan.lean else []
    if plan.device is not None and plan.device.memory_total_bytes is not None:
        args += [f"--device={plan.device.pin}", f"--device-bytes={plan.device.memory_total_bytes}"]
    return args
