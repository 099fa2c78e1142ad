"""How many workers a device gets when nobody says: measured, one more while it pays, and known to the next run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rooms.model import Chunk, ChunkStarted, Device, MemoryHeld
from rooms.root import SessionBroken
from rooms.workers import Autoscaler, Learned
from support.hand_clock import HandClock
from support.pages import Pages
from support.supervised import Bench, News, ScriptedSession
from support.waiting import wait_for

GIB = 2**30
STEP_S = 0.5


class Task:
    """A task whose workers stand still while the test says how much they have done; time passes by half seconds."""

    def __init__(
        self, folder: Path, *, cpus: int = 8, devices: int = 1, gib: float | None = 16, granted: float | None = None,
        per_gpu: int | None = None, cpu_workers: int = 0, lost: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self.clock, self.go_on, self.lost = HandClock(), threading.Event(), lost
        self.learned = Learned("demo", [folder / "learned.json"])
        self.lines: list[str] = []
        memory = None if gib is None else round(gib * GIB)
        granted_bytes = None if granted is None else round(granted * GIB)
        places = [(100 + n, Device(str(n), "test", name="V100", memory_total_bytes=memory)) for n in range(devices)]
        self.scaler = Autoscaler(
            places, self.learned, self.note, self.clock,
            cpus=cpus, per_gpu=per_gpu, cpu_workers=cpu_workers, granted_bytes=granted_bytes,
        )  # fmt: skip
        self.bench = Bench(folder, self.script, chunks=200, workers=self.scaler.plans)
        self.supervisor = self.bench.supervisor

    def note(self, kind: str, model: str | None, value: float | None, why: str) -> None:
        assert (kind, model) == ("workers_per_gpu", "V100")
        self.lines.append(f"{self.clock.monotonic_s() % 10_000:6.1f} s: {value}; {why}")

    def script(self, session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        if session.plan.slot in self.lost:
            raise SessionBroken("gpu_lost", "GPU is lost")
        yield ChunkStarted(batch[0], 0)
        assert self.go_on.wait(60)

    @property
    def opened(self) -> set[int]:
        return {session.plan.slot for session in self.bench.engine.sessions}

    @property
    def workers(self) -> int:
        """The most workers on a device."""
        places = list(self.supervisor.slots_at_work.values())
        return max(map(places.count, places), default=0)

    def live(
        self, speed: Callable[[int], float] = lambda workers: 10.0 * workers, *, seconds: float = 100,
        left: int = 10**6, used_gib: float | None = None, warm: bool = True, audio: bool = True,
        held: Callable[[float, int], MemoryHeld | None] = lambda now_s, workers: None,
    ) -> str:  # fmt: skip
        """Let time pass; ``speed``: chunks per second of so many workers on each device. Return the decisions."""
        self.bench.start()
        if self.lost:
            self.bench.run(until=lambda: len(self.bench.tally.retired) == len(self.lost))
        done, supervisor = 0.0, self.supervisor
        for _ in range(int(seconds / STEP_S)):
            self.clock.sleep(STEP_S)
            workers, now_s = self.workers, self.clock.monotonic_s()
            done += STEP_S * speed(workers)
            supervisor.tally.done = int(done)
            supervisor.audio_done_s = 30.0 * int(done) if audio else 0.0
            supervisor.finished = dict.fromkeys(supervisor.slots_at_work, 1 if warm else 0)
            peaks = {} if used_gib is None else {100: round(used_gib * GIB * workers), 101: GIB}
            self.scaler.update(
                supervisor, left=left - int(done),
                memory_peaks=lambda last_s, peaks=peaks: peaks if last_s == 30.0 else {},
                memory_held=lambda now_s=now_s, workers=workers: held(now_s, workers),
            )  # fmt: skip
            if not supervisor.draining:
                wait_for(lambda: {*supervisor.slots_at_work} <= self.opened, "every worker has its engine")
        return self.end()

    def end(self) -> str:
        threads = sorted({thread.plan.threads for thread in self.bench.engine.sessions})
        at_work = sorted(self.supervisor.slots_at_work.values(), key=str)
        self.supervisor.drain()
        self.go_on.set()
        self.bench.run()
        learned = self.learned.about("V100")
        facts = f"{learned.workers} of {learned.cores} cores, settled={learned.settled}, {learned.worker_bytes} bytes"
        return "\n".join([*self.lines, f"  at work on {at_work}, threads {threads}", f"  learned: {facts}", ""])


def table(*rates: float) -> Callable[[int], float]:
    return lambda workers: rates[workers - 1]


def every_10_s(gib_each: float) -> Callable[[float, int], MemoryHeld]:
    """Read the memory as a watch does: in between it is the old reading that is known."""
    return lambda now_s, workers: MemoryHeld(round(gib_each * GIB * workers), now_s // 10 * 10)


def growing(now_s: float, workers: int) -> MemoryHeld:
    return MemoryHeld(round(GIB * (1.0 + 0.1 * min(now_s % 1000, 60.0))), now_s)


def test_workers_are_added_while_that_pays_and_there_is_room(tmp_path: Path, pages: Pages) -> None:
    """A lost device says nothing about the others, and a lost worker is not replaced."""

    def story(name: str, **how: Any) -> Task:
        (tmp_path / name).mkdir(exist_ok=True)
        return Task(tmp_path / name, **how)

    two = {"cpus": 16, "devices": 2}
    said = {
        "until-it-does-not-pay": story("more", cpus=5).live(table(10, 18, 22, 22.5, 99)),
        "as-an-earlier-run-found": story("more", cpus=6).live(),  # nearly as many cores
        "with-other-cores": story("more", cpus=7).live(seconds=3),
        "just-5-percent": story("just", cpus=4).live(table(40, 42, 99, 99)),
        "slower": story("slower", cpus=16).live(table(0, 0, 20, 15), seconds=60),
        "no-more-cores": story("cores", cpus=3).live(),
        "slow-chunks-without-a-length": story("slow", cpus=8, devices=2).live(
            table(1, 2, 2, 2), audio=False, seconds=200
        ),
        "half-of-a-device-is-full": story("half", cpus=4, gib=20).live(used_gib=9),
        "more-than-half-is-full": story("fuller", cpus=4, gib=20).live(used_gib=9.1),
        "just-enough-main-memory": story("enough", cpus=8, granted=30).live(held=every_10_s(9)),
        "not-enough-main-memory": story("little", cpus=8, granted=29.9).live(held=every_10_s(9)),
        "main-memory-for-the-next-job": story("little", cpus=8, granted=10).live(seconds=2),
        "main-memory-still-grows": story("grows", cpus=4, granted=15).live(table(10, 10), held=growing),
        "main-memory-was-read-before": story("before", cpus=4, granted=99).live(held=lambda *_: MemoryHeld(GIB, 0.0)),
        "main-memory-is-unknown": story("unknown", cpus=2, granted=9).live(),
        "a-minute-of-work-left": story("minute", cpus=2).live(left=655),
        "less-than-a-minute-left": story("less", cpus=2).live(left=654),
        "nobody-is-warm": story("cold", cpus=8).live(warm=False),
        "a-lost-device": story("device", **two, lost=(2, 3)).live(seconds=20),
        "a-lost-worker": story("worker", **two, lost=(1,)).live(),
        "every-worker-lost": story("all", cpus=1, lost=(0,)).live(),
    }
    pages({"decisions.txt": "\n".join(f"# {name}\n{text}" for name, text in said.items())})


def test_once_the_task_drains_no_worker_is_added_and_nothing_is_decided(tmp_path: Path) -> None:
    task = Task(tmp_path, cpus=8)
    task.bench.start()
    task.supervisor.drain()
    task.live()
    assert len(task.lines) == 1


GRANTED = {"cpus": 16, "gib": 139}


def test_the_beginning_follows_from_cores_memory_and_experience(tmp_path: Path, pages: Pages) -> None:
    asked: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (GRANTED, {}),  # an H200
        ({"cpus": 24, "devices": 4, "gib": 32}, {}),  # a Sockeye node
        ({"cpus": 24, "devices": 4, "gib": 16}, {"workers": 3, "cores": 6}),
        ({"cpus": 64, "gib": 8}, {}),  # many cores, little memory
        ({"cpus": 64, "gib": None}, {}),
        ({"cpus": 80, "gib": None}, {}),
        ({"cpus": 2, "devices": 4}, {}),  # fewer cores than devices
        ({"cpus": 4}, {"workers": 8, "cores": 4}),  # experience from a larger machine
        ({"cpus": 8}, {"workers": 8, "cores": 6}),
        ({"cpus": 8}, {"workers": 8, "cores": 5}),
        ({**GRANTED, "granted": 64}, {}),
        ({**GRANTED, "granted": 16}, {}),
        ({**GRANTED, "granted": 16}, {"worker_bytes": GIB}),
        ({**GRANTED, "granted": 2}, {}),  # one there always is
        ({**GRANTED, "granted": 0.5}, {"worker_bytes": GIB // 2}),
        ({**GRANTED, "granted": 16}, {"workers": 8, "cores": 16}),
        ({**GRANTED, "granted": 64}, {"workers": 8, "cores": 16, "worker_bytes": 3 * GIB}),
        ({"cpus": 64, "devices": 4, "gib": None, "granted": 64}, {"worker_bytes": 4 * GIB}),
        ({"cpus": 6, "devices": 2, "per_gpu": 2}, {}),
        ({"cpus": 7, "devices": 0, "cpu_workers": 3}, {}),
        ({"cpus": 7, "devices": 0}, {}),
    ]
    lines = []
    for number, (how, known) in enumerate(asked):
        folder = tmp_path / str(number)
        Learned("demo", [folder / "learned.json"]).note("V100", **known)
        task = Task(folder, **how)
        plans = [(plan.slot, plan.device_id, plan.threads) for plan in task.scaler.plans]
        lines += [f"{how} {known or ''}", *task.lines, f"  {len(plans)} workers, the last: {plans[-1:]}"]
    pages({"starts.txt": "\n".join(lines)})
