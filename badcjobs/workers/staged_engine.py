"""An engine that reads the copies a ``Stager`` has made, around any other engine, which knows nothing of it."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import CannotCut, Clock, Engine, More, NoDecoder, NotThere, Session, SessionBroken, nothing_more
from badcjobs.workers.cut_chunk import cut_words
from badcjobs.workers.engine_around import EngineAround
from badcjobs.workers.failures import BAD_AUDIO, MISSING_AUDIO, NO_PROGRAM, NO_SPACE
from badcjobs.workers.staging import Stager

_FULL = (errno.ENOSPC, errno.EDQUOT)


class StagedEngine(EngineAround):
    """Gives an engine the copies on the node where they are ready, and the original path where they are not.

    What has to be cut out of a longer file it gets as a file of its own in any case.
    """

    def __init__(self, engine: Engine, stager: Stager, *, clock: Clock) -> None:
        super().__init__(engine)
        self._stager = stager
        self._clock = clock

    def open(self, plan: WorkerPlan, scratch: Path) -> StagedSession:
        """Open the engine."""
        return StagedSession(self._engine.open(plan, scratch), self._stager, clock=self._clock)


class StagedSession:
    """Swaps paths on the way in, and puts the original chunks back on the way out."""

    def __init__(self, session: Session, stager: Stager, *, clock: Clock) -> None:
        self.pid = session.pid
        self._session = session
        self._stager = stager
        self._clock = clock
        self._interrupted = False
        self._held: dict[tuple[str, str], tuple[Chunk, Chunk]] = {}  # the original and what the engine got for it
        self._untold: list[ChunkResult] = []  # of chunks that could not be cut

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Let the engine process the copies."""

        def swapped_more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            return self._swap(more(wanted, idle=idle))

        broke = False
        try:
            given = self._swap(batch)
            yield from self._tell()
            for news in self._session.process(given, swapped_more) if given else ():
                if isinstance(news, ChunkStarted):
                    yield replace(news, chunk=self._held[news.chunk.key][0])
                else:
                    yield self._give_back(news)
                yield from self._tell()
            yield from self._tell()
        except SessionBroken as broken:
            broke = True
            yield from self._tell()
            raise SessionBroken(broken.error_class, self._in_words(str(broken)), at_start=broken.at_start) from broken
        finally:
            for original, _ in self._held.values():
                self._stager.release(original, failed=broke)
            self._held.clear()

    def interrupt(self) -> None:
        """Let what is running come to its end."""
        self._interrupted = True
        self._session.interrupt()

    def kill(self) -> None:
        """End the engine now."""
        self._interrupted = True
        self._session.kill()

    def close(self) -> int | None:
        """Close the engine."""
        return self._session.close()

    def _swap(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return what the engine gets for chunks; none of them any more once somebody wants us to stop."""
        swapped = []
        for chunk in chunks:
            if self._interrupted and chunk.is_cut:
                continue  # without an answer it stays to be done
            started_at_ms = self._clock.now_ms()
            try:
                given = self._stager.take(chunk)
            except (CannotCut, OSError) as problem:
                self._untold.append(self._failure(chunk, started_at_ms, problem))
                continue
            self._held[chunk.key] = chunk, given
            swapped.append(given)
        return swapped

    def _failure(self, chunk: Chunk, started_at_ms: int, problem: Exception) -> ChunkResult:
        error_class, error = BAD_AUDIO, str(problem)
        if isinstance(problem, NoDecoder):
            error_class = NO_PROGRAM
        elif isinstance(problem, NotThere):
            error_class = MISSING_AUDIO
        elif isinstance(problem, OSError):
            error_class = NO_SPACE if problem.errno in _FULL else BAD_AUDIO
            error = f"{cut_words(chunk)} cannot be cut out: {problem.strerror or problem}"
        return ChunkResult(chunk, started_at_ms, self._clock.now_ms(), error_class=error_class, error=error)

    def _tell(self) -> Iterator[ChunkResult]:
        while self._untold:
            yield self._untold.pop(0)

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
                text = text.replace(given.audio_path, cut_words(original))
        return text
