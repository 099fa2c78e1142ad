"""Task databases for tests, written and published by the same hands as in a real task."""

import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooms.model import Allocation, Chunk, ChunkResult, Detection, Device, HostReading, Reading, RecordingName, TaskKey
from rooms.root import SystemClock
from rooms.store import MergeOrder, MergeOutcome, TaskWriter, merge, publish
from rooms.telemetry import TelemetryWriter
from support.databases import change

START_MS = 1_800_000_000_000
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # live files need no disk here
LOUD = Detection(100, 600, "LOUD", 0.9, "Loud sound")


def make_chunk(chunk_id: str, recording_id: str = "rec", seconds: float | None = 30) -> Chunk:
    end_ms = None if seconds is None else round(seconds * 1000)
    return Chunk(recording_id, chunk_id, f"{chunk_id}.wav", f"/data/{chunk_id}.wav", 0, end_ms)


def make_device(index: int = 0) -> Device:
    return Device(
        str(index),
        "test",
        index,
        f"GPU-{index}",
        "Tesla V100",
        "nvml",
        memory_total_bytes=16 * 2**30,
        power_limit_w=300.0,
    )


class LiveTask:
    """The two live files of a task that runs."""

    def __init__(
        self, folder: Path, key: TaskKey, *, shared: bool = False, devices: int = 1, telemetry: bool = True,
        started_at_ms: int = START_MS, **granted: Any,
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.paths = folder, [folder / "wrapper.sqlite", folder / "recorder.sqlite"]
        self.wrapper = TaskWriter(self.paths[0], key, shared=shared)
        self.recorder = TelemetryWriter(self.paths[1], key.task_id, shared=shared)
        allocation = Allocation(True, key.job_id, key.node, key.restart, key.array_index, **granted)
        facts = {"pid": 42, "version": "0.1.0", "engine": "demo", "telemetry": telemetry}
        self.wrapper.begin_task(allocation, started_at_ms=started_at_ms, **facts)
        self.wrapper.add_devices([make_device(index) for index in range(devices)])
        self.device_ids = [self.wrapper.device_id(make_device(index)) for index in range(devices)]

    def add(self, number: int) -> None:
        """Do one chunk and write one tick."""
        chunk = make_chunk(f"c{number}")
        self.wrapper.fill([chunk], lambda rows: None)
        result = ChunkResult(chunk, START_MS, START_MS + number)
        self.wrapper.attempt_ended(result, status="done", try_number=1, worker_id=5, device_id=9)
        reading = (self.device_ids[number % 2], Reading(utilization_percent=number % 101, power_w=250.5))
        with self.recorder.batch():
            self.recorder.write_tick(START_MS + number * 1000, [reading], HostReading(1.0, 2, 3))

    def killed(self, folder: Path) -> list[Path]:
        """Copy databases and logs: what killed processes leave behind."""
        shutil.copytree(self.folder, folder, ignore=shutil.ignore_patterns("*-shm"))
        return [folder / path.name for path in self.paths]

    def close(self) -> None:
        self.wrapper.close()
        self.recorder.close()


@dataclass
class TaskFile:
    """One attempt of one array task; ``write`` makes its database in ``folder``/tasks."""

    folder: Path
    index: int = 0
    job_id: str = "4821"
    restart: int = 0
    node: str = "gpu1"
    states: Mapping[str, str] = field(default_factory=dict)  # chunk → its final state
    labels: Sequence[str] = ("LOUD",)  # what every chunk that is done has heard
    devices: int = 1
    samples: int = 3
    reading: Reading = field(default_factory=lambda: Reading(utilization_percent=80, power_w=250.0))
    gaps: Sequence[tuple[int, int, str]] = ()  # from, to (ms from the start), reason
    started_at_ms: int = START_MS
    ended_at_ms: int | None = START_MS + 10_000
    chunk_ended_at_ms: int = START_MS + 5_000
    verdict: str = "done"
    telemetry: bool = True
    engine: str = "demo"
    settings: str | None = None  # as JSON
    names: Mapping[str, RecordingName] = field(default_factory=dict)  # of chunks that are recordings of their own
    shard: tuple[int, int] | None = None  # which part of the source, of how many; None: it does not say

    @property
    def key(self) -> TaskKey:
        return TaskKey(self.job_id, self.index, self.restart, self.node)

    @property
    def path(self) -> Path:
        return self.folder / "tasks" / f"{self.key.name}.sqlite"

    def write(self) -> Path:
        """Write both live files as a task does, publish them, and return the published file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as local:
            publish(self.write_live(Path(local)), self.path)
        return self.path

    def write_live(self, folder: Path) -> list[Path]:
        facts = {"devices": self.devices, "telemetry": self.telemetry, "started_at_ms": self.started_at_ms}
        with closing(LiveTask(folder, self.key, cpus=4, **facts)) as live:
            self._write_work(live.wrapper, next(iter(live.device_ids), None))
            self._write_telemetry(live.recorder, live.device_ids)
        return live.paths

    def _write_work(self, writer: TaskWriter, device_id: int | None) -> None:
        writer.update_task(devices=self.devices, workers=self.devices, engine=self.engine)
        if self.settings is not None:
            writer.write_meta({"settings": self.settings})
        name_of = (lambda chunk: self.names[chunk.recording_id]) if self.names else None
        writer.fill(map(self._chunk, self.states), lambda rows: None, name_of)
        if self.shard is not None:
            writer.update_task(shard_index=self.shard[0], shard_count=self.shard[1])
        worker_id = writer.worker_started(device_id=device_id, pid=7, engine="demo", at_ms=self.started_at_ms)
        for name, state in self.states.items():
            if state == "skipped":
                change(writer.path, "UPDATE chunk SET status = 'skipped' WHERE chunk_id = ?", name)
            elif state != "pending":
                result = self._result(name, state)
                writer.attempt_ended(result, status=state, try_number=1, worker_id=worker_id, device_id=device_id)
        if self.ended_at_ms is not None:
            writer.update_task(ended_at_ms=self.ended_at_ms, exit_code=0, verdict=self.verdict)

    def _chunk(self, name: str) -> Chunk:
        return make_chunk(name, name if name in self.names else "rec")

    def _result(self, name: str, state: str) -> ChunkResult:
        times = (self.chunk_ended_at_ms - 1000, self.chunk_ended_at_ms)
        if state == "done":
            heard = tuple(Detection(100, 600, label, 0.9, f"{label} sound") for label in self.labels)
            return ChunkResult(self._chunk(name), *times, heard, audio_s=30.0)
        return ChunkResult(self._chunk(name), *times, error_class="bad_audio", error=f"{name}: no luck")

    def _write_telemetry(self, telemetry: TelemetryWriter, device_ids: list[int]) -> None:
        readings = [(device_id, self.reading) for device_id in device_ids]
        with telemetry.batch():
            for tick in range(self.samples):
                host = HostReading(12.5, 4 * 2**30, 16 * 2**30)
                telemetry.write_tick(self.started_at_ms + tick * 1000, readings, host)
        for from_ms, to_ms, reason in self.gaps:
            telemetry.open_gap(None, None, self.started_at_ms + from_ms, self.started_at_ms + to_ms, reason)


def merge_run(run: Path, *inputs: Path, target: str = "job.sqlite", **more: Any) -> MergeOutcome:
    """Merge a run folder, or some of its files."""
    return merge(MergeOrder(inputs or [run], run / target, **more), SystemClock())


def make_job(folder: Path) -> Path:
    """Write two tasks (a done, b failed, c pending; d and e done) into a run folder, merge them, return job.sqlite."""
    first = {"a": "done", "b": "failed", "c": "pending"}
    TaskFile(folder, index=0, states=first, verdict="stopped").write()
    TaskFile(folder, index=1, states={"d": "done", "e": "done"}, labels=("LOUD", "SOFT")).write()
    merge_run(folder)
    return folder / "job.sqlite"


def add_host_samples(database: Path, count: int) -> Path:
    """Give a task database so many more of them, quicker than a recorder would."""
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < ?)"
    return change(database, f"{numbers} INSERT INTO host_sample SELECT 1, i, i / 7.0, i * 1000, NULL FROM n", count)
