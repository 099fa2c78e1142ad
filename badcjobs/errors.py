"""Our own errors: each is an answer with what, why and a line to paste, and knows its exit code."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What badcjobs says to the shell and to Slurm; a second signal or Ctrl-C adds 128 + its number."""

    DONE = 0
    CHUNKS_FAILED = 1
    USAGE = 2
    NOT_HERE = 3
    DATABASE = 4
    SLURM = 5
    BUG = 70
    RUN_ME_AGAIN = 75


class BadcjobsError(Exception):
    """Something the user can act on; printed without a traceback."""

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
    """Wrong usage, or a source or settings file that cannot be used as it is."""

    exit_code = ExitCode.USAGE


class NotHere(BadcjobsError):
    """No allocation, GPU, Slurm or engine where one is needed."""

    exit_code = ExitCode.NOT_HERE


class DatabaseProblem(BadcjobsError):
    """A task or job database that cannot be read or written."""

    exit_code = ExitCode.DATABASE
