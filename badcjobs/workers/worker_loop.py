"""One worker's thread: takes work, opens an engine session, feeds it, and reports; decides and writes nothing itself.

take a batch → open a session, as usual or lean → feed it (``feed``: stage, analyse, cut in pieces) → report
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, Session, SessionBroken, Timetable
from badcjobs.workers import retry
from badcjobs.workers.feed import AudioSteps, SessionFeed
from badcjobs.workers.memory_limits import model_of
from badcjobs.workers.work_queue import Batch, Fits, WorkQueue, anything_fits, nothing_fits

_PATIENCE_WITH_KILLERS = 5  # an engine that somebody else ends while it starts is started that much more often
_GPU_ERRORS = 3  # so many in a row, with nothing done between them, and it is not the chunks


@dataclass(frozen=True)
class Opened:
    """An engine session has begun."""

    pid: int | None
    at_ms: int


@dataclass(frozen=True)
class Closed:
    """An engine session has ended."""

    exit_code: int | None
    at_ms: int


@dataclass(frozen=True)
class NotOpened:
    """The engine could not be started; the batch it was started for is untouched."""

    batch: list[Chunk]
    error: BadcjobsError | OSError


@dataclass(frozen=True)
class BatchOver:
    """A batch has come to its end: what has no result, what was lost in company, and what broke the session."""

    unanswered: list[Chunk]
    begun: list[ChunkStarted]  # those of them that the engine had begun
    lost: list[ChunkResult]
    broken: SessionBroken | None
    at_ms: int
    retires: bool = False  # the worker ends with it


@dataclass(frozen=True)
class Crashed:
    """A bug of ours in this thread; raised again where the CLI can see it."""

    error: BaseException


@dataclass
class _Held:
    """The chunks in a worker's hands, from the moment they left the queue until they have a result."""

    queue: WorkQueue
    alone: bool
    room: Callable[[_Held], Fits]
    unanswered: dict[tuple[str, str], Chunk] = field(default_factory=dict)
    begun: dict[tuple[str, str], ChunkStarted] = field(default_factory=dict)
    lost: list[ChunkResult] = field(default_factory=list)
    done: int = 0
    sort_out: Callable[[list[Chunk]], list[Chunk]] = list  # returns those that this session can do

    def more(self, wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
        """Get further chunks for the session at work (seams.More)."""
        if self.alone or (wanted <= 0 and idle <= 0):
            return ()
        fresh = self.queue.more(wanted, idle=idle, fits=self.room(self))
        if fresh is None:
            self.alone = True  # suspects wait for a worker with nothing else in hand
            return ()
        fresh = self.sort_out(fresh)
        self.unanswered.update((chunk.key, chunk) for chunk in fresh)
        return fresh

    def note(self, news: ChunkStarted | ChunkResult) -> None:
        """Keep account of what the session says."""
        if isinstance(news, ChunkStarted):
            self.begun[news.chunk.key] = news
            return
        self.unanswered.pop(news.chunk.key, None)
        self.begun.pop(news.chunk.key, None)
        self.done += news.ok
        if not news.charged:
            self.lost.append(news)


Event = Opened | Closed | NotOpened | BatchOver | Crashed | ChunkStarted | ChunkResult


class WorkerThread:
    """Works off the queue on one device until there is nothing left, or its engine is of no use."""

    def __init__(
        self,
        plan: WorkerPlan,
        engine: Engine,
        queue: WorkQueue,
        report: Callable[[WorkerPlan, Event], None],
        *,
        clock: Clock,
        scratch: Path,
        openings: int,
        timetable: Timetable | None = None,
        audio: AudioSteps | None = None,
    ) -> None:
        self.plan = plan
        self.retired = False
        self._timetable = timetable
        self._lanes = 1  # so many chunks were in progress at once
        self._engine = engine
        self._queue = queue
        self._send = report
        self._clock = clock
        self._scratch = scratch
        self._openings = openings  # how often in a row the engine may fail to start
        self._audio = audio  # None: the engine gets every chunk as it is
        self._feed: Session | None = None  # the session that is open, with the steps before it
        self._is_lean = False  # the session
        self._must_be_lean = plan.lean  # whatever comes: its models did not fit as usual
        self._interrupted = False
        self._killed = False
        self._gpu_errors = 0  # in a row
        self._thread = threading.Thread(target=self._run, name=f"worker-{plan.slot}", daemon=True)

    # --- called from outside --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the engine starts when the first chunk comes."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it is still at work."""
        return self._thread.is_alive()

    def retire(self) -> None:
        """End when what is in hand is done; others do the rest."""
        self.retired = True
        self._queue.wake()

    def interrupt(self) -> None:
        """Let what is running come to its end."""
        self._interrupted = True
        if (feed := self._feed) is not None:
            feed.interrupt()

    def kill(self) -> None:
        """End the engine now."""
        self._killed = True
        if (feed := self._feed) is not None:
            feed.kill()

    # --- in the thread --------------------------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        self._send(self.plan, event)

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self._report(Crashed(error))

    def _work(self) -> None:
        failed_openings = 0
        while (batch := self._take()) is not None:
            if not batch.chunks:
                continue
            try:
                feed = self._feed_for(batch)
            except (BadcjobsError, OSError) as error:
                failed_openings += 1
                self._report(NotOpened(batch.chunks, error))
                if failed_openings >= self._openings:
                    break  # the other workers go on without this one
                continue
            over = self._process(feed, batch, failed_openings)
            at_start = over.broken is not None and over.broken.at_start
            failed_openings = failed_openings + 1 if at_start else 0
            if over.broken is not None:
                self._close()
            if over.retires:
                break  # a new process would do the same; the other workers go on
        self._close()

    def _take(self) -> Batch | None:
        """Return the next batch, without those that have to be done with less memory: their turn comes, alone."""
        batch = self._queue.take(self._room(None), lambda: self.retired, lean=self._is_lean)
        if batch is None or batch.lean or self._must_be_lean:
            return batch
        if batch.alone:
            return replace(batch, lean=any(self._needs_lean(chunk) for chunk in batch.chunks))
        usual = self._sort_out(batch.chunks)
        if len(usual) < len(batch.chunks) and (self._feed is None or self._is_lean):
            self._queue.put_back(usual)  # those that were sorted out first: it saves a start of the engine
            usual = []
        return replace(batch, chunks=usual)

    def _sort_out(self, chunks: list[Chunk]) -> list[Chunk]:
        if self._must_be_lean:
            return chunks
        usual = []
        for chunk in chunks:
            if self._needs_lean(chunk):
                self._queue.put_back([chunk], lean=True)
            else:
                usual.append(chunk)
        return usual

    def _needs_lean(self, chunk: Chunk) -> bool:
        """Say whether a chunk has no place in a usual session on this device; touches no file."""
        if self._audio is None:
            return False
        return self._audio.limits.way_of(model_of(self.plan), chunk.key, chunk.audio_s).lean

    def _feed_for(self, batch: Batch) -> Session:
        """Return a session of the wanted kind; the one that is open if it is, for a new one takes its time."""
        lean = batch.lean or self._must_be_lean
        if self._feed is not None and self._is_lean != lean:
            self._close()
        return self._feed or self._open(lean)

    def _open(self, lean: bool) -> Session:
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._is_lean = lean
        plan = replace(self.plan, lean=lean)
        feed = self._engine.open(plan, self._scratch)
        if self._audio is not None:
            feed = SessionFeed(feed, plan, self._audio, clock=self._clock, folder=self._scratch / "pieces")
        self._feed = feed
        self._report(Opened(feed.pid, self._clock.now_ms()))
        if self._interrupted:  # the stop came while we were starting
            feed.interrupt()
        if self._killed:
            feed.kill()
        return feed

    def _process(self, feed: Session, batch: Batch, failed_openings: int) -> BatchOver:
        """Feed one batch, and what comes after it, to the session; report and return how it ended."""
        in_hand = {chunk.key: chunk for chunk in batch.chunks}
        held = _Held(self._queue, batch.alone, self._room, in_hand, sort_out=self._sort_out)
        broken: SessionBroken | None = None
        try:
            for news in feed.process(batch.chunks, held.more):
                held.note(news)
                self._report(news)
        except SessionBroken as error:
            broken = error
        if held.done:
            self._gpu_errors = 0
        if broken is not None and broken.error_class == retry.GPU_ERROR and not batch.alone:
            self._gpu_errors += 1  # suspects, which are alone, say nothing of the GPU
        broken, retires = self._judge_end(broken, failed_openings)
        over = BatchOver(
            list(held.unanswered.values()),
            list(held.begun.values()),
            held.lost,
            broken,
            self._clock.now_ms(),
            retires,
        )
        self._report(over)
        return over

    def _room(self, held: _Held | None) -> Fits:
        """Return what says which chunks there is still time for; a worker that is to end has time for none."""
        if self.retired:
            return nothing_fits
        if self._timetable is None:
            return anything_fits
        in_hand: list[tuple[Chunk, int | None]] = []
        if held is not None:
            self._lanes = max(self._lanes, len(held.begun))
            in_hand = [(c, held.begun[key].at_ms if key in held.begun else None) for key, c in held.unanswered.items()]
        return self._timetable.room(self.plan.device_id, in_hand, self._lanes)

    def _judge_end(self, broken: SessionBroken | None, failed_openings: int) -> tuple[SessionBroken | None, bool]:
        """Say whether what broke the session is a reason to go; errors of one GPU without end mean that it is lost."""
        if broken is None:
            return None, False
        if self._gpu_errors >= _GPU_ERRORS:
            why = f"{_GPU_ERRORS} errors in a row on this device; the last one: {broken}"
            return SessionBroken(retry.GPU_LOST, why), True
        if broken.error_class == retry.OUT_OF_MEMORY and broken.at_start:  # the work of others fills the device
            self._must_be_lean = True
            return broken, failed_openings > 0
        limit = self._openings * (
            _PATIENCE_WITH_KILLERS if broken.error_class in (retry.WORKER_DIED, retry.TERMINATED) else 1
        )
        return broken, broken.error_class in retry.RETIRING or (broken.at_start and failed_openings + 1 >= limit)

    def _close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            self._report(Closed(feed.close(), self._clock.now_ms()))
