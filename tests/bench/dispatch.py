"""What badcjobs itself costs per chunk, with an engine that has next to nothing to do; beside a process per chunk.

    python tests/bench/dispatch.py            20,000 chunks: a minute
    python tests/bench/dispatch.py --small    1,000: seconds

All in one run on one machine, one worker each. A figure is the slope between a short list and a long one, so that the
start is left out. All that badcjobs does for a chunk is in it, and the demo engine, which reads ten samples.
"""

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.audio import make_wav
from support.measured import Measured, Promises, main, measure
from support.source_files import rows

SHORT = 50


def fed_worker(folder: Path, chunks: int) -> Measured:
    audio, manifest = make_wav(folder / "chunk.wav", 0.01, 1000, loud=[]), folder / f"{chunks}.csv"
    manifest.write_text(rows(*(f"rec,c{n},{audio},{n * 10},{n * 10 + 10},0,," for n in range(chunks))))
    out = tempfile.mkdtemp(dir=folder)
    one = ("--simulate=1", "--workers-per-gpu=1", "--engine=demo")
    return measure("run", manifest, f"--out={out}", *one, cwd=folder)


def xargs_s(folder: Path, chunks: int) -> float:
    """Start an empty program for each chunk in the cheapest way there is."""
    program = folder / "nothing.sh"
    program.write_text('#!/bin/sh\necho start_time,end_time,label,score > "$2"\n')
    program.chmod(0o755)
    command, started_s = ["xargs", "-I{}", str(program), "{}", str(folder / "xargs.csv")], time.perf_counter()
    subprocess.run(command, input=b"chunk.wav\n" * chunks, check=True, capture_output=True)
    return time.perf_counter() - started_s


def slope_ms(way: Callable[[Path, int], float], folder: Path, chunks: int, repeats: int) -> float:
    """Return milliseconds per chunk: the median of several long lists, less the quickest short one."""
    short_s = min(way(folder, SHORT) for _ in range(repeats))
    return 1000 * (statistics.median(way(folder, chunks) for _ in range(repeats)) - short_s) / (chunks - SHORT)


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Compare a worker that is fed with a process per chunk, which takes so much longer that fewer are enough."""
    chunks, repeats = (1_000, 1) if small else (20_000, 3)
    print(f"dispatch: one worker, lists of {chunks:,} chunks, {chunks // 10:,} where each is a process")
    fed_ms = slope_ms(lambda *job: fed_worker(*job).seconds, folder, chunks, repeats)
    process_ms = slope_ms(xargs_s, folder, chunks // 10, repeats)
    promises.at_most("badcjobs, fed worker, with telemetry", fed_ms, 1.0, "ms")
    promises.just("xargs, an empty program per chunk", process_ms, "ms")
    promises.at_most("a fed chunk, in times of an empty process", fed_ms / process_ms, 1.0, "×")
    promises.at_most("peak memory", fed_worker(folder, chunks).memory_mb, 100, "MB", is_time=False)


if __name__ == "__main__":
    main(__doc__, bench)
