"""Replay the devices of a recorded task database as if they were read now.

For tests with real numbers, and to see again what a recorder saw: readings, gaps and their reasons. The recording
starts with the run, and repeats when it ends.
"""

from __future__ import annotations

import json
import os
import re
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from badcjobs.errors import BadInput
from badcjobs.model import METRICS, InventoryDevice, ProcessReading, Reading
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader

_TABLES = ("device", "sample", "gap")  # every recording has them
_DEVICE = ("name", "memory_total_bytes", "power_limit_w", "pci_bus_id", "driver", "slowdown_c", "vendor", "parent_uuid")
_OLD_SLICE = re.compile(r"MIG-GPU-[^/]+/([0-9]{1,6})/([0-9]{1,6})")
_MAKE_ONE = "badcjobs record --out recording.sqlite --duration 60   (makes a recording)"

# The tables of a recording have no index on the time, and the file must not be changed.
_INDEX = """
PRAGMA temp_store = MEMORY;
CREATE TEMP TABLE sample_at AS SELECT device_id, at_ms, rowid AS row FROM sample;
CREATE INDEX temp.sample_at_time ON sample_at (device_id, at_ms);
CREATE TEMP TABLE process_at AS SELECT device_id, at_ms, rowid AS row FROM process_sample;
CREATE INDEX temp.process_at_time ON process_at (device_id, at_ms);
"""
_SAMPLE = f"""
SELECT at.at_ms, {", ".join(METRICS)} FROM sample_at AS at JOIN sample ON sample.rowid = at.row
WHERE at.device_id = ? AND at.at_ms <= ? ORDER BY at.at_ms DESC LIMIT 1
"""
_PROCESSES = """
SELECT pid, memory_used_bytes, sm_percent FROM process_at AS at JOIN process_sample AS p ON p.rowid = at.row
WHERE at.device_id = ? AND at.at_ms = ? ORDER BY at.row
"""
# A gap without a device is a gap of the recorder, and so of all devices.
_GAPS = """
SELECT metric, from_ms, to_ms, reason FROM gap
WHERE (device_id = ? OR device_id IS NULL) AND from_ms <= ? ORDER BY from_ms
"""
_SOURCES = "SELECT metric, source FROM metric_source WHERE device_id = ? AND from_ms <= ? ORDER BY from_ms"


class ReplayReader(GpuReader):
    """Reads the devices of a recording; raises BadInput for any other file."""

    backend = "replay"

    def __init__(self, path: Path, *, clock: Clock, started_at_ms: int) -> None:
        self._clock = clock
        self._started_at_ms = started_at_ms
        self._db = _open(path)
        try:
            _check_tables(self._db, path)
            self._db.executescript(_INDEX)
            self._ids, self._inventory = self._load_devices()
            begin_ms, end_ms, self._step_ms = self._load_extent(path)
        except (sqlite3.Error, BadInput) as error:
            self._db.close()
            if isinstance(error, BadInput):
                raise
            raise BadInput(f"the recording {path} cannot be read", why=str(error)) from error
        self._begin_ms = begin_ms
        self._length_ms = end_ms - begin_ms + self._step_ms
        self.why = f"replay of {path}, {self._length_ms / 1000:.1f} s long, repeated at its end"

    def inventory(self) -> Sequence[InventoryDevice]:
        """List the recorded devices."""
        return list(self._inventory)

    def read(self, uuid: str) -> Reading:
        """Return the sample at the current time of the recording; raise DeviceUnreadable for a recorded gap."""
        if uuid not in self._ids:
            raise DeviceUnreadable(f"the recording has no device {uuid!r}")
        elapsed_ms = max(0, self._clock.now_ms() - self._started_at_ms)
        try:
            return self._reading_at(self._ids[uuid], self._begin_ms + elapsed_ms % self._length_ms)
        except sqlite3.Error as error:
            raise DeviceUnreadable(f"the recording cannot be read: {error}") from error

    def close(self) -> None:
        """Close the recording; its devices can still be listed, but no longer read."""
        self._db.close()

    def _reading_at(self, device_id: int, at_ms: int) -> Reading:
        sample_ms, *numbers = self._db.execute(_SAMPLE, (device_id, at_ms)).fetchone() or (None,)
        gaps = self._db.execute(_GAPS, (device_id, at_ms)).fetchall()
        for metric, from_ms, _, reason in reversed(gaps):
            if metric is None:  # the last gap that has begun, over or not
                if sample_ms != at_ms and (sample_ms is None or from_ms >= sample_ms):
                    raise DeviceUnreadable(reason)
                break
        if sample_ms is None or at_ms - sample_ms > max(3 * self._step_ms, 5000):
            raise DeviceUnreadable("the recording has no sample at this time")
        values = dict(zip(METRICS, numbers, strict=True))
        last = {metric: (to_ms, why) for metric, from_ms, to_ms, why in gaps if from_ms <= sample_ms}
        missing = {m: why for m, (to_ms, why) in last.items() if values.get(m, 0) is None and to_ms >= sample_ms}
        known = self._db.execute(_SOURCES, (device_id, sample_ms))
        sources = {metric: source for metric, source in known if metric in values}
        listed = self._db.execute(_PROCESSES, (device_id, sample_ms)).fetchall()
        processes = tuple(ProcessReading(*one) for one in listed) or None  # None: the processes were not listed
        return Reading(**values, missing=missing, sources=sources, processes=processes)

    def _load_devices(self) -> tuple[dict[str, int], list[InventoryDevice]]:
        """Return the devices: cards by index, and the slices of a card in the order of the recorded device list.

        Without a list the token of a slice is its old name, and the numbers in it give the order.
        """
        row = self._db.execute("SELECT value FROM meta WHERE key = 'environment'").fetchone()
        try:
            visible = str(json.loads(row[0]).get("CUDA_VISIBLE_DEVICES", "")) if row else ""
        except (AttributeError, TypeError, ValueError):
            visible = ""  # a file that another program has changed
        places = {name.strip(): place for place, name in enumerate(visible.split(","))}
        found = []
        ask = f"SELECT device_id, uuid, device_index, token, {', '.join(_DEVICE)} FROM device WHERE uuid NOT NULL"
        for device_id, uuid, index, token, *values in self._db.execute(ask):
            old = _OLD_SLICE.fullmatch(token)
            slice_ = (int(old[1]), int(old[2])) if old else ()
            order = -1 if index is None else index, places.get(token, len(places)), slice_, token
            facts = {name: value for name, value in zip(_DEVICE, values, strict=True) if value is not None}
            found.append((order, device_id, uuid, index, "/".join(map(str, slice_)) or None, facts))
        found.sort(key=lambda one: one[0])
        devices = []
        for position, (_, _, uuid, index, slice_name, facts) in enumerate(found):
            known: dict[str, Any] = {"name": "GPU", **facts, "index": position if index is None else index}
            devices.append(InventoryDevice(uuid=uuid, backend=self.backend, slice=slice_name, **known))
        return {uuid: device_id for _, device_id, uuid, *_ in found}, devices

    def _load_extent(self, path: Path) -> tuple[int, int, int]:
        """Return the first time, the last time, and the usual interval of the samples."""
        times = self._db.execute(
            "SELECT count(*), min(at_ms), max(at_ms) FROM sample_at JOIN device USING (device_id)"
            " WHERE uuid NOT NULL GROUP BY device_id"
        ).fetchall()
        if not times:
            raise BadInput(
                f"the recording {path} has no sample of any device",
                why="it was recorded without a GPU, or with telemetry off",
                fix=_MAKE_ONE,
            )
        gaps = self._db.execute("SELECT from_ms, to_ms FROM gap WHERE metric IS NULL").fetchall()
        begin_ms = min([*(first for _, first, _ in times), *(from_ms for from_ms, _ in gaps)])
        end_ms = max([*(last for *_, last in times), *(to_ms for _, to_ms in gaps)])
        many, first_ms, last_ms = max(times)
        return begin_ms, end_ms, max(1, (last_ms - first_ms) // (many - 1) if many > 1 else 1000)


def _open(path: Path) -> sqlite3.Connection:
    """Open a file read-only, without a lock."""
    try:
        path.stat()
        uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"
        db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
        db.execute("SELECT count(*) FROM sqlite_master")
    except OSError as error:
        fix = "--simulate 2, or a file: a simulation script (.toml) or a task database"
        raise BadInput(f"the recording {path} cannot be read", why=error.strerror, fix=fix) from error
    except sqlite3.Error as error:
        raise BadInput(f"the recording {path} is not a task database", why=str(error), fix=_MAKE_ONE) from error
    return db


def _check_tables(db: sqlite3.Connection, path: Path) -> None:
    tables = {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if "source_file" in tables:
        raise BadInput(
            f"{path} is a job database, which cannot be replayed",
            why="its devices are those of many tasks, at different times",
            fix=f"--simulate {path.parent / 'tasks'}/…   (one of the task databases it was made of)",
        )
    if absent := [table for table in _TABLES if table not in tables]:
        why = f"it has no table {' and no table '.join(absent)}"
        raise BadInput(f"{path} is not a task database", why=why, fix=_MAKE_ONE)
