"""A million rows, in a process of its own because its peak memory is what we promise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.audio import make_wav

import badcjobs

ROWS = 1_000_000
READ_ALL = """
import json, re, sys, time
from pathlib import Path
from badcjobs.manifest import open_sources, parse_shard
started = time.monotonic()
sources = open_sources([Path(sys.argv[1])], root=None)
chunks = sum(1 for _ in sources.chunks(parse_shard(sys.argv[2])))
# Not ru_maxrss: a child inherits that from the process that started it.
peak_mb = int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024
print(json.dumps({"chunks": chunks, "seconds": time.monotonic() - started, "peak_mb": peak_mb}))
"""


@pytest.fixture(scope="module")
def million(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("million")
    make_wav(folder / "audio" / "x.wav")
    with (folder / "m.csv").open("w") as file:
        file.write("recording_id,chunk_id,source_path,start_ms,end_ms,overlap_ms,sha256,notes\n")
        for row in range(ROWS):
            recording, number = divmod(row, 20)
            start_ms = number * 30_000
            ids = f"STATION-{recording:05}_20230501_043000,STATION-{recording:05}_20230501_043000_{number:03}"
            file.write(f"{ids},audio/x.wav,{start_ms},{start_ms + 30_000},0,{row:064x},\n")
    return folder / "m.csv"


def measure(source: Path, shard: str) -> dict[str, float]:
    command = [sys.executable, "-c", READ_ALL, source.name, shard]
    environ = {**os.environ, "PYTHONPATH": str(Path(badcjobs.__file__).parents[1])}
    ended = subprocess.run(command, cwd=source.parent, env=environ, capture_output=True, check=True)
    measured: dict[str, float] = json.loads(ended.stdout)
    print(f"{ROWS:,} rows, shard {shard}: {measured['seconds']:.1f} s, {measured['peak_mb']:.0f} MB")
    return measured


@pytest.mark.parametrize(("shard", "chunks"), [("0/1", ROWS), ("7/100", ROWS // 100)])
def test_a_million_rows_fit_into_200_megabytes(million: Path, shard: str, chunks: int) -> None:
    measured = measure(million, shard)
    assert measured["chunks"] == chunks
    assert measured["peak_mb"] <= 200
