"""Opens lock files in a folder that every user of a machine may write to, so that none of them can mislead us."""

from __future__ import annotations

import fcntl
import os
import stat
from pathlib import Path

from badcjobs.errors import NotHere

_MOST_TEXT = 500

# Others may have put anything there: no link is followed, and nothing waits for the other end of a pipe.
# Nobody inherits a lock (O_CLOEXEC). Workers die with the wrapper; what a worker's program leaves behind may be a
# daemon that has nothing to do with the card and would keep it locked for weeks. If it does use the card, its memory
# and its load are seen by whoever picks next.
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


class LockFiles:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def open(self, name: str, *, create: bool) -> int | None:
        """Return a file, opened; None: it is not there and was not to be made."""
        folder = self._open_folder(create=create)
        if folder is None:
            return None
        try:
            fd = _open_or_create(name, folder) if create else os.open(name, os.O_RDONLY | _SAFELY, dir_fd=folder)
        except FileNotFoundError:
            return None
        finally:
            os.close(folder)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            os.close(fd)
            raise OSError(0, "it is no plain file")
        return fd

    def has(self, fd: int, name: str) -> bool:
        """Say whether the file of that name is still the opened one: somebody may have cleaned up meanwhile."""
        try:
            return os.path.samestat(os.fstat(fd), (self.folder / name).lstat())
        except FileNotFoundError:
            return False

    def _open_folder(self, *, create: bool) -> int | None:
        made = False
        try:
            if create:
                made = _make_folder(self.folder)
            fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
            if made:
                os.fchmod(fd, 0o1777)  # whatever the umask: everybody may lock, nobody may remove another's file
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not create:
                return None
            raise NotHere(
                f"the locks of free devices cannot be kept in {self.folder}",
                why=error.strerror,
                fix="export BADCJOBS_LOCK_DIR=/a/folder   (the same for all users, on a disk of this machine)",
            ) from error
        return fd


def lock(fd: int, kind: int) -> bool:
    """Take the kernel's lock on an open file, if nobody else has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give a lock back at once, even where another process has the same open file, and close it."""
    try:
        fcntl.flock(fd, fcntl.LOCK_UN)
    finally:
        os.close(fd)


def read_text(fd: int) -> str:
    """Return what a holder wrote, fit to be shown."""
    text = os.pread(fd, _MOST_TEXT, 0).decode(errors="replace").strip()
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text) or "somebody"


def write_text(fd: int, text: str) -> None:
    """Write who holds a lock; a file of another user may refuse, and the lock holds without."""
    try:
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace")[:_MOST_TEXT], 0)
    except OSError:
        pass


def _make_folder(folder: Path) -> bool:
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def _open_or_create(name: str, folder: int) -> int:
    # Never O_CREAT on a file that exists: in a folder with the sticky bit Linux then refuses what belongs to others
    # (fs.protected_regular), though all may write to it.
    while True:
        try:
            return _open_for_locking(name, folder)
        except FileNotFoundError:
            pass
        try:
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666, dir_fd=folder)
        except FileExistsError:
            continue  # another run was quicker
        os.fchmod(fd, 0o666)
        return fd


def _open_for_locking(name: str, folder: int) -> int:
    try:
        return os.open(name, os.O_RDWR | _SAFELY, dir_fd=folder)
    except PermissionError:
        return os.open(name, os.O_RDONLY | _SAFELY, dir_fd=folder)  # enough to lock it
