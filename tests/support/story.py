"""One array task as it would have been: its workers, chunks and devices are played through, then written for real.

Nothing here knows what the report thinks of it. A chunk costs waiting for its file, work of one core and work of the
device; who waits for whom follows from how many workers, cores and devices there are. The figures are those measured
with HawkEars: 17 s until a worker is warm, 0.2 s of a core and 0.015 s of an H200 for 30 s of audio.
"""

import heapq
import json
import math
import os
import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from rooms import model
from rooms.model import Chunk, Code, Decision, Reading, TaskKey
from rooms.store import TaskWriter, publish
from rooms.telemetry import AlertBook, Followed, TelemetryWriter
from support.task_files import IN_MEMORY, START_MS

GIB = 2**30
JOB_ID = "4821"
_KILLERS = ("engine_crash", "gpu_lost")  # of a worker
_WARM_S = 60.0  # until host memory is at its height
_THERMAL = 0x60
_ERRORS = {
    "out_of_memory": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
    "bad_audio": "Caught exception in audio load: Format not recognised",
    "engine_crash": "the worker ended with signal 11 (SIGSEGV) while it had this chunk",
    "gpu_lost": "CUDA error: GPU is lost",
    "batch_lost": "another chunk of its batch ended the worker",
}


@dataclass(frozen=True)
class Card:
    """A model of GPU: ``gpu_s`` is its work for 30 s of audio."""

    name: str
    gpu_s: float
    memory_gib: int
    limit_w: float
    idle_w: float
    clock_mhz: int
    slowdown_c: int | None
    is_slice: bool = False  # then it tells neither load nor power


H200 = Card("NVIDIA H200", 0.015, 141, 700, 75, 1980, 90)
V100 = Card("Tesla V100-SXM2-32GB", 0.08, 32, 300, 42, 1530, 87)
RTX4000 = Card("Quadro RTX 4000", 0.15, 8, 160, 11, 1545, 92)
MIG = Card("NVIDIA A100 MIG 1g.10gb", 0.3, 10, 400, 50, 1410, None, is_slice=True)


@dataclass(frozen=True)
class Story:
    """What one array task was given, and what befell it; times in seconds from its start."""

    index: int = 0
    node: str = "gpu1"
    card: Card = V100
    devices: int = 2
    workers: int = 4  # per device
    cores: int = 16
    chunks: Sequence[float] = ()  # seconds of audio each, in the order of the queue
    cpu_s: float = 0.2  # of one core, for 30 s of audio
    read_s: float = 0.02  # waiting for the file of one chunk
    pause_s: float = 0.0  # until a worker that is done has its next chunk
    start_up_s: float = 17.0
    prepare_s: float = 4.0  # before the first worker is started
    end_s: float = 2.0  # after the last chunk
    idle_devices: frozenset[int] = frozenset()  # on which no worker was started
    slowness: Mapping[int, float] = field(default_factory=dict)  # device → factor on everything
    throttle: Mapping[int, int] = field(default_factory=dict)  # device → NVML's bits, from a quarter of the time on
    fails: Mapping[int, tuple[str, ...]] = field(default_factory=dict)  # chunk → how its first tries fail
    hopeless: Mapping[int, str] = field(default_factory=dict)  # chunk → its state after these; else it is done then
    lost: Mapping[int, float] = field(default_factory=dict)  # device → when it fell off the bus
    killed_s: float | None = None
    under_way_s: float | None = None  # it had not ended when it was published for the last time
    done_before: int = 0  # chunks of its part that an earlier attempt has done
    stopped_s: float | None = None  # orderly: no chunk is begun after it
    slurm_state: str | None = None
    restart: int = 0
    started_s: float = 0.0
    memory_limit_gib: float | None = None
    time_limit_s: float | None = None
    gaps: Sequence[tuple[float, float, str]] = ()  # from, to, reason
    foreign: Sequence[tuple[int, float, float, float]] = ()  # device, from, to, GiB
    faults: Mapping[float, tuple[int, str]] = field(default_factory=dict)  # when → device, what it reports
    ecc: Mapping[int, float] = field(default_factory=dict)  # device → when its count rises
    on_cpu: bool = False  # the engine does not use the device it was given
    telemetry: bool = True
    tick_s: float = 10.0  # between two samples; the recorder's is 1 s, and 15 s may still be joined
    decisions: Sequence[tuple[str, str | None, Mapping[str, object]]] = ()  # code, subject, figures
    settings: Mapping[str, object] = field(default_factory=dict)
    species: Sequence[tuple[str, str]] = ()  # that are heard, the first ones most often
    left_out: bool = False  # its one recording, because nothing places it
    seed: int = 1

    @property
    def key(self) -> TaskKey:
        return TaskKey(JOB_ID, self.index, self.restart, self.node)

    def chunk(self, number: int) -> Chunk:
        length_ms, number = round(self.chunks[number] * 1000), self.done_before + number
        plot, day = f"plot{number // 20:02d}", f"2026{5 + self.index // 30 % 3:02d}{1 + self.index % 30:02d}"
        path = f"{plot}/{day}_{number % 24:02d}0000_{number:04d}.flac"
        return Chunk(f"{plot}-{self.index:04d}", f"c{number:04d}", path, f"/scratch/audio/{path}", 0, length_ms)


@dataclass
class Attempt:
    chunk: int
    worker: int
    device: int | None
    try_number: int
    start_s: float
    end_s: float | None  # None: no sign of it ever came again
    error_class: str | None
    gpu_s: float
    cpu_s: float
    last: bool  # after it nothing is tried any more, though it failed


@dataclass
class Life:  # of one engine process
    device: int | None
    start_s: float = 0.0
    end_s: float | None = None


class Play:
    """The course of a story."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._cut_s = story.killed_s or story.under_way_s or math.inf
        self._chance = random.Random(story.seed)
        used = [device for device in range(story.devices) if device not in story.idle_devices]
        self.lives = [Life(device) for device in used or [None] for _ in range(story.workers)]
        self.places = len(self.lives)
        self.attempts: list[Attempt] = []
        self._queue = [(number, 1) for number in range(len(story.chunks))]
        self._run()

    def _run(self) -> None:
        story = self.story
        heap: list[tuple[float, int]] = []
        for n, life in enumerate(self.lives):
            life.start_s = story.prepare_s + 0.2 * n
            heapq.heappush(heap, (life.start_s + story.start_up_s * self._chance.uniform(0.9, 1.15), n))
        while heap and self._queue:
            now_s, worker = heapq.heappop(heap)
            life = self.lives[worker]
            if now_s >= min(self._cut_s, story.stopped_s or math.inf):
                continue
            if now_s >= self._lost_s(life.device):
                life.end_s = now_s
                continue
            end_s, error = self._try(now_s, worker, *self._queue.pop(0))
            if error not in _KILLERS:
                heapq.heappush(heap, (end_s + 0.001 + story.pause_s, worker))
                continue
            life.end_s = end_s
            if error != "gpu_lost":
                self.lives.append(Life(life.device, end_s + 1))
                heapq.heappush(heap, (end_s + 1 + story.start_up_s, len(self.lives) - 1))
        ends = [a.end_s or 0.0 for a in self.attempts] + [life.start_s + story.start_up_s for life in self.lives]
        self.end_s = max(ends) + story.end_s if self._cut_s == math.inf else self._cut_s
        for life in self.lives if self._cut_s == math.inf else ():
            life.end_s = life.end_s or self.end_s - 1

    def _lost_s(self, device: int | None) -> float:
        return math.inf if device is None else self.story.lost.get(device, math.inf)

    def _pace(self, device: int | None, audio_s: float) -> tuple[float, float, float]:
        """Return how long a chunk takes on one of the workers, and what it takes of device and core."""
        story, units = self.story, audio_s / 30
        without = device is None or story.on_cpu
        slow = 1.0 if device is None else story.slowness.get(device, 1.0)
        gpu = 0.0 if without else story.card.gpu_s * units * slow
        cpu = story.cpu_s * units * (8.0 if without else 1.0)
        alone_s = (story.read_s + cpu) * slow + gpu
        takes_s = max(alone_s, story.workers * gpu / 0.96, cpu * self.places / story.cores)
        # A process that waits for a device does it at full speed: CUDA spins.
        burnt = takes_s - (story.read_s + cpu) * slow + cpu
        return takes_s, gpu, max(0.02 * takes_s, min(burnt, story.cores * takes_s / self.places))

    def _try(self, now_s: float, worker: int, chunk: int, number: int) -> tuple[float, str | None]:
        story, device = self.story, self.lives[worker].device
        takes_s, gpu_s, cpu_s = self._pace(device, story.chunks[chunk])
        noise = math.exp(self._chance.gauss(0, 0.12))
        errors = story.fails.get(chunk, ())
        error = errors[number - 1] if number <= len(errors) else None
        share = 1.0 if error is None else self._chance.uniform(0.3, 0.8)
        end_s = now_s + share * takes_s * noise
        if end_s >= self._lost_s(device):
            end_s, error = self._lost_s(device), "gpu_lost"
        is_cut = end_s >= self._cut_s
        last = error is not None and number == len(errors) and chunk in story.hopeless
        spent = (gpu_s * share, cpu_s * share)
        heard_s = None if is_cut else end_s
        self.attempts.append(Attempt(chunk, worker, device, number, now_s, heard_s, error, *spent, last))
        if error is not None and not last and not is_cut:
            self._queue.insert(0, (chunk, number + (error != "gpu_lost")))
        return end_s, error

    def density(self, device: int | None, what: str) -> list[float]:
        """Return the mean of gpu_s (or cpu_s) per second, tick by tick; device None: over all."""
        found = [0.0] * (int(self.end_s / self.story.tick_s) + 2)
        for a in self.attempts:
            if device is None or a.device == device:
                self._spread(found, a.start_s, self.end_s if a.end_s is None else a.end_s, getattr(a, what))
        for life in self.lives if what == "cpu_s" else ():
            warm_s = min(life.start_s + self.story.start_up_s, self.end_s)
            self._spread(found, life.start_s, warm_s, 0.7 * (warm_s - life.start_s))
        return found

    def _spread(self, found: list[float], from_s: float, to_s: float, amount: float) -> None:
        """Add an amount evenly between two moments; each place holds the mean per second of one tick."""
        tick_s = self.story.tick_s
        for tick in range(int(from_s / tick_s), min(int(to_s / tick_s) + 1, len(found))) if to_s > from_s else ():
            inside_s = min(to_s, (tick + 1) * tick_s) - max(from_s, tick * tick_s)
            found[tick] += amount / (to_s - from_s) * max(0.0, inside_s) / tick_s


# --- written with the hands of a real task ----------------------------------------------------------------------------


def write_story(folder: Path, story: Story) -> Path:
    """Write both live files of a task, publish them into ``folder``, and return the published file."""
    task = _Task(story)
    target = folder / f"{story.key.name}.sqlite"
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as local:
        halves = [Path(local) / "wrapper.sqlite", Path(local) / "recorder.sqlite"]
        with closing(TaskWriter(halves[0], story.key)) as writer:
            task.begin(writer)
            with writer.batch():
                task.write_work(writer)
            if story.telemetry:
                with closing(TelemetryWriter(halves[1], story.key.task_id)) as telemetry, telemetry.batch():
                    task.write_telemetry(telemetry)
            # What the next task on the node, and Slurm's hooks, say of a task that was killed.
            killed = {} if story.killed_s is None else {"ended_at_ms": task.at(task.play.end_s), "verdict": "killed"}
            last_words = {**killed, "slurm_state": story.slurm_state}
            publish(halves if story.telemetry else halves[:1], target, closing=last_words)
    os.utime(target, ns=(task.at(task.play.end_s) * 10**6,) * 2)
    return target


class _Task:
    def __init__(self, story: Story) -> None:
        self._story, self.play = story, Play(story)
        self._chance = random.Random(story.seed + 7919)
        card, uuid = story.card, "MIG" if story.card.is_slice else "GPU"
        watts = None if card.is_slice else card.limit_w
        self._devices = [model.Device(str(n), "test", n, f"{uuid}-{story.node}-{n}", card.name, "nvml",
                                      memory_total_bytes=card.memory_gib * GIB, power_limit_w=watts,
                                      slowdown_c=card.slowdown_c) for n in range(story.devices)]  # fmt: skip
        self._ids: list[int] = []
        self._watts = [card.idle_w] * story.devices

    def at(self, seconds: float) -> int:
        return START_MS + round(self._story.started_s * 1000) + round(seconds * 1000)

    def _id(self, device: int | None) -> int | None:
        return None if device is None else self._ids[device]

    def begin(self, writer: TaskWriter) -> None:
        story = self._story
        memory_bytes = None if story.memory_limit_gib is None else round(story.memory_limit_gib * GIB)
        writer.begin_task(
            model.Allocation(True, JOB_ID, story.node, array_index=story.index, cpus=story.cores), pid=42,
            started_at_ms=self.at(0), version="0.7.0", engine="hawkears", telemetry=story.telemetry,
            time_limit_s=story.time_limit_s, memory_limit_bytes=memory_bytes,
        )  # fmt: skip
        writer.write_meta({"settings": json.dumps({"workers_per_gpu": str(story.workers), **story.settings})})
        writer.add_devices(self._devices)
        self._ids = [writer.device_id(device) for device in self._devices]
        writer.update_task(devices=story.devices, workers=self.play.places)
        writer.fill([story.chunk(number) for number in range(len(story.chunks))], lambda rows: None)
        if story.left_out:
            one = Chunk("a", "a", "a.wav", "/scratch/audio/a.wav")
            writer.fill([one], lambda rows: None, lambda chunk: model.RecordingName(left_out="no_place"))

    def write_work(self, writer: TaskWriter) -> None:
        story, play = self._story, self.play
        born = [(self._id(life.device), self.at(life.start_s)) for life in play.lives]
        workers = [writer.worker_started(device_id=device, pid=100 + n, engine="hawkears", at_ms=at_ms)
                   for n, (device, at_ms) in enumerate(born)]  # fmt: skip
        for attempt in sorted(play.attempts, key=lambda a: a.start_s):
            self._write_attempt(writer, attempt, workers[attempt.worker])
        for worker, life in zip(workers, play.lives, strict=True):
            if life.end_s is not None:
                writer.worker_ended(worker, exit_code=0, at_ms=self.at(life.end_s))
        for reading, at_ms in self._usage():
            writer.add_usage(reading, at_ms)
        for code, subject, figures in story.decisions:
            writer.add_decision(Decision.of(Code(code), subject, **figures), self.at(60))
        if story.killed_s is None and story.under_way_s is None:
            verdict = "stopped" if story.stopped_s else "failed" if story.hopeless else "done"
            writer.update_task(ended_at_ms=self.at(play.end_s), exit_code=0, verdict=verdict)

    def _write_attempt(self, writer: TaskWriter, attempt: Attempt, worker_id: int) -> None:
        chunk, begin_ms, error_class = self._story.chunk(attempt.chunk), self.at(attempt.start_s), attempt.error_class
        by = {"try_number": attempt.try_number, "worker_id": worker_id, "device_id": self._id(attempt.device)}
        if attempt.end_s is None:
            writer.attempt_started(chunk, at_ms=begin_ms, **by)
            return
        error = None if error_class is None else _ERRORS[error_class]
        status = "done" if error is None else self._story.hopeless[attempt.chunk] if attempt.last else "pending"
        heard = tuple(self._heard()) if error is None else ()
        ended = (self.at(attempt.end_s), heard, chunk.audio_s, error_class, error)
        result = model.ChunkResult(chunk, begin_ms, *ended, charged=error_class not in ("gpu_lost", "batch_lost"))
        writer.attempt_ended(result, status=status, **by)

    def _heard(self) -> Iterator[model.Detection]:
        species, chance = self._story.species, self._chance
        for n in range(chance.randrange(9) if species else 0):
            label, name = species[min(int(chance.expovariate(0.22)), len(species) - 1)]
            yield model.Detection(n * 9000, n * 9000 + 3000, label, round(chance.uniform(0.6, 0.99), 3), name)

    def _usage(self) -> Iterator[tuple[model.UsageReading, int]]:
        story, cores, workers = self._story, self.play.density(None, "cpu_s"), self.play.places
        for tick in range(1, int(self.play.end_s / story.tick_s), 2):
            warm = min(1.0, max(0.0, tick * story.tick_s - story.prepare_s) / _WARM_S)
            memory = (0.25 + workers * 2.4 * warm) * self._chance.uniform(0.97, 1.0) * GIB
            used = min(float(story.cores), (cores[tick - 1] + cores[tick]) / 2 + 0.03)
            yield model.UsageReading(used, round(memory), 2e6, workers + 2, "pss"), self.at(tick * story.tick_s)

    def write_telemetry(self, telemetry: TelemetryWriter) -> None:
        story, play = self._story, self.play
        followed = [Followed(i, one.uuid, one.index, one.memory_total_bytes, one.power_limit_w, one.slowdown_c)
                    for i, one in zip(self._ids, self._devices, strict=True)]  # fmt: skip
        alerts = AlertBook(telemetry, followed, model.AlertLimits(), tell=lambda alert: None)
        loads = [play.density(device, "gpu_s") for device in range(story.devices)]
        cores, energy = play.density(None, "cpu_s"), [1e6] * story.devices
        last_begun_s = max((attempt.start_s for attempt in play.attempts), default=0.0)
        for tick in range(int(play.end_s / story.tick_s)):
            at_s = (tick + 1) * story.tick_s
            alerts.work_waits = at_s < last_begun_s
            readings = [(i, self._reading(n, at_s, min(1.0, loads[n][tick]), energy)) for n, i in enumerate(self._ids)]
            silent = {i: "GPU is lost" for n, i in enumerate(self._ids) if at_s >= story.lost.get(n, math.inf)}
            in_gap = any(from_s <= at_s < to_s for from_s, to_s, _ in story.gaps)
            readings = [] if in_gap else [(i, reading) for i, reading in readings if i not in silent]
            host = model.HostReading(100 * min(1.0, (cores[tick] + 1.5) / max(story.cores, 16)), 60 * GIB, 180 * GIB)
            telemetry.write_tick(self.at(at_s), readings, host)
            alerts.write(self.at(at_s), readings, silent)
            alerts.written()
        alerts.finish()
        gaps = [(None, *gap) for gap in story.gaps]
        for who, from_s, to_s, reason in [*gaps, *((n, s, play.end_s, "GPU is lost") for n, s in story.lost.items())]:
            if from_s < play.end_s:
                telemetry.open_gap(self._id(who), None, self.at(from_s), self.at(min(to_s, play.end_s)), reason)
        for who, from_s, to_s, gib in story.foreign:
            process = {"device_id": self._ids[who], "pid": 4711, "name": "python", "user": "somebody", "ours": 0}
            times = {"first_at_ms": self.at(from_s), "last_at_ms": self.at(to_s)}
            telemetry.put("process", {**process, **times, "memory_peak_bytes": round(gib * GIB)})

    def _reading(self, n: int, at_s: float, load: float, energy_j: list[float]) -> Reading:
        story, card, chance = self._story, self._story.card, self._chance
        hot = story.throttle.get(n, 0) if at_s > self.play.end_s / 4 and load > 0 else 0
        watts = card.idle_w + (0.85 * card.limit_w - card.idle_w) * load * chance.uniform(0.92, 1.04)
        energy_j[n] += (watts + self._watts[n]) / 2 * story.tick_s
        self._watts[n] = watts
        placed = 0 if story.on_cpu or n in story.idle_devices else story.workers
        warm = at_s > story.prepare_s + story.start_up_s / 2
        held = sum(gib for who, a, b, gib in story.foreign if who == n and a <= at_s <= b)
        memory_gib = min(0.98 * card.memory_gib, 0.3 + held + (1.7 * placed if warm else 0.0))
        percent = min(100.0, 100 * load * chance.uniform(0.93, 1.03))
        reported = not card.is_slice
        faults = ((who, what) for when, (who, what) in story.faults.items() if when <= at_s < when + story.tick_s)
        return Reading(
            utilization_percent=(0 if percent < 6 else round(percent)) if reported else None,
            busy_percent=percent if reported else None, memory_used_bytes=round(memory_gib * GIB),
            temperature_c=round(36 + 32 * load + chance.uniform(-2, 2) + (15 if hot & _THERMAL else 0)),
            power_w=round(watts, 1) if reported else None,
            energy_j=round(energy_j[n], 3) if round(at_s) % 10 == 0 else None,
            sm_clock_mhz=round(card.clock_mhz * (0.55 if hot and n in story.slowness else 0.94 if load else 0.2)),
            throttle_reasons=hot if load else 0x1, ecc_errors=3 if at_s >= story.ecc.get(n, math.inf) else 0,
            faults=tuple(what for who, what in faults if who == n),
        )  # fmt: skip
