"""What every bench shares: its options, a table of promises, and badcjobs measured in a process of its own."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

# Not ru_maxrss: a child inherits that from the process that started it.
_CODE = """
import re, sys, time
from pathlib import Path
from badcjobs.cli import main
try:
    main()
finally:
    peak = int(re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[0]) // 1024
    print(f"\\npeak {peak} {time.process_time()}", file=sys.stderr)
"""


class Promises:
    """A line per figure, with what is promised about it; a small run beside other tests judges no time."""

    def __init__(self, *, small: bool = False) -> None:
        self._small = small
        self.broken = 0

    def at_most(self, what: str, figure: float, most: float, unit: str, *, is_time: bool = True) -> None:
        """Promise that a figure is small enough; ``is_time``: it depends on how busy the machine is."""
        if is_time and self._small:
            self.just(what, figure, unit)
        else:
            self.just(what, figure, unit, f"at most {most:.3g} {unit}", kept=figure <= most)

    def at_least(self, what: str, figure: float, least: float, unit: str) -> None:
        """Promise that a figure which depends on time is large enough."""
        if self._small:
            self.just(what, figure, unit)
        else:
            self.just(what, figure, unit, f"at least {least:.3g} {unit}", kept=figure >= least)

    def just(self, what: str, figure: float, unit: str, promise: str = "", *, kept: bool = True) -> None:
        """Print a figure, here without a promise."""
        self.broken += not kept
        number = f"{figure:,.0f}" if figure >= 100 else f"{figure:,.2f}"
        verdict = promise and ("kept" if kept else "BROKEN")
        print(f"  {what:<52} {number:>10} {unit:<6} {promise:<18} {verdict}".rstrip(), flush=True)


def main(doc: str | None, bench: Callable[[Path, Promises, bool], None]) -> None:
    """Run a bench with its options, in a folder that is removed; exit with 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="seconds instead of minutes; judges no times")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    promises = Promises(small=args.small)
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        try:
            bench(Path(folder), promises, args.small)
        except pytest.skip.Exception as missing:
            sys.exit(str(missing))
    sys.exit(1 if promises.broken else 0)


class Measured(NamedTuple):
    """One command that has ended."""

    seconds: float
    cpu_s: float
    memory_mb: int
    stdout: str


def measure(*words: object, cwd: Path, **env: str) -> Measured:
    """Run a command of badcjobs; it must succeed."""
    command, began_s = [sys.executable, "-c", _CODE, *map(str, words)], time.perf_counter()
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - began_s
    if done.returncode:
        raise SystemExit(f"badcjobs {' '.join(map(str, words))}: exit code {done.returncode}\n{done.stderr}")
    peak_mb, cpu_s = done.stderr.rsplit("peak ", 1)[1].split()
    return Measured(seconds, float(cpu_s), int(peak_mb), done.stdout)
