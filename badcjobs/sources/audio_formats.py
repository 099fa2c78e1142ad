"""The headers of WAV and FLAC files, even with wrong or missing sizes; WAV is cut without decoding."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import BinaryIO, NamedTuple

UNKNOWN_SIZE = 0xFFFFFFFF  # did not fit into 32 bits, or was not known when the header was written
MOST_CHUNKS = 1000  # recorders write a handful; a damaged file could hold millions of empty ones
_PCM = 1
_FLOAT = 3
_CONSTANT_FRAMES = {_PCM, _FLOAT, 6, 7, 0xFFFE}  # PCM, float, A-law, µ-law, extensible: every frame has the same size
_MOST_METADATA = 2048  # bytes that a recorder may write behind a recording without audio
_LONGEST_FORMAT = 1024  # bytes; the longest in use has 40
_BLOCK = 1 << 20


_MAGIC = re.compile(
    rb"\0*(?:RIFF|RF64|BW64|RIFX|riff|fLaC|OggS|ID3|FORM....AIF|caff|\.snd|#!AMR|wvPk|MAC |TTA|Creative Voice|....ftyp"
    rb"|\x30\x26\xb2\x75|\x1a\x45\xdf\xa3|ADIF|\xff[\xe2-\xff])",  # also WMA, WebM; frames of MP3 and AAC
    re.DOTALL,
)


# M4A, 3GP, WMA, WebM, AAC, AMR, WavPack, Monkey's Audio, TTA: libsndfile does not decode them.
_FOR_FFMPEG = re.compile(
    rb"....ftyp|\x30\x26\xb2\x75|\x1a\x45\xdf\xa3|ADIF|\xff[\xf0\xf1\xf8\xf9]|#!AMR|wvPk|MAC |TTA", re.DOTALL
)


class NotWav(ValueError):
    """The file is not a WAV file whose frames can be counted; the text says why."""


class CompressedWav(NotWav):
    """The frames of a WAV file have no fixed size: only a decoder knows how many there are."""


class WavHeader(NamedTuple):
    """The format of a WAV file, and where its data is."""

    format_chunk: bytes  # as it is in the file; the next four fields are parsed from it
    kind: int
    channels: int
    rate_hz: int
    frame_bytes: int
    data_start: int = 0
    data_bytes: int = 0  # in the file, even if the header has another size
    missing_bytes: int = 0  # in the header but not in the file: it is truncated
    unfinished: bool = False  # the program that wrote it did not know its size yet, or lost power

    @property
    def frames(self) -> int:
        return self.data_bytes // self.frame_bytes

    @property
    def missing_frames(self) -> int:
        return self.missing_bytes // self.frame_bytes

    @property
    def length_s(self) -> float:
        return self.frames / self.rate_hz

    @property
    def promised_s(self) -> float:
        return (self.frames + self.missing_frames) / self.rate_hz


def read_wav_header(file: BinaryIO) -> WavHeader:
    """Read up to the first frame; raise NotWav if there is no data, or if its frames cannot be counted."""
    file.seek(0)
    magic = file.read(12)
    if magic[:4] not in (b"RIFF", b"RF64", b"BW64") or magic[8:] != b"WAVE":
        raise NotWav("its beginning is not that of a WAV file")

    try:
        format_chunk, start, promised = _find_data(file)
    except struct.error as error:
        raise NotWav("the file ends within its header") from error
    if len(format_chunk) < 16:
        raise NotWav("it has no format before its data")
    there = file.seek(0, 2) - start
    # Programs that stream, and recorders that lost power, write 0 or a size of nearly 2 or 4 GiB.
    is_streamed = promised == 0 and there > _MOST_METADATA
    is_made_up = UNKNOWN_SIZE - 0xFFFF <= promised <= UNKNOWN_SIZE or 0x7FFF0000 <= promised <= 0x80000000
    unfinished = is_streamed or (promised > there and is_made_up)
    if unfinished:
        promised = there

    kind, channels, rate_hz, frame_bytes = struct.unpack("<HHI4xH", format_chunk[:14])
    if kind not in _CONSTANT_FRAMES:
        raise CompressedWav(f"it is compressed (format {kind})")
    if not (channels and rate_hz and frame_bytes):
        raise NotWav(f"its header says: channels {channels}, rate {rate_hz} Hz, frame size {frame_bytes} bytes")
    return WavHeader(
        format_chunk,
        kind,
        channels,
        rate_hz,
        frame_bytes,
        data_start=start,
        data_bytes=min(promised, there),
        missing_bytes=max(0, promised - there),
        unfinished=unfinished,
    )


def _find_data(file: BinaryIO) -> tuple[bytes, int, int]:
    """Return the format chunk, the start of the data and its size in the header; struct.error: the file ends before."""
    format_chunk = b""
    long_bytes = 0
    for _ in range(MOST_CHUNKS):
        name, size = struct.unpack("<4sI", file.read(8))
        start = file.tell()
        if name == b"ds64":
            long_bytes = struct.unpack("<8xQ", file.read(16))[0]
        elif name == b"fmt ":
            format_chunk = file.read(min(size, _LONGEST_FORMAT))
        elif name == b"data":
            return format_chunk, start, long_bytes if size == UNKNOWN_SIZE else size
        file.seek(start + size + (size & 1))  # chunks start at even offsets
    raise NotWav(f"it has no data in its first {MOST_CHUNKS} chunks")


def begins_like_audio(start: bytes) -> bool:
    """Return whether a file may be audio, by its first bytes; some programs write zeros before MP3 frames."""
    return _MAGIC.match(start) is not None


def is_for_ffmpeg(start: bytes) -> bool:
    """Return whether only ffmpeg decodes a file with these first bytes."""
    return _FOR_FFMPEG.match(start) is not None


def new_header(
    channels: int,
    rate_hz: int,
    sample_bytes: int,
    *,
    is_float: bool,
) -> WavHeader:
    """Return the header of a new WAV file."""
    kind = _FLOAT if is_float else _PCM
    frame_bytes = sample_bytes * channels
    format_chunk = struct.pack(
        "<HHIIHH",
        kind,
        channels,
        rate_hz,
        rate_hz * frame_bytes,
        frame_bytes,
        8 * sample_bytes,
    )
    return WavHeader(format_chunk, kind, channels, rate_hz, frame_bytes)


def make_head(header: WavHeader, frames: int) -> bytes:
    """Return the header of a new file with this many frames of the same format."""
    data_bytes = frames * header.frame_bytes
    format_chunk = struct.pack("<4sI", b"fmt ", len(header.format_chunk)) + header.format_chunk
    format_chunk += b"\0" * (len(format_chunk) & 1)
    if header.kind != _PCM:
        format_chunk += struct.pack("<4sII", b"fact", 4, min(frames, UNKNOWN_SIZE))
    body_bytes = 4 + len(format_chunk) + 8 + data_bytes + (data_bytes & 1)
    if body_bytes < UNKNOWN_SIZE:
        head = struct.pack("<4sI4s", b"RIFF", body_bytes, b"WAVE")
        return head + format_chunk + struct.pack("<4sI", b"data", data_bytes)
    head = struct.pack("<4sI4s", b"RF64", UNKNOWN_SIZE, b"WAVE")
    head += struct.pack("<4sIQQQI", b"ds64", 28, body_bytes + 36, data_bytes, frames, 0)
    return head + format_chunk + struct.pack("<4sI", b"data", UNKNOWN_SIZE)


def copy_frames(
    source: BinaryIO,
    header: WavHeader,
    first: int,
    last: int,
    target: Path,
) -> None:
    """Write the frames from ``first`` up to ``last`` to a new file; after the last one of the source they repeat.

    At most one block is in memory.
    """
    source_bytes = header.frames * header.frame_bytes
    position = first * header.frame_bytes
    left = (last - first) * header.frame_bytes
    padding = b"\0" * (left & 1)
    with target.open("wb") as out:
        out.write(make_head(header, last - first))
        while left:
            source.seek(header.data_start + position)
            block = source.read(min(left, source_bytes - position, _BLOCK))
            if not block:
                raise EOFError(f"the file became shorter while it was read (missing bytes: {left})")
            out.write(block)
            position = (position + len(block)) % source_bytes
            left -= len(block)
        out.write(padding)


# --- FLAC: only the header is read; soundfile decodes the audio -------------------------------------------------------

_MOST_TAGS = 1 << 16  # bytes that some programs put before the stream
_MOST_FRAMES = 0xF_FFFF_FFFF


class FlacInfo(NamedTuple):
    """The STREAMINFO of a FLAC file."""

    rate_hz: int
    channels: int
    bits: int
    frames: int  # 0: not known, the encoder wrote to a pipe or lost power
    has_audio: bool  # something comes after the header


def read_flac_info(file: BinaryIO) -> FlacInfo | None:
    """Read the start of a file; None: it is not FLAC."""
    file.seek(0)
    try:
        magic, kind, packed = struct.unpack(">4sB13xQ", file.read(26))
    except struct.error:
        return None
    if magic != b"fLaC" or kind & 0x7F or not packed >> 44:
        return None
    # 20 bits rate, 3 channels, 5 depth, 36 frames
    rate_hz = packed >> 44
    channels = (packed >> 41 & 7) + 1
    bits = (packed >> 36 & 31) + 1
    return FlacInfo(rate_hz, channels, bits, packed & _MOST_FRAMES, _has_frames(file))


def _has_frames(file: BinaryIO) -> bool:
    """Return whether anything follows the blocks of metadata, of which the first is read."""
    file.seek(-22, 1)
    for _ in range(MOST_CHUNKS):
        head = file.read(4)
        file.seek(int.from_bytes(head[1:], "big"), 1)
        if not head or head[0] & 0x80:  # the last block
            break
    return bool(file.read(1))


def start_with_length(file: BinaryIO, frames: int) -> bytes:
    """Return the first bytes of a FLAC file with the length added to its header."""
    file.seek(0)
    start = file.read(_MOST_TAGS)
    to_length = start.index(b"fLaC") + 18
    (packed,) = struct.unpack(">Q", start[to_length : to_length + 8])
    return start[:to_length] + struct.pack(">Q", packed & ~_MOST_FRAMES | frames & _MOST_FRAMES)
