"""The recorder's loop: a sample at every point of a fixed grid, and a gap where a point was missed."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from badcjobs.model import HostReading, Reading
from badcjobs.seams import Clock
from badcjobs.telemetry.cost import Effort
from badcjobs.telemetry.gaps import GapWriter
from badcjobs.telemetry.unwritten import Unwritten

log = logging.getLogger(__name__)

_SLOW_START_S = 1.5


class SampleWriter(GapWriter, Protocol):
    """Where samples are written: the recorder's own file."""

    def batch(self) -> AbstractContextManager[object]: ...

    def last_sample_ms(self) -> int | None: ...

    def write_tick(self, at_ms: int, readings: Sequence[tuple[int, Reading]], host: HostReading | None) -> None: ...


class Devices(Protocol):
    """What is sampled."""

    @property
    def unreadable(self) -> Mapping[int, str]: ...

    def hurry(self) -> None: ...

    def remember_gaps(self) -> None: ...

    def sample(self, at_ms: int) -> list[tuple[int, Reading]]: ...

    def forget_gaps(self) -> None: ...


class Notes(Protocol):
    """What is written beside the samples, in the same transaction."""

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None: ...

    def finish(self) -> None: ...

    def written(self) -> None: ...


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
        since_ms: int | None = None,
        again: bool = False,
        refused: Callable[[str], None] = lambda reason: None,
        notes: Notes | None = None,
        effort: Effort | None = None,
    ) -> None:
        self._devices = devices
        self._read_host = read_host
        self._writer = writer
        self._clock = clock
        self._interval_s = interval_s
        self._since_ms = since_ms  # when recording was asked for
        self._again = again  # whether a recorder before us has died
        self._last_ms: int | None = None
        self._refused = refused  # told once per stretch in which the disk refuses
        self._unwritten: tuple[int, str] | None = None  # since when, and why
        self._lost_ms = 0
        self._lost_why = ""
        self._notes = notes
        self._effort = effort or Effort()

    def run(self, wait: Callable[[float], bool]) -> None:
        """Record until ``wait(seconds)`` says that it is over; take one last sample then."""
        start_s = self._clock.monotonic_s()
        number = expected = 0  # points of the grid: the one to be read now, the one that follows the last one read
        over = False
        while not over:
            now_s = self._clock.monotonic_s()
            self._effort.note_lateness(now_s - start_s - expected * self._interval_s)
            expected = max(number, int((now_s - start_s) / self._interval_s)) + 1
            self.tick()
            number = max(expected, int((self._clock.monotonic_s() - start_s) / self._interval_s) + 1)
            over = wait(start_s + number * self._interval_s - self._clock.monotonic_s())
        self._devices.hurry()
        self.tick(last=True)

    def tick(self, *, last: bool = False) -> None:
        """Write one instant; a disk that refuses costs this instant, not the recorder."""
        at_ms = self._clock.now_ms()
        if self._last_ms is not None:
            at_ms = max(at_ms, self._last_ms + 1)  # the last sample may follow a tick at once; no two share an instant
        self._devices.remember_gaps()
        hole = self._hole_before(at_ms)
        try:
            with self._writer.batch():
                if hole is not None:
                    self._writer.open_gap(None, None, hole[0], at_ms, hole[1])
                self._write(at_ms, last)
        except sqlite3.Error as error:
            self._devices.forget_gaps()  # rolled back with the rest
            self._note_refusal(hole[0] if hole else self._last_ms or at_ms, str(error))
            return
        if self._unwritten is not None:
            self._lost_ms += at_ms - self._unwritten[0]
            self._unwritten = None
        self._last_ms = at_ms
        if self._notes is not None:
            self._notes.written()

    def _write(self, at_ms: int, last: bool) -> None:
        begun_s = self._clock.monotonic_s()
        readings = self._devices.sample(at_ms)
        self._effort.reading_s += self._clock.monotonic_s() - begun_s
        self._effort.ticks += 1
        self._writer.write_tick(at_ms, readings, self._read_host())
        if self._notes is not None:
            self._notes.write(at_ms, readings, self._devices.unreadable)
            if last:
                self._notes.finish()

    @property
    def unwritten(self) -> Unwritten:
        """What the disk has refused so far."""
        since_ms = None if self._unwritten is None else self._unwritten[0]
        lost_ms = self._lost_ms + (0 if since_ms is None else max(0, self._clock.now_ms() - since_ms))
        return Unwritten(lost_ms / 1000, self._lost_why, since_ms)

    def _note_refusal(self, since_ms: int, reason: str) -> None:
        if self._unwritten is None:
            log.warning("readings cannot be written: %s", reason)
            self._unwritten = (since_ms, reason)
            self._lost_why = reason
            self._refused(reason)

    def _hole_before(self, at_ms: int) -> tuple[int, str] | None:
        """Return since when, and why, there was no reading before this one; None: it follows the last as it should."""
        if self._unwritten is not None:
            return self._unwritten[0], f"could not be written: {self._unwritten[1]}"
        if self._last_ms is None:
            return self._hole_at_start(at_ms)
        if not self._is_hole(self._last_ms, at_ms):
            return None
        missed = round((at_ms - self._last_ms) / 1000 / self._interval_s) - 1
        log.warning("the recorder was late and missed %d readings", missed)
        return self._last_ms, f"the recorder was late: {missed} readings missed"

    def _hole_at_start(self, at_ms: int) -> tuple[int, str] | None:
        """Return what there was before our first reading; the moment that any program takes to start is no hole."""
        last_ms = self._writer.last_sample_ms()
        if self._again or last_ms is not None:
            return last_ms or self._since_ms or at_ms, "the recorder died and was started again"
        if self._since_ms is not None and at_ms - self._since_ms > 1000 * max(_SLOW_START_S, 1.5 * self._interval_s):
            return self._since_ms, "the recorder was slow to start"
        return None

    def _is_hole(self, from_ms: int, to_ms: int) -> bool:
        return to_ms - from_ms > 1500 * self._interval_s  # half an interval late is still on the grid
