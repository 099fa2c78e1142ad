"""A rehearsal of the whole campaign, scaled down: 20 million chunks planned and sharded, 10,000 task databases merged.

    python tests/bench/rehearsal.py                          at 1/1000, 1/100 and 1/10: about ten minutes, 3 GB of disk
    python tests/bench/rehearsal.py --scales 1/1000,1/100    a minute

Prints time, peak memory and files at each scale, and how much each grows from one scale to the next: ten times the work
may take ten times as long, and no more. Exits with 1 where it takes longer than that by half.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.plan import write_manifest
from support.many_tasks import write_tasks
from support.measured import Promises, measure

CHUNKS, TASKS = 20_000_000, 10_000
CHUNKS_PER_TASK = CHUNKS // TASKS
SCALES = "1/1000,1/100,1/10"
_TASK_SECONDS = 300  # of telemetry in a task database, at 1 Hz on four devices
# So fast that two thousand chunks of 30 s, and not one more, fit into an hour of four GPUs with the usual margin.
_TOLD = ("--rate", 7.51126, "--time", 60, "--gpus-per-task", 4, "--json")
_LINEAR = 1.5


@dataclass(frozen=True)
class Act:
    """The campaign at one scale."""

    scale: Fraction
    chunks: int
    tasks: int
    plan_s: float
    plan_mb: int
    plan_files: int
    merge_s: float
    merge_mb: int
    merged_files: int
    job_mb: float


def rehearse(folder: Path, scale: Fraction) -> Act:
    """Plan, shard and merge at one scale; what is written is counted, row by row."""
    tasks = max(1, int(TASKS * scale))
    chunks = tasks * CHUNKS_PER_TASK
    print(f"rehearsal at {scale}: {chunks:,} of {CHUNKS:,} chunks, {tasks:,} of {TASKS:,} tasks", flush=True)
    manifest = write_manifest(folder / "manifest.csv", chunks)
    planned = measure("plan", manifest, *_TOLD, "--out", folder / "plan", cwd=folder)
    assert planned.json["tasks"]["count"] == tasks, planned.json["tasks"]  # type: ignore[index]
    shards = sorted((folder / "plan").glob("wave-*/task-*.csv"))
    assert len(shards) == tasks
    assert sum(_lines(path) - 1 for path in shards) == chunks, "shards are not the manifest"
    began_s = time.perf_counter()
    write_tasks(folder / "run", range(tasks), _TASK_SECONDS, CHUNKS_PER_TASK)
    print(f"  ({tasks:,} task databases were written in {time.perf_counter() - began_s:.1f} s)", flush=True)
    merged = measure("merge", folder / "run", "--json", cwd=folder)
    assert merged.json["done"] == chunks, merged.json["done"]
    job_mb = (folder / "run" / "job.sqlite").stat().st_size / 2**20
    return Act(
        scale, chunks, tasks, planned.seconds, planned.memory_mb, _files(folder / "plan"), merged.seconds,
        merged.memory_mb, _files(folder / "run"), job_mb,
    )  # fmt: skip


def tell(promises: Promises, act: Act) -> None:
    """Print what one scale took."""
    promises.just("plan --write", act.plan_s, "s")
    promises.just("  per chunk", act.plan_s / act.chunks * 1e6, "µs")
    promises.at_most("  peak memory", act.plan_mb, 300, "MB")
    promises.just("  files: shards, lists, scripts", act.plan_files, "")
    promises.just("merge, summary and page", act.merge_s, "s")
    promises.just("  per task database", act.merge_s / act.tasks * 1e3, "ms")
    promises.just("  peak memory", act.merge_mb, "MB")
    promises.just("  files of the run", act.merged_files, "")
    promises.just("  job.sqlite", act.job_mb, "MB")


def compare(promises: Promises, small: Act, large: Act) -> None:
    """Print how much everything grows from one scale to the next."""
    times = large.chunks / small.chunks
    print(f"from {small.scale} to {large.scale}: {times:.3g} times the work", flush=True)
    promises.at_most("plan --write takes", large.plan_s / small.plan_s, times * _LINEAR, "times")
    promises.at_most("  its memory is", large.plan_mb / small.plan_mb, times, "times")
    promises.just("  its files are", large.plan_files / small.plan_files, "times")
    promises.at_most("merge takes", large.merge_s / small.merge_s, times * _LINEAR, "times")
    promises.at_most("  its memory is", large.merge_mb / small.merge_mb, times, "times")
    promises.just("  its files are", large.merged_files / small.merged_files, "times")


def foretell(small: Act, large: Act) -> None:
    """Say what the whole would take if it grew on as it did from the last but one scale to the last."""
    times = (CHUNKS - large.chunks) / (large.chunks - small.chunks)

    def grown(name: str) -> float:
        here: float = getattr(large, name)
        return here + times * (here - float(getattr(small, name)))

    print(
        f"at full scale, if that goes on: plan --write {grown('plan_s') / 60:,.1f} min and {grown('plan_mb'):,.0f} MB,"
        f" merge {grown('merge_s') / 60:,.1f} min and {grown('merge_mb'):,.0f} MB, job.sqlite"
        f" {grown('job_mb') / 1024:,.1f} GB, {grown('plan_files') + grown('merged_files'):,.0f} files"
    )


def _files(folder: Path) -> int:
    return sum(path.is_file() for path in folder.rglob("*"))


def _lines(path: Path) -> int:
    return path.read_bytes().count(b"\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scales", default=SCALES, help=f"shares of the campaign, growing (default {SCALES})")
    parser.add_argument("--slack", type=float, default=1, help="forgive a factor, on a machine that is busy otherwise")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    promises, acts = Promises(args.slack), []
    for scale in map(Fraction, args.scales.split(",")):
        with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
            acts.append(rehearse(Path(folder), scale))
        tell(promises, acts[-1])
    for small, large in pairwise(acts):
        compare(promises, small, large)
    if len(acts) > 1:
        foretell(*acts[-2:])
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
