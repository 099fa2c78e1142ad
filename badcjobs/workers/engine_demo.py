"""The demo engine: the built-in detector, which needs no GPU and no HawkEars."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import WorkerPlan
from badcjobs.processes import PYTHON, worker_environment
from badcjobs.seams import EngineTraits
from badcjobs.settings import RunSettings
from badcjobs.version import __version__
from badcjobs.workers.demo_worker import parse_arguments
from badcjobs.workers.program_start import EngineStart, HangTimeout
from badcjobs.workers.stream_session import StreamSession

TRAITS = EngineTraits(cores_per_chunk=1, simulates_memory=True)


def make_engine(settings: RunSettings, start: EngineStart) -> DemoEngine:
    """Return the demo engine."""
    return DemoEngine(start, HangTimeout())


@dataclass(eq=False)
class DemoEngine:
    """Finds loud sounds in audio, one process per worker (``demo_worker``)."""

    start: EngineStart
    hang_timeout: HangTimeout
    name = "demo"
    version = __version__
    wants = 2  # one in progress, one waiting
    traits = TRAITS

    def check(self) -> None:
        """Refuse wrong arguments before any worker starts."""
        parse_arguments(self.start.args)

    def chunks_at_once(self, plan: WorkerPlan) -> int:
        """Return 1: a worker processes one chunk after the other."""
        return 1

    def open(self, plan: WorkerPlan, scratch: Path) -> StreamSession:
        """Start the worker process; pass whether it is lean, and the memory of the device."""
        options = ["--lean"] if plan.lean else []
        if plan.device is not None and plan.device.memory_total_bytes is not None:
            options += [f"--device={plan.device.pin}", f"--device-bytes={plan.device.memory_total_bytes}"]
        return StreamSession(
            self.start,
            [*PYTHON, "-m", "badcjobs.workers.demo_worker", *self.start.args, *options],
            env=worker_environment(self.start.environ, plan),
            cwd=None,
            log_file=scratch / "demo.log",
            hang_timeout=self.hang_timeout,
        )
