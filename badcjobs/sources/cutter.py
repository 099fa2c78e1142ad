"""Cut parts out of audio files: WAV is copied, soundfile decodes FLAC, MP3, OGG and AIFF, ffmpeg M4A, AAC and WMA."""

from __future__ import annotations

import errno
import io
import math
import shutil
import stat
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO, NoReturn

from badcjobs.sources.audio_formats import (
    FlacInfo,
    NotWav,
    WavHeader,
    copy_frames,
    is_for_ffmpeg,
    make_head,
    new_header,
    read_flac_info,
    read_wav_header,
    start_with_length,
)

_SLACK_S = 1.0  # recorders, and rounded times, are not exact
_GUESS_BYTES_PER_S = 48_000 * 2 * 4  # stereo, decoded to 32 bits a sample


class CannotCut(Exception):
    """This audio cannot be cut; the text says why."""


class NotThere(CannotCut):
    """The audio is missing, or ends before the start of this chunk; it did not reach the engine."""


class NoDecoder(CannotCut):
    """No program on this machine can decode this format; the audio may be intact."""


@dataclass
class AudioCutter:
    """Measures audio files, and cuts parts out of them."""

    search_path: str | None = None  # where ffmpeg is searched, in the form of PATH

    def length_s(self, path: Path) -> float | None:
        """Return the seconds of audio that are really in the file; None: not known."""
        try:
            header = _read_header(path)
        except OSError:
            return None
        if isinstance(header, WavHeader):
            return header.length_s
        if isinstance(header, FlacInfo) and header.frames:
            return header.frames / header.rate_hz
        if needs_ffmpeg(path):
            return measure_with_ffprobe(path, self.search_path)
        return measure_with_libsndfile(path)[0]

    def promised_s(self, path: Path) -> float | None:
        """Return the seconds of audio that a WAV header states; a truncated file has less.

        None: not a WAV file; in other formats it is not known where audio is missing.
        """
        with suppress(OSError, NotWav), open_audio(path) as file:
            return read_wav_header(file).promised_s
        return None

    def size_bytes(self, source: Path, start_s: float, end_s: float) -> int:
        """Return the approximate size of a part as a WAV file; raise OSError if the file cannot be read."""
        header = _read_header(source)
        if isinstance(header, WavHeader):
            first, last = _frames(header.frames, header.rate_hz, start_s, end_s)
            return len(make_head(header, 0)) + max(0, last - first) * header.frame_bytes
        bytes_per_s = _GUESS_BYTES_PER_S
        if isinstance(header, FlacInfo):
            bytes_per_s = header.rate_hz * header.channels * (2 if header.bits <= 16 else 4)
        if end_s == math.inf:
            end_s = self.length_s(source) or 0.0
        return int(max(0.0, end_s - start_s) * bytes_per_s)

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        """Write the audio between two times to the WAV file ``target``.

        An end after the end of the audio means the end of the audio, even in a truncated file. Raise CannotCut, or
        OSError if the disk refuses the file.
        """
        try:
            try:
                _copy_wav(source, start_s, end_s, target)
            except NotWav:
                if needs_ffmpeg(source):
                    self._cut_with_ffmpeg(source, start_s, end_s, target)
                else:
                    _cut_with_libsndfile(source, start_s, end_s, target)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _cut_with_ffmpeg(
        self,
        source: Path,
        start_s: float,
        end_s: float,
        target: Path,
    ) -> None:
        ffmpeg = shutil.which("ffmpeg", path=self.search_path)
        if ffmpeg is None:
            raise NoDecoder(f"{source} cannot be decoded: M4A, AAC and WMA need ffmpeg, which is not on PATH")
        # -ss after the file decodes everything from the start: slow, but right for a file without an index.
        part = ["-ss", f"{start_s:.6f}"]
        if end_s < math.inf:
            part += ["-t", f"{end_s - start_s:.6f}"]
        argv = [ffmpeg, "-nostdin", "-v", "error", "-y", "-i", str(source.absolute()), "-map", "0:a:0"]
        output = _run([*argv, *part, "-c:a", "pcm_f32le", "-f", "wav", str(target)])
        if not target.exists() or not self.length_s(target):
            raise CannotCut(f"ffmpeg cannot decode {source}: {output or 'no output'}")


def open_audio(path: Path) -> BinaryIO:
    """Open a file; raise OSError for a pipe: opening one blocks until a program writes to it."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # for a folder, open() raises the error
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not an audio file", str(path))
    return path.open("rb")


def _read_header(path: Path) -> WavHeader | FlacInfo | None:
    """Read the header of a file; None: another format, or damaged."""
    with open_audio(path) as file:
        try:
            return read_wav_header(file)
        except NotWav:
            return read_flac_info(file)


def needs_ffmpeg(path: Path) -> bool:
    """Return whether only ffmpeg can decode a file."""
    with open_audio(path) as file:
        return is_for_ffmpeg(file.read(12))


def _frames(frames: int, rate_hz: int, start_s: float, end_s: float) -> tuple[int, int]:
    """Return the first frame of a part, and the one behind its last."""
    last = frames if end_s == math.inf else min(frames, round(end_s * rate_hz))
    return max(0, round(start_s * rate_hz)), last


def _copy_wav(source: Path, start_s: float, end_s: float, target: Path) -> None:
    with open_audio(source) as file:
        header = read_wav_header(file)
        first, last = _frames(header.frames, header.rate_hz, start_s, end_s)
        if first >= last:
            _refuse_empty_part(source, header.length_s, start_s, header.promised_s)
        try:
            copy_frames(file, header, first, last, target)
        except EOFError as problem:
            raise CannotCut(f"{source}: {problem}") from problem


def _refuse_empty_part(
    source: Path,
    length_s: float,
    start_s: float,
    promised_s: float = 0.0,
) -> NoReturn:
    text = f"{source} has {length_s:.3f} s of audio and nothing after {start_s:.3f} s"
    if promised_s - length_s > _SLACK_S and start_s < promised_s:
        raise NotThere(f"{text}: it is truncated, its header says {promised_s:.3f} s")
    raise CannotCut(text)


def write_repeated(source: Path, length_s: float, target: Path) -> None:
    """Write a WAV file of this length that repeats another one; raise NotWav, EOFError or OSError without a file."""
    try:
        with source.open("rb") as file:
            header = read_wav_header(file)
            if header.frames == 0:
                raise NotWav("it has no audio")
            copy_frames(file, header, 0, max(1, round(length_s * header.rate_hz)), target)
    except BaseException:
        target.unlink(missing_ok=True)
        raise


# --- ffmpeg: M4A, AAC, WMA --------------------------------------------------------------------------------------------

_DECODING_S = 900.0  # enough for a day of audio from a slow filesystem


def measure_with_ffprobe(path: Path, search_path: str | None = None) -> float | None:
    """Return the length of a file; None: not known, because there is no ffprobe or it cannot read it."""
    ffprobe = shutil.which("ffprobe", path=search_path)
    if ffprobe is None:
        return None
    argv = [ffprobe, "-v", "error", "-select_streams", "a:0", "-show_entries", "format=duration", "-of", "csv=p=0"]
    try:
        length_s = float(_run([*argv, str(path.absolute())]).splitlines()[-1])
    except (ValueError, IndexError):
        return None
    if length_s > 0:
        return length_s
    return None


def _run(argv: Sequence[str]) -> str:
    """Return the output of a program; the caller checks whether it worked."""
    try:
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_DECODING_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]


# --- libsndfile -------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 16  # frames
_COUNTED_FRAMES = 1 << 12  # at a time: if the last ones cannot be decoded, no others are lost with them
_NO_COUNT = 1 << 62
_LOADING = Lock()  # if an import fails, another thread that waits for it gets a half-initialized module


def _cut_with_libsndfile(source: Path, start_s: float, end_s: float, target: Path) -> None:
    soundfile = load_soundfile()
    try:
        with _opened(soundfile, source) as audio:
            first, last = _frames(audio.frames, audio.samplerate, start_s, end_s)
            if first >= last:
                _refuse_empty_part(source, audio.frames / audio.samplerate, start_s)
            try:
                audio.seek(first)
                _write(audio, last - first, target)
            except soundfile.SoundFileError as error:  # although the header could be read
                part = f"from {start_s:g} s to {last / audio.samplerate:g} s"
                reason = str(error).removeprefix("Error : ").rstrip(".")
                raise CannotCut(f"{source} cannot be decoded {part}: it is truncated or damaged ({reason})") from error
    except soundfile.SoundFileError as error:
        raise CannotCut(f"{source} cannot be decoded: {error}") from error


def measure_with_libsndfile(path: Path) -> tuple[float | None, int | None, int | None]:
    """Return length, sample rate and channels; None: not known, because the package is missing or cannot read it."""
    try:
        soundfile = load_soundfile()
        with _opened(soundfile, path) as audio:
            return audio.frames / audio.samplerate or None, audio.samplerate, audio.channels
    except Exception:
        return None, None, None


@contextmanager
def _opened(soundfile: Any, path: Path) -> Iterator[Any]:
    """Open a file; libsndfile cannot seek in a FLAC file without a length, so the length is added."""
    with soundfile.SoundFile(path) as audio:
        if audio.frames < _NO_COUNT:
            yield audio
            return
    status = path.stat()
    frames = _count_frames(path, status.st_size, status.st_mtime_ns)
    if not frames:
        raise CannotCut(f"{path} has an unknown length: its header does not tell it, and no audio can be decoded")
    with path.open("rb") as file:
        start = start_with_length(file, frames)
    with _WithStart(path, start) as complete, soundfile.SoundFile(complete) as audio:
        yield audio


@lru_cache(10_000)  # each of its chunks asks
def _count_frames(path: Path, _bytes: int, _mtime_ns: int) -> int:
    """Decode a file to its end, or to the frame in which its encoder was interrupted."""
    soundfile = load_soundfile()
    frames = 0
    with soundfile.SoundFile(path) as audio, suppress(soundfile.SoundFileError):
        audio.seekable = lambda: False  # otherwise the package seeks after each block
        block = bytearray(2 * audio.channels * _COUNTED_FRAMES)
        while decoded := audio.buffer_read_into(block, "int16"):
            frames += decoded
    return frames


class _WithStart(io.FileIO):
    """A file that is read with other first bytes."""

    def __init__(self, path: Path, start: bytes) -> None:
        super().__init__(path)
        self._start = start

    def readinto(self, buffer: Any) -> int | None:
        place = self.tell()
        count = super().readinto(buffer)
        if count and place < len(self._start):
            start = self._start[place : place + count]
            memoryview(buffer).cast("B")[: len(start)] = start
        return count


def load_soundfile() -> Any:
    """Return the package soundfile; raise NoDecoder if its library cannot be loaded."""
    try:
        with _LOADING:
            import soundfile
    except (ImportError, OSError) as error:
        raise NoDecoder(f"the package soundfile cannot be loaded ({error})") from error
    return soundfile


_DECODED_AS = {"PCM_S8": "int16", "PCM_U8": "int16", "PCM_16": "int16", "PCM_24": "int32"}  # all others: float32


def _write(audio: Any, frames: int, target: Path) -> None:
    """Write frames that are decoded from now on; our own writing reports errors of the disk, libsndfile's does not."""
    sample_type = _DECODED_AS.get(audio.subtype, "float32")
    sample_bytes = 2 if sample_type == "int16" else 4
    header = new_header(
        audio.channels,
        audio.samplerate,
        sample_bytes,
        is_float=sample_type == "float32",
    )
    written = 0
    with target.open("wb") as out:
        out.write(make_head(header, frames))
        while written < frames:
            block = bytes(audio.buffer_read(min(_BLOCK, frames - written), dtype=sample_type))
            if not block:
                break
            out.write(block)
            written += len(block) // header.frame_bytes
        if written < frames:  # the file is truncated; the workers notice what is missing
            out.seek(0)
            out.write(make_head(header, written))
