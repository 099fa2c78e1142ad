"""How fast badcjobs gets through audio with a real HawkEars, against one process per chunk and against hand-tuned sets.

    python tests/bench/throughput.py --hawkears-python PYTHON --hawkears-root ROOT --audio FOLDER

FOLDER holds the chunks, equally long WAV files (960 of 30 s, say). All in one run on one machine: HawkEars started anew
for each of a few chunks; sets of ``hawkears analyze`` processes that share the folder, tuned by hand; ``badcjobs run
--workers-per-gpu auto`` that knows nothing yet and finds out (over the same chunks several times, under other names),
then with the number of workers that it has learned. Prints a table and whether the promises were kept; exits with 1
when one was not. Start-up counts everywhere.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import wave
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.badcjobs_program import rows
from support.measured import Promises

CLI = "import sys; sys.argv[0] = 'hawkears'; from hawkears.cli import cli; cli()"
ONE_BY_ONE = "import subprocess, sys; [subprocess.run(w, check=True) for w in eval(sys.argv[1])]"
TOGETHER = """
import subprocess, sys
programs = [subprocess.Popen(words) for words in eval(sys.argv[1])]
sys.exit(max(program.wait() for program in programs))
"""


class Bench:
    """Runs the ways of working, each with a recorder beside it, and prints a line for each."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._python, self._root, self._folder = args.hawkears_python, args.hawkears_root, folder
        self.files = sorted(args.audio.glob("*.wav"))[: args.chunks]
        with wave.open(str(self.files[0])) as audio:
            self.chunk_s = audio.getnframes() / audio.getframerate()

    def one_process_per_chunk(self, chunks: int) -> float:
        """Do what the lab's first tool did; return the seconds per chunk."""
        words = [self._analyze(path, self._folder / f"single{n}") for n, path in enumerate(self.files[:chunks])]
        return self._recorded("one process per chunk", chunks, ONE_BY_ONE, words)

    def by_hand(self, processes: int, threads: int) -> float:
        """Share the folder among processes that run side by side."""
        words = []
        for number in range(processes):
            share = self._folder / f"hand{processes}x{threads}" / f"in{number}"
            link(self.files[number::processes], share)
            words.append([*self._analyze(share, share.with_name(f"out{number}")), "--threads", str(threads)])
        name = f"hawkears analyze, {processes} processes × {threads} threads"
        return self._recorded(name, len(self.files), TOGETHER, words, OMP_NUM_THREADS="1")

    def badcjobs(self, name: str, passes: int = 1) -> float:
        """Run one task over all chunks, or several times over them under other names."""
        out = self._folder / f"run{len(list(self._folder.glob('run*')))}"
        files = [path for n in range(passes) for path in link(self.files, out.with_name(f"{out.name}-pass{n}"))]
        listed = out.with_suffix(".txt")
        listed.write_text("".join(f"{path}\n" for path in files))
        engine = ["--engine=hawkears", f"--hawkears-python={self._python}", f"--hawkears-root={self._root}"]
        cache = str(self._folder / "cache")
        words = ["run", str(listed), f"--out={out}", *engine, "--workers-per-gpu=auto"]
        wall_s = self._timed(words, OMP_NUM_THREADS="1", XDG_CACHE_HOME=cache)
        (database,) = (out / "tasks").glob("*.sqlite")
        assert rows(database, "SELECT count(*) FROM chunk WHERE status = 'done'") == [(len(files),)]
        decisions = "SELECT value, reason FROM decision WHERE kind = 'workers_per_gpu' ORDER BY at_ms"
        for workers, reason in rows(database, decisions):
            print(f"    {workers:.0f} workers: {reason}")
        return self._line(name, len(files), wall_s, database)

    def _analyze(self, source: Path, out: Path) -> list[str]:
        return [self._python, "-c", CLI, "analyze", str(source), "-o", str(out), "--rtype", "csv+audacity"]

    def _recorded(self, name: str, chunks: int, code: str, words: list[list[str]], **env: str) -> float:
        target = self._folder / f"{abs(hash(name))}.sqlite"
        wall_s = self._timed(["record", f"--out={target}", "--", sys.executable, "-c", code, repr(words)], **env)
        return self._line(name, chunks, wall_s, target)

    def _timed(self, words: list[str], **env: str) -> float:
        started_s = time.monotonic()
        command = [sys.executable, "-m", "badcjobs", *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=self._root, env={**os.environ, **env})
        return time.monotonic() - started_s

    def _line(self, name: str, chunks: int, wall_s: float, database: Path) -> float:
        sql = "SELECT (SELECT avg(busy_percent) FROM sample), sum(energy_integrated_j) FROM device_total"
        ((busy, joules),) = rows(database, sql)
        shown = ["-" if busy is None else f"{busy:.0f} %", "-" if joules is None else f"{joules / chunks:.0f}"]
        figures = f"{wall_s / chunks:>9.3f} {self.chunk_s * chunks / wall_s:>9.1f} ×"
        print(f"  {name:<52} {chunks:>6} {figures} {shown[0]:>7} {shown[1]:>7}", flush=True)
        return wall_s / chunks


def link(files: list[Path], folder: Path) -> list[Path]:
    """Show files in another folder, too."""
    folder.mkdir(parents=True)
    for path in files:
        (folder / path.name).symlink_to(path.absolute())
    return [folder / path.name for path in files]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hawkears-python", required=True, help="the Python that has HawkEars")
    parser.add_argument("--hawkears-root", type=Path, required=True, help="the folder with its models")
    parser.add_argument("--audio", type=Path, required=True, help="folder of equally long WAV files")
    parser.add_argument("--chunks", type=int, default=960)
    parser.add_argument("--single", type=int, default=6, help="how many chunks get a process each")
    parser.add_argument("--by-hand", nargs="*", default=["4x2"], help="PROCESSESxTHREADS")
    parser.add_argument("--passes", type=int, default=3, help="how often auto goes over the chunks to find out")
    args = parser.parse_args()
    promises = Promises(small=False)
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-") as folder:
        bench = Bench(args, Path(folder))
        kind = f"{len(bench.files)} chunks of {bench.chunk_s:.0f} s, start-up included, {os.cpu_count()} cores"
        print(
            f"throughput: {kind}\n  {'':<52} {'chunks':>6} {'s/chunk':>9} {'real time':>11} {'busy':>7} {'J/chunk':>7}"
        )
        single_s = bench.one_process_per_chunk(args.single)
        hand_s = min(bench.by_hand(*map(int, pair.split("x"))) for pair in args.by_hand)
        bench.badcjobs("badcjobs auto, finding out", args.passes)
        best_s = bench.badcjobs("badcjobs auto, as learned")
    promises.at_least("as fast as one process per chunk", single_s / best_s, 300, "×")
    promises.at_least("as fast as the best set by hand", 100 * hand_s / best_s, 95, "%")
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
