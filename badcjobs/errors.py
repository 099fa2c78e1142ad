"""The errors of badcjobs: what, why and a line to paste, each with an exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """The exit codes of badcjobs; after Ctrl-C or a second signal it is 128 + the signal number."""

    DONE = 0
    CHUNKS_FAILED = 1
    USAGE = 2
    NOT_HERE = 3  # this machine cannot do it: no device, no engine, no worker that starts
    DATABASE = 4
    SLURM = 5
    BUG = 70
    RUN_ME_AGAIN = 75  # a signal or the time limit; the same command goes on where it stopped


class BadcjobsError(Exception):
    """An error that the user can act on; printed without a traceback."""

    exit_code: int = ExitCode.BUG

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [f"badcjobs: error: {self.what}"]
        if self.why:
            lines.append("  why: " + self.why.replace("\n", "\n       "))
        if self.fix:
            lines.append(f"  try: {self.fix}")
        return "\n".join(lines)


class BadInput(BadcjobsError):
    """Wrong usage, or a source or settings file that cannot be used."""

    exit_code = ExitCode.USAGE


class NotHere(BadcjobsError):
    """No allocation, GPU, Slurm or engine where one is needed."""

    exit_code = ExitCode.NOT_HERE


class SlowStart(NotHere):
    """The engine may work, but has not started in time."""


class DatabaseProblem(BadcjobsError):
    """A task or job database that cannot be read or written."""

    exit_code = ExitCode.DATABASE


def error_line(error: Exception) -> str:
    """Return an error as one line."""
    return error.what if isinstance(error, BadcjobsError) else str(error)
