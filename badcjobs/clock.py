"""The clock: wall time at the start plus monotonic time, so that a change of the system clock cannot reorder rows."""

from __future__ import annotations

import time


class SystemClock:
    """UTC milliseconds that never run backwards."""

    def __init__(self) -> None:
        self._wall_anchor_s = time.time()
        self._monotonic_anchor_s = time.monotonic()

    def now_ms(self) -> int:
        return int((self._wall_anchor_s + time.monotonic() - self._monotonic_anchor_s) * 1000)

    def monotonic_s(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        if seconds > 0:
            time.sleep(seconds)
