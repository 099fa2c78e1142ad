"""Writes a played task with the hands of a real one: both live files, published, sealed."""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rooms.model import AlertLimits, Allocation, Chunk, ChunkResult, Device, HostReading, Reading, TaskKey, UsageReading
from rooms.store import TaskWriter, publish
from rooms.telemetry import AlertBook, Followed, TelemetryWriter
from support.task_files import START_MS
from support.trace_task import GIB, TICK_S, Attempt, Play, Story

_ERRORS = {
    "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "bad_audio": "Caught exception in audio load: Format not recognised",
    "engine_crash": "Segmentation fault",
    "gpu_lost": "CUDA error: GPU is lost",
    "ran_on_cpu": "the engine has no CUDA and went on with the CPU",
}
IN_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # there are hundreds of files, for a moment each
_SPIN_UP_S = 60.0  # until host memory is at its height
_THERMAL = 0x60


class TraceWriter:
    """Writes one task into ``folder``/tasks."""

    def __init__(self, folder: Path, story: Story) -> None:
        self._story, self._play = story, Play(story)
        self._key = TaskKey("4821", story.index, story.restart, story.node)
        self._start_ms = START_MS + round(story.started_s * 1000)
        self._target = folder / "tasks" / f"{self._key.name}.sqlite"
        self._chance = random.Random(story.seed + 7919)

    def write(self) -> Path:
        """Write, publish, and return the published file."""
        self._target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=IN_MEMORY) as local:
            halves = [Path(local) / "wrapper.sqlite", Path(local) / "recorder.sqlite"]
            with closing(TaskWriter(halves[0], self._key)) as writer:
                ids = self._begin(writer)
                with writer.batch():
                    self._write_work(writer, ids)
                if self._story.telemetry:
                    with closing(TelemetryWriter(halves[1], self._key.task_id)) as telemetry, telemetry.batch():
                        self._write_telemetry(telemetry, ids)
                publish(halves if self._story.telemetry else halves[:1], self._target, closing=self._last_words())
        os.utime(self._target, ns=(self._at(self._play.end_s) * 10**6,) * 2)
        return self._target

    def _last_words(self) -> dict[str, object]:
        """Return what the next task on the node, and Slurm's hooks, say of a task that was killed."""
        slurm_state = {"slurm_state": self._story.slurm_state}
        if self._story.killed_s is None:
            return dict(slurm_state)
        return {"ended_at_ms": self._at(self._play.end_s), "verdict": "killed", **slurm_state}

    def _at(self, seconds: float) -> int:
        return self._start_ms + round(seconds * 1000)

    # --- the wrapper's half ---------------------------------------------------------------------------------------

    def _devices(self) -> list[Device]:
        story, card = self._story, self._story.card
        watts = card.limit_w if "power" in card.metrics else None
        return [
            Device(str(n), "test", n, f"{card.uuid}-{story.node}-{n}", card.name, "nvml", card.memory_gib * GIB, watts,
                   slowdown_c=card.slowdown_c)
            for n in range(story.devices)
        ]  # fmt: skip

    def _chunk(self, number: int) -> Chunk:
        length_ms = round(self._story.chunks[number] * 1000)
        name = f"site{self._story.index:03d}-{self._story.done_before + number:05d}"
        return Chunk(name, name, f"{name}.wav", f"/scratch/lab/{name}.wav", 0, length_ms)

    def _begin(self, writer: TaskWriter) -> list[int]:
        story = self._story
        allocation = Allocation(True, "4821", story.node, array_index=story.index, cpus=story.cores)
        writer.begin_task(
            allocation, started_at_ms=self._start_ms, pid=42, version="0.1.0", engine=story.engine,
            telemetry=story.telemetry, time_limit_s=story.time_limit_s,
            memory_limit_bytes=None if story.memory_limit_gib is None else round(story.memory_limit_gib * GIB),
        )  # fmt: skip
        workers_per_gpu = str(story.workers)
        writer.write_meta({"settings": json.dumps({"workers_per_gpu": workers_per_gpu, **story.settings})})
        writer.add_devices(self._devices())
        writer.update_task(devices=story.devices, workers=len(self._play.places))
        writer.fill([self._chunk(number) for number in range(len(story.chunks))], lambda rows: None)
        return [writer.device_id(device) for device in self._devices()]

    def _write_work(self, writer: TaskWriter, ids: list[int]) -> None:
        story, play = self._story, self._play
        workers = [
            writer.worker_started(
                device_id=None if life.device is None else ids[life.device],
                pid=100 + n, engine=story.engine, at_ms=self._at(life.start_s),
            )
            for n, life in enumerate(play.lives)
        ]  # fmt: skip
        for attempt in sorted(play.attempts, key=lambda a: a.start_s):
            device_id = None if attempt.device is None else ids[attempt.device]
            self._write_attempt(writer, attempt, workers[attempt.worker], device_id)
        for worker, life in zip(workers, play.lives, strict=True):
            if life.end_s is not None:
                writer.worker_ended(worker, exit_code=0, at_ms=self._at(life.end_s))
        for reading, at_ms in self._usage() if story.usage else ():
            writer.add_usage(reading, at_ms)
        for kind, subject, value, reason in story.decisions:
            writer.add_decision(kind, subject, value, reason, self._at(60))
        if story.killed_s is None and story.under_way_s is None:
            verdict = "stopped" if story.stopped_s else "failed" if story.hopeless else "done"
            writer.update_task(ended_at_ms=self._at(play.end_s), exit_code=0, verdict=verdict)

    def _write_attempt(self, writer: TaskWriter, attempt: Attempt, worker_id: int, device_id: int | None) -> None:
        chunk, begin_ms = self._chunk(attempt.chunk), self._at(attempt.start_s)
        if attempt.end_s is None:
            writer.attempt_started(
                chunk, try_number=attempt.try_number, worker_id=worker_id, device_id=device_id, at_ms=begin_ms
            )
            return
        error = None if attempt.error_class is None else _ERRORS.get(attempt.error_class, "no luck")
        status = "done" if error is None else self._story.hopeless[attempt.chunk] if attempt.last else "pending"
        result = ChunkResult(
            chunk, begin_ms, self._at(attempt.end_s), (), chunk.audio_s, attempt.error_class, error,
            charged=attempt.error_class not in ("gpu_lost", "ran_on_cpu"),
        )  # fmt: skip
        writer.attempt_ended(
            result, status=status, try_number=attempt.try_number, worker_id=worker_id, device_id=device_id
        )

    def _usage(self) -> Iterator[tuple[UsageReading, int]]:
        cores, lives = self._play.density(None, "cpu_s"), len(self._play.places)
        for tick in range(1, int(self._play.end_s / TICK_S), 2):
            at_s = tick * TICK_S
            warm = min(1.0, max(0.0, at_s - self._story.prepare_s) / _SPIN_UP_S)
            memory = (0.25 + lives * self._story.worker_gib * warm) * self._chance.uniform(0.97, 1.0) * GIB
            used = min(float(self._story.cores), (cores[tick - 1] + cores[tick]) / 2 + 0.03)
            yield UsageReading(used, round(memory), 2e6, lives + 2, "pss"), self._at(at_s)

    # --- the recorder's half --------------------------------------------------------------------------------------

    def _write_telemetry(self, telemetry: TelemetryWriter, ids: list[int]) -> None:
        story, play = self._story, self._play
        followed = [
            Followed(device_id, device.uuid, device.index, device.memory_total_bytes, device.power_limit_w,
                     device.slowdown_c)
            for device_id, device in zip(ids, self._devices(), strict=True)
        ]  # fmt: skip
        alerts = AlertBook(telemetry, followed, AlertLimits())
        loads = [play.density(device, "gpu_s") for device in range(story.devices)]
        cores = play.density(None, "cpu_s")
        energy = [1e6] * story.devices
        last_begun_s = max((attempt.start_s for attempt in play.attempts), default=0.0)
        for tick in range(int(play.end_s / TICK_S)):
            at_s = (tick + 1) * TICK_S
            alerts.work_waits = at_s < last_begun_s
            readings, silent = [], {}
            for n, device_id in enumerate(ids):
                reading = self._reading(n, at_s, min(1.0, loads[n][tick]), energy)
                if at_s >= story.lost.get(n, play.end_s + 1):
                    silent[device_id] = "GPU is lost"
                elif not any(who in (None, n) and a <= at_s < b for who, a, b, _ in story.gaps):
                    readings.append((device_id, reading))
            host = HostReading(100 * min(1.0, (cores[tick] + 1.5) / max(story.cores, 16)), 60 * GIB, 180 * GIB)
            telemetry.write_tick(self._at(at_s), readings, host)
            alerts.write(self._at(at_s), readings, silent)
            alerts.written()
        alerts.finish()
        self._write_beside(telemetry, ids)

    def _write_beside(self, telemetry: TelemetryWriter, ids: list[int]) -> None:
        for who, from_s, to_s, reason in self._story.gaps:
            device_id = None if who is None else ids[who]
            telemetry.open_gap(device_id, None, self._at(from_s), self._at(min(to_s, self._play.end_s)), reason)
        for who, lost_s in self._story.lost.items():
            telemetry.open_gap(ids[who], None, self._at(lost_s), self._at(self._play.end_s), "GPU is lost")
        for who, from_s, to_s, gib in self._story.foreign:
            telemetry.put(
                "process",
                {"device_id": ids[who], "pid": 4711, "name": "python", "user": "somebody", "ours": 0,
                 "first_at_ms": self._at(from_s), "last_at_ms": self._at(to_s), "memory_peak_bytes": round(gib * GIB)}
            )  # fmt: skip

    def _reading(self, n: int, at_s: float, load: float, energy_j: list[float]) -> Reading:
        story, card, chance = self._story, self._story.card, self._chance
        hot = story.throttle.get(n, 0) if at_s > self._play.end_s / 4 and load > 0 else 0
        watts = card.idle_w + (0.85 * card.limit_w - card.idle_w) * load * chance.uniform(0.92, 1.04)
        energy_j[n] += watts * TICK_S * story.counter_factor
        placed = 0 if story.on_cpu or n in story.idle_devices else story.workers
        warm = at_s > story.prepare_s + story.start_up_s / 2
        if story.engine == "command":  # comes and goes with each program
            warm = warm and chance.random() < 0.5
        held = sum(gib for who, a, b, gib in story.foreign if who == n and a <= at_s <= b)
        memory_gib = min(0.98 * card.memory_gib, 0.3 + held + (1.7 * placed if warm else 0.0))
        temperature = 36 + 32 * load + chance.uniform(-2, 2) + (15 if hot & _THERMAL else 0)
        percent = 100 * load * chance.uniform(0.93, 1.03)
        coarse = 0 if percent < 6 else min(100, round(percent))
        ask = card.metrics
        return Reading(
            utilization_percent=coarse if "utilization" in ask else None,
            busy_percent=min(100.0, percent) if "busy" in ask else None,
            memory_used_bytes=round(memory_gib * GIB),
            temperature_c=round(temperature),
            power_w=round(watts, 1) if "power" in ask else None,
            energy_j=round(energy_j[n], 3) if "energy" in ask and round(at_s) % 10 == 0 else None,
            sm_clock_mhz=round(card.clock_mhz * (0.55 if hot and n in story.slowness else 0.94 if load else 0.2)),
            throttle_reasons=hot if load else 0x1,
            ecc_errors=3 if at_s >= story.ecc.get(n, self._play.end_s + 1) else 0,
            faults=tuple(
                what for when, (who, what) in story.faults.items() if who == n and when <= at_s < when + TICK_S
            ),
        )
