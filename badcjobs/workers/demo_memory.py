"""The memory that the demo engine pretends to take: of a device that all its processes share, by the length of audio.

Who has how much of it is in a folder that all of them see, a file ``<device>.<pid>`` for each process; the simulated
devices show what is written there. Without a folder each process has the whole device for itself.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class PretendedMemory:
    """The place of one process on its device."""

    bytes_per_s: float  # of audio, lean; as usual twice that
    lean: bool
    device: str = ""
    device_bytes: int | None = None  # None: there is no end of it
    folder: Path | None = None

    def take(self, audio_s: float) -> str | None:
        """Take as much as audio needs, until this process ends; return what PyTorch would say where it is not there."""
        wanted = round(fill(audio_s, lean=self.lean) * self.bytes_per_s)
        if self.folder is None:
            return self._refusal(wanted, 0)
        with _alone_in(self.folder):
            refusal = self._refusal(wanted, self._held_by_others(self.folder))
            if refusal is None:
                (self.folder / f"{self.device}.{os.getpid()}").write_text(str(wanted), encoding="ascii")
            return refusal

    def _refusal(self, wanted: int, others: int) -> str | None:
        if self.device_bytes is None or wanted + others <= self.device_bytes:
            return None
        free = max(0, self.device_bytes - others)
        return (
            f"CUDA out of memory. Tried to allocate {wanted / _MIB:.0f} MiB. GPU 0 has a total capacity of"
            f" {self.device_bytes / _MIB:.0f} MiB of which {free / _MIB:.0f} MiB is free"
        )

    def _held_by_others(self, folder: Path) -> int:
        mine = f"{self.device}.{os.getpid()}"
        return sum(_held(file) for file in folder.glob(f"{self.device}.*") if file.name != mine)


def fill(audio_s: float, *, lean: bool) -> float:
    """Return how much memory audio is made to take, in seconds: as usual twice its length."""
    return audio_s if lean else 2 * audio_s


def _held(file: Path) -> int:
    """Return what a process has; what it had is free when it ends, though nobody may have waited for it yet."""
    try:
        stat = Path("/proc", file.name.rpartition(".")[2], "stat").read_text(encoding="ascii", errors="replace")
        text = file.read_text(encoding="ascii")
    except OSError:
        return 0
    return int(text) if text.isdecimal() and stat.rpartition(")")[2].split()[0] not in "ZX" else 0


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one process after the other look how much there is, and take it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            pass  # this filesystem has no locks
        yield
    finally:
        os.close(fd)
