"""Cuts what is no WAV with the program ffmpeg, where there is one."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from badcjobs.audio.wav import NotWav, read_header
from badcjobs.model import FlacInfo
from badcjobs.seams import CannotCut, NoDecoder

_DECODING_S = 900.0  # a day of audio from a slow file system


class Ffmpeg:
    """The programs ffmpeg and ffprobe, looked for as PATH has it."""

    def __init__(self, search_path: str) -> None:
        self._search_path = search_path

    def cut(self, source: Path, start_s: float, end_s: float, target: Path, flac: FlacInfo | None) -> None:
        """Write the audio between two moments as a WAV file; raise NoDecoder or CannotCut."""
        ffmpeg = shutil.which("ffmpeg", path=self._search_path)
        if ffmpeg is None:
            raise NoDecoder("there is no ffmpeg on PATH")
        before, after, codec = _place(start_s, end_s, flac)
        argv = [ffmpeg, "-nostdin", "-v", "error", "-y", *before, "-i", str(source.absolute()), "-map", "0:a:0"]
        said = _run([*argv, *after, "-c:a", codec, "-f", "wav", str(target)])
        if not _has_audio(target):
            raise CannotCut(f"{source} cannot be decoded by ffmpeg: {said or 'it wrote nothing'}")

    def length_s(self, path: Path) -> float | None:
        """Return the seconds of audio in a file; None: nobody can tell."""
        ffprobe = shutil.which("ffprobe", path=self._search_path)
        if ffprobe is None:
            return None
        argv = [ffprobe, "-v", "error", "-select_streams", "a:0", "-show_entries", "format=duration", "-of", "csv=p=0"]
        said = _run([*argv, str(path.absolute())])
        try:
            length_s = float(said.splitlines()[-1])
        except (ValueError, IndexError):
            return None
        return length_s if length_s > 0 else None


def _place(start_s: float, end_s: float, flac: FlacInfo | None) -> tuple[list[str], list[str], str]:
    """Return what is said before and after the file's name, and how samples are written.

    -ss before it jumps there: to the sample in FLAC, if the moment is that of a sample. After it everything is decoded
    from the beginning: slower, but right also where an MP3 has no index.
    """
    codec = "pcm_f32le"
    if flac is not None:
        codec = "pcm_s16le" if flac.bits <= 16 else "pcm_s24le" if flac.bits <= 24 else codec
        start_s = round(start_s * flac.rate_hz) / flac.rate_hz
        end_s = end_s if end_s == float("inf") else round(end_s * flac.rate_hz) / flac.rate_hz
    begin = ["-ss", f"{start_s:.6f}"]
    length = [] if end_s == float("inf") else ["-t", f"{end_s - start_s:.6f}"]
    return ([], [*begin, *length], codec) if flac is None else (begin, length, codec)


def _has_audio(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return read_header(file).frames > 0
    except (OSError, NotWav):
        return False


def _run(argv: Sequence[str]) -> str:
    """Return what a program says; whether it worked, its output tells."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DECODING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]
