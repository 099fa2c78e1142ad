"""Runs badcjobs in a process of its own, as its users do, and says how long it took and how much memory it held."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

# Not ru_maxrss: a child inherits that from the process that started it.
_CODE = """
import re, sys
from pathlib import Path
from badcjobs.cli import main
try:
    main()
finally:
    peak = int(re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[0]) // 1024
    print(f"\\npeak {peak}", file=sys.stderr)
"""


@dataclass(frozen=True)
class Measured:
    """One command that has ended."""

    seconds: float
    memory_mb: int
    stdout: str
    said: list[str]  # on stderr

    @property
    def json(self) -> dict[str, object]:
        document: dict[str, object] = json.loads(self.stdout)
        return document


def measure(*words: object, cwd: Path, exit_codes: tuple[int, ...] = (0,)) -> Measured:
    """Run a command of badcjobs; it has to end as it should."""
    root = Path(__file__).parents[2]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    began_s = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", _CODE, *map(str, words)],
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - began_s
    if done.returncode not in exit_codes:
        raise SystemExit(f"badcjobs {' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr}")
    *said, peak = done.stderr.rstrip("\n").splitlines()
    return Measured(seconds, int(peak.removeprefix("peak ")), done.stdout, [line for line in said if line])


class Promises:
    """A line per figure, with what is promised about it."""

    def __init__(self, slack: float = 1.0) -> None:
        self._slack = slack
        self.broken = 0

    def at_most(self, what: str, figure: float, most: float, unit: str) -> None:
        """Promise that a figure is small enough."""
        kept = figure <= most * self._slack
        self.broken += not kept
        self._line(what, figure, unit, f"at most {most:g} {unit}   {'kept' if kept else 'BROKEN'}")

    def just(self, what: str, figure: float, unit: str) -> None:
        """Say a figure that nothing is promised about."""
        self._line(what, figure, unit, "")

    def _line(self, what: str, figure: float, unit: str, promise: str) -> None:
        number = f"{figure:,.0f}" if figure >= 100 else f"{figure:,.2f}"
        print(f"  {what:<44} {number:>12} {unit:<8} {promise}".rstrip(), flush=True)
