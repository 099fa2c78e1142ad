"""The thread of one worker: takes chunks, feeds them to an engine session and reports; writes nothing.

take a batch → open a session (usual or lean) → feed it (``feed``: stage, analyse, cut into pieces) → report
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkKey, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, Session, SessionBroken
from badcjobs.store.live_folder import check_room
from badcjobs.workers import retry
from badcjobs.workers.feed import AudioSteps, SessionFeed
from badcjobs.workers.memory_limits import model_of
from badcjobs.workers.mps import MpsDaemons
from badcjobs.workers.retry import RetryPolicy
from badcjobs.workers.work_queue import Batch, Fits, WorkQueue

_KILLED_START_FACTOR = 5  # an engine that another program kills while it starts gets this many times more starts
_GPU_ERRORS = 3  # after this many in a row, with no chunk done in between, the device is at fault and not the chunks
_FAILURES_SHARED = 3  # after this many sessions under MPS without a result, a worker does without MPS

# (device_id, chunks in hand with their start in ms, chunks processed at the same time) → Fits
Timetable = Callable[[int | None, Sequence[tuple[Chunk, int | None]], int], Fits]


class Opened(NamedTuple):
    """An engine session was opened."""

    pid: int | None
    at_ms: int


class Closed(NamedTuple):
    """An engine session was closed."""

    exit_code: int | None
    at_ms: int


class BatchOver(NamedTuple):
    """The end of a batch, with the chunks that have no result and the error that broke the session."""

    unanswered: list[Chunk]
    started: list[ChunkStarted]  # the unanswered chunks that the engine had started
    lost: list[ChunkResult]  # failed together with others, not charged
    broken: SessionBroken | None
    at_ms: int
    retires: bool = False  # the worker stops
    failed_openings: int = 0  # in a row, this one included
    shared: bool = False  # under MPS, where the fault of a worker ends all workers of its device


# An exception is a bug in this thread; the supervisor raises it again in the main thread.
Event = Opened | Closed | BatchOver | BaseException | ChunkStarted | ChunkResult


@dataclass(eq=False)
class WorkerSetup:
    """What all workers of a task share."""

    engine: Engine
    _: KW_ONLY
    clock: Clock
    policy: RetryPolicy
    scratch: Path
    timetable: Timetable = lambda device_id, in_hand, lanes: lambda chunk: True
    audio: AudioSteps | None = None  # None: the engine gets every chunk unchanged
    mps: MpsDaemons = field(default_factory=MpsDaemons)


@dataclass(eq=False, repr=False)
class WorkerThread(threading.Thread):
    """Processes chunks on one device until the queue is empty or the engine no longer works."""

    plan: WorkerPlan
    setup: WorkerSetup
    queue: WorkQueue
    report: Callable[[Event], None]
    retired: bool = False  # set by the supervisor: stop after the chunks in hand
    _parallel: int = 1  # the most chunks that were in progress at the same time
    _feed: Session | None = None  # the open session, with the audio steps before it
    _is_lean: bool = False  # whether the open session is lean
    _pipe: str | None = None  # of the daemon through which the open session shares its device; None: it does not
    _gave_result: bool = False  # the open session
    _apart: bool = False  # the next batch runs without MPS: the server recovers when all its clients have ended
    _failures_shared: int = 0  # sessions under MPS in a row without a result
    _interrupted: bool = False
    _killed: bool = False
    _gpu_errors: int = 0  # in a row
    _failed_openings: int = 0  # in a row

    def __post_init__(self) -> None:
        super().__init__(name=f"worker-{self.plan.slot}", daemon=True)  # the engine starts with the first chunk
        self._folder = self.setup.scratch / f"worker-{self.plan.slot}"
        self._must_be_lean = self.plan.lean  # the models did not fit with the usual threads
        # Nothing runs on such a card without the site's daemon; after a fault one worker goes on (``supervise``).
        self._is_exclusive = self.plan.device is not None and self.plan.device.exclusive

    # --- called from the main thread ------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Finish the chunks in progress, then stop."""
        self._interrupted = True
        if (feed := self._feed) is not None:
            feed.interrupt()

    def kill(self) -> None:
        """Kill the engine immediately."""
        self._killed = True
        if (feed := self._feed) is not None:
            feed.kill()

    def end_shared(self) -> None:
        """Kill the engine if it shares its device; one that starts a program for each chunk fails by itself."""
        if self._pipe is not None and (feed := self._feed) is not None and feed.pid is not None:
            feed.kill()

    # --- in the thread --------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Process chunks until the queue is empty (threading.Thread)."""
        try:
            while (batch := self._take()) is not None:
                if not batch.chunks:
                    continue
                over = self._process(batch)
                if over.broken is not None:
                    self._close()
                if over.retires:
                    break  # a new process would fail too; the other workers continue
            self._close()
        except BaseException as error:
            self.report(error)

    def _take(self) -> Batch | None:
        """Return the next batch without the chunks that need a lean session; those go back to the queue."""
        batch = self.queue.take(self._room({}, {}), lambda: self.retired, lean=self._is_lean)
        if batch is None or batch.lean or self._must_be_lean:
            return batch
        if batch.alone:
            return replace(batch, lean=any(self._needs_lean(chunk) for chunk in batch.chunks))
        usual = self._sort_out(batch.chunks)
        if len(usual) < len(batch.chunks) and (self._feed is None or self._is_lean):
            self.queue.put_back(usual)  # start with the lean chunks: it saves one start of the engine
            usual = []
        return replace(batch, chunks=usual)

    def _sort_out(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks for a usual session; put the others back into the queue as lean chunks."""
        usual = []
        for chunk in chunks:
            if self._must_be_lean or not self._needs_lean(chunk):
                usual.append(chunk)
            else:
                self.queue.put_back([chunk], lean=True)
        return usual

    def _needs_lean(self, chunk: Chunk) -> bool:
        """Return whether a chunk needs a lean session on this device; read no file."""
        if self.setup.audio is None:
            return False
        return self.setup.audio.limits.way_of(model_of(self.plan), chunk.key, chunk.audio_s).lean

    def _session(self, lean: bool, apart: bool) -> Session:
        """Return a lean or a usual session, under MPS or apart; keep the open one if possible: a start is slow."""
        tries = self._is_exclusive or (not apart and self._failures_shared < _FAILURES_SHARED)
        pipe = self.setup.mps.pipe_of(self.plan.device_id) if tries else None
        # If the daemon has ended, its server and its clients may still work.
        if self._feed is not None and self._is_lean == lean and (self._pipe == pipe or (tries and pipe is None)):
            return self._feed
        self._close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._is_lean, self._pipe, self._gave_result = lean, pipe, False
        plan = replace(self.plan, lean=lean, pipe=pipe)
        feed = self.setup.engine.open(plan, self._folder)
        if self.setup.audio is not None:
            feed = SessionFeed(feed, plan, self.setup.audio, clock=self.setup.clock, folder=self._folder / "pieces")
        self._feed = feed
        self.report(Opened(feed.pid, self.setup.clock.now_ms()))
        if self._interrupted:  # requested while the engine was starting
            feed.interrupt()
        if self._killed:
            feed.kill()
        return feed

    def _process(self, batch: Batch) -> BatchOver:
        """Feed one batch, and the chunks that follow it, to a session; report and return how it ended."""
        unanswered = {chunk.key: chunk for chunk in batch.chunks}
        started: dict[ChunkKey, ChunkStarted] = {}
        lost: list[ChunkResult] = []
        broken: SessionBroken | None = None
        apart, self._apart = batch.apart or self._apart, False
        alone = batch.alone or apart

        def more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            nonlocal alone
            if alone or (wanted <= 0 and idle <= 0):
                return ()
            fresh = self.queue.more(wanted, idle=idle, fits=self._room(unanswered, started))
            alone = fresh is None  # suspects need a worker with no other chunk in hand
            fresh = self._sort_out(fresh or [])
            unanswered.update((chunk.key, chunk) for chunk in fresh)
            return fresh

        try:
            for event in self._session(batch.lean or self._must_be_lean, apart).process(batch.chunks, more):
                if isinstance(event, ChunkStarted):
                    started[event.chunk.key] = event
                else:
                    event = self._excuse(event, apart)
                    unanswered.pop(event.chunk.key, None)
                    started.pop(event.chunk.key, None)
                    if event.ok:
                        self._gpu_errors = 0
                        self._look_for_mps()
                    if not event.charged and event.error_class not in retry.OF_NODE:
                        lost.append(event)
                self.report(event)
        except SessionBroken as error:
            broken = error
        except (BadcjobsError, OSError) as error:
            fault = retry.fault_of_node(error, self.setup.scratch) if isinstance(error, OSError) else None
            if self._feed is not None and fault is None:
                raise
            broken = SessionBroken(fault or retry.NO_PROGRAM, str(error), at_start=self._feed is None)
        if broken is not None and broken.error_class in retry.MAY_BE_NODE and (found := self._find_fault()) is not None:
            broken = SessionBroken(found[0], f"{broken}\n{found[1]}", at_start=broken.at_start)
        if broken is not None and broken.error_class == retry.GPU_ERROR and not batch.alone:
            self._gpu_errors += 1  # a suspect that runs alone may be the cause itself
        self._failed_openings = self._failed_openings + 1 if broken is not None and broken.at_start else 0
        broken, retires = self._decide_end(broken)
        left, now_ms = list(unanswered.values()), self.setup.clock.now_ms()
        shared = self._pipe is not None and not apart
        over = BatchOver(left, list(started.values()), lost, broken, now_ms, retires, self._failed_openings, shared)
        self.report(over)
        return over

    def _excuse(self, result: ChunkResult, apart: bool) -> ChunkResult:
        """Return a result that is not charged to the chunk if the node is at fault."""
        if result.error_class in retry.MAY_BE_NODE and result.charged and (fault := self._find_fault()) is not None:
            result = replace(result, error_class=fault[0], error=f"{result.error}\n{fault[1]}")
        of_others = self._pipe is not None and not apart and result.error_class in retry.DEATHS
        return replace(result, charged=False) if of_others or result.error_class in retry.OF_NODE else result

    def _look_for_mps(self) -> None:
        """Check once per session that its engine is a client of MPS: the first result shows that it uses the device."""
        if self._pipe is not None and not self._gave_result and self._feed is not None:
            self.setup.mps.look_for(self.plan.device_id, self._feed.pid)
            self._failures_shared = 0
        self._gave_result = True

    def _find_fault(self) -> tuple[str, str] | None:
        """Return the class and the text of a fault of the node, from a test file in our folder; None: there is none."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_room(self._folder)
        except OSError as error:
            fault = retry.fault_of_node(error, self.setup.scratch) or retry.NODE_FAULT
            return fault, f"{self._folder}: {error.strerror}"
        return None

    def _room(self, unanswered: Mapping[ChunkKey, Chunk], started: Mapping[ChunkKey, ChunkStarted]) -> Fits:
        """Return the test of which chunks still fit into the time left; a retired worker takes none."""
        if self.retired:
            return lambda chunk: False
        self._parallel = max(self._parallel, len(started))
        in_hand = [(chunk, started[key].at_ms if key in started else None) for key, chunk in unanswered.items()]
        return self.setup.timetable(self.plan.device_id, in_hand, self._parallel)

    def _decide_end(self, broken: SessionBroken | None) -> tuple[SessionBroken | None, bool]:
        """Return the error and whether the worker stops because of it; repeated GPU errors mean a lost GPU."""
        if broken is None or broken.error_class in retry.OF_NODE:
            return broken, False
        self._apart = self._pipe is not None
        if self._apart and not self._gave_result:
            self._failures_shared += 1
            if self._failures_shared == _FAILURES_SHARED and not self._is_exclusive:
                self.setup.mps.do_without(self.plan.device_id, f"{_FAILURES_SHARED} starts gave no result; {broken}")
        if self._gpu_errors >= _GPU_ERRORS:
            why = f"{_GPU_ERRORS} errors in a row on this device; last error: {broken}"
            return SessionBroken(retry.GPU_LOST, why), True
        if broken.error_class == retry.OUT_OF_MEMORY and broken.at_start:  # other processes fill the device
            self._must_be_lean = True
            return broken, self._failed_openings > 1
        if self._apart and broken.at_start and not self._is_exclusive:  # MPS may be the cause
            return broken, False
        is_killed = broken.error_class in (retry.WORKER_DIED, retry.TERMINATED)
        limit = (self.setup.policy.retries + 1) * (_KILLED_START_FACTOR if is_killed else 1)
        return broken, broken.error_class in retry.RETIRING or (broken.at_start and self._failed_openings >= limit)

    def _close(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            self.report(Closed(feed.close(), self.setup.clock.now_ms()))
