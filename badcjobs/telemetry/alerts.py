"""Alerts: trouble on a device from its begin to its end, told once each, not once per sample.

What counts as trouble is signs.py. An alert that has not ended when the recorder stops has no end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Protocol

from badcjobs.model import AlertLimits, Reading
from badcjobs.telemetry.followed import Followed
from badcjobs.telemetry.signs import CRITICAL, DeviceSigns, Sign

_LONGEST_MESSAGE = 500  # it travels through a pipe, in one piece


@dataclass(frozen=True, slots=True)
class Alert:
    """One stretch of trouble on one device."""

    kind: str  # thermal memory power throttle_thermal throttle_power idle lost fault ecc energy
    severity: str  # warning or critical
    device_id: int
    device_index: int | None
    device_uuid: str | None
    started_at_ms: int
    ended_at_ms: int | None  # None: it goes on
    peak: float | None  # the worst value
    threshold: float | None
    message: str

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.ended_at_ms is not None

    @property
    def words(self) -> str:
        """What the log says of it."""
        if self.ended_at_ms is None:
            return f"alert ({self.kind}): {self.message}"
        worst = "" if self.peak is None or self.threshold is None else f"; at worst {self.peak:g}"
        lasted_s = (self.ended_at_ms - self.started_at_ms) / 1000
        return f"alert over after {lasted_s:.0f} s ({self.kind}{worst}): {self.message}"

    def to_json(self) -> str:
        """Return one line for the wrapper."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Alert:
        """Read the recorder's line."""
        return cls(**json.loads(text))


class AlertWriter(Protocol):
    """Where alerts are written."""

    def write_alert(self, values: Mapping[str, object]) -> None: ...

    def open_alerts(self) -> Sequence[Mapping[str, object]]: ...


class Course:
    """One kind of trouble on one device: none, waiting to be worth an alert, an alert, or one that is fading."""

    def __init__(self, device: Followed, alert: Alert | None = None) -> None:
        self._device = device
        self.alert = alert
        self._since_ms: int | None = None
        self._off_since_ms: int | None = None

    def take(self, at_ms: int, sign: Sign) -> Alert | None:
        """Take the next sign; return the alert if it begins, gets worse or ends with it."""
        if sign.on is None:
            return None
        if not sign.on:
            return self._fade(at_ms, sign.quiet_s)
        self._off_since_ms = None
        self._since_ms = self._since_ms or sign.since_ms or at_ms
        if self.alert is not None:
            return self._worsen(self.alert, sign)
        if at_ms - self._since_ms < 1000 * sign.after_s:
            return None
        self.alert = self._begin(self._since_ms, sign)
        return self.alert

    def finish(self) -> Alert | None:
        """Return the alert if it was over already, and only waited to be sure."""
        return None if self._off_since_ms is None else self._fade(self._off_since_ms, 0.0)

    def _begin(self, since_ms: int, sign: Sign) -> Alert:
        device = self._device
        return Alert(
            sign.kind, sign.severity, device.device_id, device.device_index, device.uuid, since_ms, None, sign.value,
            sign.threshold, sign.message[:_LONGEST_MESSAGE],
        )  # fmt: skip

    def _worsen(self, alert: Alert, sign: Sign) -> Alert | None:
        worse = alert
        if sign.value is not None and (alert.peak is None or sign.value > alert.peak):
            worse = replace(worse, peak=sign.value)
        if sign.severity == CRITICAL != alert.severity:
            worse = replace(worse, severity=CRITICAL)
        if worse is alert:
            return None
        self.alert = worse
        return worse

    def _fade(self, at_ms: int, quiet_s: float) -> Alert | None:
        self._since_ms = None
        self._off_since_ms = self._off_since_ms or at_ms
        if self.alert is None or at_ms - self._off_since_ms < 1000 * quiet_s:
            return None
        ended = replace(self.alert, ended_at_ms=max(self._off_since_ms, self.alert.started_at_ms))
        self.alert = self._off_since_ms = None
        return ended


class AlertBook:
    """Keeps the course of every trouble of a task's devices, and writes alerts with the instant they belong to."""

    def __init__(
        self,
        writer: AlertWriter,
        devices: Sequence[Followed],
        limits: AlertLimits,
        tell: Callable[[Alert], None] = lambda alert: None,
    ) -> None:
        self.work_waits = False
        self._writer = writer
        self._devices = {device.device_id: device for device in devices}
        self._signs = {device.device_id: DeviceSigns(device, limits) for device in devices}
        self._courses: dict[tuple[int, str, str], Course] = {}
        self._tell = tell  # told of each begin and each end
        self._unwritten: dict[tuple[tuple[int, str, str], int], Alert] = {}

    def resume(self) -> None:
        """Go on with what a recorder that died has left open."""
        for values in self._writer.open_alerts():
            device = self._devices.get(int(str(values["device_id"])))
            if device is not None:
                alert = Alert(device_index=device.device_index, device_uuid=device.uuid, **values)  # type: ignore[arg-type]
                place = _place(alert.device_id, alert.kind, alert.message)
                if alert.kind == "fault":  # nobody knows of it any more; it was a moment
                    self._unwritten[place, alert.started_at_ms] = replace(alert, ended_at_ms=alert.started_at_ms)
                else:
                    self._courses[place] = Course(device, alert)

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Judge one instant and write what has changed."""
        for device_id, reading in readings:
            self._judge(at_ms, device_id, self._signs[device_id].of_reading(at_ms, reading, work_waits=self.work_waits))
        for device_id, reason in unreadable.items():
            self._judge(at_ms, device_id, self._signs[device_id].of_silence(reason))
        self._write_changes()

    def finish(self) -> None:
        """End what was over already; the rest has not ended."""
        for course in self._courses.values():
            self._note(course.finish(), news=True)
        self._write_changes()

    def written(self) -> None:
        """Forget what the disk has taken; an instant that it refuses leaves its changes for the next."""
        self._unwritten.clear()

    def _judge(self, at_ms: int, device_id: int, signs: Iterable[Sign]) -> None:
        for sign in signs:
            place = _place(device_id, sign.kind, sign.message)
            if place not in self._courses:
                self._courses[place] = Course(self._devices[device_id])
            course = self._courses[place]
            was_on = course.alert is not None
            changed = course.take(at_ms, sign)
            self._note(changed, news=not was_on or course.alert is None)

    def _note(self, alert: Alert | None, *, news: bool) -> None:
        if alert is None:
            return
        self._unwritten[_place(alert.device_id, alert.kind, alert.message), alert.started_at_ms] = alert
        if news:
            self._tell(alert)

    def _write_changes(self) -> None:
        for alert in self._unwritten.values():
            values = asdict(alert)
            del values["device_index"], values["device_uuid"]  # the device's own row has them
            self._writer.write_alert(values)


def _place(device_id: int, kind: str, message: str) -> tuple[int, str, str]:
    """Return whose course it is: each fault that a device reports has one of its own."""
    return device_id, kind, message[:_LONGEST_MESSAGE] if kind == "fault" else ""
