"""Names the processes that a device tells of: whose they are, which program. Leaves their memory to the reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from badcjobs.model import ProcessReading


@dataclass(frozen=True, slots=True)
class DeviceProcess:
    """A process on a device; None: nobody told, or it is not to be seen from here."""

    pid: int
    user: str | None
    program: str | None
    memory_used_bytes: int | None


def name_processes(readings: Sequence[ProcessReading]) -> tuple[DeviceProcess, ...]:
    """Return the processes with their names; pids are the host's, so inside a container they may be nobody's."""
    return tuple(DeviceProcess(r.pid, *_who(r.pid), r.memory_used_bytes) for r in readings)


def _who(pid: int) -> tuple[str | None, str | None]:
    import psutil  # for the few who ask for processes

    try:
        process = psutil.Process(pid)
        return process.username(), process.name()
    except (psutil.Error, OSError, ValueError):  # gone, in another namespace, or no pid at all
        return None, None
