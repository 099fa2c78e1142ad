"""The audio steps around an engine session: copies on the node, and cutting of chunks that are too long.

``AudioSteps`` decides for a task; ``SessionFeed`` does the work for one session. ``memory_limits`` records which
chunks fitted into device memory, and decides how a chunk is processed. Worker threads may not write to the database:
``AudioSteps.decisions`` passes their decisions on.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from pathlib import Path
from typing import TypeAlias

from badcjobs.model import Chunk, ChunkKey, ChunkResult, ChunkStarted, WorkerPlan, not_none
from badcjobs.model.decisions import Code, Decision
from badcjobs.seams import Clock, More, Session, SessionBroken, nothing_more
from badcjobs.sources.cutter import AudioCutter, CannotCut, NoDecoder, NotThere
from badcjobs.workers import policy
from badcjobs.workers.chunk_audio import PieceRun, available_s, describe_audio, name_fault
from badcjobs.workers.error_patterns import fault_of_node
from badcjobs.workers.learned import Learned
from badcjobs.workers.memory_limits import LEAN, MemoryLimit, MemoryLimits, Way, model_of
from badcjobs.workers.staging import Stager, Upcoming, choose_staging, find_most_bytes

log = logging.getLogger(__name__)

_STAGED = {
    Code.STAGE_ALL: "is copied to this node in advance",
    Code.STAGE_CUTS: "is cut out of longer files in advance",
}
ChunkEvent: TypeAlias = ChunkStarted | ChunkResult

_EXAMINED = 32  # chunks, to find out which filesystems the audio is on
_LEAST_AHEAD, _MOST_AHEAD = 32, 512  # chunks that have a copy


@dataclass(eq=False, kw_only=True)
class AudioSteps:
    """The steps before the engines of a task: staging on the node, cutting into pieces, and the limits of memory."""

    stage: str  # auto, always or never
    local: Path  # the task's own folder on the node
    wants: int  # how many chunks a session of the engine holds
    plans: Sequence[WorkerPlan]
    cutter: AudioCutter
    learned: Learned
    probed: Mapping[str, MemoryLimit]  # results of badcjobs probe

    def __post_init__(self) -> None:
        self.decisions: queue.SimpleQueue[Decision] = queue.SimpleQueue()  # not written yet
        ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, 2 * len(self.plans) * self.wants))
        self.stager = Stager(self.local / "staged", ahead=ahead, cutter=self.cutter)
        limits = {model: self.learned.about(model).limit for model in map(model_of, self.plans)}
        for model, limit in limits.items():
            self._decide(Code.LIMIT_LEARNED, model, limit)
        for model, limit in self.probed.items():
            self._decide(Code.LIMIT_PROBED, model, limit)
            limits[model] = limits.get(model, MemoryLimit()).lower(limit)
        self.limits = MemoryLimits(limits, self._learn)

    def start_staging(self, upcoming: Upcoming) -> None:
        """Decide about staging once the queue has chunks, log the decision, and start staging."""
        decision = choose_staging(self.stage, upcoming(_EXAMINED), self.local)
        staged = _STAGED.get(decision.code)
        log.info("audio %s: %s", staged or "is read in place", decision.reason)
        if staged is not None:
            self.stager.start(
                upcoming,
                only_cuts=decision.code is Code.STAGE_CUTS,
                most_bytes=find_most_bytes(self.local),
            )
        self.decisions.put(decision)

    def stop_staging(self) -> None:
        """Remove all copies and log how many were used; call it after the workers have ended."""
        stager = self.stager
        stager.stop()
        if stager.staged or stager.cut_late:
            log.info(
                "staging: chunks read from copies on this node: %d, read in place: %d, cut on demand: %d",
                stager.staged,
                stager.from_source,
                stager.cut_late,
            )

    def _learn(self, model: str, limit: MemoryLimit) -> None:
        """Keep a lower limit for later tasks; called in a worker thread."""
        self.learned.note(model, **asdict(limit))
        self._decide(Code.LIMIT_MET, model, limit)

    def _decide(self, code: Code, model: str, limit: MemoryLimit) -> None:
        if limit == MemoryLimit():
            return
        leanest_s = limit.crowded_s if limit.alone_s is None else limit.alone_s
        decision = Decision.of(code, model, limit_s=leanest_s, **asdict(limit))
        log.info("%s: %s", model, decision.reason)
        self.decisions.put(decision)


@dataclass
class _Handed:
    """A chunk that the engine has in hand: as it was listed, and as the engine got it."""

    original: Chunk
    staged: Chunk
    is_started: bool = False


@dataclass(eq=False)
class SessionFeed:
    """Feeds batches to one session: stages their audio, cuts chunks that do not fit, and returns the original chunks.

    It records in the memory limits of the device model which chunks fitted and which did not.
    """

    session: Session
    plan: WorkerPlan
    steps: AudioSteps
    _: KW_ONLY
    clock: Clock
    folder: Path  # for pieces
    _stopped: bool = False
    _in_pieces: bool = False  # a chunk is being processed piece by piece

    def __post_init__(self) -> None:
        self.pid = self.session.pid
        self._stager = self.steps.stager
        self._limits = self.steps.limits
        self._model = model_of(self.plan)
        self._way = Way(lean=self.plan.lean)
        self._lock = threading.Lock()
        self._in_hand: dict[ChunkKey, _Handed] = {}
        self._unavailable: deque[ChunkResult] = deque()  # chunks whose audio is missing or cannot be cut

    # --- called from another thread -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Finish the chunks in progress, then stop."""
        with self._lock:
            self._stopped = True
            if not self._in_pieces:
                self.session.interrupt()

    def kill(self) -> None:
        """Kill the engine immediately."""
        self._stopped = True
        self.session.kill()

    # --- the life of a batch --------------------------------------------------------------------------------------

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkEvent]:
        """Process the batch and what follows; a lean session processes one chunk after the other, perhaps in pieces."""

        def staged_more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            return self._stage(more(wanted, idle=idle))

        if not self._way.lean:
            yield from self._process_whole(batch, staged_more)
            return
        for chunk in batch:
            if self._stopped:
                return
            yield from self._process_lean(chunk)

    def close(self) -> int | None:
        """Close the session."""
        return self.session.close()

    def _process_lean(self, chunk: Chunk) -> Iterator[ChunkEvent]:
        audio_s = chunk.audio_s
        way = self._limits.way_of(self._model, chunk.key, audio_s)
        if audio_s is None or way.pieces > 1:  # otherwise there is no need to open the file
            audio_s = available_s(chunk, self._stager.cutter)
            way = self._limits.way_of(self._model, chunk.key, audio_s)
        if audio_s is None or way.pieces == 1:
            yield from self._process_whole([chunk], nothing_more)
        else:
            yield from self._process_in_pieces(chunk, audio_s, way)

    # --- complete chunks ------------------------------------------------------------------------------------------

    def _process_whole(self, batch: Sequence[Chunk], staged_more: More) -> Iterator[ChunkEvent]:
        broke = False
        try:
            staged = self._stage(batch)
            if staged:
                for event in self.session.process(staged, staged_more):
                    yield self._give_back(event)
                    yield from self._take_unavailable()
            yield from self._take_unavailable()
        except SessionBroken as broken:
            broke = True
            yield from self._take_unavailable()
            in_hand = list(self._in_hand.values())
            # If the engine has reported no start, the first chunk is blamed (``SessionBroken``).
            suspects = [handed for handed in in_hand if handed.is_started] or in_hand[:1]
            if len(suspects) == 1 and not broken.at_start:
                chunk = suspects[0].original
                self._note(chunk, broken.error_class, chunk.audio_s, self._way)
            error = self._with_original_paths(str(broken))
            raise SessionBroken(broken.error_class, error, at_start=broken.at_start) from broken
        finally:
            for handed in self._in_hand.values():
                self._stager.release(handed.original, failed=broke)
            self._in_hand.clear()

    def _stage(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Return the chunks for the engine: copies on the node, cuts out of longer files, or the originals."""
        staged = []
        for chunk in chunks:
            if self._stopped and chunk.is_cut:
                continue  # without a result it stays pending
            started_at_ms = self.clock.now_ms()
            try:
                copy = self._stager.take(chunk)
            except (OSError, CannotCut) as problem:
                error_class = self._class_of(problem) or policy.BAD_AUDIO
                why = str(problem)
                if isinstance(problem, OSError):
                    why = f"{describe_audio(chunk)}: {problem.strerror or problem}"
                self._unavailable.append(self._failure(chunk, started_at_ms, error_class, why))
            else:
                self._in_hand[chunk.key] = _Handed(chunk, copy)
                staged.append(copy)
        return staged

    def _take_unavailable(self) -> Iterator[ChunkResult]:
        while self._unavailable:
            yield self._unavailable.popleft()

    def _give_back(self, event: ChunkEvent) -> ChunkEvent:
        """Return the event with the original chunk; a failure is not charged if its copy was damaged."""
        handed = self._in_hand[event.chunk.key]
        original = handed.original
        if isinstance(event, ChunkStarted):
            handed.is_started = True
            return replace(event, chunk=original)

        error = None if event.error is None else self._with_original_paths(event.error)
        del self._in_hand[original.key]
        is_sound = self._stager.release(original, failed=not event.ok)
        charged = event.charged and (event.ok or is_sound)
        result = replace(
            event,
            chunk=original,
            error=error,
            charged=charged,
        )
        if charged:
            result = name_fault(result)
            # A truncated recording has less audio than the chunk's times imply.
            lengths_s = not_none((result.audio_s, original.audio_s))
            self._note(original, result.error_class, min(lengths_s, default=None), self._way)
        return result

    def _with_original_paths(self, text: str) -> str:
        """Replace the paths of copies in a message by the original paths."""
        for handed in self._in_hand.values():
            if handed.staged.audio_path != handed.original.audio_path:
                text = text.replace(handed.staged.audio_path, describe_audio(handed.original))
        return text

    # --- device memory --------------------------------------------------------------------------------------------

    def _note(
        self,
        chunk: Chunk,
        error_class: str | None,
        audio_s: float | None,
        way: Way,
    ) -> None:
        """Record whether a chunk, of which a try has ended, fitted into device memory."""
        if error_class is None:
            self._limits.note_success(self._model, chunk.key, audio_s, way)
        elif error_class == policy.OUT_OF_MEMORY:
            if not audio_s and not chunk.is_cut:
                audio_s = self._stager.cutter.length_s(Path(chunk.audio_path))
            self._limits.note_out_of_memory(self._model, chunk.key, audio_s, way)

    # --- chunks in pieces -----------------------------------------------------------------------------------------

    def _process_in_pieces(self, chunk: Chunk, audio_s: float, way: Way) -> Iterator[ChunkEvent]:
        self.steps.decisions.put(Decision.of(Code.IN_PIECES, chunk.name, audio_s=audio_s, pieces=way.pieces))
        run = PieceRun(self.session, chunk, audio_s, way.pieces, self._stager.cutter, self.folder)
        try:
            for event in run.process():
                if isinstance(event, ChunkStarted):
                    with self._lock:
                        self._in_pieces = True
                elif event.charged:
                    self._note(chunk, event.error_class, audio_s, way)
                yield event
        except SessionBroken as broken:
            if not broken.at_start:
                self._note(chunk, broken.error_class, audio_s, way)
            at_start = broken.at_start and run.started_at_ms is None  # not if a piece was processed before
            raise SessionBroken(broken.error_class, str(broken), at_start=at_start) from broken
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)  # remove all pieces
            self._stager.release(chunk)  # the copy of the complete chunk is not needed
            with self._lock:
                self._in_pieces = False
                if self._stopped:
                    self.session.interrupt()
        if run.problem is not None:
            yield self._fail_uncut(run, run.problem)

    def _fail_uncut(self, run: PieceRun, problem: CannotCut | OSError) -> ChunkResult:
        """Return the failure of a chunk that does not fit and cannot be cut, unless the node is at fault."""
        error_class = self._class_of(problem) if isinstance(problem, OSError) else None
        if error_class is None:
            self._limits.note_out_of_memory(self._model, run.chunk.key, None, LEAN)
            error_class = policy.OUT_OF_MEMORY
        error = f"it does not fit into device memory, and cannot be cut into pieces: {problem}"
        return self._failure(run.chunk, run.started_at_ms or self.clock.now_ms(), error_class, error)

    def _failure(
        self,
        chunk: Chunk,
        started_at_ms: int,
        error_class: str,
        error: str,
    ) -> ChunkResult:
        return name_fault(
            ChunkResult(
                chunk,
                started_at_ms,
                self.clock.now_ms(),
                error_class=error_class,
                error=error,
            )
        )

    def _class_of(self, problem: CannotCut | OSError) -> str | None:
        """Return why audio cannot be cut out; None: neither a decoder nor a file is missing, and the node is sound."""
        if isinstance(problem, OSError):
            return fault_of_node(problem, self._stager.folder) or fault_of_node(problem, self.folder)
        if isinstance(problem, NoDecoder):
            return policy.NO_PROGRAM
        if isinstance(problem, NotThere):
            return policy.MISSING_AUDIO
        return None
