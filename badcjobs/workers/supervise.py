"""Gives chunks to the workers and decides about each result: done, retry, or failed for good.

Each worker has a thread that talks to its engine session. One thread, the caller of ``handle_events``, takes all
decisions and writes to the task database.
"""

from __future__ import annotations

import logging
import math
import queue
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace

from badcjobs.model import Chunk, ChunkKey, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import SessionBroken
from badcjobs.store.task_writer import TaskWriter
from badcjobs.workers import retry
from badcjobs.workers.chunk_audio import is_truncated
from badcjobs.workers.retry import Retries
from badcjobs.workers.work_queue import WorkQueue
from badcjobs.workers.worker_loop import BatchOver, Closed, Event, Opened, WorkerSetup, WorkerThread

log = logging.getLogger(__name__)


_ONE_FAULT_MS = 5000  # workers of a device that end within this time end by the same fault


@dataclass
class Tally:
    """Counts of what the workers of this task have done so far."""

    done: int = 0
    failed: int = 0
    missing: int = 0  # the failed chunks whose audio file is missing, or gives no audio
    tries: int = 0
    node_fault: str | None = None  # why the task stopped although chunks are left; None: it did not
    gave_up: str | None = None  # why the task stopped trying; None: it did not
    retired: list[str] = field(default_factory=list)  # why workers stopped before the work was done


@dataclass(eq=False)
class Supervisor(WorkerSetup):
    """Runs one engine on every planned worker until the work is done or ``drain`` is called."""

    plans: Sequence[WorkerPlan]
    journal: TaskWriter
    _: KW_ONLY
    chunks: Sequence[Chunk] | None = None  # None: all pending chunks of the journal
    listen: Callable[[Event], None] = lambda event: None
    # (device_id, at_ms) → the last reading of a device before that moment, as text
    device_state: Callable[[int | None, int], str | None] = lambda device_id, at_ms: None
    is_taken_over: Callable[[], bool] = lambda: False  # another task does these chunks now: ours do not count any more
    tally: Tally = field(default_factory=Tally)
    finished: dict[int, int] = field(default_factory=dict)  # slot → chunks done
    audio_done_s: float = 0.0
    short_of_memory: set[ChunkKey] = field(default_factory=set)  # chunks that fewer workers might have done
    draining: bool = False
    killed: bool = False

    def __post_init__(self) -> None:
        self._retries = Retries(self.policy)
        self._queue = WorkQueue(self.clock, workers=len(self.plans), wants=self.engine.wants)
        self.upcoming = self._queue.upcoming  # the chunks that workers get next; thread-safe
        self._events: queue.SimpleQueue[tuple[WorkerPlan, Event]] = queue.SimpleQueue()
        self._node_faults = 0  # pauses since the last chunk done
        self._paused_until_s = -math.inf
        self._at_fault_until_ms = -1
        self._retired_from: set[int | None] = set()  # devices
        self._faults_ms: dict[int | None, int] = {}  # device → its last fault under MPS
        self._worker_ids: dict[int, int] = {}  # slot → its current row in the table worker
        self._threads = [self._make_thread(plan) for plan in self.plans]

    def _make_thread(self, plan: WorkerPlan) -> WorkerThread:
        return WorkerThread(plan, self, self._queue, lambda event: self._events.put((plan, event)))

    # --- called by the task ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread of every worker; each engine starts with its first chunk."""
        self._top_up()
        for thread in self._threads:
            thread.start()

    def add_worker(self, plan: WorkerPlan) -> None:
        """Start one more worker."""
        thread = self._make_thread(plan)
        self._threads.append(thread)
        self._queue.change_workers(1)
        thread.start()
        if self.draining:
            thread.interrupt()

    def retire(self, slot: int) -> None:
        """Stop one worker after the chunks it has in hand."""
        for thread in self._threads:
            if thread.plan.slot == slot and thread.is_alive() and not thread.retired:
                thread.retired = True
                self._queue.change_workers(-1)

    @property
    def slots_at_work(self) -> dict[int, int | None]:
        """The workers that accept chunks (by slot), and the device of each."""
        plans = [thread.plan for thread in self._threads if thread.is_alive() and not thread.retired]
        return {plan.slot: plan.device_id for plan in plans}

    @property
    def is_retiring(self) -> bool:
        """Whether a retired worker has not ended yet."""
        return any(thread.retired and thread.is_alive() for thread in self._threads)

    @property
    def lost_devices(self) -> set[int | None]:
        """The devices that no worker can use any more."""
        return self._retired_from - set(self.slots_at_work.values())

    @property
    def busy(self) -> bool:
        """Whether a worker still runs, or an event is not written yet."""
        return any(thread.is_alive() for thread in self._threads) or not self._events.empty()

    def handle_events(self, timeout_s: float) -> None:
        """Wait for events and write all of them in one transaction."""
        try:
            events = [self._events.get(timeout=timeout_s)]
        except queue.Empty:
            return
        while not self._events.empty():
            events.append(self._events.get())
        with self.journal.batch():
            for plan, event in events:
                self._handle(plan, event)
        self._top_up()

    def drain(self) -> None:
        """Start no further chunk; finish those in progress."""
        self.draining = True
        self._queue.drain()
        for thread in self._threads:
            thread.interrupt()

    def kill(self) -> None:
        """Kill every engine process; chunks in progress stay pending."""
        self.killed = True
        self.drain()
        for thread in self._threads:
            thread.kill()

    def end_shared(self, device_id: int | None) -> None:
        """End the workers that share a device through MPS; their chunks are not charged with it."""
        for thread in self._threads:
            if thread.plan.device_id == device_id:
                thread.end_shared()

    def give_up(self, reason: str) -> None:
        """End the work: the reason concerns all workers, and the next try would fail, too."""
        if self.tally.gave_up is None:
            self.tally.gave_up = reason
            log.error("giving up: %s", reason)
            self.kill()

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
        from_outside = result.charged and result.error_class in (retry.WORKER_DIED, retry.HOST_MEMORY)
        if self._is_memory_short(result):
            self.short_of_memory.add(result.chunk.key)
        if (self.killed and not result.ok) or self.is_taken_over():
            self._queue.put_back([result.chunk])  # we killed its process: it stays pending
        elif result.error_class in retry.OF_NODE:
            self._settle(plan, result)
            self._pause(f"{result.error_class}: {_last_line(result.error)}")
            self._queue.put_back([result.chunk])
        elif result.error_class in retry.MAY_BE_NODE and result.started_at_ms <= self._at_fault_until_ms:
            self._settle(plan, replace(result, charged=False))  # it ran while the node was at fault
            if result.charged:
                self._queue.put_back([result.chunk])
        elif from_outside and self._retries.is_excused(result.chunk, result.error_class or ""):
            self._settle(plan, replace(result, charged=False))
            self._queue.put_back([result.chunk], delay_s=self.policy.backoff_s, alone=True)
        elif self._is_crowded(plan, result) and self._retries.is_excused(result.chunk, retry.OUT_OF_MEMORY):
            self._settle(plan, replace(result, charged=False))
            self._queue.put_back([result.chunk], delay_s=self.policy.backoff_s, lean=True)
        else:
            self._settle(plan, result)

    def _is_crowded(self, plan: WorkerPlan, result: ChunkResult) -> bool:
        """Return whether a chunk has no smaller way left to fit into a device that other workers fill as well."""
        ways_left = self.audio and self.audio.limits.ways_left(result.chunk.key)
        if not result.charged or result.error_class != retry.OUT_OF_MEMORY or ways_left:
            return False
        return sum(one.plan.device_id == plan.device_id and one.is_alive() for one in self._threads) > 1

    def _is_memory_short(self, result: ChunkResult) -> bool:
        """Return whether there are too many workers for the memory: a chunk that is longer than most needs more."""
        usual_s = self.audio_done_s / self.tally.done if self.tally.done else math.inf
        is_usual = (result.chunk.audio_s or 0.0) <= 1.5 * usual_s
        return result.error_class == retry.HOST_MEMORY or (result.error_class == retry.OUT_OF_MEMORY and is_usual)

    def _settle(self, plan: WorkerPlan, result: ChunkResult) -> None:
        """Record the result of a try; the caller puts uncharged chunks back into the queue."""
        chunk, tally = result.chunk, self.tally
        ways_left = None  # whether a chunk that ran out of memory can be tried with less
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
                when = "with less memory" if decision.lean else f"in {decision.delay_s:.1f} s"
                log.warning("%s failed (%s), try %d; next try %s", chunk.name, result.error_class, try_number, when)
                self._queue.put_back([chunk], delay_s=decision.delay_s, alone=decision.alone, lean=decision.lean)
            return
        self._queue.finish()
        if result.ok:
            tally.done += 1
            self._node_faults = 0
            self.finished[plan.slot] = self.finished.get(plan.slot, 0) + 1
            self.audio_done_s += result.audio_s or chunk.audio_s or 0.0
            if is_truncated(result):
                found_s = result.audio_s or 0.0
                what = f"{chunk.audio_path} ends early, at {chunk.start_ms / 1000 + found_s:.3f} s"
                what += f": {found_s:.3f} s of the {chunk.audio_s:g} s of this chunk exist and were analysed"
                log.warning("%s: %s", chunk.name, what)
                self.journal.add_decision("short_audio", chunk.name, result.audio_s, what, result.ended_at_ms)
            return
        tally.failed += 1
        tally.missing += result.error_class in retry.PERMANENT
        what = f"{result.error_class}: {_last_line(result.error)}"
        log.error("%s failed for good (%s): %s", chunk.name, result.error_class, _last_line(result.error))
        # Missing and damaged files are not a fault of the engine.
        if tally.done == 0 and tally.failed - tally.missing >= self.policy.give_up_after:
            self.give_up(f"{tally.failed} chunks failed and no chunk was done; last error: {what}")

    def _on_batch_over(self, plan: WorkerPlan, event: BatchOver) -> None:
        suspects = [] if self.killed else [result.chunk for result in event.lost]
        left = {chunk.key: chunk for chunk in event.unanswered}
        delay_s = self.policy.backoff_s if event.broken else 0.0
        if event.broken is not None and event.broken.at_start:
            log.error("worker %d could not start %s: %s", plan.slot, self.engine.name, event.broken)
            delay_s = self.policy.delay_s(event.failed_openings)
        if event.shared and event.broken is not None and event.broken.error_class == retry.GPU_ERROR:
            self._on_shared_fault(plan, event.at_ms)
        for result in self._blame_chunks(plan, event):
            del left[result.chunk.key]
            if result.charged:
                self._on_result(plan, result)
            else:
                self._settle(plan, result)
                suspects.append(result.chunk)
        # One of these broke the session for the others; trying halves finds it in a few rounds. Under MPS there are
        # more of them, in other sessions.
        middle = len(suspects) // 2
        for group in [[chunk] for chunk in suspects] if event.shared else (suspects[:middle], suspects[middle:]):
            if group:
                self._queue.put_back(group, alone=True)
        if left:
            self._queue.put_back(list(left.values()), delay_s=delay_s)

    def _on_shared_fault(self, plan: WorkerPlan, at_ms: int) -> None:
        """End all workers that share a faulty context, once: each gets the same error, and none can start before."""
        before_ms, self._faults_ms[plan.device_id] = self._faults_ms.get(plan.device_id), at_ms
        if before_ms is None or at_ms - before_ms > _ONE_FAULT_MS:
            is_exclusive = plan.device is not None and plan.device.exclusive
            how = "by one worker" if is_exclusive else "without MPS"
            why = f"a fault on the device ended its workers under MPS; their chunks are tried one by one, {how}"
            log.warning("%s", why)
            self.journal.add_decision("mps", plan.device.name if plan.device else None, 0.0, why, at_ms)
            self.end_shared(plan.device_id)
            if is_exclusive:  # there is no other way to try a chunk without others
                at_work = [slot for slot, device_id in self.slots_at_work.items() if device_id == plan.device_id]
                for slot in sorted(at_work, key=lambda slot: slot != plan.slot)[1:]:
                    self.retire(slot)

    def _blame_chunks(self, plan: WorkerPlan, event: BatchOver) -> list[ChunkResult]:
        """Settle the chunks that may have broken the session, or that the engine skipped; return a result for each."""
        broken = event.broken
        if broken is None:
            silent = SessionBroken(retry.NO_OUTPUT, "the engine gave no result for this chunk and continued")
            passed_over = [] if self.draining else event.unanswered
            return [_failed_result(chunk, silent, event) for chunk in passed_over]
        if self.killed:
            return []
        if broken.error_class == retry.CONFIGURATION:
            self.give_up(str(broken))
            return []
        if broken.error_class in retry.OF_NODE:
            self._pause(f"{broken.error_class}: {_last_line(str(broken))}")
        if event.retires:
            self.tally.retired.append(str(broken))
            self._retired_from.add(plan.device_id)
            log.error("worker %d stops (%s): %s", plan.slot, broken.error_class, broken)
        if event.retires or broken.error_class in retry.OF_NODE:
            for started in event.started:  # end these tries; their chunks go back with the others
                self._settle(plan, replace(_failed_result(started.chunk, broken, event), charged=False))
            return []
        if not broken.at_start:
            log.warning(
                "worker %d ended (%s), chunks in progress: %d; %s",
                plan.slot, broken.error_class, len(event.started), _last_line(str(broken)),
            )  # fmt: skip
        in_progress = [started.chunk for started in event.started]
        blamed = [] if broken.at_start else in_progress or event.unanswered[:1]
        if broken.error_class == retry.TERMINATED:
            blamed = [chunk for chunk in blamed if not self._retries.is_excused(chunk, retry.TERMINATED)]
        of_others = event.shared and broken.error_class in retry.DEATHS
        if len(blamed) == 1 and not of_others:
            return [_failed_result(blamed[0], broken, event)]
        how = "under MPS, where one worker may end others" if of_others else f"with {len(blamed)} chunks in progress"
        why = f"lost {how} ({broken.error_class}): {_last_line(str(broken))}"
        lost = SessionBroken(retry.BATCH_LOST, why)
        return [replace(_failed_result(chunk, lost, event), charged=False) for chunk in blamed]

    def _pause(self, why: str) -> None:
        """After a fault of the node wait, longer each time, without staging; at last stop, with the rest pending."""
        now_s = self.clock.monotonic_s()
        if self.draining or now_s < self._paused_until_s:
            return  # chunks in progress meet the same fault
        self._node_faults += 1
        if self.audio is not None:
            self.audio.stager.drop()
        if self._node_faults > self.policy.node_pauses:
            self.tally.node_fault = f"this node cannot work now ({why})"
            log.error("%s: stopping with chunks left, which are not charged with it", self.tally.node_fault)
            self.drain()
            return
        pause_s = self.policy.delay_s(self._node_faults)
        log.warning("a fault of this node, not of a chunk (%s): no work for %.1f s, no copies in advance", why, pause_s)
        self._paused_until_s = now_s + pause_s
        self._at_fault_until_ms = self.clock.now_ms() + round(pause_s * 1000)  # a batch in progress goes on
        self._queue.pause(pause_s)


def _failed_result(chunk: Chunk, broken: SessionBroken, event: BatchOver) -> ChunkResult:
    started_at_ms = next((started.at_ms for started in event.started if started.chunk.key == chunk.key), event.at_ms)
    return ChunkResult(chunk, started_at_ms, event.at_ms, error_class=broken.error_class, error=str(broken))


def _last_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[-1][:200]
