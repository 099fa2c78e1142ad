"""One worker's thread: takes work, talks to its engine session, and reports; decides and writes nothing itself."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Clock, Engine, Session, SessionBroken
from badcjobs.workers.failures import RAN_ON_CPU
from badcjobs.workers.work_queue import WorkQueue


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
    lost: list[ChunkResult]
    broken: SessionBroken | None
    at_ms: int


@dataclass(frozen=True)
class Crashed:
    """A bug of ours in this thread; raised again where the CLI can see it."""

    error: BaseException


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
    ) -> None:
        self.plan = plan
        self._engine = engine
        self._queue = queue
        self._send = report
        self._clock = clock
        self._scratch = scratch
        self._openings = openings  # how often in a row the engine may fail to start
        self._session: Session | None = None
        self._interrupted = False
        self._killed = False
        self._thread = threading.Thread(target=self._run, name=f"worker-{plan.slot}", daemon=True)

    # --- called from outside --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; the engine starts when the first chunk comes."""
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it is still at work."""
        return self._thread.is_alive()

    def interrupt(self) -> None:
        """Let what is running come to its end."""
        self._interrupted = True
        if (session := self._session) is not None:
            session.interrupt()

    def kill(self) -> None:
        """End the engine now."""
        self._killed = True
        if (session := self._session) is not None:
            session.kill()

    # --- in the thread --------------------------------------------------------------------------------------------

    def _report(self, event: Event) -> None:
        self._send(self.plan, event)

    def _run(self) -> None:
        try:
            self._work_off()
        except BaseException as error:
            self._report(Crashed(error))

    def _work_off(self) -> None:
        failed_openings = 0
        while (batch := self._queue.take()) is not None:
            try:
                session = self._session or self._open()
            except (BadcjobsError, OSError) as error:
                failed_openings += 1
                self._report(NotOpened(batch, error))
                if failed_openings >= self._openings:
                    break  # the other workers go on without this one
                continue
            failed_openings = 0
            broken = self._process(session, batch)
            if broken is not None:
                self._close()
                if broken.error_class == RAN_ON_CPU:
                    break  # a new process would do the same; the other workers go on
        self._close()

    def _open(self) -> Session:
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._session = session = self._engine.open(self.plan, self._scratch)
        self._report(Opened(session.pid, self._clock.now_ms()))
        if self._interrupted:  # the stop came while we were starting
            session.interrupt()
        if self._killed:
            session.kill()
        return session

    def _process(self, session: Session, batch: list[Chunk]) -> SessionBroken | None:
        """Feed one batch to the session; return what broke it."""
        unanswered = {chunk.key: chunk for chunk in batch}
        lost: list[ChunkResult] = []
        broken: SessionBroken | None = None
        try:
            for news in session.process(batch):
                if isinstance(news, ChunkResult):
                    unanswered.pop(news.chunk.key, None)
                    if not news.charged:
                        lost.append(news)
                self._report(news)
        except SessionBroken as error:
            broken = error
        self._report(BatchOver(list(unanswered.values()), lost, broken, self._clock.now_ms()))
        return broken

    def _close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            exit_code = session.close()
            self._report(Closed(exit_code, self._clock.now_ms()))
