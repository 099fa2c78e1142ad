"""Writes down which processes are on which device: a row each, and how much they use at every instant known."""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from badcjobs.model import ProcessReading, Reading
from badcjobs.store.telemetry_writer import TelemetryWriter
from badcjobs.telemetry.recorder import Book

# The inode of the machine's own PID namespace; in any other, the numbers that a driver tells are not those seen here.
_HOST_NAMESPACE = "pid:[4026531836]"
_MOST_ANCESTORS = 100
_GONE_MS = 60_000  # one that comes back after so long is another one with the same number
# What a command that is only recorded carries. Not the mark of workers: those are ended when their wrapper was killed.
RECORDING_MARK = "BADCJOBS_RECORDING"


@dataclass(frozen=True, slots=True)
class Who:
    """What is known about a process; None: not to be seen from here."""

    name: str | None = None
    user: str | None = None
    ours: bool | None = None


class ProcessLookup:
    """Tells our processes from others: they carry a mark (NAME=VALUE) in their environment, or descend from us."""

    def __init__(self, *, wrapper_pid: int, marks: Sequence[str], proc: Path = Path("/proc")) -> None:
        self._wrapper_pid = wrapper_pid
        self._marks = {mark.encode() for mark in marks}
        self._proc = proc
        self._uid = os.getuid()

    def look_up(self, pid: int) -> Who:
        """Return who this is; a process that does not exist here is nobody, and whose it is cannot be told."""
        folder = self._proc / str(pid)
        try:
            name = (folder / "comm").read_text(errors="replace").strip()
            uid = _uid_of(folder)
        except (OSError, ValueError):
            return Who()
        marked = self._is_marked(folder)
        if marked or self._descends(pid):
            return Who(name, _user_name(uid), True)
        # In a container the number may be that of another process: accuse nobody.
        if not self._sees_the_host():
            return Who()
        return Who(name, _user_name(uid), None if marked is None and uid == self._uid else False)

    def _is_marked(self, folder: Path) -> bool | None:
        """Return whether it carries a mark; None: its environment is not to be seen, or was emptied."""
        try:
            found = (folder / "environ").read_bytes()
        except OSError:
            return None
        return not self._marks.isdisjoint(found.split(b"\0")) if found else None

    def _descends(self, pid: int) -> bool:
        for _ in range(_MOST_ANCESTORS):
            if pid == self._wrapper_pid:
                return True
            parent = self._parent_of(pid)
            if parent is None or parent <= 1:
                return False
            pid = parent
        return False

    def _parent_of(self, pid: int) -> int | None:
        try:
            return parse_parent((self._proc / str(pid) / "stat").read_text(errors="replace"))
        except (OSError, ValueError, IndexError):
            return None

    def _sees_the_host(self) -> bool:
        try:
            return str((self._proc / "self/ns/pid").readlink()) == _HOST_NAMESPACE
        except OSError:
            return True


def parse_parent(stat: str) -> int:
    """Return the parent's id, from /proc/PID/stat; a program's name may hold blanks and brackets."""
    return int(stat.rpartition(")")[2].split()[1])


def _uid_of(folder: Path) -> int:
    """Return whose process it is; the folder of one that hides its memory belongs to root, its status tells."""
    try:
        lines = (folder / "status").read_text(errors="replace").splitlines()
    except OSError:
        return folder.stat().st_uid
    return next((int(line.split()[1]) for line in lines if line.startswith("Uid:")), folder.stat().st_uid)


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


class ProcessBook(Book):
    """Follows the processes on a task's devices; each is looked up once."""

    def __init__(self, writer: TelemetryWriter, look_up: Callable[[int], Who]) -> None:
        self._writer = writer
        self._look_up = look_up
        self._rows: dict[tuple[int, int], dict[str, Any]] = {}  # by device and pid

    def resume(self) -> None:
        """Go on with the rows of a recorder that died."""
        for row in self._writer.last_processes():
            self._rows[row["device_id"], row["pid"]] = row  # type: ignore[index]

    def write(self, at_ms: int, readings: Sequence[tuple[int, Reading]], unreadable: Mapping[int, str]) -> None:
        """Write the processes of one instant; most instants do not ask for them."""
        seen = [(device_id, process) for device_id, reading in readings for process in reading.processes or ()]
        if seen:  # memory stays small where every chunk is a process of its own
            self._rows = {place: row for place, row in self._rows.items() if at_ms - row["last_at_ms"] <= _GONE_MS}
        for device_id, process in seen:
            self._write_one(at_ms, device_id, process)
        self._writer.write_process_samples(
            [(device_id, at_ms, p.pid, p.memory_used_bytes, p.sm_percent) for device_id, p in seen]
        )

    def _write_one(self, at_ms: int, device_id: int, process: ProcessReading) -> None:
        row = self._rows.get((device_id, process.pid))
        if row is None:
            who = self._who(process.pid)
            row = self._rows[device_id, process.pid] = {
                "device_id": device_id, "pid": process.pid, **who, "first_at_ms": at_ms, "memory_peak_bytes": None
            }  # fmt: skip
        row["last_at_ms"] = at_ms
        if process.memory_used_bytes is not None:
            row["memory_peak_bytes"] = max(row["memory_peak_bytes"] or 0, process.memory_used_bytes)
        self._writer.write_process(row)

    def _who(self, pid: int) -> dict[str, object]:
        """Look a process up once for all devices: it may use several."""
        for (_, other), row in self._rows.items():
            if other == pid:
                return {name: row[name] for name in ("name", "user", "ours")}
        who = self._look_up(pid)
        return {"name": who.name, "user": who.user, "ours": None if who.ours is None else int(who.ours)}
