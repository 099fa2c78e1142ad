"""Simulate devices, for demos and tests on a machine without a GPU, or replay those of a recording.

All values of a simulated device depend only on its index and the seconds since the start. So two processes with the
same start see the same devices, and a second run shows the same numbers.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from itertools import pairwise
from math import cos, inf, pi, sin
from pathlib import Path
from typing import Any
from urllib.parse import quote

from badcjobs.errors import BadInput
from badcjobs.model import METRICS, InventoryDevice, ProcessReading, Reading, known_values
from badcjobs.seams import Clock, DeviceUnreadable, GpuReader
from badcjobs.small_files import DamagedFile, parse_fields

Course = Sequence[tuple[float, float]]  # (from_s, value), in order


@dataclass(frozen=True)
class SimulatedDevice:
    """One simulated device; its fields are the keys of the script."""

    index: int
    load: tuple[tuple[float, float], ...] | None = None  # (from_s, percent); None: a sine wave
    lost_at_s: float | None = None
    back_at_s: float | None = None
    unsupported: tuple[str, ...] = ()
    name: str = "Simulated GPU"
    memory_total_mib: int = 16 * 1024
    temperature_c: tuple[tuple[float, float], ...] | None = None  # (from_s, °C); None: follows the load
    fan_percent: tuple[tuple[float, float], ...] | None = None  # (from_s, percent); None: no fan
    slowdown_c: int | None = None
    processes: tuple[tuple[int, int], ...] | None = None  # (pid, MiB); None: not listed
    fault: tuple[tuple[float, str], ...] = ()  # (at_s, text of the fault)

    def __post_init__(self) -> None:
        if self.index < 0:
            raise ValueError(f"index = {self.index} is negative")
        if not {*self.unsupported} <= {*METRICS}:
            raise ValueError(f"unsupported = {list(self.unsupported)}; allowed are {', '.join(METRICS)}")


def simulated_devices(count: int, described: Sequence[SimulatedDevice] = ()) -> list[SimulatedDevice]:
    """Return this many devices, or more if a later one is described; the others behave as usual."""
    by_index = {device.index: device for device in described}
    many = max(count, *(index + 1 for index in by_index), 0)
    return [by_index.get(index, SimulatedDevice(index)) for index in range(many)]


def load_script(path: Path) -> list[SimulatedDevice]:
    """Read the devices of a simulation script, a TOML file."""
    from badcjobs.settings import read_toml  # late: a recorder needs it only for a script

    return parse_script(read_toml(path).document, str(path))


@dataclass(frozen=True)
class _Script:
    """The top of a simulation script."""

    devices: int = 1  # or more, if a later one is described
    device: tuple[dict[str, Any], ...] = ()


def parse_script(document: Mapping[str, Any], source: str = "the simulation script") -> list[SimulatedDevice]:
    """Return the devices of a script; raise BadInput with the first mistake in each table."""
    described = []
    mistakes = []
    script = _Script()
    try:
        script = _parse_table(_Script, document)
    except ValueError as error:
        mistakes.append(str(error))
    for number, table in enumerate(script.device, start=1):
        try:
            described.append(_parse_table(SimulatedDevice, table))
        except ValueError as error:
            mistakes.append(f"device table {number}: {error}")
    if mistakes:
        raise BadInput(f"{source} has mistakes", why="\n".join(mistakes), fix="badcjobs guide gpus")
    return simulated_devices(script.devices, described)


def _parse_table(noun: type[Any], table: Mapping[str, Any]) -> Any:
    names = [part.name for part in fields(noun)]
    for key in table:
        if key not in names:
            raise DamagedFile(f"unknown key {key!r}; allowed are {', '.join(names)}")
    return parse_fields(noun, table)


# --- simulated memory -------------------------------------------------------------------------------------------------


def simulated_memory_bytes(folder: Path, uuid: str, *, without_pid: int | None = None) -> int:
    """Return the memory that running processes use of a device, the sum of their files ``<uuid>.<pid>``."""
    import psutil  # late: a recorder of real devices stays smaller

    used = 0
    for file in folder.glob(f"{uuid}.*"):
        pid = file.name.rpartition(".")[2]
        with suppress(psutil.Error, OSError, ValueError):  # the process has ended, or the file is being written
            is_zombie = psutil.Process(int(pid)).status() == psutil.STATUS_ZOMBIE  # it no longer uses memory
            if not is_zombie and pid != str(without_pid):
                used += int(file.read_text())
    return used


# --- the reader ------------------------------------------------------------------------------------------------------

IDLE_W = 50.0
FULL_W = 280.0  # below 95 % of the limit, where alerts start
LIMIT_W = 300.0

_WAVE_MEAN = 80.0  # percent
_WAVE_SWING = 15.0
_WAVE_RAD_PER_S = 2 * pi / 60
_PCIE_BYTES_PER_S = 2 * 10**9  # received under full load; it sends a tenth of it
_GPU_IDLE = 0x1  # NVML's throttle reason of an idle device


@dataclass(eq=False)
class SimulatedReader(GpuReader):
    """Reads simulated devices; ``ledger``: a folder with the memory that programs use (None: it follows the load)."""

    backend = "simulated"

    devices: Sequence[SimulatedDevice]
    clock: Clock
    started_at_ms: int
    ledger: Path | None = None

    def __post_init__(self) -> None:
        self._devices = {simulated_uuid(device.index): device for device in self.devices}
        self._read_at_s = dict.fromkeys(self._devices, self._now_s())
        self.why = f"simulated devices were requested: {len(self.devices)}"

    def inventory(self) -> Sequence[InventoryDevice]:
        """List all devices, including lost ones."""
        return [
            InventoryDevice(
                index=device.index,
                uuid=uuid,
                name=device.name,
                backend=self.backend,
                memory_total_bytes=device.memory_total_mib * 2**20,
                power_limit_w=LIMIT_W,
                slowdown_c=device.slowdown_c,
            )
            for uuid, device in self._devices.items()
        ]

    def read(self, uuid: str) -> Reading:
        device = self._devices.get(uuid)
        if device is None:
            raise DeviceUnreadable(f"no simulated device {uuid}")
        at_s = self._now_s()
        if device.lost_at_s is not None and device.lost_at_s <= at_s < (device.back_at_s or inf):
            raise DeviceUnreadable("GPU is lost (simulated)")
        since_s = self._read_at_s[uuid]
        self._read_at_s[uuid] = at_s
        reading = reading_at(device, at_s)
        reading.faults = tuple(text for fault_s, text in device.fault if since_s <= fault_s < at_s)
        if self.ledger is not None and reading.memory_used_bytes is not None:
            reading.memory_used_bytes = simulated_memory_bytes(self.ledger, uuid)
        return reading

    def _now_s(self) -> float:
        return max(0, self.clock.now_ms() - self.started_at_ms) / 1000


def simulated_uuid(index: int) -> str:
    """Return the UUID of the device with this index, the same on each machine."""
    return f"GPU-51a0d000-0000-4000-8000-{index:012d}"


def reading_at(device: SimulatedDevice, at_s: float) -> Reading:
    """Return a reading with all metrics derived from the load; unsupported ones are None."""
    load = load_at(device, at_s)
    temperature_c = step_at(device.temperature_c or (), at_s)
    if temperature_c is None:
        temperature_c = 35 + 0.45 * load
    fan_percent = step_at(device.fan_percent or (), at_s)
    reading = Reading(
        utilization_percent=round(load),
        memory_utilization_percent=round(load / 2),
        memory_used_bytes=round(device.memory_total_mib * 2**20 * (0.05 + 0.005 * load)),
        temperature_c=round(temperature_c),
        power_w=IDLE_W + (FULL_W - IDLE_W) * load / 100,
        energy_j=IDLE_W * at_s + (FULL_W - IDLE_W) * load_integral(device, at_s) / 100,
        sm_clock_mhz=round(345 + 16 * load),
        memory_clock_mhz=1593 if load else 405,
        throttle_reasons=0 if load else _GPU_IDLE,
        sm_activity_percent=0.9 * load,
        sm_occupancy_percent=0.5 * load,
        busy_percent=float(load),
        pcie_rx_bytes_per_s=round(_PCIE_BYTES_PER_S * load / 100),
        pcie_tx_bytes_per_s=round(_PCIE_BYTES_PER_S * load / 1000),
        fan_percent=None if fan_percent is None else round(fan_percent),
        missing=dict.fromkeys(device.unsupported, "Not Supported (simulated)"),
        sources={"busy_percent": "simulated"},
    )
    if device.processes is not None:
        reading.processes = tuple(ProcessReading(pid, mib * 2**20) for pid, mib in device.processes)
    for metric in device.unsupported:
        setattr(reading, metric, None)
    return reading


def load_at(device: SimulatedDevice, at_s: float) -> float:
    """Return the load in percent: a step of the script, or the sine wave."""
    if device.load is None:
        return _WAVE_MEAN + _WAVE_SWING * sin(_WAVE_RAD_PER_S * at_s + device.index)
    return step_at(device.load, at_s) or 0.0


def step_at(course: Course, at_s: float) -> float | None:
    """Return the value of the last step that has begun; None: none has."""
    return next((value for from_s, value in reversed(course) if from_s <= at_s), None)


def load_integral(device: SimulatedDevice, at_s: float) -> float:
    """Return the integral of ``load_at`` from 0 to ``at_s``, in percent·seconds, without summing samples."""
    if device.load is None:
        swing = (cos(device.index) - cos(_WAVE_RAD_PER_S * at_s + device.index)) / _WAVE_RAD_PER_S
        return _WAVE_MEAN * at_s + _WAVE_SWING * swing
    past = [(from_s, percent) for from_s, percent in device.load if from_s < at_s]
    return sum(percent * (until_s - from_s) for (from_s, percent), (until_s, _) in pairwise([*past, (at_s, 0.0)]))


# --- a recording, replayed as if it were read now; it starts with the run, and repeats when it ends -------------------

_DEVICE = ("name", "memory_total_bytes", "power_limit_w", "pci_bus_id", "driver", "slowdown_c", "vendor", "parent_uuid")
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
_SOURCES = "SELECT metric, source FROM metric_source WHERE device_id = ? AND from_ms <= ? ORDER BY from_ms"
# A gap without a device is a gap of the recorder, and so of all devices.
_DEVICE_GAP = """
SELECT from_ms, reason FROM gap
WHERE (device_id = ? OR device_id IS NULL) AND metric IS NULL AND from_ms <= ? ORDER BY from_ms DESC LIMIT 1
"""
_METRIC_GAPS = "SELECT metric, reason FROM gap WHERE device_id = ? AND metric NOT NULL AND ? BETWEEN from_ms AND to_ms"
_EXTENT = """
SELECT min(from_ms), max(to_ms) FROM (
    SELECT at_ms AS from_ms, at_ms AS to_ms FROM sample
    UNION ALL SELECT from_ms, to_ms FROM gap WHERE metric IS NULL
)
"""
_MOST_SAMPLES = """
SELECT count(*), min(at_ms), max(at_ms) FROM sample GROUP BY device_id ORDER BY 1 DESC, 2 DESC, 3 DESC LIMIT 1
"""
_LONGEST_SILENCE_MS = 5000


class ReplayReader(GpuReader):
    """Reads the devices of a recording; raises BadInput for any other file."""

    backend = "replay"

    def __init__(self, path: Path, *, clock: Clock, started_at_ms: int) -> None:
        self._clock = clock
        self._started_at_ms = started_at_ms
        try:
            path.stat()
            uri = f"file:{quote(os.fsencode(path.absolute()))}?mode=ro&immutable=1"  # without a lock
            self._db = sqlite3.connect(uri, uri=True, isolation_level=None, check_same_thread=False)
            self._load(path)
        except OSError as error:
            fix = "--simulate 2, or a file: a simulation script (.toml) or a task database"
            raise BadInput(f"the recording {path} cannot be read", why=error.strerror, fix=fix) from error
        except sqlite3.Error as error:
            raise BadInput(f"{path} is not a task database", why=str(error), fix=_MAKE_ONE) from error
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
            return self._read_at(self._ids[uuid], self._begin_ms + elapsed_ms % self._length_ms)
        except sqlite3.Error as error:
            raise DeviceUnreadable(f"the recording cannot be read: {error}") from error

    def close(self) -> None:
        """Close the recording; its devices can still be listed, but no longer read."""
        self._db.close()

    def _read_at(self, device_id: int, at_ms: int) -> Reading:
        sample = self._db.execute(_SAMPLE, (device_id, at_ms)).fetchone()
        sample_ms, *numbers = sample or (-inf,)
        gap = self._db.execute(_DEVICE_GAP, (device_id, at_ms)).fetchone()  # the last one that has begun, over or not
        if gap is not None and sample_ms <= gap[0] and sample_ms != at_ms:
            raise DeviceUnreadable(gap[1])
        if at_ms - sample_ms > max(3 * self._step_ms, _LONGEST_SILENCE_MS):
            raise DeviceUnreadable("the recording has no sample at this time")

        values = dict(zip(METRICS, numbers, strict=True))
        gaps = self._db.execute(_METRIC_GAPS, (device_id, sample_ms))
        sources = self._db.execute(_SOURCES, (device_id, sample_ms))
        processes = self._db.execute(_PROCESSES, (device_id, sample_ms))
        return Reading(
            **values,
            missing={metric: reason for metric, reason in gaps if metric in values and values[metric] is None},
            sources={metric: source for metric, source in sources if metric in values},
            processes=tuple(ProcessReading(*row) for row in processes) or None,  # None: the processes were not listed
        )

    def _load(self, path: Path) -> None:
        """Check that this is a recording, and load its devices and its extent."""
        if self._db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'source_file'").fetchone() != (0,):
            raise BadInput(
                f"{path} is a job database, which cannot be replayed",
                why="its devices are those of many tasks, at different times",
                fix=f"--simulate {path.parent / 'tasks'}/…   (one of the task databases it was made of)",
            )
        self._db.executescript(_INDEX)
        self._load_devices()

        most_samples = self._db.execute(_MOST_SAMPLES).fetchone()
        if most_samples is None:
            raise BadInput(
                f"the recording {path} has no sample of any device",
                why="it was recorded without a GPU, or with telemetry off",
                fix=_MAKE_ONE,
            )
        samples, first_ms, last_ms = most_samples
        self._step_ms = 1000  # the usual interval
        if samples > 1:
            self._step_ms = max(1, (last_ms - first_ms) // (samples - 1))
        self._begin_ms, end_ms = self._db.execute(_EXTENT).fetchone()
        self._length_ms = end_ms - self._begin_ms + self._step_ms

    def _load_devices(self) -> None:
        """Load the ids of the devices by UUID, and the devices: cards by index, each followed by its slices."""
        self._ids: dict[str, int] = {}
        self._inventory: list[InventoryDevice] = []
        rows = self._db.execute(
            f"SELECT device_id, uuid, device_index, {', '.join(_DEVICE)} FROM device WHERE uuid NOT NULL"
            " ORDER BY device_index, parent_uuid NOT NULL, token"
        )
        for position, (device_id, uuid, *columns) in enumerate(rows):
            recorded = dict(zip(("index", *_DEVICE), columns, strict=True))
            facts = {"name": "GPU", "index": position, **known_values(recorded)}
            self._ids[uuid] = device_id
            self._inventory.append(InventoryDevice(uuid=uuid, backend=self.backend, **facts))
