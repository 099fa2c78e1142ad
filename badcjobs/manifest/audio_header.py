"""What the header of a WAV or FLAC file says, above all its length; whether it can be decoded, the engine will say."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

from badcjobs.model import MOST_CHUNKS, UNTOLD, AudioHeader, is_made_up, only_chunks, read_flac_info

_HEAD_BYTES = 4096  # are read at once; left to itself, Python takes a block, which Lustre says has 4 MiB
_SLACK_S = 1.0  # so much less than the header says is no loss: recorders write whole blocks
_CONSTANT_FRAMES = {1, 3, 6, 7, 0xFFFE}  # PCM, float, A-law, µ-law, extensible: every frame has the same size


def read_duration_s(path: Path | str) -> float | None:
    """Return the seconds of audio in a WAV or FLAC file, or None when its header does not tell.

    Of a WAV that breaks off, those that are there.
    """
    header = read_header(path)
    return header.duration_s if header.there_s is None else header.there_s


def read_header(path: Path | str) -> AudioHeader:
    """Return what the header of a WAV or FLAC file tells, or why it cannot be read."""
    try:
        with open(path, "rb", _HEAD_BYTES) as file:  # noqa: PTH123  (a Path per file is felt, with a million of them)
            magic = file.read(12)
            if magic[:4] in (b"RIFF", b"RF64", b"BW64") and magic[8:] == b"WAVE":
                return _wav_header(file)
            return _flac_header(file)
    except OSError as error:
        return AudioHeader(unreadable=error.strerror or str(error))
    except struct.error:
        return AudioHeader()


def _wav_header(file: BinaryIO) -> AudioHeader:
    format_chunk: bytes | None = None
    long_data_size: int | None = None
    for _ in range(MOST_CHUNKS):
        name, size = struct.unpack("<4sI", file.read(8))
        next_chunk = file.tell() + size + (size & 1)  # chunks start at even offsets
        if name == b"ds64":
            long_data_size = struct.unpack("<8xQ", file.read(16))[0]
        elif name == b"fmt ":
            format_chunk = file.read(16)
        elif name == b"data":
            told = (long_data_size or 0) if size == UNTOLD else size
            return _described(format_chunk, told, *_really_there(file, told)) if format_chunk else AudioHeader()
        file.seek(next_chunk)
    return AudioHeader()


def _really_there(file: BinaryIO, told: int) -> tuple[int, bool]:
    """Return the bytes of audio behind the header, and whether that is unfinished; as audio/wav.py counts them.

    Programs that stream, and recorders that lost their power, leave 0 or a huge number.
    """
    start = file.tell()
    rest = file.seek(0, 2) - start
    if told == 0:
        return (0, False) if only_chunks(file, start, start + rest) else (rest, True)
    return min(told, rest), told > rest and is_made_up(told)


def _described(format_chunk: bytes, told: int, there: int, unfinished: bool) -> AudioHeader:
    kind, channels, rate, bytes_per_s, frame_size = struct.unpack("<HHIIH", format_chunk[:14])

    def seconds(data_size: int) -> float | None:
        if kind in _CONSTANT_FRAMES and rate and frame_size:
            return float(data_size // frame_size / rate)
        return float(data_size / bytes_per_s) if bytes_per_s else None

    duration_s, there_s = seconds(told), seconds(there)
    if unfinished or duration_s is None or there_s is None or duration_s - there_s <= _SLACK_S:
        return AudioHeader(there_s, rate or None, channels or None, unfinished=unfinished and there > 0)
    return AudioHeader(duration_s, rate or None, channels or None, there_s)


def _flac_header(file: BinaryIO) -> AudioHeader:
    if (info := read_flac_info(file)) is None:
        return AudioHeader()
    length_s = info.frames / info.rate_hz if info.frames else None
    return AudioHeader(length_s, info.rate_hz, info.channels, unfinished=bool(info.frames) and not info.is_told)
