"""Reads the machine around the devices: CPU and memory."""

from __future__ import annotations

import psutil

from badcjobs.model import HostReading


class HostReader:
    """CPU share since the last reading, and memory now."""

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)  # the first answer has nothing to compare with: throw it away

    def read(self) -> HostReading | None:
        """Return the reading; None where the machine does not say."""
        try:
            memory = psutil.virtual_memory()
            return HostReading(psutil.cpu_percent(interval=None), memory.total - memory.available, memory.total)
        except (OSError, psutil.Error, RuntimeError):
            return None
