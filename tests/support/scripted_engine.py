"""An engine that does what a test tells it, and the steps before an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rooms.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from rooms.root import Engine, More, SystemClock, nothing_more
from rooms.sources import AudioCutter
from rooms.workers import AudioSteps, MemoryLimits, SessionFeed, Stager

News = ChunkStarted | ChunkResult
Script = Callable[["ScriptedSession", Sequence[Chunk]], Iterator[News]]


CLOCK = SystemClock()


def done(chunk: Chunk) -> ChunkResult:
    now_ms = CLOCK.now_ms()
    return ChunkResult(chunk, now_ms, now_ms, detections=(Detection(0, 500, "LOUD", 0.9),), audio_s=1.0)


def failed(chunk: Chunk, error_class: str = "exit_code", *, charged: bool = True) -> ChunkResult:
    why, now_ms = f"no luck: {chunk.name}", CLOCK.now_ms()
    return ChunkResult(chunk, now_ms, now_ms, error_class=error_class, error=why, charged=charged)


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
