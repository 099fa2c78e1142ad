"""Compares a device's energy counter with its power added up: the two should tell the same story."""

from __future__ import annotations

_SHORTEST_MS = 60_000  # below this, when a reading is taken matters more than what it says
_LONGEST_STEP_MS = 15_000  # as in the summary: power is never added up across a hole


class EnergyCheck:
    """Both since the last hole, so that chance evens out the longer it lasts."""

    def __init__(self) -> None:
        self._counter: tuple[int, float] | None = None  # where the comparison starts
        self._power: tuple[int, float] | None = None  # the last reading
        self._joules = 0.0

    def take(self, at_ms: int, power_w: float | None, energy_j: float | None) -> float | None:
        """Take a reading; return the difference in percent of the counter, None where that cannot be told now."""
        if power_w is None:
            return None
        self._add_up(at_ms, power_w)
        if energy_j is None:
            return None
        if self._counter is None or energy_j < self._counter[1]:  # the driver was loaded anew
            self._counter, self._joules = (at_ms, energy_j), 0.0
            return None
        if at_ms - self._counter[0] < _SHORTEST_MS:
            return None
        counted = energy_j - self._counter[1]
        if counted > 0:
            return 100 * abs(counted - self._joules) / counted
        return 100.0 if self._joules > 0 else None  # a counter that stands still, under a device that draws power

    def _add_up(self, at_ms: int, power_w: float) -> None:
        if self._power is not None:
            before_ms, before_w = self._power
            if at_ms - before_ms > _LONGEST_STEP_MS:
                self._counter = None
            else:
                self._joules += (power_w + before_w) * (at_ms - before_ms) / 2000
        self._power = (at_ms, power_w)
