"""The alerts of a job in words, a line for each kind; shared by the text and the notebook."""

from __future__ import annotations

from collections.abc import Sequence

from badcjobs.model import AlertFacts
from badcjobs.report.words import count, duration, number

_CRITICAL = "critical"
_UNITS = {"thermal": "°C", "memory": "%", "power": "%", "idle": "s", "energy": "%"}  # of peak and limit


def alert_lines(alerts: Sequence[AlertFacts]) -> list[str]:
    """Return a line for each kind, the critical ones first."""
    return [_line(alert) for alert in sorted(alerts, key=lambda alert: alert.severity != _CRITICAL)]


def _line(alert: AlertFacts) -> str:
    words = f"{alert.kind} ({alert.severity}): {count(alert.alerts, 'alert')} on {count(alert.devices, 'device')}"
    unit = _UNITS.get(alert.kind)
    if unit and alert.peak is not None and alert.threshold is not None:
        words += f"; {number(alert.peak, 0)} {unit} at worst, the limit is {number(alert.threshold, 0)} {unit}"
    if alert.longest_s:
        words += f"; {duration(alert.longest_s)} at longest"
    words += f"; {alert.still_open:,} still open" if alert.still_open else ""
    return words if unit else f"{words}; for example: {alert.example}"


def alerts_in_short(alerts: Sequence[AlertFacts]) -> str:
    """Return '2 alerts', '1 critical alert and 3 others'; nothing where there was none."""
    critical = sum(alert.alerts for alert in alerts if alert.severity == _CRITICAL)
    others = sum(alert.alerts for alert in alerts) - critical
    if not critical:
        return count(others, "alert") if others else ""
    return count(critical, "critical alert") + (f" and {count(others, 'other')}" if others else "")


def any_critical(alerts: Sequence[AlertFacts]) -> bool:
    """Say whether there was an alert that nobody may call well."""
    return any(alert.severity == _CRITICAL for alert in alerts)
