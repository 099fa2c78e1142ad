"""A job of a thousand array tasks as a cluster leaves it: start-up, tails, a slow node, poison, gaps, a lost device.

A dozen tasks are written and published as a real task does it; the others are made from them, with other devices, other
recordings and a later start.
"""

from __future__ import annotations

import heapq
import json
import random
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

from rooms.model import (
    Allocation,
    ArrayShape,
    Chunk,
    ChunkResult,
    Detection,
    Device,
    HostReading,
    Reading,
    TaskKey,
    UsageReading,
    stable_id,
)
from rooms.root import FrozenRun
from rooms.store import TABLES, TaskWriter, columns_of, join_files, move_into_place, prepare_seal
from rooms.telemetry import TelemetryWriter
from support.task_files import START_MS

JOB_ID = "4821"
DEVICES, CHUNKS, NODES = 4, 100, 44
SLOW_NODE = "gpu17"
TIME_LIMIT_S = 5400
_INTERVAL_S = 10
_AUDIO_S = 300.0
_DAY = "20260611"  # of the recordings of a template
_BACK_S = 60  # a device that was lost is reset after so long, and idle from then on
_RATE = 2.6  # seconds of audio in a second, with the small model that shares a card
_OF_TIME = ("at_ms", "from_ms", "to_ms")

SPECIES = (
    ("OVEN", "Ovenbird"), ("WTSP", "White-throated Sparrow"), ("REVI", "Red-eyed Vireo"), ("HETH", "Hermit Thrush"),
    ("SWTH", "Swainson's Thrush"), ("TEWA", "Tennessee Warbler"), ("AMRO", "American Robin"),
    ("YRWA", "Yellow-rumped Warbler"), ("CHSP", "Chipping Sparrow"), ("RCKI", "Ruby-crowned Kinglet"),
    ("DEJU", "Dark-eyed Junco"), ("LISP", "Lincoln's Sparrow"), ("ALFL", "Alder Flycatcher"),
    ("CORA", "Common Raven"), ("GRAJ", "Canada Jay"), ("WIWR", "Winter Wren"), ("MAWA", "Magnolia Warbler"),
    ("BOCH", "Boreal Chickadee"), ("OSFL", "Olive-sided Flycatcher"), ("CONI", "Common Nighthawk"),
    ("BOOW", "Boreal Owl"), ("YERA", "Yellow Rail"), ("RUGR", "Ruffed Grouse"), ("COLO", "Common Loon"),
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """How one kind of array task goes; times in seconds from its start."""

    seed: int
    start_up_s: float = 95.0
    slowness: float = 1.0
    fetch_s: float = 2.0  # between two chunks
    hotter_c: int = 0
    poison: int = 0  # so many chunks fail in every try, the first of them with its worker
    gap: tuple[int, int] | None = None
    lost_at_s: int | None = None  # one device falls off its bus
    killed_at_s: int | None = None
    goes_on: bool = False  # it was not killed then: so far it has got

    def with_chunks(self, many: int) -> Shape:
        """Return the shape of a task with fewer chunks or more: what happens to it happens sooner or later."""
        factor = many / CHUNKS
        return replace(
            self,
            gap=None if self.gap is None else (round(self.gap[0] * factor), round(self.gap[1] * factor)),
            lost_at_s=None if self.lost_at_s is None else round(self.lost_at_s * factor),
            killed_at_s=None if self.killed_at_s is None else round(self.killed_at_s * factor),
        )


STEADY = tuple(Shape(seed, start_up_s=80 + 9 * seed % 40, slowness=0.94 + 0.02 * seed) for seed in range(6))
SLOW = tuple(Shape(20 + 10 * n, slowness=1.7 + 0.05 * (n * 3 % 7 - 3), hotter_c=16) for n in range(5))
HUNGRY = Shape(21, fetch_s=70.0)
POISONED = tuple(Shape(22 + 10 * n, poison=3) for n in range(3))
BLIND = Shape(23, gap=(900, 1500))
LOSING = Shape(24, lost_at_s=1500)
KILLED = Shape(25, killed_at_s=TIME_LIMIT_S, fetch_s=160.0)


def write_job(folder: Path, tasks: int, *, chunks: int = CHUNKS) -> list[Path]:
    """Write the task databases of a job, ready to be merged, into ``folder``/tasks."""
    (folder / "tasks").mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as local:
        return [write_variant(one.template, one.key, one.begin_ms, folder / "tasks")
                for one in schedule(Path(local), tasks, chunks)]  # fmt: skip


@dataclass(frozen=True)
class Planned:
    """When and where one array task runs, and the file that it is made from."""

    key: TaskKey
    shape: Shape
    begin_ms: int  # from the start of the job
    lasted_ms: int
    template: Path


def schedule(local: Path, tasks: int, chunks: int = CHUNKS) -> Iterator[Planned]:
    """Yield the tasks of a job: each starts where a node becomes free."""
    templates: dict[Shape, tuple[Path, int]] = {}
    free = [(index % 4 * 20_000 + index * 1500, f"gpu{index:02d}") for index in range(1, NODES + 1)]
    heapq.heapify(free)
    for index in range(tasks):
        begin_ms, node = heapq.heappop(free)
        shape = shape_of(index, node)
        if shape not in templates:
            templates[shape] = write_template(local, shape, chunks)
        template, lasted_ms = templates[shape]
        heapq.heappush(free, (begin_ms + lasted_ms + 20_000, node))
        yield Planned(TaskKey(JOB_ID, index, 0, node), shape, begin_ms, lasted_ms, template)


def write_source(folder: Path, tasks: int, *, chunks: int = CHUNKS) -> None:
    """Write the manifest of the job and its run.toml, so that somebody can tell what is complete."""
    rows = ["recording_id,chunk_id,source_path,start_ms,end_ms"]
    for number in range(chunks):
        chunk = _chunk(number)
        times = f"{chunk.start_ms},{chunk.end_ms}"
        # Row by row a source is dealt out to the tasks like cards.
        rows += [
            f"{chunk.recording_id}-{task:04d},{chunk.chunk_id},{chunk.source_path},{times}" for task in range(tasks)
        ]
    manifest = folder / "june.csv"
    manifest.write_text("\n".join(rows) + "\n")
    frozen = FrozenRun({"source": (str(manifest),), "engine": "hawkears"}, ArrayShape(0, 1, tasks))
    (folder / "run.toml").write_text(frozen.to_toml("0.7.0"))


def shape_of(index: int, node: str) -> Shape:
    """Return how this task goes: a few are rare, and one node is slow."""
    if node == SLOW_NODE:
        return SLOW[index * 3 % len(SLOW)]
    rare = {7: POISONED[index // 41 % len(POISONED)], 19: HUNGRY, 23: BLIND, 31: LOSING, 37: KILLED}
    return rare.get(index % 41, STEADY[index * 7 % len(STEADY)])


# --- one task, as a real one writes it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """One try on one device."""

    device: int
    chunk: Chunk
    from_ms: int
    to_ms: int
    try_number: int
    outcome: str  # done, failed (tried again), given up, poison, or lost


def _plan(shape: Shape, chance: random.Random, chunks: Sequence[Chunk]) -> Iterator[Work]:
    """Yield what is tried when: each device takes the next chunk when it is free."""
    free = [(shape.start_up_s + chance.uniform(0, 15), device) for device in range(DEVICES)]
    heapq.heapify(free)
    waiting = [(chunk, 1) for chunk in reversed(chunks)]
    bad = [chunk.key for chunk in chance.sample(list(chunks), shape.poison)]
    while waiting and free:
        at_s, device = heapq.heappop(free)
        if shape.killed_at_s is not None and at_s > shape.killed_at_s:
            return
        chunk, try_number = waiting.pop()
        took_s = _AUDIO_S / _RATE * shape.slowness * chance.lognormvariate(0, 0.12)
        end_s = at_s + took_s
        lost = shape.lost_at_s is not None and device == 2 and end_s > shape.lost_at_s
        if lost:
            yield Work(device, chunk, round(at_s * 1000), (shape.lost_at_s or 0) * 1000, try_number, "lost")
            waiting.append((chunk, try_number))
            continue
        outcome = "done"
        if chunk.key in bad:
            end_s = at_s + took_s * 0.4
            deadly = chunk.key == bad[0]
            outcome = ("poison" if deadly else "given up") if try_number >= (2 if deadly else 3) else "failed"
            if outcome == "failed":
                waiting.append((chunk, try_number + 1))
        yield Work(device, chunk, round(at_s * 1000), round(end_s * 1000), try_number, outcome)
        heapq.heappush(free, (end_s + shape.fetch_s * chance.uniform(0.6, 1.4), device))


def write_template(local: Path, shape: Shape, many: int) -> tuple[Path, int]:
    """Write and join one task of this shape; return its file and how long it lasted."""
    template = local / f"template{shape.seed}-{shape.killed_at_s if shape.goes_on else 0}.sqlite"
    shape = shape.with_chunks(many)
    chance = random.Random(shape.seed)
    key = TaskKey(JOB_ID, 0, 0, f"template{shape.seed}")
    chunks = [_chunk(number) for number in range(many)]
    work = list(_plan(shape, chance, chunks))
    lasted_ms = max((one.to_ms for one in work), default=0) + 6000
    if shape.killed_at_s is not None:
        lasted_ms = shape.killed_at_s * 1000
    halves = [local / "wrapper.sqlite", local / "recorder.sqlite"]
    for half in halves:
        half.unlink(missing_ok=True)
    with closing(TaskWriter(halves[0], key)) as writer:
        ids = _write_work(writer, key, shape, chance, chunks, work, lasted_ms)
    with closing(TelemetryWriter(halves[1], key.task_id)) as telemetry, telemetry.batch():
        _write_telemetry(telemetry, shape, chance, ids, work, lasted_ms)
    # What Slurm's epilog says of a task that ran into its time limit.
    cut = {"verdict": "killed", "ended_at_ms": START_MS + lasted_ms, "slurm_state": "TIMEOUT"}
    join_files(halves, template, closing={} if shape.killed_at_s is None or shape.goes_on else cut)
    return template, lasted_ms


def _chunk(number: int) -> Chunk:
    path = f"plot{number // 20:02d}/{_DAY}_{number % 24:02d}0000_{number:04d}.flac"
    return Chunk(f"plot{number // 20:02d}", f"c{number:04d}", path, f"/scratch/audio/{path}", 0, round(_AUDIO_S * 1000))


def _device(index: int) -> Device:
    return Device(
        str(index), "CUDA_VISIBLE_DEVICES", index, f"GPU-{index}", "Tesla V100-SXM2-16GB", "nvml", 16 * 2**30, 300.0,
        slowdown_c=87,
    )  # fmt: skip


def _write_work(
    writer: TaskWriter, key: TaskKey, shape: Shape, chance: random.Random, chunks: Sequence[Chunk],
    work: Sequence[Work], lasted_ms: int,
) -> list[int]:  # fmt: skip
    allocation = Allocation(True, JOB_ID, key.node, array_index=0, cpus=24)
    writer.begin_task(
        allocation, started_at_ms=START_MS, pid=42, version="0.7.0", engine="hawkears", telemetry=True,
        memory_limit_bytes=64 << 30, time_limit_s=TIME_LIMIT_S * len(chunks) / CHUNKS,
    )  # fmt: skip
    settings = {
        "out": "/scratch/lab/runs/june", "source": ["/scratch/lab/june.csv"], "engine": "hawkears",
        "engine_arg": ["--min_score=0.6"], "interval": 1.0, "retries": 2, "workers_per_gpu": "auto", "max_gpus": None,
        "alerts": {"temperature_c": None, "memory_percent": 90.0},
    }  # fmt: skip
    writer.write_meta({"settings": json.dumps(settings)})
    devices = [_device(index) for index in range(DEVICES)]
    writer.add_devices(devices)
    writer.update_task(devices=DEVICES, workers=DEVICES)
    writer.fill(chunks, lambda rows: None)
    ids = [writer.device_id(device) for device in devices]
    lives = [
        writer.worker_started(device_id=one, pid=100 + n, engine="hawkears", at_ms=START_MS + 12_000)
        for n, one in enumerate(ids)
    ]
    with writer.batch():
        for one in sorted(work, key=lambda one: one.to_ms):
            if one.to_ms <= lasted_ms:
                _write_try(writer, chance, one, lives[one.device], ids[one.device])
            else:
                at_ms = START_MS + one.from_ms
                writer.attempt_started(
                    one.chunk, try_number=one.try_number, worker_id=lives[one.device], device_id=ids[one.device],
                    at_ms=at_ms,
                )  # fmt: skip
        for at_ms in range(60_000, lasted_ms, 60_000):
            used = UsageReading(round(chance.uniform(9, 14), 2), chance.randrange(36, 43) << 30, 4.1e6, 9, "pss")
            writer.add_usage(used, START_MS + at_ms)
        if shape.lost_at_s is not None and shape.lost_at_s * 1000 < lasted_ms:
            writer.worker_ended(lives[2], exit_code=-6, at_ms=START_MS + shape.lost_at_s * 1000)
        if shape.killed_at_s is None:
            for life in lives:
                if shape.lost_at_s is None or life != lives[2]:
                    writer.worker_ended(life, exit_code=0, at_ms=START_MS + lasted_ms - 3000)
            code = 1 if shape.poison else 0
            writer.update_task(ended_at_ms=START_MS + lasted_ms, exit_code=code, verdict="failed" if code else "done")
    return ids


def _write_try(writer: TaskWriter, chance: random.Random, one: Work, life: int, device_id: int) -> None:
    times = (START_MS + one.from_ms, START_MS + one.to_ms)
    heard: tuple[Detection, ...] = ()
    error_class = error = None
    if one.outcome == "done":
        ranks = [min(int(chance.expovariate(0.22)), len(SPECIES) - 1) for _ in range(chance.randrange(9))]
        heard = tuple(Detection(n * 9000, n * 9000 + 3000, *_named(rank, chance)) for n, rank in enumerate(ranks))
    elif one.outcome == "lost":
        error_class, error = "gpu_lost", "CUDA error: device-side: GPU is lost (Xid 79: GPU has fallen off the bus)"
    elif one.outcome == "poison":
        error_class, error = "engine_crash", "the worker ended with signal 11 (SIGSEGV) while it had this chunk"
    else:
        error_class = "bad_audio"
        why = ("flac decoder lost sync", "Format not recognised.", "psf_fseek() failed.")[one.from_ms // 1000 % 3]
        error = f"soundfile.LibsndfileError: {one.chunk.source_path}: {why}"
    result = ChunkResult(one.chunk, *times, heard, _AUDIO_S if one.outcome == "done" else None, error_class, error)
    if one.outcome in ("failed", "lost"):
        result = replace(result, charged=one.outcome == "failed")
    status = {"done": "done", "poison": "poison", "given up": "failed"}.get(one.outcome, "pending")
    writer.attempt_ended(result, status=status, try_number=one.try_number, worker_id=life, device_id=device_id)


def _named(rank: int, chance: random.Random) -> tuple[str, float, str]:
    label, name = SPECIES[rank]
    return label, round(chance.uniform(0.6, 0.99), 3), name


def _write_telemetry(
    telemetry: TelemetryWriter, shape: Shape, chance: random.Random, ids: Sequence[int], work: Sequence[Work],
    lasted_ms: int,
) -> None:  # fmt: skip
    busy = [sorted((one.from_ms, one.to_ms) for one in work if one.device == device) for device in range(DEVICES)]
    warmth = [38.0 + device for device in range(DEVICES)]
    energy_j = [1e6] * DEVICES
    for at_ms in range(0, lasted_ms, _INTERVAL_S * 1000):
        second = at_ms // 1000
        if shape.gap is not None and shape.gap[0] <= second < shape.gap[1]:
            continue
        readings = []
        for device in range(DEVICES):
            if shape.lost_at_s is not None and device == 2 and 0 <= second - shape.lost_at_s < _BACK_S:
                continue
            working = any(begin <= at_ms < end for begin, end in busy[device])
            readings.append((ids[device], _reading(shape, chance, device, working, warmth, energy_j)))
        host = HostReading(round(chance.uniform(30, 60), 1), chance.randrange(40, 60) << 30, 180 << 30)
        telemetry.write_tick(START_MS + at_ms, readings, host)
    if shape.gap is not None:
        begin_ms, end_ms = (START_MS + second * 1000 for second in shape.gap)
        telemetry.open_gap(None, None, begin_ms, end_ms, "the recorder was stopped")
    if shape.hotter_c > 0:
        telemetry.write_alert(
            {
                "device_id": ids[3], "kind": "thermal", "severity": "warning", "started_at_ms": START_MS + 240_000,
                "ended_at_ms": None if shape.goes_on else START_MS + lasted_ms - 9000, "peak": 91, "threshold": 87,
                "message": "device 3 is at 91 °C, above 87 °C",
            }
        )  # fmt: skip
    if shape.lost_at_s is not None and shape.lost_at_s * 1000 < lasted_ms:
        lost_ms = START_MS + shape.lost_at_s * 1000
        back_ms = min(lost_ms + _BACK_S * 1000, START_MS + lasted_ms)
        telemetry.open_gap(ids[2], None, lost_ms, back_ms, "the device is lost")


def _reading(
    shape: Shape, chance: random.Random, device: int, working: bool, warmth: list[float], energy_j: list[float]
) -> Reading:
    throttled = shape.hotter_c > 0 and working
    goal_c = (68 + 2 * device + shape.hotter_c) if working else 41 + shape.hotter_c // 2
    warmth[device] += (goal_c - warmth[device]) * 0.12
    power_w = chance.gauss(168 if throttled else 214, 14) if working else chance.gauss(43, 2)
    energy_j[device] += power_w * _INTERVAL_S
    percent = min(100, max(0, round(chance.gauss(88, 6)))) if working else 0
    return Reading(
        utilization_percent=percent,
        busy_percent=float(percent),
        memory_utilization_percent=percent // 3,
        memory_used_bytes=(chance.randrange(9800, 10600) if working else 410) << 20,
        temperature_c=round(warmth[device] + chance.uniform(-1, 1)),
        power_w=round(power_w, 3),
        energy_j=round(energy_j[device], 3),
        sm_clock_mhz=1005 if throttled else 1530 if working else 135,
        memory_clock_mhz=877,
        throttle_reasons=0x40 if throttled else 0 if working else 1,
    )


# --- the others -------------------------------------------------------------------------------------------------------


def write_variant(template: Path, key: TaskKey, later_ms: int, folder: Path) -> Path:
    """Give the template's rows another task, other devices, other recordings and a later time, and seal them."""
    copy = template.with_name("variant.sqlite")
    shutil.copyfile(template, copy)
    with closing(sqlite3.connect(copy, isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute("BEGIN")
        db.execute("CREATE TEMP TABLE ids (old INTEGER PRIMARY KEY, new INTEGER)")
        for kind in ("device", "worker"):
            old = [row[0] for row in db.execute(f"SELECT {kind}_id FROM {kind} ORDER BY rowid")]
            db.executemany(
                "INSERT INTO ids VALUES (?, ?)", [(o, stable_id(key.name, kind, n)) for n, o in enumerate(old)]
            )
        for table in (table.name for table in TABLES if table.name != "meta"):
            db.execute(
                f"UPDATE {table} SET {', '.join(_changes(columns_of(table)))}",
                {
                    "task": key.task_id,
                    "later": later_ms,
                    "suffix": f"-{key.array_index:04d}",
                    "day": _day(key.array_index),
                },
            )
        db.execute("UPDATE device SET uuid = ? || '-' || uuid", (f"GPU-{stable_id(key.node):x}",))
        db.execute(
            "UPDATE task SET name = ?, array_index = ?, node = ?, shard_index = ?, shard_count = 1000",
            (key.name, key.array_index, key.node, key.array_index),
        )
        prepare_seal(db)
        db.execute("COMMIT")
    target = folder / f"{key.name}.sqlite"
    move_into_place(copy, target)
    return target


def _changes(columns: Sequence[str]) -> Iterator[str]:
    yield "task_id = :task"
    for column in columns:
        if column in ("device_id", "worker_id"):
            yield f"{column} = (SELECT new FROM ids WHERE old = {column})"
        elif column in _OF_TIME or column.endswith("_at_ms"):
            yield f"{column} = {column} + :later"
        elif column == "recording_id":
            yield "recording_id = recording_id || :suffix"
        elif column in ("source_path", "audio_path", "error"):
            yield f"{column} = replace({column}, '{_DAY}', :day)"


def _day(index: int) -> str:
    """Return when the recordings of an array task were made."""
    return f"2026{5 + index // 30 % 3:02d}{1 + index % 30:02d}"
