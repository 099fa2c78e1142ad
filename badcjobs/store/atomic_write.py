"""Writes files atomically: under a hidden name, sealed with a checksum, then renamed; readers see complete files."""

from __future__ import annotations

import errno
import glob
import json
import os
import shutil
import sqlite3
import struct
import zlib
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from badcjobs.errors import BadInput
from badcjobs.paths import shell_line
from badcjobs.small_files import parse_json
from badcjobs.store.connect import SQLITE_MAGIC, open_sealed, read_value
from badcjobs.store.schema import TABLES

ROWS = "rows"
SEAL = "seal"
_DIGITS = 8
_BLANK = b"-" * _DIGITS
_MARK = b"sealcrc32:"  # SQLite stores key and value of a row next to each other
_BLOCK_BYTES = 1 << 20


def count_tables(db: sqlite3.Connection) -> dict[str, int]:
    """Return how many rows each table has."""
    tables = [table.name for table in TABLES if table.name != "meta"]
    return {name: read_value(db, f"SELECT count(*) FROM {name}") for name in tables}


def prepare_seal(db: sqlite3.Connection) -> None:
    """Write the row counts of a complete file and a placeholder for its checksum."""
    values = {ROWS: json.dumps(count_tables(db)), SEAL: f"crc32:{_BLANK.decode()}"}
    db.executemany("INSERT OR REPLACE INTO meta VALUES (?, ?)", values.items())


def read_sealed_rows(db: sqlite3.Connection) -> dict[str, int]:
    """Return the row counts that a file was published with; empty: it has none."""
    text = read_value(db, "SELECT value FROM meta WHERE key = ?", ROWS)
    try:
        return {str(table): int(many) for table, many in parse_json(text).items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def checksum(blocks: Iterable[bytes]) -> tuple[int | None, str | None, str]:
    """Return the position of a file's seal, its digits, and the checksum of all blocks with the seal left blank."""
    crc = 0
    position = 0  # of the bytes that are held
    held = b""
    seal_at = None
    digits = b""
    for block in blocks:
        held += block
        start = held.find(_MARK) + len(_MARK)
        if seal_at is None and start >= len(_MARK) and len(held) >= start + _DIGITS:
            seal_at = position + start
            digits = held[start : start + _DIGITS]
            held = held[:start] + _BLANK + held[start + _DIGITS :]
        count = len(held)
        if seal_at is None:  # a seal may start in the last bytes
            count = max(0, count - len(_MARK) - _DIGITS + 1)
        crc = zlib.crc32(held[:count], crc)
        position += count
        held = held[count:]
    stated = None
    if seal_at is not None and digits != _BLANK:
        stated = digits.decode(errors="replace")
    return seal_at, stated, f"{zlib.crc32(held, crc):08x}"


# --- stamps -----------------------------------------------------------------------------------------------------------
# SQLite leaves the last bytes of each page of a published file to us. They hold an id of the publication and a
# checksum: salvage takes no row from a page that is damaged, in another place, or from another file.

PAGE_BYTES = 4096  # SQLite's default, which we never change
_STAMP_BYTES = 12
_CRC_BYTES = 4


def empty_stamped_page() -> bytes:
    """Return the first page of an empty database that leaves space for stamps."""
    header = SQLITE_MAGIC + struct.pack(">H6B", PAGE_BYTES, 1, 1, _STAMP_BYTES, 64, 32, 32)
    empty_tree = struct.pack(">B4xH", 13, PAGE_BYTES - _STAMP_BYTES)
    return (header.ljust(100, b"\0") + empty_tree).ljust(PAGE_BYTES, b"\0")


def read_stamp(page: bytes, number: int) -> bytes | None:
    """Return the id of the publication that a page belongs to; None: it is damaged, or has no stamp."""
    if _page_crc(page[:-_CRC_BYTES], number) != page[-_CRC_BYTES:]:
        return None
    return page[-_STAMP_BYTES:-_CRC_BYTES]


def is_stamped(path: Path) -> bool:
    """Say whether a file was published: its first page has a stamp, right or wrong, or one of the next a right one."""
    with path.open("rb") as file:
        first, *others = [file.read(PAGE_BYTES) for _ in range(19)]
    has_space = first[20:21] == bytes([_STAMP_BYTES])
    return (has_space and any(first[-_STAMP_BYTES:])) or any(map(read_stamp, others, range(2, 20)))


def _page_crc(page: bytes, number: int) -> bytes:
    """Return the checksum of a page at its place; the digits of the seal, which is written later, do not count."""
    start = page.find(_MARK) + len(_MARK)
    if start >= len(_MARK):
        page = page[:start] + page[start + _DIGITS :]
    return zlib.crc32(page, number).to_bytes(_CRC_BYTES, "big")


def _stamp_pages(blocks: Iterable[bytes]) -> Iterator[bytes]:
    publication = os.urandom(_STAMP_BYTES - _CRC_BYTES)
    number = 0
    for block in blocks:
        pages = []
        for start in range(0, len(block), PAGE_BYTES):
            number += 1
            page = block[start : start + PAGE_BYTES - _STAMP_BYTES] + publication
            pages += [page, _page_crc(page, number)]
        yield b"".join(pages)


# --- files ------------------------------------------------------------------------------------------------------------


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    return iter(lambda: file.read(_BLOCK_BYTES), b"")


def read_checksum(path: Path) -> tuple[str | None, str]:
    """Return the checksum in a file's seal (None: it has no seal), and the checksum of its bytes."""
    with path.open("rb") as file:
        _, stated, computed = checksum(_blocks(file))
    return stated, computed


def read_stated(path: Path) -> str | None:
    """Return the checksum in a file's seal without reading the file; None: it has no seal, or is not a database."""
    try:
        with closing(open_sealed(path)) as db:
            seal = read_value(db, "SELECT value FROM meta WHERE key = ?", SEAL)
    except (sqlite3.Error, ValueError):
        return None
    return seal and str(seal).removeprefix("crc32:")


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
    """Copy a finished local file to its target and seal it; readers see the complete file or the old one."""
    temporary = unfinished_name(target)
    with replacing(target, temporary), local.open("rb") as source, temporary.open("wb") as copy:
        is_database = source.read(len(SQLITE_MAGIC)) == SQLITE_MAGIC  # not samples as text
        source.seek(0)

        def copied() -> Iterator[bytes]:
            for block in _stamp_pages(_blocks(source)) if is_database else _blocks(source):
                copy.write(block)
                yield block

        seal_at, _, digits = checksum(copied())
        if seal_at is not None:
            copy.seek(seal_at)
            copy.write(digits.encode())


def unfinished_name(target: Path, pid: str = "") -> Path:
    """Return the temporary name under which a process of this machine, usually this one, writes a file."""
    return target.with_name(f".{target.name}.{os.uname().nodename}.{pid or os.getpid()}.tmp")


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
    others = {*os.listdir("/proc")} - {str(os.getpid())}  # noqa: PTH208
    at_work = {unfinished_name(target, pid) for pid in others}
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
