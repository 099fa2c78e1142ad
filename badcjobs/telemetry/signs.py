"""What a reading says about trouble: one sign per kind, judged by the limits. What becomes of signs is alerts.py.

A sign is on, off, or undecided: the device did not say, or the value is just below the limit, where an alert that has
begun goes on and none begins. So a value that dances on its limit is one alert.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from badcjobs.model import AlertLimits, Reading
from badcjobs.telemetry.energy import EnergyCheck
from badcjobs.telemetry.followed import Followed

WARNING, CRITICAL = "warning", "critical"

# NVML's clock event reasons. Of the others, some are no trouble (idle, a clock that was set), some no news.
SW_POWER_CAP, HW_SLOWDOWN, SW_THERMAL, HW_THERMAL, HW_POWER_BRAKE = 0x4, 0x8, 0x20, 0x40, 0x80
_REASONS = {
    HW_THERMAL: "too hot, the hardware slows down",
    SW_THERMAL: "too hot, the driver slows down",
    HW_POWER_BRAKE: "the power supply asks to slow down",
    HW_SLOWDOWN: "the hardware slows down",
    SW_POWER_CAP: "at its power limit",
}
_HOT_C = 83.0
_CAPPED_S = 10.0  # a big card under full load touches its power limit all the time
_DANCE_S = 10.0
_STORM_S = 60.0  # errors that follow each other so closely are one alert
_IDLE_BELOW_PERCENT = 1.0
_MOST_FAULTS = 50  # of different texts: a driver that puts an address into each would fill the log


@dataclass(frozen=True, slots=True)
class Sign:
    """What is known now about one kind of trouble on one device."""

    kind: str
    on: bool | None  # None: undecided
    message: str = ""
    value: float | None = None
    threshold: float | None = None
    severity: str = WARNING
    since_ms: int | None = None  # since when, if that is before this reading
    after_s: float = 0.0  # no alert before it has lasted so long
    quiet_s: float = 0.0  # over only when it has been off for so long


class DeviceSigns:
    """Reads the signs of one device; remembers what only a second reading can tell."""

    def __init__(self, device: Followed, limits: AlertLimits) -> None:
        self._device = device
        self._limits = limits
        self._label = device.label
        self._energy = EnergyCheck()
        self._ecc_before: int | None = None
        self._ecc_new = 0
        self._idle_since_ms: int | None = None
        self._faults: Counter[str] = Counter()
        self._was_read = False

    def of_reading(self, at_ms: int, reading: Reading, *, work_waits: bool) -> list[Sign]:
        """Return the signs of a device that answered."""
        self._was_read = True
        return [
            _off("lost"),
            self._thermal(reading.temperature_c),
            self._memory(reading.memory_used_bytes),
            self._power(reading.power_w),
            *_throttling(self._label, reading.throttle_reasons),
            self._idle(at_ms, reading, work_waits),
            *self._reported(reading.faults),
            self._ecc(reading.ecc_errors),
            self._energies(self._energy.take(at_ms, reading.power_w, reading.energy_j)),
        ]

    def of_silence(self, reason: str) -> list[Sign]:
        """Return the signs of a device that did not answer; one that never did is a gap, not a loss."""
        self._idle_since_ms = None
        if not self._was_read and "lost" not in reason.lower():
            return []
        return [Sign("lost", True, f"{self._label} cannot be read any more: {reason}", severity=CRITICAL)]

    def _thermal(self, value: float | None) -> Sign:
        slowdown_c = self._device.slowdown_c
        limit = self._limits.temperature_c or slowdown_c or _HOT_C
        why = ", where it slows down" if limit == slowdown_c else ""
        return _level(
            "thermal", value, limit, 3.0, lambda: f"{self._label} is at {value} °C; the limit is {limit:g} °C{why}"
        )

    def _memory(self, used_bytes: int | None) -> Sign:
        percent = _share(used_bytes, self._device.memory_total_bytes)
        limit = self._limits.memory_percent
        return _level(
            "memory", percent, limit, 2.0,
            lambda: f"{self._label} uses {percent} % of its memory; from {limit:g} % on it may run out",
        )  # fmt: skip

    def _power(self, power_w: float | None) -> Sign:
        percent = _share(power_w, self._device.power_limit_w)
        return _level(
            "power", percent, self._limits.power_percent, 5.0,
            lambda: f"{self._label} draws {percent} % of its power limit of {self._device.power_limit_w} W",
            quiet_s=_DANCE_S,
        )  # fmt: skip

    def _idle(self, at_ms: int, reading: Reading, work_waits: bool) -> Sign:
        """Judge by every number there is: the plain utilization reads 0 at 5 % load."""
        shares = (reading.utilization_percent, reading.busy_percent, reading.sm_activity_percent)
        known = [share for share in (*shares, *(p.sm_percent for p in reading.processes or ())) if share is not None]
        if not known and work_waits:
            return Sign("idle", None)
        if not work_waits or max(known) >= _IDLE_BELOW_PERCENT:
            self._idle_since_ms = None
            return _off("idle")
        self._idle_since_ms = self._idle_since_ms or at_ms
        idle_s, limit_s = (at_ms - self._idle_since_ms) / 1000, self._limits.idle_s
        words = f"{self._label} has had nothing to do for {limit_s:g} s, while work waits"
        return Sign("idle", True if idle_s >= limit_s else None, words, idle_s, limit_s, since_ms=self._idle_since_ms)

    def _reported(self, faults: Sequence[str]) -> list[Sign]:
        """Return a sign for each fault that there ever was; its value is how often."""
        self._faults.update(fault for fault in faults if fault in self._faults or len(self._faults) < _MOST_FAULTS)
        return [
            Sign("fault", fault in faults, f"{self._label} reports {fault}", many, severity=CRITICAL, quiet_s=_STORM_S)
            for fault, many in self._faults.items()
        ]

    def _ecc(self, errors: int | None) -> Sign:
        """Errors of former times are in the counter already; news are those that come."""
        if errors is None:
            return Sign("ecc", None)
        new = errors - (errors if self._ecc_before is None else self._ecc_before)
        self._ecc_before = errors
        if new <= 0:
            return _off("ecc", _STORM_S)
        self._ecc_new += max(0, new)
        words = f"{self._label} has new uncorrected memory errors ({self._ecc_new}); what it computed may be wrong"
        return Sign("ecc", True, words, float(self._ecc_new), severity=CRITICAL, quiet_s=_STORM_S)

    def _energies(self, percent: float | None) -> Sign:
        limit = self._limits.energy_percent
        value = None if percent is None else round(percent, 1)
        return _level(
            "energy", value, limit, 0.2 * limit,
            lambda: f"{self._label}: its energy counter and its power added up differ by {value} %;"
            f" up to {limit:g} % is normal",
        )  # fmt: skip


def _level(
    kind: str, value: float | None, limit: float, back: float, words: Callable[[], str], quiet_s: float = 0.0
) -> Sign:
    """Return the sign of a value that should stay below its limit; it is off only when it is ``back`` below it."""
    if value is None:
        return Sign(kind, None)
    if value < limit - back:
        return _off(kind, quiet_s)
    return Sign(kind, True if value >= limit else None, words(), value, limit, quiet_s=quiet_s)


@cache
def _off(kind: str, quiet_s: float = 0.0) -> Sign:
    """Return the sign of no trouble: the same one, every second of a long life."""
    return Sign(kind, False, quiet_s=quiet_s)


def _share(part: float | None, whole: float | None) -> float | None:
    return None if part is None or not whole else round(100 * part / whole, 1)


def _throttling(label: str, mask: int | None) -> list[Sign]:
    """Return the signs of clocks lowered by heat and by power."""
    if mask is None:
        return []
    hot = mask & (HW_THERMAL | SW_THERMAL)
    # HW_SLOWDOWN stands beside the reason that it has; alone it is a board that protects its power supply.
    hungry = mask & (HW_POWER_BRAKE | SW_POWER_CAP | (0 if mask & HW_THERMAL else HW_SLOWDOWN))
    at_once = hungry & ~SW_POWER_CAP
    return [
        _lowered("throttle_thermal", label, hot, CRITICAL if hot & HW_THERMAL else WARNING),
        _lowered("throttle_power", label, hungry, CRITICAL if at_once else WARNING, 0.0 if at_once else _CAPPED_S),
    ]


def _lowered(kind: str, label: str, mask: int, severity: str, after_s: float = 0.0) -> Sign:
    if not mask:
        return _off(kind, _DANCE_S)
    reasons = ", ".join(words for bit, words in _REASONS.items() if mask & bit)
    words = f"{label} has lowered its clock: {reasons}"
    return Sign(kind, True, words, float(mask), None, severity, after_s=after_s, quiet_s=_DANCE_S)
