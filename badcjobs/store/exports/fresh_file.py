"""Output files of an export: under their name they are whole, or not there."""

from __future__ import annotations

import errno
import os
import shlex
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from badcjobs.errors import BadInput


@contextmanager
def fresh_file(target: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name and rename it when it is complete; a pipe or device is written directly."""
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as out:
                yield out
            return
        # Of one length, however long the target's name is; the host, because others may share this folder.
        number = zlib.crc32(os.fsencode(target.name))
        temporary = target.with_name(f".badcjobs-export.{os.uname().nodename}.{os.getpid()}.{number:08x}.tmp")
        try:
            with temporary.open("wb") as out:
                yield out
            os.replace(temporary, target)  # noqa: PTH105
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise cannot_write(target, error) from error


def make_folder(folder: Path) -> None:
    """Make a folder for output, and those above it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(target: Path, error: OSError) -> BadInput:
    """Return the error for an output that cannot be written."""
    return BadInput(f"{target} cannot be written", why=error.strerror, fix=_way_out(target, error))


def _way_out(target: Path, error: OSError) -> str:
    name, folder = shlex.quote(str(target)), shlex.quote(str(target.parent))
    if isinstance(error, FileNotFoundError):
        return f"mkdir -p {folder}"
    if error.errno == errno.EFBIG:
        return "ulimit -f unlimited   (then the same command again)"
    return f"df -h {folder}" if error.errno in (errno.ENOSPC, errno.EDQUOT) else f"ls -ld {folder} {name}"
