"""Reads the rows of a SQLite file straight from its pages, when SQLite itself will not any more.

SQLite finds a row through the pages above it: one damaged page hides every row below. Here each page is looked at by
itself, so that only what lay on a damaged page is gone. Which table a row belongs to is salvage.py's business.
The format: https://www.sqlite.org/fileformat2.html
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import BinaryIO, NamedTuple, TypeAlias

Value: TypeAlias = int | float | str | bytes | None

OUR_PAGE_SIZE = 4096  # what SQLite takes unless told otherwise, and we never tell

_MAGIC = b"SQLite format 3\x00"
_FILE_HEADER_BYTES = 100
_PAGE_HEADER_BYTES = 8
_TABLE_LEAF = 0x0D
_LEAST_USABLE_BYTES = 480
_HOLE_BYTES = 8  # the longest run of zeros that a number can end a row with is seven


class LeafRow(NamedTuple):
    """One row, and the page it lay on; a column that is the rowid itself is None here."""

    page_number: int
    rowid: int
    values: tuple[Value, ...]


def read_rows(file: BinaryIO, *, holes: bool = False, page_bytes: int | None = None) -> Iterator[LeafRow]:
    """Yield every row that decodes, from every table leaf page, in the order of the pages; never fail.

    ``page_bytes``: the size of the pages, all of it used, where that is known better than from the header.
    ``holes``: take zeros at the end of a page for a part that was never written, and not for the end of a row. Right
    where no row ends in long runs of zeros (a blob might), as then half a row cannot be told from a whole one.
    """
    pages = _Pages(file, page_bytes)
    for number in range(1, pages.count + 1):
        page = pages.read(number)
        if holes:
            written = page.rstrip(b"\0")
            page = written if len(page) - len(written) >= _HOLE_BYTES else page
        for at in _cells(page, _FILE_HEADER_BYTES if number == 1 else 0):
            try:
                rowid, values = _read_cell(pages, page, at)
            except (ValueError, IndexError):
                continue  # not a cell, or no longer one
            yield LeafRow(number, rowid, values)


class _Pages:
    """The file as numbered pages, without the bytes reserved at their ends; what cannot be read is empty."""

    def __init__(self, file: BinaryIO, page_bytes: int | None) -> None:
        self._file = file
        said = _page_size(self._bytes(0, _FILE_HEADER_BYTES))
        self._size, self.usable = said if page_bytes is None else (page_bytes, page_bytes)
        self.count = -(-file.seek(0, os.SEEK_END) // self._size)

    def read(self, number: int) -> bytes:
        return self._bytes((number - 1) * self._size, self.usable)

    def _bytes(self, start: int, length: int) -> bytes:
        try:
            self._file.seek(start)
            return self._file.read(length)
        except OSError:  # a bad block of the disk is one bad page
            return b""


def _page_size(header: bytes) -> tuple[int, int]:
    """Return the size of a page and how much of it is used; our own where the header is lost."""
    if not header.startswith(_MAGIC) or len(header) < _FILE_HEADER_BYTES:
        return OUR_PAGE_SIZE, OUR_PAGE_SIZE
    size = int.from_bytes(header[16:18], "big")
    size = 65536 if size == 1 else size
    usable = size - header[20]
    sane = size >= 512 and size & (size - 1) == 0 and usable >= _LEAST_USABLE_BYTES
    return (size, usable) if sane else (OUR_PAGE_SIZE, OUR_PAGE_SIZE)


def _cells(page: bytes, header: int) -> Iterator[int]:
    """Yield where the cells of a table leaf page begin; nothing for any other page."""
    first = header + _PAGE_HEADER_BYTES
    if len(page) < first or page[header] != _TABLE_LEAF:
        return
    after = first + 2 * int.from_bytes(page[header + 3 : header + 5], "big")
    for (at,) in struct.iter_unpack(">H", page[first : min(after, len(page) & ~1)]):
        yield at


def _read_cell(pages: _Pages, page: bytes, at: int) -> tuple[int, tuple[Value, ...]]:
    size, at = _varint(page, at)
    rowid, at = _varint(page, at)
    local = _local_bytes(size, pages.usable)
    payload = page[at : at + local]
    if local < size:
        chain = page[at + local : at + local + 4]
        payload += _overflow(pages, int.from_bytes(chain, "big"), size - local)
    return rowid - (1 << 64 if rowid >> 63 else 0), _read_record(payload)


def _local_bytes(size: int, usable: int) -> int:
    """Return how much of a payload lies in the leaf page itself."""
    most, least = usable - 35, (usable - 12) * 32 // 255 - 23
    if size <= most:
        return size
    wanted = least + (size - least) % (usable - 4)
    return wanted if wanted <= most else least


def _overflow(pages: _Pages, number: int, missing: int) -> bytes:
    """Return the rest of a payload, from a chain of pages that must be whole and of the right length."""
    if missing > pages.count * pages.usable:
        raise ValueError("longer than the file")  # a circle of pages would do for any length
    parts = []
    while missing:
        page = pages.read(number) if 1 < number <= pages.count else b""
        part = page[4 : 4 + missing]
        if len(part) < min(missing, pages.usable - 4):
            raise ValueError("the chain ends early")
        parts.append(part)
        missing -= len(part)
        number = int.from_bytes(page[:4], "big")
    if number:
        raise ValueError("the chain goes on")
    return b"".join(parts)


def _read_record(payload: bytes) -> tuple[Value, ...]:
    header, _ = _varint(payload, 0)
    if header > len(payload):
        raise ValueError("the header is longer than the record")
    fields, size = _layout(payload[:header])
    if size != len(payload):
        raise ValueError("the values do not fill the record")
    return tuple([decode(payload[start:end]) for decode, start, end in fields])


_Decode: TypeAlias = Callable[[bytes], Value]


@lru_cache(maxsize=1024)  # the rows of a table have few layouts, and each is long to work out
def _layout(header: bytes) -> tuple[tuple[tuple[_Decode, int, int], ...], int]:
    """Return how and where to read each value of a record with this header, and the length of the record."""
    fields = []
    _, at = _varint(header, 0)
    start = len(header)
    while at < len(header):
        kind, at = _varint(header, at)
        decode, length = _serial_type(kind)
        fields.append((decode, start, start + length))
        start += length
    return tuple(fields), start


def _serial_type(kind: int) -> tuple[_Decode, int]:
    if kind >= 12:
        return (bytes.decode if kind % 2 else bytes), (kind - 12) // 2
    if kind in (10, 11):
        raise ValueError("a kind of value that no file has")
    return _FIXED[kind]


def _integer(data: bytes) -> int:
    return int.from_bytes(data, "big", signed=True)


def _float(data: bytes) -> float:
    return float(struct.unpack(">d", data)[0])


_FIXED: tuple[tuple[_Decode, int], ...] = (
    (lambda _: None, 0),
    *((_integer, length) for length in (1, 2, 3, 4, 6, 8)),
    (_float, 8),
    (lambda _: 0, 0),
    (lambda _: 1, 0),
)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of one to nine bytes that begins there, and where the next thing begins."""
    value = 0
    for position in range(at, at + 8):
        byte = data[position]
        if byte < 0x80:
            return value << 7 | byte, position + 1
        value = value << 7 | byte & 0x7F
    return value << 8 | data[at + 8], at + 9
