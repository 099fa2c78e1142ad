"""What the emulation is told: the job, the terms, and the signals that may end it early."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from badcjobs.scheduler.job_script import JobRequest
from badcjobs.scheduler.local_environment import Identity, Node, log_path


class StopSignals(Protocol):
    """What the signals to this process ask for so far."""

    warned_by: signal.Signals | None
    ended_by: signal.Signals | None
    cut_short_by: signal.Signals | None


@dataclass(frozen=True, slots=True)
class LocalJob:
    """A job of this machine."""

    job_id: int
    name: str
    request: JobRequest
    script: str
    arguments: tuple[str, ...]
    node: Node
    environ: Mapping[str, str]
    folder: Path  # of its own, on this machine; gone afterwards
    state_file: Path | None = None

    def identity(self, index: int | None, restart: int = 0) -> Identity:
        """Return who an array task is."""
        return Identity(self.job_id, index, self.request.array, restart)

    def log(self, who: Identity, pattern: str | None) -> Path:
        """Return where a task's output goes."""
        return log_path(pattern, who, self.node, name=self.name)


@dataclass(frozen=True, slots=True)
class Terms:
    """How this emulation differs from others."""

    grace_s: float = 30.0  # Slurm's KillWait
    max_requeues: int = 5
    # Says whether an attempt (job, index, restart) has got anything done; None: nobody knows.
    progress: Callable[[int, int, int], bool | None] = lambda job_id, index, restart: None
