"""Puts finished files where readers look: under a hidden name first, synced, then renamed; nobody sees half of one."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import BinaryIO

from badcjobs.store.seal import Checksum

_BLOCK_BYTES = 1 << 20


def move_into_place(local: Path, target: Path) -> None:
    """Copy a finished local file to where readers look, so that they never see half of it."""
    temporary = unfinished_name(target)
    try:
        with local.open("rb") as source, temporary.open("wb") as copy:
            _copy_and_seal(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
        os.replace(temporary, target)  # noqa: PTH105
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _copy_and_seal(source: BinaryIO, copy: BinaryIO) -> None:
    checksum = Checksum()
    while block := source.read(_BLOCK_BYTES):
        checksum.feed(block)
        copy.write(block)
    digits = checksum.digits()
    if checksum.seal_at is not None:  # None: samples as text
        copy.seek(checksum.seal_at)
        copy.write(digits)


def unfinished_name(target: Path) -> Path:
    """Return the name of a file that this process is still writing."""
    return target.with_name(f".{target.name}.{os.uname().nodename}.{os.getpid()}.tmp")


def remove_unfinished(target: Path) -> None:
    """Remove what killed publishers of this file have left half done."""
    for copy in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        if copy.is_dir():
            import shutil  # late: few come here

            shutil.rmtree(copy, ignore_errors=True)
        else:
            copy.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make a rename in this folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        pass  # some shared filesystems refuse to sync a folder; the rename itself is still atomic
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    """Make the content of a file last."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
