"""Publishes a task's database now and then from a thread of its own, so that neither workers nor samples wait."""

from __future__ import annotations

import logging
import sqlite3
import threading
from collections.abc import Mapping
from pathlib import Path

from badcjobs.store.publish import publish, publish_interval_s

log = logging.getLogger(__name__)


class Publisher:
    """Keeps the published file at most one interval behind the live ones."""

    def __init__(self, live_files: list[Path], target: Path, *, base_interval_s: float) -> None:
        self._live_files = live_files
        self._target = target
        self._base_interval_s = base_interval_s
        self._wake = threading.Event()
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)
        self._size_bytes = 0

    def start(self) -> None:
        """Publish once, so that a file is there from the beginning, then go on in the background."""
        self.publish_now()
        self._thread.start()

    def publish_soon(self) -> None:
        """Publish without waiting for the interval, and without making the caller wait."""
        self._wake.set()

    def publish_now(self, closing: Mapping[str, object] | None = None) -> bool:
        """Publish and return whether it worked; a full or vanished disk is a warning, not the end of the job.

        ``closing`` fills columns of the task row that a full disk would not take.
        """
        with self._one_at_a_time:
            try:
                self._size_bytes = publish(self._live_files, self._target, closing=closing)
            except (OSError, sqlite3.Error) as error:
                log.warning("%s could not be published: %s", self._target.name, error)
                return False
        return True

    def stop(self) -> None:
        """End the background thread; the last publication is the caller's, by ``publish_now``."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._over.is_set():
            self._wake.wait(publish_interval_s(self._size_bytes, self._base_interval_s))
            self._wake.clear()
            if not self._over.is_set():
                self.publish_now()
