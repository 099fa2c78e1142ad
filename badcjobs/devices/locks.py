"""Lock devices on a machine without Slurm, so that only one run uses each; all users of the machine share the locks.

A lock is flock(2) on one file per device. The kernel releases it when the run and every process that got the open file
(``DeviceLocks.files``) have ended, even after SIGKILL. The text in the file (the holder) is valid only while it is
locked. Files are never removed: a lock on a removed file would not keep other runs away.
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

# Other users can put anything into the folder: do not follow links, and do not block on a pipe.
# Child processes do not inherit a lock (O_CLOEXEC). Workers die with the wrapper, but a program may leave a daemon that
# does not use the GPU and would keep it locked for weeks. If it uses the GPU, the next run sees its memory and load.
_SAFE_FLAGS = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


def _open_file(folder: Path, name: str, *, create: bool) -> int | None:
    """Open a lock file; None: it does not exist, and ``create`` is false."""
    made = False
    try:
        if create:
            with suppress(FileExistsError):
                folder.mkdir()
                made = True
        dir_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _SAFE_FLAGS)
        if made:
            os.fchmod(dir_fd, 0o1777)  # for any umask: all users can lock, only the owner can remove
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not create:
            return None
        raise NotHere(
            f"cannot use {folder} for device locks",
            why=error.strerror,
            fix="export BADCJOBS_LOCK_DIR=/a/folder   (the same for all users, on a disk of this machine)",
        ) from error
    try:
        fd = _open_or_create(name, dir_fd) if create else os.open(name, os.O_RDONLY | _SAFE_FLAGS, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    finally:
        os.close(dir_fd)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(0, "not a regular file")
    return fd


def _open_or_create(name: str, dir_fd: int) -> int:
    # No O_CREAT for an existing file: in a sticky folder Linux then refuses files of other users, even if they are
    # writable (fs.protected_regular).
    while True:
        try:
            return os.open(name, os.O_RDWR | _SAFE_FLAGS, dir_fd=dir_fd)
        except PermissionError:
            return os.open(name, os.O_RDONLY | _SAFE_FLAGS, dir_fd=dir_fd)  # read access is enough for a lock
        except FileNotFoundError:
            pass
        with suppress(FileExistsError):  # another run created it first
            fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE_FLAGS, 0o666, dir_fd=dir_fd)
            os.fchmod(fd, 0o666)
            return fd


def _lock(fd: int, kind: int) -> bool:
    """Lock an open file; return False if another process has the lock."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_text(fd: int, text: str) -> None:
    with suppress(OSError):  # a file of another user may be read-only; the lock works without the text
        os.ftruncate(fd, 0)
        os.pwrite(fd, text.encode(errors="replace")[:_MOST_TEXT], 0)


_GATE = "picking.lock"
_GATE_TRIES, _GATE_REST_S = 100, 0.02


def lock_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of the locks, the same for all users of this machine."""
    if environ.get("BADCJOBS_LOCK_DIR"):
        return Path(environ["BADCJOBS_LOCK_DIR"])
    system = Path("/run/lock")
    # Look at the mode instead of trying to write: root can write everywhere, and would use a folder that others do not.
    is_public = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    return system / "badcjobs" if is_public else Path("/tmp/badcjobs-locks")


class DeviceLocks:
    """The device locks of this run, held until ``release`` or the end of the process.

    ``holder`` is the text that other runs show; None: only look at the locks of others, and create no file.
    """

    def __init__(self, folder: Path, clock: Clock, holder: str | None) -> None:
        self._folder = folder
        self._clock = clock
        self._holder = holder
        self._held: list[int] = []

    def claim(self, uuid: str) -> str | None:
        """Lock a device; return None, or why it cannot be locked (another run has it)."""
        name, takes = re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock", self._holder is not None
        try:
            while (fd := _open_file(self._folder, name, create=takes)) is not None:
                if not _lock(fd, fcntl.LOCK_EX if takes else fcntl.LOCK_SH):
                    text = os.pread(fd, _MOST_TEXT, 0).decode(errors="replace").strip()
                    os.close(fd)
                    who = "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
                    return f"is locked by {who or 'another run'}"
                if self._holder is not None and self._still_exists(fd, name):
                    self._held.append(fd)
                    _write_text(fd, self._holder)
                    break
                os.close(fd)
                if not takes:
                    break
        except OSError as error:
            return f"cannot be {'locked' if takes else 'checked for a lock'}: {error.strerror}"
        return None

    def _still_exists(self, fd: int, name: str) -> bool:
        """Return whether the open file still has its name: a cleanup may have removed it."""
        try:
            return os.path.samestat(os.fstat(fd), (self._folder / name).lstat())
        except FileNotFoundError:
            return False

    @property
    def files(self) -> tuple[int, ...]:
        """The open files of the locks: a process that inherits them keeps the devices locked if this one dies."""
        return tuple(self._held)

    def release(self) -> None:
        """Unlock all devices."""
        while self._held:
            fd = self._held.pop()
            _write_text(fd, "")
            fcntl.flock(fd, fcntl.LOCK_UN)  # immediately, even if another process has the same open file
            os.close(fd)

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Keep other runs from choosing devices at the same time.

        Without it two runs that want all devices would each lock some and release them again, and the check of a lock
        would look like a lock. A run that hangs here must not block the machine: after 2 seconds we continue anyway.
        """
        try:
            fd = _open_file(self._folder, _GATE, create=self._holder is not None)
        except OSError:
            fd = None  # the device locks are enough for correctness
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


def describe_holder(pid: int, run: Path) -> str:
    """Return the text in a lock file: user, pid and run folder."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container may have no user names
        user = str(os.getuid())
    return f"run of {user}, pid {pid}, {run}"
