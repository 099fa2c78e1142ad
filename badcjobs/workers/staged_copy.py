"""One chunk's audio on the node's own disk: made, checked, removed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import Chunk


@dataclass(eq=False)
class Copy:
    """One chunk's audio on the node; one folder each, because engines use the file's name."""

    chunk: Chunk
    path: Path
    size_bytes: int = 0  # 0: not known yet, and nothing written
    waits: bool = False  # for room
    ready: bool = False
    taken: bool = False
    unwanted: bool = False  # an engine has begun with the original
    passed_over: int = 0  # how often others were taken, and this one was not even near

    @property
    def is_sound(self) -> bool:
        """Whether it is still as it was written: many sites sweep their /tmp."""
        try:
            return self.path.stat().st_size == self.size_bytes
        except OSError:
            return False

    def serves(self, chunk: Chunk) -> bool:
        """Say whether an engine may read it instead of this chunk's audio: a piece of a chunk is not the whole."""
        return self.ready and not self.taken and chunk.audio_path == self.chunk.audio_path and self.is_sound

    def remove(self) -> None:
        """Give the space back."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def copy_file(source: str, target: Path) -> bool:
    """Copy a file into a new folder; return False when it has changed meanwhile, or was cut short."""
    before = os.stat(source)  # noqa: PTH116
    target.parent.mkdir()
    shutil.copyfile(source, target)
    after = os.stat(source)  # noqa: PTH116
    same = (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
    return same and target.stat().st_size == before.st_size


def free_bytes(folder: Path) -> int:
    """Return how much an ordinary user may still write there."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
