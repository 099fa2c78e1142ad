"""Task databases by the thousand: one is written and published as a real task does it, the others are made from it."""

from __future__ import annotations

import random
import shutil
import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from rooms.model import Allocation, Chunk, ChunkResult, Detection, HostReading, Reading, TaskKey, stable_id
from rooms.store import TABLES, TaskWriter, columns_of, join_files, move_into_place, prepare_seal
from rooms.telemetry import TelemetryWriter
from support.task_files import START_MS, make_device

DEVICES, SECONDS, CHUNKS = 4, 3600, 240  # an hour of a node with four devices at 1 Hz: 14,400 samples
JOB_ID = "4821"


def write_tasks(folder: Path, tasks: range, seconds: int = SECONDS, chunks: int = CHUNKS) -> list[Path]:
    """Write one sealed task database for each array index into ``folder``/tasks."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        template = _write_template(Path(local), seconds, chunks)
        return [_write_variant(template, index, folder / "tasks") for index in tasks]


def _write_template(local: Path, seconds: int, chunks: int) -> Path:
    chance = random.Random(3)
    key = TaskKey(JOB_ID, 0, 0, "template")
    devices = [make_device(index) for index in range(DEVICES)]
    with closing(TaskWriter(local / "wrapper.sqlite", key)) as writer:
        _write_work(writer, chance, seconds, chunks)
        ids = [writer.device_id(device) for device in devices]
    with closing(TelemetryWriter(local / "recorder.sqlite", key.task_id)) as telemetry, telemetry.batch():
        energy_j = [1e6] * DEVICES
        for second in range(seconds):
            readings = [(ids[n], _reading(chance, energy_j, n, second)) for n in range(DEVICES)]
            host = HostReading(round(chance.uniform(5, 60), 1), chance.randrange(40, 60) << 30, 180 << 30)
            telemetry.write_tick(START_MS + second * 1000 + chance.randrange(3), readings, host)
    join_files([local / "wrapper.sqlite", local / "recorder.sqlite"], local / "template.sqlite")
    return local / "template.sqlite"


def _write_work(writer: TaskWriter, chance: random.Random, seconds: int, many: int) -> None:
    allocation = Allocation(True, JOB_ID, "template", array_index=0, cpus=24)
    writer.begin_task(allocation, started_at_ms=START_MS, pid=42, version="0.1.0", engine="demo", telemetry=True)
    devices = [make_device(index) for index in range(DEVICES)]
    writer.add_devices(devices)
    writer.update_task(devices=DEVICES, workers=1)
    chunks = [
        Chunk(f"site{n // 24:03d}", f"c{n:05d}", f"site/{n:05d}.wav", f"/scratch/lab/audio/site/{n:05d}.wav", 0, 30_000)
        for n in range(many)
    ]
    writer.fill(chunks, lambda rows: None)
    lives = [
        writer.worker_started(device_id=writer.device_id(device), pid=1 + n, engine="demo", at_ms=START_MS)
        for n, device in enumerate(devices)
    ]
    for number, chunk in enumerate(chunks):
        at_ms = START_MS + number * seconds * 1000 // many
        heard = tuple(
            Detection(n * 100, n * 100 + 3000, f"SP{n:02d}", chance.random(), "A species") for n in range(number % 4)
        )
        device_id = writer.device_id(devices[number % DEVICES])
        result = ChunkResult(chunk, at_ms, at_ms + 900, heard, 30.0)
        writer.attempt_ended(
            result, status="done", try_number=1, worker_id=lives[number % DEVICES], device_id=device_id
        )
    writer.update_task(ended_at_ms=START_MS + seconds * 1000, exit_code=0, verdict="done")


def _reading(chance: random.Random, energy_j: list[float], device: int, second: int) -> Reading:
    power_w = round(chance.uniform(60, 290), 3)
    energy_j[device] += power_w
    return Reading(
        utilization_percent=chance.randrange(40, 100),
        memory_utilization_percent=chance.randrange(5, 50),
        memory_used_bytes=chance.randrange(5000, 9000) << 20,
        temperature_c=chance.randrange(45, 80),
        power_w=power_w,
        energy_j=round(energy_j[device], 3) if second % 5 == 0 else None,
        sm_clock_mhz=chance.choice((1230, 1380, 1530)),
        memory_clock_mhz=877,
        throttle_reasons=chance.choice((0, 0, 0, 4)),
    )


def _write_variant(template: Path, index: int, folder: Path) -> Path:
    """Give the template's rows another task, other devices and other recordings, and seal them."""
    key = TaskKey(JOB_ID, index, 0, f"gpu{index % 44}")
    copy = template.with_name("variant.sqlite")
    shutil.copyfile(template, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        devices = [
            (old, stable_id(key.name, "device", uuid)) for old, uuid in db.execute("SELECT device_id, uuid FROM device")
        ]
        workers = [
            (old, stable_id(key.name, "worker", n))
            for n, (old,) in enumerate(db.execute("SELECT worker_id FROM worker"))
        ]
        db.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER)")
        db.executemany("INSERT INTO ids VALUES (?, ?)", [*devices, *workers])
        for table in (table.name for table in TABLES if table.name != "meta"):
            columns = columns_of(table)
            changes = ["task_id = :task"]
            if "device_id" in columns:
                changes.append("device_id = (SELECT new FROM ids WHERE old = device_id)")
            if "worker_id" in columns:
                changes.append("worker_id = (SELECT new FROM ids WHERE old = worker_id)")
            if "recording_id" in columns:
                changes.append("recording_id = recording_id || :suffix")
            db.execute(
                f"UPDATE {table} SET {', '.join(changes)}",
                {"task": key.task_id, "suffix": f"-{index:04d}"},
            )
        db.execute("UPDATE task SET name = ?, array_index = ?, node = ?", (key.name, index, key.node))
        prepare_seal(db)
        db.execute("COMMIT")
    target = folder / f"{key.name}.sqlite"
    move_into_place(copy, target)
    return target
