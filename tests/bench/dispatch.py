"""What badcjobs itself costs per chunk, with an engine that has next to nothing to do; beside a process per chunk.

    python tests/bench/dispatch.py            20,000 chunks: a minute
    python tests/bench/dispatch.py --small    2,000: seconds

All in one run on one machine, one worker each. A figure is the slope between a short list and a long one, so that the
start is left out. All that badcjobs does for a chunk is in it, and the demo engine, which reads ten samples.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import wave
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.measured import Promises, main

HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
SHORT = 50


class Ways:
    """Ways to get through a list of chunks, one at a time; each returns its seconds."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._runs = folder, 0
        self._audio, self._program = folder / "chunk.wav", folder / "nothing.sh"
        with wave.open(str(self._audio), "wb") as audio:
            audio.setparams((1, 2, 1000, 10, "NONE", "not compressed"))
            audio.writeframes(bytes(20))
        self._program.write_text('#!/bin/sh\necho start_time,end_time,label,score > "$2"\n')
        self._program.chmod(0o755)

    def fed_worker(self, chunks: int) -> float:
        self._runs += 1
        manifest, out = self._folder / f"{chunks}.csv", self._folder / f"run{self._runs}"
        rows = (f"rec,c{number},{self._audio},{number * 10},{number * 10 + 10},0,," for number in range(chunks))
        manifest.write_text("\n".join([HEADER, *rows]) + "\n")
        run = [sys.executable, "-m", "badcjobs", "run", str(manifest), f"--out={out}", "--simulate=1", "--engine=demo"]
        return time_of(run)

    def xargs(self, chunks: int) -> float:
        """Start an empty program for each chunk in the cheapest way there is."""
        command = ["xargs", "-I{}", str(self._program), "{}", str(self._folder / "xargs.csv")]
        return time_of(command, f"{self._audio}\n" * chunks)


def time_of(command: Sequence[str], given: str = "") -> float:
    started_s = time.perf_counter()
    subprocess.run(command, input=given.encode(), check=True, capture_output=True)
    return time.perf_counter() - started_s


def slope_ms(way: Callable[[int], float], chunks: int, repeats: int) -> float:
    """Return milliseconds per chunk: the median of several long lists, less the quickest short one."""
    short_s = min(way(SHORT) for _ in range(repeats))
    return 1000 * (statistics.median(way(chunks) for _ in range(repeats)) - short_s) / (chunks - SHORT)


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Compare a worker that is fed with a process per chunk, which takes so much longer that fewer are enough."""
    chunks, repeats = (2_000, 1) if small else (20_000, 3)
    print(f"dispatch: one worker, lists of {chunks:,} chunks, {chunks // 10:,} where each is a process")
    ways = Ways(folder)
    fed_ms, process_ms = slope_ms(ways.fed_worker, chunks, repeats), slope_ms(ways.xargs, chunks // 10, repeats)
    if small:  # beside other tests only the comparison is fair
        promises.just("badcjobs, fed worker, with telemetry", fed_ms, "ms")
    else:
        promises.at_most("badcjobs, fed worker, with telemetry", fed_ms, 1.0, "ms")
    promises.just("xargs, an empty program per chunk", process_ms, "ms")
    promises.at_most("a fed chunk, in times of an empty process", fed_ms / process_ms, 1.0, "×", is_time=False)


if __name__ == "__main__":
    main(__doc__, bench)
