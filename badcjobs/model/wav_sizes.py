"""Which sizes in a WAV header are to be believed; who measures recordings and who cuts them must agree on it."""

from __future__ import annotations

import struct
from typing import BinaryIO

UNTOLD = 0xFFFFFFFF  # a size that did not fit into 32 bits, or was not known when the header was written
MOST_CHUNKS = 1000  # recorders write a handful; a damaged file could hold millions of empty ones


def only_chunks(file: BinaryIO, start: int, file_bytes: int) -> bool:
    """Say whether nothing but further chunks (notes of the recorder) follows up to the end of the file."""
    file.seek(start)
    for _ in range(MOST_CHUNKS):
        if start >= file_bytes:
            return True
        head = file.read(8)
        if len(head) < 8 or not head[:4].strip().isalnum():
            return False
        size = struct.unpack("<I", head[4:])[0]
        if start + 8 + size > file_bytes:
            return False
        start = file.seek(start + 8 + size + (size & 1))
    return False


def is_made_up(told: int) -> bool:
    """Say whether a size is one that programs write that do not know it yet: nearly 2 or 4 GiB."""
    return UNTOLD - 0xFFFF <= told <= UNTOLD or 0x7FFF0000 <= told <= 0x80000000
