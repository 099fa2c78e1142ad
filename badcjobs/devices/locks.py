"""One run per device where no Slurm shares them out: kernel locks that the runs of all users of a machine respect.

A lock is flock(2) on a file per device. The kernel gives it back when the run ends, however it ends, and so has whoever
was handed the open file (``DeviceLocks.files``). The text in the file (who has it) counts only while it is locked.
Files are never removed: a lock on a file that is gone would hold nobody off.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.seams import Clock

_MOST_TEXT = 500

# Others may have put anything there: no link is followed, and nothing waits for the other end of a pipe.
# Nobody inherits a lock (O_CLOEXEC). Workers die with the wrapper; what a worker's program leaves behind may be a
# daemon that has nothing to do with the card and would keep it locked for weeks. If it does use the card, its memory
# and its load are seen by whoever picks next.
_SAFELY = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _open_file(folder: Path, name: str, *, create: bool) -> int | None:
    """Return a lock file, opened; None: it is not there and was not to be made."""
    made = False
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir()
                made = True
        dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _SAFELY)
        if made:
            os.fchmod(dir_fd, 0o1777)  # whatever the umask: everybody may lock, nobody may remove another's file
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            return None
        raise NotHere(
            f"the locks of free devices cannot be kept in {folder}",
            why=error.strerror,
            fix="export BADCJOBS_LOCK_DIR=/a/folder   (the same for all users, on a disk of this machine)",
        ) from error
    try:
        fd = _open_or_create(name, dir_fd) if create else os.open(name, os.O_RDONLY | _SAFELY, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    finally:
        os.close(dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "it is no plain file")
    return fd


def _open_or_create(name: str, dir_fd: int) -> int:
    # Never O_CREAT on a file that exists: in a folder with the sticky bit Linux then refuses what belongs to others
    # (fs.protected_regular), though all may write to it.
    while True:
        try:
            return os.open(name, os.O_RDWR | _SAFELY, dir_fd=dir_fd)
        except PermissionError:
            return os.open(name, os.O_RDONLY | _SAFELY, dir_fd=dir_fd)  # enough to lock it
        except FileNotFoundError:
            pass
        with suppress(FileExistsError):  # another run was quicker
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFELY, 0o666, dir_fd=dir_fd)
            os.fchmod(fd, 0o666)
            return fd


def _lock(fd: int, kind: int) -> bool:
    """Take the kernel's lock on an open file, if no other process has it."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_text(fd: int, text: str) -> None:
    with suppress(OSError):  # a file of another user may refuse, and the lock holds without
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace")[:_MOST_TEXT], 0)


_GATE = "picking.lock"
_GATE_TRIES, _GATE_REST_S = 100, 0.02


def lock_folder(environ: Mapping[str, str]) -> Path:
    """Return where the locks of this machine are, the same for every user of it."""
    if environ.get("BADCJOBS_LOCK_DIR"):
        return Path(environ["BADCJOBS_LOCK_DIR"])
    system = Path("/run/lock")
    # Judged by its mode, not by trying: root may write everywhere, and would lock where nobody else looks.
    for_everybody = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    return system / "badcjobs" if for_everybody else Path("/tmp/badcjobs-locks")


class DeviceLocks:
    """The locks that this run holds, until ``release`` or the end of the process.

    ``holder`` is what others read of us; None: look at the locks of others, take none, and make no file.
    """

    def __init__(self, folder: Path, clock: Clock, holder: str | None) -> None:
        self._folder = folder
        self._clock = clock
        self._holder = holder
        self._held: list[int] = []

    def claim(self, uuid: str) -> str | None:
        """Lock a device; return who has it if that is another run."""
        name, takes = re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock", self._holder is not None
        try:
            while (fd := _open_file(self._folder, name, create=takes)) is not None:
                if not _lock(fd, fcntl.LOCK_EX if takes else fcntl.LOCK_SH):
                    text = os.pread(fd, _MOST_TEXT, 0).decode(errors="replace").strip()
                    os.close(fd)
                    who = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
                    return f"locked by {who or 'another run'}"
                if self._holder is not None and self._is_still_there(fd, name):
                    self._held.append(fd)
                    _write_text(fd, self._holder)
                    break
                os.close(fd)
                if not takes:
                    break
        except OSError as error:
            return f"its lock cannot be {'taken' if takes else 'read'}: {error.strerror}"
        return None

    def _is_still_there(self, fd: int, name: str) -> bool:
        """Return whether the opened file still has its name: it may have been cleaned up meanwhile."""
        try:
            return os.path.samestat(os.fstat(fd), (self._folder / name).lstat())
        except FileNotFoundError:
            return False

    @property
    def files(self) -> tuple[int, ...]:
        """The open files that hold the locks: a process that is given them keeps the devices if this one dies."""
        return tuple(self._held)

    def release(self) -> None:
        """Give all devices back."""
        while self._held:
            fd = self._held.pop()
            _write_text(fd, "")
            fcntl.flock(fd, fcntl.LOCK_UN)  # at once, even where another process has the same open file
            os.close(fd)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs from picking meanwhile.

        Else two runs that want all devices would each get some and give them back, and a look would be taken for a
        lock. One who stands still in here must not stop the whole machine: after two seconds we go on all the same.
        """
        try:
            fd = _open_file(self._folder, _GATE, create=self._holder is not None)
        except OSError:
            fd = None  # the locks themselves decide; this is only for good manners
        try:
            for _ in range(_GATE_TRIES):
                if fd is None or _lock(fd, fcntl.LOCK_EX):
                    break
                self._clock.sleep(_GATE_REST_S)
            yield
        finally:
            if fd is not None:
                os.close(fd)

    def __enter__(self) -> DeviceLocks:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def holder_words(pid: int, run: Path) -> str:
    """Return what a lock says of its holder."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container knows no names
        user = str(os.getuid())
    return f"run of {user}, pid {pid}, {run}"
