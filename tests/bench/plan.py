"""How fast ``badcjobs plan`` reads a manifest and a folder of WAV headers, and how much memory that takes.

python tests/bench/plan.py            1,000,000 rows and 100,000 files: about a minute
python tests/bench/plan.py --small    seconds
"""

import json
import struct
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from support.measured import Promises, main, measure
from support.source_files import HEADER

ROWS, FILES = 1_000_000, 100_000
MOST_S, MOST_WRITE_S, MOST_MB = 15.0, 20.0, 300.0  # for a million rows
START_S = 3.0  # of them before the first row


def write_manifest(path: Path, rows: int) -> Path:
    """Write a manifest of chunks of 30 s, twenty of each recording."""
    with path.open("w") as file:
        file.write(f"{HEADER}\n")
        for row in range(rows):
            recording, number = divmod(row, 20)
            name, start_ms = f"STATION-{recording:07}_20230501_043000", number * 30_000
            place = f"area{recording // 100_000:03}/{name}.wav"
            file.write(f"{name},{name}_{number:03},{place},{start_ms},{start_ms + 30_000},0,{row:064x},\n")
    return path


def write_wavs(folder: Path, files: int) -> Path:
    """Write short WAV files of a minute at 10 Hz, a thousand to a folder."""
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, 10, 10, 1, 8)
    content = struct.pack("<4sI4s", b"RIFF", 636, b"WAVE") + form + struct.pack("<4sI", b"data", 600) + b"\x80" * 600
    for number in range(files):
        path = folder / f"area{number // 1000:03}" / f"STATION-{number:06}_20230501_043000.wav"
        if number % 1000 == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return folder


def bench(folder: Path, promises: Promises, small: bool) -> None:
    """Measure both kinds of source, with and without a plan on disk."""
    rows, files = (ROWS // 100, FILES // 500) if small else (ROWS, FILES)

    def promised(most_s: float) -> float:
        return START_S + (most_s - START_S) * rows / ROWS  # Python's own start does not shrink with the rows

    print(f"plan: a manifest of {rows:,} rows")
    manifest = write_manifest(folder / "manifest.csv", rows)
    options = ("--rate", 400, "--gpus-per-task", 4, "--json")
    read = measure("plan", manifest, *options, cwd=folder)
    promises.at_most("read and planned", read.seconds, promised(MOST_S), "s")
    promises.at_most("peak memory", read.memory_mb, MOST_MB, "MB", is_time=False)
    promises.just("rows per second", rows / read.seconds, "")
    written = measure("plan", manifest, *options, "--out", folder / "plan", cwd=folder)
    promises.at_most("the same with --out", written.seconds, promised(MOST_WRITE_S), "s")
    promises.at_most("peak memory", written.memory_mb, MOST_MB, "MB", is_time=False)
    assert json.loads(written.stdout)["source"] == json.loads(read.stdout)["source"]
    print(f"plan: a folder of {files:,} WAV files")
    wavs = write_wavs(folder / "wavs", files)
    for name, more in {"one chunk each": (), "cut into chunks of 15 s": ("--", "--chunk-length", 15)}.items():
        headers = measure("plan", wavs, *options, *more, cwd=folder)
        promises.just(f"headers per second, {name}", files / headers.seconds, "")
        promises.at_most("peak memory", headers.memory_mb, MOST_MB, "MB", is_time=False)


if __name__ == "__main__":
    main(__doc__, bench)
