"""How true the recorder's readings are, and what they cost, on a real NVIDIA GPU.

    python tests/bench/telemetry.py                 about 3 minutes
    python tests/bench/telemetry.py --seconds 20    quicker, coarser
    python tests/bench/telemetry.py --mps           the loads are clients of CUDA MPS

Known loads of 5, 30 and 100 %, kernels that spin for a share of every period, are recorded with ``badcjobs record``;
the busy share in the task database is compared with what the GPU's own events say, its energy with a power integral
taken apart from it, at 50 Hz, and the load's process must be among ours. Then, beside a load of 100 %, the recorder's
process is measured with four devices at 1 Hz. Exits with 1 when a promise was not kept, with 3 without a GPU.
"""

import argparse
import ctypes
import json
import os
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import pynvml

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.by_hand import mps_daemon
from support.measured import Promises

HERE = Path(__file__).parent
DUTIES = (5, 30, 100)
Points = Sequence[tuple[float, float]]  # ms, W
# Every thread looks at the GPU's clock until its time is over.
SPIN = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry spin(.param .u64 duration_ns)
{
    .reg .u64 %now, %end, %duration;
    .reg .pred %early;
    ld.param.u64 %duration, [duration_ns];
    mov.u64 %now, %globaltimer;
    add.u64 %end, %now, %duration;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}
\0"""
MULTIPROCESSOR_COUNT = 16
THREADS = 256
PERIOD_S = 0.1  # from the start of one kernel to that of the next


class Cuda:
    """As much of the driver as is needed to start a kernel and to time it."""

    def __init__(self) -> None:
        self._cuda = ctypes.CDLL("libcuda.so.1")
        device, count = ctypes.c_int(), ctypes.c_int()
        context, module, self._kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), 0)
        self._call("cuDeviceGetAttribute", ctypes.byref(count), MULTIPROCESSOR_COUNT, device)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self._call("cuCtxSetCurrent", context)
        self._call("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(SPIN))
        self._call("cuModuleGetFunction", ctypes.byref(self._kernel), module, b"spin")
        self._blocks = count.value
        self._events = [ctypes.c_void_p() for _ in range(2)]
        for event in self._events:
            self._call("cuEventCreate", ctypes.byref(event), 0)

    def spin(self, duration_ns: int) -> float:
        """Keep every multiprocessor busy; return how many seconds it really took."""
        before, after = self._events
        duration = ctypes.c_uint64(duration_ns)
        arguments = (ctypes.c_void_p * 1)(ctypes.addressof(duration))
        self._call("cuEventRecord", before, None)
        self._call("cuLaunchKernel", self._kernel, self._blocks, 1, 1, THREADS, 1, 1, 0, None, arguments, None)
        self._call("cuEventRecord", after, None)
        self._call("cuEventSynchronize", after)
        milliseconds = ctypes.c_float()
        self._call("cuEventElapsedTime", ctypes.byref(milliseconds), before, after)
        return milliseconds.value / 1000

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._cuda, name)(*arguments)
        if code != 0:
            raise OSError(f"{name} failed with {code}")


def run_load(duty_percent: float, seconds: float) -> dict[str, float]:
    """Spin for a share of every period; return what was true."""
    cuda = Cuda()
    cuda.spin(1_000_000)  # the first launch also loads the kernel
    started_ms, start_s = time.time() * 1000, time.monotonic()
    busy_s, periods = 0.0, 0
    while time.monotonic() - start_s < seconds:
        busy_s += cuda.spin(int(duty_percent / 100 * PERIOD_S * 1e9))
        periods += 1
        time.sleep(max(0.0, start_s + periods * PERIOD_S - time.monotonic()) if duty_percent < 100 else 0)
    took_s = time.monotonic() - start_s
    ended_ms, busy_percent = started_ms + took_s * 1000, 100 * busy_s / took_s
    return {"pid": os.getpid(), "started_ms": started_ms, "ended_ms": ended_ms, "busy_percent": busy_percent}


def integral_j(points: Points) -> float:
    """Return the energy of power readings, by trapezoids."""
    return sum((p1 + p2) / 2 * (t2 - t1) / 1000 for (t1, p1), (t2, p2) in pairwise(points))


@contextmanager
def power_meter() -> Iterator[list[tuple[float, float]]]:
    """Read the power of the first device by itself, 50 times a second."""
    handle, over = pynvml.nvmlDeviceGetHandleByIndex(0), threading.Event()
    points: list[tuple[float, float]] = []

    def read() -> None:
        while not over.wait(0.02):
            points.append((time.time() * 1000, pynvml.nvmlDeviceGetPowerUsage(handle) / 1000))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield points
    finally:
        over.set()
        thread.join()


def load_line(duty: float, seconds: float) -> list[str]:
    """Return the command that makes a known load."""
    return [sys.executable, __file__, f"--duty={duty}", f"--seconds={seconds}"]


def judge_load(folder: Path, promises: Promises, duty: int, seconds: float, environ: Mapping[str, str]) -> None:
    """Record a known load and compare it with what was true."""
    target = folder / f"duty{duty}.sqlite"
    record = [sys.executable, "-m", "badcjobs", "record", "--out", str(target), "--interval", "1", "--"]
    with power_meter() as points:
        done = subprocess.run(
            [*record, *load_line(duty, seconds)], check=True, capture_output=True, text=True, env=environ
        )
    truth: dict[str, float] = json.loads(done.stdout.splitlines()[0])
    columns = "SELECT at_ms, {0} FROM sample WHERE {0} IS NOT NULL ORDER BY at_ms"
    with closing(sqlite3.connect(f"file:{target}?immutable=1", uri=True)) as db:
        busy, counter, power = (
            db.execute(columns.format(metric)).fetchall() for metric in ("busy_percent", "energy_j", "power_w")
        )
        listed = db.execute("SELECT count(*) FROM process WHERE pid = ? AND ours", (truth["pid"],)).fetchone()
    windows = [(t2 - t1, share) for (t1, _), (t2, share) in pairwise(busy)
               if t1 >= truth["started_ms"] and t2 <= truth["ended_ms"]]  # fmt: skip
    recorded = sum(w * share for w, share in windows) / sum(w for w, _ in windows)
    promises.just(f"load of {duty} %: true busy share", truth["busy_percent"], "%")
    promises.just("  recorded", recorded, "%")
    promises.at_most("  difference", abs(recorded - truth["busy_percent"]), 2, "points")
    promises.at_least("  the load's process among ours", *listed, 1, "")
    (from_ms, first_j), (to_ms, last_j) = counter[0], counter[-1]
    metered = [point for point in points if from_ms <= point[0] <= to_ms]
    meter_j = integral_j(metered) * (to_ms - from_ms) / (metered[-1][0] - metered[0][0])
    promises.just("  energy, measured apart", meter_j, "J")
    integrated_j = integral_j([point for point in power if from_ms <= point[0] <= to_ms])
    for name, joules in (("counter", last_j - first_j), ("power", integrated_j)):
        promises.just(f"  energy by {name}, error", 100 * (joules / meter_j - 1), "%")
        promises.at_most("    without its sign", 100 * abs(joules / meter_j - 1), 2, "%")


def judge_recorder(folder: Path, promises: Promises, seconds: float) -> None:
    """Measure the recorder's process with four devices: this GPU, read four times over as if it were four."""
    # A start costs the same however long the recorder lives, and varies more than a minute of recording costs.
    start = sorted(measure_recorder(folder / f"start{n}", 5) for n in range(3))[1]
    whole = measure_recorder(folder / "whole", 5 + 2 * seconds)
    percent = 100 * (whole[0] - start[0]) / (whole[1] - start[1])
    promises.at_most("recorder at 1 Hz × 4 devices: of one core", percent, 0.5, "%")
    promises.just("  processor time to start, once", start[0], "s")
    promises.at_most("  most memory", whole[2] / 2**20, 45, "MiB", is_time=False)
    promises.just("  worst lateness", 1000 * whole[3], "ms")


def measure_recorder(folder: Path, seconds: float) -> tuple[float, float, int, float]:
    """Record for some time, with modules compiled as installed ones are; return what the recorder wrote of itself."""
    folder.mkdir()
    program = [sys.executable, str(HERE / "four_devices.py"), str(folder)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    recorder = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    time.sleep(seconds)
    recorder.communicate(b"stop\npublished\n", timeout=30)
    cost = "SELECT cpu_s, (last_at_ms - started_at_ms) / 1000.0, memory_bytes, worst_late_s FROM recorder"
    with closing(sqlite3.connect(folder / "recorder.sqlite")) as db:
        assert db.execute("SELECT count(DISTINCT device_id) FROM sample WHERE power_w IS NOT NULL").fetchone()[0] == 4
        found: tuple[float, float, int, float] = db.execute(cost).fetchone()
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40, help="how long each load lasts (default 40, at least 15)")
    parser.add_argument("--duty", type=float, help="only make a load of so many percent, and print what was true")
    parser.add_argument("--mps", action="store_true", help="the loads are clients of CUDA MPS")
    args = parser.parse_args()
    if args.duty is not None:
        print(json.dumps(run_load(args.duty, args.seconds)))
        return 0
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
    mps = mps_daemon(dict(os.environ), clients=len(DUTIES) + 1) if args.mps else nullcontext({})
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-") as folder, mps as variables:
        environ = {**os.environ, **variables}
        for duty in DUTIES:
            judge_load(Path(folder), promises, duty, args.seconds, environ)
        with subprocess.Popen(load_line(100, 3600), env=environ) as load:
            judge_recorder(Path(folder), promises, args.seconds)
            load.terminate()
    return 1 if promises.broken else 0


if __name__ == "__main__":
    sys.exit(main())
