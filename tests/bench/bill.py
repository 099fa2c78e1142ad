"""What plan says that audio costs, against a run with the request of the cheapest choice.

    tests/hawkears/install --gpu DIR
    python tests/bench/bill.py --hawkears DIR --cores 6

The caches of HawkEars are filled first. A run measures, with one worker per core and the memory that ``submit``
requests. ``plan --from`` it, with the weights of Sockeye, makes the table. Then the cheapest choice runs on its own
cores, with its own memory, workers and chunks: what its report says is billed must be what the plan said, within 15 %.
Without a GPU: ``--simulate 1 --scale 0.02 --promise 0``, with caches filled as well; so little audio is not judged.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.by_hand import CACHES, HandSet, HawkEars, Meter, Nights
from support.measured import Promises

ROOT = Path(__file__).resolve().parents[2]
SITE = "sockeye"
RECORDING_S, CHUNK_S = 1800, 300
JOB = {"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0"}  # outside of Slurm nothing is billed


class Commands:
    """Runs badcjobs in a folder, inside what looks like a job of Slurm."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self._folder, self._cores = folder, sorted(os.sched_getaffinity(0))
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        own = {"PYTHONPATH": path, "XDG_CACHE_HOME": str(folder / "cache")}
        own |= {name: str(folder / "caches" / name) for name in CACHES}
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | own
        self._engine = ["--engine", "hawkears", "--hawkears-python", str(args.hawkears / "venv" / "bin" / "python"),
                        "--hawkears-root", str(args.hawkears / "root")]  # fmt: skip
        self._engine += ["--simulate", args.simulate] if args.simulate else []

    def warm_up(self, recording: Path, hawkears: Path, *, on_gpu: bool) -> None:
        """Fill the caches of the disk and of HawkEars, which are not to count for the first run."""
        by_hand = {**self._environ, "CUDA_VISIBLE_DEVICES": "0" if on_gpu else ""}
        with tempfile.TemporaryDirectory(dir=self._folder) as folder:
            HawkEars(hawkears, by_hand, on_gpu).analyze(HandSet(1, 1), [recording], Path(folder), Meter("0"))

    def __call__(self, *words: object, **variables: str) -> str:
        """Run a command, which must succeed; return what it printed."""
        command, environ = [sys.executable, "-m", "badcjobs", *map(str, words)], {**self._environ, **variables}
        done = subprocess.run(command, cwd=self._folder, env=environ, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(
                f"badcjobs {' '.join(map(str, words))}\nexit code {done.returncode}\n{done.stderr[-4000:]}"
            )
        return done.stdout

    def run(self, out: str, cpus: int, mem_gb: int, *options: object) -> dict[str, Any]:
        """Run a task with so many cores and so much memory; return its report."""
        os.sched_setaffinity(0, self._cores[:cpus])
        granted = {"SLURM_CPUS_PER_TASK": str(cpus), "SLURM_MEM_PER_NODE": str(mem_gb * 1024)}
        words = ("run", "recordings.txt", "--out", out, *self._engine, *options, "--config", f"site={SITE}")
        self(*words, **JOB, **granted)
        self("merge", out)
        report: dict[str, Any] = json.loads(self("report", out, "--json"))
        return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hawkears", type=Path, required=True, metavar="DIR", help="as tests/hawkears/install made it")
    parser.add_argument("--cores", type=int, default=6, metavar="N", help="of the run that measures [6]")
    parser.add_argument("--recordings", type=int, default=24, metavar="N", help="so many half hours of audio [24]")
    parser.add_argument("--simulate", metavar="N", help="simulated GPUs: HawkEars uses the CPU")
    parser.add_argument("--scale", type=float, default=1, metavar="X", help="so much shorter recordings and chunks [1]")
    parser.add_argument("--promise", type=float, default=15, metavar="P", help="within so many %% [15]; 0: not judged")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    args.hawkears = args.hawkears.absolute()
    promises = Promises()
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        nights = Nights(Path(folder)).files(args.recordings, RECORDING_S * args.scale, 4)
        (Path(folder) / "recordings.txt").write_text("".join(f"{path}\n" for path in nights))
        badcjobs = Commands(args, Path(folder))
        badcjobs.warm_up(nights[0], args.hawkears, on_gpu=not args.simulate)
        workers = ("--", "--workers-per-gpu", args.cores, "--chunk-length", CHUNK_S * args.scale)
        asked = badcjobs("submit", "recordings.txt", "--out", "first", "--dry-run", "--cpus", args.cores, *workers)
        mem_gb = int(asked.split("#SBATCH --mem=")[1].split("G")[0])
        first = badcjobs.run("first", args.cores, mem_gb, "--chunk-length", CHUNK_S * args.scale)
        source = ("recordings.txt", "--from", "first", "--site", SITE, "--gpus-per-task", 1)
        print(badcjobs("plan", *source), flush=True)
        plan = json.loads(badcjobs("plan", *source, "--json"))
        best = plan["tasks"]
        options = ["--workers-per-gpu", best["workers"]]
        if best["chunk_s"] < RECORDING_S * args.scale:
            options += ["--chunk-length", best["chunk_s"], "--overlap", 6]
        second = badcjobs.run("second", best["cpus"], best["mem_gb"], *options)
    (found, first_units) = (one["bill"]["units"] for one in (second, first))
    promises.just("billed with one worker per core", first_units, "units")
    promises.just("planned, for the cheapest", plan["billed_units"], "units")
    kept = not args.promise or abs(found / plan["billed_units"] - 1) <= args.promise / 100
    promise = f"within {args.promise:g}%" if args.promise else ""
    promises.just("billed for the cheapest", found, "units", promise, kept=kept)
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
