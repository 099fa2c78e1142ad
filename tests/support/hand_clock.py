"""A clock that stands still until a test moves it."""

from __future__ import annotations


class HandClock:
    def __init__(self, now_ms: int = 1_800_000_000_000) -> None:
        self._now_ms = now_ms

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic_s(self) -> float:
        return self._now_ms / 1000

    def sleep(self, seconds: float) -> None:
        self._now_ms += max(0, round(seconds * 1000))
