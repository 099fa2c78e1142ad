"""One recording of a Python program while it lives: the same records and the same recorder as a task has."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from badcjobs.api.alert_calls import AlertCalls
from badcjobs.api.stats import Stats, read_stats
from badcjobs.model import Device
from badcjobs.records import Closing, Recording, Records
from badcjobs.store.connect import read_only_uri
from badcjobs.store.live.sample_text import TEXT_FORMS
from badcjobs.surroundings import find_devices, mark_of, read_allocation
from badcjobs.telemetry.alerts import Alert
from badcjobs.world import World

log = logging.getLogger(__name__)

_PUBLISH_EVERY_S = 30.0
_FIRST_SAMPLE_PATIENCE_S = 10.0
_LOOK_EVERY_S = 0.2


class Session:
    """From the first sample to the published file; of one process, whatever it forks."""

    def __init__(
        self, path: Path, world: World, how: Recording, on_alert: Callable[[Alert], object] | None = None
    ) -> None:
        self._path = path.absolute()
        self._world = world
        self._pid = os.getpid()
        self._started_at_ms = world.clock.now_ms()
        self._ended_at_ms: int | None = None
        self._last_stats: Stats | None = None
        self._devices: list[tuple[int, Device]] = []
        self._one_at_a_time = threading.Lock()  # marks may come from any thread
        self._over = threading.Event()
        self._calls = None if on_alert is None else AlertCalls(on_alert)
        self._records = self._begin(how if self._calls is None else replace(how, on_alert=self._calls.add))
        self._thread = threading.Thread(target=self._look_after, name="badcjobs recorder", daemon=True)
        self._thread.start()

    def begin_mark(self, name: str) -> int | None:
        """Write the begin of a stretch and return its number; None: it could not be written, or is not ours to."""
        with self._one_at_a_time:
            if self.over:
                return None
            try:
                return self._records.writer.begin_mark(name, self._world.clock.now_ms())
            except sqlite3.Error as error:
                log.warning("mark %r cannot be written: %s", name, error)
                return None

    def end_mark(self, mark: int | None) -> None:
        """Write the end of a stretch."""
        with self._one_at_a_time:
            if mark is None or self.over:
                return
            try:
                self._records.writer.end_mark(mark, self._world.clock.now_ms())
            except sqlite3.Error as error:
                log.warning("the end of a mark cannot be written: %s", error)

    def close(self, *, failed: bool) -> None:
        """Take the last sample and publish; whatever goes wrong is a warning."""
        if self.over:
            return
        self._over.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        if self._path.suffix in TEXT_FORMS:
            self._last_stats = self.stats()  # a text has no tables that could be asked afterwards
        with self._one_at_a_time:
            verdict = "failed" if failed else "done"
            closing = self._records.close(exit_code=int(failed), verdict=verdict)
            self._ended_at_ms = closing.ended_at_ms
            self._records.writer.close()
        if self._calls is not None:
            self._calls.finish()
        self._complain(closing)

    def stats(self) -> Stats:
        """Return the figures so far."""
        if self._last_stats is not None:
            return self._last_stats
        ended_at_ms = self._ended_at_ms or self._world.clock.now_ms()
        published = self._ended_at_ms is not None and self._path.exists()
        uri = read_only_uri(self._path, sealed=True) if published else self._records.readings_at_hand()
        return read_stats(uri, self._devices, (ended_at_ms - self._started_at_ms) / 1000)

    @property
    def over(self) -> bool:
        """Whether there is nothing more to write; in a forked process there never is."""
        return self._ended_at_ms is not None or os.getpid() != self._pid

    def _begin(self, how: Recording) -> Records:
        world = self._world
        allocation = read_allocation(world, self._started_at_ms)
        grant = find_devices(world, allocation, how.stand_in)
        if not grant.devices:
            log.warning("no GPU to record (%s): recording the machine alone", grant.why)
        records = Records(
            allocation.key,
            self._path,
            allocation,
            world,
            started_at_ms=self._started_at_ms,
            mark=mark_of(allocation, world),
        )
        records.begin(engine=None, telemetry=True)
        records.writer.add_devices(grant.devices)
        records.writer.set_plan(devices=len(grant.devices), workers=0)
        self._devices = [(records.writer.device_id(device), device) for device in grant.devices]
        records.start_publishing(_PUBLISH_EVERY_S)
        records.start_recorder(grant.devices, how, wait_s=_FIRST_SAMPLE_PATIENCE_S)
        return records

    def _look_after(self) -> None:
        while not self._over.wait(_LOOK_EVERY_S):
            self._records.look_after_recorder()

    def _complain(self, closing: Closing) -> None:
        if closing.telemetry_failure is not None:
            log.warning("the recording is incomplete: %s", closing.telemetry_failure)
        if not closing.published:
            log.warning("%s could not be written; the files stay in %s", self._path, self._records.local.path)
