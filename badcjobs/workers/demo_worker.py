"""The process behind the demo engine: reads WAV with the standard library, FLAC with soundfile; reports loud stretches.

Started as ``python -m badcjobs.workers.demo_worker``; speaks as ``hawkears_worker`` does, which stands alone and so has
the conversation in it.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import struct
import sys
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from badcjobs.devices.simulated import pretended_bytes
from badcjobs.errors import BadInput
from badcjobs.sources.wav import read_header
from badcjobs.workers.hawkears_worker import OrderPipe
from badcjobs.workers.retry import BAD_AUDIO, NO_PROGRAM

_WINDOW_S = 0.1
_MIB = 2**20
_ARRAY_TYPE = {1: "B", 2: "h", 4: "i"}
_FLOAT_TYPE = {4: "f", 8: "d"}
_WHOLE, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE
_BLOCK = 1 << 16  # frames


class _NoSoundfile(Exception):
    """The package that reads such audio is not here."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise BadInput(f"the demo engine does not understand its arguments: {message}", fix=self.format_usage().strip())


def parse_arguments(args: Sequence[str]) -> argparse.Namespace:
    """Parse what --engine-arg gives to the demo engine."""
    parser = _Parser(prog="--engine-arg", add_help=False)
    parser.add_argument("--burn-s", type=float, default=0.0, help="seconds of work per chunk, so that demos look alive")
    parser.add_argument("--threshold", type=float, default=0.25, help="loudness that counts, of full scale")
    parser.add_argument("--room-s", type=float, help="pretend that audio of this length fits into the memory, lean")
    parser.add_argument("--memory-per-s", type=float, help="MiB for a second of audio, lean; as usual twice that")
    # How a worker is told to do with less, on which device it pretends to be, and where it says how much it has of it.
    parser.add_argument("--lean", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="", help=argparse.SUPPRESS)
    parser.add_argument("--device-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--ledger", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(args)


def memory_of(options: argparse.Namespace) -> PretendedMemory | None:
    """Return the memory that is pretended; None: it is not asked for."""
    if options.room_s is not None:
        return PretendedMemory(_MIB, options.lean, device_bytes=round(options.room_s * _MIB))
    if options.memory_per_s is None:
        return None
    per_s = options.memory_per_s * _MIB
    return PretendedMemory(per_s, options.lean, options.device, options.device_bytes, options.ledger)


def main(args: Sequence[str]) -> None:
    """Answer orders until the input ends."""
    options = parse_arguments(args)
    memory = memory_of(options)
    talk = OrderPipe()
    talk.say("ready", threads=1, holds=2)
    for order in talk.orders():
        path = order["audio"]
        talk.say("started", id=order["id"])
        try:
            answer = analyse(path, options.threshold)
            if memory is not None and (refusal := memory.take(answer["audio_s"])):
                answer = {"error": refusal}
        except _NoSoundfile as error:
            answer = {"error_class": NO_PROGRAM, "error": f"{path}: {error}"}
        except (OSError, ValueError) as error:
            what = f"{error} (this engine reads WAV, PCM and float, and FLAC)"
            answer = {"error_class": BAD_AUDIO, "error": f"{path}: {what}"}
        burn(options.burn_s)
        talk.say("failed" if "error" in answer else "done", id=order["id"], **answer)
    talk.say("bye")


def analyse(path: str, threshold: float) -> dict[str, Any]:
    """Return the length of an audio file and its loud stretches as (start_ms, end_ms, label, score, name)."""
    with Path(path).open("rb") as file:
        audio_s, levels = loudness(file)
    return {"audio_s": audio_s, "detections": list(_stretches(levels, threshold, round(_WINDOW_S * 1000)))}


def loudness(file: BinaryIO) -> tuple[float, list[float]]:
    """Return the length of audio in seconds and the peak of each tenth of a second."""
    head = file.read(12)
    if head.startswith((b"fLaC", b"ID3")):  # some programs put tags before the stream
        form, raw = read_flac(file)
    elif head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:] == b"WAVE":
        form, raw = read_wav(file)
    else:
        raise ValueError("it is empty" if not head else "it is neither WAV nor FLAC")
    levels = _float_levels if form.is_float else _levels
    return len(raw) / form.frame_bytes / form.rate, list(levels(raw, form.width, form.window))


class SampleFormat(NamedTuple):
    """How samples are written."""

    is_float: bool
    channels: int
    rate: int
    width: int  # bytes a sample

    @property
    def frame_bytes(self) -> int:
        return self.channels * self.width

    @property
    def window(self) -> int:
        """Samples, of all channels, in a tenth of a second."""
        return max(1, int(_WINDOW_S * self.rate)) * self.channels


def read_wav(file: BinaryIO) -> tuple[SampleFormat, bytes]:
    """Return the whole frames of a WAV file of whole numbers or floats; ``wave`` knows too few of its forms."""
    header = read_header(file)
    if header.missing_frames:
        raise ValueError("the audio ends before its header says")
    file.seek(header.data_start)
    return _wav_form(header.format_chunk), file.read(header.frames * header.frame_bytes)


def _wav_form(chunk: bytes) -> SampleFormat:
    kind, channels, rate, bits = struct.unpack("<HHI6xH", chunk[:16].ljust(16, b"\0"))
    kind = chunk[24] if kind == _EXTENSIBLE and len(chunk) > 25 else kind
    widths = {_FLOAT: _FLOAT_TYPE, _WHOLE: {**_ARRAY_TYPE, 3: ""}}.get(kind, {})
    if not (channels and rate) or bits // 8 not in widths:
        raise ValueError(f"audio of kind {kind} with {bits} bits a sample at {rate} Hz is not understood")
    return SampleFormat(kind == _FLOAT, channels, rate, bits // 8)


def read_flac(file: BinaryIO) -> tuple[SampleFormat, bytes]:
    """Return the same of a FLAC file, in 16 bits. Raise _NoSoundfile where nobody can read it."""
    try:
        import soundfile
    except (ImportError, OSError) as error:
        why = f"it is FLAC, and the package soundfile is not here ({error})"
        raise _NoSoundfile(
            f"{why}\npip install 'badcjobs[audio]'   (where badcjobs is: it has no soundfile)"
        ) from error
    try:
        with soundfile.SoundFile(file.name) as audio:
            blocks = iter(lambda: bytes(audio.buffer_read(_BLOCK, dtype="int16")), b"")
            rate, channels, frames, raw = audio.samplerate, audio.channels, audio.frames, b"".join(blocks)
    except soundfile.SoundFileError as error:
        raise ValueError(str(error)) from error
    if len(raw) < 2 * channels * frames:
        raise ValueError("the audio ends before its header says")
    return SampleFormat(False, channels, rate, 2), raw


def _float_levels(raw: bytes, width: int, window: int) -> Iterator[float]:
    """Yield the peak of each window; floats beyond full scale count as full scale, and what is no number as silence."""
    samples = array(_FLOAT_TYPE[width], raw)
    for start in range(0, len(samples), window):
        part = [sample if sample == sample else 0.0 for sample in samples[start : start + window]]
        yield min(1.0, max(max(part), -min(part)))


def _levels(raw: bytes, width: int, window: int) -> Iterator[float]:
    """Yield the peak of each window, 0 to 1 of full scale."""
    if width == 3:
        # Drop the lowest byte of each 24-bit sample: 16 bits tell loud from quiet.
        high = bytearray(len(raw) // 3 * 2)
        high[0::2], high[1::2] = raw[1::3], raw[2::3]
        raw, width = bytes(high), 2
    samples = array(_ARRAY_TYPE[width])
    samples.frombytes(raw)
    middle, full = (128, 128) if width == 1 else (0, 1 << (8 * width - 1))
    for start in range(0, len(samples), window):
        part = samples[start : start + window]
        yield max(max(part) - middle, middle - min(part)) / full


def _stretches(levels: Sequence[float], threshold: float, window_ms: int) -> Iterator[list[int | str | float]]:
    start = None
    for number, level in enumerate([*levels, 0.0]):
        if level >= threshold:
            start = number if start is None else start
        elif start is not None:
            score = round(max(levels[start:number]), 3)
            yield [start * window_ms, number * window_ms, "LOUD", score, "Loud sound"]
            start = None


def burn(seconds: float) -> None:
    """Work for a while: half of it computing, half of it waiting, as a real engine does."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s - seconds / 2:
        sum(range(1000))
    time.sleep(max(0.0, end_s - time.monotonic()))


# --- the memory that it pretends to take ------------------------------------------------------------------------------
# Of a device that all its processes share, by the length of audio. Which process has how much of it is in a folder that
# all of them see, a file ``<device>.<pid>`` for each; the simulated devices show what is written there. Without a
# folder each process has the whole device for itself.


@dataclass(frozen=True, slots=True)
class PretendedMemory:
    """The place of one process on its device."""

    bytes_per_s: float  # of audio, lean; as usual twice that
    lean: bool
    device: str = ""
    device_bytes: int | None = None  # None: there is no end of it
    folder: Path | None = None

    def take(self, audio_s: float) -> str | None:
        """Take as much as audio needs, until this process ends; return what PyTorch would say where it is not there."""
        wanted = round(fill(audio_s, lean=self.lean) * self.bytes_per_s)
        if self.folder is None:
            return self._refusal(wanted, 0)
        with _alone_in(self.folder):
            others = pretended_bytes(self.folder, self.device, besides=os.getpid())
            refusal = self._refusal(wanted, others)
            if refusal is None:
                (self.folder / f"{self.device}.{os.getpid()}").write_text(str(wanted), encoding="ascii")
            return refusal

    def _refusal(self, wanted: int, others: int) -> str | None:
        if self.device_bytes is None or wanted + others <= self.device_bytes:
            return None
        free = max(0, self.device_bytes - others)
        return (
            f"CUDA out of memory. Tried to allocate {wanted / _MIB:.0f} MiB. GPU 0 has a total capacity of"
            f" {self.device_bytes / _MIB:.0f} MiB of which {free / _MIB:.0f} MiB is free"
        )


def fill(audio_s: float, *, lean: bool) -> float:
    """Return how much memory audio is made to take, in seconds: as usual twice its length."""
    return audio_s if lean else 2 * audio_s


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let one process after the other look how much there is, and take it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError:
            pass  # this filesystem has no locks
        yield
    finally:
        os.close(fd)


if __name__ == "__main__":
    main(sys.argv[1:])
