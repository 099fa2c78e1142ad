"""Keeps the workers fed and judges what they bring back: done, try again, or failed for good.

A thread per worker talks to its engine session; everything that is decided or written happens in
the one thread that calls ``handle_events``.
"""

from __future__ import annotations

import logging
import queue
from dataclasses import dataclass, field
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, Journal, SessionBroken
from badcjobs.workers.failures import CONFIGURATION, DEATHS, NO_OUTPUT, RAN_ON_CPU, TERMINATED
from badcjobs.workers.work_queue import WorkQueue
from badcjobs.workers.worker_thread import BatchOver, Closed, Event, NotOpened, Opened, WorkerThread

log = logging.getLogger(__name__)

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
    retired: list[str] = field(default_factory=list)  # why workers ended before the work did


@dataclass
class _Tries:
    """What a chunk that did not work at once has been through."""

    total: int = 0
    failures: int = 0
    deaths: int = 0
    terminations: int = 0


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
        self._queue = WorkQueue(clock, workers=len(plans), whole_share=engine.takes_whole_share)
        self._events: queue.SimpleQueue[tuple[WorkerPlan, Event]] = queue.SimpleQueue()
        self._threads = [
            WorkerThread(
                plan,
                engine,
                self._queue,
                lambda plan, event: self._events.put((plan, event)),
                clock=clock,
                scratch=scratch / f"worker-{plan.slot}",
                openings=policy.retries + 1,
            )
            for plan in plans
        ]
        self._worker_ids: dict[int, int] = {}  # slot → the row it writes under now
        self._failed_openings: dict[int, int] = {}
        self._tries: dict[tuple[str, str], _Tries] = {}
        self._started_ms: dict[tuple[str, str], int] = {}
        self.draining = False
        self.killed = False

    # --- called by the task ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every worker's thread; engines start when the first chunk comes."""
        self._top_up()
        for thread in self._threads:
            thread.start()

    @property
    def busy(self) -> bool:
        """Whether a worker is still at it, or has news that are not yet written down."""
        return any(thread.alive for thread in self._threads) or not self._events.empty()

    def handle_events(self, timeout_s: float) -> None:
        """Wait for news and write all there is in one transaction."""
        try:
            news = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return
        while not self._events.empty():
            news.append(self._events.get())
        with self._journal.batch():
            for plan, event in news:
                self._handle(plan, event)
        self._top_up()

    def drain(self) -> None:
        """Start nothing new; let what is running come to its end."""
        self.draining = True
        self._queue.drain()
        for thread in self._threads:
            thread.interrupt()

    def kill(self) -> None:
        """End every engine process now; what was running stays pending."""
        self.killed = True
        self.drain()
        for thread in self._threads:
            thread.kill()

    # --- in the task's thread -------------------------------------------------------------------------------------

    def _top_up(self) -> None:
        room = self._queue.room
        if room:
            chunks = self._journal.next_pending(room)
            self._queue.add(chunks, complete=len(chunks) < room)

    def _handle(self, plan: WorkerPlan, event: Event) -> None:
        if isinstance(event, ChunkStarted):
            self._on_started(plan, event)
        elif isinstance(event, ChunkResult):
            self._on_result(plan, event)
        elif isinstance(event, BatchOver):
            self._on_batch_over(plan, event)
        elif isinstance(event, Opened):
            self._failed_openings.pop(plan.slot, None)
            self._worker_ids[plan.slot] = self._journal.worker_started(
                device_id=plan.device_id, pid=event.pid, engine=self._engine.name, at_ms=event.at_ms
            )
        elif isinstance(event, Closed):
            self._journal.worker_ended(self._worker_ids[plan.slot], exit_code=event.exit_code, at_ms=event.at_ms)
        elif isinstance(event, NotOpened):
            self._on_not_opened(plan, event)
        else:
            raise event.error

    def _on_started(self, plan: WorkerPlan, event: ChunkStarted) -> None:
        self._started_ms[event.chunk.key] = event.at_ms
        self._journal.attempt_started(
            event.chunk,
            try_number=self._try_number(event.chunk),
            worker_id=self._worker_ids[plan.slot],
            device_id=plan.device_id,
            at_ms=event.at_ms,
        )

    def _on_result(self, plan: WorkerPlan, result: ChunkResult) -> None:
        if self.killed and not result.ok:
            self._queue.put_back([result.chunk])  # we ended it ourselves: it stays pending
            return
        self._started_ms.pop(result.chunk.key, None)
        status, rest_s = self._judge(result)
        self.tally.tries += 1
        self._journal.attempt_ended(
            result,
            status=status,
            try_number=self._try_number(result.chunk),
            worker_id=self._worker_ids[plan.slot],
            device_id=plan.device_id,
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
        tries.deaths += result.error_class in DEATHS
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

    def _on_batch_over(self, plan: WorkerPlan, event: BatchOver) -> None:
        suspects = [result.chunk for result in event.lost]
        unanswered = event.unanswered
        if event.broken is not None and not self.killed:
            if event.broken.error_class == CONFIGURATION:
                self._give_up(str(event.broken))
            elif event.broken.error_class == RAN_ON_CPU:
                self.tally.retired.append(str(event.broken))
                log.error("worker %d retires: %s", plan.slot, event.broken)
            elif unanswered and not self._forgiven(unanswered[0], event.broken):
                self._on_result(plan, self._blame(unanswered.pop(0), event.broken, event.at_ms))
        # Nobody knows which of these took the others down: halves tell, in a few rounds.
        for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
            if half:
                self._queue.put_back(half)
        if event.broken is None and not self.draining:
            silent = SessionBroken(NO_OUTPUT, "the engine went on without a word about this chunk")
            while unanswered:
                self._on_result(plan, self._blame(unanswered.pop(0), silent, event.at_ms))
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

    def _on_not_opened(self, plan: WorkerPlan, event: NotOpened) -> None:
        failures = self._failed_openings[plan.slot] = self._failed_openings.get(plan.slot, 0) + 1
        log.error("worker %d could not start %s: %s", plan.slot, self._engine.name, event.error)
        self._queue.put_back(event.batch, rest_s=self._policy.rest_s(failures))

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


def _last_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[-1][:200]
