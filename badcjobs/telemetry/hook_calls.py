"""Calls the command and the webhook of [alerts], in a thread: neither the work nor the recorder waits for them.

Whoever does not answer is left alone, and a failure is said once: the alerts themselves are in the log and the
database in any case.
"""

from __future__ import annotations

import logging
import queue
import shlex
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from badcjobs.seams import Clock
from badcjobs.telemetry.alert_command import Command
from badcjobs.telemetry.alert_hooks import AlertHooks, CallBudget, News, news_of
from badcjobs.telemetry.alert_webhook import Webhook
from badcjobs.telemetry.alerts import Alert

log = logging.getLogger(__name__)

_PATIENCE_S = 1.75
_DYING_S = 0.25
_MOST_WAITING = 20


class Called(Protocol):
    """Somebody who is told of an alert."""

    name: str

    def tell(self, news: News) -> str | None:
        """Tell, and return what went wrong; None: nothing."""
        ...

    def stop(self) -> None:
        """Let go of a call that is under way; for any thread."""
        ...


class HookCalls:
    """One call after the other; what comes faster than they are made is held back, and counted in the next one."""

    def __init__(self, hooks: AlertHooks, task: str, clock: Clock, environ: Mapping[str, str], cwd: Path) -> None:
        self._task = task
        self._clock = clock
        self._budget = CallBudget(hooks.min_interval_s)
        self._called = who_is_called(hooks, environ, cwd)
        self._waiting: queue.SimpleQueue[News | None] = queue.SimpleQueue()
        self._held_back = 0
        self._silent: set[str] = set()  # those whose failure was said
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, alert: Alert) -> None:
        """Call for this alert soon, unless that would be too often; never waits."""
        full = self._waiting.qsize() >= _MOST_WAITING
        if full or not self._budget.allows(alert, self._clock.monotonic_s()):
            self._held_back += 1
            return
        self._waiting.put(news_of(alert, self._task, self._held_back))
        self._held_back = 0
        if self._thread is None:  # most tasks never have an alert
            self._thread = threading.Thread(target=self._call_each, name="badcjobs alerts", daemon=True)
            self._thread.start()

    def finish(self) -> None:
        """Wait a moment for what is due; then nothing of it goes on."""
        if self._thread is None:
            return
        self._waiting.put(None)
        self._thread.join(_PATIENCE_S)
        self._over.set()
        if self._thread.is_alive():
            log.warning("calls about alerts were still under way at the end: they are given up")
            for called in self._called:
                called.stop()
            self._thread.join(_DYING_S)

    def _call_each(self) -> None:
        while (news := self._waiting.get()) is not None and not self._over.is_set():
            for called in self._called:
                trouble = _tell(called, news)
                if trouble is not None and called.name not in self._silent and not self._over.is_set():
                    self._silent.add(called.name)
                    log.warning("[alerts] %s: %s; this is said once, the work goes on", called.name, trouble)


def _tell(called: Called, news: News) -> str | None:
    try:
        return called.tell(news)
    except Exception as error:  # broad: no thread is left, say; the next alert may be luckier
        return f"it could not be called: {type(error).__name__}"


def who_is_called(hooks: AlertHooks, environ: Mapping[str, str], cwd: Path) -> list[Called]:
    """Return the command and the webhook, as far as there are any."""
    called: list[Called] = []
    if hooks.command is not None:
        called.append(Command(shlex.split(hooks.command), environ, cwd))
    if hooks.webhook is not None:
        called.append(Webhook(hooks.webhook, environ))
    return called
