"""What writing costs: CPU, bytes and fsyncs of the store, in both modes.

python tests/bench/writing.py --seconds 60     (four minutes)
python tests/bench/writing.py --seconds 5      (a quick look)
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from rooms.model import Allocation, HostReading, Reading, TaskKey, publish_interval_s
from rooms.store import LiveHalf, TaskWriter, publish
from rooms.telemetry import TelemetryWriter

KEY = TaskKey("4821", 7, 0, "bench")
DEVICES, TICK_S, BASE_INTERVAL_S = 8, 0.1, 30.0
MODES = ("local", "shared")
HEADER = ["recording_id", "chunk_id", "source_path", "start_ms", "end_ms", "overlap_ms", "sha256", "notes"]

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

    def tick(self, number: int, told: list[tuple[int, Reading]]) -> None:
        with self.recorder.batch():
            self.recorder.write_tick(
                1_800_000_000_000 + 100 * number, told, HostReading(37.5, 9_000_000_000 + 4096 * number, 2**36)
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


def measure_cpu(folder: Path, seconds: float) -> dict[str, float]:
    """Write at 8 devices × 10 Hz in real time; return the share of one core, in percent."""
    found = {}
    ticks = max(10, int(seconds / TICK_S))
    told = [readings(number) for number in range(ticks)]
    for mode, files in each_mode(folder):
        start_s, used_s = time.monotonic(), time.process_time()
        for number in range(ticks):
            files.tick(number, told[number])
            time.sleep(max(0.0, start_s + (number + 1) * TICK_S - time.monotonic()))
        found[mode] = 100 * (time.process_time() - used_s) / (time.monotonic() - start_s)
    return found


def measure_publishing(folder: Path, hours: float) -> dict[str, dict[str, float]]:
    """Publish the file of some hours at 8 devices × 10 Hz; return seconds, size and the share of one core."""
    found = {}
    for mode, files in each_mode(folder):
        with files.recorder.batch():
            for number in range(int(hours * 3600 / TICK_S)):
                files.recorder.write_tick(1_800_000_000_000 + 100 * number, readings(number), None)
        start_s, used_s = time.monotonic(), time.process_time()
        size = files.publish()
        used_s, wall_s = time.process_time() - used_s, time.monotonic() - start_s
        share = 100 * used_s / publish_interval_s(size, BASE_INTERVAL_S)
        found[mode] = {"mb": size / 1e6, "seconds": wall_s, "percent_of_a_core": share}
    return found


def measure_size(folder: Path, ticks: int) -> dict[str, float]:
    """Write an hour at 1 Hz (or a part of it), publish it; return bytes per sample and MB per GPU-hour."""
    (folder / "size").mkdir()
    with closing(Files(folder / "size", shared=False)) as files:
        empty = files.publish()
        for number in range(ticks):
            files.tick(10 * number, readings(number))
        size = files.publish() - empty
    return {"bytes_per_sample": size / (ticks * DEVICES), "mb_per_gpu_hour": size / (ticks * DEVICES) * 3600 / 1e6}


# --- fsyncs, counted in a real run ------------------------------------------------------------------------------------


def build_counter(folder: Path) -> Path | None:
    """Compile the library that counts; None: there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    (folder / "counter.c").write_text(COUNTER)
    library = folder / "counter.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, folder / "counter.c", "-ldl"], check=True)
    return library


def make_work(folder: Path, chunks: int) -> Path:
    with wave.open(str(folder / "a.wav"), "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(1000)
        sound.writeframes(bytes(1200))
    with (folder / "manifest.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(HEADER)
        lines.writerows([f"r{number}", "c", folder / "a.wav", 0, 600, 0, "", ""] for number in range(chunks))
    return folder / "manifest.csv"


def count_fsyncs(folder: Path, counter: Path, seconds: float) -> dict[str, dict[str, float]]:
    """Run a task of 4 devices at 1 Hz, a chunk per device every 2 s, published every 30 s; return fsyncs a minute."""
    found = {}
    for mode in MODES:
        place = folder / f"fsync-{mode}"
        (place / "tmp").mkdir(parents=True)
        calls = place / "fsyncs"
        manifest = make_work(place, max(4, 4 * round(seconds / 2)))
        env = {**os.environ, "LD_PRELOAD": str(counter), "FSYNC_LOG": str(calls), "TMPDIR": str(place / "tmp")}
        words = ["run", manifest, "--out", place / "run", "--engine", "demo", "--engine-arg=--burn-s=2"]
        words += [
            "--simulate",
            4,
            "--config",
            f"run.live_mode={mode}",
            "--config",
            f"run.publish_every_s={BASE_INTERVAL_S}",
        ]
        start_s = time.monotonic()
        subprocess.run([sys.executable, "-m", "badcjobs", *map(str, words)], env=env, check=True, capture_output=True)
        minutes = (time.monotonic() - start_s) / 60
        lines = calls.read_text().splitlines() if calls.exists() else []
        found[mode] = {who: many / minutes for who, many in Counter(map(whose, lines)).items()}
        found[mode]["minutes"] = minutes
    return found


def whose(path: str) -> str:
    """Say for whom a file was synced."""
    name = Path(path).name
    for half in ("recorder", "wrapper"):
        if name.startswith(f"{half}.sqlite"):
            return half
    return "live folder" if name.startswith((".live-", "badcjobs-")) else "publication"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0, help="length of each part that runs in real time")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        figures: dict[str, Any] = {
            "cpu_percent": measure_cpu(folder / "cpu", args.seconds),
            "publishing": measure_publishing(folder / "publishing", min(1.0, args.seconds / 30)),
            "size": measure_size(folder, int(min(3600, 120 * args.seconds))),
        }
        counter = build_counter(folder)
        figures["fsyncs_per_minute"] = None if counter is None else count_fsyncs(folder, counter, args.seconds)
    print(json.dumps(figures, indent=2) if args.json else table(figures))


def table(figures: dict[str, Any]) -> str:
    """Return the figures as a small table."""
    cpu, publishing, size, syncs = figures.values()
    lines = [f"{'':44}{'local':>10}{'shared':>10}"]

    def add(what: str, form: str, values: list[float]) -> None:
        lines.append(f"{what:44}" + "".join(f"{form.format(value):>10}" for value in values))

    add("CPU, 8 devices × 10 Hz, % of a core", "{:.2f}", [cpu[mode] for mode in MODES])
    add("  and of publishing, % of a core", "{:.2f}", [publishing[mode]["percent_of_a_core"] for mode in MODES])
    add("one publication, s", "{:.2f}", [publishing[mode]["seconds"] for mode in MODES])
    add("  of a file of MB", "{:.1f}", [publishing[mode]["mb"] for mode in MODES])
    for who in ("recorder", "wrapper", "publication", "live folder"):
        if syncs is not None:
            add(f"fsyncs a minute: {who}", "{:.1f}", [syncs[mode].get(who, 0.0) for mode in MODES])
    lines.append(
        f"bytes per sample: {size['bytes_per_sample']:.0f}, MB per GPU-hour at 1 Hz: {size['mb_per_gpu_hour']:.2f}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
