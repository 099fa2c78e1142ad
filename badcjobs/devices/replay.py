"""Devices of another day: a recorded task database, played back as if it happened now.

For rehearsals with real numbers, and to see again what a recorder saw: its readings, its gaps and their reasons. The
recording begins when the run begins, and begins again at its end."""

from __future__ import annotations

import json
import os
import re
import sqlite3
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from badcjobs.errors import BadInput
from badcjobs.model import METRICS, InventoryDevice, ProcessReading, Reading
from badcjobs.seams import Clock, DeviceUnreadable

_OLD_SLICE = re.compile(r"MIG-GPU-[^/]+/([0-9]{1,6})/([0-9]{1,6})")


# --- the recording ---------------------------------------------------------------------------------------------------

BACKEND = "replay"
_DEVICE = ("name", "memory_total_bytes", "power_limit_w", "pci_bus_id", "driver", "slowdown_c", "vendor", "parent_uuid")


@dataclass(frozen=True, slots=True)
class RecordedGap:
    """A gap: from the last reading before it to the first one after it."""

    from_ms: int
    to_ms: int
    reason: str


@dataclass(slots=True)
class Rows:
    """Rows of one device, in order of time."""

    at_ms: array[int] = field(default_factory=lambda: array("q"))
    rowids: array[int] = field(default_factory=lambda: array("q"))

    def before(self, at_ms: int) -> int:
        """Return how many rows are not later than this."""
        return bisect_right(self.at_ms, at_ms)


@dataclass(slots=True)
class Track:
    """One device of the recording."""

    device: InventoryDevice
    samples: Rows = field(default_factory=Rows)
    processes: Rows = field(default_factory=Rows)
    gaps: dict[str | None, list[RecordedGap]] = field(default_factory=dict)  # by metric; None: all of them
    sources: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def gap_at(self, metric: str | None, at_ms: int) -> RecordedGap | None:
        """Return the last gap that began by then, ended or not."""
        gaps = self.gaps.get(metric, [])
        count = bisect_right(gaps, at_ms, key=lambda gap: gap.from_ms)
        return gaps[count - 1] if count else None

    def sources_at(self, at_ms: int) -> dict[str, str]:
        """Return where metrics were read from at this moment."""
        known = {m: [name for from_ms, name in rows if from_ms <= at_ms] for m, rows in self.sources.items()}
        return {metric: names[-1] for metric, names in known.items() if names}


class Tape:
    """A recording, from its first moment to its last."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._db = _open(path)
        try:
            self._columns = {table: self._columns_of(table) for table in _TABLES}
            self._check()
            self._tracks = self._load_devices()
            self._load_times("sample", "samples")
            self._load_times("process_sample", "processes")
            self._load_gaps()
            self._load_sources()
        except (sqlite3.Error, BadInput) as error:
            self._db.close()
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"the recording {path} cannot be read", why=str(error)) from error
        self.tracks = {track.device.uuid: track for track in self._tracks.values()}
        self.begin_ms, self.end_ms, self.step_ms = self._extent()

    def values(self, rowid: int) -> dict[str, Any]:
        """Return the metrics of a sample."""
        names = [metric for metric in METRICS if metric in self._columns["sample"]]
        row = self._db.execute(f"SELECT {', '.join(names)} FROM sample WHERE rowid = ?", (rowid,)).fetchone()
        return dict(zip(names, row, strict=True))

    def processes(self, rowids: Sequence[int]) -> tuple[ProcessReading, ...]:
        """Return these rows of processes."""
        ask = "SELECT pid, memory_used_bytes, sm_percent FROM process_sample WHERE rowid = ?"
        return tuple(ProcessReading(*self._db.execute(ask, (rowid,)).fetchone()) for rowid in rowids)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _columns_of(self, table: str) -> list[str]:
        return [name for _, name, *_ in self._db.execute(f"PRAGMA table_info({table})")]

    def _check(self) -> None:
        if self._columns_of("source_file"):
            raise BadInput(
                f"{self._path} is a job database, which cannot be replayed",
                why="its devices are those of many tasks, at different times",
                fix=f"--replay {self._path.parent / 'tasks'}/…   (one of the task databases it was made of)",
            )
        absent = [table for table in ("device", "sample", "gap") if not self._columns[table]]
        if absent:
            raise BadInput(
                f"{self._path} is not a task database",
                why=f"it has no table {' and no table '.join(absent)}",
                fix="badcjobs record --out recording.sqlite --duration 60   (makes one)",
            )

    def _load_devices(self) -> dict[int, Track]:
        names = [name for name in _DEVICE if name in self._columns["device"]]
        ask = f"SELECT device_id, uuid, device_index, token, {', '.join(names)} FROM device WHERE uuid NOT NULL"
        rows = sorted(self._db.execute(ask), key=self._recorded_order())
        tracks = {}
        for position, (device_id, uuid, index, token, *values) in enumerate(rows):
            known: dict[str, Any] = {n: v for n, v in zip(names, values, strict=True) if v is not None}
            facts = {
                "name": "GPU",
                **known,
                "index": position if index is None else index,
                "slice": "/".join(map(str, _slice_numbers(token))) or None,
            }
            tracks[device_id] = Track(InventoryDevice(uuid=uuid, backend=BACKEND, **facts))
        return tracks

    def _recorded_order(self) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
        """Return the key that puts cards by index, and the slices of a card as the recorded list of devices names them.

        Without a list each slice has its old name as its token, whose numbers tell the order.
        """
        visible = ""
        if self._columns["meta"]:
            row = self._db.execute("SELECT value FROM meta WHERE key = 'environment'").fetchone()
            try:
                visible = str(json.loads(row[0]).get("CUDA_VISIBLE_DEVICES", "")) if row else ""
            except (AttributeError, TypeError, ValueError):
                pass  # not of our making
        places = {name.strip(): place for place, name in enumerate(visible.split(","))}

        def key(row: tuple[Any, ...]) -> tuple[Any, ...]:
            _, _, index, token, *_ = row
            return -1 if index is None else index, places.get(token, len(places)), _slice_numbers(token), token

        return key

    def _load_times(self, table: str, part: str) -> None:
        if not self._columns[table]:
            return
        for device_id, at_ms, rowid in self._db.execute(f"SELECT device_id, at_ms, rowid FROM {table} ORDER BY at_ms"):
            if device_id in self._tracks:
                rows: Rows = getattr(self._tracks[device_id], part)
                rows.at_ms.append(at_ms)
                rows.rowids.append(rowid)

    def _load_gaps(self) -> None:
        ask = "SELECT device_id, metric, from_ms, to_ms, reason FROM gap ORDER BY from_ms"
        for device_id, metric, *words in self._db.execute(ask):
            # Without a device it is a gap of the recorder, and so of them all.
            for track in self._tracks.values() if device_id is None else filter(None, [self._tracks.get(device_id)]):
                track.gaps.setdefault(metric, []).append(RecordedGap(*words))

    def _load_sources(self) -> None:
        if not self._columns["metric_source"]:
            return
        ask = "SELECT device_id, metric, from_ms, source FROM metric_source ORDER BY from_ms"
        for device_id, metric, from_ms, source in self._db.execute(ask):
            if device_id in self._tracks and metric in METRICS:
                self._tracks[device_id].sources.setdefault(metric, []).append((from_ms, source))

    def _extent(self) -> tuple[int, int, int]:
        """Return the first moment, the last one, and the usual time between two samples."""
        rows = [track.samples.at_ms for track in self._tracks.values() if track.samples.at_ms]
        if not rows:
            raise BadInput(
                f"the recording {self._path} has no sample of any device",
                why="it was made without a GPU, or its telemetry was switched off",
                fix="badcjobs record --out recording.sqlite --duration 60   (makes one)",
            )
        gaps = [gap for track in self._tracks.values() for gap in track.gaps.get(None, ())]
        begin_ms = min([*(times[0] for times in rows), *(gap.from_ms for gap in gaps)])
        end_ms = max([*(times[-1] for times in rows), *(gap.to_ms for gap in gaps)])
        longest = max(rows, key=len)
        step_ms = (longest[-1] - longest[0]) // (len(longest) - 1) if len(longest) > 1 else 1000
        return begin_ms, end_ms, max(1, step_ms)


def _slice_numbers(token: str) -> tuple[int, ...]:
    """Return the numbers of GPU instance and compute instance where an old name tells them; else none."""
    old = _OLD_SLICE.fullmatch(token)
    return (int(old[1]), int(old[2])) if old else ()


_TABLES = ("device", "sample", "gap", "process_sample", "metric_source", "meta")


def _open(path: Path) -> sqlite3.Connection:
    """Open a file that nobody changes, without a lock."""
    try:
        size = path.stat().st_size
        uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        db.execute("SELECT count(*) FROM sqlite_master")
    except OSError as error:
        raise BadInput(f"the recording {path} cannot be read", why=error.strerror) from error
    except sqlite3.Error as error:
        why = str(error) if size else "the file is empty"
        fix = "badcjobs record --out recording.sqlite --duration 60   (makes one)"
        raise BadInput(f"the recording {path} is not a task database", why=why, fix=fix) from error
    return db


# --- the reader ------------------------------------------------------------------------------------------------------

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

    def force_full_read(self) -> None:
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
