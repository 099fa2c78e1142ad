"""Turns what did not answer into gaps: one row per stretch and reason, stretched while it lasts."""

from __future__ import annotations

from typing import Protocol


class GapWriter(Protocol):
    """Where gaps are written."""

    def open_gap(self, device_id: int | None, metric: str | None, from_ms: int, to_ms: int, reason: str) -> int: ...

    def stretch_gap(self, gap: int, to_ms: int) -> None: ...


# What a device never gives is a gap of every metric concerned: not worth a write each, every second.
_STRETCH_EVERY_MS = 10_000

_Place = tuple[int, str | None]  # device, metric (None: all of them)


class Gaps:
    """The gaps that are open now."""

    def __init__(self, writer: GapWriter, started_at_ms: int) -> None:
        self._writer = writer
        self._started_at_ms = started_at_ms
        self._last_good_ms: dict[_Place, int] = {}
        self._open: dict[_Place, tuple[int, str]] = {}  # row, reason
        self._next_stretch_ms: dict[_Place, int] = {}
        self.remember()

    def good(self, device_id: int, metric: str | None, at_ms: int) -> None:
        """Take note of a reading: an open gap ends with it."""
        place = (device_id, metric)
        if place in self._open:
            self._writer.stretch_gap(self._open.pop(place)[0], at_ms)
            if metric is None:  # it is back: what it still does not give is told from this instant on
                self._next_stretch_ms = {p: ms for p, ms in self._next_stretch_ms.items() if p[0] != device_id}
        self._last_good_ms[place] = at_ms

    def missing(self, device_id: int, metric: str | None, at_ms: int, reason: str) -> bool:
        """Take note that nothing was read; return whether this is news."""
        place = (device_id, metric)
        if place in self._open:
            row, known_reason = self._open[place]
            if known_reason == reason and metric is not None and at_ms < self._next_stretch_ms.get(place, 0):
                return False
            self._next_stretch_ms[place] = at_ms + _STRETCH_EVERY_MS
            self._writer.stretch_gap(row, at_ms)
            if known_reason == reason:
                return False
        if metric is None:
            self._bring_up_metrics(device_id)
        # A metric that never came is missing since its device was first heard of.
        since_ms = self._last_good_ms.get(place, self._started_at_ms)
        from_ms = at_ms if place in self._open else since_ms
        self._open[place] = (self._writer.open_gap(device_id, metric, from_ms, at_ms, reason), reason)
        return True

    def hurry(self) -> None:
        """Stretch every gap that goes on at the next instant: it is the last one."""
        self._next_stretch_ms.clear()

    def remember(self) -> None:
        """Keep the state of this moment, for ``forget``."""
        self._remembered = (dict(self._last_good_ms), dict(self._open), dict(self._next_stretch_ms))

    def forget(self) -> None:
        """Go back to the state that was remembered: the writer has rolled back what came after it."""
        self._last_good_ms, self._open, self._next_stretch_ms = self._remembered

    def _bring_up_metrics(self, device_id: int) -> None:
        """Let the gaps of a device's metrics reach its last reading: nobody stretches them while it is silent."""
        last_ms = self._last_good_ms.get((device_id, None))
        for (device, metric), (row, _) in self._open.items():
            if device == device_id and metric is not None and last_ms is not None:
                self._writer.stretch_gap(row, last_ms)
