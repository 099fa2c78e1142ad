"""Puts around the engine what a run asks for.

A profiler before its first worker, copies of the audio on the node (of a chunk that is a stretch of a longer file, the
stretch), and pieces of what is too long for a device.
"""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from badcjobs.learned import Learned
from badcjobs.model import WorkerPlan
from badcjobs.seams import Clock, Cutter, Engine
from badcjobs.staging_choice import choose_staging
from badcjobs.workers.memory_limits import MemoryLimit, MemoryLimits
from badcjobs.workers.pieces import PiecewiseEngine
from badcjobs.workers.piecewise_session import model_of
from badcjobs.workers.profiled_engine import ProfiledEngine, ProfileOrder
from badcjobs.workers.staged_engine import StagedEngine
from badcjobs.workers.staging import Stager, Upcoming

log = logging.getLogger(__name__)

Decision = tuple[str, str | None, float | None, str]  # kind, subject, value, reason: a row of ``decision``

_NOTHING_PROBED: Mapping[str, MemoryLimit] = {}
_LOOKED_AT = 32  # chunks, to learn where the audio lies
_LEAST_AHEAD, _MOST_AHEAD = 32, 512  # chunks with a copy


class Outfit:
    """The engine as the workers get it.

    Parameters
    ----------
    stage: one of config.STAGE_MODES.
    keep: where a profile goes, without its ending.
    local: the task's own folder on the node.
    """

    def __init__(
        self,
        engine: Engine,
        profile: ProfileOrder | None,
        *,
        stage: str,
        keep: Path,
        local: Path,
        workers: int,
        cutter: Cutter,
        clock: Clock,
    ) -> None:
        self.engine: Engine = engine if profile is None else ProfiledEngine(engine, profile, keep=keep)
        self._stage = stage
        self._local = local
        self._cutter = cutter
        self._clock = clock
        self._begun = False
        self._news: queue.SimpleQueue[Decision] = queue.SimpleQueue()
        ahead = min(_MOST_AHEAD, max(_LEAST_AHEAD, 2 * workers * engine.wants))
        self._stager = Stager(local / "staged", ahead=ahead, cutter=cutter)
        self.engine = StagedEngine(self.engine, self._stager, clock=clock)

    def cut_what_is_too_long(
        self, learned: Learned, plans: Sequence[WorkerPlan], probed: Mapping[str, MemoryLimit] = _NOTHING_PROBED
    ) -> None:
        """Analyse in pieces what does not fit into a device, as probes and earlier tasks found, and as we learn now."""
        lessons = {model: learned.about(model) for model in {model_of(plan) for plan in plans}}
        known = {model: MemoryLimit(lesson.crowded_s, lesson.alone_s) for model, lesson in lessons.items()}
        for model, limit in known.items():
            if limit != MemoryLimit():
                self._news.put(_limit_words(model, limit, "as an earlier task has learned: "))
        for model, limit in probed.items():
            self._news.put(_probed_words(model, limit))
            known[model] = known.get(model, MemoryLimit()).lower(limit)

        def learn(model: str, limit: MemoryLimit) -> None:  # in a worker's thread
            learned.note(model, crowded_s=limit.crowded_s, alone_s=limit.alone_s)
            self._news.put(_limit_words(model, limit))

        limits = MemoryLimits(known, learn)
        self.engine = PiecewiseEngine(self.engine, self._cutter, limits, clock=self._clock)

    def news(self) -> Iterator[Decision]:
        """Yield what was decided since the last time."""
        while not self._news.empty():
            yield self._news.get()

    def begin(self, upcoming: Upcoming) -> None:
        """Decide about staging once there is work in the queue, say so, and begin with it."""
        choice = choose_staging(self._stage, upcoming(_LOOKED_AT), self._local)
        log.info("%s", choice.words)
        if choice.staged:
            self._begun = True
            self._stager.start(upcoming, most_bytes=choice.most_bytes, only_cuts=choice.only_cuts)
        self._news.put(("staging", None, float(choice.staged), choice.why))

    def end(self) -> None:
        """Leave no copies behind, and say what they were good for; the workers have ended."""
        self._stager.stop()
        if self._begun or self._stager.tally.cut_late:
            log.info("%s", self._stager.tally.words)


def _limit_words(model: str, limit: MemoryLimit, since: str = "") -> Decision:
    seconds = limit.crowded_s if limit.alone_s is None else limit.alone_s
    how = "; done with one thread" if limit.alone_s is None else " even with one thread; cut"
    words = f"{since}{seconds:g} s of audio ran out of memory{how} from now on"
    log.warning("%s: %s", model, words)
    return "memory_limit", model, seconds, words


def _probed_words(model: str, limit: MemoryLimit) -> Decision:
    found = [
        f"what is longer than {seconds:.0f} s is {how}"
        for seconds, how in ((limit.crowded_s, "done with one thread"), (limit.alone_s, "cut"))
        if seconds is not None
    ]
    words = f"as badcjobs probe has found: {', '.join(found)}"
    log.info("%s: %s", model, words)
    return "memory_limit", model, limit.crowded_s if limit.alone_s is None else limit.alone_s, words
