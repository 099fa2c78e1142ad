"""Publishes a task's database now and then from a thread of its own, so that neither workers nor samples wait."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from badcjobs.model import publish_interval_s
from badcjobs.store.live.halves import Half
from badcjobs.store.live.publish import publish

log = logging.getLogger(__name__)

_NICENESS = 10


class Publisher:
    """Keeps the published file at most one interval behind the live ones; builds it in ``workplace``."""

    def __init__(
        self, halves: Sequence[Half | Path], target: Path, *, base_interval_s: float, workplace: Path | None = None
    ) -> None:
        self._halves = halves
        self._target = target
        self._workplace = workplace
        self._base_interval_s = base_interval_s
        self._wake = threading.Event()
        self._over = threading.Event()
        self._one_at_a_time = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="publisher", daemon=True)
        self._size_bytes = 0
        self._failing = False

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
                self._size_bytes = publish(self._halves, self._target, workplace=self._workplace, closing=closing)
            except (OSError, sqlite3.Error) as error:
                self._note_failure(error)
                return False
        if self._failing:
            log.info("%s is published again", self._target.name)
        self._failing = False
        return True

    def _note_failure(self, error: Exception) -> None:
        """Warn once, not at every interval, of a disk that stays full."""
        if not self._failing:
            log.warning("%s could not be published: %s; trying again at every interval", self._target.name, error)
        self._failing = True

    def stop(self) -> None:
        """End the background thread; the last publication is the caller's, by ``publish_now``."""
        self._over.set()
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        _step_back()
        while not self._over.is_set():
            self._wake.wait(publish_interval_s(self._size_bytes, self._base_interval_s))
            self._wake.clear()
            if not self._over.is_set():
                self.publish_now()


def _step_back() -> None:
    """Let everybody else go first on a busy machine: on Linux a priority is a thread's own."""
    try:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    except OSError:
        pass  # a sandbox that does not let us; then we compete
