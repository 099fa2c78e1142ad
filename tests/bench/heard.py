"""How long the recordings' own clock and its exports take on a job with many chunks that overlap.

    python tests/bench/heard.py --chunks 100000 --detections 10

Prints a line for each question, with its time, and the most memory that an export had.
"""

from __future__ import annotations

import argparse
import random
import resource
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rooms.store import create_indexes, open_draft

_PER_RECORDING = 100
_CHUNK_MS, _OVERLAP_MS, _CALL_MS = 36_000, 6_000, 3_000


def main() -> None:
    """Make the job, then ask."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--chunks", type=int, default=100_000)
    parser.add_argument("--detections", type=int, default=10, help="per chunk")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        database = Path(folder) / "job.sqlite"
        make_job(database, args.chunks, args.detections)
        size_mb = database.stat().st_size / 1e6
        print(f"{args.chunks:,} chunks, {args.chunks * args.detections:,} detections, {size_mb:.0f} MB")
        for sql in (
            "SELECT count(*) FROM recording_detection",
            "SELECT count(*) FROM recording_detection WHERE label = 'SP3' AND score >= 0.9",
            "SELECT count(*) FROM recording_detection WHERE recording_id = 'Area3/ST3/ST_00003_20220501_060000'",
        ):
            start_s = time.perf_counter()
            with closing(sqlite3.connect(database)) as db:
                (rows,) = db.execute(sql).fetchone()
            print(f"{time.perf_counter() - start_s:6.1f} s  {rows:,} rows: {sql}")
        for form in ("csv", "parquet"):
            export(database, form)


def make_job(database: Path, chunks: int, detections: int) -> None:
    """Write a job database as merge leaves it: recordings in five study areas, chunks of 36 s that share 6 s."""
    chance = random.Random(1)
    with closing(open_draft(database, new=True)) as db:
        db.execute("BEGIN")
        db.execute(
            """INSERT INTO task (task_id, name, job_id, array_index, restart, node, telemetry, version, started_at_ms)
               VALUES (1, '1_0.r0.n', '1', 0, 0, 'n', 0, 'bench', 1)"""
        )
        for number in range(-(-chunks // _PER_RECORDING)):
            area, station = f"Area{number % 5}", f"ST{number % 50}"
            recording = f"{area}/{station}/ST_{number:05d}_20220501_060000"
            db.execute(
                """INSERT INTO recording (task_id, recording_id, source_path, study_area, location, recorded_at)
                   VALUES (1, ?, ?, ?, ?, '2022-05-01T06:00:00')""",
                (recording, f"{recording}.wav", area, station),
            )
            for chunk in range(min(_PER_RECORDING, chunks - number * _PER_RECORDING)):
                start_ms = chunk * (_CHUNK_MS - _OVERLAP_MS)
                key = (recording, f"ST_{start_ms}_{start_ms + _CHUNK_MS}")
                db.execute(
                    """INSERT INTO chunk (task_id, recording_id, chunk_id, source_path, audio_path, start_ms, end_ms,
                                          status, attempts) VALUES (1, ?, ?, '', '', ?, ?, 'done', 1)""",
                    (*key, start_ms, start_ms + _CHUNK_MS),
                )
                heard = ((1, *key, *one) for one in calls(chance, detections))
                db.executemany("INSERT INTO detection VALUES (?, ?, ?, ?, ?, ?, ?, ?)", heard)
        create_indexes(db)
        db.execute("COMMIT")


def calls(chance: random.Random, many: int) -> Iterator[tuple[object, ...]]:
    """Yield what was heard in a chunk: anywhere, so that one in six reaches across a joint or lies beyond it."""
    for _ in range(many):
        start_ms = chance.randrange(_CHUNK_MS - _CALL_MS)
        yield start_ms, start_ms + _CALL_MS, f"SP{chance.randrange(20)}", "A bird", chance.random()


def export(database: Path, form: str) -> None:
    """Run the real command, and say what it took."""
    out = database.parent / f"heard-{form}"
    command = [sys.executable, "-m", "badcjobs", "export", str(database), "--format", form, "--by-study-area"]
    start_s = time.perf_counter()
    subprocess.run([*command, "-o", str(out)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak_mib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"{time.perf_counter() - start_s:6.1f} s  {peak_mib:.0f} MiB at most so far: export --format {form}")


if __name__ == "__main__":
    main()
