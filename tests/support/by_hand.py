"""Work as someone does it without badcjobs: processes of ``hawkears analyze`` side by side, with CUDA MPS or without.

Also the audio for them: nights of noise and chirps. Only the standard library is needed.
"""

import csv
import math
import random
import subprocess
import tempfile
import time
import wave
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

MPS = "nvidia-cuda-mps-control"
CACHES = ("NUMBA_CACHE_DIR", "MPLCONFIGDIR", "CUDA_CACHE_PATH", "TORCHINDUCTOR_CACHE_DIR", "PYTORCH_KERNEL_CACHE_PATH")
RATE_HZ = 44_100
_CLI = "import sys; sys.argv[0] = 'hawkears'; from hawkears.cli import cli; cli()"
_POOL_S, _CHIRPS, _STRETCH_S = 30, 15, 10
Found = tuple[int, int, str, float]  # start_ms, end_ms, label, score


class HandSet(NamedTuple):
    """So many processes with so many threads each."""

    processes: int
    threads: int
    mps: bool = False

    def __str__(self) -> str:
        return f"by hand, {self.processes} × {self.threads}{', MPS' if self.mps else ''}"


def parse_set(text: str) -> HandSet:
    """Read 6x1 or 6x1+mps."""
    numbers, _, more = text.partition("+")
    processes, threads = map(int, numbers.split("x"))
    return HandSet(processes, threads, more == "mps")


class Meter:
    """Measures seconds and, if a device has a counter, joules between two moments."""

    seconds, joules = 0.0, None

    def __init__(self, device: str) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            by_number = device.isdecimal()
            find = pynvml.nvmlDeviceGetHandleByIndex if by_number else pynvml.nvmlDeviceGetHandleByUUID
            handle = find(int(device) if by_number else device)
            self._read = lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
            self._read()
        except Exception:  # there is no device, or it has no counter
            self._read = lambda: None

    def start(self) -> None:
        self._joules, self._began_s = self._read(), time.monotonic()

    def stop(self) -> None:
        self.seconds, joules = time.monotonic() - self._began_s, self._read()
        self.joules = None if self._joules is None else joules - self._joules


@dataclass
class HawkEars:
    """A HawkEars as tests/hawkears/install makes it, and the environment of its processes."""

    folder: Path
    environ: dict[str, str]
    on_gpu: bool

    @property
    def python(self) -> Path:
        return self.folder / "venv" / "bin" / "python"

    @property
    def root(self) -> Path:
        return self.folder / "root"

    def analyze(self, way: HandSet, files: Sequence[Path], folder: Path, meter: Meter) -> None:
        """Deal the recordings out in turn, and measure until the last process has ended."""
        shares = [files[number :: way.processes] for number in range(min(way.processes, len(files)))]
        for number, share in enumerate(shares):
            (folder / f"in{number}").mkdir(parents=True)
            for path in share:
                (folder / f"in{number}" / path.name).hardlink_to(path)
        meter.start()
        with ExitStack() as stack:
            environ = {**self.environ, "OMP_NUM_THREADS": "1"}
            if way.mps:
                environ |= stack.enter_context(mps_daemon(environ, clients=len(shares)))
            programs = [self._start(way.threads, number, folder, environ) for number in range(len(shares))]
            for program in programs:
                program.wait()
            meter.stop()
        # Its exit code does not tell: whatever goes wrong, it is 0.
        done = {path.name.removesuffix("_scores.txt") for path in folder.glob("out*/*_scores.txt")}
        said = [path.read_text() for path in sorted(folder.glob("log*"))]
        if missing := {path.stem for path in files} - done:
            raise SystemExit(f"{way}: HawkEars left out {len(missing)} recordings; it said:\n{said[0][-2000:]}")
        if self.on_gpu and not all("Using CUDA" in text for text in said):
            raise SystemExit(f"{way}: HawkEars did not use the GPU; it said:\n{said[0][-2000:]}")

    def _start(self, threads: int, number: int, folder: Path, environ: dict[str, str]) -> subprocess.Popen[bytes]:
        words = [self.python, "-c", _CLI, "analyze", folder / f"in{number}", "--output", folder / f"out{number}"]
        with (folder / f"log{number}").open("w") as log:
            options = ["--rtype", "csv+audacity", "--threads", str(threads)]
            return subprocess.Popen([*map(str, words), *options], cwd=self.root, env=environ, stdout=log, stderr=log)


def read_scores(folder: Path) -> dict[str, list[Found]]:
    """Return what each recording has in the tables that HawkEars left."""
    found: dict[str, list[Found]] = {}
    for path in folder.glob("out*/scores.csv"):
        with path.open() as table:
            for row in csv.DictReader(table):
                start_ms, end_ms = (round(float(row[name]) * 1000) for name in ("start_time", "end_time"))
                found.setdefault(row["recording"], []).append((start_ms, end_ms, row["name"], float(row["score"])))
    return found


class NoMps(Exception):
    """The daemon did not start, or not all processes are its clients: these would share the GPU as without it."""


@contextmanager
def mps_daemon(environ: dict[str, str], clients: int) -> Iterator[dict[str, str]]:
    """Run NVIDIA's daemon with folders of its own; yield the variables of its clients, and see that all came."""
    with tempfile.TemporaryDirectory(prefix="mps-", dir="/tmp", ignore_cleanup_errors=True) as folder:  # a short path
        own = {f"CUDA_MPS_{name}_DIRECTORY": f"{folder}/{name.lower()}" for name in ("PIPE", "LOG")}
        for path in own.values():
            Path(path).mkdir()
        # The daemon gives the devices that it sees new numbers: it sees all, and its clients choose.
        daemon = {name: value for name, value in {**environ, **own}.items() if name != "CUDA_VISIBLE_DEVICES"}
        said = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        started = subprocess.run([MPS, "-d"], env=daemon, check=False, **said)
        if started.returncode:
            raise NoMps(f"{MPS} -d: exit code {started.returncode}: {started.stdout.strip()}")
        try:
            yield own
        finally:
            subprocess.run([MPS], input="quit\n", env=daemon, timeout=60, check=False, **said)
        logs = [path.read_text(errors="replace") for path in Path(folder, "log").glob("*.log")]
        if (came := max((text.lower().count("new client") for text in logs), default=0)) < clients:
            raise NoMps(f"{came} of {clients} processes were connected; its logs end with {[t[-500:] for t in logs]}")


class Nights:
    """Recordings of 10-second stretches, each from anywhere in half a minute of noise with chirps."""

    def __init__(self, folder: Path) -> None:
        self._folder, chance = folder, random.Random(1)
        self._pool = array("h", array("b", chance.randbytes(_POOL_S * RATE_HZ)))
        for _ in range(_CHIRPS):
            start, length = chance.randrange((_POOL_S - 1) * RATE_HZ), chance.randrange(RATE_HZ // 10, RATE_HZ)
            low_hz, high_hz = chance.uniform(1500, 9000), chance.uniform(1500, 9000)
            for n in range(length):
                turns = (low_hz + (high_hz - low_hz) * n / length / 2) * n / RATE_HZ
                loud = 4500 * math.sin(math.pi * n / length) ** 2
                self._pool[start + n] += round(loud * math.sin(2 * math.pi * turns))

    def files(self, count: int, seconds: float, distinct: int) -> list[Path]:
        """Return so many recordings; only a few are really written, the others are links to them."""
        folder = self._folder / f"{seconds:g}s"
        folder.mkdir(exist_ok=True)
        paths = [folder / f"r{number:05d}.wav" for number in range(count)]
        for number, path in enumerate(paths):
            if not path.exists() and number < distinct:
                self._write(path, seconds, random.Random(number))
            elif not path.exists():
                path.hardlink_to(paths[number % distinct])  # HawkEars would follow a symbolic one to its name
        return paths

    def _write(self, path: Path, seconds: float, chance: random.Random) -> None:
        left, stretch = round(seconds * RATE_HZ), _STRETCH_S * RATE_HZ
        with wave.open(str(path), "wb") as file:
            file.setparams((1, 2, RATE_HZ, 0, "NONE", ""))
            while left:
                start = chance.randrange(len(self._pool) - stretch)
                part = self._pool[start : start + min(left, stretch)]
                file.writeframes(part.tobytes())
                left -= len(part)


def cut(source: Path | str, start_ms: int, end_ms: int | None, target: Path) -> None:
    """Write a part of a recording; without an end, all the rest."""
    with wave.open(str(source)) as audio, wave.open(str(target), "wb") as file:
        first = round(start_ms * audio.getframerate() / 1000)
        last = audio.getnframes() if end_ms is None else round(end_ms * audio.getframerate() / 1000)
        file.setparams(audio.getparams())
        audio.setpos(first)
        file.writeframes(audio.readframes(last - first))
