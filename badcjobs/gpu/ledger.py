"""Who pretends to use how much memory of a simulated device: a file for each process, in a folder that all of them see.

Its name is ``<uuid>.<pid>``, its text a number of bytes. As with a real device, what a process had is free when it
ends.
"""

from __future__ import annotations

from pathlib import Path


class Ledger:
    """What is written in the folder."""

    def __init__(self, folder: Path, proc: Path = Path("/proc")) -> None:
        self._folder = folder
        self._proc = proc

    def used_bytes(self, uuid: str) -> int:
        """Return what living processes have of a device."""
        return sum(self._bytes_of(file) for file in self._folder.glob(f"{uuid}.*"))

    def _bytes_of(self, file: Path) -> int:
        pid = file.name.rpartition(".")[2]
        try:
            text = file.read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return 0
        return int(text) if text.isdecimal() and pid.isdecimal() and (self._proc / pid).exists() else 0
