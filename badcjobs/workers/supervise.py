"""Keeps the workers fed and judges what they bring back: done, try again, or failed for good.

A thread per worker talks to its engine session; everything that is decided or written happens in
the one thread that calls ``handle_events``.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, Journal, Session, SessionBroken
from badcjobs.workers.work_queue import WorkQueue

log = logging.getLogger(__name__)

WORKER_DIED = "worker_died"
CONFIGURATION = "configuration"  # nothing this engine tries can work: stop at once
TERMINATED = "terminated"  # somebody outside ended the process: nobody's fault, at first
_TERMINATIONS_FORGIVEN = 3


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often and how soon a chunk is tried again."""

    retries: int = 2
    backoff_s: float = 1.0
    longest_backoff_s: float = 60.0
    hopeless_after: int = 25  # chunks failed for good with none done: the engine does not work here

    def rest_s(self, failures: int) -> float:
        """Return how long a chunk rests after its n-th failure."""
        return min(self.longest_backoff_s, self.backoff_s * 2.0 ** (failures - 1))


@dataclass
class Tally:
    """What this task's workers have achieved so far."""

    done: int = 0
    failed: int = 0
    tries: int = 0
    hopeless: str | None = None  # why nothing more was tried


@dataclass
class _Slot:
    """One worker's place: its thread, its session now, and the row it writes under."""

    plan: WorkerPlan
    thread: threading.Thread | None = None
    session: Session | None = None
    worker_id: int = 0
    openings_failed: int = 0


@dataclass
class _Tries:
    """What a chunk that did not work at once has been through."""

    total: int = 0
    failures: int = 0
    deaths: int = 0
    terminations: int = 0


@dataclass(frozen=True)
class _Opened:
    pid: int | None
    at_ms: int


@dataclass(frozen=True)
class _Closed:
    exit_code: int | None
    at_ms: int


@dataclass(frozen=True)
class _NotOpened:
    batch: list[Chunk]
    error: BadcjobsError | OSError


@dataclass(frozen=True)
class _BatchOver:
    """A batch has come to its end; these chunks have no result of their own."""

    unanswered: list[Chunk]
    lost: list[ChunkResult]
    broken: SessionBroken | None
    at_ms: int


@dataclass(frozen=True)
class _Crashed:
    """A bug of ours in a worker's thread; raised again where the CLI can see it."""

    error: BaseException


_Event = _Opened | _Closed | _NotOpened | _BatchOver | _Crashed | ChunkStarted | ChunkResult


class Supervisor:
    """Runs one engine on every planned worker until the work is done or ``drain`` is called."""

    def __init__(
        self,
        engine: Engine,
        plans: list[WorkerPlan],
        journal: Journal,
        *,
        clock: Clock,
        policy: RetryPolicy,
        scratch: Path,
    ) -> None:
        self.tally = Tally()
        self._engine = engine
        self._journal = journal
        self._clock = clock
        self._policy = policy
        self._scratch = scratch
        self._queue = WorkQueue(clock, workers=len(plans), whole_share=engine.takes_whole_share)
        self._events: queue.SimpleQueue[tuple[_Slot, _Event]] = queue.SimpleQueue()
        self._slots = [_Slot(plan) for plan in plans]
        self._tries: dict[tuple[str, str], _Tries] = {}
        self._started_ms: dict[tuple[str, str], int] = {}
        self._draining = threading.Event()
        self._killed = threading.Event()

    # --- called by the task ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every worker's thread; engines start when the first chunk comes."""
        self._top_up()
        for slot in self._slots:
            slot.thread = threading.Thread(
                target=self._work, args=(slot,), name=f"worker-{slot.plan.slot}", daemon=True
            )
            slot.thread.start()

    @property
    def busy(self) -> bool:
        """Whether a worker is still at it, or has news that are not yet written down."""
        return any(slot.thread and slot.thread.is_alive() for slot in self._slots) or not self._events.empty()

    def handle_events(self, timeout_s: float) -> None:
        """Wait for news and write all there is in one transaction."""
        try:
            news = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return
        while not self._events.empty():
            news.append(self._events.get())
        with self._journal.batch():
            for slot, event in news:
                self._handle(slot, event)
        self._top_up()

    def drain(self) -> None:
        """Start nothing new; let what is running come to its end."""
        self._draining.set()
        self._queue.drain()
        self._each_session(lambda session: session.interrupt())

    def kill(self) -> None:
        """End every engine process now; what was running stays pending."""
        self._killed.set()
        self.drain()
        self._each_session(lambda session: session.kill())

    # --- in the task's thread -------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        room = self._queue.room
        if room:
            chunks = self._journal.next_pending(room)
            self._queue.add(chunks, complete=len(chunks) < room)

    def _handle(self, slot: _Slot, event: _Event) -> None:
        if isinstance(event, ChunkStarted):
            self._on_started(slot, event)
        elif isinstance(event, ChunkResult):
            self._on_result(slot, event)
        elif isinstance(event, _BatchOver):
            self._on_batch_over(slot, event)
        elif isinstance(event, _Opened):
            slot.openings_failed = 0
            slot.worker_id = self._journal.worker_started(
                device_id=slot.plan.device_id, pid=event.pid, engine=self._engine.name, at_ms=event.at_ms
            )
        elif isinstance(event, _Closed):
            self._journal.worker_ended(slot.worker_id, exit_code=event.exit_code, at_ms=event.at_ms)
        elif isinstance(event, _NotOpened):
            self._on_not_opened(slot, event)
        else:
            raise event.error

    def _on_started(self, slot: _Slot, event: ChunkStarted) -> None:
        self._started_ms[event.chunk.key] = event.at_ms
        self._journal.attempt_started(
            event.chunk,
            try_number=self._try_number(event.chunk),
            worker_id=slot.worker_id,
            device_id=slot.plan.device_id,
            at_ms=event.at_ms,
        )

    def _on_result(self, slot: _Slot, result: ChunkResult) -> None:
        if self._killed.is_set() and not result.ok:
            self._queue.put_back([result.chunk])  # we ended it ourselves: it stays pending
            return
        self._started_ms.pop(result.chunk.key, None)
        status, rest_s = self._judge(result)
        self.tally.tries += 1
        self._journal.attempt_ended(
            result,
            status=status,
            try_number=self._try_number(result.chunk),
            worker_id=slot.worker_id,
            device_id=slot.plan.device_id,
        )
        if status == "pending":
            self._tries[result.chunk.key].total += 1
            if result.charged:  # the others go back together, when their batch is over
                self._queue.put_back([result.chunk], rest_s=rest_s)
            return
        self._tries.pop(result.chunk.key, None)
        self._queue.finish()
        if status == "done":
            self.tally.done += 1
        else:
            self.tally.failed += 1
            log.error("%s failed for good (%s): %s", result.chunk.name, result.error_class, _last_line(result.error))
            self._give_up_if_hopeless(result)

    def _judge(self, result: ChunkResult) -> tuple[str, float]:
        """Return the chunk's new state, and how long it rests when that is 'pending'."""
        if result.ok:
            return "done", 0.0
        tries = self._tries.setdefault(result.chunk.key, _Tries())
        if not result.charged:
            return "pending", 0.0
        tries.failures += 1
        tries.deaths += result.error_class == WORKER_DIED
        if tries.failures <= self._policy.retries:
            rest_s = self._policy.rest_s(tries.failures)
            log.warning(
                "%s failed (%s), try %d of %d; again in %.1f s",
                result.chunk.name, result.error_class, tries.failures, self._policy.retries + 1, rest_s,
            )  # fmt: skip
            return "pending", rest_s
        return ("poison" if tries.deaths >= 2 else "failed"), 0.0

    def _try_number(self, chunk: Chunk) -> int:
        tries = self._tries.get(chunk.key)
        return 1 if tries is None else tries.total + 1

    def _on_batch_over(self, slot: _Slot, event: _BatchOver) -> None:
        suspects = [result.chunk for result in event.lost]
        unanswered = event.unanswered
        if event.broken is not None and not self._killed.is_set():
            if event.broken.error_class == CONFIGURATION:
                self._give_up(str(event.broken))
            elif unanswered and not self._forgiven(unanswered[0], event.broken):
                self._on_result(slot, self._blame(unanswered.pop(0), event.broken, event.at_ms))
        # Nobody knows which of these took the others down: halves tell, in a few rounds.
        for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
            if half:
                self._queue.put_back(half)
        if unanswered:
            self._queue.put_back(unanswered, rest_s=self._policy.backoff_s if event.broken else 0.0)

    def _forgiven(self, chunk: Chunk, broken: SessionBroken) -> bool:
        """Say whether a chunk is innocent of its worker's end: Slurm's TERM reaches workers as well as us."""
        if broken.error_class != TERMINATED:
            return False
        tries = self._tries.setdefault(chunk.key, _Tries())
        tries.terminations += 1
        return tries.terminations <= _TERMINATIONS_FORGIVEN

    def _blame(self, chunk: Chunk, broken: SessionBroken, at_ms: int) -> ChunkResult:
        started_at_ms = self._started_ms.get(chunk.key, at_ms)
        return ChunkResult(chunk, started_at_ms, at_ms, error_class=broken.error_class, error=str(broken))

    def _on_not_opened(self, slot: _Slot, event: _NotOpened) -> None:
        slot.openings_failed += 1
        log.error("worker %d could not start %s: %s", slot.plan.slot, self._engine.name, event.error)
        self._queue.put_back(event.batch, rest_s=self._policy.rest_s(slot.openings_failed))

    def _give_up_if_hopeless(self, result: ChunkResult) -> None:
        if self.tally.done == 0 and self.tally.failed >= self._policy.hopeless_after:
            self._give_up(
                f"{self.tally.failed} chunks failed and none worked; the last one: {result.error_class}:"
                f" {_last_line(result.error)}"
            )

    def _give_up(self, reason: str) -> None:
        if self.tally.hopeless is None:
            self.tally.hopeless = reason
            log.error("giving up: %s", reason)
            self.kill()

    def _each_session(self, act: Callable[[Session], None]) -> None:
        for slot in self._slots:
            if (session := slot.session) is not None:
                act(session)

    # --- in a worker's thread -------------------------------------------------------------------------------------

    def _work(self, slot: _Slot) -> None:
        try:
            self._work_off(slot)
        except BaseException as error:
            self._events.put((slot, _Crashed(error)))

    def _work_off(self, slot: _Slot) -> None:
        openings_failed = 0
        while (batch := self._queue.take()) is not None:
            if slot.session is None:
                try:
                    self._open(slot)
                except (BadcjobsError, OSError) as error:
                    openings_failed += 1
                    self._events.put((slot, _NotOpened(batch, error)))
                    if openings_failed > self._policy.retries:
                        break  # the other workers go on without this one
                    continue
            openings_failed = 0
            if not self._process(slot, batch):
                self._close(slot)
        self._close(slot)

    def _open(self, slot: _Slot) -> None:
        scratch = self._scratch / f"worker-{slot.plan.slot}"
        scratch.mkdir(parents=True, exist_ok=True)
        slot.session = session = self._engine.open(slot.plan, scratch)
        self._events.put((slot, _Opened(session.pid, self._clock.now_ms())))
        if self._killed.is_set():
            session.kill()  # the stop came while we were starting

    def _process(self, slot: _Slot, batch: list[Chunk]) -> bool:
        """Feed one batch to the session; return whether the session can take another."""
        session = slot.session
        assert session is not None
        unanswered = {chunk.key: chunk for chunk in batch}
        lost: list[ChunkResult] = []
        broken: SessionBroken | None = None
        try:
            for news in session.process(batch):
                if isinstance(news, ChunkResult):
                    unanswered.pop(news.chunk.key, None)
                    if not news.charged:
                        lost.append(news)
                self._events.put((slot, news))
        except SessionBroken as error:
            broken = error
        self._events.put((slot, _BatchOver(list(unanswered.values()), lost, broken, self._clock.now_ms())))
        return broken is None

    def _close(self, slot: _Slot) -> None:
        session, slot.session = slot.session, None
        if session is not None:
            exit_code = session.close()
            self._events.put((slot, _Closed(exit_code, self._clock.now_ms())))


def _last_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[-1][:200]
