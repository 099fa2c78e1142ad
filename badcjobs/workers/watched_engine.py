"""An engine around another engine, for a trial: all that it says is kept, and whether it is lean is decided here.

The supervisor only logs why an engine did not start; a trial has to know.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Engine, More, Session, SessionBroken, nothing_more
from badcjobs.workers.engine_around import EngineAround
from badcjobs.workers.failures import NO_PROGRAM, OUT_OF_MEMORY, classify


@dataclass(frozen=True, slots=True)
class Trouble:
    """Something that did not work."""

    error_class: str
    error: str
    at_start: bool = False  # before the engine had anything to do with a chunk
    is_final: bool = True  # False: lost with others, and more will be said

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the device's memory was the reason, also where only the words tell."""
        said = f"({OUT_OF_MEMORY})" in self.error or classify(self.error) == OUT_OF_MEMORY
        return self.error_class == OUT_OF_MEMORY or said


class Watch:
    """What the workers of one trial said; their threads write, and only the one that began the trial reads."""

    def __init__(self) -> None:
        self.done: list[ChunkResult] = []
        self.begun_at_ms: list[int] = []
        self._troubles: list[Trouble] = []
        self.closed = False  # whatever is said from now on is of our own making

    def note(self, news: ChunkStarted | ChunkResult) -> None:
        """Keep what a session says."""
        if isinstance(news, ChunkStarted):
            self.begun_at_ms.append(news.at_ms)
        elif news.ok:
            self.done.append(news)
        else:
            self.complain(Trouble(news.error_class or "", news.error or "", is_final=news.charged))

    def complain(self, trouble: Trouble) -> None:
        """Keep what did not work."""
        if not self.closed:
            self._troubles.append(trouble)

    @property
    def trouble(self) -> Trouble | None:
        """What decides the trial: that the memory ran out, else the first trouble that is one."""
        told = sorted(self._troubles, key=lambda one: (not one.is_out_of_memory, not one.is_final))
        return next((one for one in told if one.is_out_of_memory or one.is_final), None)


class WatchedEngine(EngineAround):
    """Passes everything on, and keeps a copy of what was said."""

    def __init__(self, engine: Engine, watch: Watch, *, lean: bool) -> None:
        super().__init__(engine)
        self._watch = watch
        self._lean = lean

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Open the other engine."""
        try:
            session = self._engine.open(replace(plan, lean=self._lean), scratch)
        except (BadcjobsError, OSError) as error:
            self._watch.complain(Trouble(NO_PROGRAM, str(error), at_start=True))
            raise
        return _WatchedSession(session, self._watch)


class _WatchedSession:
    """A session that is listened to (seams.Session)."""

    def __init__(self, session: Session, watch: Watch) -> None:
        self.pid = session.pid
        self._session = session
        self._watch = watch

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        try:
            for news in self._session.process(batch, more):
                self._watch.note(news)
                yield news
        except SessionBroken as broken:
            self._watch.complain(Trouble(broken.error_class, str(broken), at_start=broken.at_start))
            raise
        finally:
            self.pid = self._session.pid

    def interrupt(self) -> None:
        self._session.interrupt()

    def kill(self) -> None:
        self._session.kill()

    def close(self) -> int | None:
        return self._session.close()
