"""An engine that does what a test tells it, and a journal that keeps what it is told in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from rooms.root import Engine, More, SystemClock, nothing_more
from rooms.sources import AudioCutter
from rooms.workers import AudioSteps, MemoryLimits, SessionFeed, Stager

News = ChunkStarted | ChunkResult
Script = Callable[["ScriptedSession", Sequence[Chunk]], Iterator[News]]


def now_ms() -> int:
    return int(time.time() * 1000)


def done(chunk: Chunk) -> ChunkResult:
    return ChunkResult(chunk, now_ms(), now_ms(), detections=(Detection(0, 500, "LOUD", 0.9),), audio_s=1.0)


def failed(chunk: Chunk, error_class: str = "exit_code", *, charged: bool = True) -> ChunkResult:
    return ChunkResult(
        chunk, now_ms(), now_ms(), error_class=error_class, error=f"no luck: {chunk.name}", charged=charged
    )


@dataclass
class ScriptedSession:
    """One opening of the engine; ``number`` counts them over all workers, from 1."""

    script: Script
    plan: WorkerPlan
    number: int
    pid: int | None
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

    def __init__(
        self, script: Script, *, wants: int = 1, on_open: Callable[[WorkerPlan], None] = lambda plan: None
    ) -> None:
        self.wants = wants
        self.sessions: list[ScriptedSession] = []
        self._script = script
        self._on_open = on_open

    def check(self) -> None:
        pass

    def open(self, plan: WorkerPlan, scratch: Path) -> ScriptedSession:
        assert scratch.is_dir()
        self._on_open(plan)
        session = ScriptedSession(self._script, plan, len(self.sessions) + 1, pid=1000 + len(self.sessions))
        self.sessions.append(session)
        return session

    @property
    def batches(self) -> list[list[str]]:
        return [batch for session in self.sessions for batch in session.batches]


@dataclass
class Attempt:
    """One row of the journal."""

    chunk_id: str
    try_number: int
    worker_id: int
    started_at_s: float
    status: str | None = None  # the chunk's state after it; None: cut short
    error_class: str | None = None
    gpu_state: str | None = None


class Notebook:
    """A Journal in memory."""

    def __init__(self, chunks: Sequence[Chunk]) -> None:
        self.status = {chunk.chunk_id: "pending" for chunk in chunks}
        self.attempts: list[Attempt] = []
        self.workers: dict[int, dict[str, object]] = {}
        self.decisions: list[tuple[str, str | None]] = []
        self._fresh = list(chunks)
        self._open: dict[str, Attempt] = {}

    def batch(self) -> AbstractContextManager[object]:
        return nullcontext()

    def worker_started(self, *, device_id: int | None, pid: int | None, engine: str, at_ms: int) -> int:
        self.workers[len(self.workers) + 1] = {"device_id": device_id, "pid": pid, "engine": engine}
        return len(self.workers)

    def worker_ended(self, worker_id: int, *, exit_code: int | None, at_ms: int) -> None:
        assert "exit_code" not in self.workers[worker_id], "a worker ended twice"
        self.workers[worker_id]["exit_code"] = exit_code

    def attempt_started(
        self, chunk: Chunk, *, try_number: int, worker_id: int, device_id: int | None, at_ms: int
    ) -> None:
        attempt = Attempt(chunk.chunk_id, try_number, worker_id, time.monotonic())
        self.attempts.append(attempt)
        self._open[chunk.chunk_id] = attempt

    def attempt_ended(
        self,
        result: ChunkResult,
        *,
        status: str,
        try_number: int,
        worker_id: int,
        device_id: int | None,
        gpu_state: str | None = None,
    ) -> None:
        chunk_id = result.chunk.chunk_id
        if chunk_id not in self._open:
            self.attempt_started(result.chunk, try_number=try_number, worker_id=worker_id, device_id=device_id, at_ms=0)
        attempt = self._open.pop(chunk_id)
        attempt.status, attempt.error_class, attempt.gpu_state = status, result.error_class, gpu_state
        assert self.status[chunk_id] == "pending", f"{chunk_id} was settled already"
        self.status[chunk_id] = status

    def add_decision(self, kind: str, subject: str | None, value: float | None, reason: str, at_ms: int) -> None:
        self.decisions.append((kind, subject))

    def next_pending(self, limit: int) -> Sequence[Chunk]:
        fresh, self._fresh = self._fresh[:limit], self._fresh[limit:]
        return fresh

    def tries_of(self, chunk_id: str) -> list[Attempt]:
        return [attempt for attempt in self.attempts if attempt.chunk_id == chunk_id]


CLOCK = SystemClock()


def audio_steps(
    folder: Path, *, stager: Stager | None = None, limits: MemoryLimits | None = None, cutter: AudioCutter | None = None
) -> AudioSteps:
    """Make the steps before an engine; without a stager that was started nothing is copied."""
    cutter = cutter or AudioCutter(None)
    stager = stager or Stager(folder / "staged", ahead=1, cutter=cutter)
    return AudioSteps(stager, cutter, limits or MemoryLimits())


def open_feed(engine: Engine, plan: WorkerPlan, scratch: Path, audio: AudioSteps) -> SessionFeed:
    """Open a session and put the steps before it, as a worker does."""
    return SessionFeed(engine.open(plan, scratch), plan, audio, clock=CLOCK, folder=scratch / "pieces")
