"""Task databases by the thousand: one is written and published as a real task does it, the others are made from it."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from rooms.model import Chunk, ChunkResult, Detection, HostReading, Reading, TaskKey, stable_id
from rooms.store import TABLES, TaskWriter, columns_of, join_files, move_into_place, prepare_seal
from support.task_files import START_MS, LiveTask

DEVICES, SECONDS, CHUNKS = 4, 3600, 240  # an hour of a node with four devices at 1 Hz: 14,400 samples
JOB_ID = "4821"


def write_tasks(folder: Path, tasks: range, seconds: int = SECONDS, chunks: int = CHUNKS) -> list[Path]:
    """Write one sealed task database for each array index into ``folder``/tasks."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        template, chance = Path(local) / "template.sqlite", random.Random(3)
        key = TaskKey(JOB_ID, 0, 0, "template")
        with closing(LiveTask(Path(local), key, devices=DEVICES, cpus=24)) as live:
            with live.wrapper.batch():
                _write_work(live.wrapper, live.device_ids, chance, seconds, chunks)
            with live.recorder.batch():
                for second in range(seconds):
                    readings = [(device_id, _reading(chance, second)) for device_id in live.device_ids]
                    host = HostReading(round(chance.uniform(5, 60), 1), chance.randrange(40, 60) << 30, 180 << 30)
                    live.recorder.write_tick(START_MS + second * 1000 + chance.randrange(3), readings, host)
            join_files(live.paths, template)
        return [_write_variant(template, index, folder / "tasks") for index in tasks]


def _write_work(writer: TaskWriter, devices: list[int], chance: random.Random, seconds: int, many: int) -> None:
    writer.update_task(devices=DEVICES, workers=1)
    names = [f"site/{n:05d}.wav" for n in range(many)]
    chunks = [Chunk(f"site{n // 24:03d}", f"c{n:05d}", name, f"/scratch/lab/audio/{name}", 0, 30_000)
              for n, name in enumerate(names)]  # fmt: skip
    writer.fill(chunks, lambda rows: None)
    lives = [writer.worker_started(device_id=on, pid=1, engine="demo", at_ms=START_MS) for on in devices]
    for number, chunk in enumerate(chunks):
        at_ms, on = START_MS + number * seconds * 1000 // many, number % DEVICES
        heard = [Detection(n, n + 3000, f"SP{n:02d}", chance.random(), "A species") for n in range(number % 4)]
        result = ChunkResult(chunk, at_ms, at_ms + 900, tuple(heard), 30.0)
        writer.attempt_ended(result, status="done", try_number=1, worker_id=lives[on], device_id=devices[on])
    writer.update_task(ended_at_ms=START_MS + seconds * 1000, exit_code=0, verdict="done")


def _reading(chance: random.Random, second: int) -> Reading:
    return Reading(
        utilization_percent=chance.randrange(40, 100), memory_utilization_percent=chance.randrange(5, 50),
        memory_used_bytes=chance.randrange(5000, 9000) << 20, temperature_c=chance.randrange(45, 80),
        power_w=round(chance.uniform(60, 290), 3), energy_j=1e6 + 175.125 * second if second % 5 == 0 else None,
        sm_clock_mhz=chance.choice((1230, 1380, 1530)), memory_clock_mhz=877, throttle_reasons=chance.choice((0, 0, 4)),
    )  # fmt: skip


def _write_variant(template: Path, index: int, folder: Path) -> Path:
    """Give the template's rows another task, other devices and other recordings, and seal them."""
    key = TaskKey(JOB_ID, index, 0, f"gpu{index % 44}")
    copy = Path(shutil.copyfile(template, template.with_name("variant.sqlite")))
    other = {
        "task_id": str(key.task_id), "recording_id": f"recording_id || '-{index:04d}'",
        "device_id": "(SELECT new FROM ids WHERE old = device_id)",
        "worker_id": "(SELECT new FROM ids WHERE old = worker_id)",
    }  # fmt: skip
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        db.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER)")
        for kind in ("device", "worker"):
            ids = db.execute(f"SELECT {kind}_id FROM {kind}").fetchall()
            db.executemany("INSERT INTO ids VALUES (?, ?)", [(old, stable_id(key.name, kind, old)) for (old,) in ids])
        for table in (table.name for table in TABLES if table.name != "meta"):
            changes = [f"{name} = {value}" for name, value in other.items() if name in columns_of(table)]
            db.execute(f"UPDATE {table} SET {', '.join(changes)}")
        db.execute("UPDATE task SET name = ?, array_index = ?, node = ?", (key.name, index, key.node))
        prepare_seal(db)
        db.execute("COMMIT")
    move_into_place(copy, folder / f"{key.name}.sqlite")
    return folder / f"{key.name}.sqlite"
