"""Finds out from /proc who a process on a device is: its name, its user, and whether it is one of ours."""

from __future__ import annotations

import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# The inode of the machine's own PID namespace; in any other, the numbers that a driver tells are not those seen here.
_HOST_NAMESPACE = "pid:[4026531836]"
_MOST_ANCESTORS = 100
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
