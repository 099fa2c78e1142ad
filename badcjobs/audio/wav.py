"""WAV files as recorders really leave them: where the frames are, and a stretch of them as a new file.

Nothing is decoded: frames are copied as they are. Which piece is wanted, and what to do with other formats, is
``cutter``'s business.
"""

from __future__ import annotations

import errno
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from badcjobs.model import MOST_CHUNKS, UNTOLD, is_made_up, only_chunks

_PCM = 1
_CONSTANT_FRAMES = {_PCM, 3, 6, 7, 0xFFFE}  # PCM, float, A-law, µ-law, extensible: every frame has the same size
_LONGEST_FORMAT = 1024  # bytes; 40 is the longest that anybody writes
_BLOCK = 1 << 20


class NotWav(ValueError):
    """This is no WAV file whose frames can be counted; the text says why."""


@dataclass(frozen=True, slots=True)
class WavHeader:
    """Where the frames of a WAV file lie."""

    format_chunk: bytes  # as it stands in the file
    rate_hz: int
    frame_bytes: int
    data_start: int
    frames: int  # whole ones that are really there, whatever the header says
    missing_frames: int = 0  # that the header says and the file has not: it breaks off

    @property
    def length_s(self) -> float:
        return self.frames / self.rate_hz

    @property
    def promised_s(self) -> float:
        return (self.frames + self.missing_frames) / self.rate_hz


def read_header(file: BinaryIO) -> WavHeader:
    """Read up to the first frame; raise NotWav where there is none to be found."""
    file_bytes = file.seek(0, 2)
    file.seek(0)
    magic = file.read(12)
    if magic[:4] not in (b"RIFF", b"RF64", b"BW64") or magic[8:] != b"WAVE":
        raise NotWav("it does not begin like a WAV file" if magic else "the file is empty")
    try:
        return _read_chunks(file, file_bytes)
    except struct.error as error:
        raise NotWav("the file ends within its header") from error


def _read_chunks(file: BinaryIO, file_bytes: int) -> WavHeader:
    format_chunk, long_bytes = b"", 0
    for _ in range(MOST_CHUNKS):
        name, size = struct.unpack("<4sI", file.read(8))
        start = file.tell()
        if name == b"ds64":
            long_bytes = struct.unpack("<8xQ", file.read(16))[0]
        elif name == b"fmt ":
            format_chunk = file.read(min(size, _LONGEST_FORMAT))
        elif name == b"data":
            told = long_bytes if size == UNTOLD else size
            rest = file_bytes - start
            # A recorder that lost its power leaves 0 before its frames; one with nothing to record has none.
            if told == 0 and not only_chunks(file, start, file_bytes):
                told = rest
            return _make_header(format_chunk, start, min(told, rest), 0 if is_made_up(told) else max(0, told - rest))
        file.seek(start + size + (size & 1))  # chunks start at even offsets
    raise NotWav("it has no end of chunks, and no data among them")


def _make_header(format_chunk: bytes, start: int, data_bytes: int, missing_bytes: int) -> WavHeader:
    if len(format_chunk) < 16:
        raise NotWav("its format is not given before its data")
    kind, channels, rate_hz, _, frame_bytes = struct.unpack("<HHIIH", format_chunk[:14])
    if kind not in _CONSTANT_FRAMES:
        raise NotWav(f"its frames are packed (format {kind})")
    if not (channels and rate_hz and frame_bytes):
        raise NotWav(f"its header says {channels} channels, {rate_hz} Hz, {frame_bytes} bytes a frame")
    frames = data_bytes // frame_bytes
    return WavHeader(format_chunk, rate_hz, frame_bytes, start, frames, missing_bytes // frame_bytes)


def make_head(header: WavHeader, frames: int) -> bytes:
    """Return what stands before this many frames in a new file of the same format."""
    data_bytes = frames * header.frame_bytes
    format_chunk = struct.pack("<4sI", b"fmt ", len(header.format_chunk)) + header.format_chunk
    format_chunk += b"\0" * (len(format_chunk) & 1)
    if struct.unpack("<H", header.format_chunk[:2])[0] != _PCM:
        format_chunk += struct.pack("<4sII", b"fact", 4, min(frames, UNTOLD))
    body_bytes = 4 + len(format_chunk) + 8 + data_bytes + (data_bytes & 1)
    if body_bytes < UNTOLD:
        return struct.pack("<4sI4s", b"RIFF", body_bytes, b"WAVE") + format_chunk + _data_head(data_bytes)
    long_sizes = struct.pack("<4sIQQQI", b"ds64", 28, body_bytes + 36, data_bytes, frames, 0)
    return struct.pack("<4sI4s", b"RF64", UNTOLD, b"WAVE") + long_sizes + format_chunk + _data_head(UNTOLD)


def _data_head(data_bytes: int) -> bytes:
    return struct.pack("<4sI", b"data", data_bytes)


def copy_frames(source: BinaryIO, header: WavHeader, first: int, last: int, target: Path) -> None:
    """Write the frames from ``first`` up to ``last`` as a new file; never more than a block of them is in memory."""
    count, start = (last - first) * header.frame_bytes, header.data_start + first * header.frame_bytes
    with target.open("wb") as out:
        out.write(make_head(header, last - first))
        left = count - _send(source, start, count, out)
        source.seek(start + count - left)
        while left and (block := source.read(min(left, _BLOCK))):
            out.write(block)
            left -= len(block)
        out.write(b"\0" * (count & 1))
    if left:
        raise EOFError(f"the audio became {left} bytes shorter while it was read")


def _send(source: BinaryIO, start: int, count: int, out: BinaryIO) -> int:
    """Let the kernel copy as much as it will, which spares a way through our memory; return how much that was."""
    out.flush()
    sent = 0
    try:
        while sent < count and (more := os.sendfile(out.fileno(), source.fileno(), start + sent, count - sent)):
            sent += more
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise
        # Some filesystems cannot; they are read in the ordinary way.
    return sent
