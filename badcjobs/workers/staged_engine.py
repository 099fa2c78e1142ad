"""An engine that reads the copies a ``Stager`` has made, around any other engine, which knows nothing of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Engine, More, Session, SessionBroken, nothing_more
from badcjobs.workers.staging import Stager


class StagedEngine:
    """Gives an engine the copies on the node where they are ready, and the original path where they are not."""

    def __init__(self, engine: Engine, stager: Stager) -> None:
        self.name = engine.name
        self._engine = engine
        self._stager = stager

    @property
    def wants(self) -> int:
        """As many as the engine itself."""
        return self._engine.wants

    def check(self) -> None:
        """Check the engine."""
        self._engine.check()

    def open(self, plan: WorkerPlan, scratch: Path) -> StagedSession:
        """Open the engine."""
        return StagedSession(self._engine.open(plan, scratch), self._stager)


class StagedSession:
    """Swaps paths on the way in, and puts the original chunks back on the way out."""

    def __init__(self, session: Session, stager: Stager) -> None:
        self.pid = session.pid
        self._session = session
        self._stager = stager
        self._held: dict[tuple[str, str], tuple[Chunk, Chunk]] = {}  # the original and what the engine got for it

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Let the engine process the copies."""

        def swapped_more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            return self._swap(more(wanted, idle=idle))

        broke = False
        try:
            for news in self._session.process(self._swap(batch), swapped_more):
                if isinstance(news, ChunkStarted):
                    yield replace(news, chunk=self._held[news.chunk.key][0])
                else:
                    yield self._give_back(news)
        except SessionBroken as broken:
            broke = True
            raise SessionBroken(broken.error_class, self._in_words(str(broken)), at_start=broken.at_start) from broken
        finally:
            for original, _ in self._held.values():
                self._stager.release(original, failed=broke)
            self._held.clear()

    def interrupt(self) -> None:
        """Let what is running come to its end."""
        self._session.interrupt()

    def kill(self) -> None:
        """End the engine now."""
        self._session.kill()

    def close(self) -> int | None:
        """Close the engine."""
        return self._session.close()

    def _swap(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        swapped = [(chunk, self._stager.take(chunk)) for chunk in chunks]
        self._held.update((original.key, (original, given)) for original, given in swapped)
        return [given for _, given in swapped]

    def _give_back(self, result: ChunkResult) -> ChunkResult:
        """Return the result with the original chunk; a copy that was spoilt is nobody's fault, and not used again."""
        error = None if result.error is None else self._in_words(result.error)
        original, _ = self._held.pop(result.chunk.key)
        sound = self._stager.release(original, failed=not result.ok)
        return replace(result, chunk=original, error=error, charged=result.charged and (result.ok or sound))

    def _in_words(self, text: str) -> str:
        """Name files as people know them."""
        for original, given in self._held.values():
            if given.audio_path != original.audio_path:
                text = text.replace(given.audio_path, original.audio_path)
        return text
