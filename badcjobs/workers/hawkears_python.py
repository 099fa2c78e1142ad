"""Finds the Python that HawkEars is installed in, and asks it whether our worker program can feed it."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("hawkears_worker.py")
_TRIES = 3
_ASKING_S = 300.0  # a cold import from a parallel file system takes its time


@dataclass(frozen=True, slots=True)
class Probe:
    """What a Python says of its HawkEars."""

    can_be_fed: bool
    problem: str | None = None  # in HawkEars' or Python's own words
    version: str | None = None


def python_of(script: Path) -> str | None:
    """Return the Python that a script of pip's is for, from its first lines; None: it is no such script."""
    try:
        with script.open("rb") as file:
            head = file.read(2048).decode(errors="replace").split("\n")
    except OSError:
        return None
    if not head[0].startswith("#!"):
        return None
    words = head[0][2:].split()
    if words and words[0].endswith("/sh") and len(head) > 1 and head[1].startswith("'''exec' "):
        words = shlex.split(head[1].removeprefix("'''exec' "))  # how pip writes a path that is too long, or has spaces
    elif words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
    return words[0] if words and "python" in Path(words[0]).name else None


def probe_hawkears(python: str, options: Sequence[str], *, environ: Mapping[str, str], cwd: Path | None) -> Probe:
    """Start HawkEars' Python for a second, and let HawkEars' own command line read the options."""
    argv = [python, str(WORKER), "--probe", *options]
    for _ in range(_TRIES):
        try:
            done = subprocess.run(argv, env=dict(environ), cwd=cwd, capture_output=True, text=True, timeout=_ASKING_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return Probe(False, str(error))
        if done.returncode >= 0:
            break  # else somebody has killed it, which says nothing of HawkEars
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    answer: dict[str, Any] = events[0] if events else {}
    if answer.get("event") == "probe":
        return Probe(True, version=answer["versions"]["hawkears"])
    said = done.stderr.strip().splitlines()
    return Probe(False, answer.get("error") or (said[-1] if said else f"it ended with exit code {done.returncode}"))
