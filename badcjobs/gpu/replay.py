"""Devices of another day: a recorded task database, played back as if it happened now.

For rehearsals with real numbers, and to see again what a recorder saw: its readings, its gaps and their reasons. The
recording begins when the run begins, and begins again at its end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from pathlib import Path

from badcjobs.gpu.tape import BACKEND, Tape, Track
from badcjobs.model import InventoryDevice, ProcessReading, Reading
from badcjobs.seams import Clock, DeviceUnreadable

_NOTHING = "the recording has no sample of this moment"


class ReplayReader:
    """Reads the devices of a recording; raises BadInput for a file that is none."""

    backend = BACKEND

    def __init__(self, path: Path, *, clock: Clock, started_at_ms: int) -> None:
        self._tape = Tape(path)
        self._clock = clock
        self._started_at_ms = started_at_ms
        self._length_ms = self._tape.end_ms - self._tape.begin_ms + self._tape.step_ms
        self.why = f"replay of {path}, {self._length_ms / 1000:g} s long and from the beginning again at its end"

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the devices that were recorded."""
        return [track.device for track in self._tape.tracks.values()]

    def read(self, uuid: str) -> Reading:
        """Return the sample of this moment of the recording; raise what was a gap then."""
        track = self._tape.tracks.get(uuid)
        if track is None:
            raise DeviceUnreadable(f"no device {uuid!r} was recorded")
        elapsed_ms = max(0, self._clock.now_ms() - self._started_at_ms)
        try:
            return self._reading_at(track, self._tape.begin_ms + elapsed_ms % self._length_ms)
        except sqlite3.Error as error:
            raise DeviceUnreadable(f"the recording cannot be read: {error}") from error

    def hurry(self) -> None:
        """Do nothing: every reading is a whole one."""

    def close(self) -> None:
        """Close the recording; its devices are still listed, but no longer read."""
        self._tape.close()

    def _reading_at(self, track: Track, at_ms: int) -> Reading:
        count = track.samples.before(at_ms)
        sample_ms = track.samples.at_ms[count - 1] if count else None
        gap = track.gap_at(None, at_ms)
        if gap is not None and sample_ms != at_ms and (sample_ms is None or gap.from_ms >= sample_ms):
            raise DeviceUnreadable(gap.reason)
        if sample_ms is None or at_ms - sample_ms > max(3 * self._tape.step_ms, 5000):
            raise DeviceUnreadable(_NOTHING)
        values = self._tape.values(track.samples.rowids[count - 1])
        missing = {}
        for metric in track.gaps:
            stretch = track.gap_at(metric, sample_ms)
            if metric is not None and values.get(metric, 0) is None and stretch and stretch.to_ms >= sample_ms:
                missing[metric] = stretch.reason
        sources = track.sources_at(sample_ms)
        return Reading(**values, missing=missing, sources=sources, processes=self._processes(track, sample_ms))

    def _processes(self, track: Track, sample_ms: int) -> tuple[ProcessReading, ...] | None:
        """Return the processes listed together with a sample; None where they were not listed then."""
        rows = track.processes
        first, end = rows.before(sample_ms - 1), rows.before(sample_ms)
        return self._tape.processes(rows.rowids[first:end]) if first < end else None
