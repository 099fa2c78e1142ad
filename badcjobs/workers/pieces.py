"""An engine around another engine: what does not fit into the device's memory is analysed in pieces.

Here is what the rest of badcjobs asks it; ``piecewise_session`` does the work, ``memory_limits`` knows what fits.
"""

from __future__ import annotations

from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, WorkerPlan
from badcjobs.seams import Clock, Cutter, Engine
from badcjobs.workers.engine_around import EngineAround
from badcjobs.workers.failures import OUT_OF_MEMORY
from badcjobs.workers.memory_limits import MemoryLimits
from badcjobs.workers.piecewise_session import PiecewiseSession, model_of


class PiecewiseEngine(EngineAround):
    """Gives another engine no more audio at once than fits."""

    def __init__(self, engine: Engine, cutter: Cutter, limits: MemoryLimits, *, clock: Clock) -> None:
        super().__init__(engine)
        self._cutter = cutter
        self._limits = limits
        self._clock = clock

    def open(self, plan: WorkerPlan, scratch: Path) -> PiecewiseSession:
        """Open the other engine."""
        session = self._engine.open(plan, scratch)
        return PiecewiseSession(session, plan, self._cutter, self._limits, clock=self._clock, folder=scratch / "pieces")

    def needs_lean(self, plan: WorkerPlan, chunk: Chunk) -> bool:
        """Say whether a chunk has no place in a usual session on this device; touches no file."""
        return self._limits.way_of(model_of(plan), chunk.key, chunk.audio_s).lean

    def ways_left(self, chunk: Chunk) -> bool | None:
        """Say whether a chunk that ran out of memory can go another way; None: it is not known that it did."""
        return self._limits.ways_left(chunk.key)


def needs_lean(engine: Engine, plan: WorkerPlan, chunk: Chunk) -> bool:
    """Ask an engine that can do with less whether it should for this chunk."""
    return isinstance(engine, PiecewiseEngine) and engine.needs_lean(plan, chunk)


def ways_left(engine: Engine, result: ChunkResult) -> bool | None:
    """Ask an engine what is left to try for a chunk that ran out of memory; None: it does not say."""
    if result.error_class != OUT_OF_MEMORY or not isinstance(engine, PiecewiseEngine):
        return None
    return engine.ways_left(result.chunk)
