"""What writing costs: CPU, bytes and fsyncs of the store, in both modes.

    python tests/bench/writing.py            four minutes
    python tests/bench/writing.py --small    seconds

fsyncs are counted in a real run, by a library that the C compiler makes.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
import wave
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rooms.model import Allocation, HostReading, Reading, TaskKey, publish_interval_s
from rooms.store import LiveHalf, TaskWriter, publish
from rooms.telemetry import TelemetryWriter
from support.measured import Promises, main

KEY = TaskKey("4821", 7, 0, "bench")
DEVICES, TICK_S, BASE_INTERVAL_S = 8, 0.1, 30.0
MODES = ("local", "shared")
HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"

COUNTER = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>
static void note(int fd) {
    char link[64], path[4096], line[4200];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    int log = open(getenv("FSYNC_LOG"), O_WRONLY | O_APPEND | O_CREAT, 0644);
    if (log < 0) return;
    int size = snprintf(line, sizeof line, "%s\n", path);
    if (write(log, line, size) < 0) {}
    close(log);
}
int fsync(int fd) { note(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd); }
int fdatasync(int fd) { note(fd); return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd); }
"""


def readings(tick: int) -> list[tuple[int, Reading]]:
    """Return what eight busy devices say: numbers that move, as real ones do."""
    return [
        (
            1_000_003 * (device + 1),
            Reading(
                utilization_percent=80 + (tick * 7 + device) % 21,
                memory_utilization_percent=30 + (tick + device) % 25,
                memory_used_bytes=11_000_000_000 + 4096 * (tick % 977),
                temperature_c=60 + tick % 9,
                power_w=220 + round(30 * math.sin(tick / 9 + device), 3),
                energy_j=1e7 + 25.0 * tick if tick % 50 == 0 else None,
                sm_clock_mhz=1380 + 15 * (tick % 5),
                memory_clock_mhz=877,
                throttle_reasons=tick % 3,
            ),
        )
        for device in range(DEVICES)
    ]


class Files:
    """The two live files of a task, and where they are published."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self.folder, self.shared = folder, shared
        self.target = folder / "published.sqlite"
        self.wrapper = TaskWriter(folder / "wrapper.sqlite", KEY, shared=shared)
        self.wrapper.begin_task(
            Allocation(False, "4821", "bench"), started_at_ms=0, pid=1, version="0", engine="demo", telemetry=True
        )
        self.recorder = TelemetryWriter(folder / "recorder.sqlite", KEY.task_id, shared=shared)

    def tick(self, number: int, found: list[tuple[int, Reading]]) -> None:
        with self.recorder.batch():
            self.recorder.write_tick(
                1_800_000_000_000 + 100 * number, found, HostReading(37.5, 9_000_000_000 + 4096 * number, 2**36)
            )

    def publish(self) -> int:
        if not self.shared:
            return publish([self.wrapper.half, self.folder / "recorder.sqlite"], self.target, workplace=self.folder)
        self.recorder.snapshot(self.folder / "snapshot.sqlite")
        halves = [self.wrapper.half, LiveHalf(self.folder / "snapshot.sqlite", "sealed")]
        return publish(halves, self.target, workplace=self.folder)

    def close(self) -> None:
        self.wrapper.close()
        self.recorder.close()


def each_mode(folder: Path) -> Iterator[tuple[str, Files]]:
    for mode in MODES:
        (folder / mode).mkdir(parents=True)
        with closing(Files(folder / mode, shared=mode == "shared")) as files:
            yield mode, files


def measure_cpu(promises: Promises, folder: Path, seconds: float, hours: float) -> None:
    """Write at 8 devices × 10 Hz in real time, and publish the file of some hours: the share of one core."""
    ticks = max(10, int(seconds / TICK_S))
    prepared = [readings(number) for number in range(ticks)]
    for mode, files in each_mode(folder / "cpu"):
        start_s, used_s = time.monotonic(), time.process_time()
        for number in range(ticks):
            files.tick(number, prepared[number])
            time.sleep(max(0.0, start_s + (number + 1) * TICK_S - time.monotonic()))
        writing = 100 * (time.process_time() - used_s) / (time.monotonic() - start_s)
        with files.recorder.batch():
            for number in range(ticks, int(hours * 3600 / TICK_S)):
                files.recorder.write_tick(1_800_000_000_000 + 100 * number, readings(number), None)
        used_s = time.process_time()
        size = files.publish()
        publishing = 100 * (time.process_time() - used_s) / publish_interval_s(size, BASE_INTERVAL_S)
        promises.just(f"{mode}: writing 8 devices at 10 Hz", writing, "% core")
        promises.just(f"{mode}: publishing {size / 1e6:.1f} MB", publishing, "% core")
        promises.at_most(f"{mode}: both", writing + publishing, 2, "% core", is_time=False)


def measure_size(promises: Promises, folder: Path, ticks: int) -> None:
    """Write and publish an hour at 1 Hz, or a part of it."""
    (folder / "size").mkdir()
    with closing(Files(folder / "size", shared=False)) as files:
        empty = files.publish()
        for number in range(ticks):
            files.tick(10 * number, readings(number))
        sample_bytes = (files.publish() - empty) / (ticks * DEVICES)
    promises.at_most("a sample", sample_bytes, 90, "bytes", is_time=False)
    promises.at_most("an hour of one GPU at 1 Hz", sample_bytes * 3600 / 1e6, 0.35, "MB", is_time=False)


# --- fsyncs, counted in a real run ------------------------------------------------------------------------------------


def build_counter(folder: Path) -> Path:
    """Compile the library that counts."""
    (folder / "counter.c").write_text(COUNTER)
    library = folder / "counter.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, folder / "counter.c", "-ldl"], check=True)
    return library


def make_work(folder: Path, chunks: int) -> Path:
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setparams((1, 2, 1000, 600, "NONE", ""))
        sound.writeframes(bytes(1200))
    rows = [f"r{number},c,{folder / 'a.wav'},0,600,0,," for number in range(chunks)]
    (folder / "manifest.csv").write_text("\n".join([HEADER, *rows]) + "\n")
    return folder / "manifest.csv"


def count_fsyncs(folder: Path, counter: Path, mode: str, seconds: float) -> Counter[str]:
    """Run a task of 4 devices at 1 Hz, a chunk per device every 2 s, published every 30 s."""
    (folder / "tmp").mkdir(parents=True)
    calls = folder / "fsyncs"
    manifest = make_work(folder, max(4, 4 * round(seconds / 2)))
    env = {**os.environ, "LD_PRELOAD": str(counter), "FSYNC_LOG": str(calls), "TMPDIR": str(folder / "tmp")}
    words = ["run", manifest, "--out", folder / "run", "--engine", "demo", "--engine-arg=--burn-s=2", "--simulate", 4]
    words += [f"--config=run.live_mode={mode}", f"--config=run.publish_every_s={BASE_INTERVAL_S}"]
    subprocess.run([sys.executable, "-m", "badcjobs", *map(str, words)], env=env, check=True, capture_output=True)
    return Counter(map(whose, calls.read_text().splitlines()))


def whose(path: str) -> str:
    """Return which part of badcjobs a file belongs to."""
    name = Path(path).name
    for half in ("recorder", "wrapper"):
        if name.startswith(f"{half}.sqlite"):
            return half
    return "live folder" if name.startswith((".live-", "badcjobs-")) else "publication"


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Measure processor time, size and fsyncs, on a node-local disk and in the mode for shared filesystems."""
    seconds = 2 if small else 60
    print(f"writing: {seconds} s of 8 devices at 10 Hz")
    measure_cpu(promises, folder, seconds, 0.05 if small else 1.0)
    measure_size(promises, folder, 240 if small else 3600)
    counter = build_counter(folder)
    local, shared = (count_fsyncs(folder / f"fsync-{mode}", counter, mode, seconds) for mode in MODES)
    print(f"writing: fsyncs of a run of {seconds} s of work")
    # Opening, closing and publishing a file costs some, a commit on a node-local disk none.
    published = 1 + seconds / BASE_INTERVAL_S
    promises.at_most("local: all", local.total(), 25 * published, "", is_time=False)
    for half in ("recorder", "wrapper"):
        promises.at_most(f"local: {half}, against shared", local[half] / shared[half], 0.5, "×", is_time=False)
    promises.just("shared: all", shared.total(), "")


if __name__ == "__main__":
    main(__doc__, bench)
