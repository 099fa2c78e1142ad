"""Keeps the workers fed and decides about what they bring back: done, try again, or failed for good.

A thread per worker talks to its engine session; everything that is decided or written happens in
the one thread that calls ``handle_events``.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, SessionBroken
from badcjobs.store.task_writer import TaskWriter
from badcjobs.workers import retry
from badcjobs.workers.chunk_audio import is_short
from badcjobs.workers.feed import AudioSteps
from badcjobs.workers.retry import Retries, RetryPolicy
from badcjobs.workers.work_queue import WorkQueue
from badcjobs.workers.worker_loop import BatchOver, Closed, Event, Opened, Timetable, WorkerThread

log = logging.getLogger(__name__)


@dataclass
class Tally:
    """What this task's workers have achieved so far."""

    done: int = 0
    failed: int = 0
    missing: int = 0  # of those that failed, chunks whose audio is not there
    tries: int = 0
    hopeless: str | None = None  # why nothing more was tried
    retired: list[str] = field(default_factory=list)  # why workers ended before the work did


@dataclass(eq=False)
class Supervisor:
    """Runs one engine on every planned worker until the work is done or ``drain`` is called."""

    engine: Engine
    plans: Sequence[WorkerPlan]
    journal: TaskWriter
    _: KW_ONLY
    clock: Clock
    policy: RetryPolicy
    scratch: Path
    timetable: Timetable | None = None
    audio: AudioSteps | None = None
    chunks: Sequence[Chunk] | None = None  # None: all that are pending in the journal
    listen: Callable[[Event], None] = lambda event: None
    # (device_id, at_ms) → what a device said last before a moment
    device_state: Callable[[int | None, int], str | None] = lambda device_id, at_ms: None
    tally: Tally = field(default_factory=Tally)
    finished: dict[int, int] = field(default_factory=dict)  # slot → chunks done
    audio_done_s: float = 0.0
    draining: bool = False
    killed: bool = False

    def __post_init__(self) -> None:
        self._retries = Retries(self.policy)
        self._queue = WorkQueue(self.clock, workers=len(self.plans), wants=self.engine.wants)
        self._events: queue.SimpleQueue[tuple[WorkerPlan, Event]] = queue.SimpleQueue()
        self._worker_ids: dict[int, int] = {}  # slot → the row it writes under now
        self._threads = [self._make_thread(plan) for plan in self.plans]

    def _make_thread(self, plan: WorkerPlan) -> WorkerThread:
        return WorkerThread(
            plan,
            self.engine,
            self._queue,
            lambda plan, event: self._events.put((plan, event)),
            clock=self.clock,
            scratch=self.scratch,
            openings=self.policy.retries + 1,
            timetable=self.timetable,
            audio=self.audio,
        )

    # --- called by the task ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start every worker's thread; engines start when the first chunk comes."""
        self._top_up()
        for thread in self._threads:
            thread.start()

    def hire(self, plan: WorkerPlan) -> None:
        """Start one more worker."""
        thread = self._make_thread(plan)
        self._threads.append(thread)
        self._queue.hire()
        thread.start()
        if self.draining:
            thread.interrupt()

    def retire(self, slot: int) -> None:
        """Let one worker end when it has done what it has in hand."""
        for thread in self._threads:
            if thread.plan.slot == slot and thread.is_alive() and not thread.retired:
                thread.retired = True
                self._queue.hire(-1)

    @property
    def slots_at_work(self) -> dict[int, int | None]:
        """The workers that take work, and the device of each."""
        return {
            thread.plan.slot: thread.plan.device_id
            for thread in self._threads
            if thread.is_alive() and not thread.retired
        }

    @property
    def busy(self) -> bool:
        """Whether a worker is still at it, or has news that are not yet written down."""
        return any(thread.is_alive() for thread in self._threads) or not self._events.empty()

    def upcoming(self, count: int) -> list[Chunk]:
        """Return the chunks that the workers get next, without taking them; for any thread."""
        return self._queue.upcoming(count)

    def handle_events(self, timeout_s: float) -> None:
        """Wait for news and write all there is in one transaction."""
        try:
            news = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return
        while not self._events.empty():
            news.append(self._events.get())
        with self.journal.batch():
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
        if room := self._queue.room:
            if self.chunks is None:
                chunks: Sequence[Chunk] = self.journal.next_pending(room)
            else:
                chunks, self.chunks = self.chunks[:room], self.chunks[room:]
            self._queue.add(chunks, complete=len(chunks) < room)

    def _handle(self, plan: WorkerPlan, event: Event) -> None:
        self.listen(event)
        if isinstance(event, ChunkStarted):
            self.journal.attempt_started(
                event.chunk,
                try_number=self._retries.try_number(event.chunk),
                worker_id=self._worker_ids[plan.slot],
                device_id=plan.device_id,
                at_ms=event.at_ms,
            )
        elif isinstance(event, ChunkResult):
            self._on_result(plan, event)
        elif isinstance(event, BatchOver):
            self._on_batch_over(plan, event)
        elif isinstance(event, Opened):
            self._worker_ids[plan.slot] = self.journal.worker_started(
                device_id=plan.device_id, pid=event.pid, engine=self.engine.name, at_ms=event.at_ms
            )
        elif isinstance(event, Closed):
            self.journal.worker_ended(self._worker_ids[plan.slot], exit_code=event.exit_code, at_ms=event.at_ms)
        else:
            raise event

    def _on_result(self, plan: WorkerPlan, result: ChunkResult) -> None:
        died = result.charged and result.error_class == retry.WORKER_DIED
        if self.killed and not result.ok:
            self._queue.put_back([result.chunk])  # we ended it ourselves: it stays pending
        elif died and self._retries.forgives(result.chunk, retry.WORKER_DIED):
            self._settle(plan, replace(result, charged=False))
            self._queue.put_back([result.chunk], rest_s=self.policy.backoff_s, alone=True)
        else:
            self._settle(plan, result)

    def _settle(self, plan: WorkerPlan, result: ChunkResult) -> None:
        """Write down what became of a chunk; uncharged ones are put back by the caller, who knows their company."""
        chunk, tally = result.chunk, self.tally
        ways_left = None  # whether what ran out of memory can be tried with less
        if result.error_class == retry.OUT_OF_MEMORY and self.audio is not None:
            ways_left = self.audio.limits.ways_left(chunk.key)
        try_number = self._retries.try_number(chunk)
        decision = self._retries.decide(result, ways_left=ways_left)
        tally.tries += 1
        self.journal.attempt_ended(
            result,
            status=decision.status,
            try_number=try_number,
            worker_id=self._worker_ids[plan.slot],
            device_id=plan.device_id,
            gpu_state=None if result.ok else self.device_state(plan.device_id, result.ended_at_ms),
        )
        if decision.status == "pending":
            if result.charged:
                when = "with less memory" if decision.lean else f"in {decision.rest_s:.1f} s"
                log.warning("%s failed (%s), try %d; again %s", chunk.name, result.error_class, try_number, when)
                self._queue.put_back([chunk], rest_s=decision.rest_s, alone=decision.alone, lean=decision.lean)
            return
        self._queue.finish()
        if result.ok:
            tally.done += 1
            self.finished[plan.slot] = self.finished.get(plan.slot, 0) + 1
            self.audio_done_s += result.audio_s or chunk.audio_s or 0.0
            if is_short(result):
                there_s = result.audio_s or 0.0
                what = f"{chunk.audio_path} breaks off at {chunk.start_ms / 1000 + there_s:.3f} s"
                what += f": {there_s:.3f} s of the {chunk.audio_s:g} s of this chunk were there, and are done"
                log.warning("%s: %s", chunk.name, what)
                self.journal.add_decision("short_audio", chunk.name, result.audio_s, what, result.ended_at_ms)
            return
        tally.failed += 1
        tally.missing += result.error_class == retry.MISSING_AUDIO
        what = f"{result.error_class}: {_last_line(result.error)}"
        log.error("%s failed for good (%s): %s", chunk.name, result.error_class, _last_line(result.error))
        # Missing files say nothing about the engine.
        if tally.done == 0 and tally.failed - tally.missing >= self.policy.hopeless_after:
            self._give_up(f"{tally.failed} chunks failed and none worked; the last one: {what}")

    def _on_batch_over(self, plan: WorkerPlan, event: BatchOver) -> None:
        suspects = [] if self.killed else [result.chunk for result in event.lost]
        left = {chunk.key: chunk for chunk in event.unanswered}
        rest_s = self.policy.backoff_s if event.broken else 0.0
        if event.broken is not None and event.broken.at_start:
            log.error("worker %d could not start %s: %s", plan.slot, self.engine.name, event.broken)
            rest_s = self.policy.rest_s(event.failed_openings)
        for result in self._accuse(plan, event):
            del left[result.chunk.key]
            if result.charged:
                self._on_result(plan, result)
            else:
                self._settle(plan, result)
                suspects.append(result.chunk)
        # Which of these took the others down is not known: halves tell, in a few rounds.
        for half in (suspects[: len(suspects) // 2], suspects[len(suspects) // 2 :]):
            if half:
                self._queue.put_back(half, alone=True)
        if left:
            self._queue.put_back(list(left.values()), rest_s=rest_s)

    def _accuse(self, plan: WorkerPlan, event: BatchOver) -> list[ChunkResult]:
        """Return a result for each chunk that may have broken its session, or was passed over in silence."""
        broken = event.broken
        if broken is None:
            silent = SessionBroken(retry.NO_OUTPUT, "the engine went on without a word about this chunk")
            passed_over = [] if self.draining else event.unanswered
            return [_blame(chunk, silent, event) for chunk in passed_over]
        if self.killed:
            return []
        if broken.error_class == retry.CONFIGURATION:
            self._give_up(str(broken))
            return []
        if event.retires:
            self.tally.retired.append(str(broken))
            log.error("worker %d retires (%s): %s", plan.slot, broken.error_class, broken)
            for started in event.begun:  # its tries have an end; the chunks go back with the others
                self._settle(plan, replace(_blame(started.chunk, broken, event), charged=False))
            return []
        if not broken.at_start:
            log.warning(
                "worker %d ended with %d in progress (%s): %s",
                plan.slot, len(event.begun), broken.error_class, _last_line(str(broken)),
            )  # fmt: skip
        begun = [started.chunk for started in event.begun]
        accused = [] if broken.at_start else begun or event.unanswered[:1]
        if broken.error_class == retry.TERMINATED:
            accused = [chunk for chunk in accused if not self._retries.forgives(chunk, retry.TERMINATED)]
        if len(accused) == 1:
            return [_blame(accused[0], broken, event)]
        why = f"lost with {len(accused)} in progress ({broken.error_class}): {_last_line(str(broken))}"
        lost = SessionBroken(retry.BATCH_LOST, why)
        return [replace(_blame(chunk, lost, event), charged=False) for chunk in accused]

    def _give_up(self, reason: str) -> None:
        if self.tally.hopeless is None:
            self.tally.hopeless = reason
            log.error("giving up: %s", reason)
            self.kill()


def _blame(chunk: Chunk, broken: SessionBroken, event: BatchOver) -> ChunkResult:
    begun_at_ms = next((started.at_ms for started in event.begun if started.chunk.key == chunk.key), event.at_ms)
    return ChunkResult(chunk, begun_at_ms, event.at_ms, error_class=broken.error_class, error=str(broken))


def _last_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[-1][:200]
