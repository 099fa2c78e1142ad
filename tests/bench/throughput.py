"""How fast badcjobs gets through audio with a real HawkEars, against sets of processes tuned by hand. It can lose.

    tests/hawkears/install --gpu DIR
    python tests/bench/throughput.py --hawkears DIR --cores 6 --out throughput.json

A set by hand is a number of ``hawkears analyze`` processes, with a number of threads each, that share the recordings on
one GPU, with CUDA MPS or without. All sets run once on 6 hours of audio. The best one without MPS, any within 5 % of
it, the best one with MPS if that is faster, and ``badcjobs run`` then repeat in turn, on 6 and on 30 hours: in
recordings of 30 minutes, which badcjobs cuts on the way, and in chunks of 30 s.

Times are of all processes from start to end, on the same cores. The caches of HawkEars are filled before; badcjobs
knows nothing, each of its runs has a new cache folder. A line per run and tables of medians are printed, ``--out`` gets
everything. The exit code is 1 if badcjobs was slower than promised, compared with the best set without MPS, or found
other detections than HawkEars in the same chunks.

Without a GPU: ``--simulate 1 --scale 0.02 --promise 0``. Options after ``--`` go to ``badcjobs run``.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.by_hand import CACHES, MPS, HandSet, HawkEars, Meter, Nights, NoMps, cut, parse_set, read_scores
from support.measured import Promises

ROOT = Path(__file__).resolve().parents[2]
BADCJOBS = "badcjobs run"
RANK_H, MANY_H = 6.0, 30.0
AS_GOOD = 1.05  # one run cannot tell sets apart that are closer
SHORTEST_S = 3.0  # in less, HawkEars hears nothing
SAME_SCORE = 0.0015  # HawkEars writes three decimals
Way = HandSet | str
Run = dict[str, Any]


class Kind(NamedTuple):
    """How the audio comes: files of this length, of which so many differ; and into what badcjobs cuts them."""

    name: str
    file_s: float
    distinct: int
    chunk_s: float | None = None


class Bench:
    """Runs one way of working after the other, prints a line for each, and keeps everything in a JSON file."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._args, self._folder, self._numbers = args, folder, itertools.count(1)
        # Slurm's variables are those of the job in which this runs; badcjobs gets the ones that its own job would have.
        environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        environ |= {name: str(folder / "caches" / name) for name in CACHES}
        device = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        self._meter = Meter(device)
        by_hand = {**environ, "CUDA_VISIBLE_DEVICES": "" if args.simulate else device}
        self._hawkears = HawkEars(args.hawkears.absolute(), by_hand, on_gpu=not args.simulate)
        path = os.pathsep.join(filter(None, [str(ROOT), environ.get("PYTHONPATH")]))
        self._environ = {**environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": device}
        self._nights = Nights(folder)
        self.runs: list[Run] = []
        self.facts: dict[str, Any] = {"arguments": sys.argv[1:], "runs": self.runs, "detections": [], "promises": []}

    def warm_up(self, kind: Kind) -> None:
        """Fill the caches of the disk and of HawkEars, which is not to count for the one that comes first."""
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            self._hawkears.analyze(HandSet(1, 1), self._files(kind, 0), Path(folder), self._meter)

    def run(self, way: Way, kind: Kind, purpose: str, hours: float) -> Run:
        """Run one way over so much audio."""
        files = self._files(kind, hours)
        facts = self._by_hand(way, files) if isinstance(way, HandSet) else self._badcjobs(kind, files)
        audio_h, seconds = kind.file_s * len(files) / 3600, self._meter.seconds
        speed, used = audio_h * 3600 / seconds, None if self._meter.joules is None else self._meter.joules / audio_h
        run = {"way": str(way), "kind": kind.name, "purpose": purpose, "audio_h": audio_h, "seconds": seconds,
               "real_time": speed, "j_per_audio_h": used, **facts}  # fmt: skip
        figures = f"{seconds:>8.1f} s {speed:>7,.0f} × {'-' if used is None else f'{used:,.0f}':>6} J/h"
        print(f"  {purpose:<5} {audio_h:>6.3g} h in {kind.name:<20} {way!s:<22} {figures}", flush=True)
        for line in facts.get("decisions", ()):
            print(f"        {line}", flush=True)
        self.runs.append(run)
        self.save()
        return run

    def save(self) -> None:
        """Write what is known so far: this may be stopped at any moment."""
        if self._args.out:
            self._args.out.write_text(json.dumps(self.facts, indent=1, ensure_ascii=False) + "\n")

    def _files(self, kind: Kind, hours: float) -> list[Path]:
        return self._nights.files(max(1, round(hours * 3600 / kind.file_s)), kind.file_s, kind.distinct)

    def _by_hand(self, way: HandSet, files: list[Path]) -> Run:
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            self._hawkears.analyze(way, files, Path(folder), self._meter)
        return {}

    def _badcjobs(self, kind: Kind, files: list[Path]) -> Run:
        folder = self._folder / f"run{next(self._numbers)}"
        folder.mkdir()
        (folder / "recordings.txt").write_text("".join(f"{path}\n" for path in files))
        environ = {**self._environ, "XDG_CACHE_HOME": str(folder / "cache")}
        cutting = ["--chunk-length", str(kind.chunk_s)] if kind.chunk_s else []
        mem_mib = self._args.mem_mib or self._memory_asked_for(cutting, folder, environ)
        environ |= {"SLURM_CPUS_PER_TASK": str(self._args.cores), "SLURM_MEM_PER_NODE": str(mem_mib)}
        words = ["run", "recordings.txt", "--out", "out", *cutting, "--engine", "hawkears", "--hawkears-python",
                 str(self._hawkears.python), "--hawkears-root", str(self._hawkears.root)]  # fmt: skip
        words += ["--simulate", self._args.simulate] if self._args.simulate else []
        began_ms = time.time() * 1000
        self._meter.start()
        badcjobs([*words, *self._args.badcjobs], folder, environ)
        self._meter.stop()
        (self._database,) = (folder / "out" / "tasks").glob("*.sqlite")
        return {"granted_mib": mem_mib, **read_facts(self._database, began_ms)}

    def _memory_asked_for(self, cutting: list[str], folder: Path, environ: dict[str, str]) -> int:
        """Return the memory that ``badcjobs submit`` asks for, for one worker per core."""
        cores = str(self._args.cores)
        words = ["submit", "recordings.txt", "--out", "out", "--dry-run", "--cpus", cores]
        script = badcjobs([*words, "--", "--workers-per-gpu", cores, *cutting], folder, environ)
        return int(re.findall(r"#SBATCH --mem=(\d+)G", script)[0]) * 1024

    def compare_detections(self, kind: Kind) -> tuple[int, list[str]]:
        """Let ``hawkears analyze`` work on some chunks of the last run; return how much it found, and what differs."""
        sql = "SELECT recording_id, chunk_id, audio_path, start_ms, end_ms FROM chunk ORDER BY start_ms, recording_id"
        chunks = query(self._database, sql)
        chunks = chunks[:: max(1, len(chunks) // self._args.compare)][: self._args.compare]
        sql = "SELECT start_ms, end_ms, label, score FROM detection WHERE recording_id = ? AND chunk_id = ?"
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            folder, parts = Path(name), [Path(name) / f"c{number:03d}.wav" for number in range(len(chunks))]
            for part, (_, _, path, start_ms, end_ms) in zip(parts, chunks, strict=True):
                cut(path, start_ms, end_ms, part)
            self._hawkears.analyze(HandSet(1, 3), parts, folder, self._meter)
            theirs = read_scores(folder)
        differ = []
        for part, (recording, chunk, *_) in zip(parts, chunks, strict=True):
            ours = {row[:3]: row[3] for row in query(self._database, sql, recording, chunk)}
            wanted = {row[:3]: row[3] for row in theirs.get(part.stem, [])}
            for key in sorted(ours.keys() | wanted.keys()):
                if abs(ours.get(key, -1) - wanted.get(key, -1)) > SAME_SCORE:
                    differ.append(f"{recording} {chunk} {key}: {ours.get(key)}, HawkEars {wanted.get(key)}")
        many = sum(map(len, theirs.values()))
        self.facts["detections"].append({"kind": kind.name, "chunks": len(chunks), "found": many, "differ": differ})
        return many, differ


def badcjobs(words: list[str], folder: Path, environ: dict[str, str]) -> str:
    """Run a command, which must succeed; return what it printed."""
    command = [sys.executable, "-m", "badcjobs", *words]
    done = subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"badcjobs {' '.join(words)}\nexit code {done.returncode}\n{done.stderr[-4000:]}")
    return done.stdout


def query(database: Path, sql: str, *values: object) -> list[tuple[Any, ...]]:
    """Ask a database."""
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as db:
        return db.execute(sql, values).fetchall()


def read_facts(database: Path, began_ms: float) -> Run:
    """Return what a run of badcjobs says about itself; all chunks must be done, and each once."""
    ((chunks, done, tries),) = query(
        database, "SELECT count(*), sum(status = 'done'), (SELECT count(*) FROM attempt) FROM chunk"
    )
    if not chunks == done == tries:
        raise SystemExit(f"badcjobs: {chunks} chunks, {done} of them done, {tries} attempts: {database}")
    sql = "SELECT ended_at_ms - (SELECT min(ended_at_ms) FROM chunk), audio_s FROM chunk"
    rates: dict[int, float] = {}
    for after_ms, audio_s in query(database, sql):
        rates[after_ms // 10_000 * 10] = rates.get(after_ms // 10_000 * 10, 0) + (audio_s or 0) / 10
    decided = query(database, "SELECT at_ms, code, figures, reason FROM decision ORDER BY at_ms")
    (first_ms,), (bytes_used,), (workers,), recorder = (
        query(database, sql)[0]
        for sql in ("SELECT min(ended_at_ms) FROM chunk", "SELECT max(memory_bytes) FROM usage_sample",
                    "SELECT count(*) FROM worker",
                    "SELECT 1e5 * cpu_s / (last_at_ms - started_at_ms), memory_bytes / 1048576.0 FROM recorder")
    )  # fmt: skip
    return {
        "device": query(database, "SELECT name, driver FROM device"),
        "chunks": chunks,
        "workers": workers,
        "memory_gb": bytes_used and bytes_used / 1e9,
        "recorder": recorder,  # percent of a core, MiB
        "first_result_s": (first_ms - began_ms) / 1000,
        "real_time_after_s": dict(sorted(rates.items())),  # in each ten seconds from the first result on
        "decisions": [
            f"{(at_ms - began_ms) / 1000:.1f} s: {code} {figures}: {reason}" for at_ms, code, figures, reason in decided
        ],
    }


def contenders(ranking: dict[HandSet, float]) -> list[HandSet]:
    """Return the sets to repeat: the best without MPS, those as good as it, and the best with MPS if it is faster."""
    plain, shared = ({way: s for way, s in ranking.items() if way.mps is mps} for mps in (False, True))
    best_s = min(plain.values(), default=float("inf"))
    close = [way for way, seconds in plain.items() if seconds <= best_s * AS_GOOD]
    return close + [way for way, seconds in shared.items() if seconds == min(shared.values()) < best_s]


def promised(kind: Kind, hours: float, cores: int) -> float:
    """Return how many times as fast as the best set without MPS badcjobs is at least."""
    if hours < MANY_H or kind.chunk_s is None or cores < 6:
        return 0.95
    return 1.10 if cores < 16 else 1.25


def table(runs: list[Run], ways: list[Way]) -> Iterator[str]:
    """Yield a line per way: medians and, between which they vary, the extremes."""
    yield "| | s | × real time | J per audio-hour |\n| --- | --- | --- | --- |"
    for way in ways:
        own = [run for run in runs if run["way"] == str(way)]
        cells = []
        for name, form in (("seconds", ",.1f"), ("real_time", ",.0f"), ("j_per_audio_h", ",.0f")):
            figures = sorted(run[name] for run in own if run[name] is not None)
            middle = format(statistics.median(figures), form) if figures else "-"
            cells.append(f"{middle} ({figures[0]:{form}} to {figures[-1]:{form}})" if len(figures) > 1 else middle)
        yield f"| {way} | {' | '.join(cells)} |"


def compare(bench: Bench, kind: Kind, args: argparse.Namespace, promises: Promises) -> None:
    """Rank the sets by hand, repeat the best of them in turn with badcjobs, and hold badcjobs to its promises."""
    sets, compared = args.by_hand, not args.compare
    if len(sets) > 1:
        ranking = {}
        for way in sets:
            try:
                ranking[way] = bench.run(way, kind, "rank", RANK_H * args.scale)["seconds"]
            except NoMps as problem:
                print(f"  {way}: left out: {problem}", flush=True)
        sets = contenders(ranking)
    for hours in args.only:
        purpose = f"{hours:g}h"
        ways: list[Way] = [*sets, BADCJOBS]
        for number in range(args.rounds):
            for way in ways[:: -1 if number % 2 else 1]:
                bench.run(way, kind, purpose, hours * args.scale)
                if way == BADCJOBS and not compared:
                    many, differ = bench.compare_detections(kind)
                    alike = bool(many) and not differ  # nothing found is nothing compared
                    promises.just(f"of {many:,} detections differ", len(differ), "", "at most 0, of some", kept=alike)
                    compared = True
        runs = [run for run in bench.runs if (run["kind"], run["purpose"]) == (kind.name, purpose)]
        print(f"\n{purpose} in {kind.name}, {args.cores} cores, median of {args.rounds}:\n\n", end="")
        print(*table(runs, ways), "", sep="\n", flush=True)
        times = {way: statistics.median(run["seconds"] for run in runs if run["way"] == str(way)) for way in ways}
        least = promised(kind, hours, args.cores) if args.promise is None else args.promise
        best = min((way for way in sets if not way.mps), key=lambda way: times[way], default=None)
        for way in sets:
            ratio, what = times[way] / times[BADCJOBS], f"as fast as {way}"
            if way != best:
                promises.just(what, ratio, "×")
                continue
            promises.at_least(what, ratio, least, "×")
            facts = {"kind": kind.name, "purpose": purpose, "best": str(way), "ratio": ratio, "promised": least}
            bench.facts["promises"].append(facts)
        bench.save()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    available, both = sorted(os.sched_getaffinity(0)), ["long", "30s"]
    parser.add_argument("--hawkears", type=Path, required=True, metavar="DIR", help="as tests/hawkears/install made it")
    parser.add_argument("--cores", type=int, default=len(available), metavar="N", help="use so many cores [all]")
    parser.add_argument("--mem-mib", type=int, metavar="MIB", help="memory of badcjobs [as submit asks for]")
    parser.add_argument("--by-hand", nargs="*", metavar="PxT[+mps]", help="sets [1x3 3x2 Nx1, without and with MPS]")
    parser.add_argument("--audio", nargs="+", choices=both, default=both, help="files of 30 min, chunks of 30 s [both]")
    parser.add_argument("--chunk-length", type=float, default=300, metavar="S", help="of what badcjobs cuts [300]")
    parser.add_argument("--only", nargs="+", type=float, default=[6, 30], metavar="H", help="hours of audio [6 30]")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repeat so often [3]")
    parser.add_argument("--promise", type=float, metavar="RATIO", help="be so many times as fast as the best set")
    parser.add_argument("--compare", type=int, default=12, metavar="N", help="chunks to compare the detections of [12]")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON, with everything")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    parser.add_argument("--simulate", metavar="N", help="simulated GPUs: HawkEars uses the CPU")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="so much less audio, in shorter files [1]")
    own = sys.argv[1 : sys.argv.index("--")] if "--" in sys.argv else sys.argv[1:]
    args = parser.parse_args(own)
    args.badcjobs = sys.argv[len(own) + 2 :]
    os.sched_setaffinity(0, available[: args.cores])
    singles = [args.cores] if args.cores < 8 else [args.cores * 3 // 4, args.cores]
    usual = [one + end for one in ("1x3", "3x2", *(f"{many}x1" for many in singles)) for end in ("", "+mps")]
    has_mps = shutil.which(MPS) is not None
    args.by_hand = [
        way for way in map(parse_set, usual if args.by_hand is None else args.by_hand) if has_mps or not way.mps
    ]
    kinds = {
        "long": Kind("recordings of 30 min", 1800 * args.scale, 4, max(SHORTEST_S, args.chunk_length * args.scale)),
        "30s": Kind("chunks of 30 s", max(SHORTEST_S, 30 * args.scale), 60),
    }
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        print(f"throughput: {args.cores} cores{'' if has_mps else f', no {MPS}'}", flush=True)
        bench = Bench(args, Path(folder))
        bench.warm_up(kinds["30s"])
        for name in args.audio:
            compare(bench, kinds[name], args, promises)
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
