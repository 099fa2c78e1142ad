"""How long a recording lasts, from the header of a WAV or FLAC file; whether it can be decoded, the engine will say."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

_UNTOLD = 0xFFFFFFFF  # a size that did not fit into 32 bits, or was not known when the header was written
_MOST_CHUNKS = 1000  # recorders write a handful; a damaged file could hold millions of empty ones
_CONSTANT_FRAMES = {1, 3, 6, 7, 0xFFFE}  # PCM, float, A-law, µ-law, extensible: every frame has the same size


def read_duration_s(path: Path | str) -> float | None:
    """Return the seconds of audio in a WAV or FLAC file, or None when its header does not tell."""
    try:
        with Path(path).open("rb") as file:
            magic = file.read(12)
            if magic[:4] in (b"RIFF", b"RF64", b"BW64") and magic[8:] == b"WAVE":
                return _wav_duration_s(file)
            file.seek(_id3_size(magic))
            return _flac_duration_s(file)
    except (OSError, struct.error):
        return None


def _wav_duration_s(file: BinaryIO) -> float | None:
    format_chunk: bytes | None = None
    long_data_size: int | None = None
    for _ in range(_MOST_CHUNKS):
        name, size = struct.unpack("<4sI", file.read(8))
        next_chunk = file.tell() + size + (size & 1)  # chunks start at even offsets
        if name == b"ds64":
            long_data_size = struct.unpack("<8xQ", file.read(16))[0]
        elif name == b"fmt ":
            format_chunk = file.read(16)
        elif name == b"data":
            if size == _UNTOLD and long_data_size:
                size = long_data_size
            return _seconds(format_chunk, _really_there(file, size)) if format_chunk else None
        file.seek(next_chunk)
    return None


def _really_there(file: BinaryIO, data_size: int) -> int:
    """Return the bytes of data: programs that stream leave 0 or a huge number, a full card cuts the file short."""
    start = file.tell()
    rest = file.seek(0, 2) - start
    return min(data_size, rest) if data_size else rest


def _seconds(format_chunk: bytes, data_size: int) -> float | None:
    kind, _channels, rate, bytes_per_s, frame_size = struct.unpack("<HHIIH", format_chunk[:14])
    if kind in _CONSTANT_FRAMES and rate and frame_size:
        return float(data_size // frame_size / rate)
    return float(data_size / bytes_per_s) if bytes_per_s else None


def _id3_size(magic: bytes) -> int:
    """Return how many bytes of ID3 tags some taggers put before a FLAC stream."""
    if len(magic) < 10 or magic[:3] != b"ID3":
        return 0
    a, b, c, d = magic[6:10]  # seven bits each
    return 10 + (a << 21 | b << 14 | c << 7 | d)


def _flac_duration_s(file: BinaryIO) -> float | None:
    magic, block_type, packed = struct.unpack(">4sB3x10xQ", file.read(26))
    if magic != b"fLaC" or block_type & 0x7F != 0:  # STREAMINFO is always the first block
        return None
    rate, samples = packed >> 44, packed & 0xF_FFFF_FFFF  # 20 bits rate, 3 channels, 5 depth, 36 samples
    return samples / rate if rate and samples else None
