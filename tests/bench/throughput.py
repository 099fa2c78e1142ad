"""How fast badcjobs gets through audio with a real HawkEars, against one process per chunk and against hand-tuned sets.

    python tests/bench/throughput.py --hawkears-python PYTHON --hawkears-root ROOT --audio FOLDER

FOLDER holds the chunks, equally long WAV files (960 of 30 s, say). All in one run on one machine: HawkEars started anew
for each of a few chunks; sets of ``hawkears analyze`` processes that share the folder, tuned by hand; ``badcjobs run
--workers-per-gpu auto`` that knows nothing yet and finds out (over the same chunks several times, under other names),
then with the number of workers that it has learned. Prints a table and whether the promises were kept; exits with 1
when one was not. Start-up counts everywhere.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
import wave
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

CLI = "import sys; sys.argv[0] = 'hawkears'; from hawkears.cli import cli; cli()"


@dataclass(frozen=True)
class Figure:
    """What one way of working has shown."""

    name: str
    chunks: int
    wall_s: float
    busy_percent: float | None
    joules: float | None

    @property
    def s_per_chunk(self) -> float:
        return self.wall_s / self.chunks

    def line(self, chunk_s: float) -> str:
        busy = "-" if self.busy_percent is None else f"{self.busy_percent:.0f} %"
        joules = "-" if self.joules is None else f"{self.joules / self.chunks:.0f}"
        speed = chunk_s / self.s_per_chunk
        return f"  {self.name:<52} {self.chunks:>6} {self.s_per_chunk:>9.3f} {speed:>9.1f} × {busy:>7} {joules:>7}"


class Bench:
    """Runs the ways of working, each with a recorder beside it."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._python = args.hawkears_python
        self._root = args.hawkears_root
        self._folder = folder
        self.files = sorted(args.audio.glob("*.wav"))[: args.chunks]

    def one_process_per_chunk(self, chunks: int) -> Figure:
        """Do what the lab's first tool did."""
        words = [self._analyze(path, self._folder / f"single{n}") for n, path in enumerate(self.files[:chunks])]
        script = "import subprocess, sys; [subprocess.run(w, check=True) for w in eval(sys.argv[1])]"
        return self._recorded("one process per chunk", chunks, [sys.executable, "-c", script, repr(words)], None)

    def by_hand(self, processes: int, threads: int) -> Figure:
        """Share the folder among processes that run side by side."""
        place = self._folder / f"hand{processes}x{threads}"
        words = []
        for number in range(processes):
            share = place / f"in{number}"
            share.mkdir(parents=True)
            for path in self.files[number::processes]:
                (share / path.name).symlink_to(path)
            words.append([*self._analyze(share, place / f"out{number}"), "--threads", str(threads)])
        script = (
            "import subprocess, sys; ps = [subprocess.Popen(w) for w in eval(sys.argv[1])];"
            " sys.exit(max(p.wait() for p in ps))"
        )
        name = f"hawkears analyze, {processes} processes × {threads} threads"
        return self._recorded(name, len(self.files), [sys.executable, "-c", script, repr(words)], 1)

    def badcjobs(self, workers: int, threads: int) -> Figure:
        """Run one task over all chunks with so many workers."""
        options = (f"--workers-per-gpu={workers}", f"--engine-arg=--threads={threads}")
        return self._run(f"badcjobs, {workers} workers × {threads} threads", self.files, options)

    def find_out(self, passes: int) -> Figure:
        """Run one task that knows nothing over the chunks several times, so that it can find out."""
        files = []
        for number in range(passes):
            again = self._folder / f"pass{number}"
            again.mkdir()
            for path in self.files:
                files.append(again / path.name)
                files[-1].symlink_to(path.absolute())
        return self._run("badcjobs auto, finding out", files, ("--workers-per-gpu=auto",), say=True)

    def learned(self) -> Figure:
        """Run one task over all chunks with what was found out."""
        return self._run("badcjobs auto, as learned", self.files, ("--workers-per-gpu=auto",), say=True)

    def _run(self, name: str, files: Sequence[Path], options: Sequence[str], *, say: bool = False) -> Figure:
        out = self._folder / f"run{len(list(self._folder.glob('run*')))}"
        listed = self._folder / f"{out.name}.txt"
        listed.write_text("".join(f"{path}\n" for path in files))
        command = [
            sys.executable, "-m", "badcjobs", "run", str(listed), f"--out={out}", "--engine=hawkears",
            f"--hawkears-python={self._python}", f"--hawkears-root={self._root}", *options,
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(self._folder / "cache")}
        started_s = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
        wall_s = time.monotonic() - started_s
        (database,) = (out / "tasks").glob("*.sqlite")
        with closing(sqlite3.connect(f"file:{database}?immutable=1", uri=True)) as db:
            ((done,),) = db.execute("SELECT count(*) FROM chunk WHERE status = 'done'").fetchall()
            decisions = db.execute("SELECT value, reason FROM decision WHERE kind = 'workers_per_gpu' ORDER BY at_ms")
            for workers, reason in decisions if say else ():
                print(f"    {workers:.0f} workers: {reason}")
        assert done == len(files), f"{done} of {len(files)} chunks are done"
        return Figure(name, done, wall_s, *telemetry(database))

    def _analyze(self, source: Path, out: Path) -> list[str]:
        return [self._python, "-c", CLI, "analyze", str(source), "-o", str(out), "--rtype", "csv+audacity"]

    def _recorded(self, name: str, chunks: int, command: Sequence[str], omp_threads: int | None) -> Figure:
        target = self._folder / f"{abs(hash(name))}.sqlite"
        record = [sys.executable, "-m", "badcjobs", "record", f"--out={target}", "--", *command]
        env = {**os.environ, **({} if omp_threads is None else {"OMP_NUM_THREADS": str(omp_threads)})}
        started_s = time.monotonic()
        subprocess.run(record, check=True, capture_output=True, cwd=self._root, env=env)
        return Figure(name, chunks, time.monotonic() - started_s, *telemetry(target))


def telemetry(database: Path) -> tuple[float | None, float | None]:
    """Return the mean busy share and the energy of the devices in a task database."""
    with closing(sqlite3.connect(f"file:{database}?immutable=1", uri=True)) as db:
        (busy,) = db.execute("SELECT avg(busy_percent) FROM sample").fetchone()
        (joules,) = db.execute("SELECT sum(energy_integrated_j) FROM device_total").fetchone()
    return busy, joules


def seconds_of(path: Path) -> float:
    with wave.open(str(path)) as audio:
        return audio.getnframes() / audio.getframerate()


def parse_pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("x")
    return int(first), int(second)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hawkears-python", required=True, help="the Python that has HawkEars")
    parser.add_argument("--hawkears-root", required=True, help="the folder with its models")
    parser.add_argument("--audio", type=Path, required=True, help="folder of equally long WAV files")
    parser.add_argument("--chunks", type=int, default=960)
    parser.add_argument("--single", type=int, default=6, help="how many chunks get a process each")
    parser.add_argument("--by-hand", type=parse_pair, nargs="*", default=[(4, 2)], help="PROCESSESxTHREADS")
    parser.add_argument("--badcjobs", type=parse_pair, nargs="*", default=[], help="WORKERSxTHREADS, beside auto")
    parser.add_argument("--passes", type=int, default=3, help="how often auto goes over the chunks to find out")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="badcjobs-bench-"))
    try:
        return run(args, Bench(args, folder))
    finally:
        shutil.rmtree(folder)


def run(args: argparse.Namespace, bench: Bench) -> int:
    chunk_s = seconds_of(bench.files[0])
    print(f"throughput: {len(bench.files)} chunks of {chunk_s:.0f} s, start-up included, {os.cpu_count()} cores")
    print(f"  {'':<52} {'chunks':>6} {'s/chunk':>9} {'real time':>11} {'busy':>7} {'J/chunk':>7}")
    single = bench.one_process_per_chunk(args.single)
    print(single.line(chunk_s), flush=True)
    hand: list[Figure] = []
    ours: list[Figure] = []
    for figures, ways, work in ((hand, args.by_hand, bench.by_hand), (ours, args.badcjobs, bench.badcjobs)):
        for pair in ways:
            figures.append(work(*pair))
            print(figures[-1].line(chunk_s), flush=True)
    print(bench.find_out(args.passes).line(chunk_s), flush=True)
    best = bench.learned()
    print(best.line(chunk_s), flush=True)
    best_hand = min(hand, key=lambda figure: figure.s_per_chunk)
    faster, share = single.s_per_chunk / best.s_per_chunk, best_hand.s_per_chunk / best.s_per_chunk
    for words, kept in (
        (f"{faster:.0f} × one process per chunk (promise: at least 300 ×)", faster >= 300),
        (f"{share:.0%} of the best set by hand (promise: at least 95 %)", share >= 0.95),
    ):
        print(f"  {words}: {'kept' if kept else 'BROKEN'}")
    return 0 if faster >= 300 and share >= 0.95 else 1


if __name__ == "__main__":
    sys.exit(main())
