"""Reads what the task's processes use, beside the work: in a thread, now and then, and never for long.

Not the recorder's business: it has to be on time for its devices, and looking through /proc takes too long for that.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

from badcjobs.model import MemoryHeld, UsageReading
from badcjobs.seams import Clock
from badcjobs.telemetry.usage import UsageReader

log = logging.getLogger(__name__)

_EVERY_S = 10.0
_LATER_EVERY_S = 30.0
_LATER_S = 3600.0
_SHORTEST_S = 1.0
_SHARE_OF_A_CORE = 0.005  # what reading may cost; the kernel goes through all pages of a process to count its memory
_PATIENCE_S = 1.0
_MOST_WAITING = 1000


class UsageWatch:
    """Keeps its readings until somebody who may write them asks for them."""

    def __init__(self, reader: UsageReader, clock: Clock) -> None:
        self._reader = reader
        self._clock = clock
        self._started_s = clock.monotonic_s()
        self.memory_held: MemoryHeld | None = None  # at the last reading; None: there is none, or no more of them
        self._over = threading.Event()
        self._waiting: deque[tuple[UsageReading, int]] = deque(maxlen=_MOST_WAITING)
        self._thread = threading.Thread(target=self._watch, name="badcjobs usage", daemon=True)
        self._thread.start()

    def news(self) -> Iterator[tuple[UsageReading, int]]:
        """Yield the readings since the last call, with their times."""
        while self._waiting:
            yield self._waiting.popleft()

    def finish(self) -> None:
        """Take a last reading and end; a /proc that hangs is left alone."""
        self._over.set()
        self._thread.join(_PATIENCE_S)

    def _watch(self) -> None:
        is_over = False
        while not is_over:
            began_s, cpu_before_s = self._clock.monotonic_s(), time.thread_time()
            self._read(began_s)
            cost_s = time.thread_time() - cpu_before_s
            is_over = self._over.is_set()
            if not is_over:
                self._over.wait(pause_s(began_s - self._started_s, cost_s))

    def _read(self, at_s: float) -> None:
        try:
            reading = self._reader.read(at_s)
        except OSError as error:
            log.warning("what our processes use cannot be read: %s", error)
            self.memory_held = None
            self._over.set()
        else:
            if reading is not None:
                self._waiting.append((reading, self._clock.now_ms()))
            self.memory_held = None if reading is None else MemoryHeld(reading.memory_bytes, at_s)


def pause_s(age_s: float, cost_s: float) -> float:
    """Return how long to wait after a reading: short at first, for short tasks; longer where reading takes long."""
    wanted_s = _LATER_EVERY_S if age_s >= _LATER_S else min(_EVERY_S, max(_SHORTEST_S, age_s))
    return max(wanted_s, cost_s / _SHARE_OF_A_CORE)
