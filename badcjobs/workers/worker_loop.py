"""The thread of one worker: takes chunks, feeds them to an engine session and reports; writes nothing.

take a batch → open a session (usual or lean) → feed it (``feed``: stage, analyse, cut into pieces) → report
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkKey, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, More, Session, SessionBroken
from badcjobs.store.live_folder import check_room
from badcjobs.workers import policy
from badcjobs.workers.error_patterns import fault_of_node
from badcjobs.workers.feed import AudioSteps, SessionFeed
from badcjobs.workers.memory_limits import model_of
from badcjobs.workers.mps import MpsDaemons
from badcjobs.workers.policy import Circumstance, RetryPolicy, WorkerStep
from badcjobs.workers.work_queue import Batch, Fits, WorkQueue

_FAILURES_SHARED = 3  # after this many sessions under MPS without a result, a worker does without MPS

# The chunks of a batch that have no result yet, each with its start in the engine in ms; None: not started.
InHand = dict[ChunkKey, tuple[Chunk, int | None]]
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

    left: list[Chunk]
    broken: SessionBroken | None
    at_ms: int
    circumstances: frozenset[Circumstance]  # those that the worker knows
    failed_openings: int  # in a row, this one included


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

    plan: WorkerPlan  # lean once the models did not fit with the usual threads
    setup: WorkerSetup
    queue: WorkQueue
    report: Callable[[Event], None]
    retired: bool = False  # set by the supervisor: stop after the chunks in hand
    _parallel: int = 1  # the most chunks that were in progress at the same time
    _feed: Session | None = None  # the open session, with the audio steps before it
    _open_plan: WorkerPlan | None = None  # of the open session: lean or not, under MPS or not
    _shared: bool = False  # whether it shares its device with other workers
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
        # Nothing runs on such a card without the site's daemon; after a fault one worker goes on (``supervise``).
        self._is_exclusive = self.plan.device is not None and self.plan.device.exclusive

    # --- called from the main thread ------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Finish the chunks in progress, then stop."""
        self._interrupted = True
        feed = self._feed
        if feed is not None:
            feed.interrupt()

    def kill(self) -> None:
        """Kill the engine immediately."""
        self._killed = True
        feed = self._feed
        if feed is not None:
            feed.kill()

    def end_shared(self) -> None:
        """Kill the engine if it shares its device; one that starts a program for each chunk fails by itself."""
        feed = self._feed
        if self._shared and feed is not None and feed.pid is not None:
            feed.kill()

    # --- batches --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Process chunks until the queue is empty (threading.Thread)."""
        try:
            while True:
                batch = self._take()
                if batch is None:
                    break
                if batch.chunks and not self._process(batch):
                    break
            self._close()
        except BaseException as error:
            self.report(error)

    def _take(self) -> Batch | None:
        """Return the next batch without the chunks that need a lean session; those go back to the queue."""
        batch = self.queue.take(self._room({}), lambda: self.retired)
        if batch is None or batch.alone:
            return batch
        return batch._replace(chunks=self._sort_out(batch.chunks))

    def _sort_out(self, chunks: list[Chunk]) -> list[Chunk]:
        """Return the chunks for the usual session of this worker; put the others back into the queue, to be alone."""
        if self.plan.lean:
            return chunks
        usual = []
        for chunk in chunks:
            if self._needs_lean(chunk):
                self.queue.put_back([chunk], alone=True)
            else:
                usual.append(chunk)
        return usual

    def _needs_lean(self, chunk: Chunk) -> bool:
        """Return whether a chunk needs a lean session on this device; read no file."""
        audio = self.setup.audio
        if self.plan.lean or audio is None:
            return self.plan.lean
        return audio.limits.way_of(model_of(self.plan), chunk.key, chunk.audio_s).lean

    def _process(self, batch: Batch) -> bool:
        """Feed one batch to a session, and the chunks that follow it; report its end, and return whether to go on."""
        in_hand: InHand = {chunk.key: (chunk, None) for chunk in batch.chunks}
        broken = self._feed_session(batch, in_hand)
        if broken is None:
            self._failed_openings = 0
        else:
            broken = self._judge(broken, alone=batch.alone)
        self._blame(in_hand, broken)

        circumstances = self._circumstances(broken)
        left = [chunk for chunk, _ in in_hand.values()]
        self.report(BatchOver(left, broken, self.setup.clock.now_ms(), circumstances, self._failed_openings))
        if broken is None:
            return True
        self._close()
        step = policy.find_rule(broken.error_class, circumstances).worker
        if step is WorkerStep.LEAN_PROCESS:
            self.plan = replace(self.plan, lean=True)
        return step is not WorkerStep.STOP

    def _feed_session(self, batch: Batch, in_hand: InHand) -> SessionBroken | None:
        """Let a session process a batch, and report its events; return the error that broke the session."""
        apart = batch.apart or self._apart
        self._apart = False
        try:
            session = self._session(lean=any(map(self._needs_lean, batch.chunks)), apart=apart)
            for event in session.process(batch.chunks, self._more_for(in_hand, alone=batch.alone or apart)):
                if isinstance(event, ChunkStarted):
                    in_hand[event.chunk.key] = (event.chunk, event.at_ms)
                else:
                    event = self._note_result(event)
                    in_hand.pop(event.chunk.key, None)
                self.report(event)
        except SessionBroken as error:
            return error
        except (BadcjobsError, OSError) as error:
            return self._broken_by(error)
        return None

    def _blame(self, in_hand: InHand, broken: SessionBroken | None) -> None:
        """Report chunks without a result as failed, if one of them may be the cause."""
        chunks = [chunk for chunk, _ in in_hand.values()]
        if broken is None and not self._interrupted:
            silent = SessionBroken(policy.NO_OUTPUT, "the engine gave no result for this chunk and continued")
            for chunk in chunks:
                self._fail([chunk], in_hand, silent)
        elif broken is not None and not broken.at_start:
            started = [chunk for chunk, started_at_ms in in_hand.values() if started_at_ms is not None]
            self._fail(started or chunks[:1], in_hand, broken)

    def _fail(self, suspects: Sequence[Chunk], in_hand: InHand, broken: SessionBroken) -> None:
        """Report these chunks as failed; several are not charged, because one is the cause."""
        now_ms = self.setup.clock.now_ms()
        for chunk in suspects:
            _, started_at_ms = in_hand.pop(chunk.key)
            result = ChunkResult(
                chunk,
                now_ms if started_at_ms is None else started_at_ms,
                now_ms,
                error_class=broken.error_class,
                error=str(broken),
                charged=len(suspects) == 1,
            )
            self.report(self._note_result(result))

    def _more_for(self, in_hand: InHand, *, alone: bool) -> More:
        """Return what gives the session more chunks; none to chunks that must be ``alone``."""

        def more(wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
            nonlocal alone
            if alone or self.retired or (wanted <= 0 and idle <= 0):
                return ()
            fresh = self.queue.more(wanted, idle=idle, fits=self._room(in_hand))
            if fresh is None:
                alone = True  # suspects need a worker with no other chunk in hand
                return ()
            fresh = self._sort_out(fresh)
            in_hand.update((chunk.key, (chunk, None)) for chunk in fresh)
            return fresh

        return more

    def _note_result(self, result: ChunkResult) -> ChunkResult:
        """Return a result, with the fault of the node that may be its cause, and uncharged if a neighbour may be."""
        if result.ok:
            self._gpu_errors = 0
            self._note_mps()
            return result
        error_class = result.error_class or ""
        fault = self._find_fault(error_class) if result.charged else None
        if fault is not None:
            return replace(
                result,
                error_class=fault.error_class,
                error=f"{result.error}\n{fault}",
                charged=False,
            )
        if self._shared and error_class in policy.DEATHS:
            return replace(result, charged=False)
        return result

    def _room(self, in_hand: InHand) -> Fits:
        """Return the test of which chunks still fit into the time left."""
        chunks = list(in_hand.values())
        self._parallel = max(self._parallel, sum(started_at_ms is not None for _, started_at_ms in chunks))
        return self.setup.timetable(self.plan.device_id, chunks, self._parallel)

    # --- sessions -------------------------------------------------------------------------------------------------

    def _session(self, *, lean: bool, apart: bool) -> Session:
        """Return a lean or a usual session, under MPS or apart; keep the open one if possible: a start is slow."""
        pipe = self.setup.mps.pipe_of(self.plan.device_id)
        if not self._is_exclusive and (apart or self._failures_shared >= _FAILURES_SHARED):
            pipe = None
        plan = replace(self.plan, lean=lean, pipe=pipe)
        if self._feed is not None and plan == self._open_plan:
            return self._feed

        self._close()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._open_plan = plan
        self._shared = pipe is not None and not apart
        self._gave_result = False
        feed = self.setup.engine.open(plan, self._folder)
        if self.setup.audio is not None:
            feed = SessionFeed(
                feed,
                plan,
                self.setup.audio,
                clock=self.setup.clock,
                folder=self._folder / "pieces",
            )
        self._feed = feed
        self.report(Opened(feed.pid, self.setup.clock.now_ms()))
        if self._interrupted:  # requested while the engine was starting
            feed.interrupt()
        if self._killed:
            feed.kill()
        return feed

    def _broken_by(self, error: BadcjobsError | OSError) -> SessionBroken:
        """Return the failure behind an error outside the engine; raise the error again if it is a bug."""
        fault = fault_of_node(error, self.setup.scratch) if isinstance(error, OSError) else None
        at_start = self._feed is None
        if fault is None and not at_start:
            raise error
        return SessionBroken(fault or policy.NO_PROGRAM, str(error), at_start=at_start)

    def _find_fault(self, error_class: str) -> SessionBroken | None:
        """Return the fault of the node behind an error that may have one, from a test file in our folder."""
        if error_class not in policy.MAY_BE_NODE:
            return None
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            check_room(self._folder)
        except OSError as error:
            fault = fault_of_node(error, self.setup.scratch) or policy.NODE_FAULT
            return SessionBroken(fault, f"{self._folder}: {error.strerror}")
        return None

    def _judge(self, broken: SessionBroken, *, alone: bool) -> SessionBroken:
        """Return the error behind a broken session: a fault of the node, a lost device, or what it has reported."""
        fault = self._find_fault(broken.error_class)
        if fault is not None:
            broken = SessionBroken(fault.error_class, f"{broken}\n{fault}", at_start=broken.at_start)
        self._failed_openings = self._failed_openings + 1 if broken.at_start else 0
        if broken.error_class in policy.OF_NODE:
            return broken
        self._note_failure_under_mps(broken)
        if broken.error_class == policy.GPU_ERROR and not alone:  # a suspect that runs alone may be the cause itself
            self._gpu_errors += 1
        if self._gpu_errors >= policy.GPU_ERRORS_OF_A_LOST_GPU:
            why = f"{self._gpu_errors} errors in a row on this device; last error: {broken}"
            return SessionBroken(policy.GPU_LOST, why)
        return broken

    def _circumstances(self, broken: SessionBroken | None) -> frozenset[Circumstance]:
        circumstances = set()
        if self._shared:
            circumstances.add(Circumstance.SHARED)
        if broken is not None and broken.at_start:
            circumstances.add(Circumstance.STARTING)
            if self._shared and not self._is_exclusive:
                circumstances.add(Circumstance.MPS_SUSPECT)
            elif self._failed_openings >= self.setup.policy.most_starts(broken.error_class):
                circumstances.add(Circumstance.STARTS_SPENT)
        return frozenset(circumstances)

    def _note_failure_under_mps(self, broken: SessionBroken) -> None:
        """Let the next batch run without MPS; after several sessions without a result, do without it for good."""
        self._apart = self._shared
        if not self._shared or self._gave_result:
            return
        self._failures_shared += 1
        if self._failures_shared == _FAILURES_SHARED:
            self.setup.mps.do_without(self.plan.device_id, f"{_FAILURES_SHARED} starts gave no result; {broken}")

    def _note_mps(self) -> None:
        """Check once per session that its engine is a client of MPS: the first result shows that it uses the device."""
        if self._shared and not self._gave_result and self._feed is not None:
            self.setup.mps.look_for(self.plan.device_id, self._feed.pid)
            self._failures_shared = 0
        self._gave_result = True

    def _close(self) -> None:
        feed = self._feed
        self._feed = None
        if feed is not None:
            self.report(Closed(feed.close(), self.setup.clock.now_ms()))
