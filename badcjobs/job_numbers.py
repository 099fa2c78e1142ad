"""The numbers of emulated jobs: no two jobs of this machine ever have the same, nor two tasks of their arrays.

They are seconds since 1970 as long as nobody is quicker than that: whole numbers that grow, as Slurm's do. A small file
beside the device locks remembers the next one.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from badcjobs.errors import NotHere
from badcjobs.lock_files import LockFiles, lock, unlock, write_text
from badcjobs.seams import Clock

_FILE = "next-job-number"
_TRIES, _REST_S = 100, 0.02
_MOST_AHEAD = 100_000_000  # three years: further ahead nobody gets; and there it stays below 2**32 until 2103


def claim_numbers(folder: Path, count: int, clock: Clock) -> int:
    """Return the first of so many numbers that no emulation of this machine has had.

    Where no file can be kept they are new with the next second, and that has to do.
    """
    now_s = clock.now_ms() // 1000
    try:
        fd = LockFiles(folder).open(_FILE, create=True)
    except (OSError, NotHere):
        fd = None
    if fd is None:
        return now_s
    try:
        _wait_for(fd, clock)
        first = max(now_s, _read(fd, now_s))
        write_text(fd, str(first + count))
        return first
    finally:
        unlock(fd)


def _wait_for(fd: int, clock: Clock) -> None:
    """Let one at a time count; one who stands still in here must not stop the whole machine."""
    for _ in range(_TRIES):
        if lock(fd, fcntl.LOCK_EX):
            return
        clock.sleep(_REST_S)


def _read(fd: int, now_s: int) -> int:
    """Return what the file says; everybody may write to it, so what cannot be is left alone."""
    text = os.pread(fd, 20, 0)
    number = int(text) if text.isdigit() else 0
    return number if number < now_s + _MOST_AHEAD else 0
