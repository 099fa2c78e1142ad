"""How fast ``badcjobs plan`` reads a manifest and a folder of WAV headers, and how much memory that takes.

    python tests/bench/plan.py                               1,000,000 rows and 100,000 files: about a minute
    python tests/bench/plan.py --rows 10000 --files 1000     seconds

Looks at files on a shared filesystem wait; here each waits on purpose, for --latency-ms, and is compared with as many
waits one after another.

Prints a table of what was measured, the promise and whether it was kept; exits with 1 when one was not.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from rooms.model import AudioHeader
from rooms.sources import WHOLE, open_sources, read_header
from support.measured import Promises, measure

ROWS, FILES = 1_000_000, 100_000
MOST_S, MOST_WRITE_S, MOST_MB = 15.0, 20.0, 300.0  # for a million rows
START_S = 3.0  # of them before the first row, on a machine that is busy
HEADER = "recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes"
_SECONDS, _RATE_HZ = 60, 10  # a recording of 600 bytes
_PER_FOLDER = 1000
MOST_SLOW, LEAST_TIMES = 5000, 5  # files that are looked at slowly; times as fast as one after another


def write_manifest(path: Path, rows: int, of_each: int = 20) -> Path:
    """Write a manifest of chunks of 30 s, so many of each recording, in folders of a hundred stations."""
    with path.open("w") as file:
        file.write(f"{HEADER}\n")
        for row in range(rows):
            recording, number = divmod(row, of_each)
            name, start_ms = f"STATION-{recording:07}_20230501_043000", number * 30_000
            place = f"area{recording // 100_000:03}/{name}.wav"
            file.write(f"{name},{name}_{number:03},{place},{start_ms},{start_ms + 30_000},0,{row:064x},\n")
    return path


def write_wavs(folder: Path, files: int) -> Path:
    """Write short WAV files whose header says a minute."""
    frames = _SECONDS * _RATE_HZ
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, _RATE_HZ, _RATE_HZ, 1, 8)
    content = b"".join(
        [struct.pack("<4sI4s", b"RIFF", 36 + frames, b"WAVE"), form, struct.pack("<4sI", b"data", frames)]
    )
    content += b"\x80" * frames
    for number in range(files):
        path = folder / f"area{number // _PER_FOLDER:03}" / f"STATION-{number:06}_20230501_043000.wav"
        if number % _PER_FOLDER == 0:
            path.parent.mkdir(parents=True)
        path.write_bytes(content)
    return folder


def run(folder: Path, rows: int, files: int, slack: float, latency_ms: float) -> int:
    """Measure both kinds of source, with and without --write."""
    promises = Promises(slack)

    def promised(most_s: float) -> float:
        return START_S + (most_s - START_S) * rows / ROWS  # Python's own start does not shrink with the rows

    print(f"plan: a manifest of {rows:,} rows")
    manifest = write_manifest(folder / "manifest.csv", rows)
    told = ("--rate", 400, "--gpus-per-task", 4, "--json")
    read = measure("plan", manifest, *told, cwd=folder)
    promises.at_most("read and planned", read.seconds, promised(MOST_S), "s")
    promises.at_most("peak memory", read.memory_mb, MOST_MB, "MB")
    promises.just("rows per second", rows / read.seconds, "")
    written = measure("plan", manifest, *told, "--out", folder / "plan", cwd=folder)
    promises.at_most("the same with --write", written.seconds, promised(MOST_WRITE_S), "s")
    promises.at_most("peak memory", written.memory_mb, MOST_MB, "MB")
    promises.just("files written", sum(path.is_file() for path in (folder / "plan").rglob("*")), "")
    assert written.json["source"] == read.json["source"]
    print(f"plan: a folder of {files:,} WAV files, their headers just written")
    wavs = write_wavs(folder / "wavs", files)
    for name, more in (("one chunk each", ()), ("cut into chunks of 15 s", ("--", "--chunk-length", 15))):
        headers = measure("plan", wavs, *told, *more, cwd=folder)
        promises.just(f"read and planned, {name}", headers.seconds, "s")
        promises.at_most("peak memory", headers.memory_mb, MOST_MB, "MB")
        promises.just("headers per second", files / headers.seconds, "")
        promises.just("lines of progress on stderr", len(headers.said), "")
    print(f"the headers of {min(files, MOST_SLOW):,} WAV files that take {latency_ms:g} ms each")
    waited_s, in_turn_s = wait_for_headers(wavs, min(files, MOST_SLOW), latency_ms / 1000)
    promises.at_most("read", waited_s, in_turn_s / LEAST_TIMES, "s")
    promises.just("times as fast as one after another", in_turn_s / waited_s, "")
    return 1 if promises.broken else 0


def wait_for_headers(wavs: Path, files: int, latency_s: float) -> tuple[float, float]:
    """Return the seconds that reading a folder takes where each header takes long, and those of its waits in turn."""

    def read_slowly(path: str) -> AudioHeader:
        time.sleep(latency_s)
        return read_header(path)

    sources = replace(open_sources([wavs], root=None), read_header=read_slowly)
    began_s = time.perf_counter()
    read = sum(1 for _ in islice(sources.chunks(WHOLE), files))
    return time.perf_counter() - began_s, read * latency_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the manifest")
    parser.add_argument("--files", type=int, default=FILES, help="WAV files of the folder")
    parser.add_argument("--slack", type=float, default=1, help="forgive a factor, on a machine that is busy otherwise")
    parser.add_argument("--latency-ms", type=float, default=10, help="how long a slow filesystem takes for a file")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="badcjobs-bench-", dir=args.folder) as folder:
        return run(Path(folder), args.rows, args.files, args.slack, args.latency_ms)


if __name__ == "__main__":
    sys.exit(main())
