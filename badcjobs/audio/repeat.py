"""Makes audio of any length out of audio that is shorter, by repeating it; nothing is decoded."""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO

from badcjobs.audio.wav import NotWav, make_head, read_header

_BLOCK = 1 << 20


def write_repeated(source: Path, length_s: float, target: Path) -> None:
    """Write so many seconds of a WAV file as a new one, from its beginning, over and over again.

    Raise NotWav, or OSError where a disk will not have it; then nothing is left of the new file.
    """
    try:
        with source.open("rb") as file, target.open("wb") as out:
            header = read_header(file)
            if header.frames == 0:
                raise NotWav("it has no audio in it")
            frames = max(1, round(length_s * header.rate_hz))
            out.write(make_head(header, frames))
            left = frames * header.frame_bytes
            pad = left & 1
            while left:
                file.seek(header.data_start)
                left -= _copy(file, out, min(left, header.frames * header.frame_bytes))
            out.write(b"\0" * pad)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


def _copy(source: BinaryIO, target: BinaryIO, count: int) -> int:
    """Copy so many bytes, and return how many they were; a file that became shorter is no WAV any more."""
    left = count
    while left:
        block = source.read(min(left, _BLOCK))
        if not block:
            raise NotWav("it became shorter while it was read")
        target.write(block)
        left -= len(block)
    return count
