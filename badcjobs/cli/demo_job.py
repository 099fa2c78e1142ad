"""The demo: the whole path on this machine, from audio that it makes to the merged summary and the page."""

from __future__ import annotations

import csv
import io
import math
import random
import wave
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from badcjobs.cluster.local import emulate_order
from badcjobs.cluster.local_array import LocalSettings
from badcjobs.errors import BadcjobsError
from badcjobs.model import ArrayOrder, StandIn
from badcjobs.paths import RunFolder
from badcjobs.report.job import FinishedJob
from badcjobs.task.startup import World

_RATE = 8000
_CHUNK_S = 30
_RECORDINGS, _CHUNKS_EACH = 6, 16
_TASKS, _GPUS, _GPUS_PER_TASK = 4, 4, 2
_BURN_S = 0.1


@dataclass(frozen=True, slots=True)
class Demo:
    """What the demo did."""

    command: str
    exit_code: int
    job: FinishedJob


def run_demo(out: Path, world: World, tell: Callable[[str], None] = lambda line: None) -> Demo:
    """Make audio, run a small array over it on simulated GPUs, merge and report; what is done there stays done."""
    out = world.cwd / out
    RunFolder(out).create()
    manifest = make_audio(out / "audio")
    arguments = (
        "run", str(manifest), f"--out={out}", "--engine", "demo", f"--engine-arg=--burn-s={_BURN_S}",
        "--simulate", str(_GPUS), "--interval", "0.5",
    )  # fmt: skip
    order = ArrayOrder(out, arguments, _TASKS, gpus_per_task=_GPUS_PER_TASK, time_min=10, name="demo")
    # Its devices are nobody's but its own: it waits for no other run, and keeps none off.
    done = emulate_order(order, LocalSettings(StandIn(simulate=_GPUS), lock=False), world, tell)
    if done.job is None or done.exit_code not in (0, 130):
        bad = next(row for row in done.rows if row.exit_code != 0)
        raise BadcjobsError(
            f"demo task {bad.index} ended with exit code {bad.exit_code}",
            why=bad.log.read_text(errors="replace").strip()[-2000:] if bad.log.exists() else bad.note,
            fix=f"cat {bad.log}",
        )
    return Demo("badcjobs " + " ".join(arguments), done.exit_code, done.job)


def make_audio(folder: Path) -> Path:
    """Write recordings of faint noise with loud chirps in them, always the same, and their manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    manifest = folder / "manifest.csv"
    chance = random.Random(2026)
    noise = array("h", (chance.randint(-400, 400) for _ in range(_RATE * _CHUNK_S)))
    with manifest.open("w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(
            ("recording_id", "chunk_id", "source_path", "start_ms", "end_ms", "overlap_ms", "sha256", "notes")
        )
        for recording in range(1, _RECORDINGS + 1):
            for chunk in range(_CHUNKS_EACH):
                name = f"site{recording:02d}_{chunk * _CHUNK_S:04d}.wav"
                write_chunk(folder / name, noise, chance)
                start_ms = chunk * _CHUNK_S * 1000
                path = (folder / name).absolute()
                site = f"site{recording:02d}"
                rows.writerow((site, f"{site}_c{chunk:03d}", path, start_ms, start_ms + 30_000, 0, "", ""))
    return manifest


def write_chunk(path: Path, noise: array[int], chance: random.Random) -> None:
    """Write one chunk: the noise, and now and then a chirp; a file that holds it already stays as it is.

    A second demo in the same folder would else find other audio than was done, and do it all again.
    """
    samples = array("h", noise)
    for _ in range(chance.randint(0, 3)):
        start = chance.randrange(0, len(samples) - _RATE)
        pitch = chance.uniform(0.9, 2.2)
        length = chance.randrange(_RATE // 5, _RATE // 2)
        samples[start : start + length] = array("h", (int(16_000 * math.sin(i * pitch)) for i in range(length)))
    made = io.BytesIO()
    with wave.open(made, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(_RATE)
        audio.writeframes(samples.tobytes())
    if not path.exists() or path.read_bytes() != made.getvalue():
        path.write_bytes(made.getvalue())
