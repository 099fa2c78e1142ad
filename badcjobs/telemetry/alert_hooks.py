"""Who is called when an alert begins or ends, how often, and what they are told; the calls are hook_calls.py's."""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urlsplit

from badcjobs.telemetry.alerts import Alert

TIMEOUT_S = 10.0  # of each call
News = Mapping[str, object]

_MOST_PER_HOUR = 20
_HOUR_S = 3600.0
_CHAT_SIGNS = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})  # in a chat they would be links and mentions


@dataclass(frozen=True, slots=True)
class AlertHooks:
    """A command and a URL, either of them or none; the fields are keys of the table [alerts].

    Whoever knows the URL of a webhook may write to it: it is never logged and never stored, nor is the command's
    line, which may hold one.
    """

    command: str | None = field(default=None, repr=False)
    webhook: str | None = field(default=None, repr=False)
    min_interval_s: float = 600.0  # between two calls for one kind of trouble on one device

    @property
    def wanted(self) -> bool:
        """Whether there is anybody to call."""
        return self.command is not None or self.webhook is not None

    def problems(self) -> list[str]:
        """Return what is wrong with them, a sentence each, without their secrets."""
        found = []
        if self.command is not None and (wrong := _wrong_command(self.command)):
            found.append(f"command {wrong}")
        if self.webhook is not None and (wrong := _wrong_url(self.webhook)):
            found.append(f"webhook {wrong}")
        number = self.min_interval_s
        if type(number) not in (int, float) or not math.isfinite(number) or number < 0:
            found.append(f"min_interval_s = {number!r} must be a number, 0 or above")
        return found

    def without_secrets(self) -> dict[str, object]:
        """Return what may be stored and shown: the program's name, and the host that is called."""
        program = None if self.command is None else shlex.split(self.command)[0]
        webhook = None
        if self.webhook is not None:
            parts = urlsplit(self.webhook)
            webhook = (
                f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}/…"  # a name and a password may stand before @
            )
        return {
            "command": program and f"{program} …",
            "webhook": webhook,
            "min_interval_s": self.min_interval_s,
        }


def _wrong_command(command: object) -> str | None:
    if not isinstance(command, str):
        return "must be a text"
    try:
        words = shlex.split(command)
    except ValueError as error:
        return f"cannot be taken apart into words: {str(error).lower()}"
    return "must name a program" if not words or not words[0] or "\0" in command else None


def _wrong_url(url: object) -> str | None:
    """Return what is wrong with a URL, in words that do not repeat it."""
    if not isinstance(url, str):
        return "must be a text"
    if not url.isascii() or not url.isprintable() or " " in url:
        return "must be a URL of plain characters, without blanks"
    try:
        parts = urlsplit(url)
        complete = parts.scheme in ("http", "https") and _has_host(parts)
    except ValueError:
        complete = False
    if not complete:
        return "must be a whole http:// or https:// URL"
    return "must not hold a name and a password; services put their secret into the path" if parts.username else None


def _has_host(parts: SplitResult) -> bool:
    return bool(parts.hostname) and (parts.port is None or parts.port > 0)


class CallBudget:
    """Says which news is worth a call: people who are called too often stop listening."""

    def __init__(self, min_interval_s: float) -> None:
        self._min_interval_s = min_interval_s
        self._last_begin_s: dict[tuple[int, str], float] = {}
        self._told: set[tuple[int, str, int, str]] = set()
        self._calls_s: deque[float] = deque()

    def allows(self, alert: Alert, at_s: float) -> bool:
        """Return whether to call for this begin or end, and count it; an end is told to whoever heard of its begin."""
        name, place = (alert.device_id, alert.kind, alert.started_at_ms, alert.message), (alert.device_id, alert.kind)
        last_s = self._last_begin_s.get(place)
        is_wanted = name in self._told if alert.over else last_s is None or at_s - last_s >= self._min_interval_s
        self._told.discard(name)
        if not is_wanted or not self._has_room(at_s):
            return False
        self._calls_s.append(at_s)
        if not alert.over:
            self._told.add(name)
            self._last_begin_s[place] = at_s
        return True

    def _has_room(self, at_s: float) -> bool:
        while self._calls_s and at_s - self._calls_s[0] >= _HOUR_S:
            self._calls_s.popleft()
        return len(self._calls_s) < _MOST_PER_HOUR


def news_of(alert: Alert, task: str, held_back: int) -> dict[str, object]:
    """Return what is told, as JSON has it; ``held_back``: how many calls were not made since the last one."""
    more = f" ({held_back} more were held back)" if held_back else ""
    return {
        "text": f"badcjobs {task}: {alert.severity} {alert.words}{more}".translate(_CHAT_SIGNS),
        "state": "end" if alert.over else "begin",
        "kind": alert.kind,
        "severity": alert.severity,
        "device": alert.device_uuid if alert.device_index is None else alert.device_index,
        "uuid": alert.device_uuid,
        "task": task,
        "message": alert.message,
        "peak": alert.peak,
        "threshold": alert.threshold,
        "started_at_ms": alert.started_at_ms,
        "ended_at_ms": alert.ended_at_ms,
        "held_back": held_back,
    }


_VARIABLES = ("kind", "severity", "device", "task", "message", "peak", "threshold", "state")


def variables_of(news: News) -> dict[str, str]:
    """Return the same as variables of an environment; what is not known is empty."""
    told = {name: "" if news[name] is None else str(news[name]) for name in _VARIABLES}
    return {f"BADCJOBS_ALERT_{name.upper()}": value.replace("\0", "") for name, value in told.items()}
