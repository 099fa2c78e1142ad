"""WAV: its header read and its samples cut without decoding, also where sizes are made up."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

UNTOLD = 0xFFFFFFFF  # a size that did not fit into 32 bits, or was not known when the header was written
MOST_CHUNKS = 1000  # recorders write a handful; a damaged file could hold millions of empty ones
_PCM = 1
CONSTANT_FRAMES = {_PCM, 3, 6, 7, 0xFFFE}  # PCM, float, A-law, µ-law, extensible: every frame has the same size
_LONGEST_FORMAT = 1024  # bytes; 40 is the longest that anybody writes
_BLOCK = 1 << 20


class DataChunk(NamedTuple):
    """Where the frames of a WAV file lie, and how many bytes of them there are."""

    format_chunk: bytes  # as it stands in the file; empty: there is none before the data
    start: int
    told: int  # bytes, as the header says
    there: int
    unfinished: bool  # whoever wrote it did not know its size yet, or lost power


def is_wav(magic: bytes) -> bool:
    """Say whether a file that begins with these 12 bytes is a WAV file."""
    return magic[:4] in (b"RIFF", b"RF64", b"BW64") and magic[8:] == b"WAVE"


def find_data(file: BinaryIO) -> DataChunk | None:
    """Read on behind the first 12 bytes, up to the data; None: there is none. A file that ends is a struct.error."""
    format_chunk, long_bytes = b"", 0
    for _ in range(MOST_CHUNKS):
        name, size = struct.unpack("<4sI", file.read(8))
        start = file.tell()
        if name == b"ds64":
            long_bytes = struct.unpack("<8xQ", file.read(16))[0]
        elif name == b"fmt ":
            format_chunk = file.read(min(size, _LONGEST_FORMAT))
        elif name == b"data":
            return _measure(file, format_chunk, start, long_bytes if size == UNTOLD else size)
        file.seek(start + size + (size & 1))  # chunks start at even offsets
    return None


def _measure(file: BinaryIO, format_chunk: bytes, start: int, told: int) -> DataChunk:
    """Count what is behind the header: programs that stream, and recorders that lost their power, leave 0 or a lot."""
    rest = file.seek(0, 2) - start
    if told == 0 and not only_chunks(file, start, start + rest):
        return DataChunk(format_chunk, start, told, rest, unfinished=True)
    return DataChunk(format_chunk, start, told, min(told, rest), told > rest and is_made_up(told))


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
    file.seek(0)
    magic = file.read(12)
    if not is_wav(magic):
        raise NotWav("it does not begin like a WAV file" if magic else "the file is empty")
    try:
        data = find_data(file)
    except struct.error as error:
        raise NotWav("the file ends within its header") from error
    if data is None:
        raise NotWav("it has no end of chunks, and no data among them")
    if len(data.format_chunk) < 16:
        raise NotWav("its format is not given before its data")
    kind, channels, rate_hz, _, frame_bytes = struct.unpack("<HHIIH", data.format_chunk[:14])
    if kind not in CONSTANT_FRAMES:
        raise NotWav(f"its frames are packed (format {kind})")
    if not (channels and rate_hz and frame_bytes):
        raise NotWav(f"its header says {channels} channels, {rate_hz} Hz, {frame_bytes} bytes a frame")
    missing_bytes = 0 if data.unfinished else data.told - data.there
    frames, missing = data.there // frame_bytes, missing_bytes // frame_bytes
    return WavHeader(data.format_chunk, rate_hz, frame_bytes, data.start, frames, missing)


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
    count = (last - first) * header.frame_bytes
    with target.open("wb") as out:
        out.write(make_head(header, last - first))
        left = copy_bytes(source, header.data_start + first * header.frame_bytes, count, out)
        out.write(b"\0" * (count & 1))
    if left:
        raise EOFError(f"the audio became {left} bytes shorter while it was read")


def copy_bytes(source: BinaryIO, start: int, count: int, out: BinaryIO) -> int:
    """Copy bytes from one file to another; return how many are missing at the end."""
    source.seek(start)
    while count and (block := source.read(min(count, _BLOCK))):
        out.write(block)
        count -= len(block)
    return count
