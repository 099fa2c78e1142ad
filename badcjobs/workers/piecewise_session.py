"""A session that passes chunks on to another session, or their pieces where a whole one does not fit.

The pieces of a chunk go to a lean session one after the other: whatever happens is the fault of the one at hand.
Everything else passes through untouched; only what ran out of memory, and what did not, is noted (``memory_limits``).
How detections are put together is told in ``joints``.
"""

from __future__ import annotations

import errno
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, Detection, WorkerPlan
from badcjobs.seams import CannotCut, Clock, Cutter, More, Session, SessionBroken, nothing_more
from badcjobs.workers.cut_chunk import check_audio, there_s
from badcjobs.workers.failures import NO_SPACE, OUT_OF_MEMORY
from badcjobs.workers.joints import Stretch, join_detections, plan_pieces
from badcjobs.workers.memory_limits import ChunkKey, MemoryLimits, Way

_LONGEST_KEPT_STEM = 50  # letters, of up to four bytes; a name may have 255 bytes in all
_FULL = (errno.ENOSPC, errno.EDQUOT)


def model_of(plan: WorkerPlan) -> str:
    """Return the name under which the limits of a worker's device are kept."""
    return "cpu" if plan.device is None else plan.device.name or "unknown"


@dataclass(frozen=True, slots=True)
class _Whole:
    """A chunk that is done in pieces."""

    chunk: Chunk
    audio_s: float
    way: Way


class PiecewiseSession:
    """A session that passes chunks on, or their pieces (seams.Session)."""

    def __init__(
        self, session: Session, plan: WorkerPlan, cutter: Cutter, limits: MemoryLimits, *, clock: Clock, folder: Path
    ) -> None:
        self.pid = session.pid
        self._session = session
        self._model = model_of(plan)
        self._way = Way(lean=plan.lean)
        self._cutter = cutter
        self._limits = limits
        self._clock = clock
        self._folder = folder
        self._lock = threading.Lock()
        self._interrupted = False
        self._begun_at_ms: int | None = None  # of the chunk that is being done in pieces

    # --- called from another thread -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Finish what is in progress; a chunk of which a piece has begun is in progress up to its last piece."""
        with self._lock:
            self._interrupted = True
            if self._begun_at_ms is None:
                self._session.interrupt()

    def kill(self) -> None:
        """End it now."""
        self._session.kill()

    # --- the life of a batch --------------------------------------------------------------------------------------

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Pass the batch on; a lean session then does those in pieces that cannot be done otherwise."""
        if not self._way.lean:
            yield from self._pass_on(batch, more)
            return
        too_long: deque[_Whole] = deque()

        def sort_out(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            return [chunk for chunk in more(wanted, idle=idle) if not self._set_aside(chunk, too_long)]

        fitting = [chunk for chunk in batch if not self._set_aside(chunk, too_long)]
        if fitting:
            yield from self._pass_on(fitting, sort_out)
        while too_long and not self._interrupted:
            yield from self._process_in_pieces(too_long.popleft())

    def close(self) -> int | None:
        """Close the other session, and leave no piece behind."""
        shutil.rmtree(self._folder, ignore_errors=True)
        return self._session.close()

    def _set_aside(self, chunk: Chunk, too_long: deque[_Whole]) -> bool:
        if chunk.audio_s is not None and self._limits.way_of(self._model, chunk.key, chunk.audio_s).pieces == 1:
            return False  # as long as it says, which costs nothing to know
        audio_s = there_s(chunk, self._cutter)
        way = self._limits.way_of(self._model, chunk.key, audio_s)
        if audio_s is None or way.pieces == 1:
            return False
        too_long.append(_Whole(chunk, audio_s, way))
        return True

    # --- whole chunks ---------------------------------------------------------------------------------------------

    def _pass_on(self, batch: Sequence[Chunk], more: More) -> Iterator[ChunkStarted | ChunkResult]:
        unanswered = {chunk.key: chunk for chunk in batch}
        begun: dict[ChunkKey, Chunk] = {}
        try:
            for news in self._session.process(batch, more):
                if isinstance(news, ChunkStarted):
                    begun[news.chunk.key] = news.chunk
                    yield news
                else:
                    told = self._note(news, begun)
                    begun.pop(news.chunk.key, None)
                    unanswered.pop(news.chunk.key, None)
                    yield told
        except SessionBroken as broken:
            if not broken.at_start:
                self._note_end(broken, list((begun or unanswered).values()), begun)
            raise
        finally:
            self.pid = self._session.pid

    def _note_end(self, broken: SessionBroken, suspects: Sequence[Chunk], begun: dict[ChunkKey, Chunk]) -> None:
        if broken.error_class != OUT_OF_MEMORY:
            for chunk in suspects:
                self._limits.failed_otherwise(chunk.key)
        elif len(suspects) == 1:  # of several nobody knows which it was
            self._ran_out(suspects[0], begun)

    def _note(self, result: ChunkResult, begun: dict[ChunkKey, Chunk]) -> ChunkResult:
        if result.ok:
            lengths = [audio_s for audio_s in (result.audio_s, result.chunk.audio_s) if audio_s is not None]
            audio_s = min(lengths, default=None)  # where a recording breaks off it was less than the chunk says
            self._limits.came_through(self._model, result.chunk.key, audio_s, self._way)
        elif result.error_class == OUT_OF_MEMORY and result.charged:
            self._ran_out(result.chunk, begun)
            return self._explained(result)
        else:
            self._limits.failed_otherwise(result.chunk.key)
        return result

    def _ran_out(self, chunk: Chunk, begun: dict[ChunkKey, Chunk]) -> None:
        """Note it; with others in progress it was the longest of them all that was too much."""
        audio_s = chunk.audio_s or (None if chunk.is_cut else self._cutter.length_s(Path(chunk.audio_path)))
        lengths = [other.audio_s for other in begun.values() if other.audio_s is not None]
        self._limits.ran_out(self._model, chunk.key, audio_s, self._way, beside_s=max(lengths, default=None))

    def _explained(self, result: ChunkResult, piece_s: float | None = None) -> ChunkResult:
        """Say so where a chunk can be done in no way at all."""
        if self._limits.ways_left(result.chunk.key):
            return result
        how = "and cannot be cut" if piece_s is None else f"in pieces of {piece_s:.0f} s, and is not cut any smaller"
        return replace(result, error=f"{result.error}\nit does not fit into the device's memory even alone, {how}")

    # --- chunks in pieces -----------------------------------------------------------------------------------------

    def _process_in_pieces(self, whole: _Whole) -> Iterator[ChunkStarted | ChunkResult]:
        try:
            yield from self._process_pieces(whole)
        except SessionBroken as broken:
            if broken.error_class != OUT_OF_MEMORY:
                self._limits.failed_otherwise(whole.chunk.key)
            elif not broken.at_start:
                self._limits.ran_out(self._model, whole.chunk.key, whole.audio_s, whole.way)
            if broken.at_start and self._begun_at_ms is not None:  # between two pieces; of the chunk, this is no start
                raise SessionBroken(broken.error_class, str(broken)) from broken
            raise
        finally:
            self.pid = self._session.pid
            shutil.rmtree(self._folder, ignore_errors=True)
            with self._lock:
                self._begun_at_ms = None
                if self._interrupted:
                    self._session.interrupt()

    def _process_pieces(self, whole: _Whole) -> Iterator[ChunkStarted | ChunkResult]:
        heard: list[tuple[Stretch, Sequence[Detection]]] = []
        for stretch in plan_pieces(whole.audio_s, whole.way.pieces):
            try:
                piece = self._cut(whole.chunk, stretch)
            except (CannotCut, OSError) as problem:
                yield from self._do_without_cutting(whole, problem)
                return
            result = None
            for news in self._session.process([piece]):
                if isinstance(news, ChunkResult):
                    result = news
                if self._begun_at_ms is None:
                    yield self._begin(whole.chunk, news)
            Path(piece.audio_path).unlink(missing_ok=True)
            if result is None:
                return  # interrupted or killed: the whole chunk has no answer
            if not result.ok:
                yield self._fail(whole, stretch, piece, result)
                return
            heard.append((stretch, result.detections))
            ended_at_ms = result.ended_at_ms
        yield self._finish(whole, heard, ended_at_ms)

    def _cut(self, chunk: Chunk, stretch: Stretch) -> Chunk:
        check_audio(chunk)
        source = Path(chunk.audio_path)
        start_ms, end_ms = round(stretch.start_s * 1000), round(stretch.end_s * 1000)
        name = f"{start_ms // 1000}s"
        self._folder.mkdir(parents=True, exist_ok=True)
        target = (self._folder / f"{source.stem[:_LONGEST_KEPT_STEM]}~{name}.wav").absolute()
        first_ms = chunk.start_ms
        begin_s = first_ms / 1000 if chunk.is_cut else 0.0  # of the chunk in its file
        self._cutter.cut(source, begin_s + stretch.start_s, begin_s + stretch.end_s, target)
        return Chunk(
            chunk.recording_id, f"{chunk.chunk_id}~{name}", chunk.source_path, str(target), first_ms + start_ms,
            first_ms + end_ms, piece_of=chunk.chunk_id,
        )  # fmt: skip

    def _begin(self, chunk: Chunk, news: ChunkStarted | ChunkResult) -> ChunkStarted:
        at_ms = news.at_ms if isinstance(news, ChunkStarted) else news.started_at_ms
        with self._lock:
            self._begun_at_ms = at_ms
        return ChunkStarted(chunk, at_ms)

    def _do_without_cutting(self, whole: _Whole, problem: Exception) -> Iterator[ChunkStarted | ChunkResult]:
        """Let the engine judge audio that cannot be cut; if it has done so already, the chunk fails."""
        is_full = isinstance(problem, OSError) and problem.errno in _FULL
        if not is_full and self._begun_at_ms is None and not self._limits.has_failed(whole.chunk.key):
            yield from self._pass_on([whole.chunk], nothing_more)
            return
        error_class, what = NO_SPACE, "there is no place for a piece of it"
        if not is_full:
            self._limits.cannot_be_cut(self._model, whole.chunk.key)
            error_class, what = OUT_OF_MEMORY, "it does not fit into the device's memory, and cannot be cut"
        now_ms = self._clock.now_ms()
        started_at_ms = now_ms if self._begun_at_ms is None else self._begun_at_ms
        yield ChunkResult(whole.chunk, started_at_ms, now_ms, error_class=error_class, error=f"{what}: {problem}")

    def _fail(self, whole: _Whole, stretch: Stretch, piece: Chunk, result: ChunkResult) -> ChunkResult:
        """Return a piece's failure as that of the whole."""
        said = (result.error or "").replace(piece.audio_path, whole.chunk.audio_path)
        told = replace(
            result,
            chunk=whole.chunk,
            started_at_ms=self._begun_at_ms or result.started_at_ms,
            pieces=whole.way.pieces,
            error=f"in its piece from {stretch.start_s:.0f} s to {stretch.end_s:.0f} s: {said}",
        )
        if result.error_class != OUT_OF_MEMORY:
            self._limits.failed_otherwise(whole.chunk.key)
            return told
        self._limits.ran_out(self._model, whole.chunk.key, whole.audio_s, whole.way)
        return self._explained(told, stretch.length_s)

    def _finish(
        self, whole: _Whole, heard: Sequence[tuple[Stretch, Sequence[Detection]]], ended_at_ms: int
    ) -> ChunkResult:
        self._limits.came_through(self._model, whole.chunk.key, whole.audio_s, whole.way)
        known_s = whole.chunk.audio_s
        audio_s = whole.audio_s if known_s is None or whole.chunk.is_cut else known_s
        started_at_ms = ended_at_ms if self._begun_at_ms is None else self._begun_at_ms
        return ChunkResult(whole.chunk, started_at_ms, ended_at_ms, join_detections(heard), audio_s, pieces=len(heard))
