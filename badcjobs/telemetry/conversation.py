"""What happens between two samples: the recorder listens to its wrapper and does what it is asked."""

from __future__ import annotations

import logging
import sqlite3
import threading
from pathlib import Path
from typing import Protocol

from badcjobs.seams import Clock
from badcjobs.telemetry.alerts import AlertBook
from badcjobs.telemetry.order import READY, SNAPSHOT, WORK_NONE, WORK_WAITS
from badcjobs.telemetry.words import WRAPPER_GONE, Words

log = logging.getLogger(__name__)


class LiveFile(Protocol):
    """The recorder's file, which only its owner may copy."""

    def snapshot(self, target: Path) -> None: ...


class Snapshots:
    """Copies of the recorder's file for the wrapper, taken one at a time in a thread of their own: no tick waits."""

    def __init__(self, writer: LiveFile) -> None:
        self._writer = writer
        self._thread: threading.Thread | None = None

    def take(self, target: Path) -> None:
        """Begin a snapshot; while one is under way, another one is not begun."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._take, args=(target,))
            self._thread.start()

    def finish(self) -> None:
        """Wait for the one that is under way."""
        if self._thread is not None:
            self._thread.join()

    def _take(self, target: Path) -> None:
        try:
            self._writer.snapshot(target)
        except (OSError, sqlite3.Error) as error:
            log.warning("no snapshot for the wrapper: %s", error)


class Conversation:
    """What the wrapper says between two samples, and what is done about it."""

    def __init__(self, words: Words, clock: Clock, snapshots: Snapshots, alerts: AlertBook) -> None:
        self._words = words
        self._clock = clock
        self._snapshots = snapshots
        self._alerts = alerts
        self.last_word = WRAPPER_GONE

    def wait(self, seconds: float) -> bool:
        """Listen for so long; return whether the recording is over."""
        if not self._words.ready_said:  # we are asked for the first time after the first tick
            self._words.say(READY)
            self._words.ready_said = True
        end_s = self._clock.monotonic_s() + seconds
        while (word := self._words.next(max(0.0, end_s - self._clock.monotonic_s()))) is not None:
            if word.startswith(SNAPSHOT):
                self._snapshots.take(Path(word.partition(" ")[2]))
            elif word in (WORK_WAITS, WORK_NONE):
                self._alerts.work_waits = word == WORK_WAITS
            else:
                self.last_word = word
                return True
        return False
