"""Reads the machine around the devices: CPU and memory."""

from __future__ import annotations

import psutil

from badcjobs.model import HostReading


class HostReader:
    """CPU share since the last reading, and memory now."""

    def __init__(self) -> None:
        psutil.cpu_percent(interval=None)
        self._has_history = False

    def read(self) -> HostReading | None:
        """Return the reading; None where the machine does not say."""
        try:
            memory = psutil.virtual_memory()
            cpu_percent = psutil.cpu_percent(interval=None)
            # A share is a difference of two moments: the first answer, a 0.0, means nothing.
            known_percent = cpu_percent if self._has_history else None
            self._has_history = True
            return HostReading(known_percent, memory.total - memory.available, memory.total)
        except (OSError, psutil.Error, RuntimeError):
            return None
