"""The recorder's loop: a sample at every point of a fixed grid, and a gap where a point was missed."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from badcjobs.model import HostReading, Reading
from badcjobs.seams import Clock
from badcjobs.telemetry.gaps import GapWriter

log = logging.getLogger(__name__)


class SampleWriter(GapWriter, Protocol):
    """Where samples are written: the recorder's own file."""

    def batch(self) -> AbstractContextManager[object]: ...

    def last_sample_ms(self) -> int | None: ...

    def write_tick(self, at_ms: int, readings: Sequence[tuple[int, Reading]], host: HostReading | None) -> None: ...


class Devices(Protocol):
    """What is sampled."""

    def remember_gaps(self) -> None: ...

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]: ...

    def forget_gaps(self) -> None: ...


class Recorder:
    """Samples on the grid start, start + interval, start + 2 × interval, … whatever a tick costs."""

    def __init__(
        self,
        devices: Devices,
        read_host: Callable[[], HostReading | None],
        writer: SampleWriter,
        *,
        clock: Clock,
        interval_s: float,
    ) -> None:
        self._devices = devices
        self._read_host = read_host
        self._writer = writer
        self._clock = clock
        self._interval_s = interval_s
        self._last_ms: int | None = None
        self._unwritten: tuple[int, str] | None = None  # since when, and why

    def run(self, wait: Callable[[float], bool]) -> None:
        """Record until ``wait(seconds)`` says that it is over; take one last sample then."""
        self._note_earlier_recorder()
        start_s = self._clock.monotonic_s()
        number = 0
        over = False
        while not over:
            self.tick()
            late_s = self._clock.monotonic_s() - start_s
            due = int(late_s / self._interval_s) + 1
            if due > number + 1:
                self._note_missed(due - number - 1)
            number = due
            over = wait(start_s + number * self._interval_s - self._clock.monotonic_s())
        self.tick()

    def tick(self) -> None:
        """Write one instant; a disk that refuses costs this instant, not the recorder."""
        at_ms = self._clock.now_ms()
        if self._last_ms is not None:
            at_ms = max(at_ms, self._last_ms + 1)  # the last sample may follow a tick at once; no two share an instant
        self._devices.remember_gaps()
        try:
            with self._writer.batch():
                if self._unwritten is not None:
                    since_ms, why = self._unwritten
                    self._writer.open_gap(None, None, since_ms, at_ms, f"could not be written: {why}")
                self._writer.write_tick(at_ms, self._devices.sample(at_ms), self._read_host())
            self._unwritten = None
        except sqlite3.Error as error:
            self._devices.forget_gaps()  # rolled back with the rest
            if self._unwritten is None:
                log.warning("readings cannot be written: %s", error)
                self._unwritten = (self._last_ms or at_ms, str(error))
            return
        self._last_ms = at_ms

    def _note_missed(self, ticks: int) -> None:
        """Write the hole left by a tick that took too long: a stopped or overloaded machine, a slow driver."""
        log.warning("the recorder was late and missed %d readings", ticks)
        if self._last_ms is not None and self._unwritten is None:  # what could not be written is a hole already
            self._write_hole(self._last_ms, f"the recorder was late: {ticks} readings missed")

    def _note_earlier_recorder(self) -> None:
        last_ms = self._writer.last_sample_ms()
        if last_ms is not None:
            self._write_hole(last_ms, "the recorder died and was started again")

    def _write_hole(self, from_ms: int, reason: str) -> None:
        try:
            self._writer.open_gap(None, None, from_ms, self._clock.now_ms(), reason)
        except sqlite3.Error as error:
            self._unwritten = (from_ms, str(error))
