"""How true the recorder's readings are, and what they cost, on a real NVIDIA GPU.

    python tests/bench/telemetry.py                 about 3 minutes
    python tests/bench/telemetry.py --seconds 20    quicker, coarser

Known loads of 5, 30 and 100 % are recorded with ``badcjobs record``; the busy share in the task database is compared
with what the GPU's own events say, its energy with a power integral taken apart from it, at 50 Hz. Then one hot reading
is timed against one ``nvidia-smi`` query and, where it is installed, one snapshot of nvitop. Prints a table of what
was measured, the promise and whether it was kept; exits with 1 when one was not, with 3 without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pynvml

HERE = Path(__file__).parent
DUTIES = (5, 30, 100)
SMI_QUERY = "utilization.gpu,utilization.memory,memory.used,temperature.gpu,power.draw,clocks.sm,clocks.mem"


class Report:
    """A line per figure, with its promise."""

    def __init__(self) -> None:
        self.broken = 0

    def add(self, what: str, figure: str, promise: str = "", *, kept: bool = True) -> None:
        """Say a figure, and whether its promise was kept."""
        self.broken += not kept
        verdict = "" if not promise else "kept" if kept else "BROKEN"
        print(f"  {what:<58} {figure:>12}   {promise:<18} {verdict}".rstrip(), flush=True)


# --- truth ------------------------------------------------------------------------------------------------------------


class PowerMeter:
    """Integrates the power of a device by itself, 50 times a second."""

    def __init__(self, index: int) -> None:
        self._handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        self._points: list[tuple[float, float]] = []  # ms, W
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
        """Return the energy between two moments, by trapezoids."""
        points = [point for point in self._points if from_ms <= point[0] <= to_ms]
        steps = pairwise(points)
        inside = sum((p1 + p2) / 2 * (t2 - t1) / 1000 for (t1, p1), (t2, p2) in steps)
        covered_s = (points[-1][0] - points[0][0]) / 1000
        return inside * (to_ms - from_ms) / 1000 / covered_s


def record_load(folder: Path, duty: int, seconds: float) -> tuple[Path, dict[str, float], PowerMeter]:
    """Record a known load; return the task database, what was true, and the meter that ran beside it."""
    target = folder / f"duty{duty}.sqlite"
    load = [sys.executable, str(HERE / "gpu_load.py"), f"--duty={duty}", f"--seconds={seconds}"]
    record = [sys.executable, "-m", "badcjobs", "record", "--out", str(target), "--interval", "1", "--", *load]
    with PowerMeter(0) as meter:
        done = subprocess.run(record, check=True, capture_output=True, text=True)
    truth: dict[str, float] = json.loads(done.stdout.splitlines()[0])
    return target, truth, meter


def judge_accuracy(report: Report, folder: Path, seconds: float) -> None:
    for duty in DUTIES:
        path, truth, meter = record_load(folder, duty, seconds)
        with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as db:
            recorded, source = busy_share(db, truth)
            (plain,) = db.execute(
                "SELECT avg(utilization_percent) FROM sample WHERE at_ms BETWEEN ? AND ?",
                (truth["started_ms"] + 2000, truth["ended_ms"]),
            ).fetchone()
            counted_j, integrated_j, from_ms, to_ms = energies(db)
        off = abs(recorded - truth["busy_percent"])
        report.add(f"load of {duty} %: true busy share", f"{truth['busy_percent']:.1f} %")
        report.add(f"  recorded ({source})", f"{recorded:.1f} %", "within 2 points", kept=off <= 2)
        report.add("  the plain utilization counter, mean", f"{plain:.1f} %")
        meter_j = meter.joules(from_ms, to_ms)
        report.add("  energy, measured apart", f"{meter_j:.0f} J")
        for name, joules in (("counter", counted_j), ("integrated", integrated_j)):
            share = joules / meter_j - 1
            report.add(f"  energy recorded, {name}", f"{share:+.2%}", "within 2 %", kept=abs(share) <= 0.02)


def busy_share(db: sqlite3.Connection, truth: dict[str, float]) -> tuple[float, str]:
    """Return the mean of busy_percent over the windows that lie inside the load, and where it was read from."""
    rows = db.execute("SELECT at_ms, busy_percent FROM sample WHERE busy_percent IS NOT NULL ORDER BY at_ms").fetchall()
    windows = [(t2 - t1, busy) for (t1, _), (t2, busy) in pairwise(rows)
               if t1 >= truth["started_ms"] and t2 <= truth["ended_ms"]]  # fmt: skip
    sources = db.execute("SELECT DISTINCT source FROM metric_source WHERE metric = 'busy_percent'").fetchall()
    return sum(w * busy for w, busy in windows) / sum(w for w, _ in windows), "+".join(s for (s,) in sources)


def energies(db: sqlite3.Connection) -> tuple[float, float, int, int]:
    """Return the energy by counter and by integrated power between the counter's first and last reading."""
    counter = db.execute("SELECT at_ms, energy_j FROM sample WHERE energy_j IS NOT NULL ORDER BY at_ms").fetchall()
    (from_ms, first_j), (to_ms, last_j) = counter[0], counter[-1]
    power = db.execute(
        "SELECT at_ms, power_w FROM sample WHERE power_w IS NOT NULL AND at_ms BETWEEN ? AND ? ORDER BY at_ms",
        (from_ms, to_ms),
    ).fetchall()
    steps = pairwise(power)
    integrated_j = sum((p1 + p2) / 2 * (t2 - t1) / 1000 for (t1, p1), (t2, p2) in steps)
    return last_j - first_j, integrated_j, from_ms, to_ms


# --- cost -------------------------------------------------------------------------------------------------------------


def time_it(call: Callable[[], object], rounds: int, rest_s: float = 0.0) -> float:
    """Return the median of the seconds that a call takes."""
    seconds = []
    for _ in range(rounds):
        started_s = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started_s)
        time.sleep(rest_s)
    return statistics.median(seconds)


def judge_cost(report: Report) -> None:
    from rooms.devices import NvmlReader
    from rooms.root import SystemClock

    reader = NvmlReader(SystemClock())
    uuid = reader.inventory()[0].uuid
    reader.read(uuid)
    hot_s = time_it(lambda: reader.read(uuid), 3000)
    report.add("one hot reading, median", f"{hot_s * 1e6:.0f} µs", "at most 60 µs", kept=hot_s <= 60e-6)
    paced_s = time_it(lambda: reader.read(uuid), 100, rest_s=0.1)
    report.add("  the same, ten a second (caches have cooled down)", f"{paced_s * 1e6:.0f} µs")
    reader.close()
    smi = ["nvidia-smi", f"--query-gpu={SMI_QUERY}", "--format=csv,noheader"]
    smi_s = time_it(lambda: subprocess.run(smi, check=True, capture_output=True), 20)
    report.add(
        "one nvidia-smi query, in hot readings", f"{smi_s / hot_s:.0f} ×", "at least 200 ×", kept=smi_s >= 200 * hot_s
    )
    try:
        from nvitop import Device
    except ImportError:
        report.add("one snapshot of nvitop: nvitop is not installed", "")
        return
    device = Device(0)
    nvitop_s = time_it(device.as_snapshot, 20)
    report.add(
        "one nvitop snapshot, in hot readings",
        f"{nvitop_s / hot_s:.0f} ×",
        "at least 500 ×",
        kept=nvitop_s >= 500 * hot_s,
    )


def judge_recorder(report: Report, folder: Path, seconds: float) -> None:
    """Measure the recorder's process with four devices: this GPU, read four times over as if it were four."""
    # A start costs the same however long the recorder lives, and varies more than a minute of recording costs.
    start = sorted((measure_recorder(folder, f"start{n}", 5) for n in range(3)), key=lambda one: one["cpu_s"])[1]
    whole = measure_recorder(folder, "whole", 5 + 2 * seconds)
    cpu = (whole["cpu_s"] - start["cpu_s"]) / (whole["wall_s"] - start["wall_s"])
    report.add("recorder at 1 Hz × 4 devices: of one core", f"{cpu:.2%}", "at most 0.50 %", kept=cpu <= 0.005)
    report.add("  processor time to start, once", f"{start['cpu_s']:.2f} s")
    mib = whole["memory_bytes"] / 2**20
    report.add("  most memory", f"{mib:.1f} MiB", "at most 45 MiB", kept=mib <= 45)
    report.add("  worst lateness", f"{whole['worst_late_s'] * 1000:.0f} ms")


def measure_recorder(folder: Path, name: str, seconds: float) -> dict[str, float]:
    """Record for some time, with modules compiled as installed ones are; return what the recorder wrote of itself."""
    target = folder / f"{name}.sqlite"
    recorder = subprocess.Popen(
        [sys.executable, str(HERE / "four_devices.py"), str(target)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"},
    )
    time.sleep(seconds)
    recorder.communicate(b"stop\npublished\n", timeout=30)
    with closing(sqlite3.connect(target)) as db:
        db.row_factory = sqlite3.Row
        assert db.execute("SELECT count(DISTINCT device_id) FROM sample WHERE power_w IS NOT NULL").fetchone()[0] == 4
        row = db.execute("SELECT *, (last_at_ms - started_at_ms) / 1000.0 AS wall_s FROM recorder").fetchone()
        return {name: row[name] for name in ("cpu_s", "wall_s", "memory_bytes", "worst_late_s")}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--seconds",
        type=float,
        default=40,
        help="how long each load lasts (default 40; at least 15: the busy share is read every 5 s)",
    )
    parser.add_argument("--only-cost", action="store_true", help="leave the known loads out")
    args = parser.parse_args()
    if args.seconds < 15 and not args.only_cost:
        parser.error("--seconds: at least 15, since the busy share is read every 5 s")
    try:
        pynvml.nvmlInit()
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(0))
    except pynvml.NVMLError as error:
        print(f"no NVIDIA GPU to measure on: {error}", file=sys.stderr)
        return 3
    print(f"telemetry on one {name}, driver {pynvml.nvmlSystemGetDriverVersion()}")
    report = Report()
    folder = Path(tempfile.mkdtemp(prefix="badcjobs-bench-"))
    try:
        if not args.only_cost:
            judge_accuracy(report, folder, args.seconds)
        judge_cost(report)
        judge_recorder(report, folder, args.seconds)
    finally:
        shutil.rmtree(folder)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())
