"""What a FLAC file says about itself; the audio is for others to decode.

Whoever encodes into a pipe, or loses power, leaves a header without a length; then the last frames tell it."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass
from typing import BinaryIO

_TAIL_BYTES, _TAIL_FRAMES = 1 << 16, 4  # what is read of the end: so much, or as much as so many frames can take
_MOST_FRAMES = 0xF_FFFF_FFFF
_SYNC = re.compile(rb"(?=\xff[\xf8\xf9])")  # frames that are counted, and frames whose samples are
_BLOCK_SIZES = {1: 192, **{2 + n: 576 << n for n in range(4)}, **{8 + n: 256 << n for n in range(8)}}
_MORE_BYTES = {12: 1, 13: 2, 14: 2}  # of a sample rate that is none of the usual ones


@dataclass(frozen=True, slots=True)
class FlacInfo:
    """The STREAMINFO of a FLAC file."""

    rate_hz: int
    channels: int
    bits: int
    frames: int  # 0: neither its header nor its end tells
    is_told: bool = True  # by its header, without which many programs cannot read it


def read_flac_info(file: BinaryIO) -> FlacInfo | None:
    """Read what the begin of a file says, and if need be its end; None: that is no FLAC."""
    file.seek(0)
    file.seek(_id3_bytes(file.read(10)))
    try:
        magic, kind, block_size, packed = struct.unpack(">4sB3xH8xQ", file.read(26))
    except struct.error:
        return None
    if magic != b"fLaC" or kind & 0x7F or not packed >> 44:
        return None
    # 20 bits rate, 3 channels, 5 depth, 36 frames
    rate_hz, channels, bits = packed >> 44, (packed >> 41 & 7) + 1, (packed >> 36 & 31) + 1
    if frames := packed & _MOST_FRAMES:
        return FlacInfo(rate_hz, channels, bits, frames)
    frames = _frames_by_the_end(file, block_size, largest=block_size * channels * (bits + 7 >> 3))
    return FlacInfo(rate_hz, channels, bits, frames, is_told=False)


def begin_with_length(file: BinaryIO, frames: int) -> bytes:
    """Return the first bytes of a FLAC file as they would be, had its encoder known the length."""
    file.seek(0)
    to_length = _id3_bytes(file.read(10)) + 18
    file.seek(0)
    begin = file.read(to_length + 8)
    (packed,) = struct.unpack(">Q", begin[to_length:])
    return begin[:to_length] + struct.pack(">Q", packed & ~_MOST_FRAMES | frames & _MOST_FRAMES)


def _id3_bytes(start: bytes) -> int:
    """Return how long the ID3 tags are that some programs put before the stream."""
    if len(start) < 10 or start[:3] != b"ID3":
        return 0
    a, b, c, d = start[6:10]  # seven bits each
    return 10 + (a << 21 | b << 14 | c << 7 | d)


def _frames_by_the_end(file: BinaryIO, block_size: int, *, largest: int) -> int:
    """Return how many samples of each channel there are up to the end of the last whole frame; 0: there is none."""
    begin, end = file.tell(), file.seek(0, 2)
    file.seek(max(begin, end - max(_TAIL_BYTES, _TAIL_FRAMES * largest)))
    tail = file.read()
    ends, last, begun = {0}, 0, (0, 0)  # audio may look like a frame by chance, but not like one that follows another
    for place in (match.start() for match in _SYNC.finditer(tail)):
        start, samples = _frame_at(tail[place : place + 16], block_size) or (0, 0)
        if samples and start in ends:
            last, begun = start + samples, (start, place)
        ends.add(start + samples)
    if last and _crc(tail[begun[1] :], 16, 0x8005):  # whoever wrote it was interrupted in the middle of its last frame
        return begun[0]
    return last


def _frame_at(head: bytes, block_size: int) -> tuple[int, int] | None:
    """Return the first sample and the samples of the frame that begins with these bytes; None: they are no frame."""
    if len(head) < 16 or head[3] & 1:
        return None
    number, place = _number(head[4:11])
    size_code, rate_code = head[2] >> 4, head[2] & 15
    samples = _BLOCK_SIZES.get(size_code, 0)
    if size_code in (6, 7):
        more = size_code - 5
        samples, place = int.from_bytes(head[4 + place : 4 + place + more], "big") + 1, place + more
    place += 4 + _MORE_BYTES.get(rate_code, 0)
    if (
        number is None
        or not samples
        or rate_code == 15
        or head[place : place + 1] != bytes([_crc(head[:place], 8, 0x07)])
    ):
        return None
    return number if head[1] & 1 else number * block_size, samples


def _number(coded: bytes) -> tuple[int | None, int]:
    """Return a number that is coded as UTF-8 codes letters, and how many bytes it takes."""
    ones = f"{coded[0]:08b}".find("0")
    if ones == 0:
        return coded[0], 1
    if ones in (-1, 1) or any(byte >> 6 != 2 for byte in coded[1:ones]):
        return None, 1
    number = coded[0] & (0x7F >> ones)
    for byte in coded[1:ones]:
        number = number << 6 | byte & 0x3F
    return number, ones


def _crc(data: bytes, bits: int, polynomial: int) -> int:
    """Return the check sum of data; 0 if they end with their own."""
    crc, top, mask = 0, 1 << bits - 1, (1 << bits) - 1
    for byte in data:
        crc ^= byte << bits - 8
        for _ in range(8):
            crc = (crc << 1 ^ polynomial if crc & top else crc << 1) & mask
    return crc
