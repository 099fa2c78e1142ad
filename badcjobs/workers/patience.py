"""How long an engine may be silent: a limit from its own rate, and somebody who watches it."""

from __future__ import annotations

import threading
from collections.abc import Callable

from badcjobs.seams import Clock


class Patience:
    """Learns from every finished chunk how slow this engine is; one for all workers of a task.

    Parameters
    ----------
    start_s: how long it may take until the first chunk begins (imports, models, a cold file system).
    least_s: no silence shorter than this is a hang.
    slowest: seconds of work per second of audio that are believed while nothing is known yet.
    """

    FACTOR = 20
    _UNKNOWN_AUDIO_S = 3600.0  # a whole recording, as long as any

    def __init__(self, *, start_s: float = 900.0, least_s: float = 120.0, slowest: float = 2.0) -> None:
        self.start_s = start_s
        self._least_s = least_s
        self._slowest = slowest
        self._worst_rate: float | None = None  # seconds of work per second of audio
        self._worst_s: float | None = None  # where the length of the audio is not known

    def learn(self, took_s: float, audio_s: float | None) -> None:
        """Take note of a chunk that came through."""
        self._worst_s = max(took_s, self._worst_s or 0.0)
        if audio_s:
            self._worst_rate = max(took_s / audio_s, self._worst_rate or 0.0)

    def limit_s(self, audio_s: float | None) -> float:
        """Return how long a worker may be silent that has so much audio in progress."""
        if self._worst_s is None:
            return self.start_s + self._slowest * (audio_s or self._UNKNOWN_AUDIO_S)
        if audio_s is None or self._worst_rate is None:
            return max(self._least_s, self.FACTOR * self._worst_s)
        return max(self._least_s, self.FACTOR * self._worst_rate * audio_s)


class Watchdog:
    """Calls ``bite`` when ``sign`` has not changed for ``limit_s``; a context, as long as a program runs."""

    def __init__(self, clock: Clock, limit_s: float, bite: Callable[[], None], sign: Callable[[], object]) -> None:
        self.has_bitten = False
        self._clock = clock
        self._limit_s = limit_s
        self._bite = bite
        self._sign = sign
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        last, since_s = self._sign(), self._clock.monotonic_s()
        while not self._over.wait(min(5.0, self._limit_s / 4)):
            now = self._sign()
            if now != last:
                last, since_s = now, self._clock.monotonic_s()
            elif self._clock.monotonic_s() - since_s >= self._limit_s:
                self.has_bitten = True
                self._bite()
                return
