"""How true the recorder's readings are, and what they cost, on a real NVIDIA GPU.

    python tests/bench/telemetry.py                 about 3 minutes
    python tests/bench/telemetry.py --seconds 20    quicker, coarser

Known loads of 5, 30 and 100 % are recorded with ``badcjobs record``; the busy share in the task database is compared
with what the GPU's own events say, its energy with a power integral taken apart from it, at 50 Hz. Then the recorder's
process is measured with four devices at 1 Hz. Exits with 1 when a promise was not kept, with 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pynvml

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.measured import Promises

HERE = Path(__file__).parent
DUTIES = (5, 30, 100)
Points = Sequence[tuple[float, float]]  # ms, W


def integral_j(points: Points) -> float:
    """Return the energy of power readings, by trapezoids."""
    return sum((p1 + p2) / 2 * (t2 - t1) / 1000 for (t1, p1), (t2, p2) in pairwise(points))


class PowerMeter:
    """Reads the power of the first device by itself, 50 times a second."""

    def __init__(self) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        self._points: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PowerMeter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.02):
            self._points.append((time.time() * 1000, pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1000))

    def joules(self, from_ms: float, to_ms: float) -> float:
        """Return the energy between two moments."""
        points = [point for point in self._points if from_ms <= point[0] <= to_ms]
        return integral_j(points) * (to_ms - from_ms) / (points[-1][0] - points[0][0])


def judge_load(folder: Path, promises: Promises, duty: int, seconds: float) -> None:
    """Record a known load and compare it with what was true."""
    target = folder / f"duty{duty}.sqlite"
    load = [sys.executable, str(HERE / "gpu_load.py"), f"--duty={duty}", f"--seconds={seconds}"]
    record = [sys.executable, "-m", "badcjobs", "record", "--out", str(target), "--interval", "1", "--", *load]
    with PowerMeter() as meter:
        done = subprocess.run(record, check=True, capture_output=True, text=True)
    truth: dict[str, float] = json.loads(done.stdout.splitlines()[0])
    columns = "SELECT at_ms, {0} FROM sample WHERE {0} IS NOT NULL ORDER BY at_ms"
    with closing(sqlite3.connect(f"file:{target}?immutable=1", uri=True)) as db:
        busy, counter, power = (
            db.execute(columns.format(metric)).fetchall() for metric in ("busy_percent", "energy_j", "power_w")
        )
    windows = [(t2 - t1, share) for (t1, _), (t2, share) in pairwise(busy)
               if t1 >= truth["started_ms"] and t2 <= truth["ended_ms"]]  # fmt: skip
    recorded = sum(w * share for w, share in windows) / sum(w for w, _ in windows)
    promises.just(f"load of {duty} %: true busy share", truth["busy_percent"], "%")
    promises.just("  recorded", recorded, "%")
    promises.at_most("  difference", abs(recorded - truth["busy_percent"]), 2, "points")
    (from_ms, first_j), (to_ms, last_j) = counter[0], counter[-1]
    meter_j = meter.joules(from_ms, to_ms)
    promises.just("  energy, measured apart", meter_j, "J")
    integrated_j = integral_j([point for point in power if from_ms <= point[0] <= to_ms])
    for name, joules in (("counter", last_j - first_j), ("power", integrated_j)):
        promises.just(f"  energy by {name}, error", 100 * (joules / meter_j - 1), "%")
        promises.at_most("    without its sign", 100 * abs(joules / meter_j - 1), 2, "%")


def judge_recorder(folder: Path, promises: Promises, seconds: float) -> None:
    """Measure the recorder's process with four devices: this GPU, read four times over as if it were four."""
    # A start costs the same however long the recorder lives, and varies more than a minute of recording costs.
    start = sorted(measure_recorder(folder / f"start{n}.sqlite", 5) for n in range(3))[1]
    whole = measure_recorder(folder / "whole.sqlite", 5 + 2 * seconds)
    percent = 100 * (whole[0] - start[0]) / (whole[1] - start[1])
    promises.at_most("recorder at 1 Hz × 4 devices: of one core", percent, 0.5, "%")
    promises.just("  processor time to start, once", start[0], "s")
    promises.at_most("  most memory", whole[2] / 2**20, 45, "MiB", is_time=False)
    promises.just("  worst lateness", 1000 * whole[3], "ms")


def measure_recorder(target: Path, seconds: float) -> tuple[float, float, int, float]:
    """Record for some time, with modules compiled as installed ones are; return what the recorder wrote of itself."""
    recorder = subprocess.Popen(
        [sys.executable, str(HERE / "four_devices.py"), str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    time.sleep(seconds)
    recorder.communicate(b"stop\npublished\n", timeout=30)
    cost = "SELECT cpu_s, (last_at_ms - started_at_ms) / 1000.0, memory_bytes, worst_late_s FROM recorder"
    with closing(sqlite3.connect(target)) as db:
        assert db.execute("SELECT count(DISTINCT device_id) FROM sample WHERE power_w IS NOT NULL").fetchone()[0] == 4
        found: tuple[float, float, int, float] = db.execute(cost).fetchone()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="how long each load lasts (default 40, at least 15)")
    args = parser.parse_args()
    if args.seconds < 15:
        parser.error("--seconds: at least 15, since the busy share is read every 5 s")
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as error:
        print(f"no NVIDIA GPU to measure on: {error}", file=sys.stderr)
        return 3
    print(f"telemetry on one {name}, driver {pynvml.nvmlSystemGetDriverVersion()}")
    promises = Promises(small=False)
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-") as folder:
        for duty in DUTIES:
            judge_load(Path(folder), promises, duty, args.seconds)
        judge_recorder(Path(folder), promises, args.seconds)
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
