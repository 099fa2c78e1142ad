"""What commands share when they speak: JSON on stdout, the conversation on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S"


def say(text: str) -> None:
    """Print a result; a reader who has left (``| head -1``) or a full disk is no failure of what was done."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            print(f"badcjobs: warning: the result cannot be printed: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing else complains, at exit


def print_json(document: object) -> None:
    """Print one JSON document, and nothing else."""
    say(json.dumps(document, indent=2, ensure_ascii=False))


def shown(path: Path) -> str:
    """Return a path as people type it: relative to the working directory where it lies below it."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def log_to_stderr(*, quiet: bool = False) -> None:
    """Send the log to stderr; ``quiet`` leaves only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger("badcjobs")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.raiseExceptions = False  # a full disk under the log must not print a traceback per line


def log_to_file(path: Path) -> None:
    """Add a task's own log file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter(_FORMAT, _TIME))
    logging.getLogger("badcjobs").addHandler(handler)


class RowCounter:
    """Says on stderr how far a long reading is, now and then."""

    def __init__(self, what: str, every: int = 250_000) -> None:
        self._what = what
        self._every = every

    def __call__(self, rows: int) -> None:
        if rows % self._every == 0:
            print(f"badcjobs: {rows:,} {self._what}", file=sys.stderr)


class FileCounter:
    """Says on stderr how far a merge is, how fast, and when it will be done; at most every few seconds."""

    def __init__(self, what: str, every_s: float = 3.0) -> None:
        self._what = what
        self._every_s = every_s
        self._started_s = time.monotonic()
        self._next_s = self._started_s + every_s

    def __call__(self, done: int, of: int, rows: int) -> None:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._every_s
        spent_s = now_s - self._started_s
        left_s = round(spent_s / done * (of - done))
        remark(
            f"{done:,} of {of:,} {self._what}; {done / spent_s:,.0f} files/s, {rows / spent_s:,.0f} rows/s,"
            f" done in {left_s // 60}:{left_s % 60:02d}"
        )


def remark(text: str) -> None:
    """Say something on the way, on stderr."""
    print(f"badcjobs: {text}", file=sys.stderr)
