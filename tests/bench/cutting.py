"""What cutting costs: stretches of a long recording, cut as a task does it, beside copies of files of the same bytes.

python tests/bench/cutting.py            an hour of audio in chunks of five minutes
python tests/bench/cutting.py --small    five minutes of audio: seconds
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
import wave
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import soundfile
from rooms.model import Chunk
from rooms.sources import AudioCutter
from rooms.workers import cut_chunk
from support.measured import Promises, main

RATE, ROUNDS = 48_000, 3


def make_recording(path: Path, minutes: int) -> None:
    """Write a recording as a field recorder does, 16 bits and one channel, and the same as FLAC."""
    second = bytes(range(256)) * (2 * RATE // 256)
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        for _ in range(minutes * 60):
            file.writeframesraw(second)
    with soundfile.SoundFile(path.with_suffix(".flac"), "w", RATE, 1, "PCM_16") as file:
        for _ in range(minutes * 60):
            file.buffer_write(second, dtype="int16")


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Cut and copy in turns, so that both see the same machine."""
    minutes, chunk_s = (5, 60) if small else (60, 300)
    print(f"cutting: {minutes} minutes of audio in chunks of {chunk_s} s")
    make_recording(folder / "night.wav", minutes)
    cutter, cut = AudioCutter(None), folder / "cut.wav"
    found_s: dict[str, list[float]] = defaultdict(list)
    for _ in range(ROUNDS):
        for start_ms in range(0, minutes * 60_000, chunk_s * 1000):
            for ending in ("flac", "wav"):
                source = str(folder / f"night.{ending}")
                chunk = Chunk("night", str(start_ms), "", source, start_ms, start_ms + chunk_s * 1000, is_cut=True)
                began_s = time.perf_counter()
                cut_chunk(chunk, cut, cutter)
                found_s[ending].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            shutil.copyfile(cut, folder / "copy.wav")
            found_s["copy"].append(time.perf_counter() - began_s)
    size_mb = cut.stat().st_size / 1e6
    median_s = {name: statistics.median(values) for name, values in found_s.items()}
    for name, seconds in median_s.items():
        promises.just(f"one chunk of {size_mb:.1f} MB: {name}", seconds * 1000, "ms")
    promises.at_most("cut from WAV, in times of a copy", median_s["wav"] / median_s["copy"], 3, "×")
    promises.at_least("cut from FLAC, seconds of audio per second", chunk_s / median_s["flac"], 500, "×")


if __name__ == "__main__":
    main(__doc__, bench)
