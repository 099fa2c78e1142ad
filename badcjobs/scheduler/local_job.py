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
    keep: tuple[int, ...] = ()  # open files with locks that outlive the emulation as long as a process of it does

    @property
    def workdir(self) -> Path:
        """The folder in which the script runs; relative names of logs are meant from there, as in Slurm."""
        return self.node.submit_dir / (self.request.chdir or "")

    def identity(self, index: int | None, restart: int = 0) -> Identity:
        """Return who an array task is."""
        return Identity(self.job_id, index, self.request.array, restart)

    def log(self, who: Identity, pattern: str | None) -> Path:
        """Return where a task's output goes."""
        return self.workdir / log_path(pattern, who, self.node, name=self.name)

    def attempt_folder(self, who: Identity) -> Path:
        """Return the folder of one attempt."""
        return self.folder / f"{who.name}.r{who.restart}"


@dataclass(frozen=True, slots=True)
class Terms:
    """How this emulation differs from others."""

    grace_s: float = 30.0  # Slurm's KillWait
    max_requeues: int = 5
    # Says whether an attempt (job, index, restart) has got anything done; None: nobody knows.
    progress: Callable[[int, int, int], bool | None] = lambda job_id, index, restart: None

    def why_not_again(self, job_id: int, index: int | None, *, restarts: int, asked: int) -> str | None:
        """Return why a task that asks to be started again, for the ``asked + 1``. time, is not; None: it is."""
        if self.max_requeues == 0:
            return "--requeues 0"
        if asked >= self.max_requeues:
            return f"it was, {asked} time{'s' * (asked != 1)}"
        return "it got nothing done" if self.progress(job_id, index or 0, restarts) is False else None
