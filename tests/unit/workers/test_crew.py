"""The workers of a task while it runs: more of them, fewer, and a device that is gone."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from rooms.model import Chunk, ChunkStarted, Device, MemoryHeld
from rooms.root import Project, RunSettings, SessionBroken
from rooms.workers import Autoscaler, Learned, Lesson, RetryPolicy, Supervisor, subject_of
from support.hand_clock import HandClock
from support.scripted_engine import CLOCK, News, Notebook, Script, ScriptedEngine, ScriptedSession, done

GIB = 2**30
DEVICES = [(100 + n, Device(str(n), "test", uuid=f"GPU-{n}", name="Test GPU")) for n in range(2)]


class Bench:
    """A crew over a scripted engine, in a time of its own: every look is a second later."""

    def __init__(self, tmp_path: Path, script: Script, *, granted_bytes: int | None = None) -> None:
        self.learned = Learned("scripted", [tmp_path / "learned.json"])
        self.decisions: list[tuple[float | None, str]] = []
        self.clock = HandClock()
        self.crew = Autoscaler(
            DEVICES, self.learned, lambda kind, model, value, why: self.note(value, why), self.clock,
            cpus=16, per_gpu=None, granted_bytes=granted_bytes,
        )  # fmt: skip
        self.supervisor = Supervisor(
            ScriptedEngine(script),
            self.crew.plans,
            Notebook([Chunk("r", f"c{n}", "a.wav", "/a.wav") for n in range(20_000)]),
            clock=CLOCK,
            policy=RetryPolicy(0),
            scratch=tmp_path / "scratch",
        )

    def note(self, value: float | None, why: str) -> None:
        self.decisions.append((value, why))

    def memory_held(self) -> MemoryHeld | None:
        """Read 3 GiB for each worker, on whatever device."""
        return MemoryHeld(3 * GIB * len(self.supervisor.slots_at_work), self.clock.monotonic_s())

    def run(self, looks: int, *, until_decisions: int = 99) -> Bench:
        self.supervisor.start()
        for _ in range(looks):
            if len(self.decisions) >= until_decisions:
                break
            self.supervisor.handle_events(timeout_s=0.02)
            self.clock.sleep(1)
            self.crew.update(self.supervisor, left=10**6, memory_peaks=lambda last_s: {}, memory_held=self.memory_held)
        self.supervisor.drain()
        while self.supervisor.busy:
            self.supervisor.handle_events(timeout_s=0.02)
        return self


def quick(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
    for chunk in batch:
        yield ChunkStarted(chunk, 0)
        time.sleep(0.002)
        yield done(chunk)


def test_a_device_that_is_lost_says_nothing_about_the_others_and_nothing_is_learned_from_it(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.device_id == 101:
            raise SessionBroken("gpu_lost", "GPU is lost")
        yield from quick(session, batch)

    bench = Bench(tmp_path, script).run(looks=40)
    assert bench.decisions[0][0] == 2
    assert "a worker has ended" not in str(bench.decisions)
    assert bench.learned.about("Test GPU") == Lesson()


def test_a_worker_that_ends_beside_others_on_its_device_is_not_replaced_and_nothing_is_learned(tmp_path: Path) -> None:
    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.slot == 1:
            raise SessionBroken("gpu_lost", "no room for the models")
        yield from quick(session, batch)

    bench = Bench(tmp_path, script).run(looks=40)
    assert bench.decisions[1:] == [(1, "a worker has ended")]
    assert bench.learned.about("Test GPU") == Lesson()


def test_the_workers_of_all_devices_share_the_main_memory_and_a_later_job_with_less_begins_with_fewer(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, quick, granted_bytes=18 * GIB).run(looks=1000, until_decisions=2)
    words = "one more might raise the main memory in use from 12.0 GiB to 18.0 GiB; the job has 18.0 GiB"
    assert [value for value, _ in bench.decisions] == [2, 2]
    assert bench.decisions[1][1] == words
    assert bench.learned.about("Test GPU") == Lesson(workers=2, cores=8, settled=False, worker_bytes=3 * GIB)

    bench.learned.note("Test GPU", settled=True)
    later = Bench(tmp_path, quick, granted_bytes=8 * GIB).run(looks=1000, until_decisions=2)
    assert [value for value, _ in later.decisions] == [1, 1], "it was not settled for so little memory"
    assert later.decisions[0][1].endswith("the job has 8.0 GiB of main memory, and a worker may need 3.0 GiB")


@pytest.mark.parametrize("draining", [False, True])
def test_once_the_task_drains_no_worker_is_added_and_nothing_is_decided(tmp_path: Path, draining: bool) -> None:
    gates = {4: threading.Event(), 400: threading.Event()}
    all_begin = threading.Barrier(4)

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for chunk in batch:
            number = int(chunk.chunk_id[1:])
            if number < 4:
                all_begin.wait(60)
            for first, gate in gates.items():
                assert number < first or gate.wait(60)
            yield done(chunk)

    bench = Bench(tmp_path, script)
    bench.supervisor.start()
    for count, gate in gates.items():
        while bench.supervisor.tally.done < count:
            bench.supervisor.handle_events(timeout_s=0.02)
        if draining and count == 400:
            bench.supervisor.drain()
        bench.clock.sleep(10)
        bench.crew.update(bench.supervisor, left=10**6, memory_peaks=lambda last_s: {}, memory_held=lambda: None)
        if count < 400:
            gate.set()
    assert len(bench.supervisor.slots_at_work) == (4 if draining else 6)
    assert [value for value, _ in bench.decisions] == ([2] if draining else [2, 3])
    bench.supervisor.drain()
    gates[400].set()
    while bench.supervisor.busy:
        bench.supervisor.handle_events(timeout_s=0.02)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"command": "a {input} {output}"}, {"command": "b {input} {output}"}),
        ({"engine": "demo"}, {"engine": "demo", "engine_arg": ["--room-s=20"]}),
        ({"hawkears_root": "/models/old"}, {"hawkears_root": "/models/new"}),
    ],
)
def test_programs_options_and_models_each_have_lessons_of_their_own(
    tmp_path: Path, one: dict[str, object], other: dict[str, object]
) -> None:
    made = [Project().make(RunSettings, {"source": ["s.csv"], **flags}, "run") for flags in (one, other)]
    subjects = set(map(subject_of, made))
    assert len(subjects) == 2
