"""One run per device where no Slurm shares them out: kernel locks that the runs of all users of a machine respect.

A lock is flock(2) on a file per device (lock_files.py opens them). The kernel gives it back when the run ends, however
it ends, and so has whoever was handed the open file (``DeviceLocks.files``). The text in the file (who has it) counts
only while it is locked. Files are never removed: a lock on a file that is gone would hold nobody off.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from badcjobs.lock_files import LockFiles, lock, read_text, unlock, write_text
from badcjobs.seams import Clock

VARIABLE = "BADCJOBS_LOCK_DIR"

_GATE = "picking.lock"
_GATE_TRIES, _GATE_REST_S = 100, 0.02


def lock_folder(environ: Mapping[str, str]) -> Path:
    """Return where the locks of this machine are, the same for every user of it."""
    if environ.get(VARIABLE):
        return Path(environ[VARIABLE])
    system = Path("/run/lock")
    # Judged by its mode, not by trying: root may write everywhere, and would lock where nobody else looks.
    for_everybody = system.is_dir() and system.stat().st_mode & 0o1002 == 0o1002
    return system / "badcjobs" if for_everybody else Path("/tmp/badcjobs-locks")


class LockView:
    """Looks at the locks of other runs, takes none, and makes no file."""

    def __init__(self, folder: Path, clock: Clock) -> None:
        self._files = LockFiles(folder)
        self._clock = clock

    def claim(self, uuid: str) -> str | None:
        """Return who has locked a device; None: nobody."""
        try:
            fd = self._files.open(_file_name(uuid), create=False)
        except OSError as error:
            return f"its lock cannot be read: {error.strerror}"
        if fd is None:
            return None
        try:
            return None if lock(fd, fcntl.LOCK_SH) else f"locked by {read_text(fd)}"
        finally:
            os.close(fd)

    def release(self) -> None:
        """Do nothing: nothing was taken."""

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs from picking meanwhile."""
        with _gate(self._files, self._clock, create=False):
            yield


class DeviceLocks:
    """The locks that this run holds, until ``release`` or the end of the process."""

    def __init__(self, folder: Path, clock: Clock, holder: str) -> None:
        self._files = LockFiles(folder)
        self._clock = clock
        self._holder = holder
        self._held: list[int] = []

    def claim(self, uuid: str) -> str | None:
        """Lock a device; return who has it if that is another run."""
        name = _file_name(uuid)
        try:
            while (fd := self._files.open(name, create=True)) is not None:
                if not lock(fd, fcntl.LOCK_EX):
                    who = read_text(fd)
                    os.close(fd)
                    return f"locked by {who}"
                if self._files.has(fd, name):
                    self._held.append(fd)
                    write_text(fd, self._holder)
                    break
                os.close(fd)
        except OSError as error:
            return f"its lock cannot be taken: {error.strerror}"
        return None

    @property
    def files(self) -> tuple[int, ...]:
        """The open files that hold the locks: a process that is given them keeps the devices if this one dies."""
        return tuple(self._held)

    def release(self) -> None:
        """Give all devices back."""
        while self._held:
            fd = self._held.pop()
            write_text(fd, "")
            unlock(fd)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other runs from picking meanwhile."""
        with _gate(self._files, self._clock, create=True):
            yield

    def __enter__(self) -> DeviceLocks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def holder_words(pid: int, run: Path) -> str:
    """Return what a lock says of its holder."""
    try:
        user = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a container knows no names
        user = str(os.getuid())
    return f"run of {user}, pid {pid}, {run}"


@contextmanager
def _gate(files: LockFiles, clock: Clock, *, create: bool) -> Iterator[None]:
    """Let one at a time look at locks or take them.

    Else two runs that want all devices would each get some and give them back, and a look would be taken for a lock.
    One who stands still in here must not stop the whole machine: after two seconds we go on all the same.
    """
    try:
        fd = files.open(_GATE, create=create)
    except OSError:
        fd = None  # the locks themselves decide; this is only for good manners
    try:
        for _ in range(_GATE_TRIES):
            if fd is None or lock(fd, fcntl.LOCK_EX):
                break
            clock.sleep(_GATE_REST_S)
        yield
    finally:
        if fd is not None:
            os.close(fd)


def _file_name(uuid: str) -> str:
    return re.sub(r"[^A-Za-z0-9-]", "_", uuid) + ".lock"
