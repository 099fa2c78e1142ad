"""What a million rows take, in a process of its own because its peak memory is what we promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.audio import make_wav

import badcjobs

ROWS = 1_000_000  # are promised; a list of two hundred thousand tells what each takes
FEW, MANY = 2_000, 200_000
READ_ALL = """
import json, re, sys, time
from pathlib import Path
from badcjobs.sources.open import open_sources
from badcjobs.sources.walk import parse_shard
started = time.monotonic()
sources = open_sources([Path(sys.argv[1])], root=None)
chunks = sum(1 for _ in sources.chunks(parse_shard(sys.argv[2])))
# Not ru_maxrss: a child inherits that from the process that started it.
peak_mb = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(json.dumps({"chunks": chunks, "seconds": time.monotonic() - started, "peak_mb": peak_mb}))
"""


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lists")
    make_wav(folder / "audio" / "x.wav")
    for rows in (FEW, MANY):
        with (folder / f"{rows}.csv").open("w") as file:
            file.write("recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes\n")
            file.writelines(map(line, range(rows)))
    return folder


def line(row: int) -> str:
    recording, number = divmod(row, 20)
    start_ms = number * 30_000
    ids = f"STATION-{recording:05}_20230501_043000,STATION-{recording:05}_20230501_043000_{number:03}"
    return f"{ids},audio/x.wav,{start_ms},{start_ms + 30_000},0,{row:064x},\n"


def measure(folder: Path, rows: int, shard: str) -> dict[str, float]:
    command = [sys.executable, "-c", READ_ALL, f"{rows}.csv", shard]
    environ = {**os.environ, "PYTHONPATH": str(Path(badcjobs.__file__).parents[1])}
    ended = subprocess.run(command, cwd=folder, env=environ, capture_output=True, check=True)
    measured: dict[str, float] = json.loads(ended.stdout)
    print(f"{rows:,} rows, shard {shard}: {measured['seconds']:.1f} s, {measured['peak_mb']:.0f} MB")
    return measured


@pytest.mark.parametrize(("shard", "parts"), [("0/1", 1), ("7/100", 100)])
def test_a_million_rows_fit_into_200_megabytes(lists: Path, shard: str, parts: int) -> None:
    few, many = (measure(lists, rows, shard) for rows in (FEW, MANY))
    assert many["chunks"] == MANY // parts
    mb_a_row = (many["peak_mb"] - few["peak_mb"]) / (MANY - FEW)
    assert many["peak_mb"] + mb_a_row * (ROWS - MANY) <= 200
