"""Disks that are really full: a small tmpfs, mounted by the test, with a stone to fill it."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support import needs


class SmallDisk:
    """A mounted tmpfs of a few megabytes."""

    def __init__(self, path: Path) -> None:
        self.path, self._stone = path, path / ".stone"
        self._room = threading.Event()
        self._filler: threading.Thread | None = None

    @property
    def free_bytes(self) -> int:
        room = os.statvfs(self.path)
        return room.f_bavail * room.f_frsize

    def fill(self) -> None:
        """Leave not a byte: one file takes all there is."""
        with suppress(OSError), self._stone.open("ab", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    def stay_full(self) -> None:
        """Fill it, again and again until there is room: what is freed is taken by somebody else, as on a busy disk."""
        self.fill()
        self._room.clear()
        self._filler = threading.Thread(target=self._fill_on, daemon=True)
        self._filler.start()

    def make_room(self) -> None:
        """Take the stone away, and nobody lays it back."""
        self.let_be()
        self._stone.unlink()

    def let_be(self) -> None:
        """Fill it no more."""
        self._room.set()
        if self._filler is not None:
            self._filler.join()
            self._filler = None

    def _fill_on(self) -> None:
        while not self._room.wait(0.02):
            self.fill()


def _mount(*words: str) -> None:
    """Skip the test (or fail, with --require mount) where we may not mount."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        needs.missing("mount", f"nothing can be mounted here: {done.stderr.strip()}")


@contextmanager
def small_disk(path: Path, size: str = "4m", inodes: int = 0) -> Iterator[SmallDisk]:
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes={inodes}", "badcjobs-test", str(path))  # 0: no limit
    disk = SmallDisk(path)
    try:
        yield disk
    finally:
        disk.let_be()
        subprocess.run(["umount", "-l", str(path)], check=True)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Make a folder read-only for everybody, root too; what is open already stays open."""
    _mount("--bind", str(folder), str(folder))
    _mount("-o", "remount,bind,ro", str(folder))
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def largest_file(size_bytes: int) -> Iterator[None]:
    """Let no file of this process grow beyond a size, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sys.dont_write_bytecode = True  # Python would leave half of a module that is imported now
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        sys.dont_write_bytecode = False
