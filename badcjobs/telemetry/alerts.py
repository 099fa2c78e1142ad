"""Alerts: problems of a device, with start and end, each reported once and not once per sample.

An alert that is still open when the recorder stops has no end."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import NamedTuple

from badcjobs.model import AlertLimits, ProcessReading, Reading, not_none
from badcjobs.telemetry.recorder import Book, Followed, Readings, TelemetryWriter, Unreadable

WARNING = "warning"
CRITICAL = "critical"
_Place = tuple[int, str, str]  # device, kind, message of a fault

# NVML's clock event reasons. The others are normal (idle, a clock that was set) or reported elsewhere.
SW_POWER_CAP = 0x4
HW_SLOWDOWN = 0x8
SW_THERMAL = 0x20
HW_THERMAL = 0x40
HW_POWER_BRAKE = 0x80
_REASONS = {
    HW_THERMAL: "too hot, the hardware slows down",
    SW_THERMAL: "too hot, the driver slows down",
    HW_POWER_BRAKE: "the power supply asks to slow down",
    HW_SLOWDOWN: "the hardware slows down",
    SW_POWER_CAP: "at its power limit",
}
# The messages of values that should stay below a limit.
_LEVELS = {
    "thermal": "{device} is at {value} °C; the limit is {limit:g} °C",
    "memory": "{device} uses {value} % of its memory; above {limit:g} % it may run out of memory",
    "utilization": "{device} is at {value} % utilization; the limit is {limit:g} %",
    "power": "{device} draws {value} % of its power limit of {power_limit_w} W",
    "energy": "{device}: energy counter and integrated power differ by {value} % of the counter;"
    " up to {limit:g} % is normal",
}
_HOT_C = 83.0
_SUSTAINED_S = 10.0
_CAPPED_S = 10.0  # a large GPU under full load often reaches its power limit
_FLICKER_S = 10.0
_MOST_NAMED = 3  # processes
_MOST_FAULTS = 50  # different texts per device: a driver that adds an address to each would fill the log
_LONGEST_MESSAGE = 500
_STORM_S = 60.0  # errors with less time between them are one alert
_IDLE_BELOW_PERCENT = 1.0
_SHORTEST_ENERGY_MS = 60_000  # over a shorter time, the timing of the readings matters more than their values
_LONGEST_STEP_MS = 15_000  # as in the summary: power is not integrated across a gap


@dataclass(frozen=True)
class Alert:
    """One problem of one device, from its start to its end."""

    kind: str  # thermal memory power utilization throttle_thermal throttle_power idle lost fault ecc energy
    severity: str  # warning or critical
    device_id: int
    device_index: int | None
    device_uuid: str | None
    started_at_ms: int
    ended_at_ms: int | None  # None: still open
    peak: float | None  # the worst value
    threshold: float | None
    message: str

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended_at_ms is not None

    @property
    def text(self) -> str:
        """The text for the log."""
        if self.ended_at_ms is None:
            return f"alert ({self.kind}): {self.message}"
        lasted_s = (self.ended_at_ms - self.started_at_ms) / 1000
        kind = self.kind
        if self.peak is not None and self.threshold is not None:
            kind += f"; worst value {self.peak:g}"
        return f"alert ended after {lasted_s:.0f} s ({kind}): {self.message}"


@dataclass(eq=False)
class AlertBook(Book):
    """Tracks the problems of a task's devices, and writes alerts in the transaction of their sample."""

    writer: TelemetryWriter | None  # None: nothing is written to a database
    devices: Sequence[Followed]
    limits: AlertLimits
    tell: Callable[[Alert], None]  # called at each start and each end
    work_waits: bool = False

    def __post_init__(self) -> None:
        self._conditions = {device.device_id: DeviceConditions(device, self.limits) for device in self.devices}
        self._states: dict[_Place, AlertState] = defaultdict(AlertState)
        self._unwritten: dict[tuple[_Place, int], Alert] = {}

    @property
    def open_alerts(self) -> list[Alert]:
        """The alerts that have not ended."""
        return [state.alert for state in self._states.values() if state.alert is not None]

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Evaluate one sample and write the changes."""
        for device_id, reading in readings:
            of_reading = self._conditions[device_id].of_reading(at_ms, reading, work_waits=self.work_waits)
            self._update(at_ms, device_id, of_reading)
        for device_id, reason in unreadable.items():
            self._update(at_ms, device_id, self._conditions[device_id].of_unreadable(reason))
        self._write_changes()

    def finish(self) -> None:
        """End the alerts whose problem is already over; the others stay open."""
        for place, state in self._states.items():
            self._note(place, state.end())
        self._write_changes()

    def written(self) -> None:
        """Forget the changes that are on disk; after a failed write they are written with the next sample."""
        self._unwritten.clear()

    def _update(self, at_ms: int, device_id: int, conditions: Iterable[Condition]) -> None:
        for condition in conditions:
            fault = ""
            if condition.kind == "fault":  # each fault of a device has a separate state
                fault = condition.message[:_LONGEST_MESSAGE]
            place = (device_id, condition.kind, fault)
            state = self._states[place]
            was_on = state.alert is not None
            changed = state.take(at_ms, condition, self._conditions[device_id].device)
            is_on = state.alert is not None
            self._note(place, changed, starts_or_ends=is_on != was_on)

    def _note(self, place: _Place, alert: Alert | None, *, starts_or_ends: bool = True) -> None:
        if alert is not None:
            self._unwritten[place, alert.started_at_ms] = alert
            if starts_or_ends:
                self.tell(alert)

    def _write_changes(self) -> None:
        if self.writer is None:
            return
        for alert in self._unwritten.values():
            values = asdict(alert)
            del values["device_index"], values["device_uuid"]  # they are in the table of devices
            self.writer.write_alert(values)


@dataclass
class AlertState:
    """The state of one kind of problem on one device: off, on but too short, an alert, or an alert about to end."""

    alert: Alert | None = None
    _since_ms: int | None = None
    _off_since_ms: int | None = None

    def take(self, at_ms: int, condition: Condition, device: Followed) -> Alert | None:
        """Apply the next condition; return the alert if it starts, gets worse or ends."""
        if condition.on is None:
            return None
        if not condition.on:
            self._since_ms = None
            self._off_since_ms = self._off_since_ms or at_ms
            if at_ms - self._off_since_ms < 1000 * condition.quiet_s:
                return None
            return self.end()

        self._off_since_ms = None
        self._since_ms = self._since_ms or at_ms
        lasted_s = (at_ms - self._since_ms) / 1000
        value = condition.value
        if value is None and condition.threshold is not None:
            value = lasted_s
        if self.alert is not None:
            return self._worsen(self.alert, condition.severity, value)
        if lasted_s >= condition.after_s:
            self.alert = Alert(
                kind=condition.kind,
                severity=condition.severity,
                device_id=device.device_id,
                device_index=device.device_index,
                device_uuid=device.uuid,
                started_at_ms=self._since_ms,
                ended_at_ms=None,
                peak=value,
                threshold=condition.threshold,
                message=condition.message[:_LONGEST_MESSAGE],
            )
        return self.alert

    def _worsen(self, alert: Alert, severity: str, value: float | None) -> Alert | None:
        """Raise the peak and the severity of the alert; return it, or None if it has not changed."""
        peak = max(not_none((alert.peak, value)), default=None)
        if alert.severity == CRITICAL:
            severity = CRITICAL
        if (peak, severity) == (alert.peak, alert.severity):
            return None
        self.alert = replace(alert, peak=peak, severity=severity)
        return self.alert

    def end(self) -> Alert | None:
        """End the alert if its problem is over, and return it."""
        if self.alert is None or self._off_since_ms is None:
            return None
        ended = replace(self.alert, ended_at_ms=max(self._off_since_ms, self.alert.started_at_ms))
        self.alert = self._off_since_ms = None
        return ended


class Condition(NamedTuple):
    """One kind of problem on one device at one time."""

    kind: str
    on: bool | None  # None: not known, or between the limits
    message: str = ""
    value: float | None = None  # None with a threshold: the duration in seconds
    threshold: float | None = None
    severity: str = WARNING
    after_s: float = 0.0  # no alert if it lasts less
    quiet_s: float = 0.0  # over only after it has been off for this time


@dataclass
class EnergyCheck:
    """Compares the energy counter with the integrated power, both since the last gap."""

    _counter: tuple[int, float] | None = None  # at the start of the comparison
    _power: tuple[int, float] | None = None  # the last reading
    _joules: float = 0.0

    def take(self, at_ms: int, power_w: float | None, energy_j: float | None) -> float | None:
        """Add a reading; return the difference in percent of the counter; None: not known yet."""
        if power_w is None:
            return None
        before_ms, before_w = self._power or (at_ms, power_w)
        self._power = (at_ms, power_w)
        if at_ms - before_ms > _LONGEST_STEP_MS:
            self._counter = None
        else:
            self._joules += (power_w + before_w) * (at_ms - before_ms) / 2000
        if energy_j is None:
            return None
        if self._counter is None or energy_j < self._counter[1]:  # the driver was reloaded
            self._counter = (at_ms, energy_j)
            self._joules = 0.0
            return None
        if at_ms - self._counter[0] < _SHORTEST_ENERGY_MS:
            return None
        counted_j = energy_j - self._counter[1]
        if counted_j > 0:
            return round(100 * abs(counted_j - self._joules) / counted_j, 1)
        if self._joules > 0:  # the counter does not change although the device draws power
            return 100.0
        return None


@dataclass
class DeviceConditions:
    """Derives the conditions of one device from its readings, some from the change since the last one."""

    device: Followed
    limits: AlertLimits
    _responsible: str = "process list not available"
    _energy: EnergyCheck = field(default_factory=EnergyCheck)
    _ecc_before: int | None = None
    _ecc_new: int = 0
    _faults: Counter[str] = field(default_factory=Counter)

    def of_reading(self, at_ms: int, reading: Reading, *, work_waits: bool) -> list[Condition]:
        """Return the conditions of a device that was read."""
        device = self.device
        limits = self.limits
        hot_c = limits.temperature_c or device.slowdown_c or _HOT_C
        why_hot = ", where it slows down" if hot_c == device.slowdown_c else ""
        memory_percent = _share(reading.memory_used_bytes, device.memory_total_bytes)
        power_percent = _share(reading.power_w, device.power_limit_w)
        energy_percent = self._energy.take(at_ms, reading.power_w, reading.energy_j)
        return [
            _off("lost"),
            self._level("thermal", reading.temperature_c, hot_c, 3.0, more=why_hot),
            self._level("memory", memory_percent, limits.memory_percent, 2.0),
            self._level("power", power_percent, limits.power_percent, 5.0, quiet_s=_FLICKER_S),
            self._utilization(reading),
            *_throttling(device.label, reading.throttle_reasons),
            self._idle(reading, work_waits),
            *self._reported(reading.faults),
            self._ecc(reading.ecc_errors),
            self._level("energy", energy_percent, limits.energy_percent, 0.2 * limits.energy_percent),
        ]

    def of_unreadable(self, reason: str) -> list[Condition]:
        """Return the conditions of a device that was not read; one without a reader is not lost."""
        if self.device.uuid is None:
            return []
        message = f"{self.device.label} cannot be read: {reason}"
        return [_off("idle"), Condition("lost", True, message, severity=CRITICAL)]  # unknown is not idle

    def _utilization(self, reading: Reading) -> Condition:
        """Return the condition of a sustained load; it names the busiest processes."""
        limit = self.limits.utilization_percent
        if limit is None:
            return Condition("utilization", None)
        if reading.processes is not None:  # they are in few readings
            self._responsible = _name_busiest(reading.processes)
        processes = f" ({self._responsible})"
        return self._level("utilization", reading.utilization_percent, limit, 5.0, more=processes, quiet_s=_FLICKER_S)

    def _level(
        self, kind: str, value: float | None, limit: float, back: float, *, more: str = "", quiet_s: float = 0.0
    ) -> Condition:
        """Compare a value with its limit; the problem is over only when the value is ``back`` below the limit."""
        if value is None:
            return Condition(kind, None)
        if value < limit - back:
            return _off(kind, quiet_s)
        message = _LEVELS[kind].format(
            device=self.device.label, value=value, limit=limit, power_limit_w=self.device.power_limit_w
        )
        return Condition(
            kind,
            on=True if value >= limit else None,
            message=message + more,
            value=value,
            threshold=limit,
            after_s=_SUSTAINED_S if kind == "utilization" else 0.0,
            quiet_s=quiet_s,
        )

    def _idle(self, reading: Reading, work_waits: bool) -> Condition:
        """Use every available number: the plain utilization is 0 at 5 % load."""
        of_processes = [process.sm_percent for process in reading.processes or ()]
        shares = not_none(
            [reading.utilization_percent, reading.busy_percent, reading.sm_activity_percent, *of_processes]
        )
        if not work_waits or max(shares, default=0.0) >= _IDLE_BELOW_PERCENT:
            return _off("idle")
        limit_s = self.limits.idle_s
        message = f"{self.device.label} has been idle for {limit_s:g} s while work is waiting"
        return Condition("idle", True if shares else None, message, threshold=limit_s, after_s=limit_s)

    def _reported(self, faults: Sequence[str]) -> list[Condition]:
        """Return a condition for each of the first faults; its value is the number of times."""
        for fault in faults:
            if fault in self._faults or len(self._faults) < _MOST_FAULTS:
                self._faults[fault] += 1
        return [
            self._critical("fault", fault in faults, f"reports {fault}", many) for fault, many in self._faults.items()
        ]

    def _ecc(self, errors: int | None) -> Condition:
        """Count new errors: the counter of the device includes old ones."""
        if errors is None:
            return Condition("ecc", None)
        before = errors if self._ecc_before is None else self._ecc_before
        new = max(0, errors - before)
        self._ecc_before = errors
        self._ecc_new += new
        message = f"has new uncorrected memory errors ({self._ecc_new}); its results may be wrong"
        return self._critical("ecc", new > 0, message, self._ecc_new)

    def _critical(self, kind: str, on: bool, message: str, many: int) -> Condition:
        message = f"{self.device.label} {message}"
        return Condition(kind, on, message, float(many), severity=CRITICAL, quiet_s=_STORM_S)


def _name_busiest(processes: Sequence[ProcessReading]) -> str:
    busiest = sorted(processes, key=lambda process: process.sm_percent or 0, reverse=True)
    pids = ", ".join(str(process.pid) for process in busiest[:_MOST_NAMED])
    return f"processes: {pids or 'none visible'}"


@cache
def _off(kind: str, quiet_s: float = 0.0) -> Condition:
    """Return the condition without a problem; cached to save time."""
    return Condition(kind, False, quiet_s=quiet_s)


def _share(part: float | None, whole: float | None) -> float | None:
    if part is None or not whole:
        return None
    return round(100 * part / whole, 1)


def _throttling(label: str, mask: int | None) -> list[Condition]:
    """Return the conditions for clocks that are lowered because of heat or power."""
    if mask is None:
        return []
    hot = mask & (HW_THERMAL | SW_THERMAL)
    power = mask & (HW_POWER_BRAKE | SW_POWER_CAP)
    if not mask & HW_THERMAL:
        # It is set together with its reason; alone it means that the board protects its power supply.
        power |= mask & HW_SLOWDOWN
    return [_lowered_clock("throttle_thermal", label, hot), _lowered_clock("throttle_power", label, power)]


def _lowered_clock(kind: str, label: str, bits: int) -> Condition:
    if not bits:
        return _off(kind, _FLICKER_S)
    reasons = ", ".join(reason for bit, reason in _REASONS.items() if bits & bit)
    return Condition(
        kind,
        on=True,
        message=f"{label} has lowered its clock: {reasons}",
        value=float(bits),
        severity=CRITICAL if bits & ~(SW_THERMAL | SW_POWER_CAP) else WARNING,
        after_s=_CAPPED_S if bits == SW_POWER_CAP else 0.0,
        quiet_s=_FLICKER_S,
    )
