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
from badcjobs.model.decisions import Code, Decision
from badcjobs.seams import SessionBroken
from badcjobs.store.task_writer import TaskWriter
from badcjobs.workers import policy
from badcjobs.workers.chunk_audio import SLACK_S
from badcjobs.workers.policy import Circumstance, Retries, Rule, TaskStep, WorkerStep
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
    device_state: Callable[[int | None, int], str | None]
    is_taken_over: Callable[[], bool] = lambda: False  # another task does these chunks now: ours do not count any more
    productive: set[int] = field(default_factory=set)  # slots in which a chunk was done
    audio_done_s: float = 0.0
    short_of_memory: set[ChunkKey] = field(default_factory=set)  # chunks that fewer workers might have done
    draining: bool = False
    killed: bool = False

    def __post_init__(self) -> None:
        self.tally = Tally()
        self._retries = Retries(self.policy)
        self._queue = WorkQueue(self.clock, workers=len(self.plans), wants=self.engine.wants)
        self.upcoming = self._queue.upcoming  # the chunks that workers get next; thread-safe
        self._events: queue.SimpleQueue[tuple[WorkerPlan, Event]] = queue.SimpleQueue()
        self._pauses = 0  # since the last chunk done
        self._paused_until_s = -math.inf
        self._at_fault_until_ms = -1
        self._retired_from: set[int | None] = set()  # devices
        self._faults_ms: dict[int | None, int] = {}  # device → its last fault under MPS
        self._uncertain: dict[int, list[Chunk]] = {}  # slot → chunks of its batch that failed together with others
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
        return {
            thread.plan.slot: thread.plan.device_id
            for thread in self._threads
            if thread.is_alive() and not thread.retired
        }

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
        room = self._queue.room
        if not room:
            return
        if self.chunks is None:
            chunks: Sequence[Chunk] = self.journal.next_pending(room)
        else:
            chunks = self.chunks[:room]
            self.chunks = self.chunks[room:]
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
                device_id=plan.device_id,
                pid=event.pid,
                engine=self.engine.name,
                at_ms=event.at_ms,
            )
        elif isinstance(event, Closed):
            self.journal.worker_ended(self._worker_ids[plan.slot], exit_code=event.exit_code, at_ms=event.at_ms)
        else:
            raise event

    # --- results --------------------------------------------------------------------------------------------------

    def _on_result(self, plan: WorkerPlan, result: ChunkResult) -> None:
        if not result.ok:
            self._on_failure(plan, result)
        elif self.is_taken_over():
            self._queue.put_back([result.chunk])
        else:
            self._on_done(plan, result)

    def _on_done(self, plan: WorkerPlan, result: ChunkResult) -> None:
        chunk = result.chunk
        self._record(plan, result, "done", self._retries.try_number(chunk))
        self._retries.forget(chunk)
        self._queue.finish()
        self._pauses = 0
        self.tally.done += 1
        self.productive.add(plan.slot)
        self.audio_done_s += result.audio_s or chunk.audio_s or 0.0
        self._note_short_audio(result)

    def _note_short_audio(self, result: ChunkResult) -> None:
        """Record a chunk that was done only up to the end of its truncated file."""
        chunk = result.chunk
        found_s = result.audio_s
        if not chunk.is_cut or found_s is None or (chunk.audio_s or 0.0) - found_s <= SLACK_S:
            return
        self._decide(
            Code.SHORT_AUDIO,
            chunk.name,
            path=chunk.audio_path,
            end_s=chunk.start_ms / 1000 + found_s,
            found_s=found_s,
            audio_s=chunk.audio_s,
        )

    def _record(
        self,
        plan: WorkerPlan,
        result: ChunkResult,
        status: str,
        try_number: int,
    ) -> None:
        """Write the end of a try, and the state of its chunk."""
        self.tally.tries += 1
        self.journal.attempt_ended(
            result,
            status=status,
            try_number=try_number,
            worker_id=self._worker_ids[plan.slot],
            device_id=plan.device_id,
            gpu_state=None if result.ok else self.device_state(plan.device_id, result.ended_at_ms),
        )

    # --- failures: the policy decides, the steps below carry it out -----------------------------------------------

    def _on_failure(self, plan: WorkerPlan, result: ChunkResult) -> None:
        """Let the policy decide about a failed chunk, and carry that out."""
        chunk = result.chunk
        if self._is_memory_short(result):
            self.short_of_memory.add(chunk.key)
        circumstances = self._circumstances() | self._circumstances_of(plan, result)
        try_number = self._retries.try_number(chunk)
        response = self._retries.respond(chunk, result.error_class or "", circumstances)
        step = response.chunk
        if step.recorded:
            self._record(plan, replace(result, charged=response.charged), step.status, try_number)
        self._steer_task(response, result.error_class, result.error)

        if step is policy.HALVES:
            self._uncertain.setdefault(plan.slot, []).append(chunk)  # until the batch is over
            return
        if step.status != "pending":
            self._on_failed_for_good(result)
            return
        delay_s = self._retries.delay_s(chunk, step)
        if response.charged:
            code = Code.RETRY if step.rests else Code.RETRY_SMALLER
            self._decide(
                code,
                chunk.name,
                error_class=result.error_class,
                try_number=try_number,
                delay_s=delay_s,
            )
        self._queue.put_back(
            [chunk],
            delay_s=delay_s,
            alone=step.alone,
            apart=step.apart,
        )

    def _circumstances(self) -> set[Circumstance]:
        """Return the circumstances of the task."""
        circumstances = set()
        if self.killed or self.is_taken_over():
            circumstances.add(Circumstance.STOPPED)
        if self._pauses >= self.policy.node_pauses:
            circumstances.add(Circumstance.PAUSES_SPENT)
        return circumstances

    def _circumstances_of(self, plan: WorkerPlan, result: ChunkResult) -> set[Circumstance]:
        """Return the circumstances of a failed chunk that its worker does not know."""
        circumstances = set()
        if not result.charged:
            circumstances.add(Circumstance.UNCERTAIN)
        if result.started_at_ms <= self._at_fault_until_ms:
            circumstances.add(Circumstance.NODE_AT_FAULT)
        if sum(thread.is_alive() for thread in self._threads if thread.plan.device_id == plan.device_id) > 1:
            circumstances.add(Circumstance.CROWDED)
        if self.audio is not None:
            circumstances |= self.audio.limits.circumstances(result.chunk.key)
        return circumstances

    def _is_memory_short(self, result: ChunkResult) -> bool:
        """Return whether there are too many workers for the memory: a chunk that is longer than most needs more."""
        if result.error_class == policy.HOST_MEMORY:
            return True
        if result.error_class != policy.OUT_OF_MEMORY:
            return False
        if self.tally.done == 0:
            return True
        return (result.chunk.audio_s or 0.0) <= 1.5 * self.audio_done_s / self.tally.done

    def _on_failed_for_good(self, result: ChunkResult) -> None:
        self._queue.finish()
        self.tally.failed += 1
        self.tally.missing += result.error_class in policy.FILE_FAULTS
        why = f"{result.error_class}: {_last_line(result.error)}"
        log.error("%s failed for good: %s", result.chunk.name, why)
        # Missing and damaged files are not a fault of the engine.
        if self.tally.done == 0 and self.tally.failed - self.tally.missing >= self.policy.give_up_after:
            self.give_up(f"{self.tally.failed} chunks failed and no chunk was done; last error: {why}")

    def _steer_task(self, response: Rule, error_class: str | None, error: str | None) -> None:
        """Pause or end the work if a failure concerns all of it."""
        if response.task is TaskStep.GIVE_UP:
            self.give_up(error or "")
            return
        is_pausing = self.clock.monotonic_s() < self._paused_until_s
        if response.task is TaskStep.GO_ON or self.draining or is_pausing:
            return  # chunks in progress meet the same fault
        if self.audio is not None:
            self.audio.stager.drop()
        why = f"{error_class}: {_last_line(error)}"
        if response.task is TaskStep.PAUSE:
            self._pause(why)
        else:
            self.tally.node_fault = f"this node cannot work now ({why})"
            self._decide(Code.STOP_ON_NODE, why=why)
            self.drain()

    def _pause(self, why: str) -> None:
        """After a fault of the node wait, longer each time, without staging."""
        self._pauses += 1
        pause_s = self.policy.delay_s(self._pauses)
        self._decide(Code.PAUSE_ON_NODE, why=why, pause_s=pause_s)
        self._paused_until_s = self.clock.monotonic_s() + pause_s
        self._at_fault_until_ms = self.clock.now_ms() + round(pause_s * 1000)  # a batch in progress goes on
        self._queue.pause(pause_s)

    # --- the end of a batch ---------------------------------------------------------------------------------------

    def _on_batch_over(self, plan: WorkerPlan, event: BatchOver) -> None:
        delay_s = 0.0
        if event.broken is not None:
            delay_s = self.policy.backoff_s
            if event.broken.at_start:
                log.error("worker %d could not start %s: %s", plan.slot, self.engine.name, event.broken)
                delay_s = self.policy.delay_s(event.failed_openings)
            self._on_broken(event.broken, plan, event)

        # One of these broke the session for the others; trying halves finds it in a few rounds. Under MPS there are
        # more of them, in other sessions.
        suspects = self._uncertain.pop(plan.slot, [])
        size = math.ceil(len(suspects) / 2)
        if Circumstance.SHARED in event.circumstances:
            size = 1
        for first in range(0, len(suspects), size or 1):
            self._queue.put_back(suspects[first : first + size], apart=True)
        if event.left:
            self._queue.put_back(event.left, delay_s=delay_s)

    def _on_broken(self, broken: SessionBroken, plan: WorkerPlan, event: BatchOver) -> None:
        """Let the policy decide about a broken session: its worker, and the task."""
        response = policy.find_rule(broken.error_class, self._circumstances() | event.circumstances)
        if broken.at_start:  # otherwise its chunks have done so
            self._steer_task(response, broken.error_class, str(broken))
        if response.task is TaskStep.GIVE_UP:
            return
        if response.worker is WorkerStep.STOP:
            self.tally.retired.append(str(broken))
            self._retired_from.add(plan.device_id)
            self._decide(
                Code.STOP_WORKER,
                f"worker {plan.slot}",
                error_class=broken.error_class,
                error=str(broken),
            )
        elif response.worker is WorkerStep.NEW_PROCESSES:
            self._on_shared_fault(plan, event.at_ms)
        elif response.chunk not in (policy.LEAVE, policy.BACK):
            log.warning("worker %d ended (%s); %s", plan.slot, broken.error_class, _last_line(str(broken)))

    def _on_shared_fault(self, plan: WorkerPlan, at_ms: int) -> None:
        """End all workers that share a faulty context, once: each gets the same error, and none can start before."""
        last_fault_ms = self._faults_ms.get(plan.device_id, -math.inf)
        self._faults_ms[plan.device_id] = at_ms
        if at_ms - last_fault_ms <= _ONE_FAULT_MS:
            return
        self._decide(Code.MPS_FAULT, plan.device.name if plan.device else None)
        self.end_shared(plan.device_id)

        at_work = [slot for slot, device_id in self.slots_at_work.items() if device_id == plan.device_id]
        if plan.device is not None and plan.device.exclusive and plan.slot in at_work:
            for slot in at_work:  # there is no other way to try a chunk without others
                if slot != plan.slot:
                    self.retire(slot)

    def _decide(self, code: Code, subject: str | None = None, **figures: object) -> None:
        """Log and record what was decided."""
        decision = Decision.of(code, subject, **figures)
        log.warning("%s: %s", subject or self.engine.name, decision.reason)
        self.journal.add_decision(decision, self.clock.now_ms())


def _last_line(text: str | None) -> str:
    return (text or "").strip().split("\n")[-1][:200]
