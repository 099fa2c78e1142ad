"""The two ways in which a job database becomes the next one; with both, whoever looks sees the old or the new.

``drafted``: made beside the old one under a hidden name, and renamed when it is whole. Works on every filesystem, but
writes the whole file. ``changed_in_place``: one SQLite transaction, for a few more files on a local disk, where locks
and journals can be trusted.
"""

from __future__ import annotations

import errno
import fcntl
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from badcjobs.store.connect import transaction
from badcjobs.store.into_place import remove_unfinished, sync_file, sync_folder, unfinished_name
from badcjobs.store.job_schema import SORT_CACHE_KIB, open_draft

_FICLONE = 0x40049409  # ioctl: share the blocks of another file until one of them is written to
_PIECE_BYTES = 64 << 20
_READERS_PATIENCE_S = 5.0


@contextmanager
def drafted(
    target: Path, *, from_old: bool, keep_old_as: Path | None, check: Callable[[], None]
) -> Iterator[sqlite3.Connection]:
    """Give a new job database, or a copy of the old one, to be written; put it in place when all went well."""
    remove_unfinished(target)
    draft = unfinished_name(target)
    try:
        if from_old:
            copy_quickly(target, draft)
        db = open_draft(draft, new=not from_old)
        try:
            yield db
        finally:
            db.close()
        sync_file(draft)
        check()
        if keep_old_as is not None:
            os.replace(target, keep_old_as)  # noqa: PTH105
        os.replace(draft, target)  # noqa: PTH105
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(target.parent)


@contextmanager
def changed_in_place(target: Path, *, check: Callable[[], None]) -> Iterator[sqlite3.Connection]:
    """Give the job database itself; a kill leaves a journal, with which the next reader restores what was there."""
    db = sqlite3.connect(target, isolation_level=None, uri=True, timeout=_READERS_PATIENCE_S)
    try:
        db.execute(f"PRAGMA cache_size = -{SORT_CACHE_KIB}")
        db.execute("PRAGMA synchronous = FULL")
        with transaction(db, "BEGIN EXCLUSIVE"):  # or not at all, when somebody is reading for long
            yield db
            check()
    finally:
        db.close()


def copy_quickly(source: Path, copy: Path) -> None:
    """Copy a large file inside the kernel, writing to disk meanwhile; or share its blocks where that is possible."""
    with source.open("rb") as old, copy.open("wb") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
            return
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
        position, size = 0, os.fstat(old.fileno()).st_size
        while position < size:
            sent = os.sendfile(new.fileno(), old.fileno(), position, _PIECE_BYTES)
            if sent == 0:
                raise OSError(errno.EIO, "the file became shorter while it was copied", str(source))
            # Begins to write this piece out, so that the sync at the end finds little left to do.
            os.posix_fadvise(new.fileno(), position, sent, os.POSIX_FADV_DONTNEED)
            position += sent
