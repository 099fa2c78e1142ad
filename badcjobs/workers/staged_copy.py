"""One chunk's audio on the node's own disk: made, checked, removed."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from badcjobs.model import Chunk
from badcjobs.seams import Cutter
from badcjobs.workers.cut_chunk import check_audio, cut_chunk, stretch_of


@dataclass(eq=False)
class Copy:
    """One chunk's audio on the node; one folder each, because engines use the file's name."""

    chunk: Chunk
    path: Path
    size_bytes: int = 0  # 0: not known yet, and nothing written
    end_ms: int | None = None  # of a cut: where its audio really ends
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

    @property
    def in_the_making(self) -> bool:
        """Whether it will be ready before long."""
        return not (self.ready or self.taken or self.waits or self.unwanted)

    def serves(self, chunk: Chunk) -> bool:
        """Say whether an engine may read it instead of this chunk's audio: a piece of a chunk is not the whole."""
        return self.ready and not self.taken and chunk.audio_path == self.chunk.audio_path and self.is_sound

    def remove(self) -> None:
        """Give the space back."""
        shutil.rmtree(self.path.parent, ignore_errors=True)


def size_of(chunk: Chunk, cutter: Cutter) -> int:
    """Return how many bytes a copy of a chunk's audio takes, about; raise OSError where it cannot be looked at."""
    if chunk.is_cut:
        return cutter.size_bytes(Path(chunk.audio_path), *stretch_of(chunk))
    return os.stat(chunk.audio_path).st_size  # noqa: PTH116 - a path as it came, in a shared place


def make_copy(copy: Copy, cutter: Cutter) -> bool:
    """Copy a chunk's audio, or cut it out of a longer file; return False when a copy is not what it should be.

    Raise CannotCut where the file is missing, or another one than was listed.
    """
    check_audio(copy.chunk)
    if not copy.chunk.is_cut:
        return copy_file(copy.chunk.audio_path, copy.path)
    copy.path.parent.mkdir()
    copy.end_ms = cut_chunk(copy.chunk, copy.path, cutter)
    check_audio(copy.chunk)  # it may have been replaced while it was read
    copy.size_bytes = copy.path.stat().st_size
    return True


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
