"""What commands share when they speak: JSON on stdout, the conversation on stderr."""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path

from badcjobs.cli.safe_text import SafeFormatter, safe_json, safe_lines
from badcjobs.report.words import plain

_FORMAT = "%(asctime)s %(levelname)-7s %(message)s"
_TIME = "%Y-%m-%dT%H:%M:%S"

if logging.lastResort is not None:  # who warns in a command that keeps no log
    logging.lastResort.setFormatter(SafeFormatter())


def say(text: str, *, painted: bool = False) -> None:
    """Print a result for people; ``painted``: it may have colours of ours."""
    _print(safe_lines(text, painted=painted))


def hand_out(document: str) -> None:
    """Print a document as it is, for whoever keeps it; on a terminal nothing in it steers that."""
    _print(safe_lines(document, tabs=True) if sys.stdout.isatty() else document)


def _print(text: str) -> None:
    """Print; a reader who has left (``| head -1``) or a full disk is no failure of what was done."""
    try:
        print(text, flush=True)
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            remark(f"warning: the result cannot be printed: {error}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # so that nothing else complains, at exit


def print_json(document: object) -> None:
    """Print one JSON document, and nothing else."""
    _print(safe_json(json.dumps(document, indent=2, ensure_ascii=False)))


def shown(path: Path) -> str:
    """Return a path as people type it: relative to the working directory where it lies below it."""
    return plain(str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path))


def log_to_stderr(*, quiet: bool = False) -> None:
    """Send the log to stderr; ``quiet`` leaves only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(SafeFormatter(_FORMAT, _TIME))
    handler.setLevel(logging.WARNING if quiet else logging.INFO)
    root = logging.getLogger("badcjobs")
    root.setLevel(logging.INFO)
    root.addHandler(handler)
    logging.raiseExceptions = False  # a full disk under the log must not print a traceback per line


def log_to_file(path: Path) -> None:
    """Add a task's own log file."""
    handler = logging.FileHandler(path, encoding="utf-8")
    handler.setFormatter(SafeFormatter(_FORMAT, _TIME))
    logging.getLogger("badcjobs").addHandler(handler)


class RowCounter:
    """Says on stderr how far a long reading is, now and then."""

    def __init__(self, what: str, every: int = 250_000) -> None:
        self._what = what
        self._every = every

    def __call__(self, rows: int) -> None:
        if rows % self._every == 0:
            remark(f"{rows:,} {self._what}")


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
    print(safe_lines(f"badcjobs: {text}"), file=sys.stderr)
