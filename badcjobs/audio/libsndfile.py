"""Cuts what is no WAV with the package ``soundfile`` (the extra ``audio``), to the sample and without loss.

The WAV file is written here: a full disk then says so, and formats stay as they were.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

from badcjobs.audio.wav import WavHeader, make_head
from badcjobs.model import begin_with_length, read_flac_info
from badcjobs.seams import CannotCut, NoDecoder

_BLOCK = 1 << 16  # frames
_FLOAT = 3
_NO_COUNT = 1 << 62
_LOADING = Lock()  # a thread that waits for another one's import gets the half of a module where that fails


def cut_with_libsndfile(source: Path, start_s: float, end_s: float, target: Path) -> None:
    """Write the audio between two moments as a WAV file; raise NoDecoder or CannotCut."""
    soundfile = load_soundfile()
    try:
        with _opened(soundfile, source) as audio:
            first = max(0, round(start_s * audio.samplerate))
            last = audio.frames if end_s == float("inf") else min(audio.frames, round(end_s * audio.samplerate))
            if first >= last:
                has = f"{audio.frames / audio.samplerate:.3f} s of audio"
                raise CannotCut(f"{source} has {has}, and none after {start_s:.3f} s")
            try:
                audio.seek(first)
                _write(audio, last - first, target)
            except soundfile.SoundFileError as error:  # its header could be read
                where = f"from {start_s:g} s to {last / audio.samplerate:g} s"
                what = f"{source} cannot be decoded {where}: it breaks off, or is damaged"
                raise CannotCut(f"{what} ({str(error).removeprefix('Error : ').rstrip('.')})") from error
    except soundfile.SoundFileError as error:
        raise CannotCut(f"{source} cannot be decoded: {error}") from error


def length_with_libsndfile(path: Path) -> float | None:
    """Return the seconds of audio in a file; None: it cannot tell."""
    try:
        soundfile = load_soundfile()
        with _opened(soundfile, path) as audio:
            return audio.frames / audio.samplerate or None
    except Exception:  # the package is missing, or the file is nothing for it: others are asked then
        return None


@contextmanager
def _opened(soundfile: Any, path: Path) -> Iterator[Any]:
    """Open a file; of a FLAC that does not tell its length libsndfile knows no end, and cannot seek in it."""
    with soundfile.SoundFile(path) as audio:
        if audio.frames < _NO_COUNT:
            yield audio
            return
    with path.open("rb") as file:
        info = read_flac_info(file)
        if info is None or not info.frames:
            raise CannotCut(f"{path} does not tell how long it is: neither its header does nor its last frames")
        begin = begin_with_length(file, info.frames)
    with _WithBegin(path, begin) as told, soundfile.SoundFile(told) as audio:
        yield audio


class _WithBegin(io.FileIO):
    """A file of which the first bytes read otherwise."""

    def __init__(self, path: Path, begin: bytes) -> None:
        super().__init__(path)
        self._begin = begin

    def readinto(self, buffer: Any) -> int | None:
        place = self.tell()
        many = super().readinto(buffer)
        if many and place < len(self._begin):
            begin = self._begin[place : place + many]
            memoryview(buffer).cast("B")[: len(begin)] = begin
        return many


def load_soundfile() -> Any:
    """Return the package; raise NoDecoder where it is not installed, or its library cannot be loaded."""
    try:
        with _LOADING:
            import soundfile
    except (ImportError, OSError) as error:
        raise NoDecoder(f"the package soundfile is not here ({error})") from error
    return soundfile


def _write(audio: Any, frames: int, target: Path) -> None:
    kind, size, how, shape = _layout(audio.subtype)
    frame_bytes = size * audio.channels
    form = struct.pack(
        "<HHIIHH", kind, audio.channels, audio.samplerate, audio.samplerate * frame_bytes, frame_bytes, 8 * size
    )
    header = WavHeader(form, audio.samplerate, frame_bytes, 0, frames)
    written = 0
    with target.open("wb") as out:
        out.write(make_head(header, frames))
        while written < frames and (block := bytes(audio.buffer_read(min(_BLOCK, frames - written), dtype=how))):
            shaped = shape(block)
            out.write(shaped)
            written += len(shaped) // frame_bytes
        out.write(b"\0" * (written * frame_bytes & 1))
        if written < frames:  # the file breaks off; what is missing, others will see
            out.seek(0)
            out.write(make_head(header, written))


def _layout(subtype: str) -> tuple[int, int, str, Callable[[bytes], bytes]]:
    """Return WAV format, bytes a sample, what to decode to, and how that becomes the samples of a file."""
    if subtype in ("PCM_S8", "PCM_U8", "PCM_16"):
        return 1, 2, "int16", bytes
    if subtype == "PCM_24":
        return 1, 3, "int32", _without_lowest_byte
    return _FLOAT, 4, "float32", bytes


def _without_lowest_byte(block: bytes) -> bytes:
    """Return 24-bit samples from 32-bit ones, which have them at their upper end."""
    short = bytearray(len(block) // 4 * 3)
    for place in range(3):
        short[place::3] = block[place + 1 :: 4]
    return bytes(short)
