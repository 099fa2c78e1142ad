"""What the recorder writes in addition to samples: processes, sources of metrics, its cost, the latest readings.

It reads /proc directly instead of importing psutil, because the recorder's process must stay small."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from badcjobs.model import METRICS, HostReading, ProcessReading, not_none
from badcjobs.paths import LocalFolder, user_name
from badcjobs.seams import GpuReader
from badcjobs.telemetry.recorder import Book, Effort, Readings, TelemetryWriter, Unreadable

# The inode of the machine's initial PID namespace; in any other one, the driver's process ids are not those seen here.
_HOST_NAMESPACE = "pid:[4026531836]"
_GONE_MS = 60_000  # after this time, the same process id is another process
# In the environment of a recorded command. Not the mark of workers: those are ended if their wrapper is killed.
RECORDING_MARK = "BADCJOBS_RECORDING"
_COST_EVERY_MS = 10_000
_LATEST_KEPT_MS = 3_000
_WATCHED_MS = 15_000  # after the last look
_LATEST_EVERY_MS = 900  # every second, with some tolerance for an early sample


# --- processes --------------------------------------------------------------------------------------------------------


class ProcessOwner(NamedTuple):
    """Name and owner of a process; None: not visible from here."""

    name: str | None = None
    user: str | None = None
    ours: bool | None = None


@dataclass(frozen=True)
class ProcessLookup:
    """Finds our own processes: they have a mark (NAME=VALUE) in their environment, or descend from the wrapper."""

    wrapper_pid: int
    marks: Sequence[str]
    proc: Path = Path("/proc")

    def look_up(self, pid: int) -> ProcessOwner:
        """Return name and owner of a process; all unknown if it is not visible here."""
        status = self._status(pid)
        if not status:
            return ProcessOwner()
        uid = int(status["Uid"].split()[0])
        is_marked = self._is_marked(pid)
        ours: bool | None = False
        if is_marked or self._descends(pid, status):
            ours = True
        elif not self._sees_host():  # in a container: the process id may belong to another process
            return ProcessOwner()
        elif is_marked is None and uid == os.getuid():
            ours = None
        return ProcessOwner(status["Name"].strip(), user_name(uid), ours)

    def _sees_host(self) -> bool:
        try:
            return str((self.proc / "self/ns/pid").readlink()) == _HOST_NAMESPACE
        except OSError:
            return True

    def _status(self, pid: int) -> Mapping[str, str]:
        try:
            return parse_status((self.proc / str(pid) / "status").read_text(errors="replace"))
        except OSError:
            return {}

    def _is_marked(self, pid: int) -> bool | None:
        """Return whether it has a mark; None: its environment is not readable, or empty."""
        try:
            environ = (self.proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None
        variables = environ.split(b"\0")
        return any(mark.encode() in variables for mark in self.marks) if environ else None

    def _descends(self, pid: int, status: Mapping[str, str]) -> bool:
        while pid != self.wrapper_pid and pid > 1:
            pid = int(status.get("PPid", 0))
            status = self._status(pid)
            if self._is_marked(pid):  # a daemon of ours may give its server another environment
                return True
        return pid == self.wrapper_pid


def parse_status(text: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    pairs = (line.partition(":") for line in text.splitlines())
    return {name: value for name, _, value in pairs}


@dataclass
class ProcessBook(Book):
    """Records the processes on a task's devices; each is looked up once per device."""

    writer: TelemetryWriter
    look_up: Callable[[int], ProcessOwner]
    _rows: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)  # by device and pid

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the processes of one sample; most samples do not include them."""
        # Keeps memory small if every chunk has its own process.
        self._rows = {place: row for place, row in self._rows.items() if at_ms - row["last_at_ms"] <= _GONE_MS}
        samples = []
        for device_id, reading in readings:
            for process in reading.processes or ():
                self._update(at_ms, device_id, process)
                samples.append((device_id, at_ms, process.pid, process.memory_used_bytes, process.sm_percent))
        self.writer.write_process_samples(samples)

    def _update(self, at_ms: int, device_id: int, process: ProcessReading) -> None:
        row = self._rows.get((device_id, process.pid))
        if row is None:
            owner = self.look_up(process.pid)._asdict()
            row = {"device_id": device_id, "pid": process.pid, **owner, "first_at_ms": at_ms}
            self._rows[device_id, process.pid] = row
        row["last_at_ms"] = at_ms
        bytes_so_far = not_none([row.get("memory_peak_bytes"), process.memory_used_bytes])
        row["memory_peak_bytes"] = max(bytes_so_far, default=None)
        self.writer.put("process", row)


# --- sources ----------------------------------------------------------------------------------------------------------


@dataclass
class SourceBook(Book):
    """Writes the source of each metric of each device, when it changes."""

    writer: TelemetryWriter
    _written: dict[tuple[int, str], str] = field(default_factory=dict)  # by device and metric
    _latest: dict[tuple[int, str], str] = field(default_factory=dict)  # in the last sample, perhaps not on disk yet

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the sources that are new in these readings."""
        self._latest = {}
        for device_id, reading in readings:
            for metric, source in reading.sources.items():
                self._latest[device_id, metric] = source
                if self._written.get((device_id, metric)) != source:
                    row = {"device_id": device_id, "metric": metric, "source": source, "from_ms": at_ms}
                    self.writer.put("metric_source", row)

    def written(self) -> None:
        """Remember the sources that are on disk."""
        self._written |= self._latest


# --- the latest readings ----------------------------------------------------------------------------------------------


@dataclass
class LatestBook(Book):
    """Writes the last reading of each device to a small file, every second: monitor and serve on this machine read it.

    A metric that was not read this time keeps its last value for a few seconds. ``watched`` of the reader says whether
    the file is read.
    """

    folder: LocalFolder
    reader: GpuReader
    _values: dict[int, dict[str, tuple[int, object]]] = field(default_factory=dict)  # device → metric → (time, value)
    _next_ms: int = 0

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the file if a second has passed; on a full disk the old one stays."""
        for device_id, reading in readings:
            values = self._values.setdefault(device_id, {})
            for metric in METRICS:
                value = getattr(reading, metric)
                if value is not None:
                    values[metric] = (at_ms, value)
        if at_ms < self._next_ms:
            return
        self._next_ms = at_ms + _LATEST_EVERY_MS
        self.reader.watched = False
        with suppress(OSError):
            self.reader.watched = at_ms - self.folder.watched_file.stat().st_mtime * 1000 < _WATCHED_MS
        devices = {}
        for device_id in self._values.keys() - unreadable.keys():
            recent = [(metric, *reading) for metric, reading in self._values[device_id].items()]
            devices[device_id] = {metric: value for metric, ms, value in recent if at_ms - ms <= _LATEST_KEPT_MS}
        new_file = self.folder.latest_file.with_suffix(".new")
        with suppress(OSError):
            new_file.write_text(json.dumps({"at_ms": at_ms, "devices": devices}))
            new_file.replace(self.folder.latest_file)


# --- the recorder's own cost ------------------------------------------------------------------------------------------

Use = tuple[float, int]  # seconds of CPU, and the peak memory in bytes


def read_own_use() -> Use:
    """Return the CPU time and the peak memory of this process.

    The memory is not from getrusage, which includes the program that started this one.
    """
    peak_kib = parse_status(Path("/proc/self/status").read_text())["VmHWM"].split()[0]
    return time.process_time(), int(peak_kib) * 1024


@dataclass
class CostBook(Book):
    """Updates the recorder's row every ten seconds, and at the end."""

    writer: TelemetryWriter
    interval_s: float
    started_at_ms: int
    backend: Callable[[], tuple[str, str]]  # what reads the devices, and why
    use: Callable[[], Use] = read_own_use
    effort: Effort = field(default_factory=Effort)  # the recorder adds to it
    _at_ms: int = 0
    _next_ms: int = 0

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the row if ten seconds have passed."""
        self._at_ms = at_ms
        if at_ms >= self._next_ms:
            self._next_ms = at_ms + _COST_EVERY_MS
            self.finish()

    def finish(self) -> None:
        """Write the row now."""
        cpu_s, memory_bytes = self.use()
        backend, why = self.backend()
        row = {
            "pid": os.getpid(),
            "backend": backend,
            "why": why,
            "interval_s": self.interval_s,
            "started_at_ms": self.started_at_ms,
            "last_at_ms": self._at_ms,
            "cpu_s": cpu_s,
            "memory_bytes": memory_bytes,
        }
        self.writer.put("recorder", row | asdict(self.effort))

    @property
    def text(self) -> str:
        """The cost so far, as text for the task's log."""
        cpu_s, memory_bytes = self.use()
        lived_s = max(1, self._at_ms - self.started_at_ms) / 1000
        return (
            f"{self.effort.ticks} samples with {self.backend()[0]} in {lived_s:.0f} s; {cpu_s:.2f} s of CPU"
            f" ({100 * cpu_s / lived_s:.2f} % of a core), {memory_bytes / 2**20:.0f} MiB,"
            f" at most {self.effort.worst_late_s:.3f} s late"
        )


@dataclass
class HostReader:
    """Reads the CPU use of the machine since the last reading, and its memory now."""

    proc: Path = Path("/proc")
    _before: tuple[int, int] | None = None  # ticks of the CPUs: busy, all

    def read(self) -> HostReading | None:
        """Return the reading; None: /proc cannot be read."""
        try:
            # user nice system idle iowait irq softirq steal; guest time is part of user.
            first_line = (self.proc / "stat").read_text().partition("\n")[0]
            ticks = [int(word) for word in first_line.split()[1:9]]
            all_ticks = sum(ticks)
            busy_ticks = all_ticks - ticks[3] - ticks[4]  # waiting for a disk is not busy
            used_bytes, total_bytes = parse_memory((self.proc / "meminfo").read_text())
        except (OSError, ValueError, KeyError, IndexError):
            return None
        busy_before, all_before = self._before or (busy_ticks, all_ticks)
        self._before = (busy_ticks, all_ticks)
        busy_percent = None  # no earlier reading, or no time has passed
        if all_ticks > all_before:
            share = (busy_ticks - busy_before) / (all_ticks - all_before)
            busy_percent = min(100.0, max(0.0, round(100 * share, 1)))
        return HostReading(busy_percent, used_bytes, total_bytes)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Return (used, total) bytes, from /proc/meminfo; reclaimable memory is not used."""
    fields = parse_status(meminfo)
    total_bytes, available_bytes = (int(fields[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total_bytes - available_bytes, total_bytes
