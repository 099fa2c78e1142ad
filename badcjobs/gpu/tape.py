"""A recorded task database as a tape: what each device said, and when it said nothing; played by ``replay.py``.

Only times and row numbers are held in memory (16 bytes a sample); values are fetched when they are asked for. Columns
are looked up by name, so any version of the schema will do.
"""

from __future__ import annotations

import os
import sqlite3
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from badcjobs.errors import BadInput
from badcjobs.gpu.recorded_order import in_recorded_order, slice_in, visible_in
from badcjobs.model import METRICS, InventoryDevice, ProcessReading

BACKEND = "replay"
_DEVICE = ("name", "memory_total_bytes", "power_limit_w", "pci_bus_id", "driver", "slowdown_c", "vendor", "parent_uuid")


@dataclass(frozen=True, slots=True)
class Stretch:
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
    gaps: dict[str | None, list[Stretch]] = field(default_factory=dict)  # by metric; None: all of them
    sources: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def gap_at(self, metric: str | None, at_ms: int) -> Stretch | None:
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
        visible = visible_in(self._environment())
        rows = in_recorded_order(self._db.execute(ask), visible, index=lambda row: row[2], token=lambda row: row[3])
        tracks = {}
        for position, (device_id, uuid, index, token, *values) in enumerate(rows):
            known: dict[str, Any] = {n: v for n, v in zip(names, values, strict=True) if v is not None}
            facts = {"name": "GPU", **known, "index": position if index is None else index, "slice": slice_in(token)}
            tracks[device_id] = Track(InventoryDevice(uuid=uuid, backend=BACKEND, **facts))
        return tracks

    def _environment(self) -> str | None:
        """Return the variables of the recorded task, as JSON."""
        if not self._columns["meta"]:
            return None
        row = self._db.execute("SELECT value FROM meta WHERE key = 'environment'").fetchone()
        return None if row is None else row[0]

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
                track.gaps.setdefault(metric, []).append(Stretch(*words))

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
