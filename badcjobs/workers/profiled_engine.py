"""An engine whose first worker runs behind a profiler for its first chunks, around any other engine.

The profile is a favour: what fails behind the profiler is done again without it, and only that counts.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from badcjobs.errors import BadcjobsError
from badcjobs.model import Chunk, ChunkResult, ChunkStarted, WorkerPlan
from badcjobs.seams import Engine, Launcher, More, Session, SessionBroken, nothing_more
from badcjobs.workers.engine_around import EngineAround
from badcjobs.workers.failures import NO_PROGRAM, TERMINATED, WORKER_DIED
from badcjobs.workers.profiling import Profiler, ProfilingLauncher

log = logging.getLogger(__name__)

_FORGIVEN = (WORKER_DIED, TERMINATED)  # somebody outside did it: no chunk is charged, so others may hear of it


@dataclass(frozen=True)
class ProfileOrder:
    """What --profile asks for: which profiler, how many chunks, and how to make the same engine once more."""

    profiler: Profiler
    chunks: int
    make_engine: Callable[[Launcher], Engine]
    launcher: Launcher


class ProfiledEngine(EngineAround):
    """Opens its first session behind the profiler, all others as they are.

    Parameters
    ----------
    keep: where the report goes, without its ending.
    """

    def __init__(self, engine: Engine, order: ProfileOrder, *, keep: Path) -> None:
        super().__init__(engine)
        self._order = order
        self._keep = keep
        self._lock = threading.Lock()
        self._begun = False

    def open(self, plan: WorkerPlan, scratch: Path) -> Session:
        """Start working on one device."""
        with self._lock:
            first, self._begun = not self._begun, True
        if first:
            try:
                return self._open_profiled(plan, scratch)
            except (BadcjobsError, OSError) as error:
                log.warning("worker %d goes on without %s: %s", plan.slot, self._order.profiler.name, error)
        return self._engine.open(plan, scratch)

    def _open_profiled(self, plan: WorkerPlan, scratch: Path) -> Session:
        launcher = ProfilingLauncher(self._order.launcher, self._order.profiler, scratch / "profile")
        engine = self._order.make_engine(launcher)
        engine.check()  # it may find out here how it has to be run
        place = scratch / "profiled"
        place.mkdir(parents=True, exist_ok=True)
        log.info("worker %d: %d chunks behind %s", plan.slot, self._order.chunks, self._order.profiler.program)
        profile = _Profile(self._order, launcher, self._keep)
        return ProfiledSession(engine.open(plan, place), lambda: self._engine.open(plan, scratch), profile)


class _Profile:
    """One profile in the making, and where it is kept."""

    def __init__(self, order: ProfileOrder, launcher: ProfilingLauncher, keep: Path) -> None:
        self.left = order.chunks
        self._profiler = order.profiler
        self._launcher = launcher
        self._keep = keep
        self._kept = False

    @property
    def is_over(self) -> bool:
        """Whether everything that was asked for was seen."""
        return self.left <= 0 or self._launcher.is_full

    def keep(self) -> None:
        """Bring the reports to the run folder, and say where they are; once."""
        if self._kept:
            return
        self._kept = True
        reports = self._launcher.reports
        if not reports:
            log.warning("%s has left no report", self._profiler.name)
        for number, report in enumerate(reports, 1):
            name = self._keep.name + ("" if number == 1 else f"-{number}") + report.suffix
            self._keep_one(report, self._keep.with_name(name))

    def _keep_one(self, report: Path, target: Path) -> None:
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.tmp")
            shutil.copyfile(report, draft)
            os.replace(draft, target)  # noqa: PTH105
        except OSError as error:
            log.warning("the profile cannot be kept: %s", error)
            return
        log.info("profile: %s; to look at it: %s", target, self._profiler.how_to_open(target))


class ProfiledSession:
    """Begins behind the profiler and goes on without.

    A process that stays (``pid`` is known from the start) is profiled for one call of ``process`` at most: then it can
    be closed in order here, where ``kill`` still reaches it while the report is written.
    """

    def __init__(self, profiled: Session, open_plain: Callable[[], Session], profile: _Profile) -> None:
        self.pid = profiled.pid
        self._session: Session | None = profiled  # None: the profile is over, and nothing else has come yet
        self._exit_code: int | None = None
        self._stays = profiled.pid is not None
        self._open_plain = open_plain
        self._profile: _Profile | None = profile
        self._lock = threading.Lock()
        self._interrupted = False
        self._killed = False

    # --- called from another thread -------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Let what is running come to its end."""
        with self._lock:
            self._interrupted = True
            if self._session is not None:
                self._session.interrupt()

    def kill(self) -> None:
        """End the engine and the profiler now."""
        with self._lock:
            self._killed = True
            if self._session is not None:
                self._session.kill()

    # --- the life of a batch --------------------------------------------------------------------------------------

    def process(self, batch: Sequence[Chunk], more: More = nothing_more) -> Iterator[ChunkStarted | ChunkResult]:
        """Analyse the first chunks behind the profiler, the others as always."""
        rest, told = list(batch), set[tuple[str, str]]()
        if self._profile is not None and self._session is not None:
            first = _Watched(self._profile.left, rest, more)
            yield from self._process_profiled(self._session, self._profile, first)
            rest, told = first.undone, first.begun
        if self._interrupted or self._killed or not rest:
            return
        session = self._session or self._go_on_without()
        for news in session.process(rest, more):
            if not (isinstance(news, ChunkStarted) and news.chunk.key in told):  # one try has one beginning
                yield news

    def close(self) -> int | None:
        """Close the engine."""
        if self._session is not None:
            self._exit_code = self._session.close()
        if self._profile is not None and not self._killed:
            self._profile.keep()
        self._profile = None
        return self._exit_code

    def _process_profiled(
        self, session: Session, profile: _Profile, first: _Watched
    ) -> Iterator[ChunkStarted | ChunkResult]:
        try:
            for news in session.process(first.batch, first.more):
                if first.note(news):
                    yield news
        except SessionBroken as broken:
            if self._killed or broken.error_class in _FORGIVEN:
                raise
            log.warning("the worker behind the profiler is gone, its work goes on without: %s", broken)
        profile.left -= first.done
        if self._interrupted or self._killed or self._stays or profile.is_over or first.undone:
            self.close()
            with self._lock:
                self._session = None

    def _go_on_without(self) -> Session:
        """Open the engine as it is, now that there is work for it."""
        try:
            plain = self._open_plain()
        except (BadcjobsError, OSError) as error:
            raise SessionBroken(NO_PROGRAM, str(error), at_start=True) from error
        with self._lock:
            self._session, self.pid = plain, plain.pid
            if self._interrupted:
                plain.interrupt()
            if self._killed:
                plain.kill()
        return plain


class _Watched:
    """The part of a batch that is profiled: what is given to the engine, and what comes back of it."""

    def __init__(self, most: int, batch: list[Chunk], more: More) -> None:
        self.batch = batch[:most]
        self.begun: set[tuple[str, str]] = set()
        self.done = 0
        self._later = batch[most:]
        self._more = more
        self._most = most
        self._given = len(self.batch)
        self._unanswered = {chunk.key: chunk for chunk in self.batch}

    @property
    def undone(self) -> list[Chunk]:
        """What has to be done without the profiler."""
        return [*self._unanswered.values(), *self._later]

    def more(self, wanted: int, *, idle: int = 0) -> Sequence[Chunk]:
        """Get further chunks, as long as the profile wants them (seams.More)."""
        room = self._most - self._given
        fresh = self._more(min(wanted, room), idle=min(idle, room)) if room > 0 else ()
        self._given += len(fresh)
        self._unanswered.update((chunk.key, chunk) for chunk in fresh)
        return fresh

    def note(self, news: ChunkStarted | ChunkResult) -> bool:
        """Keep account; return whether others should hear of it: a failure may be the profiler's."""
        if isinstance(news, ChunkStarted):
            self.begun.add(news.chunk.key)
            return True
        if not news.ok and news.error_class not in _FORGIVEN:
            return False
        del self._unanswered[news.chunk.key]
        self.done += 1
        return True
