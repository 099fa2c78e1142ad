"""An engine that does what a test tells it, and a supervisor over it that writes a real task database."""

from __future__ import annotations

import functools
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, Device, TaskKey, WorkerPlan
from rooms.root import Engine, More, SessionBroken, SystemClock, nothing_more
from rooms.sources import AudioCutter
from rooms.store import TaskWriter
from rooms.workers import AudioSteps, Learned, MemoryLimits, RetryPolicy, SessionFeed, Stager, Supervisor

News = ChunkStarted | ChunkResult
Script = Callable[["ScriptedSession", Sequence[Chunk]], Iterator[News]]
CLOCK = SystemClock()
OK = (None, "done")


def done(chunk: Chunk) -> ChunkResult:
    now_ms = CLOCK.now_ms()
    return ChunkResult(chunk, now_ms, now_ms, detections=(Detection(0, 500, "LOUD", 0.9),), audio_s=1.0)


def failed(chunk: Chunk, error_class: str = "exit_code", *, charged: bool = True) -> ChunkResult:
    why, now_ms = f"no luck: {chunk.name}", CLOCK.now_ms()
    return ChunkResult(chunk, now_ms, now_ms, error_class=error_class, error=why, charged=charged)


@dataclass
class ScriptedSession:
    """One opening of the engine."""

    script: Script
    plan: WorkerPlan
    pid: int
    interrupted: threading.Event = field(default_factory=threading.Event)
    killed: threading.Event = field(default_factory=threading.Event)
    batches: list[list[str]] = field(default_factory=list)
    closed: int = 0
    more: More = nothing_more  # of the batch at hand

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[News]:
        self.more = more
        self.batches.append([chunk.chunk_id for chunk in batch])
        yield from self.script(self, batch)

    def interrupt(self) -> None:
        self.interrupted.set()

    def kill(self) -> None:
        self.killed.set()

    def close(self) -> int | None:
        self.closed += 1
        return -9 if self.killed.is_set() else 0


class ScriptedEngine:
    """Runs ``script`` for every batch; ``on_open`` may refuse to open."""

    name = "scripted"
    version = None

    def __init__(self, script: Script, wants: int = 1, on_open: Callable[[WorkerPlan], object] = id) -> None:
        self.wants, self._script, self._on_open = wants, script, on_open
        self.sessions: list[ScriptedSession] = []

    def check(self) -> None:
        pass

    def open(self, plan: WorkerPlan, scratch: Path) -> ScriptedSession:
        assert scratch.is_dir()
        self._on_open(plan)
        self.sessions.append(ScriptedSession(self._script, plan, pid=1000 + len(self.sessions)))
        return self.sessions[-1]

    @property
    def batches(self) -> list[list[str]]:
        return [batch for session in self.sessions for batch in session.batches]


def audio_steps(
    folder: Path, *, stager: Stager | None = None, limits: MemoryLimits | None = None, cutter: AudioCutter | None = None
) -> AudioSteps:
    """Make the steps before an engine; without a stager that was started nothing is copied."""
    steps = AudioSteps(
        stage="never", local=folder, wants=1, plans=(), cutter=cutter or AudioCutter(None), learned=Learned("", ()),
        probed={},
    )  # fmt: skip
    steps.stager, steps.limits = stager or steps.stager, limits or steps.limits
    return steps


def open_feed(engine: Engine, plan: WorkerPlan, scratch: Path, audio: AudioSteps) -> SessionFeed:
    """Open a session and put the steps before it, as a worker does."""
    return SessionFeed(engine.open(plan, scratch), plan, audio, clock=CLOCK, folder=scratch / "pieces")


def plan_on(slot: int) -> WorkerPlan:
    return WorkerPlan(slot, Device(str(slot), "test", name="Test GPU"), 100 + slot, 1)


class Bench:
    """Runs chunks through a supervisor; ``tries`` and ``statuses`` are what the task database says afterwards."""

    def __init__(
        self, folder: Path, script: Script, *, chunks: int | Sequence[Chunk] = 4,
        workers: int | Sequence[WorkerPlan] = 1, wants: int = 1, retries: int = 2, give_up_after: int = 25,
        on_open: Callable[[WorkerPlan], object] = id, **others: Any,
    ) -> None:  # fmt: skip
        self.engine = ScriptedEngine(script, wants, on_open)
        if isinstance(chunks, int):
            chunks = [Chunk("r", f"c{number}", "a.wav", "/a.wav") for number in range(chunks)]
        self.chunks, scratch = chunks, Path(tempfile.mkdtemp(dir=folder))
        self.writer = TaskWriter(scratch / "wrapper.sqlite", TaskKey("4821", 0, 0, "gpu1"))
        self.writer.fill(chunks, lambda rows: None)
        plans = [plan_on(slot) for slot in range(workers)] if isinstance(workers, int) else workers
        usual = {"clock": CLOCK, "policy": RetryPolicy(retries, 0.0, give_up_after=give_up_after),
                 "device_state": lambda device_id, at_ms: None}  # fmt: skip
        how = {**usual, "scratch": scratch / "workers", **others}
        self.supervisor = Supervisor(self.engine, plans, self.writer, **how)
        self.tally = self.supervisor.tally
        self.start = functools.cache(self.supervisor.start)

    def run(self, until: Callable[[], bool] = lambda: False) -> Bench:
        """Handle events until all is over, or ``until`` says so."""
        self.start()
        end_s = time.monotonic() + 30
        while self.supervisor.busy and not until():
            assert time.monotonic() < end_s, f"it never ends: {self.statuses}"
            self.supervisor.handle_events(timeout_s=0.02)
        return self

    def rows(self, sql: str) -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(self.writer.half(self.writer.path.parent), uri=True)) as db:
            return db.execute(sql).fetchall()

    @property
    def statuses(self) -> dict[str, int]:
        return self.writer.count_by_status()

    @property
    def tries(self) -> dict[str, list[tuple[str | None, str | None]]]:
        """The tries of each chunk: error class and outcome (None: without an end)."""
        found: dict[str, list[tuple[str | None, str | None]]] = {chunk.chunk_id: [] for chunk in self.chunks}
        for chunk_id, *end in self.rows("SELECT chunk_id, error_class, outcome FROM attempt ORDER BY attempt_id"):
            found[chunk_id].append((end[0], end[1]))
        return found


def acting(acts: Mapping[str, Sequence[str]], usual: str = "ok", *, in_turn: bool = False) -> Script:
    """Make a script of what happens at each try of a chunk; when its acts are over, ``usual``.

    ok, an error class, "silent", "uncharged", "together" (the error of a batch does not say whose it is), or "!class":
    the session breaks when every chunk of the batch has begun (``in_turn``: when those before it are done); "?class":
    before any has begun.
    """
    left = {name: [*mine] for name, mine in acts.items()}

    def script(session: ScriptedSession, batch: Sequence[Chunk]) -> Iterator[News]:
        for group in [[chunk] for chunk in batch] if in_turn else [batch]:
            mine = (left.get(chunk.chunk_id) for chunk in group)
            deeds = [(chunk, own.pop(0) if own else usual) for chunk, own in zip(group, mine, strict=True)]
            for act in (act for _, act in deeds if act.startswith("?")):
                raise SessionBroken(act[1:], "broken before any news")
            for chunk in group:
                yield ChunkStarted(chunk, CLOCK.now_ms())
            for chunk, act in deeds:
                if act.startswith("!"):
                    raise SessionBroken(act[1:], f"broken by {chunk.name}")
            if "together" in [act for _, act in deeds]:
                yield from (failed(chunk, "exit_code", charged=len(batch) == 1) for chunk in batch)
                continue
            for chunk, act in deeds:
                if act == "ok":
                    yield done(chunk)
                elif act != "silent":
                    yield failed(chunk, charged=False) if act == "uncharged" else failed(chunk, act)

    return script
