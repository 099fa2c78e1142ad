"""One array task as it would have been: its workers, chunks and devices are played through, then written for real.

Nothing here knows what the report thinks of it. A chunk costs waiting for its file, work of one core and work of the
device; who waits for whom follows from how many workers, cores and devices there are. The figures are those measured
with HawkEars: 17 s until a worker is warm, 0.2 s of a core and 0.015 s of an H200 for 30 s of audio.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

TICK_S = 5.0  # between two samples; the recorder's is 1 s, and 15 s may still be joined
GIB = 2**30


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
    uuid: str = "GPU"
    metrics: frozenset[str] = frozenset({"utilization", "busy", "power", "energy"})

    def without(self, *metrics: str) -> Card:
        return Card(
            self.name, self.gpu_s, self.memory_gib, self.limit_w, self.idle_w, self.clock_mhz, self.slowdown_c,
            self.uuid, self.metrics - set(metrics),
        )  # fmt: skip


H200 = Card("NVIDIA H200", 0.015, 141, 700, 75, 1980, 90)
V100 = Card("Tesla V100-SXM2-32GB", 0.08, 32, 300, 42, 1530, 87)
RTX4000 = Card("Quadro RTX 4000", 0.15, 8, 160, 11, 1545, 92)
MIG = Card("NVIDIA A100 MIG 1g.10gb", 0.3, 10, 400, 50, 1410, None, "MIG").without("utilization", "busy", "power")


@dataclass(frozen=True)
class Story:
    """What one array task was given, and what befell it."""

    index: int = 0
    node: str = "gpu1"
    card: Card = V100
    devices: int = 2
    workers: int = 4  # per device
    cores: int = 16
    engine: str = "hawkears"
    chunks: Sequence[float] = ()  # seconds of audio each, in the order of the queue
    cpu_s: float = 0.2  # of one core, for 30 s of audio
    threads: int = 1  # of one worker
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
    gives_up: Mapping[int, str] = field(default_factory=dict)  # device → how its workers end at their first chunk
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
    worker_gib: float = 2.4  # host memory
    usage: bool = True
    gaps: Sequence[tuple[int | None, float, float, str]] = ()  # device, from, to, reason
    foreign: Sequence[tuple[int, float, float, float]] = ()  # device, from, to, GiB
    faults: Mapping[float, tuple[int, str]] = field(default_factory=dict)  # when → device, what it reports
    ecc: Mapping[int, float] = field(default_factory=dict)  # device → when its count rises
    counter_factor: float = 1.0  # what the energy counter counts of the true energy
    on_cpu: bool = False  # the engine does not use the device it was given
    telemetry: bool = True
    decisions: Sequence[tuple[str, str | None, float, str]] = ()
    settings: Mapping[str, object] = field(default_factory=dict)
    seed: int = 1


@dataclass
class Attempt:
    """One try; ``end_s`` None: nobody ever heard of it again."""

    chunk: int
    worker: int
    device: int | None
    try_number: int
    start_s: float
    end_s: float | None
    error_class: str | None
    gpu_s: float
    cpu_s: float
    last: bool  # after it nothing is tried any more, though it failed


@dataclass
class Life:
    """One engine process."""

    device: int | None
    start_s: float
    end_s: float | None = None


_KILLERS = ("engine_crash", "hang", "worker_died", "gpu_error")
_RETIRING = ("gpu_lost", "ran_on_cpu")


class Play:
    """The course of a story."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self._cut_s = story.killed_s or story.under_way_s
        self.lives: list[Life] = []
        self.attempts: list[Attempt] = []
        self.chance = random.Random(story.seed)
        used = [device for device in range(story.devices) if device not in story.idle_devices]
        self.places: list[int | None] = [device for device in used or [None] for _ in range(story.workers)]
        self._queue: list[tuple[int, int]] = [(number, 1) for number in range(len(story.chunks))]
        self._run()

    def pace(self, device: int | None, audio_s: float) -> tuple[float, float, float]:
        """Return how long a chunk takes on one of the workers, and what it takes of device and core."""
        story, units = self.story, audio_s / 30
        gpu = 0.0 if device is None or story.on_cpu else story.card.gpu_s * units
        cpu = story.cpu_s * units * (8.0 if device is None or story.on_cpu else 1.0)
        slow = story.slowness.get(device, 1.0) if device is not None else 1.0
        gpu *= slow
        alone_s = (story.read_s + cpu / story.threads) * slow + gpu
        sharing = max(1, story.workers)
        of_cores = cpu * len(self.places) / story.cores
        takes_s = max(alone_s, sharing * gpu / 0.96, of_cores)
        # Whoever waits for a device does it at full speed: CUDA spins.
        burnt = takes_s - (story.read_s + cpu / story.threads) * slow + cpu
        burnt = min(burnt, story.cores * takes_s / max(1, len(self.places)))
        return takes_s, gpu, max(0.02 * takes_s, burnt)

    def _run(self) -> None:
        story = self.story
        heap: list[tuple[float, int]] = []
        for device in self.places:
            begin_s = story.prepare_s + 0.2 * len(self.lives)
            self.lives.append(Life(device, begin_s))
            heapq.heappush(heap, (begin_s + story.start_up_s * self.chance.uniform(0.9, 1.15), len(self.lives) - 1))
        while heap and self._queue:
            now_s, worker = heapq.heappop(heap)
            if now_s >= min(self._cut_s or math.inf, story.stopped_s or math.inf):
                continue
            device = self.lives[worker].device
            if device is not None and now_s >= story.lost.get(device, math.inf):
                self.lives[worker].end_s = now_s
                continue
            end_s, died = self._try(now_s, worker, *self._queue.pop(0))
            if not died:
                heapq.heappush(heap, (end_s + 0.001 + story.pause_s, worker))
                continue
            self.lives[worker].end_s = end_s
            if died not in _RETIRING:
                self.lives.append(Life(device, end_s + 1))
                heapq.heappush(heap, (end_s + 1 + story.start_up_s, len(self.lives) - 1))
        last_s = max([a.end_s or 0.0 for a in self.attempts] + [life.start_s + story.start_up_s for life in self.lives])
        self.end_s = self._cut_s or last_s + story.end_s
        if self._cut_s is None:
            for life in self.lives:
                life.end_s = life.end_s or self.end_s - 1

    def _try(self, now_s: float, worker: int, chunk: int, number: int) -> tuple[float, str | None]:
        story, device = self.story, self.lives[worker].device
        takes_s, gpu_s, cpu_s = self.pace(device, story.chunks[chunk])
        noise = math.exp(self.chance.gauss(0, 0.12))
        errors = story.fails.get(chunk, ())
        error = errors[number - 1] if number <= len(errors) else story.gives_up.get(-1 if device is None else device)
        share = 1.0 if error is None else self.chance.uniform(0.3, 0.8)
        end_s = now_s + share * takes_s * noise
        if device is not None and now_s < story.lost.get(device, math.inf) <= end_s:
            end_s, error = story.lost[device], "gpu_lost"
        cut = self._cut_s is not None and end_s >= self._cut_s
        last = error is not None and number == len(errors) and chunk in story.hopeless
        self.attempts.append(
            Attempt(chunk, worker, device, number, now_s, None if cut else end_s, error, gpu_s * share, cpu_s * share,
                    last)
        )  # fmt: skip
        if error is not None and not last and not cut:
            self._queue.insert(0, (chunk, number if error in _RETIRING else number + 1))
        return end_s, error if error in _KILLERS or error in _RETIRING else None

    def density(self, device: int | None, what: str) -> list[float]:
        """Return the mean of gpu_s (or cpu_s) per second, tick by tick; device None: over all."""
        ticks = int(self.end_s / TICK_S) + 2
        found = [0.0] * ticks
        for a in self.attempts:
            if device is None or a.device == device:
                end_s = self.end_s if a.end_s is None else a.end_s
                _spread(found, a.start_s, end_s, getattr(a, what))
        if what == "cpu_s":
            for life in self.lives:
                begin_s, warm_s = life.start_s, min(life.start_s + self.story.start_up_s, self.end_s)
                _spread(found, begin_s, warm_s, 0.7 * (warm_s - begin_s))
        return found


def _spread(found: list[float], from_s: float, to_s: float, amount: float) -> None:
    """Add an amount evenly between two moments; each place holds the mean per second of one tick."""
    if to_s <= from_s:
        return
    per_s = amount / (to_s - from_s)
    for tick in range(int(from_s / TICK_S), min(int(to_s / TICK_S) + 1, len(found))):
        inside_s = min(to_s, (tick + 1) * TICK_S) - max(from_s, tick * TICK_S)
        found[tick] += per_s * max(0.0, inside_s) / TICK_S
