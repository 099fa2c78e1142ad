"""Finds every process of an emulated task and sends signals to all of them, as Slurm does.

A process belongs to a task if it carries the task's mark, is in its session, or descends from one that is. A nested
emulation adds its own mark behind the outer one, so whoever ends the outer task reaches the inner ones too.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable

import psutil

MARK = "BADCJOBS_EMULATION"


def processes_of(mark: str, session: int | None = None) -> list[psutil.Process]:
    """Return the living processes with this mark, or of this session, and whatever they have started."""
    parents: dict[int, int] = {}
    found: dict[int, psutil.Process] = {}
    everybody = {process.pid: process for process in psutil.process_iter(["ppid"])}
    for pid, process in everybody.items():
        parents[pid] = process.info["ppid"] or 0
        if _has_mark(process, mark) or (session is not None and _session_of(pid) == session):
            found[pid] = process
    for pid, process in everybody.items():
        if pid not in found and any(one in found for one in _ancestors(pid, parents)):
            found[pid] = process
    found.pop(os.getpid(), None)
    return [process for process in found.values() if _lives(process)]


def send(processes: Iterable[psutil.Process], *signums: signal.Signals) -> None:
    """Send signals to processes that may have ended."""
    for process in processes:
        for signum in signums:
            try:
                process.send_signal(signum)
            except (psutil.Error, OSError):
                break  # gone meanwhile


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        value = process.environ().get(MARK, "")
    except (psutil.Error, OSError):
        return False  # gone meanwhile, or somebody else's
    return value == mark or value.startswith(f"{mark}/")


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _ancestors(pid: int, parents: dict[int, int]) -> Iterable[int]:
    seen = {pid}
    while (pid := parents.get(pid, 0)) and pid not in seen:
        seen.add(pid)
        yield pid


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False
