"""What badcjobs itself costs per chunk, with an engine that has next to nothing to do; beside a process per chunk.

    python tests/bench/dispatch.py                  (a minute)
    python tests/bench/dispatch.py --chunks 2000    (a quick look)

All in one run on one machine, one worker each. A figure is the slope between a short list and a long one: starting up
and saying goodbye, which cost the same for any number of chunks, are left out and shown in a column of their own.
Everything else is in: reading the manifest and looking at each chunk's file, writing it down, handing it out, the
engine's answer through its pipe, writing down when it began and ended and what it heard, and publishing the database,
with telemetry of a simulated device beside it. So is the engine: the demo engine opens and reads a WAV file of ten
samples and answers. Not in: the work of a real engine, a shared filesystem.

Prints a table and whether the promise was kept; exits with 1 when it was not.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
TABLE = "start_time,end_time,label,score"
PROMISE_MS = 1.0
SHORT = 50  # chunks of the list that is subtracted


@dataclass(frozen=True)
class Cost:
    """What a list of chunks took."""

    chunks: int
    wall_s: float
    cpu_s: float


class Bench:
    """Ways to get through a list of chunks, one at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._audio = folder / "chunk.wav"
        with wave.open(str(self._audio), "wb") as audio:
            audio.setparams((1, 2, 1000, 10, "NONE", "not compressed"))
            audio.writeframes(bytes(20))
        self._program = folder / "nothing.sh"
        self._program.write_text(f'#!/bin/sh\necho {TABLE} > "$2"\n')
        self._program.chmod(0o755)
        self._runs = 0

    def demo(self, chunks: int) -> Cost:
        """Run a task with telemetry: one worker process, fed."""
        return self._badcjobs(chunks, "--engine=demo")

    def demo_in_silence(self, chunks: int) -> Cost:
        """Run the same without telemetry."""
        return self._badcjobs(chunks, "--engine=demo", "--no-emit-gpu-telemetry")

    def program_per_chunk(self, chunks: int) -> Cost:
        """Run a task that starts a program for each chunk."""
        return self._badcjobs(chunks, f"--command={self._program} {{input}} {{output}}")

    def parallel(self, chunks: int) -> Cost:
        """Let GNU parallel start the same program for each chunk."""
        output = self._folder / "parallel.csv"
        return measure(["parallel", "-j1", str(self._program), "{}", str(output)], chunks, self._paths(chunks))

    def xargs(self, chunks: int) -> Cost:
        """Let xargs start the same program for each chunk, which is as cheap as a process per chunk can be."""
        output = self._folder / "xargs.csv"
        return measure(["xargs", "-I{}", str(self._program), "{}", str(output)], chunks, self._paths(chunks))

    def _paths(self, chunks: int) -> str:
        return f"{self._audio}\n" * chunks

    def _badcjobs(self, chunks: int, *options: str) -> Cost:
        self._runs += 1
        manifest, out = self._folder / f"{chunks}.csv", self._folder / f"run{self._runs}"
        rows = (f"rec,c{number},{self._audio},{number * 10},{number * 10 + 10},0,," for number in range(chunks))
        manifest.write_text("\n".join([HEADER, *rows]) + "\n")
        run = [sys.executable, "-m", "badcjobs", "run", str(manifest), f"--out={out}", "--simulate=1", *options]
        cost = measure(run, chunks)
        shutil.rmtree(out)
        return cost


def measure(command: Sequence[str], chunks: int, given: str = "") -> Cost:
    """Run a command to its good end; return what it took, its children included."""
    before, started_s = used_s(), time.monotonic()
    subprocess.run(command, input=given.encode(), check=True, capture_output=True)
    return Cost(chunks, time.monotonic() - started_s, used_s() - before)


def used_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(name: str, way: Callable[[int], Cost], chunks: int, repeats: int) -> float:
    """Measure the slope between a short list and a long one; print it, and return milliseconds per chunk."""
    short = sorted((way(SHORT) for _ in range(3)), key=lambda cost: cost.wall_s)[1]
    costs = [way(chunks) for _ in range(repeats)]
    slopes_ms = [1000 * (cost.wall_s - short.wall_s) / (chunks - SHORT) for cost in costs]
    slope_ms = statistics.median(slopes_ms)
    cpu_ms = 1000 * (statistics.median(cost.cpu_s for cost in costs) - short.cpu_s) / (chunks - SHORT)
    start_s = max(0.0, short.wall_s - slope_ms * SHORT / 1000)
    print(f"  {name:<58} {chunks:>7} {slope_ms:>9.3f} {cpu_ms:>9.3f} {start_s:>8.2f}", flush=True)
    return slope_ms


def run(bench: Bench, chunks: int) -> int:
    few = max(SHORT + 10, chunks // 20)  # a process per chunk takes so much longer
    print(f"dispatch: one worker, {os.cpu_count()} cores, Python {sys.version.split()[0]}")
    print(f"  {'':<58} {'chunks':>7} {'ms/chunk':>9} {'CPU ms':>9} {'start s':>8}")
    ours_ms = report("badcjobs, fed worker, telemetry on", bench.demo, chunks, 3)
    report("badcjobs, fed worker, telemetry off", bench.demo_in_silence, chunks, 1)
    report("badcjobs, a program per chunk (--command), telemetry on", bench.program_per_chunk, few, 1)
    if shutil.which("parallel"):
        report("GNU parallel -j1, the same program per chunk", bench.parallel, few, 1)
    else:
        print("  GNU parallel is not installed; try: apt-get install parallel")
    report("xargs, the same program per chunk", bench.xargs, few, 1)
    kept = ours_ms <= PROMISE_MS
    print(f"  {ours_ms:.3f} ms per chunk (promise: at most {PROMISE_MS:g} ms): {'kept' if kept else 'BROKEN'}")
    return 0 if kept else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=20_000, help="length of the long list")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="badcjobs-bench-"))
    try:
        return run(Bench(folder), args.chunks)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())
