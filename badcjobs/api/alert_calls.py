"""Calls other people's ``on_alert`` from a thread of its own, so that neither they nor the recorder wait for it."""

from __future__ import annotations

import logging
import queue
import sys
import threading
from collections.abc import Callable

from badcjobs.telemetry.alerts import Alert

log = logging.getLogger(__name__)

_PATIENCE_S = 5.0


class AlertCalls:
    """One call after the other, in the order of the alerts."""

    def __init__(self, on_alert: Callable[[Alert], object]) -> None:
        self._on_alert = on_alert
        self._waiting: queue.SimpleQueue[Alert | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._call_each, name="badcjobs on_alert", daemon=True)
        self._thread.start()

    def add(self, alert: Alert) -> None:
        """Call it for this alert, soon."""
        self._waiting.put(alert)

    def finish(self) -> None:
        """Wait for the calls that are due, but not for ever."""
        self._waiting.put(None)
        if threading.current_thread() is not self._thread:  # on_alert may stop the recorder itself
            self._thread.join(_PATIENCE_S)

    def _call_each(self) -> None:
        while (alert := self._waiting.get()) is not None:
            try:
                self._on_alert(alert)
            except BaseException:  # broad: other people's code, beside their work; exit() in it ends no program
                if sys.is_finalizing():
                    raise
                log.exception("on_alert failed; the recording goes on")
