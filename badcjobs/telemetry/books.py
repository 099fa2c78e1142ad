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

from badcjobs.model import METRICS, HostReading
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
_WORTH_A_SHARE_S = 10.0  # in a shorter time the start is nearly all of the cost


# --- processes --------------------------------------------------------------------------------------------------------


class ProcessOwner(NamedTuple):
    """Name and owner of a process; None: not visible from here."""

    name: str | None = None
    user: str | None = None
    ours: bool | None = None


def process_words(pid: int, program: str | None, user: str | None) -> str:
    """Return a process in words, as far as it is known."""
    return f"{program or 'process'} {pid}{f' of {user}' if user else ''}"


class ProcessLookup:
    """Finds our own processes: they have a mark (NAME=VALUE) in their environment, or descend from the wrapper."""

    def __init__(self, *, wrapper_pid: int, marks: Sequence[str], proc: Path = Path("/proc")) -> None:
        self._wrapper_pid = wrapper_pid
        self._marks = {mark.encode() for mark in marks}
        self._proc = proc

    def look_up(self, pid: int) -> ProcessOwner:
        """Return name and owner of a process; all unknown if it is not visible here."""
        status = self._status(pid)
        if not status:
            return ProcessOwner()
        name = status["Name"].strip()
        uid = int(status["Uid"].split()[0])
        user = user_name(uid)
        marked = self._is_marked(pid)
        if marked or self._descends(pid, status):
            return ProcessOwner(name, user, True)
        try:
            sees_the_host = str((self._proc / "self/ns/pid").readlink()) == _HOST_NAMESPACE
        except OSError:
            sees_the_host = True
        if not sees_the_host:  # in a container: the process id may belong to another process
            return ProcessOwner()
        return ProcessOwner(name, user, None if marked is None and uid == os.getuid() else False)

    def describe(self, pid: int) -> str:
        """Return a process in words."""
        owner = self.look_up(pid)
        return process_words(pid, owner.name, owner.user)

    def _status(self, pid: int) -> Mapping[str, str]:
        try:
            return parse_status((self._proc / str(pid) / "status").read_text(errors="replace"))
        except OSError:
            return {}

    def _is_marked(self, pid: int) -> bool | None:
        """Return whether it has a mark; None: its environment is not readable, or empty."""
        try:
            found = (self._proc / str(pid) / "environ").read_bytes()
        except OSError:
            return None
        return not self._marks.isdisjoint(found.split(b"\0")) if found else None

    def _descends(self, pid: int, status: Mapping[str, str]) -> bool:
        while pid != self._wrapper_pid and pid > 1:
            pid = int(status.get("PPid", 0))
            status = self._status(pid)
            if self._is_marked(pid):  # a daemon of ours may give its server another environment
                return True
        return pid == self._wrapper_pid


def parse_status(text: str) -> dict[str, str]:
    """Return the fields of /proc/PID/status."""
    return {name: value for name, _, value in (line.partition(":") for line in text.splitlines())}


class ProcessBook(Book):
    """Records the processes on a task's devices; each is looked up once."""

    def __init__(self, writer: TelemetryWriter, look_up: Callable[[int], ProcessOwner]) -> None:
        self._writer = writer
        self._look_up = look_up
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}  # by device and pid

    def resume(self) -> None:
        """Continue the rows of a recorder that died."""
        for row in self._writer.rows_of("process", "ORDER BY first_at_ms"):
            self._rows[row["device_id"], row["pid"]] = row

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the processes of one sample; most samples do not include them."""
        seen = [(device_id, process) for device_id, reading in readings for process in reading.processes or ()]
        if seen:  # keeps memory small if every chunk has its own process
            self._rows = {place: row for place, row in self._rows.items() if at_ms - row["last_at_ms"] <= _GONE_MS}
        for device_id, process in seen:
            row = self._rows.get((device_id, process.pid))
            if row is None:
                same = next((one for (_, pid), one in self._rows.items() if pid == process.pid), None)
                if same is None:  # a process is looked up once for all devices that it uses
                    looked_up = self._look_up(process.pid)
                    same = {**looked_up._asdict(), "ours": None if looked_up.ours is None else int(looked_up.ours)}
                owner = {name: same[name] for name in ProcessOwner._fields}
                row = {"device_id": device_id, "pid": process.pid, **owner, "first_at_ms": at_ms}
                self._rows[device_id, process.pid] = row
            row["last_at_ms"] = at_ms
            known = [row.get("memory_peak_bytes"), process.memory_used_bytes]
            row["memory_peak_bytes"] = max((value for value in known if value is not None), default=None)
            self._writer.put("process", row)
        self._writer.write_process_samples(
            [(device_id, at_ms, p.pid, p.memory_used_bytes, p.sm_percent) for device_id, p in seen]
        )


# --- sources ----------------------------------------------------------------------------------------------------------


class SourceBook(Book):
    """Writes the source of each metric of each device, when it changes."""

    def __init__(self, writer: TelemetryWriter) -> None:
        self._writer = writer
        self._written: dict[tuple[int, str], str] = {}
        self._news: dict[tuple[int, str], str] = {}  # not on disk yet

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the sources that are new in these readings."""
        self._news.clear()
        for device_id, reading in readings:
            for metric, source in reading.sources.items():
                if self._written.get((device_id, metric)) != source:
                    row = {"device_id": device_id, "metric": metric, "source": source, "from_ms": at_ms}
                    self._writer.put("metric_source", row)
                    self._news[device_id, metric] = source

    def written(self) -> None:
        """Remember the sources that are on disk."""
        self._written.update(self._news)
        self._news.clear()


# --- the latest readings ----------------------------------------------------------------------------------------------


class LatestBook(Book):
    """Writes the last reading of each device to a small file, every second: monitor and serve on this machine read it.

    A metric that was not read this time keeps its last value for a few seconds. ``watched`` of the reader says whether
    the file is read.
    """

    def __init__(self, folder: LocalFolder, reader: GpuReader) -> None:
        self._path, self._watched_file, self._reader = folder.latest_file, folder.watched_file, reader
        self._known: dict[int, dict[str, tuple[int, object]]] = {}  # device → metric → (time, value)
        self._next_ms = 0

    def write(self, at_ms: int, readings: Readings, unreadable: Unreadable) -> None:
        """Write the file if a second has passed; on a full disk the old one stays."""
        for device_id, reading in readings:
            known = self._known.setdefault(device_id, {})
            for metric in METRICS:
                if (value := getattr(reading, metric)) is not None:
                    known[metric] = (at_ms, value)
        if at_ms < self._next_ms:
            return
        self._next_ms = at_ms + _LATEST_EVERY_MS
        self._reader.watched = False
        with suppress(OSError):
            self._reader.watched = at_ms - self._watched_file.stat().st_mtime * 1000 < _WATCHED_MS
        devices = {
            device_id: {metric: value for metric, (was_ms, value) in known.items() if at_ms - was_ms <= _LATEST_KEPT_MS}
            for device_id, known in self._known.items()
            if device_id not in unreadable
        }
        new = self._path.with_suffix(".new")
        with suppress(OSError):
            new.write_text(json.dumps({"at_ms": at_ms, "devices": devices}))
            new.replace(self._path)


# --- the recorder's own cost ------------------------------------------------------------------------------------------

Use = tuple[float, int | None]  # seconds of CPU, and the peak memory in bytes (None: not known)


def read_own_use() -> Use:
    """Return the CPU time and the peak memory of this process.

    The memory is not from getrusage, which includes the program that started this one.
    """
    peak = parse_status(Path("/proc/self/status").read_text()).get("VmHWM")
    return time.process_time(), None if peak is None else int(peak.split()[0]) * 1024


@dataclass(slots=True)
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
        (cpu_s, memory_bytes), (backend, why) = self.use(), self.backend()
        self.writer.put(
            "recorder",
            {
                "pid": os.getpid(), "backend": backend, "why": why, "interval_s": self.interval_s,
                "started_at_ms": self.started_at_ms, "last_at_ms": self._at_ms,
                "cpu_s": cpu_s, "memory_bytes": memory_bytes, **asdict(self.effort),
            }
        )  # fmt: skip

    @property
    def text(self) -> str:
        """The cost so far, as text for the task's log."""
        effort, (cpu_s, memory_bytes) = self.effort, self.use()
        lived_s = max(0, self._at_ms - self.started_at_ms) / 1000
        share = f" ({100 * cpu_s / lived_s:.2f} % of a core)" if lived_s >= _WORTH_A_SHARE_S else ""
        memory = "?" if memory_bytes is None else f"{memory_bytes / 2**20:.0f}"
        return (
            f"{effort.ticks} sample{'' if effort.ticks == 1 else 's'} with {self.backend()[0]} in {lived_s:.0f} s;"
            f" {cpu_s:.2f} s of CPU{share}, {memory} MiB, at most {effort.worst_late_s:.3f} s late"
        )


class HostReader:
    """Reads the CPU use of the machine since the last reading, and its memory now."""

    def __init__(self, proc: Path = Path("/proc")) -> None:
        self._proc = proc
        self._before: tuple[int, int] | None = None

    def read(self) -> HostReading | None:
        """Return the reading; None: /proc cannot be read."""
        try:
            # user nice system idle iowait irq softirq steal; guest time is part of user.
            ticks = [int(word) for word in (self._proc / "stat").read_text().partition("\n")[0].split()[1:9]]
            now = sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # busy, all; waiting for a disk is not busy
            used_bytes, total_bytes = parse_memory((self._proc / "meminfo").read_text())
        except (OSError, ValueError, KeyError, IndexError):
            return None
        before, self._before = self._before, now
        busy_percent = None  # no earlier reading, or no time has passed
        if before is not None and now[1] > before[1]:
            busy_percent = min(100.0, max(0.0, round(100 * (now[0] - before[0]) / (now[1] - before[1]), 1)))
        return HostReading(busy_percent, used_bytes, total_bytes)


def parse_memory(meminfo: str) -> tuple[int, int]:
    """Return (used, total) bytes, from /proc/meminfo; reclaimable memory is not used."""
    found = parse_status(meminfo)
    total, available = (int(found[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    return total - available, total
