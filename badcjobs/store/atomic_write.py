"""Writes files atomically: under a hidden name, with checksums, then renamed; readers see complete files."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.small_files import parse_json
from badcjobs.store.connect import SQLITE_MAGIC, is_database, read_value
from badcjobs.store.schema import TABLES

ROWS = "rows"  # a key of ``meta`` that only published files have
_BLOCK_BYTES = 1 << 20


def count_tables(db: sqlite3.Connection) -> dict[str, int]:
    """Return how many rows each table has."""
    tables = [table for table in TABLES if table != "meta"]
    return {table: read_value(db, f"SELECT count(*) FROM {table}") for table in tables}


def write_row_counts(db: sqlite3.Connection) -> None:
    """Write the row counts of a complete file into it."""
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (ROWS, json.dumps(count_tables(db))))


def read_row_counts(db: sqlite3.Connection) -> dict[str, int]:
    """Return the row counts that a file was published with; empty: it has none."""
    text = read_value(db, "SELECT value FROM meta WHERE key = ?", ROWS)
    try:
        return {str(table): int(count) for table, count in parse_json(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


# --- stamps -----------------------------------------------------------------------------------------------------------
# SQLite leaves the last bytes of each page of a published file to us. They hold an id of the publication and a
# checksum: no row comes from a page that is damaged, in another place, or from another file.

PAGE_BYTES = 4096  # SQLite's default, which we never change
_STAMP_BYTES = 12
_CRC_BYTES = 4


def empty_stamped_page() -> bytes:
    """Return the first page of an empty database that leaves space for stamps."""
    header = SQLITE_MAGIC + struct.pack(">H6B", PAGE_BYTES, 1, 1, _STAMP_BYTES, 64, 32, 32)
    empty_tree = struct.pack(">B4xH", 13, PAGE_BYTES - _STAMP_BYTES)
    return (header.ljust(100, b"\0") + empty_tree).ljust(PAGE_BYTES, b"\0")


def read_pages(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the pages of a file with their numbers, from 1."""
    with path.open("rb", _BLOCK_BYTES) as file:
        yield from enumerate(iter(lambda: file.read(PAGE_BYTES), b""), 1)


def read_stamp(page: bytes, number: int) -> bytes | None:
    """Return the id of the publication that a page belongs to; None: it is damaged, or has no stamp."""
    if _page_crc(page[:-_CRC_BYTES], number) != page[-_CRC_BYTES:]:
        return None
    return page[-_STAMP_BYTES:-_CRC_BYTES]


def read_publication(path: Path) -> str | None:
    """Return the id of the publication that a file is; None: one of its pages is damaged or of another publication."""
    publication = None
    for number, page in read_pages(path):
        stamp = read_stamp(page, number)
        if stamp is None or publication not in (None, stamp):
            return None
        publication = stamp
    return None if publication is None else publication.hex()


def is_published(path: Path) -> bool:
    """Say whether a file was published, damaged or not: it leaves space for stamps, or its second page has one."""
    with path.open("rb") as file:
        first = file.read(PAGE_BYTES)
        second = file.read(PAGE_BYTES)
    return first[20:21] == bytes([_STAMP_BYTES]) or read_stamp(second, 2) is not None


def _page_crc(page: bytes, number: int) -> bytes:
    """Return the checksum of a page at its place."""
    return zlib.crc32(page, number).to_bytes(_CRC_BYTES, "big")


def _stamp_pages(path: Path) -> Iterator[bytes]:
    import hashlib  # late: it loads a cryptographic library of 4 MB, which the recorder does not need

    digest = hashlib.blake2b(digest_size=_STAMP_BYTES - _CRC_BYTES)
    for _, page in read_pages(path):
        digest.update(page)
    publication = digest.digest()
    for number, page in read_pages(path):
        content = page[:-_STAMP_BYTES] + publication
        yield content + _page_crc(content, number)


# --- files ------------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(target: Path, temporary: Path, *, lasting: bool = True) -> Iterator[None]:
    """Rename the temporary file to ``target`` when the block succeeds, else remove it; ``lasting``: with fsync."""
    try:
        yield
        if lasting:
            sync_file(temporary)
        os.replace(temporary, target)  # noqa: PTH105
    finally:
        temporary.unlink(missing_ok=True)
    if lasting:
        folder = os.open(target.parent, os.O_RDONLY)
        with suppress(OSError):  # some shared filesystems cannot sync a folder; the rename itself is still atomic
            os.fsync(folder)
        os.close(folder)


def replace_text(target: Path, text: str) -> None:
    """Write a small file and rename it; readers see the old text or the new one."""
    temporary = unfinished_name(target)
    with replacing(target, temporary, lasting=False):
        temporary.write_text(text, encoding="utf-8")


def move_into_place(local: Path, target: Path) -> None:
    """Copy a finished file to its target, a database with stamps; readers see the complete file or the old one."""
    temporary = unfinished_name(target)
    with replacing(target, temporary):
        if is_database(local):
            with temporary.open("wb", _BLOCK_BYTES) as copy:
                copy.writelines(_stamp_pages(local))
        else:  # samples as text
            shutil.copyfile(local, temporary)


def unfinished_name(target: Path, pid: str = "") -> Path:
    """Return the temporary name under which a process of this machine, usually this one, writes a file."""
    return target.with_name(f".{target.name}.{os.uname().nodename}.{pid or os.getpid()}.tmp")


@contextmanager
def scratch_folder(target: Path, place: Path | None = None) -> Iterator[Path]:
    """Give a temporary folder, beside the target or elsewhere, that ``remove_unfinished`` knows."""
    with TemporaryDirectory(prefix=f".{target.name}.", suffix=".tmp", dir=place or target.parent) as folder:
        yield Path(folder)


def try_to_write(target: Path) -> None:
    """Raise OSError if a file cannot be created; a pipe or a device is not touched."""
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, f"{target.name} is a folder")
    if not target.exists() or target.is_file():
        attempt = unfinished_name(target.absolute())  # the first file that a publication creates
        attempt.touch()
        attempt.unlink()


def remove_unfinished(target: Path) -> None:
    """Remove the temporary copies of this file that killed processes left behind."""
    other_pids = {*os.listdir("/proc")} - {str(os.getpid())}  # noqa: PTH208
    at_work = {unfinished_name(target, pid) for pid in other_pids}
    for copy in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        if copy in at_work:
            continue
        if copy.is_dir():
            shutil.rmtree(copy, ignore_errors=True)
        else:
            copy.unlink(missing_ok=True)


def sync_file(path: Path) -> None:
    """Write a file's content to disk with fsync."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextmanager
def fresh_file(target: Path) -> Iterator[BinaryIO]:
    """Write a file under a temporary name and rename it when it is complete; a pipe or device is written directly."""
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as out:
                yield out
            return
        # A short name even for a target with a long one; with the host name because hosts may share this folder.
        number = zlib.crc32(os.fsencode(target.name))
        temporary = target.with_name(f".badcjobs-export.{os.uname().nodename}.{os.getpid()}.{number:08x}.tmp")
        with replacing(target, temporary, lasting=False), temporary.open("wb") as out:
            yield out
    except OSError as error:
        raise cannot_write(target, error) from error


@contextmanager
def fresh_folder(target: Path) -> Iterator[Path]:
    """Fill a folder under a hidden name beside its target, and move it when it is complete; no file is synced."""
    place = target.resolve()
    temporary = unfinished_name(place)
    try:
        remove_unfinished(place)
        temporary.mkdir(parents=True)
        yield temporary
        if place.exists():  # it keeps its permissions
            for entry in temporary.iterdir():
                shutil.move(entry, place / entry.name)  # a mount point is another filesystem
        else:
            temporary.rename(place)
    except OSError as error:
        raise cannot_write(target, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def make_folder(folder: Path) -> None:
    """Create a folder for output, with its parents."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise cannot_write(folder, error) from error


def cannot_write(target: Path, error: OSError) -> BadInput:
    """Return the error for an output that cannot be written."""
    name = shell_line(target)
    folder = shell_line(target.parent)
    fixes = {
        errno.ENOENT: f"mkdir -p {folder}",
        errno.EFBIG: "ulimit -f unlimited   (then the same command again)",
        errno.ENOSPC: f"df -h {folder}",
        errno.EDQUOT: f"df -h {folder}",
    }
    fix = fixes.get(error.errno or 0, f"ls -ld {folder} {name}")
    return BadInput(f"{target} cannot be written", why=error.strerror, fix=fix)
