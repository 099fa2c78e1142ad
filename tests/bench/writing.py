"""What writing costs: CPU, bytes and fsyncs of the store, in both modes.

    python tests/bench/writing.py            four minutes
    python tests/bench/writing.py --small    seconds

fsyncs are counted in a real run, by a library that the C compiler makes.
"""

import math
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rooms.model import HostReading, Reading, TaskKey, publish_interval_s
from rooms.store import LiveHalf, publish
from support.audio import make_wav
from support.file_calls import FileCalls
from support.measured import Promises, main, measure
from support.source_files import rows
from support.task_files import START_MS, LiveTask

KEY = TaskKey("4821", 7, 0, "bench")
DEVICES, TICK_S, BASE_INTERVAL_S = 8, 0.1, 30.0
MODES = ("local", "shared")


def readings(tick: int) -> list[tuple[int, Reading]]:
    """Return what eight busy devices say: numbers that move, as real ones do."""
    every = Reading(
        memory_used_bytes=11_000_000_000 + 4096 * (tick % 977), temperature_c=60 + tick % 9, memory_clock_mhz=877,
        sm_clock_mhz=1380 + 15 * (tick % 5), energy_j=1e7 + 25.0 * tick if tick % 50 == 0 else None,
        memory_utilization_percent=30 + tick % 25, throttle_reasons=tick % 3,
    )  # fmt: skip
    loads = [(80 + (tick * 7 + n) % 21, 220 + round(30 * math.sin(tick / 9 + n), 3)) for n in range(DEVICES)]
    return [(1_000_003 * (n + 1), replace(every, utilization_percent=busy, power_w=power_w))
            for n, (busy, power_w) in enumerate(loads)]  # fmt: skip


def write(live: LiveTask, tick: int) -> None:
    with live.recorder.batch():
        host = HostReading(37.5, 9_000_000_000 + 4096 * tick, 2**36)
        live.recorder.write_tick(START_MS + 100 * tick, readings(tick), host)


def publish_once(live: LiveTask, *, shared: bool) -> int:
    """Publish as a run does in this mode; return the size of the file."""
    recorder = LiveHalf(live.paths[1])
    if shared:
        live.recorder.snapshot(live.folder / "snapshot.sqlite")
        recorder = LiveHalf(live.folder / "snapshot.sqlite", "sealed")
    return publish([live.wrapper.half, recorder], live.folder / "published.sqlite", workplace=live.folder)


def measure_cpu(promises: Promises, folder: Path, seconds: float, hours: float) -> None:
    """Write at 8 devices × 10 Hz in real time, and publish the file of some hours: the share of one core."""
    ticks = int(seconds / TICK_S)
    for mode in MODES:
        with closing(LiveTask(folder / "cpu" / mode, KEY, shared=mode == "shared")) as live:
            start_s, used_s = time.monotonic(), time.process_time()
            for number in range(ticks):
                write(live, number)
                time.sleep(max(0.0, start_s + (number + 1) * TICK_S - time.monotonic()))
            writing = 100 * (time.process_time() - used_s) / (time.monotonic() - start_s)
            with live.recorder.batch():
                for number in range(ticks, int(hours * 3600 / TICK_S)):
                    live.recorder.write_tick(START_MS + 100 * number, readings(number), None)
            used_s = time.process_time()
            size = publish_once(live, shared=mode == "shared")
            publishing = 100 * (time.process_time() - used_s) / publish_interval_s(size, BASE_INTERVAL_S)
        promises.just(f"{mode}: writing 8 devices at 10 Hz", writing, "% core")
        promises.just(f"{mode}: publishing {size / 1e6:.1f} MB", publishing, "% core")
        promises.at_most(f"{mode}: both", writing + publishing, 2, "% core")


def measure_size(promises: Promises, folder: Path, ticks: int) -> None:
    """Write and publish an hour at 1 Hz, or a part of it."""
    with closing(LiveTask(folder / "size", KEY)) as live:
        empty = publish_once(live, shared=False)
        for number in range(ticks):
            write(live, 10 * number)
        sample_bytes = (publish_once(live, shared=False) - empty) / (ticks * DEVICES)
    promises.at_most("a sample", sample_bytes, 90, "bytes", is_time=False)
    promises.at_most("an hour of one GPU at 1 Hz", sample_bytes * 3600 / 1e6, 0.35, "MB", is_time=False)


def count_fsyncs(folder: Path, mode: str, seconds: float) -> Counter[str]:
    """Run a task of 4 devices at 1 Hz, a chunk per device every 2 s, published every 30 s; count by file."""
    (folder / "tmp").mkdir(parents=True)
    audio, manifest = make_wav(folder / "a.wav", 0.6, 1000, tone_hz=100), folder / "manifest.csv"
    manifest.write_text(rows(*(f"r{number},c,{audio},0,600,0,," for number in range(4 * round(seconds / 2)))))
    calls = FileCalls(folder, folder / "calls")
    words = ["run", manifest, "--out", folder / "run", "--engine", "demo", "--engine-arg=--burn-s=2", "--simulate", 4]
    words += [
        "--workers-per-gpu=1",
        f"--config=run.live_mode={mode}",
        f"--config=run.publish_every_s={BASE_INTERVAL_S}",
    ]
    measure(*words, cwd=folder, TMPDIR=str(folder / "tmp"), **calls.environ)
    found: Counter[str] = Counter()
    for (call, path), many in calls.count().items():
        found[path.name.partition(".sqlite")[0]] += many * (call == "sync")
    return found


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Measure processor time, size and fsyncs, on a node-local disk and in the mode for shared filesystems."""
    seconds = 2 if small else 60
    print(f"writing: 8 devices at 10 Hz, and fsyncs of a run of {seconds} s of work")
    measure_cpu(promises, folder, 0.3 if small else seconds, 0.01 if small else 1.0)
    measure_size(promises, folder, 240 if small else 3600)
    with ThreadPoolExecutor() as pool:
        local, shared = pool.map(lambda mode: count_fsyncs(folder / f"fsync-{mode}", mode, seconds), MODES)
    # Opening, closing and publishing a file costs some, a commit on a node-local disk none.
    promises.at_most("local: all", local.total(), 25 * (1 + seconds / BASE_INTERVAL_S), "", is_time=False)
    for half in ("recorder", "wrapper"):
        promises.at_most(f"local: {half}, against shared", local[half] / shared[half], 0.5, "×", is_time=False)
    promises.just("shared: all", shared.total(), "")


if __name__ == "__main__":
    main(__doc__, bench)
