"""Filesystems that refuse: a small tmpfs that is really full, closed folders, the mount table of another machine."""

import codecs
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from support import needs


class SmallDisk:
    """A mounted tmpfs of a few megabytes."""

    def __init__(self, path: Path) -> None:
        self.path, self._stone = path, path / ".stone"
        self._room, self._filler = threading.Event(), threading.Thread()

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
        """Fill it, again and again until there is room: what is freed is taken by someone else, as on a busy disk."""
        self.fill()
        self._room.clear()
        self._filler = threading.Thread(target=self._fill_on, daemon=True)
        self._filler.start()

    def make_room(self) -> None:
        """Take the stone away, and no one lays it back."""
        self.let_be()
        self._stone.unlink()

    def let_be(self) -> None:
        self._room.set()
        if self._filler.is_alive():
            self._filler.join()

    def _fill_on(self) -> None:
        while not self._room.wait(0.02):
            self.fill()


def _mount(*words: str) -> None:
    """Skip the test (or fail, with --require mount) where we may not mount."""
    done = subprocess.run(["mount", *words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        needs.missing("mount", f"nothing can be mounted here: {done.stderr.strip()}")


@contextmanager
def small_disk(path: Path, size: str = "4m") -> Iterator[SmallDisk]:
    path.mkdir(parents=True, exist_ok=True)
    _mount("-t", "tmpfs", "-o", f"size={size},nr_inodes=0", "badcjobs-test", str(path))
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


@contextmanager
def powerless_folder() -> Iterator[Path]:
    """Work in an empty folder; as root, do so as the user nobody."""
    for late in ("utf-8-sig", "unicode_escape"):  # the unprivileged user may not read the modules of root's Python
        codecs.lookup(late)
    before, is_root, unprivileged_uid = Path.cwd(), os.geteuid() == 0, 65534
    folder = Path(tempfile.mkdtemp(prefix="badcjobs-test-", dir="/tmp"))  # pytest's own folders are closed to that user
    if is_root:
        os.chown(folder, unprivileged_uid, unprivileged_uid)
        os.seteuid(unprivileged_uid)
    try:
        os.chdir(folder)
        yield folder
    finally:
        if is_root:
            os.seteuid(0)
        os.chdir(before)
        subprocess.run(["chmod", "-R", "u+rwX", folder], check=True)
        shutil.rmtree(folder)


def lie_about_filesystem(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Let the kernel's mount table say that a folder is the mount point of a filesystem of this kind."""
    read_text, table = Path.read_text, Path("/proc/self/mountinfo")
    line = f"900 1 0:99 / {folder.resolve()} rw,relatime shared:99 - {kind} somewhere rw\n"

    def lying(path: Path, *args: Any, **options: Any) -> str:
        text = read_text(path, *args, **options)
        return f"{text}{line}" if path == table else text

    monkeypatch.setattr(Path, "read_text", lying)
