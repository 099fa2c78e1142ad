"""Cut a part out of an audio file: WAV by copying frames, other formats with soundfile or ffmpeg."""

from __future__ import annotations

import errno
import io
import shutil
import stat
import struct
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Lock
from typing import Any, BinaryIO

from badcjobs.sources.audio_formats import (
    FlacInfo,
    NotWav,
    WavHeader,
    copy_frames,
    make_head,
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

    search_path: str | None  # where ffmpeg and ffprobe are searched, in the form of PATH; None: they are not used

    def length_s(self, path: Path) -> float | None:
        """Return the seconds of audio that are really in the file; None: not known."""
        try:
            found = _look(path)
        except OSError:
            return None
        if isinstance(found, WavHeader):
            return found.length_s
        if isinstance(found, FlacInfo) and found.frames:
            return found.frames / found.rate_hz
        return measure_with_libsndfile(path)[0] or _length_with_ffprobe(path, self.search_path or "")

    def promised_s(self, path: Path) -> float | None:
        """Return the seconds of audio that a WAV header states; a truncated file has less.

        None: not a WAV file; in other formats it is not known where audio is missing.
        """
        found = _read_wav(path)
        return None if found is None else found.promised_s

    def size_bytes(self, source: Path, start_s: float, end_s: float) -> int:
        """Return the approximate size of a part as a WAV file; raise OSError if the file cannot be read."""
        found = _look(source)
        if isinstance(found, WavHeader):
            first, last = _frames(found.frames, found.rate_hz, start_s, end_s)
            return len(make_head(found, 0)) + max(0, last - first) * found.frame_bytes
        bytes_per_s = _GUESS_BYTES_PER_S
        if isinstance(found, FlacInfo):
            bytes_per_s = found.rate_hz * found.channels * -(-found.bits // 8)
        length_s = (end_s if end_s < float("inf") else self.length_s(source) or 0.0) - start_s
        return int(max(0.0, length_s) * bytes_per_s)

    def cut(self, source: Path, start_s: float, end_s: float, target: Path) -> None:
        """Write the audio between two times to the WAV file ``target``.

        An end after the end of the audio means the end of the audio, even in a truncated file. Raise CannotCut, or
        OSError if the disk refuses the file.
        """
        try:
            with open_audio(source) as file:
                header = read_wav_header(file)
                first, last = _frames(header.frames, header.rate_hz, start_s, end_s)
                if first >= last:
                    there_s, promised_s = header.length_s, header.promised_s
                    if promised_s - there_s > _SLACK_S and start_s < promised_s:
                        there = f"the file has {there_s:g} s and nothing after {start_s:g} s"
                        raise NotThere(f"{source} is truncated: its header says {promised_s:g} s, {there}")
                    raise CannotCut(f"{source} has {there_s:.3f} s of audio and nothing after {start_s:.3f} s")
                try:
                    copy_frames(file, header, first, last, target)
                except EOFError as problem:
                    raise CannotCut(f"{source}: {problem}") from problem
        except NotWav as problem:
            self._decode(source, start_s, end_s, target, problem)
        except BaseException:
            target.unlink(missing_ok=True)
            raise

    def _decode(self, source: Path, start_s: float, end_s: float, target: Path, problem: NotWav) -> None:
        """Try one decoder after another; an error while decoding is more useful than a missing decoder."""
        refusals: list[CannotCut] = []
        for cut in (_cut_with_libsndfile, partial(_cut_with_ffmpeg, self.search_path or "")):
            try:
                return cut(source, start_s, end_s, target)
            except BaseException as refusal:
                target.unlink(missing_ok=True)
                if not isinstance(refusal, CannotCut):
                    raise
                refusals.append(refusal)
        if failures := [refusal for refusal in refusals if not isinstance(refusal, NoDecoder)]:
            raise failures[-1]
        why = " and ".join(map(str, refusals))
        # The command comes last: where an error is shown in one line, it is the last one.
        what = f"{source} cannot be cut as a WAV file ({problem}), {why}"
        raise NoDecoder(f"{what}\npip install 'badcjobs[audio]'   (in the environment of badcjobs; or install ffmpeg)")


def open_audio(path: Path) -> BinaryIO:
    """Open a file; raise OSError for a pipe: opening one blocks until a program writes to it."""
    mode = path.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # for a folder, open() raises the error
        raise OSError(errno.EINVAL, "it is a pipe, a socket or a device, not an audio file", str(path))
    return path.open("rb")


def _read_wav(path: Path) -> WavHeader | None:
    """Read the header of a WAV file; None: there is no such file, or it has another format."""
    with suppress(OSError, NotWav), open_audio(path) as file:
        return read_wav_header(file)
    return None


def _look(path: Path) -> WavHeader | FlacInfo | None:
    """Read the header of a file; None: another format, or damaged."""
    with open_audio(path) as file:
        try:
            return read_wav_header(file)
        except NotWav:
            return read_flac_info(file)


def _frames(frames: int, rate_hz: int, start_s: float, end_s: float) -> tuple[int, int]:
    """Return the first frame of a part, and the one behind its last."""
    last = frames if end_s == float("inf") else min(frames, round(end_s * rate_hz))
    return max(0, round(start_s * rate_hz)), last


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


# --- ffmpeg -----------------------------------------------------------------------------------------------------------

_DECODING_S = 900.0  # enough for a day of audio from a slow filesystem


def _cut_with_ffmpeg(search_path: str, source: Path, start_s: float, end_s: float, target: Path) -> None:
    """Write the audio between two times to a WAV file; raise NoDecoder or CannotCut."""
    ffmpeg = shutil.which("ffmpeg", path=search_path)
    if ffmpeg is None:
        raise NoDecoder("ffmpeg is not on PATH")
    flac, codec = _look(source), "pcm_f32le"
    if isinstance(flac, FlacInfo):
        codec = "pcm_s16le" if flac.bits <= 16 else "pcm_s24le" if flac.bits <= 24 else codec
        start_s = round(start_s * flac.rate_hz) / flac.rate_hz
        end_s = end_s if end_s == float("inf") else round(end_s * flac.rate_hz) / flac.rate_hz
    start = ["-ss", f"{start_s:.6f}"]
    length = [] if end_s == float("inf") else ["-t", f"{end_s - start_s:.6f}"]
    # -ss before the file seeks; in FLAC this is exact if the time is that of a sample. -ss after the file decodes
    # everything from the start: slower, but also right for an MP3 file without an index.
    before, after = (start, length) if isinstance(flac, FlacInfo) else ([], [*start, *length])
    argv = [ffmpeg, "-nostdin", "-v", "error", "-y", *before, "-i", str(source.absolute()), "-map", "0:a:0"]
    output = _run([*argv, *after, "-c:a", codec, "-f", "wav", str(target)])
    if (found := _read_wav(target)) is None or found.frames == 0:
        raise CannotCut(f"ffmpeg cannot decode {source}: {output or 'no output'}")


def _length_with_ffprobe(path: Path, search_path: str) -> float | None:
    ffprobe = shutil.which("ffprobe", path=search_path)
    if ffprobe is None:
        return None
    argv = [ffprobe, "-v", "error", "-select_streams", "a:0", "-show_entries", "format=duration", "-of", "csv=p=0"]
    try:
        length_s = float(_run([*argv, str(path.absolute())]).splitlines()[-1])
    except (ValueError, IndexError):
        return None
    return length_s if length_s > 0 else None


def _run(argv: Sequence[str]) -> str:
    """Return the output of a program; the caller checks whether it worked."""
    try:
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=_DECODING_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return (done.stdout + done.stderr).decode(errors="replace").strip()[-500:]


# --- libsndfile -------------------------------------------------------------------------------------------------------

_BLOCK = 1 << 16  # frames
_NO_COUNT = 1 << 62
_LOADING = Lock()  # if an import fails, another thread that waits for it gets a half-initialized module


def _cut_with_libsndfile(source: Path, start_s: float, end_s: float, target: Path) -> None:
    """Write the audio between two times to a WAV file; raise NoDecoder or CannotCut."""
    soundfile = load_soundfile()
    try:
        with _opened(soundfile, source) as audio:
            first, last = _frames(audio.frames, audio.samplerate, start_s, end_s)
            if first >= last:
                has = f"{audio.frames / audio.samplerate:.3f} s of audio"
                raise CannotCut(f"{source} has {has} and nothing after {start_s:.3f} s")
            try:
                audio.seek(first)
                _write(audio, last - first, target)
            except soundfile.SoundFileError as error:  # although the header could be read
                where = f"from {start_s:g} s to {last / audio.samplerate:g} s"
                what = f"{source} cannot be decoded {where}: it is truncated or damaged"
                raise CannotCut(f"{what} ({str(error).removeprefix('Error : ').rstrip('.')})") from error
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
    with path.open("rb") as file:
        info = read_flac_info(file)
        if info is None or not info.frames:
            raise CannotCut(f"{path} has an unknown length: neither its header nor its last frames give it")
        start = start_with_length(file, info.frames)
    with _WithStart(path, start) as complete, soundfile.SoundFile(complete) as audio:
        yield audio


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
    """Return the package soundfile; raise NoDecoder if it, or its library, cannot be loaded."""
    try:
        with _LOADING:
            import soundfile
    except (ImportError, OSError) as error:
        raise NoDecoder(f"the package soundfile cannot be loaded ({error})") from error
    return soundfile


def _write(audio: Any, frames: int, target: Path) -> None:
    kind, size, decode_to = 3, 4, "float32"  # WAV format, bytes a sample
    if audio.subtype in ("PCM_S8", "PCM_U8", "PCM_16"):
        kind, size, decode_to = 1, 2, "int16"
    elif audio.subtype == "PCM_24":
        kind, size, decode_to = 1, 3, "int32"
    frame_bytes = size * audio.channels
    form = struct.pack(
        "<HHIIHH", kind, audio.channels, audio.samplerate, audio.samplerate * frame_bytes, frame_bytes, 8 * size
    )
    header = WavHeader(form, *struct.unpack("<HHIIH", form[:14]))
    written = 0
    with target.open("wb") as out:
        out.write(make_head(header, frames))
        while written < frames:
            block = bytes(audio.buffer_read(min(_BLOCK, frames - written), dtype=decode_to))
            if not block:
                break
            if size == 3:  # 24-bit samples are the upper bytes of 32-bit samples
                short = bytearray(len(block) // 4 * 3)
                for place in range(3):
                    short[place::3] = block[place + 1 :: 4]
                block = bytes(short)
            out.write(block)
            written += len(block) // frame_bytes
        out.write(b"\0" * (written * frame_bytes & 1))
        if written < frames:  # the file is truncated; the workers notice what is missing
            out.seek(0)
            out.write(make_head(header, written))
